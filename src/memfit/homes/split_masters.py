"""Split masters: the low bits of fp32 masters beside bf16 weights.

In: a block's bf16 weights and a home for the low bits. Out: a home of fp32 masters that holds 17
bits an element beside the weight's 16.

[Note: sixteen bits and one]
The weight is its master rounded to bf16 (to nearest, ties to even), so the master's bits, read as
an integer, lie at most half a unit of the weight away from it: `master = (weight << 16) + d` with
-32768 <= d <= 32767, or d = +32768 where a tie was rounded down to an even weight. (The sum carries
into the exponent as rounding does: this holds across powers of two, for subnormals, at infinity and
on both sides of zero.) Those are 65,537 values for an even weight, so that no scheme can do with 16
bits. d is kept as a signed 16-bit *difference*, and +32768 as -32768 with a *mark*, a bit of its
own, packed eight to a byte. Marks are rare (one in 131,072 for random digits). Only the payload of
a NaN is lost; it stays a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import BFloat16, Float32, Int16, Int64, UInt8
from torch import Tensor

from memfit.core.layout import split_layout
from memfit.core.tiers import Tier
from memfit.homes import DONE, ByteHome, TransferGroup, TransferHandle, TransferThen
from memfit.homes.weights import BlockWeights, ParameterSlot, master_pieces
from memfit.tensors.trees import new_storage, typed_view

_TIE = 1 << 15
_ROW = 512


def split(master: Float32[Tensor, " n"]) -> tuple[Int16[Tensor, " n"], UInt8[Tensor, " packed"]]:
    """Returns the differences of masters from the weights that are rounded from them, and the marks
    of ties that were rounded down.

    Memory: the results.

    Args:
        master: contiguous.

    Returns:
        Tensors of n and ceil(n / 8) elements. See [Note: sixteen bits and one].
    """
    bits = master.view(torch.int32)
    # the lower half: a weight's is zero, so that it is the difference modulo 2**16
    difference = bits.to(torch.int16)
    marks = torch.zeros(-(-master.numel() // 8), dtype=torch.uint8, device=master.device)
    ties = _find(difference, torch.amin, lambda some: some == -_TIE)
    # A tie goes to the even neighbour: down from an even upper half. NaNs do not round.
    ties = ties[(bits[ties] & 2 * _TIE == 0) & ~master[ties].isnan()]
    marks.index_add_(0, ties >> 3, (1 << (ties & 7)).to(torch.uint8))
    return difference, marks


def _find(
    values: Tensor, extreme: Callable[..., Tensor], is_wanted: Callable[[Tensor], Tensor]
) -> Int64[Tensor, " found"]:
    """Returns the indices of wanted values, which are rare and the extreme of all: rows whose
    extreme is another value are skipped.
    """
    whole = values.numel() // _ROW * _ROW
    rows = values[:whole].view(-1, _ROW)
    likely = is_wanted(extreme(rows, dim=1)).nonzero().squeeze(1)
    row, column = is_wanted(rows[likely]).nonzero(as_tuple=True)
    rest = is_wanted(values[whole:]).nonzero().squeeze(1) + whole
    return torch.cat([likely[row] * _ROW + column, rest])


def join(
    weight: BFloat16[Tensor, " n"],
    difference: Int16[Tensor, " n"],
    marks: UInt8[Tensor, " packed"],
    into: Float32[Tensor, " n"],
    *,
    skip: int = 0,
) -> None:
    """Inverts `split`, bit for bit (except a NaN's payload).

    Memory: 4 bytes an element for a moment.

    Args:
        weight: the master rounded to bf16; contiguous, like the next one.
        difference: difference of the master from it.
        marks: the bytes that cover these elements.
        into: receives the masters.
        skip: number of marks in the first byte that belong to elements before the first.
    """
    into.copy_(weight)  # widening a bf16 number is shifting its bits
    bits = into.view(torch.int32)
    bits.add_(difference)
    marked = _find(marks, torch.amax, lambda some: some != 0)
    if marked.numel():
        within = torch.arange(8, device=marks.device)
        is_set = (marks[marked].unsqueeze(1) >> within.to(torch.uint8)) & 1
        places = (marked.unsqueeze(1) * 8 + within - skip)[is_set.bool()]
        places = places[(places >= 0) & (places < bits.numel())]
        bits.index_add_(0, places, torch.full_like(places, 2 * _TIE, dtype=torch.int32))


def rest_nbytes(block: BlockWeights) -> int:
    """Returns the bytes of a block's split masters beside its weights."""
    return _layout(block)[1]


def rest_tensors(block: BlockWeights) -> list[tuple[str, torch.dtype, int, int]]:
    """Returns (parameter, dtype, elements, offset) of each difference, or whole weight, in the
    `rest_nbytes` bytes; marks are left out.
    """
    places, _ = _layout(block)
    return [
        (slot.name, slot.dtype if slot.dtype == slot.master_dtype else torch.int16, slot.numel, place[0])
        for slot, place in zip(block.slots, places, strict=True)
    ]


def rest_ends(block: BlockWeights) -> list[int]:
    """Returns the offsets at which the differences and the marks of each parameter end, each on a
    page of its own.
    """
    places, _ = _layout(block)
    ends: list[int] = []
    for slot, (differences, marks) in zip(block.slots, places, strict=True):
        if slot.dtype == slot.master_dtype:
            ends.append(differences + slot.master_nbytes)
        else:
            ends += [differences + slot.nbytes, marks + -(-slot.nbytes // 16)]
    return ends


def _layout(block: BlockWeights) -> tuple[tuple[tuple[int, int], ...], int]:
    return split_layout([(slot.nbytes, slot.master_nbytes) for slot in block.slots])


class SplitMasters(ByteHome):
    """Home that is read and written as fp32 masters, and stores their difference from the weights.

    The weight is read from the block during a visit, else from the weights' home. So a writer must
    write the rounded weight there as well (as `homes.weights`, [Note: masters], requires of every
    writer). A range that is read or written lies within one parameter, in its memory order; a
    written one begins at a multiple of eight elements.

    A weight that is its own master (an integer, fp64) is stored whole.

    Memory: during a read or write, pieces of 512 Ki elements: 5 bytes an element to read, 3 to
    write.

    Args:
        block: the block.
        weights: their home.
        rest: a home of `rest_nbytes(block)` bytes.
    """

    def __init__(self, block: BlockWeights, weights: ByteHome, rest: ByteHome) -> None:
        self.tier: Tier = rest.tier
        self.nbytes = block.master_nbytes
        self.rest = rest
        self._block = block
        self._weights = weights
        places, nbytes = _layout(block)
        assert nbytes == rest.nbytes
        self._places = dict(zip((slot.name for slot in block.slots), places, strict=True))

    @property
    def has_spare_slot(self) -> bool:
        """See `ByteHome`."""
        return self.rest.has_spare_slot

    @property
    def has_versions(self) -> bool:
        """See `ByteHome`."""
        return self.rest.has_versions

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        handles: list[TransferHandle] = []
        for slot, first, count, at in master_pieces(self._block, offset, nbytes):
            place = self._places[slot.name]
            if slot.dtype == slot.master_dtype:
                size = slot.dtype.itemsize
                handles.append(self.rest.read(place[0] + size * first, size * count, into, into_offset + at))
                continue
            target = typed_view(into, into_offset + at, slot.master_dtype, (count,))
            TransferGroup(handles[:-1]).wait()
            handles = [*handles[-1:], self._read(slot, place, first, count, target)]
        return TransferGroup(handles) if handles else DONE

    def _read(
        self, slot: ParameterSlot, place: tuple[int, int], first: int, count: int, into: Tensor
    ) -> TransferHandle:
        differences, marks = place
        skip = first % 8
        packed = -(-(skip + count) // 8)
        difference = new_storage(2 * count, into.device)
        mark = new_storage(packed, into.device)
        coming = [
            self.rest.read(differences + 2 * first, 2 * count, difference),
            self.rest.read(marks + first // 8, packed, mark),
        ]
        here, at_home = self._block.arrived_storage, self._weights.memory_at(into.device)
        if here is not None and here.device.type == into.device.type:
            weight = slot.flat_view(here)[first : first + count]
        elif at_home is not None:
            weight = typed_view(at_home, slot.offset_bytes + 2 * first, slot.dtype, (count,))
        else:
            storage = new_storage(2 * count, into.device)
            coming.append(self._weights.read(slot.offset_bytes + 2 * first, 2 * count, storage))
            weight = typed_view(storage, 0, slot.dtype, (count,))
        parts = weight, typed_view(difference, 0, torch.int16, (count,)), typed_view(mark, 0, torch.uint8, (packed,))
        # The weight must not change before this is waited for.
        return TransferThen(TransferGroup(coming), partial(join, *parts, into, skip=skip))

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`. The writer writes the weights themselves."""
        handles: list[TransferHandle] = []
        for slot, first, count, at in master_pieces(self._block, offset, nbytes):
            differences, marks = self._places[slot.name]
            if slot.dtype == slot.master_dtype:
                size = slot.dtype.itemsize
                handles.append(self.rest.write(differences + size * first, size * count, source, source_offset + at))
                continue
            assert first % 8 == 0 and (count % 8 == 0 or first + count == slot.numel)
            difference, mark = split(typed_view(source, source_offset + at, slot.master_dtype, (count,)))
            TransferGroup(handles).wait()
            handles = [
                self.rest.write(differences + 2 * first, 2 * count, difference.untyped_storage()),
                self.rest.write(marks + first // 8, mark.numel(), mark.untyped_storage()),
            ]
        return TransferGroup(handles) if handles else DONE
