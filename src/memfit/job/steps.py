"""One training step on an assembly: whole, or not at all.

In: an assembly and a batch. Out: losses and new weights at home; or an error, and the weights of
before, or words for what is torn.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from memfit.core.errors import (
    LimitBreachError,
    MemfitError,
    MemfitWarning,
    PeerError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from memfit.core.limits import format_bytes
from memfit.core.plan import Order
from memfit.core.storage_formats import ComputeDtype, dtype_failure
from memfit.devices.kernel import is_refusal, refusal_words
from memfit.engine.work import Outcome, StepInput
from memfit.homes.gradients import clip_factor
from memfit.job.assembly import Assembly
from memfit.job.interrupts import Interrupts
from memfit.job.journaling import StepJournal
from memfit.job.results import StepResult
from memfit.planner.setup import Prepared
from memfit.planner.together import add_up
from memfit.tensors.random_streams import RandomStream, draw_streams
from memfit.tensors.trees import buffers_of, tensors_in
from memfit.trace.batch import ByParts, Parts, batch_rows
from memfit.trace.cutting import Cut
from memfit.trace.splitting import fractions, weights_of


def make_step(assembly: Assembly, prepared: Prepared, parts: Sequence[Any], factors: Sequence[float] | None) -> Outcome:
    """Makes a step: forward, backward and update.

    Args:
        assembly: everything at home.
        prepared: for the batch's shapes.
        parts: its microbatches.
        factors: what each one's loss is multiplied with; None for a single one.

    Raises:
        LimitBreachError: the limit was hit; `assembly.torn` says whether the step can be repeated.
    """
    model, loss, scaler, driver = assembly.model, assembly.loss, assembly.scaler, assembly.driver
    ranks = assembly.setup.ranks
    for _, slot in assembly.place.values():
        slot.parameter.grad = None
    assembly.updates.updated_blocks.clear()
    assembly.noise.step = assembly.steps
    numbers = {index: dict(states.numbers) for index, states in assembly.states.items()}
    try:
        if scaler is None:
            driver.begin_step()
        else:
            scaler.begin_step()
        assembly.house.gradients.begin_step()
        if assembly.journal is not None:
            assembly.journal.begin_step()
        step = prepared.step if assembly.journal is None else prepared.in_turns(assembly.journal.turns())
        assembly.frames.begin_step(prepared.plan, prepared.calls, [*buffers_of(model), *tensors_in(list(parts))])
        work = StepInput(
            run=lambda m: loss(model, parts[m]),
            shares=factors,
            streams=_streams(prepared),
            max_norm=assembly.setup.max_grad_norm,
            scale=None if scaler is None else scaler.scale,
            begin_updates=None if scaler is None else driver.begin_step,
            journal=assembly.journal,
            count_over_ranks=None if ranks is None else lambda own: add_up(ranks, own),
            adds_as_loop=bool(prepared.profile.own_parts) and not prepared.profile.keeps_order,
        )
        with assembly.setting():
            outcome = assembly.engine.run(step, work)
        if scaler is not None:
            scaler.update(has_overflowed=outcome.is_skipped)
        assembly.checkpointer.note_changed(assembly.updates.updated_blocks)
        assembly.house.commit()
        assembly.watch_again(assembly.updates.updated_blocks)
    except BaseException as error:
        _fail(assembly, error, numbers)
        raise
    if not outcome.is_skipped:
        driver.end_step()
    _note_clip(assembly, outcome)
    return outcome


def make_update(assembly: Assembly, prepared: Prepared, interrupts: Interrupts) -> Outcome:
    """Makes the update of a step whose backwards the user's own lines have run; see `job.lines`.

    Ctrl-C comes before it or behind it.

    Raises:
        LimitBreachError: the limit was hit; `assembly.torn` says whether the weights are those of
            before.
    """
    driver = assembly.driver
    assembly.updates.updated_blocks.clear()
    assembly.noise.step = assembly.steps
    numbers = {index: dict(states.numbers) for index, states in assembly.states.items()}
    try:
        # Takes the hyperparameters: schedulers may have changed them since the backwards.
        driver.begin_step()
        # Before anything is changed, and then not before all is: the update is short, and an
        # interrupt in its middle would tear what is updated in place.
        interrupts.check()
        with interrupts.postponed():
            outcome = assembly.engine.update(prepared.step)
            assembly.checkpointer.note_changed(assembly.updates.updated_blocks)
            assembly.house.commit()
        assembly.watch_again(assembly.updates.updated_blocks)
    except BaseException as error:
        _fail(assembly, error, numbers)
        raise
    driver.end_step()
    return outcome


def finish_step(assembly: Assembly, journal: StepJournal) -> Outcome:
    """Finishes the step that was decided before, in this process or another.

    See [Note: a step from its journal] in `job.journaling`.
    """
    journal.finish()
    scaler = assembly.scaler
    if scaler is not None:
        scaler.begin_step()
    assembly.driver.begin_step()
    outcome = journal.give()
    if scaler is not None:
        scaler.update(has_overflowed=False)
    assembly.checkpointer.note_changed(assembly.states)
    assembly.house.commit()
    assembly.watch_again(assembly.states)
    assembly.driver.end_step()
    _note_clip(assembly, outcome)
    return outcome


def step_result(assembly: Assembly, batch: Any, outcome: Outcome, seconds: float) -> StepResult:
    """Makes what the user is told of a step."""
    losses = tuple(float(loss) for loss in outcome.losses)
    total = outcome.own_loss if outcome.loss is None else outcome.loss
    norm = None if outcome.norm is None else float(outcome.norm)
    return StepResult(
        loss=total,
        losses=losses,
        norm=norm,
        rows=_rows(assembly.setup.problem.cut, batch),
        tokens=_tokens(batch),
        seconds=seconds,
        peak_bytes=assembly.machine.last_peak_bytes(),
        departures=tuple(outcome.departures),
        is_skipped=outcome.is_skipped,
        is_finite=_is_finite(total) and (norm is None or _is_finite(norm)),
    )


@dataclass(frozen=True)
class CutBatch:
    """A batch cut into microbatches.

    Attributes:
        prepared: for its shapes.
        parts: the microbatches.
        weights: what the loss of each counts for; None for a single one of a process alone.
        are_factors: the weights are the user's own factors, and are not divided by their sum.
    """

    prepared: Prepared
    parts: list[Any]
    weights: list[float] | None
    are_factors: bool = False

    @property
    def total(self) -> float:
        """Sum of the weights of all microbatches."""
        return sum(self.weights or ())

    def factors(self, total: float) -> list[float] | None:
        """Returns what the loss of each is multiplied with.

        Args:
            total: what the losses of all ranks count for.
        """
        return self.weights if self.weights is None or self.are_factors else fractions(self.weights, total)


def cut(assembly: Assembly, prepared: Prepared, batch: Any) -> CutBatch:
    """Cuts a batch into microbatches.

    Raises:
        UsageError: `Parts` have shares, and their losses bring counts.
    """
    way, setup = assembly.setup.problem.cut, assembly.setup
    parts = way.parts(batch, prepared.microbatches)
    if isinstance(way, ByParts):
        if isinstance(batch, Parts) and batch.shares is not None and prepared.profile.counts_losses:
            raise UsageError(
                "memfit.Parts(shares=...) of a loss that returns (sum, count): its counts say what each part's loss counts for; leave shares out"
            )
        return CutBatch(prepared, parts, way.weights(batch, parts), are_factors=True)
    is_whole = len(parts) == 1 and setup.ranks is None
    return CutBatch(prepared, parts, None if is_whole else weights_of(batch, parts, way, setup.weight))


def _streams(prepared: Prepared) -> list[RandomStream | None]:
    """Returns the random numbers of each microbatch. Parts of the user's own that run one after the
    other, or that draw nothing, leave the default generators to the loop.
    """
    found = prepared.profile
    draws = any(trace.uses_random for trace in found.traces.values())
    if found.own_parts and (prepared.plan.order is Order.MICROBATCH_MAJOR or not draws):
        return [None] * prepared.microbatches
    return draw_streams(prepared.microbatches)


def _note_clip(assembly: Assembly, outcome: Outcome) -> None:
    max_norm = assembly.setup.max_grad_norm
    if max_norm is not None and outcome.norm is not None:
        assembly.checkpointer.note_clip(float(clip_factor(outcome.norm, max_norm)))


def _fail(assembly: Assembly, error: BaseException, numbers: Mapping[int, dict[str, dict[str, Any]]]) -> None:
    """Ends a step that failed: forgets it, or says that it tore the weights.

    Allocation failures become breaches.
    """
    # An update that was under way must not write when the step is forgotten.
    assembly.updates.close()
    assembly.driver.abandon_step()
    try:
        assembly.house.gradients.wait()
    # the step's first error is on its way; this one must not meet the next step
    except (StoreError, PeerError) as other:
        error.add_note(f"a gradient could not be written either: {other}")
    is_decided = assembly.journal is not None and assembly.journal.is_waiting
    if not is_decided and assembly.house.forget_step():
        error.add_note(f"step {assembly.steps} had been committed when this came: it counts")
        return
    for block in assembly.blocks:
        try:
            block.release()
        # All visits end, and whether the step is torn is found out below, whatever else fails.
        except Exception as other:  # noqa: BLE001, the first error is on its way and gets a note
            error.add_note(f"a visit failed as well: {other}")
    updated = assembly.updates.updated_blocks
    is_torn = not is_decided and bool(updated) and not assembly.can_undo(updated)
    if is_decided:
        error.add_note(
            f"step {assembly.steps + 1} had been decided: its gradients are durable, and the next call finishes its updates; job.step(batch) then gives its result"
        )
    if assembly.scaler is not None:
        assembly.scaler.forget_update()
    if not is_torn and not is_decided:
        for index, states in assembly.states.items():
            states.numbers = numbers[index]
    if is_torn:
        names = [assembly.blocks[b].name for b in updated]
        assembly.torn = (
            f"step {assembly.steps + 1} was interrupted ({type(error).__name__}: {error}) after it had begun to update {names[0]!r}"
            + (f" and {len(names) - 1} more block{'s' if len(names) > 2 else ''}" if len(names) > 1 else "")
        )
    if (
        isinstance(error, OF_DTYPES)
        and not isinstance(error, MemfitError | torch.OutOfMemoryError)
        and not is_refusal(error)
        and assembly.steps == 0
        and assembly.plan.compute_dtype is not ComputeDtype.GIVEN
    ):
        raise UnsupportedError(dtype_failure(assembly.plan.compute_dtype, error)) from error
    if is_refusal(error):
        raise LimitBreachError(
            _breach_text(assembly, error, torn=is_torn, is_decided=is_decided),
            phase="step",
            where=assembly.engine.at,
            torn=is_torn,
        ) from error


OF_DTYPES = (RuntimeError, NotImplementedError, TypeError)
"""Errors that torch raises where an operation does not exist in a dtype."""


def _breach_text(assembly: Assembly, error: BaseException, *, torn: bool, is_decided: bool) -> str:
    limit = assembly.machine.limits.device_bytes
    after = (
        "The step had begun to update in place and is torn: load a saved state or fit again"
        if torn
        else "The step is decided, and finished by the next call"
        if is_decided
        else "Nothing was updated"
        if assembly.setup.replans  # whether the job goes on is found out then
        else "Nothing was updated, and the job is over on all ranks: fit again"
        if assembly.setup.ranks is not None
        else "Nothing was updated: the job goes on with the weights of before"
    )
    return (
        f"the limit{'' if limit is None else ' of ' + format_bytes(limit)} was hit at '{assembly.engine.at}': {refusal_words(error)} "
        f"Largest residents: {assembly.largest_residents()}. {after}. Try a smaller batch, a larger limit, or a plan with more microbatches or more recompute"
    )


def _rows(cut: Cut, batch: Any) -> int:
    if not isinstance(batch, Parts):
        return cut.rows(batch)
    try:
        return sum(batch_rows(part) for part in batch.batches)
    except UsageError:
        return cut.rows(batch)  # parts need not be made of rows


def _tokens(batch: Any) -> int | None:
    if isinstance(batch, Parts):
        counts = [_tokens(one) for one in batch.batches]
        return sum(count or 0 for count in counts) if any(count is not None for count in counts) else None
    return next((t.numel() for t in tensors_in(batch) if not t.is_floating_point() and t.dim() > 1), None)


def _is_finite(value: float) -> bool:
    return value - value == 0.0


# Clipping after `job.step` finds no gradients and would do nothing, in silence.
#
# Here it is told, once a job.
#
# In: live jobs. Out: a warning where `clip_grad_norm_` gets parameters of a job, of which none has
# a gradient. (`clip_grad_value_` raises then, by itself.)
#
# [Note: who hears of clipping]
# Nothing of a parameter says that its `grad` was read, and a program may have taken
# `clip_grad_norm_` by any name. But the function reaches a helper through the globals of its
# module, `torch.nn.utils.clip_grad`, when it runs. While a job lives, that name leads through this
# module: it looks, then does what torch's does, with the same arguments. When the last job is
# closed the name is torch's own again. A torch without it is left alone; then nothing is told.

_NAME = "_clip_grads_with_norm_"


class _LiveJob(Protocol):
    def holds(self, parameters: set[int]) -> str | None: ...


_jobs: weakref.WeakSet[Any] = weakref.WeakSet()
_told: weakref.WeakSet[Any] = weakref.WeakSet()
_torchs: list[Callable[..., Any]] = []


def watch(job: _LiveJob) -> None:
    """Begins to watch for clipping of the job's parameters. See [Note: who hears of clipping]."""
    _jobs.add(job)
    found = getattr(clip_grad, _NAME, None)
    if found is not None and found is not _heard:
        _torchs[:] = [found]
        setattr(clip_grad, _NAME, _heard)


def unwatch(job: _LiveJob) -> None:
    """Stops watching for a job. After the last one torch's function is as it was."""
    _jobs.discard(job)
    if not _jobs and getattr(clip_grad, _NAME, None) is _heard:
        setattr(clip_grad, _NAME, _torchs[0])


def _heard(parameters: Any, *args: Any, **kwargs: Any) -> Any:
    own = _torchs[0]
    _look(parameters)
    return own(parameters, *args, **kwargs)


def _look(parameters: Any) -> None:
    """Warns where a job's parameters are to be clipped and none of them has a gradient."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable):
        return
    given = list(parameters)
    if not given or any(p.grad is not None for p in given):
        return
    ids = {id(p) for p in given}
    job = next((each for each in list(_jobs) if each.holds(ids) is not None), None)
    if job is None or job in _told:
        return
    _told.add(job)
    warnings.warn(
        "gradients are clipped here after job.step, and there are none: job.step has made the update with them. Give the norm to "
        "memfit.fit(max_grad_norm=...), which clips before the update (StepResult.norm is the norm before), and take this call out",
        MemfitWarning,
        stacklevel=5,
    )
