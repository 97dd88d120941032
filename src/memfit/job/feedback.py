"""Feedback: what a job's own steps measure of the machine, and whether its plan is still the one to
have.

In: an assembly, steps that it has made. Out: the machine as it was measured, where that differs so
much from what the plan was priced on that another plan may be faster; seconds of plans that were
tried.

[Note: feedback]
Between two steps a job with `adapt=True` looks at what its transfers took (`homes.link_meter`, and
of files `store.channel`), beside what they are predicted to take in the same step, and,
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

from memfit.core.hardware import Hardware, LinkTraffic, TierSpec
from memfit.core.plan import Plan
from memfit.core.rates import in_dtype
from memfit.core.tiers import Tier
from memfit.job.assembly import Assembly
from memfit.job.comparing import ComparedSteps
from memfit.job.setup import Prepared
from memfit.prediction.calibration import GROUPS, LEAST_BYTES, calibrated, link_traffic, with_share
from memfit.prediction.predict import predict

MOST_CHANGES = 4
GAIN = 0.9
"""Share of its seconds that is at most predicted for a plan that takes another one's place."""
_APART = 1.1
_WARM_STEPS, _WINDOW = 1, 2
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
