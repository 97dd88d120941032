"""Tasks of transformers' models that the command line trains: language models, sequence to
sequence, images.

In: a configuration. Out: `ModelTask`: the model's class, its loss, a sample of its batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from memfit.core.errors import UsageError
from memfit.recipes.gpt import causal_language_loss


@dataclass(frozen=True, kw_only=True)
class ModelTask:
    """One kind of task.

    Attributes:
        name: "causal", "seq2seq" or "images".
        words: for people.
        auto_class: of transformers, that builds its models.
        mapping: of transformers, from configurations to its models.
        loss: model and batch -> mean loss.
        sample: configuration, rows, tokens of a sequence -> a batch without meaning.
    """

    name: str
    words: str
    auto_class: str
    mapping: str
    loss: Callable[[nn.Module, Any], Tensor]
    sample: Callable[[Any, int, int], Any]

    def model_class(self, config: Any) -> Any:
        """Returns the class of this task's models of a configuration; None: there is no such."""
        import transformers

        return getattr(transformers, self.mapping).get(type(config), None)


def sequence_to_sequence_loss(model: nn.Module, batch: Int64[Tensor, "batch window"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of each window's second half, given its first, through transformers' own
    loss.

    Args:
        model: a transformers model with an encoder and a decoder.
        batch: token numbers.
    """
    half = batch.shape[1] // 2
    return model(input_ids=batch[:, :half], labels=batch[:, half:].contiguous(), use_cache=False).loss


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
    """Mean cross-entropy of images' classes, through transformers' own loss.

    Args:
        model: a transformers model that classifies images.
        batch: `pixel_values` of (rows, channels, height, width) and `labels`.
    """
    return model(pixel_values=batch["pixel_values"], labels=batch["labels"]).loss


def image_shape(config: Any) -> tuple[int, int, int]:
    """Returns (channels, height, width) of the images that a configuration is for: 224 by 224 where
    it says nothing.
    """
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(getattr(config, "num_channels", 3)), int(height), int(width)


def class_count(config: Any) -> int:
    """Returns the number of classes."""
    return int(getattr(config, "num_labels", 2))


def _tokens(_config: Any, rows: int, sequence_length: int) -> Tensor:
    return torch.zeros(rows, sequence_length + 1, dtype=torch.int64)


def _images(config: Any, rows: int, _sequence_length: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.zeros(rows, *image_shape(config)),
        "labels": torch.zeros(rows, dtype=torch.int64),
    }


CAUSAL = ModelTask(
    name="causal",
    words="causal language model",
    auto_class="AutoModelForCausalLM",
    mapping="MODEL_FOR_CAUSAL_LM_MAPPING",
    loss=causal_language_loss,
    sample=_tokens,
)
SEQ2SEQ = ModelTask(
    name="seq2seq",
    words="sequence-to-sequence model",
    auto_class="AutoModelForSeq2SeqLM",
    mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    loss=sequence_to_sequence_loss,
    sample=_tokens,
)
IMAGES = ModelTask(
    name="images",
    words="image classifier",
    auto_class="AutoModelForImageClassification",
    mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    loss=image_loss,
    sample=_images,
)
TASKS = (CAUSAL, SEQ2SEQ, IMAGES)


def task_of(config: Any, file: object) -> ModelTask:
    """Returns the task of a configuration: that of the class it names, else the first one that has
    a class for it, sequence to sequence first where it has an encoder and a decoder.

    Args:
        config: of transformers.
        file: for messages.

    Raises:
        UsageError: it is of none of these tasks.
    """
    named = list(getattr(config, "architectures", None) or ())
    found = {task: cls for task in TASKS if (cls := task.model_class(config)) is not None}
    for task, cls in found.items():
        # Some configurations have several classes of a task.
        names = {each.__name__ for each in (cls if isinstance(cls, tuple) else (cls,))}
        if names.intersection(named):
            return task
    if not named and found:
        order = (SEQ2SEQ, CAUSAL, IMAGES) if getattr(config, "is_encoder_decoder", False) else TASKS
        return next(task for task in order if task in found)
    raise UsageError(
        f"{file} describes {named[0] if named else type(config).__name__}, which is no causal language model, sequence-to-sequence model or image "
        "classifier: these are what --model takes. For any other model name a function, MODULE:FUNCTION (memfit init writes one)"
    )


def build_of_task(task: ModelTask, config: Any) -> nn.Module:
    """Builds the model of a configuration, in training mode.

    Raises:
        UsageError: transformers cannot build it.
    """
    import transformers

    try:
        model: Any = getattr(transformers, task.auto_class).from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UsageError(
            f"transformers cannot build a model of this configuration ({type(error).__name__}: {error})"
        ) from error
    if task is CAUSAL:
        # transformers cannot tell it from every class's name; see `causal_language_loss`.
        model.loss_type = "ForCausalLM"
    return model.train()


def prepare_config(task: ModelTask, config: Any, file: object, *, sequence_length: int) -> None:
    """Makes a configuration ready for training: no cache, weights in fp32.

    Raises:
        UsageError: sequences longer than it takes.
    """
    config.dtype = torch.float32
    if task is IMAGES:
        return
    longest = longest_sequence(task, config)
    if longest is not None and sequence_length > longest:
        raise UsageError(f"sequences of {sequence_length} tokens: {file} takes at most {longest}")
    config.use_cache = False
    if task is SEQ2SEQ:
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id


def longest_sequence(task: ModelTask, config: Any) -> int | None:
    """Returns the tokens of the longest sequence that a configuration takes; None: it does not say.

    Of a sequence to sequence one, and the token behind it, each side has a half.
    """
    positions = None if task is IMAGES else getattr(config, "max_position_embeddings", None)
    return positions if positions is None or task is CAUSAL else 2 * positions - 1


def builder_of(task: ModelTask, config: Any) -> Callable[[int], nn.Module]:
    """Returns what builds the model from a seed."""
    return partial(_build_seeded, task, config)


def _build_seeded(task: ModelTask, config: Any, seed: int) -> nn.Module:
    # The caller's random numbers go on as if no model had been drawn from them.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_of_task(task, config)
