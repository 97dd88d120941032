"""Marks on storages, which prove that nobody has written there since.

In: a storage with bytes. Out: a mark, which is gone once somebody has asked for memory to write to.

[Note: marks that a write takes off]
A version counter does not see every write: `.data` has a counter of its own, and NumPy, DLPack,
storages and foreign kernels have none. So a storage is marked as copy-on-write, which torch can do
and asks of every kernel to heed: who reads gets the address as ever, and who asks for an address to
write to, in any thread and under compiled code, first makes the storage an ordinary one. That
copies nothing, because no second storage shares the bytes. A mark that is there is a proof; one
that is gone proves nothing: NumPy and some kernels ask for memory to write to and only read.

Not seen: writes through an address that was taken before the mark, or by another process. Two
threads must not take one mark off at the same moment; the engine takes it off before it lets its
own threads write. `record_stream` passes a marked storage over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from memfit.core.errors import UnsupportedError
from memfit.tensors.trees import bytes_view

# Contexts in which modes of the user's see no operation.
_unseen = torch._C.DisableTorchFunction
_undispatched = torch._C._DisableTorchDispatch  # pyright: ignore[reportAttributeAccessIssue]


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's first element, to read from: a mark stays."""
    begin = torch._C._data_address(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    return begin + int(tensor.storage_offset()) * tensor.element_size()


def alias_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a tensor over none of a storage's bytes, by which marks are put and asked for.

    Kept beside the storage: to make one costs more than to put a mark.
    """
    with _unseen(), _undispatched():
        return bytes_view(storage, 0, 0)


def put_mark(alias: torch.Tensor) -> None:
    """Marks the storage of an alias. Costs a microsecond or two, and nothing afterwards.

    Where the storage's allocator has no such marks there is none, and `has_mark` is False.
    """
    with suppress(RuntimeError), _unseen(), _undispatched():
        alias._lazy_clone()  # pyright: ignore[reportAttributeAccessIssue]


def has_mark(alias: torch.Tensor) -> bool:
    """True if nobody has asked to write to an alias's storage since it was marked."""
    return torch._C._is_cow_tensor(alias)  # pyright: ignore[reportAttributeAccessIssue]


def take_mark_off(storage: torch.UntypedStorage) -> None:
    """Takes the mark off, where there is one; always before a storage is resized."""
    storage.data_ptr()  # an address to write to


@contextmanager
def reading(storage: torch.UntypedStorage) -> Iterator[None]:
    """Context in which the engine reads a storage by an address that it could write to: a mark
    that is there is there again at the end.
    """
    alias = alias_of(storage)
    is_marked = has_mark(alias)
    yield
    if is_marked:
        put_mark(alias)


# Tensors whose elements share memory, as `expand` makes them: what they hold, and how they get
# values.
#
# In: a buffer, values of its shape. Out: the buffer with these values; torch's `copy_` refuses it.


def shares_elements(tensor: torch.Tensor) -> bool:
    """Some of its elements are one in memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copy_shared(into: torch.Tensor, values: torch.Tensor) -> None:
    """As `into.copy_(values)`, for such tensors and others.

    Raises:
        ValueError: values that elements which are one in memory cannot have; nothing was changed.
    """
    chosen = values
    for dimension, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if stride == 0 and size > 1:
            into, chosen = into.narrow(dimension, 0, 1), chosen.narrow(dimension, 0, 1)
    if not torch.equal(chosen.expand_as(values).nan_to_num(), values.nan_to_num()):
        raise ValueError("whose elements share memory, and get different values")
    with torch.no_grad():
        into.copy_(chosen)


# Tensors that are one stretch of memory, and the refusal of others.
#
# In: any tensor. Out: nothing, or an error that says what it is and what to give in its place.


def check_dense(tensor: torch.Tensor, whose: str) -> None:
    """Raises `UnsupportedError` for a tensor that is more than one stretch of memory.

    Args:
        tensor: any.
        whose: begins the sentence whose object it is.
    """
    if tensor.is_nested:  # those of the older layout call themselves strided, and have no shape
        raise UnsupportedError(
            f"{whose} a nested tensor, and memfit places dense ones only: give its parts as a list of tensors (unbind), or pad them (to_padded_tensor)"
        )
    if tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(
            f"{whose} a sparse tensor ({name}, of shape {tuple(tensor.shape)}), and memfit places dense ones only: "
            "nn.Embedding(sparse=False), or to_dense()"
        )
