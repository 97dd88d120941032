"""Prices of options: what a plan takes more than another one, by slot of the step, by tier and by
lane.

In: a question, a frame (a plan that says all but the options). Out: `OptionPrices`.

[Note: prices are probed]
An option's price is not derived from what it means; the plan that gives it to all units is lowered
and predicted, and so is the one that gives it to none. So pieces of updates, staging, gradients'
lifetimes, copies of selective recompute and replay peaks are in it as a schedule has them. Shares
of prices add up well: which bytes are there at a slot depends on each unit's own options, and lanes
work for the sum. What does not add up (the highest of several transients) is found by judging the
mixture, and taken off the room of its slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from memfit.core.numerics import regroups_sums
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.step import Step
from memfit.core.tiers import Tier
from memfit.planner.search.candidates import Candidate
from memfit.planner.search.mixed_units import Mixture, Units, mixed_plan
from memfit.planner.search.pricing import BuiltCandidate, PlanQuestion, PricedCandidate
from memfit.step.bytes import AT_THE_END, Slot

ValueT = TypeVar("ValueT", CallPlan, BlockPlan)


class Row(NamedTuple):
    """Something that prices are said of, by its kind: bytes at a slot ("slot"), bytes in a tier
    ("tier"), seconds of a lane ("lane"), or seconds that only bounds look at ("bound").
    """

    kind: str
    slot: Slot = AT_THE_END
    tier: Tier = Tier.DEVICE
    lane: str = ""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A mixture whose schedule was built, lowered and predicted.

    Attributes:
        mixture: the decisions.
        built: the plan with its prediction.
    """

    mixture: Mixture
    built: BuiltCandidate

    @property
    def slots(self) -> Mapping[Slot, int]:
        """Device peaks by slot."""
        return self.built.cost.slots

    def amount(self, row: Row) -> float:
        """Returns what the plan takes of one row of prices."""
        if row.kind == "slot":
            return self.slots.get(row.slot, 0)
        if row.kind == "tier":
            return self.built.cost.peaks.get(row.tier, 0)
        cost = self.built.cost
        if row.kind == "bound":
            return cost.behind_s.get(row.lane, 0.0)
        return cost.busy_s.get(row.lane, cost.late_s.get(row.lane, 0.0))

    @property
    def stall_s(self) -> float:
        """Seconds beyond what the busiest lane, or one that begins late, takes at least."""
        cost = self.built.cost
        return cost.seconds - max((*cost.busy_s.values(), *cost.late_s.values()), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Option(Generic[ValueT]):
    """One option of a group, for all its units, and what it takes more than the reference.

    Attributes:
        value: a call's policy, or homes.
        more: by row.
        stall_s: seconds that it makes the main thread wait more.
    """

    value: ValueT
    more: Mapping[Row, float]
    stall_s: float


@dataclass(frozen=True, kw_only=True)
class OptionPrices:
    """Prices of all options around a reference in which everything is kept on the device.

    Attributes:
        reference: judged.
        policies, homes: options of units; the first of each is the reference's.
        ends: options of each group of ends, likewise.
    """

    reference: Judged
    policies: tuple[Option[CallPlan], ...]
    homes: tuple[Option[BlockPlan], ...]
    ends: tuple[tuple[Option[BlockPlan], ...], ...]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Everything that an option takes something of."""
        return tuple(dict.fromkeys(row for more, _ in self.options for row in more))

    @cached_property
    def options(self) -> tuple[tuple[Mapping[Row, float], float], ...]:
        """Amounts that each option takes more, and its stalls: policies, then homes, then ends."""
        found = [(o.more, o.stall_s) for o in self.policies]
        return (*found, *((o.more, o.stall_s) for group in (self.homes, *self.ends) for o in group))

    @cached_property
    def by_row(self) -> Any:
        """Amounts that options take more: an array of (rows, options)."""
        import numpy as np

        found = [[more.get(row, 0.0) for more, _ in self.options] for row in self.rows]
        return np.array(found, dtype=float).reshape(len(self.rows), len(self.options))

    @cached_property
    def known(self) -> tuple[float, ...]:
        """Amounts that the reference takes of each row."""
        return tuple(self.reference.amount(row) for row in self.rows)


class Judge:
    """Judges mixtures of one frame, each once, and counts.

    Attributes:
        judged: by mixture.
        indices: given.

    Args:
        question: that is answered.
        frame: says all but policies and homes.
        units: of the model.
        indices: numbers plans behind the listed ones.
    """

    def __init__(self, question: PlanQuestion, frame: Plan, units: Units, *, indices: Iterator[int]) -> None:
        self.question = question
        self.frame = frame
        self.units = units
        self.judged: dict[Mixture, Judged] = {}
        self.indices = indices

    def within(self, question: PlanQuestion) -> None:
        """Asks with another limit from now on: whether plans fit is told anew."""
        self.question = question
        for mixture, known in self.judged.items():
            self.judged[mixture] = replace(known, built=question.fitted(known.built.priced, known.built.cost))

    def __call__(self, mixture: Mixture) -> Judged:
        """Builds, lowers and predicts a mixture."""
        found = self.judged.get(mixture)
        return self.with_step(mixture)[0] if found is None else found

    def with_step(self, mixture: Mixture) -> tuple[Judged, Step]:
        """Judges a mixture, unless that was done, and returns its lowered step as well, which is
        not kept.
        """
        question = self.question
        plan = mixed_plan(self.frame, question.profile, self.units, mixture)
        step = question.lower(plan)
        found = self.judged.get(mixture)
        if found is None:
            name = describe_mixture(plan, self.units, mixture)
            # Bounds are for candidates that may never be built.
            priced = PricedCandidate(
                index=next(self.indices),
                candidate=Candidate(name=name, plan=plan),
                seconds_bound=0.0,
                bytes_bound=0,
                regroups=regroups_sums(plan, question.profile),
            )
            found = Judged(mixture=mixture, built=question.judge(priced, step))
            self.judged[mixture] = found
        return found, step

    def prices(self, policies: Sequence[CallPlan], homes: Sequence[BlockPlan]) -> OptionPrices:
        """Probes each option by itself: of all units, and of each group of ends. See [Note: prices
        are probed].
        """
        none = uniform(self.units, CallPlan(), BlockPlan())
        reference = self(none)

        def option(value: ValueT, mixture: Mixture) -> Option[ValueT]:
            judged = self(mixture)
            more: dict[Row, float] = {}
            for row in sorted(_rows_of(judged) | _rows_of(reference)):
                difference = judged.amount(row) - reference.amount(row)
                if difference:
                    more[row] = difference
            return Option(value=value, more=more, stall_s=judged.stall_s - reference.stall_s)

        return OptionPrices(
            reference=reference,
            policies=tuple(option(p, uniform(self.units, p, BlockPlan())) for p in policies),
            homes=tuple(option(h, uniform(self.units, CallPlan(), h)) for h in homes),
            ends=tuple(
                tuple(option(h, replace(none, ends=(*none.ends[:group], h, *none.ends[group + 1 :]))) for h in homes)
                for group in range(len(none.ends))
            ),
        )


def uniform(units: Units, policy: CallPlan, homes: BlockPlan) -> Mixture:
    """Returns the mixture that gives one option to all units, with the ends on the device."""
    count = len(units.calls)
    return Mixture(policies=(policy,) * count, homes=(homes,) * count, ends=(BlockPlan(),) * len(units.ends))


def _rows_of(judged: Judged) -> set[Row]:
    rows = {Row("slot", slot=slot) for slot in judged.slots}
    rows |= {Row("tier", tier=tier) for tier in judged.built.cost.peaks if not tier.traits.is_device}
    rows |= {Row("bound", lane=lane) for lane in judged.built.cost.behind_s}
    return rows | {Row("lane", lane=lane) for lane in (*judged.built.cost.busy_s, *judged.built.cost.late_s)}


# --- words ----------------------------------------------------------------------------------------


def describe_mixture(plan: Plan, units: Units, mixture: Mixture) -> str:
    """Says a mixed plan in words: how many units have which option."""
    count = "1 microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches"
    turns = " layer by layer" if plan.microbatches > 1 and plan.order == "layer-major" else ""
    buffers = {0: ", one buffer", 1: ""}.get(plan.prefetch, f", {plan.prefetch + 1} buffers")
    backlog = "" if plan.backlog <= 1 else f", updates {plan.backlog} actions behind"
    masters = ", masters split" if plan.splits_masters else ", no masters" if plan.drops_masters else ""
    policies = _counted([describe_policy(p) for p in mixture.policies])
    homes = _counted([describe_homes(h) for h in mixture.homes]) if any(units.blocks) else ""
    ends = "".join(
        f"; {', '.join(names)}: {describe_homes(place)}" for names, place in zip(units.ends, mixture.ends, strict=True)
    )
    return f"{count}{turns}; {policies}{f'; {homes}' if homes else ''}{ends}{buffers}{backlog}{masters}"


def describe_policy(policy: CallPlan) -> str:
    """Says a call's policy in words."""
    if policy.saved.policy.offloads:
        return f"offload to {policy.saved_home}"
    away = "" if policy.boundary_home is Tier.DEVICE else f", arguments on {policy.boundary_home}"
    return f"{policy.saved}{away}"


def describe_homes(homes: BlockPlan) -> str:
    """Says a block's homes in words."""
    places = {"weights": homes.weight_home, "gradients": homes.gradient_home, "states": homes.state_home}
    away = {what: tier for what, tier in places.items() if tier is not Tier.DEVICE}
    if not away:
        return "all on the device"
    tiers = list(dict.fromkeys(away.values()))
    parts = [f"{' and '.join(what for what in away if away[what] is tier)} on {tier}" for tier in tiers]
    return ", ".join(parts) + (", updated there" if homes.update_on is Tier.HOST else "")


def _counted(words: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(words))
    if len(distinct) == 1:
        return distinct[0]
    return " + ".join(f"{words.count(word)} x {word}" for word in distinct)
