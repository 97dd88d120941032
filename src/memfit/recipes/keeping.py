"""The tokenizer that a model was trained with, kept beside the model.

In: a directory that a save was written to, where the tokenizer came from. Out: its files there too,
so that `AutoTokenizer.from_pretrained` reads them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.recipes import corpus

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
