"""Small JSON files: what may be in them, and that reading one takes no more memory than was reckoned before."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from memfit.core.documents import ROOM_BYTES, parse_json, parsed_bytes, read_document

WORST = {
    "empty lists": "[" + ",".join(["[]"] * 60_000) + "]",
    "lists of one": "[" + ",".join(["[9]"] * 60_000) + "]",
    "empty objects": "[" + ",".join(["{}"] * 60_000) + "]",
    "objects of one": "[" + ",".join(['{"a":1}'] * 40_000) + "]",
    "objects of six": "[" + ",".join(['{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}'] * 10_000) + "]",
    "one object": "{" + ",".join(f'"{n:x}":[]' for n in range(43_700)) + "}",
    "one object just grown": "{" + ",".join(f'"{n:x}":1' for n in range(43_693)) + "}",
    "whole numbers": "[" + ",".join(["1000"] * 80_000) + "]",
    "long numbers": "[" + ",".join(["9" * 19] * 40_000) + "]",
    "floats": "[" + ",".join(["1.5"] * 80_000) + "]",
    "texts": "[" + ",".join(['"ab"'] * 60_000) + "]",
    "escaped texts": "[" + ",".join(['"\\u0101"'] * 60_000) + "]",
    "one wide text": json.dumps("a" * 500_000 + "\U0001f600"),
    "wide bytes": json.dumps("a" * 500_000 + "\U0001f600", ensure_ascii=False),
    "nested": ("[" * 400 + "]" * 400 + ",") * 100 + "0",
    "nested objects": "[" + ",".join(['{"a":' * 300 + "1" + "}" * 300] * 100) + "]",
}
WORST["nested"] = f"[{WORST['nested']}]"


@pytest.mark.parametrize("kind", WORST)
def test_reading_takes_no_more_than_was_reckoned(kind: str) -> None:
    content = WORST[kind].encode()
    tracemalloc.start()
    try:
        parse_json(content, room_bytes=1 << 40, deepest=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= parsed_bytes(content) + 10_000


def test_a_text_that_could_take_too_much_is_refused_before_it_is_read() -> None:
    content = b"[" + b"[]," * 200_000 + b"0]"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"could take .* GiB to read|could take .* MiB to read"):
            parse_json(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    # A long text of few values is none of these: a manifest's checksums.
    assert parse_json(json.dumps("0" * (ROOM_BYTES // 2 - 100))) == "0" * (ROOM_BYTES // 2 - 100)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "a": 2}', "a key is repeated"),
        ("NaN", "NaN is not a number"),
        ("[-Infinity]", "-Infinity is not a number"),
        ("1e999", "1e999 is too large"),
        ("[" * 100_000 + "]" * 100_000, "nested too deep|nested more than 64|could take"),
        ('{"a":' * 20_000 + "0" + "}" * 20_000, "nested too deep|nested more than 64|could take"),
        ("tru", "Expecting value"),
        ("9" * 5000, "digits"),
        ("", "Expecting value"),
        (r'["\ud800"]', "half of a surrogate pair"),
        (r'{"a": [{"\uDFFF": 1}]}', "half of a surrogate pair"),
        (b"\xff\xfe\x00", "codec|Expecting|decode"),
    ],
)
def test_what_is_no_json_of_ours_is_refused(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


def test_texts_that_utf_8_does_not_know_are_read_where_they_may_be() -> None:
    for text in ("\ud800", "a\udc80b", "whole \U0001f600, \\ud800"):
        assert parse_json(json.dumps({text: [text]}), any_text=True) == {text: [text]}
    whole = "\U0001f600 \\ud800"
    assert parse_json(json.dumps([whole])) == [whole]


def test_only_plain_files_are_read_and_nothing_waits(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("12345")
    assert read_document(tmp_path / "plain", limit_bytes=5) == b"12345"
    with pytest.raises(ValueError, match="more than"):
        read_document(tmp_path / "plain", limit_bytes=4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(ValueError, match="not a plain file"):
            read_document(path, limit_bytes=1 << 20)
    with pytest.raises(IsADirectoryError):
        read_document(tmp_path, limit_bytes=1 << 20)
    with pytest.raises(FileNotFoundError):
        read_document(tmp_path / "nothing", limit_bytes=1)


def test_configurations_may_have_what_python_writes() -> None:
    assert parse_json('{"limits": [0.0, Infinity]}', is_strict=False) == {"limits": [0.0, float("inf")]}
    with pytest.raises(ValueError, match="repeated"):
        parse_json('{"a": 1, "a": NaN}', is_strict=False)
