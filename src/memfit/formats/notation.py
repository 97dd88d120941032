"""Numbers and codes as a person writes them."""

from __future__ import annotations

import re
from fractions import Fraction

from memfit.core.errors import UsageError
from memfit.formats.number_format import Number, NumberFormat

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
