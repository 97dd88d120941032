"""Integers and fixed point: values at equal distances.

Outside the range they saturate; they have no NaN and no infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from memfit.core.errors import UsageError
from memfit.formats.number_format import Field, Number, NumberFormat, read_magnitude
from memfit.formats.rounding import NEAREST_EVEN, Rounding, round_magnitude


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
