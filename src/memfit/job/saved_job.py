"""Saves of a job: written, and read back between two steps.

In: a job between two steps. Out: directories that `from_pretrained` reads and runs go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from memfit.core.documents import user_path
from memfit.core.errors import LOG, TornStepError, UsageError
from memfit.files.names import wait_for_updates
from memfit.job.assembly import Assembly
from memfit.job.job_facts import check_alone
from memfit.job.loading import LoadResult, load_into_job, load_states
from memfit.job.step_runner import StepRunner
from memfit.job.torch_states import give_weights, read_states, states_at_home, weights_at_home, write_torch
from memfit.job.watching import WatchedJob
from memfit.planner.together import done_by_all, together
from memfit.runs.saving import DEFAULT_SHARD_BYTES, SaveResult, breaches_of_save, check_form, save_job
from memfit.tensors.with_frozen import saved_model

# Averages of a job's weights, as far as saves know of them.
#
# In: averages that are kept beside a job. Out: their files in a save, and the save that a job goes
# on from.


class SavedAverage(Protocol):
    """An average whose values belong to the saves of its job."""

    @property
    def is_saved(self) -> bool:
        """Tells whether a save has it: not where it is closed, or in the places of the weights."""
        ...

    def write(self, path: Path) -> None:
        """Writes its values into a new file."""

    def read(self, path: Path) -> None:
        """Takes the values of a file."""


class Averages:
    """The averages of a job."""

    def __init__(self) -> None:
        self._kept: list[SavedAverage] = []
        self._source: Path | None = None
        self._source_steps = 0

    def add(self, average: SavedAverage, steps: int) -> Path | None:
        """Adds an average.

        Args:
            average: is saved from here on.
            steps: of the job now.

        Returns:
            The file that it goes on from: of the save that the job began or was loaded with, unless
            steps were made since. None: there is none.
        """
        self._kept.append(average)
        if self._source is None or steps != self._source_steps:
            return None
        path = self._source / _name(len(self._kept) - 1)
        return path if path.is_file() else None

    def remove(self, average: SavedAverage) -> None:
        """Removes one that was added. The names of the others stay."""
        self._kept = [_Gone() if each is average else each for each in self._kept]

    def note_source(self, source: Path | None, steps: int) -> None:
        """Notes the save that weights and states have just come from, and gives averages their
        values of it, where it has them.
        """
        self._source, self._source_steps = source, steps
        for index, average in enumerate(self._kept):
            if source is not None and average.is_saved and (source / _name(index)).is_file():
                average.read(source / _name(index))

    def write(self, directory: Path) -> None:
        """Writes all of them into the directory of a save."""
        for index, average in enumerate(self._kept):
            if average.is_saved:
                average.write(directory / _name(index))


class _Gone:
    """Keeps the place of an average that was closed."""

    is_saved = False

    def write(self, path: Path) -> None:
        """Does nothing."""

    def read(self, path: Path) -> None:
        """Does nothing."""


def _name(index: int) -> str:
    return "averages.safetensors" if index == 0 else f"averages-{index}.safetensors"


class SavedJob(WatchedJob):
    """Saves of a job.

    Args:
        runner: makes the job's steps.
        source: the save that the job goes on from, if it does.

    Attributes:
        averages: of the weights, which are saved and loaded with them; see `MemfitEma`.
    """

    def __init__(self, runner: StepRunner, source: Path | None = None) -> None:
        super().__init__(runner)
        self.averages = Averages()
        self.averages.note_source(source, self.steps)

    def save(
        self,
        directory: str | Path,
        *,
        max_shard_bytes: int | str = DEFAULT_SHARD_BYTES,
        extra: Mapping[str, Any] | None = None,
        form: Literal["memfit", "trainer", "weights"] = "memfit",
        write_beside: Callable[[Path], object] | None = None,
    ) -> SaveResult:
        """Saves weights, optimizer and training position as safetensors and JSON.

        See `saving.save_job`.

        On several ranks all call it with the same directory; rank 0 writes one set of files, of
        pieces that it gathers.

        Memory: two pieces of 2 MiB.

        Args:
            directory: its save is replaced atomically when all is written; an interrupted save
                leaves the old one. Other files in it stay.
            max_shard_bytes: largest size of a file of weights.
            extra: JSON-like values that are saved too (numbers, strings, lists, dictionaries, such
                as a scheduler's `state_dict()`) and returned by `load`.
            form: "weights" writes weights and configuration alone, for `from_pretrained`. "trainer"
                adds the states as `optimizer.pt`, as `torch.save` writes `optimizer.state_dict()`,
                one parameter at a time: for transformers' `Trainer`. Runs go on from "memfit".
            write_beside: writes further files into the new directory, which takes the place of the
                old one when they are there. On rank 0.

        Raises:
            StoreError: the disk failed.
            UsageError: the directory cannot be used, or the job is closed.
            TornStepError: blocks hold weights of different steps.
        """
        with self._runner.calls.enter("job.save"):
            assembly = self._check_usable()
            with breaches_of_save(directory):
                assembly.keep_changes()
            check_form(form, extra)
            if form == "trainer":
                check_alone(assembly, 'job.save(form="trainer")')
            # Weights and states are those of the step that waits for its `job.step`, if one does.
            journal, scaler = assembly.journal, self.loss_scaler
            waiting = journal if journal is not None and journal.is_waiting else None

            def write_others(new: Path) -> None:
                if form == "memfit":
                    self.averages.write(new)
                if write_beside is not None:
                    write_beside(new)

            # A save works on host memory.
            ranks = assembly.setup.ranks
            with (
                together(ranks, "job.save", digest=f"{directory}, form={form!r}"),
                self._machine.phase("save"),
                self._machine.host_ledger(),
                # Inside of `together`: the other ranks hear of the limit too.
                breaches_of_save(directory),
            ):
                saved = save_job(
                    directory,
                    model=saved_model(assembly.model),
                    optimizer=assembly.setup.optimizer,
                    blocks=assembly.blocks,
                    states=assembly.states,
                    steps=self.steps + (waiting is not None),
                    scaler=scaler.after_a_step() if scaler is not None and waiting is not None else scaler,
                    noise=assembly.noise,
                    random=None if waiting is None else waiting.random(),
                    max_shard_bytes=max_shard_bytes,
                    extra=extra,
                    has_states=form == "memfit",
                    write_beside=write_others,
                    writes=ranks is None or ranks.rank == 0,
                )
                if form == "trainer":
                    write_torch(saved.directory / "optimizer.pt", states_at_home(assembly))
                LOG.info("saved step %d in %s, %.3g s", self.steps, saved.directory, saved.seconds)
                return saved

    def model_state(self) -> dict[str, Any]:
        """Returns the model's state dict for `write_torch`, with tensors that are read late.

        Masters stand for weights that are rounded.
        """
        with self._runner.calls.enter("job.model_state"):
            return weights_at_home(self._check_usable())

    def optimizer_state(self) -> dict[str, Any]:
        """Returns the optimizer's state dict for `write_torch`, likewise."""
        with self._runner.calls.enter("job.optimizer_state"):
            return states_at_home(self._check_usable())

    def write_torch(self, path: str | Path, content: Any) -> None:
        """Writes a file that `torch.load` reads: a checkpoint in the form of another library.

        Memory: one parameter's weight or state.

        Args:
            path: replaced atomically when all is written.
            content: anything that `torch.save` takes, with what `model_state` and `optimizer_state`
                returned in it.

        Raises:
            StoreError: the disk failed.
        """
        with self._runner.calls.enter("job.write_torch"):
            assembly = self._check_usable()
            check_alone(assembly, "job.write_torch")
            assembly.keep_changes()
            # Not "save", whose prediction is of pieces.
            with self._machine.phase("checkpoint"), self._machine.host_ledger():
                wait_for_updates(assembly.blocks)
                write_torch(user_path(path), content)

    def give_weights(self, state: Mapping[str, Any]) -> None:
        """Gives the model the weights and buffers of a state dict, a block at a time.

        Raises:
            UsageError: the state dict is of another model, or the job has a `store=`.
        """
        with self._runner.calls.enter("job.give_weights"):
            give_weights(state, self._check_loadable())

    def load(self, source: str | Path, *, restore_random: bool = True, weights_only: bool = False) -> LoadResult:
        """Loads weights from files, and the training state too if `save` wrote them.

        The training state is the optimizer's states and settings, the loss scale, the number of
        steps, and random generators. All of it is compared with the model and the optimizer before
        anything is changed.

        Memory: one parameter, in its master's dtype; its states; a piece of 2 MiB.

        Args:
            source: as in `fit(weights=...)`.
            restore_random: restores torch's default generators and the noise of stochastic
                rounding, if the source is a save.
            weights_only: loads no training state, also where the source has one.

        Returns:
            The steps and the `extra` of the save; without a save the steps so far and None.

        Raises:
            StoreError: a file is missing or damaged.
            UsageError: the files do not fit the model or the optimizer, or the job has a `store=`.
            TornStepError: raised by later calls if loading was interrupted midway.
        """
        with self._runner.calls.enter("job.load"):
            assembly = self._check_loadable()
            found = done_by_all(
                assembly.setup.ranks,
                "job.load",
                f"{source}, weights_only={weights_only}",
                lambda: load_into_job(source, assembly, restore_random=restore_random, weights_only=weights_only),
            )
            if not weights_only:
                self.averages.note_source(user_path(source), self.steps)
        return found

    def load_states(self, directory: str | Path, *, restore_random: bool = True) -> LoadResult:
        """Loads the training state of a save without its weights, which the job has already (by
        `memfit.fit(weights=directory)`, for example). See `load`.

        A file of `torch.save(optimizer.state_dict())`, as transformers' `Trainer` writes it
        (`optimizer.pt`), is read too, one parameter's states at a time; steps and generators are as
        before.

        Args:
            directory: written by `save`; or such a file.
            restore_random: restores torch's default generators and the noise of stochastic
                rounding.

        Raises:
            StoreError: a file is missing, damaged or not memfit's.
            UsageError: the save does not fit the optimizer; nothing was changed.
        """
        source = user_path(directory)
        with self._runner.calls.enter("job.load_states"):
            assembly = self._check_loadable()
            if source.is_file():
                check_alone(assembly, "job.load_states(file)")
                read_states(source, assembly)
                return LoadResult(steps=self.steps, extra={})
            found = done_by_all(
                assembly.setup.ranks,
                "job.load_states",
                str(directory),
                lambda: load_states(directory, assembly, restore_random=restore_random),
            )
            self.averages.note_source(source, self.steps)
        return found

    def _check_usable(self) -> Assembly:
        assembly = self._check_open()
        if assembly.is_stepping:
            raise UsageError(
                "the job is in the middle of a step, or of job.inference(): what runs inside cannot step, evaluate or save it"
            )
        if assembly.is_visited:
            raise UsageError(
                "job.weights() is still open where the job is to compute, save or load: leave its `with` first"
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
