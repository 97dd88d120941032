"""StepRunner: the steps of a job, each whole or not at all, under one plan after another.

In: a plan that was decided, batches. Out: results of steps; where a step does not fit and
`on_breach="replan"`, another assembly. See [Note: replanning] in `job.breaches`.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.core.errors import LOG, MemfitError, MemfitWarning, PeerError, UnsupportedError
from memfit.devices.binding import Allocator
from memfit.engine.loss_scaling import LossScaler
from memfit.engine.measured_step import StepRecorder
from memfit.job.assembly import Assembly, assemble
from memfit.job.breaches import (
    TRIES,
    BreachReport,
    LimitChange,
    assemble_again,
    assemble_faster,
    assemble_fitting,
    assemble_tighter,
    change_limit,
    follow_limit,
    limit_excess,
)
from memfit.job.comparing import ComparedSteps, Feedback
from memfit.job.forward_passes import check_first, check_hooks
from memfit.job.interrupts import Interrupts
from memfit.job.results import StepResult
from memfit.job.step_watchers import MeasuredStep, StepWatchers, step_recorder
from memfit.job.steps import CutBatch, cut, finish_step, make_step, step_result
from memfit.machine.leak_report import Census, CensusReport
from memfit.planner.setup import Planned, Prepared, Replan
from memfit.planner.together import (
    add_up,
    first_told,
    is_breach,
    prepare_together,
    renew_behind,
    settings_text,
    together,
)
from memfit.planner.user_hooks import marks_of
from memfit.runs.run_state import give_random, take_random
from memfit.tensors.guard import is_away

_FITS = "the step's plan"


class StepRunner:
    """Steps of a job.

    Args:
        assembly: everything at home.
        interrupts: Ctrl-C, which waits for the end of an action.
        scaler: the loss scale of a plan that computes in fp16.
        was_whole: the model was in memory before it moved home.

    Attributes:
        assembly: what works now; another one after a plan was exchanged.
        machine: with its limits.
        breaches: plans that were exchanged.
        has_ended: exchanging a plan failed, and nothing is left to go on with.
        owner: the job; a callback that holds it is a cycle.
        measured: the last step that was measured; None before it.
        compared: the first steps beside their prediction.
        feedback: what steps measure of the machine, and of plans.
        watchers: functions that are told of each step.
        calls: guard of the job's public calls.
        asked_commits: number of commits that were asked for while a call was under way.
    """

    def __init__(
        self, assembly: Assembly, *, interrupts: Interrupts, scaler: LossScaler | None, was_whole: bool
    ) -> None:
        self.assembly = assembly
        self.interrupts = interrupts
        self.scaler = scaler
        self.was_whole = was_whole
        self.machine = assembly.machine
        self.breaches: list[BreachReport] = []
        self.has_ended = False
        # Weak: in a cycle a dropped job would be collected late, and its limit lifted late.
        self.owner: Callable[[], object] = lambda: None
        self._census = Census(self.machine.meter)
        self.measured: MeasuredStep | None = None
        self.compared = ComparedSteps(assembly.setup)
        self.feedback = Feedback(self.compared)
        self.watchers = StepWatchers()
        self.calls = interrupts.calls
        self.asked_commits = self._made_commits = 0
        self._steps_here = 0
        self._lines_began_s, self._lines_peak_bytes = 0.0, 0
        self._has_told_passed = False
        self._new_limit: LimitChange | None = None

    def step(self, batch: Any) -> StepResult:
        """Makes a step; see `Job.step`.

        The step before is committed first, with what was done after it.
        """
        assembly = self.assembly
        prepare_together(assembly.setup.ranks, "step", lambda: _check_known(assembly, batch))
        self._commit_if_due()
        replan = assembly.planned.replan
        if replan is not None and assembly.setup.adapts:
            self._adapt(batch, replan)
        found = [] if self._new_limit is None else self._follow_limit(self._new_limit, batch, replan)
        keeps = not assembly.setup.replans
        result = self._step(batch) if replan is None or keeps else self._step_or_replan(batch, replan)
        told = [report.in_words() for report in found if report.is_of_limit]
        return replace(result, departures=(*told, *result.departures)) if told else result

    def tell_step(self, result: StepResult) -> None:
        """Tells watchers of a step that ended; they may call the job."""
        self.watchers.tell_step(self.assembly, result, self.measured)

    @property
    def owes_commit(self) -> bool:
        """True if a commit was asked for while a call was under way, and is not made."""
        return self.asked_commits > self._made_commits

    def _commit_if_due(self) -> None:
        # A handler may ask again meanwhile: that wish is the next boundary's.
        asked = self.asked_commits
        self.assembly.checkpointer.commit_if_due(is_asked=asked > self._made_commits)
        self._made_commits = asked

    # --- lines of the user's own -----------------------------------------------------------------

    def prepare_lines(self, sample: Any) -> Prepared:
        """Begins a step that lines of the user's own make: commits the one before it, and returns
        what is to be run.
        """
        assembly = self.assembly
        _check_known(assembly, sample)
        self._commit_if_due()
        prepared = assembly.shapes.prepare(sample)
        if self._steps_here < 2:
            # of loading, then of the first step, which brings up states and libraries
            self.machine.forget_peak()
        self._lines_began_s, self._lines_peak_bytes = time.perf_counter(), 0
        return prepared

    def refuse_lines(self, prepared: Prepared, counted: Any) -> None:
        """Refuses a forward and backward of lines that does not fit beside what lives now: what
        they keep, and what another job has saved for a backward that is to come.

        Args:
            prepared: the window's step.
            counted: tensors that its prediction counts.

        Raises:
            LimitBreachError: before anything was done.
        """
        others = partial(self.assembly.others_bytes, prepared, counted)
        self.machine.hard_limit.refuse(prepared.peak_bytes, others, self.assembly.steps + 1)

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Context of a part of a step that lines of the user's own make."""
        try:
            with self.machine.phase("first step" if self._steps_here == 0 else "steady", is_step=True):
                yield
        finally:
            self._lines_peak_bytes = max(self._lines_peak_bytes, self.machine.last_peak_bytes())

    def lines_recorder(self, prepared: Prepared, given: Any) -> StepRecorder | None:
        """Returns a recorder of the first backward of a window, and its update; None if it is not
        measured.

        Args:
            prepared: that the window runs.
            given: what the lines called the model with.
        """
        return step_recorder(self.assembly, prepared, given, self._steps_here)

    def end_lines_step(self, prepared: Prepared, recorder: StepRecorder | None) -> None:
        """Ends a step that lines of the user's own made.

        Args:
            prepared: that its window ran.
            recorder: has measured it.
        """
        self._steps_here += 1
        self._note_measured(recorder, prepared)
        self.assembly.checkpointer.note_positions()
        if self._census.note_step():
            self._census.warn_once(self.census())
        self._tell_passed(self._lines_peak_bytes)

    def tell_lines_step(self, departures: tuple[str, ...]) -> None:
        """Tells watchers of a step that ended.

        Args:
            departures: of its update from the trace.
        """
        seconds = time.perf_counter() - self._lines_began_s
        self.watchers.tell_lines_step(self.assembly, seconds, self._lines_peak_bytes, departures, self.measured)

    def census(self) -> CensusReport:
        """Reports what lives from step to step; see `Job.census`."""
        setup = self.assembly.setup
        callbacks: dict[str, Callable[..., Any]] = {"the loss": setup.problem.loss}
        if setup.weight is not None:
            callbacks["the weight"] = setup.weight
        return self._census.report(setup.problem.model, callbacks, keeper=self.owner())

    def take_back_changes(self) -> list[UnsupportedError]:
        """Takes parameters that were given other memory back.

        Returns in words what is lost, unless it was told before.
        """
        assembly = self.assembly
        changes = [block.take_back_changes() for block in assembly.blocks]
        return [] if assembly.has_told_changes else [change for change in changes if change is not None]

    def undo(self) -> None:
        """Ends a fit that is refused before its first step: every weight comes back in the dtype in
        which it came, or stays deferred.
        """
        self.assembly.has_begun = False
        self.take_back_changes()
        ranks = self.assembly.setup.ranks
        if ranks is not None:
            # Other ranks may be elsewhere: what only they hold cannot be asked for.
            ranks.fail(PeerError(f"rank {ranks.rank} gave its fit up"))
            ranks.close()
        with self.interrupts.held():
            self.assembly.end(restore=ranks is None)

    def _step(self, batch: Any) -> StepResult:
        began = time.perf_counter()
        assembly = self.assembly
        if assembly.journal is not None and assembly.journal.is_waiting:
            outcome = finish_step(assembly, assembly.journal)
            self._steps_here += 1
            assembly.checkpointer.note_positions()
            return step_result(assembly, batch, outcome, time.perf_counter() - began)
        ranks = assembly.setup.ranks
        work = prepare_together(ranks, "step", lambda: self._prepare(assembly, batch))
        prepared = work.prepared
        phase = "first step" if self._steps_here == 0 else "steady"
        if self._steps_here < 2:
            # of loading, then of the first step, which brings up states and libraries
            self.machine.forget_peak()
        recorder = step_recorder(assembly, prepared, batch, self._steps_here)
        settings = "" if ranks is None else settings_text(assembly.setup.optimizer)
        digest = f"{assembly.steps}\n{settings}\n{prepared.step.schedule.text()}"
        with together(ranks, "step", digest=digest, values=[work.total]) as said:
            factors = work.factors(sum(total for (total, *_) in said))
            check_first(assembly, batch)
            with (
                assembly.stepping(),
                self.machine.phase(phase, is_step=True),
                nullcontext() if recorder is None else assembly.engine.recording(recorder),
            ):
                outcome = make_step(assembly, prepared, work.parts, factors)
                self._steps_here += 1
            if ranks is not None:
                outcome.loss = add_up(ranks, outcome.own_loss)
        self._note_measured(recorder, prepared)
        assembly.checkpointer.note_positions()
        if self._census.note_step():
            self._census.warn_once(self.census())
        result = step_result(assembly, batch, outcome, time.perf_counter() - began)
        self._tell_passed(result.peak_bytes)
        if assembly.setup.adapts:
            self.feedback.note(assembly, prepared, result.seconds)
        return result

    def _prepare(self, assembly: Assembly, batch: Any) -> CutBatch:
        """Prepares a step without moving anything: what fails here fails before any rank begins."""
        prepared = assembly.shapes.prepare(batch)
        others = partial(assembly.others_bytes, prepared, batch)
        self.machine.hard_limit.refuse(prepared.peak_bytes, others, assembly.steps + 1)
        return cut(assembly, prepared, batch)

    def _note_measured(self, recorder: StepRecorder | None, prepared: Prepared) -> None:
        timeline = None if recorder is None else recorder.timeline()
        if timeline is not None and timeline.moments:
            self.measured = MeasuredStep(prepared=prepared, timeline=timeline, step=self.assembly.steps)
            # With another allocator recording itself takes too long.
            if isinstance(self.machine.allocator, Allocator):
                self.compared.note(prepared, timeline, self._steps_here)

    def _tell_passed(self, peak_bytes: int) -> None:
        """Warns, once, of a limit that was passed without an allocation that could be refused."""
        passed = None if self._has_told_passed else self.machine.hard_limit.passed(peak_bytes)
        if passed is not None:
            self._has_told_passed = True
            warnings.warn(f"step {self.assembly.steps}: {passed}", MemfitWarning, stacklevel=5)

    # --- another plan ----------------------------------------------------------------------------

    def _step_or_replan(self, batch: Any, replan: Replan) -> StepResult:
        """Makes a step; where its batch does not fit, or it meets the limit, under another plan."""
        found = self._make_fitting(batch, replan)
        for attempt in range(1, TRIES + 2):
            before = take_random()
            try:
                result = self._step(batch)
            except BaseException as error:
                is_last = attempt > TRIES
                # Whatever it was: other ranks may wait to hear whether this one goes on.
                renew_behind(self.assembly.setup.ranks, error, goes_on=is_breach(error) and not is_last)
                if not isinstance(error, MemfitError) or not is_breach(error):
                    raise
                if is_last:
                    error.add_note(f"{TRIES} tighter plans met the limit as well")
                    raise
                found.append(self._make_tighter(error, batch, attempt, replan))
                # the step is made again with the numbers that it would have had
                give_random(before)
            else:
                self.breaches += found
                _tell(found)
                return replace(result, departures=(*result.departures, *(report.in_words() for report in found)))
        raise AssertionError("the loop returns or raises")

    def _make_fitting(self, batch: Any, replan: Replan) -> list[BreachReport]:
        """Takes a plan that fits the batch, where the one so far is predicted not to.

        Raises:
            DoesNotFitError: there is none.
        """
        assembly = self.assembly
        if assembly.journal is not None and assembly.journal.is_waiting:
            return []  # the step is decided, and computes nothing
        if self._new_limit is not None:
            gc.collect()  # what is in cycles counts as somebody's, beside which the plan must live
        ranks = assembly.setup.ranks
        excess = prepare_together(ranks, _FITS, lambda: _excess(assembly, batch, self._new_limit))
        excess = first_told(ranks, _FITS, excess)
        if excess is None:
            return []
        before = take_random()
        try:
            with self.machine.phases("replan"):
                self.assembly, found = assemble_fitting(assembly, excess, batch, replan, self.interrupts)
        except BaseException:
            self.has_ended = assembly.has_ended
            raise
        finally:
            give_random(before)
        if isinstance(found, BreachReport):
            return [found]
        try:
            raise found
        finally:
            del found  # whose frames would hold it, and it the batch

    def change_limit(self, limit_bytes: int) -> None:
        """Changes the limit between two steps; see `Job.set_limit`."""
        assembly = self.assembly
        assembly.keep_changes()
        change = change_limit(assembly, limit_bytes)
        if change is not None:
            self._new_limit, self._has_told_passed = change.behind(self._new_limit), False
            LOG.info("before step %d: %s", assembly.steps + 1, change.in_words())

    def _follow_limit(self, change: LimitChange, batch: Any, replan: Replan | None) -> list[BreachReport]:
        """Takes another plan where the one so far does not fit a limit that was changed, or another
        one is faster under it. Returns what was exchanged.

        Raises:
            DoesNotFitError: none fits; the job goes on under a limit that its plan fits.
        """
        found: list[BreachReport] = []
        journal = self.assembly.journal
        if journal is not None and journal.is_waiting:
            return found  # the step is decided, and computes nothing: the next one follows
        if replan is not None:
            found = [change.told(report) for report in self._make_fitting(batch, replan)]
            if not found:
                found = self._take_faster(change, batch, replan)
            self.machine.hard_limit.follow()
            # What was held until a plan was exchanged is not under the new limit.
            self.machine.phases.begin_anew()
        self._new_limit = None
        self.breaches += found
        _tell(found)
        return found

    def _take_faster(self, change: LimitChange, batch: Any, replan: Replan) -> list[BreachReport]:
        before = take_random()
        try:
            with self.machine.phases("replan"):
                self.assembly, report = follow_limit(self.assembly, change, batch, replan, self.interrupts)
        except BaseException:
            self.has_ended = self.assembly.has_ended
            raise
        finally:
            give_random(before)
        return [] if report is None else [report]

    def _adapt(self, batch: Any, replan: Replan) -> None:
        """Takes a faster plan, where what was measured says that there is one."""
        assembly, feedback = self.assembly, self.feedback
        if assembly.journal is not None and assembly.journal.is_waiting:
            return  # the step is decided, and computes nothing
        slower = feedback.slower_than_before()
        hardware = feedback.measured(assembly) if slower is None else None
        if slower is None and hardware is None:
            return
        before = take_random()
        try:
            with self.machine.phases("replan"):
                if slower is not None:
                    self.assembly, found = assemble_again(assembly, slower, batch, replan, self.interrupts)
                else:
                    assert hardware is not None
                    self.assembly, found = assemble_faster(assembly, hardware, batch, replan, self.interrupts)
        except BaseException:
            self.has_ended = assembly.has_ended
            raise
        finally:
            give_random(before)
        if found is not None:
            feedback.begin_plan(found.before if slower is None else None)
            self.breaches.append(found)
            _tell([found])

    def _make_tighter(self, error: MemfitError, batch: Any, attempt: int, replan: Replan) -> BreachReport:
        try:
            with self.machine.phases("replan"):
                self.assembly, report = assemble_tighter(self.assembly, error, batch, attempt, replan, self.interrupts)
        except BaseException:
            self.has_ended = True
            raise
        return report


def _check_known(assembly: Assembly, batch: Any) -> None:
    """Checks that the model, its hooks and what is registered are those that the job knows."""
    marks = marks_of(assembly.model)
    assembly.check_unchanged(marks)
    assembly.checkpointer.check_registered()
    assembly.shapes.note_program(marks, lambda: check_hooks(assembly, batch))
    assembly.keep_changes()


def _excess(assembly: Assembly, batch: Any, change: LimitChange | None) -> str | None:
    """Says why a batch does not fit under the plan so far; None if it does."""
    prepared, excess = assembly.shapes.try_batch(batch)
    if excess is not None:
        return excess
    others = partial(assembly.others_bytes, prepared, batch)
    beside = assembly.machine.hard_limit.excess(prepared.peak_bytes, others)
    if beside is None and change is not None:
        beside = limit_excess(assembly, prepared, batch)
    return None if beside is None else f"step {assembly.steps + 1} does not fit: {beside}"


def _tell(found: Sequence[BreachReport]) -> None:
    """Tells of plans that were exchanged."""
    for report in found:
        LOG.info("another plan: %s", report.in_words())
        warnings.warn(report.in_words(), MemfitWarning, stacklevel=5)


def begin_steps(planned: Planned) -> StepRunner:
    """Moves everything home under a plan that was decided; see `assembly.assemble`."""
    interrupts, scaler = Interrupts(), LossScaler() if planned.plan.scales_losses else None
    was_whole = not any(is_away(p) for p in planned.setup.problem.model.parameters())
    assembly = assemble(planned, scaler=scaler, interrupts=interrupts)
    return StepRunner(assembly, interrupts=interrupts, scaler=scaler, was_whole=was_whole)
