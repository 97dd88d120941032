"""Cures that refusals of `memfit.activations` name, followed."""

from __future__ import annotations

import warnings
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


def steps(s: Scene, first: CallPlan, second: CallPlan, function: Any = loss, **wishes: Any) -> list[Tensor]:
    """Weights after a step under a plan."""
    with s.fit(function, plan=Plan(calls=(first, second)), **wishes) as job:
        job.step(BATCH)
    return [p.detach().clone() for p in s.model.parameters()]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@follows("engine/frames.py", "is called inside another call whose saved tensors are managed")
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


@follows("engine/frames.py", "is called under saved-tensor hooks of")
def a_kept_call_or_no_hooks(s: Scene) -> None:
    s.refused(lambda: steps(s, RECOMPUTE, RECOMPUTE, hooked))
    for function, call in ((hooked, KEEP), (loss, RECOMPUTE)):
        s.begin()
        steps(s, call, call, function)
        s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("engine/frames.py", "is compiled, and its operations cannot be looked at")
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


@follows("trace/trace_run.py", "or leave it out where memfit.is_tracing(), if the model's forward has it")
def a_forward_with_a_backward_of_numbers(s: Scene) -> None:
    s.begin(lambda: nn.Sequential(nn.Linear(8, 8), Steep(8, 8)))
    s.model[1].waits = False
    for lines in (False, True):
        s.refused(lambda lines=lines: s.fit(lines=lines))
    s.begin()
    steps(s, KEEP, KEEP)
    s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("engine/recompute.py", "runs autograd inside its own forward")
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


class Told(nn.Module):
    """A block whose forward is a function of its layer and its arguments; it counts its own runs behind planning."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.told, self.notes = nn.Linear(8, 8), forward, torch.zeros(8)

    def forward(self, *given: Any) -> Tensor:
        return self.told(self, *given)


class Around(nn.Module):
    """A model of a layer and a block, which it calls by a function."""

    def __init__(self, block: Callable[..., Tensor], calls: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.block, self.calls = nn.Linear(8, 8), Told(block), calls

    def forward(self, batch: Tensor) -> Tensor:
        return self.calls(self.block, self.first(batch))


class Turns:
    """Numbers the runs of a block behind planning: a second run meets another number."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> int:
        self.number += not memfit.is_tracing()
        return max(self.number, 1)


def passes_on(block: nn.Module, hidden: Tensor) -> Tensor:
    return block(hidden)


def follow_policies(
    s: Scene,
    make: Callable[[], tuple[Callable[..., Tensor], Callable[[nn.Module, Tensor], Tensor]]],
    refused: CallPlan = RECOMPUTE,
    *,
    others: tuple[CallPlan, ...] = (KEEP, OFFLOAD),
    kind: type[Exception] = memfit.MemfitError,
) -> None:
    """Meets a refusal under one policy of the block's call, and trains as plain PyTorch under the others."""

    def begin() -> None:
        s.begin(lambda: Around(*make()))

    begin()
    s.refused(lambda: steps(s, KEEP, refused, blocks=["first", "block"]), kind)
    for policy in others:
        begin()
        steps(s, KEEP, policy, blocks=["first", "block"])
        s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("engine/surroundings.py", "reads a tensor that it keeps on itself")
def a_call_that_changes_its_own_tensor_is_kept_or_offloaded(s: Scene) -> None:
    def noting(block: Any, hidden: Tensor) -> Tensor:
        if not memfit.is_tracing():
            block.notes.add_(1)
        return block.inner(hidden) * block.notes.clone()

    follow_policies(s, lambda: (noting, passes_on))


@follows("engine/call_arguments.py", "was changed in place after the call began")
def a_call_whose_argument_changes_is_kept_or_offloaded(s: Scene) -> None:
    def shifted(block: Any, hidden: Tensor) -> Tensor:
        return (hidden + block.inner.weight.sum()).tanh()

    def changes(block: nn.Module, hidden: Tensor) -> Tensor:
        result = block(hidden)
        return result + hidden.mul_(2)

    follow_policies(s, lambda: (shifted, changes))


@follows("engine/call_arguments.py", "shares its memory with another argument")
def a_call_of_two_views_is_kept_or_offloaded(s: Scene) -> None:
    def changes(block: Any, one: Tensor, other: Tensor) -> Tensor:
        one.add_(1)
        return block.inner(one.clone()) + other

    def views(block: nn.Module, hidden: Tensor) -> Tensor:
        copied = hidden * 1
        return block(copied, copied.view(-1).view(4, 8))

    follow_policies(s, lambda: (changes, views))


class Box:
    def __init__(self, *content: Tensor) -> None:
        self.content = content


@follows("engine/call_arguments.py", "which it did not read at first")
def a_call_that_reads_now_and_then_is_kept_or_offloaded(s: Scene) -> None:
    def make() -> Any:
        turns = Turns()

        def reads(block: Any, box: Box) -> Tensor:
            result = block.inner(box.content[0])
            return (result if turns.next() % 2 else result + box.content[1]).tanh()

        return reads, lambda block, hidden: block(Box(hidden, hidden.detach().tanh()))

    follow_policies(s, make)


@follows("engine/recompute.py", "does not do the same when it is recomputed")
def a_call_that_counts_is_kept_or_offloaded(s: Scene) -> None:
    def make() -> Any:
        turns = Turns()
        return lambda block, hidden: (block.inner(hidden) * turns.next()).tanh(), passes_on

    follow_policies(s, make)


@follows("engine/recompute.py", "runs other operations when it is recomputed")
def a_call_of_other_products_is_kept_or_offloaded(s: Scene) -> None:
    def make() -> Any:
        turns = Turns()

        def products(block: Any, hidden: Tensor) -> Tensor:
            if turns.next() % 2 == 0:
                hidden.detach().mm(block.inner.weight.detach())
            return block.inner(hidden).tanh()

        return products, passes_on

    follow_policies(s, make, SELECT)


@follows("engine/recompute.py", "was compiled anew by torch.compile")
def a_call_that_is_compiled_again_is_kept_or_offloaded(s: Scene) -> None:
    def make() -> Any:
        compiled = torch.compile(lambda inner, hidden: inner(hidden).tanh(), backend="eager")

        def resets(block: nn.Module, hidden: Tensor) -> Tensor:
            result = block(hidden)
            torch._dynamo.reset()  # as where its guards fail
            return result

        return lambda block, hidden: compiled(block.inner, hidden), resets

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # by torch's compiler itself
        follow_policies(s, make)


@follows("engine/writes.py", "has been modified by an inplace operation")
def a_copy_that_is_changed(s: Scene) -> None:
    def grows(block: Any, hidden: Tensor) -> Tensor:
        return block.inner(hidden).exp()

    def spoiled(policy: CallPlan) -> None:
        s.begin(lambda: Around(grows, lambda block, hidden: block(hidden).mul_(2)))
        s.refused(lambda: steps(s, KEEP, policy, blocks=["first", "block"]), RuntimeError)

    spoiled(KEEP)  # by plain PyTorch
    spoiled(OFFLOAD)
    s.begin(lambda: Around(grows, lambda block, hidden: block(hidden).clone().mul_(2)))
    steps(s, KEEP, OFFLOAD, blocks=["first", "block"])
    s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("engine/writes.py", "Where plain PyTorch goes on with the changed values")
def a_copy_or_a_kept_call_of_changed_values(s: Scene) -> None:
    def grows(block: Any, hidden: Tensor) -> Tensor:
        return block.inner(hidden).exp()

    def changes(block: nn.Module, hidden: Tensor) -> Tensor:
        result = block(hidden)
        result.data.mul_(2)
        return result

    def copies(block: nn.Module, hidden: Tensor) -> Tensor:
        result = block(hidden).clone()
        result.data.mul_(2)
        return result

    follow_policies(s, lambda: (grows, changes), others=(KEEP,), kind=RuntimeError)
    s.begin(lambda: Around(grows, copies))
    steps(s, KEEP, RECOMPUTE, blocks=["first", "block"])
    s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("engine/offload.py", "Under a memory plan a graph is walked once")
def a_graph_that_is_walked_twice_is_kept(s: Scene) -> None:
    inside = list[Tensor]()

    def remembers(block: Any, hidden: Tensor) -> Tensor:
        result = block.inner(hidden).tanh()
        if not memfit.is_tracing():
            inside.append(result)
        return result.exp()

    def twice(policy: CallPlan) -> Tensor:
        inside.clear()
        s.begin(lambda: Around(remembers, passes_on))
        job = s.fit(lines=True, plan=Plan(calls=(KEEP, policy)), blocks=["first", "block"])
        with job.lines():
            for _ in range(2):
                loss(s.model, BATCH).backward(retain_graph=True)
                s.optimizer.step()
                s.optimizer.zero_grad()
            return torch.autograd.grad(inside[0].sum(), s.model.block.inner.bias)[0]

    s.refused(lambda: twice(RECOMPUTE))
    assert twice(KEEP).isfinite().all()
