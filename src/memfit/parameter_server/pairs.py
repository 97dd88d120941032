"""Messages between a worker and a server, over a group of these two.

In: a process group of two ranks. Out: heads of requests and answers, texts, bytes in pieces.

[Note: what travels]
A worker asks, a server answers; nothing else begins a message. A push is a head and the gradient,
and has no answer: what goes wrong on the server is the answer of the worker's next pull, or of its
leaving. A pull is a head; its answer is a head and the weight, or a head and a text. Values travel
in pieces of 1 MiB, so that neither side stages more; each byte once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from memfit.distributed.transport import transporting

PIECE_BYTES = 1 << 20
_HEAD_NUMBERS = 3


class Ask(IntEnum):
    """A request of a worker."""

    PUSH = 0
    PULL = 1
    LEAVE = 2


@dataclass(frozen=True)
class Head:
    """The beginning of a message.

    Attributes:
        what: of a request its `Ask`; of an answer 0, or 1 for an error.
        index: of a request, the parameter's; of an answer, how stale it is, or the length of the
            text.
        has_bytes: values follow.
    """

    what: int
    index: int = 0
    has_bytes: bool = False


class Pair:
    """One end of the connection of a worker and a server; used by one thread at a time.

    Args:
        group: of these two ranks.
        peer: the other one's rank in it, 0 for the server and 1 for the worker.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer = peer

    def send_head(self, head: Head) -> None:
        """Sends the beginning of a message."""
        self._send(torch.tensor([head.what, head.index, int(head.has_bytes)], dtype=torch.int64))

    def receive_head(self) -> Head:
        """Waits for the beginning of a message."""
        numbers = torch.empty(_HEAD_NUMBERS, dtype=torch.int64)
        self._receive(numbers)
        what, index, has_bytes = numbers.tolist()
        return Head(what, index, bool(has_bytes))

    def send_text(self, text: str) -> None:
        """Sends a text, as the answer of something that failed."""
        encoded = bytearray(text.encode() or b" ")
        self.send_head(Head(1, len(encoded)))
        self._send(torch.frombuffer(encoded, dtype=torch.uint8))

    def receive_text(self, head: Head) -> str:
        """Waits for the text behind such a head."""
        encoded = torch.empty(head.index, dtype=torch.uint8)
        self._receive(encoded)
        return bytes(encoded.tolist()).decode(errors="replace")

    def send_bytes(self, nbytes: int, part: Callable[[int, int], torch.Tensor]) -> None:
        """Sends values.

        Args:
            nbytes: of all.
            part: returns the bytes of a range (offset, length), in host memory.
        """
        for offset, length in _pieces(nbytes):
            self._send(part(offset, length))

    def receive_bytes(
        self, nbytes: int, part: Callable[[int, int], torch.Tensor], take: Callable[[int, int, torch.Tensor], None]
    ) -> None:
        """Waits for values.

        Args:
            nbytes: of all.
            part: returns memory for the bytes of a range.
            take: called with the range and that memory, when it is filled. Where it fails, the rest
                is received all the same, so that the next message is found; then it raises.
        """
        failed: Exception | None = None
        for offset, length in _pieces(nbytes):
            piece = part(offset, length)
            self._receive(piece)
            if failed is None:
                try:
                    take(offset, length, piece)
                except Exception as error:  # noqa: BLE001, raised below
                    failed = error
        if failed is not None:
            raise failed

    def drop_bytes(self, nbytes: int) -> None:
        """Waits for values that nobody wants."""
        for _, length in _pieces(nbytes):
            self._receive(torch.empty(length, dtype=torch.uint8))

    def close(self) -> None:
        """Gives the connection up. May be repeated."""
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)

    def _send(self, values: torch.Tensor) -> None:
        with transporting():
            dist.send(values, group=self._group, group_dst=self._peer)

    def _receive(self, values: torch.Tensor) -> None:
        with transporting():
            dist.recv(values, group=self._group, group_src=self._peer)


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, nbytes, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, nbytes - offset)
