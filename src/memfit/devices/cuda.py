"""CUDA, where torch's generic interface ends."""

from __future__ import annotations

from typing import Any

import torch

from memfit.devices.accelerator import Accelerator


class Cuda(Accelerator):
    """NVIDIA's devices (and AMD's, which torch calls CUDA as well)."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def pin(self, storage: torch.UntypedStorage) -> bool:
        """See `Accelerator.pin`."""
        if not storage.nbytes():
            return False
        runtime: Any = torch.cuda.cudart()
        # In exact size: a copy from memory that is not registered would block the host.
        torch.cuda.check_error(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
        return True

    def unpin(self, storage: torch.UntypedStorage) -> None:
        """See `Accelerator.unpin`."""
        runtime: Any = torch.cuda.cudart()
        # Only when no copy uses it any more.
        torch.cuda.check_error(runtime.cudaHostUnregister(storage.data_ptr()))
