"""Collectives over a process group, as memfit does them: bytes in place, sums in rank order.

In: a process group, 1-D tensors, borders. Out: the same tensors filled. Called by the group's
`CollectiveThread` only.

[Note: roads]
*Gather*: each rank sends its share to each other one, in place, all begun at once. On Gloo an
all-gather into one tensor takes the whole buffer once more; sends take nothing, need no padding of
uneven shares and put the same bytes on the wire. So do broadcasts, but one of them has several
peers: where one of these is lost, it fails before the others have their bytes, and two ranks that
are left wait for each other until a timeout. A send has one peer: whatever was begun on both sides
ends, and what only one side has begun ends when the other one closes its sockets.

*Reduction*: an all-to-all of shares, then a sum in ascending rank order. Gloo's reduce-scatter
moves twice the bytes and adds in no rank's order; this one gives the same bits on any transport.
Measured for Gloo in docs/log.md.

[Note: who holds a buffer that was exchanged]
Gloo's own threads keep the tensors of a collective that is complete until they run again, which on
busy cores can be many collectives later. So a buffer is not given up by dropping it, but by
`free_exchanged`, which takes its bytes away whoever still holds the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from memfit.core.errors import UsageError

Group = dist.ProcessGroup | None
"""A process group; None: this process alone, for which nothing is moved."""
Combine = Callable[[Sequence[Tensor]], Tensor]


def rank_and_size(group: Group) -> tuple[int, int]:
    """Returns this process's rank in the group, and how many ranks it has."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


class BrokenTransportError(Exception):
    """A collective failed in torch.distributed.

    Attributes:
        left: collectives that were begun and may still move bytes.
    """

    def __init__(self, text: str, left: Sequence[dist.Work]) -> None:
        super().__init__(text)
        self.left = tuple(left)


@contextmanager
def transporting(left: Sequence[dist.Work] = (), about: str = "") -> Iterator[None]:
    """Context in which torch.distributed is called: its errors become `BrokenTransportError`.

    Args:
        left: collectives that go on behind an error.
        about: words before the error's.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = str(error).strip().splitlines()
        # What follows is advice of the library's, on other causes too.
        told = text[0].partition(". This is typically")[0] if text else type(error).__name__
        told = re.sub(r"^\[\S+\] ", "", told)  # a place in Gloo's source
        raise BrokenTransportError(f"{about}{told}", left) from error


def gather_in_place(group: Group, whole: Tensor, borders: Sequence[int]) -> None:
    """Fills a buffer of which each rank has its share.

    Args:
        group: all of its ranks call.
        whole: 1-D, of the same size on all ranks; this rank's share is filled.
        borders: where the share of each rank begins, and the end: one more than ranks.
    """
    if group is None:
        return
    works: list[dist.Work] = []
    peers: list[int] = []
    own, size = rank_and_size(group)
    shares = [_as_bytes(whole[first:last]) for first, last in pairwise(borders)]
    # In another order on each rank, so that not all send to the same one at once.
    for peer in ((own + turn) % size for turn in range(1, size)):
        with transporting(works, f"rank {peer}: "):
            if shares[peer].numel():
                works.append(_begun(dist.irecv(shares[peer], group=group, group_src=peer)))
                peers.append(peer)
            if shares[own].numel():
                works.append(_begun(dist.isend(shares[own], group=group, group_dst=peer)))
                peers.append(peer)
    for peer in peers:
        with transporting(works, f"rank {peer}: "):
            # Taken off first: what is left when one fails has not been waited for.
            works.pop(0).wait()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is a member of the group"
    return work


def exchange(
    group: Group, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], into: Tensor | None = None
) -> list[Tensor]:
    """Sends each rank a part of a 1-D tensor.

    Memory: what is received, if there is no `into`.

    Args:
        group: all of its ranks call.
        sent: what goes, rank after rank.
        sent_sizes: elements for each rank.
        received_sizes: elements from each rank.
        into: 1-D tensor of the same dtype that takes what is received, or has room for more.

    Returns:
        The parts that the ranks have sent to this one.
    """
    if group is None:
        return [sent.clone()]
    total = sum(received_sizes)
    received = torch.empty(total, dtype=sent.dtype, device=sent.device) if into is None else into[:total]
    with transporting():
        dist.all_to_all_single(
            _as_bytes(received), _as_bytes(sent),
            [size * sent.element_size() for size in received_sizes], [size * sent.element_size() for size in sent_sizes],
            group=group,
        )  # fmt: skip
    return list(received.split(list(received_sizes)))


def gather_small(group: Group, own: Tensor) -> Tensor:
    """Returns the small tensors of all ranks, of the same shape on each: (ranks, *shape)."""
    rank, size = rank_and_size(group)
    found = torch.empty((size, *own.shape), dtype=own.dtype, device=own.device)
    found[rank] = own
    flat = found.view(-1)
    gather_in_place(group, flat, [rank * own.numel() for rank in range(size + 1)])
    return found


def broadcast(group: Group, buffer: Tensor, root: int) -> None:
    """Fills a dense buffer with the root's."""
    if group is not None and buffer.numel():
        with transporting():
            dist.broadcast(_as_bytes(buffer), group=group, group_src=root)


def reduce_share(group: Group, whole: Tensor, borders: Sequence[int], combine: Combine) -> Tensor:
    """Combines the ranks' buffers over this rank's share.

    Memory: the share, as often as there are ranks.

    Args:
        group: all of its ranks call.
        whole: 1-D, of the same size on all ranks; unchanged.
        borders: of the shares.
        combine: of tensors in rank order.
    """
    rank, size = rank_and_size(group)
    sizes = [last - first for first, last in pairwise(borders)]
    return combine(exchange(group, whole, sizes, [sizes[rank]] * size))


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Adds tensors up from the first to the last, into the first."""
    total = parts[0]
    for part in parts[1:]:
        # One after the other: the bits depend on the order of the ranks and on nothing else.
        total.add_(part)
    return total


def free_exchanged(buffer: Tensor) -> None:
    """Frees the bytes of a buffer of one's own, of which every collective is complete, and of every
    view of it. See [Note: who holds a buffer that was exchanged].
    """
    # Complete: one under way would write into freed memory ([Note: memory of a collective]).
    buffer.untyped_storage().resize_(0)


def equal_borders(numel: int, ranks: int) -> list[int]:
    """Cuts a number of elements into nearly equal shares."""
    return [numel * rank // ranks for rank in range(ranks + 1)]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's bytes: any dtype travels so, whatever the backend knows."""
    return tensor.reshape(-1).view(torch.uint8)


# Headers of buffers: their kind, dtype and shape, by which ranks agree before they move bytes.
#
# In: a tensor, a list of numbers, or None. Out: flat tensors and `BufferHeader`s; from these
# buffers again.

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_MOST_DIMENSIONS = 12
# What was asked for, its operator, kind, dtype, number of dimensions; then the dimensions.
_FIELDS = 5 + _MOST_DIMENSIONS


@dataclass(frozen=True)
class Form:
    """Kind and shape of a buffer.

    Attributes:
        is_given: False: None was given, where a rank has nothing to send.
        is_list: a plain list, whose numbers travel as a tensor.
        shape: of the tensor.
        dtype: of the tensor.
    """

    is_given: bool
    is_list: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BufferHeader:
    """Form of a buffer, as its rank has told it."""

    form: Form

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return torch.Size(self.form.shape).numel() if self.form.is_given else 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""
        return self.form.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Returns a flat tensor for it, without values."""
        return torch.empty(self.numel, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        if not self.form.is_given:
            return "nothing"
        if self.form.is_list:
            return f"a list of {self.numel}"
        return f"a tensor {tuple(self.form.shape)} of {str(self.dtype).removeprefix('torch.')}"


def form_of(buffer: Any) -> Form:
    """Returns the form of a buffer.

    Raises:
        UsageError: it is neither a tensor nor a list of numbers.
    """
    if buffer is None:
        return Form(is_given=False, is_list=False, shape=(0,), dtype=torch.uint8)
    if isinstance(buffer, Tensor):
        if buffer.dtype not in _DTYPES or buffer.layout is not torch.strided or buffer.dim() > _MOST_DIMENSIONS:
            raise UsageError(
                f"a tensor {tuple(buffer.shape)} of {buffer.dtype} and layout {buffer.layout} cannot travel"
            )
        return Form(is_given=True, is_list=False, shape=tuple(buffer.shape), dtype=buffer.dtype)
    if isinstance(buffer, list | tuple):
        values = cast("Sequence[object]", buffer)
        if all(isinstance(value, int | float | complex) for value in values):
            kinds = (complex, torch.complex128), (float, torch.float64)
            dtype = next((d for kind, d in kinds if any(isinstance(v, kind) for v in values)), torch.int64)
            return Form(is_given=True, is_list=True, shape=(len(values),), dtype=dtype)
    raise UsageError(f"a buffer is a tensor or a list of numbers, not {type(buffer).__name__}")


def given_values(buffer: Any, form: Form) -> Tensor:
    """Returns a buffer's values as a flat tensor of its own."""
    if not form.is_given:
        return torch.empty(0, dtype=form.dtype)
    if isinstance(buffer, Tensor):
        return buffer.detach().reshape(-1).clone()
    try:
        return torch.tensor(buffer, dtype=form.dtype).reshape(-1)
    except (OverflowError, RuntimeError) as error:
        raise UsageError(f"integers of a list travel as 64 bits: {error}") from error


def restored(flat: Tensor, form: Form) -> Any:
    """Returns a buffer of the form's kind with these values."""
    if not form.is_given:
        return None
    return flat.tolist() if form.is_list else flat.view(form.shape)


def promoted(headers: Sequence[BufferHeader]) -> torch.dtype:
    """Returns the dtype that holds the values of all buffers.

    Raises:
        UsageError: lists and tensors, or tensors of different dtypes.
    """
    given = [header for header in headers if header.form.is_given]
    if not given:
        return torch.uint8
    dtype = given[0].dtype
    for header in given[1:]:
        if header.form.is_list != given[0].form.is_list or (not header.form.is_list and header.dtype != dtype):
            raise UsageError(f"one rank has {given[0]}, another {header}: their buffers must be of one kind and dtype")
        dtype = torch.promote_types(dtype, header.dtype)
    return dtype


def agree_on(group: Group, asked: tuple[str, str], forms: Sequence[Form]) -> list[list[BufferHeader]]:
    """Exchanges headers.

    Returns:
        By rank, the headers of its buffers.

    Raises:
        UsageError: the ranks have asked for different things. Raised on all of them, and nothing
            was moved.
    """
    rows = [_row(asked, form) for form in forms]
    # As many rows on all ranks, whatever they ask for: else the exchange itself would differ.
    _, size = rank_and_size(group)
    rows += [[0] * _FIELDS] * (size - len(rows))
    found = gather_small(group, torch.tensor(rows, dtype=torch.int64)).tolist()
    if any(other[0][:2] != found[0][0][:2] for other in found):
        # Names travel as sums only; the message of each rank says its own.
        raise UsageError(
            f"the ranks have called different things: this one {' by '.join(filter(None, asked))}, "
            f"ranks {[r for r, other in enumerate(found) if other[0][:2] != rows[0][:2]]} something else. Nothing was moved"
        )
    return [[_header(row) for row in own[: len(forms)]] for own in found]


def _row(asked: tuple[str, str], form: Form) -> list[int]:
    kind = int(form.is_given) + 2 * int(form.is_list)
    shape = [*form.shape, *[0] * (_MOST_DIMENSIONS - len(form.shape))]
    return [
        crc32(asked[0].encode()),
        crc32(asked[1].encode()),
        kind,
        _DTYPES.index(form.dtype),
        len(form.shape),
        *shape,
    ]


def _header(row: list[int]) -> BufferHeader:
    _, _, kind, dtype, dimensions, *shape = row
    return BufferHeader(
        Form(is_given=bool(kind & 1), is_list=bool(kind & 2), shape=tuple(shape[:dimensions]), dtype=_DTYPES[dtype])
    )
