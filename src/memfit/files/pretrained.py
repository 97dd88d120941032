"""A model of transformers from the directory that `save_pretrained` wrote, without its weights.

In: a directory. Out: a function that builds the model as its configuration says. Nothing is
downloaded and no code of the directory runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.core.documents import CONFIG_LIMIT_BYTES, parse_json, read_document
from memfit.core.errors import UsageError

# Imports of transformers and tokenizers, which memfit's own code does not, says so in one sentence
# where they are missing.

_PACKAGES = ("tokenizers", "transformers")


def need_transformers(what: str) -> None:
    """Refuses what cannot be done without the extra.

    Args:
        what: needs it; the begin of the sentence.

    Raises:
        UsageError: `transformers` or `tokenizers` is not installed.
    """
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:
                raise  # it is there, and broken
            raise UsageError(
                f"{what} needs {error.name}, which is not installed: pip install 'memfit[transformers]'"
            ) from error


def pretrained_builder(directory: str | Path) -> Callable[[], nn.Module]:
    """Builds the class that `config.json` names under `architectures`, in the dtype it names, in
    evaluation mode, with `generation_config.json`.

    Raises:
        UsageError: no configuration there, or not of a model that transformers knows.
    """
    need_transformers("a model of a directory")
    import transformers

    source = Path(directory)
    file = source / "config.json"
    try:
        named = parse_json(read_document(file, limit_bytes=CONFIG_LIMIT_BYTES), is_strict=False)["architectures"][0]
        kind = _model_class(str(named))
        config = transformers.AutoConfig.from_pretrained(str(source), local_files_only=True)
        generation = None
        if (source / "generation_config.json").exists():
            generation = transformers.GenerationConfig.from_pretrained(str(source), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UsageError(
            f"{source} holds no model that transformers knows: {file.name} must be there and name a class under 'architectures' "
            f"({type(error).__name__}: {error})"
        ) from error

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(_dtype_of(config))
        try:
            model = kind(config).eval()
        finally:
            torch.set_default_dtype(before)
        if generation is not None:
            model.generation_config = generation
        return model

    return build


def _model_class(name: str) -> type[Any]:
    """A model of the library's, and not any of its functions.

    Raises `AttributeError`, `TypeError`.
    """
    import transformers

    kind = getattr(transformers, name)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise TypeError(f"{name:.80} is no model")
    return kind


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()
