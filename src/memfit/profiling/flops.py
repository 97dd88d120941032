"""Floating point operations of one operation, from the shapes of its arguments (2 a multiply-add).

In: an operator, arguments, result. Out: a count. torch's own table (`torch.utils.flop_counter`),
and what it misses: grouped products, flash attention on CPU, which it would count as nothing, and
queries that share heads of keys and values, which torch 2.11 refuses, and the backward of
convolutions in groups. Element-wise work is counted as 0, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def operation_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating point operations of one call of `func`; 0 for operators without a formula."""
    packet = func._overloadpacket
    own = _OWN.get(packet)
    if own is not None:
        return own(args, out)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _attention_flops(args: Sequence[Any], _: Any) -> int:
    """Counts attention of queries (batch, heads, length, width), keys and values (fewer heads):
    scores, and their products with values.
    """
    query, key, value = args[:3]
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(args: Sequence[Any], _: Any) -> int:
    """As the forward with the gradient before them: scores once more, and a product for each of
    their, queries', keys' and values' gradients.
    """
    _gradient, query, key, value = args[:4]
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _convolution_backward_flops(args: Sequence[Any], _: Any) -> int:
    """Counts as many as the forward for the input's gradient and for the weight's, where they are
    wanted. Torch's own formula forgets groups in the latter.
    """
    gradient, inputs, weight, is_transposed, wanted = *args[:3], args[7], args[10]
    places = inputs if is_transposed else gradient
    return 2 * places.numel() * weight.shape[1:].numel() * sum(wanted[:2])


def _grouped_product(args: Sequence[Any], out: torch.Tensor) -> int:
    # Every row (or, for two matrices, every summand) takes part in exactly one group, so the
    # groups' sizes do not matter.
    left, right = args[0], args[1]
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out.numel() * left.shape[-1]


_OWN: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention: _attention_flops,
    aten._scaled_dot_product_efficient_attention: _attention_flops,
    aten._scaled_dot_product_cudnn_attention: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward_flops,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_product,
    aten.convolution_backward: _convolution_backward_flops,
}
