"""Measures the effect of settings on this machine, within one run.

In: `Host`. Out: `Measurements`: seconds and rates side by side. Everything runs in child processes,
so that neither memory nor threads of the caller are touched; what is compared takes turns, so that
other work on the machine weighs on both sides. Of several turns the best counts, since other work
can only slow one down; of contended steps the median. Figures of a busy machine are rough; their
ratios less so.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.errors import TierUnavailableError
from memfit.core.limits import MIB
from memfit.machine.host.read import Host
from memfit.machine.host.settings import WAITING_NAMES, compute_threads, own_waiting
from memfit.machine.host.system_files import Disk, read_text

_TRIALS = Path(__file__).with_name("trials.py")
_TOUCHED_BYTES = 64 * MIB
_FILE_BYTES = 64 * MIB
_FILE_PIECE_BYTES = 4 * MIB
# on a machine so busy that turns take this long, more of them would not make the figures better
_ENOUGH_S = 6.0
_PATIENCE_S = 120  # for one answer: a child that hangs must not hang its parent


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Seconds of a small training step, by what waiting threads do.

    Contended: one more thread computes.

    Attributes:
        before: what passive waiting is compared with: "OpenMP's default", or the user's own
            setting.
        threads: that the step computes with.
    """

    before: str
    threads: int
    before_alone_s: float
    passive_alone_s: float
    before_contended_s: float
    passive_contended_s: float

    @property
    def contended_gain(self) -> float:
        """How many times faster a contended step is when waiting threads sleep."""
        return self.before_contended_s / self.passive_contended_s

    @property
    def alone_gain(self) -> float:
        """The same with nothing beside it.

        Below 1 where waking threads costs more than it saves.
        """
        return self.before_alone_s / self.passive_alone_s


@dataclass(frozen=True, kw_only=True)
class ThreadTime:
    """Seconds of the small step, alone, with a number of threads."""

    threads: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class FirstTouch:
    """Writing memory for the first time, one thread, in bytes a second.

    Attributes:
        small_bytes_per_s, huge_bytes_per_s: fresh memory, without and with the wish for huge pages.
        again_bytes_per_s: memory that was touched before: what an arena gives.
        huge_share: how much of what was wished for came in huge pages, 0 to 1; None where the
            kernel does not tell.
    """

    small_bytes_per_s: float
    huge_bytes_per_s: float
    again_bytes_per_s: float
    huge_share: float | None


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """One thread and one file, in bytes a second, and what of the file is in memory afterwards."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    cached_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Results of the measurements.

    Attributes:
        waiting: passive waiting beside what there was.
        threads: by number of threads, ascending, waiting passively.
        first_touch: small and huge pages.
        disk_direct, disk_cached: direct I/O beside the page cache; None where there was no
            directory or no room, direct where it is refused.
        file_bytes: length of the file that was used; 0: none.
        seconds: that measuring took.
    """

    waiting: Waiting
    threads: tuple[ThreadTime, ...]
    first_touch: FirstTouch
    disk_direct: DiskRates | None
    disk_cached: DiskRates | None
    file_bytes: int
    seconds: float

    @property
    def fastest_threads(self) -> ThreadTime:
        """The number of threads with the shortest step."""
        return min(self.threads, key=lambda one: one.step_s)


def measure_host(host: Host, *, rounds: int = 3, slice_s: float = 0.15) -> Measurements:
    """Measures in two child processes; 5 to 10 seconds, most of them torch's import.

    Memory: two processes with torch (some 250 MiB each) and 64 MiB. Disk: a file of 64 MiB without
    a name, or a quarter of what is free.

    Args:
        host: as `read_host` found it; `host.disk` says where the disk is tried.
        rounds: how often everything takes its turn; steps less often on a machine that is very
            busy.
        slice_s: seconds of one turn of the step.

    Raises:
        TierUnavailableError: a child process failed or did not answer: torch cannot be loaded, the
            disk is full or fails.
    """
    began = time.perf_counter()
    threads = compute_threads(host)
    counts = sorted({1, threads, len(host.processors.allowed), *_own_count(host)})
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(counts))}
    neutral = {name: value for name, value in environment.items() if name not in WAITING_NAMES}
    own = own_waiting(host)
    with (
        _start(neutral if own is None else environment) as spinning,
        _start({**neutral, "OMP_WAIT_POLICY": "PASSIVE"}) as passive,
    ):
        for child in (spinning, passive):  # both load torch at the same time
            child.send(trial="step", threads=threads, seconds=0.0, is_contended=False)
        for child in (spinning, passive):
            child.receive()
        steps: dict[tuple[str, bool], list[float]] = {}
        by_threads: dict[int, list[float]] = {count: [] for count in counts}
        turns_began = time.perf_counter()
        for number in range(rounds):
            if number and time.perf_counter() - turns_began > _ENOUGH_S:
                break
            for is_contended in (False, True):
                for name, child in (("before", spinning), ("passive", passive)):
                    steps.setdefault((name, is_contended), []).append(
                        child.time_step(threads, slice_s, is_contended=is_contended)
                    )
            for count in counts:
                by_threads[count].append(passive.time_step(count, slice_s, is_contended=False))
        touches = [passive.ask(trial="touch", nbytes=_TOUCHED_BYTES) for _ in range(2 * rounds)]
        direct, cached, file_bytes = _measure_disk(passive, host.disk, rounds)
    return Measurements(
        waiting=Waiting(
            before="OpenMP's default" if own is None else own,
            threads=threads,
            before_alone_s=min(steps["before", False]),
            passive_alone_s=min(steps["passive", False]),
            before_contended_s=statistics.median(steps["before", True]),
            passive_contended_s=statistics.median(steps["passive", True]),
        ),
        threads=tuple(ThreadTime(threads=n, step_s=min(took)) for n, took in by_threads.items()),
        first_touch=_first_touch(touches),
        disk_direct=direct,
        disk_cached=cached,
        file_bytes=file_bytes,
        seconds=time.perf_counter() - began,
    )


def _own_count(host: Host) -> list[int]:
    """The number of threads that the user has set, unless it is a mistake that would take all day
    to measure.
    """
    text = host.environment.get("OMP_NUM_THREADS", "")
    return [int(text)] if text.isdigit() and 1 <= int(text) <= 4 * host.processors.logical else []


def _measure_disk(child: _Child, disk: Disk | None, rounds: int) -> tuple[DiskRates | None, DiskRates | None, int]:
    file_bytes = 0 if disk is None else min(_FILE_BYTES, disk.free_bytes // 4) // _FILE_PIECE_BYTES * _FILE_PIECE_BYTES
    if disk is None or file_bytes == 0:
        return None, None, 0
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for _ in range(rounds):
        for is_direct, answers in found.items():
            if not is_direct or disk.direct_io_refusal is None:
                answers.append(
                    child.ask(trial="disk", directory=disk.directory, nbytes=file_bytes, is_direct=is_direct)
                )
    direct, cached = (_disk_rates(found[is_direct]) for is_direct in (True, False))
    return direct, cached, file_bytes


def _disk_rates(answers: list[dict[str, Any]]) -> DiskRates | None:
    if not answers:
        return None
    best = _best(answers)
    return DiskRates(
        write_bytes_per_s=best["write_bytes_per_s"],
        read_bytes_per_s=best["read_bytes_per_s"],
        cached_bytes=int(best["cached_bytes"]),
    )


def _first_touch(answers: list[dict[str, Any]]) -> FirstTouch:
    shares = [answer.pop("huge_share") for answer in answers]
    return FirstTouch(**_best(answers), huge_share=None if None in shares else max(shares))


def _best(answers: list[dict[str, Any]]) -> dict[str, float]:
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


class _Child:
    """A process that runs trials one after another."""

    def __init__(self, process: subprocess.Popen[str], complaints: Any) -> None:
        self._process = process
        self._complaints = complaints

    def ask(self, **request: Any) -> dict[str, Any]:
        """Runs a trial."""
        self.send(**request)
        return self.receive()

    def time_step(self, threads: int, seconds: float, *, is_contended: bool) -> float:
        """Seconds of a step."""
        return self.ask(trial="step", threads=threads, seconds=seconds, is_contended=is_contended)["step_s"]

    def send(self, **request: Any) -> None:
        """Asks without waiting for the answer."""
        assert self._process.stdin is not None
        # A child that has died says why when the answer is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Waits for the answer.

        Raises:
            TierUnavailableError: there is none.
        """
        assert self._process.stdout is not None
        patience = threading.Timer(_PATIENCE_S, self._process.kill)
        patience.start()
        try:
            line = self._process.stdout.readline()
        finally:
            patience.cancel()
        if not line:
            self._process.wait()
            self._complaints.seek(0)
            last = self._complaints.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise TierUnavailableError(
                f"a process that measures this machine ended with {self._process.returncode}: {last[0]}; "
                "leave measuring out, or look at why it cannot run"
            )
        return json.loads(line)


@contextlib.contextmanager
def _start(environment: Mapping[str, str]) -> Generator[_Child]:
    """A child process; it ends with the `with`."""
    # -P: the script's own directory stays out of the way of other modules' names.
    command = [sys.executable, "-P", str(_TRIALS)]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=dict(environment),
        ) as process,
    ):
        try:
            yield _Child(process, complaints)
        finally:
            process.kill()  # nothing in it is worth waiting for, its files have no names


# Use of the machine by others while something is measured.
#
# In: /proc/stat and the load, before and after. Out: `Others`: shares of the processors' time.

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Others:
    """Shares of the time of all processors.

    Attributes:
        stolen: by other guests of the same host (steal time, as far as the host tells).
        used: by other processes of this machine.
    """

    stolen: float
    used: float

    @property
    def is_busy(self) -> bool:
        """True if figures measured meanwhile are rough."""
        return self.stolen + self.used > _BUSY_SHARE

    def sentence(self) -> str:
        """Says it in words; empty if the machine was quiet."""
        if not self.is_busy:
            return ""
        return (
            f"others used {self.used:.0%} of the processors' time and {self.stolen:.0%} was stolen by other guests of "
            "the host: these figures are rough, measure again when the machine is quiet"
        )


@dataclass(frozen=True, kw_only=True)
class _Count:
    """Seconds since the machine started, over all processors, and of this process."""

    busy_s: float
    stolen_s: float
    own_s: float
    at_s: float


class OthersMeter:
    """Watches the machine from its creation on.

    Args:
        root: where `proc` is; another tree is for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._processors = os.cpu_count() or 1
        self._before = self._count()

    def read(self) -> Others | None:
        """Returns the shares since; None where the kernel does not tell."""
        before, now = self._before, self._count()
        if before is None or now is None or now.at_s <= before.at_s:
            return None
        whole_s = self._processors * (now.at_s - before.at_s)
        others_s = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
        stolen_s = now.stolen_s - before.stolen_s
        return Others(stolen=max(0.0, stolen_s / whole_s), used=max(0.0, others_s / whole_s))

    def _count(self) -> _Count | None:
        """Reads the first line of /proc/stat. Source: proc_stat(5)."""
        line = (read_text(self._root / "proc/stat") or "").partition("\n")[0].split()
        if len(line) < 9 or line[0] != "cpu":
            return None
        user, nice, system, _idle, _waiting, irq, softirq, steal = (int(text) * _TICK_S for text in line[1:9])
        own = os.times()
        return _Count(
            busy_s=user + nice + system + irq + softirq,
            stolen_s=steal,
            own_s=own.user + own.system + own.children_user + own.children_system,
            at_s=time.monotonic(),
        )
