"""Places that memfit does not have: memory of another machine, and homes that two processes share. Made from its public protocols alone.

In: requests of a job. Out: homes. Neither is fast, or on another machine; both go through everything that a real one would.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from memfit.core.hardware import Link, TierSpec
from memfit.core.tiers import Tier
from memfit.homes import ByteHome, TransferHandle
from memfit.homes.factories import FurtherTier, HomeFactory, HomeRequest

LINK = Link(read_bytes_per_s=2e6, write_bytes_per_s=1e6)
PAGE = 4096


def memory(storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
    """A range of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (nbytes,))  # type: ignore[call-overload]


class Served:
    """A transfer that the other machine's thread carries out."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class Node:
    """The other machine: its memory, one thread that serves requests in order, and what it was asked."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.moved = {"read": 0, "written": 0}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="other-machine")

    def take(self, nbytes: int) -> torch.Tensor:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return torch.full((nbytes,), 0xAA, dtype=torch.uint8)  # nobody may read what was not written

    def give(self, nbytes: int) -> None:
        self.live_bytes -= nbytes

    def serve(self, to: torch.Tensor, source: torch.Tensor, direction: str) -> Served:
        self.moved[direction] += to.numel()
        return Served(self._thread.submit(self._copy, to, source))

    @staticmethod
    def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def end(self) -> None:
        self._thread.shutdown()


class NodeHome(ByteHome):
    """Bytes in memory of the other machine."""

    def __init__(self, node: Node, tier: Tier, nbytes: int) -> None:
        self.tier, self.nbytes = tier, nbytes
        self._node = node
        self._bytes = node.take(nbytes)
        self._is_open = True

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        return self._node.serve(memory(into, into_offset, nbytes), self._bytes[offset : offset + nbytes], "read")

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        there = self._bytes[offset : offset + nbytes]
        return self._node.serve(there, memory(source, source_offset, nbytes), "written")

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._node.give(self.nbytes)


class NodeFactory(HomeFactory):
    """Homes on the other machine."""

    def __init__(self, tier: Tier, node: Node) -> None:
        self._tier = tier
        self._node = node
        self._homes: list[NodeHome] = []

    def home(self, request: HomeRequest) -> ByteHome:
        self._homes.append(NodeHome(self._node, self._tier, request.nbytes))
        return self._homes[-1]

    def pool(self) -> NodePool:
        return NodePool(self._tier, self._node)

    def close(self) -> None:
        while self._homes:
            self._homes.pop().close()


class NodePool:
    """Homes for saved tensors, on the other machine."""

    def __init__(self, tier: Tier, node: Node) -> None:
        self._tier, self._node = tier, node

    def home(self, nbytes: int) -> NodeHome:
        return NodeHome(self._node, self._tier, nbytes)


def further(tier: Tier, factory: Callable[[torch.device], HomeFactory]) -> dict[str, FurtherTier]:
    """The argument `tiers` of `fit`."""
    return {str(tier): FurtherTier(spec=TierSpec(nbytes=1 << 34, link=LINK), make=factory)}


class TwoHalves(ByteHome):
    """One home cut in two, as two processes would hold it: the cut lies on a page, so that the halves of a small home are unequal.

    `read` and `write` are split at the cut; a visit gathers both halves.
    """

    def __init__(self, halves: tuple[ByteHome, ByteHome], log: list[str]) -> None:
        self.tier, self.nbytes = halves[0].tier, halves[0].nbytes + halves[1].nbytes
        self._halves = halves
        self._cut = halves[0].nbytes
        self._log = log

    def _parts(self, offset: int, nbytes: int) -> list[tuple[ByteHome, int, int, int]]:
        """(half, first byte in it, bytes, first byte in the range) of each half that a range touches."""
        end = offset + nbytes
        parts = [
            (self._halves[0], offset, min(end, self._cut) - offset, 0),
            (
                self._halves[1],
                max(offset, self._cut) - self._cut,
                end - max(offset, self._cut),
                max(0, self._cut - offset),
            ),
        ]
        return [part for part in parts if part[2] > 0]

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        self._log.append("read")
        return All([h.read(first, n, into, into_offset + at) for h, first, n, at in self._parts(offset, nbytes)])

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        self._log.append("write")
        return All([h.write(first, n, source, source_offset + at) for h, first, n, at in self._parts(offset, nbytes)])

    def visit(self, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """The gather: every half brings all of it, whoever asks."""
        self._log.append("gather")
        first, second = self._halves
        return All([first.visit(into, into_offset), second.visit(into, into_offset + self._cut)])

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """The mean over both machines, which have computed the same: exact, as a sum of two equal numbers is."""
        self._log.append("reduce")
        return (gradient + gradient) / 2

    def close(self) -> None:
        for half in self._halves:
            half.close()


class All:
    """Several transfers."""

    def __init__(self, parts: list[TransferHandle]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


class HalvesFactory(HomeFactory):
    """Homes of which two machines hold a half each."""

    def __init__(self, tier: Tier, nodes: tuple[Node, Node], logs: dict[str, list[str]]) -> None:
        self._tier, self._nodes, self._logs = tier, nodes, logs
        self._homes: list[TwoHalves] = []

    def home(self, request: HomeRequest) -> ByteHome:
        cut = min(request.nbytes, -(-request.nbytes // 2 // PAGE) * PAGE)
        halves = tuple(
            NodeHome(node, self._tier, n) for node, n in zip(self._nodes, (cut, request.nbytes - cut), strict=True)
        )
        assert len(halves) == 2
        self._homes.append(TwoHalves(halves, self._logs.setdefault(request.tag, [])))
        return self._homes[-1]

    def close(self) -> None:
        while self._homes:
            self._homes.pop().close()
