"""A job: a model in training inside its limit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from memfit.checkpoints import CommitReport
from memfit.checkpoints.run_state import give_random, take_random
from memfit.core.errors import (
    DoesNotFitError,
    LimitBreachError,
    MemfitWarning,
    StoreError,
    TornStepError,
    UsageError,
)
from memfit.core.numerics import Numerics
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.core.showing import html_table
from memfit.core.units import format_bytes, parse_bytes
from memfit.engine.loss_scaling import LossScaler
from memfit.homes.weights import check_untouched
from memfit.job import clipping
from memfit.job.assembly import Assembly
from memfit.job.breaches import TRIES, BreachReport, assemble_fitting, assemble_tighter
from memfit.job.forward_passes import check_counted, check_dtype, check_first, check_split, evaluate
from memfit.job.held import note_holder
from memfit.job.inference import Inference, most_weights, stream
from memfit.job.interrupts import Interrupts
from memfit.job.parts import JobParts, Replan
from memfit.job.results import EvaluateResult, StepResult
from memfit.job.saving import DEFAULT_SHARD_BYTES, LoadResult, SaveResult, load_into_job, load_states, save_job
from memfit.job.steps import cut, finish_step, make_step, step_result
from memfit.tensors.guard import is_away
from memfit.verification.census import Census, CensusReport
from memfit.verification.meters import Proof


class Job:
    """A model in training. Made by `memfit.fit`; use as a context manager, or call `close`.

    Memory: what the plan says; see `plan`, `predicted_peak_bytes` and `proof()`.
    """

    def __init__(self, parts: JobParts) -> None:
        self._machine = parts.machine
        self._steps_here = 0
        self._has_told_passed = False
        self._census = Census(parts.machine.meter)
        self._is_closed = False
        self._was_whole = not any(is_away(p) for p in parts.model.parameters())
        self.loss_scaler = LossScaler() if parts.plan.scales_losses else None
        """The dynamic loss scale of a plan that computes in fp16; part of every commit. None for other plans."""
        self.extra: Mapping[str, Any] = {}
        """What a save was given along that `fit(resume=...)` went on from."""
        self._interrupts = Interrupts()
        self.breaches: list[BreachReport] = []
        self._assembly = Assembly(parts, scaler=self.loss_scaler, interrupts=self._interrupts)
        note_holder(self)
        clipping.watch(self)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a job cannot be pickled or copied: its files, threads and hooks are of this process. job.save(directory) writes what it is, and fit(resume=directory) "
            "goes on from it; for another process, give it the model's class and that directory"
        )

    def __repr__(self) -> str:
        if self._is_closed:
            return f"<memfit.Job, closed after step {self.steps}>"
        return f"<memfit.Job at step {self.steps}; plan: {self._plan_words}; {self.proof().line().removeprefix('proof: ')}>"

    def _repr_html_(self) -> str:
        """In a notebook: where it stands, why this plan, and the proof so far."""
        state = "closed" if self._is_closed else "live"
        facts = [
            ("steps", str(self.steps)),
            ("state", state),
            ("plan", self._plan_words),
            ("numerics", self.numerics.short()),
        ]
        return html_table("memfit.Job", facts) + self.proof()._repr_html_()

    def holds(self, parameters: Collection[int]) -> str | None:
        """See `held.Holder`."""
        if self._assembly.has_ended or not any(
            id(slot.parameter) in parameters for _, slot in self._assembly.place.values()
        ):
            return None
        return (
            f"a live job, at step {self.steps}, has its parameters: call close() of that job first, as in job.close()"
        )

    def begin_run(self) -> None:
        """For `fit`, at its end: commits a new run's first version, or puts the random numbers of a resumed one where they were."""
        self._assembly.begin_run()

    @property
    def plan(self) -> Plan:
        """The decisions: given, the run's own, or the fastest that fit; another one where `on_breach="replan"` made it."""
        return self._assembly.plan

    @property
    def _plan_words(self) -> str:
        return self._assembly.parts.reason.rstrip(".")

    @property
    def reason(self) -> str:
        """Why this plan, and what it does to the numbers."""
        parts = self._assembly.parts
        return f"{parts.reason} {parts.numerics.sentence()}"

    @property
    def numerics(self) -> Numerics:
        """Effect of the plan on the numbers: exact, reordered or approximate; which sums are regrouped, and why. Prints as text."""
        return self._assembly.parts.numerics

    # --- training ---------------------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Forward, backward and update on one batch.

        Args:
            batch: as the sample; other shapes are planned for when they come (some tenths of a second each time a new shape appears). One
                with fewer rows than the plan has microbatches is cut into as many as it has rows.

        Returns:
            The loss and what was measured.

        Raises:
            LimitBreachError: the limit was hit; says where, and whether the step can be repeated.
            DoesNotFitError: a batch of another shape does not fit under the plan, or, with `on_breach="replan"`, under any; the job goes on.
            UsageError: the batch, the loss, or the job is closed.
            TornStepError: an earlier step was interrupted while it updated in place. KeyboardInterrupt: at the next action; a second Ctrl-C at once.
        """
        with self._interrupts.held():
            self._check_usable()
            assembly = self._assembly
            assembly.check_unchanged()
            assembly.checkpointer.check_registered()
            assembly.note_modes()
            assembly.keep_changes()
            assembly.checkpointer.commit_if_due()
            if assembly.parts.replan is None:
                return self._step(batch)
            return self._step_or_replan(batch, assembly.parts.replan)

    def _step_or_replan(self, batch: Any, replan: Replan) -> StepResult:
        """A step; where its batch does not fit, or it meets the limit, under another plan. See [Note: replanning] in `job.breaches`."""
        found = self._make_fitting(batch, replan)
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

    def _make_fitting(self, batch: Any, replan: Replan) -> list[BreachReport]:
        """Nothing, or, where the plan is predicted not to fit the batch, a plan that does.

        Raises:
            DoesNotFitError: there is none.
        """
        assembly = self._assembly
        if assembly.journal is not None and assembly.journal.is_waiting:
            return []  # the step is decided, and computes nothing
        prepared, excess = assembly.look_at(batch)
        if excess is None:
            beside = self._machine.excess(prepared.timeline.peak_bytes)
            excess = None if beside is None else f"step {self.steps + 1} does not fit: {beside}"
        if excess is None:
            return []
        before = take_random()
        try:
            with self._machine.phases("replan"):
                self._assembly, found = assemble_fitting(assembly, excess, batch, replan, self._interrupts)
        except BaseException:
            self._is_closed = assembly.has_ended
            raise
        finally:
            give_random(before)
        if isinstance(found, BreachReport):
            return [found]
        try:
            raise found
        finally:
            del found  # whose frames would hold it, and it the batch

    def _make_tighter(self, error: LimitBreachError, batch: Any, attempt: int, replan: Replan) -> BreachReport:
        try:
            with self._machine.phases("replan"):
                self._assembly, report = assemble_tighter(
                    self._assembly, error, batch, attempt, replan, self._interrupts
                )
        except BaseException:
            self._is_closed = True
            raise
        return report

    def _step(self, batch: Any) -> StepResult:
        began = time.perf_counter()
        assembly = self._assembly
        if assembly.journal is not None and assembly.journal.is_waiting:
            outcome = finish_step(assembly, assembly.journal)
            self._steps_here += 1
            self._assembly.checkpointer.note_positions()
            return step_result(assembly, batch, outcome, time.perf_counter() - began)
        prepared = assembly.prepare(batch)
        check_first(assembly, batch)
        parts, factors = cut(assembly, prepared, batch)
        phase = "first step" if self._steps_here == 0 else "steady"
        if self._steps_here < 2:
            self._machine.forget_peak()  # of loading, then of the first step, which brings up states and libraries
        self._machine.refuse(prepared.timeline.peak_bytes, self.steps + 1)
        with assembly.stepping(), self._machine.phase(phase, is_step=True):
            outcome = make_step(assembly, prepared, parts, factors)
            self._steps_here += 1
        self._assembly.checkpointer.note_positions()
        if self._census.note_step():
            self._census.warn_once(self.census())
        result = step_result(assembly, batch, outcome, time.perf_counter() - began)
        self._tell_passed(result.peak_bytes)
        return result

    def _tell_passed(self, peak_bytes: int) -> None:
        """Warns, once, of a limit that was passed without an allocation that could be refused."""
        passed = None if self._has_told_passed else self._machine.passed(peak_bytes)
        if passed is not None:
            self._has_told_passed = True
            warnings.warn(f"step {self.steps}: {passed}", MemfitWarning, stacklevel=4)

    # --- beside training --------------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Any) -> EvaluateResult:
        """The loss of a batch, forward only, in evaluation mode (`model.eval()` for the time), weights streamed as in a step."""
        self._check_usable()
        self._assembly.keep_changes()
        result = evaluate(self._assembly, batch, self._interrupts)
        self._assembly.checkpointer.note_positions()
        return result

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
        self._assembly.keep_changes()
        assembly = self._assembly
        staying = {b.index for b in assembly.blocks if not b.travels}
        try:
            with (
                assembly.stepping(),
                stream(
                    assembly.parts.model,
                    assembly.parts.sites,
                    assembly.blocks,
                    self._machine,
                    assembly.house,
                    self._interrupts,
                    most_weights(assembly.parts.sites, assembly.blocks, staying),
                    cache_limit=None if cache_limit is None else parse_bytes(cache_limit),
                    directory=assembly.parts.directory,
                ) as session,
            ):
                yield session
        finally:
            self._assembly.checkpointer.note_positions()

    def check_split(self, sample: Any) -> None:
        """For `fit`: refuses a loss that does not add up over microbatches; see `forward_passes.check_split`."""
        check_split(self._assembly, sample)

    def check_dtype(self, sample: Any) -> None:
        """For `fit`: refuses a dtype of the plan's that the model does not run in; see `forward_passes.check_dtype`."""
        check_dtype(self._assembly, sample)

    def check_counted(self, sample: Any) -> None:
        """For `fit`: refuses a pair that is not (sum, count); see `forward_passes.check_counted`."""
        check_counted(self._assembly, sample)

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
        self._assembly.keep_changes()
        chosen = self._assembly.choose_blocks(blocks)
        fetched = [block for block in chosen if not block.is_here]
        try:
            with self._interrupts.held():
                for block in chosen:
                    block.fetch()
                    block.wait()
            before = {block.index: block.versions() for block in chosen}
            yield
            check_untouched(chosen)
            with self._interrupts.held():
                self._assembly.write_home(
                    [block for block in chosen if block.versions() != before[block.index]], before
                )
        finally:
            for block in fetched:
                block.release()
            self._assembly.checkpointer.note_positions()

    # --- commits ----------------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps made in the run so far: since `fit`, or, with `store=` or `load_states`, since the run began. A loop over `range(job.steps, total)` goes on."""
        return self._assembly.steps

    def register(self, name: str, thing: Any, *, is_new: bool = False) -> None:
        """Makes the state of an object part of every commit, and gives it back what it was where a run goes on.

        Schedulers, averages, loaders, samplers: whatever has `state_dict` and `load_state_dict`; and random generators of torch, NumPy and Python (the
        default ones of all three belong to every commit without being asked). The state of what gives batches (it can be iterated) and of generators is
        noted when a method of the job returns, that of everything else when the next step begins (docs/store.md). Nothing is pickled: a state is made
        of numbers, texts, tensors and containers of them. Where a run goes on, the default generators stand at the run's position again when this returns,
        whatever was drawn since `fit`: a loader that makes its iterator to take its state draws.

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
        self._assembly.checkpointer.register(name, thing, is_new=is_new)

    def commit(self) -> None:
        """Commits the step that was made last now, with everything as it stands: say so at the end of a loop's body, where nothing of it is left to do.

        Without it a step is committed when the next one begins, or by `close`.

        Raises:
            UsageError: no `store=`. StoreError: the disk; the commit before is whole and this may be repeated. TornStepError: the weights are no step's.
        """
        self._check_usable()
        self._assembly.keep_changes()
        with self._interrupts.held():
            self._assembly.checkpointer.commit_here()

    @property
    def commits(self) -> CommitReport | None:
        """What committing costs and promises; None without `store=`."""
        return self._assembly.checkpointer.report()

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
        self._assembly.keep_changes()
        # Weights and states are those of the step that waits for its `job.step`, if one does.
        journal = self._assembly.journal
        waiting = journal if journal is not None and journal.is_waiting else None
        scaler = self.loss_scaler
        # What a save works on is host memory.
        with self._machine.phase("save"), self._machine.host_ledger():
            return save_job(
                directory,
                model=self._assembly.parts.model,
                optimizer=self._assembly.parts.optimizer,
                blocks=self._assembly.blocks,
                states=self._assembly.states,
                steps=self.steps + (waiting is not None),
                scaler=scaler.after_a_step() if scaler is not None and waiting is not None else scaler,
                noise=self._assembly.noise,
                random=None if waiting is None else waiting.random(),
                max_shard_bytes=max_shard_bytes,
                extra=extra,
            )

    def load(self, source: str | Path, *, restore_random: bool = True) -> LoadResult:
        """Takes the weights of files, and where `save` wrote them all that continues a run: it goes on from there.

        That is the optimizer's states and settings, the loss scale, the count of steps, random numbers.

        All is compared with the model and the optimizer before anything is changed.

        Memory: one parameter, in its master's dtype; its states; a piece of 8 MiB.

        Args:
            source: what `fit(weights=...)` takes.
            restore_random: torch's default generators, and the noise of stochastic rounding, go on where they were; only with a save.

        Returns:
            The steps and the `extra` of a save; else the steps made so far, and nothing.

        Raises:
            StoreError: a file that is missing or damaged. UsageError: files that do not fit; a job with `store=`, which has its own. Where it ended in its middle,
            later calls raise TornStepError.
        """
        assembly = self._load_begins()
        with assembly.loading():
            found = load_into_job(
                source,
                model=assembly.parts.model,
                optimizer=assembly.parts.optimizer,
                driver=assembly.parts.driver,
                fill=assembly.fill,
                scatter=assembly.scatter_state,
                scaler=self.loss_scaler,
                noise=assembly.noise,
                restore_random=restore_random,
            )
        return LoadResult(steps=self.steps, extra={}) if found is None else assembly.count_on(found)

    def load_states(self, directory: str | Path, *, restore_random: bool = True) -> LoadResult:
        """As `load`, without the weights: they are the job's, by `memfit.fit(weights=directory)`, say.

        Args:
            directory: that `save` wrote.
            restore_random: torch's default generators, and the noise of stochastic rounding, go on where they were.

        Raises:
            StoreError: a file that is missing, damaged or not memfit's. UsageError: an optimizer that the save does not fit (nothing was changed then).
        """
        assembly = self._load_begins()
        with assembly.loading():
            found = load_states(
                directory,
                optimizer=assembly.parts.optimizer,
                driver=assembly.parts.driver,
                named={name: slot.parameter for name, (_, slot) in assembly.place.items()},
                scatter=assembly.scatter_state,
                scaler=self.loss_scaler,
                noise=assembly.noise,
                restore_random=restore_random,
            )
        return assembly.count_on(found)

    def _load_begins(self) -> Assembly:
        self._check_usable()
        if self._assembly.parts.run is not None:
            raise UsageError(
                "a job with store= has its own weights, states and steps: give the directory of the run to resume= instead, or begin one with "
                "fit(weights=..., store=...)"
            )
        return self._assembly

    def gradient(self, name: str) -> torch.Tensor | None:
        """A copy of a parameter's gradient of the last step (`fit(keep_gradients=True)`); None if it received none."""
        self._check_open()
        if not self._assembly.parts.keeps_gradients:
            raise UsageError("gradients are given up after the update; fit(keep_gradients=True) keeps them readable")
        if name not in self._assembly.place:
            raise UsageError(f"no parameter is called {name!r}; names are those of model.named_parameters()")
        block, slot = self._assembly.place[name]
        return self._assembly.house.gradients.read(block, slot)

    def proof(self, *, before_bytes: int = 0) -> Proof:
        """The limit, the predicted peak, and the measured peak over all phases so far.

        Args:
            before_bytes: a peak that was measured before `fit`, to be covered too.
        """
        return Proof(
            limit_bytes=self._machine.limits.device_bytes,
            predicted_peak_bytes=self._assembly.parts.predicted_peak_bytes,
            measured_peak_bytes=max(before_bytes, self._machine.measured_peak_bytes()),
            phases=self._machine.phases.records,
            numerics=self.numerics,
        )

    def census(self) -> CensusReport:
        """What lives from step to step: tensors that survive and who holds them, and callbacks that keep too much alive. Prints as text; `.warn()` warns.

        Live bytes and blocks are noted at each step's end. While they are flat this takes milliseconds; else seconds, and it may run the garbage collector.
        """
        callbacks: dict[str, Callable[..., Any]] = {"the loss": self._assembly.parts.loss}
        if self._assembly.parts.weight is not None:
            callbacks["the weight"] = self._assembly.parts.weight
        return self._census.report(self._assembly.parts.model, callbacks, keeper=self)

    @property
    def predicted_peak_bytes(self) -> int:
        """Of the process without a GPU, else of the device, in a steady step."""
        return self._assembly.parts.predicted_peak_bytes

    @property
    def block_names(self) -> tuple[str, ...]:
        """In the order of their first call."""
        return tuple(block.name for block in self._assembly.blocks)

    @property
    def profile(self) -> Profile:
        """Of the sample's shapes."""
        return self._assembly.parts.prepared.profile

    @property
    def schedule(self) -> Schedule:
        """The step as data; `.text()` prints it."""
        return self._assembly.parts.prepared.step.schedule

    @property
    def bytes_moved(self) -> tuple[dict[str, int], dict[str, int]]:
        """(read, written) bytes of the disk since the job began, by purpose."""
        return self._assembly.house.bytes_moved

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
        if restore is None and not self._assembly.has_ended:
            self._check_restorable()
        restore = restore is not False
        if (
            commit
            and not self._is_closed
            and self._assembly.has_started
            and self._assembly.torn is None
            and self._assembly.parts.run is not None
        ):
            self._assembly.keep_changes()
            try:
                with self._interrupts.held():
                    self._assembly.checkpointer.commit()
            except StoreError as error:
                failure = StoreError(
                    f"{error}. The job is not closed: repeat job.close() when that is mended, or give up step {self.steps} with job.close(commit=False)"
                )
                failure.errno = error.errno
                raise failure from error
        self._is_closed = True
        clipping.unwatch(self)
        for block in self._assembly.blocks:
            change = block.take_back_changes()
            if change is not None and not self._assembly.has_told_changes:
                warnings.warn(f"the job is closed: {change}", MemfitWarning, stacklevel=2)
        with self._interrupts.held():
            self._assembly.end(restore=restore)

    def _check_restorable(self) -> None:
        limit = self._machine.limits.device_bytes
        if self._was_whole or limit is None or not self._assembly.parts.enforces or not self._assembly.has_begun:
            return
        coming = self._assembly.bytes_to_come()
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
        self._assembly.has_begun = False
        self.close()

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

    def _check_usable(self) -> None:
        self._check_open()
        if self._assembly.is_stepping:
            raise UsageError(
                "the job is in the middle of a step, or of job.inference(): what runs inside cannot step, evaluate or save it"
            )
        if self._assembly.torn is not None:
            raise TornStepError(
                f"the step is torn: {self._assembly.torn}; some blocks hold new weights and some old ones. Go back: {self._assembly.checkpointer.way_back()}"
            )
