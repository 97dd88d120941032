"""ScaleBlock-wise formats: one scale for some hundred neighbouring values, and for each value the
code of a level between -1 and 1.

The scale of a block is the largest magnitude in it, so one outlier coarsens its own block and no
other (Dettmers et al. 2022, "8-bit Optimizers via ScaleBlock-wise Quantization", section 2.1).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from memfit.core.errors import UsageError
from memfit.formats.floating import FloatFormat
from memfit.formats.number_format import Field, Number, NumberFormat, read_magnitude
from memfit.formats.rounding import NEAREST_EVEN, TOWARD_ZERO, Rounding

FP32 = FloatFormat(name="fp32", description="single precision (IEEE 754 binary32)", exponent_bits=8, mantissa_bits=23)
"""Here, and not in the catalog, because the scales of blocks and the levels of tables are fp32
values.
"""


@dataclass(frozen=True, kw_only=True)
class BlockFormat(NumberFormat):
    """Levels in ascending order and the code of each.

    As a format of single numbers it holds value / scale.

    Zero is a level of most; where it is not, all levels are positive, and a zero comes back as the
    smallest.

    Costs `bits` a value and 32 bits a block. Decoding here is exact, `scale * level`; a library
    that computes it in fp32 adds one rounding of its own, of at most 2^-24 of the result.

    Args:
        levels: at most 2^bits of them, at most 1 in magnitude.
        codes: beside `levels`; codes that no level has stand for nothing.
        block_size: values that share a scale.
    """

    code_bits: int
    levels: tuple[Fraction, ...]
    codes: tuple[int, ...]
    block_size: int

    def __post_init__(self) -> None:
        assert len(self.levels) == len(set(self.codes)) == len(self.codes) and (0 in self.levels or self.levels[0] > 0)
        assert all(low < high for low, high in pairwise(self.levels)) and max(map(abs, self.levels)) <= 1
        if self.block_size < 1:
            raise UsageError(f"{self.name}: a block has at least one value, not {self.block_size}")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.code_bits

    @property
    def bits_per_value(self) -> Fraction:
        """Bits in memory for each value of a full block, with its share of the scale."""
        return self.bits + Fraction(FP32.bits, self.block_size)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The code as a whole."""
        return (Field("level", self.bits),)

    @property
    def lowest(self) -> Fraction:
        """The lowest level; the dynamic maps end above -1."""
        return self.levels[0]

    @property
    def largest(self) -> Fraction:
        """The largest level: 1."""
        return self.levels[-1]

    @property
    def smallest_positive(self) -> Fraction:
        """The smallest level above zero."""
        return self.levels[bisect_right(self.levels, 0)]

    @property
    def largest_gap(self) -> Fraction:
        """The largest distance between neighbouring levels."""
        return max(high - low for low, high in pairwise(self.levels))

    def block_error_bound(self, rounding: Rounding = NEAREST_EVEN) -> Fraction:
        """How far any value of a block can move, as a part of the block's scale.

        It is `largest_gap`, or half of it to nearest; or, where that is more, what -1 (or 0, of
        positive levels) lacks to the lowest level.
        """
        overhang = 1 + self.lowest if self.lowest < 0 else self.lowest
        return max(rounding.error_in_gaps * self.largest_gap, overhang)

    def encode(self, value: Number, rounding: Rounding = NEAREST_EVEN) -> int:
        """The code of a value that was divided by its scale already.

        Outside the levels the nearest end.

        `NEAREST_EVEN` sends the middle between two levels to the one that is an even number of
        places from zero.

        Raises:
            UsageError: a NaN, an infinity, or a negative value where all levels are positive.
        """
        exact = self._read(value)
        if exact < 0 <= self.lowest:
            raise UsageError(f"{self.name} has no negative values, not even {value}")
        near, far = self._neighbours(exact)
        remainder = (exact - self.levels[near]) / (self.levels[far] - self.levels[near]) if near != far else Fraction(0)
        is_odd = abs(near - self._zero) % 2 == 1
        goes_far = rounding.rounds_away(remainder.numerator, remainder.denominator, is_odd=is_odd)
        return self.codes[far if goes_far else near]

    def decode(self, code: int) -> Fraction:
        """The level of a code, to be multiplied by the scale.

        Raises:
            UsageError: not a code of this format, or one that stands for no level.
        """
        self._check_code(code)
        if code not in self.codes:
            raise UsageError(f"{code:#x} stands for nothing in {self.name}")
        return self.levels[self.codes.index(code)]

    def gap(self, value: Number) -> Fraction:
        """The distance between the levels that a value (divided by its scale) lies between."""
        self._check_covers(value)
        near, far = self._neighbours(self._read(value))
        if near == far:  # at an end
            far = near - 1 if near else 1
        return abs(self.levels[far] - self.levels[near])

    def encode_blocks(self, values: Iterable[Number], rounding: Rounding = NEAREST_EVEN) -> tuple[ScaleBlock, ...]:
        """Cuts values into blocks of `block_size`, the last one shorter, and encodes each.

        No values, no blocks.

        The scale of a block is its largest magnitude as fp32, rounded up where fp32 does not have
        it, so that no value leaves the range.

        Raises:
            UsageError: a value is not finite, above fp32's range, or negative where all levels are
                positive.
        """
        rest = tuple(values)
        cut = [rest[start : start + self.block_size] for start in range(0, len(rest), self.block_size)]
        return tuple(self._encode_block(block, rounding) for block in cut)

    def _encode_block(self, values: tuple[Number, ...], rounding: Rounding) -> ScaleBlock:
        exact = [self._read(value) for value in values]
        scale = _fp32_at_least(max(map(abs, exact)), self.name)
        codes = tuple(self.encode(value / scale if scale else value, rounding) for value in exact)
        return ScaleBlock(format=self, scale=scale, codes=codes)

    @property
    def _zero(self) -> int:
        return bisect_left(self.levels, 0)

    def _read(self, value: Number) -> Fraction:
        is_negative, numerator, denominator = read_magnitude(value, self.name)
        return Fraction(-numerator if is_negative else numerator, denominator)

    def _neighbours(self, exact: Fraction) -> tuple[int, int]:
        """Places of the levels beside a value, the one nearer to zero first.

        The same place twice at and beyond the ends.
        """
        last = len(self.levels) - 1
        if exact >= 0:
            near = max(bisect_right(self.levels, exact) - 1, 0)
            if exact < self.levels[near]:
                return near, near
            return near, min(near + 1, last)
        near = min(bisect_left(self.levels, exact), last)
        return near, max(near - 1, 0)


@dataclass(frozen=True, kw_only=True)
class ScaleBlock:
    """An encoded scale block: a scale, which is an fp32 value, and a code for each value."""

    format: BlockFormat
    scale: Fraction
    codes: tuple[int, ...]

    def decode(self) -> tuple[Fraction, ...]:
        """The values that come back."""
        return tuple(self.scale * self.format.decode(code) for code in self.codes)

    def error_bound(self, rounding: Rounding = NEAREST_EVEN) -> Fraction:
        """How far any of them can be from what went in."""
        return self.scale * self.format.block_error_bound(rounding)


def symmetric_integer_format(name: str, *, bits: int, block_size: int) -> BlockFormat:
    """Integers from -(2^(bits-1) - 1) to 2^(bits-1) - 1 in two's complement, divided by the
    largest; -2^(bits-1) is not used.
    """
    largest = (1 << (bits - 1)) - 1
    whole = range(-largest, largest + 1)
    return BlockFormat(
        name=name,
        description=f"{bits}-bit integers of a scale: absmax / {largest} a step",
        code_bits=bits,
        levels=tuple(Fraction(level, largest) for level in whole),
        codes=tuple(level % (1 << bits) for level in whole),
        block_size=block_size,
    )


def table_format(name: str, description: str, levels: Iterable[Number], *, bits: int, block_size: int) -> BlockFormat:
    """A format whose code is the place in a table of ascending fp32 levels.

    Other levels are rounded to fp32 first.
    """
    rounded = sorted(Fraction(FP32.decode(FP32.encode(level))) for level in levels)
    return BlockFormat(
        name=name,
        description=description,
        code_bits=bits,
        levels=tuple(rounded),
        codes=tuple(range(len(rounded))),
        block_size=block_size,
    )


def dynamic_levels(*, signed: bool, decades: int = 7) -> tuple[Fraction, ...]:
    """The levels of a dynamic map: decades below 1, each finer cut than the one below it, and 0 and
    1.

    Decade d (0 to decades - 1) reaches from 10^(d-decades) to 10^(d-decades+1) and is cut in 2^d
    equal parts (2^(d+1) unsigned), whose middles are levels; signed, their negatives too. So 1 is a
    level and -1 is not. Seven decades make 256 levels, for 8 bits; three, signed, make 16. The
    tables of bitsandbytes and torchao are these, computed in floats: they differ in the last bits
    of some levels. Source: Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning",
    and Dettmers et al. 2022, sections 1.3 and 2.2.
    """
    positive = [
        Fraction(10) ** (decade - decades + 1) * (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * part + 1, 2 * parts))
        for decade in range(decades)
        for parts in [1 << (decade if signed else decade + 1)]
        for part in range(parts)
    ]
    negative = [-level for level in positive] if signed else []
    return (*negative, Fraction(0), *positive, Fraction(1))


def _fp32_at_least(magnitude: Fraction, name: str) -> Fraction:
    if magnitude > FP32.largest:
        raise UsageError(f"{name}: the scale of a block is an fp32 value, and a value here is above the range of fp32")
    below = FP32.encode(magnitude, TOWARD_ZERO)
    code = below if Fraction(FP32.decode(below)) == magnitude else below + 1
    return Fraction(FP32.decode(code))
