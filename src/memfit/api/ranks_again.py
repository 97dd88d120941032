"""Another plan for a running job on several ranks: all of them decide it together.

In: each rank's batch and what is left to tensors there. Out: one plan that every rank's batch fits,
or the same refusal on all of them.

[Note: one plan for unequal ranks]
Ranks have limits and rows of their own. Rank 0 chooses, by its own figures, under the least room of
any rank; each rank then prices that plan with its own rows, and says by how many bytes it is too
large. Where it is, rank 0 chooses among plans that take less by so much. So seconds are those of
one rank, and the plan fits all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memfit.core.errors import DoesNotFitError
from memfit.core.limits import Budget
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.tiers import Tier
from memfit.distributed.agreement import agree, optional_texts
from memfit.distributed.rank_group import RankGroup
from memfit.job.few_bits import with_frozen
from memfit.job.setup import Planned, Setup
from memfit.job.together import failing_together, prepare_together
from memfit.planning.over_ranks_plans import RanksChoice, choose_over_ranks
from memfit.prediction.bytes import peaks
from memfit.scheduling.build import build_step
from memfit.scheduling.lower import lower

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
