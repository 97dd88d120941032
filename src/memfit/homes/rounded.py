"""Training in bf16 without masters.

In: a block's bf16 weights. Out: a home of fp32 masters that holds nothing of its own.

[Note: weights without masters]
An update reads the bf16 weight as its master, changes that in fp32 with the user's own optimizer,
and rounds the result stochastically back to bf16 (`tensors.noise`). An update smaller than half a
unit of the weight, which nearest rounding would lose every time, is then kept on average: the
expected weight is the fp32 one, and a step adds noise of at most a unit (2^-8 to 2^-7 of the
weight). Two bytes a parameter rest in place of six. Source: Gupta et al. 2015, "Deep Learning with
Limited Numerical Precision", section 3; Zamirai et al. 2020, "Revisiting BFloat16 Training",
section 4.
"""

from __future__ import annotations

from functools import partial

import torch

from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.tiers import Tier
from memfit.homes import DONE, ByteHome, TransferGroup, TransferHandle, TransferThen
from memfit.homes.weights import BlockWeights, master_pieces
from memfit.tensors.trees import new_storage, typed_view


class RoundedMasters(ByteHome):
    """Home of masters without bytes of its own: reads return the weights, widened, and writes are
    dropped.

    The weight is read from the block during a visit, else from the weights' home. A writer writes
    the rounded weight there as well, as `homes.weights`, [Note: masters], requires of every
    writer.

    Memory: during a read, pieces of 512 Ki elements of 2 bytes if the weights are in another memory
    than the destination.

    Args:
        block: the block.
        weights: their home.
    """

    def __init__(self, block: BlockWeights, weights: ByteHome) -> None:
        self.tier: Tier = weights.tier
        self.nbytes = block.master_nbytes
        self._block = block
        self._weights = weights

    @property
    def has_spare_slot(self) -> bool:
        """See `ByteHome`."""
        return self._weights.has_spare_slot

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        handles: list[TransferHandle] = []
        here = self._block.arrived_storage
        if here is not None and here.device.type != into.device.type:
            here = None  # the host updates: what visits the device is not its to read
        at_home = self._weights.memory_at(into.device)
        for slot, first, count, at in master_pieces(self._block, offset, nbytes):
            target = typed_view(into, into_offset + at, slot.master_dtype, (count,))
            if here is not None:
                target.copy_(slot.flat_view(here)[first : first + count])
                continue
            size = slot.dtype.itemsize
            if at_home is not None:
                # In place, when it is waited for: until then copies into the home may be under way.
                resting = typed_view(at_home, slot.offset_bytes + size * first, slot.dtype, (count,))
                handles.append(TransferThen(DONE, partial(target.copy_, resting)))
                continue
            staged = new_storage(size * count, into.device)
            coming = self._weights.read(slot.offset_bytes + size * first, size * count, staged)
            TransferGroup(handles[:-1]).wait()  # two pieces are staged at most
            weight = typed_view(staged, 0, slot.dtype, (count,))
            handles = [*handles[-1:], TransferThen(coming, partial(target.copy_, weight))]
        return TransferGroup(handles) if handles else DONE

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """Does nothing: the writer writes the weights."""
        return DONE


def round_masters(masters: ByteHome, block: BlockWeights, home: ByteHome) -> None:
    """Makes a block's weights from its masters, as every update does. Costs two pieces of 2 MiB."""
    device = block.slots[0].parameter.device
    for slot in block.slots:
        size = slot.master_dtype.itemsize
        for start in range(0, slot.numel, PIECE_ELEMENTS):
            piece = torch.empty(min(PIECE_ELEMENTS, slot.numel - start), dtype=slot.master_dtype, device=device)
            # Gathered: processes that share the masters all make the weights again.
            masters.gather(slot.master_offset_bytes + start * size, piece.nbytes, piece.untyped_storage()).wait()
            rounded = piece.to(slot.dtype)
            at = slot.offset_bytes + start * slot.dtype.itemsize
            home.write(at, rounded.nbytes, rounded.untyped_storage()).wait()  # frees it next
