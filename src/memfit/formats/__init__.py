"""Number formats as they are in memory: bits, range, special values, rounding error.

Values to bit patterns and back.

In: exact values (`int`, `float`, `Fraction`) or codes (the bits of a number, read as an unsigned
integer). Out: codes, exact values, and facts as exact fractions. Nothing here is on the way of a
tensor: one number at a time, exact integer arithmetic, no torch. Who rounds to which neighbour is
`rounding`; a format is a `FloatFormat`, `FixedPoint`, `SignMagnitude` or `BlockFormat`; `catalog`
names them.
"""

from __future__ import annotations

from memfit.formats.blockwise import BlockFormat, ScaleBlock
from memfit.formats.catalog import FORMATS, decode, encode, find_format
from memfit.formats.floating import FloatFormat, Overflow, Specials
from memfit.formats.integers import FixedPoint, SignMagnitude
from memfit.formats.notation import read_code, read_number
from memfit.formats.number_format import Field, Number, NumberFormat
from memfit.formats.rounding import NEAREST_EVEN, TOWARD_ZERO, Rounding, Stochastic, find_rounding

__all__ = [
    "FORMATS",
    "NEAREST_EVEN",
    "TOWARD_ZERO",
    "BlockFormat",
    "Field",
    "FixedPoint",
    "FloatFormat",
    "Number",
    "NumberFormat",
    "Overflow",
    "Rounding",
    "ScaleBlock",
    "SignMagnitude",
    "Specials",
    "Stochastic",
    "decode",
    "encode",
    "find_format",
    "find_rounding",
    "read_code",
    "read_number",
]
