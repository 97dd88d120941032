"""Housing: every tensor that outlives a block gets its home, as the plan says.

In: a plan, the blocks, the optimizer's state layouts. Out: a `House`: weights moved in, gradient homes, state homes, the store and the
scratch file behind those on disk.

[Note: what an atomic step changes]
With `is_atomic` a region on disk has two slots. Reads give the committed version, writes go to the other slot, and `commit` flips all that were
written at once. So a version must be whole, alignment between tensors included: a region that is filled in part would go on being written in place.
Changes that are made between two steps (`job.weights()`, `load_state_dict`) are a version as well; `keep_changes` commits them under the
step's own number before anything reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch

from memfit.core.errors import StoreError
from memfit.core.plan import Plan, Tier
from memfit.core.units import MIB
from memfit.runtime.gradients import GradientHomes
from memfit.runtime.homes import ByteHome, DiskHome, MemoryHome, Tickets
from memfit.runtime.rounded import RoundedMasters
from memfit.runtime.saved import HostStore, ScratchStore, TierStore
from memfit.runtime.split import SplitMasters, rest_nbytes
from memfit.runtime.states import BlockStates
from memfit.runtime.store import DiskIO, DiskStore, RegionSpec, ScratchFile
from memfit.runtime.temporary import TemporaryDirectory
from memfit.runtime.weights import BlockWeights

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
    ) -> None:
        self.plan = plan
        has_masters = any(block.has_masters for block in blocks)
        self.blocks = tuple(blocks)
        self.states = dict(states)
        self.step = 0
        self._generation = 0
        self._device = device
        self._host_ledger = host_ledger
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host_store = HostStore(device, stream=self._stream, ledger=host_ledger)
        self._memory_homes: list[MemoryHome] = []
        self._disk_homes: list[DiskHome] = []
        self._temporary: TemporaryDirectory | None = None
        self.io: DiskIO | None = None
        self.store: DiskStore | None = None
        self.scratch: ScratchFile | None = None
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
                adds_apart=has_masters and (plan.microbatches > 1 or keeps_norms),
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
                regions[f"{block.name}/weight"] = RegionSpec(nbytes=block.nbytes, slots=slots, tag="weight")
            if block.has_masters and homes.state_home is Tier.DISK and not self.plan.drops_masters:
                regions[f"{block.name}/master"] = RegionSpec(
                    nbytes=self._master_bytes(block), slots=slots, tag="master"
                )
            if states is not None and states.nbytes and homes.state_home is Tier.DISK:
                regions[f"{block.name}/state"] = RegionSpec(nbytes=states.nbytes, slots=slots, tag="state")
            if homes.gradient_home is Tier.DISK and states is not None:
                regions[f"{block.name}/gradient"] = RegionSpec(nbytes=block.master_nbytes, slots=1, tag="gradient")
        needs_scratch = any(
            (c.saved_home is Tier.DISK and c.saved == "offload") or c.boundary_home is Tier.DISK
            for c in self.plan.calls
        )
        if not regions and not needs_scratch:
            return
        if directory is None:
            self._temporary = TemporaryDirectory()
            where = self._temporary.path / "homes"
        else:
            where = Path(directory)
            if not where.parent.is_dir():
                raise StoreError(
                    f"the directory {str(where)!r} cannot be made: its parent {str(where.parent)!r} does not exist; make it, or name another"
                )
        self.io = DiskIO()
        # A working home needs no power-cut safety: what is lost with the machine is a run that has no commit yet.
        self.store = DiskStore.create(where, regions, identity={"made-by": "memfit"}, durable=False, io=self.io)
        if needs_scratch:
            self.scratch = ScratchFile(where, io=self.io)

    def _home(self, nbytes: int, tier: Tier, region: str) -> ByteHome:
        if tier is Tier.DISK:
            assert self.store is not None
            disk = DiskHome(self.store.region(region))
            if disk.has_spare_slot:
                _blank(disk)
            self._disk_homes.append(disk)
            return disk
        with self._host_ledger() if tier is Tier.HOST else nullcontext():
            memory = MemoryHome(
                nbytes, tier=tier, device=self._device, stream=self._stream if tier is Tier.HOST else None
            )
        self._memory_homes.append(memory)
        return memory

    def _master_bytes(self, block: BlockWeights) -> int:
        return rest_nbytes(block) if self.plan.splits_masters else block.master_nbytes

    def _gradient_homes(self) -> dict[int, ByteHome]:
        homes: dict[int, ByteHome] = {}
        for block in self.blocks:
            tier = self.plan.block(block.name).gradient_home
            if block.index in self.states and tier is not Tier.DEVICE:
                homes[block.index] = self._home(block.master_nbytes, tier, f"{block.name}/gradient")
        return homes

    @property
    def uses_disk(self) -> bool:
        """Weights, gradients or states rest on disk."""
        return bool(self._disk_homes)

    def move_in(self, bring: Callable[[Iterable[torch.nn.Parameter]], None] | None = None) -> None:
        """Moves the weights home and makes homes for the states.

        Args:
            bring: gives a parameter that has no bytes here (put aside, or never made) its values; called for one at a time.

        Raises:
            StoreError: the disk. torch.OutOfMemoryError: the limit. Either way `give_back` makes the model whole again.
        """
        # What leaves the device goes first: it makes room for what stays.
        for block in sorted(self.blocks, key=lambda b: self.plan.block(b.name).weight_home is Tier.DEVICE):
            homes = self.plan.block(block.name)
            home = self._home(block.nbytes, homes.weight_home, f"{block.name}/weight")
            masters: ByteHome | None = None
            if block.has_masters and self.plan.drops_masters:
                masters = RoundedMasters(block, home)
            elif block.has_masters:
                masters = self._home(self._master_bytes(block), homes.state_home, f"{block.name}/master")
                if self.plan.splits_masters:
                    masters = SplitMasters(block, home, masters)
            try:
                block.move_in(home, masters, bring)
            except BaseException:
                _undo_move(block, masters or home)
                raise
        for index, states in self.states.items():
            block = self.blocks[index]
            tier = self.plan.block(block.name).state_home
            if states.nbytes:
                states.home = self._home(states.nbytes, tier, f"{block.name}/state")

    def give_back(self, *, as_given: bool = False) -> None:
        """Every parameter owns ordinary memory again. May be repeated where a read failed.

        Memory: all weights on the device.

        Args:
            as_given: in the dtype in which it came; else masters stay what they are.

        Raises:
            StoreError: weights could not be read; the others are back.
        """
        first: StoreError | None = None
        for block in self.blocks:
            if block.home is None:
                continue
            try:
                block.move_out(as_given=as_given)
            except StoreError as error:
                first = first or error
        if first is not None:
            raise first

    def tier_stores(self) -> dict[Tier, TierStore]:
        """Where offloaded activations rest."""
        stores: dict[Tier, TierStore] = {Tier.HOST: self._host_store}
        if self.scratch is not None:
            stores[Tier.DISK] = ScratchStore(self.scratch)
        return stores

    def first_commit(self) -> None:
        """What has been moved in is version 0."""
        if self.store is not None:
            self.store.commit(0)
            self._generation = self.store.generation
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
        if dirty:  # homes that are written in place are new already
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
        if self.store is None or self.store.generation == self._generation:
            return False
        assert self.store.step is not None
        self._generation, self.step = self.store.generation, self.store.step
        return True

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
            if self.io is not None:
                stack.callback(self.io.close)
            if self.store is not None:
                stack.callback(self.store.close, delete=True)
            if self.scratch is not None:
                stack.callback(self.scratch.close)
            stack.callback(self._host_store.close)
            while self._memory_homes:
                stack.callback(self._memory_homes.pop().close)


def _blank(home: DiskHome) -> None:
    """Zeros, so that a first version is whole. See [Note: what an atomic step changes]. Costs one buffer of 4 MiB and writing the home once."""
    zeros = torch.zeros(min(_BLANK_BYTES, home.nbytes), dtype=torch.uint8).untyped_storage()
    starts = range(0, home.nbytes, _BLANK_BYTES)
    Tickets([home.write(start, min(_BLANK_BYTES, home.nbytes - start), zeros) for start in starts]).wait()


def _undo_move(block: BlockWeights, home: ByteHome) -> None:
    """Brings back the parameters that had left when a move failed half-way; the others have not been touched."""
    if block.home is not None:
        return  # it has moved: `give_back` knows it
    for slot in block.slots:
        parameter = slot.parameter
        if parameter.numel() == slot.numel:
            continue
        own = torch.empty_strided(slot.shape, slot.stride, dtype=slot.master_dtype, device=parameter.device)
        home.read(slot.master_offset_bytes, slot.master_nbytes, own.untyped_storage()).wait()
        parameter.data = own.to(slot.given_dtype)
