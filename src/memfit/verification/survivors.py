"""Survivors: tensors that were made in training and are still alive, by who holds them.

In: storages that are new since the counts began to grow, with the step at which each was first
seen. Out: `Survivor`s.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.units import format_bytes
from memfit.verification.graphs import GraphContents, StorageKey, graph_of
from memfit.verification.holders import MOST_HOLDERS, Holder, HolderKind, HolderSearch

MOST_TARGETS = 1_000
"""Storages whose holders are looked up in one report; a leak has its oldest among them."""


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """Tensors of one holder.

    Attributes:
        nbytes: of their storages, each counted once.
        count: how many storages.
        shape: of the largest tensor.
        dtype: of the largest tensor.
        since_step: the oldest was there at the end of this step.
        is_growing: the holder gained tensors in several steps: a leak. Otherwise it was filled
            once.
        graph: name of the autograd node behind the largest tensor, such as "MseLossBackward0"; None
            for tensors without a graph.
        holders: up to three ways to the tensors, the nearest first.
    """

    nbytes: int
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    since_step: int
    is_growing: bool
    graph: str | None
    holders: tuple[Holder, ...]

    @property
    def text(self) -> str:
        """For a person: what, since when, who, and what to try."""
        kind = str(self.dtype).removeprefix("torch.")
        many = f"{self.count} tensors" if self.count > 1 else "1 tensor"
        lines = [
            f"{many}, {format_bytes(self.nbytes)}, such as {list(self.shape)} {kind}, since step {self.since_step}",
            *(f"  held by {holder.text}" for holder in self.holders),
        ]
        if self.graph is not None:
            lines.append(f"  with an autograd graph ({self.graph}): keep value.detach() or value.item() instead")
        if any(holder.kind is HolderKind.CYCLE for holder in self.holders):
            lines.append(
                "  only the garbage collector frees it, whenever it comes: break the cycle with a weak reference or `del`"
            )
        return "\n".join(lines)


@dataclass(kw_only=True)
class NewStorage:
    """A storage that was made after the baseline.

    Attributes:
        key: its identity while it lives.
        nbytes: its bytes.
        step: of the look that saw it first.
        tensors: all that lie on it.
    """

    key: StorageKey
    nbytes: int
    step: int
    tensors: list[Tensor] = field(default_factory=list)


@dataclass(kw_only=True)
class _Case:
    """Facts about a storage, without keeping it alive.

    Attributes:
        nbytes: its bytes.
        step: of the look that saw it first.
        shape: of its tensor.
        dtype: of its tensor.
        graph: name of the tensor's node.
        holders: who holds it.
        cycle: the reference cycle above it, in words, where no name was found.
        alive: tells whether a collection freed it.
    """

    nbytes: int
    step: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    graph: str | None = None
    holders: tuple[Holder, ...] = ()
    cycle: str | None = None
    alive: weakref.ref[Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class _KeptGraph:
    """A graph, who keeps it, and since when."""

    contents: GraphContents
    holder: Holder
    step: int


def name_survivors(
    new: list[NewStorage], visible: set[StorageKey], *, now: int, model: nn.Module | None
) -> tuple[Survivor, ...]:
    """Finds who holds storages, and groups them by holder.

    Runs the garbage collector if some of them hang on a reference cycle: only then is it known that
    nothing else held them.

    Args:
        new: all storages made since the baseline; their lists are emptied. At most `MOST_TARGETS`
            are looked up, the oldest first.
        visible: identities of all storages that Python objects refer to, old ones included.
        now: the current step; groups that have nothing older are left out (batches and results of
            this step).
        model: whose modules are called by their paths.

    Returns:
        The survivors, the largest first.
    """
    new.sort(key=lambda one: one.step)
    cases = _open_cases(new[:MOST_TARGETS], visible, model)
    for one in new:
        one.tensors.clear()  # a tensor that is held here would survive the collection
    _judge_cycles(cases)
    groups: dict[tuple[str, ...], list[_Case]] = {}
    for case in cases:
        groups.setdefault(tuple(holder.text for holder in case.holders), []).append(case)
    found = [_survivor(group) for group in groups.values() if min(case.step for case in group) < now]
    return tuple(sorted(found, key=lambda survivor: -survivor.nbytes))


def _survivor(group: Sequence[_Case]) -> Survivor:
    largest = max(group, key=lambda case: case.nbytes)
    steps = {case.step for case in group}
    return Survivor(
        nbytes=sum(case.nbytes for case in group),
        count=len(group),
        shape=largest.shape,
        dtype=largest.dtype,
        since_step=min(steps),
        is_growing=len(steps) > 1,
        graph=largest.graph,
        holders=largest.holders,
    )


def _open_cases(new: Sequence[NewStorage], visible: set[StorageKey], model: nn.Module | None) -> list[_Case]:
    targets = [tensor for one in new for tensor in one.tensors]
    search = HolderSearch(targets, model=model, own=[one.tensors for one in new])
    search.climb()
    cases: list[_Case] = []
    graphs: list[_KeptGraph] = []
    walked: set[Any] = set()  # nodes; several tensors of a storage may share theirs
    for one in new:
        tensor = max(one.tensors, key=lambda t: t.numel())
        named = {holder.text: holder for t in one.tensors for holder in search.holders(t)}
        node = tensor.grad_fn
        case = _Case(
            nbytes=one.nbytes,
            step=one.step,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            graph=None if node is None else type(node).__name__,
            holders=tuple(named.values())[:MOST_HOLDERS],
        )
        cases.append(case)
        if case.holders and node is not None and node not in walked:
            walked.add(node)
            graphs.append(_kept_graph(tensor, case))
    for one, case in zip(new, cases, strict=True):
        if not case.holders:
            _explain(one, case, graphs, search)
    cases.extend(_out_of_sight(graphs, visible))
    return cases


def _kept_graph(tensor: Tensor, case: _Case) -> _KeptGraph:
    contents, owner = graph_of(tensor), case.holders[0]
    assert contents is not None
    holder = replace(owner, kind=HolderKind.GRAPH, name=f"the autograd graph ({contents.name}) of {owner.name}")
    return _KeptGraph(contents=contents, holder=holder, step=case.step)


def _explain(one: NewStorage, case: _Case, graphs: Sequence[_KeptGraph], search: HolderSearch) -> None:
    """A storage that no name leads to: a graph holds it, a cycle, or native code."""
    above = {key for tensor in one.tensors for key in search.ancestors(tensor)}
    holding = [g.holder for g in graphs if one.key in g.contents.storages or g.contents.objects & above]
    case.holders = tuple({holder.text: holder for holder in holding}.values())[:MOST_HOLDERS]
    if not case.holders:
        first = one.tensors[0]
        case.holders = (search.nearest(first),)
        case.cycle = search.cycle(first)
        case.alive = weakref.ref(first)


def _out_of_sight(graphs: Iterable[_KeptGraph], visible: set[StorageKey]) -> list[_Case]:
    """Finds tensors that graphs saved and no Python object refers to."""
    found: dict[StorageKey, _Case] = {}
    for graph in graphs:
        for key, saved in graph.contents.storages.items():
            if key not in visible and key not in found and saved.nbytes:
                found[key] = _Case(
                    nbytes=saved.nbytes, step=graph.step, shape=saved.shape, dtype=saved.dtype, holders=(graph.holder,)
                )
    return list(found.values())


def _judge_cycles(cases: Iterable[_Case]) -> None:
    """Collects: what it frees was held by its cycle alone.

    The others are held from native code as well.
    """
    waiting = [case for case in cases if case.cycle is not None]
    if waiting:
        gc.collect()
    for case in waiting:
        assert case.alive is not None
        if case.alive() is None:
            nearest = case.holders[0]
            context = (*nearest.context, f"unreachable, in the reference cycle {case.cycle}")
            case.holders = (replace(nearest, kind=HolderKind.CYCLE, context=context),)
