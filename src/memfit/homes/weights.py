"""Blocks of weights and their visits.

In: the parameters of a block and a home. Out: the same parameters as views of one flat buffer that
has its bytes while the block visits.

[Note: visits by storage identity]
A block's parameters are views of one storage. A visit gives that storage its bytes (`resize_(n)`)
and fills it in one transfer; release takes the bytes away (`resize_(0)`). The storage *object*
stays, so whatever autograd saved (the weight, its transpose, any view) finds the bytes again at the
next visit: saved references cost nothing and nothing is saved twice. `resize_` and a transfer into
the storage do not touch version counters, so autograd's in-place check keeps working on what the
user does. A storage that NumPy has seen, or that lies in shared memory, cannot be resized: it stays
with whoever holds it, and the block goes on with a new one.

[Note: did a weight change?]
What the user's code writes to a weight that has a copy elsewhere would be lost. Nobody asks version
counters alone, which most roads pass by. `job.weights()` compares checksums of all bytes from
before and after. While a block visits, a mark on its storage (`tensors.write_marks`) proves that
nobody wrote; where the mark is gone the bytes are compared with those at home. A block whose
kernels ask for writable memory at every visit and never write is compared ever more seldom, so that
its reads do not cost twice; its version counters are asked each time. Marks end where an update of
the engine begins. Weights that rest on the device are marked while they have masters, or a store:
what differs from its master becomes the master, and the next commit writes it.

[Note: masters]
With a compute dtype, a floating parameter is kept twice: its *master* in fp32, laid out like the
weights in a home of its own, and the weight in the compute dtype, rounded from it, which is all
that visits. Updates change the master and write the rounded weight beside it. Where there is no
compute dtype the weight is its own master, and every master_* figure of a slot equals that of the
weight. Gradients add up in the master's dtype and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from memfit.core.errors import PeerError, UnsupportedError
from memfit.core.layout import PIECE_ELEMENTS, flat_layout
from memfit.core.storage_formats import ComputeDtype, stored_dtypes
from memfit.core.tiers import Tier
from memfit.homes.home import ByteHome, TransferGroup, TransferHandle, dense_copy, dense_stride, write_tensor
from memfit.store.checksums import checksum_of_memory
from memfit.tensors.guard import (
    Kept,
    changed_attribute,
    is_away,
    keep_attributes,
    mark_away,
    mark_present,
    put_back,
    refused_change,
)
from memfit.tensors.trees import bytes_view, new_storage, typed_view
from memfit.tensors.write_marks import address_of, alias_of, has_mark, put_mark, take_mark_off

_COMPARED_BYTES = 1 << 20
_FEW_ALARMS = 8


@dataclass(frozen=True, kw_only=True)
class ParameterSlot:
    """Place of one parameter in its block's flat buffer, and its dense layout there.

    `held`: the elements, in memory order, whose master and states this process updates: all of
    them, if no home is shared. `master_*`: the same for its master, in the layout of masters and
    gradients. `given_dtype`: the parameter's dtype before `move_in`. See [Note: masters].
    """

    name: str
    parameter: torch.nn.Parameter
    offset_bytes: int
    nbytes: int
    numel: int
    requires_grad: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    given_dtype: torch.dtype
    master_dtype: torch.dtype
    master_offset_bytes: int
    master_nbytes: int
    held: range

    def view(self, storage: torch.UntypedStorage, base_bytes: int = 0) -> torch.Tensor:
        """Returns the parameter's view of a storage that is laid out as the block's flat
        buffer.
        """
        return typed_view(storage, base_bytes + self.offset_bytes, self.dtype, self.shape, self.stride)

    def flat_view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the same bytes as a 1-D tensor of `numel` elements, in memory order."""
        return typed_view(storage, self.offset_bytes, self.dtype, (self.numel,))


class BlockWeights:
    """One block's parameters, their flat buffer and their home.

    Life: made over ordinary parameters (nothing moves) -> `move_in(home)` (bytes go to the flat
    layout in the home) -> any number of fetch / wait / release -> `move_out` (the parameters own
    ordinary memory again).

    With a compute dtype the block has a second home, `master_home`; see [Note: masters]. The
    Parameters are of the compute dtype from `move_in` to `move_out`, which gives the masters back.

    Memory: the flat buffer (`nbytes`) while it visits or lives on the device; nothing while away.

    Args:
        index: of the block.
        name: of the block.
        parameters: by name, dense.
        compute_dtype: dtype of the visiting weights.
        held: by parameter, the elements that this process updates; None: all.

    Attributes:
        updates_on_host: updates run on the host's cores, beside an accelerator: they work at the
            homes and touch nothing of a visit.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        compute_dtype: ComputeDtype = ComputeDtype.GIVEN,
        held: Sequence[range] | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.has_masters = compute_dtype.has_masters
        self.updates_on_host = False
        dtypes = [_stored_dtypes(p.dtype, compute_dtype) for _, p in parameters]
        sizes = [
            (p.numel() * own.itemsize, p.numel() * full.itemsize)
            for (_, p), (own, full) in zip(parameters, dtypes, strict=True)
        ]
        offsets, self.nbytes = flat_layout([size for size, _ in sizes])
        master_offsets, self.master_nbytes = flat_layout([size for _, size in sizes])
        all_held = [range(p.numel()) for _, p in parameters] if held is None else held
        self.slots = tuple(
            ParameterSlot(
                name=n,
                parameter=p,
                offset_bytes=offset,
                nbytes=nbytes,
                numel=p.numel(),
                requires_grad=p.requires_grad,
                dtype=dtype,
                shape=tuple(p.shape),
                stride=dense_stride(n, p),
                given_dtype=p.dtype,
                master_dtype=master_dtype,
                master_offset_bytes=master_offset,
                master_nbytes=master_nbytes,
                held=own,
            )
            for (n, p), offset, master_offset, (nbytes, master_nbytes), (dtype, master_dtype), own in zip(
                parameters, offsets, master_offsets, sizes, dtypes, all_held, strict=True
            )
        )
        self.home: ByteHome | None = None
        self._masters: ByteHome | None = None
        self._storage: torch.UntypedStorage | None = None
        self._alias = torch.empty(0)  # of the storage, for marks
        self._is_here = True
        self._arriving: TransferHandle | None = None
        self._attributes: list[Kept] = []
        self._watched_versions: tuple[int, ...] | None = None
        self._false_alarms = 0

    @property
    def device(self) -> torch.device:
        """Device of the visits."""
        return self.slots[0].parameter.device

    @property
    def update_device(self) -> torch.device:
        """Device on which the optimizer updates the block's pieces."""
        return torch.device("cpu") if self.updates_on_host else self.device

    @property
    def storage(self) -> torch.UntypedStorage:
        """The flat buffer; has no bytes while the block is away."""
        assert self._storage is not None, f"block {self.name} has not moved in"
        return self._storage

    @property
    def is_here(self) -> bool:
        """True if the bytes are on the device, or arriving."""
        return self._is_here

    @property
    def arrived_storage(self) -> torch.UntypedStorage | None:
        """The flat buffer while it holds the bytes; None while they are away or arriving."""
        return self._storage if self._is_here and self._arriving is None else None

    @property
    def travels(self) -> bool:
        """True if visits bring the weights."""
        return self.home is not None and not _rests_here(self.home)

    @property
    def master_home(self) -> ByteHome | None:
        """Home of the masters; the weights' own home if there is no compute dtype."""
        return self._masters if self.has_masters else self.home

    def move_in(
        self,
        home: ByteHome,
        masters: ByteHome | None = None,
        bring: Callable[[Iterable[torch.nn.Parameter]], None] | None = None,
        staged: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Moves the parameters' bytes into the home and makes the parameters views of the flat
        buffer.

        Memory: for a home that is away, the peak does not grow: each parameter is freed once
        written; one whose elements lie in another order is there twice for a moment. A device home
        is the flat buffer itself and costs one block more, unless the values are staged. With
        `bring`, one parameter more. With masters, some pieces of 2 MiB more.

        Args:
            home: a home of `nbytes`.
            masters: a home of `master_nbytes`, if there is a compute dtype.
            bring: materializes a parameter without bytes; called for one at a time.
            staged: the values, as `staged_blocks.StagedBlock` holds them.
        """
        assert (masters is not None) == self.has_masters
        resting = home.memory if _rests_here(home) else None
        assert resting is not None or not _rests_here(home)
        device = self.device
        for n, slot in enumerate(self.slots):
            p = slot.parameter
            if bring is not None and staged is None:
                bring([p])
            with torch.no_grad():
                _put(slot, p.data if staged is None else staged[n], home, masters)
                # Only when the home has the values (`_put` waits): this frees the only other copy.
                p.data = torch.empty(0, dtype=slot.dtype, device=p.device)
        self._place_in(home, masters, resting, device)

    def rest_in(self, home: ByteHome, masters: ByteHome | None = None) -> None:
        """Moves in as `move_in` does, with homes that hold the values already; the parameters' own
        memory is freed.

        Memory: none; a device home is the flat buffer itself.

        Args:
            home: a filled home of `nbytes`.
            masters: a filled home of `master_nbytes`, if there is a compute dtype.
        """
        assert (masters is not None) == self.has_masters
        resting = home.memory if _rests_here(home) else None
        device = self.device
        for slot in self.slots:
            mark_present(slot.parameter)  # first: one that is away refuses to be given data
            slot.parameter.data = torch.empty(0, dtype=slot.dtype, device=device)
        self._place_in(home, masters, resting, device)

    def _place_in(
        self, home: ByteHome, masters: ByteHome | None, resting: torch.UntypedStorage | None, device: torch.device
    ) -> None:
        """Makes the parameters views of the flat buffer."""
        # `set_` wants the storage at full size; its pages are not touched before they are given
        # back.
        storage = resting if resting is not None else new_storage(self.nbytes, device)
        for slot in self.slots:
            slot.parameter.data = slot.view(storage)
        self._attributes = [keep_attributes(slot.parameter) for slot in self.slots]
        self._storage, self._alias, self.home, self._masters = storage, alias_of(storage), home, masters
        if resting is None:
            self._leave()  # last: parameters that are away refuse to be given data

    def move_out(
        self, *, as_given: bool = False, take_back: Callable[[str, torch.nn.Parameter], bool] | None = None
    ) -> None:
        """Gives every parameter ordinary memory of its own again, its master where it has one; the
        block no longer travels.

        Memory: the block's bytes (of its masters), for good; one parameter more for a moment.

        Args:
            as_given: returns parameters in the dtype that they had at first, if that was not the
                master's.
            take_back: asked first, by name; a parameter for which it returns True never was in
                memory, and is not read.
        """
        self.wait()  # the buffer is freed below: a transfer may be filling it
        for slot in self.slots:
            parameter = slot.parameter
            if take_back is not None and take_back(slot.name, parameter):
                continue
            own = torch.empty_strided(slot.shape, slot.stride, dtype=slot.master_dtype, device=parameter.device)
            if self._masters is None and self._is_here:
                own.copy_(slot.view(self.storage))
            else:
                assert self.master_home is not None
                self.master_home.gather(slot.master_offset_bytes, slot.master_nbytes, own.untyped_storage()).wait()
            mark_present(parameter)
            if slot.dtype != own.dtype:
                parameter.grad = None  # it is of the compute dtype, as the values no longer are
            parameter.data = own.to(slot.given_dtype) if as_given else own
        # Behind the last parameter: where one cannot be read, the block is whole for another try.
        take_mark_off(self.storage)
        if not _is_held(self.storage):
            self.storage.resize_(0)
        self._storage, self._alias, self.home, self._masters = None, torch.empty(0), None, None
        self._is_here = True

    def give_up(self) -> None:
        """Frees the parameters' bytes, here and at home. They keep shape and identity, so that
        another block can hold them.
        """
        if self.home is None:
            return
        if self._arriving is not None:
            self._arriving.wait()  # before the bytes go: it writes to their address
            self._arriving = None
        self._leave()
        self.home, self._masters = None, None

    def fetch(self) -> None:
        """Begins a visit; does nothing if the block is here or coming."""
        if self._is_here:
            return
        assert self.home is not None
        self.storage.resize_(self.nbytes)  # first: the transfer is given these bytes' address
        try:
            self._arriving = self.home.visit(self.storage)
        except BaseException:
            self.storage.resize_(0)  # away, and without bytes that nobody would free
            raise
        self._is_here = True

    def wait(self) -> None:
        """Waits until the bytes are here; the parameters are usable then."""
        if self._arriving is None:
            return
        arriving, self._arriving = self._arriving, None  # off first: an error is told once
        try:
            arriving.wait()
        except PeerError:
            # Other ranks may write to this memory still: it must stay until their group is gone.
            self._arriving = arriving
            raise
        except Exception:
            self._leave()  # no values came: a block that counted as here would use these bytes
            raise
        except BaseException:
            self._arriving = arriving  # Ctrl-C: the transfer goes on, and its memory must stay
            raise
        for slot in self.slots:
            mark_present(slot.parameter)  # not before: what has not come must not be read
        self.watch_writes()

    def release(self, *, forgets_arrival: bool = False) -> None:
        """Ends a visit: the device memory is freed. Changes must have been written home before.

        Args:
            forgets_arrival: the transfer failed on another rank, and nothing writes any more.
        """
        if not self._is_here or not self.travels:
            return
        if forgets_arrival:
            self._arriving = None
        self.wait()  # where nobody used the visit: its transfer ends before its memory goes
        self._leave()

    def take_back_changes(self) -> UnsupportedError | None:
        """Puts parameters that are here back onto the flat buffer, so that homes, parameters and
        the next visit agree.

        Returns:
            A description of the first parameter that was changed; None if none was.
        """
        # While bytes arrive the parameters refuse all questions, and nobody can have changed them.
        if not self._is_here or self._arriving is not None or self._storage is None:
            return None
        first: UnsupportedError | None = None
        is_shared = self.travels and _is_in_shared_memory(self._storage)
        for slot, kept in zip(self.slots, self._attributes, strict=True):
            p, what = slot.parameter, None
            if p.dtype != slot.dtype or p.shape != slot.shape:
                what = f"became {tuple(p.shape)} of {p.dtype}, from {slot.shape} of {slot.dtype},"
            elif slot.numel and not _lies_at(p, self._storage, slot):
                what = "was given other memory (parameter.data = ...)"
            elif is_shared:
                what = "was put into memory that processes share"
            if what is not None:
                p.data = slot.view(self._storage)  # while the buffer has bytes: not after a release
            attribute = changed_attribute(kept) if kept else None
            if attribute is not None:
                put_back(kept)
                what = what or f"had its attribute {attribute!r} changed"
            if what is not None and first is None:
                first = refused_change(slot.name, self.name, what)
        return first

    def write_home(self, changed: Collection[str]) -> TransferHandle | None:
        """Begins to write the visiting bytes home, after they were changed on the device. Changed
        parameters become the masters too.

        Args:
            changed: names of parameters.
        """
        # Masters are home on return; the weights' bytes must stay until the handle was waited for.
        if self._masters is not None:
            for slot in self.slots:
                if slot.name in changed:
                    write_masters(self._masters, slot, slot.parameter.data)
        if not self.travels:
            return None
        assert self.home is not None
        return self.home.write(0, self.nbytes, self.storage)

    # --- writes of the user's, see [Note: did a weight change?] ----------------------------------

    def begin_changes(self) -> dict[str, int]:
        """Begins changes of the user's, which are kept: returns a checksum of each parameter's
        bytes.
        """
        self._watched_versions = None
        return {slot.name: _checksum(bytes_view(self.storage, slot.offset_bytes, slot.nbytes)) for slot in self.slots}

    def changed_since(self, before: Mapping[str, int]) -> list[str]:
        """Returns the names of parameters whose bytes are not those of `begin_changes`."""
        now = self.begin_changes()
        return [name for name in now if now[name] != before[name]]

    def watch_writes(self) -> None:
        """Begins to watch for writes of the user's, to bytes that are here and equal those at
        home.
        """
        self._watched_versions = self._versions()
        put_mark(self._alias)

    @property
    def may_be_written(self) -> bool:
        """True if somebody may have written since the watch began; False if nobody watches."""
        before = self._watched_versions
        return before is not None and (before != self._versions() or not has_mark(self._alias))

    def written_since_watch(self) -> list[str]:
        """Ends the watch. Returns the names of parameters that the user's code has changed since,
        and that have other values at home, or in their masters; none where nobody watched.
        """
        before, self._watched_versions = self._watched_versions, None
        if before is None or not self._is_here or not (self.travels or self.has_masters):
            return []
        is_asked, is_counted = not has_mark(self._alias), before != self._versions()
        # The engine writes next, in threads of its own.
        take_mark_off(self.storage)
        self._false_alarms += 1 if is_asked else -self._false_alarms
        is_seldom = self._false_alarms > _FEW_ALARMS and self._false_alarms & (self._false_alarms - 1)
        if not is_counted and (is_seldom or not is_asked):
            return []
        return [slot.name for slot in self.slots if any(self._differences(slot))]

    def _versions(self) -> tuple[int, ...]:
        return tuple(slot.parameter._version for slot in self.slots)

    def _differences(self, slot: ParameterSlot) -> Iterator[bool]:
        """Compares a parameter's values here with those at home, or with this process's share of
        them; of a block that rests here, with its masters. Yields whether pieces differ.
        """
        home, size = self.home, slot.dtype.itemsize
        assert home is not None
        begin, end = slot.offset_bytes, slot.offset_bytes + slot.nbytes
        if home.is_shared:
            first = -home.place(0)
            begin, end = max(begin, first), min(end, first + home.own.nbytes)
        for at in range(begin, end, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, end - at)
            here = bytes_view(self.storage, at, count)
            if self.travels:
                resting = new_storage(count, self.device)
                home.read(at, count, resting).wait()
                yield not torch.equal(bytes_view(resting, 0, count), here)
                continue
            assert self._masters is not None
            master = torch.empty(count // size, dtype=slot.master_dtype, device=self.device)
            place = slot.master_offset_bytes + (at - slot.offset_bytes) // size * slot.master_dtype.itemsize
            self._masters.read(place, master.nbytes, master.untyped_storage()).wait()
            yield not torch.equal(master.to(slot.dtype).view(torch.uint8), here)

    def _leave(self) -> None:
        # Kernels that read these bytes may be enqueued still: the caching allocator gives memory
        # to later work of their stream only. Copies on other streams must have been waited for.
        take_mark_off(self.storage)  # before its bytes go: torch does not take it off with them
        if _is_held(self.storage):
            self._take_new_storage()
        else:
            # The object stays: what autograd saved finds its next bytes by it.
            self.storage.resize_(0)
        self._is_here, self._watched_versions = False, None
        # Nothing of the user's may run in between: reading freed bytes crashes the process.
        for slot in self.slots:
            mark_away(slot.parameter, slot.name, self.name)

    def _take_new_storage(self) -> None:
        """Leaves the storage to whoever looks at its bytes from outside of torch."""
        device = self.device
        for slot in self.slots:
            slot.parameter.data = torch.empty(0, dtype=slot.dtype, device=device)
        # Gone before the next one comes, unless somebody holds it.
        self._storage, self._alias = None, torch.empty(0)
        self._storage = new_storage(self.nbytes, device)
        self._alias = alias_of(self._storage)
        for slot in self.slots:
            slot.parameter.data = slot.view(self._storage)
        self._storage.resize_(0)


def master_pieces(block: BlockWeights, offset: int, nbytes: int) -> Iterator[tuple[ParameterSlot, int, int, int]]:
    """Cuts a range within one parameter: (slot, first element, elements, offset in the range)."""
    if not nbytes:
        return
    slot = next(s for s in block.slots if s.master_offset_bytes <= offset < s.master_offset_bytes + s.master_nbytes)
    begin, size = offset - slot.master_offset_bytes, slot.master_dtype.itemsize
    assert begin % size == 0 and begin + nbytes <= slot.master_nbytes
    first, end = begin // size, (begin + nbytes) // size
    for start in range(first, end, PIECE_ELEMENTS):
        yield slot, start, min(PIECE_ELEMENTS, end - start), (start - first) * size


def put_values(block: BlockWeights, slot: ParameterSlot, values: torch.Tensor) -> None:
    """Sets a parameter's values at home (and here, if home is the device). The block must be away,
    or live on the device.

    Memory: one parameter in the compute dtype, and two pieces of 2 MiB.

    Args:
        block: the parameter's block.
        slot: the parameter's slot.
        values: of its shape, in the master's dtype.
    """
    # A visit would hide the new values, and an update during it write the old ones home again.
    assert block.home is not None and (not block.travels or not block.is_here)
    with torch.no_grad():
        _put(slot, values, block.home, block.master_home if block.has_masters else None)


def check_untouched(blocks: Iterable[BlockWeights]) -> None:
    """Checks that parameters that are here are views of their flat buffers, after all were put
    back, and that nobody wrote to visiting ones. Raises `UnsupportedError`.

    See [Note: what a visit may not change] and [Note: did a weight change?].
    """
    # All are put back before the first is told: a release would lose the others.
    chosen = tuple(blocks)
    changes = [change for block in chosen if (change := block.take_back_changes()) is not None]
    if changes:
        raise changes[0]
    for block in chosen:
        if block.travels:
            check_unwritten(block)


def check_unwritten(block: BlockWeights) -> None:
    """Ends the watch of a visit's writes. Raises `UnsupportedError` if the user's code changed a
    weight in it: only updates go home.
    """
    written = block.written_since_watch()
    if written:
        raise UnsupportedError(
            f"the model's code changed the weight {written[0]!r} in place while it visited; the change would be lost, since only updates go home. Change weights "
            f"between steps, inside `with job.weights({block.name!r}):`"
        )


def _stored_dtypes(dtype: torch.dtype, compute: ComputeDtype) -> tuple[torch.dtype, torch.dtype]:
    """See `core.storage_formats.stored_dtypes`."""
    weight, master = stored_dtypes(str(dtype).removeprefix("torch."), compute)
    return getattr(torch, weight), getattr(torch, master)


def _put(slot: ParameterSlot, values: torch.Tensor, home: ByteHome, masters: ByteHome | None) -> None:
    """Writes a parameter's values to its homes, and waits."""
    if masters is not None:
        values = values.to(slot.parameter.device)  # staged ones lie on the host
        write_masters(masters, slot, values)
    resting = home.memory if _rests_here(home) else None
    if resting is not None:
        slot.view(resting).copy_(values)
        return
    dense = values if tuple(values.stride()) == slot.stride else dense_copy(values, slot.stride, values.dtype)
    # Waited for here: the caller frees the values, and `dense` goes with this frame.
    TransferGroup(_begin_write(home, slot.offset_bytes, dense, slot.numel, slot.dtype)).wait()


def write_masters(home: ByteHome, slot: ParameterSlot, values: torch.Tensor) -> None:
    """Writes a parameter's values to the place of its master and waits. Costs a piece of 2 MiB
    where dtype or memory order differ.
    """
    dense = values if tuple(values.stride()) == slot.stride else dense_copy(values, slot.stride, values.dtype)
    TransferGroup(begin_write_masters(home, slot, dense)).wait()


def begin_write_masters(home: ByteHome, slot: ParameterSlot, dense: torch.Tensor) -> list[TransferHandle]:
    """Begins to write values in a parameter's memory order to the place of its master. If they are
    widened, all but the last piece of 2 MiB are home on return.
    """
    return _begin_write(home, slot.master_offset_bytes, dense, slot.numel, slot.master_dtype)


def _begin_write(
    home: ByteHome, offset: int, dense: torch.Tensor, numel: int, dtype: torch.dtype
) -> list[TransferHandle]:
    if dense.dtype == dtype:
        return [write_tensor(home, offset, dense)]
    handles: list[TransferHandle] = []
    flat = dense.as_strided((numel,), (1,))
    for start in range(0, numel, PIECE_ELEMENTS):
        piece = flat[start : start + PIECE_ELEMENTS].to(dtype)
        TransferGroup(handles).wait()  # else all converted pieces would be in memory at once
        handles = [write_tensor(home, offset + start * dtype.itemsize, piece)]
    return handles


def _lies_at(parameter: torch.Tensor, storage: torch.UntypedStorage, slot: ParameterSlot) -> bool:
    """True if a parameter is its slot of a storage. By identity: to ask for addresses takes
    marks off.
    """
    return (
        parameter.untyped_storage()._cdata == storage._cdata
        and parameter.storage_offset() * slot.dtype.itemsize == slot.offset_bytes
        and parameter.stride() == slot.stride
    )


def _is_held(storage: torch.UntypedStorage) -> bool:
    """True if NumPy, or another process, may look at a storage's bytes: they must stay."""
    return not storage.resizable() or _is_in_shared_memory(storage)


def _is_in_shared_memory(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu" and storage.is_shared()


def _checksum(content: torch.Tensor) -> int:
    """Returns the CRC-32C of bytes; those of an accelerator pass through the host in pieces."""
    checksum = 0
    for piece in content.split(_COMPARED_BYTES) if content.numel() else ():
        here = piece.cpu()
        checksum = checksum_of_memory(address_of(here), here.numel(), checksum)
    return checksum


def _rests_here(home: ByteHome) -> bool:
    return home.tier is Tier.DEVICE and not home.is_shared and not home.is_encoded


# A block's values on the host for a moment, where the device has no room for them and for the home
# that they move into.
#
# In: a block that has not moved in. Out: its values in host memory; its parameters without bytes.


class StagedBlock:
    """The values of a block's parameters, each in the memory order that it has at home.

    Memory: the block's bytes on the host; those on the device are freed.

    Args:
        block: its parameters are whole on the device.
        ledger: context in which host memory is allocated.

    Attributes:
        values: by slot.
    """

    def __init__(self, block: BlockWeights, ledger: Callable[[], AbstractContextManager[None]]) -> None:
        self._block = block
        with ledger(), torch.no_grad():
            self.values = [
                torch.empty_strided(slot.shape, slot.stride, dtype=slot.given_dtype).copy_(slot.parameter.data)
                for slot in block.slots
            ]
        # Only when the host has all of them: a failure before leaves the block as it was.
        for slot in block.slots:
            slot.parameter.data = torch.empty(0, dtype=slot.given_dtype, device=slot.parameter.device)

    def give_back(self) -> None:
        """Makes the parameters whole again, when the move has failed and its homes are given up."""
        for slot, value in zip(self._block.slots, self.values, strict=True):
            own = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=slot.parameter.device)
            slot.parameter.data = own.copy_(value)


def is_whole(block: BlockWeights) -> bool:
    """Tells whether all values of a block are in memory: none is deferred or put aside."""
    parameters = [slot.parameter for slot in block.slots]
    # One that was put aside has its shape still, and a storage without bytes.
    return all(not is_away(p) and p.untyped_storage().nbytes() >= p.numel() * p.element_size() for p in parameters)
