"""Layout of a rank's store, where ranks share homes: the regions of a process alone, cut.

In: the regions of the whole, what this rank has of each. Out: the regions of its store, and which
elements of which tensors lie where in them, by which any number of ranks finds what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from memfit.core.errors import StoreError
from memfit.homes.optimizer_states import BlockStates, StateSlot
from memfit.homes.regions import master_region, state_region, weight_region
from memfit.homes.sharing import RegionPart, Sharing
from memfit.homes.weights import BlockWeights
from memfit.store import RegionSpec, TensorPlace


@dataclass(frozen=True)
class TensorShare:
    """Elements of a tensor that a rank's store holds, one after the other in a region.

    Attributes:
        name: of the tensor.
        first: element.
        count: of elements.
        offset: of the first one in the region, in bytes.
        record_elements: elements that are stored together.
        record_bytes: their bytes.
    """

    name: str
    first: int
    count: int
    offset: int
    record_elements: int
    record_bytes: int

    @property
    def last(self) -> int:
        """The element behind the last one."""
        return self.first + self.count

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Returns offset and bytes, in the region, of elements [first, last); the first begins a
        record, and the last ends one, or the tensor.
        """
        begin = (first - self.first) // self.record_elements * self.record_bytes
        return self.offset + begin, -(-(last - first) // self.record_elements) * self.record_bytes


Shares = Mapping[str, Sequence[TensorShare]]
"""By region, what a rank's store holds."""


def rank_regions(
    regions: Mapping[str, RegionSpec], blocks: Sequence[BlockWeights], sharing: Sharing
) -> dict[str, RegionSpec]:
    """Returns a rank's regions: those of a process alone, with weights and masters cut. States are
    laid out by what a rank has of them already.
    """
    found = dict(regions)
    for block in blocks:
        for region, tag in ((weight_region(block.name), "weight"), (master_region(block.name), "master")):
            spec = regions.get(region)
            if spec is not None:
                part = sharing.part(block, tag)
                places = zip(block.slots, part.elements, spec.tensors, strict=True)
                tensors = [_placed(place, part, held, slot.numel) for slot, held, place in places if held]
                found[region] = replace(spec, nbytes=part.nbytes, tensors=tuple(tensors))
    return found


def _placed(place: TensorPlace, part: RegionPart, held: range, numel: int) -> TensorPlace:
    offset = place.offset + held.start * place.torch_dtype.itemsize - part.first
    return replace(place, offset=offset, shape=place.shape if len(held) == numel else (len(held),))


def shares_of(
    regions: Mapping[str, RegionSpec],
    blocks: Sequence[BlockWeights],
    states: Mapping[int, BlockStates],
    sharing: Sharing,
) -> Shares:
    """Returns which elements a rank's regions hold.

    Args:
        regions: of the rank.
        blocks: of the model.
        states: by block index.
        sharing: of the homes.
    """
    found: dict[str, list[TensorShare]] = {}
    for block in blocks:
        for region, tag in ((weight_region(block.name), "weight"), (master_region(block.name), "master")):
            if region in regions:
                held = {s.name: e for s, e in zip(block.slots, sharing.part(block, tag).elements, strict=True)}
                found[region] = [_of_place(place, held[place.name]) for place in regions[region].tensors]
        if state_region(block.name) in regions:
            found[state_region(block.name)] = list(_of_states(states[block.index]))
    return found


def _of_place(place: TensorPlace, held: range) -> TensorShare:
    return TensorShare(place.name, held.start, len(held), place.offset, 1, place.torch_dtype.itemsize)


def _of_states(states: BlockStates) -> Iterator[TensorShare]:
    for name, slots in states.slots.items():
        for state in slots:
            yield TensorShare(f"{name}.{state.key}", state.first, state.numel, state.offset_bytes, *_record(state))


def _record(state: StateSlot) -> tuple[int, int]:
    if state.codec is None:
        return 1, state.dtype.itemsize
    return state.codec.records.elements, state.codec.records.nbytes


def write_shares(shares: Shares) -> dict[str, Any]:
    """Returns shares as values of a small state."""
    return {region: [list(astuple(share)) for share in found] for region, found in shares.items()}


def read_shares(found: Any) -> Shares:
    """Returns the shares that `write_shares` wrote.

    Raises:
        StoreError: the values are damaged.
    """
    kinds = [str, int, int, int, int, int]
    if not isinstance(found, dict) or not all(
        isinstance(entry, list) and [type(value) for value in entry] == kinds and min(entry[1:4]) >= 0 < min(entry[4:])
        for entries in found.values()
        for entry in (entries if isinstance(entries, list) else [None])
    ):
        raise StoreError("the state of the step has no proper 'shares': it is damaged, or of another version of memfit")
    return {region: [TensorShare(*entry) for entry in entries] for region, entries in found.items()}
