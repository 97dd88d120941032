"""Dtypes in which weights compute and in which they are stored.

In: a parameter's dtype and the plan's decision, as torch prints them without the prefix. Out: the
dtypes of the weight and of its master.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from memfit.core.layout import flat_layout

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


# Number formats of frozen weights at home, and their sizes in bytes.
#
# In: the plan's decision, and a weight that does not train. Out: whether it rests in few bits, and
# its size. `homes.encoded_weights` encodes and decodes.
#
# [Note: frozen weights in few bits]
# A frozen weight of a linear layer of at least `SMALLEST_FROZEN_ELEMENTS` elements may rest in 4 or
# 8 bits an element, in whatever tier: on the device too, where such a block then visits like one
# that rests elsewhere, and is decoded into its visit. It is rounded once, when it moves home;
# training, saves and `close` have the decoded values from then on. Adapters, biases, norms,
# embeddings and weights that are read between calls rest as they are.
#
# | format | at home                                               | bits  | a value                          |
# |--------|-------------------------------------------------------|-------|----------------------------------|
# | nf4    | an fp32 scale for 64 values, 4-bit codes (Dettmers et | 4.5   | level x scale, in fp32           |
# |        | al. 2023, "QLoRA", section 3)                         |       |                                  |
# | int8   | an fp32 scale for a row of the weight, 8-bit integers | 8 and | integer x scale, in fp32, divided|
# |        | (Dettmers et al. 2022, "LLM.int8()", section 2.1)     | a bit | by 127                           |

SMALLEST_FROZEN_ELEMENTS = 4096
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
        if self is FrozenFormat.GIVEN or len(shape) != 2 or numel < SMALLEST_FROZEN_ELEMENTS:
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


# Number formats of optimizer states at home, and their sizes in bytes.
#
# In: the plan's decision, and a state's name and size. Out: its layout and size.
# `homes.state_codecs` encodes and decodes.
#
# [Note: state formats]
# A moment of a weight of at least `SMALLEST_ELEMENTS` elements may rest in 4, 8 or 16 bits an
# element in place of 32. An update decodes a piece of it to fp32, runs the user's own optimizer on
# that, and encodes the result on its way home, so that bytes at home and bytes moved shrink by the
# same factor, whatever the tier. What is encoded is known by its name: those that torch's
# optimizers give to running means of gradients (signed) and of their squares (never negative).
# Everything else stays as it is: step counts, small tensors, weights of embeddings (their gradients
# are sparse and differ by orders of magnitude between rows: Dettmers et al. 2022, "8-bit Optimizers
# via Block-wise Quantization", section 2.3), and the moments of a centered RMSprop, which subtracts
# one from the square of the other and takes a root: rounded apart, the difference may be negative.
#
# | format | a record                     | bits | mean of gradients                        | mean of squares                           |
# |--------|------------------------------|------|------------------------------------------|-------------------------------------------|
# | int8   | fp32 scale, 256 codes        | 8.13 | dynamic map, signed (Dettmers et al.)    | dynamic map, unsigned                     |
# | int4   | fp32 scale, 128 codes        | 4.25 | dynamic map, signed (Li et al. 2023,     | 16 equal steps without a zero (Li et al., |
# |        |                              |      | "Memory Efficient Optimizers with 4-bit  | section 4.1: a zero denominator is what   |
# |        |                              |      | States", block 128)                      | breaks 4-bit second moments)              |
# | fp8    | fp32 scale, 256 e4m3 values  | 8.13 | nearest                                  | nearest                                   |
# | bf16   | one bf16 value               | 16   | stochastic rounding                      | stochastic rounding                       |
#
# In all of them a mean of squares that is above zero never becomes zero. bf16 has no scale that
# shrinks with its block, so nearest rounding would hold a mean that loses 0.1 % a step (beta2 =
# 0.999) where it is for ever, since bf16 values are 0.4 to 0.8 % apart; stochastic rounding loses
# it on average.

SMALLEST_ELEMENTS = 4096
"""Smaller tensors are not encoded: little would be saved, and they matter most (norms, biases).
Source: Dettmers et al. 2022, section 2.
"""


class StateFormat(StrEnum):
    """Format of optimizer states. GIVEN: as the optimizer makes them. Others: see [Note: state
    formats].
    """

    GIVEN = "given"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    BF16 = "bf16"

    @property
    def allowance(self) -> str:
        """Name of the format in `fit(allow=...)`."""
        return f"{self}-state"


class StateMoment(StrEnum):
    """Quantity whose running mean a state is. FIRST: gradients, of either sign. SECOND: their
    squares or magnitudes, never negative.
    """

    FIRST = "first"
    SECOND = "second"


# Names in torch.optim (2.11 to 2.13). Not here: Adagrad's sum (it only grows: what is below half a
# step would be lost for good), Rprop's signs and step sizes, ASGD's averaged weights.
_MOMENTS = {
    "exp_avg": StateMoment.FIRST,
    "momentum_buffer": StateMoment.FIRST,
    "exp_avg_sq": StateMoment.SECOND,
    "max_exp_avg_sq": StateMoment.SECOND,
    "square_avg": StateMoment.SECOND,
    "acc_delta": StateMoment.SECOND,
    "exp_inf": StateMoment.SECOND,
}
_SUBTRACTED = "grad_avg"


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """Layout of an encoded tensor: records, one after the other, of `elements` neighbouring values
    and their scale in `nbytes`.
    """

    elements: int
    nbytes: int

    def size(self, count: int) -> int:
        """Returns the bytes of `count` elements."""
        return -(-count // self.elements) * self.nbytes

    def offset(self, first: int) -> int:
        """Returns the offset in bytes of the record that begins with element `first`."""
        assert first % self.elements == 0
        return first // self.elements * self.nbytes


_RECORDS = {
    StateFormat.INT8: RecordLayout(elements=256, nbytes=4 + 256),
    StateFormat.INT4: RecordLayout(elements=128, nbytes=4 + 64),
    StateFormat.FP8: RecordLayout(elements=256, nbytes=4 + 256),
    StateFormat.BF16: RecordLayout(elements=1, nbytes=2),
}


def records_of(chosen: StateFormat) -> RecordLayout:
    """Returns the layout of a format other than GIVEN."""
    return _RECORDS[chosen]


def moment_of(key: str, keys: Collection[str], numel: int, dtype: str) -> StateMoment | None:
    """Returns the quantity whose mean a state is; None for a state that is not encoded. See [Note:
    state formats].

    Args:
        key: the state's name.
        keys: names of all states of its parameter.
        numel: elements of the parameter, whose shape the state has.
        dtype: dtype of the state, as torch prints it without the prefix.
    """
    if numel < SMALLEST_ELEMENTS or dtype != "float32" or _SUBTRACTED in keys:
        return None
    return _MOMENTS.get(key)
