"""Batches that come cut: the micro-batches of a window of accumulation of the user's own.

In: batches of any shapes, and what the loss of each counts for. Out: the way in which such a batch
is cut, which is to hand its parts out.

[Note: sums of the user's own]
Whoever gives `Parts` has decided the sums: the gradients of each part's loss, times its share,
added in their order, as `(loss * share).backward()` part by part adds them. Plain PyTorch's bits
are those of that loop, so a plan with as many microbatches regroups nothing. Layer by layer it is
the same sums as long as no weight is used by several blocks, whose uses would be added in another
order, and no call draws random numbers, which come in another order: there the planner keeps to one
part after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import UsageError


@dataclass(frozen=True)
class Parts:
    """The micro-batches of one step: `job.step(memfit.Parts([batch, batch, ...]))`.

    One update with the gradients that a plain loop adds up: `(loss(model, batch) *
    share).backward()` for each, bit for bit, whatever their shapes. Give `memfit.fit` such a
    sample, with as many parts as a step has at most, the largest that will come. Weights that
    travel then come once a step and direction where the parts pass layer by layer, and once a part
    where they go one after the other; `job.reason` says which of them, and why.

    Attributes:
        batches: in their order.
        shares: factor of each one's loss; None: 1, as in a loop that does not divide.
    """

    batches: Sequence[Any]
    shares: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.batches, list | tuple) or any(isinstance(batch, Parts) for batch in self.batches):
            raise UsageError(
                f"memfit.Parts takes a list of batches, not {type(self.batches).__name__} or parts of parts: say memfit.Parts([batch, ...])"
            )
        if not self.batches:
            raise UsageError("memfit.Parts([]) has no batch: give it those of one step")
        if self.shares is None:
            return
        try:
            shares = [float(share) for share in self.shares]
        except (TypeError, ValueError) as error:
            raise UsageError(f"memfit.Parts: shares= takes a number for each batch ({error})") from None
        if len(shares) != len(self.batches) or not all(map(math.isfinite, shares)):
            raise UsageError(
                f"memfit.Parts: shares= has {len(shares)} numbers for {len(self.batches)} batches, or one that is not finite: give a factor of each batch's loss"
            )


def first_part(batch: Any) -> Any:
    """Returns the first of the parts; a batch that comes whole itself."""
    return batch.batches[0] if isinstance(batch, Parts) else batch


@dataclass(frozen=True)
class ByParts:
    """Batches are `Parts`; any other is one part."""

    is_even = False

    def rows(self, batch: Any) -> int:
        """Counts parts."""
        return len(batch.batches) if isinstance(batch, Parts) else 1

    def most(self, batch: Any, wanted: int) -> int:
        """Counts parts.

        Raises:
            UsageError: there are more than wanted.
        """
        count = self.rows(batch)
        if count > wanted:
            raise UsageError(
                f"{count} parts came, and the plan is for {wanted} at most: give memfit.fit a sample with as many"
            )
        return count

    def parts(self, batch: Any, count: int) -> list[Any]:
        """Hands out the parts.

        Raises:
            UsageError: there are not so many.
        """
        if count != self.rows(batch):
            raise UsageError(
                f"the plan has {count} microbatches, and the batch comes in {self.rows(batch)} parts: plan microbatches={self.rows(batch)}"
            )
        return list(batch.batches) if isinstance(batch, Parts) else [batch]

    def weights(self, batch: Any, parts: Sequence[Any]) -> list[float]:
        """Returns the shares as they are stated."""
        stated = batch.shares if isinstance(batch, Parts) else None
        return [1.0] * len(parts) if stated is None else [float(share) for share in stated]

    def why_whole(self, batch: Any) -> str | None:
        """Says that there is one part."""
        return "it comes in one part" if self.rows(batch) == 1 else None
