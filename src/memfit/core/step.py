"""A schedule lowered to operations that carry their meaning: what a step does, without the plan that it came from.

In: made by `scheduling.lower` from a schedule, a plan and a profile. Out: folded by `prediction` (bytes, seconds, who holds them), by reports and by tests.

[Note: one meaning]
An action, such as `fetch B3`, says what a person reads. What it does to memory, links and processors is said once, by `scheduling.lower`, and stands in its
`Operation`: the bytes that come and go, tier by tier and owner by owner; what it waits for; what it moves; how much it computes. Whoever adds a step up reads
operations and nothing beside them, so two plans that come to equal steps have equal predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from memfit.core.schedule import Action, Schedule
from memfit.core.shape import StepShape
from memfit.core.tiers import Tier

CATEGORIES = ("weight", "gradient", "state", "activation", "transient", "staging")
"""Sorts of bytes, as timelines and reports show them."""


class ByteChange(NamedTuple):
    """Bytes that come to a tier (above zero) or leave it.

    Attributes:
        tier: where.
        category: one of `CATEGORIES`.
        owner: whose they are: a block ("B3"), a microbatch's activations ("m0"; itemized: what made them, "C5"), "batch", "updates", "disk buffers".
        nbytes: signed.
    """

    tier: Tier
    category: str
    owner: str
    nbytes: int


class Token(NamedTuple):
    """Names work that goes on beside the main thread, for whoever waits for it: ("fetch", "B3")."""

    kind: str
    key: str


class Transfer(NamedTuple):
    """Bytes over the link between the device and a tier."""

    tier: Tier
    direction: str  # "read": to the device; "write": from it
    category: str
    nbytes: int


class WorkKind(StrEnum):
    """Kinds of computing, each with a rate of its own.

    FLOPS: floating point operations of matrix products. CALLS: entries of calls. UPDATED, ENCODED, SPLIT, ROUNDED: elements that an update passes, that it
    decodes and encodes, whose masters it joins and splits, that it rounds stochastically.
    """

    FLOPS = "flops"
    CALLS = "calls"
    UPDATED = "updated"
    ENCODED = "encoded"
    SPLIT = "split"
    ROUNDED = "rounded"


class UpdatePlace(StrEnum):
    """Where an update computes.

    AT_ONCE: in the main thread, on all of its cores: nothing of it has to travel, so that a thread beside backward would only take one of them. BESIDE: in
    a thread of its own, which waits for what travels while backward goes on. HOST: the same, on the host's cores beside an accelerator.
    """

    AT_ONCE = "at-once"
    BESIDE = "beside"
    HOST = "host"


class Operation(NamedTuple):
    """One action with its meaning.

    The main thread takes operations in order. It stops for `waits`, computes `work`, stops for `waits_after`; transfers are begun and go on beside it.

    Attributes:
        action: as the schedule has it.
        changes: bytes that have come or gone when it is done.
        during: bytes beyond those before it, at its highest; `changes` is not part of it.
        waits: tokens that must be done before it begins; seconds spent so are stalls.
        waits_after: the same at its end.
        transfers: begun by it, each in its link's queue.
        is_chain: each transfer begins when the one before it has ended; else all begin at once.
        after: tokens that its transfers begin behind, while the main thread goes on.
        gives: done when its transfers, and its work on either processor, are.
        work: amounts by kind, done by the device, one after the other.
        host_work: the same of the host's cores, done beside the main thread: in order, behind `after`, while the transfers go on.
        update_place: of an update: where it computes.
        needs: blocks whose weights must be on the device.
        adds_to: blocks to whose gradients it adds.
    """

    action: Action
    changes: tuple[ByteChange, ...] = ()
    during: tuple[ByteChange, ...] = ()
    waits: tuple[Token, ...] = ()
    waits_after: tuple[Token, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    is_chain: bool = True
    after: tuple[Token, ...] = ()
    gives: Token | None = None
    work: tuple[tuple[WorkKind, float], ...] = ()
    host_work: tuple[tuple[WorkKind, float], ...] = ()
    update_place: UpdatePlace | None = None
    needs: tuple[int, ...] = ()
    adds_to: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, or a forward-only pass, in full.

    Attributes:
        schedule: what it was lowered from, an action an operation.
        shape: segments, and what rests where, that the actions' indices refer to.
        resting: bytes that are there before the first operation.
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
        """Blocks by index."""
        return self.schedule.blocks

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the calls by index."""
        return tuple(call.site for call in self.schedule.calls)


def owner_name(owner: str, names: tuple[str, ...], sites: tuple[str, ...]) -> str:
    """A name for an owner: "B3" is a block's, "C5" what call 5 made, "reload C5" what came back for it."""
    if owner[:1] == "B" and owner[1:].isdigit():
        return names[int(owner[1:])]
    prefix, _, call = owner.rpartition("C")
    if call.isdigit():
        return f"{'reloaded for' if prefix else 'made by'} {sites[int(call)] or 'model'}"
    return owner
