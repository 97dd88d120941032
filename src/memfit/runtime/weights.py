"""Blocks of weights and their visits.

In: the parameters of a block and a home. Out: the same parameters as views of one flat buffer that has its bytes while the block visits.

[Note: visits by storage identity]
A block's parameters are views of one storage. A visit gives that storage its bytes (`resize_(n)`) and fills it in one transfer; release
takes the bytes away (`resize_(0)`). The storage *object* stays, so whatever autograd saved (the weight, its transpose, any view) finds the
bytes again at the next visit: saved references cost nothing and nothing is saved twice. `resize_` and a transfer into the storage do
not touch version counters, so autograd's in-place check keeps working on what the user does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfit.core.errors import UnsupportedError
from memfit.core.layout import flat_layout
from memfit.core.plan import Tier
from memfit.runtime.guard import mark_away, mark_present
from memfit.runtime.homes.base import ByteHome, Ticket
from memfit.runtime.trees import new_storage, typed_view


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one parameter lies in its block's flat buffer, and its dense layout there."""

    name: str
    parameter: torch.nn.Parameter
    offset_bytes: int
    nbytes: int
    numel: int
    requires_grad: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, storage: torch.UntypedStorage, base_bytes: int = 0) -> torch.Tensor:
        """The parameter's place in a storage laid out as the block's flat buffer."""
        return typed_view(storage, base_bytes + self.offset_bytes, self.dtype, self.shape, self.stride)

    def flat_view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same bytes as a 1-D tensor of `numel` elements, in memory order."""
        return typed_view(storage, self.offset_bytes, self.dtype, (self.numel,))


class BlockWeights:
    """One block's parameters, their flat buffer and their home.

    Life: made over ordinary parameters (nothing moves) -> `move_in(home)` (bytes go to the flat layout in the home) -> any number of
    fetch / wait / release -> `move_out` (the parameters own ordinary memory again).

    Memory: the flat buffer (`nbytes`) while it visits or lives on the device; nothing while away.
    """

    def __init__(self, index: int, name: str, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.index = index
        self.name = name
        offsets, self.nbytes = flat_layout([p.nbytes for _, p in parameters])
        self.slots = tuple(
            Slot(
                name=n,
                parameter=p,
                offset_bytes=offset,
                nbytes=p.nbytes,
                numel=p.numel(),
                requires_grad=p.requires_grad,
                dtype=p.dtype,
                shape=tuple(p.shape),
                stride=_dense_stride(n, p),
            )
            for (n, p), offset in zip(parameters, offsets, strict=True)
        )
        self.home: ByteHome | None = None
        self._storage: torch.UntypedStorage | None = None
        self._is_here = True
        self._arriving: Ticket | None = None

    @property
    def storage(self) -> torch.UntypedStorage:
        """The flat buffer; has no bytes while the block is away."""
        assert self._storage is not None, f"block {self.name} has not moved in"
        return self._storage

    @property
    def is_here(self) -> bool:
        """The bytes are on the device, or arriving."""
        return self._is_here

    @property
    def travels(self) -> bool:
        """The home is not the device."""
        return self.home is not None and self.home.tier is not Tier.DEVICE

    def move_in(self, home: ByteHome) -> None:
        """Moves the parameters' bytes into the home and makes the parameters views of the flat buffer.

        Memory: for a home that is away, the peak does not grow: each parameter is freed once written. A device home is the flat buffer
        itself and costs one block more for a moment.
        """
        resting = home.memory if home.tier is Tier.DEVICE else None
        assert resting is not None or home.tier is not Tier.DEVICE
        device = self.slots[0].parameter.device
        for slot in self.slots:
            p = slot.parameter
            with torch.no_grad():
                if resting is not None:
                    slot.view(resting).copy_(p.data)
                else:
                    dense = p.data if tuple(p.stride()) == slot.stride else _dense_copy(p.data, slot.stride)
                    first = int(dense.storage_offset()) * dense.element_size()
                    home.write(slot.offset_bytes, slot.nbytes, dense.untyped_storage(), first).wait()
                    del dense
                p.data = torch.empty(0, dtype=p.dtype, device=p.device)
        # `set_` wants the storage at full size; its pages are not touched before they are given back.
        storage = resting if resting is not None else new_storage(self.nbytes, device)
        for slot in self.slots:
            slot.parameter.data = slot.view(storage)
        self._storage, self.home = storage, home
        if resting is None:
            self._leave()

    def move_out(self) -> None:
        """Gives every parameter ordinary memory of its own again; the block no longer travels.

        Memory: the block's bytes, for good; one parameter more for a moment.
        """
        self.fetch()
        self.wait()
        for slot in self.slots:
            own = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=slot.parameter.device)
            slot.parameter.data = own.copy_(slot.view(self.storage))
        self.storage.resize_(0)
        self._storage, self.home = None, None

    def fetch(self) -> None:
        """Begins a visit; does nothing if the block is here or coming."""
        if self._is_here:
            return
        assert self.home is not None
        self.storage.resize_(self.nbytes)
        self._arriving = self.home.read(0, self.nbytes, self.storage)
        self._is_here = True

    def wait(self) -> None:
        """Returns when the bytes are here; the parameters are ordinary ones again."""
        if self._arriving is not None:
            arriving, self._arriving = self._arriving, None
            try:
                arriving.wait()
            except Exception:
                self._leave()
                raise
            for slot in self.slots:
                mark_present(slot.parameter)

    def release(self) -> None:
        """Ends a visit: the device bytes are given up. What was changed must have been written home before."""
        if not self._is_here or not self.travels:
            return
        if self._arriving is not None:  # a visit that nobody used: the transfer must end before its memory goes
            arriving, self._arriving = self._arriving, None
            try:
                arriving.wait()
            finally:
                self._leave()
            return
        self._leave()

    def write_home(self) -> Ticket | None:
        """Begins to write the visiting bytes home, after they were changed on the device."""
        if not self.travels:
            return None
        assert self.home is not None
        return self.home.write(0, self.nbytes, self.storage)

    def versions(self) -> tuple[int, ...]:
        """Version counters of the parameters: equal if nobody wrote through torch operations in between."""
        return tuple(slot.parameter._version for slot in self.slots)

    def _leave(self) -> None:
        self.storage.resize_(0)
        self._is_here = False
        for slot in self.slots:
            mark_away(slot.parameter, slot.name, self.name)


def _dense_stride(name: str, parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The parameter's own stride where it is dense (channels-last stays channels-last), else the contiguous one."""
    if parameter.layout is not torch.strided:
        raise UnsupportedError(
            f"the parameter {name!r} has layout {parameter.layout}; memfit moves strided tensors only"
        )
    # empty_like with preserve_format gives the dense stride closest to the tensor's own.
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return tuple(torch.empty_like(meta).stride())


def _dense_copy(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
