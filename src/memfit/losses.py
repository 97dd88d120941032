"""Losses for your own loss functions, whose logits are never whole: in plain PyTorch and under
memfit alike.

In: hidden states, a head, targets. Out: the cross-entropy and its gradients, of as many tokens at a
time as `chunk_tokens` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit.core.errors import UsageError
from memfit.engine.causal_loss import chunked_cross_entropy as _linear_cross_entropy

__all__ = ["chunked_cross_entropy"]

Reduction = Literal["mean", "sum", "sum_and_count"]
Head = nn.Module | Tensor | Callable[[Tensor], Tensor]


@overload
def chunked_cross_entropy(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_tokens: int = 256,
) -> Tensor: ...


@overload
def chunked_cross_entropy(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["sum_and_count"],
    chunk_tokens: int = 256,
) -> tuple[Tensor, Tensor]: ...


def chunked_cross_entropy(
    hidden: Float[Tensor, "*tokens width"],
    head: nn.Module | Float[Tensor, "vocabulary width"] | Callable[[Tensor], Tensor],
    target: Int64[Tensor, "*tokens"],
    *,
    bias: Float[Tensor, " vocabulary"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    chunk_tokens: int = 256,
) -> Float[Tensor, ""] | tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Computes `torch.nn.functional.cross_entropy(head(hidden), target)` a chunk of tokens at a
    time.

    The sums are those of the whole loss in another order (*reordered*): equal up to rounding,
    computed in fp32 (fp64 for fp64).

        def loss(model, batch):
            tokens = batch["input_ids"]
            hidden = model.model(tokens).last_hidden_state[:, :-1]
            return memfit.losses.chunked_cross_entropy(hidden, model.lm_head, tokens[:, 1:])

    For `(sum, count)`, which memfit divides by the count of the whole batch:
    `reduction="sum_and_count"`.

    Memory: with a `torch.nn.Linear` or a weight, the logits of a chunk twice (2 x chunk_tokens x
    vocabulary x 4 bytes), and the gradients of `hidden`, weight and bias from forward to backward;
    for 16-bit weights up to 128 MiB more. With another head, what it saves for one chunk, and its
    forward runs twice; its gradients add up chunk by chunk in the dtype of its weights. Without
    gradients (`torch.no_grad()`) the logits of one chunk alone.

    Args:
        hidden: what goes into the head.
        head: a `torch.nn.Linear`, whose weight and bias are read (it is not called, and its hooks
            do not run); the weight itself, tied or not; or any module or function from states
            `(tokens, width)` to logits `(tokens, vocabulary)`, which treats tokens one by one.
            Under memfit a weight that is read without its module's call stays on the device.
        target: classes, of the shape of `hidden` without its last dimension.
        bias: of the head, where `head` is a weight.
        ignore_index: target of tokens that do not count.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        reduction: "mean" over the tokens that count, "sum", or "sum_and_count" for both parts of
            the mean.
        chunk_tokens: tokens whose logits are there at once.

    Returns:
        The loss in nats, differentiable once; or (sum, count).

    Raises:
        UsageError: shapes, dtypes or settings that do not fit together.
    """
    _check(hidden, head, target, bias, label_smoothing, reduction, chunk_tokens)
    states, classes = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    wide = torch.promote_types(states.dtype, torch.float32)
    count = (classes != ignore_index).sum().to(wide)
    divisor = count if reduction == "mean" else None
    # subclasses may compute something else
    if isinstance(head, nn.Linear) and type(head) is nn.Linear:
        head, bias = head.weight, head.bias
    if isinstance(head, Tensor):
        loss = _of_weight(states, head, bias, classes, divisor, chunk_tokens, ignore_index, label_smoothing)
    else:
        loss = _of_function(states, head, classes, divisor, chunk_tokens, ignore_index, label_smoothing)
    return (loss, count) if reduction == "sum_and_count" else loss


def _of_weight(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: Tensor,
    divisor: Tensor | None,
    chunk_tokens: int,
    ignored: int,
    smoothing: float,
) -> Tensor:
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        # The products that autocast would make; inside, gradients are written where casts have no
        # place.
        narrow = torch.get_autocast_dtype(kind)
        states, weight = states.to(narrow), weight.to(narrow)
        bias = None if bias is None else bias.to(narrow)
    if not torch.is_grad_enabled():
        states, weight = states.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    with torch.autocast(kind, enabled=False):
        return _linear_cross_entropy(
            states,
            weight,
            classes,
            bias=bias,
            count=1.0 if divisor is None else divisor,
            chunk_tokens=chunk_tokens,
            ignored=ignored,
            smoothing=smoothing,
        )


def _of_function(
    states: Tensor,
    head: Callable[[Tensor], Tensor],
    classes: Tensor,
    divisor: Tensor | None,
    chunk_tokens: int,
    ignored: int,
    smoothing: float,
) -> Tensor:
    def part(some: Tensor, wanted: Tensor) -> Tensor:
        logits = head(some)
        if logits.shape[:-1] != wanted.shape:
            raise UsageError(
                f"the head makes logits of shape {tuple(logits.shape)} of {len(wanted)} tokens: it must take (tokens, width) and give (tokens, vocabulary)"
            )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(
            logits, wanted, ignore_index=ignored, label_smoothing=smoothing, reduction="sum"
        )

    total: Tensor | None = None
    for some, wanted in zip(states.split(chunk_tokens), classes.split(chunk_tokens), strict=True):
        found = checkpoint(part, some, wanted, use_reentrant=False) if torch.is_grad_enabled() else part(some, wanted)
        assert isinstance(found, Tensor)
        total = found if total is None else total + found
    assert total is not None
    return total if divisor is None else total / divisor


def _check(
    hidden: Tensor,
    head: object,
    target: Tensor,
    bias: Tensor | None,
    smoothing: float,
    reduction: str,
    chunk_tokens: int,
) -> None:
    if hidden.dim() < 2 or target.shape != hidden.shape[:-1]:
        raise UsageError(
            f"hidden states of shape {tuple(hidden.shape)} need targets of shape {tuple(hidden.shape[:-1])}, not {tuple(target.shape)}"
        )
    if target.numel() == 0:
        raise UsageError("there are no tokens: the loss of nothing has no value")
    if target.dtype is not torch.int64:
        raise UsageError(
            f"targets are classes (torch.int64), not {target.dtype}: probabilities of classes are not taken"
        )
    if not (isinstance(head, Tensor) or callable(head)):
        raise UsageError(f"head must be a torch.nn.Linear, its weight or a function, not {type(head).__name__}")
    if isinstance(head, Tensor) and (head.dim() != 2 or head.shape[1] != hidden.shape[-1]):
        raise UsageError(
            f"a head's weight has the shape (vocabulary, {hidden.shape[-1]}) here, not {tuple(head.shape)}"
        )
    if bias is not None and not isinstance(head, Tensor):
        raise UsageError("bias= goes with a weight: a module has its own")
    if not 0.0 <= smoothing <= 1.0:
        raise UsageError(f"label_smoothing is a share from 0 to 1, not {smoothing}")
    if reduction not in ("mean", "sum", "sum_and_count"):
        raise UsageError(f'reduction is "mean", "sum" or "sum_and_count", not {reduction!r:.80}')
    if chunk_tokens < 1:
        raise UsageError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
