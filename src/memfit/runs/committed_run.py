"""A committed run, opened to be read without its program: of one process, or of several ranks.

In: a run's directory. Out: its small state, and a home for each whole tensor, also where ranks have
it in parts; of ranks' stores, what is damaged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.core.errors import StoreError
from memfit.core.tiers import Tier
from memfit.engine.conversions import described, file_tensors
from memfit.files.names import keep_names
from memfit.homes import ByteHome, DiskHome
from memfit.homes.home import TransferGroup, TransferHandle
from memfit.homes.weights import BlockWeights
from memfit.runs.rank_record import RankRecord, TensorShare, find_record, read_shares
from memfit.runs.rank_stores import check_one_commit, merged_numbers
from memfit.runs.run_state import part
from memfit.runs.run_store import BUFFERS, FORMAT, in_memory_order, persistent_buffers
from memfit.store import BlockReport, CommittedStore, DiskStore, FileOperations, StoreReport, TensorPlace
from memfit.store.disk_store import common_commit
from memfit.store.files import store_error
from memfit.store.verify import check_store, summed_bytes


@dataclass(frozen=True, kw_only=True)
class CommittedTensor:
    """A tensor of the last commit.

    Attributes:
        region: of the store.
        tag: of the region: "weight", "master", "state" or "buffer".
        home: to read it from.
        place: in the home, in memory order.
    """

    region: str
    tag: str
    home: ByteHome
    place: TensorPlace


@dataclass(frozen=True, kw_only=True)
class CommittedRun:
    """The last commit of a run.

    Attributes:
        identity: text that tells whose it is.
        state: what belongs to the step beside tensors; of ranks that of the first, with the
            counters of all.
        tensors: whole ones.
        disk: the store of a run of one process, which may have a journal; None: ranks.
    """

    identity: Mapping[str, str]
    state: Mapping[str, Any]
    tensors: Sequence[CommittedTensor]
    disk: DiskStore | None


@contextmanager
def opened_to_be_read(directory: Path) -> Iterator[CommittedRun]:
    """Opens a run, compares all that is committed with its checksums, and gives it.

    Raises:
        StoreInUseError: a live job owns it.
        StoreError: there is no run, or it is damaged.
    """
    with ExitStack() as stack:
        record = find_record(directory)
        if record is not None and record.number:
            yield _of_ranks(directory, record, stack)
            return
        store = stack.enter_context(
            CommittedStore.open(directory, identity={"memfit run": FORMAT}, reads_only=True),
        )
        regions = store.disk.regions
        tensors = [
            CommittedTensor(region=name, tag=spec.tag, home=home, place=place)
            for name, spec in regions.items()
            for home in (DiskHome(store.region(name)),)
            for place in spec.tensors
        ]
        yield CommittedRun(identity=store.disk.identity, state=store.read_state(), tensors=tensors, disk=store.disk)


def _of_ranks(directory: Path, record: RankRecord, stack: ExitStack) -> CommittedRun:
    stores: list[CommittedStore] = []
    for rank, path in enumerate(record.paths(directory)):
        stores.append(stack.enter_context(CommittedStore.open(path, reads_only=True)))
        record.check(stores[-1].disk.identity, rank, path)
    states = [store.read_state() for store in stores]
    check_one_commit(states, directory)
    optimizer = {**part(states[0], "optimizer", dict), "numbers": merged_numbers(states)}
    tensors = [*_joined(stores, states, directory), *_buffers(stores[0])]
    return CommittedRun(
        identity=stores[0].disk.identity, state={**states[0], "optimizer": optimizer}, tensors=tensors, disk=None
    )


def _buffers(store: CommittedStore) -> Iterator[CommittedTensor]:
    """Yields the buffers of a rank: its own, as a job of ranks saves the first one's."""
    spec = store.disk.regions.get(BUFFERS)
    for place in () if spec is None else spec.tensors:
        yield CommittedTensor(region=BUFFERS, tag="buffer", home=DiskHome(store.region(BUFFERS)), place=place)


def _joined(
    stores: Sequence[CommittedStore], states: Sequence[Mapping[str, Any]], directory: Path
) -> Iterator[CommittedTensor]:
    """Yields the tensors that ranks have in parts, or whole."""
    found: dict[tuple[str, str], list[_RankPart]] = defaultdict(list)
    for store, state in zip(stores, states, strict=True):
        for region, shares in read_shares(state.get("shares")).items():
            spec = store.disk.regions.get(region)
            places = {} if spec is None else {place.name: place for place in spec.tensors}
            for share in shares:
                if share.count:
                    if share.name not in places:
                        raise store_error(f"{share.name!r:.200} is in no region of {store.disk.directory}: damaged")
                    home = DiskHome(store.region(region))
                    found[region, share.name].append(
                        _RankPart(share, home, places[share.name], spec.tag if spec else "")
                    )
    shapes = part(states[0], "shapes", dict)
    orders = part(part(states[0], "model", dict), "orders", dict)
    for (region, name), parts in found.items():
        parameter = name if name in shapes else name.rpartition(".")[0]
        if parameter not in shapes:
            raise store_error(f"the run in {directory} has {name!r:.200} of no weight: it is damaged")
        stride = orders[parameter]["stride"] if parameter in orders else None
        shape = in_memory_order(tuple(shapes[parameter]), None if stride is None else tuple(stride))
        home, place = _whole(name, parts, shape, directory)
        yield CommittedTensor(region=region, tag=parts[0].tag, home=home, place=place)


@dataclass(frozen=True)
class _RankPart:
    """Elements of a tensor that a rank has."""

    share: TensorShare
    home: DiskHome
    place: TensorPlace
    tag: str


def _whole(
    name: str, parts: Sequence[_RankPart], shape: tuple[int, ...], directory: Path
) -> tuple[ByteHome, TensorPlace]:
    """Joins the parts of a tensor.

    Args:
        name: of the tensor.
        parts: of the ranks, in order; several may have the same elements.
        shape: of its parameter, in memory order.
        directory: of the run, for messages.
    """
    numel = max(part.share.last for part in parts)
    is_encoded = parts[0].share.record_elements > 1
    whole = next((part for part in parts if part.share.count == numel), None)
    if whole is not None and not is_encoded:
        # In a shape of its own, which need not be the weight's.
        return whole.home, whole.place
    if not is_encoded and numel != math.prod(shape):
        raise store_error(f"the run in {directory} has {numel} elements of {name!r:.200}, not {math.prod(shape)}")
    joined = list(_ranges(name, parts, numel, directory))
    nbytes = sum(one.nbytes for one in joined)
    dtype = parts[0].place.dtype
    place = TensorPlace(name=name, dtype=dtype, shape=(nbytes,) if is_encoded else shape, offset=0)
    return _JoinedHome(joined), place


def _ranges(name: str, parts: Sequence[_RankPart], numel: int, directory: Path) -> Iterator[_Bytes]:
    """Yields where all elements lie, one range behind the other."""
    at, begin = 0, 0
    while at < numel:
        one = next((part for part in parts if part.share.first == at), None)
        if one is None:
            raise store_error(f"the run in {directory} lacks elements of {name!r:.200} from {at} on: it is damaged")
        offset, nbytes = one.share.span(at, one.share.last)
        yield _Bytes(begin, nbytes, one.home, offset)
        at, begin = one.share.last, begin + nbytes


@dataclass(frozen=True)
class _Bytes:
    """A range of a whole, and where it lies."""

    begin: int
    nbytes: int
    home: DiskHome
    offset: int


class _JoinedHome(ByteHome):
    """A whole whose ranges lie in several homes. It is read only."""

    tier = Tier.DISK

    def __init__(self, ranges: Sequence[_Bytes]) -> None:
        self._ranges = tuple(ranges)
        self.nbytes = sum(one.nbytes for one in ranges)

    @property
    def is_stored(self) -> bool:
        """See `ByteHome`."""
        return True

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        transfers: list[TransferHandle] = []
        try:
            for one in self._ranges:
                first, last = max(offset, one.begin), min(offset + nbytes, one.begin + one.nbytes)
                if first < last:
                    place = into_offset + first - offset
                    transfers.append(one.home.read(one.offset + first - one.begin, last - first, into, place))
        except BaseException:
            # Nothing may be on its way into memory that the caller gives up.
            TransferGroup(transfers).wait()
            raise
        return TransferGroup(transfers)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`: nothing may be written."""
        raise StoreError("a committed run that was opened to be read is not written")


def verify_rank_stores(
    directory: Path, record: RankRecord, *, on_progress: Callable[[int, int], None] | None = None
) -> StoreReport:
    """Reads all that a run on several ranks has committed and compares it with its checksums; see
    `store.verify`. Regions have the number of their rank before their name.

    Args:
        directory: of the run.
        record: names its set.
        on_progress: see `store.verify`.

    Raises:
        StoreInUseError: a live job has it.
        StoreError: a store is missing, or what holds it together is damaged, or they are of
            different commits.
    """
    paths = record.paths(directory)
    with ExitStack() as stack:
        stores = [stack.enter_context(DiskStore.open(path, reads_only=True)) for path in paths]
        # One that was interrupted is no damage where the next to open the run finishes it.
        common_commit(paths, record.check, operations=FileOperations())
        sizes = [summed_bytes(store) for store in stores]
        blocks: list[BlockReport] = []
        problems: list[str] = []
        steps: list[int | None] = []
        for rank, store in enumerate(stores):
            before = sum(sizes[:rank])
            told = None if on_progress is None else lambda done, _, on=on_progress, at=before: on(at + done, sum(sizes))
            found = check_store(store, on_progress=told)
            blocks += [replace(block, name=f"rank {rank}: {block.name}") for block in found.blocks]
            problems += [] if found.state_problem is None else [f"rank {rank}: {found.state_problem}"]
            steps.append(found.step)
    step = None if None in steps else min(step for step in steps if step is not None)
    return StoreReport(directory=directory, step=step, blocks=tuple(blocks), state_problem="; ".join(problems) or None)


# Facts of a model that an export needs when the model is not there.
#
# In: a model and its blocks. Out: plain values: names of its `state_dict`, ties, memory orders, its
# configuration.


def model_facts(model: nn.Module, blocks: Sequence[BlockWeights]) -> dict[str, Any]:
    """Returns the facts.

    What is plain is left out: a model of the library's takes some hundred bytes.
    """
    kept = keep_names(model)
    known = {id(slot.parameter): slot.name for block in blocks for slot in block.slots}
    names = {name: known.get(id(tensor), name) for name, tensor in kept.tensors.items()}
    own = {*known.values(), *(name for name, _ in persistent_buffers(model))}
    config, generation = described(model, blocks)
    return {
        "class": type(model).__name__,
        "names": {parameter: name for name, parameter in names.items() if name != parameter},
        "ignored": sorted(own - set(names.values())),
        "tied": dict(kept.tied),
        "files": _files(model, {name: tuple(tensor.shape) for name, tensor in kept.tensors.items()}),
        "orders": {
            slot.name: {"shape": list(slot.shape), "stride": list(slot.stride)}
            for block in blocks
            for slot in block.slots
            if not _is_row_major(slot.shape, slot.stride)
        },
        "config": config.to_json_string() if hasattr(config, "to_json_string") else None,
        "generation_config": None if generation is None else generation.to_json_string(),
    }


def _files(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """Returns the tensors of the model's files; None where they are those of its `state_dict`."""
    found = file_tensors(model, shapes)
    is_plain = found.keys() == shapes.keys() and all(
        wanted.shape == shapes[name] and len(wanted.parts) == 1 and wanted.parts[0].name == name
        for name, wanted in found.items()
    )
    if is_plain:
        return None
    return {
        name: {"shape": list(wanted.shape), "parts": [[part.name, part.first, part.count] for part in wanted.parts]}
        for name, wanted in found.items()
    }


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return tuple(torch.empty(shape, device="meta").stride()) == stride
