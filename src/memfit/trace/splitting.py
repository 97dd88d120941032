"""Weights of the parts of a batch, and the check that a loss adds up over them.

In: a batch and a way to cut it. Out: the parts' shares of the loss, and the proof (on the first
batch) that they add up.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.errors import UnsupportedError, UsageError
from memfit.tensors.trees import tensors_in
from memfit.tensors.write_marks import check_dense
from memfit.trace.batch import ByParts, Parts, first_part
from memfit.trace.cutting import ByRows, Cut, ways_of

# The sizes of the check's unequal parts: enough that a mean of means differs from the mean. Of a
# sample of two rows, one each.
_CHECK_PARTS = {3: (2, 1), 2: (1, 1)}
CHECKED_ROWS = max(_CHECK_PARTS)
_CHECK_TOLERANCE = 1e-5
_ROUNDED_TOLERANCE = 1 / 64

Weigh = Callable[[Any], float]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Shapes and dtypes of a batch: equal signatures run the same schedule."""

    rows: int
    tensors: tuple[tuple[tuple[int, ...], str], ...]


def signature_of(batch: Any, cut: Cut, microbatches: int) -> Signature:
    """The signature of a batch.

    Args:
        batch: of a step.
        cut: how it is cut.
        microbatches: of the plan; where parts are no equal slices, their shapes belong to the
            signature.

    Raises:
        UsageError: it is empty, or comes cut. UnsupportedError: it holds sparse or nested tensors.
    """
    if isinstance(batch, Parts) and not isinstance(cut, ByParts):
        raise UsageError(
            "memfit.Parts came, and the job was planned for whole batches: give memfit.fit such a sample, without lines=True"
        )
    for tensor in tensors_in(batch):
        check_dense(tensor, "the batch holds")
    rows, parts = cut.rows(batch), [batch]
    count = cut.most(batch, microbatches)
    if count > 1 and not cut.is_even:
        parts += cut.parts(batch, count)
    tensors = tuple((tuple(t.shape), str(t.dtype)) for t in tensors_in(parts))
    return Signature(rows=rows, tensors=tensors)


def shares(batch: Any, parts: Sequence[Any], cut: Cut, weight: Weigh | None) -> list[float] | None:
    """Loss weight of each microbatch: its weight over the sum of weights; None for
    a single one.

    Raises:
        UsageError: a weight that is not a finite number above or equal to 0, or all are 0; what
            parts count for does not show.
    """
    if len(parts) == 1:
        return None
    return fractions(weights_of(batch, parts, cut, weight))


def weights_of(batch: Any, parts: Sequence[Any], cut: Cut, weight: Weigh | None) -> list[float]:
    """Returns the weight of each microbatch's loss: its rows, or as the user says."""
    return cut.weights(batch, parts) if weight is None else [float(weight(part)) for part in parts]


def fractions(weights: Sequence[float], total: float | None = None) -> list[float]:
    """Returns weights over their total, that of all ranks where several train together.

    Raises:
        UsageError: a weight is negative or not finite, or all are 0.
    """
    total = sum(weights) if total is None else total
    if not all(0.0 <= w < float("inf") for w in weights) or total <= 0.0:
        raise UsageError(f"weight= must give numbers that are not negative and not all 0; it gave {weights}")
    return [w / total for w in weights]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A batch whose loss must be the sum over its parts.

    Attributes:
        whole: the batch.
        parts: of it.
        weights: rows of each; None where they do not show.
    """

    whole: Any
    parts: list[Any]
    weights: list[float] | None

    @property
    def in_words(self) -> str:
        """Rows of the whole and of the parts."""
        if self.weights is None:
            return "a batch, as the weighted sum over its parts,"
        return f"{sum(self.weights):.0f} rows, as the weighted sum over {' and '.join(f'{w:.0f}' for w in self.weights)} of them,"


def checked_rows(cut: Cut) -> int:
    """Rows that run whole to show that a batch may be cut; all, where they are not told apart."""
    return CHECKED_ROWS if isinstance(cut, ByRows) else sys.maxsize


def trial_of(sample: Any, cut: Cut) -> Trial | None:
    """Three rows whole, and cut into two and one.

    Two rows whole and cut, of a sample that has no more; None of one row, which cannot be cut.

    What the user's function cuts is compared as it is cut into two. Of parts of the user's own,
    which nothing puts together, the first is cut between its rows.
    """
    if isinstance(cut, ByParts):
        sample = first_part(sample)
        way = next(ways_of(sample), None)
        return None if way is None else trial_of(sample, way)
    if isinstance(cut, ByRows):
        rows = min(cut.rows(sample), CHECKED_ROWS)
        if rows not in _CHECK_PARTS:
            return None
        first, _ = _CHECK_PARTS[rows]
        whole = cut.slice(sample, 0, rows)
        parts = [cut.slice(sample, 0, first), cut.slice(sample, first, rows)]
        return Trial(whole=whole, parts=parts, weights=[float(first), float(rows - first)])
    if cut.most(sample, 2) == 1:
        return None
    parts = cut.parts(sample, 2)
    try:
        weights = cut.weights(sample, parts)
    except UsageError:
        weights = None
    return Trial(whole=sample, parts=parts, weights=weights)


def compare_split(
    one: Any, found: Sequence[Any], trial: Trial, weight: Weigh | None, *, is_rounded: bool = False
) -> None:
    """Refuses a loss that does not add up over rows.

    Where these rows count for nothing (a sample of zeros), or have no finite loss, nothing can be
    compared.

    Args:
        one: loss of the whole, or (sum, count).
        found: losses of the parts.
        trial: what they are losses of.
        weight: as in `shares`.
        is_rounded: computed in 16 bits: losses themselves may be rounded to 8 bits.

    Raises:
        UsageError: what parts count for does not show.
        UnsupportedError: the whole and the sum of the parts differ by more than 1e-5 of the whole
            (1/64 where `is_rounded`).
    """
    one, found = _value(one), [_value(f) for f in found]
    if isinstance(one, tuple):
        if one[1] == 0:
            return
        expected = one[0] / one[1]
        summed = sum(v[0] for v in found) / sum(v[1] for v in found)
    else:
        expected = one
        weights = trial.weights if weight is None else [float(weight(part)) for part in trial.parts]
        if weights is None:
            raise UsageError(
                "what each part of fit(split=...) counts for does not show from its tensors' dimension 0: give fit(weight=...), which tells the rows (or counted "
                "tokens) of a part"
            )
        if not any(weights):
            return
        summed = sum(v * w for v, w in zip(found, fractions(weights), strict=True))
    if math.isfinite(expected) and not abs(summed - expected) <= (
        _ROUNDED_TOLERANCE if is_rounded else _CHECK_TOLERANCE
    ) * max(abs(expected), 1e-12):
        raise UnsupportedError(
            f"the loss of {trial.in_words} is {summed:.6g}, and whole it is {expected:.6g}: this loss does not add up over microbatches. "
            "If it is a mean over tokens, give fit(weight=...) with each microbatch's number of counted tokens, or return (sum, count). If "
            'rows really depend on each other (contrastive, router balance), allow={"nonadditive-loss"} trains on the sum of the microbatches\' losses'
        )


def check_sum(one: Any, found: Sequence[Any], trial: Trial) -> None:
    """Refuses a pair (mean, something) that was taken for (sum, count).

    The mean of a whole lies between those of its parts; a sum of numbers of one sign is larger than
    each.

    Args:
        one: what the loss gave for the whole.
        found: for the parts.
        trial: what they are losses of.

    Raises:
        UsageError: the first of the pair is a mean.
    """
    if not isinstance(one, tuple):
        return
    (whole, count), sums = _value(one), [_value(pair)[0] for pair in found]
    if whole < 0.0:
        whole, sums = -whole, [-value for value in sums]
    slack = _ROUNDED_TOLERANCE * whole
    if count == 1.0 or not min(sums) > slack or not min(sums) - slack <= whole <= max(sums) + slack:
        return
    raise UsageError(
        f"the loss returned a pair, which means (sum, count), but its first is no sum: {whole:.6g} for {trial.in_words} where the parts have "
        f"{' and '.join(f'{value:.6g}' for value in sums)}. It would be divided by its second, {count:.6g}: return the loss alone, and keep what else the loop "
        "wants of a forward (a count of right answers) in a list of the loop's"
    )


def rows_differ(trial: Trial) -> bool:
    """The parts' tensors tell their rows apart, those of numbers each: of equal rows a sum shows
    neither that they are mixed nor that what is cut is no row.
    """
    first = [t[:1] for t in tensors_in(trial.parts[0]) if t.dim() and t.numel()]
    last = [t[-1:] for t in tensors_in(trial.parts[-1]) if t.dim() and t.numel()]
    if len(first) != len(last):
        return True
    alike = [
        a.is_floating_point() for a, b in zip(first, last, strict=True) if a.shape == b.shape and torch.equal(a, b)
    ]
    return not any(alike) and len(alike) < len(first)


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


# Random numbers that are the same for every row, for as long as losses of a batch and of its parts
# are compared.
#
# In: a program that draws. Out: inside a `with`, what torch's default generators give depends on
# shapes beyond dimension 0 alone, so that a row meets the same numbers wherever it stands. (A mask
# that is drawn for the third row of three is not the one of the first row of one.)

aten = torch.ops.aten
_FACTORIES = {aten.rand, aten.randn, aten.randint}
_LIKE = {aten.rand_like, aten.randn_like, aten.randint_like}
_IN_PLACE = {aten.uniform_, aten.normal_, aten.exponential_, aten.random_, aten.bernoulli_, aten.geometric_}


class RowsAlike(TorchDispatchMode):
    """Draws one row and gives it to all.

    Operations that draw otherwise (permutations, samples of given odds) begin at one seed each
    time.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        torch.manual_seed(0)
        kind = func.overloadpacket
        has_tensors = any(isinstance(arg, torch.Tensor) for arg in args[1:])
        if kind in _FACTORIES:
            place = next(index for index, arg in enumerate(args) if isinstance(arg, list | tuple))
            size = list(args[place])
            if size:
                one = func(*args[:place], [1, *size[1:]], *args[place + 1 :], **kwargs)
                return one.expand(size).contiguous()
        elif kind in _LIKE and args[0].dim() and len(args[0]):
            return func(args[0][:1], *args[1:], **kwargs).expand(args[0].shape).contiguous()
        elif kind is aten.bernoulli and args[0].dim() and len(args) == 1:
            odds = args[0]
            return (torch.rand_like(odds[:1]) < odds).to(odds.dtype)
        elif kind in _IN_PLACE and args[0].dim() and len(args[0]) and not has_tensors:
            one = torch.empty_like(args[0][:1])
            func(one, *args[1:], **kwargs)
            return args[0].copy_(one.expand(args[0].shape))
        return func(*args, **kwargs)
