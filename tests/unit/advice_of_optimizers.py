"""Cures that refusals of `memfit.optimizers` name, followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memfit
from unit.advice import BATCH, Scene, follows, loss


def trains(s: Scene, make: Callable[[Any], Optimizer]) -> None:
    """Compares a step of a job with one of a plain loop, under an optimizer that the advice leads to."""
    s.begin()
    s.optimizer = make(s.model.parameters())
    with s.fit() as job:
        job.step(BATCH)
    ours, _ = s.model, s.begin()
    optimizer = make(s.model.parameters())
    loss(s.model, BATCH).backward()
    optimizer.step()
    for one, other in zip(ours.parameters(), s.model.parameters(), strict=True):
        assert torch.equal(one, other)


def two_lines(s: Scene, job: memfit.Job, step: Callable[[], object]) -> None:
    with job.lines() as lines:
        loss(s.model, BATCH).backward()
        step()
        s.optimizer.zero_grad()
    assert lines.steps == 1


@follows("optimizers/interception.py", "optimizer.state was read")
def states_are_gathered_or_back(s: Scene) -> None:
    job = s.fit()
    job.step(BATCH)
    weight = next(s.model.parameters())
    s.refused(lambda: s.optimizer.state[weight])
    gathered = s.optimizer.state_dict()["state"][0]["exp_avg"]
    job.close()
    assert torch.equal(s.optimizer.state[weight]["exp_avg"], gathered)


@follows("optimizers/interception.py", "optimizer.step() was called while memfit owns")
def the_update_of_a_step_of_lines_or_behind_close(s: Scene) -> None:
    job = s.fit()
    s.refused(s.optimizer.step)
    assert job.step(BATCH).is_finite
    job.close()
    job = s.fit(lines=True)
    two_lines(s, job, s.optimizer.step)
    job.close()
    loss(s.model, BATCH).backward()
    s.optimizer.step()


@follows("optimizers/interception.py", "parameters that the plan does not know")
def a_group_is_added_between_jobs(s: Scene) -> None:
    s.optimizer = AdamW(s.model[0].parameters(), lr=1e-2)
    job = s.fit()
    group = {"params": [*s.model[2].parameters()]}
    s.refused(lambda: s.optimizer.add_param_group(group))
    job.close()
    s.optimizer.add_param_group(group)
    s.fit().step(BATCH)
    s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("optimizers/shadow.py", "Move the work of __new__ into __init__")
def an_optimizer_that_is_made_in_init(s: Scene) -> None:
    class Made(SGD):
        def __new__(cls, params: Any, rate: float) -> Any:
            del params, rate
            return super().__new__(cls)

        def __init__(self, params: Any, rate: float) -> None:
            super().__init__(params, lr=rate)

    class Begun(SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)

    s.optimizer = Made(s.model.parameters(), 0.1)
    s.refused(lambda: s.fit().step(BATCH))
    trains(s, lambda p: Begun(p, 0.1))


@follows("optimizers/interception.py", "the hook would run behind the update")
def a_hook_before_fit_or_the_objects_step(s: Scene) -> None:
    taken, ran = s.optimizer.step, list[str]()
    job = s.fit(lines=True)
    hook = s.optimizer.register_step_pre_hook(lambda *_: ran.append("late"))
    with job.lines():
        loss(s.model, BATCH).backward()
        s.refused(taken)
        s.optimizer.step()
        s.optimizer.zero_grad()
    job.close()
    hook.remove()
    s.optimizer.register_step_pre_hook(lambda *_: ran.append("early"))
    two_lines(s, s.fit(lines=True), taken)
    assert ran == ["late", "early"]


@follows("optimizers/interception.py", "returned new arguments for optimizer.step")
def a_hook_that_returns_none(s: Scene) -> None:
    job = s.fit()
    hook = s.optimizer.register_step_pre_hook(lambda optimizer, *_: ((optimizer, lambda: 1.0), {}))
    s.refused(lambda: job.step(BATCH))
    hook.remove()
    s.optimizer.register_step_pre_hook(lambda *_: None)
    assert job.step(BATCH).is_finite


@follows("optimizers/standing.py", "optimizer.param_groups was changed by hand")
def groups_are_changed_between_jobs(s: Scene) -> None:
    job, group = s.fit(), s.optimizer.param_groups[0]
    taken = group["params"].pop()
    s.refused(lambda: job.step(BATCH))
    group["params"].append(taken)
    job.close()
    s.optimizer.param_groups.append({**group, "params": [group["params"].pop()], "lr": 0.1})
    assert s.fit().step(BATCH).is_finite


@follows("optimizers/standing.py", "changed settings that decide which states exist")
def a_job_behind_a_change_of_settings(s: Scene) -> None:
    s.optimizer = SGD(s.model.parameters(), lr=0.1)
    job = s.fit()
    s.optimizer.param_groups[0]["momentum"] = 0.9
    s.refused(lambda: job.step(BATCH))
    job.close()
    with s.fit() as job:
        job.step(BATCH)
        assert "momentum_buffer" in s.optimizer.state_dict()["state"][0]


@follows("optimizers/validation.py", "A job has one optimizer")
def a_job_for_each_network_or_groups(s: Scene) -> None:
    body, head = s.model, nn.Linear(8, 8)
    both = [s.optimizer, AdamW(head.parameters(), lr=1e-2)]
    whole = nn.Sequential(body, head)
    s.refused(lambda: memfit.fit(whole, both, loss, BATCH))  # type: ignore[arg-type]
    with (
        memfit.fit(body, both[0], loss, BATCH, lines=True) as one,
        memfit.fit(head, both[1], loss, BATCH, lines=True) as other,
    ):
        with one.lines(), other.lines():
            loss(whole, BATCH).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        assert one.steps == other.steps == 1
    groups = AdamW([{"params": body.parameters()}, {"params": head.parameters(), "lr": 0.1}], lr=1e-2)
    with memfit.fit(whole, groups, loss, BATCH) as job:
        assert job.step(BATCH).is_finite


@follows("optimizers/validation.py", "not a torch.optim.Optimizer")
def the_optimizer_itself(s: Scene) -> None:
    s.optimizer = [*s.model.parameters()]  # type: ignore[assignment]
    s.refused(s.fit)
    trains(s, lambda p: SGD(p, lr=0.1))


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 8, sparse=sparse)

    def forward(self, batch: Tensor) -> Tensor:
        return self.table(batch)


TOKENS = torch.tensor([[0, 3], [5, 3]])


def learns_words(make: Callable[[Any], Optimizer]) -> None:
    ours, plain = Words(sparse=False), Words(sparse=False)
    with memfit.fit(ours, make(ours.parameters()), loss, TOKENS) as job:
        job.step(TOKENS)
    optimizer = make(plain.parameters())
    loss(plain, TOKENS).backward()
    optimizer.step()
    assert torch.equal(ours.table.weight, plain.table.weight)


@follows("optimizers/validation.py", "SparseAdam needs sparse gradients")
def a_dense_embedding_with_adam(s: Scene) -> None:
    words = Words(sparse=True)
    s.refused(lambda: memfit.fit(words, SparseAdam([*words.parameters()]), loss, TOKENS))
    learns_words(lambda parameters: Adam(parameters, lr=0.1))
    learns_words(lambda parameters: AdamW(parameters, lr=0.1))


@follows("optimizers/validation.py", "keeps its states in a form of its own")
def torchs_class_with_states_in_few_bits(s: Scene) -> None:
    class AdamW8bit(AdamW):
        pass

    AdamW8bit.__module__ = "bitsandbytes.optim.adamw"
    s.model = nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8))
    s.optimizer = AdamW8bit(s.model.parameters())
    s.refused(s.fit)
    s.optimizer = AdamW(s.model.parameters())
    for few_bits in ("int8-state", "int4-state", "fp8-state"):
        with s.fit(allow={few_bits}, limit="4GiB") as job:
            assert job.step(BATCH).is_finite


@follows("optimizers/validation.py", "runs the model several times within one update")
def a_class_without_closure(s: Scene) -> None:
    s.optimizer = torch.optim.LBFGS(s.model.parameters())
    s.refused(s.fit)
    trains(s, lambda p: AdamW(p, lr=0.1))
    trains(s, lambda p: SGD(p, lr=0.1))


@follows("optimizers/validation.py", "optimizer.step was replaced on this object")
def a_step_of_a_subclass_or_a_hook(s: Scene) -> None:
    class Halved(SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)
            return super().step(closure)

    s.optimizer = SGD(s.model.parameters(), lr=0.1)
    s.optimizer.step = lambda *_: None  # type: ignore[method-assign]
    s.refused(s.fit)
    trains(s, lambda p: Halved(p, lr=0.1))
    s.optimizer, ran = SGD(s.model.parameters(), lr=0.1), list[int]()
    s.optimizer.register_step_pre_hook(lambda *_: ran.append(1))
    s.fit().step(BATCH)
    assert ran == [1]


@follows("optimizers/validation.py", "has differentiable=True")
def an_update_outside_of_the_graph(s: Scene) -> None:
    s.optimizer = AdamW(s.model.parameters(), lr=0.1, differentiable=True)
    s.refused(s.fit)
    trains(s, lambda p: AdamW(p, lr=0.1, differentiable=False))


@follows("optimizers/validation.py", "has some on the CPU. Use capturable=False")
def an_update_without_graphs_of_cuda(s: Scene) -> None:
    s.optimizer = AdamW(s.model.parameters(), lr=0.1, capturable=True)
    s.refused(s.fit)
    trains(s, lambda p: AdamW(p, lr=0.1, capturable=False))


@follows("optimizers/validation.py", "wraps another optimizer")
def the_optimizer_inside_and_its_wrapper_in_lines(s: Scene) -> None:
    class Wrapper(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    inner, s.optimizer = s.optimizer, Wrapper(s.optimizer)
    wrapper = s.optimizer
    s.refused(s.fit)
    s.optimizer = inner
    with s.fit() as job:
        job.step(BATCH)
    s.trains_as(lambda model: loss(model, BATCH).backward())
    s.begin()
    wrapper.inner = s.optimizer
    with s.fit(lines=True) as job:
        two_lines(s, job, wrapper.step)
    s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("optimizers/interception.py", "it would run torch's global optimizer hooks once a piece")
def hooks_of_the_optimizer_or_none(s: Scene) -> None:
    class Halved(AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)
            return super().step(closure)

    s.optimizer = Halved(s.model.parameters(), lr=0.1)
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        s.refused(lambda: s.fit().step(BATCH))
    finally:
        hook.remove()
    trains(s, lambda p: Halved(p, lr=0.1))
    s.begin()
    s.optimizer, ran = Halved(s.model.parameters(), lr=0.1), list[int]()
    s.optimizer.register_step_pre_hook(lambda *_: ran.append(1))
    s.fit().step(BATCH)
    assert ran == [1]


@follows("optimizers/validation.py", "It would be updated twice a step; remove one of the two")
def a_parameter_of_one_group(s: Scene) -> None:
    groups = s.optimizer.param_groups
    groups.append({**groups[0], "params": [next(s.model.parameters())]})
    s.refused(s.fit)
    groups.pop()
    s.fit().step(BATCH)
    s.trains_as(lambda model: loss(model, BATCH).backward())


class WithLoss(nn.Module):
    """A model, and a loss that has parameters of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.Linear(8, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.loss(self.model(batch))


@follows("optimizers/validation.py", "Make the optimizer last. A loss with parameters of its own goes into one module")
def an_optimizer_of_the_model_as_it_is_and_of_its_loss(s: Scene) -> None:
    s.model[0] = nn.Linear(8, 8)  # behind the optimizer
    s.refused(s.fit)
    s.optimizer = AdamW(s.model.parameters())
    s.fit().step(BATCH)
    s.begin()
    measure = nn.Linear(8, 1)
    s.optimizer = AdamW([*s.model.parameters(), *measure.parameters()])
    s.refused(lambda: s.fit(lambda model, batch: measure(model(batch)).square().mean()))
    s.begin(lambda: WithLoss(nn.Linear(8, 8)))
    s.fit().step(BATCH)
    s.trains_as(lambda model: loss(model, BATCH).backward())
