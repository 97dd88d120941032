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
# So often a limit that is to be named is tried, each time beside what the last one took.
_MOST_TRIALS = 3
_ADVICE = ("a larger limit", "a process that holds less before memfit.fit")


def choose_in_room(
    found: Profile, budget: Callable[..., Budget], choose: Callable[[Profile, Budget, Traces], Choice]
) -> tuple[Choice, Budget]:
    """Chooses a plan that fits beside what is held when it has been chosen: to look for one, and to
    load what it computes with, takes of a process, too. What that is, only the plan tells: parts of
    two sizes have kernels each. So what was missing is kept free when a plan is looked for again.

    Where none fits, the same is done with the limit that is to be named: a search that finds plans
    takes more of the process than one that finds none.

    Args:
        found: profile that plans are looked for with.
        budget: measures what is left to tensors under a profile, and a plan if there is one.
        choose: looks for a plan, and keeps what it traces.

    Returns:
        The plan, and what is left to its tensors.

    Raises:
        DoesNotFitError: no plan fits, or none that was found did when it had been found.
    """
    # Looked for again in less room, the same is traced and predicted.
    traces = Traces()
    choice = _Choosing(found, budget, lambda found, room: choose(found, room, traces))
    begun = budget(found)
    try:
        return choice.run(begun)
    except DoesNotFitError as error:
        raise choice.beside_a_search(error, begun) from None


class _Choosing:
    """Looks for a plan, beside what that takes of the process.

    Args:
        found, budget: as in `choose_in_room`.
        choose: looks for a plan in a room.
    """

    def __init__(
        self, found: Profile, budget: Callable[..., Budget], choose: Callable[[Profile, Budget], Choice]
    ) -> None:
        self._found, self._budget, self._choose = found, budget, choose

    def run(self, room: Budget) -> tuple[Choice, Budget]:
        """Looks for a plan until one fits beside what it took to be found.

        Args:
            room: at the beginning; what is held later is measured, under the same limit.

        Raises:
            DoesNotFitError: as `choose_in_room`.
        """
        limit_bytes = room.limit_bytes
        missing, grown, attempt = 0, 0, 0
        while True:
            attempt += 1
            chosen = self._keeping_free(missing, grown, room)
            left = replace(self._budget(chosen.profile, chosen.plan), limit_bytes=limit_bytes)
            peak = chosen.found.timeline.peak_bytes
            if left.tensor_bytes is None or peak <= left.tensor_bytes:
                return chosen, left
            if attempt == _MOST_CHOICES:
                name = chosen.found.name
                raise Refusal(budget=left, peak_bytes=peak, plan=name, report="", advice=_ADVICE, varies=True).error()
            missing += peak - left.tensor_bytes
            del chosen
            gc.collect()  # what was looked at goes: the next search takes its place
            before, room = room, replace(self._budget(self._found), limit_bytes=limit_bytes)
            # The next search may take as much as the last one did, which is there now.
            grown = max(0, room.base_bytes - before.base_bytes)
            missing = max(0, missing - grown)

    def _keeping_free(self, least: int, more: int, room: Budget) -> Choice:
        """Chooses a plan with so many bytes kept free at least, and with more where one fits beside
        them, too.

        Raises:
            DoesNotFitError: no plan fits with the least.
        """
        within = replace(room, base_bytes=room.base_bytes + least)
        if more:
            with contextlib.suppress(DoesNotFitError):
                return self._choose(self._found, replace(within, base_bytes=within.base_bytes + more))
        return self._choose(self._found, within)

    def beside_a_search(self, error: DoesNotFitError, begun: Budget) -> DoesNotFitError:
        """Returns the refusal of a limit of a process, beside what the next search takes, at the
        limit that is named: it is made here.

        Args:
            error: the refusal.
            begun: the room at the beginning, as the next process has it.
        """
        refusal = error.refusal
        if not isinstance(refusal, Refusal) or not refusal.varies:
            return error
        # Its frames hold what was looked at, in cycles: the next search takes that memory again.
        error.__traceback__ = None
        for _ in range(_MOST_TRIALS):
            gc.collect()
            refusal = _beside(refusal, self._budget(self._found))
            try:
                _, left = self.run(replace(begun, limit_bytes=refusal.smallest_limit_bytes))
            except DoesNotFitError as again:
                if not isinstance(again.refusal, Refusal):
                    break
                refusal = _beside(refusal, again.refusal.budget)
            else:
                return _beside(refusal, left).error()
        return _beside(refusal, self._budget(self._found)).error()


def _beside(refusal: Refusal, budget: Budget) -> Refusal:
    """The same beside what is held now, where that is more."""
    base = max(refusal.budget.base_bytes, budget.base_bytes)
    return replace(refusal, budget=replace(refusal.budget, base_bytes=base))
