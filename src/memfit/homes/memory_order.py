"""The order in which a parameter's elements lie at home.

In: a parameter. Out: strides without gaps, copies that lie so.
"""

from __future__ import annotations

import torch

from memfit.core.errors import UnsupportedError


def is_dense(parameter: torch.nn.Parameter) -> bool:
    """Tells whether a parameter's elements lie as they would at home."""
    return parameter.layout is not torch.strided or parameter.stride() == dense_stride("", parameter)


def dense_stride(name: str, parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Returns the parameter's own stride if it is dense (channels-last stays channels-last), else
    the contiguous one.
    """
    if parameter.layout is not torch.strided:
        raise UnsupportedError(
            f"the parameter {name!r} has layout {parameter.layout}; memfit moves strided tensors only"
        )
    # empty_like with preserve_format gives the dense stride closest to the tensor's own.
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return tuple(torch.empty_like(meta).stride())


def dense_copy(tensor: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy whose elements lie with these strides."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)
    return copy.copy_(tensor)
