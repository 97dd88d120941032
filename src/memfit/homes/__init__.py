"""Homes: the places where bytes rest between visits.

In: byte ranges of storages. Out: handles of transfers that have begun. A home knows bytes, not
tensors: blocks, gradients and states lay their tensors out in it by `core.layout`. `MemoryHome`
rests in device or host memory, `DiskHome` in a region of the store.
Parts: `home` (the protocol), `memory` and `disk` (homes), `masters` (homes of
masters), `offloaded` (homes within a step), `factories` (who makes them, by tier), `staging`
(pinned memory on the way), `weights`, `gradients` and `optimizer_states` (what rests), `updates`
and `update_pieces` (the optimizer at the homes).
"""

from memfit.homes.disk import DiskHome
from memfit.homes.home import DONE, ByteHome, TransferGroup, TransferHandle, TransferThen, write_tensor
from memfit.homes.memory import MemoryHome
from memfit.homes.staging import Staging

__all__ = [
    "DONE",
    "ByteHome",
    "DiskHome",
    "MemoryHome",
    "Staging",
    "TransferGroup",
    "TransferHandle",
    "TransferThen",
    "write_tensor",
]
