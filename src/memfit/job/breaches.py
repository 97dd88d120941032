"""A plan that does not do for a step, and the one that takes its place.

In: the error of a step that met the limit, or a batch that is predicted to pass it. Out: an
assembly under another plan, and what is said about it.

[Note: replanning]
Under `on_breach="replan"` another plan takes a run up where a step meets the limit, and where a
batch comes that the plan is predicted not to fit. What stays is the store, whose last commit is the
step before; homes in memory, buffers and hooks go, and are made anew from there.

*A breach.* The step is given up with everything that its plan made. What is still allocated then
belongs to others (the user's tensors, a leak), and the next plan must live beside it, with a
margin, larger with each try, for what no trace foresees. It must also be predicted to take less, by
that margin, than the plan before: so tries end, at the latest after `TRIES`. Where none does,
nothing is left to go on with: the job is closed, and its last commit is whole.

On several ranks a breach ends the ranks' group, and each of them its step with it. All are alive:
they meet, make the group anew, and take the run up together under one plan, which must be
predicted to take less on the rank that met its limit. A rank that has failed by something else
says so where the others wait, and the job is over on all.

*A prediction.* Nothing has begun. The plan is looked for while the one before still has its homes,
which are not counted: they go with it. Where none fits, nothing was changed, and the job goes on.
Once for a batch: the plan that comes is predicted to fit it; if it meets the limit even so, that is
a breach.

In both, the fastest plan is taken, whatever its number of microbatches: another number adds up in
another order, which is told. It is for all batches that come, of any shape. A loss that was never
cut before is shown to add up first; where it does not, plans that cut the batch are out. The step
is made with the same batch and random numbers as it would have been.
"""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.core.errors import (
    LOG,
    DoesNotFitError,
    LimitBreachError,
    MemfitError,
    PeerError,
    UnsupportedError,
    UsageError,
)
from memfit.core.hardware import Hardware
from memfit.core.limits import MIB, format_bytes, format_seconds
from memfit.core.plan import Plan
from memfit.devices.kernel import is_refusal
from memfit.job.assembly import Assembly, assemble
from memfit.job.comparing import GAIN, step_seconds
from memfit.job.forward_passes import check_split
from memfit.job.interrupts import Interrupts
from memfit.mesh.agreement import agree
from memfit.mesh.rank_group import RankGroup
from memfit.planner.plan_checks import other_sums
from memfit.planner.setup import Planned, Prepared, Replan
from memfit.planner.together import failing_together, first_told, prepare_together
from memfit.tensors.trees import tensors_in

TRIES = 3
"""Plans that one step may be tried under after the one that met the limit."""
_MARGIN_SHARE = 0.04


@dataclass(frozen=True, kw_only=True)
class BreachReport:
    """A plan that was found not to do, and the one that took its place.

    Attributes:
        step: the step (from 1) that met the limit, or whose batch was predicted to pass it.
        cause: in words: where, what was asked for, what held memory; or what the batch would have
            taken.
        is_predicted: the step had not begun: it is its batch that does not fit under `before`.
        foreign_bytes: what was allocated on the device beside the job.
        before: the plan that did not do.
        after: the plan that the run goes on with.
        reason: why this one.
        is_measured: nothing was in its way: by what was measured another plan is faster.
        is_of_limit: the limit was changed before the step.
    """

    step: int
    cause: str
    is_predicted: bool
    foreign_bytes: int
    before: Plan
    after: Plan
    reason: str
    is_measured: bool = False
    is_of_limit: bool = False

    def in_words(self) -> str:
        """A sentence or three for people."""
        if self.is_measured:
            return f"from step {self.step} on another plan is taken, with the same bits. Cause: {self.cause}. Now: {self.reason}"
        what = (
            "is under a limit that the plan so far does not fit: another one took its place"
            if self.is_of_limit
            else "is for a batch that does not fit under the plan so far: another one took its place"
            if self.is_predicted
            else "met the limit and was made again under a tighter plan"
        )
        sums = other_sums(self.before, self.after)
        return f"step {self.step} {what}. Cause: {self.cause}. Now: {self.reason}{f' {sums}' if sums else ''}"


def assemble_tighter(
    before: Assembly, error: MemfitError, batch: Any, attempt: int, replan: Replan, interrupts: Interrupts
) -> tuple[Assembly, BreachReport]:
    """Gives up everything but the store, and takes the run up again under a plan that needs less.

    Args:
        before: the assembly whose step met the limit; it is no more afterwards.
        error: the breach; on several ranks also that of another one, as it was told.
        batch: of that step.
        attempt: from 1.
        replan: makes plans.
        interrupts: of the job.

    Raises:
        MemfitError: the breach itself, where no tighter plan fits; nothing is left of the job, the
            last commit is whole.
    """
    planned, adds_up = before.planned, before.planned.adds_up
    # Only where it was met: other ranks' predictions have held.
    is_own, step = isinstance(error, LimitBreachError), before.steps + 1
    margin = margin_bytes(before.machine.limits.device_bytes or 0, attempt) if is_own else 0
    peak = before.shapes.prepare(batch).peak_bytes if is_own else None
    ranks = planned.setup.ranks
    cause = str(error) if ranks is None or not is_own else ranks.words_of(error)
    now = before
    try:
        _end_visits(before)
        while True:
            now.give_up()
            clear_frames(error)
            # Behind both: what is still allocated is not the job's.
            foreign_bytes = now.machine.meter.live_bytes()
            tighter = replan(batch, like=planned.plan, adds_up=adds_up, margin_bytes=margin, below_bytes=peak)
            now = _exchange(now, tighter, interrupts)
            if _may_cut(now, batch):
                break
            adds_up = False
    except BaseException as other:
        now.end(restore=False)
        if not (isinstance(other, MemfitError) or is_refusal(other)):
            raise
        error.add_note(f"no tighter plan took its place ({type(other).__name__}: {other}). {_closed(now)}")
        raise error from other
    return now, BreachReport(
        step=step,
        cause=cause,
        is_predicted=False,
        foreign_bytes=foreign_bytes,
        before=planned.plan,
        after=now.plan,
        reason=now.planned.reason,
    )


def _end_visits(given_up: Assembly) -> None:
    """Ends visits that failed with the group of the ranks: its thread has ended, and nothing of it
    writes to their memory any more.
    """
    for block in given_up.blocks if given_up.planned.setup.ranks is not None else ():
        try:
            block.release()
        except PeerError:
            block.release(forgets_arrival=True)


def assemble_fitting(
    before: Assembly, excess: str, batch: Any, replan: Replan, interrupts: Interrupts
) -> tuple[Assembly, BreachReport | DoesNotFitError]:
    """Takes the run up under a plan that fits a batch.

    Args:
        before: the assembly whose plan does not; no more afterwards, unless it is what is returned.
        excess: what the batch would take, in words.
        batch: of the step that is to be made.
        replan: makes plans.
        interrupts: of the job.

    Returns:
        The assembly that the run goes on with, and what was changed; or, where no other plan does,
        an assembly under the plan before, and the refusal.

    Raises:
        DoesNotFitError: the refusal, where the plan before could not be taken up again either;
            nothing is left of the job, the last commit is whole.
    """
    planned, adds_up, step = before.planned, before.planned.adds_up, before.steps + 1
    now = before
    try:
        while True:
            held = list(now.held())
            foreign_bytes = now.machine.meter.live_bytes() - sum(part.nbytes for part in held)
            with now.engine.looking_away():
                fitting = replan(batch, like=planned.plan, held=held, adds_up=adds_up)
            del held
            now.give_up()
            now = _exchange(now, fitting, interrupts)
            if _may_cut(now, batch):
                break
            adds_up = False
    except (MemfitError, MemoryError, torch.OutOfMemoryError) as other:
        clear_frames(other)
        _end_with_ranks(now, other)
        if not before.has_begun:
            before = _take_back(now, replace(planned, adds_up=adds_up), excess, other, interrupts)
        return before, _refusal(excess, other, "The job goes on under the plan that it has")
    except BaseException:
        if not before.has_begun:
            now.end(restore=False)
        raise
    return now, BreachReport(
        step=step,
        cause=excess,
        is_predicted=True,
        foreign_bytes=foreign_bytes,
        before=planned.plan,
        after=now.plan,
        reason=now.planned.reason,
    )


def assemble_faster(
    before: Assembly, hardware: Hardware, batch: Any, replan: Replan, interrupts: Interrupts
) -> tuple[Assembly, BreachReport | None]:
    """Takes the run up under a plan that is faster on the machine as it was measured, with the same
    bits. See [Note: feedback] in `job.comparing`.

    Args:
        before: no more afterwards, unless it is what is returned.
        hardware: as measured.
        batch: of the step that is to be made.
        replan: makes plans.
        interrupts: of the job.

    Returns:
        The assembly that the run goes on with, and what was changed; the same one and None, where
        no plan is so much faster.

    Raises:
        MemfitError: neither plan could be taken up; nothing is left of the job, the last commit is
            whole.
    """
    planned = before.planned
    held = list(before.held())
    try:
        with before.engine.looking_away():
            faster = replan(batch, like=planned.plan, held=held, adds_up=planned.adds_up, hardware=hardware)
    except (MemfitError, MemoryError, torch.OutOfMemoryError) as other:
        LOG.info("plans were not looked for with the rates that were measured: %s", _in_a_line(other))
        clear_frames(other)
        _end_with_ranks(before, other)
        return before, None
    finally:
        del held
    now_s, then_s = (step_seconds(one, hardware) for one in (before.shapes.prepare(batch), faster.prepared))
    if planned.setup.ranks is not None:
        # Rank 0's: with figures of its own each would decide otherwise.
        now_s, then_s, *_ = agree(planned.setup.ranks, "a faster plan", values=[now_s, then_s])[0]
    is_same = faster.numerics.changes == planned.numerics.changes and not other_sums(planned.plan, faster.plan)
    if faster.plan == planned.plan or not is_same or then_s > GAIN * now_s:
        return before, None
    cause = f"by what its steps measured of the machine the plan takes {format_seconds(now_s)} a step, and {format_seconds(then_s)} are predicted for another one"
    return _exchanged(before, faster, cause, interrupts)


def assemble_again(
    before: Assembly, plan: Plan, batch: Any, replan: Replan, interrupts: Interrupts
) -> tuple[Assembly, BreachReport | None]:
    """Takes the run up under the plan before the present one, which was measured to be slower.

    Args:
        before: no more afterwards, unless it is what is returned.
        plan: that comes back.
        batch: as for `assemble_faster`, whose results these are.
        replan: likewise.
        interrupts: likewise.
    """
    held = list(before.held())
    try:
        with before.engine.looking_away():
            again = replan(batch, like=plan, held=held, adds_up=before.planned.adds_up, plan=plan)
    except (MemfitError, MemoryError, torch.OutOfMemoryError) as other:
        clear_frames(other)
        return before, None
    finally:
        del held
    return _exchanged(before, again, "its steps took longer than those of the plan before", interrupts)


def _exchanged(
    before: Assembly, planned: Planned, cause: str, interrupts: Interrupts
) -> tuple[Assembly, BreachReport | None]:
    """Exchanges the plan between two steps; where that fails, the plan before is taken up again."""
    step, now = before.steps + 1, before
    try:
        now.give_up()
        now = _exchange(now, planned, interrupts)
    except (MemfitError, MemoryError, torch.OutOfMemoryError) as other:
        clear_frames(other)
        _end_with_ranks(now, other)
        return _take_back(now, before.planned, cause, other, interrupts), None
    except BaseException:
        now.end(restore=False)
        raise
    return now, BreachReport(
        step=step,
        cause=cause,
        is_predicted=True,
        foreign_bytes=0,
        before=before.planned.plan,
        after=now.plan,
        reason=now.planned.reason,
        is_measured=True,
    )


def margin_bytes(limit_bytes: int, attempt: int) -> int:
    """Returns what a plan must leave free after so many breaches of one step (from 1)."""
    return attempt * max(int(_MARGIN_SHARE * limit_bytes), MIB)


def _exchange(given_up: Assembly, planned: Planned, interrupts: Interrupts) -> Assembly:
    """Takes the run up from its last commit under another plan.

    Where that fails, machine and run are still to be ended by the assembly that was given up.
    """
    before = given_up.run_checkpointer
    with failing_together(planned.setup.ranks):
        # First: the next assembly takes weights and states from the store, as of the last commit.
        before.run.go_back()
        after = assemble(planned, scaler=given_up.scaler, interrupts=interrupts, before=before)
        after.run_checkpointer.begin_again()
    given_up.hand_over()
    return after


def _end_with_ranks(now: Assembly, error: BaseException) -> None:
    """Ends the job where the group of its ranks is over, and raises why. Nothing can be exchanged
    without the others, and what they hold is out of reach; the last commit is whole.
    """
    ranks = now.planned.setup.ranks
    if ranks is None or ranks.failure is None:
        return
    now.end(restore=False)
    error.add_note(_closed(now))
    raise error


def _may_cut(now: Assembly, batch: Any) -> bool:
    """Tells whether the plan cuts no batches, or the loss adds up over what it cuts them into."""
    if now.plan.microbatches == 1 or now.planned.adds_up is not None:
        return True
    ranks, may = now.planned.setup.ranks, True
    # Where there is no room to look on one of several ranks, the others are in the middle of it.
    refusals = UnsupportedError if ranks is not None else (UnsupportedError, MemoryError, torch.OutOfMemoryError)
    with failing_together(ranks):
        try:
            check_split(now, batch)
        except refusals:
            may = False  # or there is no room to look
    return may if ranks is None else all(said for (said, *_) in agree(ranks, "to cut a batch", values=[float(may)]))


def _take_back(now: Assembly, planned: Planned, excess: str, refused: Exception, interrupts: Interrupts) -> Assembly:
    """Takes the run up again under the plan before, from the same commit.

    Or the job ends, with the refusal.
    """
    try:
        now.give_up()
        return _exchange(now, planned, interrupts)
    except BaseException as error:
        now.end(restore=False)
        if not (isinstance(error, MemfitError) or is_refusal(error)):
            raise
        again = f"The plan before could not be taken up again ({_in_a_line(error)})."
        raise _refusal(excess, refused, f"{again} {_closed(now)}") from error


def _refusal(excess: str, error: Exception, what_now: str) -> DoesNotFitError:
    if isinstance(error, DoesNotFitError):
        text, smallest = f"{excess}. No other plan fits it either: {_in_a_line(error)}", error.smallest_limit_bytes
    else:
        text, smallest = f"{excess}. Another plan could not take its place ({_in_a_line(error)}).", None
    refusal = DoesNotFitError(f"{text} {what_now}", smallest_limit_bytes=smallest)
    refusal.__cause__ = error
    return refusal


def _in_a_line(error: BaseException) -> str:
    """The first line of an error, with its class where that is not memfit's: the whole of it
    follows as the cause.
    """
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, MemfitError) else f"{type(error).__name__}: {first}"


def _closed(assembly: Assembly) -> str:
    run = assembly.run_checkpointer.run
    return f"The job is closed; step {run.commits.last_step} is whole in {run.directory}"


def clear_frames(error: BaseException) -> None:
    """Lets go of what the frames of an error, and of what caused it, hold: activations and
    gradients of the step that failed.

    The tracebacks go too: a frame that was cleared still holds its function, and that the arguments
    in its closure (as `Module.__call__` has them).
    """
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    gc.collect()  # autograd's graph and the frames of the step refer to each other


# A limit that changes while a job runs, and the plan that follows it.
#
# In: a running assembly, a new limit. Out: the limit in force, or a refusal that leaves the old
# one; before the next step another plan, where the old one does not fit or a faster one does.
#
# [Note: a limit that changes]
# A neighbour comes or goes, and the memory there is for a job is another. `job.set_limit` takes
# effect between two steps. A plan that fits the new limit goes on. One that does not is exchanged
# when the next step begins, as for a batch that does not fit ([Note: replanning] in
# `job.breaches`): the run goes on from its last commit, with the same bits where sums are the same.
# Until then the process holds what the old plan holds. Under a larger limit a plan is looked for
# that is predicted to be a tenth faster with the same bits. A job that cannot exchange its plan (no
# store, or `on_breach` and `adapt` as they are by default) is refused a limit that its plan does
# not fit.
#
# On several ranks each has a limit of its own, and all of them call. Where a rank's plan does not
# fit, all take another one, for the rank that has least. What cannot be is refused by all, in the
# words of the first rank that finds it.
#
# A proof is of one limit: it begins anew, and that of the limit before is what `set_limit` returns.

_CALL = "job.set_limit"


@dataclass(frozen=True, kw_only=True)
class LimitChange:
    """A change of the limit that no step has been made under.

    Attributes:
        before_bytes: limit before it.
        after_bytes: limit now.
        rank: on several ranks the first whose limit was changed.
        is_lowered: on several ranks, one of them has less than before.
    """

    before_bytes: int
    after_bytes: int
    rank: int | None = None
    is_lowered: bool = False

    @property
    def is_raised(self) -> bool:
        """There is more memory than before."""
        return self.after_bytes > self.before_bytes and not self.is_lowered

    def in_words(self) -> str:
        """Tells both limits."""
        whose = "" if self.rank is None else f" of rank {self.rank}"
        return f"the limit{whose} is {format_bytes(self.after_bytes)} now, and was {format_bytes(self.before_bytes)}"

    def behind(self, earlier: LimitChange | None) -> LimitChange:
        """Returns this change with an earlier one that no step was made under either."""
        if earlier is None or earlier.rank != self.rank:
            return self
        return replace(self, before_bytes=earlier.before_bytes)

    def told(self, report: BreachReport) -> BreachReport:
        """Returns the report of an exchanged plan with this change as its cause."""
        if report.is_measured:
            return replace(report, cause=f"{self.in_words()}; another plan is predicted to be faster under it")
        return replace(report, cause=f"{self.in_words()}; {report.cause}", is_of_limit=True)


def change_limit(assembly: Assembly, limit_bytes: int) -> LimitChange | None:
    """Changes the limit of a job's device between two steps. See [Note: a limit that changes].

    Args:
        assembly: of the job.
        limit_bytes: new limit.

    Returns:
        What was changed; None where the limit is the same.

    Raises:
        UsageError: the job has no limit.
        DoesNotFitError: the job's plan does not fit, and it cannot take another one; the limit is
            what it was, on all ranks.
        PeerError: the limit of another rank cannot be changed; likewise.
    """
    machine, planned = assembly.machine, assembly.planned
    ranks = planned.setup.ranks
    before = machine.limits.device_bytes
    if before is None or not planned.setup.enforces:
        raise UsageError(
            "the job was made without a limit that is enforced, so there is none to change: give memfit.fit a limit="
        )
    if limit_bytes == before and ranks is None:
        return None
    prepare_together(ranks, _CALL, lambda: machine.change_limit(limit_bytes))
    try:
        change = _agreed(ranks, LimitChange(before_bytes=before, after_bytes=limit_bytes))
        if planned.replan is None or planned.setup.has_lines:
            # Else the next step asks, which has its batch.
            _check_plan(assembly, before, limit_bytes)
    except (MemfitError, ValueError):
        machine.change_limit(before)
        raise
    if change is None:
        return None
    if planned.replan is None or planned.setup.has_lines:
        machine.hard_limit.follow()
    assembly.shapes.forget()
    machine.phases.begin_anew()
    return change


def _agreed(ranks: RankGroup | None, own: LimitChange) -> LimitChange | None:
    """Returns the change as all ranks tell it: of the first rank that has one; None if none has."""
    if ranks is None:
        return own
    said = agree(ranks, _CALL, values=[float(own.before_bytes), float(own.after_bytes)])
    limits = [(int(before), int(after)) for before, after, *_ in said]
    changed = [rank for rank, (before, after) in enumerate(limits) if before != after]
    if not changed:
        return None
    before, after = limits[changed[0]]
    is_lowered = any(after < before for before, after in limits)
    return LimitChange(before_bytes=before, after_bytes=after, rank=changed[0], is_lowered=is_lowered)


def _check_plan(assembly: Assembly, before: int, limit_bytes: int) -> None:
    """Raises `DoesNotFitError` where the job's plan does not fit, with the same text on all
    ranks.
    """
    largest = max(assembly.shapes.known, key=lambda prepared: prepared.peak_bytes)
    excess = limit_excess(assembly, largest, ())
    told = first_told(
        assembly.setup.ranks,
        _CALL,
        None
        if excess is None
        else f"the job's plan does not fit {format_bytes(limit_bytes)}: {excess}. The limit is still {format_bytes(before)}",
    )
    if told is not None:
        raise DoesNotFitError(
            f'{told}. A job of memfit.fit(store=..., on_breach="replan") takes another plan; here, save the job and fit again with resume=',
            smallest_limit_bytes=None,
        )


def limit_excess(assembly: Assembly, prepared: Prepared, batch: Any) -> str | None:
    """Says why a step does not fit beside what is held now; None if it does.

    Args:
        assembly: of the job.
        prepared: the step.
        batch: of the step, whose bytes its peak has.
    """
    machine, model, peak_bytes = assembly.machine, assembly.model, prepared.peak_bytes

    def room() -> int | None:
        return machine.budget(beside=[*assembly.held(), *tensors_in(batch), *model.buffers()]).tensor_bytes

    left = room()
    if left is not None and peak_bytes > left:
        gc.collect()  # what is in cycles is nobody's
        left = room()
    if left is None or peak_bytes <= left:
        return machine.hard_limit.excess(peak_bytes, lambda: assembly.others_bytes(prepared, batch))
    return (
        f"a step is predicted to take {format_bytes(peak_bytes)} of tensors, and {format_bytes(max(0, left))} are left"
    )


def follow_limit(
    assembly: Assembly, change: LimitChange, batch: Any, replan: Replan, interrupts: Interrupts
) -> tuple[Assembly, BreachReport | None]:
    """Looks for a faster plan under a limit that was raised.

    Args:
        assembly: whose plan fits.
        change: of the limit.
        batch: of the step that is to be made.
        replan: makes plans.
        interrupts: of the job.

    Returns:
        As `breaches.assemble_faster`.
    """
    if not change.is_raised:
        return assembly, None
    hardware = assembly.setup.hardware()
    now, report = assemble_faster(assembly, hardware, batch, replan, interrupts)
    return now, None if report is None else change.told(report)
