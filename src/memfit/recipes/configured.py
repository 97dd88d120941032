"""A causal language model of any transformers configuration, without its weights: to ask what it
would take.

In: a `config.json`, sizes of a batch. Out: a model whose weights have shapes and no bytes, its
optimizer, a sample. Nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.documents import CONFIG_LIMIT_BYTES, parse_json, read_document
from memfit.core.errors import UsageError
from memfit.recipes.extra import need_transformers
from memfit.recipes.gpt import build_adamw, causal_language_loss


@dataclass(frozen=True, kw_only=True)
class ConfiguredRun:
    """A training run to be profiled, not run: `model` (weights of no bytes), AdamW, one batch of
    token numbers.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sample: Tensor

    @staticmethod
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy; see `causal_language_loss`."""
        return causal_language_loss(model, batch)


def causal_config(path: str | Path, *, sequence_length: int) -> Any:
    """The configuration of a causal language model, made ready for training: no cache, weights in
    fp32.

    Args:
        path: a `config.json`, or a directory with one.
        sequence_length: tokens of a sequence that are predicted.

    Raises:
        UsageError: no such file, not a configuration, not of a causal language model, or sequences
            longer than it takes.
    """
    need_transformers("--model")
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

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
            f"{file} is no configuration of a causal language model of transformers ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    named = list(getattr(config, "architectures", None) or ())
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if causal is None or (named and named != [causal.__name__]):
        raise UsageError(
            f"{file} describes {named[0] if named else type(config).__name__}, which is no causal language model: the command line trains those on text. "
            "From Python any model can be trained: memfit.empty, memfit.fit(weights=directory)"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise UsageError(f"sequences of {sequence_length} tokens: {file} takes at most {longest}")
    config.use_cache = False
    config.dtype = torch.float32
    return config


def config_file(path: str | Path) -> Path:
    """`path`, or the `config.json` in it."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def build_causal(config: Any) -> nn.Module:
    """The model of a configuration, in training mode."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UsageError(
            f"transformers cannot build a model of this configuration ({type(error).__name__}: {error})"
        ) from error
    # transformers cannot tell it from every class's name; see `causal_language_loss`.
    model.loss_type = "ForCausalLM"
    return model.train()


def build_configured(path: str | Path, *, batch_size: int, sequence_length: int) -> ConfiguredRun:
    """Builds the model that a configuration describes, from shapes alone.

    Memory: the batch and the model's buffers; a model of any size can be asked about.

    Args:
        path: a `config.json`, or a directory with one.
        batch_size: sequences a step.
        sequence_length: tokens of a sequence that are predicted.

    Raises:
        UsageError: see `causal_config`.
    """
    if batch_size < 1 or sequence_length < 1:
        raise UsageError(f"a batch of {batch_size} sequences of {sequence_length} tokens: give at least 1 of each")
    config = causal_config(path, sequence_length=sequence_length)
    with torch.device("meta"):
        model = build_causal(config)
    _hollow(model)
    return ConfiguredRun(
        model=model,
        optimizer=build_adamw(model, learning_rate=1e-4),
        sample=torch.zeros(batch_size, sequence_length + 1, dtype=torch.int64),
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
