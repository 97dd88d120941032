"""Models that fail in the dtype that a plan computes in, as they do in plain PyTorch: told in words, at `fit` where a forward shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UnsupportedError
from memfit.core.plan import Plan
from memfit.core.storage_formats import ComputeDtype

WIDTH, ROWS = 8, 4


class Distances(nn.Module):
    """Distances of rows, which torch does not have in fp16 on any processor (an LSTM some have)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pdist(self.inner(x))


class Mixed(nn.Module):
    """Multiplies its weight with a tensor that stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.given = torch.eye(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.inner.bias, x, self.given @ self.inner.weight)


class OnlyForward(torch.autograd.Function):
    """An operation whose backward lacks fp16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradient.dtype is torch.float16 and gradient.device.type != "meta" and not memfit.is_planning():
            raise RuntimeError('"only_forward_backward" not implemented for Half')
        return gradient


class LacksBackward(nn.Module):
    """Fails where its backward gets fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return OnlyForward.apply(self.inner(x))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def fitted(model: nn.Module, compute: ComputeDtype) -> memfit.Job:
    name = {ComputeDtype.FLOAT16: "fp16", ComputeDtype.BFLOAT16: "bf16"}[compute]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memfit.fit(
        model, optimizer, loss_of, torch.randn(ROWS, WIDTH), plan=Plan(compute_dtype=compute), allow={name}
    )


def test_what_the_forward_lacks_is_told_at_fit() -> None:
    model = Distances()
    with (
        pytest.raises(RuntimeError, match="pdist"),
        torch.autocast("cpu", torch.float16),
    ):
        loss_of(model, torch.randn(ROWS, WIDTH))  # plain PyTorch cannot either
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        UnsupportedError, match=r"fails in float16, which the plan computes in: NotImplementedError: .*pdist.*allow="
    ):
        fitted(model, ComputeDtype.FLOAT16)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_the_backward_lacks_is_told_in_the_first_step() -> None:
    model = LacksBackward()
    before = [p.clone() for p in model.parameters()]
    with (
        fitted(model, ComputeDtype.FLOAT16) as job,
        pytest.raises(UnsupportedError, match=r"fails in float16.*not implemented for Half"),
    ):
        job.step(torch.randn(ROWS, WIDTH))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_model_that_mixes_dtypes_is_told_in_bf16() -> None:
    with pytest.raises(UnsupportedError, match="fails in bfloat16.*same dtype"):
        fitted(Mixed(), ComputeDtype.BFLOAT16)
