"""Models that compute next to nothing, so that what takes their time is Python, torch and memfit.

In: what their blocks are to be made of. Out: models whose blocks are equal. Each part reads more
first than a core's cache holds, as the products of a real layer do: they leave nothing of Python's
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, PLACES = 16, 4
LOOKS = 400
"""Functions that a talkative part calls besides.
"""
_LARGE = 1 << 19
_SMALL_LOOKS = {"kind": "any"}


class SmallPart(nn.Module):
    """Reads more than a cache holds, then does what a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        self._large = torch.ones(_LARGE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reads, then computes."""
        self._large.sum()
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what comes of it: of the same shape."""
        raise NotImplementedError


class Smallest(SmallPart):
    """One operation, of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies."""
        return x * self.weight


class Layer(SmallPart):
    """A transformer's layer, with the modules and operations of one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.attention = _Norm(), _Norm(), _Attention()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.turns = torch.ones(PLACES, WIDTH // 2), torch.zeros(PLACES, WIDTH // 2)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a gated network, each beside what comes in."""
        x = x + self.attention(self.before(x), turns=self.turns)
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Talkative(Layer):
    """A layer whose code looks at tensors and options around its operations, as libraries' do."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Looks, then computes as a layer."""
        for _ in range(LOOKS):
            _look(x, options=_SMALL_LOOKS)
        return super().compute(x)


class SmallBlock(nn.Sequential):
    """Some parts, called as one."""


class _Norm(nn.Module):
    """Division by the root of the mean square, by its formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Attention(nn.Module):
    """Attention of two heads over queries and keys turned by their places."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor, *, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shape = (*hidden.shape[:-1], 2, -1)
        query, key, value = (one(hidden).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        query, key = (one * turns[0] + _half_turned(one) * turns[1] for one in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(hidden.shape))


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _look(x: torch.Tensor, *, options: dict[str, Any], **more: Any) -> tuple[int, ...] | None:
    """Asks for what code around operations asks for."""
    if options.get("is_skipped") or not isinstance(options["kind"], str):
        return None
    return (*x.shape[:-1], more.get("heads", 1))
