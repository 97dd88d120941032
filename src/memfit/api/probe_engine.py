"""Rates of what Python and memfit's engine spend on a step, whatever it computes.

In: a machine's description. Out: a `Rate` for each class that counts operations, calls and pieces.

[Note: layers of no work]
Blocks of 16 x 16 with few and with many operations run under the engine, under each policy. An
action's seconds are taken as a constant and a multiple of its operations: two lengths give both,
and the differences between policies, and from two microbatches, give what each of them adds. These
differences are measured with cold caches, since the products of a layer leave none of Python's
there.
Seconds are those of the thread on a processor, the middle of the faster half of many steps: other
work can only slow one down, and no step is the sum of the least of each. The processor does this on
any machine: beside an accelerator too, Python runs there.
Transfers of pieces are what the thread of updates takes more than for as many pieces where the same
blocks rest on disk.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from memfit.api.fit import fit
from memfit.core.hardware import Hardware
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.rates import Rate
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.core.timeline import Timeline
from memfit.core.work_kinds import WorkKind
from memfit.scheduling.work_amounts import update_work

_WIDTH, _PLACES = 16, 4
_LARGE = 1 << 19
_FEW, _MANY = 1, 3
_BLOCKS = 6
_STEPS = 24
_POLICIES = (Saved.KEEP, Saved.RECOMPUTE, Saved.SELECT)
_LEAST_S = 1e-7
_LEAST_SPREAD = 0.1


class _Norm(nn.Module):
    """Division by the root of the mean square, by its formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Attention(nn.Module):
    """Attention of two heads over queries and keys turned by their places."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor, *, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shape = (*hidden.shape[:-1], 2, -1)
        query, key, value = (one(hidden).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        query, key = (one * turns[0] + _half_turned(one) * turns[1] for one in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(hidden.shape))


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class _Unit(nn.Module):
    """A transformer's layer, with the modules and operations of one.

    Args:
        is_cold: it reads more than a core's cache holds first, as the products of a layer do.
    """

    def __init__(self, *, is_cold: bool) -> None:
        super().__init__()
        self.large = torch.ones(_LARGE) if is_cold else None
        self.before, self.between, self.attention = _Norm(), _Norm(), _Attention()
        self.gate, self.up, self.down = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))
        self.turns = torch.ones(_PLACES, _WIDTH // 2), torch.zeros(_PLACES, _WIDTH // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.large is not None:
            self.large.sum()
        x = x + self.attention(self.before(x), turns=self.turns)
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class _Block(nn.Sequential):
    """Some units, called as one."""


class _Seconds(NamedTuple):
    """Seconds of an action of one block, of a step beside its actions, of a piece's update."""

    forward: float
    backward: float
    rest: float
    piece: float


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Seconds of an action as a constant and a multiple of its operations."""

    constant: float
    per_operation: float

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> _Line:
        """The line through two points (operations, seconds)."""
        per_operation = max(_LEAST_S, (many[1] - few[1]) / (many[0] - few[0]))
        return cls(constant=max(_LEAST_S, few[1] - per_operation * few[0]), per_operation=per_operation)


def measure_engine(hardware: Hardware, directory: str | Path | None = None) -> Mapping[WorkKind, Rate]:
    """Measures what the engine and Python take on this machine's processor; some seconds. See
    [Note: layers of no work].

    Args:
        hardware: a description, of links above all, so that `fit` measures nothing itself.
        directory: on the disk that homes would use; None: the temporary one.
    """
    forward: dict[Saved | None, _Line] = {}
    backward: dict[Saved | None, _Line] = {}
    rest: list[float] = []
    piece: list[float] = []
    spread = _LEAST_SPREAD
    for saved in (None, *_POLICIES):
        points: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for units in (_FEW, _MANY):
            seconds, operations, found = _measure(hardware, saved or Saved.KEEP, units, is_cold=saved is not None)
            points.append(((operations[0], seconds.forward), (operations[1], seconds.backward)))
            rest.append(seconds.rest)
            piece.append(seconds.piece)
            spread = max(spread, found)
        forward[saved] = _Line.through(points[0][0], points[1][0])
        backward[saved] = _Line.through(points[0][1], points[1][1])
    plain, keep, again, select = (forward[saved] for saved in (None, *_POLICIES))
    by_turns, operations, found = _measure(hardware, Saved.KEEP, _FEW, microbatches=2)
    spread = max(spread, found)
    # Differences of noisy figures: a mode's Python takes more than calling an operation twice.
    least_mode = 2 * plain.per_operation
    seconds_of = {
        WorkKind.OPERATIONS: plain.per_operation,
        WorkKind.NODES: backward[None].per_operation,
        WorkKind.WATCHED: max(again.per_operation - keep.per_operation, least_mode),
        WorkKind.SELECTED: max(select.per_operation - again.per_operation, least_mode),
        WorkKind.CALLS: (plain.constant + backward[None].constant) / 2,
        WorkKind.FRAMES: again.constant - keep.constant,
        WorkKind.SWITCHES: by_turns.forward - plain.constant - plain.per_operation * operations[0],
        WorkKind.STEPS: min(rest),
        WorkKind.PIECES: min(piece),
        WorkKind.PIECE_TRANSFERS: _transfer_s(hardware, directory, min(piece)),
    }
    return {kind: Rate(1 / max(s, _LEAST_S), round(spread, 3)) for kind, s in seconds_of.items()}


def _measure(
    hardware: Hardware, saved: Saved, units: int, *, microbatches: int = 1, is_cold: bool = False
) -> tuple[_Seconds, tuple[float, float], float]:
    """Seconds under a policy, operations of a block's forward and backward, and by which share two
    halves of the measurement differ.
    """
    model = nn.Sequential(*(_Block(*(_Unit(is_cold=is_cold) for _ in range(units))) for _ in range(_BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, _PLACES, _WIDTH)
    plan = Plan(microbatches=microbatches, calls=tuple(CallPlan(saved=saved) for _ in range(_BLOCKS)))
    timelines: list[Timeline] = []
    totals: list[float] = []
    with fit(model, optimizer, _loss, batch, plan=plan, hardware=hardware, enforce=False) as job:
        trace = next(iter(job.profile.traces.values()))
        middle = trace.calls[_BLOCKS // 2]
        operations = (
            dict(middle.forward_work)[WorkKind.OPERATIONS],
            dict(middle.backward_work)[WorkKind.NODES],
        )
        for _ in range(_STEPS):
            began = time.thread_time()
            job.step(batch)
            totals.append(time.thread_time() - began)
            measured = job._runner.measured  # noqa: SLF001, nothing public gives timelines
            assert measured is not None, "each step of a processor's job is measured"
            timelines.append(measured.timeline)
        job.close(restore=False)
    pieces = len(list(model.parameters()))
    # The first steps make states and warm caches.
    found = _usual(timelines[4:], totals[4:], pieces)
    halves = min(totals[4::2]), min(totals[5::2])
    return found, operations, min(1.0, max(halves) / min(halves) - 1)


def _transfer_s(hardware: Hardware, directory: str | Path | None, piece_s: float) -> float:
    """Seconds of the thread of updates for each tensor of a piece that comes from disk or goes
    there.
    """
    model = nn.Sequential(*(_Block(_Unit(is_cold=False)) for _ in range(_BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, _PLACES, _WIDTH)
    homes = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    plan = Plan(blocks={str(index): homes for index in range(_BLOCKS)})
    seconds: list[float] = []
    with fit(model, optimizer, _loss, batch, plan=plan, hardware=hardware, directory=directory, enforce=False) as job:
        works = [dict(update_work(plan, job.profile, index)) for index in range(len(job.profile.blocks))]
        for _ in range(_STEPS):
            job.step(batch)
            measured = job._runner.measured  # noqa: SLF001, as in `_measure`
            assert measured is not None, "each step of a processor's job is measured"
            seconds.append(measured.timeline.beside_s)
        job.close(restore=False)
    pieces, transfers = (sum(work.get(k, 0.0) for work in works) for k in (WorkKind.PIECES, WorkKind.PIECE_TRANSFERS))
    return (statistics.median(seconds[4:]) - pieces * piece_s) / transfers


def _usual(timelines: list[Timeline], totals: list[float], pieces: int) -> _Seconds:
    steps: list[_Seconds] = []
    for timeline, total in zip(timelines, totals, strict=True):
        kinds: dict[str, list[float]] = {}
        for moment in timeline.moments:
            assert moment.busy_s is not None, "backward runs in the thread that asks for it"
            kinds.setdefault(moment.action.split()[0], []).append(moment.busy_s)
        # The first call and the last do other things besides.
        forward, backward = (statistics.median(kinds[kind]) for kind in ("forward", "backward"))
        updates = sum(kinds["update"])
        rest = total - sum(kinds["forward"]) - sum(kinds["backward"]) - updates
        steps.append(_Seconds(forward, backward, rest, updates / pieces))
    # Of the faster half of the steps the middle, each figure by itself.
    return _Seconds(*(sorted(column)[len(column) // 4] for column in zip(*steps, strict=True)))


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()
