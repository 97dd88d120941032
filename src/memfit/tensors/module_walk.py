"""Modules and buffers of a model, for what asks in every step.

In: a model. Out: lists. torch's own walks are generators in generators, and take five times as
long.
"""

from __future__ import annotations

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns the model and all modules in it, each once."""
    found: list[nn.Module] = []
    pending, seen = [model], set[int]()
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            pending += [child for child in vars(module)["_modules"].values() if child is not None]
    return found


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Returns all buffers of the model; one that two modules hold comes twice."""
    return [
        buffer for module in modules_of(model) for buffer in vars(module)["_buffers"].values() if buffer is not None
    ]
