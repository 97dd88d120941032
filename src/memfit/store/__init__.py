"""Disk homes: files that weights, states, gradients and activations rest in, moved without the page
cache.

In: a directory, what shall live there, and memory to move. Out: transfers to wait for, and a
directory that always holds the last committed step, whole.
Parts: `DiskIO` (threads and direct I/O), `DiskStore` (regions and commits), `CommittedStore` (what
a run continues from), `verify`, `ScratchFile` (room inside one step), `probe_disk`.
"""

from memfit.store.checksums import Memory, aligned_memory, memory_of_storage, memory_of_tensor
from memfit.store.committed import CommittedStore, Durability
from memfit.store.disk_store import DiskStore
from memfit.store.files import FileHandle, FileOperations, open_file
from memfit.store.io import DiskIO, IOStatistics, IOTraffic
from memfit.store.manifest import RegionSpec, TensorPlace, dtype_name, store_bytes
from memfit.store.probe import BesideRates, probe_disk, probe_disk_beside
from memfit.store.region import PieceDamage, Region
from memfit.store.scratch import Extent, ScratchFile, ScratchStatistics
from memfit.store.transfer import DiskTransfer
from memfit.store.verify import BlockReport, StoreReport, verify

__all__ = [
    "BesideRates",
    "BlockReport",
    "CommittedStore",
    "DiskIO",
    "DiskStore",
    "DiskTransfer",
    "Durability",
    "Extent",
    "FileHandle",
    "FileOperations",
    "IOStatistics",
    "IOTraffic",
    "Memory",
    "PieceDamage",
    "Region",
    "RegionSpec",
    "ScratchFile",
    "ScratchStatistics",
    "StoreReport",
    "TensorPlace",
    "aligned_memory",
    "dtype_name",
    "memory_of_storage",
    "memory_of_tensor",
    "open_file",
    "probe_disk",
    "probe_disk_beside",
    "store_bytes",
    "verify",
]
