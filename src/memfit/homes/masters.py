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

from memfit import devices
from memfit.core.layout import PIECE_ELEMENTS, split_layout
from memfit.core.tiers import Tier
from memfit.homes import DONE, ByteHome, TransferGroup, TransferHandle, TransferThen
from memfit.homes.weights import BlockWeights, ParameterSlot, master_pieces
from memfit.tensors.noise import RoundingNoise, round_stochastically
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


# Training in bf16 without masters.
#
# In: a block's bf16 weights. Out: a home of fp32 masters that holds nothing of its own.
#
# [Note: weights without masters]
# An update reads the bf16 weight as its master, changes that in fp32 with the user's own optimizer,
# and rounds the result stochastically back to bf16 (`tensors.noise`). An update smaller than half a
# unit of the weight, which nearest rounding would lose every time, is then kept on average: the
# expected weight is the fp32 one, and a step adds noise of at most a unit (2^-8 to 2^-7 of the
# weight). Two bytes a parameter rest in place of six. Source: Gupta et al. 2015, "Deep Learning
# with Limited Numerical Precision", section 3; Zamirai et al. 2020, "Revisiting BFloat16 Training",
# section 4.


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


# Speed of what an update does with bf16 weights beside the optimizer's class: joining and splitting
# masters, rounding stochastically.
#
# In: a device. Out: parameters a second, without what launching operations takes: that is counted
# by pieces (`step.work_amounts`).

_FEW = 512
_TRIES = 5
# Of a piece, at least this share is taken to be work: launching may take as long as all of it.
_LEAST_SHARE = 0.05


def probe_splitting(device: torch.device) -> float:
    """Masters that are split, whose weights are rounded, and that are joined from both again, in a
    second.

    Memory: 10 MiB. Some 10 ms on one core.

    Args:
        device: where updates run.
    """

    def run(masters: torch.Tensor) -> None:
        difference, marks = split(masters)
        join(masters.bfloat16(), difference, marks, torch.empty_like(masters))

    return _elements_per_s(device, run)


def probe_rounding(device: torch.device) -> float:
    """Weights that are rounded stochastically in a second.

    Memory: 12 MiB. Some 15 ms on one core.

    Args:
        device: where updates run.
    """
    noise = RoundingNoise(seed=0)

    def run(masters: torch.Tensor) -> None:
        round_stochastically(masters, noise.bits("probe", 0, masters.numel(), masters.device))

    return _elements_per_s(device, run)


def _elements_per_s(device: torch.device, run: Callable[[torch.Tensor], None]) -> float:
    # The first run makes what stays made.
    few_s, piece_s = (
        devices.least_seconds(device, partial(run, torch.linspace(-1.0, 1.0, count, device=device)), tries=_TRIES)
        for count in (_FEW, PIECE_ELEMENTS)
    )
    return (PIECE_ELEMENTS - _FEW) / max(piece_s - few_s, _LEAST_SHARE * piece_s)
