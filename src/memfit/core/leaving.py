"""Rule by which storages leave the device when a plan offloads activations, shared by profile,
prediction and engine.
"""

from __future__ import annotations

from typing import Any

from memfit.core.units import KIB

MINIMUM_LEAVING_BYTES = 64 * KIB
"""Smaller storages stay: a transfer of fewer bytes costs more in latency than the memory is worth.
"""


def leaves(nbytes: int, *, is_movable: bool, minimum_bytes: int = MINIMUM_LEAVING_BYTES) -> bool:
    """Tells whether a storage leaves.

    Args:
        nbytes: size of the whole storage.
        is_movable: all tensors over the storage are movable; see `is_movable`.
        minimum_bytes: smaller ones stay.
    """
    return is_movable and nbytes >= minimum_bytes


def is_movable(tensor: Any, kinds: tuple[type, ...]) -> bool:
    """Tells whether a tensor can be rebuilt as a view of bytes that were offloaded and came back.

    Args:
        tensor: a torch tensor, dense.
        kinds: classes of ordinary tensors; bytes of other classes need not be one range.
    """
    return type(tensor) in kinds and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
