"""Clock: begin and end of each operation, from a simulation of the step on a model of the machine.

In: `Step`, `Hardware`. Out: `ActionTime` for each operation, stalls by cause, bytes moved by
category.

[Note: the clock]
One main thread takes the operations in order. Compute takes its time, class by class of its work;
on an accelerator not less than the host needs to launch it. Transfers start at once, or when what
they need is done, and are served by their link in the order they were issued: reading and writing
are two queues a tier. An update moves its bytes piece by piece, and asks for a piece when one
before it is through: so it waits for what was issued before, and what is issued later goes before
the rest of it. Pieces come and go in turns: all directions of links that an update uses are through
with it at once, and what goes before its pieces in one of them holds the others up as well. The
main thread stops only where an operation waits; those seconds are stalls, by
what was waited for.

An update's elements are worked on by the device or by the host's cores, one update after the other,
as soon as its gradient is there. The host begins when a first piece can have come, and is not
through before the last has gone. One thread makes all updates: one by the device that files are
read or written for begins when the host is through with those before it; others go before the
host's. On the device an update of a thread beside the main one goes first: what the main thread
computes meanwhile comes later by as much, and where it waits anyhow that costs nothing. Two that
share a processor have done as much in the end. But an update whose pieces come over a link does
nothing until that link is through with what it was given before, and while a transfer goes before
its pieces: a fetch that the main thread waits for is not hidden by it. On an accelerator an update
of whole parameters has its kernels, and their waits for what comes from host memory and goes there,
in the order of the caller's (`homes.updates`): the main thread goes on when that has passed. A
piece is computed when the one before it is home again, so that its work and writes to host memory
add up. What the disk brings is waited for by the updates' own thread.

Where a link's contention was measured: a transfer takes the speed of both directions while the
other one has work, and compute goes on at `Link.compute_share` of its speed while the link has
work. A transfer that crosses a second link (files, beside an accelerator) is served by both, each
in its own order and at its own speed, and is done when both are: so both links carry all of its
bytes.

Not modelled: that an accelerator's updates have asked for all their reads from host memory when a
fetch comes, which then waits for them; that a transfer under way ends later when another begins or
goes before it (what is behind it in its queue does, and the step with the last update); that links
slow updates down as they slow compute; updates on the host taking memory's bandwidth from
transfers; disks that hang on the accelerator's own switch; a run's main thread that waits before it
begins a transfer (`Operation.after`); the cost of a first step.

What ranks send each other is one queue of the link `network`, in the order of the list, as their
one thread does it (`mesh`). All ranks are taken as alike: a collective begins when this rank
comes to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from memfit.core.hardware import Hardware, Rate, host_rates_of, rates_of
from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.schedule import Backward, Forward
from memfit.core.step import (
    COMPUTE_LANE,
    HOST_LANE,
    UPDATE_LANE,
    Interval,
    Operation,
    Step,
    Timeline,
    Token,
    Transfer,
    UpdatePlace,
    for_updates,
)
from memfit.core.tiers import NETWORK, Tier, is_processor
from memfit.core.work_kinds import LAUNCHED, PRODUCT_KINDS, Work, WorkKind

# Speeds of a machine: seconds of work on its processors, and of bytes on its links.
#
# In: `Hardware`. Out: `Pace`, and seconds of single amounts.
#
# [Note: the interval]
# Each rate has a spread, the share by which its measurements differed. All rates slow by theirs
# gives one end of what rates leave open, all fast the other: errors that do not cancel. Besides, a
# step is not its model: nine of ten steps were nearer to their prediction than
# `Hardware.step_spread`, which `benchmarks/clock.py` and a machine's own runs tell. Both are taken
# as independent.


def work_seconds(work: Work, hardware: Hardware) -> float:
    """Returns the seconds of work on the device, one kind after the other."""
    return _seconds(work, _per_s(rates_of(hardware)), launches_beside=not is_processor(hardware.device))


def host_work_seconds(work: Work, hardware: Hardware) -> float:
    """Returns the seconds of work on the host's cores, beside an accelerator."""
    return _seconds(work, _per_s(host_rates_of(hardware)))


def fastest_products_per_s(hardware: Hardware) -> float:
    """Returns the rate that no class of products exceeds, for lower bounds."""
    rates = rates_of(hardware)
    return max(rates[kind].per_s for kind in PRODUCT_KINDS)


def _per_s(rates: Mapping[WorkKind, Rate], sign: int = 0) -> Mapping[WorkKind, float]:
    """Amounts a second: as measured, or all fast (1) or slow (-1) by their spread."""
    return {kind: _shifted(rate.per_s, rate.spread, sign) for kind, rate in rates.items()}


def _shifted(per_s: float, spread: float, sign: int) -> float:
    return per_s * (1 + spread) if sign > 0 else per_s / (1 + spread) if sign < 0 else per_s


def _seconds(work: Work, rates: Mapping[WorkKind, float], *, launches_beside: bool = False) -> float:
    """Seconds of amounts. An accelerator works while the host launches what comes next."""
    launched = 0.0
    total = 0.0
    for kind, amount in work:
        if launches_beside and kind in LAUNCHED:
            launched += amount / rates[kind]
        else:
            total += amount / rates[kind]
    return max(total, launched)


class Lane(NamedTuple):
    """One direction of a link: its name, bytes a second alone and while the other one has work,
    seconds beside the bytes.
    """

    name: str
    alone: float
    both: float
    latency_s: float


class Pace:
    """Speeds of a machine as clocks take them, found once for many steps.

    Args:
        hardware: the machine.
        sign: 0: at its rates; 1 or -1: all rates fast or slow. See [Note: the interval].
    """

    def __init__(self, hardware: Hardware, *, sign: int = 0) -> None:
        self.hardware = hardware
        self._sign = sign
        self._rates = _per_s(rates_of(hardware), sign)
        self._host_rates = _per_s(host_rates_of(hardware), sign)
        self._launches_beside = not is_processor(hardware.device)
        # Seconds by work: segments share theirs among microbatches, and steps among plans.
        self._known_s: dict[Work, float] = {}
        self._host_known_s: dict[Work, float] = {}
        self._known_pieces: dict[Work, float] = {}
        self._lanes: dict[tuple[Tier, str], Lane] = {}
        self.slows_compute = any(spec.link and spec.link.compute_share < 1 for spec in hardware.tiers.values()) or any(
            link.compute_share < 1 for link in hardware.network.values()
        )

    @property
    def adds_up(self) -> bool:
        """Amounts of work take as long together as one after the other."""
        return not self._launches_beside

    def work_s(self, work: Work) -> float:
        """Seconds of work on the device."""
        found = self._known_s.get(work)
        if found is None:
            found = self._known_s[work] = _seconds(work, self._rates, launches_beside=self._launches_beside)
        return found

    def host_work_s(self, work: Work) -> float:
        """Seconds of work on the host's cores."""
        found = self._host_known_s.get(work)
        if found is None:
            found = self._host_known_s[work] = _seconds(work, self._host_rates)
        return found

    def pieces(self, work: Work) -> float:
        """Pieces of an update on the host: small parameters go together, large ones are cut."""
        found = self._known_pieces.get(work)
        if found is None:
            amounts = dict(work)
            together = amounts.get(WorkKind.UPDATED, 0.0) / PIECE_ELEMENTS
            found = self._known_pieces[work] = max(1.0, min(amounts.get(WorkKind.PIECES, 0.0), together))
        return found

    def lane(self, tier: Tier, direction: str) -> Lane:
        """One direction of a tier's link.

        Raises:
            PlanError: the machine has no such tier.
        """
        found = self._lanes.get((tier, direction))
        if found is None:
            link, is_read = self.hardware.link(tier), direction == "read"
            alone = _shifted(link.read_bytes_per_s if is_read else link.write_bytes_per_s, link.spread, self._sign)
            both = link.both_read_bytes_per_s if is_read else link.both_write_bytes_per_s
            both = alone if both is None else _shifted(both, link.spread, self._sign)
            found = self._lanes[tier, direction] = Lane(f"{tier} {direction}", alone, both, link.latency_s)
        return found


# Seconds that two sums of the same terms may differ by, in another order.
_ROUNDING_S = 1e-12
_NO_TIERS = frozenset[Tier]()
# The stall of whoever reads a sum of gradients to add to it, as timelines name it.
_SUM = "accumulate"
# That of a main thread behind an update's traffic with host memory.
_UPDATE = "update"
LAST_BACKWARD = "last backward"
"""Names the instant at which the last backward is through."""


class ActionTime(NamedTuple):
    """Begin and end of an operation, in seconds since the step began. A transfer ends when its
    bytes have arrived; later operations may have begun before.
    """

    start_s: float
    end_s: float


class _Updating(NamedTuple):
    """Seconds in which the device works on an update beside the main thread.

    Attributes:
        began, end: of them.
        moment: the operation's.
        gives: what it is waited for by.
        reads: tiers whose links its pieces come over.
    """

    began: float
    end: float
    moment: int
    gives: Token | None
    reads: frozenset[Tier]


def _read_in_pieces(operation: Operation) -> frozenset[Tier]:
    reads = [transfer for transfer in operation.transfers if transfer.direction == "read"]
    return frozenset(t for one in reads for t in (one.tier, one.crosses) if t is not None)


def _uses_files(transfers: Iterable[Transfer]) -> bool:
    return any(transfer.tier.traits.is_files for transfer in transfers)


class Clock:
    """Simulates a step on a machine; without one, only bytes are counted and all seconds are 0.
    See [Note: the clock].

    Args:
        pace: of the machine.
        records: keeps `intervals`.
    """

    def __init__(self, pace: Pace | Hardware | None, *, records: bool = False) -> None:
        self._pace = pace = Pace(pace) if isinstance(pace, Hardware) else pace
        self._records = records and pace is not None
        self._moment = -1
        self.intervals: list[Interval] = []
        # When the host's cores are through with the updates that they were given.
        self._host_free_s = 0.0
        # The same for the device and updates beside the main thread, and when it works on them:
        # seconds that are not over, in order.
        self._updates_free_s = 0.0
        self._updating: deque[_Updating] = deque()
        # When updates that transfers held up are through, by their operations.
        self._late_s: dict[int, float] = {}
        self.now_s = 0.0
        self.stalls_s: dict[str, float] = {}
        # How long each lane works, by its name.
        self.busy_s: dict[str, float] = {}
        self.bytes_read: Counter[str] = Counter()
        self.bytes_written: Counter[str] = Counter()
        self.bytes_received: Counter[str] = Counter()
        # When each queue is free again, and when what was begun is done.
        self._free_s: dict[tuple[Tier, str], float] = {}
        # The same of what updates move piece by piece, which all else goes before.
        self._pieces_free_s: dict[tuple[Tier, str], float] = {}
        # By queue: itself, and those that updates under way use with it.
        self._in_turns: dict[tuple[Tier, str], tuple[tuple[Tier, str], ...]] = {}
        self._last_in_pieces = -1
        self._done_s: dict[Token, float] = {}
        # When all that it reads has come.
        self._come_s: dict[Token, float] = {}

    def run(self, step: Step) -> list[ActionTime]:
        """Returns the times of all operations, in order."""
        return self._ended([self._take(operation) for operation in step])

    def run_with_turns(self, step: Step) -> tuple[list[ActionTime], dict[str, Mapping[str, float]]]:
        """Returns the times of all operations, and how long each lane had worked at instants of the
        step, by their names: the first and the last time that a backward follows a forward, and
        when the last backward is through.
        """
        times: list[ActionTime] = []
        instants: dict[str, Mapping[str, float]] = {}
        operations = step.operations
        behind = range(len(operations) - 1, -1, -1)
        last = next((i for i in behind if isinstance(operations[i].action, Backward)), -1)
        is_forward = False
        for index, operation in enumerate(operations):
            kind = type(operation.action)
            if kind is Forward:
                is_forward = True
            elif is_forward and kind is Backward:
                is_forward = False
                instants["last turn"] = dict(self.busy_s)
                instants.setdefault("first turn", instants["last turn"])
            times.append(self._take(operation))
            if index == last:
                instants[LAST_BACKWARD] = dict(self.busy_s)
        return self._ended(times), instants

    def _ended(self, times: list[ActionTime]) -> list[ActionTime]:
        """Lets the last update that moved bytes end when links are through with all pieces."""
        for one in self._updating:
            self._note(UPDATE_LANE, "work", "", one.began, one.end, moment=one.moment)
        self._updating.clear()
        for moment, end in self._late_s.items():
            times[moment] = ActionTime(start_s=times[moment].start_s, end_s=max(times[moment].end_s, end))
        if self._last_in_pieces >= 0:
            last = times[self._last_in_pieces]
            end = max(last.end_s, *self._pieces_free_s.values())
            times[self._last_in_pieces] = ActionTime(start_s=last.start_s, end_s=end)
        return times

    def commit_seconds(self, step: Step) -> float:
        """Returns the seconds of the step's share of a commit, which nothing else runs beside."""
        if self._pace is None:
            return 0.0
        return sum(t.nbytes / self._pace.lane(t.tier, t.direction).alone for t in step.commit)

    def _note(
        self,
        lane: str,
        kind: str,
        name: str,
        start_s: float,
        end_s: float,
        nbytes: int = 0,
        moment: int | None = None,
    ) -> None:
        if self._records and end_s > start_s:
            at = self._moment if moment is None else moment
            self.intervals.append(Interval(lane, kind, name, at, nbytes, start_s, end_s))

    def _work(self, lane: str, seconds: float) -> None:
        self.busy_s[lane] = self.busy_s.get(lane, 0.0) + seconds

    def _take(self, operation: Operation) -> ActionTime:
        # All at once, in the order of `Operation`'s fields: each operation of each plan that a
        # planner looks at passes here.
        (_, _, _, waits, waits_after, transfers, awaited, is_chain, after, behind, gives, work, host_work, place) = (
            operation[:14]
        )
        self._moment += 1
        start = self.now_s
        if waits:
            self._wait(waits)
            if work:
                start = self.now_s  # what computes is shown without its stall
        begin = self.now_s
        if after or awaited or behind:
            begin = self._begin(after, awaited, behind)
        end = come = begin
        is_beside = place is not None and place.is_beside
        reads, fed = _NO_TIERS, begin
        if is_beside:
            # Its own pieces come behind all that their links were given before.
            reads = _read_in_pieces(operation)
            # One thread makes those of the host as well, and waits for files itself.
            before = self._host_free_s if _uses_files(transfers) else 0.0
            fed = max([begin, before, *(self._free_s.get((tier, "read"), 0.0) for tier in reads)])
        # By direction: when what it moves to and from host memory is through.
        passed: dict[str, float] = {}
        ended: list[float] = []
        for transfer in transfers:
            moved = self._serve(transfer, end if is_chain else begin, in_pieces=place is not None)
            end = max(end, moved)
            ended.append(moved)
            if transfer.tier is Tier.HOST:
                passed[transfer.direction] = moved
            if transfer.direction == "read":
                come = max(come, moved)
        if place is not None and transfers and self._pace is not None:
            self._take_turns(transfers, self._pace)
        if work and self._pace is not None:
            seconds = self._pace.work_s(work)
            if is_beside:
                end = max(end, self._update_beside(fed, seconds, gives, reads))
                if place is UpdatePlace.IN_ORDER and passed:
                    # A piece is computed when the one before is home: writes and work take turns.
                    self._stop_until(max(passed.get("read", 0.0), passed.get("write", -seconds) + seconds), _UPDATE)
            else:
                self._compute(seconds, self._pace)
        if host_work and self._pace is not None:
            end = max(end, self._update_on_host(begin, host_work, zip(transfers, ended, strict=True), self._pace))
        if gives is not None:
            end = max(end, self.now_s)
            self._done_s[gives] = end
            self._come_s[gives] = come
            return ActionTime(begin, end)
        end = self.now_s
        if waits_after:
            self._wait(waits_after)
        return ActionTime(start, end)

    def _begin(self, after: Iterable[Token], awaited: Iterable[Transfer], behind: Iterable[Token]) -> float:
        """Returns when an operation's transfers begin, behind what they wait for."""
        begin = self.now_s
        for token in after:
            begin = max(begin, self._done_s.get(token, 0.0))
        for transfer in awaited:
            # The main thread itself waits for these.
            begin = self._serve(transfer, begin)
            self._stop_until(begin, _SUM)
        for token in behind:
            begin = max(begin, self._come_s.get(token, 0.0))
        return begin

    def _serve(self, transfer: Transfer, begin: float, *, in_pieces: bool = False) -> float:
        tier, direction, category, nbytes, crosses = transfer
        counter = self.bytes_read if direction == "read" else self.bytes_written
        if tier is NETWORK:
            counter = self.bytes_received
        counter[category] = counter.get(category, 0) + nbytes
        if self._pace is None:
            return begin
        end = self._pass(tier, transfer, begin, self._pace, in_pieces=in_pieces)
        if crosses is not None and crosses in self._pace.hardware.tiers:
            end = max(end, self._pass(crosses, transfer, begin, self._pace, in_pieces=in_pieces))
        return end

    def _pass(self, tier: Tier, transfer: Transfer, begin: float, pace: Pace, *, in_pieces: bool) -> float:
        """Puts a transfer into the queue of one link; returns when it is through."""
        direction, nbytes = transfer.direction, transfer.nbytes
        queue = tier, direction
        name, alone, both, latency_s = pace.lane(tier, direction)
        pieces_free_s = self._pieces_free_s.get(queue, 0.0)
        began = max(begin, self._free_s.get(queue, 0.0), pieces_free_s if in_pieces else 0.0)
        if both >= alone:
            end = began + (latency_s + nbytes / alone)
        else:
            # Slower while the other direction has work.
            beside_s = self._busy_until((tier, "write" if direction == "read" else "read")) - began
            shared_s = min(max(beside_s, 0.0), nbytes / both)
            end = began + (latency_s + shared_s + (nbytes - shared_s * both) / alone)
        if in_pieces:
            name = for_updates(name)
            self._pieces_free_s[queue] = end
            self._last_in_pieces = self._moment
        else:
            self._free_s[queue] = end
            for other in self._in_turns.get(queue, ()):
                if self._pieces_free_s[other] > began + _ROUNDING_S:
                    self._pieces_free_s[other] += end - began
            if pieces_free_s > began + _ROUNDING_S and direction == "read" and self._updating:
                self._starve(tier, began, end)
        self.busy_s[name] = self.busy_s.get(name, 0.0) + (end - began)
        if self._records:
            self._note(name, "transfer", transfer.category, began, end, nbytes)
        return end

    def _take_turns(self, transfers: Iterable[Transfer], pace: Pace) -> None:
        """Lets all queues that an update used be through with its pieces at once."""
        ways = [(tier, one.direction) for one in transfers for tier in (one.tier, one.crosses) if tier is not None]
        queues = tuple(queue for queue in dict.fromkeys(ways) if queue[0] in pace.hardware.tiers)
        through_s = max((self._pieces_free_s[queue] for queue in queues), default=0.0)
        joined = dict.fromkeys(queues)
        for queue in queues:
            # Also those of updates before, whose pieces are not through.
            partners = self._in_turns.get(queue, ())
            joined |= dict.fromkeys(one for one in partners if self._pieces_free_s[one] > self.now_s + _ROUNDING_S)
        for queue in queues:
            self._pieces_free_s[queue] = through_s
        for queue in joined:
            self._in_turns[queue] = tuple(joined)

    def _busy_until(self, queue: tuple[Tier, str]) -> float:
        return max(self._free_s.get(queue, 0.0), self._pieces_free_s.get(queue, 0.0))

    def _update_beside(self, begin: float, seconds: float, gives: Token | None, reads: frozenset[Tier]) -> float:
        """Puts an update behind those that the device works on beside the main thread; returns when
        it is through.
        """
        began = max(begin, self._updates_free_s)
        self._updates_free_s = end = began + seconds
        if end > began:
            self._updating.append(_Updating(began, end, self._moment, gives, reads))
        self._work(UPDATE_LANE, seconds)
        return end

    def _update_on_host(
        self, begin: float, work: Work, transfers: Iterable[tuple[Transfer, float]], pace: Pace
    ) -> float:
        """Puts an update behind those that the host's cores work on; returns when it is through.

        Args:
            begin: of its transfers.
            work: of all its pieces.
            transfers: each with the end of all its pieces.
            pace: of the machine.
        """
        seconds, pieces = pace.host_work_s(work), pace.pieces(work)
        # By queue: seconds of one piece, to the host and from it.
        coming: dict[tuple[Tier, str], float] = {}
        going: dict[tuple[Tier, str], float] = {}
        come = begin
        for (tier, direction, _, nbytes, _), ended in transfers:
            # What the device gives comes over the host's link, in the direction away from it.
            comes = (direction == "write") is (tier is Tier.HOST)
            of_piece = coming if comes else going
            of_piece[tier, direction] = (
                of_piece.get((tier, direction), 0.0) + nbytes / pace.lane(tier, direction).alone / pieces
            )
            come = max(come, ended) if comes else come
        began = max(begin + max(coming.values(), default=0.0), self._host_free_s)
        self._host_free_s = max(began + seconds, come + seconds / pieces)
        self._work(HOST_LANE, seconds)
        self._note(HOST_LANE, "work", "", began, began + seconds)
        return self._host_free_s + max(going.values(), default=0.0)

    def _starve(self, tier: Tier, since_s: float, until_s: float) -> None:
        """Lets updates that read from a tier do nothing while a transfer goes before their
        pieces.
        """
        fed = deque[_Updating]()
        free_s = 0.0
        for one in self._updating:
            began = max(one.began, free_s)
            end = began + (one.end - one.began)
            if tier in one.reads and end > since_s and began < until_s:
                if began < since_s:
                    fed.append(one._replace(began=began, end=since_s))
                    began = since_s
                began, end = until_s, until_s + (end - began)
            free_s = end
            fed.append(one._replace(began=began, end=end))
            if one.gives is not None:
                self._done_s[one.gives] = max(self._done_s[one.gives], end)
                self._late_s[one.moment] = end
        self._updating = fed
        self._updates_free_s = max(self._updates_free_s, free_s)

    def _compute(self, left_s: float, pace: Pace) -> None:
        """Computes for so long, slower while a link has work and not while an update goes first."""
        self._work(COMPUTE_LANE, left_s)
        while self._updating and left_s > 0:
            first = self._updating[0]
            if first.began > self.now_s:
                left_s = self._compute_until(first.began, left_s, pace)
            if first.began <= self.now_s:
                self.now_s = max(self.now_s, first.end)
                self._updating.popleft()
                self._note(UPDATE_LANE, "work", "", first.began, first.end, moment=first.moment)
        self._compute_until(float("inf"), left_s, pace)

    def _compute_until(self, until_s: float, left_s: float, pace: Pace) -> float:
        """Computes for so long or until a moment; returns the seconds that are left then."""
        since_s = self.now_s
        if pace.slows_compute:
            hardware = pace.hardware
            busy: dict[Tier, float] = {}
            for queues in (self._free_s, self._pieces_free_s):
                for (tier, _), free_s in queues.items():
                    if free_s > self.now_s and hardware.link(tier).compute_share < 1:
                        busy[tier] = max(busy.get(tier, 0.0), free_s)
            # While several links have work, the one that slows most counts.
            for tier in sorted(busy, key=lambda one: busy[one]):
                slowest = min(hardware.link(t).compute_share for t, free_s in busy.items() if free_s >= busy[tier])
                beside_s = max(0.0, min(busy[tier], until_s) - self.now_s)
                done_s = min(left_s, beside_s * slowest)
                self.now_s += done_s / slowest
                left_s -= done_s
        done_s = min(left_s, max(0.0, until_s - self.now_s))
        self.now_s += done_s
        self._note(COMPUTE_LANE, "work", "", since_s, self.now_s)
        return left_s - done_s

    def _wait(self, tokens: Iterable[Token]) -> None:
        for token in tokens:
            self._stop_until(self._done_s[token], token.kind)

    def _stop_until(self, done_s: float, cause: str) -> None:
        if done_s > self.now_s:
            self.stalls_s[cause] = self.stalls_s.get(cause, 0.0) + done_s - self.now_s
            self._note(COMPUTE_LANE, "stall", cause, self.now_s, done_s)
            self.now_s = done_s


# Bottlenecks of a step over time: which lane works most in each of its phases.
#
# In: a predicted `Timeline`. Out: `Phase`s, in order.


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a step.

    Attributes:
        name: "forward", "backward", or "the rest" (updates that are left, commits of a journal).
        start_s, end_s: since the step began.
        busy_s: for how long each lane works in it, the busiest first. The compute lane: without its
            stalls.
        stalls_s: for how long compute waits in it, by cause.
    """

    name: str
    start_s: float
    end_s: float
    busy_s: Mapping[str, float]
    stalls_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


def find_phases(timeline: Timeline) -> tuple[Phase, ...]:
    """Splits a step where its first backward begins and its last one ends, and says who works.

    A step that goes back and forth (microbatch by microbatch, or with a tail) has one phase
    "forward" until its first backward: the other forwards count as the backward's.
    """
    backward = [moment for moment in timeline.moments if moment.action.startswith("backward ")]
    end = max((moment.end_s for moment in timeline.moments), default=0.0)
    if not backward or not timeline.intervals:
        return ()
    bounds = [0.0, backward[0].start_s, backward[-1].end_s, end]
    names = ("forward", "backward", "the rest")
    return tuple(
        _phase(name, begin, until, timeline.intervals)
        for name, (begin, until) in zip(names, pairwise(bounds), strict=True)
        if until > begin
    )


def _phase(name: str, begin: float, until: float, intervals: tuple[Interval, ...]) -> Phase:
    busy: dict[str, float] = {}
    stalls: dict[str, float] = {}
    for each in intervals:
        seconds = min(each.end_s, until) - max(each.start_s, begin)
        if seconds <= 0:
            continue
        if each.kind == "stall":
            stalls[each.name] = stalls.get(each.name, 0.0) + seconds
        else:
            busy[each.lane] = busy.get(each.lane, 0.0) + seconds
    return Phase(
        name=name,
        start_s=begin,
        end_s=until,
        busy_s=dict(sorted(busy.items(), key=lambda item: (-item[1], item[0] != COMPUTE_LANE))),
        stalls_s=stalls,
    )
