"""Sharing of a job's homes over the ranks of the data axis.

In: a plan, the places where its blocks are cut, the ranks. Out: a `Sharing`, which whoever places
homes asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from memfit.core.layout import ALIGNMENT_BYTES
from memfit.core.plan import BlockPlan, Plan
from memfit.core.shares import BlockCut, Share
from memfit.core.tiers import Tier
from memfit.distributed.agreement import optional_texts
from memfit.distributed.gradient_exchange import RankExchange
from memfit.distributed.rank_group import RankGroup
from memfit.distributed.rank_homes import SharedHome, SpreadHome
from memfit.distributed.transport import gather_in_place
from memfit.homes.factories import HomeRequest
from memfit.homes.home import DONE, ByteHome, TransferHandle
from memfit.homes.sharing import RegionPart, Sharing
from memfit.homes.state_ranks import StateRanks
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.optimizers import StateTensor


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
