"""Files that lie: a structure-aware mutator of JSON texts and of the binary formats that carry them.

In: a valid file and a random generator. Out: a file that is nearly valid: a value of the wrong kind or size, a key missing, doubled or unknown, bytes cut,
flipped or added. Where a format has a checksum, it is made right again, so that what is behind it is met.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**40, 0.5, -0.0, 1e308, "", "x", "nan", "NaN", "../../etc/passwd",
    "/etc/passwd", "\x00", "a" * 600, "é\ud800", "float32", "int4", "pickle", [], [[]], {}, {"$": "tensor", "name": "0"}, {"$": "tuple", "items": 3}, {"$": []},
    [0] * 70, [1 << 40, 1 << 40], [-1], [0.5], {"": None}, "homes-0.bin", "state.json", "device",
    (1 << 63) - 8, (1 << 63) - 4096, (1 << 62) + 1, 5e-324, -1e308, 0.1 + 0.2, [10**300] * 300, [0, 1 << 62, 1 << 62], [[[[1]]]], "a" * 100_000, "Homes-0.bin",
    "model.SAFETENSORS", "e\u0301", "\u00e9", "\u202etxt.exe", "\x1b]0;x\x07", "x\ny", "\ufeff", "CON", "..", ".", "~", "$HOME", "%s%n", "{0}",
    "None", "1e400", "0x10",
    {"$": "float", "value": "nan"}, {"$": "bytes", "base64": "AAAA"}, {"$": "dict", "items": [[[1], 2]]}, {"float": "inf"}, {"tuple": []}, {"map": {"": {}}},
)  # fmt: skip
"""Values that a reader may not expect."""

RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "9" * 400,
    "9" * 5000,
    "[" * 200,
    '{"a":' * 200,
    "[" * 100_000,
    "[" * 120 + "]" * 120,
    "[" * 900 + "]" * 900,
    '{"a":' * 900 + "1" + "}" * 900,
    "[" + "[]," * 5000 + "0]",
    "1.0",
    "1e2",
    "-0",
    "01",
    '"\\ud83d"',
    '"\\ud83d\\ude00' + "x" * 5000 + '"',
    "\\u0000",
    "tru",
    "'",
    "",
)
"""Texts that stand in the place of a value; most of them are no JSON."""

NESTING = (
    ("[", "]"),
    ('{"a":', "}"),
    ('[{"a":', "}]"),
    ('{"$":"tuple","items":[', "]}"),
    ('{"tuple":[', "]}"),
    ('{"map":{"a":', "}}"),
)
"""What can be put around a value any number of times."""

_MARK = "\x01here\x01"


def mutate_json(value: Any, chance: random.Random) -> str:
    """A text of one to three changes to a JSON value."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        changed = _mutate_value(changed, chance)
    if chance.random() < 0.15:
        text = json.dumps(_with_mark(changed, chance))
        return text.replace(json.dumps(_MARK), _raw(chance), 1)
    text = json.dumps(changed)
    if chance.random() < 0.05:
        # A key that comes twice, at any depth.
        starts = [at for at, mark in enumerate(text) if mark == "{"]
        at = chance.choice(starts) if starts else -1
        known = text[at + 1 :].split('"', 2)
        key = known[1] if len(known) > 2 and not known[0].strip() else "x"
        text = f"{text[: at + 1]}{json.dumps(key)}: {json.dumps(chance.choice(HOSTILE))}, {text[at + 1 :]}"
    return text


def _raw(chance: random.Random) -> str:
    if chance.random() < 0.3:
        opening, closing = chance.choice(NESTING)
        depth = int(1.02 ** chance.uniform(0, 400))  # up to 2750, most of them few
        return opening * depth + chance.choice(("1", "[]", "null", '"x"')) + closing * depth
    if chance.random() < 0.1:
        return chance.choice("-0123456789.eE") * chance.randrange(1, 100) + chance.choice("019") * chance.randrange(
            5000
        )
    return chance.choice(RAW)


def mutate_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut, repeated or added."""
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = chance.randbytes(chance.choice((1, 8, 64)))
            case 3:
                del found[at : at + chance.choice((1, 8, 64))]
            case _:
                found[at : at + 8] = chance.choice(
                    (
                        0,
                        1,
                        len(content),
                        1 << 20,
                        1 << 40,
                        (1 << 63) - 8,
                        (1 << 63) - 1,
                        1 << 63,
                        (1 << 64) - 8,
                        (1 << 64) - 1,
                    )
                ).to_bytes(8, "little")
    return bytes(found)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        top = stack.pop()
        keys: Any = top.keys() if isinstance(top, dict) else range(len(top)) if isinstance(top, list) else ()
        for key in keys:
            found.append((top, key))
            if isinstance(top[key], dict | list):
                stack.append(top[key])
    return found


def _walk(value: Any, chance: random.Random) -> tuple[Any, Any]:
    """A (container, key), drawn from the top down: a field that comes once is met as often as one of a thousand."""
    holder = value
    while True:
        key = chance.choice(list(holder.keys())) if isinstance(holder, dict) else chance.randrange(len(holder))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.25:
            return holder, key
        holder = inner


def _other_form(value: Any, chance: random.Random) -> Any:
    """The same number or text in another form, or one container more around it."""
    forms: list[Any] = [[value], {"x": value}, str(value), repr(value)]
    if isinstance(value, int) and not isinstance(value, bool):
        forms += [float(value) if abs(value) < 1 << 1000 else 0.5, -value, value << 40, value * 10**400, bool(value)]
    if isinstance(value, float):
        forms += [int(value) if value - value == 0 else 0, -value, value * 1e300]
    if isinstance(value, str):
        forms += [
            value.upper(),
            value + "\ud800",
            value + "\x00",
            value.replace(".", "/"),
            list(value[:50]),
            value.encode(errors="surrogatepass").hex(),
        ]
    if isinstance(value, list):
        forms += [dict(enumerate(value)), value[::-1], value[:1] * len(value)]
    if isinstance(value, dict):
        forms += [list(value), [list(pair) for pair in value.items()], dict.fromkeys(value)]
    return chance.choice(forms)


def _mutate_value(value: Any, chance: random.Random) -> Any:
    places = _places(value)
    if not places:
        return copy.deepcopy(chance.choice(HOSTILE))
    holder, key = _walk(value, chance) if chance.random() < 0.5 else chance.choice(places)
    match chance.randrange(14):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(("x", "", "__class__", "$", "name", f"{key}x"))] = copy.deepcopy(
                chance.choice(HOSTILE)
            )
        case 2:
            other, from_key = chance.choice(places)
            holder[key] = copy.deepcopy(
                other.get(from_key)
                if isinstance(other, dict)
                else other[from_key % max(1, len(other))]
                if other
                else None
            )
        case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += chance.choice((-4096, -1, 1, 8, 4096, 1 << 32))
        case 4 if isinstance(holder[key], list):
            holder[key] = holder[key] * chance.choice((0, 2, 3))
        case 6 | 7:
            holder[key] = _other_form(holder[key], chance)
        case 8:
            other, from_key = _walk(value, chance)
            holder[key], other[from_key] = copy.deepcopy(other[from_key]), copy.deepcopy(holder[key])
        case 9 if isinstance(holder, dict):
            # The same key to a careless eye: another case, another way to write its letters, a mark that does not show.
            known = holder.pop(key)
            holder[
                chance.choice(
                    (
                        key.upper(),
                        key.capitalize(),
                        key + "\u200b",
                        "\ufeff" + key,
                        key.replace("e", "e\u0301"),
                        key * 1000,
                    )
                )
            ] = known
        case 5 if isinstance(holder[key], str):
            holder[key] = chance.choice((holder[key] + "x", holder[key][:-1], holder[key] * 40, "../" + holder[key]))
        case _:
            holder[key] = copy.deepcopy(chance.choice(HOSTILE))
    return value


def _with_mark(value: Any, chance: random.Random) -> Any:
    places = _places(value)
    if not places:
        return _MARK
    holder, key = chance.choice(places)
    holder[key] = _MARK
    return value
