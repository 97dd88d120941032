"""One forward and backward of a step whose code is the user's own lines.

In: the calls of the model as the user's loop makes them, and the backward that it asks for. Out:
weights that come and go, saved tensors that leave and return, gradients at home. Updates are a run
of their own, when the loop says `optimizer.step()`.

[Note: lines drive the list]
In `job.step` the run resumes the user's code (`engine.run`, [Note: who drives whom]). Here nobody
does: the loop is in the middle of a `for`, calls the model, does what it likes with the output and
calls `loss.backward()`. So forward works as backward always did: whoever comes to a call *advances*
the list to its forward, and every operation before it is done first. The first gradient that
reaches an output of a call begins backward: the list goes on behind its seed. Autograd tells when
the whole backward is over; what is left up to the end of this part is done then. One thread, one
stack, no coroutine: errors, Ctrl-C, debuggers and context managers behave as in plain PyTorch, and
no function of torch is replaced.

Code between two hooks is the user's: nothing is half done there, and a run that is given up
(`give_up`) in any such place leaves weights and gradients of earlier backwards as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch

from memfit.core.errors import UnsupportedError
from memfit.core.schedule import Action, Backward, Forward, Norm, Seed
from memfit.core.step import Step
from memfit.engine.entered_calls import Listener
from memfit.engine.measured_step import Recorder
from memfit.engine.run import StepRun
from memfit.engine.work import EngineParts, EnginePhase, StepInput


@dataclass(frozen=True, kw_only=True)
class LineWatch:
    """Functions that a driven run calls.

    Attributes:
        held: context in which Ctrl-C waits.
        before_backward: called when the first gradient arrives, before anything is done with it.
        after_backward: called when backward is over and its gradients are at home.
        failed_backward: called when backward has raised, before its caller hears of it.
    """

    held: Callable[[], AbstractContextManager[object]]
    before_backward: Callable[[], None]
    after_backward: Callable[[], None]
    failed_backward: Callable[[], None]


class _End:
    """Called by autograd when a backward is over, and dropped uncalled when it has raised."""

    def __init__(self, finish: Callable[[], None], fail: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._fail = fail

    def __call__(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def __del__(self) -> None:
        # Torch tells nobody of a backward that raised; but what it was to call at the end goes with
        # it, while the error is on its way to the lines.
        if self._finish is not None:
            self._fail()


class UserLines:
    """The user's lines in the place of a microbatch's coroutine.

    Attributes:
        microbatch: 0.
        position: index of the first call that they have not made yet.
    """

    def __init__(self, arrive: Callable[[int], None]) -> None:
        self.microbatch = 0
        self.position = 0
        self._arrive = arrive
        self._thread = threading.get_ident()

    @property
    def is_current(self) -> bool:
        """Tells whether the caller runs in the thread of the lines."""
        return threading.get_ident() == self._thread

    def pause(self, call: int) -> None:
        """Brings the list to the forward of a call, which the lines are about to make."""
        self._arrive(call)


class DrivenRun(StepRun):
    """Run of the operations of one forward and backward. See [Note: lines drive the list].

    Args:
        parts: of the engine.
        step: with one microbatch, whose updates wait for the norm.
        watch: is called.
        listener: told which call autograd has reached.
        is_new: no run of this step has come to its end yet.
        observe: called with each action when it is done.
        recorder: measures; None: the run is not measured. What the lines do between two calls
            counts in the first one.

    Attributes:
        is_over: backward has come to its end.
    """

    def __init__(
        self,
        parts: EngineParts,
        step: Step,
        watch: LineWatch,
        *,
        listener: Listener,
        is_new: bool,
        observe: Callable[[Action], None] | None,
        recorder: Recorder | None,
    ) -> None:
        nothing = StepInput(run=lambda _: None, shares=None, streams=())
        super().__init__(parts, step, nothing, listener=listener, is_new=is_new, observe=observe, recorder=recorder)
        self._end = end_of_backward(step)
        self._forwards = {a.first: i for i, a in enumerate(step.schedule.actions) if isinstance(a, Forward)}
        self._watch = watch
        self._lines = UserLines(self._arrive)
        self._watching = ExitStack()
        self.is_over = False

    @property
    def is_complete(self) -> bool:
        """All calls of the trace were made."""
        return self._lines.position >= len(self._schedule.calls)

    @property
    def is_untouched(self) -> bool:
        """No call of the trace was made yet."""
        return self._lines.position == 0

    @property
    def in_backward(self) -> bool:
        """Backward has begun, and has not come to its end."""
        return self.phase is EnginePhase.BACKWARD

    def begin(self) -> None:
        """Begins before the lines' first call."""
        self._parts.update_phase.begin()
        if self._parts.gradients is not None:
            self._parts.gradients.is_receiving = True
        self.calls.running = self._lines

    def watch_writes(self) -> None:
        """Begins to watch what operations write, for tensors that are not simply kept."""
        self._watching.enter_context(self._parts.frames.watching())

    def end_watch(self) -> None:
        """Ends `watch_writes`. Called where the context that it began in ends: a mode that the
        lines entered before must be on top again.
        """
        self._watching.close()

    def _start(self, m: int) -> None:
        """Does nothing: the lines have started long ago."""

    def _do_to(self, position: int) -> None:
        """Does the operations before a position. The forwards among them were not made."""
        while self._next < position:
            operation = self._operations[self._next]
            self._next += 1
            if isinstance(operation.action, Forward):
                self._begin(operation)
                self._parts.departures.append(f"{operation.action}: the lines did not make this call")
            elif isinstance(operation.action, Backward):
                self._begin(operation)  # no gradient came here
            else:
                self._do(operation)

    def _arrive(self, call: int) -> None:
        position = self._forwards[call]
        with self._watch.held():
            # What left after the call before has no bytes from here on, as it is priced.
            self._end_compute()
            self._do_to(position)
            operation = self._operations[position]
            self._next = position + 1
            self._begin(operation)
            self._owed = operation.waits_after

    # --- backward --------------------------------------------------------------------------------

    def reach(self, call: int, m: int, site: int) -> None:
        """Advances to the backward of a call, and begins backward with the first one."""
        with self._watch.held():
            self.begin_backward()
            super().reach(call, m, site)

    def begin_backward(self) -> None:
        """Begins backward when the first gradient is here; does nothing afterwards."""
        if self.phase is not EnginePhase.FORWARD:
            return
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a gradient of a gradient was asked for (create_graph=True): weights travel with one backward, and are away when the second one reads them. "
                "memfit trains no such loss yet: close the job, which makes the model ordinary again, and train it in plain PyTorch"
            )
        # Off first: calls that are run in backward are not the lines'.
        self.calls.running = None
        self.phase = EnginePhase.BACKWARD
        # Called when this whole backward is over, before `loss.backward()` returns; from here on,
        # since a refusal ends a backward too.
        torch.autograd.Variable._execution_engine.queue_callback(_End(self._finish, self._fail))
        self._watch.before_backward()
        self._end_compute()
        seed = next(i for i, o in enumerate(self._operations) if isinstance(o.action, Seed))
        # Forwards alone bring the list on before, and all of them stand before the seed.
        assert self._next <= seed
        self._do_to(seed)
        self._begin(self._operations[seed])
        self._next = seed + 1

    def _finish(self) -> None:
        if self.phase is not EnginePhase.BACKWARD:
            return  # it was given up meanwhile
        with self._watch.held():
            self._frames.end_pass(range(1))
            self._end_compute()
            self._do_to(self._end)
            self._end_compute()
            if self._parts.gradients is not None:
                # The lines may read them at once, through `.grad` or what stands there.
                self._parts.gradients.wait()
            if self._recorder is not None:
                self._recorder.end()
            self.is_over = True
            self._watch.after_backward()

    def _fail(self) -> None:
        if self.phase is EnginePhase.BACKWARD and not self.is_over:
            self._watch.failed_backward()

    # --- the end ---------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Ends a run before its end: nothing visits any more, and nothing is saved.

        Gradients of earlier backwards stay, with what this one has added to them.
        """
        self._frames.withdraw_all()
        self._watching.close()
        self._frames.finish_all()
        self.calls.restore()
        for block in self._parts.blocks:
            block.take_back_changes()
            try:
                block.release()
            # All visits must end; what else went wrong was raised where it was met.
            except Exception as error:  # noqa: BLE001, told as a departure
                self._parts.departures.append(f"while ending the visit of block {block.name!r}: {error!r}")


def end_of_backward(step: Step) -> int:
    """Returns the index of the operation that ends what is done for each backward: the norm, for
    which all updates wait.
    """
    return next(i for i, operation in enumerate(step.operations) if isinstance(operation.action, Norm))
