"""A training run for a model of transformers, from its configuration or the directory where it was
saved: language models and sequence-to-sequence models on text, classifiers on images.

In: a `config.json` or a directory as `save_pretrained` writes it; files. Out: a `Recipe`.
Nothing is downloaded and no code of the directory runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from memfit.core.documents import CONFIG_LIMIT_BYTES, parse_json, read_document
from memfit.core.errors import UsageError
from memfit.files.pretrained import need_transformers
from memfit.integrations.recipes.corpus import LARGEST_VOCABULARY, SMALLEST_VOCABULARY
from memfit.integrations.recipes.gpt import Recipe, build_adamw, build_warmup, causal_language_loss
from memfit.integrations.recipes.image_batches import DrawnImages, FileImages, ImageStream
from memfit.integrations.recipes.token_batches import (
    TokenWindows,
    WindowStream,
    copy_tokenizer,
    read_tokens,
    write_built_in_tokenizer,
)

# Tasks of transformers' models that the command line trains: language models, sequence to sequence,
# images.
#
# In: a configuration. Out: `ModelTask`: the model's class, its loss, a sample of its batches.


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


# A model of any transformers configuration, without its weights: to ask what it would take.
#
# In: a `config.json`, sizes of a batch. Out: a model whose weights have shapes and no bytes, its
# optimizer, a sample. Nothing is downloaded.


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
