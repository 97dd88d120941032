"""Number formats of optimizer states at home, and their sizes in bytes.

In: the plan's decision, and a state's name and size. Out: its layout and size. `homes.state_codecs`
encodes and decodes.

[Note: state formats]
A moment of a weight of at least `SMALLEST_ELEMENTS` elements may rest in 4, 8 or 16 bits an element
in place of 32. An update decodes a piece of it to fp32, runs the user's own optimizer on that, and
encodes the result on its way home, so that bytes at home and bytes moved shrink by the same factor,
whatever the tier. What is encoded is known by its name: those that torch's optimizers give to
running means of gradients (signed) and of their squares (never negative). Everything else stays as
it is: step counts, small tensors, weights of embeddings (their gradients are sparse and differ by
orders of magnitude between rows: Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization", section 2.3), and the moments of a centered RMSprop, which subtracts one from the
square of the other and takes a root: rounded apart, the difference may be negative.

| format | a record                     | bits | mean of gradients                        | mean of squares                           |
|--------|------------------------------|------|------------------------------------------|-------------------------------------------|
| int8   | fp32 scale, 256 codes        | 8.13 | dynamic map, signed (Dettmers et al.)    | dynamic map, unsigned                     |
| int4   | fp32 scale, 128 codes        | 4.25 | dynamic map, signed (Li et al. 2023,     | 16 equal steps without a zero (Li et al., |
|        |                              |      | "Memory Efficient Optimizers with 4-bit  | section 4.1: a zero denominator is what   |
|        |                              |      | States", block 128)                      | breaks 4-bit second moments)              |
| fp8    | fp32 scale, 256 e4m3 values  | 8.13 | nearest                                  | nearest                                   |
| bf16   | one bf16 value               | 16   | stochastic rounding                      | stochastic rounding                       |

In all of them a mean of squares that is above zero never becomes zero. bf16 has no scale that
shrinks with its block, so nearest rounding would hold a mean that loses 0.1 % a step (beta2 =
0.999) where it is for ever, since bf16 values are 0.4 to 0.8 % apart; stochastic rounding loses it
on average.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

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
