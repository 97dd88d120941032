"""The series of limits at which mixed plans are looked for.

In: the least bytes that are needed, the bytes that are asked about. Out: numbered limits, the same
for every question about a model. See [Note: a larger limit is never slower] in `planning.widening`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_LIMITS_AN_OCTAVE = 8
# Models of more units than so many are looked at with fewer limits: a half of these, and so on.
_MANY_UNITS, _OF_MANY_UNITS = 40, 12
# Of few units a plan is judged soon: then the series has so many limits an octave, and mixtures are
# solved for at every so-manieth of them. At the others the best is polished.
_FEW_UNITS, _MANY_LIMITS, _SOLVED_EVERY = 8, 48, 4


def series_of_limits(least: int, asked: int, units: int) -> Iterator[tuple[int, int]]:
    """Yields the series' number and bytes of each limit, from the last that is not above the least
    to the first that is not below the one asked about.

    Args:
        least: bytes that are needed at least.
        asked: bytes that are asked about.
        units: of the model.
    """
    an_octave = _MANY_LIMITS if units <= _FEW_UNITS else _LIMITS_AN_OCTAVE
    if units > _MANY_UNITS:
        an_octave = _OF_MANY_UNITS
    while units > _MANY_UNITS and an_octave > 1:
        an_octave, units = an_octave // 2, units // 2
    number = math.floor(an_octave * math.log2(max(1, least)))
    while True:
        limit = math.ceil(2 ** (number / an_octave))
        yield number, limit
        if limit >= asked:
            return
        number += 1


def limits_a_solution(units: int) -> int:
    """Returns how many limits of the series there are for each at which mixtures are solved for."""
    return _SOLVED_EVERY if units <= _FEW_UNITS else 1
