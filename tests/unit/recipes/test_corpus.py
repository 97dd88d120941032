from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.integrations.recipes import corpus

# How GPT-2 cuts text into words before merging: Radford et al. 2019, section 2.2, and the pattern of its encoder.
WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


build_tokenizer = functools.cache(corpus.build_tokenizer)


def byte_letters() -> dict[int, str]:
    """Each byte's printable stand-in in the merges file: itself where printable, else 256 and up in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def merge_by_hand(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding by its definition: merge the earliest-learnt pair until none is left."""
    letters = byte_letters()
    parts = [letters[byte] for byte in word.encode()]
    while True:
        pairs = {pair: ranks[pair] for pair in itertools.pairwise(parts) if pair in ranks}
        if not pairs:
            return parts
        left, right = min(pairs, key=pairs.__getitem__)
        place = 0
        while place < len(parts) - 1:
            if (parts[place], parts[place + 1]) == (left, right):
                parts[place : place + 2] = [left + right]
            place += 1


def read_merges() -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in corpus.MERGES_PATH.read_text(encoding="utf-8").splitlines():
        left, right = line.split(" ")
        merges.append((left, right))
    return merges


def test_the_vocabulary_has_16384_tokens_and_every_prefix_of_its_merges_is_one() -> None:
    merges = read_merges()
    known = set(byte_letters().values())
    assert len(known) == 256
    for left, right in merges:
        assert left in known
        assert right in known
        assert left + right not in known
        known.add(left + right)
    assert len(known) + 1 == 16_384
    assert corpus.MERGES_PATH.stat().st_size < 1_000_000


@pytest.mark.parametrize("vocabulary_size", [257, 512, 8192, 16_384])
def test_tokens_are_those_of_byte_pair_encoding_by_its_definition(vocabulary_size: int) -> None:
    tokenizer = corpus.build_tokenizer(vocabulary_size)
    ranks = {pair: rank for rank, pair in enumerate(read_merges()[: vocabulary_size - 257])}
    text = Path(corpus.__file__).read_text(encoding="utf-8")[:6000] + "\n\tüñïçødé 漢字 \x00\x7f 'll\r\n   x\n"
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert encoding.tokens == [part for word in WORDS.findall(text) for part in merge_by_hand(word, ranks)]
    assert all(0 < number < vocabulary_size for number in encoding.ids)


@settings(max_examples=30)
@given(st.text(max_size=200))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = build_tokenizer(16_384)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("vocabulary_size", [0, 256, 16_385])
def test_a_size_that_the_merges_cannot_give_is_refused(vocabulary_size: int) -> None:
    with pytest.raises(ValueError, match=r"choose from 257 to 16384"):
        corpus.build_tokenizer(vocabulary_size)


def test_text_is_sorted_source_without_packages_tests_and_tables(tmp_path: Path) -> None:
    kept = {"b.py": "b = 1\n", "a/z.py": "z = 1\n", "a.py": "a = 1\n", "json/__init__.py": "j = 1\n"}
    left_out = [
        "site-packages/x.py",
        "dist-packages/x.py",
        "test/x.py",
        "unittest/tests/x.py",
        "idlelib/x.py",
        "encodings/cp1.py",
        "_sysconfigdata__linux.py",
        "notes.txt",
    ]
    for name in [*kept, *left_out]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(kept.get(name, "left out\n"), encoding="utf-8")
    (tmp_path / "empty.py").touch()
    (tmp_path / "latin.py").write_bytes(b"# \xe9t\xe9\n")
    assert list(corpus.iterate_text(tmp_path)) == [kept[name] for name in sorted(kept)]


def test_a_folder_without_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python source"):
        list(corpus.iterate_text(tmp_path))


def test_tokens_of_files_are_joined_by_the_end_of_text_mark_and_stop_at_the_limit(tmp_path: Path) -> None:
    texts = [f"value_{number} = {number}\n" * (number + 1) for number in range(70)]
    for number, text in enumerate(texts):
        (tmp_path / f"f{number:03}.py").write_text(text, encoding="utf-8")
    tokenizer = corpus.build_tokenizer(1000)

    def parts() -> Iterator[tuple[str, bool]]:
        return ((text, True) for text in corpus.iterate_text(tmp_path))

    expected = [number for text in texts for number in [*tokenizer.encode(text).ids, 0]]
    whole = [number for piece in corpus.encode_texts(tokenizer, parts()) for number in piece]
    assert whole == expected
    for limit in (1, 500, len(expected), len(expected) + 5):
        some = [number for piece in corpus.encode_texts(tokenizer, parts(), token_limit=limit) for number in piece]
        assert some == expected[:limit]


def test_the_child_process_loads_neither_torch_nor_memfit() -> None:
    program = (
        "import runpy, sys\n"
        f"module = runpy.run_path({corpus.__file__!r}, run_name='corpus')\n"
        "module['build_tokenizer'](300)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'memfit', 'transformers', 'numpy'}))\n"
    )
    child = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
