"""Disk homes: files that weights, states, gradients and activations rest in, moved without the page cache.

In: a directory, what shall live there, and memory to move. Out: tickets to wait for, and a directory that always holds
the last committed step, whole.
Parts: `DiskIO` (threads and direct I/O), `DiskStore` (regions and commits), `CommittedStore` (what a run continues from),
`verify`, `ScratchFile` (room inside one step), `probe_disk`.
"""

from memfit.runtime.store.committed import CommittedStore, Durability
from memfit.runtime.store.files import FileHandle, FileOperations, open_file
from memfit.runtime.store.io import DiskIO, IOStatistics, IOTraffic
from memfit.runtime.store.layout import RegionSpec, store_bytes
from memfit.runtime.store.memory import Memory, aligned_memory, memory_of_storage, memory_of_tensor
from memfit.runtime.store.probe import DiskSpeed, probe_disk
from memfit.runtime.store.region import PieceDamage, Region
from memfit.runtime.store.scratch import Extent, ScratchFile, ScratchStatistics
from memfit.runtime.store.store import DiskStore
from memfit.runtime.store.tensors import TensorPlace, dtype_name
from memfit.runtime.store.ticket import Ticket
from memfit.runtime.store.verify import BlockReport, StoreReport, verify

__all__ = [
    "BlockReport",
    "CommittedStore",
    "DiskIO",
    "DiskSpeed",
    "DiskStore",
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
    "Ticket",
    "aligned_memory",
    "dtype_name",
    "memory_of_storage",
    "memory_of_tensor",
    "open_file",
    "probe_disk",
    "store_bytes",
    "verify",
]
