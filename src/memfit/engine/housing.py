"""Housing: every tensor that outlives a block gets its home, as the plan says.

In: a plan, the blocks, the optimizer's state layouts, perhaps a store that outlives the job. Out: a `House`: weights moved in, gradient homes,
state homes, the regions and the scratch file behind those on disk. What is committed, and when, is decided elsewhere (`checkpoints`).

[Note: what an atomic step changes]
With `is_atomic` a region on disk has two slots. Reads give the committed version, writes go to the other slot, and `commit` flips all that were
written at once. So a version must be whole, alignment between tensors included: a region that is filled in part would go on being written in place.
Changes that are made between two steps (`job.weights()`, `load_state_dict`) are a version as well; `keep_changes` commits them under the
step's own number before anything reads them.

[Note: homes in a store that is given]
Regions that the given store has are taken from it, whatever the plan says of slots; everything else that rests on disk (gradients, activations)
has a working store and a scratch file of the job's own, in a temporary directory that is deleted at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch

from memfit import devices
from memfit.core.errors import StoreError
from memfit.core.plan import Plan
from memfit.core.tiers import Tier
from memfit.core.units import MIB
from memfit.homes import ByteHome, DiskHome, MemoryHome, Staging, Tickets
from memfit.homes.gradients import GradientHomes
from memfit.homes.offloaded import HomePool, HostPool, ScratchPool
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.regions import (
    RegionStore,
    WorkingStore,
    gradient_region,
    master_region,
    state_region,
    weight_region,
)
from memfit.homes.rounded import RoundedMasters
from memfit.homes.split import SplitMasters, rest_ends, rest_nbytes
from memfit.homes.weights import BlockWeights, round_masters
from memfit.store import DiskIO, RegionSpec, ScratchFile
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
        kept: a store that outlives the job, whose regions are taken where it has them. See [Note: homes in a store that is given].

    Attributes:
        placed: by region, the block and the home that holds its bytes, on whatever tier.
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
        kept: RegionStore | None = None,
    ) -> None:
        self.plan = plan
        self.placed: dict[str, tuple[int, ByteHome]] = {}
        self._kept = kept
        has_masters = any(block.has_masters for block in blocks)
        self.blocks = tuple(blocks)
        self.states = dict(states)
        self.step = 0
        self._device = device
        self._host_ledger = host_ledger
        self._stream = devices.of(device).new_stream(device) if devices.is_accelerator(device) else None
        self._host_pool = HostPool(device, stream=self._stream, ledger=host_ledger)
        self._memory_homes: list[MemoryHome] = []
        self._disk_homes: list[DiskHome] = []
        self._temporary: TemporaryDirectory | None = None
        self.io: DiskIO | None = None if kept is None else kept.io
        self._working: WorkingStore | None = None
        self.scratch: ScratchFile | None = None
        self._staging: Staging | None = None
        if self._stream is not None:
            self._staging = Staging(device, stream=self._stream, ledger=host_ledger)
        try:
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

    def _open_disk(self, directory: str | Path | None) -> None:
        regions: dict[str, RegionSpec] = {}
        slots = 2 if self.plan.is_atomic else 1
        for block in self.blocks:
            homes = self.plan.block(block.name)
            states = self.states.get(block.index)
            if homes.weight_home is Tier.DISK:
                regions[weight_region(block.name)] = RegionSpec(nbytes=block.nbytes, slots=slots, tag="weight")
            if block.has_masters and homes.state_home is Tier.DISK and not self.plan.drops_masters:
                regions[master_region(block.name)] = RegionSpec(
                    nbytes=self._master_bytes(block), slots=slots, tag="master"
                )
            if states is not None and states.nbytes and homes.state_home is Tier.DISK:
                regions[state_region(block.name)] = RegionSpec(nbytes=states.nbytes, slots=slots, tag="state")
            if homes.gradient_home is Tier.DISK and states is not None:
                regions[gradient_region(block.name)] = RegionSpec(nbytes=block.master_nbytes, slots=1, tag="gradient")
        if self._kept is not None:
            regions = {name: spec for name, spec in regions.items() if not self._kept.has(name)}
        needs_scratch = any(
            (c.saved_home is Tier.DISK and c.saved == "offload") or c.boundary_home is Tier.DISK
            for c in self.plan.calls
        )
        if not regions and not needs_scratch:
            return
        if directory is None:
            self._temporary = TemporaryDirectory(None if self._kept is None else self._kept.directory)
            where = self._temporary.path / "homes"
        else:
            where = Path(directory)
            if not where.parent.is_dir():
                raise StoreError(
                    f"the directory {str(where)!r} cannot be made: its parent {str(where.parent)!r} does not exist; make it, or name another"
                )
        self.io = self.io or DiskIO()
        self._working = WorkingStore(where, regions, self.io)
        if needs_scratch:
            self.scratch = ScratchFile(where, io=self.io)

    def _home(self, nbytes: int, tier: Tier, region: str, block: int, ends: Collection[int]) -> ByteHome:
        home: ByteHome
        if tier is Tier.DISK:
            is_kept = self._kept is not None and self._kept.has(region)
            regions = self._kept if is_kept else self._working
            assert regions is not None
            home = disk = regions.home(region, ends, self._staging)
            # A region of the given store holds zeros until it is filled, and is whole from its first commit on.
            if not is_kept and disk.has_spare_slot:
                _blank(disk)
            self._disk_homes.append(disk)
        else:
            with self._host_ledger() if tier is Tier.HOST else nullcontext():
                home = memory = MemoryHome(
                    nbytes, tier=tier, device=self._device, stream=self._stream if tier is Tier.HOST else None
                )
            self._memory_homes.append(memory)
        self.placed[region] = block, home
        return home

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
        return home, rest

    def take_over(
        self,
        load: Callable[[str, ByteHome], None],
        forget: Callable[[Iterable[torch.nn.Parameter]], None] | None,
        *,
        has_weights: Callable[[str], bool],
        step: int,
    ) -> None:
        """As `move_in`, with the values that the given store has; those that the parameters have are given up.

        Args:
            load: fills a home in memory with the bytes of a region; homes on disk have them.
            forget: is told of parameters whose own values are not asked for any more.
            has_weights: the store has the current weights of the block of this name, not only its masters.
            step: that the values are of.

        Raises:
            StoreError: the disk. torch.OutOfMemoryError: the limit. Blocks that were reached have the store's values then, the others their own.
        """
        for block in sorted(self.blocks, key=lambda b: self.plan.block(b.name).weight_home is Tier.DEVICE):
            home, masters = self._weight_homes(block)
            if isinstance(masters, SplitMasters):
                load(master_region(block.name), masters.rest)
            elif masters is not None and not isinstance(masters, RoundedMasters):
                load(master_region(block.name), masters)
            is_made = masters is not None and not isinstance(masters, SplitMasters | RoundedMasters)
            if not is_made:
                load(weight_region(block.name), home)
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
                load(state_region(block.name), states.home)
        self.step = step

    def begin_versions(self, regions: Iterable[str]) -> None:
        """What is written from now on to the homes of these regions is a new version."""
        for region in regions:
            _, home = self.placed[region]
            if isinstance(home, DiskHome):
                home.begin_version()

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

    def pools(self) -> dict[Tier, HomePool]:
        """Pools of homes for offloaded activations."""
        found: dict[Tier, HomePool] = {Tier.HOST: self._host_pool}
        if self.scratch is not None:
            found[Tier.DISK] = ScratchPool(self.scratch, self._staging)
        return found

    def first_commit(self) -> None:
        """What has been moved in is version 0."""
        if self._working is not None:
            self._working.publish(0, (), is_new=True)
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
        store = self._versions
        if store is not None:
            store.publish(step, [home.name for home in dirty], is_new=step != self.step)
        for home in dirty:
            home.begin_version()
        self.step = step

    @property
    def _versions(self) -> RegionStore | None:
        """The store whose regions have versions: the one that is given, or the job's own."""
        return self._working if self._kept is None else self._kept

    def forget_step(self) -> bool:
        """A step did not come to its end: what it wrote into spare slots is not a version.

        Returns:
            True if its version is the current one all the same: an interrupt came after the instant of the commit.
        """
        for home in self._disk_homes:
            home.begin_version()
        store = self._versions
        published = None if store is None else store.published_since(self.step)
        if published is None:
            return False
        self.step = published
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
            if self.io is not None and self._kept is None:
                stack.callback(self.io.close)
            if self._working is not None:
                stack.callback(self._working.close)
            if self.scratch is not None:
                stack.callback(self.scratch.close)
            if self._staging is not None:
                stack.callback(self._staging.close)
            stack.callback(self._host_pool.close)
            self.placed.clear()
            while self._memory_homes:
                stack.callback(self._memory_homes.pop().close)


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
