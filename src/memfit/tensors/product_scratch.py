"""Memory that products of matrices in half precision take inside, on a processor.

In: sizes of a product. Out: bytes alive for a moment above operands and result, an upper bound.

Measured on torch 2.13 under the allocator's counters, 1 to 16 threads, 3,400 products and batches
of products of 1 to 8,192 rows, columns and places, with and without AMX: each thread takes
reordered operands, padded to 64 places, of up to 320 rows at once. In bf16 they took up to 1.5 MiB
a thread; in fp16, which only AMX-FP16 multiplies as it is, operands are widened, also of up to 320
columns at once, and took up to 2.2 MiB. With AMX, where more than some 1,500 numbers are added up
for an element, there are sums in fp32 besides, of all its rows and at most 768 columns at a time,
unless the first factor lies column by column.

Where oneDNN has no products in a dtype (bf16 without AVX-512, fp16 on most processors) torch
computes them itself: column by column times row by row, as gradients of weights are, into a copy of
the result in fp32, matrix by matrix (measured by the kernel's count of the process, for the copy
comes from the C library: `outside_bytes`; the other three layouts take nothing).
"""

from __future__ import annotations

import math

import torch

_MIB = 2**20
_SMALL_BYTES = 64 * 1024
_MOST_BYTES = 3 * _MIB // 2
_MOST_WIDENED_BYTES = 9 * _MIB // 4
_MOST_AT_ONCE = 320
_DEEP = 1536
_COLUMNS = 768
_SUM_BYTES = 4


def product_scratch_bytes(
    rows: int, depth: int, columns: int, *, dtype: torch.dtype, is_transposed: bool = False
) -> int:
    """Returns most bytes that a product (rows, depth) by (depth, columns) takes inside, and a batch
    of them.

    Args:
        rows: of the result.
        depth: how many numbers are added up for each element.
        columns: of the result.
        dtype: of the result, bf16 or fp16.
        is_transposed: the first factor lies column by column.
    """
    if not has_products(dtype):
        return 0
    threads, height, width = torch.get_num_threads(), min(_padded(rows), _MOST_AT_ONCE), _padded(columns)
    reordered = min(_MOST_BYTES, 2 * _padded(depth) * (height + width))
    if dtype is torch.float16 and not has_tiles(dtype):
        reordered = min(_MOST_WIDENED_BYTES, 4 * _padded(depth) * (height + min(width, _MOST_AT_ONCE)))
    sums = has_tiles(dtype) and depth > _DEEP and not is_transposed
    return threads * (_SMALL_BYTES + reordered) + sums * _SUM_BYTES * rows * min(columns, threads * _COLUMNS)


def _padded(places: int) -> int:
    return -(-places // 64) * 64


def outside_bytes(left: torch.Tensor, right: torch.Tensor) -> int:
    """Returns bytes of the C library that a product of two matrices, or of two batches of them,
    takes inside, beside all that a counter of tensors sees.
    """
    if has_products(left.dtype) or left.stride(-1) == 1 or right.stride(-1) != 1:
        return 0
    return _SUM_BYTES * left.shape[-2] * right.shape[-1]


def update_product_bytes(elements: int, dtype: torch.dtype) -> int:
    """Returns most bytes that products of a matrix of so many elements by itself take inside, as
    optimizers that orthogonalize make them.
    """
    side = math.isqrt(elements)
    return product_scratch_bytes(side, _DEEP + 1, side, dtype=dtype)


def has_tiles(dtype: torch.dtype) -> bool:
    """Tells whether the processor has matrices in registers (AMX) for a dtype."""
    if dtype is torch.bfloat16:
        return torch.cpu._is_amx_tile_supported()
    return dtype is torch.float16 and torch.cpu._is_amx_fp16_supported()


def has_products(dtype: torch.dtype) -> bool:
    """Tells whether oneDNN multiplies matrices in a dtype on this processor."""
    return dtype not in _WITHOUT_PRODUCTS


def _is_supported(dtype: torch.dtype) -> bool:
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    ask = getattr(torch.ops.mkldnn, name, None)
    return ask is not None and bool(ask())


# Asked once: under a trace's modes an operator of torch's is not what it is.
_WITHOUT_PRODUCTS = frozenset(dtype for dtype in (torch.bfloat16, torch.float16) if not _is_supported(dtype))
