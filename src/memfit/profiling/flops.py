"""Floating point operations of one operation, from the shapes of its arguments (2 a multiply-add).

In: an operator, arguments, result. Out: a count. torch's own table (`torch.utils.flop_counter`), and what it misses:
flash attention on CPU and grouped products, which it would count as nothing. Element-wise work is counted as 0, as
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def operation_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating point operations of one call of `func`; 0 for operators without a formula."""
    packet = func._overloadpacket
    own = _OWN.get(packet)
    if own is not None:
        return own(args, out)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _flash_forward(args: Sequence[Any], _: Any) -> int:
    return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))


def _flash_backward(args: Sequence[Any], _: Any) -> int:
    return int(sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape))


def _grouped_product(args: Sequence[Any], out: torch.Tensor) -> int:
    # Every row (or, for two matrices, every summand) takes part in exactly one group, so the groups' sizes do not
    # matter.
    left, right = args[0], args[1]
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out.numel() * left.shape[-1]


_OWN: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    aten._grouped_mm: _grouped_product,
}
