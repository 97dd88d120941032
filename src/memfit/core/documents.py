"""Readers of small, untrusted JSON files (plans, manifests, headers, indices), and a writer.

In: a path, or text. Out: plain Python values, or an error that says what is wrong. Reading takes at
most the file's own size and a stated number of bytes, and never blocks on a pipe.

[Note: what JSON takes in memory]
Two bytes of text can become a hundred bytes of Python: `[],` takes 64 and a place in its list,
`"a":{},` a dictionary's slot, a pair and a key besides. So before a text is read, its marks are
counted, which costs no memory, and each is charged what the values that it stands for take at most
while they are read (CPython 3.11 to 3.14, 64 bits; `tests/unit/test_documents.py` measures the
worst texts of each kind). Marks inside of texts are charged too: that errs on the safe side, and a
long text without marks, such as a manifest's checksums, costs its own length.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

from memfit.core.errors import UsageError
from memfit.core.limits import MIB, format_bytes

ROOM_BYTES = 16 * MIB
"""Default for the memory that parsing a document may take beside the document's own size.
"""
CONFIG_LIMIT_BYTES = 1 * MIB
"""Maximum size of a model's `config.json`.
"""
PLAN_LIMIT_BYTES = 64 * MIB
"""Maximum size of a plan's file.
"""
DEEPEST = 64
"""Maximum nesting depth of containers, well below the interpreter's recursion limit, so that a
value that was read can be shown, compared and copied.
"""
_COPIES = 2
"""Copies of a text that exist while it is parsed: the text itself, and the strings made from it.
"""
_WIDEST_CHARACTER = 4
_OBJECT_BYTES = 250
_LIST_BYTES = 130
_MEMBER_BYTES = 130
_ELEMENT_BYTES = 45
_TEXT_BYTES = 80


def read_document(path: Path, *, limit_bytes: int) -> bytes:
    """Reads a small file whole.

    Args:
        path: a plain file, or a link to one.
        limit_bytes: a larger file is refused.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: it is not a plain file, or larger than the limit.
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


def write_document(path: Path, text: str) -> None:
    """Writes a small file whole or not at all; directories above it are made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            # Before the name changes: after a crash the name would stand for an empty file.
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise


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
        room_bytes: the most memory that parsing may take beside the text.
        is_strict: False accepts NaN and infinities, which are not JSON but are written by Python's
            own writer (configurations of models have them).
        deepest: maximum nesting depth of containers.
        any_text: accepts strings with lone surrogates, by which Python represents file names that
            are not UTF-8. Such strings cannot be encoded, so that writing or printing them may
            fail.

    Raises:
        ValueError: the text is not JSON or not UTF-8, has a lone surrogate, a repeated key, NaN or
            an infinity (a number that is too large included), is nested too deeply, or could take
            more memory than allowed.
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
    """Returns an upper bound of the memory that parsing a JSON text takes beside it, in bytes."""
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
    """Checks the nesting depth of a JSON value. Raises `ValueError` if it is above `deepest`."""
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
    """Checks that no string in a JSON value has a lone surrogate. Raises `ValueError`. Recursive:
    the depth must have been checked before.
    """
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


def object_in(what: str, value: object) -> dict[str, object]:
    """Returns a value that must be a JSON object. Raises `TypeError` if it is not."""
    if not isinstance(value, dict):
        raise TypeError(f"{what} must be a JSON object, not {type(value).__name__}")
    return cast("dict[str, object]", value)


def list_in(what: str, value: object) -> list[object]:
    """Returns a value that must be a JSON list. Raises `TypeError` if it is not."""
    if not isinstance(value, list):
        raise TypeError(f"{what} must be a JSON list, not {type(value).__name__}")
    return cast("list[object]", value)


# Paths as people write them.
#
# In: a text or a `Path`, with `~` for a home. Out: a `Path` that the file system can be asked
# about, or an error that says what is wrong with the name.

# Linux: NAME_MAX, and PATH_MAX without its end.
_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095


def user_path(written: str | Path) -> Path:
    """Returns a path with the home of `~` in it.

    Raises:
        UsageError: no file can have this name.
    """
    try:
        path = Path(written).expanduser()
        encoded = os.fsencode(path)
    except (RuntimeError, ValueError) as error:  # an unknown user; half of a surrogate pair
        raise UsageError(f"the path {str(written)!r:.80} cannot be used: {error}. Write it in full") from error
    if (
        b"\0" in encoded
        or len(encoded) > _LONGEST_PATH_BYTES
        or max(map(len, encoded.split(b"/"))) > _LONGEST_NAME_BYTES
    ):
        raise UsageError(
            f"no file can be called {str(written)!r:.80}: a name has at most {_LONGEST_NAME_BYTES} bytes, a path {_LONGEST_PATH_BYTES}, and none a zero. "
            "Give a shorter path"
        )
    return path
