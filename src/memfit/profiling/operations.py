"""Questions about single operations: how to run them on fake tensors, whether they are random.

In: an operator with its arguments, as a dispatch mode receives it. Out: answers for the recorder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.core.operators import argument_of

aten = torch.ops.aten

# Products whose kernels take operands of one dtype, where torch's shape functions take any.
_OF_ONE_DTYPE = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.convolution}


def run_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, is_fake: bool) -> Any:
    """Runs an operation; on fake tensors with the shapes of real ones, where torch's own shape
    functions differ.
    """
    if is_fake and func is aten._grouped_mm.default:
        left, right = args[0], args[1]
        # torch's shape function refuses fp32, the CPU kernel takes it: the shapes are plain
        # arithmetic.
        if left.dtype is torch.float32 and left.device.type == "cpu":
            return _grouped_result(left, right, args[2] if len(args) > 2 else kwargs.get("offs"))
    if is_fake and func._overloadpacket in _OF_ONE_DTYPE:
        dtypes = list(dict.fromkeys(str(one.dtype) for one in args if isinstance(one, torch.Tensor)))
        if len(dtypes) > 1:
            raise RuntimeError(f"{func._overloadpacket} takes operands of one dtype, not {' and '.join(dtypes)}")
    out = func(*args, **kwargs)
    if is_fake and func is aten.mkldnn_rnn_layer.default and argument_of(func, "train", args, kwargs):
        return (*out[:3], out[3].new_empty(_recurrent_reserve_bytes(args[0], args[5]), dtype=torch.uint8))
    return out


def _recurrent_reserve_bytes(x: torch.Tensor, hidden: torch.Tensor) -> int:
    """Returns the workspace that oneDNN's LSTM layer keeps for backward, an output whose fake
    version is empty.

    Fitted to seven real sizes (torch 2.13), from exact to 4 % too high: gates and states for each
    step and one more, widths rounded to 16.
    """
    steps, rows = x.shape[0] + 1, x.shape[1]
    width, inner = (-(-size // 16) * 16 for size in (hidden.shape[-1], x.shape[-1]))
    return steps * rows * (4 * width + 6 * max(width, inner) + 6 * width) * x.element_size() + 6 * 4096


def _grouped_result(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    if left.dim() == 2 and right.dim() == 2:
        assert offsets is not None, "two matrices are grouped along their common dimension by offsets"
        return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])
    if left.dim() == 3 and right.dim() == 3:
        return left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    return left.new_empty(left.shape[-2], right.shape[-1])


def is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tells whether the operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # Attention kernels carry the tag for their dropout, which is mostly off.
    return argument_of(func, "dropout_p", args, kwargs) != 0.0


def reads_batch_statistics(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tells whether the operation is a batch norm that computes its statistics from the batch."""
    name = func._overloadpacket.__name__
    if "batch_norm" not in name or "backward" in name:
        return False
    # Instance norm runs on the same kernel with one row that holds all instances as channels.
    return args[0].shape[0] != 1 and any(argument_of(func, n, args, kwargs) is True for n in ("training", "train"))
