"""Whole lives of ranks, from the process group to the end of the process, one of which ends or stops at a drawn instant."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

import memfit
from distributed.processes import IMPORTED
from distributed.storing import begin, differing, rows_of

STEPS = 2
TIMEOUT_S = 15.0
"""Of `init_process_group`: the longest wait for a rank that is stopped."""
LONG_S = 100.0
"""The same where a rank is killed: nobody waits for it."""
KILLED_S = 10.0
"""The longest wait for a rank that is killed."""
SLACK_S = 10.0
PHASES = ("began", "in init_process_group", "in fit", "in steps", "in close", "closed", "ended")
_TURNS = (0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5)
"""Phases to draw from: those that are memfit's are drawn more often."""
HOMES = ((0, "device"), (1, "device"), (2, "disk"), (3, "disk"), (3, "device"))


@dataclass(frozen=True, kw_only=True)
class Life:
    """The draw of one trial.

    Attributes:
        size: number of ranks.
        later_size: number of ranks that go on with the run.
        stage, tier: of the plan.
        has_agent: the store of the process group outlives all ranks, as under torchrun; else rank 0 has it.
        victim: rank that gets the signal.
        signal: SIGKILL or SIGSTOP.
        phase: of the victim's life in which it gets it, by number.
        at: when in this phase, as a part of what the phase takes if nothing disturbs it.
    """

    size: int
    later_size: int
    stage: int
    tier: str
    has_agent: bool
    victim: int
    signal: signal.Signals
    phase: int
    at: float


def drawn(draw: random.Random, kind: signal.Signals) -> Life:
    """Draws a trial."""
    size, (stage, tier) = draw.choice((2, 3)), draw.choice(HOMES)
    return Life(
        size=size, later_size=draw.choice((size, 2, 3)), stage=stage, tier=tier, has_agent=draw.random() < 0.5,
        victim=draw.randrange(size), signal=kind, phase=draw.choice(_TURNS), at=draw.random(),
    )  # fmt: skip


def _live(
    pipe: Connection, marks: str, rank: int, life: Life, size: int, port: int, run: str, before: int, timeout_s: float
) -> None:
    """The life of a rank; sends (error, steps that the run had, what differs from plain PyTorch)."""
    os.environ["GLOO_SOCKET_IFNAME"], os.environ["TORCH_CPP_LOG_LEVEL"] = "lo", "FATAL"
    torch.set_num_threads(1)
    done, error, differs = -1, "", list[str]()

    def mark(phase: int) -> None:
        with Path(f"{marks}-{rank}").open("a", encoding="ascii") as file:
            file.write(f"{phase} {time.monotonic()}\n")

    mark(0)
    try:
        mark(1)
        timeout, has_store = timedelta(seconds=timeout_s), rank == 0 and not life.has_agent
        store = TCPStore("127.0.0.1", port, is_master=has_store, wait_for_workers=False, timeout=timeout)
        # The keys of one group are not those of the next one.
        store = PrefixStore(marks, store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        mark(2)
        model, optimizer, job = begin(rank, size, run, life.stage, life.tier)
        with job:
            done = job.steps
            mark(3)
            for step in range(done, STEPS):
                job.step(rows_of(rank, size, step))
            mark(4)
        mark(5)
        sizes = [life.size] * (done if before else 0) + [size] * (STEPS - (done if before else 0))
        differs = differing(model, optimizer, sizes)
        dist.destroy_process_group()
        mark(6)
    except memfit.PeerError as failed:
        error = f"PeerError: {failed}"
    except Exception as failed:  # noqa: BLE001, told to the test
        error = f"{type(failed).__name__}: {failed}"
    pipe.send((error, done, differs))
    # As a program ends whose threads may hang in torch.
    os._exit(0)


class Lives:
    """Ranks as processes of their own, in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)
        self._agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._serial = 0
        self._seconds = [0.1] * len(PHASES)

    def _begin(
        self, life: Life, size: int, run: str, *, goes_on: bool, timeout_s: float
    ) -> tuple[list[Any], list[Connection], str]:
        self._serial += 1
        marks = str(self._directory / f"marks-{self._serial}")
        port = self._agent.port if life.has_agent else free_port()
        processes, pipes = list[Any](), list[Connection]()
        for rank in range(size):
            here, there = self._context.Pipe()
            arguments = (there, marks, rank, life, size, port, run, int(goes_on), timeout_s)
            process = self._context.Process(target=_live, args=arguments, daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        return processes, pipes, marks

    def undisturbed(self, life: Life, size: int, run: str, *, goes_on: bool) -> list[Any]:
        """Lets ranks live to their end; returns what each has sent."""
        processes, pipes, marks = self._begin(life, size, run, goes_on=goes_on, timeout_s=100.0)
        try:
            answers = [_answer(pipe, 120.0)[0] for pipe in pipes]
        finally:
            _end(processes)
        times = [at for _, at in _marked(f"{marks}-0")]
        for phase, (first, last) in enumerate(itertools.pairwise(times)):
            self._seconds[phase] = 0.7 * self._seconds[phase] + 0.3 * (last - first)
        return answers

    def trial(self, life: Life) -> dict[str, Any]:
        """Sends a rank the signal in its life, waits for the others, and lets the run go on.

        Returns:
            The phases that the ranks were in, what the others said and after how many seconds, how
            long they may wait, and what the ranks that went on have sent.
        """
        run = str(self._directory / f"run-{self._serial}")
        timeout_s = LONG_S if life.signal is signal.SIGKILL and life.phase >= 2 else TIMEOUT_S
        processes, pipes, marks = self._begin(life, life.size, run, goes_on=False, timeout_s=timeout_s)
        try:
            ends_s = time.monotonic() + 60.0
            while _phase(f"{marks}-{life.victim}") < life.phase and time.monotonic() < ends_s:
                time.sleep(0.002)
            time.sleep(life.at * self._seconds[life.phase])
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[life.victim].pid, life.signal)
            at = time.monotonic()
            phases = [_phase(f"{marks}-{rank}") for rank in range(life.size)]
            others = [rank for rank in range(life.size) if rank != life.victim]
            told = [_answer(pipes[rank], 120.0, at) for rank in others]
        finally:
            _end(processes)
        after = self.undisturbed(life, life.later_size, run, goes_on=True)
        most_s = KILLED_S if life.signal is signal.SIGKILL else TIMEOUT_S + SLACK_S
        return {
            "life": life, "phases": [PHASES[phase] for phase in phases], "phase": min(phases),
            "told": [answer for answer, _ in told], "seconds": [round(seconds, 2) for _, seconds in told],
            # Before all ranks have a process group, waits are torch's own.
            "most_s": most_s if min(phases) >= 2 else math.inf, "after": after,
        }  # fmt: skip


def faults(trial: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a trial; empty if all is well."""
    life, found = trial["life"], list[str]()
    for (error, _, differs), seconds in zip(trial["told"], trial["seconds"], strict=True):
        if seconds > trial["most_s"]:
            found.append(f"waited {seconds} s")
        # In init_process_group errors are torch's own.
        if error and not error.startswith("PeerError: ") and trial["phase"] >= 2:
            found.append(error)
        if differs:
            found.append(f"differs: {differs}")
    for error, _, differs in trial["after"]:
        if error or differs:
            found.append(f"went on with {error!r}, differing: {differs}")
    return [f"{text} ({life}, {trial['phases']})" for text in found]


def is_named(trial: dict[str, Any]) -> bool:
    """Tells whether each rank that failed has named the rank that got the signal, and what became of it."""
    life = trial["life"]
    words = f"rank {life.victim} {'was lost' if life.signal is signal.SIGKILL else 'is stopped'}"
    return all(words in error for error, _, _ in trial["told"] if error)


def _answer(pipe: Connection, timeout_s: float, since: float = 0.0) -> tuple[Any, float]:
    """Returns what a rank has sent, and when."""
    if not wait([pipe], timeout_s):
        return ("gave no answer", -1, []), time.monotonic() - since
    try:
        return pipe.recv(), time.monotonic() - since
    except EOFError:
        return ("ended without a word", -1, []), time.monotonic() - since


def _phase(marks: str) -> int:
    return max((phase for phase, _ in _marked(marks)), default=0)


def _marked(marks: str) -> list[tuple[int, float]]:
    """Returns the phases that a rank has begun, and when."""
    lines = Path(marks).read_text(encoding="ascii").splitlines() if Path(marks).exists() else []
    return [(int(phase), float(at)) for phase, _, at in (line.partition(" ") for line in lines) if at]


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.kill()
        process.join()


def free_port() -> int:
    """Returns a port that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
