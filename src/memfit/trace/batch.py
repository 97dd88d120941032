"""A batch as a tree of leaves, some of which have one entry a row.

In: what the user's data loader gives, and which of its places are cut how. Out: the number of rows,
parts of it (views, no copy), the tree with tensors replaced. Trees are mappings, lists, tuples,
named tuples and dataclasses, nested.

[Note: what counts rows]
Dimension 0 of every tensor and array counts rows, and so does a list at a place named in
`RowPlaces.lists`. `along` names tensors that have their rows in another dimension, `ends` leaves
whose entries belong to rows in runs (patches of images: row r has the entries from `ends[r]` to
`ends[r + 1]`). Everything else is the same for all rows. What does not fit this is never cut.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.data

from memfit.core.errors import UsageError

_BatchT = TypeVar("_BatchT")
_PLAIN_LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.device,
    torch.dtype,
    torch.Generator,
)
# Objects inside of objects that are looked through for tensors.
_DEEPEST = 4


class UncuttableError(UsageError):
    """A batch cannot be cut into microbatches; whole it may well be trained."""


@dataclass(frozen=True, kw_only=True)
class RowPlaces:
    """How a batch is cut, by the places of its leaves, such as `batch['labels']`.

    See [Note: what counts rows].

    Attributes:
        lists: lists with one entry a row.
        along: dimension that counts rows, of tensors where it is not 0.
        ends: of leaves whose entries belong to rows in runs, where each row's run ends, with a 0
            before; a run that is empty for all rows of a part makes the leaf None.
    """

    lists: frozenset[str] = frozenset()
    along: Mapping[str, int] = field(default_factory=dict)
    ends: Mapping[str, Sequence[int]] = field(default_factory=dict)


_PLAIN = RowPlaces()


def batch_rows(batch: object, places: RowPlaces = _PLAIN) -> int:
    """Rows of a batch: what all that counts rows agrees on (tensors without dimensions aside).

    Raises:
        UncuttableError: nothing counts rows, two things disagree, or something is there that cannot
            be cut.
        UsageError: the batch is empty.
    """
    refuse_loader(batch)
    first: tuple[str, int] | None = None
    for path, size in _row_counts(batch, "batch", places):
        if first is None:
            first = (path, size)
        elif size != first[1]:
            raise UncuttableError(
                f"the batch's tensors disagree about the number of rows (dimension 0): {first[0]} has {first[1]}, {path} has {size}"
            )
    if first is None:
        raise UncuttableError(
            f"the batch is a {type(batch).__name__} without a tensor that has a dimension 0, so it has no rows to count or slice: pass what the loss "
            "function gets, tensors in dicts, lists, tuples or dataclasses"
        )
    if first[1] == 0:
        raise UsageError(
            f"the batch is empty: {first[0]} has no rows (dimension 0 is 0). Skip such a batch in the loop, or look at what the loader "
            "drops (a filter that keeps nothing, an empty shard)"
        )
    return first[1]


def gives_batches(thing: object) -> bool:
    """A loader, or an iterator, and not a batch."""
    if isinstance(thing, torch.Tensor | Mapping):
        return False
    # Loaders have little in common but that: a batch size, or a position that can be saved. So have
    # graphs and dictionaries of tensors (PyTorch Geometric, TensorDict), which have keys.
    is_sized = hasattr(thing, "batch_size") or hasattr(thing, "state_dict")
    is_loader = hasattr(type(thing), "__iter__") and is_sized and not hasattr(thing, "keys")
    return is_loader or isinstance(thing, Iterator)


def refuse_loader(batch: object) -> None:
    """Refuses what gives batches where a batch is meant.

    Raises:
        UsageError: a loader, a dataset or an iterator.
    """
    if gives_batches(batch):
        raise UsageError(
            f"this is a {type(batch).__name__}, which gives batches, and not a batch: pass each of them, as in `for batch in loader`"
        )
    if isinstance(batch, torch.utils.data.Dataset):
        raise UsageError(
            f"this is a dataset ({type(batch).__name__}), not a batch: pass batches of its loader, torch.utils.data.DataLoader(dataset, ...)"
        )


def slice_batch(batch: _BatchT, start: int, stop: int, places: RowPlaces = _PLAIN) -> _BatchT:
    """Rows `start` to `stop` (exclusive) of a batch, as views that cost no memory.

    Raises:
        UsageError: the range is empty or reaches beyond the batch.
    """
    rows = batch_rows(batch, places)
    if not 0 <= start < stop <= rows:
        raise UsageError(f"rows {start} to {stop} are not a part of a batch of {rows} rows")

    def cut(leaf: Any, path: str) -> Any:
        if path in places.ends:
            ends = places.ends[path]
            return leaf[ends[start] : ends[stop]] if ends[start] < ends[stop] else None
        if path in places.along:
            return leaf.narrow(places.along[path], start, stop - start)
        return leaf[start:stop] if isinstance(leaf, list | tuple) or leaf.ndim else leaf

    return _map(batch, cut, "batch", places)


def grow_batch(batch: _BatchT, more: int, places: RowPlaces = _PLAIN) -> _BatchT:
    """A batch with so many rows more: behind the last its rows once more, from the first on, as
    copies.

    `places.ends` must be empty.
    """
    count = batch_rows(batch, places)
    rows = [row % count for row in range(count + more)]

    def grow(leaf: Any, path: str) -> Any:
        if isinstance(leaf, list | tuple):
            return type(leaf)([leaf[row] for row in rows])
        if isinstance(leaf, np.ndarray):
            return leaf[rows] if leaf.ndim else leaf
        dim = places.along.get(path, 0)
        return leaf.index_select(dim, torch.tensor(rows, device=leaf.device)) if leaf.dim() else leaf

    return _map(batch, grow, "batch", places)


def map_tensors(batch: _BatchT, change: Callable[[torch.Tensor], Any]) -> _BatchT:
    """The same tree with every tensor replaced by `change(tensor)`.

    In objects that are no part of the tree they stay.
    """
    return _map(batch, lambda leaf, _: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, "batch", _PLAIN)


def is_plain_leaf(node: object) -> bool:
    """A value without parts or data to cut: a number, text, None."""
    return isinstance(node, _PLAIN_LEAVES)


def children(node: Any, path: str) -> list[tuple[str, Any]] | None:
    """Parts of an inner node with their places; None of a leaf."""
    if isinstance(node, Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, list | tuple):
        return [(f"{path}[{index}]", value) for index, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f"{path}.{f.name}", getattr(node, f.name)) for f in dataclasses.fields(node)]
    return None


def _row_counts(node: Any, path: str, places: RowPlaces) -> Iterator[tuple[str, int]]:
    """(place, number of entries) of everything that counts rows."""
    if path in places.ends:
        yield path, len(places.ends[path]) - 1
    elif isinstance(node, torch.Tensor):
        _check_can_be_cut(node, path)
        if node.dim():
            yield path, node.shape[places.along.get(path, 0)]
    elif isinstance(node, np.ndarray):
        if node.ndim:
            yield path, len(node)
    elif path in places.lists and isinstance(node, list | tuple):
        yield path, len(node)
    elif isinstance(node, _PLAIN_LEAVES):
        return
    elif (parts := children(node, path)) is not None:
        _refuse_packed(node, path)
        for place, value in parts:
            yield from _row_counts(value, place, places)
    else:
        _refuse_hidden_tensors(node, path)


def _map(node: Any, change: Callable[[Any, str], Any], path: str, places: RowPlaces) -> Any:
    """The tree with tensors, arrays and what `places` names replaced."""
    is_listed = path in places.lists and isinstance(node, list | tuple)
    if isinstance(node, torch.Tensor | np.ndarray) or is_listed or path in places.ends:
        return change(node, path)
    if isinstance(node, _PLAIN_LEAVES) or (parts := children(node, path)) is None:
        return node
    changed = [_map(value, change, place, places) for place, value in parts]
    if isinstance(node, dict) and type(node) is dict:
        return dict(zip(node, changed, strict=True))
    if isinstance(node, Mapping):
        return _rebuilt_mapping(node, dict(zip(node, changed, strict=True)), path)
    if isinstance(node, tuple):
        return type(node)(*changed) if hasattr(node, "_fields") else tuple(changed)
    if isinstance(node, list):
        return changed
    return _rebuilt_record(node, {f.name: value for f, value in zip(dataclasses.fields(node), changed, strict=True)})


def _rebuilt_mapping(node: Any, items: dict[Any, Any], path: str) -> Any:
    """A mapping of the user's own type (such as transformers' BatchEncoding) made again from a
    plain dict.
    """
    try:
        return type(node)(items)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        made = copy.copy(node)
        if not isinstance(made, MutableMapping):
            raise UncuttableError(
                f"{path} is a {type(node).__name__} that cannot be rebuilt from a dict ({error}); pass dict({path}) instead"
            ) from error
        made.update(items)
        return made


def _rebuilt_record(node: Any, fields: dict[str, Any]) -> Any:
    """A dataclass with other values.

    Where its constructor does not take them, a copy of it that holds them.
    """
    try:
        return dataclasses.replace(node, **fields)
    except (TypeError, ValueError):
        made = copy.copy(node)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made


def _check_can_be_cut(tensor: torch.Tensor, path: str) -> None:
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise UncuttableError(
            f"{path} is a nested or sparse tensor; its rows cannot be sliced: pass padded dense tensors"
        )


def _refuse_packed(node: object, path: str) -> None:
    if isinstance(node, torch.nn.utils.rnn.PackedSequence):
        raise UncuttableError(
            f"{path} is a PackedSequence: its dimension 0 counts steps, not rows; "
            "pad the batch and pack it inside the model"
        )


def _refuse_hidden_tensors(node: object, path: str) -> None:
    """An unknown object passes unchanged, unless it holds data: every microbatch would get the
    whole of it.
    """
    if hasattr(node, "__array__") or _holds_tensors(node, _DEEPEST):
        raise UncuttableError(
            f"{path} is a {type(node).__name__}, which holds data that cannot be cut into rows; "
            "pass tensors in dicts, lists, tuples or dataclasses (torch.from_numpy for arrays)"
        )


def _holds_tensors(node: object, depth: int) -> bool:
    if isinstance(node, torch.Tensor | np.ndarray):
        return True
    if isinstance(node, (*_PLAIN_LEAVES, type, torch.nn.Module)) or depth == 0:
        return False
    held: list[Any] = list(getattr(node, "__dict__", {}).values())
    held += [getattr(node, name, None) for kind in type(node).__mro__ for name in _slots_of(kind)]
    if isinstance(node, Mapping):
        held += node.values()
    elif isinstance(node, list | tuple | set | frozenset):
        held += node
    return any(_holds_tensors(value, depth - 1) for value in held)


def _slots_of(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


# Batches that come cut: the micro-batches of a window of accumulation of the user's own.
#
# In: batches of any shapes, and what the loss of each counts for. Out: the way in which such a
# batch is cut, which is to hand its parts out.
#
# [Note: sums of the user's own]
# Whoever gives `Parts` has decided the sums: the gradients of each part's loss, times its share,
# added in their order, as `(loss * share).backward()` part by part adds them. Plain PyTorch's bits
# are those of that loop, so a plan with as many microbatches regroups nothing. Layer by layer it is
# the same sums as long as no weight is used by several blocks, whose uses would be added in another
# order, and no call draws random numbers, which come in another order: there the planner keeps to
# one part after the other.


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
