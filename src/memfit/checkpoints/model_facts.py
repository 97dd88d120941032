"""Facts of a model that an export needs when the model is not there.

In: a model and its blocks. Out: plain values: names of its `state_dict`, ties, memory orders, its
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.checkpoints.region_layout import persistent_buffers
from memfit.files.names import keep_names
from memfit.homes.weights import BlockWeights
from memfit.huggingface.conversions import file_tensors
from memfit.huggingface.description import described


def model_facts(model: nn.Module, blocks: Sequence[BlockWeights]) -> dict[str, Any]:
    """Returns the facts.

    What is plain is left out: a model of the library's takes some hundred bytes.
    """
    kept = keep_names(model)
    known = {id(slot.parameter): slot.name for block in blocks for slot in block.slots}
    names = {name: known.get(id(tensor), name) for name, tensor in kept.tensors.items()}
    own = {*known.values(), *(name for name, _ in persistent_buffers(model))}
    config, generation = described(model, blocks)
    return {
        "class": type(model).__name__,
        "names": {parameter: name for name, parameter in names.items() if name != parameter},
        "ignored": sorted(own - set(names.values())),
        "tied": dict(kept.tied),
        "files": _files(model, {name: tuple(tensor.shape) for name, tensor in kept.tensors.items()}),
        "orders": {
            slot.name: {"shape": list(slot.shape), "stride": list(slot.stride)}
            for block in blocks
            for slot in block.slots
            if not _is_row_major(slot.shape, slot.stride)
        },
        "config": config.to_json_string() if hasattr(config, "to_json_string") else None,
        "generation_config": None if generation is None else generation.to_json_string(),
    }


def _files(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """Returns the tensors of the model's files; None where they are those of its `state_dict`."""
    found = file_tensors(model, shapes)
    is_plain = found.keys() == shapes.keys() and all(
        wanted.shape == shapes[name] and len(wanted.parts) == 1 and wanted.parts[0].name == name
        for name, wanted in found.items()
    )
    if is_plain:
        return None
    return {
        name: {"shape": list(wanted.shape), "parts": [[part.name, part.first, part.count] for part in wanted.parts]}
        for name, wanted in found.items()
    }


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return tuple(torch.empty(shape, device="meta").stride()) == stride
