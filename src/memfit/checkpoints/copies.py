"""Copies in a run's store of what rests in memory.

In: homes in memory and the model's buffers. Out: the same bytes in the spare slots of the store, for the next commit.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from memfit import devices
from memfit.checkpoints.run_store import RunStore
from memfit.checkpoints.schemes import CommitScheme
from memfit.core.plan import Tier
from memfit.engine.housing import House
from memfit.homes import ByteHome, DiskHome, MemoryHome
from memfit.homes.regions import updated_regions
from memfit.homes.weights import BlockWeights


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

    def _homes(self) -> dict[str, tuple[int, MemoryHome]]:
        """By region that commits copy, the block and its home in memory."""
        return {
            region: (block.index, home)
            for block in self._house.blocks
            for region in self._scheme.copied_regions(block)
            if (home := self._house.placed.get(region, (0, None))[1]) is not None
            if isinstance(home, MemoryHome) and self._run.has(region)
        }

    @property
    def nbytes(self) -> int:
        """Bytes that a commit copies at most."""
        return sum(home.nbytes for _, home in self._homes().values())

    def note_changed(self, blocks: Iterable[int]) -> None:
        """Marks the homes in memory of these blocks as newer than the store."""
        chosen = set(blocks)
        self._changed |= {region for region, (block, _) in self._homes().items() if block in chosen}

    def write(self) -> list[str]:
        """Writes what changed since the last commit, and the model's buffers, to the spare slots.

        Returns:
            The regions that the commit must flip; then call `note_committed`.

        Raises:
            StoreError: the disk; may be repeated.
        """
        self._settle()
        flips = [
            name for name, (_, home) in self._homes().items() if name in self._changed and self._run.keep(name, home)
        ]
        return flips + self.write_buffers()

    def write_buffers(self) -> list[str]:
        """Writes the model's buffers alone; see `write`."""
        return self._run.keep_buffers(self._model)

    def note_committed(self) -> None:
        """The commit that `write` wrote for was made."""
        self._changed.clear()

    def load(self, region: str, home: ByteHome) -> None:
        """Fills a home in memory with the committed bytes; homes on disk have them. Raises `StoreError`."""
        if home.tier is not Tier.DISK and isinstance(home, MemoryHome):
            self._run.load(region, home)

    def load_buffers(self) -> None:
        """Gives the model's buffers their committed values. Raises `StoreError`."""
        self._run.load_buffers(self._model)

    # --- blocks one by one, for the journal of steps

    def updated_regions(self, block: BlockWeights) -> tuple[str, ...]:
        """Returns the regions of the store that an update of a block writes."""
        return tuple(name for name in updated_regions(block.name) if self._run.has(name))

    def write_block(self, block: BlockWeights) -> None:
        """Makes a block's next version in the store whole, with what was not updated and what rests in memory.

        Raises:
            StoreError: the disk; may be repeated.
        """
        self._settle()
        for region in self.updated_regions(block):
            home = self._house.placed[region][1]
            if isinstance(home, DiskHome):
                home.complete()
            elif isinstance(home, MemoryHome):
                self._run.keep(region, home)

    def begin_versions(self, blocks: Iterable[BlockWeights]) -> None:
        """What is written from now on to the homes of these blocks is a new version."""
        self._house.begin_versions(region for block in blocks for region in self.updated_regions(block))

    def restore_block(self, block: BlockWeights) -> None:
        """Puts the homes of a block back to the version that is committed. Raises `StoreError`."""
        # A piece of the update that failed may still be on its way to a pinned home: it would land on what is read now.
        self._settle()
        self.begin_versions([block])
        for region in self.updated_regions(block):
            self.load(region, self._house.placed[region][1])

    def _settle(self) -> None:
        # Pinned homes are written by a stream that the host does not follow.
        if devices.is_accelerator(self._device):
            devices.of(self._device).synchronize(self._device)
