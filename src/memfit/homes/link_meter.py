"""Meter of a link between an accelerator and its host: what copies take while a job runs.

In: copies of a stream, as they are enqueued. Out: bytes and seconds, by direction.

[Note: what a copy takes]
Two events on the copy's own stream, around it: what the copy waits for is before the first. Where
copies of several streams go the same way at once, each takes longer, as a step's do. Nothing waits
for the events: those that have passed are looked at between two steps.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from memfit.core.hardware import LinkTraffic

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
