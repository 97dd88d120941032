"""Where backward begins: each microbatch's loss, and what it is multiplied with.

In: what the user's function returned. Out: scalar losses and their factors; the result is the weighted mean of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Losses of some microbatches, with their graphs, and the gradients that they begin with.

    Attributes:
        losses: scalars.
        shares: of each in the whole batch's loss; None: the loss as it is.
        factors: the shares as tensors like the losses.
    """

    losses: list[torch.Tensor]
    shares: list[float | None]
    factors: list[torch.Tensor | None]


def seed(
    results: Sequence[Any], shares: Sequence[float] | None, *, may_share_counts: bool, scale: float | None = None
) -> Seeds:
    """Losses and factors of microbatches that have run forward.

    Args:
        results: scalars, or pairs (sum, count).
        shares: one a scalar result; None for one microbatch: the loss as it is.
        may_share_counts: these are all microbatches of the step, so that the total of their counts is known.
        scale: factors are multiplied with it.

    Raises:
        UsageError: a loss is no differentiable scalar; or it comes with a count, and others' counts are not known yet.
    """
    losses: list[torch.Tensor]
    if any(isinstance(r, tuple) for r in results):
        if not may_share_counts:
            raise UsageError(
                "the loss returns (sum, count), whose total count is known only after all microbatches; this plan runs each one's tail back at "
                "once. Give fit(weight=...) so that counts come from the batch, or a plan with tail=None"
            )
        total = float(sum(float(count) for _, count in results))
        losses, found = [loss for loss, _ in results], [1.0 / total for _ in results]
    else:
        losses, found = list(results), [None] * len(results) if shares is None else list(shares)
    for loss in losses:
        check_loss(loss)
    return Seeds(
        losses=losses,
        shares=list(found),
        factors=[_factor(loss, share, scale) for loss, share in zip(losses, found, strict=True)],
    )


def _factor(loss: torch.Tensor, share: float | None, scale: float | None) -> torch.Tensor | None:
    if share is None and scale is None:
        return None
    product = (1.0 if share is None else share) * (1.0 if scale is None else scale)
    return torch.tensor(product, dtype=loss.dtype, device=loss.device).reshape(loss.shape)


def check_loss(loss: Any) -> None:
    """Raises `UsageError` where a loss is not one number that can be differentiated."""
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"the loss function must return a tensor of one element (or a pair of sum and count), not {type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"the loss function must return a scalar, not a tensor of shape {tuple(loss.shape)}: take its mean() or sum()"
        )
    if not loss.requires_grad:
        raise UsageError("the loss does not depend on any parameter that trains: nothing would be updated")
