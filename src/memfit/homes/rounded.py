"""Training in bf16 without masters.

In: a block's bf16 weights. Out: a home of fp32 masters that holds nothing of its own.

[Note: weights without masters]
An update reads the bf16 weight as its master, changes that in fp32 with the user's own optimizer, and rounds the result stochastically back to bf16
(`tensors.noise`). An update smaller than half a unit of the weight, which nearest rounding would lose every time, is then kept on average: the expected weight
is the fp32 one, and a step adds noise of at most a unit (2^-8 to 2^-7 of the weight). Two bytes a parameter rest in place of six. Source: Gupta et al. 2015,
"Deep Learning with Limited Numerical Precision", section 3; Zamirai et al. 2020, "Revisiting BFloat16 Training", section 4.
"""

from __future__ import annotations

from functools import partial

import torch

from memfit.core.tiers import Tier
from memfit.homes import DONE, ByteHome, Then, Tickets, TransferHandle
from memfit.homes.weights import BlockWeights, master_pieces
from memfit.tensors.trees import new_storage, typed_view


class RoundedMasters(ByteHome):
    """A home of masters to those who read and write it; what it gives are the weights, widened, and what is written to it rests nowhere.

    The weight is taken from the block, where it visits, or from the weights' home. Whoever writes here writes the rounded weight there, as
    `homes.weights`, [Note: masters], says of every writer.

    Memory: while it is read, pieces of 512 Ki elements of 2 bytes where the weights lie elsewhere than what they are read into.

    Args:
        block: its weights.
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
        tickets: list[TransferHandle] = []
        here = self._block.settled_storage
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
                tickets.append(Then(DONE, partial(target.copy_, resting)))
                continue
            staged = new_storage(size * count, into.device)
            coming = self._weights.read(slot.offset_bytes + size * first, size * count, staged)
            Tickets(tickets[:-1]).wait()  # two pieces are staged at most
            weight = typed_view(staged, 0, slot.dtype, (count,))
            tickets = [*tickets[-1:], Then(coming, partial(target.copy_, weight))]
        return Tickets(tickets) if tickets else DONE

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """Nothing to do: the weights are the writer's to write."""
        return DONE
