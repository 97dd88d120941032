"""The interface of number formats, and the conversion of values that come in."""

from __future__ import annotations

import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from memfit.core.errors import UsageError

# Which of its two neighbours a value becomes.
#
# In: how far a value lies from the neighbour that is nearer to zero, as a fraction of the gap. Out:
# whether it goes to the other one. Every format asks here, so that a rule means the same in all of
# them.


class Rounding(ABC):
    """A rule.

    A format asks it exactly once for each finite value that it encodes, exact ones included.
    """

    name: str
    error_in_gaps: Fraction
    """No value between two neighbours moves further than this part of the gap between them."""

    @abstractmethod
    def rounds_away(self, remainder: int, divisor: int, *, is_odd: bool) -> bool:
        """Tells whether the value goes to the neighbour that is farther from zero.

        Args:
            remainder: with `divisor` the distance from the neighbour nearer to zero: `remainder /
                divisor` of the gap, in [0, 1).
            divisor: at least 1.
            is_odd: whether the neighbour nearer to zero ends in an odd digit (an odd place of the
                table, for formats that are tables).
        """


class _NearestEven(Rounding):
    name = "nearest-even"
    error_in_gaps = Fraction(1, 2)

    def rounds_away(self, remainder: int, divisor: int, *, is_odd: bool) -> bool:
        return 2 * remainder > divisor or (2 * remainder == divisor and is_odd)


class _TowardZero(Rounding):
    name = "toward-zero"
    error_in_gaps = Fraction(1)

    def rounds_away(self, remainder: int, divisor: int, *, is_odd: bool) -> bool:
        return False


class Stochastic(Rounding):
    """Away from zero with the probability `remainder / divisor`, so that the expected result is the
    value itself.

    The expectation holds inside the range of a format. A uniform number is a double, so the
    probability is met to 2^-53.

    Args:
        uniforms: a generator, or uniform numbers in [0, 1), of which each finite value takes one,
            in order.
    """

    name = "stochastic"
    error_in_gaps = Fraction(1)

    def __init__(self, uniforms: random.Random | Iterable[float]) -> None:
        self._uniforms = _draw_from(uniforms) if isinstance(uniforms, random.Random) else iter(uniforms)

    def rounds_away(self, remainder: int, divisor: int, *, is_odd: bool) -> bool:
        """Compares exactly: `uniform < remainder / divisor`.

        Raises:
            UsageError: there are no uniform numbers left, or one is outside [0, 1).
        """
        uniform = next(self._uniforms, None)
        if uniform is None:
            raise UsageError("stochastic rounding has used up its uniform numbers: give one for each value")
        if not 0 <= uniform < 1:
            raise UsageError(f"stochastic rounding needs uniform numbers in [0, 1), not {uniform!r}")
        numerator, denominator = uniform.as_integer_ratio()
        return numerator * divisor < remainder * denominator


def _draw_from(generator: random.Random) -> Iterator[float]:
    while True:
        yield generator.random()


NEAREST_EVEN: Rounding = _NearestEven()
"""To the nearer neighbour; from the middle to the even one.

What hardware and torch's casts do (IEEE 754-2019, section 4.3.1).
"""
TOWARD_ZERO: Rounding = _TowardZero()
"""To the neighbour nearer to zero: digits are cut off."""


def find_rounding(name: str, *, seed: int = 0) -> Rounding:
    """The rule of a name: `nearest-even`, `toward-zero`, or `stochastic` with a generator of its
    own from `seed`.

    Raises:
        UsageError: there is no rule of this name.
    """
    rules = (NEAREST_EVEN, TOWARD_ZERO, Stochastic(random.Random(seed)))  # noqa: S311, rounding is no secret
    for rule in rules:
        if rule.name == name:
            return rule
    raise UsageError(f"no rounding is called {name!r}: there are {', '.join(rule.name for rule in rules)}")


def round_magnitude(numerator: int, denominator: int, rounding: Rounding) -> int:
    """Rounds the fraction `numerator / denominator`, which is not negative, to a whole number."""
    quotient, remainder = divmod(numerator, denominator)
    return quotient + rounding.rounds_away(remainder, denominator, is_odd=quotient % 2 == 1)


Number = int | float | Fraction
"""A value: finite ones are taken exactly; infinities, NaN and negative zero are floats."""


class Field(NamedTuple):
    """Neighbouring bits of a code that mean something together.

    The first field holds the highest bits.
    """

    name: str
    bits: int


@dataclass(frozen=True, kw_only=True)
class NumberFormat(ABC):
    """A set of values, each with its code (for two formats zero has two).

    Facts are exact fractions. `lowest` and `largest` bound the finite values; what lies outside is
    the format's `encode` to say.
    """

    name: str
    description: str
    """One line for a person, with the source where there is one."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code."""

    @property
    @abstractmethod
    def fields(self) -> tuple[Field, ...]:
        """The parts of a code; their bits add up to `bits`."""

    @property
    @abstractmethod
    def lowest(self) -> Fraction:
        """The lowest finite value."""

    @property
    @abstractmethod
    def largest(self) -> Fraction:
        """The largest finite value."""

    @abstractmethod
    def encode(self, value: Number, rounding: Rounding = NEAREST_EVEN) -> int:
        """The code of the value's neighbour that `rounding` chooses.

        Raises:
            UsageError: the format has nothing that stands for the value (a NaN or an infinity in a
                format without them).
        """

    @abstractmethod
    def decode(self, code: int) -> Number:
        """The exact value of a code.

        Raises:
            UsageError: not a code of this format.
        """

    @abstractmethod
    def gap(self, value: Number) -> Fraction:
        """The distance between the two neighbours that a finite value inside the range lies
        between.

        Raises:
            UsageError: the value is outside the range, or not finite.
        """

    def error_bound(self, value: Number, rounding: Rounding = NEAREST_EVEN) -> Fraction:
        """How far `decode(encode(value, rounding))` can be from the value: half a gap to nearest, a
        gap otherwise.

        Raises:
            UsageError: the value is outside the range (there is no bound there), or not finite.
        """
        return rounding.error_in_gaps * self.gap(value)

    def covers(self, value: Number) -> bool:
        """Tells whether a value is finite and between `lowest` and `largest`."""
        return is_finite(value) and self.lowest <= Fraction(value) <= self.largest

    def split(self, code: int) -> tuple[str, ...]:
        """The code in binary digits, cut into its fields: `("0", "10000000", "1001001")`."""
        self._check_code(code)
        digits = f"{code:0{self.bits}b}"
        parts: list[str] = []
        for field in self.fields:
            parts.append(digits[: field.bits])
            digits = digits[field.bits :]
        return tuple(parts)

    def _check_code(self, code: int) -> None:
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < 1 << self.bits:  # pyright: ignore[reportUnnecessaryIsInstance], users pass anything
            raise UsageError(f"a code of {self.name} is an integer of {self.bits} bits, not {code!r}")

    def _check_covers(self, value: Number) -> None:
        if not self.covers(value):
            raise UsageError(f"{value} is outside the range of {self.name}, where no bound holds")


def is_finite(value: Number) -> bool:
    """Neither infinite nor NaN; integers and fractions are finite at any size."""
    return not isinstance(value, float) or math.isfinite(value)


class Magnitude(NamedTuple):
    """A finite value as a sign and an exact fraction of integers that is not negative."""

    is_negative: bool
    numerator: int
    denominator: int


def read_magnitude(value: Number, name: str) -> Magnitude:
    """Takes a finite value apart; negative zero keeps its sign.

    Raises:
        UsageError: the value is not finite, or not a number; the message blames the format `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):  # pyright: ignore[reportUnnecessaryIsInstance], users pass anything
        raise UsageError(f"a value is an int, a float or a Fraction, not {value!r}")
    if not is_finite(value):
        raise UsageError(f"{name} has no code for {value}")
    numerator, denominator = value.as_integer_ratio()
    is_negative = numerator < 0 or (numerator == 0 and isinstance(value, float) and math.copysign(1, value) < 0)
    return Magnitude(is_negative, abs(numerator), denominator)


# Binary floating point: a sign, an exponent, a mantissa, from fp64 down to fp4.
#
# [Note: one code line]
# Below the sign bit the codes of a float format, read as integers, grow with the value: 0, the
# subnormals, the normals, then what is special. In units of the gap 2^(e - m) a value with exponent
# e is a whole number q with 2^m <= q < 2^(m+1), or q < 2^m for a subnormal, which has the smallest
# exponent. Its code is ((e - emin) << m) + q. A rounding that carries q up to 2^(m+1) lands on the
# first code of the next exponent by itself, and past the largest finite code by itself when it
# overflows.


class Specials(Enum):
    """Meaning of the codes with the largest exponent."""

    IEEE = "infinities and NaNs"
    """None of them is finite: mantissa zero is an infinity, the others are NaNs."""
    ONE_NAN = "one NaN of each sign, no infinity"
    """All are finite but the one with all mantissa bits set (the "fn" of e4m3fn)."""
    NONE = "none"
    """All are finite."""


class Overflow(Enum):
    """Treatment of values too large for the format, infinities included.

    A finite value too large is rounded as if exponents had no end, and overflows if that is above
    `largest`; so `TOWARD_ZERO` never overflows (IEEE 754-2019, section 7.4) and stochastic rounding
    just above `largest` only sometimes does.
    """

    INFINITY = "infinity"
    NAN = "NaN"
    SATURATE = "largest"


@dataclass(frozen=True, kw_only=True)
class FloatFormat(NumberFormat):
    """1 sign bit, `exponent_bits` (at least 2, biased by half their range), `mantissa_bits` (at
    least 1).

    Args:
        storage_bits: bits that a value takes in memory where that is more than its own; 0 for its
            own.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: Specials = Specials.IEEE
    overflow: Overflow = Overflow.INFINITY
    storage_bits: int = 0

    def __post_init__(self) -> None:
        if self.exponent_bits < 2 or self.mantissa_bits < 1:
            raise UsageError(f"{self.name}: a float has at least 2 exponent bits and 1 mantissa bit")
        has_what_overflow_needs = {
            Overflow.INFINITY: self.specials is Specials.IEEE,
            Overflow.NAN: self.specials is not Specials.NONE,
            Overflow.SATURATE: True,
        }
        if not has_what_overflow_needs[self.overflow]:
            raise UsageError(
                f"{self.name} has no {self.overflow.value} to overflow to: its specials are {self.specials.value}"
            )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def fields(self) -> tuple[Field, ...]:
        """Sign, exponent, mantissa."""
        return (Field("sign", 1), Field("exponent", self.exponent_bits), Field("mantissa", self.mantissa_bits))

    @property
    def bias(self) -> int:
        """Amount by which the exponent field is above the exponent of a normal value."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def smallest_exponent(self) -> int:
        """The exponent of the smallest normal value, and of every subnormal: the field of
        subnormals is 0 but counts as 1.
        """
        return 1 - self.bias

    @property
    def lowest(self) -> Fraction:
        """Minus `largest`."""
        return -self.largest

    @property
    def largest(self) -> Fraction:
        """The largest finite value."""
        return self._magnitude(self._largest_code)

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest positive value that has all mantissa bits for its precision."""
        return _power_of_two(self.smallest_exponent)

    @property
    def smallest_subnormal(self) -> Fraction:
        """The smallest positive value, and the gap between all values up to twice the smallest
        normal one.
        """
        return _power_of_two(self.smallest_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> Fraction:
        """The gap above 1."""
        return _power_of_two(-self.mantissa_bits)

    @property
    def unit_roundoff(self) -> Fraction:
        """Half of `epsilon`: the relative error of `NEAREST_EVEN` is below it for every value from
        `smallest_normal` to `largest`.
        """
        return self.epsilon / 2

    def relative_error_bound(self, rounding: Rounding = NEAREST_EVEN) -> Fraction:
        """Bound of the relative error, for magnitudes from `smallest_normal` to `largest`.

        Subnormals have no such bound.
        """
        return rounding.error_in_gaps * self.epsilon

    def encode(self, value: Number, rounding: Rounding = NEAREST_EVEN) -> int:
        """The code of a value, infinities and NaN included.

        What is too small goes to a subnormal or to zero, with its sign.

        Raises:
            UsageError: a NaN, in a format that has none.
        """
        if isinstance(value, float) and math.isnan(value):
            return self._nan_code()
        if isinstance(value, float) and math.isinf(value):
            return self._with_sign(self._overflow_code(), is_negative=value < 0)
        is_negative, numerator, denominator = read_magnitude(value, self.name)
        exponent = (
            max(_floor_log2(numerator, denominator), self.smallest_exponent) if numerator else self.smallest_exponent
        )
        shift = self.mantissa_bits - exponent
        # [Note: one code line]
        whole = round_magnitude(numerator << max(shift, 0), denominator << max(-shift, 0), rounding)
        code = ((exponent - self.smallest_exponent) << self.mantissa_bits) + whole
        if code > self._largest_code:
            code = self._largest_code if rounding is TOWARD_ZERO else self._overflow_code()
        return self._with_sign(code, is_negative=is_negative)

    def decode(self, code: int) -> float:
        """The value of a code; a double holds every value of every format up to fp64 exactly.

        Raises:
            UsageError: not a code of this format.
        """
        self._check_code(code)
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        magnitude_code = code & ((1 << (self.bits - 1)) - 1)
        if magnitude_code <= self._largest_code:
            return sign * float(self._magnitude(magnitude_code))
        is_infinity = self.specials is Specials.IEEE and magnitude_code == self._largest_code + 1
        return sign * math.inf if is_infinity else math.nan

    def gap(self, value: Number) -> Fraction:
        """The distance between the neighbours of a value: `epsilon` times its power of two, and no
        less among subnormals.
        """
        self._check_covers(value)
        _, numerator, denominator = read_magnitude(value, self.name)
        if not numerator:
            return self.smallest_subnormal
        return _power_of_two(max(_floor_log2(numerator, denominator), self.smallest_exponent) - self.mantissa_bits)

    @cached_property
    def _largest_code(self) -> int:
        """The largest finite code, without the sign."""
        everything = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        return {
            Specials.IEEE: everything - (1 << self.mantissa_bits),
            Specials.ONE_NAN: everything - 1,
            Specials.NONE: everything,
        }[self.specials]

    def _magnitude(self, code: int) -> Fraction:
        exponent_field, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        whole = mantissa if exponent_field == 0 else mantissa + (1 << self.mantissa_bits)
        return whole * _power_of_two(max(exponent_field, 1) - self.bias - self.mantissa_bits)

    def _nan_code(self) -> int:
        if self.specials is Specials.NONE:
            raise UsageError(f"{self.name} has no NaN")
        # A quiet NaN has the highest mantissa bit set (IEEE 754-2019, section 6.2.1).
        is_ieee = self.specials is Specials.IEEE
        return self._largest_code + 1 + (1 << (self.mantissa_bits - 1) if is_ieee else 0)

    def _overflow_code(self) -> int:
        if self.overflow is Overflow.SATURATE:
            return self._largest_code
        return self._largest_code + 1 if self.overflow is Overflow.INFINITY else self._nan_code()

    def _with_sign(self, code: int, *, is_negative: bool) -> int:
        return code | (is_negative << (self.bits - 1))


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def _floor_log2(numerator: int, denominator: int) -> int:
    """The largest e with 2^e <= numerator / denominator, both positive."""
    guess = numerator.bit_length() - denominator.bit_length()
    is_reached = numerator << max(-guess, 0) >= denominator << max(guess, 0)
    return guess if is_reached else guess - 1


# Integers and fixed point: values at equal distances.
#
# Outside the range they saturate; they have no NaN and no infinity.


@dataclass(frozen=True, kw_only=True)
class FixedPoint(NumberFormat):
    """Two's complement: Qm.n has a sign bit, m integer bits and n fraction bits.

    An n-bit integer is Q(n-1).0.

    A code is the value in steps of 2^-n, modulo 2^bits, so there is one zero and one more negative
    value than positive ones. The sign bit is not counted in m (the notation has both habits).
    """

    integer_bits: int
    fraction_bits: int = 0

    def __post_init__(self) -> None:
        if self.integer_bits < 0 or self.fraction_bits < 0 or self.bits < 2:
            raise UsageError(f"{self.name}: two's complement needs a bit beside the sign")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.integer_bits + self.fraction_bits

    @property
    def fields(self) -> tuple[Field, ...]:
        """Sign, integer, fraction, without those that have no bit."""
        parts = (Field("sign", 1), Field("integer", self.integer_bits), Field("fraction", self.fraction_bits))
        return tuple(field for field in parts if field.bits)

    @property
    def step(self) -> Fraction:
        """The distance between neighbours, everywhere."""
        return Fraction(1, 1 << self.fraction_bits)

    @property
    def lowest(self) -> Fraction:
        """Minus 2^m."""
        return Fraction(-(1 << self.integer_bits))

    @property
    def largest(self) -> Fraction:
        """One step below 2^m."""
        return (1 << self.integer_bits) - self.step

    def encode(self, value: Number, rounding: Rounding = NEAREST_EVEN) -> int:
        """The code of a value; outside the range the nearest end, as quantizers do (a processor's
        addition would wrap around).

        Raises:
            UsageError: a NaN or an infinity.
        """
        is_negative, numerator, denominator = read_magnitude(value, self.name)
        steps = round_magnitude(numerator << self.fraction_bits, denominator, rounding)
        half = 1 << (self.bits - 1)
        return max(-half, min(half - 1, -steps if is_negative else steps)) % (2 * half)

    def decode(self, code: int) -> Fraction:
        """The value of a code.

        Raises:
            UsageError: not a code of this format.
        """
        self._check_code(code)
        is_negative = code >> (self.bits - 1)
        return (code - (is_negative << self.bits)) * self.step

    def gap(self, value: Number) -> Fraction:
        """The step."""
        self._check_covers(value)
        return self.step


@dataclass(frozen=True, kw_only=True)
class SignMagnitude(NumberFormat):
    """Integers as a sign bit and a magnitude: as many negative values as positive ones, and two
    zeros.
    """

    magnitude_bits: int

    def __post_init__(self) -> None:
        if self.magnitude_bits < 1:
            raise UsageError(f"{self.name}: sign and magnitude need a bit beside the sign")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.magnitude_bits

    @property
    def fields(self) -> tuple[Field, ...]:
        """Sign, magnitude."""
        return (Field("sign", 1), Field("magnitude", self.magnitude_bits))

    @property
    def step(self) -> Fraction:
        """The distance between neighbours: 1."""
        return Fraction(1)

    @property
    def lowest(self) -> Fraction:
        """Minus `largest`."""
        return -self.largest

    @property
    def largest(self) -> Fraction:
        """All magnitude bits set."""
        return Fraction((1 << self.magnitude_bits) - 1)

    def encode(self, value: Number, rounding: Rounding = NEAREST_EVEN) -> int:
        """The code of a value; a negative value that rounds to zero keeps its sign.

        Outside the range the nearest end.

        Raises:
            UsageError: a NaN or an infinity.
        """
        is_negative, numerator, denominator = read_magnitude(value, self.name)
        magnitude = min(round_magnitude(numerator, denominator, rounding), (1 << self.magnitude_bits) - 1)
        return magnitude | (is_negative << self.magnitude_bits)

    def decode(self, code: int) -> Fraction | float:
        """The value of a code; the second zero is the float -0.0.

        Raises:
            UsageError: not a code of this format.
        """
        self._check_code(code)
        magnitude = code & ((1 << self.magnitude_bits) - 1)
        if not code >> self.magnitude_bits:
            return Fraction(magnitude)
        return Fraction(-magnitude) if magnitude else -0.0

    def gap(self, value: Number) -> Fraction:
        """The step."""
        self._check_covers(value)
        return self.step


# Numbers and codes as a person writes them.

# More is beyond every format's range, and work for nothing.
_MOST_EXPONENT_DIGITS = 4
_EXPONENT = re.compile(r"[eE][+-]?0*([0-9]*)$")
_POWER_OF_TWO = re.compile(r"([+-]?)2(?:\^|\*\*)([+-]?[0-9]{1,5})")
_NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan)", re.IGNORECASE)


def read_number(text: str) -> Number:
    """Reads `3.14159`, `-1e-45`, `1/3`, `2^-149`, `inf`, `nan` or `-0` exactly: no double comes
    between the digits and the format.

    Raises:
        UsageError: not a number, or one with an exponent of more than four digits.
    """
    stripped = text.strip()
    if _NOT_FINITE.fullmatch(stripped):
        return float(stripped)
    power = _POWER_OF_TWO.fullmatch(stripped)
    if power is not None:
        return Fraction(2) ** int(power[2]) * (-1 if power[1] == "-" else 1)
    exponent = _EXPONENT.search(stripped)
    if exponent is not None and len(exponent[1]) > _MOST_EXPONENT_DIGITS:
        raise UsageError(f"the exponent of {text!r} has more than {_MOST_EXPONENT_DIGITS} digits")
    try:
        exact = Fraction(stripped)
    except (ValueError, ZeroDivisionError) as error:
        is_code = stripped[:2].lower() in ("0x", "0b")
        hint = f"; what a code stands for is asked with --bits {stripped}" if is_code else ""
        raise UsageError(
            f"cannot read the number {text!r}: write 3.14159, -1e-45, 1/3, 2^-149, inf, nan or -0{hint}"
        ) from error
    return -0.0 if not exact and stripped.startswith("-") else exact


def read_code(text: str, format: NumberFormat) -> int:  # noqa: A002, the word is format
    """Reads a code: `0x4049`, `0b0100...`, or, without a prefix, exactly as many binary or
    hexadecimal digits as the format has.

    Spaces, `_` and `|` between digits are skipped.

    Raises:
        UsageError: not a code of the format.
    """
    digits = re.sub(r"[\s_|]", "", text).lower()
    hex_digits = -(-format.bits // 4)
    is_binary = re.fullmatch(rf"0b[01]+|[01]{{{format.bits}}}", digits) is not None
    if not is_binary and re.fullmatch(rf"0x[0-9a-f]+|[0-9a-f]{{{hex_digits}}}", digits) is None:
        raise UsageError(
            f"cannot read the bits {text!r}: write a code of {format.name} as 0x..., 0b..., or as all its {format.bits} binary "
            f"or {hex_digits} hexadecimal digits"
        )
    code = int(digits, 2 if is_binary else 16)
    if code >> format.bits:
        raise UsageError(f"{text!r} is more than the {format.bits} bits of {format.name}")
    return code
