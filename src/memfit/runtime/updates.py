"""Updates where the state lives, beside the backward of the blocks below.

In: blocks whose gradients are complete. Out: new weights and states at their homes. One worker thread takes blocks in order; each parameter is
updated in pieces small enough for the processor's cache, and the next piece's transfers run while one is computed. What is updated is the master
(`runtime.weights`, [Note: masters]).

[Note: threads of an update]
The worker touches a block's weights, gradients and states only between `submit` and the end of its ticket; the engine frees or
fetches that block only after waiting for the ticket. Autograd meanwhile works on blocks below. Elementwise updates give the same bits on any number of
threads, so the worker computes on one and leaves the others to backward; updates that need whole parameters (they contain reductions) run with the
main thread's count, because the order of a reduction follows it. Where nothing is waited for, a worker beside backward only takes one of its cores, and
the other cores wait for the slower one: then each update runs at once, on all of them.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfit.runtime.gradients import GradientHomes, GradientPiece
from memfit.runtime.homes.base import DONE, ByteHome, Ticket, Tickets, write_tensor
from memfit.runtime.noise import RoundingNoise, round_stochastically
from memfit.runtime.optimizers import OptimizerDriver, UpdateKind
from memfit.runtime.states import BlockStates, StatePiece
from memfit.runtime.trees import typed_view
from memfit.runtime.weights import PIECE_ELEMENTS, BlockWeights, Slot


@dataclass(frozen=True)
class _Piece:
    slot: Slot
    first: int
    count: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class _Coming:
    """A piece whose bytes are on their way."""

    piece: _Piece
    weight: torch.Tensor
    ready: Ticket
    """The weight is here."""
    gradient: GradientPiece
    state: StatePiece


class UpdateTicket:
    """The update of one block, under way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Called by the worker."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Returns when the block's new weights and states are home; an exception of a signal handler comes through only then."""
        try:
            self._done.wait()
        except BaseException:
            self._done.wait()
            raise
        if self._error is not None:
            raise self._error


class UpdateWorker:
    """Runs updates in a thread of its own, in the order of `submit`.

    Memory: three pieces of weight (if it is away), gradient (if it is away) and states (if they are away).

    Args:
        driver: the optimizer.
        states: by block index.
        gradients: where gradients are.
        is_beside: False runs each update inside `submit` (used where overlapping cannot help).
        noise: weights are rounded stochastically from what the update made; None: to nearest.
    """

    def __init__(
        self,
        driver: OptimizerDriver,
        states: Mapping[int, BlockStates],
        gradients: GradientHomes,
        *,
        is_beside: bool = True,
        noise: RoundingNoise | None = None,
    ) -> None:
        self._driver = driver
        self._trained = frozenset(driver.names)
        self._states = dict(states)
        self._gradients = gradients
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], UpdateTicket] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_beside = is_beside
        self._noise = noise
        self.updated_blocks: list[int] = []

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that the optimizer updates."""
        return self._trained

    def submit(self, block: BlockWeights) -> Ticket:
        """Begins the update of a block; parameters without a gradient are left alone, as `optimizer.step` leaves them."""
        ticket = UpdateTicket()
        if not any(self._is_due(slot) for slot in block.slots):
            ticket.finish()
            return ticket
        self.updated_blocks.append(block.index)
        if not self._is_beside:
            self._update(block)
            ticket.finish()
            return ticket
        if self._thread is None:
            self._thread = _start_worker(self._jobs)
            # A worker that is dropped without `close` ends its thread as well: the thread refers to the queue only.
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put((lambda: self._update(block), ticket))
        return ticket

    def close(self) -> None:
        """Ends the thread after the updates that were submitted."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _update(self, block: BlockWeights) -> None:
        with torch.no_grad():
            pieces = list(self._pieces(block))
            leaving: list[Ticket] = []
            coming = self._begin(block, pieces[0])
            try:
                for index in range(len(pieces)):
                    here, coming = coming, (self._begin(block, pieces[index + 1]) if index + 1 < len(pieces) else None)
                    assert here is not None
                    # The piece before goes home and the next one comes while this one is computed: three are in memory.
                    before, leaving = leaving, self._apply(block, here)
                    Tickets(before).wait()
            finally:
                Tickets(leaving).wait()

    def _pieces(self, block: BlockWeights) -> Iterator[_Piece]:
        for slot in block.slots:
            if not self._is_due(slot):
                continue
            size = PIECE_ELEMENTS if self._is_elementwise(slot) else max(slot.numel, 1)
            starts = range(0, max(slot.numel, 1), size)
            for start in starts:
                count = min(size, slot.numel - start)
                yield _Piece(slot, start, count, start == 0, start == starts[-1])

    def _is_due(self, slot: Slot) -> bool:
        return slot.name in self._trained and self._gradients.has(slot)

    def _is_elementwise(self, slot: Slot) -> bool:
        return self._driver.verdict(slot.name).kind is UpdateKind.ELEMENTWISE

    def _begin(self, block: BlockWeights, piece: _Piece) -> _Coming:
        slot = piece.slot
        gradient = self._gradients.begin_piece(block, slot, piece.first, piece.count)
        state = self._states[block.index].begin_read(slot, piece.first, piece.count)
        return _Coming(piece, *self._begin_weight(block, piece), gradient, state)

    def _begin_weight(self, block: BlockWeights, piece: _Piece) -> tuple[torch.Tensor, Ticket]:
        slot = piece.slot
        if block.is_here and not block.has_masters:
            return slot.flat_view(block.storage)[piece.first : piece.first + piece.count], DONE
        home = block.master_home
        assert home is not None
        offset = slot.master_offset_bytes + piece.first * slot.master_dtype.itemsize
        if home.memory is not None:
            return typed_view(home.memory, offset, slot.master_dtype, (piece.count,)), DONE
        weight = torch.empty(piece.count, dtype=slot.master_dtype, device=slot.parameter.device)
        return weight, home.read(offset, piece.count * slot.master_dtype.itemsize, weight.untyped_storage())

    def _apply(self, block: BlockWeights, coming: _Coming) -> list[Ticket]:
        piece, weight, state = coming.piece, coming.weight, coming.state
        slot = piece.slot
        states = self._states[block.index]
        gradient = self._gradients.finish_piece(coming.gradient)
        coming.ready.wait()
        state.ready.wait()
        values: dict[str, Any] = {**states.numbers.get(slot.name, {}), **state.values()}
        if not self._is_elementwise(slot):
            weight, gradient = (t.as_strided(slot.shape, slot.stride) for t in (weight, gradient))
            for placed in states.slots[slot.name]:
                if placed.is_like_weight and placed.key in values:
                    values[placed.key] = values[placed.key].as_strided(slot.shape, slot.stride)
        new = self._driver.update(slot.name, weight, gradient, values, first=piece.is_first, last=piece.is_last)
        if not self._is_elementwise(slot):
            new = {
                key: _in_memory_order(value, slot) if _is_like(states, slot, key) else value
                for key, value in new.items()
            }
        leaving = states.write(slot, piece.first, piece.count, new)
        if piece.is_last:
            states.keep_numbers(slot, new)
        if block.has_masters:
            return leaving + _write_masters(block, piece, weight, self._noise)
        return leaving + _write_weight(block, piece, weight)


def _write_weight(block: BlockWeights, piece: _Piece, weight: torch.Tensor) -> list[Ticket]:
    """Takes a new piece of a weight home, unless it was changed where it rests."""
    home, slot = block.home, piece.slot
    assert home is not None
    if not block.travels or (home.memory is not None and not block.is_here):
        return []
    return [_write(home, slot.offset_bytes, piece, weight)]


def _write_masters(
    block: BlockWeights, piece: _Piece, master: torch.Tensor, noise: RoundingNoise | None
) -> list[Ticket]:
    """Takes a new piece of a master home, and the weight rounded from it to wherever weights are."""
    masters, home, slot = block.master_home, block.home, piece.slot
    assert masters is not None and home is not None
    leaving = [] if masters.memory is not None else [_write(masters, slot.master_offset_bytes, piece, master)]
    flat = master.as_strided((piece.count,), (1,))
    if noise is not None and slot.dtype is torch.bfloat16:
        flat = round_stochastically(flat, noise.bits(f"{slot.name}/weight", piece.first, piece.count, flat.device))
    place = slot.flat_view(block.storage)[piece.first : piece.first + piece.count] if block.is_here else None
    weight = flat.to(slot.dtype) if place is None else place.copy_(flat)
    if block.travels:
        leaving.append(_write(home, slot.offset_bytes, piece, weight))
    return leaving


def _write(home: ByteHome, offset_bytes: int, piece: _Piece, dense: torch.Tensor) -> Ticket:
    return write_tensor(home, offset_bytes + piece.first * dense.element_size(), dense)


def _is_like(states: BlockStates, slot: Slot, key: str) -> bool:
    return any(placed.key == key and placed.is_like_weight for placed in states.slots[slot.name])


def _in_memory_order(value: torch.Tensor, slot: Slot) -> torch.Tensor:
    if tuple(value.stride()) != slot.stride:
        value = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((slot.numel,), (1,))


def _start_worker(jobs: queue.SimpleQueue[Any]) -> threading.Thread:
    thread = threading.Thread(target=_work, args=(jobs,), name="memfit-update", daemon=True)
    thread.start()
    return thread


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], None], UpdateTicket] | None]) -> None:
    while (job := jobs.get()) is not None:
        run, ticket = job
        try:
            run()
        except BaseException as error:  # noqa: BLE001, raised where the ticket is waited for
            ticket.finish(error)
        else:
            ticket.finish()
        del run, ticket, job
