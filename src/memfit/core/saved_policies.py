"""Policies for the tensors that a call saves for backward.

In: names in plans. Out: `Saved`, the name, and its `Policy`, an entry of the one table that prices,
the planner and the engine read.

[Note: a policy is an entry]
No code asks which name a plan has; all ask what its policy does: whether the call runs again in
backward, whether what it saves is sent away, results of which operators are held meanwhile, and
which share of the forward backward repeats. So a policy inside a block is one more entry of
`POLICIES`, made before a model is profiled: the trace notes what it would hold, the planner looks
at it, and frames keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

MATRIX_PRODUCTS_AND_ATTENTION = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::linear", "aten::convolution", "aten::_convolution",
    "aten::_grouped_mm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward",
})  # fmt: skip
"""Matrix products, convolutions and attention, in all overloads that write into nothing."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Memory and cost of a call's saved tensors.

    Attributes:
        recomputes: only the call's arguments are held (at `CallPlan.boundary_home`), and the call
            runs again in backward.
        offloads: saved tensors rest at `CallPlan.saved_home` until backward.
        kept_operators: schema names of operators whose results a recomputed call holds and reuses.
        replay_share: share of the forward's floating point operations that backward repeats.
    """

    recomputes: bool = False
    offloads: bool = False
    kept_operators: frozenset[str] = frozenset()
    replay_share: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """True if everything stays on the device, as in plain PyTorch."""
        return not self.recomputes and not self.offloads


POLICIES: dict[str, Policy] = {
    "keep": Policy(),
    "recompute": Policy(recomputes=True, replay_share=1.0),
    # The share is an assumption: what is left of a transformer layer without its products.
    "select": Policy(recomputes=True, kept_operators=MATRIX_PRODUCTS_AND_ATTENTION, replay_share=0.1),
    "offload": Policy(offloads=True),
}
"""Policies by name. See [Note: a policy is an entry].
"""


class _Words(type):
    """Metaclass that makes the names iterable, like an enum's."""

    def __iter__(cls) -> Iterator[Saved]:
        return map(Saved, POLICIES)


class Saved(str, metaclass=_Words):
    """The name of a policy.

    In memory: KEEP holds all that a call saves; RECOMPUTE holds only the call's arguments (at
    `boundary_home`); SELECT also holds the outputs of matrix products and attention; OFFLOAD holds
    none while away: they rest at `saved_home`.

    There is one object for each name: `Saved("keep") is Saved.KEEP`.

    Raises:
        ValueError: no such policy.
    """

    __slots__ = ()
    _known: ClassVar[dict[str, Saved]] = {}
    KEEP: ClassVar[Saved]
    RECOMPUTE: ClassVar[Saved]
    SELECT: ClassVar[Saved]
    OFFLOAD: ClassVar[Saved]

    def __new__(cls, word: str) -> Saved:  # noqa: PYI034, there are no subclasses
        """Returns the one object of that name."""
        if word not in POLICIES:
            raise ValueError(f"{word!r:.80} is no policy; there are {[*POLICIES]}")
        return cls._known.setdefault(str(word), super().__new__(cls, word))

    def __repr__(self) -> str:
        return f"Saved({str(self)!r})"

    @property
    def policy(self) -> Policy:
        """The entry of `POLICIES`."""
        return POLICIES[self]


Saved.KEEP, Saved.RECOMPUTE, Saved.SELECT, Saved.OFFLOAD = map(Saved, ("keep", "recompute", "select", "offload"))
