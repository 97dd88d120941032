"""In which dtype weights compute, and in which they are kept.

In: a parameter's dtype and the plan's decision, as torch prints them without the prefix. Out: the dtypes of the weight and of its master.
"""

from __future__ import annotations

from enum import StrEnum

WITHOUT_MASTERS = "bf16-weights-sr"
"""What `fit(allow=...)` calls bf16 weights that are rounded stochastically and have no masters."""

_MASTERED = ("float32", "bfloat16")


class ComputeDtype(StrEnum):
    """GIVEN: weights compute in the dtype in which the model came, and are updated in it.

    BFLOAT16: weights that are fp32 or bf16 compute in bf16; their fp32 masters, and the optimizer's moments in fp32, rest at home.
    FLOAT16: weights are as they came; the forward runs under torch's autocast to fp16, and losses are scaled dynamically.
    """

    GIVEN = "given"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def has_masters(self) -> bool:
        """Weights are kept twice: as they compute, and in fp32."""
        return self is ComputeDtype.BFLOAT16


def stored_dtypes(dtype: str, compute: ComputeDtype) -> tuple[str, str]:
    """Dtypes of a parameter's weight and of its master; equal where the weight is its own master (fp64 and integers always are)."""
    if not compute.has_masters or dtype not in _MASTERED:
        return dtype, dtype
    return str(compute), "float32"
