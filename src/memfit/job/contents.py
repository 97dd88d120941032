"""Contents of a job's homes: weights and optimizer states, read and changed between two steps.

In: blocks, their states, a `House`. Out: values by name, and changes that become versions of their
own, or are forgotten where they fail.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.errors import UsageError
from memfit.core.limits import format_bytes
from memfit.core.tiers import Tier
from memfit.engine.housing import House
from memfit.engine.loss_scaling import LossScaler
from memfit.files.matching import Matched
from memfit.homes import ByteHome
from memfit.homes.gradient_standins import GradientStandIn
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.weights import BlockWeights, put_values
from memfit.job.journaling import StepJournal
from memfit.planner.setup import Planned, Prepared
from memfit.planner.together import together
from memfit.runs.checkpointer import Checkpointer
from memfit.tensors.noise import RoundingNoise
from memfit.tensors.trees import buffers_of, tensors_in

_LARGEST_SHOWN = 5


class Contents:
    """Weights and optimizer states of a job under one plan, at their homes.

    Args:
        planned: what `fit` decided.
        house: the homes.
        noise: of stochastic rounding and of encoded states.
        scaler: the loss scale of a plan that computes in fp16.

    Attributes:
        place: by parameter, its block and its slot there.
        checkpointer: commits what changes; nothing without a store.
        journal: of a store that keeps one.
        torn: why blocks hold weights of different steps; None while they do not.
        is_stepping: in the middle of a step, or of inference.
        is_visited: blocks that rest elsewhere are on the device, in `job.weights()`.
        has_told_changes: the user knows that a parameter was changed past its memory.
    """

    def __init__(self, planned: Planned, house: House, *, noise: RoundingNoise, scaler: LossScaler | None) -> None:
        self.planned = planned
        self.setup = planned.setup
        self.plan = planned.plan
        self.machine = planned.setup.machine
        self.model = planned.setup.problem.model
        self.driver = planned.setup.problem.driver
        self.house = house
        self.blocks = house.blocks
        self.states: dict[int, BlockStates] = house.states
        self.place = {slot.name: (block, slot) for block in self.blocks for slot in block.slots}
        self.noise = noise
        self.scaler = scaler
        self.checkpointer = Checkpointer()
        self.journal: StepJournal | None = None
        self.torn: str | None = None
        self.is_stepping = self.is_visited = False
        self.has_told_changes = False
        self._is_shapes_only = False
        self._checked_marks: tuple[object, ...] = ()
        self._checked_names: Mapping[str, torch.nn.Parameter] = {}
        self._read_state: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
        self._frozen_sums: dict[int, Mapping[str, int]] = {}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context of a step: nothing else is done with the job, and what is written is no version
        yet.
        """
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    @contextmanager
    def visiting(self, fetched: Sequence[BlockWeights]) -> Iterator[None]:
        """Context of a visit of blocks that rest elsewhere; the visit ends with it."""
        before, self.is_visited = self.is_visited, self.is_visited or bool(fetched)
        try:
            yield
        finally:
            self.is_visited = before
            for block in fetched:
                block.release()

    def check_unchanged(self, marks: tuple[object, ...]) -> None:
        """Checks that the parameters are those of `fit`, lie where the job put them, and train as
        they did.

        Args:
            marks: of the model now (`user_hooks.marks_of`): as long as they are the same, so are
                the names of parameters.

        Raises:
            UsageError: one does not.
        """
        has_names = marks == self._checked_marks
        now = self._checked_names if has_names else dict(self.model.named_parameters())
        for name, (block, slot) in self.place.items():
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
                self.has_told_changes = True
                raise UsageError(
                    f"the parameter {name!r} {problem} behind the job's back: homes, plan and optimizer states belong to "
                    "the old one. Change values in place inside `with job.weights():`; for anything else close the job, "
                    "change the model, and fit again"
                )
        added = [] if has_names else [name for name in now if name not in self.place]
        if added:
            raise UsageError(
                f"the model has a new parameter {added[0]!r} that the job does not know: close the job and fit again"
            )
        self._checked_marks, self._checked_names = marks, now

    def choose_blocks(self, names: Sequence[str]) -> list[BlockWeights]:
        """Returns the blocks of these names, or of parameters of these names; all without any.

        Raises:
            UsageError: an unknown name.
        """
        if not names:
            return list(self.blocks)
        by_name = {block.name: block for block in self.blocks} | {n: b for n, (b, _) in self.place.items()}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            near = difflib.get_close_matches(unknown[0], by_name, n=1, cutoff=0.0)
            raise UsageError(
                f"no block or parameter is called {unknown[0]!r}; the nearest name is {near[0]!r}, and job.block_names lists the blocks"
            )
        return list(dict.fromkeys(by_name[name] for name in names))

    # --- changes between two steps ---------------------------------------------------------------

    def keep_changes(self) -> None:
        """Makes what was written to homes between two steps a version of its own.

        Within a step nothing is one yet.
        """
        if not self.is_stepping:
            if self.journal is not None:
                self.journal.finish()
            self._keep_written()
            self.house.keep_changes()

    def watch_again(self, indices: Iterable[int]) -> None:
        """Begins to watch what the user's code writes to those of these blocks that rest on the
        device, and have masters or a store, which would not hear of it; and to those that visit, in
        lines of the user's.
        """
        for block in (self.blocks[index] for index in indices):
            if block.arrived_storage is None or not (block.travels or block.has_masters or self.setup.run is not None):
                continue
            if not block.travels and not block.has_masters and block.index not in self.states:
                self._frozen_sums[block.index] = block.begin_changes()
            block.watch_writes()

    def _keep_written(self) -> None:
        """Keeps what the user's code wrote, outside of `job.weights()`, to weights that rest on the
        device: for their masters, and for the next commit.
        """
        names: dict[int, Sequence[str]] = {}
        for block in self.blocks:
            if block.travels or not block.may_be_written:
                continue
            sums = self._frozen_sums.get(block.index)
            found = block.written_since_watch() if sums is None else block.changed_since(sums)
            if found or (sums is None and self.setup.run is not None):
                names[block.index] = found
            else:
                block.watch_writes()
        if names:
            self._note_changes([self.blocks[index] for index in names])
            for index, found in names.items():
                self.blocks[index].write_home(found)
            self.watch_again(names)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Makes what is written to homes inside a version of its own, or is forgotten where it
        fails.
        """
        self.keep_changes()
        try:
            yield
        except BaseException:
            self.house.forget_step()
            raise
        self.keep_changes()

    def write_home(self, names: Mapping[int, Sequence[str]]) -> None:
        """Writes weights that were changed on the device to their homes.

        Args:
            names: of the changed parameters, by block.

        Raises:
            StoreError: the disk; where homes have one slot, the weights are torn.
            UnsupportedError: there is no room for a version that no step makes.
        """
        changed = [block for block in self.blocks if names.get(block.index)]
        self._note_changes(changed)
        try:
            for block in changed:
                transfer = block.write_home(names[block.index])
                if transfer is not None:
                    transfer.wait()
            self.watch_again(block.index for block in changed)
            self.keep_changes()
        except BaseException as error:
            if any(_is_overwritten(block.home) or _is_overwritten(block.master_home) for block in changed):
                self.torn = (
                    "weights that were changed between two steps could not be written "
                    f"({type(error).__name__}: {error})"
                )
            self.house.forget_step()
            raise

    def fill(self, found: Mapping[int, Matched]) -> None:
        """Gives weights the values that files have, one at a time, at home.

        Args:
            found: by identity of the parameter.

        Raises:
            StoreError: a file, or the disk; the weights are torn where some had been replaced.
            UnsupportedError: see `write_home`.
        """
        chosen = [block for block in self.blocks if any(id(slot.parameter) in found for slot in block.slots)]
        self._note_changes(chosen)
        try:
            for block in chosen:
                block.release()
                for slot in block.slots:
                    values = torch.empty_strided(
                        slot.shape, slot.stride, dtype=slot.master_dtype, device=slot.parameter.device
                    )
                    found[id(slot.parameter)].read(values)
                    put_values(block, slot, values)
        except BaseException as error:
            if not all(_has_spare_slot(home) for block in chosen for home in (block.home, block.master_home)):
                self.torn = f"a load ended in its middle ({type(error).__name__}: {error})"
            raise

    def _note_changes(self, blocks: Sequence[BlockWeights]) -> None:
        is_deciding = self.journal is not None and self.journal.is_waiting
        for block in blocks:
            self.checkpointer.check_changeable(block, is_deciding=is_deciding)
        self.checkpointer.note_changed_between(block.index for block in blocks)

    def gather_state(self, name: str) -> dict[str, Any]:
        """Reads the optimizer states of a parameter from home."""
        block, slot = self.place[name]
        if self._is_shapes_only:
            return self.states[block.index].gather_shapes(slot)
        self.keep_changes()
        with together(self.setup.ranks, f"the optimizer states of {name!r}"):
            return self.states[block.index].gather(slot)

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Context in which `gather_state`, and so `optimizer.state_dict()`, gives fake tensors."""
        self._is_shapes_only = True
        try:
            yield
        finally:
            self._is_shapes_only = False
        self._checked_marks: tuple[object, ...] = ()
        self._checked_names: Mapping[str, torch.nn.Parameter] = {}

    def scatter_state(self, name: str, state: dict[str, Any]) -> None:
        """Writes optimizer states of a parameter to their home.

        Raises:
            UnsupportedError: there is no room for a version that no step makes.
        """
        block, slot = self.place[name]
        if self._read_state is not None:
            state = self._read_state(name, state)
        self._note_changes([block])
        self.states[block.index].put(slot, state)

    @contextmanager
    def reading_states(self, read: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
        """Context in which `scatter_state`, and so `optimizer.load_state_dict`, takes fake tensors.

        Args:
            read: returns the values for a parameter's fake states.
        """
        self._read_state = read
        try:
            yield
        finally:
            self._read_state = None

    # --- bytes -----------------------------------------------------------------------------------

    def held(self) -> Iterator[torch.Tensor]:
        """Yields what is on the device between steps and goes with the plan."""
        yield from self.house.held()
        yield from self.house.gradients.kept
        found = (p.grad for p in self.model.parameters())
        yield from (
            gradient for gradient in found if gradient is not None and not isinstance(gradient, GradientStandIn)
        )

    def others_bytes(self, prepared: Prepared, batch: Any) -> int:
        """Returns the bytes of live tensors that the prediction of a step does not count; see
        `Machine.others_bytes`.

        Args:
            prepared: the step.
            batch: of the step, or what stands for it in the prediction.
        """
        others = self.machine.others_bytes([*self.held(), *tensors_in(batch), *buffers_of(self.model)])
        # From the second step on the program keeps what it is predicted to.
        return others - min(max(0, others), prepared.lasting_bytes)

    def largest_residents(self) -> str:
        """Names what of the job takes most of the device now, with its bytes."""
        found: list[tuple[int, str]] = []
        for block in self.blocks:
            if block.is_here:
                found.append((block.nbytes, f"weights of {block.name!r}"))
            found += [(self.house.gradients.here.held_bytes(s), f"gradient of {s.name!r}") for s in block.slots]
        for index, states in self.states.items():
            if states.home is not None and states.home.memory is not None:
                found.append((states.nbytes, f"optimizer states of {self.blocks[index].name!r}"))
        largest = sorted(found, key=lambda item: -item[0])[:_LARGEST_SHOWN]
        return ", ".join(f"{name} {format_bytes(nbytes)}" for nbytes, name in largest if nbytes) or "none of memfit"

    def bytes_to_come(self) -> int:
        """Returns what giving everything back brings to the device, at its peak."""
        coming = sum(b.master_nbytes if b.has_masters else b.nbytes for b in self.blocks if b.travels)
        coming += sum(s.nbytes for s in self.states.values() if s.home is not None and s.home.tier is not Tier.DEVICE)
        return coming + max(block.nbytes for block in self.blocks)  # one is here twice for a moment

    def can_undo(self, updated: Sequence[int]) -> bool:
        """Returns True if the homes of updated blocks still hold what they held before."""
        return all(
            _has_spare_slot(self.blocks[b].home)
            and _has_spare_slot(self.blocks[b].master_home)
            and (not self.states[b].nbytes or _has_spare_slot(self.states[b].home))
            for b in updated
        )


def _has_spare_slot(home: ByteHome | None) -> bool:
    return home is not None and home.has_spare_slot


def _is_overwritten(home: ByteHome | None) -> bool:
    """Returns True if what is written there changes what reads see."""
    return home is not None and home.has_versions and not home.has_spare_slot
