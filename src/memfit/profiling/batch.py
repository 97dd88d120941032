"""A batch as a tree of tensors whose dimension 0 counts rows.

In: what the user's data loader gives. Out: the number of rows, slices of rows (views, no copy), the tree with tensors
replaced. Trees are mappings, lists, tuples, named tuples and dataclasses, nested; other leaves pass unchanged.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.utils.data

from memfit.core.errors import UnsupportedError, UsageError

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


def batch_rows(batch: object) -> int:
    """Rows of a batch: the size of dimension 0 that all of its tensors agree on (those without dimensions aside).

    Raises:
        UsageError: no tensor has a dimension 0, or two tensors disagree.
        UnsupportedError: a nested, sparse or packed tensor: its rows cannot be sliced.
    """
    refuse_loader(batch)
    first: tuple[str, int] | None = None
    for path, tensor in _named_tensors(batch, "batch"):
        if tensor.dim() == 0:
            continue
        if first is None:
            first = (path, tensor.shape[0])
        elif tensor.shape[0] != first[1]:
            raise UsageError(
                f"the batch's tensors disagree about the number of rows (dimension 0): {first[0]} has {first[1]}, "
                f"{path} has {tensor.shape[0]}; a tensor that is the same for all rows belongs into the loss function"
            )
    if first is None:
        raise UsageError(
            f"the batch is a {type(batch).__name__} without a tensor that has a dimension 0, so it has no rows to count or slice: pass what the loss "
            "function gets, tensors in dicts, lists, tuples or dataclasses"
        )
    if first[1] == 0:
        raise UsageError(f"the batch is empty: {first[0]} has no rows")
    return first[1]


def gives_batches(thing: object) -> bool:
    """A loader, or an iterator, and not a batch."""
    if isinstance(thing, torch.Tensor | Mapping):
        return False
    # Loaders have little in common but that: a batch size, or a position that can be saved.
    is_loader = hasattr(type(thing), "__iter__") and (hasattr(thing, "batch_size") or hasattr(thing, "state_dict"))
    return is_loader or isinstance(thing, Iterator)


def refuse_loader(batch: object) -> None:
    """Refuses what gives batches where a batch is meant.

    Raises:
        UsageError: a loader, a dataset or an iterator.
    """
    if gives_batches(batch):
        raise UsageError(
            f"this is a {type(batch).__name__}, which gives batches, and not a batch: pass one of them, such as next(iter(loader))"
        )
    if isinstance(batch, torch.utils.data.Dataset):
        raise UsageError(
            f"this is a dataset ({type(batch).__name__}), not a batch: pass one batch of its loader, next(iter(torch.utils.data.DataLoader(dataset, ...)))"
        )


def slice_batch(batch: _BatchT, start: int, stop: int) -> _BatchT:
    """Rows `start` to `stop` (exclusive) of a batch, as views that cost no memory.

    Raises:
        UsageError: the range is empty or reaches beyond the batch.
    """
    rows = batch_rows(batch)
    if not 0 <= start < stop <= rows:
        raise UsageError(f"rows {start} to {stop} are not a part of a batch of {rows} rows")
    return map_tensors(batch, lambda tensor: tensor[start:stop] if tensor.dim() else tensor)


def map_tensors(batch: _BatchT, change: Callable[[torch.Tensor], Any]) -> _BatchT:
    """The same tree with every tensor replaced by `change(tensor)`."""
    return _map(batch, change, "batch")


def _map(node: Any, change: Callable[[torch.Tensor], Any], path: str) -> Any:
    if isinstance(node, torch.Tensor):
        return change(_checked(node, path))
    if isinstance(node, _PLAIN_LEAVES):
        return node
    if isinstance(node, Mapping):
        changed = {key: _map(value, change, f"{path}[{key!r}]") for key, value in node.items()}
        return changed if type(node) is dict else _rebuilt(type(node), changed, path)
    if isinstance(node, tuple):
        _refuse_packed(node, path)
        items = [_map(value, change, f"{path}[{index}]") for index, value in enumerate(node)]
        return type(node)(*items) if hasattr(node, "_fields") else tuple(items)
    if isinstance(node, list):
        return [_map(value, change, f"{path}[{index}]") for index, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {f.name: _map(getattr(node, f.name), change, f"{path}.{f.name}") for f in dataclasses.fields(node)}
        return dataclasses.replace(node, **fields)
    _refuse_hidden_tensors(node, path)
    return node


def _rebuilt(kind: type, items: dict[Any, Any], path: str) -> Any:
    """A mapping of the user's own type (such as transformers' BatchEncoding) made again from a plain dict."""
    try:
        return kind(items)
    except TypeError as error:
        raise UsageError(
            f"{path} is a {kind.__name__} that cannot be rebuilt from a dict ({error}); pass dict({path}) instead"
        ) from error


def _named_tensors(node: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield path, _checked(node, path)
    elif isinstance(node, _PLAIN_LEAVES):
        return
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _named_tensors(value, f"{path}[{key!r}]")
    elif isinstance(node, list | tuple):
        _refuse_packed(node, path)
        for index, value in enumerate(node):
            yield from _named_tensors(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for f in dataclasses.fields(node):
            yield from _named_tensors(getattr(node, f.name), f"{path}.{f.name}")
    else:
        _refuse_hidden_tensors(node, path)


def _checked(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{path} is a nested or sparse tensor; its rows cannot be sliced: pass padded dense tensors"
        )
    return tensor


def _refuse_packed(node: object, path: str) -> None:
    if isinstance(node, torch.nn.utils.rnn.PackedSequence):
        raise UnsupportedError(
            f"{path} is a PackedSequence: its dimension 0 counts steps, not rows; "
            "pad the batch and pack it inside the model"
        )


def _refuse_hidden_tensors(node: object, path: str) -> None:
    """An unknown object passes unchanged, unless it holds data: every microbatch would get the whole of it."""
    held = getattr(node, "__dict__", {})
    if hasattr(node, "__array__") or any(isinstance(value, torch.Tensor) for value in held.values()):
        raise UsageError(
            f"{path} is a {type(node).__name__}, which holds data that cannot be cut into rows; "
            "pass tensors in dicts, lists, tuples or dataclasses (torch.from_numpy for arrays)"
        )
