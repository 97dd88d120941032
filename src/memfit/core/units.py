"""Conversion between bytes and text with units; seconds as text.

In: integers of bytes, or a user's `"8 GiB"`. Out: integers of bytes, or text. Binary (KiB, MiB,
GiB, TiB) and decimal (kB, MB, GB, TB) units are both read, and one letter (K, M, G, T) as docker,
Slurm and systemd read it: binary. Only binary ones are written.
"""

from __future__ import annotations

import re

from memfit.core.errors import UsageError, shown

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
MOST_BYTES = (1 << 63) - 1
"""Largest size that is read: what a file can have.
"""
_LONGEST_TEXT = 200

_UNITS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB, "ki": KIB, "mi": MIB, "gi": GIB, "ti": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*$")


def parse_bytes(size: int | str) -> int:
    """Reads a size: an integer of bytes, or text such as `"1.25GiB"`, `"400 MB"`, `"8G"` (8 GiB).

    Args:
        size: bytes as an integer, or a number with a unit.

    Returns:
        Whole bytes, rounded down.

    Raises:
        UsageError: the size is negative, has an unknown unit or parts of a byte, or is no size at
            all.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):  # pyright: ignore[reportUnnecessaryIsInstance], users pass anything
        raise UsageError(f"a size is an integer of bytes or text such as '8GiB', not {shown(size)}")
    if isinstance(size, int):
        return _in_range(size, size)
    match = _PATTERN.match(size) if len(size) <= _LONGEST_TEXT else None
    if match is None or match.group(2).lower() not in _UNITS:
        raise UsageError(
            f"cannot read the size {shown(size)}: write a number and a unit, such as '8GiB', '512 MiB' or '10GB'"
        )
    number, unit = match.group(1), match.group(2).lower()
    whole, _, fraction = number.partition(".")
    if fraction.strip("0") and _UNITS[unit] == 1:
        raise UsageError(f"the size {size!r} is not a whole number of bytes: write its unit, such as '{number}GiB'")
    scale = _UNITS[unit]
    # Integer arithmetic: a float of 2**53 bytes and more would lose whole bytes.
    fraction_bytes = int(fraction) * scale // 10 ** len(fraction) if fraction else 0
    return _in_range(int(whole or "0") * scale + fraction_bytes, size)


def _in_range(nbytes: int, size: int | str) -> int:
    if nbytes < 0:
        raise UsageError(f"a size cannot be negative: {shown(size)}")
    if nbytes > MOST_BYTES:
        raise UsageError(
            f"the size {shown(size)} is more than any machine has: write at most {format_bytes(MOST_BYTES)}"
        )
    return nbytes


def format_bytes(size_bytes: int) -> str:
    """Writes bytes for a person: `"1.25 GiB"`, `"37.0 MiB"`, `"512 B"`."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    for scale, unit, digits in ((TIB, "TiB", 2), (GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if size >= scale:
            return f"{sign}{size / scale:.{digits}f} {unit}"
    return f"{sign}{size} B"


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Writes seconds for a person: `"0.0123 s"`, `"7.1 s"`, `"2979 s"`; with so many digits, or as
    many as whole seconds have.
    """
    return f"{seconds:.{digits}g} s" if abs(seconds) < 10**digits - 0.5 else f"{seconds:.0f} s"


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple
