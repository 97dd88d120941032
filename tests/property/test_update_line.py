"""The line of updates: pieces of many blocks come, are computed and leave, in order, few at a time, and each block's failure is its own."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.homes.updates import Gate, UpdateWorker

BEGIN, APPLY, LEAVE = "begin", "apply", "leave"


class Trouble(Exception):
    """Planted."""


@dataclass
class Leaving:
    """A transfer home."""

    log: list[tuple[str, int, int]]
    block: int
    piece: int
    fails: bool
    is_over: bool = False

    def wait(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.log.append((LEAVE, self.block, self.piece))
        if self.fails:
            raise Trouble(f"{self.block}.{self.piece}")


@dataclass
class RecordedPieces:
    """What `PieceUpdates` does, noted."""

    lengths: tuple[int, ...]
    troubles: frozenset[tuple[str, int, int]] = frozenset()
    log: list[tuple[str, int, int]] = field(default_factory=list)

    def due(self, block: Any) -> list[Any]:
        return [block]

    def update_at_once(self, block: Any) -> bool:
        return False

    def forget_standing(self) -> None:
        pass

    def groups(self, block: Any) -> list[tuple[int]]:
        return [(piece,) for piece in range(self.lengths[block.index])]

    def begin_together(self, block: Any, group: tuple[int]) -> tuple[int]:
        self._note(BEGIN, block, group[0])
        return group

    def apply_together(self, block: Any, coming: tuple[int]) -> list[Leaving]:
        (piece,) = coming
        self._note(APPLY, block, piece)
        return [Leaving(self.log, block.index, piece, (LEAVE, block.index, piece) in self.troubles)]

    def _note(self, act: str, block: Any, piece: int) -> None:
        self.log.append((act, block.index, piece))
        if (act, block.index, piece) in self.troubles:
            raise Trouble(f"{block.index}.{piece}")


def worker_of(pieces: RecordedPieces) -> UpdateWorker:
    return UpdateWorker(pieces)  # pyright: ignore[reportArgumentType]


def block(index: int) -> Any:
    return SimpleNamespace(index=index, device=torch.device("cpu"), updates_on_host=False)


LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=8).map(tuple)


@st.composite
def stories(draw: st.DrawFn) -> tuple[tuple[int, ...], frozenset[tuple[str, int, int]]]:
    lengths = draw(LENGTHS)
    places = [(act, b, p) for b, n in enumerate(lengths) for p in range(n) for act in (BEGIN, APPLY, LEAVE)]
    troubles = draw(st.sets(st.sampled_from(places), max_size=3)) if places else set()
    return lengths, frozenset(troubles)


@given(story=stories(), is_beside=st.booleans())
def test_each_block_is_updated_whole_in_order_or_fails_alone(
    story: tuple[tuple[int, ...], frozenset[tuple[str, int, int]]], is_beside: bool
) -> None:
    lengths, troubles = story
    pieces = RecordedPieces(lengths, troubles)
    worker = worker_of(pieces)
    failed: set[int] = set()
    transfers = deque[tuple[int, Any]]()
    for b in range(len(lengths)):
        try:
            transfers.append((b, worker.submit(block(b), is_beside=is_beside)))
        except Trouble:
            assert not is_beside
            failed.add(b)
    for b, transfer in transfers:
        try:
            transfer.wait()
        except Trouble:
            failed.add(b)
    worker.close()
    assert failed == {b for _, b, _ in troubles}
    log = pieces.log
    for b, length in enumerate(lengths):
        applied = [p for act, block, p in log if act == APPLY and block == b]
        left = [p for act, block, p in log if act == LEAVE and block == b]
        if b not in failed:
            assert applied == list(range(length)) == left
        clean = [p for p in applied if (APPLY, b, p) not in troubles]
        assert left == clean, "whatever began to leave is waited for before the transfer ends"
    begun = [(b, p) for act, b, p in log if act == BEGIN]
    assert begun == sorted(begun), "pieces come in the order of blocks"
    under_way = 0
    for act, b, p in log:
        under_way += (act == BEGIN and (BEGIN, b, p) not in troubles) - (act == APPLY)
        assert under_way <= 2 + len(failed) * max(lengths), "one is computed while the next comes"
        if not failed:
            assert under_way <= 2


@given(lengths=LENGTHS, opened=st.integers(0, 8))
def test_nothing_is_changed_behind_a_gate_and_a_shut_one_fails(lengths: tuple[int, ...], opened: int) -> None:
    pieces = RecordedPieces(lengths)
    worker = worker_of(pieces)
    gates = [Gate() for _ in lengths]
    transfers = [worker.submit(block(b), gate) for b, gate in enumerate(gates)]
    opened = min(opened, len(lengths))
    for b in range(opened):
        assert not any(act == APPLY and block >= b for act, block, _ in pieces.log)
        gates[b].open()
        transfers[b].wait()
        assert [p for act, block, p in pieces.log if act == APPLY and block == b] == list(range(lengths[b]))
    for gate in gates:
        gate.shut(Trouble("given up"))
    worker.close()
    for b in range(opened, len(lengths)):
        if lengths[b]:
            with pytest.raises(Trouble, match="given up"):
                transfers[b].wait()
    assert not any(act == APPLY and block >= opened for act, block, _ in pieces.log)


def test_what_is_next_comes_while_a_gate_is_closed_and_an_update_alone_ends_at_once() -> None:
    pieces = RecordedPieces((2, 3))
    worker = worker_of(pieces)
    gate = Gate()
    first = worker.submit(block(0))
    first.wait()  # with nothing behind it
    second = worker.submit(block(1), gate)
    for _ in range(2000):
        if (BEGIN, 1, 1) in pieces.log:
            break
        threading.Event().wait(0.005)
    assert [entry for entry in pieces.log if entry[1] == 1] == [(BEGIN, 1, 0), (BEGIN, 1, 1)]
    gate.open()
    second.wait()
    worker.close()
    assert [p for act, b, p in pieces.log if act == APPLY and b == 1] == [0, 1, 2]
