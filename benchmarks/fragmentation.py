"""How much memory a step's tensors need beyond what is live at once: arenas beside torch's caching allocator.

    .venv/bin/python benchmarks/fragmentation.py

The allocations and frees of all storages of a real training step (a small GPT, forward, backward and AdamW) are recorded,
for batches of several lengths one after the other. They are then replayed, without bytes, by: offsets planned from the
lifetimes, an arena with best fit and with first fit (each with the least capacity that serves the trace), an arena that
is defragmented when it refuses, and the rules of torch's CUDA caching allocator (segments reserved, never given back).
"""

from __future__ import annotations

import argparse
import bisect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
from memfit.devices.buffer_arena import Fit, Occupancy, plan_offsets

ALIGNMENT = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.h, for all of them alike
MIB = 1 << 20

Event = tuple[int, int]
"""(storage, bytes): bytes above 0 where it is made, 0 where it dies."""


class Recorder(TorchDispatchMode):
    """Records when storages are made and when the last tensor on them dies."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._live: dict[int, int] = {}
        self._count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes():
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        identity = storage._cdata  # noqa: SLF001 - torch has no public name for "the same storage"
        if identity in self._live:
            return
        number = self._count
        self._count += 1
        self._live[identity] = number
        self.events.append((number, -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT))
        weakref.finalize(storage, self._end, identity)

    def _end(self, identity: int) -> None:
        self.events.append((self._live.pop(identity), 0))


def record(lengths: Sequence[int], layers: int, width: int) -> list[Event]:
    """Runs one step for each length and returns its allocations and frees."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, activation="gelu")
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    head = torch.nn.Linear(width, 2048)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    with Recorder() as recorder:
        for length in lengths:
            logits = head(model(torch.randn(4, length, width)))
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(2048, (4 * length,))).backward()
            del logits
            optimizer.step()
            optimizer.zero_grad()
    return list(recorder.events)


def most_live(events: Sequence[Event]) -> int:
    sizes: dict[int, int] = {}
    live = most = 0
    for number, size in events:
        live += size or -sizes[number]
        sizes[number] = size
        most = max(most, live)
    return most


def planned(events: Sequence[Event]) -> int:
    spans: dict[int, list[int]] = {}
    for moment, (number, size) in enumerate(events):
        if size:
            spans[number] = [moment, len(events), size]
        else:
            spans[number][1] = moment
    return plan_offsets([(start, end, size) for start, end, size in spans.values()], ALIGNMENT)[1]


def serves(events: Sequence[Event], capacity: int, fit: Fit) -> bool:
    occupancy, places = Occupancy(capacity), dict[int, int]()
    try:
        for number, size in events:
            if size:
                places[number] = occupancy.find(size, fit)
                occupancy.take(places[number], size)
            else:
                occupancy.free(places.pop(number))
    except torch.OutOfMemoryError:
        return False
    return True


def least(events: Sequence[Event], fit: Fit) -> int:
    """Returns the least capacity, to 1/256 of the live peak, at which the trace is served."""
    floor = most_live(events)
    step = floor // 256
    return floor + step * bisect.bisect_left(range(256), 1, key=lambda add: serves(events, floor + step * add, fit))


def moved(events: Sequence[Event], capacity: int) -> tuple[int, int]:
    """Replays with defragmentation on refusal; returns how often, and the bytes that moved."""
    occupancy, places = Occupancy(capacity), dict[int, int]()
    times = copied = 0
    for number, size in events:
        if not size:
            occupancy.free(places.pop(number))
            continue
        try:
            place = occupancy.find(size, "best")
        except torch.OutOfMemoryError:
            times += 1
            low = 0
            for owner, offset in sorted(places.items(), key=lambda item: item[1]):
                length = occupancy.sizes[offset]
                if offset != low:
                    occupancy.free(offset)
                    occupancy.take(low, length)
                    places[owner] = low
                    copied += length
                low += length
            place = occupancy.find(size, "best")
        occupancy.take(place, size)
        places[number] = place
    return times, copied


@dataclass
class Piece:
    """A part of a segment."""

    size: int
    is_free: bool = True


class CachingAllocator:
    """The rules of c10/cuda/CUDACachingAllocator.cpp at their defaults: pools, segments, best fit, splits, merges."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._pools: dict[bool, list[list[Piece]]] = {True: [], False: []}
        self._places: dict[int, tuple[list[Piece], Piece]] = {}

    def allocate(self, number: int, size: int) -> None:
        """Takes the smallest free piece of the pool, or reserves a segment."""
        is_small = size <= MIB  # kSmallSize
        pool = self._pools[is_small]
        fitting = [
            (piece.size, segment, piece)
            for segment in pool
            for piece in segment
            if piece.is_free and piece.size >= size
        ]
        if fitting:
            _, segment, piece = min(fitting, key=lambda each: each[0])
        else:
            # kSmallBuffer; kLargeBuffer below kMinLargeAlloc; else rounded to kRoundLarge.
            length = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            piece = Piece(length)
            segment = [piece]
            pool.append(segment)
            self.reserved_bytes += length
        rest = piece.size - size
        if rest >= ALIGNMENT if is_small else rest > MIB:  # should_split
            segment.insert(segment.index(piece) + 1, Piece(rest))
            piece.size = size
        piece.is_free = False
        self._places[number] = (segment, piece)

    def free(self, number: int) -> None:
        """Frees a piece and merges it with free neighbours."""
        segment, piece = self._places.pop(number)
        piece.is_free = True
        at = next(index for index, each in enumerate(segment) if each is piece)
        for neighbour in (at + 1, at - 1):
            if 0 <= neighbour < len(segment) and segment[neighbour].is_free:
                segment[min(neighbour, at)].size += segment[max(at, neighbour)].size
                del segment[max(at, neighbour)]


def reserved(events: Sequence[Event]) -> int:
    allocator = CachingAllocator()
    for number, size in events:
        if size:
            allocator.allocate(number, size)
        else:
            allocator.free(number)
    return allocator.reserved_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    cases = {"one length": [128, 128], "growing": [64, 96, 128, 160], "mixed": [160, 72, 128, 56, 144, 96]}
    ways: dict[str, Callable[[Sequence[Event]], int]] = {
        "planned offsets": planned,
        "arena, best fit": lambda events: least(events, "best"),
        "arena, first fit": lambda events: least(events, "first"),
        "torch's caching rules": reserved,
    }
    rows = []
    for name, lengths in cases.items():
        events = record(lengths, arguments.layers, arguments.width)
        floor = most_live(events)
        times, copied = moved(events, floor)
        row = [name, str(len(events)), f"{floor / MIB:.1f}", *(f"{way(events) / floor:.3f}" for way in ways.values())]
        rows.append([*row, f"{times} times, {copied / MIB:.1f} MiB"])
    headings = ["lengths", "events", "most live, MiB", *ways, "defragmented at the most live"]
    print(common.table(headings, rows))


if __name__ == "__main__":
    main()
