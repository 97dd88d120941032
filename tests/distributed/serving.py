"""Servers and workers, in tests of the parameter server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import memfit
from distributed.training import OPTIMIZERS, accumulated, batch_of, build, loss, same, weights_of
from memfit.devices.binding import install
from memfit.store import FileOperations


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Context in which the bytes that torch.distributed sends and receives between two ranks are counted."""
    own, counts = (dist.send, dist.recv), [0, 0]

    def counting(place: int, act: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            counts[place] += tensor.nbytes
            return act(tensor, *args, **options)

        return call

    dist.send, dist.recv = counting(0, own[0]), counting(1, own[1])
    try:
        yield counts
    finally:
        dist.send, dist.recv = own


def like_data_parallel(rank: int, size: int, servers: int, optimizer: str, home: str, steps: int) -> list[str]:
    """Trains with synchronous servers, workers in any order; returns what differs from one process that adds the workers in order."""
    model = build("tower")
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    workers, told = size - servers, list[str]()
    nbytes = sum(p.nbytes for p in model.parameters())
    with (
        memfit.parameter_server.create(model, optimizer_, servers=servers, home=home) as server,
        counted_bytes() as counts,
    ):
        for step in range(steps if server.is_worker else 0):
            for index, p in enumerate(model.parameters()):
                server.pull(index, into=p)
            if (rank + step) % 2:
                time.sleep(0.02)
            model.zero_grad()
            (loss(model, batch_of("tower", step, rank - servers)) / workers).backward()
            for index, p in reversed(list(enumerate(model.parameters()))):
                server.push(index, p.grad)
        if server.is_worker:
            for index, p in enumerate(model.parameters()):
                server.pull(index, into=p)
            # A head of 24 bytes for each push, two for each pull.
            heads = 24 * (3 * steps + 2) * len(list(model.parameters()))
            told += [] if sum(counts) == (2 * steps + 1) * nbytes + heads else [f"sent and received {counts}"]
            told += [] if server.bytes_moved == ((steps + 1) * nbytes, steps * nbytes) else ["bytes_moved"]
            told += [] if server.stalest_pull == 0 else ["stale"]
    expected = accumulated("tower", optimizer, workers, 1, steps)
    if rank >= servers:
        return told + same(weights_of(model), expected)
    # A server has its own parameters' last values, and those that it does not have as they were.
    first = {name: p.detach() for name, p in build("tower").named_parameters()}
    for name, p in model.named_parameters():
        is_own = bool(optimizer_.state.get(p))
        told += [] if torch.equal(p, expected[name] if is_own else first[name]) else [name]
    return told + ([] if any(optimizer_.state.get(p) for p in model.parameters()) else ["no states"])


class Counts(nn.Module):
    """A weight for each worker: with gradients of -1 at a worker's place and SGD of lr 1, how often it has pushed."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(workers))
        # One that takes several pieces, so that a worker can be lost in the middle of it.
        self.large = nn.Parameter(torch.zeros(workers, 1 << 18))


def _push_of(model: Counts, worker: int) -> list[torch.Tensor]:
    found = [torch.zeros_like(p) for p in model.parameters()]
    for gradient in found:
        gradient[worker] = -1
    return found


def clocks(rank: int, size: int, staleness: int, steps: int) -> list[Any]:
    """Worker 1 pushes when worker 2 can go no further; returns for each pull the least clock of another that it saw, less its own, and what it was told."""
    model = Counts(size - 1)
    seen: list[int] = []
    with memfit.parameter_server.create(
        model, torch.optim.SGD(model.parameters(), lr=1.0), staleness=staleness
    ) as server:
        for step in range(steps if server.is_worker else 0):
            for index in range(2):
                counts = server.pull(index).view(size - 1, -1)
                assert all(torch.equal(row, row[:1].expand_as(row)) for row in counts), "a torn weight"
                pushed = counts[:, 0].tolist()
                assert pushed[rank - 1] == step
                if step < steps - 1:  # one that has ended is waited for no more
                    seen.append(int(min(pushed)) - step)
            # Synchronous pushes are seen when all have come: nobody can be ahead there.
            ahead = min(step + staleness + 1, steps) if rank == 1 and staleness else 0
            while ahead and server.pull(1).view(size - 1, -1)[1, 0] < ahead:
                time.sleep(0.002)
            for index, gradient in enumerate(_push_of(model, rank - 1)):
                server.push(index, gradient)
    return [seen, server.stalest_pull, server.lost_workers]


def killed(rank: int, size: int, staleness: int, home: str) -> list[Any]:
    """Worker 2 is killed in the middle of its third push of the large parameter; worker 1 goes on. Returns its last counts, the longest wait, and who was lost."""
    model = Counts(size - 1)
    longest, last = 0.0, [0.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memfit.parameter_server.create(model, optimizer, staleness=staleness, home=home) as server:
        for step in range(6 if server.is_worker else 0):
            gradients = _push_of(model, rank - 1)
            if rank == 2 and step == 2:
                server.push(0, gradients[0])
                _die_while_sending(server, gradients[1])
            for index, gradient in enumerate(gradients):
                server.push(index, gradient)
            began = time.perf_counter()
            rows = [server.pull(index).view(size - 1, -1) for index in range(2)]
            longest = max(longest, time.perf_counter() - began)
            assert all(torch.equal(row, row[:1].expand_as(row)) for part in rows for row in part), "a torn weight"
            last = [row[0].item() for part in rows for row in part]
    return [last, longest, server.lost_workers]


def _die_while_sending(server: Any, gradient: torch.Tensor) -> None:
    from memfit.job.served import PIECE_BYTES, Ask, Head

    pair = server._side._links[0]._pair
    pair.send_head(Head(Ask.PUSH, 1, has_bytes=True))
    pair._send(gradient.view(-1).view(torch.uint8)[:PIECE_BYTES])
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def _matrices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(24)))


def under_a_limit(rank: int, size: int, limit: str) -> list[Any]:
    """Trains a model whose weights alone are above the servers' limit; returns what was measured, predicted, the limit, and what differs from plain PyTorch."""
    rows = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(3))
    model: Any = _matrices()
    measured, predicted, armed = 0, 0, None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with memfit.parameter_server.create(model, optimizer, limit=limit, emulate_device=True) as server:
        if server.is_server:
            predicted, armed = server.predicted_peak_bytes, server._side.machine.hard_limit.armed_bytes  # type: ignore[union-attr]
            install().reset_peak()
            server._side.serving.wait()  # type: ignore[union-attr]
            measured = install().stats().peak_bytes
        for _ in range(2 if server.is_worker else 0):
            for index, p in enumerate(model.parameters()):
                server.pull(index, into=p)
            model.zero_grad()
            (model(rows[rank - 1]).square().mean() / 2).backward()
            for index, p in enumerate(model.parameters()):
                server.push(index, p.grad)
    expected = _matrices()
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-3, foreach=False)
    for _ in range(2):
        plain.zero_grad()
        for part in rows:
            (expected(part).square().mean() / 2).backward()
        plain.step()
    wrong = same(weights_of(model), weights_of(expected)) if rank == 0 else []
    return [measured, predicted, armed, wrong]


def full_disk(rank: int, size: int) -> str:
    """The server's disk is full; returns what this rank raises."""
    model = build("tower")
    own = FileOperations.pwrite

    def full(self: FileOperations, descriptor: int, source: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    try:
        with memfit.parameter_server.create(model, OPTIMIZERS["adamw"](model.parameters()), home="disk") as server:
            if server.is_server:
                FileOperations.pwrite = full  # type: ignore[method-assign]
                server.close(restore=False)
            for index, p in enumerate(model.parameters()):
                server.push(index, torch.ones_like(p))
            server.pull(0)
    except Exception as error:  # noqa: BLE001, told to the test
        return f"{type(error).__name__}: {error}"
    finally:
        FileOperations.pwrite = own  # type: ignore[method-assign]
    return ""


def unused(rank: int, size: int) -> list[str]:
    """Some workers do not use a parameter, nobody another one, and gradients have other strides: as plain PyTorch, or refused."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 6, bias=False) for _ in range(3)))
    before = model[2].weight.detach().clone()
    told: list[str] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    with memfit.parameter_server.create(model, optimizer) as server:
        if server.is_worker:
            told += [] if "is a server" not in _refused(lambda: server.push(0, None)) else ["worker"]
            told += [] if "is (2,) of torch.float32" in _refused(lambda: server.push(0, torch.ones(2))) else ["shape"]
            told += [] if "no parameter 9" in _refused(lambda: server.pull(9)) else ["index"]
            gradients = [torch.full((8, 6), float(rank)).t(), torch.full((6, 8), 2.0) if rank == 2 else None, None]
            for index, gradient in enumerate(gradients):
                server.push(index, gradient)
            pulled = [server.pull(index, async_op=True) for index in range(3)]
            found = [each.wait() for each in pulled]
        else:
            told += [] if "is a server" in _refused(lambda: server.pull(0)) else ["server"]
            found = []
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 6, bias=False) for _ in range(3)))
    plain[0].weight.grad, plain[1].weight.grad = torch.full((6, 8), 1.0 + 2.0), torch.full((6, 8), 2.0)
    torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False).step()
    told += [
        f"{i}" for i, (value, p) in enumerate(zip(found, plain.parameters(), strict=False)) if not torch.equal(value, p)
    ]
    return told + ([] if not found or torch.equal(found[2], before) else ["unused"])


def _refused(call: Any) -> str:
    try:
        call()
    except memfit.UsageError as error:
        return str(error)
    return ""


def disagrees(rank: int, size: int) -> str:
    """Ranks that ask for another staleness; returns the error."""
    model = build("tower")
    try:
        memfit.parameter_server.create(model, OPTIMIZERS["sgd"](model.parameters()), staleness=rank % 2)
    except memfit.UsageError as error:
        return str(error)
    return ""
