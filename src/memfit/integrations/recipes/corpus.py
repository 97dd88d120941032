"""The text and its byte-pair tokens, with nothing imported but the standard library and
`tokenizers`.

In: files of text, or the standard library's `.py` files of the running interpreter; a tokenizer, or
the merges in `data/`. Out: text, or token numbers as raw 16-bit (32-bit with a tokenizer) integers
on standard output. `token_batches` runs it as a script, in a short-lived child process: so the
tokenizer's memory, and that of a million token objects, goes back to the operating system before
training starts.

The module must not import memfit: the child would load torch for nothing (some 230 MB).
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MERGES_PATH = Path(__file__).with_name("data") / "python-source.merges.txt"

END_OF_TEXT = "<|endoftext|>"
"""Stands between two files; its number is 0."""

SMALLEST_VOCABULARY = 257
"""The end-of-text mark and one token for each byte."""

LARGEST_VOCABULARY = 1 << 15
"""Token numbers travel as signed 16-bit integers, the one 16-bit type that every torch operation
knows.
"""

_LEFT_OUT_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib-dynload",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_FILES_AT_ONCE = 8


def iterate_text(root: Path | None = None) -> Iterator[str]:
    """Yields the standard library's source files, one text each, sorted by path.

    Left out, so that the text is what people wrote to be read: installed packages (`site-packages`,
    `dist-packages`), test suites (`test`, `tests`), IDLE and the turtle demos, the generated
    character tables of `encodings`, build records (`_sysconfigdata*`, which differ between two
    builds of one version), and files that are not UTF-8 or empty.

    Args:
        root: folder to read instead of the running interpreter's standard library.

    Yields:
        The text of one file.

    Raises:
        FileNotFoundError: the folder holds no Python source (an interpreter packed into an
            archive).
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = False
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        if _LEFT_OUT_FOLDERS.intersection(path.relative_to(folder).parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            found = True
            yield text
    if not found:
        raise FileNotFoundError(f"no Python source under {folder}: the recipes read the standard library's source")


def build_tokenizer(vocabulary_size: int, merges_path: Path = MERGES_PATH) -> Tokenizer:
    """Builds the byte-level byte-pair tokenizer.

    Merges are kept in the order in which training found them, so a prefix of them is the vocabulary
    that training for that smaller size would have given: one file serves every size. Source:
    Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units", section
    3.2.

    Args:
        vocabulary_size: number of tokens, from 257 to what the merges file holds (16,384).
        merges_path: one merge a line, two tokens with a blank between.

    Returns:
        The tokenizer; token 0 is the end-of-text mark, 1 to 256 are bytes, the others merges.

    Raises:
        ValueError: a size that the merges cannot give.
        ImportError: `tokenizers` is not installed.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    lines = merges_path.read_text(encoding="utf-8").splitlines()
    largest = min(SMALLEST_VOCABULARY + len(lines), LARGEST_VOCABULARY)
    if not SMALLEST_VOCABULARY <= vocabulary_size <= largest:
        raise ValueError(f"a vocabulary of {vocabulary_size} tokens: choose from {SMALLEST_VOCABULARY} to {largest}")
    merges: list[tuple[str, str]] = []
    for line in lines[: vocabulary_size - SMALLEST_VOCABULARY]:
        left, right = line.split(" ")
        merges.append((left, right))
    tokens = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_PART_BYTES = 1 << 20


def iterate_files(paths: Iterable[Path]) -> Iterator[tuple[str, bool]]:
    """Yields UTF-8 files in parts of about 1 MiB that end with a line, each with whether it is its
    file's last.

    Raises:
        OSError: a file that cannot be read. UnicodeDecodeError: one that is not UTF-8.
    """
    for path in paths:
        with path.open(encoding="utf-8") as file:
            lines = file.readlines(_PART_BYTES)
            while lines:
                coming = file.readlines(_PART_BYTES)
                yield "".join(lines), not coming
                lines = coming


def encode_texts(
    tokenizer: Tokenizer,
    texts: Iterable[tuple[str, bool]],
    *,
    token_limit: int | None = None,
    end: int = 0,
    kind: str = "h",
) -> Iterator[array[int]]:
    """Yields texts as token numbers, some at a time.

    Memory: the tokens of 8 texts at a time, as `tokenizers` keeps them (some tens of megabytes).

    Args:
        tokenizer: see `build_tokenizer`.
        texts: each with whether a document ends with it: then the end-of-text mark follows.
        token_limit: stop after so many tokens; all of them where `None`.
        end: number of the mark.
        kind: of the integers, as `array` names it.

    Yields:
        Arrays of integers of the machine's byte order.
    """
    left = sys.maxsize if token_limit is None else token_limit
    batch: list[tuple[str, bool]] = []

    def encode() -> array[int]:
        numbers = array(kind)
        encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for encoding, (_, ends) in zip(encodings, batch, strict=True):
            numbers.extend(encoding.ids)
            if ends:
                numbers.append(end)
        batch.clear()
        return numbers[:left]

    for text in texts:
        batch.append(text)
        if len(batch) == _FILES_AT_ONCE:
            numbers = encode()
            left -= len(numbers)
            yield numbers
            if left <= 0:
                return
    if batch:
        yield encode()


def main() -> None:
    """Writes text to standard output as token numbers: integers of the machine's byte order, 16-bit
    ones, with a tokenizer 32-bit ones.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--token-limit", type=int)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--end", type=int, default=0)
    parser.add_argument("--save", type=Path, help="Write the built-in tokenizer there, and no text.")
    parser.add_argument("files", type=Path, nargs="*")
    arguments = parser.parse_args()
    if arguments.save is not None:
        build_tokenizer(arguments.vocabulary_size).save(str(arguments.save))
        return
    if arguments.tokenizer is None:
        tokenizer, kind = build_tokenizer(arguments.vocabulary_size), "h"
    else:
        from tokenizers import Tokenizer

        tokenizer, kind = Tokenizer.from_file(str(arguments.tokenizer)), "i"
    texts = iterate_files(arguments.files) if arguments.files else ((text, True) for text in iterate_text())
    for numbers in encode_texts(tokenizer, texts, token_limit=arguments.token_limit, end=arguments.end, kind=kind):
        if numbers and max(numbers) >= arguments.vocabulary_size:
            sys.exit(f"the tokenizer gives the token {max(numbers)}, the model knows {arguments.vocabulary_size}")
        sys.stdout.buffer.write(numbers.tobytes())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    # The tokenizer's threads read this when they start; a warning about forks would otherwise reach
    # the user's terminal.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
