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
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

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
