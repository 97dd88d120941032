"""The interface of number formats, and the conversion of values that come in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from memfit.core.errors import UsageError
from memfit.formats.rounding import NEAREST_EVEN, Rounding

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
