"""Kernels that a step uses, and what libraries take for them outside of tensors.

In: operations as a trace meets them. Out: bytes. See [Note: kernels that are kept] in
`allocator.compiled_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.core.limits import KERNELS_KEPT
from memfit.profiling.operation_facts import Facts

# The sizes of their results, or of the products inside them, depend on values.
_OF_VALUES = {torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default}
_GROUPED = torch.ops.aten._grouped_mm.default


class KernelsUsed:
    """Kernels of one trace; operations that are alike share one."""

    def __init__(self) -> None:
        # By identity: operations that are alike share their facts, others may have equal ones.
        self._kernels: dict[int, Facts] = {}
        # Held, so that an address is not another one's.
        self._noted: dict[int, Facts] = {}
        self._libraries: set[str] = set()
        self._sizes_vary = False
        self._outside_bytes = 0

    def note(self, func: Any, facts: Facts) -> None:
        """Notes an operation."""
        if id(facts) in self._noted:
            return
        self._noted[id(facts)] = facts
        # In fp32 the BLAS computes them, and compiles nothing.
        self._sizes_vary |= func in _OF_VALUES or (func is _GROUPED and facts.kernel_bytes > 0)
        if facts.kernel_bytes:
            self._kernels[id(facts)] = facts
        self._outside_bytes = max(self._outside_bytes, facts.outside_bytes)
        if facts.library:
            self._libraries.add(facts.library)

    @property
    def nbytes(self) -> int:
        """Bytes that libraries keep of kernels: of as many as are ever kept where sizes depend on
        values, so that each step brings other ones. And the most that an operation takes outside
        of tensors: it may come beside all that the allocator keeps.
        """
        found = sorted((facts.kernel_bytes for facts in self._kernels.values()), reverse=True)
        kept = KERNELS_KEPT * found[0] if found and self._sizes_vary else sum(found[:KERNELS_KEPT])
        return kept + self._outside_bytes

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the libraries that take memory when they first compute."""
        return tuple(sorted(self._libraries))
