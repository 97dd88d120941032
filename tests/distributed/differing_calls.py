"""Ranks that ask for different things, in tests of what is refused before it moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memfit
from distributed.training import Tower, batch_of, loss, plan_for


def fits(rank: int, size: int, how: str, directory: str) -> str:
    """Rank 1 asks `fit` for something else than rank 0; returns the error, after which all ranks fit and train alike."""
    model, options = _asked(rank, size, how, Path(directory))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if rank == 1 and how == "lr" else 1e-2)
    batch = batch_of("tower", 0, rank)
    if rank == 1 and how == "states":
        values = [p.detach().clone() for p in model.parameters()]
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
    raised = ""
    try:
        memfit.fit(model, optimizer, loss, batch, **options)
    except memfit.MemfitError as error:
        raised = f"{type(error).__name__}: {error}"
    model, _ = _asked(rank, size, "nothing", Path(directory))
    job = memfit.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch)
    job.step(batch)
    job.close()
    return raised


def _asked(rank: int, size: int, how: str, directory: Path) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = Tower()
    if how == "norms":
        return model, {"max_grad_norm": 0.5 + rank}
    if how == "directories":
        return model, {"store": directory / f"run-{rank}"}
    if rank == 0:
        return model, {}
    given: dict[str, dict[str, Any]] = {
        "limit": {"limit": "4GiB"},
        "plan": {"plan": plan_for(model, size, 3, "device", 1)},
        "store": {"store": directory / "run"},
        "bf16": {"allow": {"bf16"}},
    }
    return model, given.get(how, {})


def steps_after(rank: int, size: int, how: str, stage: int, directory: str) -> list[str]:
    """Rank 1 does something else between two steps; returns what this rank raised in the next call of all, and in the one after it."""
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, is_odd = batch_of("tower", 0, rank), rank == 1
    job = memfit.fit(model, optimizer, loss, batch, plan=plan_for(model, size, stage, "device", 1), enforce=False)
    job.step(batch)
    told: list[str] = []

    def attempt(call: Any) -> None:
        try:
            call()
        except memfit.MemfitError as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("")

    def change() -> None:
        with job.weights("head"), torch.no_grad():
            model.get_parameter("head.weight").mul_(2.0 if is_odd else 1.0)

    if how == "a schedule of one rank":
        optimizer.param_groups[0]["lr"] = 0.5 if is_odd else 0.1
        attempt(lambda: job.step(batch))
        optimizer.param_groups[0]["lr"] = 0.1
    elif how == "weights":
        attempt(change)
    elif how == "a load":
        job.save(directory)
        attempt(lambda: job.load(directory) if is_odd else job.step(batch))
    elif how == "a load of nothing":
        attempt(lambda: job.load(Path(directory) / "nothing"))
    elif how == "forms":
        attempt(lambda: job.save(directory, form="weights" if is_odd else "memfit"))
    elif how == "a limit":
        attempt(lambda: job.set_limit("4GiB"))
    else:
        parameter = model.get_parameter("embed.weight")
        parameter.requires_grad_(not is_odd)
        attempt(lambda: job.step(batch))
        parameter.requires_grad_(True)
    attempt(lambda: job.step(batch))
    job.close(restore=False)
    return told


class Halves(nn.Module):
    """Two linear layers, of which each rank has a part, as tensor parallel libraries make it of local weights."""

    def __init__(self, rank: int, size: int, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = {"uneven": 8 + 8 * rank, "groups": 8}.get(how, 16 // size)
        self.first = nn.Linear(8, rows, bias=False)
        self.last = nn.Linear(rows, 8, bias=False)
        if how != "groups":
            nn.init.normal_(self.last.weight, generator=torch.Generator().manual_seed(rank))
        group = dist.new_group(list(range(2 if how == "groups" else size)), backend="gloo")
        # In a closure of a hook, as `distribute_module` and the like do it.
        self.last.register_forward_hook(lambda _, __, out: _summed(out, group))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The sum over all parts."""
        return self.last(self.first(batch))


def _summed(out: Any, group: Any) -> Any:
    if isinstance(out, FakeTensor) or not isinstance(group, dist.ProcessGroup):
        return out
    dist.all_reduce(out, group=group)
    return out


def parts(rank: int, size: int, how: str) -> str:
    """`fit` of a model of which each rank has a part; returns the error."""
    model: nn.Module = Halves(rank, size, how)
    if how == "dtensor":
        mesh = init_device_mesh("cpu", (size,))
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        memfit.fit(model, optimizer, lambda m, b: m(b).square().mean(), torch.ones(4, 8), max_grad_norm=0.1)
    except memfit.MemfitError as error:
        return f"{type(error).__name__}: {error}"
    return ""
