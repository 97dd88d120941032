"""Engine: executes lowered steps with the user's model and autograd.

In: a step, the blocks with their homes, the call sites. Out: gradients and updates, exactly as
plain PyTorch makes them. `engine.run` describes one run. Calls outside of any step get their
weights on demand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from memfit.core.errors import UnsupportedError
from memfit.core.schedule import Action
from memfit.core.step import Step
from memfit.engine.driven_run import DrivenRun, LineWatch, end_of_backward
from memfit.engine.entered_calls import Listener, ServedCalls, StepCalls
from memfit.engine.measured_step import BothRecorders, Recorder, StepRecorder
from memfit.engine.modules import MicrobatchLeaves, ModuleNotes, watch_arrivals, watch_last
from memfit.engine.run import StepRun
from memfit.engine.sites import OwnWeights, SideTensors, Site, SiteHooks
from memfit.engine.update_phase import UpdatePhase, Visits
from memfit.engine.work import EngineParts, EnginePhase, FrameFactory, Outcome, StepInput
from memfit.homes.gradients import GradientHomes
from memfit.homes.updates import UpdateWorker
from memfit.homes.weights import BlockWeights, check_untouched
from memfit.tensors.one_call import OneCall

_MODEL = "a call of the model"


class Engine:
    """Runs steps over one model.

    Memory: nothing of its own beyond frames and what the step holds.

    Args:
        model: the user's.
        sites: all call sites; hooks are put on them until `close`.
        blocks: by the schedule's block index.
        frames: makes the frames of calls.
        gradients: their homes.
        updates: the worker.
        parameter_order: names in the model's order (norms are summed in it).
        calls: guard of the job's public calls, one of which a call outside of any step is.
        device_types: whose autocast state belongs to a coroutine.
        loose: indices of the blocks that code outside of all calls reads.
        observe: called with each action when it is done (a backward: when it begins).

    Attributes:
        before_call: called before a call that no run has foreseen, which may begin one; None:
            nobody asks.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        sites: Sequence[Site],
        blocks: Sequence[BlockWeights],
        frames: FrameFactory,
        gradients: GradientHomes | None,
        updates: UpdateWorker | None,
        parameter_order: Sequence[str],
        calls: OneCall,
        device_types: tuple[str, ...] = ("cpu",),
        loose: Sequence[int] = (),
        observe: Callable[[Action], None] | None = None,
    ) -> None:
        adds_apart = gradients is not None and gradients.here.adds_apart
        # What the schedule did not foresee; its `append` is shared, because a method of the engine
        # would be a cycle.
        departures: list[str] = []
        update_phase = UpdatePhase(blocks, gradients, updates, parameter_order, departures.append)
        self._parts = EngineParts(
            sites=tuple(sites),
            blocks=tuple(blocks),
            frames=frames,
            gradients=gradients,
            update_phase=update_phase,
            visits=Visits(blocks, update_phase.wait, departures.append, update_phase.wait_for_device),
            notes=ModuleNotes(model),
            own=OwnWeights(tuple(sites)),
            side_tensors=SideTensors(tuple(sites)),
            own_leaves=MicrobatchLeaves(model, tuple(blocks)) if adds_apart else None,
            device_types=device_types,
            loose=tuple(loose),
            departures=departures,
        )
        self._observe = observe
        self._one = calls
        self._recorder: Recorder | None = None
        self._arrivals: list[Any] = []
        if gradients is not None and adds_apart:
            self._arrivals = watch_arrivals(self._parts.blocks, gradients)
        # Weak: a new step may get the `id` of one that is forgotten.
        self._learned: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()
        self._hooks = SiteHooks(self._parts.sites, self)
        self._serial = 0
        self._run: StepRun | None = None
        self._ran_at = ""
        self._idle = self._served()
        self._calls: ServedCalls | StepCalls = self._idle
        self._looks_away = False
        self.before_call: Callable[[], None] | None = None

    def heed_hooks(self) -> None:
        """Takes note of hooks on gradients that were registered since: they run before gradients go
        home.
        """
        watch_last(self._parts.blocks)

    @property
    def sites(self) -> tuple[Site, ...]:
        """All call sites."""
        return self._parts.sites

    @property
    def at(self) -> str:
        """Text of the action that runs now or ran last, for messages."""
        return self._ran_at if self._run is None else self._run.at

    def run(self, step: Step, work: StepInput) -> Outcome:
        """Runs a step from its first operation to its last.

        Raises:
            Whatever the user's code or a transfer raised; the coroutines are ended, and blocks and
            gradients are as `StepRun.recover` leaves them.
        """
        return self._run_from(0, step, work)

    def update(self, step: Step) -> Outcome:
        """Runs what a step does once for all the backwards that were driven: its updates and its
        commit.

        Raises:
            Whatever a transfer or the optimizer raised; as `run`.
        """
        # The norm before them has been taken by the user's lines, where they want one.
        nothing = StepInput(run=lambda _: None, shares=None, streams=())
        return self._run_from(end_of_backward(step) + 1, step, nothing)

    def _run_from(self, first: int, step: Step, work: StepInput) -> Outcome:
        # Before the listener is made: hooks in graphs of earlier steps keep the number of theirs.
        self._serial += 1
        self._parts.departures.clear()
        run = self._run = StepRun(
            self._parts,
            step,
            work,
            listener=self._listener(),
            is_new=self._learned.get(id(step)) is not step,
            observe=self._observe,
            recorder=self._recorder,
        )
        self._calls = run.calls
        try:
            run.go(first)
            # Inside of the `try`: a step whose weights were given other memory has failed.
            check_untouched(self._parts.blocks)
            # Only a run that came to its end has seen all calls.
            self._learned[id(step)] = step
            return run.outcome
        except BaseException:
            # Ctrl-C and the end of the process too: an update may still be writing to weights.
            run.recover()
            raise
        finally:
            # The error's traceback holds this frame and so the run: it must let go of the graph.
            self._end(run)

    def _end(self, run: StepRun) -> None:
        run.forget()
        self._run, self._ran_at = None, run.at
        # Made anew: a call that an interrupt broke off was never left, and would count as open.
        self._calls = self._idle = self._served()
        # Behind `recover`: updates have ended, and nothing writes to these visits any more.
        self._parts.visits.end_on_demand()
        # A copy, since the next run clears the list; last, when all have been told.
        run.outcome.departures = list(self._parts.departures)

    def drive(self, step: Step, watch: LineWatch) -> DrivenRun:
        """Begins a forward and backward that the user's own lines drive; see `engine.driven_run`.

        `end_drive` ends it, also when it is given up.
        """
        self._serial += 1
        self._parts.departures.clear()
        run = DrivenRun(
            self._parts,
            step,
            watch,
            listener=self._listener(),
            is_new=self._learned.get(id(step)) is not step,
            observe=self._observe,
            recorder=self._recorder,
        )
        self._run, self._calls = run, run.calls
        run.begin()
        return run

    def end_drive(self, run: DrivenRun) -> tuple[str, ...]:
        """Ends a driven run, before its end or after it. Returns its departures.

        Raises:
            UnsupportedError: a weight was given other memory in a run that came to its end.
        """
        was_whole = run.is_over
        try:
            if was_whole:
                check_untouched(self._parts.blocks)
            else:
                run.give_up()
        finally:
            self._end(run)
        return tuple(run.outcome.departures)

    def evaluate(self, step: Step, work: StepInput) -> list[Any]:
        """Runs a forward-only step and returns the results of the user's function, one for each
        microbatch.
        """
        results: dict[int, Any] = {}
        plain = work.run

        def run(m: int) -> None:
            results[m] = plain(m)

        self.run(step, StepInput(run=run, shares=None, streams=work.streams))
        return [results[m] for m in sorted(results)]

    @contextmanager
    def recording(self, recorder: StepRecorder) -> Iterator[None]:
        """Context in which runs are measured. Inside of another one both measure."""
        outer = self._recorder
        self._recorder = recorder if outer is None else BothRecorders(outer, recorder)
        try:
            yield
        finally:
            self._recorder = outer

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Context in which the engine ignores calls of the model, as of a trace on stand-ins for
        the weights.
        """
        self._looks_away = True
        try:
            yield
        finally:
            self._looks_away = False

    def close(self) -> None:
        """Removes the hooks."""
        self._hooks.remove()
        while self._arrivals:
            self._arrivals.pop().remove()

    # --- calls -----------------------------------------------------------------------------------

    def enter(self, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `CallObserver`."""
        if self._looks_away:
            return
        if self.before_call is not None and self._run is None and not self._idle.is_inside:
            self.before_call()
        if self._run is not None:
            self._one.check_thread(_MODEL)
            self._calls.enter(site, args, kwargs)
            return
        with self._one.enter(_MODEL):
            self._calls.enter(site, args, kwargs)

    def leave(self, site: int, output: Any) -> None:
        """See `CallObserver`."""
        if not self._looks_away:
            with nullcontext() if self._run is not None else self._one.leave(_MODEL):
                self._calls.leave(site, output)

    @contextmanager
    def recomputing(self, blocks: Sequence[int] = ()) -> Iterator[None]:
        """Context of a call that is recomputed in backward: its sites are ignored, and nothing
        pauses.

        Args:
            blocks: blocks whose weights it reads. They may still be away, if a gradient reached a
                later call of the segment by another tensor before any of its outputs.
        """
        # Held: the counter that goes down must be the one that went up.
        calls = self._calls
        # Here, since sites are ignored from the next line on and fetch nothing.
        calls.ensure(blocks)
        calls.recomputing += 1
        try:
            yield
        finally:
            calls.recomputing -= 1

    def begins(self, serial: int, call: int | None, microbatch: int, site: int) -> None:
        """See `BackwardObserver`."""
        run = self._run
        if call is None or call < 0:  # served: weights must be here until autograd is through
            self._parts.visits.ensure(self._parts.sites[site].blocks, is_foreseen=True)
            if run is None:
                # When the whole backward is over: nodes that were made earlier read weights still.
                torch.autograd.Variable._execution_engine.queue_callback(self._parts.visits.end_on_demand)
            return
        if serial != self._serial or run is None or run.phase is EnginePhase.IDLE:
            if self.before_call is not None:
                raise UnsupportedError(
                    "backward came to a forward whose weights and saved tensors are given up: it was run back before (a second backward on one graph), or another "
                    "forward began after it. Run each loss back once and before the next forward; where a loss needs several forwards, let the loss function "
                    "given to memfit.fit make them too"
                )
            raise UnsupportedError(
                "backward was called on a graph of a step that memfit has already run back: job.step(batch) computes the gradients itself; "
                "return the loss from the loss function and use the result's .loss only as a number"
            )
        run.reach(call, microbatch, site)

    def _listener(self) -> Listener:
        # Weak: a loss that the user keeps holds its graph, and the graph would hold all the homes.
        return Listener(observer=weakref.ref(self), serial=self._serial)

    def _served(self) -> ServedCalls:
        return ServedCalls(self._parts, self._listener())
