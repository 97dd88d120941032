"""Which of its two neighbours a value becomes.

In: how far a value lies from the neighbour that is nearer to zero, as a fraction of the gap. Out:
whether it goes to the other one. Every format asks here, so that a rule means the same in all of
them.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from fractions import Fraction

from memfit.core.errors import UsageError


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
