"""Cures that refusals of `memfit.activations` name, followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from unit.advice import BATCH, Scene, follows, loss

KEEP, RECOMPUTE, SELECT, OFFLOAD = (CallPlan(saved=saved) for saved in Saved)


class Doing(nn.Module):
    """A layer whose forward does something besides, once memfit has planned."""

    def __init__(self, act: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(8, 8), act

    def forward(self, batch: Tensor) -> Tensor:
        result = self.inner(batch).tanh()
        if not memfit.is_tracing():
            self.act(batch, result)
        return result


def with_layer(s: Scene, act: Callable[[Tensor, Tensor], object]) -> None:
    torch.manual_seed(0)
    s.model = nn.Sequential(nn.Linear(8, 8), Doing(act))
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)


def steps(s: Scene, first: CallPlan, second: CallPlan, function: Any = loss) -> list[Tensor]:
    """Weights after a step under a plan."""
    with s.fit(function, plan=Plan(calls=(first, second))) as job:
        job.step(BATCH)
    return [p.detach().clone() for p in s.model.parameters()]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@follows("activations/frames.py", "is called inside another call whose saved tensors are managed")
def the_outer_call_is_kept(s: Scene) -> None:
    for outer in (RECOMPUTE, KEEP):
        s.begin()
        inner = s.fit(plan=Plan(calls=(RECOMPUTE, RECOMPUTE)))
        with_layer(s, lambda *_, inner=inner: inner.step(BATCH))
        if outer is RECOMPUTE:
            s.refused(lambda: steps(s, KEEP, RECOMPUTE))
        else:
            steps(s, KEEP, KEEP)
            assert inner.steps == 1


def hooked(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return loss(model, batch)


@follows("activations/frames.py", "is called under saved-tensor hooks of")
def a_kept_call_or_no_hooks(s: Scene) -> None:
    s.refused(lambda: steps(s, RECOMPUTE, RECOMPUTE, hooked))
    for function, call in ((hooked, KEEP), (loss, RECOMPUTE)):
        s.begin()
        steps(s, call, call, function)
        s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("activations/frames.py", "is compiled, and its operations cannot be looked at")
def a_compiled_call_that_is_not_selected_from(s: Scene) -> None:
    def compiled() -> None:
        s.begin()
        s.model[0].forward = torch.compile(s.model[0].forward, backend="eager")  # type: ignore[method-assign]

    compiled()
    s.refused(lambda: steps(s, SELECT, KEEP))
    for call in (RECOMPUTE, OFFLOAD, KEEP):
        compiled()
        steps(s, call, KEEP)
        s.trains_as(lambda model: loss(model, BATCH).backward())
    torch._dynamo.reset()


class Steep(nn.Linear):
    """A layer that adds its own slope, once memfit has planned or always."""

    waits = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's own name
        result = super().forward(input).tanh()
        if self.waits and memfit.is_tracing():
            return result
        (slope,) = torch.autograd.grad(result.sum(), self.weight, retain_graph=True)
        return result + slope.mean()


@follows("profiling/trace_run.py", "or leave it out where memfit.is_tracing(), if the model's forward has it")
def a_forward_with_a_backward_of_numbers(s: Scene) -> None:
    s.begin(lambda: nn.Sequential(nn.Linear(8, 8), Steep(8, 8)))
    s.model[1].waits = False
    for lines in (False, True):
        s.refused(lambda lines=lines: s.fit(lines=lines))
    s.begin()
    steps(s, KEEP, KEEP)
    s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("activations/recompute.py", "runs autograd inside its own forward")
def a_call_with_a_backward_inside_is_kept(s: Scene) -> None:
    def slope(_: Tensor, result: Tensor) -> None:
        torch.autograd.grad(result.sum(), [*s.model[1].parameters()], retain_graph=True)

    with_layer(s, slope)
    s.refused(lambda: steps(s, KEEP, RECOMPUTE))
    with_layer(s, slope)
    ours = steps(s, KEEP, KEEP)
    with_layer(s, lambda *_: None)
    loss(s.model, BATCH).backward()
    s.optimizer.step()
    assert same(ours, [*s.model.parameters()])
