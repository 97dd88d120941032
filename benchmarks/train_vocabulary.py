"""Trains the recipes' byte-pair vocabulary on the standard library's source and writes it as package data.

    .venv/bin/python benchmarks/train_vocabulary.py

Deterministic for one interpreter version (the kept file: CPython 3.11.7). Takes about two seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from memfit.integrations.recipes.corpus import END_OF_TEXT, MERGES_PATH, SMALLEST_VOCABULARY, iterate_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocabulary-size", type=int, default=16_384)
    parser.add_argument("--output", type=Path, default=MERGES_PATH)
    arguments = parser.parse_args()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=arguments.vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(iterate_text(), trainer=trainer)
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    if len(merges) != arguments.vocabulary_size - SMALLEST_VOCABULARY:
        raise RuntimeError(f"training gave {len(merges)} merges for a vocabulary of {arguments.vocabulary_size}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(f"{left} {right}\n" for left, right in merges), encoding="utf-8")
    print(f"{len(merges)} merges, {arguments.output.stat().st_size} bytes: {arguments.output}")


if __name__ == "__main__":
    main()
