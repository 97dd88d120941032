"""Optimizer states at home.

In: the layout of each parameter's state in the optimizer. Out: pieces of it in memory for an
update, and their way back home.

Tensors of a parameter's size (momentum) and of other sizes (row factors) lie in one byte range for
each block; single numbers (step counts) stay in memory. If the plan says so, running means are
stored in fewer bits (`core.storage_formats`, [Note: state formats]): they are decoded when a
piece's values are read and encoded when it is written; homes see bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.core.layout import flat_layout
from memfit.core.storage_formats import StateFormat, StateMoment, moment_of, records_of
from memfit.core.tiers import Tier
from memfit.homes.home import DONE, ByteHome, TransferGroup, TransferHandle, write_tensor
from memfit.homes.state_codecs import StateCodec, codec_of
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.optimizers import StateTensor
from memfit.tensors.noise import RoundingNoise
from memfit.tensors.trees import new_storage, typed_view

# Optimizer states of which each process that trains the model has a share: how they become whole.
#
# In: this process's part. Out: whole values. Made by `mesh`.


class StateRanks:
    """Processes that have shares of optimizer states; abstract. Its methods are collective."""

    def first_known(
        self, numbers: Mapping[str, Any] | None, block: BlockWeights, slot: ParameterSlot
    ) -> dict[str, Any] | None:
        """Returns the numbers of a parameter's state, of the first process that has any; None if
        none has.
        """
        raise NotImplementedError

    def home(self, local: ByteHome | None, tensor: StateTensor, block: BlockWeights, slot: ParameterSlot) -> ByteHome:
        """Returns a home of a whole state tensor, whose gathers are collective.

        Args:
            local: of the values that this process has; None if it has none.
            tensor: of the state.
            block: of the parameter.
            slot: of the parameter.
        """
        raise NotImplementedError

    def assemble(
        self,
        own: torch.Tensor | None,
        numel: int,
        dtype: torch.dtype,
        block: BlockWeights,
        slot: ParameterSlot,
        *,
        is_like: bool,
    ) -> torch.Tensor:
        """Returns a whole state tensor, 1-D.

        Args:
            own: the values that this process has; None if it has none.
            numel: of the whole.
            dtype: of the whole.
            block: of the parameter.
            slot: of the parameter.
            is_like: it is cut as the parameter is; else one process has all of it.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StateSlot:
    """Place of one state tensor of a parameter in its block's state range, and its format (None:
    not encoded).

    `first`, `numel`: the elements that this process has of a tensor of the parameter's size; all of
    them if no home is shared.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    offset_bytes: int
    is_like_weight: bool
    codec: StateCodec | None = None
    first: int = 0

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Returns offset and bytes, in the range, of elements [first, first + count); `first` must
        begin a record.
        """
        first -= self.first
        if self.codec is not None:
            return self.offset_bytes + self.codec.records.offset(first), self.codec.records.size(count)
        return self.offset_bytes + first * self.dtype.itemsize, count * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StateRest:
    """Formats of a run's states at home.

    Attributes:
        format: format of the states that may be encoded.
        kept: names of parameters whose states are not encoded (weights of embeddings).
        noise: for stochastic rounding.
    """

    format: StateFormat = StateFormat.GIVEN
    kept: Collection[str] = frozenset()
    noise: RoundingNoise

    def moment(self, name: str, tensor: StateTensor, layout: Sequence[StateTensor]) -> StateMoment | None:
        """Returns the quantity whose mean a state of a parameter is; None if it is not encoded."""
        return encoded_moment(self.format, self.kept, name, tensor, layout)


def encoded_moment(
    chosen: StateFormat, kept: Collection[str], name: str, tensor: StateTensor, layout: Sequence[StateTensor]
) -> StateMoment | None:
    """Returns the quantity whose mean a state is; None if the format does not encode it."""
    if chosen is StateFormat.GIVEN or name in kept or tensor.shape_kind != "like":
        return None
    keys = [t.key for t in layout]
    return moment_of(tensor.key, keys, tensor.numel, str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True, kw_only=True)
class StoredStates:
    """Sizes of a parameter's states at home.

    Attributes:
        nbytes: bytes of their elements, as they are moved.
        home_bytes: bytes at home, each state on pages of its own.
        encoded: number of encoded elements.
    """

    nbytes: int
    home_bytes: int
    encoded: int


def stored_states(chosen: StateFormat, kept: Collection[str], name: str, layout: Sequence[StateTensor]) -> StoredStates:
    """Returns the sizes of a parameter's states in a format."""
    sizes: list[int] = []
    encoded = 0
    for tensor in layout:
        if tensor.shape_kind == "scalar":
            continue
        if encoded_moment(chosen, kept, name, tensor, layout) is None:
            sizes.append(tensor.nbytes)
        else:
            sizes.append(records_of(chosen).size(tensor.numel))
            encoded += tensor.numel
    return StoredStates(nbytes=sum(sizes), home_bytes=flat_layout(sizes)[1], encoded=encoded)


def embedding_names(model: torch.nn.Module) -> frozenset[str]:
    """Returns the names of parameters that embeddings read rows of, whose states are not
    encoded.
    """
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    owned = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    return frozenset(name for name, p in model.named_parameters() if id(p) in owned)


class BlockStates:
    """One block's optimizer states.

    Memory: `nbytes` at the home; numbers in memory; pieces while an update runs.

    Args:
        block: its weights.
        layout: by parameter name, the tensors of its state ("scalar" ones are kept in memory).
        rest: formats of the states.
        ranks: the processes that share the states; None: this one has all. Then each has those of
            its elements, in a range of its own.
    """

    def __init__(
        self,
        block: BlockWeights,
        layout: Mapping[str, Sequence[StateTensor]],
        rest: StateRest | None = None,
        ranks: StateRanks | None = None,
    ) -> None:
        self.block = block
        self._ranks = ranks
        self._rest = rest if rest is not None else StateRest(noise=RoundingNoise(seed=0))
        placed: list[tuple[ParameterSlot, StateTensor, StateCodec | None]] = []
        for slot in block.slots:
            own = layout.get(slot.name, ())
            for t in own:
                # A tensor of another size is the whole parameter's, and lies where that does.
                if t.shape_kind != "scalar" and (slot.held or not slot.numel):
                    moment = self._rest.moment(slot.name, t, own)
                    placed.append((slot, t, codec_of(self._rest.format, moment) if moment is not None else None))
        counts = [len(slot.held) if t.shape_kind == "like" else t.numel for slot, t, _ in placed]
        sizes = [
            count * (t.dtype or torch.float32).itemsize if codec is None else codec.records.size(count)
            for (_, t, codec), count in zip(placed, counts, strict=True)
        ]
        offsets, self.nbytes = flat_layout(sizes)
        self.slots: dict[str, list[StateSlot]] = {slot.name: [] for slot in block.slots}
        for (slot, t, codec), offset, count in zip(placed, offsets, counts, strict=True):
            self.slots[slot.name].append(
                StateSlot(
                    key=t.key,
                    dtype=t.dtype or torch.float32,
                    shape=tuple(t.shape),
                    numel=count,
                    offset_bytes=offset,
                    is_like_weight=t.shape_kind == "like",
                    codec=codec,
                    first=slot.held.start if t.shape_kind == "like" else 0,
                )
            )
        self._layout = dict(layout)
        self.numbers: dict[str, dict[str, Any]] = {}
        self.home: ByteHome | None = None

    @property
    def ends(self) -> list[int]:
        """Returns the offset at which each tensor ends at home; the next one begins on another
        page.
        """
        return [sum(state.span(state.first, state.numel)) for states in self.slots.values() for state in states]

    def exists(self, name: str) -> bool:
        """Tells whether the parameter has states: it has been updated, or came with them."""
        return name in self.numbers

    def rests_on(self, device: torch.device) -> bool:
        """Tells whether all states lie in memory of the device, as they are computed with."""
        home = self.home
        is_plain = all(state.codec is None for states in self.slots.values() for state in states)
        return is_plain and (home is None or home.memory_at(device) is not None)

    def begin_read(self, slot: ParameterSlot, first: int, count: int, device: torch.device | None = None) -> StatePiece:
        """Begins to read elements [first, first + count) of each state tensor of the weight's size,
        and other tensors whole.

        Args:
            slot: the parameter's.
            first: element.
            count: of elements.
            device: destination; None: the weights' device.
        """
        device = slot.parameter.device if device is None else device
        tensors: dict[str, torch.Tensor] = {}
        handles: list[TransferHandle] = []
        if self.exists(slot.name):
            for state in self.slots[slot.name]:
                tensor, handle = self._bring(state, first, count, device)
                tensors[state.key] = tensor
                handles.append(handle)
        return StatePiece(self, slot, first, count, tensors, TransferGroup(handles))

    def _bring(
        self, state: StateSlot, first: int, count: int, device: torch.device
    ) -> tuple[torch.Tensor, TransferHandle]:
        """Begins to read a range of a state tensor: its values, or their records as uint8."""
        assert self.home is not None
        offset, nbytes, dtype, shape = _range(state, first, count)
        if (resting := self.home.memory_at(device)) is not None:
            return typed_view(resting, offset, dtype, shape), DONE
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor, self.home.read(offset, nbytes, tensor.untyped_storage())

    def write(
        self,
        slot: ParameterSlot,
        first: int,
        count: int,
        values: Mapping[str, Any],
        device: torch.device | None = None,
    ) -> list[TransferHandle]:
        """Begins to write a piece of a parameter's state home. Tensors that already lie there
        (memory homes) are not copied.

        Args:
            slot: the parameter's.
            first: element.
            count: of elements.
            values: tensors by state.
            device: device of the values; None: the weights' device.
        """
        device = slot.parameter.device if device is None else device
        handles: list[TransferHandle] = []
        for state in self.slots[slot.name]:
            value = values.get(state.key)
            if value is None:
                continue
            assert self.home is not None
            offset, _, dtype, shape = _range(state, first, count)
            memory = self.home.memory_at(device)
            resting = None if memory is None else typed_view(memory, offset, dtype, shape)
            if state.codec is not None:
                dense = resting if resting is not None else torch.empty(shape, dtype=dtype, device=value.device)
                state.codec.encode(value.reshape(-1), dense, self._rest.noise, f"{slot.name}/{state.key}", first)
            elif resting is not None:
                if resting.data_ptr() != value.data_ptr():
                    resting.copy_(value.reshape(shape))
                continue
            else:
                dense = value.contiguous()
            if resting is None:
                handles.append(write_tensor(self.home, offset, dense))
        return handles

    def keep_numbers(self, slot: ParameterSlot, values: Mapping[str, Any]) -> None:
        """Stores the numbers of a parameter's state (after its last piece)."""
        placed = {state.key for state in self.slots[slot.name]}
        self.numbers[slot.name] = {key: value for key, value in values.items() if key not in placed}

    def gather(self, slot: ParameterSlot) -> dict[str, Any]:
        """Returns the parameter's state as the optimizer would hold it, in memory of its own. Empty
        before its first update.
        """
        if self._ranks is not None:
            return self._gather_over(self._ranks, slot)
        if not self.exists(slot.name):
            return {}
        piece = self.begin_read(slot, 0, slot.numel)
        values: dict[str, Any] = {}
        piece.ready.wait()
        found = piece.values()
        for state in self.slots[slot.name]:
            tensor = found[state.key]
            if state.is_like_weight:
                own = torch.empty_strided(slot.shape, slot.stride, dtype=state.dtype, device=tensor.device)
                own.as_strided((slot.numel,), (1,)).copy_(tensor.reshape(-1))
                values[state.key] = own
            else:
                values[state.key] = tensor.clone()
        for key, value in self.numbers[slot.name].items():
            values[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return values

    def _gather_over(self, ranks: StateRanks, slot: ParameterSlot) -> dict[str, Any]:
        """Gathers a parameter's state from all processes that have a share of it; collective."""
        # Only those of a process that updates the parameter: others keep what they were given once.
        known = self.numbers.get(slot.name) if slot.held or not slot.numel else None
        numbers = ranks.first_known(known, self.block, slot)
        if numbers is None:
            return {}
        piece = self.begin_read(slot, slot.held.start, len(slot.held))
        piece.ready.wait()
        found, values = piece.values(), dict[str, Any]()
        for t in self._layout.get(slot.name, ()):
            if t.shape_kind == "scalar":
                continue
            own, dtype = found.get(t.key), t.dtype or torch.float32
            shape = slot.shape if t.shape_kind == "like" else tuple(t.shape)
            flat = None if own is None else own.reshape(-1)
            whole = ranks.assemble(flat, t.numel, dtype, self.block, slot, is_like=t.shape_kind == "like")
            values[t.key] = whole.as_strided(shape, slot.stride) if t.shape_kind == "like" else whole.view(shape)
        return values | numbers

    def gather_shapes(self, slot: ParameterSlot) -> dict[str, Any]:
        """Returns what `gather` would, with fake tensors for those that rest at home."""
        if not self.exists(slot.name):
            return {}
        values: dict[str, Any] = {}
        with FakeTensorMode():
            for state in self.slots[slot.name]:
                values[state.key] = (
                    torch.empty_strided(slot.shape, slot.stride, dtype=state.dtype)
                    if state.is_like_weight
                    else torch.empty(state.shape, dtype=state.dtype)
                )
        return values | dict(self.numbers[slot.name])

    def learn_numbers(self) -> None:
        """Learns the numbers of parameters of which only other processes have a share; collective.
        Nothing, where this process has all states.
        """
        for slot in self.block.slots if self._ranks is not None else ():
            known = self.numbers.get(slot.name) if slot.held or not slot.numel else None
            numbers = self._ranks.first_known(known, self.block, slot) if self._ranks is not None else None
            if numbers is not None and known is None:
                self.numbers[slot.name] = numbers

    def whole_homes(self, slot: ParameterSlot) -> Iterator[tuple[StateTensor, ByteHome]] | None:
        """Yields a parameter's state tensors, each with a home of its decoded whole whose gathers
        are collective; None where this process has all states.
        """
        return None if self._ranks is None else self._whole_homes(self._ranks, slot)

    def _whole_homes(self, ranks: StateRanks, slot: ParameterSlot) -> Iterator[tuple[StateTensor, ByteHome]]:
        own = {state.key: state for state in self.slots[slot.name]}
        for t in self._layout.get(slot.name, ()):
            state = own.get(t.key)
            local: ByteHome | None = None
            if state is not None and self.home is not None:
                local = StateValues(self.home, state) if state.codec is None else DecodedState(self.home, state)
            if t.shape_kind != "scalar":
                yield t, ranks.home(local, t, self.block, slot)

    def put(self, slot: ParameterSlot, values: Mapping[str, Any]) -> None:
        """Writes a whole state (as `gather` returns it) home.

        Memory: one tensor of it, where it is not as it lies at home.
        """
        if not values:
            self.numbers.pop(slot.name, None)
            return
        held, placed = slot.held, set[str]()
        for state in self.slots[slot.name]:
            value = values.get(state.key)
            if value is None:
                continue
            if state.is_like_weight:
                value = self._as_at_home(slot, state, value)[held.start : held.stop]
            # One after the other: copies of all would be in memory at once.
            TransferGroup(self.write(slot, held.start, len(held), {state.key: value})).wait()
            placed.add(state.key)
        keys = {t.key for t in self._layout.get(slot.name, ()) if t.shape_kind != "scalar"}
        self.keep_numbers(slot, {k: v for k, v in values.items() if k not in placed and k not in keys})

    def _as_at_home(self, slot: ParameterSlot, state: StateSlot, value: torch.Tensor) -> torch.Tensor:
        """Returns a state tensor of the weight's size as a 1-D tensor in the weight's memory order,
        where it can be written from.
        """
        device = slot.parameter.device
        # From the host straight to a home on the device, which holds it as it is.
        is_near = value.device == device or (state.codec is None and self._rests_at(device))
        if not (is_near and value.dtype == state.dtype and tuple(value.stride()) == slot.stride):
            value = torch.empty_strided(slot.shape, slot.stride, dtype=state.dtype, device=device).copy_(value)
        return value.as_strided((slot.numel,), (1,))

    def _rests_at(self, device: torch.device) -> bool:
        return self.home is not None and self.home.memory_at(device) is not None


@dataclass
class StatePiece:
    """A piece of one parameter's state that is being read; `tensors` as they lie at home."""

    states: BlockStates
    slot: ParameterSlot
    first: int
    count: int
    tensors: dict[str, torch.Tensor]
    ready: TransferHandle

    def values(self) -> dict[str, torch.Tensor]:
        """Returns the states' values, once `ready`: encoded ones decoded, in memory of their own;
        others in place.
        """
        codecs = {state.key: state.codec for state in self.states.slots[self.slot.name]}
        return {
            key: tensor if (codec := codecs[key]) is None else codec.decode(tensor, self.count)
            for key, tensor in self.tensors.items()
        }


class StateValues(ByteHome):
    """Home of one state tensor that is not encoded: the part that this process has, from 0 on.

    Args:
        home: home of the block's states.
        state: the state.
    """

    def __init__(self, home: ByteHome, state: StateSlot) -> None:
        self.tier: Tier = home.tier
        self.nbytes = state.numel * state.dtype.itemsize
        self._home = home
        self._offset = state.offset_bytes

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        return self._home.read(self._offset + offset, nbytes, into, into_offset)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """Not supported: states are written through `BlockStates`."""
        raise NotImplementedError("a state is written through BlockStates")


class DecodedState(ByteHome):
    """Home of one encoded state tensor, read as fp32 values, so that saves hold what the optimizer
    would.

    Memory: during a read, its records and values.

    Args:
        home: home of the block's states.
        state: an encoded state.
    """

    tier = Tier.DEVICE

    def __init__(self, home: ByteHome, state: StateSlot) -> None:
        self.nbytes = state.numel * state.dtype.itemsize
        self._home = home
        self._state = state

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`; complete on return."""
        state, size = self._state, self._state.dtype.itemsize
        assert state.codec is not None
        first, count = state.first + offset // size, nbytes // size
        skipped = first % state.codec.records.elements
        begin, length = state.span(first - skipped, skipped + count)
        staged = new_storage(length)
        self._home.read(begin, length, staged).wait()
        values = state.codec.decode(typed_view(staged, 0, torch.uint8, (length,)), skipped + count)
        typed_view(into, into_offset, state.dtype, (count,)).copy_(values[skipped:])
        return DONE

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """Not supported: states are written through `BlockStates`."""
        raise NotImplementedError("an encoded state is written through BlockStates")


def _range(state: StateSlot, first: int, count: int) -> tuple[int, int, torch.dtype, tuple[int, ...]]:
    """Returns offset and bytes of a piece of a state tensor at home, and the dtype that they are
    moved as. Encoded ones are moved as bytes; tensors of other sizes than the weight's are moved
    whole.
    """
    if not state.is_like_weight:
        return state.offset_bytes, state.numel * state.dtype.itemsize, state.dtype, state.shape
    offset, nbytes = state.span(first, count)
    return (offset, nbytes, state.dtype, (count,)) if state.codec is None else (offset, nbytes, torch.uint8, (nbytes,))
