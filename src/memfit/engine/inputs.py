"""Casts of floating inputs of low-precision modules.

In: a model that computes in another dtype than its batches are of. Out: its own forward, and those
of its layers, get floating arguments in that dtype.

The rule is that of `torch.distributed.fsdp.fully_shard` with
`MixedPrecisionPolicy(cast_forward_inputs=True)` on each layer and on the whole model: floating
tensors among the positional and keyword arguments are cast, in whatever containers; integers stay,
and so do buffers and what a module makes itself. The batch that the loss function sees is as the
user gave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.core.precision import ComputeDtype


def cast_dtype(compute: ComputeDtype) -> torch.dtype | None:
    """Returns the dtype that inputs of the model and its layers are cast to; None without a compute
    dtype.
    """
    return None if compute.weight_dtype is None else getattr(torch, compute.weight_dtype)


@contextmanager
def casting_inputs(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Context in which these modules get their floating arguments in `dtype`; None changes
    nothing.
    """
    cast = None if dtype is None else _Cast(dtype)
    handles = [m.register_forward_pre_hook(cast, with_kwargs=True) for m in modules] if cast is not None else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Cast:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not any(self._is_other(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            return None  # containers stay the caller's own
        return pytree.tree_map(self._one, args), pytree.tree_map(self._one, kwargs)

    def _is_other(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != self._dtype

    def _one(self, value: Any) -> Any:
        return value.to(self._dtype) if self._is_other(value) else value
