"""A job: a model in training inside its limit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from memfit.api.breaches import TRIES, BreachReport, clear_frames, margin_bytes
from memfit.api.commits import CommitReport, Commits, run_identity
from memfit.api.inference import Inference, most_weights, stream
from memfit.api.interrupts import Interrupts
from memfit.api.journaling import StepJournal
from memfit.api.machine import Machine
from memfit.api.run_state import give_random, is_random_state, take_random
from memfit.api.saving import DEFAULT_SHARD_BYTES, LoadResult, SaveResult, load_states, save_job
from memfit.api.setting import training_setting
from memfit.api.splitting import (
    Signature,
    Weigh,
    compare_split,
    evaluating,
    parts_to_check,
    shares,
    signature_of,
    split,
    without_dropout,
)
from memfit.core.errors import (
    DoesNotFitError,
    LimitBreachError,
    MemfitError,
    MemfitWarning,
    StoreError,
    TornStepError,
    UnsupportedError,
    UsageError,
)
from memfit.core.plan import Order, Plan, Tier
from memfit.core.precision import ComputeDtype
from memfit.core.profile import CallProfile, Profile
from memfit.core.schedule import Schedule
from memfit.core.timeline import Timeline
from memfit.core.units import format_bytes, parse_bytes
from memfit.runtime.engine import Engine, Outcome, Work
from memfit.runtime.frames import CallFrames
from memfit.runtime.guard import is_away
from memfit.runtime.homes import ByteHome, DiskHome
from memfit.runtime.housing import House
from memfit.runtime.inputs import casting_inputs
from memfit.runtime.loss_scaling import LossScaler, in_half
from memfit.runtime.noise import RoundingNoise
from memfit.runtime.optimizers import OptimizerDriver, OwnerCallbacks
from memfit.runtime.run_store import RunStore
from memfit.runtime.saved import Buffers
from memfit.runtime.sites import Site
from memfit.runtime.split import SplitMasters
from memfit.runtime.states import BlockStates, StateRest, embedding_names
from memfit.runtime.streams import draw_streams
from memfit.runtime.trees import tensors_in
from memfit.runtime.updates import UpdateWorker
from memfit.runtime.weights import BlockWeights, Slot
from memfit.scheduling.build import build_forward
from memfit.verification.census import Census, CensusReport
from memfit.verification.meters import Proof


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One training step.

    Attributes:
        loss: weighted mean over microbatches, of the whole batch.
        losses: one a microbatch.
        norm: global gradient norm before clipping; None without `max_grad_norm`.
        rows: rows of the batch.
        tokens: elements of the batch's first integer tensor; None if it has none.
        seconds: of this step, measured.
        peak_bytes: measured peak of the step: of the process without a GPU, else of the device.
        departures: what the model did that its trace did not foresee; each was served.
        is_skipped: a gradient overflowed in fp16: nothing was updated, and the loss scale was lowered.
        is_finite: False when the loss (or norm) is NaN or infinite: the update was made all the same, as plain PyTorch does.
    """

    loss: float
    losses: tuple[float, ...]
    norm: float | None
    rows: int
    tokens: int | None
    seconds: float
    peak_bytes: int
    departures: tuple[str, ...]
    is_finite: bool
    is_skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """One forward pass: weighted mean loss, one loss a microbatch, seconds."""

    loss: float
    losses: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that depends on the shapes of a batch."""

    profile: Profile
    rows: int
    schedule: Schedule
    evaluation: Schedule
    timeline: Timeline
    microbatches: int

    @property
    def calls(self) -> tuple[CallProfile, ...]:
        """The calls of a microbatch, as traced."""
        return self.profile.traces[self.rows].calls


Replan = Callable[[Any, int], "JobParts"]
"""A batch that must fit, and bytes to leave free besides -> the parts of a job under another plan."""


@dataclass(frozen=True, kw_only=True)
class JobParts:
    """What `fit` hands over."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    weight: Weigh | None
    optimizer: torch.optim.Optimizer
    driver: OptimizerDriver
    machine: Machine
    plan: Plan
    reason: str
    prepare: Callable[[Any, Plan], Prepared]
    prepared: Prepared
    signature: Signature
    blocks: Sequence[tuple[str, Sequence[tuple[str, nn.Parameter]]]]
    sites: Sequence[Site]
    casts: Sequence[nn.Module]
    predicted_peak_bytes: int
    max_grad_norm: float | None
    directory: str | Path | None
    keeps_gradients: bool
    enforces: bool
    bring: Callable[[Iterable[nn.Parameter]], None] | None = None
    take_back: Callable[[str, nn.Parameter], bool] | None = None
    run: RunStore | None = None
    forget: Callable[[Iterable[nn.Parameter]], None] | None = None
    replan: Replan | None = None
    checks_split: bool = True


class Job:
    """A model in training. Made by `memfit.fit`; use as a context manager, or call `close`.

    Memory: what the plan says; see `plan`, `predicted_peak_bytes` and `proof()`.
    """

    def __init__(self, parts: JobParts) -> None:
        self._machine = parts.machine
        self._steps_here = 0
        self._steps_before = 0
        self._census = Census(parts.machine.meter)
        self._torn: str | None = None
        self._is_closed = False
        self._in_weights = 0
        self._was_whole = not any(is_away(p) for p in parts.model.parameters())
        self.loss_scaler = LossScaler() if parts.plan.scales_losses else None
        """The dynamic loss scale of a plan that computes in fp16; part of every commit. None for other plans."""
        self._has_ended = False
        self._is_stepping = False
        self._has_started = False
        self._interrupts = Interrupts()
        self.breaches: list[BreachReport] = []
        self._assemble(parts)

    def _assemble(self, parts: JobParts, before: Commits | None = None) -> None:
        """All that follows from a plan. `before`: the commits of the plan that this one takes the place of."""
        self.plan = parts.plan
        self.reason = parts.reason
        self._parts = parts
        self._prepared = {parts.signature: parts.prepared}
        self._modes = _modes(parts.model)
        driver = parts.driver
        self._blocks = tuple(
            BlockWeights(i, name, parameters, parts.plan.compute_dtype)
            for i, (name, parameters) in enumerate(parts.blocks)
        )
        if self._is_bf16:
            parts.driver.use_masters(torch.float32)
        self._place = {slot.name: (block, slot) for block in self._blocks for slot in block.slots}
        trained = set(driver.names)
        self._noise = RoundingNoise(seed=torch.initial_seed())
        rest = StateRest(format=self.plan.state_format, kept=embedding_names(parts.model), noise=self._noise)
        self._states = {
            block.index: BlockStates(
                block, {slot.name: driver.state_layout(slot.name) for slot in block.slots if slot.name in trained}, rest
            )
            for block in self._blocks
            if any(slot.name in trained for slot in block.slots)
        }
        self._house = House(
            parts.plan,
            self._blocks,
            self._states,
            device=parts.machine.device,
            directory=parts.directory,
            keeps_gradients=parts.keeps_gradients,
            keeps_norms=parts.max_grad_norm is not None,
            host_ledger=parts.machine.host_ledger,
            run=parts.run,
            model=parts.model,
            identity=run_identity(parts.model, parts.optimizer, parts.plan),
        )
        self._commits: Commits | None = None
        self._journal: StepJournal | None = None
        self._running = ExitStack()
        self._has_begun = False
        self._owed: set[str] = set()
        try:
            self._commits = None if parts.run is None else self._open_commits(parts.run)
            if self._commits is not None and before is not None:
                self._commits.carry_on(before)
            self._begin(parts)
        except BaseException:
            self._is_closed = True
            self._end(restore=True)
            raise

    def _begin(self, parts: JobParts) -> None:
        """Everything moves home. If that fails, `_end` gives back what had moved."""
        driver = parts.driver
        resumed = self._commits if self._commits is not None and self._commits.run.is_resumed else None
        if resumed is None:
            self._house.move_in(parts.bring, parts.take_back)
        else:
            resumed.check()
            self._house.take_up(parts.forget, has_weights=resumed.has_weights)
        callbacks = OwnerCallbacks(
            gather_state=self._gather_state, scatter_state=self._scatter_state, zero_grad=self._zero_grad
        )
        for name, state in driver.adopt(callbacks):
            block, slot = self._place[name]
            try:
                if resumed is None:
                    self._states[block.index].put(slot, state)
            except BaseException:
                driver.restore(name, state)
                raise
            self._owed.add(name)
        if resumed is not None:
            resumed.take_up()
        self._house.first_commit()
        # Beside backward there is something to win where updates wait for copies or the disk; else they would only take backward's cores.
        is_beside = parts.machine.device.type != "cpu" or self._house.uses_disk
        self._running.enter_context(casting_inputs(parts.casts, torch.bfloat16 if self._is_bf16 else None))
        self._updates = UpdateWorker(
            driver,
            self._states,
            self._house.gradients,
            is_beside=is_beside,
            noise=self._noise if self.plan.drops_masters else None,
        )
        self._running.callback(self._updates.close)
        self._frames = CallFrames(parts.plan, self._blocks, self._house.tier_stores(), device=parts.machine.device)
        self._engine = Engine(
            model=parts.model,
            sites=parts.sites,
            blocks=self._blocks,
            frames=self._frames,
            gradients=self._house.gradients,
            updates=self._updates,
            parameter_order=[name for name, _ in parts.model.named_parameters()],
            device_types=("cpu", "cuda") if parts.machine.device.type == "cuda" else ("cpu",),
            loose=[i for i, block in enumerate(parts.prepared.profile.blocks) if block.is_spanning],
            observe=self._interrupts.check,
        )
        self._running.callback(self._engine.close)
        self._frames.attach(self._engine)
        self._open_journal(parts)
        self._machine.forget_peak()  # while the model was whole
        if parts.enforces:
            self._machine.arm()
        self._has_begun = True

    def _open_commits(self, run: RunStore) -> Commits:
        parts = self._parts
        return Commits(
            run,
            self._house,
            machine=parts.machine,
            model=parts.model,
            optimizer=parts.optimizer,
            blocks=self._blocks,
            states=self._states,
            plan=parts.plan,
            reason=parts.reason,
            max_grad_norm=parts.max_grad_norm,
            noise=self._noise,
            scaler=self.loss_scaler,
        )

    def _open_journal(self, parts: JobParts) -> None:
        """Where the run keeps one: a step that was decided when the last process ended is made."""
        if parts.run is None or parts.run.scheme != "journal":
            return
        self._journal = StepJournal(
            self._house,
            driver=parts.driver,
            optimizer=parts.optimizer,
            updates=self._updates,
            states=self._states,
            noise=self._noise,
        )
        if parts.run.is_resumed:
            self._journal.take_up()

    def begin_run(self) -> None:
        """For `fit`, at its end: commits a new run's first version, or puts the random numbers of a resumed one where they were."""
        if self._commits is not None:
            self._commits.begin()
        self._has_started = True
        # Where weights came from is not asked for any more.
        self._parts = replace(self._parts, bring=None, take_back=None)

    @property
    def _is_bf16(self) -> bool:
        return self.plan.compute_dtype is ComputeDtype.BFLOAT16

    # --- training ---------------------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Forward, backward and update on one batch.

        Args:
            batch: as the sample; other shapes are planned for when they come (about a second each time a new shape appears).

        Returns:
            The loss and what was measured.

        Raises:
            LimitBreachError: the limit was hit; says where, and whether the step can be repeated.
            DoesNotFitError: a batch of another shape does not fit. UsageError: the batch, the loss, or the job is closed.
            TornStepError: an earlier step was interrupted while it updated in place. KeyboardInterrupt: at the next action; a second Ctrl-C at once.
        """
        with self._interrupts.held():
            self._check_usable()
            self._check_unchanged()
            if self._commits is not None:
                self._commits.check_registered()
            self._note_modes()
            self._keep_changes()
            self._seal()
            if self._parts.replan is None:
                return self._step(batch)
            return self._step_or_replan(batch, self._parts.replan)

    def _step_or_replan(self, batch: Any, replan: Replan) -> StepResult:
        """A step; where it meets the limit, the same step under a tighter plan. See [Note: replanning] in `api.breaches`."""
        found: list[BreachReport] = []
        for attempt in range(1, TRIES + 2):
            before = take_random()
            try:
                result = self._step(batch)
            except LimitBreachError as error:
                if attempt > TRIES:
                    error.add_note(f"{TRIES} tighter plans met the limit as well")
                    raise
                found.append(self._make_tighter(error, batch, attempt, replan))
                give_random(before)
            else:
                self.breaches += found
                for report in found:
                    warnings.warn(report.in_words(), MemfitWarning, stacklevel=3)
                return replace(result, departures=(*result.departures, *(report.in_words() for report in found)))
        raise AssertionError("the loop returns or raises")

    def _make_tighter(self, error: LimitBreachError, batch: Any, attempt: int, replan: Replan) -> BreachReport:
        """Gives up everything but the store, and takes the run up again under a plan that needs less.

        Raises:
            LimitBreachError: the breach itself, where no tighter plan fits; the job is closed, the last commit is whole.
        """
        parts, commits = self._parts, self._commits
        assert commits is not None
        limit = self._machine.limits.device_bytes or 0
        peak = self._prepared[signature_of(batch)].timeline.peak_bytes
        try:
            self._give_up()
            commits.run.go_back()
            clear_frames(error)
            foreign_bytes = self._machine.meter.live_bytes()
            tighter = replan(batch, margin_bytes(limit, attempt))
            if tighter.prepared.timeline.peak_bytes >= peak:
                raise DoesNotFitError(  # noqa: TRY301, answered below like the planner's own
                    f"the tightest plan that fits is predicted to take no less: {tighter.reason}"
                )
            self._torn = None
            self._assemble(tighter, commits)
            if tighter.plan.microbatches > 1 and parts.plan.microbatches == 1 and tighter.checks_split:
                self.check_split(batch)
        except BaseException as other:
            self._is_closed = True
            self._end(restore=False)
            if not isinstance(other, MemfitError | torch.OutOfMemoryError):
                raise
            error.add_note(
                f"no tighter plan took its place ({type(other).__name__}: {other}). The job is closed; step {commits.run.committed.committed_step} is whole in "
                f"{commits.run.directory}"
            )
            raise error from other
        return BreachReport(
            step=self.steps + 1,
            cause=str(error),
            foreign_bytes=foreign_bytes,
            before=parts.plan,
            after=tighter.plan,
            reason=tighter.reason,
        )

    def _give_up(self) -> None:
        """Lets go of all that the plan made; only the store stays."""
        self._running.close()
        for block in self._blocks:
            block.give_up()
        for states in self._states.values():
            states.home = None
        self._parts.driver.release()
        self._house.close()

    def _step(self, batch: Any) -> StepResult:
        began = time.perf_counter()
        if self._journal is not None and self._journal.is_waiting:
            return self._finish_step(batch, self._journal, began)
        prepared = self._prepare(batch)
        parts = split(batch, prepared.microbatches)
        factors = shares(parts, self._parts.weight)
        phase = "first step" if self._steps_here == 0 else "steady"
        if self._steps_here < 2:
            self._machine.forget_peak()  # of loading, then of the first step, which brings up states and libraries
        self._is_stepping = True
        try:
            with self._machine.phases(phase):
                outcome = self._run_step(prepared, parts, factors)
                self._steps_here += 1
        finally:
            self._is_stepping = False
        self._note()
        if self._census.note_step():
            self._census.warn_once(self.census())
        return self._result(batch, outcome, time.perf_counter() - began)

    def _finish_step(self, batch: Any, journal: StepJournal, began: float) -> StepResult:
        """The step that was decided before, in this process or another. See [Note: a step from its journal] in `api.journaling`."""
        journal.finish()
        scaler = self.loss_scaler
        if scaler is not None:
            scaler.begin_step()
        self._parts.driver.begin_step()
        outcome = journal.give()
        if scaler is not None:
            scaler.update(has_overflowed=False)
        self._house.note_changed(self._states)
        self._house.commit()
        self._parts.driver.end_step()
        self._note_clip()
        self._steps_here += 1
        self._note()
        return self._result(batch, outcome, time.perf_counter() - began)

    def _note_clip(self) -> None:
        if self._commits is not None:
            scale = self._house.gradients.scale
            self._commits.clip = None if scale is None else float(scale)

    @property
    def _loss(self) -> Callable[[nn.Module, Any], Any]:
        """The user's, as the plan runs it."""
        loss = self._parts.loss
        return loss if self.loss_scaler is None else in_half(loss, self._machine.device.type)

    def _run_step(self, prepared: Prepared, parts: Sequence[Any], factors: Sequence[float] | None) -> Outcome:
        model, loss, scaler = self._parts.model, self._loss, self.loss_scaler
        for _, slot in self._place.values():
            slot.parameter.grad = None
        self._updates.updated_blocks.clear()
        self._noise.step = self.steps
        numbers = {index: dict(states.numbers) for index, states in self._states.items()}
        try:
            if scaler is None:
                self._parts.driver.begin_step()
            else:
                scaler.begin_step()
            self._house.gradients.begin_step()
            if self._journal is not None:
                self._journal.begin_step()
            self._frames.begin_step(prepared.calls, [*model.buffers(), *tensors_in(list(parts))])
            work = Work(
                run=lambda m: loss(model, parts[m]),
                shares=factors,
                streams=draw_streams(prepared.microbatches),
                max_norm=self._parts.max_grad_norm,
                scale=None if scaler is None else scaler.scale,
                begin_updates=None if scaler is None else self._parts.driver.begin_step,
                settle=None if self._journal is None else self._journal.decide,
            )
            with training_setting(model, self.plan.loss_chunk_tokens):
                outcome = self._engine.run(prepared.schedule, work, tail=_tail(self.plan))
            if scaler is not None:
                scaler.update(has_overflowed=outcome.is_skipped)
            self._house.note_changed(self._updates.updated_blocks)
            self._house.commit()
        except BaseException as error:
            self._fail(error, "step", numbers)
            raise
        if not outcome.is_skipped:
            self._parts.driver.end_step()
        self._note_clip()
        return outcome

    def _fail(self, error: BaseException, phase: str, numbers: Mapping[int, dict[str, dict[str, Any]]]) -> None:
        """A step did not end: forget it, or say that it tore the weights. Allocation failures become breaches."""
        # An update that was under way must not write when the step is forgotten.
        self._updates.close()
        self._parts.driver.abandon_step()
        try:
            self._house.gradients.wait()
        except StoreError as other:  # the step's first error is on its way; this one must not meet the next step
            error.add_note(f"a gradient could not be written either: {other}")
        is_decided = self._journal is not None and self._journal.is_waiting
        if not is_decided and self._house.forget_step():
            error.add_note(f"step {self.steps} had been committed when this came: it counts")
            return
        for block in self._blocks:
            block.release()
        is_torn = not is_decided and bool(self._updates.updated_blocks) and not self._is_undoable
        if is_decided:
            error.add_note(
                f"step {self.steps + 1} had been decided: its gradients are durable, and the next call finishes its updates; job.step(batch) then gives its result"
            )
        if self.loss_scaler is not None:
            self.loss_scaler.forget_update()
        if not is_torn and not is_decided:
            for index, states in self._states.items():
                states.numbers = numbers[index]
        if is_torn:
            names = [self._blocks[b].name for b in self._updates.updated_blocks]
            self._torn = (
                f"step {self.steps + 1} was interrupted ({type(error).__name__}: {error}) after it had begun to update {names[0]!r}"
                + (f" and {len(names) - 1} more blocks" if len(names) > 1 else "")
            )
        if isinstance(error, torch.OutOfMemoryError):
            raise LimitBreachError(
                self._breach_text(error, torn=is_torn, is_decided=is_decided),
                phase=phase,
                where=self._engine.at,
                torn=is_torn,
            ) from error

    @property
    def _is_undoable(self) -> bool:
        """The homes still hold the weights and states of before."""
        return all(
            _has_spare_slot(self._blocks[b].home)
            and _has_spare_slot(self._blocks[b].master_home)
            and (not self._states[b].nbytes or _has_spare_slot(self._states[b].home))
            for b in self._updates.updated_blocks
        )

    def _breach_text(self, error: BaseException, *, torn: bool, is_decided: bool) -> str:
        limit = self._machine.limits.device_bytes
        largest = sorted(self._residents(), key=lambda item: -item[1])[:5]
        held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in largest)
        after = (
            "The step had begun to update in place and is torn: load a saved state or fit again"
            if torn
            else "The step is decided, and finished by the next call"
            if is_decided
            else "Nothing was updated: the job goes on with the weights of before"
        )
        return (
            f"the limit{'' if limit is None else ' of ' + format_bytes(limit)} was hit at '{self._engine.at}': {str(error).splitlines()[0]} "
            f"Largest residents: {held or 'none of memfit'}. {after}. Try a smaller batch, a larger limit, or a plan with more microbatches or more recompute"
        )

    def _residents(self) -> Iterator[tuple[str, int]]:
        for block in self._blocks:
            if block.is_here:
                yield f"weights of {block.name!r}", block.nbytes
            for slot in block.slots:
                nbytes = self._house.gradients.held_bytes(slot)
                if nbytes:
                    yield f"gradient of {slot.name!r}", nbytes
        for index, states in self._states.items():
            if states.home is not None and states.home.memory is not None:
                yield f"optimizer states of {self._blocks[index].name!r}", states.nbytes

    def _result(self, batch: Any, outcome: Outcome, seconds: float) -> StepResult:
        losses = tuple(float(loss) for loss in outcome.losses)
        total = sum(x * share for x, share in zip(losses, outcome.shares, strict=True))
        norm = None if outcome.norm is None else float(outcome.norm)
        return StepResult(
            loss=total,
            losses=losses,
            norm=norm,
            rows=signature_of(batch).rows,
            tokens=_tokens(batch),
            seconds=seconds,
            peak_bytes=self._machine.last_peak_bytes(),
            departures=tuple(outcome.departures),
            is_skipped=outcome.is_skipped,
            is_finite=_is_finite(total) and (norm is None or _is_finite(norm)),
        )

    def _note_modes(self) -> None:
        """Modules in other modes (`model.train()` after a frozen start) are another program: what was prepared is prepared again, and checked."""
        modes = _modes(self._parts.model)
        if modes != self._modes:
            self._prepared.clear()
            self._modes = modes

    def _prepare(self, batch: Any) -> Prepared:
        signature = signature_of(batch)
        prepared = self._prepared.get(signature)
        if prepared is None:
            prepared = self._parts.prepare(batch, self.plan)
            budget = self._machine.armed_bytes
            if self._parts.enforces and budget is not None and prepared.timeline.peak_bytes > budget:
                raise DoesNotFitError(
                    f"a batch of {signature.rows} rows with tensors {[list(s) for s, _ in signature.tensors]} would take "
                    f"{format_bytes(prepared.timeline.peak_bytes)} of tensors under the job's plan, and {format_bytes(budget)} are left: cut it, or close the job "
                    "and fit again with this batch as the sample"
                )
            self._prepared[signature] = prepared
        return prepared

    # --- beside training --------------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Any) -> EvaluateResult:
        """The loss of a batch, forward only, in evaluation mode (`model.eval()` for the time), weights streamed as in a step."""
        self._check_usable()
        self._keep_changes()
        began = time.perf_counter()
        prepared = self._prepare(batch)
        parts = split(batch, prepared.microbatches)
        factors = shares(parts, self._parts.weight)
        model, loss = self._parts.model, self._loss
        work = Work(run=lambda m: loss(model, parts[m]), shares=factors, streams=[None] * len(parts))
        with (
            self._interrupts.held(),
            self._machine.phases("evaluate"),
            torch.no_grad(),
            evaluating(model),
            training_setting(model, self.plan.loss_chunk_tokens),
        ):
            results = self._engine.evaluate(prepared.evaluation, work)
        if factors is None and isinstance(results[0], tuple):
            losses = (float(results[0][0]) / float(results[0][1]),)
        elif isinstance(results[0], tuple):
            total = float(sum(float(count) for _, count in results))
            losses, factors = tuple(float(s) for s, _ in results), [1.0 / total] * len(results)
        else:
            losses = tuple(float(r) for r in results)
        mean = losses[0] if factors is None else sum(x * f for x, f in zip(losses, factors, strict=True))
        self._note()
        return EvaluateResult(loss=mean, losses=losses, seconds=time.perf_counter() - began)

    @contextmanager
    def inference(self, *, cache_limit: int | str | None = None) -> Iterator[Inference]:
        """Lets the model's own `forward` and `generate` be called: no gradients, evaluation mode, weights streamed.

        Two blocks at a time are here, beside those that live on the device.

            with job.inference():
                tokens = model.generate(prompt, max_new_tokens=50)

        Activations are the program's own; the limit holds. What is changed in weights inside is lost.

        Args:
            cache_limit: as in `memfit.infer`.

        Yields:
            What `memfit.infer` yields: the model, `together` for several requests, the caches' figures.

        Raises:
            LimitBreachError: the limit; the job goes on. UsageError: the job is closed. TornStepError: the weights are no step's.
        """
        self._check_usable()
        self._keep_changes()
        self._is_stepping = True
        try:
            with stream(
                self._parts.model,
                self._parts.sites,
                self._blocks,
                self._machine,
                self._house,
                self._interrupts,
                most_weights(self._parts.sites, self._blocks, {b.index for b in self._blocks if not b.travels}),
                cache_limit=None if cache_limit is None else parse_bytes(cache_limit),
                directory=self._parts.directory,
            ) as session:
                yield session
        finally:
            self._is_stepping = False
            self._note()

    def check_split(self, sample: Any) -> None:
        """Refuses a loss that does not add up over microbatches, by three rows forward: whole, and cut into two and one run interleaved.

        As the model trains but without dropout; where it draws random numbers even so, in evaluation mode. Generators and buffers are as they were after;
        weights stream as in a step, so that it fits where the step fits.

        Raises:
            UnsupportedError: the results differ by more than 1e-5 of the whole.
        """
        pieces = parts_to_check(sample)
        if pieces is None:
            return
        whole, parts = pieces
        model = self._parts.model
        with without_dropout(model):
            found = self._losses_of_split(whole, parts, may_draw=False)
        if found is None:
            with evaluating(model):
                found = self._losses_of_split(whole, parts, may_draw=True)
        assert found is not None
        compare_split(
            found[0][0],
            found[1],
            parts,
            self._parts.weight,
            is_rounded=self.plan.compute_dtype is not ComputeDtype.GIVEN
            or any(
                slot.given_dtype.is_floating_point and slot.given_dtype.itemsize < 4 for _, slot in self._place.values()
            ),
        )

    def _losses_of_split(self, whole: Any, parts: Sequence[Any], *, may_draw: bool) -> list[list[Any]] | None:
        """What the loss gives for the whole, and for its parts; None where random numbers are drawn that may not be."""
        model, loss = self._parts.model, self._loss
        results: list[list[Any]] = []
        before = take_random()
        try:
            for batches in ([whole], parts):
                give_random(before)
                schedule = build_forward(self.plan, self._parts.prepared.profile, len(batches))
                work = Work(run=lambda m, b=batches: loss(model, b[m]), shares=None, streams=[None] * len(batches))
                with torch.no_grad(), Buffers(model).restored(), training_setting(model, self.plan.loss_chunk_tokens):
                    results.append(self._engine.evaluate(schedule, work))
                if not may_draw and not is_random_state(before):
                    return None
        finally:
            give_random(before)
        return results

    @contextmanager
    def weights(self, *blocks: str) -> Iterator[None]:
        """Brings blocks (all without arguments) to the device for as long as the context lasts; what is changed inside is kept.

        Under a plan that computes in bf16 these are the bf16 weights; the masters of those that are changed become what they were changed to.

        Args:
            blocks: names of blocks (`job.block_names`) or of parameters.

        Raises:
            UsageError: an unknown name.
        """
        self._check_open()
        self._keep_changes()
        chosen = self._choose_blocks(blocks)
        fetched = [block for block in chosen if not block.is_here]
        try:
            with self._interrupts.held():
                for block in chosen:
                    block.fetch()
                    block.wait()
            before = {block.index: block.versions() for block in chosen}
            yield
            with self._interrupts.held():
                self._write_home([block for block in chosen if block.versions() != before[block.index]], before)
        finally:
            for block in fetched:
                block.release()
            self._note()

    def _write_home(self, changed: Sequence[BlockWeights], before: Mapping[int, Sequence[int]]) -> None:
        for block in changed:
            self._check_changeable(block)
        self._house.note_changed(block.index for block in changed)
        try:
            for block in changed:
                ticket = block.write_home(before[block.index])
                if ticket is not None:
                    ticket.wait()
            self._keep_changes()
        except BaseException as error:
            if any(_is_overwritten(block.home) or _is_overwritten(block.master_home) for block in changed):
                self._torn = f"weights that were changed between two steps could not be written ({type(error).__name__}: {error})"
            self._house.forget_step()
            raise

    # --- commits ----------------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps made in the run so far: since `fit`, or, with `store=` or `load_states`, since the run began. A loop over `range(job.steps, total)` goes on."""
        return self._steps_before + self._house.step

    def register(self, name: str, thing: Any, *, is_new: bool = False) -> None:
        """Makes the state of an object part of every commit, and gives it back what it was where a run goes on.

        Schedulers, averages, loaders, samplers: whatever has `state_dict` and `load_state_dict`; and random generators of torch, NumPy and Python (the
        default ones of all three belong to every commit without being asked). The state of what gives batches (it can be iterated) and of generators is
        noted when a method of the job returns, that of everything else when the next step begins (docs/store.md). Nothing is pickled: a state is made
        of numbers, texts, tensors and containers of them.

        Memory: three times the tensors of its state, for a moment, at each commit.

        Args:
            name: to find it again by, in the run that goes on.
            thing: the object, ready: register a scheduler after it is built. None: the state that the run has under this name is given up.
            is_new: it joins a run that went on without it.

        Raises:
            UsageError: no `store=`; a name that is taken, or that the run does not know; an object without a state. UnsupportedError: a state that cannot be kept.
            StoreError: a state that the object does not take.
        """
        self._check_open()
        if self._commits is None:
            raise UsageError(
                f"register({name!r}, ...): the job commits nothing; memfit.fit(store=directory) makes a run that can go on"
            )
        self._commits.register(name, thing, is_new=is_new)

    def commit(self) -> None:
        """Commits the step that was made last now, with everything as it stands: say so at the end of a loop's body, where nothing of it is left to do.

        Without it a step is committed when the next one begins, or by `close`.

        Raises:
            UsageError: no `store=`. StoreError: the disk; the commit before is whole and this may be repeated. TornStepError: the weights are no step's.
        """
        self._check_usable()
        if self._commits is None:
            raise UsageError("the job commits nothing; memfit.fit(store=directory) makes a run that can go on")
        self._keep_changes()
        with self._interrupts.held():
            self._commits.note()
            self._commits.seal(force=True)

    @property
    def commits(self) -> CommitReport | None:
        """What committing costs and promises; None without `store=`."""
        return None if self._commits is None else self._commits.report()

    def _seal(self, *, force: bool = False) -> None:
        """The step before is committed with what was done after it, if it is time."""
        if self._commits is not None:
            with self._interrupts.held():
                self._commits.seal(force=force)

    def _note(self) -> None:
        if self._commits is not None:
            self._commits.note()

    def save(
        self,
        directory: str | Path,
        *,
        max_shard_bytes: int | str = DEFAULT_SHARD_BYTES,
        extra: Mapping[str, Any] | None = None,
    ) -> SaveResult:
        """Saves weights, optimizer and the run's place as safetensors and JSON; see `saving.save_job`. Two pieces of 8 MiB of memory.

        Args:
            directory: replaced in one step, when all is written; an interrupted save leaves the old one. Files of others in it stay.
            max_shard_bytes: of one file of weights.
            extra: kept along and given back by `saving.load`: numbers, texts, lists, dictionaries (a scheduler's `state_dict()`, say).

        Raises:
            StoreError: the disk. UsageError: the directory, or the job is closed. TornStepError: the weights are no step's.
        """
        self._check_usable()
        self._keep_changes()
        with self._machine.phases("save"):
            return save_job(
                directory,
                model=self._parts.model,
                optimizer=self._parts.optimizer,
                blocks=self._blocks,
                states=self._states,
                # Weights and states are those of the step that waits for its `job.step`, if one does.
                steps=self.steps + (self._journal is not None and self._journal.is_waiting),
                max_shard_bytes=max_shard_bytes,
                extra=extra,
            )

    def load_states(self, directory: str | Path, *, restore_random: bool = True) -> LoadResult:
        """Takes the optimizer's states, its settings and the count of steps from a directory that `save` wrote: the run goes on where that one stood.

        The weights are those of the job: `memfit.fit(weights=directory)`, say, for a model that is never whole in memory.

        Memory: the states of one parameter, and a piece of 8 MiB.

        Args:
            directory: that `save` wrote.
            restore_random: torch's default generators go on where they were.

        Raises:
            StoreError: a file that is missing, damaged or not memfit's. UsageError: an optimizer that the save does not fit (nothing was changed then).
        """
        self._check_usable()
        if self._commits is not None:
            raise UsageError(
                "a job with store= has its own states and steps: give the directory of the run to resume= instead"
            )
        named = {name: slot.parameter for name, (_, slot) in self._place.items()}
        try:
            found = load_states(
                directory,
                optimizer=self._parts.optimizer,
                driver=self._parts.driver,
                named=named,
                scatter=self._scatter_state,
                restore_random=restore_random,
            )
        except BaseException:
            self._house.forget_step()
            raise
        self._keep_changes()
        self._steps_before = found.steps - self._house.step
        return found

    def gradient(self, name: str) -> torch.Tensor | None:
        """A copy of a parameter's gradient of the last step (`fit(keep_gradients=True)`); None if it received none."""
        self._check_open()
        if not self._parts.keeps_gradients:
            raise UsageError("gradients are given up after the update; fit(keep_gradients=True) keeps them readable")
        if name not in self._place:
            raise UsageError(f"no parameter is called {name!r}; names are those of model.named_parameters()")
        block, slot = self._place[name]
        return self._house.gradients.read(block, slot)

    def proof(self, *, before_bytes: int = 0) -> Proof:
        """The limit, the predicted peak, and the measured peak over all phases so far.

        Args:
            before_bytes: a peak that was measured before `fit`, to be covered too.
        """
        limit = self._machine.limits.device_bytes
        return Proof(
            limit_bytes=limit if limit is not None else 0,
            predicted_peak_bytes=self._parts.predicted_peak_bytes,
            measured_peak_bytes=max(before_bytes, self._machine.measured_peak_bytes()),
            phases=self._machine.phases.records,
        )

    def census(self) -> CensusReport:
        """What lives from step to step: tensors that survive and who holds them, and callbacks that keep too much alive. Prints as text; `.warn()` warns.

        Live bytes and blocks are noted at each step's end. While they are flat this takes milliseconds; else seconds, and it may run the garbage collector.
        """
        callbacks: dict[str, Callable[..., Any]] = {"the loss": self._parts.loss}
        if self._parts.weight is not None:
            callbacks["the weight"] = self._parts.weight
        return self._census.report(self._parts.model, callbacks, keeper=self)

    @property
    def predicted_peak_bytes(self) -> int:
        """Of the process without a GPU, else of the device, in a steady step."""
        return self._parts.predicted_peak_bytes

    @property
    def block_names(self) -> tuple[str, ...]:
        """In the order of their first call."""
        return tuple(block.name for block in self._blocks)

    @property
    def profile(self) -> Profile:
        """Of the sample's shapes."""
        return self._parts.prepared.profile

    @property
    def schedule(self) -> Schedule:
        """The step as data; `.text()` prints it."""
        return self._parts.prepared.schedule

    @property
    def bytes_moved(self) -> tuple[dict[str, int], dict[str, int]]:
        """(read, written) bytes of the disk since the job began, by purpose."""
        return self._house.bytes_moved

    # --- the end ----------------------------------------------------------------------------------------------------------------

    def close(self, *, restore: bool | None = None, commit: bool = True) -> None:
        """Gives the user an ordinary, complete model and optimizer back, where they fit; temporary files are deleted, a `store=` stays.

        Weights that computed in bf16 come back as their fp32 masters, whatever the dtype in which the model came.

        Memory: all weights and optimizer states at once, on the model's device; the limit is off from here on.

        Args:
            restore: True gives everything back, whatever it takes. False gives nothing back: weights that are away are gone with their files (save before),
                or stay in the store alone.
                None: everything, but a model that was never whole in memory (`memfit.empty`) only where that stays under the limit.
            commit: with `store=`, the last step is committed first. Leaving the context by an error does not: nobody knows what was done after the step.

        Raises:
            DoesNotFitError: such a model is larger than the limit, and it was not said what is to become of it. Nothing is lost: the job goes on.
            StoreError: something could not be read, or files could not be removed. What could be read is given back; repeat `close` when the disk is
            there again, or give the rest up with `restore=False`.
        """
        if restore is None and not self._has_ended:
            self._check_restorable()
        restore = restore is not False
        if commit and not self._is_closed and self._has_started and self._torn is None and self._commits is not None:
            self._keep_changes()
            self._seal(force=True)
        self._is_closed = True
        with self._interrupts.held():
            self._end(restore=restore)

    def _check_restorable(self) -> None:
        limit = self._machine.limits.device_bytes
        if self._was_whole or limit is None or not self._parts.enforces or not self._has_begun:
            return
        coming = sum(b.master_nbytes if b.has_masters else b.nbytes for b in self._blocks if b.travels)
        coming += sum(s.nbytes for s in self._states.values() if s.home is not None and s.home.tier is not Tier.DEVICE)
        coming += max(block.nbytes for block in self._blocks)  # one is here twice for a moment
        held = self._machine.base_bytes() + self._machine.meter.live_bytes()
        if held + coming > limit:
            raise DoesNotFitError(
                f"the model was never whole in memory: its weights and optimizer states would take {format_bytes(coming)} beside the {format_bytes(held)} that "
                f"are held, above the limit of {format_bytes(limit)}. The job goes on. Save it and say job.close(restore=False), or bring everything back "
                "past the limit with job.close(restore=True)",
                smallest_limit_bytes=held + coming,
            )

    def undo(self) -> None:
        """As `close`, for a fit that is refused before its first step: every weight comes back in the dtype in which it came, or stays unborn."""
        self._has_begun = False
        self.close()

    def _end(self, *, restore: bool) -> None:
        if self._has_ended:
            return
        self._machine.disarm()
        self._running.close()
        if restore:
            self._give_back()
        else:
            for block in self._blocks:
                block.release()
        self._has_ended = True
        self._parts.driver.release()
        self._house.close()
        if self._parts.run is not None and self._has_started:
            self._parts.run.close()
        elif self._parts.run is not None:
            self._parts.run.reset()

    def _give_back(self) -> None:
        """States and weights, each as soon as it was read; what was given back already is not read again."""
        try:
            self._keep_changes()
            for name in sorted(self._owed):
                self._parts.driver.restore(name, self._gather_state(name))
                self._owed.discard(name)
            # Before the first step weights are what they were born as: what never was in memory need not come there.
            take_back = None if self._has_begun else self._parts.take_back
            self._house.give_back(as_given=not self._has_begun, take_back=take_back)
        except StoreError as error:
            failure = StoreError(
                f"not everything could be given back: {error}. Repeat job.close() when the disk can be read again; job.close(restore=False) gives up "
                "what is still in the job's homes"
            )
            failure.errno = error.errno
            raise failure from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close(commit=error is None)
        except DoesNotFitError as refusal:
            if error is None:
                raise
            self.close(restore=False, commit=False)
            error.add_note(f"the job was closed without giving the model back: {refusal}")

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(
                "the job is closed; its model and optimizer are ordinary ones again. memfit.fit makes a new job"
            )

    def _keep_changes(self) -> None:
        """What was written to homes between two steps is a version of its own. Within a step nothing is one yet."""
        if not self._is_stepping:
            if self._journal is not None:
                self._journal.finish()
            self._house.keep_changes()

    def _check_usable(self) -> None:
        self._check_open()
        if self._is_stepping:
            raise UsageError(
                "the job is in the middle of a step, or of job.inference(): what runs inside cannot step, evaluate or save it"
            )
        if self._torn is not None:
            raise TornStepError(
                f"the step is torn: {self._torn}; some blocks hold new weights and some old ones. Go back: {self._way_back()}"
            )

    def _way_back(self) -> str:
        if self._commits is None:
            return "load a saved state into the model and fit again. Under a plan with is_atomic=True, what rests on disk cannot tear"
        report = self._commits.report()
        return f"step {report.step} is whole in {report.directory}: close this job with restore=False and fit again with the same store"

    def _check_unchanged(self) -> None:
        """The parameters are those of `fit`, lie where the job put them, and train as they did."""
        now = dict(self._parts.model.named_parameters())
        for name, (block, slot) in self._place.items():
            parameter = now.get(name)
            problem = None
            if parameter is None:
                problem = "was removed from the model"
            elif parameter is not slot.parameter:
                problem = "was replaced by another parameter"
            elif parameter.requires_grad != slot.requires_grad:
                problem = f"had requires_grad={slot.requires_grad} and has {parameter.requires_grad} now"
            elif block.is_here and parameter.untyped_storage()._cdata != block.storage._cdata:  # noqa: SLF001, identity
                problem = "was given other memory (parameter.data = ..., model.to(...))"
            if problem is not None:
                raise UsageError(
                    f"the parameter {name!r} {problem} behind the job's back: homes, plan and optimizer states belong to the old one. Change values in place inside "
                    "`with job.weights():`; for anything else close the job, change the model, and fit again"
                )
        added = [name for name in now if name not in self._place]
        if added:
            raise UsageError(
                f"the model has a new parameter {added[0]!r} that the job does not know: close the job and fit again"
            )

    def _choose_blocks(self, names: Sequence[str]) -> list[BlockWeights]:
        if not names:
            return list(self._blocks)
        by_name = {block.name: block for block in self._blocks} | {n: b for n, (b, _) in self._place.items()}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise UsageError(f"no block or parameter is called {unknown[0]!r}; blocks are {list(self.block_names)}")
        return list(dict.fromkeys(by_name[name] for name in names))

    def _gather_state(self, name: str) -> dict[str, Any]:
        self._keep_changes()
        block, slot = self._place[name]
        return self._states[block.index].gather(slot)

    def _check_changeable(self, block: BlockWeights) -> None:
        """With a journal, a block's one slot is changed by its steps alone."""
        if self._journal is None:
            return
        is_fixed = block.index not in self._states or self.plan.block(block.name).rests_on_disk
        if is_fixed or self._journal.is_waiting:
            raise UnsupportedError(
                f"weights or states of block {block.name!r} cannot be changed between steps: with scheme='journal' there is no room for a version of them that "
                "no step makes. The store has what it had. Change the model before a run begins, or take scheme='generations'"
            )

    def _scatter_state(self, name: str, state: dict[str, Any]) -> None:
        block, slot = self._place[name]
        self._check_changeable(block)
        self._house.note_changed([block.index])
        self._states[block.index].put(slot, state)

    def _zero_grad(self, set_to_none: bool) -> None:  # noqa: FBT001, the optimizer's own signature
        for _, slot in self._place.values():
            gradient = slot.parameter.grad
            if set_to_none or gradient is None:
                slot.parameter.grad = None
            else:
                gradient.zero_()


def _has_spare_slot(home: ByteHome | None) -> bool:
    return home is not None and home.has_spare_slot


def _is_overwritten(home: ByteHome | None) -> bool:
    """What is written there changes what reads see."""
    rests = home.rest if isinstance(home, SplitMasters) else home
    return isinstance(rests, DiskHome) and rests.has_versions and not rests.has_spare_slot


def _tail(plan: Plan) -> int | None:
    # A single microbatch has nothing to wait for: its one backward is plain PyTorch's, also in the order of its sums.
    return plan.tail if plan.order is Order.LAYER_MAJOR and plan.microbatches > 1 else None


def _modes(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())


def _tokens(batch: Any) -> int | None:
    return next((t.numel() for t in tensors_in(batch) if not t.is_floating_point() and t.dim() > 1), None)


def _is_finite(value: float) -> bool:
    return value - value == 0.0


__all__ = ["EvaluateResult", "Job", "JobParts", "Prepared", "Slot", "StepResult"]
