"""Feedback: what a job's own steps measure of the machine, and whether its plan is still the one to
have.

In: an assembly, steps that it has made. Out: the machine as it was measured, where that differs so
much from what the plan was priced on that another plan may be faster; seconds of plans that were
tried.

[Note: feedback]
Between two steps a job with `adapt=True` looks at what its transfers took (`homes.link_meter`) and,
where the processor is the device, at the factors by which classes of work were off
(`job.comparing`). The plan's own schedule is priced twice: with the rates that it was chosen with,
and with those. Where they are a tenth apart, plans are looked for again with the measured rates,
among those that give the same bits. One that is predicted to be a tenth faster takes the place of
the plan between two steps; the run goes on from the commit of the step before, as after a breach
([Note: replanning] in `job.breaches`). The seconds of both are measured: where the new one is the
slower one, the plan before comes back, and stays until rates change again. Rates of which nothing
is measured (a link that the plan does not use) stay what they were. Nothing is concluded from the
first steps of an assembly, and no more than `MOST_CHANGES` plans are taken in a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memfit.core.hardware import Hardware, Link, LinkTraffic, TierSpec
from memfit.core.plan import Plan
from memfit.core.rates import in_dtype
from memfit.core.tiers import Tier
from memfit.job.assembly import Assembly
from memfit.job.comparing import ComparedSteps
from memfit.job.setup import Prepared
from memfit.prediction.calibration import calibrated
from memfit.prediction.predict import predict

MOST_CHANGES = 4
GAIN = 0.9
"""Share of its seconds that is at most predicted for a plan that takes another one's place."""
_APART = 1.1
_WARM_STEPS, _WINDOW = 1, 2
# Steps behind which the processor's own rates are compared, once.
_COMPARED_AFTER = 8
_RATE_APART = 1.2
_LEAST_BYTES = 4 << 20
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
        self.changes = 0

    def note(self, assembly: Assembly, prepared: Prepared, seconds: float) -> None:
        """Notes a step. Those of other shapes than the first ones begin anew."""
        factories = assembly.house.factories.items()
        traffic = {(tier, way): one for tier, factory in factories for way, one in factory.take_traffic().items()}
        if prepared is not self._prepared:
            self._prepared, self._steps = prepared, 0
        self._steps += 1
        self._all_steps += 1
        if self._steps <= _WARM_STEPS:
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
        found = with_rates(priced, self._traffic)
        if self._all_steps == _COMPARED_AFTER and not self.changes:
            compared = self._compared.result()
            if compared is not None and compared.is_quiet:
                found = calibrated(found, compared.factors)
        if not _differ(priced, found):
            return None  # nearly always: to price a step takes milliseconds
        thought, now = (step_seconds(self._prepared, machine) for machine in (priced, found))
        if max(thought, now) < _APART * min(thought, now):
            return None
        self._priced = found  # asked once, whatever comes of it
        return found

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


def with_rates(machine: Hardware, traffic: Traffic) -> Hardware:
    """Returns the machine with the rates of links that were measured; those of too few bytes
    stay.
    """
    tiers = dict(machine.tiers)
    for (tier, direction), one in traffic.items():
        spec = tiers.get(tier)
        if spec is None or spec.link is None or one.nbytes < _LEAST_BYTES or one.seconds <= 0:
            continue
        tiers[tier] = TierSpec(nbytes=spec.nbytes, link=_with_rate(spec.link, direction, one.nbytes / one.seconds))
    return replace(machine, tiers=tiers)


def _with_rate(link: Link, direction: str, per_s: float) -> Link:
    """The link at another rate one way; what both ways at once and computing cost stays in
    proportion.
    """
    is_read = direction == "read"
    share = per_s / (link.read_bytes_per_s if is_read else link.write_bytes_per_s)

    def scaled(rate: float | None) -> float | None:
        return None if rate is None else rate * share

    if is_read:
        return replace(
            link,
            read_bytes_per_s=per_s,
            both_read_bytes_per_s=scaled(link.both_read_bytes_per_s),
            busy_read_bytes_per_s=scaled(link.busy_read_bytes_per_s),
        )
    return replace(
        link,
        write_bytes_per_s=per_s,
        both_write_bytes_per_s=scaled(link.both_write_bytes_per_s),
        busy_write_bytes_per_s=scaled(link.busy_write_bytes_per_s),
    )
