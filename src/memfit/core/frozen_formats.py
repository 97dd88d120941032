"""Number formats of frozen weights at home, and their sizes in bytes.

In: the plan's decision, and a weight that does not train. Out: whether it rests in few bits, and
its size. `homes.encoded_weights` encodes and decodes.

[Note: frozen weights in few bits]
A frozen weight of a linear layer of at least `SMALLEST_ELEMENTS` elements may rest in 4 or 8 bits
an element, in whatever tier: on the device too, where such a block then visits like one that rests
elsewhere, and is decoded into its visit. It is rounded once, when it moves home; training, saves
and `close` have the decoded values from then on. Adapters, biases, norms, embeddings and weights
that are read between calls rest as they are.

| format | at home                                               | bits  | a value                          |
|--------|-------------------------------------------------------|-------|----------------------------------|
| nf4    | an fp32 scale for 64 values, 4-bit codes (Dettmers et | 4.5   | level x scale, in fp32           |
|        | al. 2023, "QLoRA", section 3)                         |       |                                  |
| int8   | an fp32 scale for a row of the weight, 8-bit integers | 8 and | integer x scale, in fp32, divided|
|        | (Dettmers et al. 2022, "LLM.int8()", section 2.1)     | a bit | by 127                           |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from memfit.core.layout import flat_layout

SMALLEST_ELEMENTS = 4096
NF4_BLOCK = 64
_SCALE_BYTES = 4


class FrozenFormat(StrEnum):
    """Format of frozen weights at home. GIVEN: as they are. Others: see [Note: frozen weights in
    few bits].
    """

    GIVEN = "given"
    NF4 = "nf4"
    INT8 = "int8"

    @property
    def allowance(self) -> str:
        """Name of the format in `fit(allow=...)`."""
        return f"{self}-frozen"

    def parts(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the bytes of the scales of a weight, and of its codes; not for GIVEN."""
        numel = math.prod(shape)
        if self is FrozenFormat.NF4:
            return _SCALE_BYTES * (numel // NF4_BLOCK), numel // 2
        return _SCALE_BYTES * shape[0], numel

    def can_hold(self, shape: Sequence[int], dtype: str) -> bool:
        """Tells whether a frozen linear weight rests in this format; never in GIVEN."""
        numel = math.prod(shape)
        if self is FrozenFormat.GIVEN or len(shape) != 2 or numel < SMALLEST_ELEMENTS:
            return False
        return dtype in ("float32", "bfloat16", "float16") and (self is FrozenFormat.INT8 or numel % NF4_BLOCK == 0)


def encoded_sizes(parts: Sequence[tuple[int, int] | int]) -> tuple[list[tuple[int, ...]], int]:
    """Returns the offsets of what rests of each parameter of a block, and the bytes of all.

    Args:
        parts: by parameter: bytes of scales and codes, or of a weight that rests as it is.
    """
    sizes = [size for part in parts for size in ((part,) if isinstance(part, int) else part)]
    offsets, total = flat_layout(sizes)
    left = iter(offsets)
    return [tuple(next(left) for _ in range(1 if isinstance(part, int) else 2)) for part in parts], total
