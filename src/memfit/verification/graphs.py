"""Tensors that an autograd graph holds: looked up without unpacking anything.

In: a tensor with a `grad_fn`. Out: the storages that its graph saved for a backward that may never
come.

[Note: saved, but not in sight]
A saved tensor belongs to a C++ node: Python's collector does not see that reference, and often
there is no Python object for the tensor at all. So the graph is walked from the tensor that is
kept. `SavedTensor.data` gives what was packed without running the unpack hook (unpacking could
recompute a block); with saved-tensor hooks that is the hooks' own object, which may hold tensors in
its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

StorageKey = int
"""Identity of a storage for as long as it lives."""


@dataclass(frozen=True, kw_only=True)
class SavedStorage:
    """A storage that a graph saved: its bytes, and shape and dtype of the tensor that was saved on
    it.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(kw_only=True)
class GraphContents:
    """Contents of the graph of one tensor.

    Attributes:
        name: of its last node, such as "MulBackward0".
        storages: what was saved.
        objects: identities of Python objects that C++ nodes hold: contexts of custom functions, and
            what saved-tensor hooks packed.
        nodes: all of them; the identities above are valid while they live.
    """

    name: str
    storages: dict[StorageKey, SavedStorage] = field(default_factory=dict)
    objects: set[int] = field(default_factory=set)
    nodes: set[Any] = field(default_factory=set)


def storage_of(tensor: Tensor) -> tuple[StorageKey, int]:
    """A tensor's storage and its bytes.

    Tensors without one storage (sparse ones) count as their own.

    Views of one storage give the same key.
    """
    # a weight that is away refuses, and so may others' classes
    with torch._C.DisableTorchFunctionSubclass():
        try:
            storage = tensor.untyped_storage()
            return storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have none
            parts = [tensor._values(), tensor._indices()] if tensor.layout == torch.sparse_coo else []
            return id(tensor), sum(part.nbytes for part in parts)


def graph_of(tensor: Tensor) -> GraphContents | None:
    """Returns the contents of the graph behind a tensor, or None.

    No saved tensor is unpacked; a graph that ran backward holds nothing.
    """
    first: Any = tensor.grad_fn
    if first is None:
        return None
    found = GraphContents(name=type(first).__name__)
    pending: list[Any] = [first]
    while pending:
        node = pending.pop()
        if node is None or node in found.nodes:
            continue
        found.nodes.add(node)
        if issubclass(
            type(node), torch.autograd.function.FunctionCtx
        ):  # a function written in Python: its node is its context
            found.objects.add(id(node))
        for packed in _packed_by(node):
            if isinstance(packed, Tensor):
                key, nbytes = storage_of(packed)
                found.storages[key] = SavedStorage(nbytes=nbytes, shape=tuple(packed.shape), dtype=packed.dtype)
            else:
                found.objects.add(id(packed))
        pending.extend(following for following, _ in node.next_functions)
    return found


def _packed_by(node: Any) -> Iterator[Any]:
    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # torch's word for "freed by a backward"
            continue
        for one in saved if isinstance(saved, tuple | list) else (saved,):
            data = None if one is None else one.data
            if data is not None:
                yield data
