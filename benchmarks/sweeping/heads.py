"""Model classes of a model type, those with a loss of their own first.

In: a model type. Out: classes to try, in the order in which people would train them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

_ORDER = (
    "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MULTIMODAL_LM", "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "TIME_SERIES_PREDICTION",
)  # fmt: skip
_NEVER = ("PRETRAINING",)
"""Tried after all others: their batches are the least alike."""


def model_types() -> list[str]:
    """Every model type that the installed transformers knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]

    return list(CONFIG_MAPPING_NAMES)


def candidates(model_type: str, config: Any) -> Iterator[type]:
    """Classes of a model type: by the tables of the auto classes, then whatever its module defines for its configuration."""
    seen: set[str] = set()
    for name in (*_listed(model_type), *_defined(config)):
        if name in seen:
            continue
        seen.add(name)
        found = _load(name, config)
        if found is not None:
            yield found


def _listed(model_type: str) -> Iterator[str]:
    from transformers.models.auto import modeling_auto

    tables = {
        name[10:-14]: table
        for name, table in vars(modeling_auto).items()
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
    }
    rest = [name for name in tables if name not in _ORDER and name not in _NEVER]
    ordered = [tables[name] for name in (*_ORDER, *rest, *_NEVER) if name in tables]
    for table in (*ordered, modeling_auto.MODEL_MAPPING_NAMES):
        if model_type in table:
            names = table[model_type]
            yield from (names,) if isinstance(names, str) else names


def _module(config: Any) -> Any:
    import importlib

    name = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _defined(config: Any) -> Iterator[str]:
    from transformers import PreTrainedModel

    module = _module(config)
    for name, found in vars(module).items() if module is not None else ():
        is_model = inspect.isclass(found) and issubclass(found, PreTrainedModel) and "forward" in vars(found)
        if is_model and getattr(found, "config_class", None) is type(config):
            yield name


def _load(name: str, config: Any) -> type | None:
    import transformers

    module = _module(config)
    found = vars(module).get(name) if module is not None else None
    if found is None:
        try:
            found = getattr(transformers, name)
            found.forward  # noqa: B018 - a class whose libraries are missing says so here
        except (ImportError, AttributeError):
            return None
    return found
