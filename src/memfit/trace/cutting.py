"""Ways to cut a batch into microbatches, and which of them a sample allows.

In: a batch. Out: its parts and what each counts for; or the batch whole, and why it is not cut.

[Note: a way is chosen once]
What counts rows is guessed from the sample: tensors by dimension 0, and lists, where they have as
many entries. A guess is taken only if the model runs on parts that are cut so and its loss adds up
over them; then it holds for every batch of the job. A batch that it does not fit is trained whole.
What is to be the same for all rows and has as many entries by accident (a weight a class, positions
of three axes for three rows) makes a guess fail, as the model does not run on a part of it, or
gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from memfit.core.errors import UsageError
from memfit.tensors.trees import tensors_in
from memfit.trace.batch import (
    RowPlaces,
    UncuttableError,
    batch_rows,
    children,
    grow_batch,
    is_plain_leaf,
    slice_batch,
)

UserSplit = Callable[[Any, int], Sequence[Any]]
MOST_MICROBATCHES = 64
"""Into how many a batch is cut at most, as plans are looked for."""


class Cut(Protocol):
    """A way to cut batches."""

    @property
    def is_even(self) -> bool:
        """Parts of as many rows have the same shapes."""
        ...

    def rows(self, batch: Any) -> int:
        """Rows of a batch; 1 where it cannot be cut."""
        ...

    def most(self, batch: Any, wanted: int) -> int:
        """Into how many microbatches it can be cut, at most as many as are wanted."""
        ...

    def parts(self, batch: Any, count: int) -> list[Any]:
        """So many microbatches, larger ones first where they are cut by rows."""
        ...

    def weights(self, batch: Any, parts: Sequence[Any]) -> list[float]:
        """Rows of each part."""
        ...

    def why_whole(self, batch: Any) -> str | None:
        """Why a batch cannot be cut; None if it can."""
        ...


def slice_bounds(rows: int, microbatches: int) -> list[tuple[int, int]]:
    """(start, stop) of each microbatch: sizes differ by at most one, larger ones first, as
    `torch.tensor_split` cuts.
    """
    small, larger = divmod(rows, microbatches)
    bounds: list[tuple[int, int]] = []
    start = 0
    for m in range(microbatches):
        stop = start + small + (1 if m < larger else 0)
        bounds.append((start, stop))
        start = stop
    return bounds


@dataclass(frozen=True)
class Whole:
    """No batch is cut.

    Attributes:
        why: in words.
    """

    why: str
    is_even = True

    def rows(self, batch: Any) -> int:
        """One, whatever it holds."""
        del batch
        return 1

    def most(self, batch: Any, wanted: int) -> int:
        """One."""
        del batch, wanted
        return 1

    def parts(self, batch: Any, count: int) -> list[Any]:
        """The batch itself."""
        _check_count(count, 1, self.why)
        return [batch]

    def weights(self, batch: Any, parts: Sequence[Any]) -> list[float]:
        """One."""
        del batch, parts
        return [1.0]

    def why_whole(self, batch: Any) -> str | None:
        """For every batch the same."""
        del batch
        return self.why


@dataclass(frozen=True)
class ByRows:
    """Batches are cut between rows.

    Attributes:
        find: the places that count rows in a batch.
        is_even: see `Cut`.
    """

    find: Callable[[Any], RowPlaces]
    is_even: bool = True

    def rows(self, batch: Any) -> int:
        """The number of rows on which all tensors and lists agree."""
        try:
            return batch_rows(batch, self.find(batch))
        except UncuttableError:
            return 1

    def most(self, batch: Any, wanted: int) -> int:
        """A row each."""
        return min(self.rows(batch), wanted)

    def parts(self, batch: Any, count: int) -> list[Any]:
        """Views of the rows."""
        if count == 1:
            return [batch]
        places = self.find(batch)
        rows = batch_rows(batch, places)
        _check_count(count, rows, None)
        return [slice_batch(batch, start, stop, places) for start, stop in slice_bounds(rows, count)]

    def weights(self, batch: Any, parts: Sequence[Any]) -> list[float]:
        """Rows of each, as they were cut."""
        return [float(stop - start) for start, stop in slice_bounds(self.rows(batch), len(parts))]

    def why_whole(self, batch: Any) -> str | None:
        """Tensors and lists that disagree about rows, or have none."""
        try:
            rows = batch_rows(batch, self.find(batch))
        except UncuttableError as error:
            return str(error)
        return "it has one row" if rows == 1 else None

    def grown(self, batch: Any, more: int = 1) -> Any | None:
        """A batch with its first rows once more behind the last; None where entries belong to rows
        in runs.
        """
        places = self.find(batch)
        return None if places.ends else grow_batch(batch, more, places)

    def resized(self, batch: Any, rows: int) -> Any | None:
        """A batch of so many rows: its first ones, or more as `grown` makes them; None likewise."""
        more = rows - self.rows(batch)
        return self.slice(batch, 0, rows) if more <= 0 else self.grown(batch, more)

    def slice(self, batch: Any, start: int, stop: int) -> Any:
        """The rows from `start` to `stop`."""
        return slice_batch(batch, start, stop, self.find(batch))


@dataclass(frozen=True)
class ByUser:
    """Batches are cut by a function of the user's.

    Attributes:
        function: (batch, count) -> at most `count` batches.
    """

    function: UserSplit
    is_even = False

    def rows(self, batch: Any) -> int:
        """The most microbatches that the function makes, up to 64: it tells of nothing smaller."""
        found = count = 1
        while count < MOST_MICROBATCHES:
            count *= 2
            made = self.most(batch, count)
            found = max(found, made)
            if made < count:
                break
        return found

    def most(self, batch: Any, wanted: int) -> int:
        """As many as the function gives."""
        return 1 if wanted == 1 else len(self._given(batch, wanted))

    def parts(self, batch: Any, count: int) -> list[Any]:
        """The function's results."""
        if count == 1:
            return [batch]
        found = self._given(batch, count)
        _check_count(count, len(found), None)
        return found

    def weights(self, batch: Any, parts: Sequence[Any]) -> list[float]:
        """Rows of each, where they show.

        Raises:
            UsageError: they do not.
        """
        try:
            whole, found = batch_rows(batch), [batch_rows(part) for part in parts]
        except UncuttableError:
            whole, found = 0, [1]
        if len(parts) > 1 and sum(found) != whole:
            raise UsageError(
                "what each part of fit(split=...) counts for does not show from its tensors' dimension 0: give fit(weight=...), which tells the rows (or counted "
                "tokens) of a part. A loss that returns (sum, count) brings its own counts; then any number above 0 will do"
            )
        return [float(rows) for rows in found]

    def why_whole(self, batch: Any) -> str | None:
        """The function gave one."""
        return None if self.most(batch, 2) > 1 else "fit(split=...) does not cut it"

    def _given(self, batch: Any, count: int) -> list[Any]:
        given: Any = self.function(batch, count)
        if not isinstance(given, list | tuple) or not 1 <= len(given) <= count:
            told = f"{len(given)} of them" if isinstance(given, list | tuple) else type(given).__name__
            raise UsageError(
                f"split(batch, {count}) must return a list of 1 to {count} batches (fewer where there are not so many rows), not {told}"
            )
        is_filled = any(t.numel() for t in tensors_in(batch))
        for part in given if is_filled else ():
            if not any(t.numel() for t in tensors_in(part)):
                raise UsageError(
                    f"split(batch, {count}) returned an empty batch: return fewer where there are not so many rows"
                )
        return list(given)


def ways_of(sample: Any) -> Iterator[ByRows]:
    """Guesses what counts rows in a sample, likelier ones first.

    See [Note: a way is chosen once].
    """
    lists = list(_lists(sample, "batch"))
    records = [one for one in lists if one.is_record and one.path != "batch"]
    holders = [one for one in lists if one.holds_tensors and one.path != "batch"]
    samples = [one for one in lists if one.holds_tensors and one.path == "batch" and isinstance(one.node, list)]
    # A sample's own numbers, such as its label, are tensors without dimensions; those of columns
    # have one.
    surely = [one for one in samples if one.is_record and any(t.dim() == 0 for t in tensors_in(one.node))]
    texts = [one for one in lists if not one.holds_tensors]
    tried: set[frozenset[str]] = set()
    for rowed in ([surely] if surely else []) + [records, [], holders, samples]:
        outermost = [one for one in rowed if not any(_is_inside(one.path, other.path) for other in rowed)]
        names = {one.path for one in outermost}
        try:
            rows = batch_rows(sample, RowPlaces(lists=frozenset(names)))
        except UncuttableError:
            continue
        names |= {
            one.path for one in texts if one.length == rows and not any(_is_inside(one.path, name) for name in names)
        }
        places = RowPlaces(lists=frozenset(names))
        if places.lists not in tried:
            tried.add(places.lists)
            # Entries of lists have shapes of their own.
            yield ByRows(
                lambda _, places=places: places, is_even=not any(one.path in names for one in holders + samples)
            )


def smaller_part(cut: Cut, batch: Any, count: int) -> dict[int, Any]:
    """Returns the last of so many microbatches by its rows, where it has one less than the first
    and takes less for that.
    """
    rows = cut.rows(batch)
    if not cut.is_even or count > rows or not rows % count:
        return {}
    return {rows // count: cut.parts(batch, count)[-1]}


@dataclass(frozen=True)
class _List:
    """A list of the sample; `is_record`: its entries are mappings with the same keys."""

    path: str
    node: Sequence[Any]
    is_record: bool
    holds_tensors: bool

    @property
    def length(self) -> int:
        return len(self.node)


def _lists(node: Any, path: str) -> Iterator[_List]:
    """Lists that may have an entry a row, with those inside.

    A tuple of numbers is a shape or the like, and none.
    """
    if isinstance(node, list | tuple) and node and not hasattr(node, "_fields"):
        holds_tensors = any(True for _ in _data_in(node))
        is_numbers = isinstance(node, tuple) and all(isinstance(item, int | float) for item in node)
        first = node[0]
        is_record = isinstance(first, Mapping) and all(
            isinstance(item, Mapping) and item.keys() == first.keys() for item in node
        )
        is_flat = all(is_plain_leaf(item) for item in node)
        if not is_numbers and (holds_tensors or is_flat):
            yield _List(path, node, is_record=is_record and holds_tensors, holds_tensors=holds_tensors)
    if isinstance(node, torch.Tensor | np.ndarray) or is_plain_leaf(node):
        return
    for place, value in children(node, path) or ():
        yield from _lists(value, place)


def _data_in(node: Any) -> Iterator[Any]:
    if isinstance(node, torch.Tensor | np.ndarray):
        yield node
    elif not is_plain_leaf(node):
        for _, value in children(node, "") or ():
            yield from _data_in(value)


def _is_inside(path: str, other: str) -> bool:
    return path != other and path.startswith(other) and path[len(other)] in "[."


def _check_count(count: int, rows: int, why: str | None) -> None:
    if count > rows:
        told, cure = (f"it has {rows} rows", "a larger batch") if why is None else (why, "fit(split=...)")
        raise UsageError(
            f"the plan cuts a batch into {count} microbatches, and this one cannot be: {told}. Give a plan with fewer microbatches, or {cure}"
        )
