"""Reads and writes of weights by every road that PyTorch offers, at every moment of a job's life, under drawn plans.

The same touches are made on a plain model at the same moments. A touch is seen and kept (bit for bit plain PyTorch), or refused by an error, behind which
the job is as if the touch had not been made. It is never lost in silence. Where weights have masters, the plain model has them too: a weight whose bits
were changed becomes its master.
"""

from __future__ import annotations

import copy
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor, nn

import memfit
from memfit.core.errors import MemfitError, TornStepError
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier

WIDTH = 8
LAYERS = ("first", "middle", "last")
Touch = Callable[[nn.Parameter], object]
# Not in torch's stubs, or not with these arguments.
_foreach_mul: Any = getattr(torch, "_foreach_mul_")  # noqa: B009 (pyright knows no such name)
_set: Any = torch.Tensor.set_


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.bias.requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(batch)))))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


# Roads to a weight's bytes


@torch.library.custom_op("memfit_habits::halve", mutates_args={"weight"})
def declared_halve(weight: Tensor) -> None:
    weight.mul_(0.5)


@torch.library.custom_op("memfit_habits::halve_unsaid", mutates_args=())
def undeclared_halve(weight: Tensor) -> Tensor:
    _by_numpy(weight.view(torch.int16).numpy())
    return torch.zeros(())


def _by_numpy(values: Any) -> None:
    values[...] = values * np.asarray(0.5, values.dtype)


def _without_gradient(touch: Touch) -> Touch:
    def touched(weight: nn.Parameter) -> None:
        with torch.no_grad():
            touch(weight)

    return touched


def _in_thread(weight: nn.Parameter) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            weight.data.mul_(0.5)
        except BaseException as error:  # noqa: BLE001, raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _add_part(weight: nn.Parameter) -> None:
    weight.data[0] += 0.25


def _load_values(weight: nn.Parameter) -> None:
    holder = nn.Module()
    holder.register_parameter("weight", weight)
    holder.load_state_dict({"weight": torch.full(weight.shape, 0.125, dtype=weight.dtype)})


WRITES: dict[str, Touch] = {
    "mul_": _without_gradient(lambda w: w.mul_(0.5)),
    "a view": _without_gradient(lambda w: w.view(-1)[1:].mul_(0.5)),
    "clamp_ of .data": lambda w: w.data.clamp_(-0.05, 0.05),
    "copy_ of .data": lambda w: w.data.copy_(w.data * 0.5),
    "a part of .data": _add_part,
    "one element": lambda w: w.data.view(-1)[-1].add_(1.0),
    "foreach of .data": lambda w: _foreach_mul([w.data], 0.5),
    "out=": lambda w: torch.mul(w.data, 0.5, out=w.data),
    "unsafe view": lambda w: torch.ops.aten._unsafe_view(w.detach(), [-1]).mul_(0.5),
    "set_ of another tensor": lambda w: _set(torch.empty(0, dtype=w.dtype), w.data).mul_(0.5),
    "numpy": lambda w: _by_numpy(w.detach().view(torch.int16).numpy()),
    "asarray": lambda w: _by_numpy(np.asarray(w.data.view(torch.int16))),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).mul_(0.5),
    "a declared operator": lambda w: declared_halve(w.detach()),
    "an undeclared operator": lambda w: undeclared_halve(w.detach().view(-1)),
    "init": lambda w: nn.init.constant_(w, 0.25),
    "load_state_dict": _load_values,
    "a thread": _in_thread,
}
# Roads that give a parameter other memory: refused, or done as plain PyTorch does.
EXCHANGES: dict[str, Touch] = {
    "data =": lambda w: setattr(w, "data", w.data * 0.5),
    "set_": _without_gradient(lambda w: _set(w, w.detach() * 0.5)),
    "swap_tensors": lambda w: torch.utils.swap_tensors(
        w, nn.Parameter(w.detach() * 0.5, requires_grad=w.requires_grad)
    ),
    "shared memory": lambda w: w.data.share_memory_().mul_(0.5),
}
READS: dict[str, Touch] = {
    "norm": lambda w: w.detach().norm().item(),
    "numpy is looked at": lambda w: np.abs(w.detach().float().numpy()).max(),
    "numpy is looked at in place": lambda w: w.detach().view(torch.int16).numpy().max(),
    "numpy is kept": lambda w: setattr(w, "_kept_by_a_test", w.detach().view(torch.int16).numpy()),
    "a list": lambda w: w.tolist(),
    "dlpack is looked at": lambda w: torch.from_dlpack(w.detach()).sum().item(),
    "a copy": copy.deepcopy,
    "a histogram": lambda w: torch.histc(w.detach().float()),
    "data_ptr": lambda w: w.data_ptr(),
}
ROADS = {**WRITES, **EXCHANGES, **READS}
MOMENTS = (
    "inside of weights", "between two steps", "before the layer", "behind the layer", "behind the model", "a gradient's hook",
    "behind accumulation", "a signal's handler", "in evaluate", "in inference",
)  # fmt: skip


@dataclass(frozen=True)
class Habit:
    """A touch of one weight at one moment of one step."""

    road: str
    moment: str
    weight: str
    step: int

    @property
    def is_possible(self) -> bool:
        """The frozen weight has no gradient; a parameter that is exchanged outside of everything is another one."""
        has_moment = self.weight != "last.bias" or self.moment not in ("a gradient's hook", "behind accumulation")
        return has_moment and not (self.road in EXCHANGES and self.moment == "between two steps")


def are_possible(chosen: list[Habit]) -> bool:
    """Torch does not call hooks that are registered on a parameter behind `swap_tensors`."""
    swapped = {habit.weight for habit in chosen if habit.road == "swap_tensors"}
    return not any(h.weight in swapped and h.moment in ("a gradient's hook", "behind accumulation") for h in chosen)


@dataclass
class Acting:
    """Hooks on a model that make the habits of the moment that is on, once each, and note what failed."""

    model: nn.Module
    loud: list[Habit]

    def act(self, moment: str, name: str | None = None) -> None:
        if memfit.is_tracing():
            return
        for habit in [h for h in self.loud if h.moment == moment and (name is None or h.weight == name)]:
            self.loud.remove(habit)
            ROADS[habit.road](self.model.get_parameter(habit.weight))

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in LAYERS:
                module = self.model.get_submodule(layer)

                def before(_: nn.Module, __: Any, layer: str = layer) -> None:
                    self._act_of(("before the layer", "in evaluate", "in inference"), layer)

                def behind(_: nn.Module, __: Any, ___: Any, layer: str = layer) -> None:
                    self._act_of(("behind the layer",), layer)

                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(behind).remove)
            for name, weight in self.model.named_parameters():
                if weight.requires_grad:

                    def of_gradient(_: Tensor, name: str = name) -> None:
                        self.act("a gradient's hook", name)

                    def behind_accumulation(_: Tensor, name: str = name) -> None:
                        self.act("behind accumulation", name)

                    stack.callback(weight.register_hook(of_gradient).remove)
                    stack.callback(weight.register_post_accumulate_grad_hook(behind_accumulation).remove)
            yield

    def _act_of(self, moments: tuple[str, ...], layer: str) -> None:
        for moment in moments:
            for name in (f"{layer}.weight", f"{layer}.bias"):
                self.act(moment, name)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        value = loss_of(model, batch)
        if not memfit.is_tracing():
            self.act("behind the model")
            if any(habit.moment == "a signal's handler" for habit in self.loud):
                before = signal.signal(signal.SIGUSR1, lambda *_: self.act("a signal's handler"))
                try:
                    signal.raise_signal(signal.SIGUSR1)
                finally:
                    signal.signal(signal.SIGUSR1, before)
        return value


class Plain:
    """Plain PyTorch beside a job: masters in fp32 where the job computes in bf16."""

    def __init__(self, model: nn.Module, *, is_rounded: bool, split: frozenset[str], batch: Tensor) -> None:
        self.split = split
        self.masters = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.model = model.to(torch.bfloat16) if is_rounded else model
        self.is_rounded = is_rounded
        self.acting = Acting(self.model, [])
        self.batch = batch.to(torch.bfloat16) if is_rounded else batch
        self.momenta: dict[str, Tensor] = {}

    def saved(self) -> Any:
        return (
            {name: weight.detach().clone() for name, weight in self.model.named_parameters()},
            {name: master.clone() for name, master in self.masters.items()},
            {name: momentum.clone() for name, momentum in self.momenta.items()},
        )

    def restore(self, saved: Any) -> None:
        weights, self.masters, self.momenta = saved
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.grad = None
                weight.copy_(weights[name])

    def keep(self, *, is_promised: bool = False) -> None:
        """A weight whose bits are not those of its master, rounded, becomes its master.

        Split masters of weights that rest on the device are their difference from the weight, which stays unless `job.weights()` keeps a change.
        """
        for name, weight in self.model.named_parameters():
            before = self.masters[name].to(weight.dtype)
            if torch.equal(before, weight.detach()):
                continue
            after = weight.detach().to(torch.float32)
            if name in self.split and not is_promised:
                difference = self.masters[name].view(torch.int32) - before.to(torch.float32).view(torch.int32)
                moved = (after.view(torch.int32) + difference).view(torch.float32)
                # Around zero the sum is no number that is rounded to the weight.
                after = moved if torch.equal(moved.to(weight.dtype), weight.detach()) else after
            self.masters[name] = after

    def step(self) -> None:
        with self.acting.hooked():
            self.acting.loss(self.model, self.batch).backward()
        self.keep()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.grad is None:
                    continue
                gradient, weight.grad = weight.grad.to(torch.float32), None
                momentum = self.momenta.get(name)
                momentum = gradient.clone() if momentum is None else momentum.mul_(0.9).add_(gradient)
                self.momenta[name] = momentum
                self.masters[name].add_(momentum, alpha=-0.1)
                weight.copy_(self.masters[name])


@st.composite
def habits(draw: st.DrawFn) -> list[Habit]:
    names = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
    road = st.one_of(*map(st.sampled_from, (list(WRITES), list(WRITES), list(READS), list(EXCHANGES))))
    return draw(
        st.lists(
            st.builds(
                Habit, road=road, moment=st.sampled_from(MOMENTS), weight=st.sampled_from(names), step=st.integers(0, 1)
            ).filter(lambda habit: habit.is_possible),
            min_size=1,
            max_size=4,
        ).filter(are_possible)
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    is_atomic = draw(st.sampled_from([False, False, True]))
    tiers = st.sampled_from([Tier.DISK] if is_atomic else [Tier.DEVICE, Tier.DISK])
    is_rounded = draw(st.booleans())
    is_split = is_rounded and draw(st.booleans())
    blocks = {
        layer: BlockPlan(weight_home=draw(tiers), gradient_home=draw(tiers), state_home=draw(tiers)) for layer in LAYERS
    }
    return Plan(
        blocks=blocks,
        calls=tuple(CallPlan(saved=draw(st.sampled_from([Saved.KEEP, Saved.KEEP, Saved.RECOMPUTE]))) for _ in LAYERS),
        compute_dtype=ComputeDtype.BFLOAT16 if is_rounded else ComputeDtype.GIVEN,
        splits_masters=is_split,
        is_atomic=is_atomic,
    )


def _is_told(error: BaseException | None) -> bool:
    """The error, or what it came from, says in words what is wrong."""
    while error is not None:
        if isinstance(error, MemfitError) or "rests in its home" in str(error):
            return True
        # torch's own words for a graph whose weights were changed, or exchanged, before backward
        if isinstance(error, RuntimeError) and any(
            words in str(error) for words in ("inplace operation", "swap", "use_count")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


class Beside:
    """A job and plain PyTorch, which make the same habits."""

    def __init__(self, plan: Plan, directory: Path | None) -> None:
        torch.manual_seed(0)
        self.model, self.batch = Net(), torch.randn(4, WIDTH)
        is_rounded = plan.compute_dtype is ComputeDtype.BFLOAT16
        split = {
            name
            for name, _ in self.model.named_parameters()
            if plan.splits_masters and plan.block(name.partition(".")[0]).weight_home.traits.is_device
        }
        self.plain = Plain(copy.deepcopy(self.model), is_rounded=is_rounded, split=frozenset(split), batch=self.batch)
        self.acting = Acting(self.model, [])
        optimizer = torch.optim.SGD([w for w in self.model.parameters() if w.requires_grad], lr=0.1, momentum=0.9)
        self.job = memfit.fit(
            self.model, optimizer, self.acting.loss, self.batch, plan=plan, allow={"bf16"}, store=directory
        )

    def run(self, chosen: list[Habit]) -> None:
        for step in range(3):
            of_step = [habit for habit in chosen if habit.step == step]
            for habit in of_step:
                self._between(habit)
            inside = [
                habit
                for habit in of_step
                if habit.moment not in ("inside of weights", "between two steps", "in evaluate", "in inference")
            ]
            if not self._step(inside):
                event("torn")
                return
        self.job.close()
        self.assert_equal("behind close")

    def _between(self, habit: Habit) -> None:
        saved = self.plain.saved()
        weight = self.model.get_parameter(habit.weight)
        other = self.plain.model.get_parameter(habit.weight)
        is_in_steps = False
        try:
            if habit.moment == "inside of weights":
                with self.job.weights():
                    ROADS[habit.road](weight)
            elif habit.moment == "between two steps":
                ROADS[habit.road](weight)
            elif habit.moment in ("in evaluate", "in inference"):
                self.acting.loud[:] = [habit]
                with self.acting.hooked():
                    if habit.moment == "in evaluate":
                        self.job.evaluate(self.batch)
                    else:
                        with self.job.inference():
                            self.model(self.plain.batch)
            else:
                is_in_steps = True
        except BaseException as error:
            if not _is_told(error):
                raise
            event(f"refused: {habit.moment}")
            self.plain.restore(saved)
            # Memory that processes share is refused, and its values may be kept.
            self._take_over([habit])
            return
        finally:
            self.acting.loud.clear()
        if is_in_steps:
            return
        event(f"kept: {habit.moment}")
        ROADS[habit.road](other)
        self.plain.keep(is_promised=habit.moment == "inside of weights")
        self.assert_equal(f"behind {habit}")

    def _step(self, inside: list[Habit]) -> bool:
        """Makes a step. Returns False where the job says that it is torn."""
        saved = self.plain.saved()
        self.plain.acting.loud[:], self.acting.loud[:] = list(inside), list(inside)
        try:
            with self.acting.hooked():
                self.job.step(self.batch)
        except BaseException as error:
            if not _is_told(error):
                raise
            self.acting.loud.clear()
            event("refused: in a step")
            self.plain.restore(saved)
            if self.job._assembly.torn is not None:
                with pytest.raises(TornStepError):
                    self.job.step(self.batch)
                return False
            # What was written in place before the refusal stays, as in plain PyTorch.
            self._take_over(inside)
            self.job.step(self.batch)
            self.plain.acting.loud.clear()
            self.plain.step()
        else:
            assert not self.acting.loud, self.acting.loud
            self.plain.step()
        self.assert_equal(f"behind the step of {inside}")
        return True

    def _take_over(self, inside: list[Habit]) -> None:
        """Takes over what touches of a refused step have left: all or nothing of each."""
        with self.job.weights():
            for name, weight in self.model.named_parameters():
                other, touches = self.plain.model.get_parameter(name), [h for h in inside if h.weight == name]
                values = [other.detach().clone()]
                for habit in touches:
                    ROADS[habit.road](other)
                    values.append(other.detach().clone())
                assert any(torch.equal(weight.detach(), value) for value in values), (
                    f"{name} behind the refused {inside}"
                )
                with torch.no_grad():
                    other.copy_(weight)
        self.plain.keep()

    def assert_equal(self, when: str) -> None:
        is_open = self.job.steps >= 0 and when != "behind close"
        with ExitStack() as stack:
            if is_open:
                stack.enter_context(self.job.weights())
            for name, weight in self.model.named_parameters():
                expected = self.plain.model.get_parameter(name) if is_open else self.plain.masters[name]
                assert torch.equal(weight.detach(), expected.detach()), f"{name} {when}"


@pytest.mark.filterwarnings("ignore")
@given(plan=plans(), chosen=habits(), is_stored=st.sampled_from([False, False, True]))
def test_what_habits_do_to_weights_is_kept_or_refused_and_never_lost(
    plan: Plan, chosen: list[Habit], *, is_stored: bool
) -> None:
    with TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside = Beside(plan, Path(directory) / "run" if is_stored else None)
        try:
            beside.run(chosen)
        finally:
            beside.job.close(restore=False, commit=False)
        if is_stored and beside.job.steps == 3:
            _assert_the_store_has(beside, Path(directory) / "run", plan)


def _assert_the_store_has(beside: Beside, directory: Path, plan: Plan) -> None:
    """A resumed run has the same weights."""
    model = Net()
    optimizer = torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=0.1, momentum=0.9)
    job = memfit.fit(model, optimizer, loss_of, beside.batch, plan=plan, allow={"bf16"}, store=directory)
    job.close()
    for name, weight in model.named_parameters():
        assert torch.equal(weight.detach(), beside.plain.masters[name]), f"{name} in the store"
