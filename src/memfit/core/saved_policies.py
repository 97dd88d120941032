"""Policies: what becomes of the tensors that a call saves for backward.

In: words of plans. Out: `Saved`, the word, and its `Policy`, an entry of one table that prices, the planner and the engine read.

[Note: a policy is an entry]
Nobody asks which word a plan has; all ask what its policy does: whether the call runs again in backward, whether what it saves is sent away, results of which
operators are held meanwhile, and which share of the forward backward repeats. So a policy inside a block is one more entry of `POLICIES`, made before a
model is profiled: the trace notes what it would hold, the planner looks at it, and frames keep it.
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
    """What a call's saved tensors do in memory, and what that costs.

    Attributes:
        recomputes: only the call's arguments are held (at `CallPlan.boundary_home`), and the call runs again in backward.
        offloads: what it saved rests at `CallPlan.saved_home` meanwhile.
        kept_operators: schema names of operators whose results a recomputed call holds, which are handed out when it runs again.
        replay_share: share of the forward's floating point operations that backward repeats.
    """

    recomputes: bool = False
    offloads: bool = False
    kept_operators: frozenset[str] = frozenset()
    replay_share: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """Holds everything on the device, as plain PyTorch does."""
        return not self.recomputes and not self.offloads


POLICIES: dict[str, Policy] = {
    "keep": Policy(),
    "recompute": Policy(recomputes=True, replay_share=1.0),
    # The share is an assumption: what is left of a transformer layer without its products.
    "select": Policy(recomputes=True, kept_operators=MATRIX_PRODUCTS_AND_ATTENTION, replay_share=0.1),
    "offload": Policy(offloads=True),
}
"""By word. See [Note: a policy is an entry]."""


class _Words(type):
    """Lets the words be gone through, as those of an enum."""

    def __iter__(cls) -> Iterator[Saved]:
        return map(Saved, POLICIES)


class Saved(str, metaclass=_Words):
    """The word of a policy.

    In memory: KEEP holds all that a call saves; RECOMPUTE holds only the call's arguments (at `boundary_home`); SELECT also holds the
    outputs of matrix products and attention; OFFLOAD holds none while away: they rest at `saved_home`.

    There is one object a word: `Saved("keep") is Saved.KEEP`.

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
        """The one object of that word."""
        if word not in POLICIES:
            raise ValueError(f"{word!r:.80} is no policy; there are {[*POLICIES]}")
        return cls._known.setdefault(str(word), super().__new__(cls, word))

    def __repr__(self) -> str:
        return f"Saved({str(self)!r})"

    @property
    def policy(self) -> Policy:
        """See `Policy`."""
        return POLICIES[self]


Saved.KEEP, Saved.RECOMPUTE, Saved.SELECT, Saved.OFFLOAD = map(Saved, ("keep", "recompute", "select", "offload"))
