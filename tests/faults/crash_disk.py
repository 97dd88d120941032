"""A disk that remembers what it was told and in which order, and every state that a power cut could leave of it.

`RecordedDisk` stands below a store, works on real files, and notes each change. `crash_states` takes the notes up to some
moment and yields what may be found after the power came back. The rules are those that POSIX gives and no more:

- data written to a file is durable after `fdatasync` or `fsync` of that file; until then each part of each write may be
  there or not, in any order (lost, torn and reordered writes);
- names made, renamed or removed are durable after `fsync` of the directory; until then each of them may have happened or
  not, in any order, but a rename happens at once;
- a sync that failed makes nothing durable, and neither does a later one that succeeds: the kernel has let go of the pages.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memfit.store import FileOperations

SECTOR_BYTES = 512


@dataclass(frozen=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resize:
    """To `nbytes` if that is longer, or to nothing."""

    file: int
    nbytes: int


@dataclass(frozen=True)
class Name:
    """`name` now leads to `file`, or to nothing; a rename also takes the old name away."""

    name: str
    file: int | None
    old_name: str | None = None


@dataclass(frozen=True)
class SyncFile:
    file: int
    is_ok: bool = True


@dataclass(frozen=True)
class SyncNames:
    is_ok: bool = True


@dataclass(frozen=True)
class Attempt:
    """A commit begins: from here on the step may be found."""

    step: int


@dataclass(frozen=True)
class Promise:
    """Control came back from a commit: from here on the step must be found."""

    step: int


Note = Write | Resize | Name | SyncFile | SyncNames | Attempt | Promise
Files = dict[str, bytes]


class PowerCutError(OSError):
    """Nothing goes through any more."""


class RecordedDisk(FileOperations):
    """Real files without real syncs, and notes of every change.

    Args:
        directory: the store's; what happens elsewhere, and to the lock file, is not noted.

    Attributes:
        notes: in the order of the calls.
        before: called with a running number and the kind of each change before it is made; may raise `OSError`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notes: list[Note] = []
        self.calls = 0
        self.before: Callable[[int, str], None] = lambda number, kind: None
        self._names: dict[str, int] = {}
        self._descriptors: dict[int, int] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def _ask(self, kind: str) -> None:
        number, self.calls = self.calls, self.calls + 1
        self.before(number, kind)

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        with self._lock:
            parts = path.parts
            if parts[:4] == ("/", "proc", "self", "fd"):
                file = self._descriptors.get(int(parts[4]))
                descriptor = super().open(path, flags & ~os.O_DIRECT, mode)
            elif path.parent != self.directory or path.name == "lock":
                return super().open(path, flags, mode)
            else:
                is_change = path.name not in self._names if flags & os.O_CREAT else bool(flags & os.O_TRUNC)
                if is_change:
                    self._ask("open")
                descriptor = super().open(path, flags & ~os.O_DIRECT, mode)
                file = self._names.get(path.name)
                if file is None:
                    file = self._names[path.name] = next(self._numbers)
                    self.notes.append(Name(path.name, file))
                elif flags & os.O_TRUNC:
                    self.notes.append(Resize(file, 0))
            if file is not None:
                self._descriptors[descriptor] = file
            return descriptor

    def close(self, descriptor: int) -> None:
        with self._lock:
            self._descriptors.pop(descriptor, None)
            super().close(descriptor)

    def pwrite(self, descriptor: int, source: memoryview, offset: int) -> int:
        with self._lock:
            file = self._descriptors.get(descriptor)
            if file is None:
                return super().pwrite(descriptor, source, offset)
            try:
                self._ask("pwrite")
            except InterruptedError:
                source = source[: max(1, source.nbytes // 2 // SECTOR_BYTES * SECTOR_BYTES)]  # A short write.
            written = super().pwrite(descriptor, source, offset)
            self.notes.append(Write(file, offset, bytes(source[:written])))
            return written

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        with self._lock:
            self._ask("allocate")
            super().allocate(descriptor, offset, nbytes)
            self.notes.append(Resize(self._descriptors[descriptor], offset + nbytes))

    def fdatasync(self, descriptor: int) -> None:
        self.fsync(descriptor)

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            file = self._descriptors.get(descriptor)
            is_directory = Path(f"/proc/self/fd/{descriptor}").readlink() == self.directory
            if file is None and not is_directory:
                return
            try:
                self._ask("fsync")
            except PowerCutError:
                raise
            except OSError:
                self.notes.append(SyncNames(is_ok=False) if file is None else SyncFile(file, is_ok=False))
                raise
            self.notes.append(SyncNames() if file is None else SyncFile(file))

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            self._ask("rename")
            super().rename(source, target)
            self._names[target.name] = self._names.pop(source.name)
            self.notes.append(Name(target.name, self._names[target.name], source.name))

    def unlink(self, path: Path) -> None:
        with self._lock:
            if path.name != "lock":
                self._ask("unlink")
            super().unlink(path)
            if path.name != "lock":
                self._names.pop(path.name)
                self.notes.append(Name(path.name, None))

    def attempt(self, step: int) -> None:
        """Notes that a commit begins."""
        self.notes.append(Attempt(step))

    def promise(self, step: int) -> None:
        """Notes that a commit has returned."""
        self.notes.append(Promise(step))


@dataclass
class _Change:
    """A change and whether a power cut may still take it: "durable", "pending", or "lost" by a sync that failed."""

    what: Write | Resize | Name
    status: str = "pending"


@dataclass
class Disk:
    """What is durable, and what may be, in the order in which it was done."""

    contents: dict[int, bytearray] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    changes: list[_Change] = field(default_factory=list)
    promised: int | None = None
    attempted: int | None = None

    @property
    def allowed(self) -> set[int]:
        """The steps that may be found."""
        return {step for step in (self.promised, self.attempted) if step is not None}

    def take(self, note: Note) -> None:
        """Follows a note."""
        match note:
            case Write() | Resize():
                self.changes.append(_Change(note))
            case Name():
                if note.file is not None:
                    self.contents.setdefault(note.file, bytearray())
                self.changes.append(_Change(note))
            case SyncFile(file, is_ok):
                self._settle(lambda what: not isinstance(what, Name) and what.file == file, is_ok=is_ok)
            case SyncNames(is_ok):
                self._settle(lambda what: isinstance(what, Name), is_ok=is_ok)
            case Attempt(step):
                self.attempted = step
            case Promise(step):
                self.promised, self.attempted = step, None

    def _settle(self, concerns: Callable[[Write | Resize | Name], bool], *, is_ok: bool) -> None:
        for change in self.changes:
            if change.status == "pending" and concerns(change.what):
                change.status = "durable" if is_ok else "lost"
        # What is durable and has nothing uncertain of its kind before it is the ground that the rest stands on.
        kept: list[_Change] = []
        uncertain: set[int | None] = set()
        for change in self.changes:
            kind = None if isinstance(change.what, Name) else change.what.file
            if change.status == "durable" and kind not in uncertain:
                _apply(self.contents, self.names, change.what)
            else:
                uncertain.add(kind)
                kept.append(change)
        self.changes = kept

    def parts(self, tear: Callable[[Write], list[Write]]) -> list[tuple[Write | Resize | Name, bool]]:
        """The changes since, in order, writes in parts, and of each whether it has happened for certain."""
        return [
            (part, change.status == "durable")
            for change in self.changes
            for part in (tear(change.what) if isinstance(change.what, Write) else [change.what])
        ]

    def uncertain(self, tear: Callable[[Write], list[Write]]) -> int:
        """How many parts may have happened or not."""
        return sum(not is_certain for _, is_certain in self.parts(tear))

    def found(self, parts: list[tuple[Write | Resize | Name, bool]], happened: Iterable[bool]) -> Files:
        """The files by name, if of the uncertain parts just these have happened."""
        names, contents, chosen = dict(self.names), {n: bytearray(c) for n, c in self.contents.items()}, iter(happened)
        for what, is_certain in parts:
            if is_certain or next(chosen):
                _apply(contents, names, what)
        return {name: bytes(contents[file]) for name, file in names.items()}


def _apply(contents: dict[int, bytearray], names: dict[str, int], what: Write | Resize | Name) -> None:
    match what:
        case Name(name, file, old_name):
            if old_name is not None:
                names.pop(old_name, None)
            if file is None:
                names.pop(name, None)
            else:
                names[name] = file
        case Resize(file, nbytes):
            if nbytes == 0:
                contents[file].clear()
            contents[file].extend(bytes(max(0, nbytes - len(contents[file]))))
        case Write(file, offset, data):
            contents[file].extend(bytes(max(0, offset + len(data) - len(contents[file]))))
            contents[file][offset : offset + len(data)] = data


def in_halves(write: Write) -> list[Write]:
    """A write that may be torn in its middle, at a sector if it has several."""
    middle = len(write.data) // 2
    if middle > SECTOR_BYTES:
        middle -= middle % SECTOR_BYTES
    return [Write(write.file, write.offset + a, write.data[a:b]) for a, b in ((0, middle), (middle, len(write.data)))]


def in_sectors(write: Write) -> list[Write]:
    """A write that may be torn at every sector."""
    starts = range(0, len(write.data), SECTOR_BYTES)
    return [Write(write.file, write.offset + a, write.data[a : a + SECTOR_BYTES]) for a in starts]


def all_crash_states(disk: Disk) -> Iterator[Files]:
    """Every subset of what is uncertain, writes in halves: complete."""
    parts = disk.parts(in_halves)
    for happened in itertools.product((False, True), repeat=disk.uncertain(in_halves)):
        yield disk.found(parts, happened)


def some_crash_states(disk: Disk, draw: random.Random, count: int) -> Iterator[Files]:
    """Nothing, everything, and random subsets of sectors."""
    parts, uncertain = disk.parts(in_sectors), disk.uncertain(in_sectors)
    for share in (0.0, 1.0, *(draw.random() for _ in range(count))):
        yield disk.found(parts, [draw.random() < share for _ in range(uncertain)])


def put_back(files: Files, directory: Path) -> None:
    """The files as a store's directory."""
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
