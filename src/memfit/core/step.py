"""Step: a schedule lowered to operations that carry their meaning, without the plan that it came
from.

In: made by `step.lower` from a schedule, a plan and a profile. Out: summed by `step`
(bytes, seconds, residents), checked, and executed by `engine`.

[Note: one meaning]
An action, such as `fetch B3`, is for people. What it does to memory, links and processors is
decided once, by `step.lower`, and stands in its `Operation`: the bytes that come and go,
tier by tier and owner by owner; what it waits for; what it transfers; how much it computes.
Predictions read operations and nothing beside them, so two plans that are lowered to equal steps
have equal predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from memfit.core.hardware import LinkTraffic
from memfit.core.schedule import Action, Schedule
from memfit.core.shape import StepShape
from memfit.core.tiers import Tier
from memfit.core.work_kinds import Work

CATEGORIES = ("weight", "gradient", "state", "activation", "logits", "transient", "staging")
"""Categories of bytes, as timelines and reports show them. "logits": of what the call behind the
repeated ones gives and the loss makes of it, gradients and what rises there among them.
"""


class ByteChange(NamedTuple):
    """Bytes that are added to a tier (positive) or removed from it (negative).

    Attributes:
        tier: the tier.
        category: one of `CATEGORIES`.
        owner: a block ("B3"), a microbatch's activations ("m0"; itemized: what made them, "C5"),
            "batch", "updates", "disk buffers".
        nbytes: bytes, with their sign.
    """

    tier: Tier
    category: str
    owner: str
    nbytes: int


class Token(NamedTuple):
    """Name of work that goes on beside the main thread, by which operations wait for it: ("fetch",
    "B3").
    """

    kind: str
    key: str


class Transfer(NamedTuple):
    """Transfer of bytes over the link between the device and a tier.

    Attributes:
        tier: the tier.
        direction: "read": to the device; "write": from it.
        category: one of `CATEGORIES`, or "commit".
        nbytes: bytes.
        crosses: tier whose link the bytes pass as well, in the same direction: between files and an
            accelerator that is the host's.
    """

    tier: Tier
    direction: str
    category: str
    nbytes: int
    crosses: Tier | None = None


class UpdatePlace(StrEnum):
    """Processor and thread of an update.

    AT_ONCE: in the main thread, on all of its cores: nothing of it has to travel, so that a thread
    beside backward would only take one of them. BESIDE: in a thread of its own, which waits for
    what travels while backward goes on. HOST: the same, on the host's cores beside an accelerator.
    IN_ORDER: in a thread of its own, but with kernels in the order of the caller's, so that what
    the device computes next waits for what travels to and from host memory.
    """

    AT_ONCE = "at-once"
    BESIDE = "beside"
    HOST = "host"
    IN_ORDER = "in-order"

    @property
    def is_beside(self) -> bool:
        """True if the device works on it from a thread of its own."""
        return self in (UpdatePlace.BESIDE, UpdatePlace.IN_ORDER)


class Operation(NamedTuple):
    """An action with its meaning.

    The main thread executes operations in order. It waits for `waits` and for what is `awaited`,
    computes `work`, waits for `waits_after`; transfers are started and go on beside it.

    Attributes:
        action: as the schedule has it.
        changes: bytes added or removed when it is done.
        during: bytes at its peak above those before it; `changes` is not part of it.
        waits: tokens that must be done before it begins; seconds spent so are stalls.
        waits_after: the same at its end.
        transfers: transfers that it starts, each in its link's queue.
        awaited: transfers that the main thread starts after `after`, before all others, and waits
            for one after the other.
        is_chain: each transfer begins when the one before it has ended; else all begin at once.
        after: tokens that must be done before its transfers begin. As predicted the main thread
            does not wait for them; a run, which begins the transfers itself, does (`engine.run`,
            [Note: who waits]), but for a journal's keeps.
        behind: updates before it in its pipelines, if it is an update: what it reads begins to
            come when all that these read has come.
        gives: tokens that are done when its transfers and its work on either processor are.
        work: amounts by kind, computed by the device one after the other.
        host_work: the same for the host's cores, beside the main thread: in order, after `after`,
            while the transfers go on.
        update_place: processor and thread, if it is an update.
        needs: blocks whose weights must be on the device.
        adds_to: blocks to whose gradients it adds.
    """

    action: Action
    changes: tuple[ByteChange, ...] = ()
    during: tuple[ByteChange, ...] = ()
    waits: tuple[Token, ...] = ()
    waits_after: tuple[Token, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    awaited: tuple[Transfer, ...] = ()
    is_chain: bool = True
    after: tuple[Token, ...] = ()
    behind: tuple[Token, ...] = ()
    gives: Token | None = None
    work: Work = ()
    host_work: Work = ()
    update_place: UpdatePlace | None = None
    needs: tuple[int, ...] = ()
    adds_to: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, or a forward-only pass, in full.

    Attributes:
        schedule: the schedule that it was lowered from; each action is one operation.
        shape: segments and homes that the actions' indices refer to.
        resting: bytes in use before the first operation.
        operations: in order.
        commit: transfers of the step's share of a commit to a store. They are no operations: the
            commit is made when the next step begins, after the user's loop body, and with nothing
            beside it; see [Note: when a step is committed] in `runs.checkpointer`.
    """

    schedule: Schedule
    shape: StepShape
    resting: tuple[ByteChange, ...]
    operations: tuple[Operation, ...]
    commit: tuple[Transfer, ...] = ()

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks by index."""
        return self.schedule.blocks

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the calls by index."""
        return tuple(call.site for call in self.schedule.calls)


def owner_name(owner: str, names: tuple[str, ...], sites: tuple[str, ...]) -> str:
    """Returns an owner's name for people: of "B3" the block's, of "C5" that of call 5, which made
    the bytes, of "reload C5" that of the call for which they came back.
    """
    if owner[:1] == "B" and owner[1:].isdigit():
        return names[int(owner[1:])]
    prefix, _, call = owner.rpartition("C")
    if call.isdigit():
        return f"{'reloaded for' if prefix else 'made by'} {sites[int(call)] or 'model'}"
    return owner


# Timeline: bytes and seconds of a step, action by action.
#
# In: filled by `step` (predicted) or by the engine's recorder (measured). Out: `Timeline`,
# read by the planner, by the job's proof and by `memfit report`.

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
