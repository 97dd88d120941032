"""Tensors whose elements share memory, as `expand` makes them: what they hold, and how they get
values.

In: a buffer, values of its shape. Out: the buffer with these values; torch's `copy_` refuses it.
"""

from __future__ import annotations

import torch


def shares_elements(tensor: torch.Tensor) -> bool:
    """Some of its elements are one in memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copy_shared(into: torch.Tensor, values: torch.Tensor) -> None:
    """As `into.copy_(values)`, for such tensors and others.

    Raises:
        ValueError: values that elements which are one in memory cannot have; nothing was changed.
    """
    chosen = values
    for dimension, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if stride == 0 and size > 1:
            into, chosen = into.narrow(dimension, 0, 1), chosen.narrow(dimension, 0, 1)
    if not torch.equal(chosen.expand_as(values).nan_to_num(), values.nan_to_num()):
        raise ValueError("whose elements share memory, and get different values")
    with torch.no_grad():
        into.copy_(chosen)
