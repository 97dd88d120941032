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

from memfit.core.limits import KERNELS_KEPT

_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_kernels() -> None:
    """Sets both variables for this process, unless the user has."""
    for name in _VARIABLES:
        os.environ.setdefault(name, str(KERNELS_KEPT))


# Rows, common size and columns of a product, and its dtype.
_PRODUCTS = {
    "blas": ((512, 512, 512), torch.float32),
    "blas, wide": ((16, 64, 8192), torch.float32),
    "onednn": ((512, 512, 512), torch.bfloat16),
}
_have_computed: set[str] = set()


def compute_once(libraries: Iterable[str]) -> None:
    """Lets libraries compute a small product, once a process, so that what they take for good is
    there and can be measured.

    Memory: 4 MiB of tensors for a moment.

    Args:
        libraries: keys of `core.limits.LIBRARY_BYTES`.
    """
    for name in libraries:
        if name not in _have_computed:
            _have_computed.add(name)
            (rows, inner, columns), dtype = _PRODUCTS[name]
            left, right = torch.zeros(rows, inner, dtype=dtype), torch.zeros(inner, columns, dtype=dtype)
            result = left @ right
            _ = result @ right.t(), left.t() @ result  # as backward does


def is_to_compute(library: str) -> bool:
    """Tells whether a library has not computed yet."""
    return library not in _have_computed
