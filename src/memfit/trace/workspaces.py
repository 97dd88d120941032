"""Memory that operations allocate and free inside, where no dispatch trace sees it: additions
to the peaks, on CPU.

In: an operation with its arguments and result (metadata only). Out: bytes alive for a moment above
arguments and results.

The table was measured with torch.profiler's memory events on torch 2.13, AVX512, two threads;
`tests/memory/test_trace.py` measures it again. It is meant to err upwards, by the rounding of
channels to 16 and by the scratch of half-precision products:

| operation                           | workspace                                                                      |
|-------------------------------------|--------------------------------------------------------------------------------|
| convolution, NCHW                   | oneDNN's blocked copies: max(input + weight, output), channels rounded up to 16|
| convolution backward, NCHW          | blocked gradient, input and weight, beside the results                         |
| convolution, channels last          | a reordered weight (forward), two (backward)                                   |
| flash attention forward, backward   | tiles of scores for each thread; the gradient in the output's layout           |
| in bf16 where the processor has AMX | keys and values in the layout of its tiles as well (forward)                   |
| products in bf16, fp16              | reordered operands of each thread, by processor, see `tensors.product_scratch` |
| indexing by a mask                  | the positions: 8 bytes for each dimension of the mask and each hit             |
| LSTM layer forward, backward        | reordered weights and the gates of all steps                                   |
| inverse, solve                      | a copy of the matrix                                                           |
| logarithm of a sum of exponentials  | the exponentials: a copy of the input; the maxima and their logarithms         |

fp32 products of matrices that lie row by row or column by column have none, nor has what treats
elements one by one in one dtype and in the order in which they lie. Of everything else the table is
silent, and `measuring` finds out. Of an accelerator's kernels the table below tells; of
other devices none is modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from memfit.core.limits import (
    BLAS_COLUMNS,
    BLAS_WORKSPACES_KIB,
    PRODUCT_KERNEL_BYTES,
    TILED_PRODUCT_KERNEL_BYTES,
    round_up,
)
from memfit.tensors.product_scratch import has_products, has_tiles, outside_bytes, product_scratch_bytes

_CHANNEL_BLOCK = 16
_SCRATCH_BYTES = 64 * 1024
# Where oneDNN has no AVX-512 it goes other ways: beside its operands a convolution took up to
# 67 KiB there, some small ones 200 (torch 2.13, AVX2, two threads). Runs tell (`measuring`).
_HAS_KNOWN_WAYS = torch.backends.cpu.get_cpu_capability() == "AVX512"
_CONVOLUTION_SCRATCH_BYTES = _SCRATCH_BYTES // 4 if _HAS_KNOWN_WAYS else 3 * _SCRATCH_BYTES // 2
_HALF = (torch.bfloat16, torch.float16)
# Of a convolution's kernel, which oneDNN compiles and keeps; see [Note: kernels that are kept] in
# `devices.compiled_kernels`. Measured on torch 2.13, AVX512: 0.09 to 0.14 MiB with its backward.
_CONVOLUTION_KERNEL_BYTES = 80 << 10
_LARGE_PRODUCT_BYTES = 1 << 20
_FEWEST_PACKED = 64
# With fewer the BLAS reads the right factor as it lies.
_FEWEST_ROWS = 256
aten = torch.ops.aten


def workspace_bytes(func: Any, args: Sequence[Any], out: Any) -> int | None:
    """Bytes that one operation holds inside itself beyond its arguments and results (see the table
    above).

    Args:
        func: the operator, as a dispatch mode receives it.
        args: its positional arguments.
        out: its result.

    Returns:
        None where the table is silent.
    """
    if func._overloadpacket not in _FORMULAS:
        return 0 if func.is_view or _is_elementwise(func, args, out) else None
    first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    if first is None or first.device.type != "cpu":
        return 0
    return formula_bytes(func, args, out)


def formula_bytes(func: Any, args: Sequence[Any], out: Any) -> int | None:
    """Bytes of an operation in the table above, wherever its tensors are."""
    return _FORMULAS[func._overloadpacket](args, out)


def kernel_bytes(func: Any, args: Sequence[Any], out: Any) -> int:
    """Bytes that oneDNN keeps of the kernel that it compiles for an operation of these shapes, once
    for all that are alike.

    Args:
        func: the operator, as a dispatch mode receives it.
        args: its positional arguments.
        out: its result.
    """
    kind = func._overloadpacket if isinstance(func, torch._ops.OpOverload) else None
    if kind in _CONVOLUTIONS:
        return _CONVOLUTION_KERNEL_BYTES if args[0].device.type == "cpu" else 0
    if kind in PRODUCTS and out.dtype is torch.bfloat16 and out.device.type == "cpu" and has_products(out.dtype):
        return TILED_PRODUCT_KERNEL_BYTES if has_tiles(out.dtype) else PRODUCT_KERNEL_BYTES
    return 0


def outside_bytes_of(func: Any, args: Sequence[Any], out: Any) -> int:
    """Bytes that an operation takes from the C library for a moment, where no counter of tensors
    sees them. They come beside whatever the allocator keeps, wherever in a step that is.

    Args:
        func: the operator, as a dispatch mode receives it.
        args: its positional arguments.
        out: its result.
    """
    kind = func._overloadpacket if isinstance(func, torch._ops.OpOverload) else None
    if kind in _CONVOLUTIONS:
        return _columns_bytes(args, out)
    if kind not in PRODUCTS or out.dtype not in _HALF or out.device.type != "cpu":
        return 0
    left, right = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()][-2:]
    return outside_bytes(left, right)


def _columns_bytes(args: Sequence[Any], out: Any) -> int:
    """Bytes of the C library for a convolution that goes back from its places to pictures, where
    oneDNN has no products in the dtype: the gradient of an input, or a transposed one's forward. It
    is a product for each picture, of what each place of the kernel gives, in fp32; of a gradient in
    the dtype as well. Of groups (measured: depthwise ones) for the pictures of one group.
    """
    is_backward = not isinstance(out, torch.Tensor)
    places, x, weight = args[:3] if is_backward else (args[0], *args[:2])
    is_transposed, groups = (args[7], args[9]) if is_backward else (args[6], args[8])
    # The other two gather the places of a picture instead, and take nothing (measured).
    if is_transposed is is_backward or (is_backward and out[0] is None):
        return 0
    if x.device.type != "cpu" or x.dtype not in _HALF or has_products(x.dtype):
        return 0
    pictures = min(x.shape[0], torch.get_num_threads()) if groups == 1 else x.shape[0]
    each = 4 + (x.element_size() if is_backward else 0)
    return pictures * prod(weight.shape[1:]) * prod(places.shape[2:]) * each


def library_of(func: Any, out: Any) -> str:
    """Name of the library that computes a product, where it takes memory once for all that it
    computes: "blas, N columns" of those that are not small, whose buffers grow with the columns of
    the result, "onednn" of those in bf16; else "".
    """
    kind = func._overloadpacket if isinstance(func, torch._ops.OpOverload) else None
    if kind not in PRODUCTS or out.device.type != "cpu":
        return ""
    if out.dtype is torch.bfloat16:
        return "onednn" if has_products(out.dtype) else ""
    rows, columns = out.shape[-2:]
    if out.nbytes < _LARGE_PRODUCT_BYTES or rows < _FEWEST_ROWS:
        return ""
    return f"blas, {next((n for n in BLAS_COLUMNS if columns <= n), BLAS_COLUMNS[-1])} columns"


# Masks are read as they are.
_MASKED = (aten.where, aten.masked_fill, aten.masked_fill_)


def _is_elementwise(func: Any, args: Sequence[Any], out: Any) -> bool:
    """It treats elements one by one, in one dtype and in the order in which they lie.

    Else operands may be converted or copied first, whole.
    """
    if torch.Tag.pointwise not in func.tags or not isinstance(out, torch.Tensor):
        return False
    read = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()]
    if func._overloadpacket in _MASKED:
        read = [arg for arg in read if arg.dtype is not torch.bool]
    kinds = {arg.dtype for arg in read} | ({out.dtype} - {torch.bool})
    return len(kinds) <= 1 and all(tensor.is_contiguous() for tensor in read)


def _convolution(args: Sequence[Any], out: torch.Tensor) -> int:
    x, weight = args[0], args[1]
    if _is_channels_last(x) or _is_channels_last(weight):
        return _blocked_weight(weight) + _CONVOLUTION_SCRATCH_BYTES
    blocked_out = _blocked(out)
    operands = weight.nbytes if _is_first(weight) else _blocked(x) + _blocked_weight(weight)
    return max(operands + blocked_out - out.nbytes, blocked_out) + (0 if _HAS_KNOWN_WAYS else _SCRATCH_BYTES // 2)


def _convolution_backward(args: Sequence[Any], out: Sequence[torch.Tensor | None]) -> int:
    gradient, x, weight = args[0], args[1], args[2]
    if _is_channels_last(x) or _is_channels_last(weight):
        return 2 * _blocked_weight(weight) + _SCRATCH_BYTES
    # Two phases, one after the other: the gradient of the input (which then exists in both
    # layouts), and that of the weight.
    results = sum(t.nbytes for t in out if t is not None)
    x_result = x.nbytes if out[0] is not None else 0
    input_phase = _blocked(gradient) + _blocked_weight(weight) + _blocked(x) if out[0] is not None else 0
    operands = 2 * weight.nbytes if _is_first(weight) else _blocked(x) + 2 * _blocked_weight(weight)
    weight_phase = x_result + _blocked(gradient) + operands if out[1] is not None else 0
    return max(input_phase - results, weight_phase - results, 0) + _CONVOLUTION_SCRATCH_BYTES


def _flash_tiles(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a tile of scores.

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of torch 2.13.
    """
    rows = query.shape[2]
    split = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(split, rows), min(512, key.shape[2])


def _flash_forward(args: Sequence[Any], _: Any) -> int:
    query, key = args[0], args[1]
    rows, columns = _flash_tiles(query, key)
    tile = rows * (columns + 2 + query.shape[3]) * 4
    if query.dtype in _HALF:
        tile += rows * columns * query.element_size()
    if not _packs(query, key):
        return torch.get_num_threads() * tile
    # Two tokens or two values lie side by side: an odd head is padded.
    head = query.shape[3] + query.shape[3] % 2
    tile += (rows + columns) * head * query.element_size()
    packed = 2 * prod(key.shape[:3]) * head * query.element_size()
    return torch.get_num_threads() * tile + packed


def _packs(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Tells whether keys and values are copied first, for the processor's tiles of matrices."""
    # Measured on torch 2.13: from 64 places on, and only in a dtype that the tiles know.
    if min(query.shape[2], key.shape[2]) < _FEWEST_PACKED:
        return False
    return has_tiles(query.dtype)


def _flash_backward(args: Sequence[Any], _: Any) -> int:
    gradient, query, key = args[0], args[1], args[2]
    rows, columns = _flash_tiles(query, key)
    tile = 2 * rows * columns * 4
    scratch = rows * 4
    if query.dtype in _HALF:
        tile += rows * columns * 2 * query.element_size() // 2
        scratch += 8 * _SCRATCH_BYTES
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else query.nbytes
    return torch.get_num_threads() * tile + scratch + copied


def _product(args: Sequence[Any], out: torch.Tensor) -> int | None:
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if out.dtype not in _HALF:
        return 0 if all(is_dense_matrix(operand) for operand in operands[-2:]) else None
    # The last two are the factors (addmm has its summand first).
    left, right = operands[-2:]
    rows, depth, columns = *left.shape[-2:], right.shape[-1]
    return product_scratch_bytes(rows, depth, columns, dtype=out.dtype, is_transposed=left.stride(-1) != 1)


def is_dense_matrix(matrix: torch.Tensor) -> bool:
    """Tells whether BLAS takes a matrix (or a batch) as it is: by rows or columns, without gaps."""
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    lies_so = (across == 1 and down >= columns) or (down == 1 and across >= rows)
    return lies_so and (matrix.dim() == 2 or matrix.stride(0) >= rows * columns or matrix.shape[0] == 1)


def _log_of_sum(args: Sequence[Any], out: torch.Tensor) -> int:
    return args[0].numel() * out.element_size() + 4 * out.nbytes


def _masked_index(args: Sequence[Any], out: torch.Tensor) -> int:
    total = 0
    for mask in args[1]:
        if mask is not None and mask.dtype in (torch.bool, torch.uint8):
            kept = prod(args[0].shape) // max(prod(mask.shape), 1)
            hits = out.numel() // max(kept, 1) if out.shape != args[0].shape else mask.numel()
            total += 8 * mask.dim() * hits
    return total


def _lstm(args: Sequence[Any], _: Any) -> int:
    x, hidden = args[0], args[5]
    gates = (x.shape[0] + 1) * x.shape[1] * 4 * hidden.shape[-1] * x.element_size()
    return args[1].nbytes + args[2].nbytes + gates + _SCRATCH_BYTES // 2


def _lstm_backward(args: Sequence[Any], _: Any) -> int:
    x, hidden = args[0], args[5]
    gates = (x.shape[0] + 1) * x.shape[1] * 4 * hidden.shape[-1] * x.element_size()
    return 2 * (args[1].nbytes + args[2].nbytes) + gates + x.nbytes + _SCRATCH_BYTES // 2


def _matrix_copy(args: Sequence[Any], _: Any) -> int:
    return args[0].nbytes + _SCRATCH_BYTES // 16


def _is_channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _is_first(weight: torch.Tensor) -> bool:
    """Tells whether oneDNN takes a convolution for a network's first: few channels, which it then
    reads as they are.
    """
    return weight.shape[1] <= 4 and prod(weight.shape[2:]) > 1


def _blocked(tensor: torch.Tensor) -> int:
    channels = tensor.shape[1]
    return tensor.nbytes // max(channels, 1) * round_up(channels, _CHANNEL_BLOCK)


def _blocked_weight(weight: torch.Tensor) -> int:
    out_channels, in_channels = weight.shape[0], weight.shape[1]
    return (
        weight.nbytes
        // max(out_channels * in_channels, 1)
        * round_up(out_channels, _CHANNEL_BLOCK)
        * round_up(in_channels, _CHANNEL_BLOCK)
    )


PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
_FORMULAS: dict[Any, Callable[[Sequence[Any], Any], int | None]] = {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    aten.mm: _product,
    aten.addmm: _product,
    aten.bmm: _product,
    aten.baddbmm: _product,
    aten.index: _masked_index,
    aten.index_put: _masked_index,
    aten.index_put_: _masked_index,
    aten.mkldnn_rnn_layer: _lstm,
    aten.mkldnn_rnn_layer_backward: _lstm_backward,
    aten.linalg_inv_ex: _matrix_copy,
    aten.linalg_solve_ex: _matrix_copy,
    aten.logsumexp: _log_of_sum,
}


@dataclass(frozen=True, kw_only=True)
class ScratchTable:
    """Memory beside tensors that the kernels of one kind of device take.

    Attributes:
        workspace_bytes: inside an operation, from its arguments and result; None: unknown.
        kernel_bytes: kept by a library for all operations that are alike.
        outside_bytes: taken for a moment outside of tensors.
        library: key of `core.limits.LIBRARY_BYTES` for an operation and its result, or "".
    """

    workspace_bytes: Callable[[Any, Sequence[Any], Any], int | None]
    kernel_bytes: Callable[[Any, Sequence[Any], Any], int]
    outside_bytes: Callable[[Any, Sequence[Any], Any], int]
    library: Callable[[Any, Any], str]


PROCESSOR_TABLE = ScratchTable(
    workspace_bytes=workspace_bytes, kernel_bytes=kernel_bytes, outside_bytes=outside_bytes_of, library=library_of
)


# Memory that kernels of an accelerator allocate inside, by operator and architecture.
#
# In: an operation with its arguments and result, traced on any device. Out: bytes alive for a
# moment above arguments and results, as torch's CUDA kernels take them. Nothing of it was measured
# by us; `benchmarks/measured_gpu.py` compares predictions with public runs.
#
# | operation                     | inside                                               | source |
# |-------------------------------|------------------------------------------------------|--------|
# | softmax backward              | gradient times output                                | a      |
# | attention backward, efficient | sums of gradients in fp32, a number a row; before    | b      |
# |                               | them, where it is fp32, gradient times output        |        |
# | attention backward, flash     | gradient of queries in fp32, a number a row;         | c      |
# |                               | gradients of keys and values that heads share, whole |        |
# | embedding backward            | sorted indices, partial sums in fp32                 | d      |
# | indexed write                 | linear and sorted indices                            | e      |
# | product of matrices with gaps | copies of them                                       | f      |
# | workspace of the BLAS, kept   | `core.limits.BLAS_WORKSPACES_KIB`                    | g      |
#
# Sources, below aten/src/ATen of torch, read in 2026:
# a) native/cuda/SoftMax.cu, softmax_backward_cuda_out
# b) native/transformers/cuda/attention_backward.cu, _efficient_attention_backward;
#    native/transformers/cuda/mem_eff_attention/kernel_backward.h, workspace_elements_gk, _gv and
# _gq
# c) native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd
# d) native/cuda/Embedding.cu, embedding_dense_backward_cuda; EmbeddingBackwardKernel.cu,
#    embedding_backward_cuda_kernel
# e) native/cuda/Indexing.cu, index_put_with_sort_kernel
# f) native/cuda/Blas.cpp, prepare_batch_matrix_for_cublas
# g) cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize
#
# What treats elements one by one or sums them has none: kernels convert dtypes as they read. Flash
# attention is taken for 16 bits from compute capability 8.0 on (sdp_utils.cpp,
# use_flash_attention), the efficient kernels below and for fp32. Assumed: a convolution copies its
# operands into another layout, and what the table does not know takes what the processor's kernel
# takes. Not modelled: the algorithms that cuDNN chooses, hipBLASLt's workspace, a flash attention's
# forward that splits keys.

_FP32_BYTES, _INDEX_BYTES = 4, 8
_NEWEST, _FLASH_CAPABILITY = "sm_90", 80
# Tiles of flash attention: rows and columns (of a head) that sums are rounded to.
_FLASH_ROWS, _FLASH_COLUMNS = 128, 32
# Efficient kernels; and blocks that keys are split among, whose sums are apart.
_TILE, _MOST_SPLITS = 64, 200
# Embeddings sort gradients where there are more, and sum them by so many.
_FEWEST_SORTED, _ROWS_A_SUM = 3072, 10
_SORTED_COPIES = 6
_SUMMED_INDICES = {aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put}
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward
_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward
_PROCESSORS_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
# Other rows of the processor's table count what is in its kernels alone.
_AS_THERE = {
    aten.convolution, aten.convolution_backward, aten.index, aten.linalg_inv_ex, aten.linalg_solve_ex, aten.logsumexp,
}  # fmt: skip
_WITHOUT = {aten._scaled_dot_product_flash_attention_for_cpu, aten._softmax, aten._log_softmax, aten.nll_loss_forward}


def accelerator_table(architecture: str) -> ScratchTable:
    """Returns the table of an architecture: "sm_75", "gfx942"; "" counts as NVIDIA's newest.

    Args:
        architecture: as `Hardware.architecture`.
    """
    name = architecture or _NEWEST
    prefix = max((known for known in BLAS_WORKSPACES_KIB if name.startswith(known)), key=len, default="")
    library = f"workspaces, {BLAS_WORKSPACES_KIB[prefix]} KiB" if prefix else ""
    capability = name.removeprefix("sm_")
    has_flash = not capability.isdigit() or int(capability) >= _FLASH_CAPABILITY
    return ScratchTable(
        workspace_bytes=partial(_scratch_bytes, has_flash),
        # Kernels are compiled before, and take memory from torch's allocator alone.
        kernel_bytes=lambda *_: 0,
        outside_bytes=lambda *_: 0,
        library=lambda func, _: library if getattr(func, "_overloadpacket", None) in PRODUCTS else "",
    )


def _scratch_bytes(has_flash: bool, func: Any, args: Sequence[Any], out: Any) -> int | None:  # noqa: FBT001, bound
    packet = func._overloadpacket
    if packet is _FLASH_BACKWARD or (packet is _PROCESSORS_BACKWARD and has_flash and args[1].element_size() == 2):
        return _flash_backward_scratch(args)
    if packet in (_EFFICIENT_BACKWARD, _PROCESSORS_BACKWARD):
        return _efficient_backward(args)
    if packet is aten._softmax_backward_data:
        return args[0].numel() * max(args[0].element_size(), args[1].element_size())
    if packet is aten.embedding_dense_backward:
        return _embedding_backward(args, out)
    if packet in PRODUCTS:
        matrices = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1]
        return sum(m.numel() * m.element_size() for m in matrices if not is_dense_matrix(m))
    if packet in _SUMMED_INDICES:
        counts = [index.numel() for index in args[1] if index is not None]
        return _SORTED_COPIES * max(counts, default=0) * _INDEX_BYTES
    if packet in _AS_THERE:
        return formula_bytes(func, args, out)
    is_plain = func.is_view or {torch.Tag.pointwise, torch.Tag.reduction} & {*func.tags} or packet in _WITHOUT
    return 0 if is_plain else None


def _flash_backward_scratch(args: Sequence[Any]) -> int:
    query, key = args[1], args[2]
    batch, heads, rows, columns = query.shape
    sums = batch * heads * round_up(rows, _FLASH_ROWS) * (round_up(columns, _FLASH_COLUMNS) + 1) * _FP32_BYTES
    # Keys and values that several heads share get gradients of each head apart.
    is_shared = key.shape[1] != heads
    return sums + (2 * batch * heads * key.shape[2] * columns * key.element_size() if is_shared else 0)


def _efficient_backward(args: Sequence[Any]) -> int:
    gradient, query, key = args[:3]
    batch, heads, rows, columns = query.shape
    columns, is_half = round_up(columns, _TILE), query.element_size() == 2
    sums = round_up(rows, _TILE) * columns
    if is_half and columns > _TILE:
        # Gradients of keys and values do not fit registers.
        splits = min(-(-key.shape[2] // _TILE), _MOST_SPLITS // (batch * heads))
        sums += 2 * max(1, splits) * _TILE * columns
    before = 0 if is_half else gradient.numel()
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.numel() * gradient.element_size()
    return (max(batch * heads * sums, before) + batch * heads * rows) * _FP32_BYTES + copied


def _embedding_backward(args: Sequence[Any], out: torch.Tensor) -> int:
    count, (words, width) = args[1].numel(), out.shape
    sums = (count // _ROWS_A_SUM + min(count, words)) * width * _FP32_BYTES
    return _SORTED_COPIES * count * _INDEX_BYTES + sums if count > _FEWEST_SORTED else 0
