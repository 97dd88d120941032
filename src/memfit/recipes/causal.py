"""A training run on text for any causal language model of transformers, from its configuration or
the directory where it was saved.

In: a `config.json` or a directory as `save_pretrained` writes it; files of text. Out: a `Recipe`.
Nothing is downloaded and no code of the directory runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.recipes.configured import build_causal, causal_config
from memfit.recipes.corpus import LARGEST_VOCABULARY, SMALLEST_VOCABULARY
from memfit.recipes.gpt import Recipe, build_adamw, build_warmup, causal_language_loss
from memfit.recipes.keeping import copy_tokenizer, write_built_in_tokenizer
from memfit.recipes.token_batches import TokenWindows, WindowStream, read_tokens

_BUILT_IN_TOKENS = 16_384
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def causal_recipe(
    path: str | Path,
    *,
    batch_size: int,
    sequence_length: int,
    learning_rate: float,
    files: Sequence[Path] = (),
) -> Recipe:
    """The run.

    Weights are fp32, read from the directory's files if it has some (bf16 ones convert), else
    initialised. Text becomes tokens by the directory's own `tokenizer.json`; where there is none,
    by the built-in byte pairs, as many as the vocabulary has room for. Behind each file stands the
    configuration's end-of-text token.

    Args:
        path: a `config.json`, or a directory with one.
        batch_size: sequences a step.
        sequence_length: tokens of a sequence that are predicted.
        learning_rate: of AdamW, after warm-up.
        files: UTF-8 text; none: the source of Python's standard library.

    Raises:
        UsageError: see `causal_config`; a vocabulary too small for the built-in tokens; weights
            that were trained on another vocabulary than the built-in one.
    """
    config = causal_config(path, sequence_length=sequence_length)
    source = Path(path)
    tokenizer = source / "tokenizer.json"
    own = tokenizer if source.is_dir() and tokenizer.is_file() else None
    vocabulary = int(config.vocab_size)
    if own is None and vocabulary < SMALLEST_VOCABULARY:
        raise UsageError(
            f"{source} has a vocabulary of {vocabulary} and no tokenizer.json: the built-in tokens need {SMALLEST_VOCABULARY}; put a tokenizer.json beside "
            "the configuration"
        )
    has_weights = source.is_dir() and any((source / name).is_file() for name in _WEIGHT_FILES)
    if has_weights and own is None:
        raise UsageError(
            f"{source} holds trained weights and no tokenizer.json: text cut by the built-in tokens would mean nothing to them. Put its tokenizer beside them "
            "(transformers.AutoTokenizer.from_pretrained(...).save_pretrained(directory)), or name its config.json to begin with new weights"
        )
    known = vocabulary if own is not None else min(vocabulary, _BUILT_IN_TOKENS, LARGEST_VOCABULARY)
    end = getattr(config, "eos_token_id", None)
    end = end if own is not None and isinstance(end, int) and 0 <= end < vocabulary else 0
    text = f"{len(files)} files" if files else "Python source"
    tokens = "its own tokenizer" if own is not None else f"{known} built-in tokens"
    return Recipe(
        name=source.name,
        description=(
            f"{type(config).__name__.removesuffix('Config')} of {source}, {'weights from its files' if has_weights else 'new weights'}, "
            f"{batch_size} sequences of {sequence_length} tokens of {text} by {tokens}, AdamW"
        ),
        batch_size=batch_size,
        sequence_length=sequence_length,
        build_model=partial(_build, config),
        build_optimizer=partial(build_adamw, learning_rate=learning_rate),
        build_scheduler=build_warmup,
        loss=causal_language_loss,
        batches=partial(_batches, known, tuple(files), own, end, batch_size, sequence_length),
        keep_tokenizer=partial(copy_tokenizer, source) if own is not None else partial(write_built_in_tokenizer, known),
        is_large=True,
        weights=source if has_weights else None,
    )


def _build(config: Any, seed: int) -> nn.Module:
    # The caller's random numbers go on as if no model had been drawn from them.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_causal(config)


def _batches(
    vocabulary: int,
    files: Sequence[Path],
    tokenizer: Path | None,
    end: int,
    batch_size: int,
    sequence_length: int,
    seed: int,
) -> WindowStream:
    tokens = read_tokens(vocabulary, files=files, tokenizer=tokenizer, end=end)
    return iter(TokenWindows(tokens=tokens, batch_size=batch_size, sequence_length=sequence_length, seed=seed))
