"""JSON as the store writes it, and nothing else.

In: text of a file that anybody may have changed. Out: plain values; a repeated key and numbers that JSON does not know are errors.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn


def read_strict_json(text: str | bytes) -> Any:
    """Reads one JSON value.

    Raises:
        ValueError: not JSON, a repeated key, NaN or an infinity. RecursionError: nested too deep.
    """
    return json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of the format")
