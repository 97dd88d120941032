"""Job: a model in training inside its memory limit."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Self

from memfit.core.errors import LOG, DoesNotFitError, MemfitWarning, PeerError, StoreError, UsageError
from memfit.core.limits import format_bytes, parse_bytes
from memfit.homes.weights import BlockWeights, check_untouched
from memfit.job import steps
from memfit.job.assembly import Assembly
from memfit.job.forward_passes import evaluate
from memfit.job.inference import Inference, most_weights, stream
from memfit.job.job_facts import check_alone, end_job
from memfit.job.lines import Lines
from memfit.job.results import EvaluateResult, StepResult
from memfit.job.saved_job import SavedJob
from memfit.job.step_runner import StepRunner
from memfit.machine.hard_limit import note_holder
from memfit.machine.proof import Proof
from memfit.mesh.agreement import DisagreementError
from memfit.planner.together import check_same_changes, fail_together, prepare_together, together


class Job(SavedJob):
    """A model in training. Made by `memfit.fit`; use as a context manager, or call `close`.

    Memory: what the plan says; see `plan`, `predicted_peak_bytes` and `proof()`.

    Attributes:
        extra: the `extra` of the save that `fit(resume=...)` continued from.
    """

    def __init__(self, runner: StepRunner, extra: Mapping[str, Any] | None = None, source: Path | None = None) -> None:
        super().__init__(runner, source)
        self.extra: Mapping[str, Any] = extra or {}
        runner.owner = weakref.ref(self)
        note_holder(self)
        steps.watch(self)
        LOG.info("job begins at step %d; plan: %s; %s", self.steps, self.reason, self.proof().line())

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a job cannot be pickled or copied: its files, threads and hooks are of this process. job.save(directory) "
            "writes what it is, and fit(resume=directory) goes on from it; for another process, give it the model's "
            "class and that directory"
        )

    # --- training --------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Runs forward, backward and update on one batch.

        Args:
            batch: a batch like the sample. A new shape is planned for when it first appears, which
                takes some tenths of a second. A batch with fewer rows than the plan has
                microbatches is cut into single rows. `memfit.Parts`, where the sample was.

        Returns:
            The loss, and what was measured in the step.

        Raises:
            LimitBreachError: the limit was hit; the message says where, and whether the step can be
                repeated.
            DoesNotFitError: a batch of another shape does not fit under the plan or, with
                `on_breach="replan"`, under any plan. The job remains usable.
            UsageError: the batch or the loss is invalid, or the job is closed.
            TornStepError: an earlier step was interrupted while it updated in place.
            KeyboardInterrupt: after Ctrl-C, at the next action; after a second one, at once.
        """
        with self._runner.interrupts.working("job.step"):
            self._check_usable()
            _refuse_lines(
                self._assembly,
                "job.step(batch) is called: inside of it loss.backward() and optimizer.step() make steps",
            )
            result = self._runner.step(batch)
        self._runner.tell_step(result)
        return result

    def set_limit(self, limit: int | str) -> Proof:
        """Changes the limit from the next step on: a neighbour came, or went.

        Where the job's plan does not fit it, the next step begins with another one, as
        `on_breach="replan"` does it, and tells so (`job.breaches`); under a larger limit with a
        faster one of the same bits, if there is one. Both take `fit(store=...)` with
        `on_breach="replan"` or `adapt=True`. On several ranks all call it, each with its own limit.

        Args:
            limit: of the device, as in `memfit.fit`.

        Returns:
            The proof of the limit until now; `job.proof()` begins anew.

        Raises:
            DoesNotFitError: the plan does not fit, and the job cannot take another one: the limit
                is what it was. If it can and none fits, the next step says so, with the smallest
                limit, and makes none; a larger limit lets the job go on.
            UsageError: the job has no limit, or is inside `job.lines()`.
        """
        with self._runner.interrupts.working("job.set_limit"):
            assembly = self._check_usable()
            _refuse_lines(assembly, "job.set_limit() is called")
            before = self.proof()
            limit_bytes = prepare_together(assembly.setup.ranks, "job.set_limit", lambda: parse_bytes(limit))
            self._runner.change_limit(limit_bytes)
        return before

    @contextmanager
    def lines(self) -> Iterator[Lines]:
        """Context in which a training loop of your own makes the steps, unchanged.

            with job.lines():
                for batch in loader:
                    loss = model(**batch).loss
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

        Weights come and go as the model is called and as backward runs; `optimizer.step()` makes
        the update. Any number of backwards may come before it (accumulation), of batches of any
        shape. Forward passes under `torch.no_grad()` are served in between. Gradients that rest
        away from the device have stand-ins on `.grad`, which `clip_grad_norm_` and `zero_grad` work
        on; `optimizer.step()` gives all gradients up.

        The job is one made with `memfit.fit(lines=True)`. Leaving the context by an error leaves
        the weights of the last `optimizer.step()`, and nothing of torch changed.

        Yields:
            Counts of steps and backwards.

        Raises:
            UsageError: the job was not made for lines, or is closed.
            LimitBreachError: the limit was hit; nothing was updated.
        """
        check_alone(self._check_usable(), "job.lines()")
        with Lines(self._runner, self._check_usable) as lines:
            yield lines

    def evaluate(self, batch: Any) -> EvaluateResult:
        """Computes the loss of a batch without backward, in evaluation mode (the mode is restored
        afterwards), with weights streamed as in a step.
        """
        with self._runner.interrupts.working("job.evaluate"):
            assembly = self._check_usable()
            assembly.keep_changes()
            result = evaluate(assembly, batch)
            assembly.checkpointer.note_positions()
        return result

    @contextmanager
    def inference(self, *, cache_limit: int | str | None = None) -> Iterator[Inference]:
        """Context in which the model's own `forward` and `generate` can be called: without
        gradients, in evaluation mode, with streamed weights.

        Two blocks at a time are on the device, beside those at home there.

            with job.inference():
                tokens = model.generate(prompt, max_new_tokens=50)

        Activations are the program's own and count against the limit. Changes of weights inside are
        refused where they would be lost.

        Args:
            cache_limit: as in `memfit.infer`.

        Yields:
            The session, as of `memfit.infer`.

        Raises:
            LimitBreachError: the limit was hit; the job remains usable.
            UsageError: the job is closed.
            TornStepError: blocks hold weights of different steps.
        """
        calls = self._runner.calls
        with ExitStack() as ending, ExitStack() as stack:
            with calls.enter("job.inference"):
                assembly = self._check_usable()
                check_alone(assembly, "job.inference()")
                assembly.keep_changes()
                sites, staying = assembly.engine.sites, {b.index for b in assembly.blocks if not b.travels}
                stack.callback(assembly.checkpointer.note_positions)
                stack.enter_context(assembly.stepping())
                streamed = stream(
                    assembly.model,
                    sites,
                    assembly.blocks,
                    self._machine,
                    assembly.house,
                    self._runner.interrupts,
                    most_weights(sites, assembly.blocks, staying),
                    cache_limit=None if cache_limit is None else parse_bytes(cache_limit),
                    directory=assembly.setup.directory,
                )
                session = stack.enter_context(streamed)
                stack.enter_context(assembly.engine.looking_away())  # the stream serves these calls
            # Called first of all at the end; `ending` is closed last.
            stack.callback(lambda: ending.enter_context(calls.leave("the end of job.inference")))
            yield session

    @contextmanager
    def weights(self, *blocks: str) -> Iterator[None]:
        """Context in which blocks (all, without arguments) are on the device. Changes of weights
        inside are kept, by whatever road they are written (`.data`, NumPy, custom operators), also
        where the lines inside raise an error.

        Time: two checksums of the weights. An array of NumPy that looks at a weight keeps the
        values of the end of the context.

        Under a plan that computes in bf16 these are the bf16 weights; the master of a changed
        weight becomes its new value.

        Args:
            blocks: names of blocks (`job.block_names`) or of parameters.

        Raises:
            UsageError: a name is unknown.
            UnsupportedError: a weight was given other memory; changes in place are kept.
        """
        with ExitStack() as visit:
            with self._runner.interrupts.working("job.weights"):
                assembly = self._check_open()
                assembly.keep_changes()
                chosen = assembly.choose_blocks(blocks)
                fetched = [block for block in chosen if not block.is_here]
                visit.callback(assembly.checkpointer.note_positions)
                visit.callback(assembly.watch_again, [block.index for block in chosen])
                visit.enter_context(assembly.visiting(fetched))
                with together(assembly.setup.ranks, f"job.weights{tuple(block.name for block in chosen)}"):
                    for block in chosen:
                        block.fetch()
                        block.wait()
                before = {block.index: block.begin_changes() for block in chosen}
            try:
                try:
                    yield
                except BaseException:
                    if assembly.setup.ranks is None:  # else the others are not here
                        self._keep_changes(assembly, chosen, before)
                    raise
                self._keep_changes(assembly, chosen, before)
            finally:
                with self._runner.calls.leave("the end of job.weights"):
                    visit.close()

    def _keep_changes(
        self, assembly: Assembly, chosen: Sequence[BlockWeights], before: Mapping[int, Mapping[str, int]]
    ) -> None:
        """Keeps what the lines inside of `weights` have changed in place, and refuses the rest."""
        with self._runner.interrupts.held(), self._runner.calls.leave("the end of job.weights"):
            try:
                check_untouched(chosen)
            finally:
                changed = {block.index: block.changed_since(before[block.index]) for block in chosen}
                self._check_same(assembly, [block for block in chosen if changed[block.index]])
                assembly.write_home(changed)

    # --- commits ---------------------------------------------------------------------------------

    def register(self, name: str, thing: Any, *, is_new: bool = False) -> None:
        """Makes the state of an object part of every commit, and restores it if a run is resumed.

        Accepts objects with `state_dict` and `load_state_dict` (schedulers, averages, loaders,
        samplers), and random generators of torch, NumPy and Python (the default ones of all three
        belong to every commit anyway). The state of iterables, which give batches, and of
        generators is taken when a method of the job returns, that of all others when the next step
        begins (docs/store.md). Nothing is pickled: a state is made of numbers, texts, tensors and
        containers of them. In a resumed run, the default generators are at the run's position again
        when this returns, even if numbers were drawn since `fit`, as by a loader that makes its
        iterator to read its state.

        Memory: three times the tensors of its state at each commit, temporarily.

        Args:
            name: identifies the object in a resumed run.
            thing: the object, completely built. None: the run's state under this name is dropped.
            is_new: adds the object to a resumed run that did not have it.

        Raises:
            UsageError: there is no `store=`, the name is taken or unknown to the run, or the object
                has no state.
            UnsupportedError: the state cannot be saved.
            StoreError: the object does not accept its state.
        """
        with self._runner.calls.enter("job.register"):
            self._check_open().checkpointer.register(name, thing, is_new=is_new)

    def commit(self) -> None:
        """Commits the last step now, with everything registered in its present state. Call it at
        the end of a loop's body.

        Without it a step is committed when the next one begins, or by `close`. Called while another
        call of the job is under way (by a signal handler, a thread, a function that a step calls),
        or inside of `job.weights()` or `job.inference()`, it returns at once: the commit is made
        when the next step begins, or by `close`, with what the loop does until then.

        Raises:
            UsageError: there is no `store=`.
            StoreError: the disk failed; the previous commit is intact, and the call may be
                repeated.
            TornStepError: blocks hold weights of different steps.
        """
        assembly = self._check_open()
        with self._runner.calls.enter_if_free("job.commit") or nullcontext() as token:
            if assembly.setup.run is not None and (token is None or assembly.is_stepping or assembly.is_visited):
                self._runner.asked_commits += 1
                return
            with self._runner.interrupts.held():
                self._check_usable().keep_changes()
                assembly.checkpointer.commit_here()

    # --- the end ---------------------------------------------------------------------------------

    def close(self, *, restore: bool | None = None, commit: bool = True) -> None:
        """Makes the model and the optimizer ordinary and complete again, if they fit in memory.

        Temporary files are deleted; a `store=` stays.

        Weights that computed in bf16 become their fp32 masters, whatever the dtype of the model
        before `fit`.

        Memory: all weights and optimizer states at once, on the model's device; the limit no longer
        applies.

        Args:
            restore: True restores everything, whatever memory it takes. False restores nothing:
                weights that are away are lost with their files (save before), or stay in the store
                only. None: restores everything, but a model that was never whole in memory
                (`memfit.empty`) only if it fits under the limit.
            commit: with `store=`, commits the last step first. Leaving the context by an error does
                not commit, since what the loop did after the step is unknown.

        Raises:
            DoesNotFitError: with `restore=None`, a model built by `memfit.empty` is larger than the
                limit. Nothing is lost; the job remains usable.
            StoreError: something could not be read, or files could not be removed. What could be
                read is restored; repeat `close` when the disk works again, or drop the remainder
                with `restore=False`.
        """
        with self._runner.calls.enter("job.close"):
            self._close(restore=restore, commit=commit)

    def _close(self, *, restore: bool | None, commit: bool) -> None:
        assembly = self._assembly
        _refuse_lines(assembly, "the job is closed")
        if assembly.is_stepping or assembly.is_visited:
            raise UsageError(
                "job.close() is called inside of `with job.inference()` or `with job.weights()`: leave it first"
            )
        if restore is None and not assembly.has_ended:
            self._check_restorable(assembly)
        self._runner.compared.keep()
        ranks = assembly.setup.ranks
        has_peers = ranks is None or ranks.failure is None  # a commit is one of all ranks
        if commit and has_peers and not self._is_closed and assembly.has_started and assembly.torn is None:
            try:
                self._commit_last(assembly)
            except PeerError:
                if ranks is not None and ranks.failure is not None:
                    # Another rank was lost meanwhile: there is nothing to go on with.
                    self._close(restore=False, commit=False)
                raise
        # Asked of a store that may not be made yet where another rank was lost.
        last = self.commits if self._runner.owes_commit and has_peers and not self._is_closed else None
        if last is not None and last.step != self.steps:
            warnings.warn(
                f"the commit that was asked for inside of a call is given up with step {self.steps}: the job was closed with commit=False, or left by an error. "
                "A signal handler that calls job.commit() had better not raise: let the loop end",
                MemfitWarning,
                stacklevel=3,
            )
        self._was_closed = True
        steps.unwatch(self)
        for change in self._runner.take_back_changes():
            warnings.warn(f"the job is closed: {change}", MemfitWarning, stacklevel=3)
        with self._runner.interrupts.held():
            end_job(assembly, restore=restore is not False)
        LOG.info("job closed after step %d; %s", self.steps, self.proof().line())

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

    def _check_same(self, assembly: Assembly, changed: Sequence[BlockWeights]) -> None:
        try:
            check_same_changes(assembly.setup.ranks, changed)
        except DisagreementError as error:
            # Blocks at home on the device have been changed where they lie.
            assembly.torn = f"weights were changed in other ways on other ranks: {error}"
            raise

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
        if self._runner.calls.is_forked:
            return  # a child that ends: threads and files are its parent's
        ranks = self._assembly.setup.ranks
        if error is not None and ranks is not None:
            # The other ranks wait for this one's next call, which does not come.
            fail_together(ranks, error)
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


def _refuse_lines(assembly: Assembly, what: str) -> None:
    if not assembly.has_ended and assembly.engine.before_call is not None:
        raise UsageError(f"job.lines() is still open where {what}. Leave its `with` first")
