"""Bounds what oneDNN keeps of the kernels that it has compiled, and lets libraries take what they
take once.

In: the environment. Out: two variables of it; memory that libraries take when they first compute.

[Note: kernels that are kept]
On CPUs torch computes convolutions, and matrix products in bf16, with kernels that oneDNN compiles
for each combination of shapes, and keeps: 1,024 of them, twice (in oneDNN, and in torch's binding).
A product in bf16 takes 0.6 MiB, so that a model whose shapes differ from step to step (tokens of an
expert, rows of any length) grows by up to 600 MiB that no allocator counts. 64 are enough for the
layers of a model, which are alike; one that is compiled again costs 3 ms. Both variables are read
when the first such kernel is needed: whoever computed in bf16 before memfit has the larger caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from memfit.core.limits import BLAS_COLUMNS, KERNELS_KEPT, LIBRARY_BYTES

_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_kernels() -> None:
    """Sets both variables for this process, unless the user has."""
    for name in _VARIABLES:
        os.environ.setdefault(name, str(KERNELS_KEPT))


# Rows, common size and columns of a product, and its dtype. With fewer than some 450 rows and 384
# places the BLAS does not take all of its buffer.
_BY_COLUMNS = tuple(f"blas, {columns} columns" for columns in BLAS_COLUMNS)
_PRODUCTS = {"onednn": ((512, 512, 512), torch.bfloat16)} | {
    name: ((512, 384, columns), torch.float32) for name, columns in zip(_BY_COLUMNS, BLAS_COLUMNS, strict=True)
}
_have_computed: set[str] = set()


def compute_once(libraries: Iterable[str]) -> None:
    """Lets libraries compute a small product, once a process, so that what they take for good is
    there and can be measured.

    Memory: for a moment 3 MiB of tensors, and 3.5 KiB for each column of the widest product.

    Args:
        libraries: keys of `core.limits.LIBRARY_BYTES`.
    """
    for name in widest(libraries):
        if is_to_compute(name):
            _have_computed.add(name)
            (rows, inner, columns), dtype = _PRODUCTS[name]
            left, right = torch.zeros(rows, inner, dtype=dtype), torch.zeros(inner, columns, dtype=dtype)
            result = left @ right
            del right
            if columns <= rows:
                _ = result @ result.t(), result.t() @ result  # as backward does


def widest(libraries: Iterable[str]) -> list[str]:
    """Returns the names without those of the BLAS for fewer columns: it has one buffer for all."""
    given = set(libraries)
    of_blas = [name for name in _BY_COLUMNS if name in given]
    return [*sorted(given.difference(_BY_COLUMNS)), *of_blas[-1:]]


def panels_to_come(libraries: Iterable[str], threads: int) -> int:
    """Returns what the BLAS takes in a first step beyond what one small product had it take: of a
    product with more columns than one panel has, each of several threads has a panel of its own.
    """
    if threads == 1 or _BY_COLUMNS[-1] not in set(libraries):
        return 0
    return threads * LIBRARY_BYTES[_BY_COLUMNS[-1]]


def is_to_compute(library: str) -> bool:
    """Tells whether a library has not computed yet, or not a product that is as wide."""
    if library in _BY_COLUMNS:
        return _have_computed.isdisjoint(_BY_COLUMNS[_BY_COLUMNS.index(library) :])
    return library not in _have_computed
