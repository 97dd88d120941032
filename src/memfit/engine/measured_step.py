"""Measurement of a run, operation by operation: a `Timeline` of the same form as the predicted
one.

In: operations as they begin and end, seconds that were waited. Out: `Timeline`, measured.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from memfit.core.hardware import LinkTraffic
from memfit.core.schedule import Action
from memfit.core.step import Moment, Timeline
from memfit.core.tiers import Tier

Traffic = tuple[Mapping[str, int], Mapping[str, int]]
"""Function that returns bytes read and written so far, by purpose."""


class ByteMeter(Protocol):
    """Counts bytes of the device."""

    def live_bytes(self) -> int:
        """Returns the bytes in use."""
        ...

    def take_peak(self) -> int:
        """Returns the peak bytes in use since the last call."""
        ...


class Recorder(Protocol):
    """Follows a run, operation by operation."""

    def begin(self, action: Action) -> None:
        """Begins an operation."""
        ...

    def end(self) -> None:
        """Ends the operation that began last."""
        ...

    def stall(self, kind: str) -> AbstractContextManager[None]:
        """Returns a context in which the main thread only waits."""
        ...


class BothRecorders:
    """Two recorders of one run; their meters must not disturb each other."""

    def __init__(self, outer: Recorder, inner: Recorder) -> None:
        self._outer = outer
        self._inner = inner

    def begin(self, action: Action) -> None:
        """Begins an operation in both."""
        self._outer.begin(action)
        self._inner.begin(action)

    def end(self) -> None:
        """Ends it in both."""
        self._inner.end()
        self._outer.end()

    @contextmanager
    def stall(self, kind: str) -> Iterator[None]:
        """Context in which the main thread only waits, for both."""
        with self._outer.stall(kind), self._inner.stall(kind):
            yield


@dataclass
class _Open:
    action: str
    start_s: float
    busy_from_s: float
    thread: int


class StepRecorder:
    """Measures one run by the host's clock, and by a meter of the device's bytes where there is
    one.

    Work beside the host (streams, the disk, updates) counts in the interval of the operation that
    waits for it. Categories of bytes are not known: `Moment.by_category` stays empty. Stalls for
    saved tensors are not seen: their frames wait for offloads and reloads themselves.

    Args:
        meter: of the device; None: bytes are 0.
        traffic: bytes moved so far; None: they are not counted.
        clock: seconds, such as those that the thread did not wait for a processor.
        beside: seconds that the thread of updates was on a processor so far; None: not asked.
        links: what transfers took so far, by lane; None: not asked.
    """

    def __init__(
        self,
        meter: ByteMeter | None = None,
        traffic: Callable[[], Traffic] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        beside: Callable[[], float] | None = None,
        links: Callable[[], Mapping[str, LinkTraffic]] | None = None,
    ) -> None:
        self._meter = meter
        self._traffic = traffic
        self._moved_before = traffic() if traffic is not None else None
        self._beside = beside
        self._beside_before_s = 0.0 if beside is None else beside()
        self._links = links
        self._links_before = {} if links is None else links()
        self._clock = clock
        self._began_s = clock()
        self._moments: list[Moment] = []
        self._stalls_s: dict[str, float] = {}
        self._open: _Open | None = None
        if meter is not None:
            meter.take_peak()

    def begin(self, action: Action) -> None:
        """Begins an operation, and ends the one before it if it was not ended."""
        self.end()
        self._open = _Open(str(action), self._now_s(), time.thread_time(), threading.get_ident())

    def end(self) -> None:
        """Ends the operation that began last, if it was not ended."""
        if self._open is None:
            return
        done, self._open = self._open, None
        after = 0 if self._meter is None else self._meter.live_bytes()
        self._moments.append(
            Moment(
                action=done.action,
                peak_bytes=0 if self._meter is None else max(self._meter.take_peak(), after),
                after_bytes=after,
                start_s=done.start_s,
                end_s=self._now_s(),
                # An action may end in autograd's thread, whose time is another one.
                busy_s=time.thread_time() - done.busy_from_s if threading.get_ident() == done.thread else None,
                by_category={},
            )
        )

    def pass_over(self, action: Action) -> None:
        """Notes an operation that others did, with what came since the one before: its peak is not
        the run's.
        """
        if self._meter is not None:
            self._meter.take_peak()
        self.begin(action)
        self.end()

    @contextmanager
    def stall(self, kind: str) -> Iterator[None]:
        """Context in which the main thread only waits, for work of this kind."""
        before = self._now_s()
        try:
            yield
        finally:
            self._stalls_s[kind] = self._stalls_s.get(kind, 0.0) + self._now_s() - before

    def timeline(self) -> Timeline:
        """Returns the timeline of all operations that have ended."""
        read, written = self._moved()
        timeline = Timeline(
            moments=tuple(self._moments),
            bytes_read=read,
            bytes_written=written,
            stalls_s=dict(self._stalls_s),
            beside_s=0.0 if self._beside is None else self._beside() - self._beside_before_s,
            traffic={
                lane: now.since(self._links_before.get(lane, LinkTraffic()))
                for lane, now in ({} if self._links is None else self._links()).items()
            },
        )
        return timeline if self._meter is None else replace(timeline, peaks={Tier.DEVICE: timeline.peak_bytes})

    def _moved(self) -> Traffic:
        if self._traffic is None or self._moved_before is None:
            return {}, {}
        now = self._traffic()
        read, written = (
            dict(Counter(after) - Counter(before)) for after, before in zip(now, self._moved_before, strict=True)
        )
        return read, written

    def _now_s(self) -> float:
        return self._clock() - self._began_s
