"""Bounds what oneDNN keeps of the kernels that it has compiled.

In: the environment. Out: two variables of it.

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

from memfit.core.limits import KERNELS_KEPT

_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_kernels() -> None:
    """Sets both variables for this process, unless the user has."""
    for name in _VARIABLES:
        os.environ.setdefault(name, str(KERNELS_KEPT))
