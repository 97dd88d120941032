"""Notes on a plan's choices: what each saves and costs, by class of blocks.

In: a plan, its profile, a judge. Out: `ChoiceNote`s, in words and as numbers.

[Note: what a choice saves]
A choice is taken back alone, all others stay: what the plan then takes more on the device, and how
much sooner a step would be done, is what the choice saves and costs. So savings do not add up: two
choices that both are needed at the same moment each save all that is missing there, and a choice
whose bytes lie at another moment than the peak saves none of the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from memfit.core.errors import PlanError
from memfit.core.numbered_names import joined_names
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.tiers import Tier
from memfit.planning.slot_prices import describe_homes, describe_policy
from memfit.prediction.predict import Appraisal


@dataclass(frozen=True, kw_only=True)
class ChoiceNote:
    """One choice of a plan, for all blocks or calls of a class that share it.

    Attributes:
        members: names of blocks or calls, ranges where equal; "the step" for what is decided once.
        count: number of them.
        choice: what was chosen, in the plan's words.
        meaning: the same for somebody who does not know them.
        saves_bytes: device bytes that the plan's peak would be higher by without it; None: the plan
            is not legal without it.
        costs_s: seconds that a step would be shorter by without it, negative if longer; None
            likewise.
    """

    members: str
    count: int
    choice: str
    meaning: str
    saves_bytes: int | None
    costs_s: float | None


def note_choices(plan: Plan, profile: Profile, price: Callable[[Plan], Appraisal]) -> tuple[ChoiceNote, ...]:
    """Prices every choice of a plan that plain training does not make. See [Note: what a choice
    saves].

    Args:
        plan: the decisions.
        profile: of the model.
        price: predicts a plan; raises `PlanError` for one that is not legal.
    """
    own = price(plan)
    notes: list[ChoiceNote] = []
    for members, count, choice, meaning, without in _choices(plan, profile):
        try:
            other = price(without)
        except PlanError:
            other = None
        notes.append(
            ChoiceNote(
                members=members,
                count=count,
                choice=choice,
                meaning=meaning,
                saves_bytes=None if other is None else other.peak_bytes - own.peak_bytes,
                costs_s=None if other is None else own.seconds - other.seconds,
            )
        )
    return tuple(notes)


def _choices(plan: Plan, profile: Profile) -> Iterator[tuple[str, int, str, str, Plan]]:
    """Yields members, their number, the choice, its meaning, and the plan without it."""
    yield from _step_choices(plan)
    trace = next(iter(profile.traces.values()))
    by_policy: dict[tuple[str, CallPlan], list[int]] = {}
    for call in trace.calls:
        # What joins the call before it has the same policy.
        policy = replace(plan.call(call.index), joins_previous=False)
        if policy != CallPlan():
            by_policy.setdefault((call.kind, policy), []).append(call.index)
    for (_, policy), indices in by_policy.items():
        chosen = frozenset(indices)
        calls = [CallPlan() if index in chosen else plan.call(index) for index in range(len(plan.calls))]
        # A call cannot join one that is kept.
        calls = [
            replace(call, joins_previous=call.joins_previous and index - 1 not in chosen)
            for index, call in enumerate(calls)
        ]
        names = joined_names(trace.calls[index].site for index in indices)
        joined = sum(plan.call(index).joins_previous for index in indices)
        choice = describe_policy(policy) + (f", {len(indices) - joined} segments" if joined else "")
        yield names, len(indices), choice, _meaning_of_policy(policy), replace(plan, calls=tuple(calls))
    by_homes: dict[tuple[str, BlockPlan], list[str]] = {}
    for block in profile.blocks:
        homes = plan.block(block.name)
        if homes != BlockPlan():
            by_homes.setdefault((block.kind, homes), []).append(block.name)
    for (_, homes), found in by_homes.items():
        without = {name: homes for name, homes in plan.blocks.items() if name not in found}
        yield (
            joined_names(name or "(model)" for name in found),
            len(found),
            describe_homes(homes),
            _meaning_of_homes(homes),
            replace(plan, blocks=without),
        )


def _step_choices(plan: Plan) -> Iterator[tuple[str, int, str, str, Plan]]:
    if plan.microbatches > 1:
        turns = plan.order is Order.LAYER_MAJOR
        how = "layer by layer" if turns else "one after the other"
        meaning = "the batch is computed in parts, so that only a part's activations are there at once"
        if turns:
            meaning += "; each layer takes all parts before the next one, so that its weights come once"
        without = replace(plan, microbatches=1, order=Order.LAYER_MAJOR, tail=None)
        yield "the step", 1, f"{plan.microbatches} microbatches, {how}", meaning, without
    if plan.update is UpdateTime.IN_BACKWARD:
        meaning = "a block is updated as soon as its gradient is whole, which then goes"
        without = replace(plan, update=UpdateTime.AFTER_BACKWARD)
        yield "the step", 1, "updates in backward", meaning, without
    if any(block.weight_home is not Tier.DEVICE for block in plan.blocks.values()) and plan.prefetch > 0:
        meaning = f"up to {plan.prefetch} blocks' weights come while another one computes"
        yield "the step", 1, f"{plan.prefetch + 1} buffers for weights", meaning, replace(plan, prefetch=0)
    if plan.backlog > 1:
        meaning = f"an update's end is waited for {plan.backlog} compute actions later; until then its gradient stays"
        yield "the step", 1, f"updates {plan.backlog} actions behind", meaning, replace(plan, update_backlog=1)


def _meaning_of_policy(policy: CallPlan) -> str:
    if policy.saved.policy.offloads:
        return f"what backward needs goes to {policy.saved_home} after forward and comes back"
    again = "is computed again in backward"
    kept = "all but the dearest of what backward needs" if policy.saved.policy.kept_operators else "what backward needs"
    away = "" if policy.boundary_home is Tier.DEVICE else f", from inputs that wait on {policy.boundary_home}"
    return f"{kept} {again}{away}"


def _meaning_of_homes(homes: BlockPlan) -> str:
    told: list[str] = []
    if homes.weight_home is not Tier.DEVICE:
        told.append(f"weights come from {homes.weight_home} for each use")
    if homes.gradient_home is not Tier.DEVICE:
        told.append(f"gradients go to {homes.gradient_home}")
    if homes.state_home is not Tier.DEVICE:
        there = "are updated there, by the host's cores" if homes.update_on is Tier.HOST else "come for the update"
        told.append(f"optimizer states rest on {homes.state_home} and {there}")
    return "; ".join(told)
