"""Timeline: bytes and seconds of a step, action by action.

In: filled by `prediction` (predicted) or by the engine's recorder (measured). Out: `Timeline`, read
by the planner, by the job's proof and by `memfit report`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.core.hardware import LinkTraffic
from memfit.core.tiers import Tier

COMPUTE_LANE = "compute"
"""Lane of the main thread, in `Interval.lane`."""
UPDATE_LANE = "updates"
"""Lane of the device's updates in a thread beside the main one."""
HOST_LANE = "host updates"
"""Lane of the host's cores beside an accelerator."""


def for_updates(lane: str) -> str:
    """Names the lane of what updates move over a link, piece by piece, beside the link's own."""
    return f"{lane} for updates"


class Interval(NamedTuple):
    """Time in which a lane works, or in which the main thread waits.

    Attributes:
        lane: `COMPUTE_LANE`, `UPDATE_LANE`, `HOST_LANE`, or a tier and a direction as seen from the
            device, such as "disk read", or `for_updates` of that.
        kind: "work", "stall" or "transfer".
        name: of a stall its cause, as in `Timeline.stalls_s`; of a transfer its category; of work
            "".
        moment: index of the action that it belongs to.
        nbytes: of a transfer.
        start_s, end_s: seconds since the step began.
    """

    lane: str
    kind: str
    name: str
    moment: int
    nbytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes and seconds of one action.

    Attributes:
        action: its text.
        peak_bytes: most device bytes alive while it runs.
        after_bytes: device bytes alive when it is done.
        start_s, end_s: seconds since the step began.
        busy_s: seconds of them that the main thread was on a processor; None: predicted.
        by_category: device bytes at the peak by category: "weight", "gradient", "state",
            "activation", "logits", "transient", "staging".
    """

    action: str
    peak_bytes: int
    after_bytes: int
    start_s: float = 0.0
    end_s: float = 0.0
    busy_s: float | None = None
    by_category: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A whole step.

    Attributes:
        moments: in the schedule's order.
        peaks: peak bytes by tier; a tier that is never used is not named.
        bytes_read, bytes_written: bytes moved over the links, by category.
        bytes_received: bytes that come from other ranks, by category; predicted only.
        stalls_s: seconds that compute waited, by cause: "fetch", "reload", "offload",
            "accumulate", "update". Measured ones are of the first and the last two alone
            (`engine.measured_step`).
        beside_s: seconds that updates beside backward were on a processor; 0: none, or predicted.
        traffic: measured bytes and seconds of links, by lane ("disk read"), where their tier
            counts them; empty where predicted.
        commit_s: seconds of the step's share of a commit to a store, after its last action.
        intervals: what each lane does when, predicted; empty where seconds were not predicted or
            the timeline was measured. Lengths of stalls sum to `stalls_s`.
        interval_s: seconds of the step and of that share if all rates of the machine are fast, or
            slow, by their spread; None: measured, or no machine was given.
    """

    moments: tuple[Moment, ...]
    peaks: Mapping[Tier, int] = field(default_factory=dict[Tier, int])
    bytes_read: Mapping[str, int]
    bytes_written: Mapping[str, int]
    bytes_received: Mapping[str, int] = field(default_factory=dict[str, int])
    stalls_s: Mapping[str, float] = field(default_factory=dict[str, float])
    beside_s: float = 0.0
    traffic: Mapping[str, LinkTraffic] = field(default_factory=dict[str, LinkTraffic])
    commit_s: float = 0.0
    intervals: tuple[Interval, ...] = ()
    interval_s: tuple[float, float] | None = None

    def peak_in(self, tier: Tier) -> int:
        """Returns the peak bytes in a tier; 0 if it is never used."""
        return self.peaks.get(tier, 0)

    @property
    def peak_bytes(self) -> int:
        """Most device bytes alive at once."""
        return max((m.peak_bytes for m in self.moments), default=0)

    @property
    def peak(self) -> Moment | None:
        """The action with the peak on the device."""
        return max(self.moments, key=lambda m: m.peak_bytes, default=None)

    @property
    def seconds(self) -> float:
        """Seconds of the step and of its share of a commit."""
        return max((m.end_s for m in self.moments), default=0.0) + self.commit_s
