"""A job: a model in training inside its limit."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self

from memfit.core.errors import DoesNotFitError, MemfitWarning, StoreError, TornStepError, UsageError
from memfit.core.units import format_bytes, parse_bytes
from memfit.homes.weights import check_untouched
from memfit.job import clipping
from memfit.job.assembly import Assembly
from memfit.job.forward_passes import evaluate
from memfit.job.held import note_holder
from memfit.job.inference import Inference, most_weights, stream
from memfit.job.job_facts import JobFacts
from memfit.job.loading import LoadResult, load_into_job, load_states
from memfit.job.results import EvaluateResult, StepResult
from memfit.job.saving import DEFAULT_SHARD_BYTES, SaveResult, save_job
from memfit.job.step_runner import StepRunner


class Job(JobFacts):
    """A model in training. Made by `memfit.fit`; use as a context manager, or call `close`.

    Memory: what the plan says; see `plan`, `predicted_peak_bytes` and `proof()`.

    Attributes:
        extra: what a save was given along that `fit(resume=...)` went on from.
    """

    def __init__(self, runner: StepRunner, extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(runner)
        self.extra: Mapping[str, Any] = extra or {}
        runner.owner = weakref.ref(self)
        note_holder(self)
        clipping.watch(self)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a job cannot be pickled or copied: its files, threads and hooks are of this process. job.save(directory) "
            "writes what it is, and fit(resume=directory) goes on from it; for another process, give it the model's "
            "class and that directory"
        )

    # --- training --------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Makes forward, backward and update on one batch.

        Args:
            batch: as the sample; other shapes are planned for when they come (some tenths of a
                second each time a new shape appears). One with fewer rows than the plan has
                microbatches is cut into as many as it has rows.

        Returns:
            The loss and what was measured.

        Raises:
            LimitBreachError: the limit was hit; says where, and whether the step can be repeated.
            DoesNotFitError: a batch of another shape does not fit under the plan, or, with
                `on_breach="replan"`, under any; the job goes on.
            UsageError: the batch, the loss, or the job is closed.
            TornStepError: an earlier step was interrupted while it updated in place.
            KeyboardInterrupt: at the next action; a second Ctrl-C at once.
        """
        with self._runner.interrupts.held():
            self._check_usable()
            return self._runner.step(batch)

    def evaluate(self, batch: Any) -> EvaluateResult:
        """Computes the loss of a batch, forward only, in evaluation mode (`model.eval()` for the
        time), weights streamed as in a step.
        """
        assembly = self._check_usable()
        assembly.keep_changes()
        result = evaluate(assembly, batch, self._runner.interrupts)
        assembly.checkpointer.note_positions()
        return result

    @contextmanager
    def inference(self, *, cache_limit: int | str | None = None) -> Iterator[Inference]:
        """Lets the model's own `forward` and `generate` be called: no gradients, evaluation mode,
        weights streamed.

        Two blocks at a time are here, beside those that live on the device.

            with job.inference():
                tokens = model.generate(prompt, max_new_tokens=50)

        Activations are the program's own; the limit holds. What is changed in weights inside is
        lost.

        Args:
            cache_limit: as in `memfit.infer`.

        Yields:
            What `memfit.infer` yields: the model, `together` for several requests, the caches'
                figures.

        Raises:
            LimitBreachError: the limit; the job goes on. UsageError: the job is closed.
                TornStepError: the weights are no step's.
        """
        assembly = self._check_usable()
        assembly.keep_changes()
        sites, staying = assembly.engine.sites, {b.index for b in assembly.blocks if not b.travels}
        try:
            with (
                assembly.stepping(),
                stream(
                    assembly.model,
                    sites,
                    assembly.blocks,
                    self._machine,
                    assembly.house,
                    self._runner.interrupts,
                    most_weights(sites, assembly.blocks, staying),
                    cache_limit=None if cache_limit is None else parse_bytes(cache_limit),
                    directory=assembly.setup.directory,
                ) as session,
            ):
                yield session
        finally:
            assembly.checkpointer.note_positions()

    @contextmanager
    def weights(self, *blocks: str) -> Iterator[None]:
        """Brings blocks (all without arguments) to the device for as long as the context lasts.

        What is changed inside is kept.

        Under a plan that computes in bf16 these are the bf16 weights; the masters of those that are
        changed become what they were changed to.

        Args:
            blocks: names of blocks (`job.block_names`) or of parameters.

        Raises:
            UsageError: an unknown name.
        """
        assembly = self._check_open()
        assembly.keep_changes()
        chosen = assembly.choose_blocks(blocks)
        fetched = [block for block in chosen if not block.is_here]
        try:
            with self._runner.interrupts.held():
                for block in chosen:
                    block.fetch()
                    block.wait()
            before = {block.index: block.versions() for block in chosen}
            yield
            check_untouched(chosen)
            with self._runner.interrupts.held():
                assembly.write_home([block for block in chosen if block.versions() != before[block.index]], before)
        finally:
            for block in fetched:
                block.release()
            assembly.checkpointer.note_positions()

    # --- commits ---------------------------------------------------------------------------------

    def register(self, name: str, thing: Any, *, is_new: bool = False) -> None:
        """Makes the state of an object part of every commit, and gives it back what it was where a
        run goes on.

        Schedulers, averages, loaders, samplers: whatever has `state_dict` and `load_state_dict`;
        and random generators of torch, NumPy and Python (the default ones of all three belong to
        every commit without being asked). The state of what gives batches (it can be iterated) and
        of generators is noted when a method of the job returns, that of everything else when the
        next step begins (docs/store.md). Nothing is pickled: a state is made of numbers, texts,
        tensors and containers of them. Where a run goes on, the default generators stand at the
        run's position again when this returns, whatever was drawn since `fit`: a loader that makes
        its iterator to take its state draws.

        Memory: three times the tensors of its state, for a moment, at each commit.

        Args:
            name: to find it again by, in the run that goes on.
            thing: the object, ready: register a scheduler after it is built. None: the state that
                the run has under this name is given up.
            is_new: it joins a run that went on without it.

        Raises:
            UsageError: no `store=`; a name that is taken, or that the run does not know; an object
                without a state.
            UnsupportedError: a state that cannot be kept.
            StoreError: a state that the object does not take.
        """
        self._check_open().checkpointer.register(name, thing, is_new=is_new)

    def commit(self) -> None:
        """Commits the step that was made last now, with everything as it stands, at the end of a
        loop's body.

        Without it a step is committed when the next one begins, or by `close`.

        Raises:
            UsageError: no `store=`.
            StoreError: the disk; the commit before is whole and this may be repeated.
            TornStepError: the weights are no step's.
        """
        assembly = self._check_usable()
        assembly.keep_changes()
        with self._runner.interrupts.held():
            assembly.checkpointer.commit_here()

    # --- saves -----------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        *,
        max_shard_bytes: int | str = DEFAULT_SHARD_BYTES,
        extra: Mapping[str, Any] | None = None,
    ) -> SaveResult:
        """Saves weights, optimizer and the run's place as safetensors and JSON.

        See `saving.save_job`.

        Memory: two pieces of 8 MiB.

        Args:
            directory: replaced in one step, when all is written; an interrupted save leaves the old
                one. Files of others in it stay.
            max_shard_bytes: of one file of weights.
            extra: kept along and given back by `loading.load`: numbers, texts, lists, dictionaries
                (a scheduler's `state_dict()`, say).

        Raises:
            StoreError: the disk. UsageError: the directory, or the job is closed. TornStepError:
                the weights are no step's.
        """
        assembly = self._check_usable()
        assembly.keep_changes()
        # Weights and states are those of the step that waits for its `job.step`, if one does.
        journal, scaler = assembly.journal, self.loss_scaler
        waiting = journal if journal is not None and journal.is_waiting else None
        # What a save works on is host memory.
        with self._machine.phase("save"), self._machine.host_ledger():
            return save_job(
                directory,
                model=assembly.model,
                optimizer=assembly.setup.optimizer,
                blocks=assembly.blocks,
                states=assembly.states,
                steps=self.steps + (waiting is not None),
                scaler=scaler.after_a_step() if scaler is not None and waiting is not None else scaler,
                noise=assembly.noise,
                random=None if waiting is None else waiting.random(),
                max_shard_bytes=max_shard_bytes,
                extra=extra,
            )

    def load(self, source: str | Path, *, restore_random: bool = True) -> LoadResult:
        """Takes the weights of files, and where `save` wrote them all that continues a run: it goes
        on from there.

        That is the optimizer's states and settings, the loss scale, the count of steps, random
        numbers. All is compared with the model and the optimizer before anything is changed.

        Memory: one parameter, in its master's dtype; its states; a piece of 8 MiB.

        Args:
            source: what `fit(weights=...)` takes.
            restore_random: torch's default generators, and the noise of stochastic rounding, go on
                where they were; only with a save.

        Returns:
            The steps and the `extra` of a save; else the steps made so far, and nothing.

        Raises:
            StoreError: a file that is missing or damaged.
            UsageError: files that do not fit; a job with `store=`, which has its own. Where it
                ended in its middle, later calls raise TornStepError.
        """
        return load_into_job(source, self._check_loadable(), restore_random=restore_random)

    def load_states(self, directory: str | Path, *, restore_random: bool = True) -> LoadResult:
        """As `load`, without the weights: they are the job's, by `memfit.fit(weights=directory)`,
        say.

        Args:
            directory: that `save` wrote.
            restore_random: torch's default generators, and the noise of stochastic rounding, go on
                where they were.

        Raises:
            StoreError: a file that is missing, damaged or not memfit's.
            UsageError: an optimizer that the save does not fit (nothing was changed then).
        """
        return load_states(directory, self._check_loadable(), restore_random=restore_random)

    # --- the end ---------------------------------------------------------------------------------

    def close(self, *, restore: bool | None = None, commit: bool = True) -> None:
        """Gives the user an ordinary, complete model and optimizer back, where they fit.

        Temporary files are deleted, a `store=` stays.

        Weights that computed in bf16 come back as their fp32 masters, whatever the dtype in which
        the model came.

        Memory: all weights and optimizer states at once, on the model's device; the limit is off
        from here on.

        Args:
            restore: True gives everything back, whatever it takes. False gives nothing back:
                weights that are away are gone with their files (save before), or stay in the store
                alone. None: everything, but a model that was never whole in memory (`memfit.empty`)
                only where that stays under the limit.
            commit: with `store=`, the last step is committed first. Leaving the context by an error
                does not: nobody knows what was done after the step.

        Raises:
            DoesNotFitError: such a model is larger than the limit, and it was not said what is to
                become of it. Nothing is lost: the job goes on.
            StoreError: something could not be read, or files could not be removed. What could be
                read is given back; repeat `close` when the disk is there again, or give the rest up
                with `restore=False`.
        """
        assembly = self._assembly
        if restore is None and not assembly.has_ended:
            self._check_restorable(assembly)
        if commit and not self._is_closed and assembly.has_started and assembly.torn is None:
            self._commit_last(assembly)
        self._was_closed = True
        clipping.unwatch(self)
        for change in self._runner.take_back_changes():
            warnings.warn(f"the job is closed: {change}", MemfitWarning, stacklevel=2)
        with self._runner.interrupts.held():
            assembly.end(restore=restore is not False)

    def _commit_last(self, assembly: Assembly) -> None:
        if assembly.setup.run is None:
            return
        assembly.keep_changes()
        try:
            with self._runner.interrupts.held():
                assembly.checkpointer.commit()
        except StoreError as error:
            failure = StoreError(
                f"{error}. The job is not closed: repeat job.close() when that is mended, or give up step {self.steps} with "
                "job.close(commit=False)"
            )
            failure.errno = error.errno
            raise failure from error

    def _check_restorable(self, assembly: Assembly) -> None:
        limit = self._machine.limits.device_bytes
        if self._runner.was_whole or limit is None or not assembly.setup.enforces or not assembly.has_begun:
            return
        coming = assembly.bytes_to_come()
        held = self._machine.base_bytes() + self._machine.meter.live_bytes()
        if held + coming > limit:
            raise DoesNotFitError(
                f"the model was never whole in memory: its weights and optimizer states would take {format_bytes(coming)} "
                f"beside the {format_bytes(held)} that are held, above the limit of {format_bytes(limit)}. The job goes on. "
                "Save it and say job.close(restore=False), or bring everything back past the limit with "
                "job.close(restore=True)",
                smallest_limit_bytes=held + coming,
            )

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

    # --- checks ----------------------------------------------------------------------------------

    def holds(self, parameters: Collection[int]) -> str | None:
        """See `held.ModelOwner`."""
        assembly = self._assembly
        if assembly.has_ended or not any(id(slot.parameter) in parameters for _, slot in assembly.place.values()):
            return None
        return (
            f"a live job, at step {self.steps}, has its parameters: call close() of that job first, as in job.close()"
        )

    def _check_usable(self) -> Assembly:
        assembly = self._check_open()
        if assembly.is_stepping:
            raise UsageError(
                "the job is in the middle of a step, or of job.inference(): what runs inside cannot step, evaluate or save it"
            )
        if assembly.torn is not None:
            raise TornStepError(
                f"the step is torn: {assembly.torn}; some blocks hold new weights and some old ones. Go back: "
                f"{assembly.checkpointer.way_back()}"
            )
        return assembly

    def _check_loadable(self) -> Assembly:
        assembly = self._check_usable()
        if assembly.setup.run is not None:
            raise UsageError(
                "a job with store= has its own weights, states and steps: give the directory of the run to resume= instead, or "
                "begin one with fit(weights=..., store=...)"
            )
        return assembly
