"""Calibration: a machine's rates refitted to a measured step, and where the two differ most.

In: a lowered `Step`, its predicted and its measured timeline. Out: factors by group of classes, a
`Hardware` with rates changed by them, the largest deviations.

[Note: what is fitted]
Each action that computes in the main thread gives an equation: its measured seconds are
the sum over groups of a factor times the predicted seconds of that group. Groups rather than
classes, since a step has too few kinds of actions to tell 20 classes apart. Least squares, drawn
towards 1 by as much as a group's share of the step is small; then all factors by one number, so
that the sum is the measured one. Updates in a thread of their own have its seconds on a processor,
all together.

[Note: what links took]
Where the main thread waits, its seconds do not say for how long a link worked. The disk's own
threads do (`store.channel`): each direction's seconds a byte, measured, by those that the clock
predicts for the same step. So what the other direction and computing cost is on both sides, and the
factor is that of the link alone. Links whose tier counts nothing, or whose step moved less than
`LEAST_BYTES`, are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.core.hardware import Hardware, Link, LinkTraffic, TierSpec
from memfit.core.rates import Rate, rates_of
from memfit.core.step import Step, UpdatePlace
from memfit.core.tiers import Tier
from memfit.core.timeline import Moment, Timeline, for_updates
from memfit.core.work_kinds import PRODUCT_KINDS, Work, WorkKind
from memfit.prediction.pace import work_seconds
from memfit.prediction.predict import predict

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
