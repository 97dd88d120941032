"""Home in memory of the device, or of the host beside it.

[Note: two copy streams]
A link moves bytes both ways at once, but a stream does one copy after the other: what leaves goes
on one stream, and what comes on another. So nothing orders a read behind the write of the same
bytes but what is said here: a home remembers the last copies each way, and a copy waits for those
of the other way that touch its bytes. Copies of one way are in order on their stream.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

import torch

from memfit import devices
from memfit.core.hardware import LinkTraffic
from memfit.core.tiers import Tier, updates_in_place
from memfit.homes.home import DONE, ByteHome, CompletedTransfer, TransferHandle, TransferThen
from memfit.tensors.trees import bytes_view, new_storage

# Meter of a link between an accelerator and its host: what copies take while a job runs.
#
# In: copies of a stream, as they are enqueued. Out: bytes and seconds, by direction.
#
# [Note: what a copy takes]
# Two events on the copy's own stream, around it: what the copy waits for is before the first. Where
# copies of several streams go the same way at once, each takes longer, as a step's do. Nothing
# waits for the events: those that have passed are looked at between two steps.

_LEAST_BYTES = 1 << 18
"""Smaller copies say more of what a copy costs than of its bytes."""
_MOST_OPEN = 512


class LinkMeter:
    """Measures copies of both directions. Calls may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: deque[tuple[str, int, torch.Event, torch.Event]] = deque(maxlen=_MOST_OPEN)

    def begin(self, stream: torch.Stream, nbytes: int) -> torch.Event | None:
        """Marks where a copy begins; None if it is not measured."""
        return _marked(stream) if nbytes >= _LEAST_BYTES else None

    def end(self, stream: torch.Stream, began: torch.Event | None, nbytes: int, direction: str) -> None:
        """Marks where a copy ends.

        Args:
            stream: of the copy.
            began: what `begin` returned.
            nbytes: of the copy.
            direction: "read" or "write", of the home that it goes from or to.
        """
        if began is not None:
            with self._lock:
                self._open.append((direction, nbytes, began, _marked(stream)))

    def take(self) -> dict[str, LinkTraffic]:
        """Returns what was measured since it was asked last, by direction."""
        found: dict[str, LinkTraffic] = {}
        with self._lock:
            left = [one for one in self._open if not one[3].query()]
            passed = [one for one in self._open if one not in left]
            self._open.clear()
            self._open.extend(left)
        for direction, nbytes, began, ended in passed:
            seconds = began.elapsed_time(ended) / 1e3
            found[direction] = found.get(direction, LinkTraffic()).plus(nbytes, seconds)
        return found


def _marked(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


class StreamCopy(TransferHandle):
    """A copy on a side stream. `wait` orders the current stream behind it; the host does not block.

    Args:
        stream: where the copy was enqueued.
        event: recorded behind it.
        keep: storages that it reads and writes.
    """

    def __init__(self, stream: torch.Stream, event: torch.Event, *keep: torch.UntypedStorage) -> None:
        self._stream = stream
        self._event = event
        self._keep: tuple[torch.UntypedStorage, ...] = keep

    @property
    def stream(self) -> torch.Stream:
        """The stream of the copy."""
        return self._stream

    @property
    def event(self) -> torch.Event:
        """Recorded behind the copy; who waits for it alone leaves the storages kept."""
        return self._event

    def wait(self) -> None:
        """Orders the device's current stream behind the copy."""
        device = self._stream.device  # the copy's own: the thread's current device may be another
        devices.of(device).current_stream(device).wait_event(self._event)
        self._keep = ()

    def join(self) -> None:
        """Blocks the host until the copy is done."""
        self._event.synchronize()
        self._keep = ()

    def __del__(self) -> None:
        # Dropped before anyone waited: the allocator would give the memory out on the compute
        # stream while the copy is still to come.
        for storage in self._keep:
            if devices.is_accelerator(storage.device) and storage.nbytes():
                # The collector may come while a model is traced: modes that fake operations must
                # not see this one.
                with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
                    bytes_view(storage, 0, storage.nbytes()).record_stream(self._stream)


class HostCopy(TransferHandle):
    """A copy from an accelerator that the host is about to read: `wait` returns when the bytes are
    there.

    Args:
        copy: what is under way.
    """

    def __init__(self, copy: StreamCopy) -> None:
        self.copy = copy

    def wait(self) -> None:
        """See above."""
        # Ordering a stream is not enough: the host would read what was there before.
        self.copy.join()


class _RangeEvents:
    """Events of the last copies of one way, by the range of a home that they touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, torch.Event]] = []

    def add(self, start: int, stop: int, event: torch.Event) -> None:
        """Notes a copy. Older ones inside its range are before it on the same stream."""
        self._ranges = [one for one in self._ranges if one[0] < start or one[1] > stop]
        self._ranges.append((start, stop, event))

    def touching(self, start: int, stop: int) -> list[torch.Event]:
        """Returns the events of copies that touch a range."""
        return [event for first, last, event in self._ranges if first < stop and start < last]


class MemoryHome(ByteHome):
    """Home in a storage of its own.

    Memory: `nbytes` of the device, or of the host (pinned in exact size if an accelerator copies
    from it).

    Args:
        nbytes: size.
        tier: DEVICE or HOST.
        device: where compute runs; decides what DEVICE means and whether host bytes are pinned.
        stream: the copy stream, for host memory beside an accelerator, and for device memory that
            the host reads and writes.
        writes: the stream of writes; None: that of reads too.
        meter: measures the copies; None: they are not measured.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        tier: Tier,
        device: torch.device,
        stream: torch.Stream | None = None,
        writes: torch.Stream | None = None,
        meter: LinkMeter | None = None,
    ) -> None:
        assert tier is not Tier.DISK
        self.tier = tier
        self.nbytes = nbytes
        self._stream = stream
        self._writes = stream if writes is None else writes
        self.orders_reads = stream is not None
        self._read, self._written = _RangeEvents(), _RangeEvents()
        self._lock = threading.Lock()
        self._meter = meter
        self._device = device
        self._is_beside = tier is Tier.HOST and devices.is_accelerator(device)
        self._is_pinned = False
        if tier is Tier.DEVICE:
            self._storage = new_storage(nbytes, device)
        else:
            self._storage = new_storage(nbytes)
            if self._is_beside:
                self._is_pinned = devices.of(device).pin(self._storage)

    @property
    def memory(self) -> torch.UntypedStorage | None:
        """The storage if the device can use it in place, else None."""
        return self._storage if updates_in_place(self.tier, self._device.type) else None

    def memory_at(self, device: torch.device) -> torch.UntypedStorage | None:
        """See `ByteHome.memory_at`."""
        return self._storage if self._storage.device.type == device.type else None

    @property
    def bytes(self) -> torch.UntypedStorage:
        """The storage, in any memory. Copies from and to host memory beside an accelerator may be
        under way: wait for the device first.
        """
        return self._storage

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        to, source = bytes_view(into, into_offset, nbytes), bytes_view(self._storage, offset, nbytes)
        if self._is_beside and to.device.type == "cpu":
            # Between two places of the host: when it is waited for, since a copy of the stream into
            # the home may be under way until then.
            return TransferThen(DONE, partial(to.copy_, source))
        copy = self._copy(to, source, (offset, offset + nbytes), is_read=True)
        return HostCopy(copy) if isinstance(copy, StreamCopy) and to.device.type == "cpu" else copy

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`."""
        to, given = bytes_view(self._storage, offset, nbytes), bytes_view(source, source_offset, nbytes)
        return self._copy(to, given, (offset, offset + nbytes), is_read=False)

    def _copy(
        self, to: torch.Tensor, source: torch.Tensor, place: tuple[int, int], *, is_read: bool
    ) -> StreamCopy | CompletedTransfer:
        stream = self._stream if is_read else self._writes
        if stream is None:
            to.copy_(source)
            return DONE
        # The copy must see what compute has written into `source`, and must not overwrite `to`
        # while earlier kernels still use the memory: both are enqueued on the current stream, so
        # the copy stream first waits for it.
        device = devices.of(self._device)
        stream.wait_stream(device.current_stream(stream.device))
        own, other = (self._read, self._written) if is_read else (self._written, self._read)
        # Under the lock: of two threads' copies of one way, the later one on the stream is noted
        # last. See [Note: two copy streams].
        with self._lock, device.on(stream):
            for before in other.touching(*place):
                stream.wait_event(before)
            began = None if self._meter is None else self._meter.begin(stream, to.nbytes)
            to.copy_(source, non_blocking=True)
            event = stream.record_event()
            own.add(*place, event)
            if self._meter is not None:
                self._meter.end(stream, began, to.nbytes, "read" if is_read else "write")
        # The handle keeps both storages alive until the compute stream is ordered behind the copy:
        # the caching allocator, which knows only the compute stream, cannot hand the memory out
        # before.
        return StreamCopy(stream, event, to.untyped_storage(), source.untyped_storage())

    def close(self) -> None:
        """Unpins the memory; the bytes are freed with the object."""
        if self._is_pinned:
            device = devices.of(self._device)
            device.synchronize(self._device)  # copies from and to these pages may be under way
            device.unpin(self._storage)
            self._is_pinned = False
