"""The whole probe of this machine, as a call.

In: a device. Out: `Hardware`, and the file that keeps it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memfit.core.hardware import Hardware, Rate
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.step import Step, Timeline
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind
from memfit.job.fit import fit
from memfit.machine.described import identity_of, save, saved_path
from memfit.machine.probing import probe_whole
from memfit.planner.search.mixing import LinearProgram

# Models that compute next to nothing, so that what takes their time is Python, torch and memfit.
#
# In: what their blocks are to be made of. Out: models whose blocks are equal. Each part reads more
# first than a core's cache holds, as the products of a real layer do: they leave nothing of
# Python's there.

WIDTH, PLACES = 16, 4
LOOKS = 400
"""Functions that a talkative part calls besides.
"""
_LARGE = 1 << 19
_SMALL_LOOKS = {"kind": "any"}


class SmallPart(nn.Module):
    """Reads more than a cache holds, then does what a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        self._large = torch.ones(_LARGE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reads, then computes."""
        self._large.sum()
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what comes of it: of the same shape."""
        raise NotImplementedError


class Smallest(SmallPart):
    """One operation, of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies."""
        return x * self.weight


class Layer(SmallPart):
    """A transformer's layer, with the modules and operations of one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.attention = _Norm(), _Norm(), _Attention()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.turns = torch.ones(PLACES, WIDTH // 2), torch.zeros(PLACES, WIDTH // 2)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a gated network, each beside what comes in."""
        x = x + self.attention(self.before(x), turns=self.turns)
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Talkative(Layer):
    """A layer whose code looks at tensors and options around its operations, as libraries' do."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Looks, then computes as a layer."""
        for _ in range(LOOKS):
            _look(x, options=_SMALL_LOOKS)
        return super().compute(x)


class SmallBlock(nn.Sequential):
    """Some parts, called as one."""


class _Norm(nn.Module):
    """Division by the root of the mean square, by its formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Attention(nn.Module):
    """Attention of two heads over queries and keys turned by their places."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor, *, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shape = (*hidden.shape[:-1], 2, -1)
        query, key, value = (one(hidden).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        query, key = (one * turns[0] + _half_turned(one) * turns[1] for one in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(hidden.shape))


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _look(x: torch.Tensor, *, options: dict[str, Any], **more: Any) -> tuple[int, ...] | None:
    """Asks for what code around operations asks for."""
    if options.get("is_skipped") or not isinstance(options["kind"], str):
        return None
    return (*x.shape[:-1], more.get("heads", 1))


# Rates of what Python and memfit's engine spend on a step, whatever it computes.
#
# In: a machine's description. Out: a `Rate` for each class that counts operations, calls and
# pieces.
#
# [Note: layers of no work]
# Blocks of almost no work run under the engine: smallest ones, layers, three layers, layers with
# more Python around their operations, under each policy, from one microbatch and from two. Each
# forward and backward in the middle gives an equation: its seconds are the sum over classes of a
# rate's inverse times the amount that the clock itself counts for it. The rates are those that
# explain all of them best, none negative: the sum of distances, relative to the measured seconds,
# is least (a linear program). So figures that were disturbed move no rate by much, which
# differences of two did. Visits are what the main thread takes more where the same blocks rest on
# disk; transfers of pieces are what the thread of updates takes more there. Seconds are those of
# the thread on a processor, the middle of the faster half of many steps: other work can only slow
# one down, and no step is the sum of the least of each. The processor does this on any machine:
# beside an accelerator too, Python runs there.

_BLOCKS, _MANY = 6, 3
_STEPS, _FIRST_STEPS = 24, 4
_LEAST_S = 1e-7
_LEAST_SPREAD = 0.1
_SHORT_S = 5e-5
# What reads a cache's worth, counted by itself: it is the same in each part.
_PARTS = "parts"
EXPLAINED = (
    WorkKind.OPERATIONS,
    WorkKind.PYTHON,
    WorkKind.NODES,
    WorkKind.WATCHED,
    WorkKind.SELECTED,
    WorkKind.CALLS,
    WorkKind.FRAMES,
    WorkKind.SWITCHES,
)
"""Kinds whose rates forwards and backwards tell.
"""
_ON_DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)


@dataclass(frozen=True, kw_only=True)
class _Design:
    """Blocks and how they run."""

    part: type[SmallPart]
    parts: int = 1
    saved: Saved = Saved.KEEP
    microbatches: int = 1
    homes: BlockPlan | None = None


_DESIGNS = (
    *(_Design(part=Smallest, saved=saved) for saved in (Saved.KEEP, Saved.RECOMPUTE)),
    *(_Design(part=Layer, saved=saved) for saved in (Saved.KEEP, Saved.RECOMPUTE, Saved.SELECT)),
    *(_Design(part=Layer, parts=_MANY, saved=saved) for saved in (Saved.KEEP, Saved.RECOMPUTE, Saved.SELECT)),
    _Design(part=Talkative),
    _Design(part=Layer, microbatches=2),
)


@dataclass(frozen=True, kw_only=True)
class _MeasuredDesign:
    """A design's amounts and seconds.

    Attributes:
        amounts: of a forward and of a backward in the middle.
        seconds: of them.
        rest_s: of the main thread in a step, without these two and updates.
        updates_s: of all updates, in the thread that does them.
        main_s: of the main thread in a step, without updates.
        step: that ran.
    """

    amounts: tuple[Mapping[str, float], Mapping[str, float]]
    seconds: tuple[float, float]
    rest_s: float
    updates_s: float
    main_s: float
    step: Step

    def amount(self, kind: WorkKind) -> float:
        """Sum over the step."""
        return sum(amount for operation in self.step for k, amount in operation.work if k is kind)


def measure_engine(hardware: Hardware, directory: str | Path | None = None) -> Mapping[WorkKind, Rate]:
    """Measures what the engine and Python take on this machine's processor; some seconds. See
    [Note: layers of no work].

    Args:
        hardware: a description, of links above all, so that `fit` measures nothing itself.
        directory: on the disk that homes would use; None: the temporary one.
    """
    found = {design: _measure(design, hardware, directory) for design in _DESIGNS}
    actions = [pair for one in found.values() for pair in zip(one.amounts, one.seconds, strict=True)]
    seconds_of, spread = explained(actions)
    one = found[_Design(part=Layer)]
    piece_s = one.updates_s / one.amount(WorkKind.PIECES)
    seconds_of[WorkKind.PIECES] = piece_s
    seconds_of[WorkKind.STEPS] = one.rest_s
    smallest, layer = (_Design(part=part, homes=_ON_DISK) for part in (Smallest, Layer))
    away = {design: _measure(design, hardware, directory) for design in (smallest, layer)}
    beside = {design: found[_Design(part=design.part)] for design in away}
    of_visit = [
        max(0.0, away[design].main_s - beside[design].main_s) / away[design].amount(WorkKind.VISITS)
        for design in (smallest, layer)
    ]
    tensors = [away[design].amount(WorkKind.VISITED) / away[design].amount(WorkKind.VISITS) for design in away]
    of_tensor = max(0.0, of_visit[1] - of_visit[0]) / (tensors[1] - tensors[0])
    seconds_of[WorkKind.VISITED] = of_tensor
    seconds_of[WorkKind.VISITS] = of_visit[0] - of_tensor * tensors[0]
    moved = away[layer]
    seconds_of[WorkKind.PIECE_TRANSFERS] = (moved.updates_s - moved.amount(WorkKind.PIECES) * piece_s) / moved.amount(
        WorkKind.PIECE_TRANSFERS
    )
    return {kind: Rate(1 / max(s, _LEAST_S), round(spread, 3)) for kind, s in seconds_of.items()}


def explained(actions: Sequence[tuple[Mapping[str, float], float]]) -> tuple[dict[WorkKind, float], float]:
    """Returns the seconds of one of each kind that explain all actions best, and by which share
    they are off.

    Args:
        actions: the amounts of each and its seconds. See [Note: layers of no work].
    """
    names = (_PARTS, *map(str, EXPLAINED))
    scales = [max(seconds, _SHORT_S) for _, seconds in actions]
    wanted = [seconds / scale for (_, seconds), scale in zip(actions, scales, strict=True)]
    rows = [
        [(column, amounts[name] / scale) for column, name in enumerate(names) if amounts.get(name)]
        for (amounts, _), scale in zip(actions, scales, strict=True)
    ]
    # The sum of distances, not of their squares: what was disturbed is passed over. A distance is
    # not less than the difference in either direction.
    first = len(names)
    below = [[*row, (first + i, 1.0)] for i, row in enumerate(rows)]
    over = [[*row, (first + i, -1.0)] for i, row in enumerate(rows)]
    count = len(rows)
    program = LinearProgram(
        [0.0] * (first + count),
        [math.inf] * (first + count),
        [*below, *over],
        [*wanted, *([-math.inf] * count)],
        [*([math.inf] * count), *wanted],
    )
    solved = program.minimize([*([0.0] * first), *([1.0] * count)])
    assert solved is not None, "any seconds will do, with distances that are large enough"
    spread = max(_LEAST_SPREAD, statistics.median(solved[first:]))
    return dict(zip(EXPLAINED, solved[1:first], strict=True)), spread


def _measure(design: _Design, hardware: Hardware, directory: str | Path | None) -> _MeasuredDesign:
    model = nn.Sequential(*(SmallBlock(*(design.part() for _ in range(design.parts))) for _ in range(_BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, PLACES, WIDTH)
    plan = Plan(
        microbatches=design.microbatches,
        calls=tuple(CallPlan(saved=design.saved) for _ in range(_BLOCKS)),
        blocks={} if design.homes is None else {str(index): design.homes for index in range(_BLOCKS)},
    )
    timelines: list[Timeline] = []
    totals: dict[bool, list[float]] = {True: [], False: []}
    with fit(model, optimizer, _loss, batch, plan=plan, hardware=hardware, directory=directory, enforce=False) as job:
        for index in range(_STEPS):
            began = time.thread_time()
            job.step(batch)
            total = time.thread_time() - began
            measured = job._runner.measured  # noqa: SLF001, nothing public gives timelines
            assert measured is not None, "the first steps of a processor's job are measured"
            if index < _FIRST_STEPS:
                continue  # they make states and warm caches
            # A job measures its first steps action by action, and then a few: which takes time.
            is_measured = measured.step == index + 1
            totals[is_measured].append(total)
            timelines += [measured.timeline] if is_measured else []
        measured = job._runner.measured  # noqa: SLF001, as above
        assert measured is not None, "the first steps of a processor's job are measured"
        step = measured.prepared.step
        job.close(restore=False)
    return _usual(step, timelines, totals[False] or totals[True], design)


def _usual(step: Step, timelines: Sequence[Timeline], totals: Sequence[float], design: _Design) -> _MeasuredDesign:
    """Takes the middle of the faster half of the steps, each figure by itself."""
    columns: list[tuple[float, ...]] = []
    for timeline in timelines:
        kinds: dict[str, list[float]] = {}
        for moment in timeline.moments:
            assert moment.busy_s is not None, "backward runs in the thread that asks for it"
            kinds.setdefault(moment.action.split()[0], []).append(moment.busy_s)
        # The first call and the last do other things besides.
        forward, backward = (statistics.median(kinds[kind]) for kind in ("forward", "backward"))
        updates = timeline.beside_s or sum(kinds["update"])
        columns.append((forward, backward, sum(kinds["forward"]) + sum(kinds["backward"]), updates))
    forward, backward, computed, updates = (_middle_of_faster(column) for column in zip(*columns, strict=True))
    main = _middle_of_faster(totals) - (0.0 if any(timeline.beside_s for timeline in timelines) else updates)
    return _MeasuredDesign(
        amounts=(_amounts(step, "forward", design), _amounts(step, "backward", design)),
        seconds=(forward, backward),
        rest_s=max(0.0, main - computed),
        updates_s=updates,
        main_s=main,
        step=step,
    )


def _middle_of_faster(figures: Sequence[float]) -> float:
    return sorted(figures)[len(figures) // 4]


def _amounts(step: Step, kind: str, design: _Design) -> Mapping[str, float]:
    """Amounts that the clock counts for a call in the middle."""
    works = [operation.work for operation in step if str(operation.action).split()[0] == kind]
    found = {str(k): amount for k, amount in works[len(works) // 2]}
    runs_forward = kind == "forward" or not design.saved.policy.keeps_all
    return {**found, _PARTS: float(design.parts * runs_forward)}


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def probe(
    device: str | torch.device, *, directory: str | Path | None = None, out: Path | None = None
) -> tuple[Hardware, Path]:
    """Measures a device with memfit's allocator under torch, as jobs run, and keeps what it found.

    Args:
        device: "cpu", or an accelerator.
        directory: on the disk that homes would use.
        out: file to write; None: that of this device in the user's cache, which later runs read.

    Raises:
        UsageError: the file cannot be written. StoreError: the disk has no room or fails.
    """
    where = torch.device(device)
    found = probe_whole(where, directory)
    # The allocator is installed, so that jobs on the processor measure their steps.
    found = replace(found, rates={**found.rates, **measure_engine(found, directory)})
    path = saved_path(identity_of(where)) if out is None else out
    save(found, path)
    return found, path
