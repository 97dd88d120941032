"""Cures for plans that a model does not bear."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import memfit
from memfit.core.plan import BlockPlan, Order, Plan, UpdateTime
from memfit.core.tiers import Tier
from memfit.planner.advise import advise
from unit.advice import BATCH, ON_DISK, Scene, follows, loss

TWO = Plan(microbatches=2)
IN_TURN = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
ALLOWED: dict[str, Any] = {"allow": {"nonadditive-loss"}}


def around(s: Scene, make: Callable[[], nn.Module]) -> nn.Module:
    """Gives the scene a model of a module between two linear layers; returns the module."""
    torch.manual_seed(0)
    s.model = nn.Sequential(nn.Linear(8, 8), made := make(), nn.Linear(8, 8))
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)
    return made


def steps(s: Scene, make: Callable[[], object], *plans: Plan, function: Any = loss, **wishes: Any) -> None:
    """Trains a new model under each plan, with the bits of a plain loop where the batch is whole or its parts come in turn."""
    for plan in plans:
        make()
        job = s.fit(function, plan=plan, **wishes)
        job.step(BATCH)
        job.close()
        ours = [p.detach().clone() for p in s.model.parameters()]
        make()
        for part in BATCH.chunk(plan.microbatches):
            (function(s.model, part) / plan.microbatches).backward()
        s.optimizer.step()
        for mine, theirs in zip(ours, s.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


class Layer(nn.Module):
    """A layer with something that its forwards may change."""

    range: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.count = 0
        self.past = torch.zeros(8)
        self.register_buffer("range", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * (1 + self.count / 8)


class Remembering(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + self.past
        self.past.copy_(out.detach().mean(0))
        return out


class Ranging(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.range.copy_(torch.maximum(self.range, x.detach().abs().amax(0)))
        return super().forward(x / (1 + self.range))


@follows("planner/plan_checks.py", "(a counter, a tensor that is read again, an exchanged module)")
def forwards_that_follow_each_other_run_in_turn(s: Scene) -> None:
    make = partial(around, s, Counting)
    make()
    s.refused(lambda: s.fit(plan=TWO, **ALLOWED))
    steps(s, make, IN_TURN, Plan(), **ALLOWED)
    around(s, Layer)
    s.fit(plan=TWO).step(BATCH)


@follows("planner/plan_checks.py", "changes a tensor in place that its module keeps (no buffer)")
def a_module_that_writes_its_tensor_runs_in_turn(s: Scene) -> None:
    make = partial(around, s, Remembering)
    make()
    s.refused(lambda: s.fit(plan=TWO, **ALLOWED))
    steps(s, make, IN_TURN, Plan(), **ALLOWED)


@follows(
    "planner/plan_checks.py", "microbatches would not mean the same as the whole batch, and their order would show"
)
def ranges_of_a_batch_are_frozen(s: Scene) -> None:
    make = partial(around, s, Ranging)
    make()
    s.refused(lambda: s.fit(plan=TWO))
    steps(s, make, Plan())
    steps(s, lambda: make().eval(), IN_TURN)


@follows("planner/plan_checks.py", "(batch norm in training mode)")
def statistics_of_a_batch_are_frozen(s: Scene) -> None:
    make = partial(around, s, partial(nn.BatchNorm1d, 8))
    make()
    s.refused(lambda: s.fit(plan=TWO))
    steps(s, make, Plan())
    steps(s, lambda: make().eval(), IN_TURN)
    steps(s, lambda: around(s, partial(nn.LayerNorm, 8)), IN_TURN)


def scaled(model: Any, batch: Tensor) -> Tensor:
    hidden = functional_call(model[1], {"weight": model[1].weight * 1.5}, (model[0](batch),))
    return model[2](hidden).square().mean()


@follows("planner/plan_checks.py", "is called with other tensors in the places of its parameters")
def calls_with_other_weights_come_in_turn(s: Scene) -> None:
    make = partial(around, s, partial(nn.Linear, 8, 8))
    make()
    s.refused(lambda: s.fit(scaled, plan=TWO))
    steps(s, make, IN_TURN, Plan(), function=scaled)


class Bounded(Layer):
    """A layer that keeps its weights in a range."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@follows("planner/plan_checks.py", "that is kept only under a plan that")
def a_weight_is_bounded_between_steps(s: Scene) -> None:
    make = partial(around, s, Bounded)
    make()
    s.refused(lambda: s.fit(plan=TWO))
    steps(s, make, IN_TURN, Plan())
    around(s, Layer)
    with s.fit(plan=TWO) as job:
        with job.weights("1.inner.weight"), torch.no_grad():
            s.model.get_parameter("1.inner.weight").clamp_(-0.1, 0.1)
        job.step(BATCH)


@follows("planner/plan_checks.py", "the plan sends the weights of block")
def a_weight_that_the_loss_reads_stays(s: Scene) -> None:
    def held(model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean() + model[0].weight.square().sum()

    s.refused(lambda: s.fit(held, plan=ON_DISK))
    homes = dict(ON_DISK.blocks) | {"0": BlockPlan(gradient_home=Tier.DISK, state_home=Tier.DISK)}
    steps(s, s.begin, Plan(blocks=homes), function=held)
    s.begin()
    s.fit(plan=ON_DISK).step(BATCH)  # the module is called


class HandTied(nn.Module):
    """Reads its embedding by a product with the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) @ self.first.weight


@follows("planner/plan_checks.py", "so the tail cannot run back on its own: plan tail=None")
def a_head_by_hand_has_no_tail(s: Scene) -> None:
    around(s, HandTied)
    calls = len(next(iter(memfit.profile(s.model, s.optimizer, loss, BATCH).traces.values())).calls)
    s.refused(lambda: s.fit(plan=Plan(microbatches=2, tail=calls - 2)))
    s.fit(plan=Plan(microbatches=2, tail=None)).step(BATCH)


def balances(model: Any) -> None:
    """A hook reads the gradient of another layer."""
    last = model[2].weight
    model[0].weight.register_hook(lambda grad: None if last.grad is None else grad + 0.5 * last.grad.mean())


@follows("planner/plan_checks.py", "while backward runs, which the plan drops before: plan")
def gradients_that_a_hook_reads_stay(s: Scene) -> None:
    def make() -> None:
        s.begin()
        balances(s.model)

    make()
    s.refused(lambda: s.fit(plan=Plan()))
    steps(s, make, Plan(update=UpdateTime.AFTER_BACKWARD))
    s.begin()
    with s.fit(plan=Plan(), keep_gradients=True) as job:
        job.step(BATCH)
        assert job.gradient("2.weight") is not None


@follows("planner/user_hooks.py", "sees shares of the gradient instead of all: plan microbatches=1, or")
def a_batch_stays_whole_for_a_hook(s: Scene) -> None:
    def make(hook: Callable[[Tensor], Tensor]) -> None:
        s.begin()
        s.model.get_parameter("0.weight").register_hook(hook)

    make(lambda grad: grad.clamp(-1e-3, 1e-3))
    s.refused(lambda: s.fit(plan=TWO))
    steps(s, lambda: make(lambda grad: grad.clamp(-1e-3, 1e-3)), Plan())
    mask = torch.eye(8)
    steps(s, lambda: make(lambda grad: grad * mask), IN_TURN, **ALLOWED)


@follows("planner/plan_checks.py", "is compiled with torch.compile around the calls at which weights come and go:")
def each_layer_is_compiled(s: Scene) -> None:
    s.model.compile(backend="eager")
    s.refused(lambda: s.fit(plan=ON_DISK))
    s.begin()
    for layer in s.model:
        layer.compile(backend="eager")
    s.fit(plan=ON_DISK).step(BATCH)


@follows("planner/plan_checks.py", "has no effect:")
def an_allowance_without_effect_is_left_out(s: Scene) -> None:
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=1e-2)
    s.refused(lambda: s.fit(allow={"int8-state"}))
    s.fit().step(BATCH)


# --- tiers ---------------------------------------------------------------------------------------


def homes(tier: Tier, **decided: Any) -> Plan:
    return Plan(blocks=dict.fromkeys("02", BlockPlan(gradient_home=tier, state_home=tier, **decided)))


@follows("planner/plan_checks.py", "the plan names the tier 'host', but without a GPU")
def homes_on_disk_or_beside_an_emulated_device(s: Scene) -> None:
    s.refused(lambda: s.fit(plan=homes(Tier.HOST)))
    steps(s, s.begin, homes(Tier.DEVICE), homes(Tier.DISK))
    steps(s, s.begin, homes(Tier.HOST), emulate_device=True)


@follows("planner/plan_checks.py", "which this job does not have: it has")
def homes_in_a_tier_that_the_job_has(s: Scene) -> None:
    s.refused(lambda: s.fit(plan=homes(Tier("node"))))
    steps(s, s.begin, homes(Tier.DISK))


@follows("planner/plan_checks.py", "the plan updates blocks on the host, and")
def updates_on_the_device(s: Scene) -> None:
    plan = homes(Tier.HOST, update_on=Tier.HOST)
    ask = lambda plan: advise(s.model, s.optimizer, loss, BATCH, plan=plan, hardware="rtx-4090").plan  # noqa: E731
    s.optimizer = torch.optim.AdamW(s.model.parameters(), fused=True)
    s.refused(lambda: ask(plan))
    assert ask(homes(Tier.HOST)) == homes(Tier.HOST)
    s.optimizer = torch.optim.AdamW(s.model.parameters())
    assert ask(plan) == plan
