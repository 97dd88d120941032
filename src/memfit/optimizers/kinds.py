"""Into how small a part an optimizer's step may be cut, and what is known about torch's own
classes.

In: an optimizer class. Out: its `Verdict`, if it is one of torch's own (a documented table, of
which a test checks every entry against the detector in `detect.py`); classes that are not in the
table are tried out by that detector.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

ALIGNED_PIECE_ELEMENTS = 64
"""Elements in a multiple of which pieces begin.

Fused CPU kernels round a vector's body and its tail differently (measured: SGD), and torch itself
cuts them between threads at cache lines. Pieces that start at multiples of this many elements meet
body and tail where the whole tensor does.
"""


class UpdateKind(enum.Enum):
    """The smallest part of the model on which one step of an optimizer is exactly the step on the
    whole.

    In memory: `ELEMENTWISE` needs one piece of weight, gradient and states at a time;
    `PER_PARAMETER` needs one whole parameter with its shape; `JOINT` needs every parameter,
    gradient and state of the optimizer at once.
    """

    ELEMENTWISE = "elementwise"
    PER_PARAMETER = "per parameter"
    JOINT = "joint"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Smallest unit of an update, for one parameter group."""

    kind: UpdateKind
    piece_multiple: int
    """Pieces of an elementwise update hold a multiple of this many elements, except the last one of
    a parameter.
    """
    reason: str
    """One sentence, for error messages."""


# Source: torch/optim/*.py of 2.11 and 2.13. Each of these touches element i of the weight, the
# gradient and the states only with element i, and otherwise with scalars that depend on the step
# count and the group alone.
_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

# Adafactor takes norms of one parameter and factors its second moment into rows and columns; Muon
# orthogonalizes one matrix.
_PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)


SIXTEEN_BIT = frozenset({torch.float16, torch.bfloat16})


def narrowed(verdict: Verdict, dtype: torch.dtype, device_type: str) -> Verdict:
    """The verdict for weights that are updated in this dtype on this kind of device.

    [Note: 16-bit tails] On the CPU, torch's 16-bit `add(alpha=...)` computes in float32 inside full
    vectors and rounds the product to 16 bits in the tail behind the last one (measured on 2.13).
    Tails lie at the end of each thread's share of the tensor, so a plain step on a large 16-bit
    weight depends on the number of threads, and only the whole tensor meets its tails where plain
    torch does.
    """
    if verdict.kind is UpdateKind.ELEMENTWISE and device_type == "cpu" and dtype in SIXTEEN_BIT:
        return Verdict(
            kind=UpdateKind.PER_PARAMETER,
            piece_multiple=1,
            reason=f"{dtype} kernels on the CPU round differently at vector tails; a float32 master may be cut",
        )
    return verdict


def known_classes() -> dict[type[torch.optim.Optimizer], UpdateKind]:
    """The table of torch's own optimizers.

    Subclasses are not covered by it: a subclass may change anything.
    """
    table = dict.fromkeys(_ELEMENTWISE, UpdateKind.ELEMENTWISE)
    table.update(dict.fromkeys(_PER_PARAMETER, UpdateKind.PER_PARAMETER))
    return table


def known_verdict(optimizer_class: type, group: dict[str, Any]) -> Verdict | None:
    """Looks one group of an optimizer of exactly this class up in the table; None if the class is
    not in the table.
    """
    kind = known_classes().get(optimizer_class)
    if kind is None:
        return None
    multiple = ALIGNED_PIECE_ELEMENTS if group.get("fused") and kind is UpdateKind.ELEMENTWISE else 1
    return Verdict(kind=kind, piece_multiple=multiple, reason=f"torch.optim.{optimizer_class.__name__} is {kind.value}")
