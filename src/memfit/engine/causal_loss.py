"""Losses over a large vocabulary, in pieces: the logits are never whole.

In: hidden states, the head's weight, target tokens. Out: the cross-entropy and its gradients, with
the logits of `chunk_tokens` tokens alive at a time. The sums are taken chunk by chunk, so the
result is *reordered* against the whole loss (equal up to rounding), never approximate.

[Note: gradients of the logits that wait]
The weight's gradient is a product over tokens. Made chunk by chunk in the weight's dtype, 16 bits
wide, its sum would lose digits with every chunk (bf16: 1.2e-2 of it at 128 chunks; 1.7e-3 of one
product, which rounds once). So where the weight is narrow, the *gradients of the logits* (as wide
as the weight) of as many tokens as take 128 MiB wait for one product; where there are more tokens
than that, products are added in fp32, some rows at a time.

torch 2.13 has `linear_cross_entropy` for this; it is not used because 2.11 lacks it and a plan must
mean the same bytes on both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from memfit.core.errors import UnsupportedError


class LossNotChunkedError(UnsupportedError):
    """The program computes its loss itself, from the logits, or changes them before."""


_IGNORED = -100
_WAITING_BYTES = 128 << 20
_ROWS = 4096


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Forward makes the gradients as well: the logits of a chunk are needed for both and are there
    only once.

    Memory: logits of one chunk twice; the gradient of the hidden states and of the weight, from
    forward to backward. For a narrow weight also gradients of the logits that wait (128 MiB at
    most, or one chunk's) and, where they are more, 4 bytes an element of the weight while forward
    runs.
    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", section 3
    (the idea of never storing logits).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        count: float | Tensor,
        chunk_tokens: int,
        ignored: int,
        smoothing: float,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        products = _WeightProducts(weight, hidden, chunk_tokens) if needs_weight else None
        grad_bias = (
            torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
            if needs_bias and bias is not None
            else None
        )
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for first in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(first, first + chunk_tokens)
            logits = torch.nn.functional.linear(hidden[rows], weight, bias).to(wide)
            wanted = target[rows]
            is_counted = wanted != ignored
            safe = wanted.masked_fill(~is_counted, 0).unsqueeze(1)
            log_sum = logits.logsumexp(dim=1, keepdim=True)
            losses = (log_sum - logits.gather(1, safe)).squeeze(1)
            if smoothing:
                losses.mul_(1.0 - smoothing).add_((log_sum.squeeze(1) - logits.mean(dim=1)).mul_(smoothing))
            total += (losses * is_counted).sum()
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            # softmax minus one-hot, in place of the logits
            logit_gradient = logits.sub_(log_sum).exp_()
            logit_gradient.scatter_add_(1, safe, torch.full_like(safe, smoothing - 1.0, dtype=logit_gradient.dtype))
            if smoothing:
                logit_gradient.sub_(smoothing / logits.shape[1])
            logit_gradient.mul_(is_counted.unsqueeze(1)).div_(count)
            logit_gradient = logit_gradient.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(logit_gradient, weight, out=grad_hidden[rows])
            if products is not None:
                products.add(first, logit_gradient)
            if grad_bias is not None:
                grad_bias += logit_gradient.sum(dim=0, dtype=grad_bias.dtype)
        grad_weight = None if products is None else products.finish()
        ctx.gradients = (
            grad_hidden,
            grad_weight,
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
        )
        return total / count

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UnsupportedError("the chunked loss was differentiated twice; its gradients are made once, in forward")
        return (*(None if g is None else g.mul_(grad_output) for g in gradients), *[None] * 5)


class _WeightProducts:
    """The gradient of the head's weight, from the gradients of the logits of chunk after chunk.

    See [Note: gradients of the logits that wait].
    """

    def __init__(self, weight: Tensor, hidden: Tensor, chunk_tokens: int) -> None:
        self._weight, self._hidden = weight, hidden
        self._is_narrow = weight.dtype.itemsize < torch.float32.itemsize
        tokens = hidden.shape[0]
        room = _WAITING_BYTES // (weight.shape[0] * weight.dtype.itemsize) // chunk_tokens * chunk_tokens
        self._group = min(tokens, max(chunk_tokens, room))
        if self._is_narrow and self._group == tokens:
            self._sum = torch.empty_like(weight)
        else:
            self._sum = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        self._waiting: Tensor | None = None

    def add(self, first: int, logit_gradient: Tensor) -> None:
        """Adds the gradients of the logits of the tokens from `first` on; chunks come in order."""
        end = first + len(logit_gradient)
        if not self._is_narrow:
            self._sum.addmm_(logit_gradient.t(), self._hidden[first:end])
            return
        begin = first // self._group * self._group
        if self._waiting is None:
            self._waiting = logit_gradient.new_empty(
                min(self._group, len(self._hidden) - begin), logit_gradient.shape[1]
            )
        self._waiting[first - begin : end - begin] = logit_gradient
        if end - begin < len(self._waiting):
            return
        waiting, self._waiting = self._waiting, None
        if self._sum.dtype == self._weight.dtype:
            torch.mm(waiting.t(), self._hidden, out=self._sum)
            return
        for row in range(0, len(self._sum), _ROWS):
            self._sum[row : row + _ROWS] += waiting[:, row : row + _ROWS].t() @ self._hidden[begin:end]

    def finish(self) -> Tensor:
        """The gradient, in the weight's dtype."""
        return self._sum.to(self._weight.dtype)


def chunked_cross_entropy(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocabulary width"],
    target: Int64[Tensor, " tokens"],
    *,
    bias: Float[Tensor, " vocabulary"] | None = None,
    count: float | Float[Tensor, ""] | None = None,
    chunk_tokens: int = 256,
    ignored: int = _IGNORED,
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Cross-entropy of `hidden @ weight.T + bias` against `target`, without the logits ever being
    whole.

    Args:
        hidden: states, flattened over batch and sequence.
        weight: of the head.
        target: class of each token; those that are `ignored` do not count.
        bias: of the head.
        count: what the sum is divided by; the number of counted tokens if None.
        chunk_tokens: tokens whose logits are alive at once: 2 x chunk_tokens x vocabulary x 4
            bytes.
        ignored: a class index that does not count.
        smoothing: share of each target that is spread over all classes.

    Returns:
        The sum of the losses over `count`, in nats. Differentiable once.
    """
    divisor = float((target != ignored).sum()) if count is None else count
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, target, divisor, chunk_tokens, ignored, smoothing)


def knows_loss(model: nn.Module) -> bool:
    """The model computes transformers' causal language loss from a linear head, which
    `chunked_head` can take over.
    """
    return known_head(model) is not None


def known_head(model: nn.Module) -> nn.Linear | None:
    """The head whose logits `chunked_head` would not let be whole; None for a model that computes
    no such loss.
    """
    owner = _owner(model)
    return None if owner is None else owner.get_output_embeddings()


@contextmanager
def chunked_head(model: nn.Module, chunk_tokens: int | None) -> Iterator[None]:
    """While the context lasts, the model's loss runs in chunks: the head hands its input on, and
    the loss calls the head with the targets.

    The model's output then carries hidden states where its logits would be. Only the loss may be
    read from it: whoever reads the logits gets an error, never hidden states.

    Raises:
        UnsupportedError: not a model that `knows_loss`.
    """
    if chunk_tokens is None:
        yield
        return
    owner = _owner(model)
    if owner is None:
        raise UnsupportedError(
            "loss_chunk_tokens needs a transformers causal language model with a linear head and its own loss; for another loss call "
            "memfit.losses.chunked_cross_entropy in it and leave loss_chunk_tokens out"
        )
    head = owner.get_output_embeddings()  # type: ignore[operator]
    restore = _as_before(head, owner)
    deferred: list[Tensor] = []
    calls = {"head": 0, "loss": 0}

    def forward(hidden: Tensor, target: Tensor | None = None, count: float | None = None) -> Tensor:
        if target is None:
            calls["head"] += 1
            deferred[:] = [_withheld(hidden.view_as(hidden))]
            return deferred[0]
        return chunked_cross_entropy(
            hidden, head.weight, target, bias=head.bias, count=count, chunk_tokens=chunk_tokens
        )

    def loss_function(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if not deferred or logits is not deferred[0] or ignore_index != _IGNORED:
            raise LossNotChunkedError(
                "the model changes its logits between the head and the loss (a soft cap, a scale), so the loss cannot run in chunks: plan loss_chunk_tokens=None"
            )
        deferred.clear()
        states = _handed_on(logits)
        calls["loss"] += 1
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        count = None if num_items_in_batch is None else float(num_items_in_batch)
        return head(states.reshape(-1, states.shape[-1]), shift_labels.reshape(-1).to(states.device), count)

    head.forward = forward
    owner.loss_function = loss_function  # type: ignore[assignment]
    try:
        yield
        if calls["head"] != calls["loss"]:
            raise LossNotChunkedError(
                f"the model called its head {calls['head']} times but its loss function {calls['loss']} times: its loss is computed elsewhere and cannot run "
                "in chunks (the head handed hidden states on, so this result is discarded): plan loss_chunk_tokens=None"
            )
    finally:
        restore()
        deferred.clear()


def _as_before(head: Any, owner: Any) -> Callable[[], None]:
    """Returns what puts the head's forward and the owner's loss function back as they are now."""
    plain_forward, plain_loss = head.forward, owner.loss_function
    own_forward, had_loss = "forward" in vars(head), "_loss_function" in vars(owner)

    def restore() -> None:
        if own_forward:
            head.forward = plain_forward
        else:
            del head.forward
        if had_loss:
            owner.loss_function = plain_loss
        else:
            vars(owner).pop("_loss_function", None)

    return restore


# What tells nothing of values or width; the first row is what the engine reads of the outputs of a
# call.
_DESCRIPTIVE = frozenset({
    "grad_fn", "requires_grad", "is_leaf", "register_hook", "untyped_storage", "_version", "_backward_hooks", "output_nr", "is_sparse",
    "_is_view", "_base", "dtype", "device", "layout", "ndim", "dim",
})  # fmt: skip
_withheld_classes: dict[type, type] = {}


def _withheld(states: Tensor) -> Tensor:
    """The tensor, which holds hidden states under the name of logits, wearing a class whose
    operations raise `UnsupportedError`.
    """
    kind = type(states)
    if kind not in _withheld_classes:
        own = {"__torch_function__": classmethod(_refuse_logits), "_memfit_plain_class": kind}
        _withheld_classes[kind] = type(kind.__name__, (kind,), own)
    states.__class__ = _withheld_classes[kind]
    return states


def _handed_on(logits: Tensor) -> Tensor:
    """The hidden states of a withheld tensor, for the loss."""
    withheld: Any = type(logits)
    logits.__class__ = withheld._memfit_plain_class
    try:
        return logits.view_as(logits)
    finally:
        logits.__class__ = withheld


def _refuse_logits(
    _cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    if name in _DESCRIPTIVE:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    raise LossNotChunkedError(
        f"{name!r} needs the logits, which are never whole while the loss runs in chunks: plan loss_chunk_tokens=None where logits are read beside "
        "the model's own loss, or changed before it"
    )


def _owner(model: nn.Module) -> Any:
    """The module (the model, or what an adapter wraps) whose own forward calls `loss_function` on
    the logits of a linear head.
    """
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or "loss_function" not in code.co_names:
            continue
        getter = getattr(module, "get_output_embeddings", None)
        is_causal = getattr(module.loss_function, "__name__", "") == "ForCausalLMLoss"
        if is_causal and callable(getter) and isinstance(getter(), nn.Linear):
            return module
    return None
