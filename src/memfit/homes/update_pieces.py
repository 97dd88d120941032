"""One piece of a block's update: its bytes are read, the optimizer computes, the new ones are
written home.

In: blocks, their gradients and states, the optimizer. Out: new weights and states at their homes,
piece by piece. The master is what is updated (`homes.weights`, [Note: masters]).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import accumulate
from typing import Any

import torch

from memfit import devices
from memfit.core.layout import FIRST_PIECE_ELEMENTS, PIECE_ELEMENTS
from memfit.core.tiers import Tier
from memfit.homes.gradients import GradientHomes, GradientPiece, flat_gradient
from memfit.homes.home import DONE, ByteHome, TransferHandle, write_tensor
from memfit.homes.memory import HostCopy, StreamCopy
from memfit.homes.optimizer_states import BlockStates, StatePiece
from memfit.homes.staging import PinnedRing, RingPiece
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.optimizers import OptimizerDriver, StandingPart, UpdateKind
from memfit.tensors.noise import RoundingNoise, round_stochastically
from memfit.tensors.trees import typed_view

# Updates of blocks that rest where they are updated: what the optimizer's class is lent stays made
# from step to step.
#
# In: blocks, their gradients and states, the optimizer. Out: new weights and states in their
# places.
#
# [Note: what stands]
# Where nothing of a block comes or goes, each step lends the same memory: the same pieces of
# weights, the same pieces of states. Leaves over them, which the class takes for its parameters,
# are made once and used while that memory is where it was; a step then adds the gradients and
# copies of the numbers. One call of the class takes all pieces of a block. It takes them one by one
# (`OptimizerDriver.takes_one_by_one`), and what it has made for one is there until the next one's
# has been made: so pieces are half as long as those that are updated by themselves, and take no
# more.

# More than any processor computes at once.
_VECTOR_ELEMENTS = 64


@dataclass(frozen=True, kw_only=True)
class _StandingParameter:
    slot: ParameterSlot
    pieces: tuple[tuple[int, int, StandingPart], ...]
    """First element, count, and what is lent."""


@dataclass(frozen=True, kw_only=True)
class _StandingBlock:
    token: tuple[int, ...]
    parameters: tuple[_StandingParameter, ...]


class StandingUpdates:
    """Updates of whole blocks at once. See [Note: what stands].

    Memory: an object of Python for each piece.

    Args:
        driver: the optimizer.
        states: states by block index.
        gradients: gradients of all blocks.
    """

    def __init__(self, driver: OptimizerDriver, states: Mapping[int, BlockStates], gradients: GradientHomes) -> None:
        self._driver = driver
        self._states = states
        self._gradients = gradients
        self._trained = frozenset(driver.names)
        self._kept: dict[int, _StandingBlock] = {}

    def update(self, block: BlockWeights) -> bool:
        """Updates a block in the caller's thread.

        Returns:
            False where something of it comes or goes, or was never updated: nothing was done.
        """
        # Without states: of no parameter that the optimizer updates, or of none so far.
        kept = self._standing(block) if block.index in self._states else None
        if kept is None:
            return False
        due: list[tuple[_StandingParameter, torch.Tensor]] = []
        for parameter in kept.parameters:
            gradient = self._gradients.here.of(parameter.slot)
            if gradient is not None:
                due.append((parameter, gradient))
            elif self._gradients.has(parameter.slot):
                return False  # it rests elsewhere
        states = self._states[block.index]
        # Before a gradient is scaled: states may have been dropped since, and begin anew.
        if not all(states.exists(parameter.slot.name) for parameter, _ in due):
            del self._kept[block.index]
            return False
        lent: list[tuple[StandingPart, torch.Tensor, Mapping[str, Any]]] = []
        names: list[str] = []
        for parameter, gradient in due:
            slot = parameter.slot
            flat = flat_gradient(self._gradients.here.dense_in_place(slot, gradient))
            flat = self._gradients.finish_piece(GradientPiece(slot, flat))
            numbers = states.numbers[slot.name]
            for first, count, part in parameter.pieces:
                lent.append((part, flat if count == slot.numel else flat[first : first + count], numbers))
                names.append(slot.name)
        # A parameter's last piece comes last: its numbers are those that are kept.
        for name, new in zip(names, self._driver.update_standing(lent), strict=True):
            states.numbers[name] = new
        return True

    def forget(self) -> None:
        """Lets go of all that is lent."""
        self._kept.clear()

    def _standing(self, block: BlockWeights) -> _StandingBlock | None:
        kept = self._kept.get(block.index)
        if kept is not None and kept.token == self._token(block):
            return kept
        self._kept.pop(block.index, None)
        if not self._may_stand(block):
            return None
        states, storage = self._states[block.index], block.storage
        length = _piece_length(block)
        parameters: list[_StandingParameter] = []
        for slot in (slot for slot in block.slots if slot.name in self._trained):
            pieces: list[tuple[int, int, StandingPart]] = []
            for first in range(0, slot.numel, length):
                count = min(length, slot.numel - first)
                weight = slot.flat_view(storage)[first : first + count]
                values = states.begin_read(slot, first, count, block.update_device).values()
                pieces.append((first, count, self._driver.stand(slot.name, weight, values)))
            parameters.append(_StandingParameter(slot=slot, pieces=tuple(pieces)))
        made = _StandingBlock(token=self._token(block), parameters=tuple(parameters))
        self._kept[block.index] = made
        return made

    def _may_stand(self, block: BlockWeights) -> bool:
        states = self._states[block.index]
        trained = [slot for slot in block.slots if slot.name in self._trained]
        return (
            self._driver.takes_one_by_one
            and block.update_device.type == "cpu"
            and not block.has_masters
            and not block.updates_on_host
            and not block.travels
            and block.is_here
            and states.rests_on(block.update_device)
            and all(
                slot.shape != ()
                and slot.numel > 0
                and slot.held == range(slot.numel)
                and states.exists(slot.name)
                and self._driver.verdict(slot.name).kind is UpdateKind.ELEMENTWISE
                # Another tensor than one of the weight's size would be lent to several pieces.
                and all(state.is_like_weight for state in states.slots[slot.name])
                for slot in trained
            )
        )

    def _token(self, block: BlockWeights) -> tuple[int, ...]:
        """Returns where the memory of a block lies: of what was lent, nothing may have moved."""
        home = self._states[block.index].home
        memory = None if home is None else home.memory_at(block.update_device)
        return block.storage.data_ptr(), 0 if memory is None else memory.data_ptr(), id(home)


def _piece_length(block: BlockWeights) -> int:
    """Returns the elements of a piece: half of what a piece by itself has at most in this block.

    Of whole vectors, so that the last elements of a weight alone are computed as ends of one.
    """
    alone = min(PIECE_ELEMENTS, max(slot.numel for slot in block.slots))
    return max(_VECTOR_ELEMENTS, alone // 2 // _VECTOR_ELEMENTS * _VECTOR_ELEMENTS)


# Watchers of updates: functions that see each piece of a weight when it has been updated, before it
# goes home.
#
# In: functions of the user's. Out: calls of them, on the thread that updates.


@dataclass(frozen=True, kw_only=True)
class UpdatedPiece:
    """A range of a parameter that was just updated.

    Attributes:
        block: name of the parameter's block.
        name: of the parameter, as in `model.named_parameters()`.
        first: index of the range's first element, in the parameter's memory order.
        weight: the new values, flat; the master's where there is one. Valid during the call only,
            and not to be changed.
        is_last: the parameter's last piece of this step.
        shape, stride: of the whole parameter.
    """

    block: str
    name: str
    first: int
    weight: torch.Tensor
    is_last: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]


UpdateWatcher = Callable[[UpdatedPiece], object]


class UpdateWatchers:
    """Functions that watch updates, in the order in which they came.

    Attributes:
        entries: by the number of a handle (`torch.utils.hooks.RemovableHandle`): a block's name, or
            None for all, and the function.
    """

    def __init__(self) -> None:
        # Ordered: a handle holds it weakly, and plain dictionaries cannot be held so.
        self.entries: OrderedDict[int, tuple[str | None, UpdateWatcher]] = OrderedDict()

    def tell(self, block: str, make: Callable[[], UpdatedPiece]) -> None:
        """Calls those that watch a block.

        Args:
            block: its name.
            make: makes the piece; called only if there is a watcher.
        """
        if not self.entries:
            return
        # A copy: the main thread may remove one while this thread updates.
        for wanted, watcher in tuple(self.entries.values()):
            if wanted is None or wanted == block:
                watcher(make())


@dataclass(frozen=True)
class UpdatePiece:
    """A range of a parameter, in its memory order."""

    slot: ParameterSlot
    first: int
    count: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Coming:
    """A piece whose bytes are being read."""

    piece: UpdatePiece
    weight: torch.Tensor
    ready: TransferHandle
    """Done when the weight has arrived."""
    gradient: GradientPiece
    state: StatePiece
    moved: RingPiece | None = None
    """Pinned memory that the weight lies in, if the host updates it and it lives on the device."""


class Travel(Enum):
    """Says how a block's update travels: not at all, in pieces of bounded size, or with whole
    parameters.
    """

    NONE = auto()
    PIECES = auto()
    WHOLE = auto()


class PieceUpdates:
    """Updates pieces.

    Memory: for each piece that was begun, its weight, gradient and states if they are away;
    temporary memory of the optimizer for one piece.

    Args:
        driver: the optimizer.
        states: states by block index.
        gradients: gradients of all blocks.
        noise: for stochastic rounding of weights from the updated masters; None: to nearest.
        moved: pinned memory for weights on the device that the host updates; None if there are
            none.
        watchers: see each piece when it has been updated.
    """

    def __init__(
        self,
        driver: OptimizerDriver,
        states: Mapping[int, BlockStates],
        gradients: GradientHomes,
        *,
        noise: RoundingNoise | None = None,
        moved: PinnedRing | None = None,
        watchers: UpdateWatchers | None = None,
    ) -> None:
        self._driver = driver
        self._watchers = UpdateWatchers() if watchers is None else watchers
        self._moved = moved
        self.trained = frozenset(driver.names)
        self._states = dict(states)
        self._gradients = gradients
        self._noise = noise
        self._standing = StandingUpdates(driver, states, gradients)

    def forget_standing(self) -> None:
        """Lets go of blocks' memory that stays lent: an object that outlives a plan (a frame of the
        step that is made again under another one) would keep all states alive.
        """
        self._standing.forget()

    def update_at_once(self, block: BlockWeights) -> bool:
        """Updates a block in the caller's thread, where nothing of it comes or goes and nobody
        watches its pieces.

        Returns:
            False: nothing was done; it goes piece by piece.
        """
        # Watchers see pieces of a weight before the next one is changed.
        return not self._watchers.entries and self._standing.update(block)

    def cut(self, block: BlockWeights) -> Iterator[UpdatePiece]:
        """Yields the pieces of a block that this process holds; parameters without a gradient are
        skipped, as by `optimizer.step`.
        """
        for slot in self.due(block):
            is_elementwise, held = self._is_elementwise(slot), slot.held
            # Whoever needs a whole parameter has all of it: shares of such optimizers are of whole
            # parameters.
            assert is_elementwise or len(held) in (0, slot.numel)
            if not held and slot.numel:
                continue
            size = (
                PIECE_ELEMENTS
                if self._states[block.index].exists(slot.name)
                else min(FIRST_PIECE_ELEMENTS, PIECE_ELEMENTS)
            )
            if not is_elementwise:
                size = max(slot.numel, 1)
            starts = range(held.start, max(held.stop, held.start + 1), size)
            for start in starts:
                count = min(size, held.stop - start)
                yield UpdatePiece(slot, start, count, start == starts[0], start == starts[-1])

    def groups(self, block: BlockWeights) -> Iterator[tuple[UpdatePiece, ...]]:
        """Yields the pieces of `cut`, those together that one step of the optimizer's class
        updates: whole parameters of a block all of which rests where it is updated, or is updated
        by an accelerator.

        Memory: of what comes and goes, that of the largest piece. So is the temporary memory: the
        class takes parameters one by one, or else the elements of a group are not more than those
        of the largest piece of their dtype.
        """
        pieces = list(self.cut(block))
        is_resident = bool(pieces) and self._is_resident(block)
        if not is_resident:
            # The largest parameters first: behind a large piece and two small ones the next large
            # one would not be read until the first was home.
            pieces.sort(key=lambda piece: -len(piece.slot.held))
        # Beside an accelerator a piece waits for what the one before the last takes home: many
        # small ones would each wait behind a large one.
        if len(pieces) < 2 or not (is_resident or devices.is_accelerator(block.device)):
            yield from ((piece,) for piece in pieces)
            return
        largest: dict[torch.dtype, int] = {}
        for piece in pieces:
            dtype = piece.slot.master_dtype
            largest[dtype] = max(largest.get(dtype, 0), piece.count)
        # Elsewhere the class may hold temporary memory for all of a group at once.
        is_one_by_one = is_resident and self._driver.takes_one_by_one and block.update_device.type == "cpu"
        group: list[UpdatePiece] = []
        elements = 0
        for piece in pieces:
            is_whole = piece.is_first and piece.is_last and self._is_elementwise(piece.slot)
            # Of one dtype, since those that pass through pinned memory lie there one behind the
            # other.
            is_like = not group or is_one_by_one or piece.slot.master_dtype is group[0].slot.master_dtype
            if group and not (
                is_whole and is_like and (is_one_by_one or elements + piece.count <= largest[piece.slot.master_dtype])
            ):
                yield tuple(group)
                group, elements = [], 0
            group.append(piece)
            elements += piece.count
            if not is_whole:
                yield tuple(group)
                group, elements = [], 0
        if group:
            yield tuple(group)

    def travel(self, block: BlockWeights) -> Travel:
        """Tells what of a block's update comes or goes."""
        due = self.due(block)
        masters = block.master_home if block.has_masters else None
        # By where things rest, not by what is there: states that a first update makes would else
        # leave a stream of its own memory that nothing ever uses again.
        rests = (
            not block.travels
            and (masters is None or masters.memory_at(block.update_device) is not None)
            and self._states[block.index].rests_on(block.update_device)
            and all(self._gradients.here.of(slot) is not None for slot in due)
        )
        if rests:
            return Travel.NONE
        return Travel.PIECES if all(self._is_elementwise(slot) for slot in due) else Travel.WHOLE

    def homes(self, block: BlockWeights) -> list[ByteHome]:
        """Returns all homes that pieces of a block come from or go to."""
        homes = block.home, block.master_home, self._states[block.index].home, self._gradients.homes.get(block.index)
        return [home for home in homes if home is not None]

    def lay_out(self, block: BlockWeights) -> None:
        """Brings gradients on the device into the memory order of their parameters, in the caller's
        stream, where they were made and go.
        """
        for slot in self.due(block):
            if (gradient := self._gradients.here.of(slot)) is not None:
                self._gradients.here.dense_in_place(slot, gradient)

    def lend_numbers(self, block: BlockWeights, stream: torch.Stream) -> None:
        """Lets a stream read numbers of states that an update has made on the device: their memory
        is not used again before that stream is through.
        """
        for numbers in self._states[block.index].numbers.values():
            for value in numbers.values():
                if isinstance(value, torch.Tensor) and value.device.type == stream.device.type:
                    value.record_stream(stream)

    def _is_resident(self, block: BlockWeights) -> bool:
        """Tells whether nothing of the block's update comes or goes."""
        states = self._states[block.index]
        slots = self.due(block)
        return (
            not block.has_masters
            and not block.updates_on_host
            and not block.travels
            and states.rests_on(block.update_device)
            and all(states.exists(s.name) and self._gradients.here.of(s) is not None for s in slots)
        )

    def due(self, block: BlockWeights) -> list[ParameterSlot]:
        """Returns the parameters of a block that are to be updated in this step."""
        return [slot for slot in block.slots if slot.name in self.trained and self._gradients.has(slot)]

    def _is_elementwise(self, slot: ParameterSlot) -> bool:
        return self._driver.verdict(slot.name).kind is UpdateKind.ELEMENTWISE

    def begin_together(self, block: BlockWeights, group: Sequence[UpdatePiece]) -> tuple[Coming, ...]:
        """Begins to read a group of `groups`."""
        # All reads begin before any is waited for: they come beside the piece that is updated now.
        # Pinned memory is taken last: whoever fails before has taken none.
        states = self._states[block.index]
        beside = [
            (
                self._gradients.begin_piece(block, piece.slot, piece.first, piece.count),
                states.begin_read(piece.slot, piece.first, piece.count, block.update_device),
            )
            for piece in group
        ]
        weights = (
            self._begin_in_ring(block, group)
            if _comes_through_ring(block)
            else [(*self._begin_weight(block, piece), None) for piece in group]
        )
        return tuple(
            Coming(piece, weight, ready, gradient, state, moved)
            for piece, (weight, ready, moved), (gradient, state) in zip(group, weights, beside, strict=True)
        )

    def _begin_in_ring(
        self, block: BlockWeights, group: Sequence[UpdatePiece]
    ) -> list[tuple[torch.Tensor, TransferHandle, RingPiece | None]]:
        """Begins to read weights that come down from the device, one behind the other into one
        piece of pinned memory.
        """
        home = block.master_home
        assert home is not None
        places = [0, *accumulate(piece.count * piece.slot.master_dtype.itemsize for piece in group)]
        # Taken in the order in which groups begin: the ring has room for one that leaves, one in
        # work, one that comes.
        moved = _taken(self._moved, places[-1])
        begun: list[tuple[torch.Tensor, TransferHandle, RingPiece | None]] = []
        for piece, at in zip(group, places, strict=False):
            dtype = piece.slot.master_dtype
            offset = piece.slot.master_offset_bytes + piece.first * dtype.itemsize
            # The ring hands this memory out again only when the last copy into it is done: it must
            # know it. Those of a group are in order on one stream.
            ready = home.read(offset, piece.count * dtype.itemsize, moved.storage, at)
            assert isinstance(ready, HostCopy)
            moved.busy = ready.copy
            begun.append((typed_view(moved.storage, at, dtype, (piece.count,)), ready, moved))
        return begun

    def _begin_weight(self, block: BlockWeights, piece: UpdatePiece) -> tuple[torch.Tensor, TransferHandle]:
        slot, device = piece.slot, block.update_device
        if block.is_here and not block.has_masters and not block.updates_on_host:
            return slot.flat_view(block.storage)[piece.first : piece.first + piece.count], DONE
        home = block.master_home
        assert home is not None
        offset, nbytes = piece.first * slot.master_dtype.itemsize, piece.count * slot.master_dtype.itemsize
        offset += slot.master_offset_bytes
        if (resting := home.memory_at(device)) is not None:
            return typed_view(resting, home.place(offset), slot.master_dtype, (piece.count,)), DONE
        # Nothing else holds this memory while bytes arrive: the handle and the piece do.
        weight = torch.empty(piece.count, dtype=slot.master_dtype, device=device)
        return weight, home.read(offset, nbytes, weight.untyped_storage())

    def apply_together(self, block: BlockWeights, group: Sequence[Coming]) -> list[TransferHandle]:
        """Updates a group of `groups`, and begins to write it home."""
        if len(group) == 1:
            return self.apply(block, group[0])
        states = self._states[block.index]
        lent = [(coming.piece.slot.name, coming.weight, *_arrived(coming, self._gradients, states)) for coming in group]
        found = self._driver.update_together(lent)
        return [h for coming, new in zip(group, found, strict=True) for h in self._keep(block, coming, new)]

    def apply(self, block: BlockWeights, coming: Coming) -> list[TransferHandle]:
        """Waits for a piece, updates it, and begins to write it home."""
        piece, weight = coming.piece, coming.weight
        slot = piece.slot
        states = self._states[block.index]
        gradient, values = _arrived(coming, self._gradients, states)
        if not self._is_elementwise(slot):
            weight, gradient = (t.as_strided(slot.shape, slot.stride) for t in (weight, gradient))
            for placed in states.slots[slot.name]:
                if placed.is_like_weight and placed.key in values:
                    values[placed.key] = values[placed.key].as_strided(slot.shape, slot.stride)
        new = self._driver.update(slot.name, weight, gradient, values, first=piece.is_first, last=piece.is_last)
        return self._keep(block, replace(coming, weight=weight), new)

    def _keep(self, block: BlockWeights, coming: Coming, new: dict[str, Any]) -> list[TransferHandle]:
        """Begins to write an updated piece home."""
        piece, weight, states = coming.piece, coming.weight, self._states[block.index]
        slot = piece.slot
        self._watchers.tell(block.name, lambda: _updated(block, piece, weight))
        if not self._is_elementwise(slot):
            new = {
                key: _in_memory_order(value, slot) if _is_like(states, slot, key) else value
                for key, value in new.items()
            }
        # Before the numbers (counts of steps) are kept: where a write cannot begin, no count is
        # ahead of its states.
        leaving = states.write(slot, piece.first, piece.count, new, block.update_device)
        if piece.is_last:
            states.keep_numbers(slot, new)
        if block.has_masters:
            leaving += _write_masters(block, piece, weight)
            return leaving + (
                self._give_weight(block, piece, weight)
                if block.updates_on_host
                else _write_rounded(block, piece, self._rounded(piece, weight))
            )
        if coming.moved is not None:
            return [*leaving, _send(block, piece, weight, coming.moved)]
        return leaving + _write_weight(block, piece, weight)

    def _rounded(self, piece: UpdatePiece, master: torch.Tensor) -> torch.Tensor:
        """Returns the values that the weight is rounded from: the new master, or with noise the
        rounded weight already.
        """
        slot, flat = piece.slot, master.as_strided((piece.count,), (1,))
        if self._noise is None or slot.dtype is not torch.bfloat16:
            return flat
        return round_stochastically(
            flat, self._noise.bits(f"{slot.name}/weight", piece.first, piece.count, flat.device)
        )

    def _give_weight(self, block: BlockWeights, piece: UpdatePiece, master: torch.Tensor) -> list[TransferHandle]:
        """Rounds a new piece of a weight on the host: into its home there, or into memory from
        which it leaves for its home.
        """
        home, slot = block.home, piece.slot
        assert home is not None
        flat = self._rounded(piece, master)
        offset = slot.offset_bytes + piece.first * slot.dtype.itemsize
        if (resting := home.memory_at(block.update_device)) is not None:
            # In place: whoever asked for the update has waited for all kernels and copies that read
            # the weight (`homes.updates`).
            typed_view(resting, home.place(offset), slot.dtype, (piece.count,)).copy_(flat)
            return []
        if home.tier is not Tier.DEVICE:
            return [_write(home, slot.offset_bytes, piece, flat.to(slot.dtype))]
        # Waits for the copy that used this pinned piece last: the stream may read it still.
        moved = _taken(self._moved, piece.count * slot.dtype.itemsize)
        weight = typed_view(moved.storage, 0, slot.dtype, (piece.count,)).copy_(flat)
        return [_send(block, piece, weight, moved)]


def _comes_through_ring(block: BlockWeights) -> bool:
    """Tells whether a block's weights come down from the device to be updated on the host."""
    home = block.master_home
    return block.updates_on_host and not block.has_masters and home is not None and home.tier is Tier.DEVICE


def _taken(ring: PinnedRing | None, nbytes: int) -> RingPiece:
    assert ring is not None, "a weight on the device is updated on the host without pinned memory to pass through"
    return ring.take(nbytes)


def _arrived(coming: Coming, gradients: GradientHomes, states: BlockStates) -> tuple[torch.Tensor, dict[str, Any]]:
    """Waits for a piece. Returns its gradient, and the values of its states."""
    # All three must have arrived before the optimizer's class sees any: it may read and write each
    # of them in any order.
    gradient = gradients.finish_piece(coming.gradient)
    coming.ready.wait()
    coming.state.ready.wait()
    return gradient, {**states.numbers.get(coming.piece.slot.name, {}), **coming.state.values()}


def _updated(block: BlockWeights, piece: UpdatePiece, weight: torch.Tensor) -> UpdatedPiece:
    slot = piece.slot
    return UpdatedPiece(
        block=block.name,
        name=slot.name,
        first=piece.first,
        # In memory order: an optimizer that needs whole parameters has given it their shape.
        weight=weight.detach().as_strided((piece.count,), (1,)),
        is_last=piece.is_last,
        shape=tuple(slot.shape),
        stride=tuple(slot.stride),
    )


def _write_masters(block: BlockWeights, piece: UpdatePiece, master: torch.Tensor) -> list[TransferHandle]:
    """Writes a new piece of a master home, unless it was changed in place."""
    masters = block.master_home
    assert masters is not None
    is_there = masters.memory_at(block.update_device) is not None
    return [] if is_there else [_write(masters, piece.slot.master_offset_bytes, piece, master)]


def _write_weight(block: BlockWeights, piece: UpdatePiece, weight: torch.Tensor) -> list[TransferHandle]:
    """Writes a new piece of a weight home, unless it was changed in place."""
    home, slot = block.home, piece.slot
    assert home is not None
    is_there = home.memory_at(block.update_device) is not None
    if not block.travels or (is_there and (block.updates_on_host or not block.is_here)):
        return []
    return [_write(home, slot.offset_bytes, piece, weight)]


def _write_rounded(block: BlockWeights, piece: UpdatePiece, flat: torch.Tensor) -> list[TransferHandle]:
    """Rounds a new piece of a weight into the place of the weight."""
    home, slot = block.home, piece.slot
    assert home is not None
    place = slot.flat_view(block.storage)[piece.first : piece.first + piece.count] if block.is_here else None
    weight = flat.to(slot.dtype) if place is None else place.copy_(flat)
    return [_write(home, slot.offset_bytes, piece, weight)] if block.travels else []


def _send(block: BlockWeights, piece: UpdatePiece, weight: torch.Tensor, moved: RingPiece) -> TransferHandle:
    """Begins to copy a new piece of a weight at home on the device from pinned memory."""
    assert block.home is not None
    leaving = _write(block.home, piece.slot.offset_bytes, piece, weight)
    assert isinstance(leaving, StreamCopy)
    # Before the ring comes round: else the next piece is written over bytes that still leave.
    moved.busy = leaving
    return leaving


def _write(home: ByteHome, offset_bytes: int, piece: UpdatePiece, dense: torch.Tensor) -> TransferHandle:
    return write_tensor(home, offset_bytes + piece.first * dense.element_size(), dense)


def _is_like(states: BlockStates, slot: ParameterSlot, key: str) -> bool:
    return any(placed.key == key and placed.is_like_weight for placed in states.slots[slot.name])


def _in_memory_order(value: torch.Tensor, slot: ParameterSlot) -> torch.Tensor:
    if tuple(value.stride()) != slot.stride:
        value = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((slot.numel,), (1,))
