"""The hard limit of a device: armed, corrected step by step, taken off.

In: a limit, a meter, an allocator. Out: `HardLimit`: an allocation that would pass the limit
becomes `torch.OutOfMemoryError`, and a step that is predicted not to fit is refused.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import nn

from memfit.core.errors import DoesNotFitError, LimitBreachError, UsageError
from memfit.core.limits import format_bytes
from memfit.devices.binding import Allocator
from memfit.devices.fallback import FallbackAllocator
from memfit.devices.kernel import KernelLimit
from memfit.machine.limits_of_process import Room, excess_text
from memfit.machine.meters import DeviceMeter, PhaseRecord, Phases, ProcessMeter


class HardLimit:
    """The limit on what tensors of a device may take. Not armed until `arm`.

    Args:
        limit_bytes: of the process, or of the device; None: none, and `arm` does nothing.
        meter: of the device, which refuses allocations.
        process: a meter of the process, where the limit is the process's.
        allocator: of tensors in host memory; None beside an accelerator.
        reserve_bytes: tells what plans leave free for scratch.
        kernel: its limit is armed too, from the second step on.

    Attributes:
        armed_bytes: what tensors may take now; None while the limit is not armed.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        meter: DeviceMeter,
        process: ProcessMeter | None,
        allocator: Allocator | FallbackAllocator | None,
        *,
        reserve_bytes: Callable[[], int],
        kernel: KernelLimit | None,
    ) -> None:
        self.armed_bytes: int | None = None
        self._next_bytes: int | None = None
        """Limit of a device that was changed and is not armed yet."""
        self._limit_bytes = limit_bytes
        self._meter = meter
        self._process = process
        self._allocator = allocator
        self._reserve_bytes = reserve_bytes
        self._kernel = kernel
        self._room: Room | None = None
        self._planned_bytes: tuple[int, int] | None = None
        """Outside of tensors, and in tensors of others, before there is a room."""
        # A job that is dropped without `close` must not leave its limits on the process.
        self._lift = weakref.finalize(self, _lift_limit, meter, -1)
        if kernel is not None:
            weakref.finalize(self, kernel.lift)

    @property
    def room_bytes(self) -> int | None:
        """Bytes that plans may take under the armed limit: without the reserve, as at `fit`; None
        while no limit is armed.
        """
        if self.armed_bytes is None:
            return None
        if self._room is not None:
            return self._room.planned_bytes
        return (self.armed_bytes if self._next_bytes is None else self._next_bytes) - self._reserve_bytes()

    @property
    def reserve_left_bytes(self) -> int:
        """Part of the reserve that libraries have not taken yet; all of it before `arm`."""
        return self._reserve_bytes() if self._room is None else self._room.reserve_left_bytes

    def note_planned(self, outside_bytes: int, others_bytes: int) -> None:
        """Notes what the process holds outside of tensors, and in tensors that no prediction
        counts, when a plan is made, until a step has been made.
        """
        if self._room is None:
            self._planned_bytes = outside_bytes, others_bytes
        else:
            self._room.note_planned(self._reserve_bytes(), outside_bytes, others_bytes)

    @property
    def has_stepped(self) -> bool:
        """True if a step was made under the armed limit."""
        return self._room is not None and self._room.has_stepped

    def arm(self) -> None:
        """Sets the hard limit, by what is resident now: a breach becomes `torch.OutOfMemoryError`
        before the limit is passed.

        Raises:
            DoesNotFitError: the process is above the limit already.
        """
        limit = self._limit_bytes
        if limit is None:
            return
        if self._process is None:
            self._set_limit(limit)
            return
        assert self._allocator is not None
        if self._room is None:
            # Where planning had no room below the limit, it is armed after it: what that took of
            # the process is the reserve's all the same.
            self._room = Room(
                limit,
                self._reserve_bytes(),
                partial(outside_bytes, self._process, self._allocator),
                self._allocator,
                kernel=self._kernel,
                planned_bytes=self._planned_bytes,
            )
        left = self._room.begin_plan()
        if left <= 0:
            self._room = None
            raise DoesNotFitError(
                f"the process already holds {format_bytes(limit - left)} outside of memfit's tensors, above the limit of "
                f"{format_bytes(limit)}: start from a fresh process, free what is not needed, or raise the limit",
                smallest_limit_bytes=None,
            )
        self._set_limit(left)

    def change(self, limit_bytes: int) -> None:
        """Changes the limit; what tensors may take follows with `follow` or the job's next call.

        Raises:
            DoesNotFitError: what the process holds outside of tensors is above it; nothing is
                changed.
        """
        outside = outside_bytes(self._process, self._allocator)
        if outside >= limit_bytes:
            raise DoesNotFitError(
                f"the process holds {format_bytes(outside)} outside of memfit's tensors, above a limit of {format_bytes(limit_bytes)}: "
                "free what is not needed, or leave the limit as it is",
                smallest_limit_bytes=None,
            )
        self._limit_bytes = limit_bytes
        if self._room is not None:
            self._room.change_limit(limit_bytes)
        elif self.armed_bytes is not None:
            self._next_bytes = limit_bytes

    def follow(self) -> None:
        """Arms a limit of a device that was changed: not before the plan that fits it, since a
        batch must be made until then.
        """
        if self._next_bytes is not None:
            self._set_limit(self._next_bytes)

    @contextmanager
    def phase(self, phases: Phases, *, is_step: bool) -> Iterator[None]:
        """Surrounds a call of the job: the limit on tensors follows what the process holds beside
        them.

        Args:
            phases: that record the call inside of this context.
            is_step: the call is a step, whose scratch is kept free for the next ones.
        """
        room = self._room
        if room is not None:
            left = max(0, room.begin())
            if left != self.armed_bytes:
                self._set_limit(left)
        try:
            yield
        finally:
            if room is not None and room is self._room:
                last = phases.last
                room.end(
                    _scratch_bytes(last, outside_bytes(self._process, self._allocator))
                    if is_step and last is not None
                    else None
                )

    def excess(self, peak_bytes: int, others: Callable[[], int]) -> str | None:
        """Says why a step of that predicted peak does not fit beside what the device holds now;
        None if it does, or no limit is armed.

        Args:
            peak_bytes: of the job's tensors.
            others: tells the bytes of live tensors that the peak does not count.
        """
        if self._room is not None:
            return self._room.excess(peak_bytes, others)
        limit = self.armed_bytes
        if limit is None or peak_bytes + self._meter.live_bytes() <= limit or peak_bytes + others() <= limit:
            return None
        gc.collect()  # what is in cycles is nobody's
        beside = others()
        return None if peak_bytes + beside <= limit else excess_text(peak_bytes, limit - beside, limit, beside)

    def refuse(self, peak_bytes: int, others: Callable[[], int], step: int) -> None:
        """Refuses a step that does not fit beside what the device holds now.

        Args:
            peak_bytes: as for `excess`.
            others: likewise.
            step: its number.

        Raises:
            LimitBreachError: before anything was done.
        """
        excess = self.excess(peak_bytes, others)
        if excess is not None:
            raise LimitBreachError(
                f"step {step} was not begun: {excess}. Nothing was updated. Free it, have it before memfit.fit, raise the limit, or fit with store= and "
                'on_breach="replan"',
                phase="step",
                where="before the step",
                torn=False,
            )

    def passed(self, peak_bytes: int) -> str | None:
        """Says what took the process past its limit where no allocation of a tensor did, in words;
        None while it is below.

        The armed limit counts what tensors take; what else the process holds is what it held when
        the step began.

        Args:
            peak_bytes: what was measured.
        """
        limit = self._limit_bytes
        if limit is None or self.armed_bytes is None or self._process is None or peak_bytes <= limit:
            return None
        outside = outside_bytes(self._process, self._allocator)
        return (
            f"the process took {format_bytes(peak_bytes)}, above the limit of {format_bytes(limit)}: {format_bytes(outside)} are outside of tensors now, and "
            f"{format_bytes(limit - self.armed_bytes)} were when the step began. What comes in between is not memfit's to refuse (NumPy's arrays, mapped "
            'files, workers, libraries): fit(enforce="kernel") lets the kernel refuse it. Have it before memfit.fit, free it, or raise the limit'
        )

    def disarm(self) -> None:
        """Takes the hard limit off."""
        if self._room is not None:
            self._room.lift()
            self._room = None
        if self.armed_bytes is not None:
            self._meter.set_limit(None)
            self.armed_bytes = self._next_bytes = None
            self._lift.detach()

    def _set_limit(self, limit_bytes: int) -> None:
        self._meter.set_limit(limit_bytes)
        self.armed_bytes, self._next_bytes = limit_bytes, None
        # A job that is dropped without `close` must not leave its limit on the process.
        self._lift.detach()
        self._lift = weakref.finalize(self, _lift_limit, self._meter, limit_bytes)


def _lift_limit(meter: DeviceMeter, limit_bytes: int) -> None:
    """Lifts a limit, unless another job has set its own since."""
    if meter.limit_bytes() == limit_bytes:
        meter.set_limit(None)


def outside_bytes(process: ProcessMeter | None, allocator: Allocator | FallbackAllocator | None) -> int:
    """Bytes of the process that our allocator did not give: interpreter, libraries, what was
    allocated before. 0 if either is None.
    """
    if process is None or allocator is None:
        return 0
    return max(0, process.counted_bytes() - allocator.stats().mapped_bytes)


def _scratch_bytes(step: PhaseRecord, base_bytes: int) -> int:
    """Bytes that the process held at the peak of a step beside its tensors, and gave back before
    its end.

    Peaks need not coincide: it is at least that.
    """
    return (step.process_peak_bytes or 0) - step.held_peak_bytes - base_bytes


# A model is in one hand at a time: a job's, or that of a session of `memfit.infer`.
#
# In: who has which parameters. Out: a refusal for whoever wants them as well. Both would give them
# memory of their own, and the first would be left with none.


class ModelOwner(Protocol):
    """Something that has parameters in hand."""

    def holds(self, parameters: Collection[int]) -> str | None:
        """Sentence that says what holds the model and how that is ended, if it has one of these
        parameters (by identity) now.
        """
        ...


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def note_holder(holder: ModelOwner) -> None:
    """Registers a holder, which is asked from now on, as long as it lives."""
    _holders.add(holder)


def refuse_held(model: nn.Module) -> None:
    """Refuses a model that is in somebody's hand, with whatever optimizer. Raises `UsageError`."""
    if _holder_of(model) is None:
        return
    gc.collect()  # a job that nobody can reach any more holds nothing
    found = _holder_of(model)
    if found is not None:
        raise UsageError(
            f"this model is not free: {found}; then its parameters are ordinary ones again, and it can be fitted anew"
        )


def _holder_of(model: nn.Module) -> str | None:
    wanted = {id(p) for p in model.parameters()}
    found = (holder.holds(wanted) for holder in list(_holders))
    return next((words for words in found if words is not None), None)


class Session:
    """Parameters that are in hand until `end`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {id(p) for p in model.parameters()}
        note_holder(self)

    def holds(self, parameters: Collection[int]) -> str | None:
        """See `ModelOwner`."""
        if self._parameters.isdisjoint(parameters):
            return None
        return "a session of memfit.infer has its parameters: leave its `with` first"

    def end(self) -> None:
        """Releases ownership of the parameters."""
        self._parameters.clear()
