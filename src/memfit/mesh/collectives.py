"""Collectives for people: on tensors and on plain lists, checked before anything moves.

In: a buffer on each rank. Out: new buffers; inputs are never changed.

    communicator = memfit.communicator.create()
    communicator.allreduce([1, 2, 3], op=sum)

Started by `torchrun`, or under a process group that the program has initialized; a process that is
alone is a communicator of one.
"""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

import torch
from torch import Tensor

from memfit.core.errors import UsageError
from memfit.mesh.rank_group import CollectiveHandle, RankGroup, open_group
from memfit.mesh.transport import (
    BufferHeader,
    Combine,
    Form,
    Group,
    agree_on,
    broadcast,
    equal_borders,
    exchange,
    form_of,
    gather_in_place,
    gather_small,
    given_values,
    promoted,
    reduce_share,
    restored,
    sum_in_order,
)

Op = str | Callable[[Any], Any]
"""A reduction: its name, or a function of the ranks' values in rank order, such as Python's `sum`.
"""
_SMALL_BYTES = 1 << 16
T = TypeVar("T")


class Pending(Generic[T]):
    """A collective under way, as `async_op=True` gives it."""

    def __init__(self, handle: CollectiveHandle, found: list[T]) -> None:
        self._handle = handle
        self._found = found

    @property
    def is_done(self) -> bool:
        """Tells whether `wait` would return at once."""
        return self._handle.is_done

    def wait(self) -> T:
        """Returns the result when it is there; may be called again.

        Raises:
            PeerError: a rank failed or was lost.
            UsageError: the ranks called different things.
        """
        self._handle.wait()
        return self._found[0]


class Communicator:
    """Ranks that exchange buffers. Made by `create`, on all ranks.

    A buffer is a tensor, or a list of numbers; a result is of the same kind. Every rank must call
    the same methods in the same order: each call compares what the ranks ask for before it moves
    anything, and raises the same `UsageError` on all of them where that differs. Reductions combine
    the values in rank order, so that their bits do not depend on the transport. As a context
    manager it is closed at the end, and an error that leaves it is told to the other ranks.

    Memory: `allreduce` takes the buffer twice besides its result.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.rank = ranks.rank
        self.size = ranks.size

    def __repr__(self) -> str:
        return f"<memfit communicator: rank {self.rank} of {self.size}>"

    # --- reductions

    def allreduce(self, buffer: Any, op: Op = "sum", *, async_op: bool = False) -> Any:
        """Combines the buffers of all ranks, element by element, in rank order.

        Args:
            buffer: a tensor or a list of numbers, as long on all ranks.
            op: "sum", "mean", "product", "max", "min", or a function that combines the ranks'
                values: Python's `sum`, `max`, `min`, `math.prod`, or one of yours, called for each
                element of a list, and once for the tensors.
            async_op: returns a `Pending` at once.

        Returns:
            A new buffer, equal on all ranks.
        """
        return self._do(partial(_allreduce, op=op), buffer, ("allreduce", _op_name(op)), async_op=async_op)

    def reduce(self, buffer: Any, op: Op = "sum", root: int = 0, *, async_op: bool = False) -> Any:
        """Combines as `allreduce` does. Returns the result on rank `root`, and None elsewhere."""
        self._check_rank(root)
        act = partial(_reduce, op=op, root=root)
        return self._do(act, buffer, (f"reduce to rank {root}", _op_name(op)), async_op=async_op)

    def reduce_scatter(self, buffers: Sequence[Any], op: Op = "sum", *, async_op: bool = False) -> Any:
        """Combines the buffers that all ranks have for this one.

        Args:
            buffers: one for each rank.
            op: as in `allreduce`.
            async_op: returns a `Pending` at once.
        """
        self._check_parts(buffers)
        act = partial(_reduce_scatter, op=op)
        return self._do(act, buffers, ("reduce_scatter", _op_name(op)), parts=self.size, async_op=async_op)

    # --- copies

    def broadcast(self, buffer: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Returns rank `root`'s buffer; what other ranks give (None, for example) is not looked
        at.
        """
        self._check_rank(root)
        mine = buffer if self.rank == root else None
        return self._do(partial(_broadcast, root=root), mine, (f"broadcast of rank {root}", ""), async_op=async_op)

    def allgather(self, buffer: Any, *, async_op: bool = False) -> Any:
        """Returns the buffers of all ranks, as a list in rank order. Their shapes may differ."""
        return self._do(_allgather, buffer, ("allgather", ""), async_op=async_op)

    def gather(self, buffer: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Returns the buffers of all ranks on rank `root`, and None elsewhere."""
        self._check_rank(root)
        return self._do(partial(_gather, root=root), buffer, (f"gather to rank {root}", ""), async_op=async_op)

    def scatter(self, buffers: Sequence[Any] | None, root: int = 0, *, async_op: bool = False) -> Any:
        """Returns this rank's of the buffers that rank `root` has, one for each rank."""
        self._check_rank(root)
        if self.rank == root:
            self._check_parts(buffers)
        mine = buffers if self.rank == root else [None] * self.size
        act = partial(_alltoall, root=root)
        return self._do(act, mine, (f"scatter of rank {root}", ""), parts=self.size, async_op=async_op)

    def alltoall(self, buffers: Sequence[Any], *, async_op: bool = False) -> Any:
        """Sends each rank its of the buffers, and returns those that the ranks have sent to this
        one, in rank order. Their shapes may differ.
        """
        self._check_parts(buffers)
        return self._do(_alltoall, buffers, ("alltoall", ""), parts=self.size, async_op=async_op)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._do(_nothing, None, ("barrier", ""), async_op=False)

    # --- the end

    def fail(self, error: BaseException) -> None:
        """Tells all other ranks that this one has failed: their collectives, under way and to come,
        raise a `PeerError` with its text at once.
        """
        self._ranks.fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def close(self) -> None:
        """Ends the communicator's threads and gives its connections up. Nothing may use it
        afterwards.
        """
        self._ranks.close()

    def _do(
        self,
        act: Callable[[_Call], Any],
        given: Any,
        asked: tuple[str, str],
        *,
        parts: int | None = None,
        async_op: bool,
    ) -> Any:
        buffers = [given] if parts is None else list(given)
        # Copied here: the caller may write into its buffer as soon as this returns.
        forms = [form_of(buffer) for buffer in buffers]
        flats = [given_values(buffer, form) for buffer, form in zip(buffers, forms, strict=True)]
        found: list[Any] = []

        def run(group: Group) -> None:
            headers = agree_on(group, asked, forms)
            found.append(act(_Call(group, self.rank, self.size, forms, flats, headers)))

        pending = Pending(self._ranks.submit(run), found)
        return pending if async_op else pending.wait()

    def _check_rank(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise UsageError(f"there is no rank {root} among {self.size}")

    def _check_parts(self, buffers: object) -> None:
        if not isinstance(buffers, Sequence) or len(cast("Sequence[object]", buffers)) != self.size:
            raise UsageError(f"a list with one buffer for each of the {self.size} ranks is needed")


def create(*, timeout_s: float | None = None) -> Communicator:
    """Makes a communicator of all ranks: of the default process group of torch.distributed, which
    is initialized from `torchrun`'s environment if the program has not done so. Without either this
    process is alone. All ranks must call it.

    Args:
        timeout_s: after it, a collective that a rank does not come to is an error on the others;
            None: that of `init_process_group`, or ten minutes where memfit initializes.

    Raises:
        UsageError: torchrun has started several ranks and torch has no torch.distributed.
        PeerError: another rank was lost, or hangs.
    """
    return Communicator(open_group(timeout_s=timeout_s))


# --- collectives, in the group's thread -----------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A collective as a rank has asked for it: flat buffers of its own, and the headers of all
    ranks.

    `headers[r][p]` is that of buffer p on rank r.
    """

    group: Group
    rank: int
    size: int
    forms: list[Form]
    flats: list[Tensor]
    headers: list[list[BufferHeader]]


def _nothing(call: _Call) -> None:
    """Agreeing was all."""


def _allreduce(call: _Call, op: Op) -> Any:
    own, combine = _comparable(call, 0, op), _combiner(op, call.forms[0])
    size = own.numel()
    if callable(op) and combine is not None and op not in _NAMES:
        # A function of the user's may look at the whole: no shares.
        return restored(combine(_all(call, own)), call.forms[0])
    assert combine is not None
    if size * own.element_size() <= _SMALL_BYTES:
        return restored(combine(_all(call, own)), call.forms[0])
    borders = equal_borders(size, call.size)
    share = reduce_share(call.group, own, borders, combine)
    whole = torch.empty(size, dtype=share.dtype, device=share.device)
    whole[borders[call.rank] : borders[call.rank + 1]] = share
    gather_in_place(call.group, whole, borders)
    return restored(whole, call.forms[0])


def _reduce(call: _Call, op: Op, root: int) -> Any:
    own, combine = _comparable(call, 0, op), _combiner(op, call.forms[0])
    sizes = [own.numel() if rank == root else 0 for rank in range(call.size)]
    received = [own.numel() if call.rank == root else 0] * call.size
    parts = exchange(call.group, own, sizes, received)
    return restored(combine(parts), call.forms[0]) if call.rank == root else None


def _reduce_scatter(call: _Call, op: Op) -> Any:
    flats = [_comparable(call, part, op) for part in range(call.size)]
    dtype = flats[0].dtype
    for flat in flats[1:]:
        dtype = torch.promote_types(dtype, flat.dtype)
    form = call.forms[call.rank]
    sizes = [flat.numel() for flat in flats]
    sent = torch.cat([flat.to(dtype) for flat in flats])
    parts = exchange(call.group, sent, sizes, [sizes[call.rank]] * call.size)
    own = [part.to(flats[call.rank].dtype) for part in parts]
    return restored(_combiner(op, form)(own), form)


def _broadcast(call: _Call, root: int) -> Any:
    header = call.headers[root][0]
    whole = call.flats[0] if call.rank == root else header.empty(_device(call))
    broadcast(call.group, whole, root)
    return restored(whole, header.form)


def _allgather(call: _Call) -> Any:
    headers = [own[0] for own in call.headers]
    dtype = promoted(headers)
    own = call.flats[0].to(dtype)
    borders = [0]
    for header in headers:
        borders.append(borders[-1] + header.numel)
    whole = torch.empty(borders[-1], dtype=dtype, device=own.device)
    whole[borders[call.rank] : borders[call.rank + 1]] = own
    gather_in_place(call.group, whole, borders)
    # In memory of its own each: one that is kept must not keep all.
    parts = [whole[a:b].clone() for a, b in itertools.pairwise(borders)]
    return [restored(part, header.form) for part, header in zip(parts, headers, strict=True)]


def _gather(call: _Call, root: int) -> Any:
    headers = [own[0] for own in call.headers]
    own = call.flats[0].to(promoted(headers))
    sizes = [own.numel() if rank == root else 0 for rank in range(call.size)]
    received = [header.numel if call.rank == root else 0 for header in headers]
    parts = exchange(call.group, own, sizes, received)
    if call.rank != root:
        return None
    return [restored(part.clone(), header.form) for part, header in zip(parts, headers, strict=True)]


def _alltoall(call: _Call, root: int | None = None) -> Any:
    """Exchanges parts; with a root only those that it sends."""
    table = [header for own in call.headers for header in own if header.form.is_given]
    dtype = promoted(table)
    coming = [own[call.rank] for own in call.headers]
    sent = torch.cat([flat.to(dtype) for flat in call.flats])
    sizes = [flat.numel() for flat in call.flats]
    parts = exchange(call.group, sent, sizes, [header.numel for header in coming])
    if root is not None:
        return restored(parts[root].clone(), coming[root].form)
    return [restored(part.clone(), header.form) for part, header in zip(parts, coming, strict=True)]


def _device(call: _Call) -> torch.device:
    return call.flats[0].device


def _all(call: _Call, own: Tensor) -> list[Tensor]:
    return list(gather_small(call.group, own).unbind())


def _comparable(call: _Call, part: int, op: Op) -> Tensor:
    """Returns a part as the ranks can combine it: lists of integers become what the others have."""
    headers = [own[part] for own in call.headers]
    shapes = {header.form.shape for header in headers}
    kinds = {header.form.is_list for header in headers}
    dtypes = {header.dtype for header in headers}
    if len(shapes) > 1 or len(kinds) > 1 or (len(dtypes) > 1 and not headers[0].form.is_list):
        told = "; ".join(f"rank {rank}: {header}" for rank, header in enumerate(headers))
        raise UsageError(f"the ranks' buffers cannot be combined by {_op_name(op)}, they differ. {told}")
    return call.flats[part].to(promoted(headers))


# --- operators


def _product(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total.mul_(part)
    return total


def _largest(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = torch.maximum(total, part)
    return total


def _smallest(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = torch.minimum(total, part)
    return total


def _mean(parts: Sequence[Tensor]) -> Tensor:
    return sum_in_order(parts) / len(parts)


_OPERATORS: dict[str, Combine] = {
    "sum": sum_in_order,
    "mean": _mean,
    "product": _product,
    "max": _largest,
    "min": _smallest,
}
_NAMES: dict[Callable[[Any], Any], str] = {
    builtins.sum: "sum",
    builtins.max: "max",
    builtins.min: "min",
    math.prod: "product",
}


def _op_name(op: Op) -> str:
    if callable(op):
        name = _NAMES.get(op, getattr(op, "__qualname__", type(op).__name__))
    else:
        name = op
        if name not in _OPERATORS:
            raise UsageError(f"op is one of {sorted(_OPERATORS)} or a function, not {op!r:.80}")
    return name


def _combiner(op: Op, form: Form) -> Combine:
    name = _op_name(op)
    if name in _OPERATORS:
        return _OPERATORS[name]
    assert callable(op)
    return partial(_combine_by, op, form)


def _combine_by(op: Callable[[Any], Any], form: Form, parts: Sequence[Tensor]) -> Tensor:
    """Combines by a function of the user's: element by element of lists, and of whole tensors."""
    if not form.is_list:
        found = op([part.view(form.shape) for part in parts])
        if not isinstance(found, Tensor) or found.shape != form.shape:
            raise UsageError("op must give a tensor of the shape of those that it is called with")
        return found.reshape(-1)
    return torch.tensor([op(list(values)) for values in zip(*(part.tolist() for part in parts), strict=True)])
