"""Seeds of backward: each microbatch's loss, and its factor.

In: results of the user's function. Out: scalar losses and their factors, which make the weighted
mean of the whole batch.

[Note: counts that come late]
A loss that returns (sum, count) is divided by the total of the counts, which is known when the last
microbatch has run forward. Where all of them begin backward together, that is in time, and the
gradient is that of `sum / total`. Where one goes back before the next has run (one after the other,
or a tail at once), its sum begins with a power of two near the inverse of the total, guessed from
the first count, so that fp16 sees gradients of the usual size and nothing is rounded; what is
missing, guess over total, multiplies the finished gradients on their way to the update, with what
unscales and clips them. No update begins before the last microbatch went back. These are the same
sums with one rounding more: *reordered*.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.errors import MemfitWarning, UsageError


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Losses of some microbatches, with their graphs, and the gradients that they begin with.

    Attributes:
        losses: scalars.
        shares: weight of each in the whole batch's loss; None: 1.
        factors: the weights as tensors like the losses.
    """

    losses: list[torch.Tensor]
    shares: list[float | None]
    factors: list[torch.Tensor | None]


class Counts:
    """Counts of the losses of one step. See [Note: counts that come late].

    Args:
        microbatches: number in the step.
        over_ranks: adds a number up over all processes that train together; called once when the
            first counts are known, and once when all are.
    """

    def __init__(self, microbatches: int, over_ranks: Callable[[float], float] | None = None) -> None:
        self._over_ranks = over_ranks or float
        self._missing = microbatches
        self._total = 0.0
        self._divisor: float | None = None

    def add(self, counts: Sequence[float]) -> float:
        """Adds the counts of the microbatches that begin backward next.

        Returns:
            The factor that their sums begin with.

        Raises:
            UsageError: a count is invalid, or all are known and add up to 0.
        """
        if not all(0.0 <= count < math.inf for count in counts):
            raise UsageError(
                f"a loss that returns (sum, count) must count from 0 up; it gave {list(counts)}. Return the number of "
                "targets that the sum is of"
            )
        self._missing -= len(counts)
        self._total += sum(counts)
        if self.is_complete:
            self._total = self._over_ranks(self._total)
        if self.is_complete and not self._total > 0.0:
            raise UsageError(
                "the loss returned (sum, count), and the counts of the whole batch add up to 0: there is no mean. Skip a batch "
                "without targets"
            )
        if self._divisor is None:
            so_far = self._total if self.is_complete else self._over_ranks(self._total)
            guess = so_far / len(counts) * (len(counts) + self._missing)
            self._divisor = self._total if self.is_complete else 2.0 ** round(math.log2(max(guess, 1.0)))
        return 1.0 / self._divisor

    @property
    def is_complete(self) -> bool:
        """True if all microbatches were counted."""
        return self._missing == 0

    @property
    def share(self) -> float:
        """Weight of each sum in the mean, when all were counted."""
        assert self.is_complete
        return 1.0 / self._total

    @property
    def correction(self) -> float:
        """Factor by which gradients must be multiplied, when all were counted: 1 if all began
        backward together.
        """
        assert self.is_complete and self._divisor is not None
        return self._divisor / self._total


def seed(
    results: Sequence[Any], shares: Sequence[float] | None, *, counts: Counts, scale: float | None = None
) -> Seeds:
    """Returns losses and factors of microbatches that have run forward.

    Args:
        results: scalars, or pairs (sum, count).
        shares: loss weight of each scalar result; None for one microbatch: 1.
        counts: of the step; the counts of these results are added, if they have any.
        scale: factors are multiplied by it.

    Raises:
        UsageError: a loss is not a differentiable scalar, or its count is invalid.
    """
    losses: list[torch.Tensor]
    for result in results:
        check_result(result)
    if any(isinstance(r, tuple) for r in results):
        found_counts = [float(count) for _, count in results]
        if any(0.0 < count < 1.0 for count in found_counts):
            warnings.warn(
                f"the loss returned a pair whose second is {min(c for c in found_counts if c > 0.0):.6g}: memfit takes a pair for (sum, count) and divides by "
                "it. If it is a metric, such as an accuracy, return the loss alone",
                MemfitWarning,
                stacklevel=2,
            )
        share = counts.add(found_counts)
        losses, found = [loss for loss, _ in results], [share] * len(results)
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
    # Each rounded before they are multiplied, as a loss that is multiplied with one and then with
    # the other is differentiated.
    share_of, scale_of = (
        torch.tensor(1.0 if x is None else x, dtype=loss.dtype, device=loss.device) for x in (share, scale)
    )
    return (scale_of * share_of).reshape(loss.shape)


def check_result(result: Any) -> None:
    """Checks that the user's function returned a tensor or (sum, count). Raises `UsageError`."""
    if isinstance(result, torch.Tensor):
        return
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor):
        problem = _not_a_count(result[1])
        if problem is None:
            return
        raise UsageError(
            f"loss(model, batch) returned a pair, which means (sum, count), but its second is {problem}: return the loss alone. What else the loop wants of a "
            "forward pass (outputs, an accuracy) the function can keep detached, in a list of the loop's; job.evaluate and job.inference() are for evaluation"
        )
    has_loss = (
        "loss" in result if isinstance(result, Mapping) else isinstance(getattr(result, "loss", None), torch.Tensor)
    )
    hint = "return its loss alone (output.loss)" if has_loss else "return the loss alone"
    raise UsageError(
        f"loss(model, batch) must return a scalar tensor, or (sum, count), not {_described(result)}: {hint}"
    )


def _not_a_count(value: Any) -> str | None:
    """Describes a value that cannot be a count; None if it can."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return f"a tensor of shape {tuple(value.shape)}"
        return "a tensor that requires gradients" if value.requires_grad else None
    return None if isinstance(value, int | float) else f"a {type(value).__name__}"


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, float | int):
        return f"a Python {type(value).__name__} (.item() or float() cuts the graph)"
    return f"a {type(value).__name__}"


def check_loss(loss: torch.Tensor) -> None:
    """Checks that a loss is one number that can be differentiated. Raises `UsageError`."""
    if loss.numel() != 1:
        raise UsageError(
            f"the loss function must return a scalar, not a tensor of shape {tuple(loss.shape)}: take its mean() or sum()"
        )
    if not loss.requires_grad:
        if not torch.is_grad_enabled():
            raise UsageError(
                "gradients are off where job.step is called (torch.no_grad, torch.inference_mode): call it outside of that"
            )
        raise UsageError(
            "the loss does not depend on any parameter that trains: nothing would be updated. Compute it from the model's output "
            "without detach(), and unfreeze a parameter (requires_grad_())"
        )
