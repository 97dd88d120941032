"""The directory that a run is committed to: its regions, its journal, and the small state beside
them.

In: a directory. Out: a store whose regions are disk homes where the plan says disk, and copies of
homes in memory, written by each commit, where it does not. See [Note: one layout for all plans] in
`runs.run_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.core.documents import user_path
from memfit.core.layout import Scheme, flat_layout
from memfit.core.shape import Masters
from memfit.homes import ByteHome, DiskHome, Staging
from memfit.homes.masters import rest_nbytes, rest_tensors
from memfit.homes.optimizer_states import BlockStates, StateSlot
from memfit.homes.regions import gradient_region, master_region, state_region, weight_region
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.runs.rank_record import find_record
from memfit.runs.run_state import part
from memfit.store import CommittedStore, DiskIO, DiskStore, Durability, RegionSpec, TensorPlace, dtype_name
from memfit.store.committed import State, check_durability, check_journaled
from memfit.store.directory import is_there, refuse_lost
from memfit.store.files import store_error
from memfit.store.journal import RECORD, Journal, record_region
from memfit.store.manifest import MANIFEST_NAME
from memfit.tensors.trees import new_storage

COPY_BYTES = 4 << 20
FORMAT = "1"
"""Format of what a run keeps in a store; `identity["memfit run"]`."""
_STATE_BYTES = 256 << 10


class RunStore:
    """A directory with a run that was committed before, or room for one.

    One job at a time has it; see `close`.

    Memory: the disk's staging (1 MiB a worker); a buffer of 4 MiB while bytes of a device are
    copied; with `verify`, four reads of 4 MiB at opening.
    Disk: `nbytes`, claimed when it is made.

    Args:
        directory: made if it does not exist; its parent must.
        durability: how often a step is committed.
        must_exist: a directory without a committed step is refused; else a run begins there.
        scheme: of a new run, generations by default; a run that is there must have it, if it is
            given.

    Raises:
        StoreInUseError: a live job owns it.
        StoreError: it is damaged, of another format, or nothing was committed and `must_exist`.
        UsageError: not a durability.

    Attributes:
        directory: where.
        scheme: see `DiskStore.scheme`.
        io: the disk's threads, for whatever else the job moves.
        state: the small state of the last commit; empty for a new run.
        is_resumed: a step was committed before.
        resumed: the commit that is gone on from.
        commits: how the run is committed.
    """

    def __init__(
        self, directory: str | Path, *, durability: Durability, must_exist: bool, scheme: Scheme | None = None
    ) -> None:
        check_durability(durability)
        self._set_up(directory, durability, scheme)
        try:
            refuse_ranks(self.directory)
            if must_exist or is_there(self.directory / MANIFEST_NAME):
                self._open(must_exist=must_exist)
            else:
                refuse_lost(self.directory)
            if self._committed is not None:
                self._take_scheme(scheme)
            elif self.scheme == "journal":
                check_journaled(durability)
        except BaseException:
            self.io.close()
            raise
        self.is_resumed = self._committed is not None

    def _set_up(self, directory: str | Path, durability: Durability, scheme: Scheme | None) -> None:
        self.scheme: Scheme = scheme or "generations"
        self.directory = user_path(directory).absolute()
        self.durability: Durability = durability
        self.state: dict[str, Any] = {}
        self._regions: dict[str, RegionSpec] = {}
        self._committed: CommittedStore | None = None
        self.resumed = ResumedCommit(self)
        self.commits = Commits(self)
        self.io = DiskIO()

    def _take_scheme(self, wanted: Scheme | None) -> None:
        self.scheme = self.committed.disk.scheme
        if wanted not in (None, self.scheme):
            self.committed.close()
            raise store_error(
                f"the run in {self.directory} was begun with scheme={self.scheme!r}, and its files are laid out for that: leave scheme={wanted!r} out, or begin "
                "a run in another directory"
            )

    def _open(self, *, must_exist: bool) -> None:
        if not must_exist and self._remove_unfinished():
            return
        store = CommittedStore.open(
            self.directory, identity={"memfit run": FORMAT}, durability=self.durability, io=self.io
        )
        try:
            self.state = store.read_state()
        except BaseException:
            store.close()
            raise
        self._committed = store

    def _remove_unfinished(self) -> bool:
        """Removes the files of a run that ended before its first commit. Nothing is lost."""
        with DiskStore.open(self.directory, durable=False, io=self.io) as found:
            is_unfinished = found.step is None and found.identity.get("memfit run") == FORMAT
            if is_unfinished:
                found.close(delete=True)
        return is_unfinished

    @property
    def committed(self) -> CommittedStore:
        """The open store. Before `prepare`, a new run has none."""
        assert self._committed is not None, "the store of the run was not made yet"
        return self._committed

    @property
    def is_new(self) -> bool:
        """Nothing was committed to the open store yet."""
        return not self.is_resumed

    @property
    def nbytes(self) -> int:
        """Disk that the data takes."""
        return self.committed.disk.disk_bytes

    @property
    def claimed_bytes(self) -> int:
        """`nbytes`, or 0 while a new run has no store yet."""
        return 0 if self._committed is None else self.nbytes

    def prepare(
        self, regions: Mapping[str, RegionSpec], identity: Mapping[str, str], units: Sequence[Sequence[str]] = ()
    ) -> None:
        """Makes the store with all its room, or compares what is there with what is wanted.

        Args:
            regions: what it holds.
            identity: whose it is.
            units: in a new store with a journal, the regions of each block that rests on disk; see
                `DiskStore.create`.

        Raises:
            StoreError: no room for it, no permission; or another model, dtype or optimizer, with
                the differences.
        """
        self._regions = dict(regions)
        if self._committed is not None:
            self._committed.check(regions, identity)
            return
        if not self.directory.parent.is_dir():
            raise store_error(
                f"the directory {str(self.directory)!r} cannot be made: its parent {str(self.directory.parent)!r} does not exist; make it, or name another"
            )
        self._committed = CommittedStore.create(
            self.directory,
            regions,
            identity={"memfit run": FORMAT, **identity},
            durability=self.durability,
            state_bytes=_STATE_BYTES,
            units=units if self.scheme == "journal" else None,
            io=self.io,
        )

    def journal(self, blocks: Mapping[str, Sequence[str]]) -> Journal:
        """The journal of the open store.

        Args:
            blocks: by name, the regions that an update writes; each has a gradient.
        """
        return Journal(self.committed.disk, blocks, [gradient_region(name) for name in blocks])

    def moves(self, region: str) -> bool:
        """The region shares its room with others, through which they move one after the other."""
        return self.has(region) and self.committed.disk.shares_room(region)

    def go_back(self) -> None:
        """To the last commit: the run is resumed from there, in this process.

        Raises:
            StoreError: the store can only be read, or its state is damaged.
        """
        self.committed.roll_back()
        self.state = self.committed.read_state()
        self.is_resumed = True

    def home(self, region: str, ends: Collection[int] = (), staging: Staging | None = None) -> DiskHome:
        """A region as the home of a block that the plan puts on disk.

        The other arguments as in `DiskHome`.
        """
        return DiskHome(self.committed.region(region), ends, staging)

    @property
    def regions(self) -> Mapping[str, RegionSpec]:
        """Regions that the store holds, once it is prepared."""
        return self._regions

    def has(self, region: str) -> bool:
        """See `homes.regions.RegionStore`."""
        return region in self._regions

    def publish(self, step: int, changed: Sequence[str], *, is_new: bool) -> None:
        """See `homes.regions.RegionStore`.

        Nothing is committed by it: a crash goes back to the last commit.
        """
        if is_new:
            self.committed.end_step(step, changed)
        else:
            self.committed.advance(changed)

    def published_since(self, step: int) -> int | None:
        """See `homes.regions.RegionStore`."""
        now = self.committed.step
        return None if now == step else now

    def reset(self) -> None:
        """The job did not begin: a store that it made and never committed goes.

        One that was there stays as it was.
        """
        if self._committed is not None and self._committed.committed_step is None:
            store, self._committed = self._committed, None
            store.disk.close(delete=True)

    def close(self) -> None:
        """Gives the directory back.

        What was not committed is gone; a run that was never committed leaves nothing. May be
        repeated.

        Raises:
            StoreError: files could not be removed.
        """
        try:
            self.reset()
        finally:
            if self._committed is not None:
                self._committed.close()
            self.io.close()


class ResumedCommit:
    """The commit that a run goes on from: its small state, and the bytes of its regions.

    Args:
        run: the store, open.
    """

    def __init__(self, run: RunStore) -> None:
        self.run = run

    @property
    def step(self) -> int:
        """Its step."""
        return part(self.run.state, "step", int)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of its weights, by name."""
        specs = self.run.committed.disk.regions.values()
        return {place.name: place.shape for spec in specs if spec.tag == "weight" for place in spec.tensors}

    @property
    def numbers(self) -> Any:
        """Counters of the optimizer; see `run_state.take_numbers`."""
        return part(self.run.state, "optimizer", dict).get("numbers")

    def fill(self, region: str, home: ByteHome) -> None:
        """Fills a home with the bytes of a region; the store's own have them.

        Raises:
            StoreError: the disk.
        """
        if home.is_stored:
            return
        disk, whole = self.run.home(region), home.bytes
        for start, count in pieces_of(home.nbytes, whole):
            if whole is not None:
                disk.read(start, count, whole, start).wait()
                continue
            staged = new_storage(count)
            disk.read(start, count, staged).wait()
            home.write(start, count, staged).wait()

    def read_tensor(self, region: str, name: str) -> torch.Tensor:
        """Reads a tensor; see `CommittedStore.read_tensor`."""
        return self.run.committed.read_tensor(region, name)

    def close(self) -> None:
        """Closes what is open beside the run's own store."""


class Commits:
    """Commits of a run: by this process alone.

    Args:
        run: the store.
    """

    def __init__(self, run: RunStore) -> None:
        self.run = run

    @property
    def last_step(self) -> int | None:
        """Step of the run's last commit; None before the first."""
        return self.run.committed.committed_step

    def any(self, flag: bool) -> bool:  # noqa: FBT001, a vote
        """Tells whether any of the processes that commit together says so."""
        return flag

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Context of all that a commit does."""
        yield

    def commit(self, state: Callable[[], State], flips: Sequence[str]) -> None:
        """Commits the step that ended last; see `CommittedStore.commit`."""
        self.run.committed.commit(state, flips=flips, force=True)

    def note_first(self) -> None:
        """Notes that the first version of a new store is committed."""

    def state(self) -> dict[str, Any]:
        """Returns what each commit's small state has beside that of the job."""
        return {}


def refuse_ranks(directory: Path) -> None:
    """Refuses a directory that has a run on several ranks, where this process is alone. Raises
    `StoreError`.
    """
    record = find_record(directory)
    if record is not None and record.number:
        raise store_error(
            f"the run in {directory} is one on several ranks: start two processes or more with torchrun, any number of which can go on with it; "
            "job.save on them writes files that one process can begin from"
        )


def pieces_of(nbytes: int, storage: torch.UntypedStorage | None) -> Iterator[tuple[int, int]]:
    """Cuts bytes that are not in the processor's memory into pieces, each of which is staged there:
    yields (start, count).
    """
    step = max(1, nbytes if storage is not None and storage.device.type == "cpu" else COPY_BYTES)
    for start in range(0, nbytes, step):
        yield start, min(step, nbytes - start)


# Layout of a run's store: which regions it has, and which tensors lie in them.
#
# In: blocks, optimizer states, buffers. Out: regions by name.
#
# [Note: one layout for all plans]
# What lies in the store follows from the model, the optimizer and the formats that bytes rest in,
# not from homes and order: for each block its weights (with masters: those too) and its states, and
# the model's buffers. So a run can go on under another plan, be it with another limit or after a
# breach. What belongs to a plan only (activations, and gradients unless a journal makes them
# durable) lies in a temporary directory beside it. Where a block rests in memory, a commit writes
# its bytes to the spare slots: one writing of what was updated, no reading. Weights that are
# rounded from whole masters are made from them again when they are needed, so with `generations`
# they are never written for their own sake.

BUFFERS = "buffers"
"""Name of the region of the model's persistent buffers."""
_RECORD_BYTES = 256 << 10
"""Bytes of a journal's record: random numbers, settings of the groups, losses of the microbatches.
"""
_NUMBER_BYTES = 1 << 10
"""Bytes of it for the counters of one parameter, beside its name."""


def regions_of(
    blocks: Sequence[BlockWeights],
    states: Mapping[int, BlockStates],
    buffers: Sequence[tuple[str, torch.Tensor]],
    *,
    masters: Masters = "whole",
    scheme: Scheme = "generations",
) -> dict[str, RegionSpec]:
    """Returns what the store of a run holds. See [Note: one layout for all plans].

    Args:
        blocks: of the model.
        states: by block index.
        buffers: the model's persistent ones, by name.
        masters: how they rest, where there are any.
        scheme: with a journal, what does not train has one slot, and gradients and the journal's
            record have their room.
    """
    regions: dict[str, RegionSpec] = {}
    for block in blocks:
        slots = 2 if scheme == "generations" or block.index in states else 1
        weights = [_place(s.name, s.dtype, s.shape, s.stride, s.offset_bytes) for s in block.slots]
        regions[weight_region(block.name)] = _spec(block.nbytes, "weight", weights, slots)
        if block.has_masters and masters == "split":
            rest = [_place(name, dtype, (count,), None, at) for name, dtype, count, at in rest_tensors(block)]
            regions[master_region(block.name)] = _spec(rest_nbytes(block), "master", rest, slots)
        elif block.has_masters and masters == "whole":
            whole = [_place(s.name, s.master_dtype, s.shape, s.stride, s.master_offset_bytes) for s in block.slots]
            regions[master_region(block.name)] = _spec(block.master_nbytes, "master", whole, slots)
        own = states.get(block.index)
        if own is not None and own.nbytes:
            tensors = [_state_place(s, t) for s in block.slots for t in own.slots[s.name]]
            regions[state_region(block.name)] = _spec(own.nbytes, "state", tensors)
        if own is not None and scheme == "journal":
            regions[gradient_region(block.name)] = RegionSpec(nbytes=block.master_nbytes, tag="gradient")
    offsets, nbytes = flat_layout([tensor.nbytes for _, tensor in buffers])
    if nbytes:
        placed = zip(buffers, offsets, strict=True)
        tensors = [_place(name, tensor.dtype, tuple(tensor.shape), None, at) for (name, tensor), at in placed]
        regions[BUFFERS] = _spec(nbytes, "buffer", tensors)
    if scheme == "journal":
        trained = [slot.name for block in blocks if block.index in states for slot in block.slots]
        regions[RECORD] = record_region(_RECORD_BYTES + sum(_NUMBER_BYTES + 2 * len(name) for name in trained))
    return regions


def _state_place(slot: ParameterSlot, state: StateSlot) -> TensorPlace:
    name = f"{slot.name}.{state.key}"
    if state.codec is not None:  # bytes, to everybody but the codec
        offset, nbytes = state.span(0, state.numel)
        return _place(name, torch.uint8, (nbytes,), None, offset)
    if state.is_like_weight and state.numel < slot.numel:
        # A rank's share of it.
        return _place(name, state.dtype, (state.numel,), None, state.offset_bytes)
    stride = slot.stride if state.is_like_weight else None
    return _place(name, state.dtype, state.shape, stride, state.offset_bytes)


def _spec(nbytes: int, tag: str, tensors: Sequence[TensorPlace], slots: int = 2) -> RegionSpec:
    return RegionSpec(nbytes=nbytes, slots=slots, tag=tag, tensors=tuple(tensors))


def _place(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None, offset: int
) -> TensorPlace:
    return TensorPlace(name=name, dtype=dtype_name(dtype), shape=in_memory_order(shape, stride), offset=offset)


def in_memory_order(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of a dense tensor's bytes as they lie: dimensions sorted by stride (channels-last
    comes last).
    """
    if stride is None:
        return shape
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))
    return tuple(shape[d] for d in order)


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that `state_dict` has, each once, in the model's order."""
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        hidden: set[str] = getattr(module, "_non_persistent_buffers_set", set())
        for name, buffer in module.named_buffers(recurse=False):
            if name not in hidden and id(buffer) not in seen:
                seen.add(id(buffer))
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found
