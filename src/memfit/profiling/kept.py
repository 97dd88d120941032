"""Tensors that modules keep on themselves, beside parameters and buffers.

In: a module. Out: the tensors in its own and its submodules' attributes, and in lists and
dictionaries there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from memfit.profiling.traced_trees import contained_tensors
from memfit.tensors.own_attributes import own_attributes


def kept_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that a call of the module may find there of an earlier one."""
    for owner in module.modules():
        for _, value in own_attributes(owner):
            if isinstance(value, torch.Tensor | list | dict):
                yield from (tensor for tensor in contained_tensors(value) if tensor.layout is torch.strided)
