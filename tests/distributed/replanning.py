"""Jobs on ranks whose plan is exchanged while they run, in tests of that."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import memfit
from distributed.storing import ROWS, rows_of
from distributed.training import OPTIMIZERS, build, differing_from, loss, plan_for
from memfit.runs.checkpointer import RunCheckpointer
from memfit.runs.rank_stores import RankRunStore

LARGE = 200 << 20


def begin(
    rank: int, size: int, directory: str, stage: int, tier: str, k: int = 1, loss_of: Any = loss, **options: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, memfit.Job]:
    """Begins a run under a limit of an emulated device, which every plan fits."""
    model = build("tower")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    options = {"limit": LARGE, "on_breach": "replan", "emulate_device": True, **options}
    plan = plan_for(model, size, stage, tier, k)
    job = memfit.fit(model, optimizer, loss_of, rows_of(rank, size, 0), plan=plan, store=directory, **options)
    return model, optimizer, job


def differing(model: torch.nn.Module, optimizer: torch.optim.Optimizer, size: int, counts: Sequence[int]) -> list[str]:
    """Returns the names of weights and states that are not those of plain PyTorch in one process, whose steps add up
    so many microbatches of each rank, and then the ranks.
    """
    plain = build("tower")
    plain_optimizer = OPTIMIZERS["adamw"](plain.parameters())
    for step, k in enumerate(counts):
        total: list[torch.Tensor] | None = None
        for rank in range(size):
            plain_optimizer.zero_grad()
            for part in rows_of(rank, size, step).tensor_split(k):
                (loss(plain, part) * torch.tensor(len(part) / ROWS)).backward()
            own = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
            total = own if total is None else [a + b for a, b in zip(total, own, strict=True)]
        for p, gradient in zip(plain.parameters(), total or [], strict=True):
            p.grad = gradient
        plain_optimizer.step()
    return differing_from(model, optimizer, plain, plain_optimizer)


def changed_limits(
    rank: int, size: int, directory: str, stage: int, tier: str, shares: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Makes a step under each limit, given by step and rank as a share of the first plan's tensors (0: the large one)."""
    model, optimizer, job = begin(rank, size, directory, stage, tier)
    peak, beside = job._assembly.planned.prepared.peak_bytes, job._assembly.planned.beside_bytes
    plans, counts, holds = [job.plan.to_json()], list[int](), list[bool]()
    for step, of_ranks in enumerate(shares):
        share = of_ranks[rank]
        job.set_limit(int(share * peak) + beside if share else LARGE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", memfit.MemfitWarning)
            job.step(rows_of(rank, size, step))
        plans.append(job.plan.to_json())
        counts.append(job.plan.microbatches)
        holds.append(job.proof().holds)
    words = [report.in_words() for report in job.breaches]
    job.close()
    return {"plans": plans, "words": words, "holds": holds, "differing": differing(model, optimizer, size, counts)}


def refused_limits(rank: int, size: int, directory: str, on_breach: str) -> dict[str, Any]:
    """Gives rank 1 a limit that nothing fits; then all a larger one again."""
    model, optimizer, job = begin(rank, size, directory, 3, "device", on_breach=on_breach)
    job.step(rows_of(rank, size, 0))
    told = list[str]()

    def tried() -> None:
        job.set_limit("1MiB" if rank == 1 else LARGE)
        job.step(rows_of(rank, size, 1))

    try:
        tried()
    except memfit.MemfitError as error:
        told.append(f"{type(error).__name__}: {error}")
    job.set_limit(LARGE)
    job.step(rows_of(rank, size, 1))
    job.close()
    return {"told": told, "differing": differing(model, optimizer, size, [1, 1])}


def killed_in_the_exchange(rank: int, size: int, directory: str, instant: str) -> str:
    """Takes a smaller limit; rank 1 is killed while the plan is exchanged."""
    _, _, job = begin(rank, size, directory, 1, "device")
    job.step(rows_of(rank, size, 0))
    job.step(rows_of(rank, size, 1))
    owner, name = {
        "before its store is closed": (RankRunStore, "go_back"),
        "before the new stores are made": (RankRunStore, "prepare"),
        "before the first commit": (RunCheckpointer, "begin_again"),
    }[instant]
    if rank == 1:
        setattr(owner, name, lambda *_args, **_kwargs: os.kill(os.getpid(), signal.SIGKILL))
    planned = job._assembly.planned
    job.set_limit(planned.prepared.peak_bytes // 2 + planned.beside_bytes)
    raised = ""
    try:
        job.step(rows_of(rank, size, 2))
    except memfit.PeerError as error:
        raised = str(error)
    job.close(restore=False, commit=False)
    return raised


def resumed(rank: int, size: int, directory: str, until: int) -> tuple[int, list[str]]:
    """Goes on with a run; returns how many steps it had, and what differs from plain PyTorch."""
    model, optimizer, job = begin(rank, size, directory, 3, "device")
    done = job.steps
    for step in range(done, until):
        job.step(rows_of(rank, size, step))
    job.close()
    assert not any(path.name.endswith(".new") for path in Path(directory).iterdir())
    return done, differing(model, optimizer, size, [1] * until)


def breached(rank: int, size: int, directory: str, stage: int, tier: str, rank_of_it: int, how: str) -> dict[str, Any]:
    """Allocates more than there is on one rank in its second step, once; or does that and fails otherwise on another:
    at once, where it is traced for another plan, or when the step is made again.
    """
    armed, calls, has_failed = [False], [0], Path(directory).with_suffix(".failed")

    def own_loss(given: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = loss(given, batch)
        calls[0] += armed[0]
        if armed[0] and rank == rank_of_it:
            armed[0] = False
            if how == "and another rank fails":
                # Else the other could hear of the breach on the way to its loss.
                while not has_failed.exists():
                    time.sleep(0.01)
            torch.empty(64 << 20, dtype=torch.uint8)
        if armed[0] and how == "and another rank fails":
            has_failed.touch()
            raise KeyError("of the loss")
        if (
            armed[0]
            and calls[0] > 1
            and how == f"and another rank fails {'in a trace' if memfit.is_tracing() else 'when it is made again'}"
        ):
            raise KeyError("of the loss")
        if armed[0] and how == "and another rank is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    model, optimizer, job = begin(rank, size, directory, stage, tier, loss_of=own_loss)
    first = job.plan.to_json()
    planned = job._assembly.planned
    job.set_limit(planned.prepared.peak_bytes + planned.beside_bytes + (64 << 10))
    counts, raised, kept_bits = list[int](), "", list[str]()
    for step in range(4):
        armed[0] = step == 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", memfit.MemfitWarning)
                job.step(rows_of(rank, size, step))
        except Exception as error:  # noqa: BLE001, told to the test
            raised = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            break
        counts.append(job.plan.microbatches)
    words = [report.in_words() for report in job.breaches]
    plans = job.plan.to_json()
    job.close(restore=None if not raised else False)
    if not raised:
        kept_bits = differing(model, optimizer, size, counts)
    return {"raised": raised, "words": words, "plan": plans, "first": first, "differing": kept_bits}
