"""Memory that kernels of an accelerator allocate inside, by operator and architecture.

In: an operation with its arguments and result, traced on any device. Out: bytes alive for a moment
above arguments and results, as torch's CUDA kernels take them. Nothing of it was measured by us;
`benchmarks/measured_gpu.py` compares predictions with public runs.

| operation                     | inside                                               | source |
|-------------------------------|------------------------------------------------------|--------|
| softmax backward              | gradient times output                                | a      |
| attention backward, efficient | sums of gradients in fp32, a number a row; before    | b      |
|                               | them, where it is fp32, gradient times output        |        |
| attention backward, flash     | gradient of queries in fp32, a number a row;         | c      |
|                               | gradients of keys and values that heads share, whole |        |
| embedding backward            | sorted indices, partial sums in fp32                 | d      |
| indexed write                 | linear and sorted indices                            | e      |
| product of matrices with gaps | copies of them                                       | f      |
| workspace of the BLAS, kept   | `core.limits.BLAS_WORKSPACES_KIB`                    | g      |

Sources, below aten/src/ATen of torch, read in 2026:
a) native/cuda/SoftMax.cu, softmax_backward_cuda_out
b) native/transformers/cuda/attention_backward.cu, _efficient_attention_backward;
   native/transformers/cuda/mem_eff_attention/kernel_backward.h, workspace_elements_gk, _gv and _gq
c) native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd
d) native/cuda/Embedding.cu, embedding_dense_backward_cuda; EmbeddingBackwardKernel.cu,
   embedding_backward_cuda_kernel
e) native/cuda/Indexing.cu, index_put_with_sort_kernel
f) native/cuda/Blas.cpp, prepare_batch_matrix_for_cublas
g) cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize

What treats elements one by one or sums them has none: kernels convert dtypes as they read. Flash
attention is taken for 16 bits from compute capability 8.0 on (sdp_utils.cpp, use_flash_attention),
the efficient kernels below and for fp32. Assumed: a convolution copies its operands into another
layout, and what the table does not know takes what the processor's kernel takes. Not modelled: the
algorithms that cuDNN chooses, hipBLASLt's workspace, a flash attention's forward that splits keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from memfit.core.limits import BLAS_WORKSPACES_KIB
from memfit.profiling.workspaces import PRODUCTS, ScratchTable, formula_bytes, is_dense_matrix

_FP32_BYTES, _INDEX_BYTES = 4, 8
_NEWEST, _FLASH_CAPABILITY = "sm_90", 80
# Tiles of flash attention: rows and columns (of a head) that sums are rounded to.
_FLASH_ROWS, _FLASH_COLUMNS = 128, 32
# Efficient kernels; and blocks that keys are split among, whose sums are apart.
_TILE, _MOST_SPLITS = 64, 200
# Embeddings sort gradients where there are more, and sum them by so many.
_FEWEST_SORTED, _ROWS_A_SUM = 3072, 10
_SORTED_COPIES = 6
aten = torch.ops.aten
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
        return _flash_backward(args)
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


def _flash_backward(args: Sequence[Any]) -> int:
    query, key = args[1], args[2]
    batch, heads, rows, columns = query.shape
    sums = batch * heads * _rounded(rows, _FLASH_ROWS) * (_rounded(columns, _FLASH_COLUMNS) + 1) * _FP32_BYTES
    # Keys and values that several heads share get gradients of each head apart.
    is_shared = key.shape[1] != heads
    return sums + (2 * batch * heads * key.shape[2] * columns * key.element_size() if is_shared else 0)


def _efficient_backward(args: Sequence[Any]) -> int:
    gradient, query, key = args[:3]
    batch, heads, rows, columns = query.shape
    columns, is_half = _rounded(columns, _TILE), query.element_size() == 2
    sums = _rounded(rows, _TILE) * columns
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


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
