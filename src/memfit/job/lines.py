"""Steps that are made by lines of the user's own: forward, `loss.backward()`, `optimizer.step()`.

In: a job, and what the lines do with its model and optimizer. Out: updates, bit for bit those that
the lines make in plain PyTorch.

[Note: a window]
A *window* is what happens between two updates: any number of forwards and backwards, the gradients
of which add up, then `optimizer.step()`. Each forward and backward is a driven run of the engine
(`engine.driven_run`), and the update is one of its own; nothing of memfit waits in between, so the
lines may end there, raise, evaluate, or go on with another model. What they do to gradients between
two runs is found out when the next one needs them (`homes.gradient_standins`).

A forward that is never run back is given up when the next one begins, as its graph is in plain
PyTorch. A backward that fails leaves gradients that are a part of what they should be: they are
dropped, and `zero_grad` must come before the next.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd.graph import get_gradient_edge

from memfit.core.errors import LimitBreachError, MemfitError, MemfitWarning, UnsupportedError, UsageError
from memfit.core.limits import format_bytes
from memfit.devices.kernel import is_refusal, refusal_words
from memfit.engine.coroutines import can_pause
from memfit.engine.driven_run import DrivenRun, LineWatch, end_of_backward
from memfit.engine.measured_step import StepRecorder
from memfit.engine.writes import sample_of
from memfit.homes.gradient_standins import WindowGradients
from memfit.job.assembly import Assembly
from memfit.job.step_runner import StepRunner
from memfit.job.steps import make_update
from memfit.planner.setup import Prepared
from memfit.tensors.trees import buffers_of, tensors_in

_FORWARD = "a forward or backward inside of job.lines()"
_NOT_FOR_LINES = "the job was planned for job.step, which makes whole steps. Make it with memfit.fit(..., lines=True), and a sample that is one batch of your loop"


class Lines:
    """The user's own lines, while their context lasts. Made by `Job.lines`.

    Args:
        runner: of the job's steps.
        check_usable: raises where the job cannot be used now.

    Attributes:
        steps: updates so far in this context.
        backwards: backwards since the last update.
        departures: texts of what the last run met that the trace had not foreseen.
    """

    def __init__(self, runner: StepRunner, check_usable: Callable[[], object]) -> None:
        self.steps = 0
        self.backwards = 0
        self.departures: tuple[str, ...] = ()
        self._runner = runner
        self._assembly = runner.assembly
        self._check_usable = check_usable
        self._gradients = WindowGradients(runner.assembly.blocks, runner.assembly.house.gradients)
        self._thread = threading.get_ident()
        self._installed = ExitStack()
        self._around = ExitStack()
        self._run: DrivenRun | None = None
        self._prepared: Prepared | None = None
        self._sample = runner.assembly.setup.lines_sample
        self._recorder: StepRecorder | None = None
        self._is_busy = False
        self._has_raised = False
        self._is_inside = False
        self._is_scoped = False
        self._outputs: list[tuple[torch.Tensor, object]] = []
        self._given: list[weakref.ref[torch.Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Lines:
        return _idle_lines()  # of hooks: a copy of the model is an ordinary model

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle_lines, ()  # one that is pickled too

    # --- the context -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        assembly = self._assembly
        if not assembly.setup.has_lines:
            raise UsageError(_NOT_FOR_LINES)
        if assembly.engine.before_call is not None:
            raise UsageError("job.lines() is open already: leave the one before it")
        model, engine, step = assembly.model, assembly.engine, assembly.driver.users_step
        with self._runner.calls.enter("job.lines"), ExitStack() as stack:
            # Ahead of the user's own hooks, which may read weights; behind them at the end.
            stack.callback(model.register_forward_pre_hook(self._enter_model, prepend=True, with_kwargs=True).remove)
            stack.callback(model.register_forward_hook(self._leave_model, with_kwargs=True, always_call=True).remove)
            for node in self._nodes_outside_of_calls():
                stack.callback(node.register_prehook(self._before_gradient).remove)
            engine.before_call, step.served = self._before_call, self._step
            stack.callback(self._stop_serving)
            self._installed = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        unused, is_planned = self.backwards, self._run is not None
        with self._runner.interrupts.held(), self._runner.calls.leave("the end of job.lines"):
            self._installed.close()
            self._give_up()
            if error is None and unused and not self._gradients.are_left():
                unused = 0
            self._gradients.end(are_used=not self.backwards)
        if error is None and unused:
            warnings.warn(
                f"the lines ended with the gradients of {unused} backward{'s' if unused > 1 else ''} that no optimizer.step() used; they are given up. Go on inside "
                "of one `with job.lines():` where a window lasts longer",
                MemfitWarning,
                stacklevel=4,
            )
        if error is not None and is_refusal(error) and not isinstance(error, MemfitError):
            raise LimitBreachError(
                self._breach_text(error, is_planned=is_planned),
                phase="step",
                where=self._assembly.engine.at,
                torn=False,
            ) from error

    def _stop_serving(self) -> None:
        self._assembly.engine.before_call = None
        self._assembly.driver.users_step.served = None

    def _nodes_outside_of_calls(self) -> list[Any]:
        """Nodes that take the gradients of weights which no call announces: backward may begin with
        one of them.
        """
        found: list[Any] = []
        for block in self._assembly.blocks:
            for slot in (slot for slot in block.slots if slot.requires_grad):
                with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001, the weight may be away
                    found.append(get_gradient_edge(slot.parameter).node)
        return found

    def _breach_text(self, error: BaseException, *, is_planned: bool) -> str:
        limit = self._assembly.machine.limits.device_bytes
        way = (
            "Try a smaller batch, or a larger limit; batches larger than the sample that memfit.fit was given were not planned for"
            if is_planned
            else "No planned forward was under way: memfit places no memory around other work (per-sample gradients, vmap). Do less at once, or raise the limit"
        )
        return (
            f"the limit{'' if limit is None else ' of ' + format_bytes(limit)} was hit in lines of yours, behind '{self._assembly.engine.at}': "
            f"{refusal_words(error)} Nothing was updated since the last optimizer.step(). {way}"
        )

    def expect(self, batch: Any) -> None:
        """Plans for a batch before its forward begins, if it is larger than the sample and those
        before it. Without this call such a batch runs as the sample was planned.

        Memory: the largest batch stays.

        Raises:
            DoesNotFitError: it does not fit under the plan; nothing has begun.
        """
        if _elements(batch) <= _elements(self._sample):
            return
        with self._runner.calls.enter("lines.expect"), self._tracing():
            prepared = self._assembly.shapes.prepare(batch)
        self._sample = batch
        if self._prepared is not None:
            # The window goes on under the larger prediction; its measurement was of the other one.
            self._prepared, self._recorder = prepared, None

    # --- forward ---------------------------------------------------------------------------------

    @contextmanager
    def forward(self, *given: Any) -> Iterator[None]:
        """Context of a forward that does not call the model, but parts of it, as Lightning's
        `training_step` does.

        Args:
            given: what it gets; tensors among it stay where they are.
        """
        model = self._assembly.model
        self._enter_model(model, given, {})
        self._is_scoped = True
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            self._is_scoped = False
            self._leave_model(model, (), {}, () if is_whole else None)
            if self._run is not None and self._run.is_untouched:
                with self._runner.calls.leave(_FORWARD):
                    self._give_up()

    def _enter_model(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_scoped or not self._may_begin():
            return
        with self._runner.interrupts.working(_FORWARD):
            run = self._run
            # Entered and never left: a Ctrl-C that the lines have caught.
            self._has_raised |= self._is_inside
            if run is not None and (run.in_backward or run.is_complete or self._has_raised):
                # Nobody ran it back, or backward failed: in plain PyTorch its graph would be
                # dropped.
                self._give_up()
            if self._run is None:
                self._begin((args, kwargs))
        assert self._run is not None
        self._run.watch_writes()
        self._is_inside = True

    def _leave_model(self, _module: torch.nn.Module, _args: object, _kwargs: object, output: Any) -> None:
        run = self._run
        if run is None or self._is_scoped or threading.get_ident() != self._thread or self._is_busy:
            return
        run.end_watch()
        self._is_inside = False
        if output is None:
            self._has_raised = True
        elif torch.is_grad_enabled():
            self._given += [weakref.ref(t) for t in tensors_in(output)]
            self._outputs += [(t, _state_of(t)) for t in tensors_in(output)]

    def _before_call(self) -> None:
        """Begins a forward of a part of the model that the lines call by itself."""
        if not self._may_begin():
            return
        with self._runner.interrupts.working(_FORWARD):
            self._begin(())
            manages = self._assembly.frames.manages
            if manages:
                self._give_up()
        if manages:
            raise UnsupportedError(
                "these lines call a part of the model, not the model, and the plan does not simply keep what its calls save: changes in place between the "
                "calls could not be seen. Call the model itself, put `with lines.forward():` around these calls (lines is what job.lines() gives), or plan "
                "saved='keep' for all calls"
            )

    def _may_begin(self) -> bool:
        return (
            not self._is_busy
            and torch.is_grad_enabled()
            and threading.get_ident() == self._thread
            and can_pause()
            and not (self._assembly.is_stepping and self._run is None)
        )

    def _begin(self, given: Any) -> None:
        """Begins a forward and backward.

        Args:
            given: what the model was called with.
        """
        assembly, runner = self._assembly, self._runner
        with runner.interrupts.held(), ExitStack() as stack:
            prepared = self._prepared = self._begin_window() if self._prepared is None else self._prepared
            # Lines let go of what the last forward gave when the next one gives it anew.
            last = [output for given in self._given if (output := given()) is not None]
            self._given.clear()
            runner.refuse_lines(prepared, [assembly.setup.lines_sample, last])
            stack.enter_context(assembly.stepping())
            stack.enter_context(runner.phase())
            stack.enter_context(assembly.setting())
            staying = [*buffers_of(assembly.model), *tensors_in(given)]
            assembly.frames.begin_step(prepared.plan, prepared.calls, staying)
            watch = LineWatch(
                held=self._working_briefly,
                before_backward=self._before_backward,
                after_backward=self._after_backward,
                failed_backward=self._gradients.fail,
            )
            self._has_raised = self._is_inside = False
            if not self.backwards:
                # Of the first backward: what the later ones hold besides is not in its prediction.
                self._recorder = runner.lines_recorder(prepared, given)
            recorder = None if self.backwards else self._recorder
            with nullcontext() if recorder is None else assembly.engine.recording(recorder):
                self._run = assembly.engine.drive(prepared.step, watch)
            self._around = stack.pop_all()

    @contextmanager
    def _working_briefly(self) -> Iterator[None]:
        with self._runner.interrupts.held_briefly(), self._runner.calls.enter(_FORWARD):
            yield

    def _begin_window(self) -> Prepared:
        self._check_usable()
        with self._tracing():
            prepared = self._runner.prepare_lines(self._sample)
        self._gradients.begin()
        return prepared

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Context in which the model runs for a trace, and not for a line of the user's."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    # --- backward --------------------------------------------------------------------------------

    def _before_gradient(self, _gradients: Any) -> None:
        if self._run is not None:
            with self._working_briefly():
                self._run.begin_backward()

    def _before_backward(self) -> None:
        self._gradients.before_backward()
        for tensor, state in self._outputs:
            if _state_of(tensor) != state:
                self._assembly.frames.note_write(tensor)
        self._outputs.clear()

    def _after_backward(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        self._end(run)
        self.backwards += not self._gradients.is_stale
        self._gradients.show()

    def _end(self, run: DrivenRun) -> None:
        self._outputs.clear()
        with self._around:
            self.departures = self._assembly.engine.end_drive(run)

    def _give_up(self) -> None:
        """Gives the forward or backward up that is under way, if there is one."""
        run, self._run = self._run, None
        if run is None:
            return
        was_in_backward = run.in_backward
        if not self.backwards:
            self._recorder = None
        with self._runner.interrupts.held():
            self._end(run)
            if was_in_backward:
                self._gradients.fail()
                self._gradients.forget()
                self.backwards = 0

    # --- the update ------------------------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        with self._runner.interrupts.working("optimizer.step"):
            self._give_up()
            self._update()
        self._runner.tell_lines_step(self.departures)
        return value

    def _update(self) -> None:
        assembly = self._assembly
        self._check_usable()
        self._gradients.before_update()
        # Without a backward, and zeroed, there are no gradients: an update of nothing, as in plain
        # PyTorch.
        prepared = self._begin_window() if self._prepared is None else self._prepared
        used = self._gradients.used()
        try:
            with assembly.stepping(), self._runner.phase(), _recording_update(self._recorder, assembly, prepared):
                outcome = make_update(assembly, prepared, self._runner.interrupts)
        except BaseException:
            self._prepared, self._recorder, self.backwards = None, None, 0
            self._gradients.forget()
            self._gradients.spend(used, "the update failed, and gave the gradients up")
            raise
        recorder = self._recorder
        self._prepared, self._recorder, self.backwards = None, None, 0
        self.steps += 1
        self.departures = tuple(outcome.departures)
        self._gradients.spend(used)
        self._runner.end_lines_step(prepared, recorder)


def _state_of(tensor: torch.Tensor) -> object:
    """Returns what shows changes in place: the version counter, and the bits of four elements, for
    writes that pass the counter by.
    """
    return tensor._version, sample_of(tensor)  # noqa: SLF001, torch has no other word for it


def _idle_lines() -> Lines:
    """Makes lines whose hooks do nothing."""
    lines = object.__new__(Lines)
    lines._is_scoped, lines._run = True, None
    return lines


def _elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))


def _recording_update(
    recorder: StepRecorder | None, assembly: Assembly, prepared: Prepared
) -> AbstractContextManager[None]:
    """Returns a context in which the update is measured, behind the backward that was."""
    if recorder is None:
        return nullcontext()
    # The lines have taken it, where they wanted one.
    recorder.pass_over(prepared.step.operations[end_of_backward(prepared.step)].action)
    return assembly.engine.recording(recorder)
