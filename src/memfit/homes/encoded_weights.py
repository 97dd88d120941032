"""Weights of a block whose frozen linear ones rest in few bits.

In: a home of encoded bytes. Out: a home that is read and written as the block's flat buffer. See
`core.storage_formats`, [Note: frozen weights in few bits].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache, partial

import torch

from memfit.core.format_catalog import BlockFormat, find_format
from memfit.core.storage_formats import NF4_BLOCK, FrozenFormat, encoded_sizes
from memfit.core.tiers import Tier
from memfit.homes.home import DONE, ByteHome, TransferGroup, TransferHandle, TransferThen
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.tensors.trees import bytes_view, new_storage, typed_view

_PIECE_ELEMENTS = 1 << 18
ENCODING_BYTES = 20 * _PIECE_ELEMENTS
"""Scratch of a piece that is being encoded."""
_MOST_CODE = 127
# The float that bitsandbytes multiplies by.
_INT8_UNIT = 1.0 / _MOST_CODE


def encode(chosen: FrozenFormat, values: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes a weight.

    Memory: some 20 bytes an element of a piece of 256 Ki.

    Args:
        chosen: not GIVEN.
        values: 1-D, in memory order.
        rows: of the weight, which int8 has a scale each for.

    Returns:
        Scales in fp32; codes, uint8, two of nf4 in a byte with the first in its upper half.
    """
    width = NF4_BLOCK if chosen is FrozenFormat.NF4 else values.numel() // rows
    blocks = values.view(-1, width)
    step = max(1, _PIECE_ELEMENTS // width)
    scales: list[torch.Tensor] = []
    codes: list[torch.Tensor] = []
    for start in range(0, len(blocks), step):
        wide = blocks[start : start + step].float()
        scale = wide.abs().amax(dim=1, keepdim=True)
        scales.append(scale.view(-1))
        if chosen is FrozenFormat.INT8:
            found = torch.round(wide * (_MOST_CODE / scale.clamp(min=1e-38))).to(torch.int8).view(torch.uint8)
            codes.append(found.view(-1))
            continue
        normal = torch.clamp(wide * (1.0 / scale.clamp(min=1e-38)), -1.0, 1.0)
        found = torch.bucketize(normal.view(-1), _bounds(values.device), out_int32=True).to(torch.uint8)
        codes.append((found[::2] << 4) | found[1::2])
    return torch.cat(scales), torch.cat(codes)


def decode(chosen: FrozenFormat, scales: torch.Tensor, codes: torch.Tensor, into: torch.Tensor) -> None:
    """Decodes whole blocks (rows) of a weight: bits of bitsandbytes' `dequantize_4bit`, and of its
    `int8_vectorwise_dequant`.

    Memory: 6 bytes an element of a piece of 256 Ki; 4 more where the weight is not fp32.

    Args:
        chosen: not GIVEN.
        scales: as `encode` gives them.
        codes: likewise.
        into: 1-D, as many elements.
    """
    width = into.numel() // max(len(scales), 1)
    step = max(1, _PIECE_ELEMENTS // width)
    for start in range(0, len(scales), step):
        scale = scales[start : start + step].view(-1, 1)
        target = into[start * width : (start + len(scale)) * width]
        wide = target if target.dtype is torch.float32 else torch.empty_like(target, dtype=torch.float32)
        if chosen is FrozenFormat.NF4:
            places = codes[start * width // 2 : (start + len(scale)) * width // 2].to(torch.int32)
            torch.index_select(_pairs(into.device), 0, places, out=wide.view(-1, 2))
            wide.view(-1, width).mul_(scale)
        else:
            wide.copy_(codes[start * width : (start + len(scale)) * width].view(torch.int8))
            wide.view(-1, width).mul_(scale).mul_(_INT8_UNIT)
        if wide is not target:
            target.copy_(wide)


@cache
def _levels(device: torch.device) -> torch.Tensor:
    table = find_format("nf4")
    assert isinstance(table, BlockFormat) and tuple(table.codes) == tuple(range(16))
    return torch.tensor([float(level) for level in table.levels], device=device)


@cache
def _bounds(device: torch.device) -> torch.Tensor:
    levels = _levels(device)
    return (levels[:-1] + levels[1:]) / 2


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """By byte, the levels of its upper and its lower half."""
    levels, byte = _levels(device), torch.arange(256, device=device)
    return torch.stack([levels[byte >> 4], levels[byte & 15]], dim=1).contiguous()


class EncodedWeights(ByteHome):
    """Home of a block's weights, of which some rest encoded.

    A visit decodes all of them; parts are read by rows or blocks, and an encoded weight is written
    whole. Bytes that equal what it decodes to are not encoded again: nothing is rounded twice.

    Memory: a visit from a home that the device's processor does not reach, the encoded bytes.

    Args:
        block: not moved in yet.
        inner: a home of `nbytes_at_home`.
        chosen: not GIVEN.
        names: of the encoded parameters.
    """

    def __init__(self, block: BlockWeights, inner: ByteHome, chosen: FrozenFormat, names: Collection[str]) -> None:
        self.tier: Tier = inner.tier
        self.nbytes = block.nbytes
        self.is_encoded = True
        self.inner = inner
        self._chosen = chosen
        self._slots = block.slots
        self._names = frozenset(names)
        self._places, self._ends, total = layout_at_home(block, chosen, names)
        assert total == inner.nbytes
        self._filled: set[str] = set()

    @property
    def has_spare_slot(self) -> bool:
        """See `ByteHome`."""
        return self.inner.has_spare_slot

    @property
    def has_versions(self) -> bool:
        """See `ByteHome`."""
        return self.inner.has_versions

    @property
    def is_dirty(self) -> bool:
        """See `ByteHome`."""
        return self.inner.is_dirty

    def visit(self, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.visit`. The weights are decoded by whoever waits."""
        resting = self.inner.memory_at(into.device)
        if resting is not None:
            return TransferThen(DONE, partial(self._fill, resting, into, into_offset))
        coming = new_storage(self.inner.nbytes, into.device)
        # Kept by the action until it has run: the transfer writes there.
        return TransferThen(self.inner.visit(coming), partial(self._fill, coming, into, into_offset))

    def _fill(self, source: torch.UntypedStorage, into: torch.UntypedStorage, into_offset: int) -> None:
        with torch.no_grad():
            for slot in self._slots:
                target = typed_view(into, into_offset + slot.offset_bytes, slot.dtype, (slot.numel,))
                place = self._places[slot.name]
                if slot.name not in self._names:
                    target.copy_(typed_view(source, place[0], slot.dtype, (slot.numel,)))
                    continue
                scale_bytes, code_bytes = self._chosen.parts(slot.shape)
                scales = typed_view(source, place[0], torch.float32, (scale_bytes // 4,))
                decode(self._chosen, scales, typed_view(source, place[1], torch.uint8, (code_bytes,)), target)

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`. What is decoded is there on return."""
        handles: list[TransferHandle] = []
        for slot, first, count in self._parts(offset, nbytes):
            at, size = into_offset + slot.offset_bytes + first - offset, slot.dtype.itemsize
            if slot.name not in self._names:
                handles.append(self.inner.read(self._places[slot.name][0] + first, count, into, at))
                continue
            width = self._width(slot)
            begin, end = first // size // width, -(-((first + count) // size) // width)
            decoded = torch.empty((end - begin) * width, dtype=slot.dtype, device=into.device)
            self._decode_rows(slot, begin, end, decoded)
            skip = first - begin * width * size
            bytes_view(into, at, count).copy_(decoded.view(torch.uint8)[skip : skip + count])
        return TransferGroup(handles) if handles else DONE

    def _decode_rows(self, slot: ParameterSlot, begin: int, end: int, into: torch.Tensor) -> None:
        place, width = self._places[slot.name], self._width(slot)
        row_bytes = width // 2 if self._chosen is FrozenFormat.NF4 else width
        scales, codes = (new_storage(size * (end - begin), into.device) for size in (4, row_bytes))
        TransferGroup(
            [
                self.inner.read(place[0] + 4 * begin, scales.nbytes(), scales),
                self.inner.read(place[1] + row_bytes * begin, codes.nbytes(), codes),
            ]
        ).wait()
        found = typed_view(scales, 0, torch.float32, (end - begin,)), bytes_view(codes, 0, codes.nbytes())
        with torch.no_grad():
            decode(self._chosen, *found, into)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`."""
        handles: list[TransferHandle] = []
        for slot, first, count in self._parts(offset, nbytes):
            at = source_offset + slot.offset_bytes + first - offset
            place = self._places[slot.name]
            if slot.name not in self._names:
                handles.append(self.inner.write(place[0] + first, count, source, at))
                continue
            assert count == slot.nbytes, "an encoded weight is written whole"
            values = typed_view(source, at, slot.dtype, (slot.numel,))
            if self._is_there(slot, values):
                continue
            with torch.no_grad():
                scales, codes = encode(self._chosen, values, slot.shape[0])
            # Both live in their handles until they are home.
            handles += [
                self.inner.write(place[0], scales.nbytes, scales.untyped_storage()),
                self.inner.write(place[1], codes.nbytes, codes.untyped_storage()),
            ]
            TransferGroup(handles).wait()
            self._filled.add(slot.name)
            handles.clear()
        return TransferGroup(handles) if handles else DONE

    def _is_there(self, slot: ParameterSlot, values: torch.Tensor) -> bool:
        """Tells whether the home decodes to these values already."""
        if slot.name not in self._filled:
            return False
        decoded = torch.empty_like(values)
        self._decode_rows(slot, 0, slot.numel // self._width(slot), decoded)
        return torch.equal(decoded, values)

    def _width(self, slot: ParameterSlot) -> int:
        return NF4_BLOCK if self._chosen is FrozenFormat.NF4 else slot.shape[1]

    def _parts(self, offset: int, nbytes: int) -> Iterator[tuple[ParameterSlot, int, int]]:
        """Yields the slots that a range of the flat buffer meets: (slot, first byte, bytes)."""
        for slot in self._slots:
            first = max(0, offset - slot.offset_bytes)
            end = min(slot.nbytes, offset + nbytes - slot.offset_bytes)
            if first < end:
                yield slot, first, end - first


def layout_at_home(
    block: BlockWeights, chosen: FrozenFormat, names: Collection[str]
) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...], int]:
    """Returns where each parameter rests, by name; where what rests of each ends; and the bytes of
    all.
    """
    parts = [chosen.parts(slot.shape) if slot.name in names else slot.nbytes for slot in block.slots]
    places, total = encoded_sizes(parts)
    ends = [
        at + size
        for place, part in zip(places, parts, strict=True)
        for at, size in zip(place, (part,) if isinstance(part, int) else part, strict=True)
    ]
    return dict(zip((slot.name for slot in block.slots), places, strict=True)), tuple(ends), total
