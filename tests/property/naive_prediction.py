"""A second prediction of a step, slow and without any code of `memfit.prediction`.

Bytes: every byte that an operation says comes is a lot with a birth and a death; a tier holds what
is alive. Seconds: a discrete-event simulation. The main thread is a coroutine that stops at
signals; links, the device and the host's cores are queues; time goes from one completion to the
next.

Both are written from what `core.step` and [Note: the clock] say.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from memfit.core.hardware import Hardware, Link
from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.step import ByteChange, Operation, Step, Token, Transfer, UpdatePlace
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind
from memfit.step.clock import host_work_seconds, work_seconds

Key = tuple[Tier, str, str]
_BESIDE = (UpdatePlace.BESIDE, UpdatePlace.IN_ORDER)


# ---- bytes ----


@dataclass
class Lot:
    """Bytes that came together and belong to one owner. `born`: index of the operation that
    brought them, -1 for what rests before the first; `died`: of the one that removed them.
    """

    key: Key
    nbytes: int
    born: int
    died: int | None = None

    def is_alive_after(self, index: int) -> bool:
        """Tells whether they are there when operation `index` is done."""
        return self.born <= index and (self.died is None or self.died > index)


def lots_of(step: Step) -> list[Lot]:
    """Lists all bytes that a step ever holds, each with its birth and death.

    Raises:
        AssertionError: an operation removes bytes that are not there.
    """
    lots: list[Lot] = []
    for index, changes in enumerate([step.resting, *(o.changes for o in step.operations)], start=-1):
        for key, nbytes in _by_key(changes).items():
            if nbytes > 0:
                lots.append(Lot(key, nbytes, index))
        for key, nbytes in _by_key(changes).items():
            left = -nbytes
            for lot in [lot for lot in lots if lot.key == key and lot.died is None]:
                if left > 0:
                    taken = min(left, lot.nbytes)
                    lots.append(Lot(key, lot.nbytes - taken, lot.born))
                    lot.nbytes, lot.died = taken, index
                    left -= taken
            assert left <= 0, f"operation {index} removes {left} bytes of {key} that are not there"
    return [lot for lot in lots if lot.nbytes]


def held(step: Step, lots: Sequence[Lot], index: int) -> tuple[Counter[Key], Counter[Key]]:
    """Returns bytes by tier, category and owner: at the peak of operation `index` as it runs, and
    when it is done.
    """
    during, after = Counter[Key](), Counter[Key]()
    for lot in lots:
        if lot.is_alive_after(index - 1):
            during[lot.key] += lot.nbytes
        if lot.is_alive_after(index):
            after[lot.key] += lot.nbytes
    for key, nbytes in _by_key(step.operations[index].during).items():
        during[key] += nbytes
    return during, after


def in_tier(counted: Mapping[Key, int], tier: Tier) -> int:
    """Returns the bytes of one tier."""
    return sum(nbytes for key, nbytes in counted.items() if key[0] is tier)


def by_category(counted: Mapping[Key, int], tier: Tier) -> dict[str, int]:
    """Returns the bytes of one tier by category, without those that have none."""
    sums = Counter[str]()
    for (where, category, _), nbytes in counted.items():
        if where is tier:
            sums[category] += nbytes
    return {category: nbytes for category, nbytes in sums.items() if nbytes}


def peaks_of(step: Step) -> dict[Tier, int]:
    """Returns the most bytes of every tier that ever holds some."""
    lots = lots_of(step)
    most: dict[Tier, int] = defaultdict(int)
    for lot in lots:
        if lot.born < 0:
            most[lot.key[0]] += lot.nbytes
    for index, operation in enumerate(step):
        tiers = {lot.key[0] for lot in lots} | {change.tier for change in operation.during}
        for counted in held(step, lots, index):
            for tier in tiers:
                most[tier] = max(most[tier], in_tier(counted, tier))
    return {tier: nbytes for tier, nbytes in most.items() if nbytes}


def _by_key(changes: Iterable[ByteChange]) -> Counter[Key]:
    found = Counter[Key]()
    for change in changes:
        found[change.tier, change.category, change.owner] += change.nbytes
    return found


# ---- seconds ----


@dataclass(eq=False)
class Signal:
    """Something that comes to pass: at a moment of its own, or when all that it needs has, and not
    before `earliest`.
    """

    earliest: Fraction = Fraction(0)
    needs: tuple[Signal, ...] = ()
    own: bool = True
    happened: Fraction | None = None

    @property
    def at(self) -> Fraction | None:
        """When it came to pass; None: it has not."""
        if self.own:
            return self.happened
        moments = [signal.at for signal in self.needs]
        known = [moment for moment in moments if moment is not None]
        if len(known) == len(moments):
            self.own, self.happened = True, max([self.earliest, *known])
        return self.happened


def all_of(earliest: Fraction, *needs: Signal) -> Signal:
    """Returns the signal of several."""
    return Signal(earliest=earliest, needs=needs, own=False)


@dataclass
class Job:
    """Work of a queue.

    Attributes:
        left: seconds that it would take alone.
        needs: what must have come to pass before.
        beside: while that has not come to pass, it goes on at `share` of its speed.
        done: its end.
        reads: of an update: tiers whose links its pieces come over.
    """

    left: Fraction
    needs: Signal
    beside: Signal | None = None
    share: Fraction = Fraction(1)
    done: Signal = field(default_factory=Signal)
    reads: frozenset[Tier] = frozenset()

    @property
    def speed(self) -> Fraction:
        """Share of its own speed at which it goes on now."""
        return self.share if self.beside is not None and self.beside.at is None else Fraction(1)


@dataclass
class Pause(Job):
    """Seconds by which a queue of pieces is behind, since a transfer went before its rest.

    Attributes:
        began, ended: when that transfer did.
        headed: when all before it in the queue was over: only if the transfer had begun by then is
            there a pause, of as long as it took.
        number: of the operation that the transfer is of.
        is_own: the queue is the transfer's own: updates beside wait for what is read there.
    """

    number: int = 0
    is_own: bool = True

    began: Signal = field(default_factory=Signal)
    ended: Signal = field(default_factory=Signal)
    headed: Fraction | None = None

    @property
    def starves(self) -> bool:
        """Tells whether the transfer is under way, and began before all pieces had come."""
        is_first = self.began.at is not None and (self.headed is None or self.began.at < self.headed)
        return self.is_own and is_first and self.ended.at is None

    def decide(self, now: Fraction) -> None:
        """Sets how long it lasts, as soon as that is known."""
        if self.headed is None:
            self.headed = now
            if self.began.at is None or self.began.at >= now:
                self.needs = Signal(happened=now)
        elif self.needs.at is not None:
            return
        if self.needs.at is None and self.ended.at is not None:
            assert self.began.at is not None
            self.left = self.headed + (self.ended.at - self.began.at) - now
            self.needs = Signal(happened=now)


def _is_of_pieces(name: object) -> bool:
    return isinstance(name, tuple) and name[-1] == "pieces"


@dataclass
class Simulation:
    """A run of a step on a machine, told by a discrete-event simulation.

    Attributes:
        times: begin and end of each operation, as timelines show them.
        stalls_s: seconds that the main thread stood still, by what it waited for.
    """

    hardware: Hardware
    now: Fraction = Fraction(0)
    times: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    stalls_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _queues: dict[object, deque[Job]] = field(default_factory=lambda: defaultdict(deque))
    _given: dict[Token, Signal] = field(default_factory=dict[Token, Signal])
    _come: dict[Token, Signal] = field(default_factory=dict[Token, Signal])
    _in_turns: dict[object, tuple[object, ...]] = field(default_factory=dict[object, "tuple[object, ...]"])
    _pieces_over: Fraction = Fraction(0)
    _last_in_pieces: int = -1
    _number: int = -1

    def run(self, step: Step) -> Simulation:
        """Simulates the whole step."""
        shown: list[tuple[Signal, Signal]] = []
        self._last_in_pieces = -1
        main = self._main(step, shown)
        waited = next(main, None)
        while True:
            for queue in self._queues.values():
                if queue and isinstance(queue[0], Pause):
                    queue[0].decide(self.now)
            # All that happens at this instant.
            if waited is not None and waited.at is not None:
                waited = next(main, None)
                continue
            heads = [queue for queue in self._queues.values() if queue and queue[0].needs.at is not None]
            over = [queue for queue in heads if not queue[0].left]
            if over:
                over[0].popleft().done.happened = self.now
                if any(over[0] is queue for name, queue in self._queues.items() if _is_of_pieces(name)):
                    self._pieces_over = self.now
                continue
            if not heads:
                break
            names = {id(queue[0]): name for name, queue in self._queues.items() if queue}
            speeds = [self._speed(names[id(queue[0])], queue[0]) for queue in heads]
            passed = min(queue[0].left / speed for queue, speed in zip(heads, speeds, strict=True) if speed)
            self.now += passed
            for queue, speed in zip(heads, speeds, strict=True):
                queue[0].left -= passed * speed
        assert waited is None, "the main thread waits for what never comes"
        for index, (begin, end) in enumerate(shown):
            assert begin.at is not None
            assert end.at is not None
            over = self._pieces_over if index == self._last_in_pieces else Fraction(0)
            self.times.append((float(begin.at), float(max(end.at, over))))
        return self

    def _main(self, step: Step, shown: list[tuple[Signal, Signal]]) -> Iterator[Signal]:
        for index, operation in enumerate(step):
            self._number = index
            begin = Signal(happened=self.now)
            if operation.update_place is not None and operation.transfers:
                self._last_in_pieces = index
            yield from self._stop(operation.waits)
            if operation.work:
                begin = Signal(happened=self.now)
            gate = all_of(self.now, *(self._foretold(t) for t in operation.after if t in self._given))
            for transfer in operation.awaited:
                read = self._transfer(transfer, gate)
                yield from self._stall("accumulate", read)
                gate = all_of(self.now, read)
            if operation.behind:
                gate = all_of(self.now, gate, *(self._come[t] for t in operation.behind if t in self._come))
            under_way = self._start(operation, gate)
            if operation.work and operation.update_place is UpdatePlace.IN_ORDER:
                # Its kernels, behind their transfers, are in one order with what is computed next.
                seconds = Fraction(work_seconds(operation.work, self.hardware))
                passed: list[Signal] = []
                for transfer, (direction, moved) in zip(operation.transfers, under_way, strict=False):
                    if transfer.tier is Tier.HOST:
                        is_written = direction == "write"
                        passed.append(
                            self._queue(f"behind {index} {len(passed)}", seconds, moved) if is_written else moved
                        )
                yield from self._stall("update", all_of(self.now, *passed))
            if operation.work and operation.update_place not in _BESIDE:
                seconds = Fraction(work_seconds(operation.work, self.hardware))
                yield self._queue("device", seconds, all_of(self.now))
            if operation.gives is None:
                shown.append((begin, Signal(happened=self.now)))
                yield from self._stop(operation.waits_after)
            else:
                done = all_of(self.now, gate, *(signal for _, signal in under_way))
                reads = [signal for direction, signal in under_way if direction == "read"]
                self._given[operation.gives] = done
                self._come[operation.gives] = all_of(Fraction(0), gate, *reads)
                shown.append((gate, done))

    def _start(self, operation: Operation, gate: Signal) -> list[tuple[str, Signal]]:
        """Starts what goes on beside the main thread; returns the end of each, with its direction."""
        started: list[tuple[str, Signal]] = []
        sources = [transfer for transfer in operation.transfers if transfer.direction == "read"]
        reads = [tier for one in sources for tier in (one.tier, one.crosses) if tier is not None]
        # Behind what the links were given before, and with files what the host has under way.
        has_files = any(transfer.tier is Tier.DISK for transfer in operation.transfers)
        queues = [(tier, "read") for tier in reads] + (["host"] if has_files else [])
        fed = all_of(self.now, gate, *(signal for queue in queues for signal in self._last_of(queue)))
        for transfer in operation.transfers:
            before = started[-1][1] if operation.is_chain and started else gate
            moved = self._transfer(transfer, before, in_pieces=operation.update_place is not None)
            started.append((transfer.direction, moved))
        if operation.update_place is not None:
            self._take_turns(operation.transfers)
        if operation.work and operation.update_place in _BESIDE:
            seconds = Fraction(work_seconds(operation.work, self.hardware))
            started.append(("computed", self._queue("updates", seconds, fed)))
            self._queues["updates"][-1].reads = frozenset(reads)
        if operation.host_work:
            started.append(("computed", self._update_on_host(operation, gate, [signal for _, signal in started])))
        return started

    def _update_on_host(self, operation: Operation, gate: Signal, moved: list[Signal]) -> Signal:
        """Works on pieces: the first when it has come, and the last one is still to go."""
        seconds = Fraction(host_work_seconds(operation.host_work, self.hardware))
        counts = {kind: Fraction(amount) for kind, amount in operation.host_work}
        cut = min(counts.get(WorkKind.PIECES, Fraction(0)), counts.get(WorkKind.UPDATED, Fraction(0)) / PIECE_ELEMENTS)
        pieces = max(Fraction(1), cut)
        coming: dict[tuple[Tier, str], Fraction] = defaultdict(Fraction)
        going: dict[tuple[Tier, str], Fraction] = defaultdict(Fraction)
        come = [gate]
        for transfer, signal in zip(operation.transfers, moved, strict=False):
            link, is_read = self._link(transfer.tier), transfer.direction == "read"
            one = Fraction(transfer.nbytes / (link.read_bytes_per_s if is_read else link.write_bytes_per_s)) / pieces
            if is_read != (transfer.tier is Tier.HOST):
                coming[transfer.tier, transfer.direction] += one
                come.append(signal)
            else:
                going[transfer.tier, transfer.direction] += one
        name = f"host {self._number}"
        first = self._queue(f"{name} first", Fraction(max(coming.values(), default=0)), gate)
        worked = self._queue("host", seconds, first)
        last = self._queue(f"{name} last", seconds / pieces, all_of(Fraction(0), *come))
        through = self._queue("host", Fraction(0), all_of(Fraction(0), worked, last))
        return self._queue(f"{name} home", Fraction(max(going.values(), default=0)), through)

    def _foretold(self, token: Token) -> Signal:
        """Returns the end of what gives a token, as it is foretold now: what later transfers hold up
        comes to what waits for it, and not to what has been issued by then.
        """
        jobs = list(self._queues["updates"])
        signal = self._given[token]
        if not any(job.done in signal.needs for job in jobs):
            return signal
        until = next(index for index, job in enumerate(jobs) if job.done in signal.needs)
        copies = deque(replace(job, done=Signal()) for job in jobs[: until + 1])
        end = copies[-1].done
        self._queues["foretold", self._number, token] = copies
        return all_of(signal.earliest, end, *(other for other in signal.needs if other is not jobs[until].done))

    def _stop(self, tokens: Iterable[Token]) -> Generator[Signal]:
        for token in tokens:
            yield from self._stall(token.kind, self._given[token])

    def _stall(self, cause: str, signal: Signal) -> Generator[Signal]:
        before = self.now
        yield signal
        self.stalls_s[cause] += float(self.now - before)

    def _speed(self, name: object, job: Job) -> Fraction:
        """Share of its own speed at which the first job of a queue goes on."""
        if name == "device":
            return self._compute_speed()
        until = name[1] if isinstance(name, tuple) and name[0] == "foretold" else None
        return Fraction(0) if self._is_starved(job, until) else job.speed

    def _is_starved(self, update: Job, until: int | None = None) -> bool:
        """Tells whether a transfer goes before the pieces that an update reads, of those of
        operations before `until`.
        """
        pieces = [job for tier in update.reads for job in self._queues[tier, "read", "pieces"]]
        pauses = [job for job in pieces if isinstance(job, Pause) and (until is None or job.number < until)]
        return any(job.starves for job in pauses)

    def _compute_speed(self) -> Fraction:
        """Share of its own speed at which the device computes for the main thread: none while it
        updates, less while links have work.
        """
        updates = self._queues["updates"]
        if updates and updates[0].needs.at is not None and not self._is_starved(updates[0]):
            return Fraction(0)
        tiers = [
            name[0]
            for name, queue in self._queues.items()
            if queue and isinstance(name, tuple) and name[0] != "foretold"
        ]
        return min([Fraction(1), *(Fraction(self._link(tier).compute_share) for tier in tiers)])

    def _transfer(self, transfer: Transfer, gate: Signal, *, in_pieces: bool = False) -> Signal:
        """Issues a transfer to each link that its bytes pass."""
        tiers = [transfer.tier]
        if transfer.crosses is not None and transfer.crosses in self.hardware.tiers:
            tiers.append(transfer.crosses)
        return all_of(Fraction(0), *(self._pass(tier, transfer, gate, in_pieces=in_pieces) for tier in tiers))

    def _pass(self, tier: Tier, transfer: Transfer, gate: Signal, *, in_pieces: bool) -> Signal:
        """Issues a transfer to a link. What the link's other direction was given before slows it.
        An update's waits for all that was issued before; others for all but updates', which are
        then behind by as much.
        """
        link, is_read = self._link(tier), transfer.direction == "read"
        alone = link.read_bytes_per_s if is_read else link.write_bytes_per_s
        both = (link.both_read_bytes_per_s if is_read else link.both_write_bytes_per_s) or alone
        other = "write" if is_read else "read"
        beside = self._last_of((tier, other), (tier, other, "pieces"))
        before = self._last_of((tier, transfer.direction))
        began = all_of(Fraction(0), gate, *before)
        done = self._queue(
            (tier, transfer.direction, "pieces") if in_pieces else (tier, transfer.direction),
            Fraction(transfer.nbytes / alone),
            began,
            beside=all_of(Fraction(0), *beside) if beside else None,
            share=min(Fraction(1), Fraction(both / alone)),
        )
        own = tier, transfer.direction, "pieces"
        for name in self._in_turns.get(own, ()) if not in_pieces else ():
            if self._queues[name]:
                pause = Pause(Fraction(0), Signal(), began=began, ended=done, number=self._number, is_own=name == own)
                self._queues[name].append(pause)
        return done

    def _take_turns(self, transfers: Iterable[Transfer]) -> None:
        """Lets all queues of an update's pieces go on when each is through with it."""
        tiers = self.hardware.tiers
        names = {
            (tier, one.direction, "pieces"): None
            for one in transfers
            for tier in (one.tier, one.crosses)
            if tier in tiers
        }
        joined = dict(names)
        for name in names:
            joined |= {one: None for one in self._in_turns.get(name, ()) if self._is_under_way(one)}
        self._wait_for_each_other(names)
        for name in joined:
            self._in_turns[name] = tuple(joined)

    def _is_under_way(self, name: object) -> bool:
        """Tells whether something of a queue is still to be done."""
        return any(job.left or job.needs.at is None for job in self._queues[name])

    def _wait_for_each_other(self, names: Iterable[object]) -> None:
        over = all_of(Fraction(0), *self._last_of(*names))
        for name in names:
            self._queues[name].append(Job(Fraction(0), over))

    def _last_of(self, *names: object) -> list[Signal]:
        """Returns the end of the last job of each queue that has one."""
        return [queue[-1].done for name in names if (queue := self._queues[name])]

    def _link(self, tier: Tier) -> Link:
        link = self.hardware.tiers[tier].link
        assert link is not None
        return link

    def _queue(
        self,
        name: object,
        seconds: Fraction,
        gate: Signal,
        beside: Signal | None = None,
        share: Fraction = Fraction(1),
    ) -> Signal:
        job = Job(seconds, gate, beside, share)
        self._queues[name].append(job)
        return job.done
