"""Tensors that are one stretch of memory, and the refusal of others.

In: any tensor. Out: nothing, or an error that says what it is and what to give in its place.
"""

from __future__ import annotations

import torch

from memfit.core.errors import UnsupportedError


def check_dense(tensor: torch.Tensor, whose: str) -> None:
    """Raises `UnsupportedError` for a tensor that is more than one stretch of memory.

    Args:
        tensor: any.
        whose: begins the sentence whose object it is.
    """
    if tensor.is_nested:  # those of the older layout call themselves strided, and have no shape
        raise UnsupportedError(
            f"{whose} a nested tensor, and memfit places dense ones only: give its parts as a list of tensors (unbind), or pad them (to_padded_tensor)"
        )
    if tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(
            f"{whose} a sparse tensor ({name}, of shape {tuple(tensor.shape)}), and memfit places dense ones only: "
            "nn.Embedding(sparse=False), or to_dense()"
        )
