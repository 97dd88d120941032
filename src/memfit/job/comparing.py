"""Comparison of a job's first steps with their prediction, action by action.

In: a prepared step, its measured timelines. Out: `StepComparison`: seconds of both, the actions
that are farthest apart, factors by group of classes; what a machine learns from it is kept
(`machine.described`).

[Note: what is compared]
What the main thread computes, in seconds that it was on a processor: those do not tell whether
others kept it waiting, which is told apart. The fastest of the first steps behind the second
counts, since other work can only slow one down: whole, since the least of each action adds up to
5 % less than any step takes. Updates beside backward are another thread's: the median of its
seconds in a step. Of each direction of the disk the step in the middle counts, by seconds a byte
([Note: what links took] in `step.predict`): a drive that buffers has steps that are much
too fast. Left out: actions that end in another thread than they began in. Stalls are compared by
cause, by the clock. Only steps of a processor say what is learnt: an accelerator's actions end
before their work does.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memfit import devices
from memfit.core.errors import MemfitWarning
from memfit.core.hardware import Hardware, LinkTraffic, TierSpec, in_dtype
from memfit.core.limits import format_seconds
from memfit.core.plan import Plan
from memfit.core.step import Moment, Step, Timeline, UpdatePlace
from memfit.core.tiers import Tier
from memfit.core.work_kinds import Work, WorkKind
from memfit.job.assembly import Assembly
from memfit.machine.described import (
    correction_path,
    corrections_are_on,
    identity_of,
    load_correction,
    load_measured,
    measurement_of,
    save_correction,
    saved_path,
)
from memfit.planner.setup import Prepared, Setup
from memfit.step.clock import work_seconds
from memfit.step.predict import (
    GROUPS,
    LANES,
    LEAST_BYTES,
    Deviation,
    calibrated,
    fit_factors,
    group_seconds,
    largest_deviations,
    link_traffic,
    predict,
    with_share,
)

_WARM_STEPS = 2
_FEWEST, _MOST = 3, 8
_BUSY_MACHINE = 1.5
"""Seconds by the clock, in those on a processor, from which others use the machine."""


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """A step's prediction beside the fastest of several measured ones.

    Attributes:
        predicted_s, measured_s: of what the main thread computes.
        steps: that were measured.
        factors: measured by predicted seconds, by group of classes of work, and by direction of the
            disk ("disk read") where it moved enough.
        deviations: kinds of actions that are farthest apart, farthest first.
        predicted_stalls_s, measured_stalls_s: seconds of waiting by cause.
        is_quiet: the thread hardly waited for a processor; else nothing is learnt from it.
    """

    predicted_s: float
    measured_s: float
    steps: int
    factors: Mapping[str, float]
    deviations: tuple[Deviation, ...]
    predicted_stalls_s: Mapping[str, float]
    measured_stalls_s: Mapping[str, float]
    is_quiet: bool

    @property
    def ratio(self) -> float:
        """Measured by predicted seconds of what the main thread computes."""
        return self.measured_s / self.predicted_s if self.predicted_s else 1.0

    def sentence(self) -> str:
        """Says it in a line, with the farthest action."""
        said = (
            f"computing took {format_seconds(self.measured_s)} where {format_seconds(self.predicted_s)} were predicted"
        )
        if self.deviations:
            far = self.deviations[0]
            said += f"; farthest apart: {far.action} ({far.count} a step), {format_seconds(far.measured_s)} for {format_seconds(far.predicted_s)}"
        return said if self.is_quiet else f"{said}; others used the processors meanwhile"


class ComparedSteps:
    """Measured steps of one job. See [Note: what is compared].

    Args:
        setup: of the job, with the machine's description.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._prepared: Prepared | None = None
        self._fastest: list[Moment] = []
        self._fastest_s = math.inf
        self._stalls_s: dict[str, float] = {}
        self._beside_s: list[float] = []
        self._traffic: dict[str, list[LinkTraffic]] = {}
        self._measured = 0
        self._clock_s = self._busy_s = 0.0
        self._is_kept = False

    def note(self, prepared: Prepared, timeline: Timeline, steps_here: int) -> None:
        """Notes a measured step. The first shapes of a batch count, and no more than some steps.

        Args:
            prepared: that it ran.
            timeline: as measured.
            steps_here: steps that the job has made, this one included.
        """
        if steps_here <= _WARM_STEPS or self._measured >= _MOST:
            return
        if self._prepared is None:
            self._prepared = prepared
        actions = [str(operation.action) for operation in self._prepared.step]
        # Other shapes, or a journal's other order.
        if prepared is not self._prepared or actions != [moment.action for moment in timeline.moments]:
            return
        known = [moment for moment in timeline.moments if moment.busy_s is not None]
        self._clock_s += sum(moment.end_s - moment.start_s for moment in known) - sum(timeline.stalls_s.values())
        busy_s = sum(moment.busy_s or 0.0 for moment in known)
        self._busy_s += busy_s
        if busy_s < self._fastest_s:
            self._fastest, self._fastest_s = [*timeline.moments], busy_s
        for cause, seconds in timeline.stalls_s.items():
            self._stalls_s[cause] = min(seconds, self._stalls_s.get(cause, seconds))
        self._beside_s.append(timeline.beside_s)
        for lane, one in timeline.traffic.items():
            self._traffic.setdefault(lane, []).append(one)
        self._measured += 1
        if self._measured == _MOST:
            self.keep()

    def result(self) -> StepComparison | None:
        """Returns the comparison; None until some steps were measured."""
        if self._prepared is None or self._measured < _FEWEST:
            return None
        hardware = in_dtype(self._setup.hardware(), self._prepared.plan.compute_dtype)
        step, measured = self._prepared.step, self._timeline()
        predicted = predict(step, hardware)
        kept = _compared(step, self._fastest)
        seconds = [work_seconds(_of_actions(operation.work), hardware) for operation in step]
        return StepComparison(
            predicted_s=sum(seconds[index] for index in kept),
            measured_s=sum(_busy(self._fastest[index]) for index in kept),
            steps=self._measured,
            factors=fit_factors(step, measured, hardware),
            deviations=largest_deviations(
                replace(predicted, moments=_computing(step, kept, seconds)),
                replace(measured, moments=tuple(measured.moments[index] for index in kept)),
            ),
            predicted_stalls_s=dict(predicted.stalls_s),
            measured_stalls_s=dict(self._stalls_s),
            is_quiet=self._clock_s <= _BUSY_MACHINE * self._busy_s,
        )

    def keep(self) -> None:
        """Keeps what the machine's rates learn from it, once; see `machine.described`."""
        machine = self._setup.machine
        if self._is_kept or self._measured < _FEWEST or not corrections_are_on():
            return
        if machine.is_emulated or devices.is_accelerator(machine.device):
            return
        self._is_kept = True
        # First, since to ask for the job's description may be to measure the disk.
        saved, path = load_measured(machine.device), correction_path(saved_path(identity_of(machine.device)))
        found = None if saved is None else self.result()
        if saved is None or found is None or not found.is_quiet:
            return
        hardware = self._setup.hardware()
        if measurement_of(saved) != measurement_of(hardware):
            return  # of another description than the saved one
        before = load_correction(saved, path)
        applied = before.applied(saved)
        if applied.rates != hardware.rates:
            return  # a description that was given, or another run has taught in between
        factors = found.factors
        # Of another disk than the one that was probed they say nothing of that one.
        if applied.link(Tier.DISK) != hardware.link(Tier.DISK):
            factors = {name: factor for name, factor in factors.items() if name not in LANES}
        assert self._prepared is not None, "there is a result"
        weights = group_seconds(self._prepared.step, in_dtype(hardware, self._prepared.plan.compute_dtype))
        try:
            save_correction(before.followed_by(factors, weights, found.ratio), path)
        except OSError as error:
            warnings.warn(
                f"what this run taught about the machine's rates cannot be kept in {path}: {error.strerror}",
                MemfitWarning,
                stacklevel=2,
            )

    def _timeline(self) -> Timeline:
        """The fastest of the steps, in seconds on a processor."""
        at = 0.0
        moments: list[Moment] = []
        for moment in self._fastest:
            moments.append(replace(moment, start_s=at, end_s=at + _busy(moment)))
            at += _busy(moment)
        return Timeline(
            moments=tuple(moments),
            bytes_read={},
            bytes_written={},
            stalls_s=dict(self._stalls_s),
            # A step's last update may end in the next one.
            beside_s=statistics.median(self._beside_s),
            traffic=median_traffic(self._traffic),
        )


def median_traffic(found: Mapping[str, Sequence[LinkTraffic]]) -> dict[str, LinkTraffic]:
    """Returns by lane what the step in the middle took, by its seconds a byte."""
    moved = {lane: [one for one in every if one.nbytes] for lane, every in found.items()}
    return {
        lane: sorted(every, key=lambda one: one.seconds / one.nbytes)[len(every) // 2]
        for lane, every in moved.items()
        if every
    }


def _busy(moment: Moment) -> float:
    return moment.end_s - moment.start_s if moment.busy_s is None else moment.busy_s


def _compared(step: Step, measured: Sequence[Moment]) -> list[int]:
    """Indices of actions that compute in the main thread, and were measured there."""
    return [
        index
        for index, (operation, moment) in enumerate(zip(step, measured, strict=True))
        if operation.work and moment.busy_s is not None and operation.update_place in (None, UpdatePlace.AT_ONCE)
    ]


def _of_actions(work: Work) -> Work:
    """Without what a step takes beside its actions."""
    return tuple(amount for amount in work if amount[0] is not WorkKind.STEPS)


def _computing(step: Step, kept: Sequence[int], seconds: Sequence[float]) -> tuple[Moment, ...]:
    """Moments that take the predicted seconds of computing, without stalls."""
    operations = [*step]
    return tuple(
        Moment(
            action=str(operations[index].action),
            peak_bytes=0,
            after_bytes=0,
            end_s=seconds[index],
            by_category={},
        )
        for index in kept
    )


# Feedback: what a job's own steps measure of the machine, and whether its plan is still the one to
# have.
#
# In: an assembly, steps that it has made. Out: the machine as it was measured, where that differs
# so much from what the plan was priced on that another plan may be faster; seconds of plans that
# were tried.
#
# [Note: feedback]
# Between two steps a job with `adapt=True` looks at what its transfers took (`homes.memory`,
# and of files `store.io`), beside what they are predicted to take in the same step, and, where
# the processor is the device, at the factors by which classes of work were off (`job.comparing`).
# The plan's own schedule is priced twice: with the rates that it was chosen with, and with those.
# Where they are a tenth apart, plans are looked for again with the measured rates, among those that
# give the same bits. One that is predicted to be a tenth faster takes the place of the plan between
# two steps; the run goes on from the commit of the step before, as after a breach ([Note:
# replanning] in `job.breaches`). The seconds of both are measured: where the new one is the slower
# one, the plan before comes back, and stays until rates change again. Rates of which nothing is
# measured (a link that the plan does not use) stay what they were. Nothing is concluded from the
# first steps of an assembly, and no more than `MOST_CHANGES` plans are taken in a job.

MOST_CHANGES = 4
GAIN = 0.9
"""Share of its seconds that is at most predicted for a plan that takes another one's place."""
_APART = 1.1
_UNTIMED_STEPS, _WINDOW = 1, 2
# Steps behind which the processor's own rates are compared, once.
_COMPARED_AFTER = 8
_RATE_APART = 1.2
_SLOWER = 1.03

Traffic = Mapping[tuple[Tier, str], LinkTraffic]


class Feedback:
    """Measurements of a job's steps under its present plan. See [Note: feedback].

    Args:
        compared: factors of classes of work, which know when they say something.
    """

    def __init__(self, compared: ComparedSteps) -> None:
        self._compared = compared
        self._priced: Hardware | None = None
        self._traffic: dict[tuple[Tier, str], LinkTraffic] = {}
        self._seconds: list[float] = []
        self._steps = self._all_steps = 0
        self._prepared: Prepared | None = None
        self._before: tuple[Plan, float] | None = None
        self._foretold: tuple[Prepared, Hardware, Traffic] | None = None
        self.changes = 0

    def note(self, assembly: Assembly, prepared: Prepared, seconds: float) -> None:
        """Notes a step. Those of other shapes than the first ones begin anew."""
        factories = assembly.house.factories.items()
        traffic = {(tier, way): one for tier, factory in factories for way, one in factory.take_traffic().items()}
        if prepared is not self._prepared:
            self._prepared, self._steps = prepared, 0
        self._steps += 1
        self._all_steps += 1
        if self._steps <= _UNTIMED_STEPS:
            return
        if len(self._seconds) >= _WINDOW:
            self._seconds, self._traffic = [], {}
        self._seconds.append(seconds)
        for key, one in traffic.items():
            self._traffic[key] = self._traffic.get(key, LinkTraffic()).plus(one.nbytes, one.seconds)

    def measured(self, assembly: Assembly) -> Hardware | None:
        """Returns the machine as it was measured, where the plan is to be priced again; None while
        it is what the plan was priced on, or too little is known.
        """
        if len(self._seconds) < _WINDOW or self._prepared is None or self.changes >= MOST_CHANGES:
            return None
        priced = self._priced = self._priced or assembly.setup.hardware()
        found = with_rates(priced, self._traffic, self._step_traffic(self._prepared, priced))
        if self._all_steps == _COMPARED_AFTER and not self.changes:
            compared = self._compared.result()
            if compared is not None and compared.is_quiet:
                # Of links the window tells more than the job's first steps.
                found = calibrated(found, {name: compared.factors[name] for name in GROUPS})
        if not _differ(priced, found):
            return None  # nearly always: to price a step takes milliseconds
        thought, now = (step_seconds(self._prepared, machine) for machine in (priced, found))
        if max(thought, now) < _APART * min(thought, now):
            return None
        self._priced = found  # asked once, whatever comes of it
        return found

    def _step_traffic(self, prepared: Prepared, priced: Hardware) -> Traffic:
        """Predicted bytes and seconds of links; found once for each plan and price of it."""
        if not self._traffic:
            return {}
        known = self._foretold
        if known is None or known[0] is not prepared or known[1] is not priced:
            known = self._foretold = (prepared, priced, step_traffic(prepared, priced))
        return known[2]

    def slower_than_before(self) -> Plan | None:
        """Returns the plan before, where steps under the present one were measured to take
        longer.
        """
        if self._before is None or len(self._seconds) < _WINDOW:
            return None
        plan, seconds = self._before
        self._before = None
        return plan if min(self._seconds) > _SLOWER * seconds else None

    def begin_plan(self, before: Plan | None) -> None:
        """Begins another plan.

        Args:
            before: the plan whose place it takes, which may come back; None: it came back.
        """
        self.changes += 1
        self._before = None if before is None or not self._seconds else (before, min(self._seconds))
        self._seconds, self._traffic, self._steps, self._prepared = [], {}, 0, None


def _differ(a: Hardware, b: Hardware) -> bool:
    """Tells whether rates are so far apart that a step may take another time."""
    rates: list[tuple[float, float]] = []
    for tier in a.away:
        one, other = a.link(tier), b.link(tier)
        rates.append((one.read_bytes_per_s, other.read_bytes_per_s))
        rates.append((one.write_bytes_per_s, other.write_bytes_per_s))
    return a.rates != b.rates or any(max(pair) > _RATE_APART * min(pair) for pair in rates)


def step_seconds(prepared: Prepared, machine: Hardware) -> float:
    """Returns the predicted seconds of a prepared step on a machine."""
    return predict(prepared.step, in_dtype(machine, prepared.plan.compute_dtype)).seconds


def step_traffic(prepared: Prepared, machine: Hardware) -> Traffic:
    """Returns what the links of a machine are predicted to take in a prepared step."""
    foretold = link_traffic(predict(prepared.step, in_dtype(machine, prepared.plan.compute_dtype)))
    return {
        (tier, way): foretold[f"{tier} {way}"]
        for tier in machine.away
        for way in ("read", "write")
        if f"{tier} {way}" in foretold
    }


def with_rates(machine: Hardware, traffic: Traffic, foretold: Traffic) -> Hardware:
    """Returns the machine with the rates of links that were measured; those of too few bytes
    stay.

    Args:
        machine: as it was thought to be.
        traffic: as measured.
        foretold: predicted on this machine for the same step; of what it does not say, at the
            link's own speed.
    """
    tiers = dict(machine.tiers)
    for (tier, direction), one in traffic.items():
        spec = tiers.get(tier)
        if spec is None or spec.link is None or one.nbytes < LEAST_BYTES or one.seconds <= 0:
            continue
        link, thought = spec.link, foretold.get((tier, direction))
        per_s = link.read_bytes_per_s if direction == "read" else link.write_bytes_per_s
        if thought is not None and thought.nbytes and thought.seconds > 0:
            per_s = thought.nbytes / thought.seconds
        tiers[tier] = TierSpec(nbytes=spec.nbytes, link=with_share(link, direction, one.nbytes / one.seconds / per_s))
    return replace(machine, tiers=tiers)
