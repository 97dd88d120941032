"""Binary floating point: a sign, an exponent, a mantissa, from fp64 down to fp4.

[Note: one code line]
Below the sign bit the codes of a float format, read as integers, grow with the value: 0, the
subnormals, the normals, then what is special. In units of the gap 2^(e - m) a value with exponent e
is a whole number q with 2^m <= q < 2^(m+1), or q < 2^m for a subnormal, which has the smallest
exponent. Its code is ((e - emin) << m) + q. A rounding that carries q up to 2^(m+1) lands on the
first code of the next exponent by itself, and past the largest finite code by itself when it
overflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property

from memfit.core.errors import UsageError
from memfit.formats.number_format import Field, Number, NumberFormat, read_magnitude
from memfit.formats.rounding import NEAREST_EVEN, TOWARD_ZERO, Rounding, round_magnitude


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
