"""Housing: every tensor that outlives a block gets its home, as the plan says.

In: a plan, the blocks, the optimizer's state layouts. Out: a `House`: weights moved in, gradient homes, state homes, the store and the
scratch file behind those on disk.

[Note: what an atomic step changes]
With `is_atomic` a region on disk has two slots. Reads give the committed version, writes go to the other slot, and `commit` flips all that were
written at once. So a version must be whole, alignment between tensors included: a region that is filled in part would go on being written in place.
Changes that are made between two steps (`job.weights()`, `load_state_dict`) are a version as well; `keep_changes` commits them under the
step's own number before anything reads them.

[Note: a run's homes]
With a `RunStore` the blocks that rest on disk rest in its regions, which have two slots whatever the plan says; those that rest in memory are written to
it when a step is committed, if they changed since (`keep_residents`). A step ends when reads see its versions (`commit`), and is committed later, when
control comes back (`job.commits`). Gradients and activations have a store of their own in a temporary directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch

from memfit import devices
from memfit.activations import HostStore, ScratchStore, StagedScratchStore, TierStore
from memfit.core.errors import PlanError, StoreError
from memfit.core.plan import Plan
from memfit.core.tiers import Tier
from memfit.core.units import MIB
from memfit.homes import ByteHome, DiskHome, MemoryHome, Staging, Tickets
from memfit.homes.gradients import GradientHomes
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.rounded import RoundedMasters
from memfit.homes.run_store import (
    RunStore,
    gradient_region,
    master_region,
    masters_of,
    persistent_buffers,
    regions_of,
    state_region,
    weight_region,
)
from memfit.homes.split import SplitMasters, rest_ends, rest_nbytes
from memfit.homes.weights import BlockWeights, round_masters
from memfit.store import DiskIO, DiskStore, RegionSpec, ScratchFile
from memfit.store.temporary import TemporaryDirectory
from memfit.tensors.trees import bytes_view

_BLANK_BYTES = 4 * MIB


class House:
    """All homes of a job.

    Memory: what the plan puts on the device and the host; the disk's staging (1 MiB a worker).

    Args:
        plan: the decisions.
        blocks: their weights still in ordinary memory.
        states: by block index, without homes yet.
        device: where compute runs.
        directory: for what rests on disk; None makes a temporary one that is deleted at the end.
        keeps_gradients: gradients can be read after the step.
        host_ledger: a context in which host homes are allocated (counts them apart on an emulated device).
        run: where the run is committed; None: nothing outlives the job. See [Note: a run's homes].
        model: with `run`, whose buffers belong to it.
        identity: with `run`, what tells it from others.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        *,
        device: torch.device,
        directory: str | Path | None,
        keeps_gradients: bool,
        keeps_norms: bool,
        host_ledger: Callable[[], AbstractContextManager[None]] = nullcontext,
        run: RunStore | None = None,
        model: torch.nn.Module | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.run = run
        self._model = model
        self._residents: dict[str, tuple[int, MemoryHome]] = {}
        self._changed: set[str] = set()
        has_masters = any(block.has_masters for block in blocks)
        self.blocks = tuple(blocks)
        self.states = dict(states)
        self.step = 0
        self._generation = 0
        self._device = device
        self._host_ledger = host_ledger
        self._stream = devices.of(device).new_stream(device) if devices.is_accelerator(device) else None
        self._host_store = HostStore(device, stream=self._stream, ledger=host_ledger)
        self._memory_homes: list[MemoryHome] = []
        self._disk_homes: list[DiskHome] = []
        self._temporary: TemporaryDirectory | None = None
        self.io: DiskIO | None = None
        self.store: DiskStore | None = None
        self.scratch: ScratchFile | None = None
        self._staging: Staging | None = None
        if self._stream is not None:
            self._staging = Staging(device, stream=self._stream, ledger=host_ledger)
        try:
            if run is not None:
                assert model is not None
                buffers = persistent_buffers(model)
                regions = regions_of(self.blocks, self.states, buffers, masters=masters_of(plan), scheme=run.scheme)
                run.prepare(regions, identity or {}, self._moving_units(regions))
                self._check_moving(run)
                self.io = run.io
            self._open_disk(directory)
            gradient_homes = self._gradient_homes()
            self.gradients = GradientHomes(
                blocks,
                gradient_homes,
                keeps_norms=keeps_norms,
                keeps_gradients=keeps_gradients,
                # A norm is taken of what the update gets: of gradients in the masters' dtype.
                keeps_peaks=plan.scales_losses,
                adds_apart=plan.adds_apart(has_masters=has_masters, clips_norm=keeps_norms),
            )
        except BaseException:
            self.close()
            raise

    @property
    def _is_journaled(self) -> bool:
        return self.run is not None and self.run.scheme == "journal"

    def _moving_units(self, regions: Mapping[str, RegionSpec]) -> list[list[str]]:
        """Regions that move together, by block that trains and rests on disk; see [Note: journal] in `store.journal`."""
        chosen = [b for b in self.blocks if b.index in self.states and self.plan.block(b.name).rests_on_disk]
        return [[name for name in _versions_of(block.name) if name in regions] for block in chosen]

    def _check_moving(self, run: RunStore) -> None:
        for block in self.blocks:
            if run.moves(weight_region(block.name)) and not self.plan.block(block.name).rests_on_disk:
                raise PlanError(
                    f"block {block.name!r} rests on disk in the run in {run.directory}, whose scheme='journal' has no other room for it: the plan must say "
                    "weight_home='disk' and state_home='disk'"
                )

    def _open_disk(self, directory: str | Path | None) -> None:
        regions: dict[str, RegionSpec] = {}
        slots = 2 if self.plan.is_atomic else 1
        for block in self.blocks:
            homes = self.plan.block(block.name)
            states = self.states.get(block.index)
            if self.run is None and homes.weight_home is Tier.DISK:
                regions[weight_region(block.name)] = RegionSpec(nbytes=block.nbytes, slots=slots, tag="weight")
            if self.run is None and block.has_masters and homes.state_home is Tier.DISK and not self.plan.drops_masters:
                regions[master_region(block.name)] = RegionSpec(
                    nbytes=self._master_bytes(block), slots=slots, tag="master"
                )
            if self.run is None and states is not None and states.nbytes and homes.state_home is Tier.DISK:
                regions[state_region(block.name)] = RegionSpec(nbytes=states.nbytes, slots=slots, tag="state")
            if homes.gradient_home is Tier.DISK and states is not None and not self._is_journaled:
                regions[gradient_region(block.name)] = RegionSpec(nbytes=block.master_nbytes, slots=1, tag="gradient")
        needs_scratch = any(
            (c.saved_home is Tier.DISK and c.saved == "offload") or c.boundary_home is Tier.DISK
            for c in self.plan.calls
        )
        if not regions and not needs_scratch:
            return
        if directory is None:
            self._temporary = TemporaryDirectory(None if self.run is None else self.run.directory)
            where = self._temporary.path / "homes"
        else:
            where = Path(directory)
            if not where.parent.is_dir():
                raise StoreError(
                    f"the directory {str(where)!r} cannot be made: its parent {str(where.parent)!r} does not exist; make it, or name another"
                )
        self.io = self.io or DiskIO()
        # A working home needs no power-cut safety: what is lost with the machine is a run that has no commit yet.
        self.store = DiskStore.create(where, regions, identity={"made-by": "memfit"}, durable=False, io=self.io)
        if needs_scratch:
            self.scratch = ScratchFile(where, io=self.io)

    def _home(self, nbytes: int, tier: Tier, region: str, block: int, ends: Collection[int]) -> ByteHome:
        is_kept = self.run is not None and self.run.has(region)
        if tier is Tier.DISK and is_kept:
            assert self.run is not None
            # Zeros until it is filled: whole from its first commit on.
            self._disk_homes.append(self.run.home(region, ends, self._staging))
            return self._disk_homes[-1]
        if tier is Tier.DISK:
            assert self.store is not None
            disk = DiskHome(self.store.region(region), ends, self._staging)
            if disk.has_spare_slot:
                _blank(disk)
            self._disk_homes.append(disk)
            return disk
        with self._host_ledger() if tier is Tier.HOST else nullcontext():
            memory = MemoryHome(
                nbytes, tier=tier, device=self._device, stream=self._stream if tier is Tier.HOST else None
            )
        self._memory_homes.append(memory)
        if is_kept:
            self._residents[region] = (block, memory)
        return memory

    def _master_bytes(self, block: BlockWeights) -> int:
        return rest_nbytes(block) if self.plan.splits_masters else block.master_nbytes

    def _gradient_homes(self) -> dict[int, ByteHome]:
        homes: dict[int, ByteHome] = {}
        for block in self.blocks:
            tier = self.plan.block(block.name).gradient_home
            if block.index in self.states and tier is not Tier.DEVICE:
                homes[block.index] = self._home(
                    block.master_nbytes, tier, gradient_region(block.name), block.index, _master_ends(block)
                )
        return homes

    @property
    def uses_disk(self) -> bool:
        """Weights, gradients or states rest on disk."""
        return bool(self._disk_homes)

    def move_in(
        self,
        bring: Callable[[Iterable[torch.nn.Parameter]], None] | None = None,
        take_back: Callable[[str, torch.nn.Parameter], bool] | None = None,
    ) -> None:
        """Moves the weights home and makes homes for the states.

        Args:
            bring: gives a parameter that has no bytes here (put aside, or never made) its values; called for one at a time.
            take_back: see `BlockWeights.move_out`; for the block that a failure met half-way.

        Raises:
            StoreError: the disk. torch.OutOfMemoryError: the limit. Either way `give_back` makes the model whole again.
        """
        # What leaves the device goes first: it makes room for what stays.
        for block in sorted(self.blocks, key=lambda b: self.plan.block(b.name).weight_home is Tier.DEVICE):
            home, masters = self._weight_homes(block)
            try:
                block.move_in(home, masters, bring)
            except BaseException:
                _undo_move(block, masters or home, take_back)
                raise
        for index, states in self.states.items():
            block = self.blocks[index]
            tier = self.plan.block(block.name).state_home
            if states.nbytes:
                states.home = self._home(states.nbytes, tier, state_region(block.name), index, states.ends)
        self._changed = set(self._residents)  # none of them is in the store yet

    def _weight_homes(self, block: BlockWeights) -> tuple[ByteHome, ByteHome | None]:
        homes = self.plan.block(block.name)
        ends = [slot.offset_bytes + slot.nbytes for slot in block.slots]
        home = self._home(block.nbytes, homes.weight_home, weight_region(block.name), block.index, ends)
        if not block.has_masters:
            return home, None
        if self.plan.drops_masters:
            return home, RoundedMasters(block, home)
        ends = rest_ends(block) if self.plan.splits_masters else _master_ends(block)
        rest = self._home(self._master_bytes(block), homes.state_home, master_region(block.name), block.index, ends)
        if self.plan.splits_masters:
            return home, SplitMasters(block, home, rest)
        # Weights in memory beside whole masters are made from them again: the store need not have them. See [Note: one layout for all plans].
        if not self._is_journaled:  # there, all regions of a block move together
            self._residents.pop(weight_region(block.name), None)
        return home, rest

    def take_up(
        self, forget: Callable[[Iterable[torch.nn.Parameter]], None] | None, *, has_weights: Callable[[str], bool]
    ) -> None:
        """As `move_in`, with the values of the run's last commit; those that the parameters have are given up.

        Args:
            forget: is told of parameters whose own values are not asked for any more.
            has_weights: the store has the current weights of the block of this name, not only its masters.

        Raises:
            StoreError: the disk. torch.OutOfMemoryError: the limit. Blocks that were reached have the run's values then, the others their own.
        """
        assert self.run is not None and self._model is not None
        for block in sorted(self.blocks, key=lambda b: self.plan.block(b.name).weight_home is Tier.DEVICE):
            home, masters = self._weight_homes(block)
            if isinstance(masters, SplitMasters):
                self._load(master_region(block.name), masters.rest)
            elif isinstance(masters, MemoryHome):
                self._load(master_region(block.name), masters)
            is_made = masters is not None and not isinstance(masters, SplitMasters | RoundedMasters)
            if not is_made:
                self._load(weight_region(block.name), home)
            elif masters is not None and not (home.tier is Tier.DISK and has_weights(block.name)):
                round_masters(masters, block, home)
            if forget is not None:
                forget([slot.parameter for slot in block.slots])
            block.rest_in(home, masters)
        for index, states in self.states.items():
            block = self.blocks[index]
            if states.nbytes:
                tier = self.plan.block(block.name).state_home
                states.home = self._home(states.nbytes, tier, state_region(block.name), index, states.ends)
                self._load(state_region(block.name), states.home)
        self.run.load_buffers(self._model)
        assert self.run.committed.step is not None
        self.step = self.run.committed.step

    def _load(self, region: str, home: ByteHome) -> None:
        if isinstance(home, MemoryHome):
            assert self.run is not None
            self.run.load(region, home)

    def note_changed(self, blocks: Iterable[int]) -> None:
        """What rests in memory of these blocks is not what the store has."""
        chosen = set(blocks)
        self._changed |= {region for region, (block, _) in self._residents.items() if block in chosen}

    def keep_residents(self) -> list[str]:
        """Writes what rests in memory and changed since the last commit to the store, and the model's buffers.

        Memory: the buffers once more; 4 MiB while bytes of a device are copied.

        Returns:
            The regions that the commit must flip; then call `residents_kept`.

        Raises:
            StoreError: the disk; may be repeated.
        """
        assert self.run is not None and self._model is not None
        self._follow_copies()
        names = [name for name in self._residents if name in self._changed]
        flips = [name for name in names if self.run.keep(name, self._residents[name][1])]
        return flips + self.keep_buffers()

    def _follow_copies(self) -> None:
        if devices.is_accelerator(self._device):
            devices.of(self._device).synchronize(
                self._device
            )  # pinned homes are written by a stream that the host does not follow

    def keep_buffers(self) -> list[str]:
        """Of `keep_residents`, the model's buffers alone."""
        assert self.run is not None and self._model is not None
        return self.run.keep_buffers(self._model)

    def residents_kept(self) -> None:
        """The commit that `keep_residents` wrote for was made."""
        self._changed.clear()

    @property
    def resident_bytes(self) -> int:
        """What a commit writes at most of blocks that rest in memory."""
        return sum(home.nbytes for _, home in self._residents.values())

    # --- a journal, see `job.journaling`

    def journal_blocks(self) -> dict[str, tuple[str, ...]]:
        """By name of the blocks that train, the regions that an update writes."""
        assert self.run is not None
        has = self.run.has
        return {
            block.name: tuple(name for name in _versions_of(block.name) if has(name))
            for block in self.blocks
            if block.index in self.states
        }

    def keep_version(self, block: BlockWeights) -> None:
        """After a block's update: makes its next version in the store whole, with what was not updated and what rests in memory.

        Raises:
            StoreError: the disk; may be repeated.
        """
        assert self.run is not None
        self._follow_copies()
        for region, home in self._homes_of(block):
            if isinstance(home, DiskHome):
                home.complete()
            else:
                self.run.keep(region, home)

    def begin_versions(self, blocks: Iterable[BlockWeights]) -> None:
        """What is written from now on to the homes of these blocks is a new version."""
        for block in blocks:
            for _, home in self._homes_of(block):
                if isinstance(home, DiskHome):
                    home.begin_version()

    def go_back(self, block: BlockWeights) -> None:
        """The homes of a block hold the version that is committed, and nothing of the next one.

        Raises:
            StoreError: the disk.
        """
        assert self.run is not None
        # A piece of the update that failed may still be on its way to a pinned home: it would land on what the host reads now.
        self._follow_copies()
        self.begin_versions([block])
        for region, home in self._homes_of(block):
            if isinstance(home, MemoryHome):
                self.run.load(region, home)

    def _homes_of(self, block: BlockWeights) -> list[tuple[str, DiskHome | MemoryHome]]:
        on_disk = {home.name: home for home in self._disk_homes}
        found: list[tuple[str, DiskHome | MemoryHome]] = []
        for region in _versions_of(block.name):
            if region in on_disk:
                found.append((region, on_disk[region]))
            elif region in self._residents:
                found.append((region, self._residents[region][1]))
        return found

    def give_back(
        self, *, as_given: bool = False, take_back: Callable[[str, torch.nn.Parameter], bool] | None = None
    ) -> None:
        """Every parameter owns ordinary memory again. May be repeated where a read failed.

        Memory: all weights on the device, but for those that are taken back.

        Args:
            as_given: in the dtype in which it came; else masters stay what they are.
            take_back: see `BlockWeights.move_out`.

        Raises:
            StoreError: weights could not be read; the others are back.
        """
        first: StoreError | None = None
        for block in self.blocks:
            if block.home is None:
                continue
            try:
                block.move_out(as_given=as_given, take_back=take_back)
            except StoreError as error:
                first = first or error
        if first is not None:
            raise first

    def tier_stores(self) -> dict[Tier, TierStore]:
        """Where offloaded activations rest."""
        stores: dict[Tier, TierStore] = {Tier.HOST: self._host_store}
        if self.scratch is not None and self._staging is None:
            stores[Tier.DISK] = ScratchStore(self.scratch)
        elif self.scratch is not None and self._staging is not None:
            stores[Tier.DISK] = StagedScratchStore(self.scratch, self._staging)
        return stores

    def first_commit(self) -> None:
        """What has been moved in is version 0."""
        if self.store is not None:
            self.store.commit(0)
            self._generation = self.store.generation
        if self.run is not None and self.run.is_resumed:
            self.keep_changes()  # weights that were made from masters again
        for home in self._disk_homes:
            home.begin_version()

    def commit(self) -> None:
        """The step's new versions become current, all at once."""
        self._publish(self.step + 1)

    def keep_changes(self) -> None:
        """What was written between two steps becomes current. See [Note: what an atomic step changes]."""
        if any(home.is_dirty for home in self._disk_homes):
            self._publish(self.step)

    def _publish(self, step: int) -> None:
        dirty = [home for home in self._disk_homes if home.is_dirty]
        for home in dirty:
            home.complete()
        if self.run is not None:
            names = [home.name for home in dirty]
            if step == self.step:
                self.run.committed.amend(names)
            else:
                self.run.committed.end_step(step, names)
            for home in dirty:
                home.begin_version()
        elif dirty:  # homes that are written in place are new already
            assert self.store is not None
            self.store.commit(step, [home.name for home in dirty])
            for home in dirty:
                home.begin_version()
            self._generation = self.store.generation
        self.step = step

    def forget_step(self) -> bool:
        """A step did not come to its end: what it wrote into spare slots is not a version.

        Returns:
            True if its version is the current one all the same: an interrupt came after the instant of the commit.
        """
        for home in self._disk_homes:
            home.begin_version()
        if self.run is not None:
            ended = self.run.committed.step
            is_ended = ended is not None and ended != self.step
            self.step = ended if is_ended and ended is not None else self.step
            return is_ended
        if self.store is None or self.store.generation == self._generation:
            return False
        assert self.store.step is not None
        self._generation, self.step = self.store.generation, self.store.step
        return True

    def held(self) -> Iterator[torch.Tensor]:
        """The bytes of all homes on the device."""
        for home in self._memory_homes:
            if home.tier is Tier.DEVICE:
                yield bytes_view(home.bytes, 0, home.nbytes)

    @property
    def bytes_moved(self) -> tuple[dict[str, int], dict[str, int]]:
        """(read, written) bytes of the disk since the beginning, by purpose."""
        if self.io is None:
            return {}, {}
        statistics = self.io.statistics()
        by_tag = statistics.by_tag
        return (
            {tag: traffic.read_bytes for tag, traffic in by_tag.items()},
            {tag: traffic.written_bytes for tag, traffic in by_tag.items()},
        )

    def close(self) -> None:
        """Ends all transfers and frees all homes; temporary files are deleted. Weights must have moved out before. May be repeated.

        Raises:
            StoreError: files could not be removed. Everything else is freed even so.
        """
        with ExitStack() as stack:
            # Backwards: transfers end, then files go.
            if self._temporary is not None:
                stack.callback(self._temporary.remove)
            if self.io is not None and self.run is None:
                stack.callback(self.io.close)
            if self.store is not None:
                stack.callback(self.store.close, delete=True)
            if self.scratch is not None:
                stack.callback(self.scratch.close)
            if self._staging is not None:
                stack.callback(self._staging.close)
            stack.callback(self._host_store.close)
            self._residents.clear()
            while self._memory_homes:
                stack.callback(self._memory_homes.pop().close)


def _versions_of(block: str) -> tuple[str, ...]:
    """The regions that an update of a block may write."""
    return weight_region(block), master_region(block), state_region(block)


def _master_ends(block: BlockWeights) -> list[int]:
    return [slot.master_offset_bytes + slot.master_nbytes for slot in block.slots]


def _blank(home: DiskHome) -> None:
    """Zeros, so that a first version is whole. See [Note: what an atomic step changes]. Costs one buffer of 4 MiB and writing the home once."""
    zeros = torch.zeros(min(_BLANK_BYTES, home.nbytes), dtype=torch.uint8).untyped_storage()
    starts = range(0, home.nbytes, _BLANK_BYTES)
    Tickets([home.write(start, min(_BLANK_BYTES, home.nbytes - start), zeros) for start in starts]).wait()


def _undo_move(
    block: BlockWeights, home: ByteHome, take_back: Callable[[str, torch.nn.Parameter], bool] | None
) -> None:
    """Brings back the parameters that had left when a move failed half-way; the others have not been touched."""
    if block.home is not None:
        return  # it has moved: `give_back` knows it
    for slot in block.slots:
        parameter = slot.parameter
        if (take_back is not None and take_back(slot.name, parameter)) or parameter.numel() == slot.numel:
            continue
        own = torch.empty_strided(slot.shape, slot.stride, dtype=slot.master_dtype, device=parameter.device)
        home.read(slot.master_offset_bytes, slot.master_nbytes, own.untyped_storage()).wait()
        parameter.data = own.to(slot.given_dtype)
