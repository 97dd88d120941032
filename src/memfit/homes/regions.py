"""Regions on disk that homes are made from, and the publishing of their versions.

In: names and sizes of regions. Out: `RegionStore`, the protocol; `WorkingStore`, a store that is
deleted with the job. A store that outlives the job is another `RegionStore`
(`runs.run_store`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from memfit.homes.disk import DiskHome
from memfit.homes.staging import Staging
from memfit.store import DiskIO, DiskStore, RegionSpec
from memfit.store.directory import is_there
from memfit.store.manifest import MANIFEST_NAME

_IDENTITY = {"made-by": "memfit"}


def weight_region(block: str) -> str:
    """Name of the region of a block's weights."""
    return f"{block}/weight"


def master_region(block: str) -> str:
    """Name of the region of a block's master weights."""
    return f"{block}/master"


def state_region(block: str) -> str:
    """Name of the region of a block's optimizer states."""
    return f"{block}/state"


def gradient_region(block: str) -> str:
    """Name of the region of a block's gradients."""
    return f"{block}/gradient"


def updated_regions(block: str) -> tuple[str, ...]:
    """Names of the regions that an update of a block may write."""
    return weight_region(block), master_region(block), state_region(block)


class RegionStore(Protocol):
    """Regions on disk with versions: reads of a home with two slots see a write once it is
    published.

    Attributes:
        directory: of its files.
        io: the disk's threads.
    """

    directory: Path
    io: DiskIO

    @property
    def nbytes(self) -> int:
        """Bytes of disk that the regions take."""
        ...

    def has(self, region: str) -> bool:
        """Returns True if there is a region of this name."""
        ...

    def home(self, region: str, ends: Collection[int] = (), staging: Staging | None = None) -> DiskHome:
        """Makes a home of a region; the other arguments as in `DiskHome`."""
        ...

    def publish(self, step: int, changed: Sequence[str], *, is_new: bool) -> None:
        """Makes the new versions of regions current, all at once.

        Args:
            step: number of the step that they belong to.
            changed: names of regions whose spare slot is complete.
            is_new: a step has ended; else they were written between two steps.

        Raises:
            StoreError: the disk failed; reads see the previous version.
        """
        ...

    def published_since(self, step: int) -> int | None:
        """Returns the step of a version that was published although the call failed, else None.

        Args:
            step: the last one known to be published.
        """
        ...


class WorkingStore:
    """Store of one job, deleted by `close`, or after a kill by the next one there. Its commits make
    versions current without a sync, so nothing in it survives a power cut.

    Args:
        directory: is made.
        regions: sizes and names of its regions.
        io: the disk's threads.
    """

    def __init__(self, directory: Path, regions: Mapping[str, RegionSpec], io: DiskIO) -> None:
        self.directory = directory
        self.io = io
        _remove_left(directory, io)
        self.disk = DiskStore.create(directory, regions, identity=_IDENTITY, durable=False, io=io)
        self._generation = 0

    @property
    def nbytes(self) -> int:
        """See `RegionStore`."""
        return self.disk.disk_bytes

    def has(self, region: str) -> bool:
        """See `RegionStore`."""
        return region in self.disk.regions

    def home(self, region: str, ends: Collection[int] = (), staging: Staging | None = None) -> DiskHome:
        """See `RegionStore`."""
        return DiskHome(self.disk.region(region), ends, staging)

    def publish(self, step: int, changed: Sequence[str], *, is_new: bool) -> None:
        """See `RegionStore`. Homes with one slot are current already."""
        if changed or self.disk.step is None:
            self.disk.commit(step, changed)
            self._generation = self.disk.generation

    def published_since(self, step: int) -> int | None:
        """See `RegionStore`."""
        if self.disk.generation == self._generation:
            return None
        self._generation = self.disk.generation
        return self.disk.step

    def close(self) -> None:
        """Deletes the files. May be repeated. Raises `StoreError` if they could not be removed."""
        self.disk.close(delete=True)


def _remove_left(directory: Path, io: DiskIO) -> None:
    """Removes the working store of a killed process: no process holds it, and no run owns it."""
    if is_there(directory / MANIFEST_NAME):
        with DiskStore.open(directory, durable=False, io=io) as store:
            if store.identity == _IDENTITY:
                store.close(delete=True)
