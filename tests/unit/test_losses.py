"""The loss in chunks: the gradients of the whole loss, with as many digits, in every dtype."""

from __future__ import annotations

import pytest
import torch

from memfit.engine import causal_loss as losses
from memfit.engine.causal_loss import chunked_cross_entropy

TOKENS, VOCABULARY, WIDTH = 512, 300, 64


def _apart(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    assert found is not None
    assert wanted is not None
    return float(torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted))


def _problem(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    parts = [torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH) * 0.1, torch.randn(VOCABULARY)]
    target = torch.randint(0, VOCABULARY, (TOKENS,))
    target[::7] = -100
    return [part.to(dtype) for part in parts], target


@pytest.mark.parametrize("waiting", [1 << 30, 128 * VOCABULARY * 2, 1], ids=["one product", "four", "one a chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_lose_no_digits_of_the_gradients(
    dtype: torch.dtype, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far from fp64 as a rounding to the dtype and one of the products, or as the whole loss; 64 chunks that add up in bf16 would be 4 times as far."""
    monkeypatch.setattr(losses, "_WAITING_BYTES", waiting)
    given, target = _problem(dtype)
    exact = [part.double().requires_grad_() for part in given]
    torch.nn.functional.cross_entropy(torch.nn.functional.linear(*exact), target).backward()
    hidden, weight, bias = (part.clone().requires_grad_() for part in given)
    chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=8).backward()
    # How far one product is, the processor's library says: in fp32 1 to 3 roundings.
    whole = [part.clone().requires_grad_() for part in given]
    torch.nn.functional.cross_entropy(torch.nn.functional.linear(*whole).float(), target).backward()
    for found, wanted, plain in zip((hidden, weight, bias), exact, whole, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert found.grad.dtype is dtype
        allowed = max(2 * torch.finfo(dtype).eps, 1.5 * _apart(plain.grad, wanted.grad))
        assert _apart(found.grad, wanted.grad) < allowed, tuple(found.shape)


def test_the_gradient_of_a_narrow_weight_in_one_product_is_that_of_the_whole_loss() -> None:
    """What waits is what the whole loss would have multiplied: the same product, bit for bit."""
    (hidden, weight, _), target = _problem(torch.bfloat16)
    target[:] = target.clamp(min=0)
    grads: list[torch.Tensor] = []
    for is_chunked in (True, False):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if is_chunked:
            loss = chunked_cross_entropy(states, head, target, chunk_tokens=128)
        else:
            loss = torch.nn.functional.cross_entropy((states @ head.t()).float(), target)
        loss.backward()
        assert head.grad is not None
        grads.append(head.grad)
    assert _apart(grads[0], grads[1].double()) < 1e-4
