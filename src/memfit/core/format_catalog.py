"""ScaleBlock-wise formats: one scale for some hundred neighbouring values, and for each value the
code of a level between -1 and 1.

The scale of a block is the largest magnitude in it, so one outlier coarsens its own block and no
other (Dettmers et al. 2022, "8-bit Optimizers via ScaleBlock-wise Quantization", section 2.1).
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from memfit.core.errors import UsageError
from memfit.core.number_formats import (
    NEAREST_EVEN,
    TOWARD_ZERO,
    Field,
    FixedPoint,
    FloatFormat,
    Number,
    NumberFormat,
    Overflow,
    Rounding,
    SignMagnitude,
    Specials,
    read_magnitude,
)

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


# The formats by name. `int<bits>`, `sm<bits>` and `q<m>.<n>` are made when they are asked for.

_MOST_BITS = 64

# QLoRA's table, as fp32 values. Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of
# Quantized LLMs", appendix E; the rule behind it is in section 3: quantiles of the normal
# distribution, divided by the outermost, eight steps above zero and seven below.
_NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

_E4M3 = FloatFormat(
    name="fp8-e4m3",
    # Both overflows are in the standard; torch casts to NaN before 2.12 and saturates since,
    # ml_dtypes casts to NaN.
    description="8 bits for weights and activations (OCP OFP8); overflow saturates, as torch's casts since 2.12",
    exponent_bits=4,
    mantissa_bits=3,
    specials=Specials.ONE_NAN,
    overflow=Overflow.SATURATE,
)


def _fp8_block_format() -> BlockFormat:
    """e4m3 values from -256 to 256 as levels: the largest of a block is 256, a power of two, and
    comes back as it was.
    """
    values = {
        Fraction(value): code for code in range(256) if -256 <= (value := _E4M3.decode(code)) <= 256 and code != 0x80
    }
    return BlockFormat(
        name="fp8-block",
        description="e4m3 of a scale: absmax is 256 (optimizer states in fp8)",
        code_bits=8,
        levels=tuple(value / 256 for value in sorted(values)),
        codes=tuple(values[value] for value in sorted(values)),
        block_size=256,
    )


_ALL: tuple[NumberFormat, ...] = (
    FloatFormat(name="fp64", description="double precision (IEEE 754 binary64)", exponent_bits=11, mantissa_bits=52),
    FP32,
    FloatFormat(
        name="tf32",
        description="what tensor cores read of an fp32 value: fp32's range, fp16's precision (NVIDIA Ampere)",
        exponent_bits=8,
        mantissa_bits=10,
        storage_bits=32,
    ),
    FloatFormat(name="fp16", description="half precision (IEEE 754 binary16)", exponent_bits=5, mantissa_bits=10),
    FloatFormat(
        name="bf16", description="brain float: the upper half of an fp32 value", exponent_bits=8, mantissa_bits=7
    ),
    _E4M3,
    FloatFormat(
        name="fp8-e5m2",
        description="8 bits for gradients (OCP OFP8): the upper half of an fp16 value",
        exponent_bits=5,
        mantissa_bits=2,
    ),
    FloatFormat(
        name="fp4",
        description="4 bits, e2m1 (OCP Microscaling Formats)",
        exponent_bits=2,
        mantissa_bits=1,
        specials=Specials.NONE,
        overflow=Overflow.SATURATE,
    ),
    FixedPoint(name="int8", description="8-bit integer, two's complement", integer_bits=7),
    FixedPoint(name="int4", description="4-bit integer, two's complement", integer_bits=3),
    SignMagnitude(name="sm8", description="8-bit integer, sign and magnitude", magnitude_bits=7),
    FixedPoint(
        name="q3.4", description="fixed point: sign, 3 integer bits, 4 fraction bits", integer_bits=3, fraction_bits=4
    ),
    symmetric_integer_format("int8-block", bits=8, block_size=256),
    symmetric_integer_format("int4-block", bits=4, block_size=128),
    table_format("nf4", "quantiles of a normal distribution (QLoRA)", _NF4_LEVELS, bits=4, block_size=64),
    table_format(
        "dynamic8",
        "dynamic map, signed: seven decades, the upper ones finer (8-bit optimizers' first moment)",
        dynamic_levels(signed=True),
        bits=8,
        block_size=256,
    ),
    table_format(
        "dynamic8-unsigned",
        "dynamic map without signs (8-bit optimizers' second moment)",
        dynamic_levels(signed=False),
        bits=8,
        block_size=256,
    ),
    table_format(
        "dynamic4",
        "dynamic map, signed, of three decades (4-bit optimizers' first moment)",
        dynamic_levels(signed=True, decades=3),
        bits=4,
        block_size=128,
    ),
    table_format(
        "linear4-unsigned",
        "16 equal steps above zero, without zero (4-bit optimizers' second moment)",
        [Fraction(step, 16) for step in range(1, 17)],
        bits=4,
        block_size=128,
    ),
    _fp8_block_format(),
)

FORMATS: dict[str, NumberFormat] = {one.name: one for one in _ALL}
"""Every named format, in the order of the table that a person reads."""

# Other people's words: read, never written.
_ALSO_CALLED = {
    "double": "fp64", "float64": "fp64", "e11m52": "fp64",
    "float": "fp32", "float32": "fp32", "single": "fp32", "e8m23": "fp32",
    "half": "fp16", "float16": "fp16", "e5m10": "fp16",
    "bfloat16": "bf16", "e8m7": "bf16",
    "e4m3": "fp8-e4m3", "e4m3fn": "fp8-e4m3", "float8_e4m3fn": "fp8-e4m3",
    "e5m2": "fp8-e5m2", "float8_e5m2": "fp8-e5m2",
    "e2m1": "fp4", "float4_e2m1fn": "fp4",
    "dynamic8-signed": "dynamic8",
}  # fmt: skip

_MADE_WHEN_ASKED = re.compile(
    r"(?P<kind>int|sm)(?P<bits>[0-9]{1,3})|q(?P<integer>[0-9]{1,3})\.(?P<fraction>[0-9]{1,3})"
)


def find_format(name: str | NumberFormat) -> NumberFormat:
    """The format of a name, torch's names included.

    `int12`, `sm12` and `q7.8` (of at most 64 bits) are made. A format is given back.

    Raises:
        UsageError: there is none of this name.
    """
    if isinstance(name, NumberFormat):
        return name
    wanted = name.strip().lower().removeprefix("torch.")
    wanted = _ALSO_CALLED.get(wanted, wanted)
    if wanted in FORMATS:
        return FORMATS[wanted]
    match = _MADE_WHEN_ASKED.fullmatch(wanted)
    if match is not None:
        return _make_format(wanted, match)
    near = difflib.get_close_matches(wanted, [*FORMATS, *_ALSO_CALLED], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"no number format is called {name!r}: {hint}there are {', '.join(FORMATS)}, and int<bits>, sm<bits>, q<m>.<n>"
    )


def encode(value: Number, format: str | NumberFormat, rounding: Rounding = NEAREST_EVEN) -> int:  # noqa: A002, the word is format
    """The code of a value in a format; see the format's own `encode`.

    Its bits, field by field: `find_format(format).split(code)`.
    """
    return find_format(format).encode(value, rounding)


def decode(code: int, format: str | NumberFormat) -> Number:  # noqa: A002, the word is format
    """The exact value of a code in a format; see the format's own `decode`."""
    return find_format(format).decode(code)


def _make_format(name: str, match: re.Match[str]) -> NumberFormat:
    kind = match["kind"]
    bits = int(match["bits"]) if kind else 1 + int(match["integer"]) + int(match["fraction"])
    if not 2 <= bits <= _MOST_BITS:
        raise UsageError(f"{name} has {bits} bits: 2 to {_MOST_BITS} are possible")
    if kind == "int":
        return FixedPoint(name=name, description=f"{bits}-bit integer, two's complement", integer_bits=bits - 1)
    if kind == "sm":
        return SignMagnitude(name=name, description=f"{bits}-bit integer, sign and magnitude", magnitude_bits=bits - 1)
    integer, fraction = int(match["integer"]), int(match["fraction"])
    return FixedPoint(
        name=name,
        description=f"fixed point: sign, {integer} integer bits, {fraction} fraction bits",
        integer_bits=integer,
        fraction_bits=fraction,
    )
