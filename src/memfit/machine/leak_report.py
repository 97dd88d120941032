"""The census: what lives from step to step, and who holds it.

In: the device's counts at each step's end. Out: a report that names tensors that were made in
training and survive, and their holders.

[Note: when the census looks]
Live bytes and blocks have no noise: after a few steps they are the same at the end of every step,
to the byte, or something is kept. Reading them costs microseconds, and that is all that `note_step`
does while they are flat. When they first grow, it looks at the tensors that live (0.1 s), and these
are the *baseline*: what is made later and survives is what grows. It looks again each time the
growth has doubled, so a run of n steps pays for at most log n looks, and every tensor has an age:
the look that saw it first. Batches in flight come and go between looks; only a holder with tensors
older than the last step is named, and only one that gained them at several looks is called a leak.
From the fourth look on (about the tenth step of a steady leak) whoever runs the steps is told that
a report is worth its second, and warns of each leak once.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memfit.core.errors import MemfitWarning
from memfit.core.limits import format_bytes
from memfit.machine.closures import CallbackFinding, GraphContents, StorageKey, graph_of, inspect_callbacks, storage_of
from memfit.machine.holders import MOST_HOLDERS, Holder, HolderKind, HolderSearch
from memfit.machine.naming import Place

# Survivors: tensors that were made in training and are still alive, by who holds them.
#
# In: storages that are new since the counts began to grow, with the step at which each was first
# seen. Out: `Survivor`s.

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


WARM_UP_STEPS = 3
"""The first steps see lazy library state and the first filling of the optimizer's states.

What the third leaves, all later ones do.
"""

_KEPT_COUNTS = 256
_LOOKS_BEFORE_ALARM = 4


class Meter(Protocol):
    """Interface to the figures read at each step's end.

    `memfit.machine.meters.DeviceMeter` is one.
    """

    def live_bytes(self) -> int:
        """Bytes of live tensors."""
        ...

    def live_blocks(self) -> int:
        """Live blocks."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """Live bytes and blocks at the end of a step (1 is the first)."""

    step: int
    live_bytes: int
    live_blocks: int


@dataclass(frozen=True, kw_only=True)
class CensusReport:
    """Report on tensors that live from step to step.

    Attributes:
        counts: live bytes and blocks at the end of the last steps (at most 256).
        grown_bytes: what was live at the end of the last step beyond the least of all steps from
            the third on.
        grown_blocks: the same in blocks.
        survivors: tensors that are older than a step and were made since the counts first grew; the
            largest first.
        unseen: new tensors whose holders were not looked up, as there are too many.
        callbacks: hooks on the model, and callbacks of the user, that keep more alive than they
            seem to.
    """

    counts: tuple[StepCount, ...]
    grown_bytes: int
    grown_blocks: int
    survivors: tuple[Survivor, ...]
    unseen: int
    callbacks: tuple[CallbackFinding, ...]

    @property
    def leaks(self) -> tuple[Survivor, ...]:
        """The survivors that grow from step to step."""
        return tuple(survivor for survivor in self.survivors if survivor.is_growing)

    @property
    def is_rising(self) -> bool:
        """Bytes or blocks rose from quarter to quarter of the counts after warm-up, by their least
        and by their most.
        """
        counts = [count for count in self.counts if count.step >= WARM_UP_STEPS]
        return _rises([c.live_bytes for c in counts]) or _rises([c.live_blocks for c in counts])

    @property
    def is_clean(self) -> bool:
        """Nothing leaks, as far as the counts of these steps say."""
        return not self.leaks and not self.is_rising

    @property
    def text(self) -> str:
        """For a person."""
        lines = [self._headline(), *(f"leak: {survivor.text}" for survivor in self.leaks)]
        lines += [f"kept, not growing: {s.text}" for s in self.survivors if not s.is_growing]
        if self.unseen:
            lines.append(f"and {self.unseen} more new tensors, whose holders were not looked up")
        if self.is_rising and not self.leaks:
            lines.append(
                "live memory rises, but no tensor of an earlier step was found: run a few more steps and ask again. If it stays so, a tensor is replaced by a "
                "larger one each step (torch.cat onto itself), or native code holds what grows"
            )
        lines += [f"callback: {finding.text}" for finding in self.callbacks]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text

    def _headline(self) -> str:
        if not self.counts:
            return "census: no step has ended yet"
        last = self.counts[-1]
        live = f"census: {format_bytes(last.live_bytes)} in {last.live_blocks} blocks live after step {last.step}"
        if last.step < WARM_UP_STEPS:
            return f"{live}; it compares from step {WARM_UP_STEPS} on"
        if not self.grown_bytes and not self.grown_blocks:
            return f"{live}, flat"
        return f"{live}, {format_bytes(self.grown_bytes)} and {self.grown_blocks} blocks above the least since step {WARM_UP_STEPS}"

    def warn(self) -> None:
        """Warns (`MemfitWarning`) of each leak, and of each callback that forms a cycle or holds
        tensors, at the line to look at.
        """
        for survivor in self.leaks:
            _warn_at(f"memory leak: {survivor.text}", survivor.holders[0].place)
        for finding in self.callbacks:
            if finding.is_leak:
                _warn_at(finding.text, finding.place)


class Census:
    """Counts what lives at each step's end and, when that grows, finds out who holds it.

    Memory: 256 counts, and weak references to the tensors that lived when it looked. It keeps no
    tensor alive.

    Args:
        meter: the device's counts. Growth is seen on that device only; once seen, tensors of all
            devices are named. The fallback allocator counts pages of the process, so that growth is
            coarse there and the census may look in vain.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._step = 0
        self._counts: deque[StepCount] = deque(maxlen=_KEPT_COUNTS)
        self._least: tuple[int, int] | None = None  # bytes and blocks, from the end of warm-up on
        self._looked_at = (0, 0)  # growth in bytes and blocks when it last looked
        self._baseline_step: int | None = None
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._looks = 0
        self._told: set[str] = set()

    def note_step(self) -> bool:
        """A step has ended.

        About 10 microseconds; 0.1 s when live memory has grown and doubled its growth since the
        last look.

        Returns:
            It has doubled often enough that a report is worth its time; see `warn_once`.
        """
        self._step += 1
        count = StepCount(step=self._step, live_bytes=self._meter.live_bytes(), live_blocks=self._meter.live_blocks())
        self._counts.append(count)
        if self._step < WARM_UP_STEPS:
            return False
        before = self._least or (count.live_bytes, count.live_blocks)
        self._least = (min(before[0], count.live_bytes), min(before[1], count.live_blocks))
        grown = self._growth(count)
        if any(new > 0 and new >= 2 * old for new, old in zip(grown, self._looked_at, strict=True)):
            self._looked_at = (max(grown[0], self._looked_at[0]), max(grown[1], self._looked_at[1]))
            self._look()
            self._looks += 1
            return self._looks >= _LOOKS_BEFORE_ALARM
        return False

    def warn_once(self, report: CensusReport) -> None:
        """Warns of the leaks of a report that were not warned of before, each by its nearest
        holder.
        """
        for leak in report.leaks:
            holder = leak.holders[0]
            if holder.name not in self._told:
                self._told.add(holder.name)
                _warn_at(f"memory leak: {leak.text}", holder.place)

    def report(
        self,
        model: nn.Module | None = None,
        callbacks: Mapping[str, Callable[..., Any]] | None = None,
        *,
        keeper: object = None,
    ) -> CensusReport:
        """Returns what survives, and who holds it.

        Milliseconds while the counts are flat; else a second or two, and it may run the garbage
        collector.

        Tensors are named once they are a step old. Ask between steps.

        Args:
            model: whose modules are called by their paths, and whose hooks are looked at.
            callbacks: the user's own functions, by a word for each, such as "loss".
            keeper: the object that holds these callbacks: one that holds it in turn is a cycle.
        """
        grown = self._growth(self._counts[-1]) if self._counts else (0, 0)
        survivors: tuple[Survivor, ...] = ()
        new: list[NewStorage] = []
        if max(grown) > 0:
            visible, new = self._look()
            survivors = name_survivors(new, visible, now=self._step, model=model)
        return CensusReport(
            counts=tuple(self._counts),
            grown_bytes=grown[0],
            grown_blocks=grown[1],
            survivors=survivors,
            unseen=max(0, len(new) - MOST_TARGETS),
            callbacks=inspect_callbacks(model, callbacks, keeper=keeper),
        )

    def _growth(self, count: StepCount) -> tuple[int, int]:
        least = self._least or (count.live_bytes, count.live_blocks)
        return count.live_bytes - least[0], count.live_blocks - least[1]

    def _look(self) -> tuple[set[StorageKey], list[NewStorage]]:
        """Gives tensors that were not seen before this step's number.

        Returns:
            The storages of all live tensors, and those that hold no tensor of the baseline.
        """
        if self._baseline_step is None:
            self._baseline_step = self._step
        seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        old: set[StorageKey] = set()
        new: dict[StorageKey, NewStorage] = {}
        for tensor in live_tensors():
            known = self._seen.get(id(tensor))
            if known is None or known[0]() is not tensor:
                known = (weakref.ref(tensor), self._step)
            seen[id(tensor)] = known
            key, nbytes = storage_of(tensor)
            if known[1] == self._baseline_step:
                old.add(key)
            elif nbytes:
                one = new.setdefault(key, NewStorage(key=key, nbytes=nbytes, step=known[1]))
                one.step = min(one.step, known[1])
                one.tensors.append(tensor)
        self._seen = seen
        return old | new.keys(), [one for key, one in new.items() if key not in old]


def live_tensors() -> list[Tensor]:
    """All tensors that Python can see, parameters and tensors of subclasses included.

    About 0.1 s in a process with 400,000 objects.
    """
    kinds: set[type] = set()
    pending: list[type] = [Tensor]
    while pending:
        kind = pending.pop()
        if kind not in kinds:
            kinds.add(kind)
            pending.extend(type.__subclasses__(kind))
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def _rises(values: Sequence[int]) -> bool:
    size = len(values) // 4
    if size == 0:
        return False
    quarters = [values[len(values) - (4 - i) * size : len(values) - (3 - i) * size] for i in range(4)]
    return all(min(a) < min(b) and max(a) < max(b) for a, b in pairwise(quarters))


def _warn_at(text: str, place: Place | None) -> None:
    if place is None:
        warnings.warn(text, MemfitWarning, stacklevel=3)
    else:
        warnings.warn_explicit(text, MemfitWarning, place.file, place.line)
