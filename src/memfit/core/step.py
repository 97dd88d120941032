"""Step: a schedule lowered to operations that carry their meaning, without the plan that it came
from.

In: made by `scheduling.lower` from a schedule, a plan and a profile. Out: summed by `prediction`
(bytes, seconds, residents), checked, and executed by `engine`.

[Note: one meaning]
An action, such as `fetch B3`, is for people. What it does to memory, links and processors is
decided once, by `scheduling.lower`, and stands in its `Operation`: the bytes that come and go,
tier by tier and owner by owner; what it waits for; what it transfers; how much it computes.
Predictions read operations and nothing beside them, so two plans that are lowered to equal steps
have equal predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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
            beside it; see [Note: when a step is committed] in `checkpoints.registry`.
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
