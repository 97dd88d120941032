"""Names of modules that differ in a number, such as those of equal layers, told as one.

In: dotted names, or texts with one in them. Out: names with ranges (`layers.0-31`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

# A part of a dotted name that is a number; the name may stand inside a text, before a colon.
_NUMBER = re.compile(r"(?:(?<=[. ])|^)(\d+)(?=[.:]|$)")


def split_number(name: str) -> tuple[str, int | None, str]:
    """A name as (what stands before its first number, the number, what stands behind it); None
    where it has none.
    """
    head, number, tail = (*_NUMBER.split(name, maxsplit=1), "", "")[:3]
    return head, int(number) if number else None, tail


def joined_names(names: Iterable[str]) -> str:
    """Names, each once; those that differ only in their first number as ranges (`layers.0-31`)."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        head, number, tail = split_number(name)
        numbers.setdefault((head, tail), []).extend([] if number is None else [number])
    joined: list[str] = []
    for (head, tail), found in numbers.items():
        # A run of consecutive numbers keeps its distance to their positions.
        runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(found)), key=lambda pair: pair[1] - pair[0])]
        shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        joined.append(f"{head}{shown}{tail}")
    return ", ".join(joined)
