"""The record of a run on several ranks: which set of stores is the run, and whose they are.

In: a run's directory, trusted in nothing. Out: the record, with the folders of the stores that it
names; or an error that says how to name a set. Sets that may go, and their removal.

[Note: whose stores]
`ranks.json` names the run and its set; the manifest of each store has the same name, the set and
the rank in its identity. All are compared before anything is written. The name is drawn when the
first set is made. The record has set 0 then, until the first step is committed, so that a committed
set without a record is one whose record was lost, and never one that a crash left. A set goes when
it is of the run and the record names another one that was opened, or when none of its stores was
ever committed; what belongs to somebody else stays. Version 1 of the record has no name and no
checksum, and its stores have neither run nor rank: they are read, and the next set is of version 2.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from memfit.core.documents import parse_json, read_document
from memfit.core.errors import StoreError, StoreInUseError
from memfit.homes.exchanged_gradients import RegionPart, Sharing
from memfit.homes.optimizer_states import BlockStates, StateSlot
from memfit.homes.regions import master_region, state_region, weight_region
from memfit.homes.weights import BlockWeights
from memfit.store import FileOperations, RegionSpec, TensorPlace
from memfit.store.directory import data_names, is_there, is_unfinished, read_manifest_file, remove_files
from memfit.store.files import explain, store_error, sync_directory, write_small_file
from memfit.store.lock import DirectoryLock
from memfit.store.manifest import MANIFEST_NAME, PARTIAL_MANIFEST_NAME, Manifest

RANKS_NAME = "ranks.json"
"""Name of the record in the directory of the run."""
RANKS_IDENTITY = {"memfit run of ranks": "1"}
_FORMAT = "memfit-ranks"
_LIMIT_BYTES = 4096
_MOST_RANKS, _MOST_SETS = 1 << 16, 10**9
_SET = re.compile(r"set-([1-9][0-9]{0,8})")
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,4})")


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Record of a run.

    Attributes:
        number: of the set that is the run; 0 before the first commit.
        ranks: that the set is of.
        run: name of the run, drawn; empty in version 1.
    """

    number: int
    ranks: int
    run: str

    def identity(self, rank: int) -> dict[str, str | None]:
        """Returns what the identity of a rank's store must have; None: no such key."""
        place = f"{rank} of {self.ranks} in set {self.number}"
        return {**RANKS_IDENTITY, "run": self.run or None, "rank": place if self.run else None}

    def is_of(self, identity: Mapping[str, str], rank: int) -> bool:
        """True if an identity is that of a rank's store."""
        return all(identity.get(key) == value for key, value in self.identity(rank).items())

    def check(self, identity: Mapping[str, str], rank: int, path: Path) -> None:
        """Refuses a store that is not this run's, or another rank's. Raises `StoreError`."""
        if not self.is_of(identity, rank):
            raise store_error(
                f"{path} is not the store of rank {rank} of this run: its manifest says run {identity.get('run')!r:.80}, rank {identity.get('rank')!r:.80}. "
                f"Put the folder back that belongs there, or restore all of {path.parent.name} and {RANKS_NAME} from one copy"
            )

    def paths(self, directory: Path) -> list[Path]:
        """Returns the folders of the stores that are the run, by rank.

        Raises:
            StoreError: a folder is missing, or a link.
        """
        assert self.number, "nothing was committed, so that there are no stores"
        paths = [rank_store_path(directory, self.number, rank) for rank in range(self.ranks)]
        for path in (paths[0].parent, *paths):
            if path.is_symlink() or not path.is_dir():
                what = "a link, behind which nothing is written" if path.is_symlink() else "missing"
                raise store_error(
                    f"the run in {directory} is on {self.ranks} ranks, and its folder {path} is {what}: put the folder itself there, or restore it from a copy"
                )
        return paths

    def text(self) -> str:
        """Returns the record as it is written."""
        if not self.run:
            return json.dumps({"format": _FORMAT, "version": 1, "ranks": self.ranks, "set": self.number})
        fields = {"format": _FORMAT, "version": 2, "ranks": self.ranks, "set": self.number, "run": self.run}
        return json.dumps({**fields, "checksum": f"{zlib.crc32(json.dumps(fields).encode()):08x}"})

    def write(self, directory: Path) -> None:
        """Makes this the record of a directory, durably. Raises `StoreError`."""
        operations, fresh = FileOperations(), directory / f"{RANKS_NAME}.new"
        try:
            write_small_file(fresh, self.text().encode(), operations=operations, durable=True)
            operations.rename(fresh, directory / RANKS_NAME)
            sync_directory(directory, operations=operations)
        except OSError as error:
            raise explain(error, doing="name the run's stores", path=fresh) from error


def rank_store_path(directory: Path, number: int, rank: int) -> Path:
    """Returns the folder of a rank's store in a set of a run."""
    return directory / f"set-{number}" / f"rank-{rank}"


def parse_record(text: str | bytes) -> RankRecord:
    """Reads what `RankRecord.text` wrote.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    found = parse_json(text)
    fields: dict[str, Any] = found if isinstance(found, dict) else {}
    number, ranks, run = (fields.get(key, "") for key in ("set", "ranks", "run"))
    if type(number) is not int or type(ranks) is not int or not isinstance(run, str):
        raise ValueError("it is not the record of a run on several ranks")
    record = RankRecord(number=number, ranks=ranks, run=run)
    if not 0 <= number < _MOST_SETS or not 1 <= ranks <= _MOST_RANKS or parse_json(record.text()) != fields:
        raise ValueError("its checksum does not match, or it is of another version of memfit")
    return record


def find_record(directory: Path) -> RankRecord | None:
    """Returns the record of a run on several ranks; None if there is no such run.

    Raises:
        StoreError: it is lost or damaged, or older than a set of the run: the message says how to
            name a set.
    """
    path = directory / RANKS_NAME
    if not is_there(path):
        for each in _sets(directory):
            if _may_be_committed(each):
                raise store_error(f"{path} is gone, and {each} holds stores of ranks. {_cure(directory)}")
        return None
    try:
        record = parse_record(read_document(path, limit_bytes=_LIMIT_BYTES))
    except OSError as error:
        raise explain(error, doing="read the record of the run", path=path) from error
    except ValueError as error:
        raise store_error(f"{path} is damaged: {str(error)[:200]}. {_cure(directory)}") from error
    for each in _sets(directory):
        found = [manifest for manifest in map(_manifest, _stores(each)) if manifest is not None]
        # The first commit of a set comes before the record that names it, and the second one after.
        if _number(each) > record.number and any(m.generation > 1 and _run(m) == record.run for m in found):
            raise store_error(f"{path} names set-{record.number}, older than {each}. {_cure(directory)}")
    return record


def next_number(directory: Path) -> int:
    """Returns the number of a set that is not there yet."""
    return 1 + max(map(_number, _sets(directory)), default=0)


def sweep_sets(directory: Path, record: RankRecord) -> None:
    """Removes the sets beside the named one that are the run's, or were never committed. Somebody
    else's stay, and for now one that is being read. See [Note: whose stores].

    Args:
        directory: of the run.
        record: names a set that was opened, or none.

    Raises:
        StoreError: something cannot be removed.
    """
    for path in _sets(directory):
        is_ours = record.run and all(_run(_manifest(store)) == record.run for store in _stores(path))
        is_rubbish = is_ours or not _may_be_committed(path)
        if is_rubbish and _number(path) != record.number and not path.is_symlink():
            with suppress(StoreInUseError):
                remove_set(path)


def remove_set(path: Path) -> None:
    """Removes the stores of a set. What else lies in it stays.

    Raises:
        StoreInUseError: a process has one of them; nothing was removed.
        StoreError: something cannot be removed.
    """
    operations, stores = FileOperations(), _stores(path)
    with ExitStack() as stack:
        for store in stores:
            lock = DirectoryLock(store, operations=operations)
            stack.callback(_remove_empty, store)
            stack.callback(lock.release, remove=True)
        for store in stores:
            remove_files(store, data_names(store), durable=True, operations=operations)
    _remove_empty(path)


def remove_rank_stores(directory: Path, record: RankRecord) -> None:
    """Removes the stores of a run on several ranks, and last what names them.

    Raises:
        StoreInUseError: a process has it; nothing was removed.
        StoreError: a store of its set is not this run's, or something cannot be removed.
    """
    operations, named = FileOperations(), directory / f"set-{record.number}"
    lock = DirectoryLock(directory, operations=operations)
    try:
        for store in _stores(named):
            manifest = _manifest(store)
            record.check({} if manifest is None else manifest.identity, _number(store), store)
        remove_set(named)
        sweep_sets(directory, record)
        try:
            operations.unlink(directory / RANKS_NAME)
        except OSError as error:
            raise explain(error, doing="remove the run's name", path=directory) from error
    finally:
        lock.release(remove=True)


def _sets(directory: Path) -> list[Path]:
    """Returns the sets in a directory, the newest first."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in paths if _SET.fullmatch(path.name)), key=_number, reverse=True)


def _stores(path: Path) -> list[Path]:
    """Returns the stores in a set, by rank."""
    paths = path.iterdir() if path.is_dir() else ()
    return sorted((path for path in paths if _RANK.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _manifest(store: Path) -> Manifest | None:
    """Returns the manifest of a store, also of one that is being made or removed; None if there is
    none that can be read, or behind a link.
    """
    name = PARTIAL_MANIFEST_NAME if is_unfinished(store) else MANIFEST_NAME
    with suppress(StoreError):
        return None if store.is_symlink() else read_manifest_file(store, operations=FileOperations(), name=name)
    return None


def _run(manifest: Manifest | None) -> str | None:
    return None if manifest is None else manifest.identity.get("run")


def _may_be_committed(path: Path) -> bool:
    """True if a set may have a committed store, as far as its files say."""
    for store in (path, *_stores(path)):
        if store.is_symlink():
            return True
        manifest = _manifest(store)
        has_files = is_there(store / MANIFEST_NAME) or (bool(data_names(store)) and not is_unfinished(store))
        if has_files and (manifest is None or manifest.step is not None):
            return True
    return False


def _cure(directory: Path) -> str:
    """Says how to name the newest set that is whole."""
    for path in _sets(directory):
        manifests = [_manifest(store) for store in _stores(path)]
        record = RankRecord(number=_number(path), ranks=len(manifests), run=_run(next(iter(manifests), None)) or "")
        committed = [each for each in manifests if each is not None and each.step is not None]
        is_whole = 0 < len(committed) == len(manifests)
        if is_whole and all(record.is_of(each.identity, rank) for rank, each in enumerate(committed)):
            return f"Restore {RANKS_NAME} from a copy, or make this line its content, which names {path.name} at step {committed[0].step}:\n{record.text()}"
    return "Restore the directory from a copy, or choose another one"


def _remove_empty(path: Path) -> None:
    with suppress(OSError):  # what else lies in it is not ours
        path.rmdir()


# Layout of a rank's store, where ranks share homes: the regions of a process alone, cut.
#
# In: the regions of the whole, what this rank has of each. Out: the regions of its store, and which
# elements of which tensors lie where in them, by which any number of ranks finds what it needs.


@dataclass(frozen=True)
class TensorShare:
    """Elements of a tensor that a rank's store holds, one after the other in a region.

    Attributes:
        name: of the tensor.
        first: element.
        count: of elements.
        offset: of the first one in the region, in bytes.
        record_elements: elements that are stored together.
        record_bytes: their bytes.
    """

    name: str
    first: int
    count: int
    offset: int
    record_elements: int
    record_bytes: int

    @property
    def last(self) -> int:
        """The element behind the last one."""
        return self.first + self.count

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Returns offset and bytes, in the region, of elements [first, last); the first begins a
        record, and the last ends one, or the tensor.
        """
        begin = (first - self.first) // self.record_elements * self.record_bytes
        return self.offset + begin, -(-(last - first) // self.record_elements) * self.record_bytes


Shares = Mapping[str, Sequence[TensorShare]]
"""By region, what a rank's store holds."""


def rank_regions(
    regions: Mapping[str, RegionSpec], blocks: Sequence[BlockWeights], sharing: Sharing
) -> dict[str, RegionSpec]:
    """Returns a rank's regions: those of a process alone, with weights and masters cut. States are
    laid out by what a rank has of them already.
    """
    found = dict(regions)
    for block in blocks:
        for region, tag in ((weight_region(block.name), "weight"), (master_region(block.name), "master")):
            spec = regions.get(region)
            if spec is not None:
                part = sharing.part(block, tag)
                places = zip(block.slots, part.elements, spec.tensors, strict=True)
                tensors = [_placed(place, part, held, slot.numel) for slot, held, place in places if held]
                found[region] = replace(spec, nbytes=part.nbytes, tensors=tuple(tensors))
    return found


def _placed(place: TensorPlace, part: RegionPart, held: range, numel: int) -> TensorPlace:
    offset = place.offset + held.start * place.torch_dtype.itemsize - part.first
    return replace(place, offset=offset, shape=place.shape if len(held) == numel else (len(held),))


def shares_of(
    regions: Mapping[str, RegionSpec],
    blocks: Sequence[BlockWeights],
    states: Mapping[int, BlockStates],
    sharing: Sharing,
) -> Shares:
    """Returns which elements a rank's regions hold.

    Args:
        regions: of the rank.
        blocks: of the model.
        states: by block index.
        sharing: of the homes.
    """
    found: dict[str, list[TensorShare]] = {}
    for block in blocks:
        for region, tag in ((weight_region(block.name), "weight"), (master_region(block.name), "master")):
            if region in regions:
                held = {s.name: e for s, e in zip(block.slots, sharing.part(block, tag).elements, strict=True)}
                found[region] = [_of_place(place, held[place.name]) for place in regions[region].tensors]
        if state_region(block.name) in regions:
            found[state_region(block.name)] = list(_of_states(states[block.index]))
    return found


def _of_place(place: TensorPlace, held: range) -> TensorShare:
    return TensorShare(place.name, held.start, len(held), place.offset, 1, place.torch_dtype.itemsize)


def _of_states(states: BlockStates) -> Iterator[TensorShare]:
    for name, slots in states.slots.items():
        for state in slots:
            yield TensorShare(f"{name}.{state.key}", state.first, state.numel, state.offset_bytes, *_record(state))


def _record(state: StateSlot) -> tuple[int, int]:
    if state.codec is None:
        return 1, state.dtype.itemsize
    return state.codec.records.elements, state.codec.records.nbytes


def write_shares(shares: Shares) -> dict[str, Any]:
    """Returns shares as values of a small state."""
    return {region: [list(astuple(share)) for share in found] for region, found in shares.items()}


def read_shares(found: Any) -> Shares:
    """Returns the shares that `write_shares` wrote.

    Raises:
        StoreError: the values are damaged.
    """
    kinds = [str, int, int, int, int, int]
    if not isinstance(found, dict) or not all(
        isinstance(entry, list) and [type(value) for value in entry] == kinds and min(entry[1:4]) >= 0 < min(entry[4:])
        for entries in found.values()
        for entry in (entries if isinstance(entries, list) else [None])
    ):
        raise StoreError("the state of the step has no proper 'shares': it is damaged, or of another version of memfit")
    return {region: [TensorShare(*entry) for entry in entries] for region, entries in found.items()}
