"""Deciding: from a setup to the plan that a job begins with (given, the run's own, or chosen by
`choosing`), and to another one while it runs.

In: a setup, a batch, a budget. Out: `Planned`, checked; or the refusal with the smallest limit that
would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from memfit.core.errors import DoesNotFitError, UnsupportedError
from memfit.core.hardware import Hardware
from memfit.core.limits import Budget, format_bytes
from memfit.core.numerics import NONADDITIVE, check_exact, declare
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.storage_formats import ComputeDtype, FrozenFormat
from memfit.core.tiers import Tier
from memfit.job.forward_passes import check_counted, check_dtype, check_split
from memfit.job.step_runner import StepRunner, begin_steps
from memfit.mesh.agreement import agree, optional_texts
from memfit.mesh.rank_group import RankGroup
from memfit.planner.choosing import Choice, Traces, Wanted, choose, choose_in_room, commits_a_step, keeps_batch_whole
from memfit.planner.given_plans import (
    check_fits,
    checks_split,
    cut_by_lines,
    cut_for,
    plan_of_lines,
    plan_of_parts,
    told_of_road,
    with_check,
)
from memfit.planner.plan_checks import (
    check_compiled,
    check_effect,
    check_meaning,
    check_tiers,
    lacking_tier,
    other_sums,
)
from memfit.planner.preparing import excess_beside_device, prepare, prepared_for, with_smaller
from memfit.planner.problem import check_precision, with_frozen
from memfit.planner.search.candidates import check_journaled, update_time
from memfit.planner.search.over_ranks_plans import RanksChoice, choose_over_ranks
from memfit.planner.search.pricing import Refusal
from memfit.planner.setup import Planned, Prepared, Setup
from memfit.planner.together import failing_together, prepare_together
from memfit.runs.checkpointer import stored_reason
from memfit.step.build import build_step
from memfit.step.bytes import peaks
from memfit.step.lower import lower
from memfit.tensors.trees import tensors_in
from memfit.trace.batch import ByParts, Parts, UncuttableError
from memfit.trace.cutting import Whole
from memfit.trace.splitting import signature_of
from memfit.trace.trace import arrange_blocks

# Another plan for a running job on several ranks: all of them decide it together.
#
# In: each rank's batch and what is left to tensors there. Out: one plan that every rank's batch
# fits, or the same refusal on all of them.
#
# [Note: one plan for unequal ranks]
# Ranks have limits and rows of their own. Rank 0 chooses, by its own figures, under the least room
# of any rank; each rank then prices that plan with its own rows, and says by how many bytes it is
# too large. Where it is, rank 0 chooses among plans that take less by so much. So seconds are those
# of one rank, and the plan fits all.

_CALL = "another plan"
# More than any machine has: the room of a rank without a limit.
_ANY_BYTES = 1 << 60


def plan_again(
    setup: Setup,
    ranks: RankGroup,
    batch: Any,
    budget: Budget,
    make: Callable[[Plan, str, Profile, Budget], Planned],
    *,
    like: Plan,
    may_split: bool,
) -> Planned:
    """Decides a plan that fits every rank; collective. See [Note: one plan for unequal ranks].

    Args:
        setup: of the job.
        ranks: of the job.
        batch: this rank's.
        budget: what is left here.
        make: prepares a plan for the batch.
        like: the plan that it takes the place of, in whose formats bytes rest.
        may_split: the loss adds up over microbatches, as far as is known.

    Raises:
        DoesNotFitError: none does; with the same text on all ranks.
        PeerError: another rank's batch cannot be traced or prepared, or a rank was lost.
    """
    plan, reason, found = _decided(setup, ranks, batch, budget, like, may_split=may_split)
    planned = prepare_together(ranks, _CALL, lambda: make(plan, reason, found, budget))
    agree(ranks, _CALL)  # where it failed on a rank, all of them have none
    return planned


def _decided(
    setup: Setup, ranks: RankGroup, batch: Any, budget: Budget, like: Plan, *, may_split: bool
) -> tuple[Plan, str, Profile]:
    counts, found = prepare_together(ranks, _CALL, lambda: _traced(setup, batch, like, may_split=may_split))
    room = _ANY_BYTES if budget.tensor_bytes is None else budget.tensor_bytes
    said = agree(ranks, _CALL, values=[float(room), float(may_split and found.may_split)])
    least = int(min(room for (room, *_) in said))
    if not all(may for (_, may, *_) in said):
        counts = (1,)
    while True:
        plan, reason = _chosen_by_first(
            ranks,
            lambda least=least: choose_over_ranks(
                found,
                counts,
                ranks.size,
                least,
                setup.hardware(),
                clips_norm=setup.clips_norm,
                device=setup.device,
                like=like,
            ),
        )
        own = plan if plan.microbatches in counts else replace(plan, microbatches=max(counts))
        step = lower(build_step(own, found, clips_norm=setup.clips_norm), own, found, device=setup.device)
        most = peaks(step)[Tier.DEVICE]
        said = agree(ranks, _CALL, values=[float(most - room), float(most)])
        beyond = int(max(over for (over, *_) in said))
        if beyond <= 0:
            return plan, reason, found
        least = min(least, int(said[0][1])) - beyond


def _traced(setup: Setup, batch: Any, like: Plan, *, may_split: bool) -> tuple[tuple[int, ...], Profile]:
    problem = setup.problem
    counts = tuple(problem.counts(batch)) if may_split else (1,)
    if setup.numerics == "exact":
        counts = (like.microbatches,)
    found = problem.profile(batch, counts, chunk_tokens=like.loss_chunk_tokens, compute=like.compute_dtype)
    found = problem.with_states(found, like.compute_dtype, like.state_format)
    return counts, with_frozen(problem.model, found, like.frozen_format)


def _chosen_by_first(ranks: RankGroup, choose: Callable[[], RanksChoice]) -> tuple[Plan, str]:
    """Returns rank 0's choice and its reason on all ranks.

    Raises:
        DoesNotFitError: it has none.
    """
    plan = reason = refusal = None
    if ranks.rank == 0:
        with failing_together(ranks):
            try:
                chosen = choose()
            except DoesNotFitError as error:
                chosen, refusal = None, str(error)
        if chosen is not None:
            plan = chosen.plan.to_json()
            reason = chosen.reason
    plan, reason, refusal = (optional_texts(ranks, text)[0] for text in (plan, reason, refusal))
    if refusal is not None:
        raise DoesNotFitError(refusal, smallest_limit_bytes=None)
    assert plan is not None and reason is not None, "rank 0 says one or the other"
    return Plan.from_json(plan), reason


GIVEN = "given by the user."
_RunnerT = TypeVar("_RunnerT", bound=StepRunner | None)


# --- the plan of a new job ----------------------------------------------------------------------


def begin_given(
    setup: Setup, sample: Any, plan: Plan, *, reason: str = GIVEN, why: str = "the plan was given"
) -> StepRunner:
    """Begins the steps under a plan that the user gave, or that is decided; see `make_planned`."""

    def begin(own: Setup) -> StepRunner:
        found = trace(own, sample, plan)
        budget = own.budget(sample, found, plan)
        check_fits(own, sample, plan, found, budget)
        planned = make_planned(own, sample, plan, reason, found, budget, why=why)
        return _begin_checked(planned, sample, found)

    return _in_ways(setup, sample, plan, begin)


def begin_resumed(setup: Setup, sample: Any, plan: Plan) -> tuple[StepRunner, str]:
    """Begins the steps under the plan that the run had, or another one where that does not do.

    Returns:
        The runner of its steps; and, in words, what is summed otherwise from here on.
    """
    run, why_not = setup.run, ""
    assert run is not None

    def like_before(own: Setup) -> StepRunner | None:
        nonlocal why_not
        found, why_not = _own_plan(own, sample, plan)
        if found is None:
            return None
        why = "it is the plan that the run had"
        return _begin_checked(
            make_planned(own, sample, plan, stored_reason(run), found, own.budget(sample, found, plan), why=why),
            sample,
            found,
        )

    runner = _in_ways(setup, sample, plan, like_before)
    if runner is not None:
        return runner, ""
    told = f"The plan that the run had is not taken: {why_not}."

    def remark(after: Plan) -> str:
        return " ".join(filter(None, ["", told, other_sums(plan, after)]))

    runner = begin_chosen(setup, sample, remark)
    sums = other_sums(plan, runner.assembly.plan)
    return runner, "" if sums is None else f"{told} {sums}"


def begin_chosen(setup: Setup, sample: Any, remark: Callable[[Plan], str] = lambda _: "") -> StepRunner:
    """Begins the steps under the fastest plan that fits; its reason ends with the remark."""
    if setup.has_lines:
        return _begin_lines(setup, sample, remark)
    if isinstance(sample, Parts):
        return _begin_parts(setup.cut_by(ByParts()), sample, remark)
    ways = setup.problem.ways(sample, setup.split)
    if setup.resumed_plan is None:
        check_effect(setup.problem, setup.allow, setup.device)
    is_free = setup.machine.limits.device_bytes is None and setup.classic is None
    if is_free and setup.resumed_plan is None and not setup.has_journal:
        own = setup.cut_by(ways[0])
        found = own.problem.profile(sample, (1,), chunk_tokens=None)
        plan = Plan(update=update_time(found, clips_norm=False))
        reason = "no limit was given: everything stays on the device."
        return _begin_checked(
            make_planned(own, sample, plan, reason, found, own.budget(sample, found, plan), why=""), sample, found
        )
    setup.hardware()  # measured before anything is traced
    why, whole = "", None
    for way in ways[:-1]:
        own = setup.cut_by(way)
        try:
            found = _profile_counts(own, sample, partial(own.budget, sample))
        except UncuttableError as error:
            why = why or str(error)
            continue
        chosen, budget = _choose_in_room(own, sample, found, may_split=found.may_split)
        cause = "the model computes over its batch, or its forward changes what it computes with"
        note = "" if found.may_split else _not_cut(cause)
        try:
            reason = chosen.reason + note + remark(chosen.plan)
            planned = make_planned(own, sample, chosen.plan, reason, chosen.profile, budget, why=chosen.why)
            return _begin_checked(planned, sample, chosen.profile)
        except UnsupportedError as error:
            if chosen.plan.microbatches == 1:
                raise
            why, whole = why or str(error), (own, found)
    own, found = whole or (setup.cut_by(ways[-1]), None)
    if found is None:
        found = _profile_counts(own, sample, partial(own.budget, sample))
        why = why or ways[-1].why_whole(sample) or ""
    try:
        chosen, budget = _choose_in_room(own, sample, found, may_split=False)
    except DoesNotFitError as error:
        if isinstance(error.refusal, Refusal):
            raise error.refusal.error(_not_cut(why)) from None
        error.add_note(_not_cut(why).strip())
        raise
    reason = f"{chosen.reason}{_not_cut(why)}{remark(chosen.plan)}"
    planned = make_planned(own, sample, chosen.plan, reason, chosen.profile, budget, adds_up=False, why=chosen.why)
    return begin_steps(planned)


def _begin_lines(setup: Setup, sample: Any, remark: Callable[[Plan], str]) -> StepRunner:
    own = cut_by_lines(setup)
    plan, why, found = plan_of_lines(own, sample, partial(_choose, may_split=True))
    planned = make_planned(own, sample, plan, why + remark(plan), found, own.budget(sample, found, plan), why="")
    return _begin_checked(planned, sample, found)


def _begin_parts(own: Setup, sample: Parts, remark: Callable[[Plan], str]) -> StepRunner:
    if own.resumed_plan is None:
        check_effect(own.problem, own.allow, own.device)
    plan, told, why, found = plan_of_parts(own, sample, partial(_choose, may_split=True))
    reason = told + told_of_road(plan, found) + remark(plan)
    planned = make_planned(own, sample, plan, reason, found, own.budget(sample, found, plan), why=why)
    return _begin_checked(planned, sample, found)


def _in_ways(setup: Setup, sample: Any, plan: Plan, begin: Callable[[Setup], _RunnerT]) -> _RunnerT:
    """Begins the steps under a plan that is decided, with the first way to cut batches by which its
    microbatches can be made.

    Raises:
        UnsupportedError, UncuttableError: there is none; what the likeliest one met.
    """
    ways = [ByParts()] if isinstance(sample, Parts) else setup.problem.ways(sample, setup.split)
    if plan.microbatches == 1:
        return begin(setup.cut_by(ways[0]))
    refusal: UncuttableError | UnsupportedError | None = None
    for way in ways[:-1] or ways:
        try:
            return begin(setup.cut_by(way))
        except (UncuttableError, UnsupportedError) as error:
            refusal = refusal or error
    assert refusal is not None, "not to cut refuses by another error"
    raise refusal


def _begin_checked(planned: Planned, sample: Any, found: Profile) -> StepRunner:
    """Begins the steps, and checks that the loss is what it says and adds up over microbatches.

    If a check fails, everything is given back.
    """
    planned = with_check(planned, sample, found)
    runner, setup = begin_steps(planned), planned.setup
    try:
        if planned.plan.compute_dtype is not ComputeDtype.GIVEN:
            check_dtype(runner.assembly, sample)
        if found.counts_losses:
            check_counted(runner.assembly, sample)
        if checks_split(setup, planned.plan, found):
            if found.source == "fake":
                setup.problem.check_rows(sample)
            check_split(runner.assembly, sample)
    except BaseException:
        runner.undo()
        raise
    return runner


def _not_cut(why: str) -> str:
    return f" The batch is not cut into microbatches: {why.split('. ', maxsplit=1)[0].rstrip('.')}."


# --- another plan for a running job -------------------------------------------------------------


def replan(
    setup: Setup,
    batch: Any,
    *,
    like: Plan,
    adds_up: bool | None,
    held: Iterable[torch.Tensor] = (),
    margin_bytes: int = 0,
    below_bytes: int | None = None,
    hardware: Hardware | None = None,
    plan: Plan | None = None,
) -> Planned:
    """Decides the fastest plan that fits beside what is allocated now.

    Args:
        setup: of the job.
        batch: that must fit.
        like: the plan that it takes the place of, in whose formats bytes rest.
        adds_up: as in `Planned`.
        held: what goes with that plan.
        margin_bytes: to be left free besides.
        below_bytes: what it must be predicted to take less than, by the margin too: a plan of that
            peak did not do.
        hardware: the machine as it was measured since; where `like` is bitwise plain PyTorch, so is
            the plan then. None: as the job knows it.
        plan: that is taken; None: the fastest that fits.

    Raises:
        DoesNotFitError: none does.
    """
    setup = replace(setup, problem=replace(setup.problem, aside=None))
    problem, numerics = setup.problem, setup.numerics
    if hardware is not None:
        setup = replace(setup, hardware=lambda: hardware)
        if like.microbatches == 1 and like.loss_chunk_tokens is None:
            numerics = "exact"
    budget = setup.machine.budget(beside=[*held, *tensors_in(batch), *problem.model.buffers()])
    if below_bytes is not None and budget.tensor_bytes is not None:
        margin_bytes += max(0, budget.tensor_bytes - below_bytes)
    budget = replace(budget, reserve_bytes=budget.reserve_bytes + margin_bytes)
    if setup.ranks is not None:
        how = {"adds_up": adds_up, "why": "there are several ranks", "load_bytes": setup.load_bytes}
        make = partial(make_planned, setup, batch, **how)
        return plan_again(setup, setup.ranks, batch, budget, make, like=like, may_split=adds_up is not False)
    if plan is not None:
        found = trace(setup, batch, plan)
        reason = "it was measured to be faster."
        return make_planned(
            setup, batch, plan, reason, found, budget, adds_up=adds_up, why="", load_bytes=setup.load_bytes
        )
    try:
        found = _profile_counts(setup, batch, lambda _: budget, running=like)
    except UncuttableError as error:
        setup = setup.cut_by(Whole(str(error)))
        found = _profile_counts(setup, batch, lambda _: budget, running=like)
    asked, may_split = replace(setup, numerics=numerics), found.may_split and adds_up is not False
    chosen = _choose(asked, batch, found, budget, Traces(), may_split=may_split, running=like)
    plan = chosen.plan
    if plan.microbatches == setup.problem.cut.rows(batch):
        # It is cut into as many by any larger number too: then batches with more rows keep theirs.
        plan = replace(plan, microbatches=max(plan.microbatches, like.microbatches))
    return make_planned(
        setup,
        batch,
        plan,
        chosen.reason,
        chosen.profile,
        budget,
        adds_up=adds_up,
        why=chosen.why,
        load_bytes=setup.load_bytes,
    )


# --- a plan that is decided ---------------------------------------------------------------------


def trace(setup: Setup, sample: Any, plan: Plan) -> Profile:
    """Traces the sample under a plan that is decided.

    Raises:
        PlanError, UsageError, UnsupportedError: the machine, what is allowed, or the model does not
            go with the plan.
    """
    check_tiers(plan, setup.machine)
    check_precision(plan, setup.problem.model, setup.allow)
    if plan.frozen_format is not FrozenFormat.GIVEN and setup.run is not None:
        raise UnsupportedError(
            f"the plan keeps frozen weights in {plan.frozen_format}, and a store keeps them as they are: fit without store=, and job.save between steps"
        )
    found = setup.problem.profile_for(plan, sample)
    check_meaning(plan, found, is_committed=setup.run is not None)
    check_exact(plan, found, setup.numerics)
    if setup.has_journal:
        check_journaled(plan, found)
    return found


def make_planned(
    setup: Setup,
    sample: Any,
    plan: Plan,
    reason: str,
    found: Profile,
    budget: Budget,
    *,
    why: str,
    adds_up: bool | None = None,
    load_bytes: int | None = None,
) -> Planned:
    """Prepares a plan for the sample.

    Args:
        setup: of the job.
        sample: a batch.
        plan: decided.
        reason: why this plan.
        found: the profile that it was decided with.
        budget: of the device.
        why: why sums are regrouped, where they are.
        adds_up: see `Planned`.
        load_bytes: were held while weights moved home; None: they are still to move.

    Raises:
        UnsupportedError: the plan would train another model. DoesNotFitError: it takes more of the
            host or the disk than it may.
    """
    check_meaning(plan, found, is_committed=setup.run is not None)
    check_compiled(setup.problem, plan)
    arranged = replace(setup.problem, block_map=arrange_blocks(setup.problem.block_map, found))
    own = replace(setup, problem=arranged)
    adds_apart = plan.adds_apart(has_masters=found.has_masters, clips_norm=setup.clips_norm)
    ready = _prepared(own, sample, plan, found, adds_apart=adds_apart)
    excess = excess_beside_device(setup, ready)
    if excess is not None:
        raise DoesNotFitError(f"the plan {excess}: raise the limit, or keep less there")
    # What is left of a process's reserve is for what is not usual.
    reserve = 0 if setup.machine.counts_process else budget.reserve_bytes
    beside = budget.base_bytes + reserve
    load_bytes = setup.load_peak_bytes(plan, found, budget) if load_bytes is None else load_bytes
    return Planned(
        setup=own,
        plan=plan,
        reason=" ".join(filter(None, [reason, found.remark, setup.compiled_words])),
        choice=reason,
        numerics=declare(plan, found, allow=setup.allow, why=why),
        adds_apart=adds_apart,
        prepared=ready,
        signature=signature_of(sample, arranged.cut, plan.microbatches),
        predicted_peak_bytes=max(ready.peak_bytes + beside, load_bytes),
        load_bytes=load_bytes,
        beside_bytes=beside,
        budget=budget,
        adds_up=True if NONADDITIVE in setup.allow else adds_up,
        replan=partial(replan, setup) if setup.replans or setup.adapts else None,
    )


def _prepared(setup: Setup, sample: Any, plan: Plan, found: Profile, *, adds_apart: bool) -> Prepared:
    """Prepares the sample, from the profile that the plan was decided with where that has its
    sizes.
    """
    cut = cut_for(setup, sample, plan)
    rows = -(-found.batch_rows // cut.microbatches)
    if found.batch_rows == setup.problem.cut.rows(sample) and rows in found.traces:
        return prepared_for(
            with_smaller(setup, sample, cut, found),
            cut,
            clips_norm=setup.clips_norm,
            has_lines=setup.has_lines,
            adds_apart=adds_apart,
            device=setup.device,
        )
    return prepare(setup, plan, sample, adds_apart=adds_apart)


def _profile_counts(
    setup: Setup, batch: Any, budget: Callable[[Profile], Budget], *, running: Plan | None = None
) -> Profile:
    """Traces a batch in all the sizes of microbatches that plans are looked for with, or whole
    where no plan with more microbatches than one would be chosen.

    Raises:
        UncuttableError: the model runs on no part of it.
    """

    def suffices(found: Profile) -> bool:
        wanted = _wanted(setup, may_split=found.may_split, running=running)
        left = budget(found)
        return keeps_batch_whole(setup.problem, batch, found, left, setup.hardware(), setup.machine, wanted)

    return setup.problem.profile(batch, setup.problem.counts(batch), chunk_tokens=None, suffices=suffices)


def _choose_in_room(setup: Setup, sample: Any, found: Profile, *, may_split: bool) -> tuple[Choice, Budget]:
    return choose_in_room(found, partial(setup.budget, sample), partial(_choose, setup, sample, may_split=may_split))


def _choose(
    setup: Setup,
    batch: Any,
    found: Profile,
    budget: Budget,
    traces: Traces,
    *,
    may_split: bool,
    running: Plan | None = None,
) -> Choice:
    """Chooses a plan (`choosing.choose`). Under a running one nothing is loaded, no cut checked."""
    wanted = _wanted(setup, may_split=may_split, running=running)
    return choose(setup.problem, batch, found, budget, setup.hardware(), setup.machine, wanted, traces)


def _wanted(setup: Setup, *, may_split: bool, running: Plan | None) -> Wanted:
    run, is_running = setup.run, running is not None
    return Wanted(
        allow=setup.allow,
        may_split=may_split,
        clips_norm=setup.clips_norm,
        load_bytes=0 if is_running else setup.most_load_bytes,
        checks_split=not is_running and not setup.has_lines and not isinstance(setup.problem.cut, ByParts),
        has_lines=setup.has_lines,
        like=running or setup.resumed_plan,
        scheme=None if run is None else run.scheme,
        numerics=setup.numerics,
        commits=0.0 if run is None else commits_a_step(run.durability),
        classic=None if is_running else setup.classic,
    )


# --- refusals -----------------------------------------------------------------------------------


def check_claim(setup: Setup) -> None:
    """Refuses a store that turned out larger than `disk_limit`: each tensor of a state begins on a
    page, which no profile counts.
    """
    limit, run = setup.machine.limits.of(Tier.DISK), setup.run
    if run is not None and limit is not None and run.nbytes > limit:
        raise DoesNotFitError(
            f"the store claims {format_bytes(run.nbytes)} of disk, above disk_limit of {format_bytes(limit)}: raise it, or "
            "keep states in fewer bits"
        )


def _own_plan(setup: Setup, sample: Any, plan: Plan) -> tuple[Profile | None, str]:
    """Checks whether the stored plan of a resumed run still fits.

    Returns the profile, or None and the reason.
    """
    lacking = lacking_tier(plan, setup.machine)
    if lacking is not None:
        return None, f"it puts something into the tier {str(lacking)!r}, which this machine does not have"
    cut = cut_for(setup, sample, plan)
    found = trace(replace(setup, numerics="auto"), sample, cut)
    if setup.numerics == "exact" and not declare(cut, found).is_exact:
        return None, f"numerics='exact' was asked for, and it is {declare(cut, found).short()}"
    ready = prepared_for(found, cut, clips_norm=setup.clips_norm, has_lines=setup.has_lines, device=setup.device)
    peak, left = ready.peak_bytes, setup.budget(sample, found).tensor_bytes
    if left is not None and peak > left:
        return None, f"it would take {format_bytes(peak)} of tensors, and {format_bytes(left)} are left"
    load, limit = setup.most_load_bytes, setup.machine.limits.device_bytes
    if setup.enforces and not setup.machine.counts_process and limit is not None and load > limit:
        return None, f"the model as it was built takes {format_bytes(load)} until its weights have moved home"
    excess = excess_beside_device(setup, ready)
    return (found, "") if excess is None else (None, f"it {excess}")
