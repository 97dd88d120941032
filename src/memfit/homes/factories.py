"""Factories of homes, one for each tier, in a table that a job is given.

In: requests, each for a region of bytes in a tier. Out: homes, and pools of homes for tensors that
are offloaded within a step.

[Note: a tier is an entry]
The code that places weights, states and gradients (`engine.housing`) looks a tier up in a table of
`HomeFactory`s and knows nothing else about it. Memory and disk are two entries (`own_factories`);
memory of another machine, or homes that several processes share, are further entries, which a job
is given as `FurtherTier`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from memfit import devices
from memfit.core.errors import StoreError, UsageError
from memfit.core.hardware import LinkTraffic, TierSpec
from memfit.core.limits import MIB
from memfit.core.tiers import Tier
from memfit.homes.disk import DiskHome
from memfit.homes.home import ByteHome, TransferGroup
from memfit.homes.memory import LinkMeter, MemoryHome
from memfit.homes.offloaded import HomePool, HostPool, ScratchPool
from memfit.homes.regions import RegionStore, WorkingStore
from memfit.homes.staging import Staging
from memfit.store import DiskIO, RegionSpec, ScratchFile
from memfit.store.directory import TemporaryDirectory, sweep

_BLANK_BYTES = 4 * MIB
BytesByTag = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class HomeRequest:
    """A home that a plan asks for.

    Attributes:
        region: its name, unique in a job (`homes.regions`).
        nbytes: its size.
        tier: its tier.
        tag: "weight", "master", "state" or "gradient".
        ends: offsets at which tensors end that nothing else shares a page with; see `DiskHome`.
        is_updated_on_host: the host's cores update it, wherever it rests, beside an accelerator.
        is_versioned: a failed step must leave its bytes unchanged, as far as the tier can (two
            slots on disk).
    """

    region: str
    nbytes: int
    tier: Tier
    tag: str
    ends: tuple[int, ...] = ()
    is_versioned: bool = False
    is_updated_on_host: bool = False


class HomeFactory:
    """Factory of the homes of one tier, for one job; abstract. See [Note: a tier is an entry]."""

    def prepare(self, requests: Sequence[HomeRequest], *, offloads: bool) -> None:
        """Prepares for all homes that will be requested, before the first is.

        Args:
            requests: requests for this tier.
            offloads: saved tensors are offloaded to it, so that `pool` will be called.
        """

    def home(self, request: HomeRequest) -> ByteHome:
        """Makes one of the prepared homes. Its content is undefined until it was written whole."""
        raise NotImplementedError

    def pool(self) -> HomePool:
        """Returns the pool that makes homes of offloaded tensors."""
        raise NotImplementedError

    def begin(self) -> None:
        """Declares what homes hold now the first version."""

    def publish(self, step: int, changed: Sequence[str], *, is_new: bool) -> None:
        """Makes new versions of regions current, all at once; see `RegionStore.publish`."""

    def published_since(self, step: int) -> int | None:
        """See `RegionStore.published_since`."""
        return None

    @property
    def bytes_moved(self) -> tuple[BytesByTag, BytesByTag]:
        """Returns (read, written) bytes since the beginning, by purpose, if the tier counts
        them.
        """
        return {}, {}

    def take_traffic(self) -> Mapping[str, LinkTraffic]:
        """Returns what transfers took since it was asked last, by direction ("read", "write"), if
        the tier measures them.
        """
        return {}

    def used(self) -> Mapping[str, LinkTraffic]:
        """Returns what transfers took since the beginning, by direction, if the tier counts it all
        along.
        """
        return {}

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of the tier that homes and offloaded tensors have claimed, if it counts
        them.
        """
        return 0

    def close(self) -> None:
        """Waits for all transfers and releases everything. May be repeated."""


FactoryMaker = Callable[[torch.device], HomeFactory]


@dataclass(frozen=True, kw_only=True)
class FurtherTier:
    """A tier beside memfit's own, as it is given to `fit(tiers=...)`.

    Attributes:
        spec: its capacity, and the link between the device and it.
        make: makes the factory of its homes for a device; called once for each plan of a job.
    """

    spec: TierSpec
    make: FactoryMaker


def further_tiers(tiers: Mapping[str, FurtherTier]) -> dict[Tier, FurtherTier]:
    """Reads tiers as they are given to `fit(tiers=...)`.

    Raises:
        UsageError: a name that no tier may have, or something else than a `FurtherTier`.
    """
    for name, given in tiers.items():
        if not isinstance(given, FurtherTier):
            raise UsageError(f"tiers={{{name!r}: ...}} takes a memfit.homes.factories.FurtherTier, not {given!r:.80}")
    return {Tier(name): given for name, given in tiers.items()}


class MemoryFactory(HomeFactory):
    """Homes in memory of the device, or of the host beside it.

    Args:
        tier: DEVICE or HOST.
        device: where compute runs.
        stream: the copy stream, for host memory beside an accelerator, and for device memory that
            the host updates.
        writes: the stream of writes; None: that of reads too.
        measures: what copies take is measured.
        ledger: a context in which homes are allocated.
    """

    def __init__(
        self,
        tier: Tier,
        device: torch.device,
        *,
        stream: torch.Stream | None = None,
        writes: torch.Stream | None = None,
        measures: bool = False,
        ledger: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._tier = tier
        self._device = device
        self._stream = stream
        self._writes = writes
        self._ledger = ledger
        self._homes: list[MemoryHome] = []
        self._meter: LinkMeter | None = None
        self._pool: HostPool | None = None
        if not tier.traits.is_device:
            self._meter = LinkMeter() if measures and stream is not None else None
            self._pool = HostPool(device, stream=stream, writes=writes, meter=self._meter, ledger=ledger)

    def home(self, request: HomeRequest) -> ByteHome:
        """See `HomeFactory`."""
        crosses = request.is_updated_on_host or not self._tier.traits.is_device
        stream, writes = (self._stream, self._writes) if crosses else (None, None)
        with self._ledger():
            self._homes.append(
                MemoryHome(
                    request.nbytes,
                    tier=self._tier,
                    device=self._device,
                    stream=stream,
                    writes=writes,
                    meter=self._meter,
                )
            )
        return self._homes[-1]

    def pool(self) -> HomePool:
        """See `HomeFactory`."""
        assert self._pool is not None, "nothing is offloaded to the device"
        return self._pool

    def take_traffic(self) -> Mapping[str, LinkTraffic]:
        """See `HomeFactory`."""
        return {} if self._meter is None else self._meter.take()

    @property
    def held_bytes(self) -> int:
        """See `HomeFactory`."""
        return sum(home.nbytes for home in self._homes) + (0 if self._pool is None else self._pool.reserved_bytes)

    def close(self) -> None:
        """See `HomeFactory`."""
        with ExitStack() as stack:
            if self._pool is not None:
                stack.callback(self._pool.close)
            while self._homes:
                stack.callback(self._homes.pop().close)


class FileFactory(HomeFactory):
    """Homes in regions of a store on disk, and a scratch file for offloaded tensors.

    Regions that the given store has are taken from it; all others lie in a working store of the
    job's own, which is deleted at the end.

    Memory: the disk's staging (1 MiB a worker), and beside an accelerator that of `Staging`.

    Args:
        directory: for the working store; None makes a temporary one.
        device: where compute runs.
        stream: the copy stream of an accelerator.
        leaving: the stream of copies from the device; None: that of copies to it too.
        ledger: a context in which staging is allocated.
        kept: a store that outlives the job.
    """

    def __init__(
        self,
        directory: str | Path | None,
        device: torch.device,
        *,
        stream: torch.Stream | None = None,
        leaving: torch.Stream | None = None,
        ledger: Callable[[], AbstractContextManager[None]] = nullcontext,
        kept: RegionStore | None = None,
    ) -> None:
        self._directory = directory
        self._kept = kept
        self._temporary: TemporaryDirectory | None = None
        self._io: DiskIO | None = None if kept is None else kept.io
        self._working: WorkingStore | None = None
        self._scratch: ScratchFile | None = None
        self.staging = None if stream is None else Staging(device, stream=stream, leaving=leaving, ledger=ledger)
        self._taken: Mapping[str, LinkTraffic] = {}

    def prepare(self, requests: Sequence[HomeRequest], *, offloads: bool) -> None:
        """See `HomeFactory`.

        Raises:
            StoreError: there is no room for the files, or no such directory.
        """
        regions = {
            r.region: RegionSpec(nbytes=r.nbytes, slots=2 if r.is_versioned else 1, tag=r.tag)
            for r in requests
            if self._kept is None or not self._kept.has(r.region)
        }
        if self._kept is not None:
            sweep(self._kept.directory)
        if not regions and not offloads:
            return
        if self._directory is None:
            self._temporary = TemporaryDirectory(None if self._kept is None else self._kept.directory)
            where = self._temporary.path / "homes"
        else:
            where = Path(self._directory)
            if not where.parent.is_dir():
                raise StoreError(
                    f"the directory {str(where)!r} cannot be made: its parent {str(where.parent)!r} does not exist; make it, or name another"
                )
        self._io = self._io or DiskIO()
        self._working = WorkingStore(where, regions, self._io)
        if offloads:
            self._scratch = ScratchFile(where, io=self._io)

    def home(self, request: HomeRequest) -> ByteHome:
        """See `HomeFactory`."""
        is_kept = self._kept is not None and self._kept.has(request.region)
        regions = self._kept if is_kept else self._working
        assert regions is not None
        home = regions.home(request.region, request.ends, self.staging)
        # A region of the given store holds zeros until it is filled, and is whole from its first
        # commit on.
        if not is_kept and home.has_spare_slot:
            _blank(home)
        return home

    def pool(self) -> HomePool:
        """See `HomeFactory`."""
        assert self._scratch is not None, "nothing is offloaded to files"
        return ScratchPool(self._scratch, self.staging)

    def begin(self) -> None:
        """See `HomeFactory`."""
        if self._working is not None:
            self._working.publish(0, (), is_new=True)

    @property
    def _versions(self) -> RegionStore | None:
        """The store whose regions have versions: the given one, or the job's own."""
        return self._working if self._kept is None else self._kept

    def publish(self, step: int, changed: Sequence[str], *, is_new: bool) -> None:
        """See `HomeFactory`."""
        if self._versions is not None:
            self._versions.publish(step, changed, is_new=is_new)

    def published_since(self, step: int) -> int | None:
        """See `HomeFactory`."""
        return None if self._versions is None else self._versions.published_since(step)

    @property
    def bytes_moved(self) -> tuple[BytesByTag, BytesByTag]:
        """See `HomeFactory`."""
        by_tag = {} if self._io is None else self._io.statistics().by_tag
        return (
            {tag: traffic.read_bytes for tag, traffic in by_tag.items()},
            {tag: traffic.written_bytes for tag, traffic in by_tag.items()},
        )

    def used(self) -> Mapping[str, LinkTraffic]:
        """See `HomeFactory`: of all transfers of the same threads, a store's commits too."""
        return {} if self._io is None else self._io.used()

    def take_traffic(self) -> Mapping[str, LinkTraffic]:
        """See `HomeFactory`."""
        before, self._taken = self._taken, self.used()
        return {way: now.since(before.get(way, LinkTraffic())) for way, now in self._taken.items()}

    @property
    def held_bytes(self) -> int:
        """See `HomeFactory`. Of a store that outlives the job all that it claimed."""
        return (
            (0 if self._kept is None else self._kept.nbytes)
            + (0 if self._working is None else self._working.nbytes)
            + (0 if self._scratch is None else self._scratch.statistics().file_bytes)
        )

    def close(self) -> None:
        """See `HomeFactory`.

        Raises:
            StoreError: files could not be removed. All else is released nevertheless.
        """
        with ExitStack() as stack:
            # Backwards: transfers end, then files go.
            if self._temporary is not None:
                stack.callback(self._temporary.remove)
            if self._io is not None and self._kept is None:
                stack.callback(self._io.close)
            if self._working is not None:
                stack.callback(self._working.close)
            if self._scratch is not None:
                stack.callback(self._scratch.close)
            if self.staging is not None:
                stack.callback(self.staging.close)


def own_factories(
    device: torch.device,
    directory: str | Path | None,
    *,
    host_ledger: Callable[[], AbstractContextManager[None]] = nullcontext,
    kept: RegionStore | None = None,
    further: Mapping[Tier, FurtherTier] | None = None,
    measures_links: bool = False,
) -> dict[Tier, HomeFactory]:
    """Returns the table of a job: memory of the device and of the host, files, and further tiers.

    Args:
        device: where compute runs.
        directory: of homes on disk; None makes a temporary one that is deleted at the end.
        host_ledger: a context in which host homes are allocated (counts them apart on an emulated
            device).
        kept: a store that outlives the job, whose regions are used if it has them.
        further: tiers beside memfit's own, or in place of them.
        measures_links: what copies between an accelerator and its host take is measured.
    """
    coming = leaving = down = up = None
    if devices.is_accelerator(device):
        # Each way its own, see [Note: two copy streams] in `homes.memory`. Weights that the host
        # updates come down and go up beside what homes on the host move.
        coming, leaving, down, up = (devices.of(device).new_stream(device) for _ in range(4))
    own: dict[Tier, HomeFactory] = {
        Tier.DEVICE: MemoryFactory(Tier.DEVICE, device, stream=down, writes=up),
        Tier.HOST: MemoryFactory(
            Tier.HOST, device, stream=coming, writes=leaving, measures=measures_links, ledger=host_ledger
        ),
        Tier.DISK: FileFactory(directory, device, stream=coming, leaving=leaving, ledger=host_ledger, kept=kept),
    }
    return own | {tier: each.make(device) for tier, each in (further or {}).items()}


def used_by(factories: Mapping[Tier, HomeFactory]) -> dict[str, LinkTraffic]:
    """Returns what transfers of tiers that count it took so far, by lane ("disk read")."""
    return {f"{tier} {way}": one for tier, factory in factories.items() for way, one in factory.used().items()}


def _blank(home: DiskHome) -> None:
    """Writes zeros, so that a first version is whole. Costs one buffer of 4 MiB and writing the
    home once.
    """
    zeros = torch.zeros(min(_BLANK_BYTES, home.nbytes), dtype=torch.uint8).untyped_storage()
    starts = range(0, home.nbytes, _BLANK_BYTES)
    TransferGroup([home.write(start, min(_BLANK_BYTES, home.nbytes - start), zeros) for start in starts]).wait()
