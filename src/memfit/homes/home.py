"""Protocol of homes, and handles of their transfers.

[Note: transfer handles]
Whatever begins a transfer returns a `TransferHandle`, which is waited for once, by `wait`, before
its memory is used or freed; an error of the transfer is raised there and nowhere else. All classes
of handles derive from it:

| class                | of                                                 | `wait` returns when        |
|----------------------|----------------------------------------------------|----------------------------|
| `CompletedTransfer`  | nothing (`DONE`)                                   | at once                    |
| `TransferGroup`      | several transfers                                  | all have ended             |
| `TransferThen`       | a transfer, and what is done with its bytes        | that is done               |
| `memory.StreamCopy`  | a copy on a stream                                 | the current stream is      |
|                      |                                                    | ordered behind it          |
| `memory.HostCopy`    | a copy from an accelerator to the host             | its bytes are there        |
| `staging.Staged`     | a range between an accelerator and a file          | see there, by direction    |
| `offloaded._Left`    | an offloaded storage on its way to a file          | its bytes left the device  |
| `updates.UpdateHandle` | an update                                        | new weights are home       |
| `updates.Gate`       | nothing: somebody opens it                         | it was opened              |

Some classes only have the same `wait`, which is all that the protocol asks for: `DiskTransfer` (the
room `store` may not import this one) and whatever a home of a further tier returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from memfit.core.errors import UnsupportedError
from memfit.core.tiers import Tier


class TransferHandle(Protocol):
    """A transfer that has begun. See [Note: transfer handles]."""

    def wait(self) -> None:
        """Returns when it is complete; raises what went wrong."""
        ...


class CompletedTransfer(TransferHandle):
    """A transfer that is complete already."""

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = CompletedTransfer()


class TransferGroup(TransferHandle):
    """Several transfers as one."""

    def __init__(self, handles: Sequence[TransferHandle]) -> None:
        self._handles = tuple(handles)

    def wait(self) -> None:
        """Waits for all, even if one fails: no transfer may still touch memory that is about to be
        freed. Then raises the first error.
        """
        first: Exception | None = None
        # In the order in which they began: the last one is likely to be done when it is asked.
        for handle in self._handles:
            try:
                handle.wait()
            except Exception as error:  # noqa: BLE001, raised below, once nothing is under way any more
                first = first or error
        # Handles keep storages alive: they go with the first wait, also where a transfer failed.
        self._handles = ()
        if first is not None:
            raise first


class TransferThen(TransferHandle):
    """A transfer, and what is done with its bytes when it is complete, once.

    Args:
        handle: the transfer.
        act: keeps what it works on alive until then.
    """

    def __init__(self, handle: TransferHandle, act: Callable[[], object]) -> None:
        self._left: tuple[TransferHandle, Callable[[], object]] | None = handle, act

    def wait(self) -> None:
        """Waits, then acts and lets go of both; nothing the second time."""
        # Let go before the wait: a second `wait` after an error must not act on bytes that never
        # came.
        left, self._left = self._left, None
        if left is not None:
            handle, act = left
            # The transfer first: `act` reads what it brought.
            handle.wait()
            act()


class ByteHome(Protocol):
    """Home of a range of bytes: the one protocol for every place outside of a visit, in any tier;
    abstract.

    `read` and `write` are local: they concern the bytes that this process holds, and one process
    may call them alone. A write is cut to what this process holds. `visit` copies the whole to the
    device. If several processes share a home, `visit`, `gather` and `spread` are collective, so
    that no process may decide on one by itself.

    Attributes:
        tier: its tier.
        nbytes: its size.
        memory: the storage itself if the device can use it in place (device memory; host memory of
            a CPU), else None.
        has_spare_slot: writes do not change what reads see.
        has_versions: writes become current together, when they are published.
        is_dirty: a new version has been begun since `begin_version`.
        is_stored: its bytes lie in the regions of a store; of other homes a commit copies the
            bytes.
        bytes: the storage that holds all of it, if this process has one (copies of a stream may be
            under way in it); None: only `read` reaches the bytes.
        is_shared: processes share it, and this one holds a range.
        is_encoded: its bytes are not those of a visit, which is decoded from them.
        orders_reads: a read sees all writes that were begun before it, on whatever stream either is
            asked for; else the caller's stream orders them.
    """

    tier: Tier
    nbytes: int
    is_encoded: bool = False
    orders_reads: bool = False

    @property
    def memory(self) -> torch.UntypedStorage | None:
        """See above."""
        return None

    @property
    def has_spare_slot(self) -> bool:
        """See above."""
        return False

    def memory_at(self, device: torch.device) -> torch.UntypedStorage | None:
        """Returns the storage itself if the processor of that device can use it in place, else
        None.

        To the host it may be memory into or from which copies of a stream are still under way.
        """
        del device
        return None

    def place(self, offset: int) -> int:
        """Returns where a byte of the home that this process holds lies in `memory_at`."""
        # Whoever views that memory asks: a share's first byte is not the home's.
        return offset

    @property
    def is_shared(self) -> bool:
        """See above."""
        return False

    @property
    def own(self) -> ByteHome:
        """Home of the bytes that this process holds, the first at 0; this one, if it has all."""
        return self

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """Begins to copy a range of the home into a storage, which must live until the handle is
        done.
        """
        ...

    def read_next(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """Begins to read as `read` does what was written last, where writes do not change yet what
        reads see.
        """
        return self.read(offset, nbytes, into, into_offset)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """Begins to copy a range of a storage into the home; the storage must live and stay
        unchanged until the handle is done.
        """
        ...

    @property
    def has_versions(self) -> bool:
        """See above."""
        return False

    @property
    def is_dirty(self) -> bool:
        """See above."""
        return False

    @property
    def is_stored(self) -> bool:
        """See above."""
        return False

    @property
    def bytes(self) -> torch.UntypedStorage | None:
        """See above."""
        return None

    def begin_version(self) -> None:
        """Begins a new version, which later writes belong to."""

    def complete(self) -> None:
        """Completes the new version with the bytes of the current one that were not written."""

    def visit(self, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """Begins to copy the whole to the device, into a storage that must live until the transfer
        was waited for.
        """
        # Not by `read`: all processes must come, also one that holds the whole of a small home.
        return self.gather(0, self.nbytes, into, into_offset)

    def gather(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """Begins to copy a range of the home as `read` does, also what other processes hold:
        collective, as `visit`.
        """
        return self.read(offset, nbytes, into, into_offset)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Reduces a parameter's dense gradient over all processes that share the home, before it is
        added to the home's content. With one process the identity.

        Called once in each `accumulate` for each parameter with a gradient, in the block's order,
        by the computing thread. Ranks of a job exchange whole blocks instead
        (`gradients.GradientExchange`).
        """
        return gradient

    def spread(self) -> TransferHandle:
        """Begins to give what each process has changed of its share to all who have the whole;
        collective. With one process nothing.
        """
        return DONE

    def close(self) -> None:
        """Releases what it holds. Nothing may use it afterwards."""


def use_files(homes: Iterable[ByteHome]) -> bool:
    """Tells whether bytes of some of these homes are in files."""
    return any(home.tier.traits.is_files for home in homes)


def order_reads(homes: Iterable[ByteHome], device: torch.device) -> bool:
    """Tells whether all that a device reads from these homes is ordered behind writes; what rests
    there is not read.
    """
    return all(home.orders_reads or home.memory_at(device) is not None for home in homes)


def write_tensor(home: ByteHome, offset: int, dense: torch.Tensor) -> TransferHandle:
    """Begins to copy a dense tensor's bytes, in memory order, into the home from an offset on; see
    `ByteHome.write`.
    """
    start = int(dense.storage_offset()) * dense.element_size()
    return home.write(offset, dense.numel() * dense.element_size(), dense.untyped_storage(), start)


# The order in which a parameter's elements lie at home.
#
# In: a parameter. Out: strides without gaps, copies that lie so.


def is_dense(parameter: torch.nn.Parameter) -> bool:
    """Tells whether a parameter's elements lie as they would at home."""
    return parameter.layout is not torch.strided or parameter.stride() == dense_stride("", parameter)


def dense_stride(name: str, parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Returns the parameter's own stride if it is dense (channels-last stays channels-last), else
    the contiguous one.
    """
    if parameter.layout is not torch.strided:
        raise UnsupportedError(
            f"the parameter {name!r} has layout {parameter.layout}; memfit moves strided tensors only"
        )
    # empty_like with preserve_format gives the dense stride closest to the tensor's own.
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return tuple(torch.empty_like(meta).stride())


def dense_copy(tensor: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy whose elements lie with these strides."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)
    return copy.copy_(tensor)
