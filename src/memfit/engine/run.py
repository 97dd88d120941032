"""Run of a step: executes its operations in order, with their waits.

In: a lowered step, the engine's parts, the user's code. Out: an `Outcome`; departures from the
list, in words.

[Note: who drives whom]
Forward: the run resumes a microbatch's coroutine (`forward C5 m0`); user code runs until it is
about to enter the next segment, pauses there, and the run goes on to the next operation. Backward:
autograd drives. It runs the latest-made node first, hence call after call in reverse order and,
within a call, microbatches in the order opposite to forward. When the first gradient reaches an
output of call c of microbatch m, the hook of that output *advances* the list to `backward Cc m`:
every operation before it (accumulate, update, release, fetch) is done first. At that moment nothing
of a later-made call is left to run, so what came before is complete. Only what the list says is
done, in its order; a call or gradient that it does not foresee is served (weights fetched and
waited for on the spot), counted as a departure and reported.

[Note: who waits]
The host waits for the tokens that an operation names, and for no others: before it is done for
`waits` and `after`, at its end for `waits_after`. Two are waited for as late as may be within their
operation: weights of a forward by the call that reads them, reloaded tensors by whoever unpacks
them. What an operation lists as `awaited` (a sum that it adds to) it reads and waits for itself.
What is served on demand is waited for beside the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from memfit.core.errors import UnsupportedError
from memfit.core.schedule import (
    Accumulate,
    Action,
    Backward,
    Check,
    Clear,
    Commit,
    Decide,
    Drop,
    Fetch,
    Forward,
    Joint,
    Keep,
    Norm,
    Offload,
    Release,
    Reload,
    Scale,
    Seed,
    Spread,
    Start,
    Unscale,
    Update,
)
from memfit.core.step import Operation, Step, Token
from memfit.engine.backward import BackwardPasses, Counts, Seeds, seed
from memfit.engine.coroutines import Coroutine
from memfit.engine.entered_calls import Listener, StepCalls
from memfit.engine.measured_step import Recorder
from memfit.engine.update_phase import TurnGates
from memfit.engine.work import EngineParts, EnginePhase, OpenFrames, Outcome, StepInput


class StepRun:
    """One run. Its maker calls `recover` after an error, and `forget` at the end.

    Args:
        parts: of the engine.
        step: its operations.
        work: the user's.
        listener: told which call autograd has reached.
        is_new: no run of this step has come to its end yet.
        observe: called with each action when it is done (a backward: when it begins).
        recorder: measures the run; None: it is not measured.

    Attributes:
        at: text of the action that runs now or ran last, for messages.
        phase: what autograd may be doing.
        calls: the user's calls as they come.
        outcome: the outcome so far.
    """

    def __init__(
        self,
        parts: EngineParts,
        step: Step,
        work: StepInput,
        *,
        listener: Listener,
        is_new: bool,
        observe: Callable[[Action], None] | None,
        recorder: Recorder | None,
    ) -> None:
        schedule = step.schedule
        self._parts = parts
        self._operations = step.operations
        self._schedule = schedule
        self._work = work
        self._observe = observe
        self._recorder = recorder
        self._position_of = {a: i for i, a in enumerate(schedule.actions) if isinstance(a, Backward)}
        self._segment_of = {
            c: (a.first, a.last) for a in schedule.actions if isinstance(a, Forward) for c in range(a.first, a.last + 1)
        }
        self._has_joint = any(isinstance(a, Joint) for a in schedule.actions)
        self._trains = any(isinstance(a, Seed) for a in schedule.actions)
        self._frames = OpenFrames()
        self._passes = BackwardPasses(parts, schedule, is_new=is_new)
        self.calls = StepCalls(
            parts,
            schedule,
            frames=self._frames,
            passes=self._passes,
            leaves=parts.own_leaves if schedule.is_interleaved and self._trains else None,
            listener=listener,
            recorder=recorder,
            refuses_reuse=work.adds_as_loop and schedule.is_interleaved and self._trains,
        )
        self._counts = Counts(schedule.microbatches, work.count_over_ranks)
        self._coroutines: dict[int, Coroutine] = {}
        self._begun: set[tuple[int, int]] = set()
        self._next = 0
        # Of the forward or backward that runs or ran last, what its end waits for.
        self._owed: tuple[Token, ...] = ()
        self._gates = TurnGates()
        self._loss_scale: float | None = None
        self.at = ""
        self.phase = EnginePhase.FORWARD
        self.outcome = Outcome()
        parts.notes.begin_run(learns=is_new)

    def go(self, first: int = 0) -> None:
        """Executes all operations, or those from an index on.

        Raises:
            Whatever the user's code or a transfer raised.
        """
        parts = self._parts
        parts.update_phase.begin()
        if parts.gradients is not None:
            # From here to `forget`, what hooks on weights see are gradients of this step.
            parts.gradients.is_receiving = self._trains
        self._next = first
        while self._next < len(self._operations):
            # Counted before it is done: hooks inside of a seed or joint advance the list from here.
            self._next += 1
            self._do(self._operations[self._next - 1])
        self._frames.end_pass(range(len(self._coroutines)))
        if self._schedule.is_interleaved:
            parts.notes.enter(self._coroutines[self._schedule.microbatches - 1].notes)

    def recover(self) -> None:
        """Recovers from an error: ends coroutines and updates, visits and gradients. The first
        error is already being raised.
        """
        parts = self._parts
        # First: `abandon` waits for updates, and these for the gates of their turns.
        self._gates.shut()
        # While weights and leaves are still in place: the user's `finally` clauses may compute.
        for coroutine in self._coroutines.values():
            try:
                coroutine.cancel()
            except Exception as error:  # noqa: BLE001, a user's `finally` may fail as well; it is reported beside the first error
                parts.departures.append(f"while ending microbatch {coroutine.microbatch}: {error!r}")
        self._frames.finish_all()
        # Behind the coroutines: calls that `GreenletExit` has ended never came to `leave`.
        self.calls.restore()
        # Before any block goes: an update under way would write into freed memory.
        parts.update_phase.abandon()
        for block in parts.blocks:
            block.take_back_changes()  # an error is on its way
            try:
                block.release()
            # Where a disk fails, several visits under way fail: all must end, and the first error
            # is the one to raise.
            except Exception as error:  # noqa: BLE001, as above
                parts.departures.append(f"while ending the visit of block {block.name!r}: {error!r}")

    def forget(self) -> None:
        """Drops all references to the user's objects, since an error's traceback may hold the run
        for long.
        """
        self.phase = EnginePhase.IDLE
        if self._parts.gradients is not None:
            # Else a backward of the user's own would find its gradients taken off `.grad`.
            self._parts.gradients.is_receiving = False
        self._coroutines.clear()
        self._frames.forget()
        self._passes.forget()
        self.calls.running = None

    # --- operations ------------------------------------------------------------------------------

    def _do(self, operation: Operation) -> None:
        action = operation.action
        self._begin(operation)
        match action:
            case Start(m):
                self._start(m)
            case Forward():
                self._forward(action, operation)
            case Seed(first, last):
                self._seed(first, last)
            case Joint():
                self._run_joint()
            case Backward():
                pass  # no gradient came here: else the hooks would have advanced beyond it
            case _:
                self._wait((*operation.waits, *operation.after))
                # An accumulate reads the sum that it adds to, and returns when it has it.
                with self._stalled("accumulate") if operation.awaited else nullcontext():
                    self._execute(operation)
        if self._recorder is not None:
            self._recorder.end()
        if self._observe is not None:
            # Last: it raises a Ctrl-C that was noted, and nothing may be half done then.
            self._observe(action)

    def _begin(self, operation: Operation) -> None:
        self.at = str(operation.action)
        if self._recorder is not None:
            self._recorder.begin(operation.action)

    def _execute(self, operation: Operation) -> None:
        """Executes an operation on weights, saved tensors, gradients or updates."""
        parts, work, action = self._parts, self._work, operation.action
        match action:
            case Fetch(b):
                parts.visits.fetch(b)
            case Release(b):
                parts.visits.release(b)
            case Offload() | Drop() | Reload():
                self._frames.move(action)
            case Scale() | Unscale() | Check():
                self._scale(action)
            case Norm():
                self.outcome.norm = parts.update_phase.norm(work.max_norm)
            case Update(b):
                assert operation.update_place is not None
                parts.update_phase.update(b, operation.update_place, self._gates.before(operation))
            case Spread(b):
                parts.update_phase.spread(b)
            case Decide():
                assert work.journal is not None
                # Gradients first: a journal that names one still on its way cannot be finished
                # after a crash.
                if parts.update_phase.gather():
                    work.journal.decide(self.outcome)
            case Keep(blocks):
                if not parts.update_phase.skips:
                    assert work.journal is not None
                    work.journal.keep(blocks)
                    # Not before: updates would write over the versions that a crash goes back to.
                    self._gates.open(operation)
            case Accumulate() | Clear() | Commit():
                parts.update_phase.do(action)
            case _:
                pass  # it only waits

    def _scale(self, action: Scale | Unscale | Check) -> None:
        """See `engine.loss_scaling`, [Note: fp16 as GradScaler does it]."""
        work = self._work
        assert work.scale is not None
        match action:
            case Scale():
                self._loss_scale = work.scale
            case Unscale():
                self._parts.update_phase.unscale(work.scale)
            case Check():
                self.outcome.is_skipped = not self._parts.update_phase.check()
                if not self.outcome.is_skipped and work.begin_updates is not None:
                    # Only now: a step that is skipped must not be counted by the optimizer.
                    work.begin_updates()

    # --- waiting, see [Note: who waits] ----------------------------------------------------------

    def _wait(self, tokens: Iterable[Token]) -> None:
        for token in tokens:
            with self._stalled(token.kind):
                self._wait_for(token)

    def _stalled(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.stall(kind)

    def _wait_for(self, token: Token) -> None:
        parts = self._parts
        match token.kind:
            case "fetch":
                parts.blocks[_block(token)].wait()
            case "accumulate":
                assert parts.gradients is not None
                parts.gradients.wait()
            case "update" | "spread":
                parts.update_phase.wait(_block(token))
            case "keep":
                pass  # a gate: the update's own thread waits for it
            case _:
                # the frames wait for what they move: a drop for its offload, an unpacking for its
                # reload
                pass

    def _end_compute(self) -> None:
        """Ends a forward or backward: gradients that left before it have no bytes on the device any
        more.
        """
        # Taken off before the wait: where that raises, the next end must not raise the same again.
        owed, self._owed = self._owed, ()
        self._wait(owed)

    # --- forward ---------------------------------------------------------------------------------

    def _start(self, m: int) -> None:
        work = self._work
        watching = self._parts.frames.watching  # not by way of the run, which holds the coroutine

        def run() -> Any:
            with watching():
                return work.run(m)

        coroutine = Coroutine(
            m,
            run,
            stream=work.streams[m],
            device_types=self._parts.device_types,
            modules=self._parts.notes if self._schedule.is_interleaved else None,
        )
        self._coroutines[m] = coroutine
        self.calls.resume(coroutine)

    def _forward(self, action: Forward, operation: Operation) -> None:
        coroutine = self._coroutines[action.microbatch]
        if self._passes.is_in_tail(action.first):
            # Before its code goes on: the nodes that it makes from here on are the tail's.
            self._passes.begin_tail(action.microbatch)
        self._owed = operation.waits_after
        if coroutine.is_finished or (coroutine.call is not None and coroutine.call > action.first):
            self._parts.departures.append(f"{action}: microbatch {action.microbatch} did not make this call")
        else:
            self.calls.resume(coroutine)
        self._end_compute()

    # --- backward --------------------------------------------------------------------------------

    def _seed(self, first: int, last: int) -> None:
        microbatches = range(first, last + 1)
        for m in microbatches:
            # It pauses at calls of the schedule alone, behind which nothing is left of it.
            assert self._coroutines[m].is_finished
        seeds = self._seeds(microbatches)
        if self._passes.tail is None:
            # Before autograd runs: its hooks take a backward in another phase for the loss's own.
            self.phase = EnginePhase.BACKWARD
            self._passes.run_whole(seeds)
            self._end_pass(microbatches)
            return
        self.phase = EnginePhase.TAIL
        self._passes.run_tail(first, seeds)
        self._frames.leave()
        self._end_compute()
        self.phase = EnginePhase.FORWARD
        if self._passes.has_cuts and not self._has_joint and last == self._schedule.microbatches - 1:
            self._parts.departures.append("gradients reach calls before the tail, where the trace saw none")
            self._run_joint()

    def _run_joint(self) -> None:
        """Runs one backward from the cuts of all microbatches; does nothing if no gradient reached
        a cut.
        """
        if not self._passes.has_cuts:
            return
        self.phase = EnginePhase.BACKWARD
        self._passes.run_joint()
        self._end_pass(range(len(self._coroutines)))

    def _end_pass(self, microbatches: range) -> None:
        self._frames.end_pass(microbatches)
        self._end_compute()
        self.phase = EnginePhase.FORWARD

    def _seeds(self, microbatches: Sequence[int]) -> Seeds:
        """Returns losses and factors of microbatches that have run forward, and adds them to the
        outcome.
        """
        # Taken off the coroutines: they live until the step ends, and a result holds its graph.
        results = [self._coroutines[m].take_result() for m in microbatches]
        given = self._work.shares
        seeds = seed(
            results,
            None if given is None else [given[m] for m in microbatches],
            counts=self._counts,
            scale=self._loss_scale,
        )
        # Copies: the loss's code may write into its tensor again for the next microbatch.
        self.outcome.losses += [loss.detach().clone() for loss in seeds.losses]
        self.outcome.shares += [1.0 if share is None else share for share in seeds.shares]
        if self._counts.is_complete:
            # With the last microbatch's count, before any norm or update reads the gradients.
            self.outcome.shares = [self._counts.share] * len(self.outcome.losses)
            self._parts.update_phase.multiply(self._counts.correction)
        return seeds

    def reach(self, call: int, m: int, site: int) -> None:
        """Advances to the backward of a call: the first gradient has reached one of its outputs.

        Raises:
            UnsupportedError: the loss differentiates by itself.
        """
        # Called by autograd's hooks: on an accelerator in its device thread, while the caller's
        # thread waits in C++ for the end of backward. So actions are done in either thread.
        if self.phase is EnginePhase.FORWARD:
            raise UnsupportedError(
                f"the loss function differentiates through {self._parts.sites[site].name!r} itself (autograd.grad or backward inside the loss): "
                "double backward is not supported, because a block's weights travel with the one backward that the schedule foresees"
            )
        if self.phase is EnginePhase.TAIL and not self._passes.is_in_tail(call):
            return  # the cut's edge: this call's own backward comes with the joint one
        first, last = self._segment_of[call]
        if (first, m) in self._begun:
            return
        # Before the list advances: hooks on the segment's other outputs come here as well.
        self._begun.add((first, m))
        self._advance(Backward(first, last, m))

    def _advance(self, action: Backward) -> None:
        position = self._position_of.get(action)
        # Before the actions in between, as they are priced: what the ended backward held goes, then
        # what they fetch comes.
        self._frames.leave()
        self._end_compute()
        if position is None or position < self._next:
            self._parts.departures.append(f"{action} came where the schedule had passed it")
            self.at = str(action)
        else:
            while self._next < position:
                passed = self._operations[self._next]
                # A call's backward stands behind the forward that made its graph, and its seed.
                assert not isinstance(passed.action, Forward | Start | Seed | Joint | Commit)
                self._next += 1
                if isinstance(passed.action, Backward):
                    self._begin(passed)  # no gradient came here
                else:
                    self._do(passed)
            self._next = position + 1
            self._begin(self._operations[position])
            self._owed = self._operations[position].waits_after
        self._frames.reach(action.first, action.last, action.microbatch)
        for call in range(action.first, action.last + 1):
            # Before the hook returns: the node that runs next reads the weights by their address.
            self.calls.ensure(self._schedule.calls[call].blocks)
        if self._observe is not None:
            self._observe(action)


def _block(token: Token) -> int:
    return int(token.key.removeprefix("B"))
