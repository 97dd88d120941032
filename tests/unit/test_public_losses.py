"""`memfit.losses`: the loss of plain PyTorch and its gradients for any head, with logits of a chunk at a time, alone and under plans of memfit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.core.errors import UsageError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.losses import chunked_cross_entropy

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 10, 8, 50


def targets(*, ignored: int = -100) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    found[:, ::4] = ignored
    return found


class Body(nn.Module):
    """Something before a head."""

    def __init__(self, *, bias: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.embedding(tokens)))


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def body(*, bias: bool, tied: bool, dtype: torch.dtype = torch.float32) -> Body:
    torch.manual_seed(0)
    return Body(bias=bias, tied=tied).to(dtype)


def tokens() -> Tensor:
    return torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % VOCABULARY


@pytest.mark.parametrize(
    ("bias", "tied", "frozen"),
    [
        (False, False, "nothing"),
        (True, False, "nothing"),
        (False, True, "nothing"),
        (True, True, "nothing"),
        (True, False, "the head"),
        (True, False, "all but the head"),
    ],
)
@pytest.mark.parametrize("smoothing", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["linear", "weight", "function"])
def test_the_loss_and_its_gradients_are_those_of_plain_cross_entropy(
    way: str, smoothing: float, bias: bool, tied: bool, frozen: str
) -> None:
    ignored = 7
    target = targets(ignored=ignored)
    model = body(bias=bias, tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen == "nothing" or name.startswith("head.") != (frozen == "the head"))
    exact = body(bias=bias, tied=tied, dtype=torch.float64)
    for parameter, mine in zip(exact.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(mine.requires_grad)
    given: dict[str, Any] = {
        "linear": {"head": model.head},
        "weight": {"head": model.head.weight, "bias": model.head.bias},
        "function": {"head": lambda hidden: functional.linear(hidden, model.head.weight, model.head.bias)},
    }[way]
    for reduction in ("mean", "sum", "sum_and_count"):
        plain = functional.cross_entropy(
            exact.head(exact(tokens())).flatten(0, 1),
            target.flatten(),
            ignore_index=ignored,
            label_smoothing=smoothing,
            reduction="mean" if reduction == "mean" else "sum",
        )
        count = int((target != ignored).sum())
        wanted = gradients(exact, lambda plain=plain: plain)
        for chunk in (1, 7, 1000) if reduction == "mean" else (7,):
            found: Any = chunked_cross_entropy(
                model(tokens()), given["head"], target, bias=given.get("bias"), ignore_index=ignored,
                label_smoothing=smoothing, reduction=reduction, chunk_tokens=chunk,
            )  # fmt: skip
            if reduction == "sum_and_count":
                found, counted = found
                assert not counted.requires_grad
                assert float(counted) == count
            torch.testing.assert_close(found.double(), plain, rtol=2e-6, atol=0)
            for name, gradient in gradients(model, lambda found=found: found).items():
                expected = wanted[name]
                if gradient is None:
                    assert expected is None, name
                else:
                    assert expected is not None, name
                    torch.testing.assert_close(gradient.double(), expected, rtol=2e-5, atol=2e-7 * count)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_in_double_precision_nothing_but_double_roundings_is_lost(smoothing: float) -> None:
    mine, plain = (body(bias=True, tied=True, dtype=torch.float64) for _ in range(2))
    target = targets()

    def ours() -> Any:
        return chunked_cross_entropy(mine(tokens()), mine.head, target, label_smoothing=smoothing, chunk_tokens=3)

    def theirs() -> Tensor:
        logits = plain.head(plain(tokens())).flatten(0, 1)
        return functional.cross_entropy(logits, target.flatten(), label_smoothing=smoothing)

    wanted = gradients(plain, theirs)
    for name, gradient in gradients(mine, ours).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["linear", "weight"])
def test_bf16_weights_lose_no_more_than_the_plain_loss_does(way: str) -> None:
    target = targets()
    exact = body(bias=True, tied=True, dtype=torch.bfloat16).double()
    wanted = gradients(
        exact, lambda: functional.cross_entropy(exact.head(exact(tokens())).flatten(0, 1), target.flatten())
    )
    plain = body(bias=True, tied=True, dtype=torch.bfloat16)
    by_plain = gradients(
        plain, lambda: functional.cross_entropy(plain.head(plain(tokens())).float().flatten(0, 1), target.flatten())
    )
    mine = body(bias=True, tied=True, dtype=torch.bfloat16)
    head: Any = mine.head if way == "linear" else mine.head.weight
    bias = None if way == "linear" else mine.head.bias
    found = gradients(
        mine,
        lambda: chunked_cross_entropy(mine(tokens()), head, target, bias=bias, chunk_tokens=4),
    )
    for name, gradient in found.items():
        expected, theirs = wanted[name], by_plain[name]
        assert gradient is not None and expected is not None and theirs is not None
        assert gradient.dtype is torch.bfloat16
        off, plain_off = ((some.double() - expected).norm() / expected.norm() for some in (gradient, theirs))
        assert off <= 1.5 * plain_off + torch.finfo(torch.bfloat16).eps / 2, name


def test_under_autocast_it_is_the_plain_loss_under_autocast() -> None:
    target = targets()
    model = body(bias=True, tied=False)
    with torch.autocast("cpu", torch.bfloat16):
        plain = functional.cross_entropy(model.head(model(tokens())).flatten(0, 1), target.flatten())
        found = chunked_cross_entropy(model(tokens()), model.head, target, chunk_tokens=8)
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
    wanted = gradients(model, lambda: plain)
    for name, gradient in gradients(model, lambda: found).items():
        expected = wanted[name]
        assert gradient is not None and expected is not None
        assert gradient.dtype is torch.float32
        assert (gradient - expected).norm() <= 2e-2 * expected.norm(), name


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize(("way", "most_chunks"), [("linear", 3), ("function", 6)])
def test_the_logits_are_never_whole(way: str, most_chunks: int) -> None:
    tokens, vocabulary, width, chunk = 1024, 4096, 16, 32
    head = nn.Linear(width, vocabulary)
    hidden = torch.randn(tokens, width, requires_grad=True)
    target = torch.randint(0, vocabulary, (tokens,))
    given: Any = head if way == "linear" else nn.Sequential(head)
    allocator = install()

    def rise(run: Callable[[], Any]) -> int:
        before = allocator.stats().live_bytes
        allocator.reset_peak()
        run()
        return allocator.stats().peak_bytes - before

    def step(loss: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            head.zero_grad()
            hidden.grad = None
            loss().backward()

        return run

    plain = rise(step(lambda: functional.cross_entropy(head(hidden), target)))
    mine = step(lambda: chunked_cross_entropy(hidden, given, target, chunk_tokens=chunk))
    whole = tokens * vocabulary * 4
    gradients_bytes = sum(p.numel() * 4 for p in head.parameters()) + hidden.numel() * 4
    assert plain > 2 * whole
    # Logits of a chunk and what is made of them; gradients, once and where they add up.
    assert rise(mine) < most_chunks * chunk * vocabulary * 4 + 3 * gradients_bytes + (1 << 20)
    with torch.no_grad():
        assert rise(lambda: chunked_cross_entropy(hidden, given, target, chunk_tokens=chunk)) < (
            3 * chunk * vocabulary * 4 + (1 << 20)
        )
    with Largest() as largest:
        mine()
    assert largest.elements == chunk * vocabulary


# Under memfit


def _loss(model: Body, batch: Tensor) -> Tensor:
    return chunked_cross_entropy(model(batch), model.head, batch.roll(-1, 1), chunk_tokens=7)


def _loss_of_any_head(model: Body, batch: Tensor) -> Tensor:
    def capped(hidden: Tensor) -> Tensor:
        return torch.tanh(model.head(hidden) / 5.0) * 5.0

    return chunked_cross_entropy(model(batch), capped, batch.roll(-1, 1), chunk_tokens=7)


def _counted(model: Body, batch: Tensor) -> Any:
    wanted = batch.roll(-1, 1).masked_fill(batch % 3 == 0, -100)
    return chunked_cross_entropy(model(batch), model.head, wanted, reduction="sum_and_count", chunk_tokens=7)


DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)


@pytest.mark.parametrize("homes", ["device", "disk"])
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("loss", [_loss, _loss_of_any_head])
def test_under_a_plan_the_steps_are_those_of_plain_pytorch_with_the_same_loss(
    loss: Callable[..., Tensor], tied: bool, homes: str
) -> None:
    plain, mine = body(bias=True, tied=tied), body(bias=True, tied=tied)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (plain, mine)]
    names = memfit.profile(mine, optimizers[1], loss, tokens()).blocks
    blocks = {} if homes == "device" else {b.name: DISK for b in names if not b.is_spanning}
    with memfit.fit(mine, optimizers[1], loss, tokens(), plan=Plan(blocks=blocks)) as job:
        for _ in range(3):
            found = job.step(tokens()).loss
            optimizers[0].zero_grad()
            value = loss(plain, tokens())
            value.backward()
            optimizers[0].step()
            assert found == float(value.detach())
    for (name, ours), theirs in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_two_microbatches_of_a_sum_with_its_count_are_the_whole_batch() -> None:
    whole, mine = body(bias=True, tied=False), body(bias=True, tied=False)
    total, count = _counted(whole, tokens())
    (total / count).backward()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
    with memfit.fit(mine, optimizer, _counted, tokens(), plan=Plan(microbatches=2), keep_gradients=True) as job:
        job.step(tokens())
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(job.gradient(name), parameter.grad, rtol=1e-5, atol=1e-7)


# What cannot be


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": targets().flatten()}, "need targets of shape"),
        ({"target": targets().int()}, "targets are classes"),
        ({"target": targets()[:, :0], "hidden": torch.zeros(ROWS, 0, WIDTH)}, "no tokens"),
        ({"head": torch.zeros(VOCABULARY, WIDTH + 1)}, "a head's weight has the shape"),
        ({"head": "lm_head"}, "head must be a torch.nn.Linear"),
        ({"bias": torch.zeros(VOCABULARY)}, "bias= goes with a weight"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"reduction": "none"}, "reduction is"),
        ({"chunk_tokens": 0}, "chunk_tokens must be"),
        ({"head": lambda hidden: hidden.sum()}, "makes logits of shape"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {
        "hidden": torch.zeros(ROWS, TOKENS, WIDTH),
        "head": nn.Linear(WIDTH, VOCABULARY),
        "target": targets(),
        **change,
    }
    with pytest.raises(UsageError, match=said):
        chunked_cross_entropy(given.pop("hidden"), given.pop("head"), given.pop("target"), **given)
