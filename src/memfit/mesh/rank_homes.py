"""Homes that ranks have in common: of which each holds a share, or which each has whole and updates
a share of.

In: local homes of any tier, the places where a block is cut. Out: `ByteHome`s whose visits gather.
Reads and writes are local; only visits, gathers and spreads are collective (`homes.home`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from memfit.core.layout import ALIGNMENT_BYTES, SPREAD_BYTES, BlockCut, Share
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.homes.exchanged_gradients import RegionPart, Sharing
from memfit.homes.factories import HomeRequest
from memfit.homes.home import DONE, ByteHome, TransferHandle
from memfit.homes.optimizer_states import StateRanks
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.mesh.agreement import optional_texts
from memfit.mesh.gradient_exchange import RankExchange
from memfit.mesh.rank_group import RankGroup
from memfit.mesh.transport import Group, free_exchanged, gather_in_place
from memfit.optimizers import StateTensor
from memfit.tensors.trees import bytes_view, new_storage


class RankHome(ByteHome):
    """A home of a region that ranks cut between them; abstract.

    Args:
        name: of the region, in messages.
        nbytes: of the whole.
        local: this rank's own home.
        group: the ranks.
        borders: where the share of each rank begins, and the end.
    """

    def __init__(self, name: str, nbytes: int, local: ByteHome, group: RankGroup, borders: Sequence[int]) -> None:
        assert len(borders) == group.size + 1 and borders[-1] == nbytes
        self.tier: Tier = local.tier
        self.nbytes = nbytes
        self.local = local
        self._name = name
        self._group = group
        self._borders = tuple(borders)
        kind = name.rpartition("/")[2]
        self._purpose = kind if kind in ("weight", "master", "gradient") else "state"
        self._first, self._last = borders[group.rank : group.rank + 2]

    @property
    def own(self) -> ByteHome:
        """See `ByteHome.own`."""
        return self.local

    @property
    def has_spare_slot(self) -> bool:
        """See `ByteHome`."""
        return self.local.has_spare_slot

    @property
    def has_versions(self) -> bool:
        """See `ByteHome`."""
        return self.local.has_versions

    @property
    def is_dirty(self) -> bool:
        """See `ByteHome`."""
        return self.local.is_dirty

    @property
    def is_stored(self) -> bool:
        """See `ByteHome`."""
        return self.local.is_stored

    @property
    def bytes(self) -> torch.UntypedStorage | None:
        """See `ByteHome`."""
        return self.local.bytes

    def memory_at(self, device: torch.device) -> torch.UntypedStorage | None:
        """See `ByteHome.memory_at`."""
        return self.local.memory_at(device)

    def begin_version(self) -> None:
        """See `ByteHome`."""
        self.local.begin_version()

    def complete(self) -> None:
        """See `ByteHome`."""
        self.local.complete()

    def close(self) -> None:
        """See `ByteHome`."""
        self.local.close()


class SharedHome(RankHome):
    """A home of which each rank holds its share."""

    @property
    def is_shared(self) -> bool:
        """See `ByteHome`."""
        return True

    def place(self, offset: int) -> int:
        """See `ByteHome.place`."""
        return offset - self._first

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`: within this rank's share."""
        assert self._first <= offset and offset + nbytes <= self._last, f"{self._name}: not this rank's share"
        return self.local.read(offset - self._first, nbytes, into, into_offset)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`: what lies in this rank's share."""
        first, last = self._own(offset, nbytes)
        if first >= last:
            return DONE
        return self.local.write(first - self._first, last - first, source, source_offset + first - offset)

    def gather(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.gather`."""
        first, last = self._own(offset, nbytes)
        came: TransferHandle = DONE
        if first < last:
            came = self.local.read(first - self._first, last - first, into, into_offset + first - offset)
        borders = [min(max(border - offset, 0), nbytes) for border in self._borders]

        def act(group: Group) -> None:
            # Here, not by whoever submits: a disk's read goes on beside what is computed.
            came.wait()
            gather_in_place(group, bytes_view(into, into_offset, nbytes), borders)
            self._group.received[self._purpose] += nbytes - max(last - first, 0)

        return self._group.submit(act)

    def _own(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Returns the part of a range that is in this rank's share; empty if it ends before it
        begins.
        """
        return max(offset, self._first), min(offset + nbytes, self._last)


class SpreadHome(RankHome):
    """A home that each rank has whole, and updates its share of."""

    @property
    def memory(self) -> torch.UntypedStorage | None:
        """See `ByteHome`."""
        return self.local.memory

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        return self.local.read(offset, nbytes, into, into_offset)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`."""
        return self.local.write(offset, nbytes, source, source_offset)

    def spread(self) -> TransferHandle:
        """See `ByteHome.spread`. In memory in place, else in pieces of 1 MiB a rank."""
        return self._group.submit(self._spread)

    def _spread(self, group: Group) -> None:
        whole = self.local.bytes
        if whole is not None:
            gather_in_place(group, bytes_view(whole, 0, self.nbytes), self._borders)
            self._group.received[self._purpose] += self.nbytes - self._last + self._first
            return
        shares = list(zip(self._borders, self._borders[1:], strict=False))
        longest = max(last - first for first, last in shares)
        staged = new_storage(min(SPREAD_BYTES, longest) * self._group.size)
        for start in range(0, longest, SPREAD_BYTES):
            parts = [(min(first + start, last), min(first + start + SPREAD_BYTES, last)) for first, last in shares]
            places = [0]
            for first, last in parts:
                places.append(places[-1] + last - first)
            first, last = parts[self._group.rank]
            self.local.read_next(first, last - first, staged, places[self._group.rank]).wait()
            gather_in_place(group, bytes_view(staged, 0, places[-1]), places)
            for rank, (first, last) in enumerate(parts):
                if rank != self._group.rank and last > first:
                    # Waited for: the next piece comes into the same memory.
                    self.local.write(first, last - first, staged, places[rank]).wait()
        self._group.received[self._purpose] += self.nbytes - self._last + self._first
        free_exchanged(bytes_view(staged, 0, staged.nbytes()))


# Sharing of a job's homes over the ranks of the data axis.
#
# In: a plan, the places where its blocks are cut, the ranks. Out: a `Sharing`, which whoever places
# homes asks.


class RankSharing(Sharing):
    """Sharing as a plan says.

    Args:
        group: the ranks.
        plan: the decisions.
        names: of the blocks, by index.
        cuts: by block index.
    """

    def __init__(self, group: RankGroup, plan: Plan, names: Sequence[str], cuts: Sequence[BlockCut]) -> None:
        self._group = group
        self._homes: list[BlockPlan] = [plan.block(name) for name in names]
        self._cuts = tuple(cuts)
        self._states = _GatheredStates(group, self._cuts)

    def states(self, block: int) -> StateRanks | None:
        """See `Sharing.states`."""
        return None if self._homes[block].states_over is Share.WHOLE else self._states

    def held(self, block: int) -> tuple[range, ...]:
        """See `Sharing.held`."""
        cut = self._cuts[block]
        if self._homes[block].states_over is Share.WHOLE:
            return tuple(range(numel) for numel in cut.numels)
        return cut.held(self._group.rank)

    def part(self, block: BlockWeights, tag: str) -> RegionPart:
        """See `Sharing.part`."""
        if not self._is_cut(block, tag):
            nbytes = block.nbytes if tag == "weight" else block.master_nbytes
            return RegionPart(first=0, nbytes=nbytes, elements=tuple(range(slot.numel) for slot in block.slots))
        first, last = self._borders(block, tag)[self._group.rank : self._group.rank + 2]
        # A region has at least a page, also where nothing of the block is this rank's.
        nbytes = max(last - first, ALIGNMENT_BYTES)
        return RegionPart(first=first, nbytes=nbytes, elements=self._cuts[block.index].held(self._group.rank))

    def request(self, block: BlockWeights, request: HomeRequest) -> HomeRequest:
        """See `Sharing.request`."""
        if not self._is_cut(block, request.tag):
            return request
        part = self.part(block, request.tag)
        first, last = part.first, part.first + part.nbytes
        ends = tuple(end - first for end in request.ends if first < end <= last)
        return replace(request, nbytes=part.nbytes, ends=ends)

    def home(self, block: BlockWeights, request: HomeRequest, local: ByteHome) -> ByteHome:
        """See `Sharing.home`."""
        name, borders = request.region, self._borders(block, request.tag)
        if self._is_cut(block, request.tag):
            return SharedHome(name, request.nbytes, local, self._group, borders)
        if request.tag == "weight" and self._homes[block.index].spreads:
            return SpreadHome(name, request.nbytes, local, self._group, borders)
        return local

    def exchange(self, *, keeps_norms: bool, keeps_peaks: bool) -> RankExchange:
        """See `Sharing.exchange`."""
        return RankExchange(self._group, self._cuts, keeps_norms=keeps_norms, keeps_peaks=keeps_peaks)

    def _is_cut(self, block: BlockWeights, tag: str) -> bool:
        homes = self._homes[block.index]
        over = {"weight": homes.weights_over, "master": homes.states_over, "gradient": homes.gradients_over}
        # States are laid out by what a rank holds of them already (`BlockStates`).
        return over.get(tag, Share.WHOLE) is Share.DATA

    def _borders(self, block: BlockWeights, tag: str) -> tuple[int, ...]:
        sizes = [slot.nbytes if tag == "weight" else slot.master_nbytes for slot in block.slots]
        return self._cuts[block.index].borders(sizes)


class _GatheredStates(StateRanks):
    """Optimizer states of which each rank has a share."""

    def __init__(self, group: RankGroup, cuts: Sequence[BlockCut]) -> None:
        self._group = group
        self._cuts = cuts

    def first_known(
        self, numbers: Mapping[str, Any] | None, block: BlockWeights, slot: ParameterSlot
    ) -> dict[str, Any] | None:
        """See `StateRanks.first_known`."""
        found = optional_texts(self._group, None if numbers is None else json.dumps(_written(numbers)))
        text = next((text for text in found if text is not None), None)
        return None if text is None else _read(json.loads(text))

    def assemble(
        self,
        own: torch.Tensor | None,
        numel: int,
        dtype: torch.dtype,
        block: BlockWeights,
        slot: ParameterSlot,
        *,
        is_like: bool,
    ) -> torch.Tensor:
        """See `StateRanks.assemble`."""
        rank, borders = self._group.rank, self._borders(block, slot, numel, is_like=is_like)
        whole = torch.empty(numel, dtype=dtype, device=slot.parameter.device)
        if own is not None and own.numel():
            whole[borders[rank] : borders[rank + 1]] = own
        self._group.submit(lambda group: gather_in_place(group, whole, borders)).wait()
        return whole

    def home(self, local: ByteHome | None, tensor: StateTensor, block: BlockWeights, slot: ParameterSlot) -> ByteHome:
        """See `StateRanks.home`."""
        size = (tensor.dtype or torch.float32).itemsize
        borders = self._borders(block, slot, tensor.numel, is_like=tensor.shape_kind == "like")
        name, own = f"{slot.name}.{tensor.key}", local or _NoBytes()
        return SharedHome(name, tensor.numel * size, own, self._group, [border * size for border in borders])

    def _borders(self, block: BlockWeights, slot: ParameterSlot, numel: int, *, is_like: bool) -> list[int]:
        """Returns the elements at which each rank's part of a state tensor begins, and the end."""
        index, cut = block.slots.index(slot), self._cuts[block.index]
        held = [len(cut.held(rank)[index]) for rank in range(self._group.size)]
        return [0, *accumulate(held if is_like else [numel if each else 0 for each in held])]


class _NoBytes(ByteHome):
    """A home of nothing, on a rank that has no part of a tensor."""

    tier = Tier.DEVICE
    nbytes = 0

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        assert not nbytes
        return DONE

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`."""
        assert not nbytes
        return DONE


def _written(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the numbers of a state as JSON values; a tensor of one number with its dtype."""
    return {
        key: {"tensor": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "value": value.item()}
        if isinstance(value, torch.Tensor)
        else value
        for key, value in numbers.items()
    }


def _read(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: torch.full(value["shape"], value["value"], dtype=getattr(torch, value["tensor"]))
        if isinstance(value, dict)
        else value
        for key, value in numbers.items()
    }
