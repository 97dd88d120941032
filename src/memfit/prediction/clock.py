"""Clock: begin and end of each operation, from a simulation of the step on a model of the machine.

In: `Step`, `Hardware`. Out: `ActionTime` for each operation, stalls by cause, bytes moved by
category.

[Note: the clock]
One main thread takes the operations in order. Compute takes its time; transfers start at once, or
when what they need is done, and are served by their link in the order they were issued: reading and
writing are two queues a tier. The main thread stops only where an operation waits; those seconds
are stalls, by what was waited for. An update's elements are worked on by the device, which delays
compute, or by the host's cores, which take one update after the other beside it. Not modelled:
links and compute slowing each other, updates on the host taking memory's bandwidth from transfers,
a run's main thread that waits before it begins a transfer (`Operation.after`), the cost of a first
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memfit.core.hardware import Hardware
from memfit.core.step import Operation, Step, Token, Transfer, WorkKind
from memfit.core.tiers import Tier
from memfit.core.timeline import COMPUTE_LANE, HOST_LANE, Interval

# An assumption, not a measurement: entering a call (hooks, a coroutine switch). It lets fewer
# microbatches win ties.
CALLS_PER_S = 1e4
# The stall of whoever reads a sum of gradients to add to it, as timelines name it.
_SUM = "accumulate"
# Joining a master from its weight and the rest, and splitting it again, parameters a second
# (measured: 512 Ki in 0.4 ms on one core).
SPLIT_ELEMENTS_PER_S = 1.3e9
# Rounding weights that have no masters stochastically, parameters a second.
ROUNDED_ELEMENTS_PER_S = 7.5e8


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionTime:
    """Begin and end of an operation, in seconds since the step began. A transfer ends when its
    bytes have arrived; later operations may have begun before.
    """

    start_s: float
    end_s: float


def work_seconds(work: Iterable[tuple[WorkKind, float]], hardware: Hardware) -> float:
    """Returns the seconds of work on the device, one kind after the other."""
    return _seconds(work, _rates(hardware))


def host_work_seconds(work: Iterable[tuple[WorkKind, float]], hardware: Hardware) -> float:
    """Returns the seconds of work on the host's cores, beside an accelerator."""
    return _seconds(work, _host_rates(hardware))


def _rates(hardware: Hardware) -> Mapping[WorkKind, float]:
    return {
        WorkKind.FLOPS: hardware.flops_per_s,
        WorkKind.CALLS: CALLS_PER_S,
        WorkKind.UPDATED: hardware.update_elements_per_s,
        WorkKind.ENCODED: hardware.codec_elements_per_s,
        WorkKind.SPLIT: SPLIT_ELEMENTS_PER_S,
        WorkKind.ROUNDED: ROUNDED_ELEMENTS_PER_S,
    }


def _host_rates(hardware: Hardware) -> Mapping[WorkKind, float]:
    return {
        WorkKind.UPDATED: hardware.host_update_elements_per_s,
        WorkKind.ENCODED: hardware.host_codec_elements_per_s,
        WorkKind.SPLIT: SPLIT_ELEMENTS_PER_S,
        WorkKind.ROUNDED: ROUNDED_ELEMENTS_PER_S,
    }


def _seconds(work: Iterable[tuple[WorkKind, float]], rates: Mapping[WorkKind, float]) -> float:
    return sum(amount / rates[kind] for kind, amount in work)


class Clock:
    """Simulates a step on a `Hardware`; without one, only bytes are counted and all seconds are 0.
    See
    [Note: the clock].

    Args:
        hardware: the machine.
        records: keeps `intervals`.
    """

    def __init__(self, hardware: Hardware | None, *, records: bool = False) -> None:
        self._hardware = hardware
        self._records = records and hardware is not None
        self._moment = -1
        self.intervals: list[Interval] = []
        self._rates = None if hardware is None else _rates(hardware)
        self._host_rates = None if hardware is None else _host_rates(hardware)
        # When the host's cores are through with the updates that they were given.
        self._host_free_s = 0.0
        self.now_s = 0.0
        self.stalls_s: dict[str, float] = {}
        self.bytes_read: Counter[str] = Counter()
        self.bytes_written: Counter[str] = Counter()
        # When each queue is free again, and when what was begun is done.
        self._free_s: dict[tuple[Tier, str], float] = {}
        self._done_s: dict[Token, float] = {}
        # When all that it reads has come.
        self._come_s: dict[Token, float] = {}

    def run(self, step: Step) -> list[ActionTime]:
        """Returns the times of all operations, in order."""
        return [self._take(operation) for operation in step]

    def commit_seconds(self, step: Step) -> float:
        """Returns the seconds of the step's share of a commit, which nothing else runs beside."""
        if self._hardware is None:
            return 0.0
        return sum(t.nbytes / _bytes_per_s(self._hardware, t) for t in step.commit)

    def _note(self, lane: str, kind: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        if self._records and end_s > start_s:
            self.intervals.append(Interval(lane, kind, name, self._moment, nbytes, start_s, end_s))

    def _take(self, operation: Operation) -> ActionTime:
        self._moment += 1
        start = self.now_s
        self._wait(operation.waits)
        if operation.work:
            start = self.now_s  # what computes is shown without its stall
        end = begin = max([self.now_s, *(self._done_s.get(token, 0.0) for token in operation.after)])
        for transfer in operation.awaited:
            end = begin = self._stop(transfer, begin)
        if operation.behind is not None:
            end = begin = max(begin, self._come_s.get(operation.behind, 0.0))
        come = begin
        for transfer in operation.transfers:
            moved = self._serve(transfer, end if operation.is_chain else begin)
            end = max(end, moved)
            if transfer.direction == "read":
                come = max(come, moved)
        if self._rates is not None:
            began = self.now_s
            self.now_s += _seconds(operation.work, self._rates)
            self._note(COMPUTE_LANE, "work", "", began, self.now_s)
        if operation.host_work and self._host_rates is not None:
            began = max(begin, self._host_free_s)
            self._host_free_s = began + _seconds(operation.host_work, self._host_rates)
            self._note(HOST_LANE, "work", "", began, self._host_free_s)
            end = max(end, self._host_free_s)
        if operation.gives is not None:
            end = max(end, self.now_s)
            self._done_s[operation.gives] = end
            self._come_s[operation.gives] = come
            return ActionTime(start_s=begin, end_s=end)
        end = self.now_s
        self._wait(operation.waits_after)
        return ActionTime(start_s=start, end_s=end)

    def _serve(self, transfer: Transfer, begin: float) -> float:
        counter = self.bytes_read if transfer.direction == "read" else self.bytes_written
        counter[transfer.category] += transfer.nbytes
        if self._hardware is None:
            return begin
        queue = transfer.tier, transfer.direction
        speed = _bytes_per_s(self._hardware, transfer)
        began = max(begin, self._free_s.get(queue, 0.0))
        self._free_s[queue] = began + transfer.nbytes / speed
        lane = f"{transfer.tier} {transfer.direction}"
        self._note(lane, "transfer", transfer.category, began, self._free_s[queue], transfer.nbytes)
        return self._free_s[queue]

    def _stop(self, transfer: Transfer, begin: float) -> float:
        """Returns when a transfer that the main thread itself waits for is done."""
        done = self._serve(transfer, begin)
        if done > self.now_s:
            self.stalls_s[_SUM] = self.stalls_s.get(_SUM, 0.0) + done - self.now_s
            self._note(COMPUTE_LANE, "stall", _SUM, self.now_s, done)
            self.now_s = done
        return done

    def _wait(self, tokens: Iterable[Token]) -> None:
        for token in tokens:
            done = self._done_s[token]
            if done > self.now_s:
                self.stalls_s[token.kind] = self.stalls_s.get(token.kind, 0.0) + done - self.now_s
                self._note(COMPUTE_LANE, "stall", token.kind, self.now_s, done)
                self.now_s = done


def _bytes_per_s(hardware: Hardware, transfer: Transfer) -> float:
    link = hardware.link(transfer.tier)
    return link.read_bytes_per_s if transfer.direction == "read" else link.write_bytes_per_s
