"""Real text as batches of token numbers.

In: a vocabulary size, a window's length, a seed. Out: an endless, deterministic stream of `(batch,
window)` tensors, which can be left and taken up. The tokenizer runs in a child process that ends
before the first batch is given out, so this process holds only the tokens themselves: two bytes
each, 4.5 MiB for the whole corpus, in a mapped file of which only what batches touch is resident.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from memfit.core.errors import MemfitError, StoreError, UsageError
from memfit.files.pretrained import need_transformers
from memfit.integrations.recipes import corpus


class CorpusError(MemfitError, RuntimeError):
    """The recipes' text could not be read or turned into tokens."""


def read_tokens(
    vocabulary_size: int,
    *,
    token_limit: int | None = None,
    files: Sequence[Path] = (),
    tokenizer: Path | None = None,
    end: int = 0,
) -> Int[Tensor, " tokens"]:
    """Reads files of text, or the corpus (see `memfit.integrations.recipes.corpus.iterate_text`),
    as token numbers.

    Costs about three CPU-seconds and no memory after it but the tokens that are touched: 2 bytes
    each, outside torch's allocator. While it runs, the child process takes some 150 MiB for the
    whole corpus.

    Args:
        vocabulary_size: from 257 to 16,384; a smaller one is a prefix of the larger. With a
            tokenizer: what the model knows.
        token_limit: read only the first so many tokens.
        files: UTF-8 text to read instead of the corpus.
        tokenizer: a `tokenizer.json` to use instead of the built-in byte pairs.
        end: stands behind each file.

    Returns:
        Token numbers in the order of the files, as 16-bit integers; with a tokenizer as 32-bit
        ones.

    Raises:
        UsageError: the extra `memfit[transformers]` is not installed, the token limit is not
            positive, or a file is not there.
        CorpusError: the child process failed; the message carries its last words.
    """
    need_transformers("reading text")
    if token_limit is not None and token_limit < 1:
        raise UsageError(f"a token limit of {token_limit}: give at least 1, or None for the whole corpus")
    for path in files if tokenizer is None else [*files, tokenizer]:
        if not path.is_file():
            raise UsageError(f"there is no file {path}: name files of UTF-8 text")
    # -P keeps the script's own folder out of the import path, where its neighbours' names could
    # shadow packages.
    command = [sys.executable, "-P", corpus.__file__, "--vocabulary-size", str(vocabulary_size)]
    if token_limit is not None:
        command += ["--token-limit", str(token_limit)]
    if tokenizer is not None:
        command += ["--tokenizer", str(tokenizer)]
    command += ["--end", str(end), "--", *(str(path) for path in files)]
    dtype = torch.int16 if tokenizer is None else torch.int32
    # Through a file that stays, without a name, as long as the tensor: of a mapped file only the
    # pages that batches touch are resident.
    with tempfile.NamedTemporaryFile(prefix="memfit-tokens-") as output:
        child = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, check=False)
        if child.returncode != 0:
            last_words = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["(it said nothing)"]
            raise CorpusError(f"the tokenizer process ended with status {child.returncode}: {last_words[0]}")
        size = os.fstat(output.fileno()).st_size // dtype.itemsize
        return torch.from_file(output.name, shared=True, size=size, dtype=dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenWindows:
    """An endless stream of batches of token windows, shuffled anew each epoch, equal for equal
    seeds.

    Windows overlap by one token, so that the inputs `batch[:, :-1]` and the targets `batch[:, 1:]`
    of all windows together use each token once as a target. Each `iter()` begins again at the first
    batch. An epoch's last windows that do not fill a batch are left out. Memory: the tokens, 8
    bytes a window for the order of an epoch, and the batch.
    """

    tokens: Int[Tensor, " tokens"]
    """The corpus."""
    batch_size: int
    """Windows in a batch."""
    sequence_length: int
    """Inputs in a window; a window holds one token more."""
    seed: int
    """Decides the order."""

    def __post_init__(self) -> None:
        """Checks that at least one batch can be made.

        Raises:
            UsageError: the corpus is too short, or a size is not positive.
        """
        if self.batch_size < 1 or self.sequence_length < 1:
            raise UsageError(
                f"batches of {self.batch_size} windows of {self.sequence_length} tokens: both must be positive"
            )
        if self.window_count < self.batch_size:
            raise UsageError(
                f"{len(self.tokens)} tokens give {self.window_count} windows of {self.sequence_length} tokens, fewer "
                f"than a batch of {self.batch_size}: use smaller batches, shorter windows or more text"
            )

    @property
    def window_count(self) -> int:
        """Whole windows in the corpus."""
        return (len(self.tokens) - 1) // self.sequence_length

    def __iter__(self) -> WindowStream:
        """Yields batches of `(batch_size, sequence_length + 1)` token numbers, forever."""
        return WindowStream(self)


class WindowStream:
    """The batches of `TokenWindows`, one after the other.

    Says where it stands, and goes on from there.

    Memory: 8 bytes a window for the order of the epoch.
    """

    def __init__(self, windows: TokenWindows) -> None:
        self._windows = windows
        # no memory
        self._view = windows.tokens.unfold(0, windows.sequence_length + 1, windows.sequence_length)
        self._begin(epoch=0, batch=0)

    def _begin(self, *, epoch: int, batch: int) -> None:
        self._generator = torch.Generator().manual_seed(self._windows.seed)
        for _ in range(epoch + 1):
            self._order = torch.randperm(self._windows.window_count, generator=self._generator)
        self._epoch, self._batch = epoch, batch

    @property
    def _batches(self) -> int:
        """Whole batches in an epoch."""
        return self._windows.window_count // self._windows.batch_size

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Int64[Tensor, "batch_size window"]:
        """The next batch; there always is one."""
        if self._batch == self._batches:
            self._order = torch.randperm(self._windows.window_count, generator=self._generator)
            self._epoch, self._batch = self._epoch + 1, 0
        first = self._batch * self._windows.batch_size
        self._batch += 1
        return self._view[self._order[first : first + self._windows.batch_size]].to(torch.int64)

    def state_dict(self) -> dict[str, int]:
        """Where it stands, and what decides the order."""
        return {**self._shape(), "epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there.

        Raises:
            UsageError: of another text, seed, batch or window; or no such state.
        """
        for key, value in self._shape().items():
            if state.get(key) != value:
                raise UsageError(f"the batches went on from {key} {state.get(key)!r:.40}, and have {key} {value} here")
        epoch, batch = state.get("epoch"), state.get("batch")
        if type(epoch) is not int or type(batch) is not int or epoch < 0 or not 0 <= batch <= self._batches:
            raise UsageError(f"the batches cannot go on from batch {batch!r:.40} of epoch {epoch!r:.40}")
        self._begin(epoch=epoch, batch=batch)

    def _shape(self) -> dict[str, int]:
        windows = self._windows
        return {
            "seed": windows.seed,
            "batch_size": windows.batch_size,
            "sequence_length": windows.sequence_length,
            "windows": windows.window_count,
        }


# The tokenizer that a model was trained with, kept beside the model.
#
# In: a directory that a save was written to, where the tokenizer came from. Out: its files there
# too, so that `AutoTokenizer.from_pretrained` reads them.

# What tokenizers of transformers are made of: their own files, and those of the libraries before
# it.
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copies a model directory's tokenizer files; those that are there already are replaced.

    Raises:
        StoreError: the disk.
    """
    if source.resolve() == directory.resolve():
        return
    try:
        for name in _FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
    except OSError as error:
        raise _failure(directory, error.strerror or str(error)) from error


def write_built_in_tokenizer(vocabulary_size: int, directory: Path) -> None:
    """Writes the built-in byte pairs as a `tokenizer.json`, by a child process: this one is to stay
    as small as it is.

    Raises:
        StoreError: the disk, or the process.
    """
    command = [sys.executable, "-P", corpus.__file__, "--vocabulary-size", str(vocabulary_size)]
    command += ["--save", str(directory / "tokenizer.json")]
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise _failure(directory, (child.stderr.strip().splitlines() or ["the process said nothing"])[-1])
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": corpus.END_OF_TEXT,
        "bos_token": corpus.END_OF_TEXT,
    }
    try:
        (directory / "tokenizer_config.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _failure(directory, error.strerror or str(error)) from error


def _failure(directory: Path, why: str) -> StoreError:
    return StoreError(f"the model is saved in {directory}, its tokenizer is not: {why}")
