"""Runs on ranks that are committed to a store, in tests of stores over ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import memfit
from distributed.training import OPTIMIZERS, batch_of, build, differing_from, loss, plan_for, same
from memfit.store import FileOperations

ROWS = 12
"""Of a step, however many ranks there are."""


def rows_of(rank: int, size: int, step: int) -> torch.Tensor:
    """This rank's part of a step's rows."""
    return batch_of("tower", step, 0, ROWS).tensor_split(size)[rank]


def expected(sizes: Sequence[int], first: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Plain PyTorch in one process, whose steps were made by so many ranks each, with data from a step of the stream on."""
    model = build("tower")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        for rank in range(size):
            part = rows_of(rank, size, first + step)
            (loss(model, part) * torch.tensor(len(part) / ROWS)).backward()
        optimizer.step()
    return model, optimizer


def differing(model: torch.nn.Module, optimizer: torch.optim.Optimizer, sizes: Sequence[int]) -> list[str]:
    """Returns the names of weights and states that are not those of plain PyTorch."""
    plain, plain_optimizer = expected(sizes)
    return differing_from(model, optimizer, plain, plain_optimizer)


def begin(
    rank: int, size: int, directory: str, stage: int, tier: str, **options: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, memfit.Job]:
    """Begins a run, or goes on with it."""
    model = build("tower")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    plan = plan_for(model, size, stage, tier, 1)
    job = memfit.fit(
        model, optimizer, loss, rows_of(rank, size, 0), plan=plan, enforce=False, store=directory, **options
    )
    return model, optimizer, job


def go_on(
    rank: int, size: int, directory: str, until: int, stage: int, tier: str, before: Sequence[int]
) -> tuple[int, list[str]]:
    """Goes on with a run until it has some steps; returns how many it had, and what differs from plain PyTorch.

    Args:
        before: ranks that made each step of the run so far, at least as many steps as it has.
    """
    model, optimizer, job = begin(rank, size, directory, stage, tier)
    done = job.steps
    for step in range(done, until):
        job.step(rows_of(rank, size, step))
    job.close()
    return done, differing(model, optimizer, [*before[:done], *[size] * (until - done)])


def left_before_a_step(rank: int, size: int, directory: str, stage: int, tier: str) -> None:
    """Begins a run and leaves it, in memory that held other numbers on each rank before."""
    junk = [torch.full((1 << power,), rank + 1.0) for power in range(4, 22) for _ in range(8)]
    del junk
    begin(rank, size, directory, stage, tier)[2].close(restore=False)


def killed_in_a_commit(rank: int, size: int, directory: str, instant: str, stage: int, tier: str) -> str:
    """Kills rank 1 at an instant of the commit of its second step; returns what the others raise.

    Args:
        instant: "unprepared", "prepared", "voted" or "renamed".
    """
    own, is_armed = FileOperations.rename, [False]

    def rename(self: FileOperations, source: Path, target: Path) -> None:
        is_vote = target.name.endswith(".prepared")
        if is_armed[0] and instant == ("unprepared" if is_vote else "voted"):
            os.kill(os.getpid(), signal.SIGKILL)
        own(self, source, target)
        if is_armed[0] and instant == ("prepared" if is_vote else "renamed"):
            os.kill(os.getpid(), signal.SIGKILL)

    FileOperations.rename = rename  # type: ignore[method-assign]
    try:
        _, _, job = begin(rank, size, directory, stage, tier)
        try:
            job.step(rows_of(rank, size, 0))
            job.step(rows_of(rank, size, 1))
            is_armed[0] = rank == 1
            job.step(rows_of(rank, size, 2))
        finally:
            job.close()
    except memfit.PeerError as error:
        return str(error)
    finally:
        FileOperations.rename = own  # type: ignore[method-assign]
    return ""


def full_disk(rank: int, size: int, directory: str) -> list[Any]:
    """Rank 1's disk is full in one commit, and not any more in the next; returns what each rank raised, and what it went on to."""
    is_armed = [False]
    model, optimizer, job = begin(rank, size, directory, 3, "disk")
    write: Callable[..., None] = FileOperations.rename

    def rename(self: FileOperations, source: Path, target: Path) -> None:
        if is_armed[0]:
            raise OSError(28, "No space left on device")
        write(self, source, target)

    FileOperations.rename = rename  # type: ignore[method-assign]
    raised = ""
    try:
        job.step(rows_of(rank, size, 0))
        is_armed[0] = rank == 1
        began = time.monotonic()
        try:
            job.step(rows_of(rank, size, 1))
        except memfit.MemfitError as error:
            raised = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        is_armed[0] = False
        job.step(rows_of(rank, size, 1))
        job.close()
    finally:
        FileOperations.rename = write  # type: ignore[method-assign]
    return [raised, differing(model, optimizer, [size, size]), seconds]


def endless(rank: int, size: int, directory: str, stage: int, tier: str, started: str) -> tuple[int, str, float]:
    """Trains, commits and saves until another rank is lost; returns the steps that the run had, the error and when it came."""
    done = -1
    try:
        _, _, job = begin(rank, size, directory, stage, tier)
        done = job.steps
    except memfit.PeerError as error:
        return done, f"{type(error).__name__}: {error}", time.time()
    Path(f"{started}-{rank}").touch()
    answer = done, "", time.time()
    try:
        for step in range(done, 1 << 30):
            job.step(rows_of(rank, size, step))
            if step % 7 == 3:
                job.save(f"{directory}-save")
    except memfit.PeerError as error:
        answer = done, f"{type(error).__name__}: {error}", time.time()
    # Not in the context of the error: closing must not fail as well.
    job.close()
    return answer


def two_more(
    rank: int, size: int, directory: str, stage: int, tier: str, before: Sequence[int]
) -> tuple[int, list[str]]:
    """Goes on with a run for two steps; see `go_on`."""
    model, optimizer, job = begin(rank, size, directory, stage, tier)
    done = job.steps
    for step in range(done, done + 2):
        job.step(rows_of(rank, size, step))
    job.close()
    return done, differing(model, optimizer, [*before[:done], size, size])


def ended(rank: int, size: int, directory: str, stage: int, tier: str) -> dict[str, torch.Tensor]:
    """Trains two steps of a run; returns this rank's whole weights and states at the end, by name in a checkpoint."""
    model, optimizer, job = begin(rank, size, directory, stage, tier)
    for step in range(2):
        job.step(rows_of(rank, size, step))
    job.close()
    found = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        found |= {f"optim.state.{name}.{key}": torch.as_tensor(v).clone() for key, v in optimizer.state[p].items()}
    return found


def begin_at(rank: int, size: int, directory: str, steps: int, stage: int, tier: str, first: int) -> None:
    """Begins a run, whose data are those of a stream from a step on."""
    _, _, job = begin(rank, size, directory, stage, tier)
    for step in range(job.steps, steps):
        job.step(rows_of(rank, size, first + step))
    job.close()


def begin_with_the_same_draws(rank: int, size: int, *args: Any) -> None:
    """Begins a run whose name, and the number of each commit, are those of every other one that begins like this."""
    with patch("secrets.token_hex", lambda nbytes: "5" * 2 * nbytes), patch("secrets.randbits", lambda bits: 5):
        begin_at(rank, size, *args)


def go_on_as_one_of(
    rank: int, size: int, directory: str, stage: int, tier: str, firsts: Sequence[int], before: Sequence[int]
) -> tuple[int, bool]:
    """Goes on with a run for a step; returns how many it had, and whether it is bit for bit one of some runs.

    Args:
        firsts: of each run that may lie there, where its data begin in the stream.
        before: ranks that made each step.
    """
    model, optimizer, job = begin(rank, size, directory, stage, tier)
    done = job.steps
    with job.weights():
        now = {name: p.detach().clone() for name, p in model.named_parameters()}
    plains = {first: expected(before[:done], first)[0] for first in firsts}
    first = next((first for first, plain in plains.items() if not same(now, dict(plain.named_parameters()))), None)
    if first is not None:
        job.step(rows_of(rank, size, first + done))
    job.close()
    if first is None:
        return done, False
    return done, not differing_from(model, optimizer, *expected([*before[:done], size], first))
