"""A plan that fits beside what looking for it takes of a process.

In: what measures the room, and what looks for a plan in it. Out: the plan; or the refusal, whose
smallest limit holds what a search takes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace

from memfit.api.choosing import Choice, Traces
from memfit.core.errors import DoesNotFitError
from memfit.core.limits import Budget
from memfit.core.profile import Profile
from memfit.planning.refusals import Refusal

# To look for a plan takes 2 to 7 MiB of a process, and less each time that it is done again.
_MOST_CHOICES = 6
_ADVICE = ("a larger limit", "a process that holds less before memfit.fit")


def choose_in_room(
    found: Profile, budget: Callable[..., Budget], choose: Callable[[Profile, Budget, Traces], Choice]
) -> tuple[Choice, Budget]:
    """Chooses a plan that fits beside what is held when it has been chosen: to look for one, and to
    load what it computes with, takes of a process, too. What that is, only the plan tells: parts of
    two sizes have kernels each. So what was missing is kept free when a plan is looked for again.

    Args:
        found: profile that plans are looked for with.
        budget: measures what is left to tensors under a profile, and a plan if there is one.
        choose: looks for a plan, and keeps what it traces.

    Returns:
        The plan, and what is left to its tensors.

    Raises:
        DoesNotFitError: no plan fits, or none that was found did when it had been found.
    """
    missing, grown, room, attempt = 0, 0, budget(found), 0
    # Looked for again in less room, the same is traced and predicted.
    traces = Traces()
    while True:
        attempt += 1
        try:
            chosen = _choose_keeping_free(missing, grown, found, room, lambda found, room: choose(found, room, traces))
        except DoesNotFitError as error:
            raise _beside_a_search(error, found, budget) from None
        left = budget(chosen.profile, chosen.plan)
        peak = chosen.found.timeline.peak_bytes
        if left.tensor_bytes is None or peak <= left.tensor_bytes:
            return chosen, left
        if attempt == _MOST_CHOICES:
            last = "the plan that was found last"
            refusal = Refusal(budget=left, peak_bytes=peak, plan=last, report="", advice=_ADVICE, varies=True)
            raise _beside_a_search(refusal.error(), found, budget)
        missing += peak - left.tensor_bytes
        before, room = room, budget(found)
        # The next search may take as much of the process as the last one did, which is there now.
        grown = max(0, room.base_bytes - before.base_bytes)
        missing = max(0, missing - grown)


def _choose_keeping_free(
    least: int, more: int, found: Profile, room: Budget, choose: Callable[[Profile, Budget], Choice]
) -> Choice:
    """Chooses a plan with so many bytes kept free at least, and with more where one fits beside
    them, too.

    Raises:
        DoesNotFitError: no plan fits with the least.
    """
    within = replace(room, base_bytes=room.base_bytes + least)
    if more:
        with contextlib.suppress(DoesNotFitError):
            return choose(found, replace(within, base_bytes=within.base_bytes + more))
    return choose(found, within)


def _beside_a_search(error: DoesNotFitError, found: Profile, budget: Callable[..., Budget]) -> DoesNotFitError:
    """Returns the refusal of a limit of a process, beside what is held when a plan was looked for:
    the next search, at the limit that is named, is measured when it has ended, too.
    """
    refusal = error.refusal
    if not isinstance(refusal, Refusal) or not refusal.varies:
        return error
    # Its frames hold what the search looked at, in cycles: memory that the next one takes again.
    error.__traceback__ = None
    gc.collect()
    base = max(refusal.budget.base_bytes, budget(found).base_bytes)
    return replace(refusal, budget=replace(refusal.budget, base_bytes=base)).error()
