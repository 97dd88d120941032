"""Schemes: how a store holds a whole step on disk at every instant.

In: blocks, their optimizer states, the model's buffers. Out: the regions of a run's store, and what
may be written to them when.

| scheme        | class            | slots of what trains | a crash goes back to        | between two steps   |
|---------------|------------------|----------------------|-----------------------------|---------------------|
| "generations" | `DoubleBuffered` | two                  | the last commit             | weights may be      |
|               |                  |                      |                             | changed             |
| "journal"     | `Journaled`      | on disk one, with    | the last commit, or forward | weights on disk are |
|               |                  | one spare room for   | to the step that was        | changed by steps    |
|               |                  | all; else two        | decided, from its gradients | only                |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from memfit import devices
from memfit.core.errors import PlanError, UnsupportedError, UsageError
from memfit.core.plan import Plan
from memfit.core.shape import committed_parts, masters_of
from memfit.core.tiers import Tier
from memfit.engine.housing import House
from memfit.homes import ByteHome
from memfit.homes.exchanged_gradients import Sharing
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.regions import master_region, state_region, updated_regions, weight_region
from memfit.homes.weights import BlockWeights
from memfit.runs.rank_record import rank_regions, shares_of
from memfit.runs.rank_stores import RankRunStore
from memfit.runs.run_state import part
from memfit.runs.run_store import BUFFERS, RunStore, pieces_of, regions_of
from memfit.store import TensorPlace, dtype_name
from memfit.store.files import store_error
from memfit.tensors.trees import bytes_view, new_storage
from memfit.tensors.write_marks import copy_shared, reading

_REGION_OF = {"weight": weight_region, "master": master_region, "state": state_region}


class CommitScheme(Protocol):
    """One way to lay out a store."""

    def prepare(
        self,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        buffers: Sequence[tuple[str, torch.Tensor]],
        identity: Mapping[str, str],
    ) -> None:
        """Makes the store with all its room, or compares what is there with what is wanted.

        Args:
            blocks: of the model.
            states: by block index.
            buffers: the model's persistent ones, by name.
            identity: tells the run from others.

        Raises:
            StoreError: no room, or another model. PlanError: the plan does not go with how the
                store was laid out.
        """
        ...

    def copied_regions(self, block: BlockWeights) -> tuple[str, ...]:
        """Returns the regions that a commit copies from the block's homes in memory."""
        ...

    def has_weights(self, block: str) -> bool:
        """Returns True if the last commit has the block's current weights, not only its masters."""
        ...

    def check_changeable(self, block: BlockWeights, *, trains: bool, is_deciding: bool) -> None:
        """Refuses to change a block between two steps where the store has no room for such a
        version.

        Args:
            block: that would be changed.
            trains: the optimizer updates it.
            is_deciding: a step is decided that is not finished.

        Raises:
            UnsupportedError: there is no room.
        """
        ...


class DoubleBuffered:
    """Two slots of every weight and state: a step writes the spare ones, a commit exchanges them
    ("generations").
    """

    def __init__(self, run: RunStore, plan: Plan, sharing: Sharing | None) -> None:
        self._run = run
        self._plan = plan
        self._sharing = sharing

    def prepare(
        self,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        buffers: Sequence[tuple[str, torch.Tensor]],
        identity: Mapping[str, str],
    ) -> None:
        """See `CommitScheme`."""
        regions = regions_of(blocks, states, buffers, masters=masters_of(self._plan))
        if self._sharing is not None:
            assert isinstance(self._run, RankRunStore), "ranks commit to stores of their own"
            regions = rank_regions(regions, blocks, self._sharing)
            shapes = {slot.name: slot.shape for block in blocks for slot in block.slots}
            self._run.take_shares(shares_of(regions, blocks, states, self._sharing), shapes)
        self._run.prepare(regions, identity)

    def copied_regions(self, block: BlockWeights) -> tuple[str, ...]:
        """See `CommitScheme`."""
        parts = committed_parts(masters_of(self._plan), has_masters=block.has_masters)
        return tuple(_REGION_OF[part](block.name) for part in parts)

    def has_weights(self, block: str) -> bool:
        """See `CommitScheme`."""
        if self._run.is_new:
            return False  # its homes are filled from elsewhere
        before = Plan.from_json(part(self._run.state, "plan", str))
        return before.block(block).weight_home is Tier.DISK

    def check_changeable(self, block: BlockWeights, *, trains: bool, is_deciding: bool) -> None:
        """See `CommitScheme`. What is written is a version of its own."""


class Journaled:
    """One slot of every weight and state: gradients are durable before updates overwrite anything
    ("journal").

    See [Note: journal] in `store.journal`.
    """

    def __init__(self, run: RunStore, plan: Plan) -> None:
        self._run = run
        self._plan = plan

    def prepare(
        self,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        buffers: Sequence[tuple[str, torch.Tensor]],
        identity: Mapping[str, str],
    ) -> None:
        """See `CommitScheme`."""
        regions = regions_of(blocks, states, buffers, masters=masters_of(self._plan), scheme="journal")
        # Regions of a block that trains and rests on disk move together, through one spare room.
        moving = [b.name for b in blocks if b.index in states and self._plan.block(b.name).rests_on_disk]
        units = [[name for name in updated_regions(block) if name in regions] for block in moving]
        self._run.prepare(regions, identity, units)
        for block in blocks:
            if self._run.moves(weight_region(block.name)) and not self._plan.block(block.name).rests_on_disk:
                raise PlanError(
                    f"block {block.name!r} rests on disk in the run in {self._run.directory}, whose scheme='journal' "
                    "has no other room for it: the plan must say weight_home='disk' and state_home='disk'"
                )

    def copied_regions(self, block: BlockWeights) -> tuple[str, ...]:
        """See `CommitScheme`."""
        parts = committed_parts(masters_of(self._plan), has_masters=block.has_masters, scheme="journal")
        return tuple(_REGION_OF[part](block.name) for part in parts)

    def has_weights(self, block: str) -> bool:
        """See `CommitScheme`."""
        return True

    def check_changeable(self, block: BlockWeights, *, trains: bool, is_deciding: bool) -> None:
        """See `CommitScheme`. The one slot of a block is changed by its steps alone."""
        if is_deciding or not trains or self._plan.block(block.name).rests_on_disk:
            raise UnsupportedError(
                f"weights or states of block {block.name!r} cannot be changed between steps: with scheme='journal' the "
                "store has no room for a version of them that no step makes. The store has what it had. Change the "
                "model before a run begins, or take scheme='generations'"
            )


def scheme_of(run: RunStore, plan: Plan, sharing: Sharing | None = None) -> CommitScheme:
    """Makes the scheme that a run's store is laid out by.

    Args:
        run: the store.
        plan: of the job.
        sharing: of its homes between ranks.
    """
    return Journaled(run, plan) if run.scheme == "journal" else DoubleBuffered(run, plan, sharing)


# Copies in a run's store of what rests in memory.
#
# In: homes in memory and the model's buffers. Out: the same bytes in the spare slots of the store,
# for the next commit.


class StoreCopies:
    """Copies of homes in memory, which commits write where they changed since the last one.

    Memory: the buffers once more while they are written; 4 MiB while bytes of a device are copied.

    Args:
        run: the open store.
        house: the homes.
        scheme: tells which regions are copied.
        model: whose buffers belong to each commit.
    """

    def __init__(self, run: RunStore, house: House, scheme: CommitScheme, model: nn.Module) -> None:
        self._run = run
        self._house = house
        self._scheme = scheme
        self._model = model
        self._device = next(slot.parameter.device for block in house.blocks for slot in block.slots)
        self._changed: set[str] = set()

    def _homes(self) -> dict[str, tuple[int, ByteHome]]:
        """By region that commits copy, the block and its home, which is not the store's own."""
        return {
            region: (block.index, home)
            for block in self._house.blocks
            for region in self._scheme.copied_regions(block)
            if (placed := self._house.placed.get(region, (0, None))[1]) is not None
            # What this rank holds of it, where ranks share homes.
            if not (home := placed.own).is_stored and self._run.has(region)
        }

    @property
    def nbytes(self) -> int:
        """Bytes that a commit copies at most."""
        return sum(home.nbytes for _, home in self._homes().values())

    def note_changed(self, blocks: Iterable[int]) -> bool:
        """Marks the homes in memory of these blocks as newer than the store. Returns True if there
        are any.
        """
        chosen = set(blocks)
        changed = {region for region, (block, _) in self._homes().items() if block in chosen}
        self._changed |= changed
        return bool(changed)

    def write(self) -> list[str]:
        """Writes what changed since the last commit, and the model's buffers, to the spare slots.

        Returns:
            The regions that the commit must flip; then call `note_committed`.

        Raises:
            StoreError: the disk; may be repeated.
        """
        self._wait_for_copies()
        flips = [name for name, (_, home) in self._homes().items() if name in self._changed and self._keep(name, home)]
        return flips + self.write_buffers()

    def write_buffers(self) -> list[str]:
        """Writes the model's buffers alone; see `write`.

        Raises:
            StoreError: the disk. UsageError: a buffer changed its shape or dtype since `fit`, or is
                gone.
        """
        if not self._run.has(BUFFERS):
            return []
        spec = self._run.regions[BUFFERS]
        staged = new_storage(spec.nbytes)
        bytes_view(staged, 0, spec.nbytes).zero_()
        for place in spec.tensors:
            flat = _buffer(self._model, place).detach().contiguous().reshape(-1).view(torch.uint8)
            bytes_view(staged, place.offset, place.nbytes).copy_(flat)
        return [BUFFERS] if self._write(BUFFERS, staged, spec.nbytes) else []

    def note_committed(self) -> None:
        """The commit that `write` wrote for was made."""
        self._changed.clear()

    def load(self, region: str, home: ByteHome) -> None:
        """Fills a home with the committed bytes; the store's own homes have them.

        Raises `StoreError`.
        """
        self._run.resumed.fill(region, home.own)

    def load_buffers(self) -> None:
        """Gives the model's buffers their committed values, in place. Raises `StoreError`."""
        if not self._run.has(BUFFERS):
            return
        for place in self._run.regions[BUFFERS].tensors:
            value = self._run.resumed.read_tensor(BUFFERS, place.name)
            try:
                copy_shared(self._model.get_buffer(place.name), value)
            except ValueError as error:
                raise store_error(
                    f"{place.name!r} is a buffer {error} of the run in {self._run.directory}: build the model as it was"
                ) from error

    def _keep(self, region: str, home: ByteHome) -> bool:
        if home.bytes is not None:
            return self._write(region, home.bytes, home.nbytes)

        def fetch(start: int, count: int) -> tuple[torch.UntypedStorage, int]:
            staged = new_storage(count)
            home.read(start, count, staged).wait()
            return staged, 0

        return self._write_pieces(region, pieces_of(home.nbytes, None), fetch)

    def _write(self, region: str, source: torch.UntypedStorage, nbytes: int) -> bool:
        return self._write_pieces(region, pieces_of(nbytes, source), lambda start, _: (source, start))

    def _write_pieces(
        self,
        region: str,
        pieces: Iterable[tuple[int, int]],
        fetch: Callable[[int, int], tuple[torch.UntypedStorage, int]],
    ) -> bool:
        """Writes bytes to where the next commit finds them.

        Returns True if it must flip the region.
        """
        is_first = self._run.committed.region(region).step is None
        disk = self._run.home(region)
        for start, count in pieces:
            source, at = fetch(start, count)
            # Not around the wait: a write of the user's meanwhile must take the mark off for good.
            with reading(source):
                handle = disk.write(start, count, source, at)
            handle.wait()
        return not is_first

    # --- blocks one by one, for the journal of steps

    def updated_regions(self, block: BlockWeights) -> tuple[str, ...]:
        """Returns the regions of the store that an update of a block writes."""
        return tuple(name for name in updated_regions(block.name) if self._run.has(name))

    def write_block(self, block: BlockWeights) -> None:
        """Makes a block's next version in the store whole, with what was not updated and what rests
        in memory.

        Raises:
            StoreError: the disk; may be repeated.
        """
        self._wait_for_copies()
        for region in self.updated_regions(block):
            home = self._house.placed[region][1]
            if home.is_stored:
                home.complete()
            else:
                self._keep(region, home)

    def begin_versions(self, blocks: Iterable[BlockWeights]) -> None:
        """Makes what is written from now on to the homes of these blocks a new version."""
        self._house.begin_versions(region for block in blocks for region in self.updated_regions(block))

    def restore_block(self, block: BlockWeights) -> None:
        """Puts the homes of a block back to the version that is committed. Raises `StoreError`."""
        # A piece of the update that failed may still be on its way to a pinned home: it would land
        # on what is read now.
        self._wait_for_copies()
        self.begin_versions([block])
        for region in self.updated_regions(block):
            self.load(region, self._house.placed[region][1])

    def _wait_for_copies(self) -> None:
        # Pinned homes are written by a stream that the host does not follow.
        if devices.is_accelerator(self._device):
            devices.of(self._device).synchronize(self._device)


def _buffer(model: nn.Module, place: TensorPlace) -> torch.Tensor:
    try:
        buffer = model.get_buffer(place.name)
    except AttributeError as error:
        raise UsageError(
            f"the buffer {place.name!r} is gone from the model, so that the step cannot be committed: keep it, or close the job and fit again"
        ) from error
    if tuple(buffer.shape) != place.shape or buffer.dtype != place.torch_dtype:
        raise UsageError(
            f"the buffer {place.name!r} had shape {list(place.shape)} and dtype {place.dtype} when the job began, and has {list(buffer.shape)} and "
            f"{dtype_name(buffer.dtype)} now, so that the step cannot be committed: keep its shape, or register it as state of its own"
        )
    return buffer
