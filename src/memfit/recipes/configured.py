"""A model of any transformers configuration, without its weights: to ask what it would take.

In: a `config.json`, sizes of a batch. Out: a model whose weights have shapes and no bytes, its
optimizer, a sample. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.documents import CONFIG_LIMIT_BYTES, parse_json, read_document
from memfit.core.errors import UsageError
from memfit.recipes.extra import need_transformers
from memfit.recipes.gpt import build_adamw
from memfit.recipes.model_tasks import (
    IMAGES,
    ModelTask,
    build_of_task,
    longest_sequence,
    prepare_config,
    task_of,
)


@dataclass(frozen=True, kw_only=True)
class ConfiguredRun:
    """A training run to be profiled, not run: `model` (weights of no bytes), AdamW, one batch.

    Attributes:
        model: without bytes of weights.
        optimizer: AdamW.
        loss: of the task.
        sample: one batch.
        words: for people.
        sample_of: makes a batch of so many rows and tokens a row.
        longest: sequences that the configuration takes; None: it does not say, or has none.
        has_sequences: rows are sequences.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    sample: Any
    words: str
    sample_of: Callable[[int, int], Any]
    longest: int | None
    has_sequences: bool


def task_config(path: str | Path, *, sequence_length: int) -> tuple[ModelTask, Any]:
    """The task of a configuration, and the configuration, made ready for training.

    Args:
        path: a `config.json`, or a directory with one.
        sequence_length: tokens of a sequence, for language models.

    Raises:
        UsageError: no such file, not a configuration, of no task that is known, or sequences longer
            than it takes.
    """
    need_transformers("--model")
    from transformers import AutoConfig

    file = config_file(path)
    try:
        fields = parse_json(read_document(file, limit_bytes=CONFIG_LIMIT_BYTES), is_strict=False)
        config: Any = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no file {str(file)[:200]!r}: --model takes a config.json, or a directory as save_pretrained writes it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} is no configuration of a model of transformers ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    task = task_of(config, file)
    prepare_config(task, config, file, sequence_length=sequence_length)
    return task, config


def config_file(path: str | Path) -> Path:
    """`path`, or the `config.json` in it."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def build_configured(path: str | Path, *, batch_size: int, sequence_length: int) -> ConfiguredRun:
    """Builds the model that a configuration describes, from shapes alone.

    Memory: the batch and the model's buffers; a model of any size can be asked about.

    Args:
        path: a `config.json`, or a directory with one.
        batch_size: rows a step.
        sequence_length: tokens of a sequence, for language models.

    Raises:
        UsageError: see `task_config`.
    """
    if batch_size < 1 or sequence_length < 1:
        raise UsageError(f"a batch of {batch_size} sequences of {sequence_length} tokens: give at least 1 of each")
    task, config = task_config(path, sequence_length=sequence_length)
    with torch.device("meta"):
        model = build_of_task(task, config)
    _hollow(model)
    rows = "images" if task is IMAGES else f"sequences of {sequence_length} tokens"
    return ConfiguredRun(
        model=model,
        optimizer=build_adamw(model, learning_rate=1e-4),
        loss=task.loss,
        sample=task.sample(config, batch_size, sequence_length),
        words=f"{type(model).__name__} of {path}, {batch_size} {rows}, AdamW",
        sample_of=partial(task.sample, config),
        longest=longest_sequence(task, config),
        has_sequences=task is not IMAGES,
    )


def _hollow(model: nn.Module) -> None:
    """Turns a model on `meta` into one on the CPU whose parameters have storages of no bytes.

    Ties stay: each parameter changes in place.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in replaced:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                empty.untyped_storage().resize_(0)
                replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module.register_parameter(name, replaced[parameter])
