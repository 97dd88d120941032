"""Staging between an accelerator and files: pinned pieces of host memory, and a thread for each
direction.

In: functions that move a range between a file and host memory. Out: handles. Homes on disk and
offloaded activations share one `Staging`.

[Note: staging]
A transfer is cut into pieces. Inward, the file's threads fill a piece, and the copy stream takes it
to the device; outward the copy stream fills one, and the file's threads write it. A piece is used
again when its copy (inward: an event) or its write (outward: a handle) is done, so that while one
is copied the other is filled. A caller's wait inward ends when the last copy is *enqueued*, and
orders the current stream behind it; outward it ends when the file has everything. A caller that
only wants its device memory back waits until the last byte has left it (`wait_until_left`), not for
the disk.

[Note: order in staging]
A file's own order begins when the staging thread asks for a range, which is later than the caller
did. So a caller with overlapping ranges names the older transfers that a new one comes after. A
thread serves its jobs in the order in which they were asked for, and a job waits only for older
ones: no cycles.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from memfit import devices
from memfit.core.layout import MOVED_PIECES, STAGING_PIECE_BYTES, STAGING_PIECES
from memfit.homes.home import TransferHandle
from memfit.homes.memory import StreamCopy
from memfit.store import Memory, memory_of_storage
from memfit.tensors.trees import bytes_view, new_storage

Move = Callable[[int, int, Memory], TransferHandle]
"""Function that begins to move a range of a file (offset and bytes, relative to the transfer) to or
from memory.
"""


class Staged(TransferHandle):
    """A transfer by way of the staging, asked for, under way or done.

    Inward it is a `TransferHandle`: after `wait` the current stream is ordered behind the copies.
    Outward `wait` returns when the file has everything.
    """

    def __init__(self, after: Sequence[Staged]) -> None:
        self.after = tuple(after)
        self._ended = threading.Event()
        self._left = threading.Event()
        self._error: BaseException | None = None
        self._copy: StreamCopy | None = None
        self._lock = threading.RLock()  # a finalizer may ask inside of it
        self._acts: list[Callable[[], object]] = []

    def call_when_ended(self, act: Callable[[], object]) -> None:
        """Calls `act` once: from the thread that ends the transfer, or at once if it has ended. It
        must not raise.
        """
        with self._lock:
            if not self._ended.is_set():
                self._acts.append(act)
                return
        act()

    @property
    def has_ended(self) -> bool:
        """True if it has ended: nothing more of it will be requested of the file."""
        return self._ended.is_set()

    def end(self, copy: StreamCopy | None = None, error: BaseException | None = None) -> None:
        """Ends the transfer; called by the thread."""
        with self._lock:
            # Everything before the events: whoever wakes up reads these without the lock. `after`
            # goes, or a chain of old transfers would stay alive.
            self._copy, self._error, self.after = copy, error, ()
            self._ended.set()
            self._left.set()
            acts, self._acts = self._acts, []
        # Outside of the lock: what is called may begin another transfer, or wait.
        for act in acts:
            act()

    def leave(self) -> None:
        """Notes that the last byte of a transfer outward is in host memory."""
        self._left.set()

    def join(self) -> None:
        """Waits until it has ended, with or without an error."""
        _wait(self._ended)

    def wait_until_left(self) -> None:
        """Waits until the storage of a transfer outward may be freed."""
        # `left` is set at the end of a failed transfer too: nobody waits for ever.
        _wait(self._left)
        if self._ended.is_set():
            self._raise()

    def wait(self) -> None:
        """Waits as described above. Raises the transfer's error."""
        self.join()
        self._raise()
        if self._copy is not None:
            self._copy.wait()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class Staging:
    """Pinned pieces and threads between a device and files. See [Note: staging].

    Memory: host, `STAGING_PIECES` pieces of `STAGING_PIECE_BYTES` for each direction, from its
    first transfer to `close`.

    Args:
        device: an accelerator; on the CPU (in tests) copies are synchronous.
        stream: copy stream of an accelerator.
        leaving: the stream of copies from the device; None: that of copies to it too.
        ledger: a context in which the pieces are allocated.
        piece_bytes: size of a piece.
        pieces: number for each direction.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        stream: torch.Stream | None = None,
        leaving: torch.Stream | None = None,
        ledger: Callable[[], AbstractContextManager[None]] = nullcontext,
        piece_bytes: int = STAGING_PIECE_BYTES,
        pieces: int = STAGING_PIECES,
    ) -> None:
        assert (stream is not None) == devices.is_accelerator(device)
        self._device = device
        self._stream = stream
        self._leaving = stream if leaving is None else leaving
        make = lambda: _Pieces(device, ledger, piece_bytes, pieces)  # noqa: E731
        self._outward = _Direction("memfit-staging-out", make)
        self._inward = _Direction("memfit-staging-in", make)

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of the pieces that are allocated now."""
        return self._outward.held_bytes + self._inward.held_bytes

    def bring(
        self, move: Move, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0, after: Sequence[Staged] = ()
    ) -> Staged:
        """Begins to bring a file's range into a storage, which must live until the handle was
        waited for.

        Args:
            move: reads from the file.
            nbytes: of the range.
            into: storage of the device.
            into_offset: first byte to fill.
            after: older transfers that come before.
        """
        staged, ready = Staged(after), self._now()
        # In a list: what the queue holds does not keep the storage once the thread has taken it.
        given = [into]
        self._inward.submit(
            staged, lambda pieces: staged.end(self._bring(pieces, move, nbytes, given.pop(), into_offset, ready))
        )
        return staged

    def take(
        self,
        move: Move,
        nbytes: int,
        source: torch.UntypedStorage,
        source_offset: int = 0,
        after: Sequence[Staged] = (),
    ) -> Staged:
        """Begins to take a range of a storage to a file; the storage must live and stay unchanged
        until the handle has left.

        Args:
            move: writes to the file.
            nbytes: of the range.
            source: storage of the device.
            source_offset: its first byte.
            after: older transfers that come before.
        """
        staged, ready = Staged(after), self._now()
        given = [source]

        def run(pieces: _Pieces) -> None:
            self._take(pieces, move, nbytes, given.pop(), source_offset, ready, staged)
            staged.end()

        self._outward.submit(staged, run)
        return staged

    def close(self) -> None:
        """Ends the threads when their transfers are done, and frees the pieces."""
        for direction in (self._outward, self._inward):
            direction.close()

    def _now(self) -> torch.Event | None:
        """Records an event behind all that was enqueued on the compute stream until now."""
        if self._stream is None:
            return None
        device = self._stream.device
        return devices.of(device).current_stream(device).record_event()

    def _bring(
        self,
        pieces: _Pieces,
        move: Move,
        nbytes: int,
        into: torch.UntypedStorage,
        into_offset: int,
        ready: torch.Event | None,
    ) -> StreamCopy | None:
        coming: deque[tuple[_Piece, int, int, TransferHandle]] = deque()
        left = deque(pieces.cut(nbytes))
        event: torch.Event | None = None
        try:
            while left or coming:
                while left and len(coming) < pieces.count:
                    offset, count = left.popleft()
                    piece = pieces.next()  # its last copy is done
                    coming.append((piece, offset, count, move(offset, count, piece.memory(count))))
                piece, offset, count, handle = coming[0]
                handle.wait()
                coming.popleft()
                # Behind what was enqueued when it was asked for: kernels may still read this memory
                # as what it was before.
                event = self._copy(
                    bytes_view(into, into_offset + offset, count), piece.bytes(count), ready, self._stream
                )
                piece.busy = event
        finally:
            # After an error: nothing may still be written into a piece that is used again.
            for *_, handle in coming:
                _quietly(handle)
        if self._stream is None or event is None:
            return None
        return StreamCopy(self._stream, event, into)

    def _take(
        self,
        pieces: _Pieces,
        move: Move,
        nbytes: int,
        source: torch.UntypedStorage,
        source_offset: int,
        ready: torch.Event | None,
        staged: Staged,
    ) -> None:
        handles: list[TransferHandle] = []
        try:
            for offset, count in pieces.cut(nbytes):
                piece = pieces.next()  # its last write is done
                # The copy must see what compute wrote into the storage before it was given.
                event = self._copy(
                    piece.bytes(count), bytes_view(source, source_offset + offset, count), ready, self._leaving
                )
                if event is not None:
                    event.synchronize()
                piece.busy = handle = move(offset, count, piece.memory(count))
                handles.append(handle)
            del source  # whoever waits lets the last reference go, and its memory with it
            staged.leave()
        finally:
            for handle in handles:
                _quietly(handle)
        for handle in handles:
            handle.wait()

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, ready: torch.Event | None, stream: torch.Stream | None
    ) -> torch.Event | None:
        if stream is None or ready is None:
            target.copy_(source)
            return None
        with devices.of(self._device).on(stream):
            stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            return stream.record_event()


class _Piece:
    """A piece of pinned memory; `busy` is the transfer that used it last."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.busy: torch.Event | TransferHandle | None = None

    def memory(self, nbytes: int) -> Memory:
        """Memory for the file's threads."""
        return memory_of_storage(self.storage, 0, nbytes)

    def bytes(self, nbytes: int) -> torch.Tensor:
        """A view of its first bytes, for copies."""
        return bytes_view(self.storage, 0, nbytes)


class _Pieces:
    """The pieces of a direction, used in turn by one thread."""

    def __init__(
        self, device: torch.device, ledger: Callable[[], AbstractContextManager[None]], nbytes: int, count: int
    ) -> None:
        self._device = device
        self._pinned: list[torch.UntypedStorage] = []
        self._piece_bytes = nbytes
        self.count = count
        self._ring: deque[_Piece] = deque()
        for _ in range(count):
            with ledger():
                storage = new_storage(nbytes)
            if devices.is_accelerator(device) and devices.of(device).pin(storage):
                self._pinned.append(storage)
            self._ring.append(_Piece(storage))

    def cut(self, nbytes: int) -> list[tuple[int, int]]:
        """Returns (offset, bytes) of the pieces of a transfer."""
        size = self._piece_bytes
        return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]

    def next(self) -> _Piece:
        """Waits for the piece that was used longest ago, and returns it."""
        piece = self._ring[0]
        self._ring.rotate(-1)
        busy, piece.busy = piece.busy, None
        if isinstance(busy, torch.Event):
            busy.synchronize()
        elif busy is not None:
            _quietly(busy)  # whoever asked for the write is told
        return piece

    def close(self) -> None:
        """Unpins and frees the pieces."""
        for piece in self._ring:
            # Copies may still read these pages; writes to files have ended (`_take` waits for its
            # own).
            if isinstance(piece.busy, torch.Event):
                piece.busy.synchronize()
        while self._pinned:
            devices.of(self._device).unpin(self._pinned.pop())
        self._ring.clear()


class _Direction:
    """A thread that serves jobs in order; it starts, and its pieces are allocated, with the
    first.
    """

    def __init__(self, name: str, make: Callable[[], _Pieces]) -> None:
        self._name = name
        self._make = make
        self._pieces: _Pieces | None = None
        self._jobs: queue.SimpleQueue[tuple[Staged, Callable[[_Pieces], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """See `Staging`."""
        pieces = self._pieces
        return 0 if pieces is None else sum(piece.storage.nbytes() for piece in pieces._ring)

    def submit(self, staged: Staged, run: Callable[[_Pieces], None]) -> None:
        """Begins a job; `run` ends `staged`, or its error does."""
        with self._lock:
            if self._thread is None:
                self._pieces = self._make()
                self._thread = threading.Thread(
                    target=_serve, args=(self._jobs, self._pieces), name=self._name, daemon=True
                )
                self._thread.start()
            # Inside the lock: the order of the queue is the order in which ranges were noted by who
            # asks.
            self._jobs.put((staged, run))

    def close(self) -> None:
        """See `Staging`."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                # Behind all jobs: the thread ends when they are done.
                self._jobs.put(None)
        if thread is not None:
            thread.join()
        if self._pieces is not None:
            self._pieces.close()
            self._pieces = None


def _serve(jobs: queue.SimpleQueue[tuple[Staged, Callable[[_Pieces], None]] | None], pieces: _Pieces) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        staged, run = job
        # The queue's tuple would keep the storage alive while the thread waits for its next job.
        del job
        try:
            # Older transfers of the same bytes, which may run in the other direction's thread. They
            # were queued before, so that they end.
            for older in staged.after:
                older.join()
            with torch.no_grad():
                run(pieces)
        except BaseException as error:  # noqa: BLE001, raised where the handle is waited for
            staged.end(error=error)
        del staged, run


def _quietly(handle: TransferHandle) -> None:
    """Waits; what went wrong is another's to tell."""
    try:
        handle.wait()
    except Exception:  # noqa: BLE001, see above
        return


def _wait(event: threading.Event) -> None:
    """Waits for an event; an exception of a signal handler is raised only when the transfer has
    ended.
    """
    try:
        event.wait()
    except BaseException:
        event.wait()
        raise


# Pinned host memory for updates on the host of weights that live on the device.
#
# In: sizes of pieces. Out: storages, each reused when its last copy is done.


@dataclass
class RingPiece:
    """A storage, and the copy that used it last."""

    storage: torch.UntypedStorage
    busy: StreamCopy | None = None


class PinnedRing:
    """A ring of `MOVED_PIECES` storages, for one thread: a new weight leaves from one, the update
    works in the next, and a third is filled.

    Memory: host, `MOVED_PIECES` times the largest piece so far, from the first `take` to `close`.

    Args:
        device: the accelerator that copies to and from them.
        ledger: a context in which they are allocated.
    """

    def __init__(
        self, device: torch.device, *, ledger: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._ring: list[RingPiece] = []
        self._pinned: set[int] = set()
        self._next = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(piece.storage.nbytes() for piece in self._ring)

    def take(self, nbytes: int) -> RingPiece:
        """Returns the next piece, of at least that many bytes; waits until the copy that used it
        last is done.
        """
        if len(self._ring) < MOVED_PIECES:
            self._ring.append(RingPiece(self._made(nbytes)))
            return self._ring[-1]
        piece = self._ring[self._next]
        self._next = (self._next + 1) % MOVED_PIECES
        if piece.busy is not None:
            # The stream may read these bytes for an older weight still, or fill them for an update
            # that was given up.
            piece.busy.join()
            piece.busy = None
        if piece.storage.nbytes() < nbytes:
            self._unpin(piece.storage)
            piece.storage = new_storage(0)  # the old one goes before the new one comes
            # Pinned anew: a copy from memory that is not pinned would stop the host.
            piece.storage = self._made(nbytes)
        return piece

    def _made(self, nbytes: int) -> torch.UntypedStorage:
        with self._ledger():
            storage = new_storage(nbytes)
        if devices.of(self._device).pin(storage):
            self._pinned.add(storage.data_ptr())
        return storage

    def _unpin(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() in self._pinned:
            self._pinned.discard(storage.data_ptr())
            devices.of(self._device).unpin(storage)

    def close(self) -> None:
        """Unpins and frees all, when their copies are done."""
        for piece in self._ring:
            if piece.busy is not None:
                # Unpinning memory that a copy still uses is undefined on a device.
                piece.busy.join()
            self._unpin(piece.storage)
        self._ring.clear()
