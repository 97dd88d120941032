"""Prediction of a step's timeline, or of its sums alone.

In: `Step`, `Hardware`. Out: `Timeline` (`predict`), or its sums (`appraise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from memfit.core.hardware import Hardware, Link, LinkTraffic, Rate, TierSpec, rates_of
from memfit.core.step import COMPUTE_LANE, HOST_LANE, UPDATE_LANE, Moment, Step, Timeline, UpdatePlace, for_updates
from memfit.core.tiers import Tier
from memfit.core.work_kinds import PRODUCT_KINDS, Work, WorkKind
from memfit.step.bytes import Slot, follow_tier, peaks, peaks_and_slots
from memfit.step.clock import LAST_BACKWARD, Clock, Pace, work_seconds


@dataclass(frozen=True, kw_only=True)
class Appraisal:
    """Sums of a `Timeline`.

    Attributes:
        peaks: predicted, by tier.
        seconds: of a step.
        slots: predicted peaks of the device by slot (`step.bytes.peaks_and_slots`).
        busy_s: for how long each lane works, by its name as in `Interval`; compute without what
            links slow it by.
        late_s: how long a step takes at least because of what each lane does behind a turn from
            forward to backward, the first or the last one: what the device computes before the
            turn, and that. Operations are given out in order: none behind the turn begins before.
            And because the device and each link serve updates as well.
        behind_s: the same of what each lane does behind the last backward, which bounds say and
            searches do not look at: with it as a lane they found slower plans.
    """

    peaks: Mapping[Tier, int]
    seconds: float
    slots: Mapping[Slot, int] = field(default_factory=dict[Slot, int])
    busy_s: Mapping[str, float] = field(default_factory=dict[str, float])
    late_s: Mapping[str, float] = field(default_factory=dict[str, float])
    behind_s: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def peak_bytes(self) -> int:
        """The device's."""
        return self.peaks[Tier.DEVICE]


def predict(step: Step, hardware: Hardware | None = None) -> Timeline:
    """Predicts bytes and seconds of a step.

    Args:
        step: made by `step.lower`.
        hardware: None: bytes only, all seconds are 0.

    Returns:
        One moment an action; peaks by tier; bytes moved by category; stalls by cause; intervals of
        the lanes.

    Raises:
        PlanError: the step uses a tier that the hardware does not have.
    """
    clock = Clock(hardware, records=True)
    times = clock.run(step)
    moments = tuple(
        Moment(
            action=str(operation.action),
            peak_bytes=b.peak_bytes,
            after_bytes=b.after_bytes,
            start_s=t.start_s,
            end_s=t.end_s,
            by_category=b.by_category,
        )
        for operation, b, t in zip(step, follow_tier(step), times, strict=True)
    )
    return Timeline(
        moments=moments,
        peaks=peaks(step),
        bytes_read=dict(clock.bytes_read),
        bytes_received=dict(clock.bytes_received),
        bytes_written=dict(clock.bytes_written),
        stalls_s=dict(clock.stalls_s),
        commit_s=clock.commit_seconds(step),
        intervals=tuple(clock.intervals),
        interval_s=None if hardware is None else _interval(step, hardware),
    )


def _interval(step: Step, hardware: Hardware) -> tuple[float, float]:
    """See [Note: the interval] in `step.clock`."""
    fast, expected, slow = (_seconds(step, hardware, sign) for sign in (1, 0, -1))
    if not expected:
        return 0.0, 0.0
    below = math.hypot(expected / fast - 1, hardware.step_spread)
    above = math.hypot(slow / expected - 1, hardware.step_spread)
    return expected / (1 + below), expected * (1 + above)


def _seconds(step: Step, hardware: Hardware, sign: int) -> float:
    clock = Clock(Pace(hardware, sign=sign))
    times = clock.run(step)
    return max((t.end_s for t in times), default=0.0) + clock.commit_seconds(step)


def appraise(step: Step, hardware: Hardware | Pace) -> Appraisal:
    """Predicts the sums only, for searches that look at many schedules.

    Args:
        step: made by `step.lower`.
        hardware: the machine, or its speeds where many steps are predicted for it.
    """
    pace = Pace(hardware) if isinstance(hardware, Hardware) else hardware
    clock = Clock(pace)
    times, instants = clock.run_with_turns(step)
    late = _late(clock.busy_s, instants, pace.hardware)
    by_tier, slots = peaks_and_slots(step)
    return Appraisal(
        peaks=by_tier,
        seconds=max((t.end_s for t in times), default=0.0) + clock.commit_seconds(step),
        slots=slots,
        busy_s=clock.busy_s,
        late_s={name: seconds for name, seconds in late.items() if not name.endswith(LAST_BACKWARD)},
        behind_s={name: seconds for name, seconds in late.items() if name.endswith(LAST_BACKWARD)},
    )


def _late(
    busy_s: Mapping[str, float], instants: Mapping[str, Mapping[str, float]], hardware: Hardware
) -> dict[str, float]:
    """Seconds of what is behind each instant, and of what the device and links do in all."""
    shared = {"compute": (COMPUTE_LANE, UPDATE_LANE)} | _with_updates(hardware)
    late = {f"{name} with updates": sum(busy_s.get(lane, 0.0) for lane in lanes) for name, lanes in shared.items()}
    behind = {UPDATE_LANE: (UPDATE_LANE,), HOST_LANE: (HOST_LANE,)} | _with_updates(hardware)
    for which, instant in instants.items():
        for name, lanes in behind.items():
            left_s = sum(busy_s.get(lane, 0.0) - instant.get(lane, 0.0) for lane in lanes)
            late[f"{name}, after the {which}"] = instant.get(COMPUTE_LANE, 0.0) + left_s
    return late


def _with_updates(hardware: Hardware) -> dict[str, tuple[str, str]]:
    """Both lanes of each direction of each link, by its name."""
    ways = [f"{tier} {way}" for tier in hardware.away for way in ("read", "write")]
    return {way: (way, for_updates(way)) for way in ways}


# Calibration: a machine's rates refitted to a measured step, and where the two differ most.
#
# In: a lowered `Step`, its predicted and its measured timeline. Out: factors by group of classes, a
# `Hardware` with rates changed by them, the largest deviations.
#
# [Note: what is fitted]
# Each action that computes in the main thread gives an equation: its measured seconds are the sum
# over groups of a factor times the predicted seconds of that group. Groups rather than classes,
# since a step has too few kinds of actions to tell 20 classes apart. Least squares, drawn towards 1
# by as much as a group's share of the step is small; then all factors by one number, so that the
# sum is the measured one. Updates in a thread of their own have its seconds on a processor, all
# together.
#
# [Note: what links took]
# Where the main thread waits, its seconds do not say for how long a link worked. The disk's own
# threads do (`store.io`): each direction's seconds a byte, measured, by those that the clock
# predicts for the same step. So what the other direction and computing cost is on both sides, and
# the factor is that of the link alone. Links whose tier counts nothing, or whose step moved less
# than `LEAST_BYTES`, are left alone.

SMALLEST_FACTOR, LARGEST_FACTOR = 0.25, 4.0
LARGEST_LINK_FACTOR = 20.0
"""The largest of a link, either way: a disk may be another one tomorrow, or one that others use."""
LEAST_BYTES = 4 << 20
"""A direction that moved less in a step says nothing of its speed."""
_PULL = 0.001
_UPDATES = frozenset(
    {WorkKind.PIECES, WorkKind.PIECE_TRANSFERS, WorkKind.UPDATED, WorkKind.ENCODED, WorkKind.SPLIT, WorkKind.ROUNDED}
)
_OVERHEAD = frozenset({
    WorkKind.OPERATIONS, WorkKind.PYTHON, WorkKind.NODES, WorkKind.WATCHED, WorkKind.SELECTED, WorkKind.CALLS,
    WorkKind.FRAMES, WorkKind.SWITCHES, WorkKind.VISITS, WorkKind.VISITED,
})  # fmt: skip
GROUPS: Mapping[str, frozenset[WorkKind]] = {
    "products": PRODUCT_KINDS,
    "memory and functions": frozenset(WorkKind) - PRODUCT_KINDS - _UPDATES - _OVERHEAD - {WorkKind.STEPS},
    "overhead": _OVERHEAD,
    "updates": _UPDATES,
}
"""Classes that share a factor. What a step takes beside its actions is in none.
"""
LANES: Mapping[str, tuple[Tier, str]] = {f"{Tier.DISK} {way}": (Tier.DISK, way) for way in ("read", "write")}
"""Directions of links that have factors too, by name, in the same mappings as groups."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """An action whose measured seconds differ from the predicted ones.

    Attributes:
        action: its text; equal actions of other layers and microbatches are in the same one.
        predicted_s, measured_s: sums over `count` actions.
        count: of them.
    """

    action: str
    predicted_s: float
    measured_s: float
    count: int


def fit_factors(step: Step, measured: Timeline, hardware: Hardware) -> Mapping[str, float]:
    """Returns the factor by which each group's seconds were measured, 1 where nothing tells, and
    those of links of which something was measured.

    Args:
        step: that was measured.
        measured: action by action; seconds of the processor, or of the clock on a quiet machine.
        hardware: with the rates to correct.

    See [Note: what is fitted] and [Note: what links took].
    """
    return {**_fit_groups(step, measured, hardware), **fit_links(step, measured, hardware)}


def fit_links(step: Step, measured: Timeline, hardware: Hardware) -> Mapping[str, float]:
    """Returns the factors of links (`LANES`) that the step tells. See [Note: what links took]."""
    if not measured.traffic:
        return {}
    foretold = link_traffic(predict(step, hardware))
    found: dict[str, float] = {}
    for lane, took in measured.traffic.items():
        thought = foretold.get(lane)
        if lane in LANES and thought is not None and min(took.nbytes, thought.nbytes) >= LEAST_BYTES:
            factor = (took.seconds / took.nbytes) / (thought.seconds / thought.nbytes)
            found[lane] = min(max(factor, 1 / LARGEST_LINK_FACTOR), LARGEST_LINK_FACTOR)
    return found


def link_traffic(predicted: Timeline) -> Mapping[str, LinkTraffic]:
    """Returns the bytes and seconds of each lane of a link in a predicted step, what updates move
    included.
    """
    found: dict[str, LinkTraffic] = {}
    for one in predicted.intervals:
        if one.kind == "transfer":
            lane = one.lane.removesuffix(for_updates(""))
            found[lane] = found.get(lane, LinkTraffic()).plus(one.nbytes, one.end_s - one.start_s)
    return found


def _fit_groups(step: Step, measured: Timeline, hardware: Hardware) -> Mapping[str, float]:
    rows: list[list[float]] = []
    seconds: list[float] = []
    groups = list(GROUPS)
    for operation, found in zip(step, measured.moments, strict=True):
        # What another thread does is not in the main thread's seconds.
        if not operation.work or operation.update_place not in (None, UpdatePlace.AT_ONCE):
            continue
        rows.append([work_seconds(_of_group(operation.work, GROUPS[name]), hardware) for name in groups])
        seconds.append(found.end_s - found.start_s)
    total = sum(map(sum, rows))
    if not total or not sum(seconds):
        return _with_beside(dict.fromkeys(groups, 1.0), step, measured, hardware)
    factors = [min(max(f, SMALLEST_FACTOR), LARGEST_FACTOR) for f in _ridge(rows, seconds, total)]
    again = sum(seconds) / sum(f * x for row in rows for f, x in zip(factors, row, strict=True))
    in_step = [any(row[g] for row in rows) for g in range(len(groups))]
    found = {name: f * again if known else 1.0 for name, f, known in zip(groups, factors, in_step, strict=True)}
    return _with_beside(found, step, measured, hardware)


def _with_beside(factors: dict[str, float], step: Step, measured: Timeline, hardware: Hardware) -> dict[str, float]:
    """The factors, with that of updates in a thread of their own: then all of a step are there."""
    foretold = sum(work_seconds(o.work, hardware) for o in step if o.update_place and o.update_place.is_beside)
    if not measured.beside_s or not foretold:
        return factors
    return {**factors, "updates": min(max(measured.beside_s / foretold, SMALLEST_FACTOR), LARGEST_FACTOR)}


def group_seconds(step: Step, hardware: Hardware) -> Mapping[str, float]:
    """Returns the predicted seconds of each group in what this processor's threads compute, and of
    each lane of `LANES`: what its factor rests on.
    """
    works = [o.work for o in step if o.update_place is not UpdatePlace.HOST]
    groups = {
        name: sum(work_seconds(_of_group(work, kinds), hardware) for work in works) for name, kinds in GROUPS.items()
    }
    foretold = link_traffic(predict(step, hardware))
    return groups | {lane: foretold[lane].seconds for lane in LANES if lane in foretold}


def calibrated(hardware: Hardware, factors: Mapping[str, float]) -> Hardware:
    """Returns a machine whose classes and links take `factors` times as long, by group and by
    lane.
    """
    by_kind = {kind: factors.get(name, 1.0) for name, kinds in GROUPS.items() for kind in kinds}
    rates = {kind: Rate(rate.per_s / by_kind.get(kind, 1.0), rate.spread) for kind, rate in rates_of(hardware).items()}
    tiers = dict(hardware.tiers)
    for lane, (tier, way) in LANES.items():
        spec = tiers.get(tier)
        if lane in factors and spec is not None and spec.link is not None:
            tiers[tier] = TierSpec(nbytes=spec.nbytes, link=with_share(spec.link, way, 1 / factors[lane]))
    return replace(hardware, rates=rates, tiers=tiers)


def with_share(link: Link, direction: str, share: float) -> Link:
    """Returns a link at a share of its speed one way; what both ways at once and computing cost
    stays in proportion.
    """
    names = [f"{prefix}{direction}_bytes_per_s" for prefix in ("", "both_", "busy_")]
    scaled = {name: None if (rate := getattr(link, name)) is None else rate * share for name in names}
    return replace(link, **scaled)


def largest_deviations(predicted: Timeline, measured: Timeline, *, most: int = 8) -> tuple[Deviation, ...]:
    """Returns the kinds of actions ("forward", "backward", "fetch") and calls whose seconds differ
    most, largest difference first.
    """
    sums: dict[str, list[float]] = {}
    for foretold, found in zip(predicted.moments, measured.moments, strict=True):
        entry = sums.setdefault(_kind(foretold), [0.0, 0.0, 0.0])
        entry[0] += foretold.end_s - foretold.start_s
        entry[1] += found.end_s - found.start_s
        entry[2] += 1
    found_all = [
        Deviation(action=action, predicted_s=p, measured_s=m, count=int(count))
        for action, (p, m, count) in sums.items()
    ]
    return tuple(sorted(found_all, key=lambda d: -abs(d.measured_s - d.predicted_s))[:most])


def _kind(moment: Moment) -> str:
    """The action without its microbatch: "forward C3 m1" is "forward C3"."""
    return " ".join(word for word in moment.action.split() if not (word[0] == "m" and word[1:].isdigit()))


def _of_group(work: Work, kinds: frozenset[WorkKind]) -> Work:
    return tuple((kind, amount) for kind, amount in work if kind in kinds)


def _ridge(rows: Sequence[Sequence[float]], wanted: Sequence[float], total: float) -> list[float]:
    """Least squares with a pull towards 1: solves (X'X + p I) f = X'y + p."""
    count = len(rows[0])
    pull = _PULL * total * total / max(1, len(rows))
    matrix = [
        [sum(row[i] * row[j] for row in rows) + (pull if i == j else 0.0) for j in range(count)] for i in range(count)
    ]
    right = [sum(row[i] * y for row, y in zip(rows, wanted, strict=True)) + pull for i in range(count)]
    return _solved(matrix, right)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is symmetric and positive definite, so no rows change
    places.
    """
    count = len(right)
    for i in range(count):
        for j in range(i + 1, count):
            share = matrix[j][i] / matrix[i][i]
            for k in range(i, count):
                matrix[j][k] -= share * matrix[i][k]
            right[j] -= share * right[i]
    found = [0.0] * count
    for i in reversed(range(count)):
        found[i] = (right[i] - sum(matrix[i][k] * found[k] for k in range(i + 1, count))) / matrix[i][i]
    return found
