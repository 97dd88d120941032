"""Dtypes in which weights compute and in which they are stored.

In: a parameter's dtype and the plan's decision, as torch prints them without the prefix. Out: the
dtypes of the weight and of its master.
"""

from __future__ import annotations

from enum import StrEnum

WITHOUT_MASTERS = "bf16-weights-sr"
"""Name in `fit(allow=...)` of bf16 weights without masters, rounded stochastically.
"""
FP16_WEIGHTS = "fp16-weights"
"""Name in `fit(allow=...)` of fp16 weights with fp32 masters. "fp16" is autocast, which computes
sums, norms and losses in fp32.
"""


class ComputeDtype(StrEnum):
    """Dtype in which weights compute.

    GIVEN: weights compute and are updated in the dtype in which the model came.

    BFLOAT16: weights that are fp32 or bf16 compute in bf16; their fp32 masters, and the optimizer's
    moments in fp32, rest at home. FLOAT16: weights are as they came; the forward runs under torch's
    autocast to fp16, and losses are scaled dynamically. FLOAT16_WEIGHTS: as BFLOAT16, with weights
    in fp16, and losses are scaled dynamically. Half the bytes of a weight are read at each visit;
    under FLOAT16 all.
    """

    GIVEN = "given"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT16_WEIGHTS = "float16-weights"

    @property
    def has_masters(self) -> bool:
        """True if weights are stored twice: in the dtype in which they compute, and in fp32."""
        return self.weight_dtype is not None

    @property
    def weight_dtype(self) -> str | None:
        """Dtype in which weights compute; None if it is the one in which they came."""
        return _WEIGHTS.get(self)

    @property
    def scales_losses(self) -> bool:
        """True if gradients pass through fp16: losses are scaled, and no update begins before all
        gradients are known to be finite.
        """
        return self in (ComputeDtype.FLOAT16, ComputeDtype.FLOAT16_WEIGHTS)


_WEIGHTS = {ComputeDtype.BFLOAT16: "bfloat16", ComputeDtype.FLOAT16_WEIGHTS: "float16"}


def stored_dtypes(dtype: str, compute: ComputeDtype) -> tuple[str, str]:
    """Returns the dtypes of a parameter's weight and of its master; equal if the weight is its own
    master (fp64 and integers always are).
    """
    if compute.weight_dtype is None or dtype not in ("float32", compute.weight_dtype):
        return dtype, dtype
    return compute.weight_dtype, "float32"


def dtype_failure(compute: ComputeDtype, error: BaseException) -> str:
    """Returns the message that says that the user's model fails in the plan's compute dtype."""
    told = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"the model fails in {compute}, which the plan computes in: {type(error).__name__}: {told:.200}. "
        "Plain PyTorch may lack an operation in that dtype on this device, or a layer mixes it with fp32: "
        "leave it out of allow=, or let the layer's forward bring input and weights to one dtype"
    )
