"""Codecs of optimizer states in 4, 8 and 16 bits.

In: fp32 values of a piece of a state, or its records. Out: the other. `core.storage_formats`,
[Note: state formats], says what is encoded and how it lies in memory; the levels of the maps are
those of `memfit.formats`.

[Note: the sign of a scale]
A record's scale is its value of largest magnitude *with its sign*, so that it stands at level 1,
which every map has (the dynamic maps end above -1; fp8 has both ends, and its scale is the
magnitude): the largest value comes back exactly. Therefore encoding what was decoded gives the same
record, bit for bit, and a state that was saved in fp32 and loaded again is the one that was saved.
No value moves by more than `BlockFormat.block_error_bound` times the scale.

[Note: nearest level by two tables]
A search among 256 levels takes eight dependent steps an element; torch's `bucketize` was measured
at 180 ns, torchao's at 700 and bitsandbytes' at 50 on one core. Here the upper 16 bits of the fp32
value choose a bin that holds at most one of the middles between neighbouring levels (asserted when
the tables are made): one table gives the level below, another the middle to compare with. Two
gathers and a comparison, about 3 ns, and exactly the nearest level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch

from memfit import devices
from memfit.core.format_catalog import BlockFormat, find_format
from memfit.core.storage_formats import RecordLayout, StateFormat, StateMoment, records_of
from memfit.tensors.noise import RoundingNoise, round_stochastically

_SCALE_BYTES = 4
_BINS = 1 << 16
_PART_VALUES = 1 << 17

_TABLES = {
    (StateFormat.INT8, StateMoment.FIRST): "dynamic8",
    (StateFormat.INT8, StateMoment.SECOND): "dynamic8-unsigned",
    (StateFormat.INT4, StateMoment.FIRST): "dynamic4",
    (StateFormat.INT4, StateMoment.SECOND): "linear4-unsigned",
    (StateFormat.FP8, StateMoment.FIRST): "fp8-block",
    (StateFormat.FP8, StateMoment.SECOND): "fp8-block",
}


class StateCodec(ABC):
    """Encodes and decodes one state. Without memory of its own beyond tables; any device.

    Attributes:
        records: how it lies in memory.
    """

    records: RecordLayout

    @abstractmethod
    def decode(self, stored: torch.Tensor, count: int) -> torch.Tensor:
        """Fp32 values.

        Memory: 4 bytes a value for the result, as much again for a moment.

        Args:
            stored: uint8, whole records.
            count: how many values they hold.
        """

    @abstractmethod
    def encode(self, values: torch.Tensor, into: torch.Tensor, noise: RoundingNoise, name: str, first: int) -> None:
        """Writes the records of fp32 values.

        A NaN or an infinity makes its whole record NaN or infinite.

        Memory: 10 bytes a value for a moment.

        Args:
            values: 1-D; not changed.
            into: uint8, `records.size(len(values))` bytes.
            noise: for stochastic rounding.
            name: of the state, for the noise.
            first: number of the first value in its state; a record begins there.
        """


@cache
def codec_of(chosen: StateFormat, moment: StateMoment) -> StateCodec:
    """The codec of a format for a kind of state; not for GIVEN."""
    if chosen is StateFormat.BF16:
        return Bf16Codec()
    table = find_format(_TABLES[chosen, moment])
    assert isinstance(table, BlockFormat)
    kind = Fp8Codec if chosen is StateFormat.FP8 else TableCodec
    return kind(table, records_of(chosen), moment)


class RecordCodec(StateCodec):
    """Records of a scale and the codes of levels. See [Note: the sign of a scale].

    Args:
        table: its levels; of 4 bits, two codes lie in a byte, the first in its lower half.
        records: their layout.
        moment: of SECOND, a value above zero never becomes zero.
    """

    def __init__(self, table: BlockFormat, records: RecordLayout, moment: StateMoment) -> None:
        assert table.block_size == records.elements
        assert records.nbytes == _SCALE_BYTES + records.elements * table.bits // 8
        self.records = records
        self._is_signed = moment is StateMoment.FIRST
        self._is_packed = table.bits == 4
        values = torch.full((1 << table.bits,), float("nan"))
        for code, level in zip(table.codes, table.levels, strict=True):
            values[code] = float(level)
        self._values = _PerDevice(_pairs(values) if self._is_packed else values)

    @abstractmethod
    def _codes(self, normal: torch.Tensor) -> torch.Tensor:
        """Codes, uint8, of values that were divided by their scales; same shape."""

    def decode(self, stored: torch.Tensor, count: int) -> torch.Tensor:
        """See `StateCodec.decode`."""
        scales, codes = self._split(stored)
        places = codes.to(torch.int32).view(-1)
        values = self._values.on(stored.device).index_select(0, places)
        if self._is_packed:
            values = values.view(torch.float32)
        return values.view(len(scales), -1).mul_(scales).view(-1)[:count]

    def encode(self, values: torch.Tensor, into: torch.Tensor, noise: RoundingNoise, name: str, first: int) -> None:
        """See `StateCodec.encode`."""
        scales, codes = self._split(into)
        missing = len(scales) * self.records.elements - values.numel()
        rows = (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(len(scales), -1)
        scale = self._scale(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True))
        scales.copy_(scale)
        found = self._codes(rows / scale.masked_fill(scale == 0, 1.0))
        codes.copy_(found[:, 0::2] | (found[:, 1::2] << 4) if self._is_packed else found)

    def _scale(self, highest: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
        """The value that is to stand at level 1."""
        return torch.where(highest >= -lowest, highest, lowest) if self._is_signed else highest

    def _split(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the records' scales, (records, 1) fp32, and of their bytes of codes."""
        rows = stored.view(-1, self.records.nbytes)
        return rows[:, :_SCALE_BYTES].view(torch.float32), rows[:, _SCALE_BYTES:]


class TableCodec(RecordCodec):
    """Codes are places in the table, found as [Note: nearest level by two tables] says. Tables take
    320 KiB a device.
    """

    def __init__(self, table: BlockFormat, records: RecordLayout, moment: StateMoment) -> None:
        super().__init__(table, records, moment)
        assert table.codes == tuple(range(len(table.levels)))
        levels = torch.tensor([float(level) for level in table.levels], dtype=torch.float64)
        exact = torch.cat(((levels[1:] + levels[:-1]) / 2, torch.tensor([torch.inf], dtype=torch.float64)))
        # Rounded down to fp32: an fp32 value is above the middle exactly if it is above that.
        middles = exact.to(torch.float32)
        middles = torch.where(middles > exact, middles.nextafter(torch.tensor(-torch.inf)), middles)
        if not self._is_signed and table.levels[0] == 0:
            middles[0] = 0.0  # above zero is never zero
        below, middle = _bins(middles)
        self._below, self._middle = _PerDevice(below), _PerDevice(middle)

    def _codes(self, normal: torch.Tensor) -> torch.Tensor:
        flat = normal.view(-1)
        codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
        # In parts: bins, middles and comparisons of all values at once would take 9 bytes each
        # beside them.
        for start in range(0, flat.numel(), _PART_VALUES):
            part = flat[start : start + _PART_VALUES]
            bins = (part.view(torch.int32) >> 16).add_(_BINS // 2)
            found = codes[start : start + _PART_VALUES]
            torch.index_select(self._below.on(flat.device), 0, bins, out=found)
            found.add_(part > self._middle.on(flat.device).index_select(0, bins))
        return codes.view(normal.shape)


class Fp8Codec(RecordCodec):
    """Codes are e4m3 values, rounded to nearest by torch's own cast; the scale stands at 256, a
    power of two, so that it comes back exactly.
    """

    def __init__(self, table: BlockFormat, records: RecordLayout, moment: StateMoment) -> None:
        super().__init__(table, records, moment)
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32) / 256
        # with the zero that has a sign, which is no level of its own
        self._values = _PerDevice(every)

    def _scale(self, highest: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
        return torch.maximum(highest, -lowest)  # levels go from -1 to 1: the magnitude is enough

    def _codes(self, normal: torch.Tensor) -> torch.Tensor:
        codes = (normal * 256.0).to(torch.float8_e4m3fn).view(torch.uint8)
        if not self._is_signed:
            codes.bitwise_or_((codes == 0) & (normal > 0))
        return codes


class Bf16Codec(StateCodec):
    """Values rounded stochastically to bf16."""

    def __init__(self) -> None:
        self.records = records_of(StateFormat.BF16)

    def decode(self, stored: torch.Tensor, count: int) -> torch.Tensor:
        """See `StateCodec.decode`."""
        return stored.view(torch.bfloat16)[:count].to(torch.float32)

    def encode(self, values: torch.Tensor, into: torch.Tensor, noise: RoundingNoise, name: str, first: int) -> None:
        """See `StateCodec.encode`."""
        bits = noise.bits(name, first, values.numel(), values.device)
        into.view(torch.bfloat16).copy_(round_stochastically(values.contiguous(), bits))


def probe_codecs(device: torch.device, *, elements: int = 1 << 19, tries: int = 4) -> float:
    """Elements of optimizer states that are decoded and encoded in a second, to 8 bits: best of
    several, since other work can only slow one down.

    Memory: 9 bytes an element for the values and the records, and about 20 while they are encoded;
    15 MiB in all. A quarter of a second on one core, most of it for tables that a job with such
    states needs as well.

    Args:
        device: where updates run.
        elements: at once.
        tries: of which the best counts.
    """
    noise = RoundingNoise(seed=0)
    codecs = [codec_of(StateFormat.INT8, moment) for moment in StateMoment]
    values = torch.linspace(0.0, 1.0, elements, device=device)
    stored = torch.empty(codecs[0].records.size(elements), dtype=torch.uint8, device=device)

    def run() -> None:
        for codec in codecs:
            codec.encode(values, stored, noise, "probe", 0)
            codec.decode(stored, elements)

    return len(codecs) * elements / devices.least_seconds(device, run, tries=tries)


class _PerDevice:
    """A constant tensor, copied once to each device that asks for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copies = {torch.device("cpu"): tensor}

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self._copies:
            self._copies[device] = self._copies[torch.device("cpu")].to(device)
        return self._copies[device]


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Returns for each byte of two 4-bit codes their two values as the halves of an int64, so that
    one gather reads both.
    """
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).contiguous().view(torch.int64).view(-1)


def _bins(middles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By bin (upper half of the fp32 bits as a signed number, plus 32768): the place of the level
    below, uint8, and the middle above it, fp32.
    """
    upper = torch.arange(-_BINS // 2, _BINS // 2, dtype=torch.int32) << 16
    ends = torch.stack((upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)))
    is_number = ~ends.isnan().any(0)
    low, high = ends.nan_to_num(nan=0.0).aminmax(dim=0)
    # A value above k middles stands at level k.
    below, above = (torch.searchsorted(middles, end, right=False) for end in (low, high))
    assert bool((above - below)[is_number].le(1).all()), "two middles between levels lie in one bin"
    below = below.clamp_(max=len(middles) - 1)
    return below.to(torch.uint8), middles[below]
