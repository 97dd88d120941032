"""Room that a limit on a process leaves to tensors, step by step.

In: a limit, and what the process holds. Out: `Room`: the hard limit of the allocator, and of the
kernel where that is asked for; refusals in words.

[Note: memory outside of tensors]
A limit on a process counts everything: interpreter, libraries, NumPy's arrays, workers. The
allocator can refuse tensors alone. So what is left to them is what the limit leaves beside all
else, and since all else changes, it is measured again when a step begins. Growth inside the job's
own calls is that of libraries and kernels (11 to 67 MiB in a first step, nothing in later ones),
which the reserve is for. Growth between them is the user's: it is taken off what is left. A step
that is predicted not to fit what is left is refused before it begins: so nothing is torn, and the
process does not pass the limit to find out.

Between steps the process holds the pool of freed tensors beside what the user takes: it gives way
as far as half of the limit, or the most that the user ever took between two calls. What grows
inside a step is refused by nobody but the kernel, where its limit is armed too; what two steps in
succession took and gave back is kept free for the next one (as far as the reserve goes: a single
step that took much must not shut out all others).
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.allocator import Allocator, FallbackAllocator
from memfit.allocator.kernel import KernelLimit, drop_mapped_files, page_out_libraries
from memfit.core.errors import LimitBreachError
from memfit.core.units import MIB, format_bytes

# A loader, a list of losses, modules that are imported between `fit` and the first step: part of
# the reserve, as in what a refusal names as the smallest limit.
_SMALL_GROWTH_BYTES = 8 * MIB
# Of the limit, what is free between steps where pooled memory can make it so: a user's arrays come
# there, and nothing can refuse them. Taking its pages anew costs the next step up to 4 % of its CPU
# time (measured: 0.54 to 0.56 s, 0.65 to 0.67 s, 1.33 to 1.33 s with the whole pool given back).
_FREE_BETWEEN_STEPS = 0.5


class Room:
    """Room that is left to the tensors of a process under its limit.

    See [Note: memory outside of tensors].

    Args:
        limit_bytes: of the process.
        reserve_bytes: what of it plans leave free.
        outside_bytes: tells what the process holds outside of tensors.
        allocator: of tensors.
        kernel: its limit is armed too, from the second step on.
        planned_bytes: what was held outside of tensors when the budget of plans was made, if that
            was before now.
    """

    def __init__(
        self,
        limit_bytes: int,
        reserve_bytes: int,
        outside_bytes: Callable[[], int],
        allocator: Allocator | FallbackAllocator,
        *,
        kernel: KernelLimit | None = None,
        planned_bytes: int | None = None,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._outside_bytes = outside_bytes
        self._allocator = allocator
        self._kernel = kernel
        self._at_arming = self._last = outside_bytes()
        if planned_bytes is not None:
            self._at_arming = min(self._at_arming, planned_bytes)
        self._users_bytes = 0
        self._most_growth_bytes = 0
        """Between two calls."""
        self._scratch_bytes = (0, 0)
        """Scratch of the last two steps."""
        self._has_stepped = False

    @property
    def left_bytes(self) -> int:
        """Bytes that tensors may take now. Measures."""
        return self._limit_bytes - self._outside_bytes() - min(*self._scratch_bytes, self._reserve_bytes)

    @property
    def planned_bytes(self) -> int:
        """Bytes that a step which never ran may be predicted to take: what `fit` planned with, less
        what the user took since then.
        """
        users = max(0, self._users_bytes - _SMALL_GROWTH_BYTES)
        return self._limit_bytes - self._at_arming - self._reserve_bytes - users

    @property
    def reserve_left_bytes(self) -> int:
        """Part of the reserve that libraries have not taken yet."""
        taken = self._last - self._at_arming - self._users_bytes
        return max(_SMALL_GROWTH_BYTES, self._reserve_bytes - max(0, taken))

    @property
    def has_stepped(self) -> bool:
        """True if a step was made: what libraries take at their first use is there."""
        return self._has_stepped

    def change_limit(self, limit_bytes: int) -> None:
        """Changes the limit of the process. Pooled memory goes back first: it counts."""
        self._limit_bytes = limit_bytes
        self._allocator.trim()

    def note_planned(self, reserve_bytes: int, outside_bytes: int) -> None:
        """Notes what is held when a plan is made, before any step: the reserve is for what comes
        after it.
        """
        if not self._has_stepped:
            self._reserve_bytes = reserve_bytes
            self._at_arming = outside_bytes

    def begin_plan(self) -> int:
        """Begins the steps of a plan whose homes are there: what the process grew by until now was
        for planning.

        Returns:
            What tensors may take.
        """
        self.end()
        # Weights that another allocator gave were part of what was outside, until they moved home.
        self._at_arming = min(self._at_arming, self._last)
        return self.left_bytes

    def begin(self) -> int:
        """Begins a call of the job: what grew since the last one is the user's.

        Returns:
            What tensors may take, for the allocator's limit.
        """
        self._note_users()
        if self._kernel is not None and self._has_stepped:
            self._kernel.arm(self._limit_bytes - self._outside_bytes() - self._allocator.stats().mapped_bytes)
        return self.left_bytes

    def end(self, scratch_bytes: int | None = None) -> None:
        """Ends a call of the job: what grew in it is the libraries'.

        Args:
            scratch_bytes: what a step held at its peak beside its tensors and what is held now;
                None: it was no step.
        """
        self._last = self._outside_bytes()
        if scratch_bytes is not None:
            self._scratch_bytes = (self._scratch_bytes[1], max(0, scratch_bytes))
            self._has_stepped = True
            self._make_free()

    def excess(self, peak_bytes: int) -> str | None:
        """Returns why a step of that predicted peak does not fit what is left, in words; None if it
        does.

        Where it seems not to, malloc's free pages and the pages of mapped files and libraries go
        first.
        """
        if self._fits(peak_bytes):
            return None
        self._allocator.trim()
        drop_mapped_files()
        page_out_libraries()
        self._note_users()
        if self._fits(peak_bytes):
            return None
        grown = self._last - self._at_arming
        left = self.left_bytes if self._has_stepped else min(self.left_bytes, self.planned_bytes)
        return (
            f"it is predicted to take {format_bytes(peak_bytes)} of tensors, and {format_bytes(max(0, left))} are left of the limit of "
            f"{format_bytes(self._limit_bytes)}: outside of tensors the process holds {format_bytes(self._last)}, {format_bytes(max(0, grown))} more "
            "than when the job began (NumPy's arrays, a loader's workers, libraries)"
        )

    def refuse(self, peak_bytes: int, step: int) -> None:
        """Refuses a step that does not fit.

        Raises:
            LimitBreachError: before anything was done.
        """
        excess = self.excess(peak_bytes)
        if excess is not None:
            raise LimitBreachError(
                f"step {step} was not begun: {excess}. Nothing was updated. Free it, have it before memfit.fit, raise the limit, or fit with store= and "
                'on_breach="replan"',
                phase="step",
                where="before the step",
                torn=False,
            )

    def lift(self) -> None:
        """Takes the kernel's limit off."""
        if self._kernel is not None:
            self._kernel.lift()

    def _make_free(self) -> None:
        """Gives pooled memory back to the system, oldest first, as far as what happens between two
        steps may need its bytes.
        """
        if not isinstance(self._allocator, Allocator):
            return
        # A pool beside which the kernel refuses the user's memory would be of no use to anybody.
        share = 1.0 if self._kernel is not None else _FREE_BETWEEN_STEPS
        wanted = max(int(share * self._limit_bytes), self._most_growth_bytes * 5 // 4)
        stats = self._allocator.stats()
        missing = wanted - (self._limit_bytes - self._last - stats.mapped_bytes)
        if missing > 0 and stats.pooled_bytes > 0:
            before = self._allocator.pool_limit_bytes
            self._allocator.set_pool_limit(max(0, stats.pooled_bytes - missing))
            self._allocator.set_pool_limit(before)

    def _fits(self, peak_bytes: int) -> bool:
        # Before a first step, the libraries' growth in it is still to come.
        return peak_bytes <= self.left_bytes and (self._has_stepped or peak_bytes <= self.planned_bytes)

    def _note_users(self) -> None:
        now = self._outside_bytes()
        self._users_bytes += now - self._last
        self._most_growth_bytes = max(self._most_growth_bytes, now - self._last)
        self._last = now
