"""Cutting a batch into microbatches: the same cut everywhere, and only where it keeps the meaning of the loss.

In: a batch. Out: its slices, their shares of the loss, and the proof (on the first batch) that they add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from memfit.core.errors import UnsupportedError, UsageError
from memfit.profiling.batch import batch_rows, slice_batch
from memfit.runtime.trees import tensors_in

# The sizes of the check's unequal parts: enough that a mean of means differs from the mean. Of a sample of two rows, one each.
_CHECK_PARTS = {3: (2, 1), 2: (1, 1)}
_CHECK_TOLERANCE = 1e-5
_ROUNDED_TOLERANCE = 1 / 64

Weigh = Callable[[Any], float]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Shapes and dtypes of a batch: equal signatures run the same schedule."""

    rows: int
    tensors: tuple[tuple[tuple[int, ...], str], ...]


def signature_of(batch: Any) -> Signature:
    """The signature of a batch.

    Raises:
        UsageError: no rows, or tensors that disagree about them.
    """
    tensors = tuple((tuple(t.shape), str(t.dtype)) for t in tensors_in(batch))
    return Signature(rows=batch_rows(batch), tensors=tensors)


def slice_bounds(rows: int, microbatches: int) -> list[tuple[int, int]]:
    """(start, stop) of each microbatch: sizes differ by at most one, larger ones first, as `torch.tensor_split` cuts."""
    small, larger = divmod(rows, microbatches)
    bounds: list[tuple[int, int]] = []
    start = 0
    for m in range(microbatches):
        stop = start + small + (1 if m < larger else 0)
        bounds.append((start, stop))
        start = stop
    return bounds


def split(batch: Any, microbatches: int) -> list[Any]:
    """The microbatches of a batch, as views.

    Raises:
        UsageError: fewer rows than microbatches.
    """
    rows = batch_rows(batch)
    if rows < microbatches:
        raise UsageError(
            f"the plan cuts a batch into {microbatches} microbatches, this one has {rows} rows: give a larger batch or a plan with fewer microbatches"
        )
    if microbatches == 1:
        return [batch]
    return [slice_batch(batch, start, stop) for start, stop in slice_bounds(rows, microbatches)]


def shares(parts: Sequence[Any], weight: Weigh | None) -> list[float] | None:
    """What each microbatch's loss is multiplied with: its weight over the sum of weights; None for a single one.

    Raises:
        UsageError: a weight that is not a finite number above or equal to 0, or all are 0.
    """
    if len(parts) == 1:
        return None
    weights = [float(batch_rows(part) if weight is None else weight(part)) for part in parts]
    total = sum(weights)
    if not all(0.0 <= w < float("inf") for w in weights) or total <= 0.0:
        raise UsageError(f"weight= must give numbers that are not negative and not all 0; it gave {weights}")
    return [w / total for w in weights]


def parts_to_check(sample: Any) -> tuple[Any, list[Any]] | None:
    """Three rows whole, and cut into two and one; two rows whole and cut, of a sample that has no more; None of one row, which cannot be cut."""
    rows = min(batch_rows(sample), max(_CHECK_PARTS))
    if rows not in _CHECK_PARTS:
        return None
    first, _ = _CHECK_PARTS[rows]
    return slice_batch(sample, 0, rows), [slice_batch(sample, 0, first), slice_batch(sample, first, rows)]


def compare_split(
    one: Any, found: Sequence[Any], parts: Sequence[Any], weight: Weigh | None, *, is_rounded: bool = False
) -> None:
    """Refuses a loss that does not add up over rows. Where these rows count for nothing (a sample of zeros), or have no finite loss, nothing can be compared.

    Args:
        one: loss of the whole, or (sum, count).
        found: losses of the parts.
        parts: the parts.
        weight: as in `shares`.
        is_rounded: computed in 16 bits: losses themselves may be rounded to 8 bits.

    Raises:
        UnsupportedError: the whole and the sum of the parts differ by more than 1e-5 of the whole (1/64 where `is_rounded`).
    """
    one, found = _value(one), [_value(f) for f in found]
    if isinstance(one, tuple):
        if one[1] == 0:
            return
        expected = one[0] / one[1]
        summed = sum(v[0] for v in found) / sum(v[1] for v in found)
    else:
        expected = one
        if weight is not None and not any(weight(part) for part in parts):
            return
        factors = shares(parts, weight)
        assert factors is not None
        summed = sum(v * f for v, f in zip(found, factors, strict=True))
    if math.isfinite(expected) and not abs(summed - expected) <= (
        _ROUNDED_TOLERANCE if is_rounded else _CHECK_TOLERANCE
    ) * max(abs(expected), 1e-12):
        raise UnsupportedError(
            f"the loss of {sum(map(batch_rows, parts))} rows is {expected:.6g}, but the weighted sum over {batch_rows(parts[0])} and {batch_rows(parts[1])} of them "
            f"is {summed:.6g}: this loss does not add up over microbatches. If it is a mean over tokens, give fit(weight=...) with each microbatch's number of "
            "counted tokens, or return (sum, count). If "
            'rows really depend on each other (contrastive, router balance), allow={"nonadditive-loss"} trains on the sum of the microbatches\' losses'
        )


def _value(result: Any) -> Any:
    if isinstance(result, tuple):
        return float(result[0]), float(result[1])
    return float(result)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; each module has its own mode back at the end."""
    with _modes_restored(model):
        model.eval()
        yield


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The mode in which the model trains, but for torch's dropout modules."""
    with _modes_restored(model):
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        yield


@contextmanager
def _modes_restored(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
