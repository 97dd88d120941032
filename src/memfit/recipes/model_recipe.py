"""A training run for a model of transformers, from its configuration or the directory where it was
saved: language models and sequence-to-sequence models on text, classifiers on images.

In: a `config.json` or a directory as `save_pretrained` writes it; files. Out: a `Recipe`.
Nothing is downloaded and no code of the directory runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from memfit.core.errors import UsageError
from memfit.recipes.configured import task_config
from memfit.recipes.corpus import LARGEST_VOCABULARY, SMALLEST_VOCABULARY
from memfit.recipes.gpt import Recipe, build_adamw, build_warmup
from memfit.recipes.image_batches import DrawnImages, FileImages, ImageStream
from memfit.recipes.keeping import copy_tokenizer, write_built_in_tokenizer
from memfit.recipes.model_tasks import IMAGES, ModelTask, builder_of, class_count, image_shape
from memfit.recipes.token_batches import TokenWindows, WindowStream, read_tokens

_BUILT_IN_TOKENS = 16_384
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def model_recipe(
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
    configuration's end-of-text token. A sequence-to-sequence model learns the second half of each
    sequence from its first. Images come from a safetensors file (`image_batches.FileImages`), or
    are drawn.

    Args:
        path: a `config.json`, or a directory with one.
        batch_size: rows a step.
        sequence_length: tokens of a sequence, for language models.
        learning_rate: of AdamW, after warm-up.
        files: UTF-8 text, or one file of images; none: the source of Python's standard library, or
            drawn images.

    Raises:
        UsageError: see `task_config`; a vocabulary too small for the built-in tokens; weights
            that were trained on another vocabulary than the built-in one.
    """
    task, config = task_config(path, sequence_length=sequence_length)
    source = Path(path)
    if task is IMAGES:
        return _image_recipe(task, config, source, batch_size, learning_rate, files)
    tokenizer = source / "tokenizer.json"
    own = tokenizer if source.is_dir() and tokenizer.is_file() else None
    vocabulary = int(config.vocab_size)
    if own is None and vocabulary < SMALLEST_VOCABULARY:
        raise UsageError(
            f"{source} has a vocabulary of {vocabulary} and no tokenizer.json: the built-in tokens need {SMALLEST_VOCABULARY}; put a tokenizer.json beside "
            "the configuration"
        )
    if _has_weights(source) and own is None:
        raise UsageError(
            f"{source} holds trained weights and no tokenizer.json: text cut by the built-in tokens would mean nothing to them. Put its tokenizer beside them "
            "(transformers.AutoTokenizer.from_pretrained(...).save_pretrained(directory)), or name its config.json to begin with new weights"
        )
    known = vocabulary if own is not None else min(vocabulary, _BUILT_IN_TOKENS, LARGEST_VOCABULARY)
    end = getattr(config, "eos_token_id", None)
    end = end if own is not None and isinstance(end, int) and 0 <= end < vocabulary else 0
    text = f"{len(files)} files" if files else "Python source"
    tokens = "its own tokenizer" if own is not None else f"{known} built-in tokens"
    return _recipe(
        task,
        config,
        source,
        learning_rate,
        f"{batch_size} sequences of {sequence_length} tokens of {text} by {tokens}",
        batch_size=batch_size,
        sequence_length=sequence_length,
        batches=partial(_batches, known, tuple(files), own, end, batch_size, sequence_length),
        keep_tokenizer=partial(copy_tokenizer, source) if own is not None else partial(write_built_in_tokenizer, known),
    )


def _recipe(task: ModelTask, config: Any, source: Path, learning_rate: float, data: str, **of_the_data: Any) -> Recipe:
    """The run, with the fields that do not follow from the kind of data."""
    has_weights = _has_weights(source)
    kind, weights = (
        type(config).__name__.removesuffix("Config"),
        "weights from its files" if has_weights else "new weights",
    )
    return Recipe(
        name=source.name,
        description=f"{kind} of {source}, {weights}, {data}, AdamW",
        build_model=builder_of(task, config),
        build_optimizer=partial(build_adamw, learning_rate=learning_rate),
        build_scheduler=build_warmup,
        loss=task.loss,
        is_large=True,
        weights=source if has_weights else None,
        **of_the_data,
    )


def _has_weights(source: Path) -> bool:
    return source.is_dir() and any((source / name).is_file() for name in _WEIGHT_FILES)


def _image_recipe(
    task: ModelTask, config: Any, source: Path, batch_size: int, learning_rate: float, files: Sequence[Path]
) -> Recipe:
    if len(files) > 1:
        raise UsageError("--data names one file of images: a safetensors file with the tensors 'images' and 'labels'")
    shape, classes = image_shape(config), class_count(config)
    images = FileImages(files[0], shape, classes) if files else DrawnImages(shape, classes)
    size = "x".join(map(str, shape))
    return _recipe(
        task,
        config,
        source,
        learning_rate,
        f"{batch_size} images of {size}{f' of {files[0]}' if files else ', drawn'}, {classes} classes",
        batch_size=batch_size,
        sequence_length=None,
        batches=partial(ImageStream, images, batch_size),
        keep_tokenizer=lambda _: None,
    )


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
