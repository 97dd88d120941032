"""Updates of blocks at their homes, beside the backward of earlier blocks.

In: blocks whose gradients are complete. Out: new weights and states at their homes. One worker
thread takes blocks in order, but for those that go first; each parameter is updated in pieces small
enough for the processor's cache (`homes.update_pieces`), and the next pieces' transfers run while
one is computed, also from one block to the next.

[Note: threads of an update]
The worker touches a block's weights, gradients and states only between `submit` and the end of its
handle; the engine frees or fetches that block only after waiting for the handle. Autograd meanwhile
works on blocks below. Elementwise updates give the same bits on any number of threads, so the
worker computes on one and leaves the others to backward; updates that need whole parameters (they
contain reductions) run with the main thread's count, because the order of a reduction follows it.
Where nothing is waited for, a worker beside backward only takes one of its cores, and the other
cores wait for the slower one: then each update runs at once, on all of them.

[Note: what goes first]
The host's cores take long over an update. One by an accelerator takes the worker no longer than it
takes to enqueue it, if nothing of it comes from files or goes there, and its memory, which blocks
in front of it may need, is free the sooner: it goes before the next piece of those that the host
makes. Those that an accelerator makes stay in order among themselves, since the memory of their
pieces is counted so: such an update waits until those before it that files are read for have ended,
and nothing of it comes before.

[Note: updates on the host]
Beside an accelerator the host's cores may update a block at its homes (`BlockPlan.update_on`). Four
things order them with the device. An *event* behind all that the caller has enqueued when it asks
for the update: the gradient's copy home, the visit that came from the weight's home, kernels that
read the weights. The host waits for it before it changes a byte, and the stream on which new
weights go up waits for it too: that stream is one of the updates' own, so that nothing of the
backward below is waited for. A weight that comes down is read by the host when its copy is done,
not when a stream is ordered behind it. Whoever waits for the update's handle is ordered behind what
went up. Pinned pieces are used again when their copies are done (`homes.staging`). In between
the device goes on: visits of such a block end, and its device gradients go, without waiting for the
update.

[Note: updates beside the device's compute]
An update by the device whose pieces come and go has kernels that wait for copies. In the caller's
stream the backward below would wait for them too, so they go to a stream of the updates' own,
ordered with the caller's as those on the host are: behind an event when it is asked for, and in
front of whoever waits for its handle. Where all homes order their reads behind writes themselves,
the first piece comes before that event. Memory of pieces comes and goes on that stream: beside an
accelerator torch keeps what it has freed by stream, so only updates in pieces of a few MiB are made
so, and what a piece would else have to make of a whole gradient the caller makes. Step counts of
optimizers that keep them on the device are lent to the caller's stream. Updates that need whole
parameters stay in the caller's stream. An update does not end with a wait for its last writes: the
first read of the next block's would wait as well. Whoever waits for the handle waits for them; the
stream does behind the first kernels of the next update, and until then their memory stays.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from memfit import devices
from memfit.homes.home import DONE, TransferGroup, TransferHandle, order_reads, use_files
from memfit.homes.memory import StreamCopy
from memfit.homes.update_pieces import Coming, PieceUpdates, Travel
from memfit.homes.weights import BlockWeights


class Gate(TransferHandle):
    """A handle that others wait for until it is opened, or shut for good."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._error: Exception | None = None

    def open(self) -> None:
        """Whoever waits goes on."""
        self._decided.set()

    def shut(self, error: Exception) -> None:
        """Whoever waits, now or later, gets the error; nothing if it was opened."""
        if not self._decided.is_set():
            # Before the event: whoever wakes up reads it without a lock.
            self._error = error
            self._decided.set()

    def wait(self) -> None:
        """Returns when it is open; raises why it was shut."""
        self._decided.wait()
        if self._error is not None:
            raise self._error


class UpdateHandle(TransferHandle):
    """The update of one block, under way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._sent: tuple[torch.device, list[torch.Event]] | None = None

    def finish(
        self, error: BaseException | None = None, sent: tuple[torch.device, list[torch.Event]] | None = None
    ) -> None:
        """Ends the handle; called by the worker.

        Args:
            error: the error that ended the update, or None.
            sent: a device, and events behind all that an update has enqueued to it on streams of
                its own.
        """
        # Both before the event: whoever wakes up reads them without a lock.
        self._error, self._sent = error, sent
        self._done.set()

    @property
    def is_done(self) -> bool:
        """Tells whether the update has ended, with or without an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """Waits until the block's new weights and states are home; an exception of a signal handler
        is raised only then.
        """
        try:
            self._done.wait()
        except BaseException:
            self._done.wait()
            raise
        if self._sent is not None:
            # The worker's copies went to a stream of the updates' own: what is enqueued next must
            # see the new weights.
            device, events = self._sent
            for event in events:
                devices.of(device).current_stream(device).wait_event(event)
        if self._error is not None:
            raise self._error


class UpdateWorker:
    """Runs updates in a thread of its own, in the order of `submit` but for those that go first.

    Memory: three pieces of weight (if it is away), gradient (if it is away) and states (if they are
    away).

    Args:
        pieces: updates single pieces.
    """

    def __init__(self, pieces: PieceUpdates) -> None:
        self._pieces = pieces
        # Of updates by the device (False) and by the host (True): behind what they wait for, and
        # nothing else.
        self._streams: dict[bool, torch.Stream] = {}
        self._last_writes = _LastWrites()
        self._jobs: queue.SimpleQueue[_SubmittedUpdate | None] = queue.SimpleQueue()
        # Of these jobs those that the host's pieces let pass. See [Note: what goes first].
        self._first = deque[_SubmittedUpdate]()
        # Those that an accelerator makes and that do not go first, and are not over.
        self._in_turn: list[weakref.ref[UpdateHandle]] = []
        self._thread: threading.Thread | None = None
        self.updated_blocks: list[int] = []

    @property
    def trained(self) -> frozenset[str]:
        """Returns the names of the parameters that the optimizer updates."""
        return self._pieces.trained

    def note_updated(self, block: int) -> None:
        """Notes a block as one that this step changes."""
        if block not in self.updated_blocks:
            self.updated_blocks.append(block)

    def submit(self, block: BlockWeights, after: TransferHandle = DONE, *, is_beside: bool = True) -> TransferHandle:
        """Begins the update of a block; parameters without a gradient are skipped, as by
        `optimizer.step`.

        Args:
            block: a block whose gradients are complete.
            after: nothing of the block is changed before this is done; reads for the update go on
                meanwhile. Its error becomes the update's.
            is_beside: False: the update is made before this returns, in the caller's thread;
                nothing may be under way then (`core.step.UpdatePlace`).
        """
        if not self._pieces.due(block):
            return DONE
        if not is_beside:
            with torch.no_grad():
                if self._pieces.update_at_once(block):
                    self.note_updated(block.index)
                    return DONE
        job = _SubmittedUpdate(
            self._pieces,
            block,
            after,
            self._last_writes,
            self._stream_of(block, may_overtake=is_beside and after is DONE),
        )
        if not job.is_left:
            job.handle.finish()
            return job.handle
        self.note_updated(block.index)
        if not is_beside:
            with torch.no_grad():
                _Pipeline(lambda: None, deque()).run(job)
            job.handle.wait()
            return job.handle
        if self._thread is None:
            self._thread = _start_worker(self._jobs, self._first)
            # A worker that is dropped without `close` ends its thread as well: the thread refers to
            # queues only.
            weakref.finalize(self, self._jobs.put, None)
        if devices.is_accelerator(block.device) and not block.updates_on_host:
            self._in_turn = [one for one in self._in_turn if not _is_over(one)]
            if after is DONE and not use_files(self._pieces.homes(block)):
                job.front = tuple(self._in_turn)
                self._first.append(job)  # before it is put: see `_Pipeline`
            else:
                self._in_turn.append(weakref.ref(job.handle))
        self._jobs.put(job)
        return job.handle

    def _stream_of(self, block: BlockWeights, *, may_overtake: bool) -> torch.Stream | None:
        """Returns the stream for the update of a block; None: the caller's.

        Args:
            block: that is updated.
            may_overtake: the caller goes on beside it, and has enqueued all that it depends on.
        """
        if not devices.is_accelerator(block.device):
            return None
        if not block.updates_on_host and not (may_overtake and self._pieces.travel(block) is Travel.PIECES):
            return None
        if not block.updates_on_host:
            self._pieces.lay_out(block)
        if block.updates_on_host not in self._streams:
            self._streams[block.updates_on_host] = devices.of(block.device).new_stream(block.device)
        return self._streams[block.updates_on_host]

    def busy_s(self) -> float:
        """Returns the seconds that the thread was on a processor since it began; 0: it has not."""
        ident = None if self._thread is None else self._thread.ident
        return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))

    def catch_up(self) -> None:
        """Lets go of what the last updates' writes read; all handles have been waited for."""
        self._last_writes.catch_up()

    def close(self) -> None:
        """Ends the thread after the updates that were submitted, and lets go of memory that was
        lent.
        """
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self.catch_up()
        self._pieces.forget_standing()


def _is_over(update: weakref.ref[UpdateHandle]) -> bool:
    handle = update()
    return handle is None or handle.is_done


class _LastWrites:
    """Writes of an update that its own stream is not yet ordered behind: what they read stays."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None
        self._writes: list[StreamCopy] = []

    def put(self, stream: torch.Stream, writes: Sequence[StreamCopy]) -> list[torch.Event]:
        """Adds writes of an update in this stream. Returns the events behind all of them."""
        if writes:
            # Others have streams too, and none such writes.
            self._stream = stream
            self._writes += writes
        # Those of one stream are in order on it.
        return list({one.stream.stream_id: one.event for one in writes}.values())

    def take(self) -> list[StreamCopy]:
        """Returns all, to be waited for in their stream."""
        found, self._writes = self._writes, []
        return found

    def catch_up(self) -> None:
        """Orders their stream behind them."""
        if self._stream is not None and self._writes:
            with devices.of(self._stream.device).on(self._stream):
                TransferGroup(self.take()).wait()


class _SubmittedUpdate:
    """The update of one block: pieces that are still to be read, and writes under way."""

    def __init__(
        self,
        pieces: PieceUpdates,
        block: BlockWeights,
        after: TransferHandle,
        last_writes: _LastWrites,
        own_stream: torch.Stream | None = None,
    ) -> None:
        self.handle = UpdateHandle()
        # Of one that goes first: what it may not go before.
        self.front: Sequence[weakref.ref[UpdateHandle]] = ()
        self._last_writes = last_writes
        self._pieces = pieces
        self._block = block
        self._after = after
        # The worker's own current stream would be the default one of device 0, whatever the
        # caller's is: gradients come on the caller's, and what reads the weights next goes there
        # too.
        device = block.device
        self._stream = devices.of(device).current_stream(device) if devices.is_accelerator(device) else None
        # Behind the gradient's way home and all that reads the weights, wherever they lie. See
        # [Note: updates on the host] and [Note: updates beside the device's compute].
        self._behind: torch.Event | None = None
        self._caller: torch.Stream | None = None
        self._reads_in_order = False
        if own_stream is not None:
            assert self._stream is not None
            self._caller = self._stream
            self._reads_in_order = block.updates_on_host or not order_reads(pieces.homes(block), block.update_device)
            self._behind, self._stream = self._stream.record_event(), own_stream
        self._left = deque(pieces.groups(block))
        self._begun = 0
        self._leaving: list[TransferHandle] = []

    @property
    def is_left(self) -> bool:
        """True if the reading of a piece has not begun."""
        return bool(self._left)

    @property
    def may_begin(self) -> bool:
        """True if all is done that it may not go before."""
        return all(map(_is_over, self.front))

    @property
    def _is_beside_the_caller(self) -> bool:
        """True if the device makes the update, in a stream of its own."""
        return self._behind is not None and not self._block.updates_on_host

    def _in_order(self) -> AbstractContextManager[None]:
        """Context in which work goes to the update's stream: its own, or that of the thread that
        submitted it.
        """
        return nullcontext() if self._stream is None else devices.of(self._stream.device).on(self._stream)

    def _wait_for_caller(self) -> None:
        """Orders a stream of the updates' own behind what the caller had enqueued."""
        if self._behind is not None and self._stream is not None:
            self._stream.wait_event(self._behind)

    def begin(self) -> tuple[Coming, ...] | None:
        """Begins to read the next piece; None if that fails, which ends the update."""
        try:
            with self._in_order():
                if self._reads_in_order and not self._begun:
                    # Before a weight comes down from the device, or a new one goes up to it:
                    # kernels still read there. Or the caller's stream alone orders a home.
                    self._wait_for_caller()
                coming = self._pieces.begin_together(self._block, self._left.popleft())
        except BaseException as error:  # noqa: BLE001, raised where the handle is waited for
            self._end(error)
            return None
        self._begun += 1
        return coming

    def apply(self, coming: tuple[Coming, ...]) -> None:
        """Updates a piece that was begun, in order. Does nothing after an error."""
        if self.handle.is_done:
            return
        try:
            with self._in_order():
                self._after.wait()
                if not self._block.updates_on_host:
                    # Not before the first piece is read: the last piece of the block before would
                    # wait as well, and with it whoever waits for that block.
                    self._wait_for_caller()
                elif self._behind is not None:
                    # The host is about to read the gradient's home and to write the weight's:
                    # copies from and to them are done then.
                    self._behind.synchronize()
                # The piece before goes home and the next ones come while this one is computed.
                before, self._leaving = self._leaving, self._pieces.apply_together(self._block, coming)
                if self._is_beside_the_caller:
                    before = [*self._last_writes.take(), *before]
                TransferGroup(before).wait()
        except BaseException as error:  # noqa: BLE001, as above
            self._end(error)
            return
        self._begun -= 1

    def end_if_done(self) -> None:
        """Ends the update if nothing of it is left: not in `apply`, whose frame holds memory that
        whoever waits would still find alive.
        """
        if not self._left and not self._begun and not self.handle.is_done:
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        self._left.clear()
        may_last = self._is_beside_the_caller and error is None
        writes = [one for one in self._leaving if may_last and isinstance(one, StreamCopy)]
        others = [one for one in self._leaving if not (may_last and isinstance(one, StreamCopy))]
        try:
            with self._in_order():
                TransferGroup(others).wait()
        except BaseException as other:  # noqa: BLE001, as above
            error = error or other
        self._leaving = []
        sent = None
        if self._behind is not None and self._stream is not None:
            sent = self._block.device, [self._stream.record_event(), *self._last_writes.put(self._stream, writes)]
            if self._caller is not None and not self._block.updates_on_host:
                # Whoever reads the optimizer's states does it on the caller's stream.
                self._pieces.lend_numbers(self._block, self._caller)
        self.handle.finish(error, sent)


class _Pipeline:
    """Update pipeline, across blocks: while one piece is computed the next one is read, and the one
    before goes home.

    Args:
        more: returns the next update, if it was submitted already.
        first: updates that go before the next piece.
    """

    def __init__(self, more: Callable[[], _SubmittedUpdate | None], first: deque[_SubmittedUpdate]) -> None:
        self._more = more
        self._first = first
        self._job: _SubmittedUpdate | None = None

    def run(self, job: _SubmittedUpdate) -> None:
        """Makes this update, and those that are submitted meanwhile; returns when nothing is under
        way.
        """
        self._job = job
        coming = self._next()
        while coming is not None:
            (job, here), coming = coming, self._next()
            job.apply(here)
            del here
            job.end_if_done()
            coming = coming or self._next()  # one that was asked for while this was computed

    def _next(self) -> tuple[_SubmittedUpdate, tuple[Coming, ...]] | None:
        """Begins to read the next piece; None if there is none, or its update may not begin."""
        while True:
            while self._job is None or not self._job.is_left:
                self._job = self._more()
                if self._job is None:
                    return None
            # Behind `more`: what it gives is among these by now, and nothing of it has begun.
            while (first := self._passing()) is not None:
                _Pipeline(self._passing, deque()).run(first)
            if not self._job.may_begin:
                return None
            coming = self._job.begin() if self._job.is_left else None
            if coming is not None:
                return self._job, coming

    def _passing(self) -> _SubmittedUpdate | None:
        """Returns an update that goes before the next piece, if there is one."""
        return self._first.popleft() if self._first and self._first[0].may_begin else None


def _start_worker(jobs: queue.SimpleQueue[_SubmittedUpdate | None], first: deque[_SubmittedUpdate]) -> threading.Thread:
    thread = threading.Thread(target=_work, args=(jobs, first), name="memfit-update", daemon=True)
    thread.start()
    return thread


def _work(jobs: queue.SimpleQueue[_SubmittedUpdate | None], first: deque[_SubmittedUpdate]) -> None:
    is_ending = False

    def more() -> _SubmittedUpdate | None:
        nonlocal is_ending
        try:
            job = None if is_ending else jobs.get_nowait()
        except queue.Empty:
            return None
        is_ending = is_ending or job is None
        return job

    with torch.no_grad():
        while not is_ending:
            job = jobs.get()
            if job is None:
                return
            _Pipeline(more, first).run(job)
            del job
