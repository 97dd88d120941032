"""Small JSON files that anybody may have written: plans, manifests, headers, indices.

In: a path, or text. Out: plain values, read within a room that is known before; or an error that says what is wrong. Nothing waits for a pipe, and nothing
takes more memory than the file's own size and the room.

[Note: what JSON takes in memory]
Two bytes of text can become a hundred bytes of Python: `[],` takes 64 and a place in its list, `"a":{},` a dictionary's slot, a pair and a key besides. So before a
text is read, its marks are counted, which costs no memory, and each is charged what the values that it stands for take at most while they are read
(CPython 3.11 to 3.14, 64 bits; `tests/unit/test_documents.py` measures the worst texts of each kind). Marks inside of texts are charged too: that
errs on the safe side, and a long text without marks, such as a manifest's checksums, costs its own length.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

from memfit.core.units import MIB, format_bytes

ROOM_BYTES = 16 * MIB
"""Memory that reading a document may take beside its own size, where nothing else vouches for it."""
CONFIG_LIMIT_BYTES = 1 * MIB
"""A longer `config.json` of a model is none."""
DEEPEST = 64
"""Containers in containers, at most. Well below the interpreter's own limit: whoever shows, compares or copies a value that was read must not meet that."""
_COPIES = 2
"""The text as Python has it, and the texts in it."""
_WIDEST_CHARACTER = 4
_OBJECT_BYTES = 250
_LIST_BYTES = 130
_MEMBER_BYTES = 130
_ELEMENT_BYTES = 45
_TEXT_BYTES = 80


def read_document(path: Path, *, limit_bytes: int) -> bytes:
    """The bytes of a small file.

    Args:
        path: a plain file, or a link to one.
        limit_bytes: more are refused.

    Raises:
        OSError: the system. ValueError: not a plain file, or too long.
    """
    # Without waiting: a pipe in its place would hang the reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a plain file")
        if found.st_size > limit_bytes:
            raise ValueError(
                f"it has {format_bytes(found.st_size)}, more than the {format_bytes(limit_bytes)} that such a file may have"
            )
        return file.read(found.st_size)


def parse_json(
    text: str | bytes,
    *,
    room_bytes: int = ROOM_BYTES,
    is_strict: bool = True,
    deepest: int = DEEPEST,
    any_text: bool = False,
) -> Any:
    """Reads one JSON value.

    Memory: at most `room_bytes` beside the text. See [Note: what JSON takes in memory].

    Args:
        text: in UTF-8.
        room_bytes: see above.
        is_strict: False takes what Python's own writer writes and JSON does not know: NaN, infinities (configurations of models have them).
        deepest: containers in containers.
        any_text: takes texts that have no bytes in UTF-8 (half of a surrogate pair: how Python has file names that are not UTF-8). Else whoever
            writes or prints such a text would fail.

    Raises:
        ValueError: not JSON; not UTF-8; half of a surrogate pair; a repeated key; NaN or an infinity, be it as a number that is too large;
            nested too deep; or it could take more memory.
    """
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    needed = parsed_bytes(content)
    if needed > room_bytes:
        raise ValueError(
            f"its {len(content)} bytes could take {format_bytes(needed)} to read, more than the {format_bytes(room_bytes)} that are allowed beside them"
        )
    try:
        value = json.loads(
            content.decode(),
            object_pairs_hook=_without_repetition,
            parse_constant=_refuse_constant if is_strict else None,
            parse_float=_finite if is_strict else None,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    check_depth(value, deepest)
    if not any_text and b"\\ud" in content.lower():
        _check_texts(value)
    return value


def parsed_bytes(content: bytes) -> int:
    """The most memory that reading a JSON text may take beside it."""
    is_plain = content.isascii() and b"\\u" not in content
    return (
        _COPIES * (1 if is_plain else _WIDEST_CHARACTER) * len(content)
        + _OBJECT_BYTES * content.count(b"{")
        + _LIST_BYTES * content.count(b"[")
        + _MEMBER_BYTES * content.count(b":")
        + _ELEMENT_BYTES * content.count(b",")
        + _TEXT_BYTES * (content.count(b'"') // 2)
    )


def check_depth(value: Any, deepest: int) -> None:
    """Refuses a JSON value with more than so many containers in one another. Raises `ValueError`."""
    open_ones: list[Iterator[Any]] = [iter((value,))]
    while open_ones:
        for inner in open_ones[-1]:
            if isinstance(inner, dict | list):
                if len(open_ones) > deepest:
                    raise ValueError(f"it is nested more than {deepest} deep")
                held = cast("dict[str, Any] | list[Any]", inner)
                open_ones.append(iter(held.values() if isinstance(held, dict) else held))
                break
        else:
            open_ones.pop()


def _check_texts(value: Any) -> None:
    """Refuses a JSON value that has a text with half of a surrogate pair. Raises `ValueError`. Its depth was checked."""
    if isinstance(value, str):
        if any("\ud800" <= one <= "\udfff" for one in value):
            raise ValueError(f"{value!r:.80} is no text: it has half of a surrogate pair")
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            _check_texts(key)
            _check_texts(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            _check_texts(inner)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of the format")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise ValueError(f"{text[:40]} is too large for a number of the format")
    return value
