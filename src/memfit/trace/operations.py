"""Questions about single operations: how to run them on fake tensors, whether they are random.

In: an operator with its arguments, as a dispatch mode receives it. Out: answers for the recorder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit.core.operators import argument_of, runs_across
from memfit.core.work_kinds import BACKWARD_OF, FEW_PLACES, Work, WorkKind, as_work, attention_flops, product_kind
from memfit.trace.traced_trees import operator_tensors

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


# Amounts of work of one operation, by class, from its operator and the shapes of its tensors.
#
# In: an operator, arguments, results. Out: `core.work_kinds.Work`. See [Note: classes of work]
# there. What an operation reads and writes is counted once for each tensor: memory that an expanded
# tensor does not have is not read. Operators that are not known count as point-wise. Not counted:
# the copies that a kernel makes inside itself.

LARGE_BYTES = 48 << 20
"""Bytes that an operation moves, from which it counts as large.
"""
# Products that a sum of a convolution has: below, it is no matrix product worth its name.
_FEW_FACTORS = 64
# Channels, of a group, that a wide convolution takes and gives at least.
_FEW_CHANNELS = 64

# Positions of the two factors among the arguments. Shapes are (..., m, k) and (..., k, n).
_FACTORS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten.mv: 0, aten.addmv: 1, aten._grouped_mm: 0}
_BATCHED = {aten.bmm, aten.baddbmm}
_IN_DTYPE = {
    (name, is_half): WorkKind(f"bf16-{name}" if is_half else name)
    for name in ("products-256", "batched-products", "attention", "attention-backward")
    for is_half in (False, True)
}
_ATTENTION = "_scaled_dot_product_"


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FUNCTIONS = _named(
    "gelu gelu_backward silu silu_backward exp exp_ exp2 sigmoid sigmoid_ erf mish elu elu_ elu_backward celu selu "
    "hardswish softplus softplus_backward rsqrt"
)
_SLOW_FUNCTIONS = _named(
    "tanh tanh_ log log_ log1p log2 sin cos expm1 mish_backward log_sigmoid_forward log_sigmoid_backward cumsum "
    "cumprod cumsum_ logcumsumexp sort topk atan2 erfinv logsumexp argsort unique2 _unique2 cummax "
    # On a processor they take four times as long as the norms of rows.
    "native_batch_norm _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm"
)
_NORMALIZED = _named("native_layer_norm native_group_norm _softmax _log_softmax _fused_rms_norm _safe_softmax")
_NORMALIZED_BACKWARD = _named(
    "native_layer_norm_backward native_batch_norm_backward batch_norm_backward native_group_norm_backward "
    "_softmax_backward_data _log_softmax_backward_data _fused_rms_norm_backward cudnn_batch_norm_backward"
)
_REDUCED = _named("sum mean var var_mean std amax amin max min argmax argmin prod any all linalg_vector_norm norm")
_GATHERED = _named(
    "embedding embedding_dense_backward index index_select index_put index_put_ _index_put_impl_ gather scatter "
    "scatter_ scatter_add scatter_add_ index_add index_add_ nll_loss_forward nll_loss_backward masked_select nonzero "
    "max_pool2d_with_indices_backward masked_scatter index_copy index_copy_ repeat_interleave col2im im2col"
)
# Windows of each: an average is no search, and takes a quarter of the time of a maximum.
_POOLED = {"max_pool2d_with_indices": 1.0, "max_pool3d_with_indices": 1.0, "avg_pool2d": 0.25, "avg_pool3d": 0.25}
_POOLED |= {f"{name}_backward": share for name, share in _POOLED.items() if name.startswith("avg")}
# By element of the larger side.
_RESIZED = {"upsample_bilinear2d": 1.0, "upsample_bicubic2d": 4.0, "upsample_nearest2d": 0.5}
_RESIZED |= {f"{name}_backward": share for name, share in _RESIZED.items()}
_DRAWN = _named(
    "native_dropout bernoulli bernoulli_ normal_ uniform_ rand randn rand_like randn_like randint randint_like randperm "
    "exponential_ multinomial normal"
)
_BY_ELEMENT = {
    **dict.fromkeys(_FUNCTIONS, WorkKind.FUNCTIONS),
    **dict.fromkeys(_SLOW_FUNCTIONS, WorkKind.SLOW_FUNCTIONS),
    **dict.fromkeys(_NORMALIZED, WorkKind.NORMALIZED),
    **dict.fromkeys(_NORMALIZED_BACKWARD, WorkKind.NORMALIZED_BACKWARD),
    **dict.fromkeys(_DRAWN, WorkKind.DRAWN),
}
_ELEMENT_KINDS = frozenset(_BY_ELEMENT.values()) - {WorkKind.DRAWN}
_HALF = frozenset({torch.bfloat16, torch.float16})
_COPIES = _named("clone copy_ _to_copy _reshape_copy contiguous cat stack copy")
# They write without having read what they write to.
_OVERWRITES = _named("copy_ fill_ zero_")
_MADE = _named(
    "empty _unsafe_view _reshape_alias new_empty empty_like empty_strided new_empty_strided detach alias _local_scalar_dense lift_fresh"
)


def operation_work(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, flops: int) -> Work:
    """Returns the amounts of one call of `func`.

    Args:
        func: as a dispatch mode receives it.
        args: its positional arguments.
        kwargs: the others.
        out: what it returned.
        flops: floating point operations, from `flops.operation_flops`.
    """
    packet = func._overloadpacket
    name = packet.__name__
    amounts = {WorkKind.OPERATIONS: 1.0}
    if func.is_view or name in _MADE:
        return as_work(amounts)
    read, made = _tensors((args, kwargs)), _tensors(out)
    if flops:
        kind = _flops_kind(packet, name, args, read)
        if kind is WorkKind.HALF_ATTENTION_BACKWARD and args[1].shape[-2] < FEW_PLACES:
            amounts[WorkKind.HALF_ATTENTION_ROWS] = float(args[1].shape[:-1].numel())
        elif name.startswith(_ATTENTION):
            amounts[kind] = attention_flops(flops, args[1 if name.endswith("backward") else 0].shape[-2])
        else:
            amounts[kind] = float(flops)
        return as_work(amounts)
    is_by_tanh = "tanh" in [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    kind, amount = _amount(func, args, read, made, is_by_tanh=is_by_tanh)
    amounts[kind] = float(amount)
    nbytes = sum(map(_bytes, (*read, *made)))
    if kind in _ELEMENT_KINDS and nbytes >= LARGE_BYTES:
        # Beyond caches the bytes are waited for as well.
        amounts[WorkKind.STREAMED_LARGE] = float(nbytes)
    return as_work(amounts)


def _amount(
    func: Any, args: Sequence[Any], read: Sequence[torch.Tensor], made: Sequence[torch.Tensor], *, is_by_tanh: bool
) -> tuple[WorkKind, int]:
    """Class and amount of an operation that is no product."""
    name = func._overloadpacket.__name__
    elements = max((t.numel() for t in (*read, *made)), default=0)
    kind = WorkKind.SLOW_FUNCTIONS if is_by_tanh or _is_odd_power(name, args) else _BY_ELEMENT.get(name)
    if kind is not None:
        return kind, int(elements * BACKWARD_OF.get(name, 1.0))
    if name in _GATHERED:
        # Of the table that is read, as much as is taken from it; all of one that is written.
        return WorkKind.GATHERED, sum(map(_bytes, made)) + min(map(_bytes, (*read, *made)), default=0)
    is_overwritten = name in _OVERWRITES and bool(read)
    nbytes = sum(map(_bytes, read[1:] if is_overwritten else read)) + sum(map(_bytes, made))
    if name in _POOLED or name in _RESIZED:
        return WorkKind.WINDOWED, _windowed(name, args, [t.numel() for t in (*read, *made)])
    if runs_across(func, args):
        return WorkKind.SLOW_FUNCTIONS, elements
    if any(t.dtype in _HALF and t.dim() for t in (*read, *made)):
        return WorkKind.HALF_ELEMENTS, elements
    if name in _REDUCED:
        return WorkKind.REDUCED, nbytes
    if name in _COPIES and _is_transposed(read, made):
        return WorkKind.TRANSPOSED, nbytes
    return (WorkKind.STREAMED if nbytes < LARGE_BYTES else WorkKind.STREAMED_LARGE), nbytes


def _flops_kind(packet: Any, name: str, args: Sequence[Any], read: Sequence[torch.Tensor]) -> WorkKind:
    """Class of an operation of products."""
    dtype = str(read[0].dtype).removeprefix("torch.") if read else "float32"
    is_half, is_backward = dtype == "bfloat16", name.endswith("backward")
    if dtype == "float16":
        return WorkKind.FP16
    if name.startswith(_ATTENTION):
        return _IN_DTYPE["attention-backward" if is_backward else "attention", is_half]
    if "conv" in name:
        weight, groups = (args[2], args[9]) if is_backward else (args[1], args[8] if len(args) > 8 else 1)
        return _convolution_kind(weight, groups, is_backward=is_backward, is_half=is_half)
    if packet in _BATCHED:
        return _IN_DTYPE["batched-products", is_half]
    at = _FACTORS.get(packet)
    if at is None:
        return _IN_DTYPE["products-256", is_half]
    left, right = args[at], args[at + 1]
    return product_kind(min(*left.shape[-2:], *right.shape[-2:], *([1] if right.dim() == 1 else [])), dtype)


def _convolution_kind(weight: torch.Tensor, groups: int, *, is_backward: bool, is_half: bool) -> WorkKind:
    """Class of a convolution by its weight: (output channels, input channels a group, sizes)."""
    if groups > 1 and weight.shape[1:].numel() < _FEW_FACTORS:
        return WorkKind.GROUPED_CONVOLUTION
    if is_half:
        return WorkKind.HALF_CONVOLUTION
    if min(weight.shape[0] // groups, weight.shape[1]) < _FEW_CHANNELS:
        return WorkKind.NARROW_CONVOLUTION_BACKWARD if is_backward else WorkKind.NARROW_CONVOLUTION
    return WorkKind.CONVOLUTION_BACKWARD if is_backward else WorkKind.CONVOLUTION


def _windowed(name: str, args: Sequence[Any], elements: Sequence[int]) -> int:
    """Elements that the windows of pooling or resizing look at."""
    if name in _RESIZED:
        return int(_RESIZED[name] * max(elements, default=0))
    return int(_POOLED[name] * min(elements, default=0) * _window(args[2 if name.endswith("backward") else 1]))


def _window(sizes: Sequence[int]) -> int:
    """Elements of a window of two dimensions; one size is that of both."""
    return sizes[0] ** 2 if len(sizes) == 1 else math.prod(sizes)


def _is_odd_power(name: str, args: Sequence[Any]) -> bool:
    """Tells whether a power has no short cut, as squares and cubes have."""
    if name not in ("pow", "pow_"):
        return False
    exponent = args[1] if len(args) > 1 else None
    return not isinstance(exponent, int | float) or exponent not in (-2, -1, -0.5, 0.5, 1, 2, 3)


def _is_transposed(read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
    """Tells whether what is read and what is written have their dimensions in another order in
    memory.
    """
    source = read[-1] if read else None
    target = made[0] if made else None
    if source is None or target is None or source.dim() != target.dim():
        return False
    return _fastest(source) != _fastest(target)


def _fastest(tensor: torch.Tensor) -> int:
    """Returns the dimension whose neighbours lie beside each other."""
    strides = [(stride, -index) for index, stride in enumerate(tensor.stride()) if tensor.shape[index] > 1 and stride]
    return -min(strides)[1] if strides else -1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in {id(t): t for t in operator_tensors(tree)}.values() if t.layout is torch.strided]


def _bytes(tensor: torch.Tensor) -> int:
    held = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        held *= size if stride else 1
    return held * tensor.element_size() if tensor.numel() else 0


# Floating point operations of one operation, from the shapes of its arguments (2 a multiply-add).
#
# In: an operator, arguments, result. Out: a count. torch's own table (`torch.utils.flop_counter`),
# and what it misses: grouped products, flash attention on CPU, which it would count as nothing, and
# queries that share heads of keys and values, which torch 2.11 refuses, and the backward of
# convolutions in groups. Element-wise work is counted as 0, as there.


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
