"""What ranks do in tests of collectives."""

from __future__ import annotations

import math
from typing import Any

import torch

import memfit
from memfit.communicator import Communicator, create


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of a rank, different on each."""
    generator = torch.Generator().manual_seed(100 + rank)
    drawn = torch.randint(-50, 50, (size,), generator=generator) if not dtype.is_floating_point else None
    return torch.randn(size, generator=generator).to(dtype) if drawn is None else drawn.to(dtype)


def lists(rank: int, size: int) -> dict[str, Any]:
    """Every collective on plain lists: the results."""
    c = create()
    own = [rank + 1, 10 * rank]
    found = {
        "allreduce": c.allreduce(own, op=sum),
        "max": c.allreduce(own, op=max),
        "min": c.allreduce(own, op="min"),
        "product": c.allreduce(own, op=math.prod),
        "own function": c.allreduce(own, op=_digits),
        "mixed": c.allreduce([1] if rank else [0.5], op=sum),
        "reduce": c.reduce(own, op=sum, root=1),
        "reduce_scatter": c.reduce_scatter([[rank, r] for r in range(size)], op=sum),
        "broadcast": c.broadcast([7, 8.5] if rank == 1 else None, root=1),
        "allgather": c.allgather([rank] * rank),
        "gather": c.gather([rank, 0], root=1),
        "scatter": c.scatter([[r] * r for r in range(size)] if rank == 1 else None, root=1),
        "alltoall": c.alltoall([[rank, r] for r in range(size)]),
        "empty": c.allreduce([], op=sum),
        "own": own,
    }
    c.barrier()
    c.close()
    return found


def _digits(given: list[int]) -> int:
    return int("".join(map(str, given)))


def worked_example(rank: int, size: int) -> tuple[list[int], list[int]]:
    """WORKED_EXAMPLES 1."""
    own = [[1, 2, 3], [1, 0, 1]][rank]
    c = create()
    found = c.allreduce(own, op=sum)
    c.close()
    return found, own


def tensors(rank: int, size: int, numel: int, name: str) -> list[bool]:
    """Every collective on tensors, against arithmetic on what all ranks have."""
    dtype = getattr(torch, name)
    c = create()
    all_of_them = [values(r, numel, dtype) for r in range(size)]
    own = all_of_them[rank].clone()
    total = all_of_them[0].clone()
    for other in all_of_them[1:]:
        total = total + other
    checks = [torch.equal(c.allreduce(own), total), torch.equal(own, all_of_them[rank])]
    checks.append(torch.equal(c.allreduce(own, op=sum), total))
    checks.append(torch.equal(c.allreduce(own, op="max"), torch.stack(all_of_them).amax(0)))
    checks.append(
        torch.equal(
            c.allreduce(own.view(1, -1), op=lambda parts: parts[0] - parts[-1])[0], all_of_them[0] - all_of_them[-1]
        )
    )
    reduced = c.reduce(own, root=size - 1)
    checks.append(torch.equal(reduced, total) if rank == size - 1 else reduced is None)
    checks.append(torch.equal(c.broadcast(own, root=size - 1), all_of_them[-1]))
    uneven = [t[: numel // (r + 1)] for r, t in enumerate(all_of_them)]
    checks.append(_equal(c.allgather(uneven[rank]), uneven))
    gathered = c.gather(uneven[rank], root=1)
    checks.append(_equal(gathered, uneven) if rank == 1 else gathered is None)
    checks.append(torch.equal(c.scatter(uneven if rank == 1 else None, root=1), uneven[rank]))
    checks.append(
        _equal(
            c.alltoall([all_of_them[rank][: numel // (r + 1)] for r in range(size)]),
            [t[: numel // (rank + 1)] for t in all_of_them],
        )
    )
    parts = [own[numel * r // size : numel * (r + 1) // size] for r in range(size)]
    checks.append(torch.equal(c.reduce_scatter(parts), total[numel * rank // size : numel * (rank + 1) // size]))
    pending = [c.allreduce(own + n, async_op=True) for n in range(3)]
    own.fill_(1)  # its values were taken
    checks += [torch.equal(p.wait(), _sum([t + n for t in all_of_them])) for n, p in reversed(list(enumerate(pending)))]
    checks.append(torch.equal(c.allreduce(torch.tensor(float(rank))), torch.tensor(float(sum(range(size))))))
    c.close()
    return checks


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for other in tensors[1:]:
        total = total + other
    return total


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def disagreements(rank: int, size: int) -> list[str]:
    """Calls that differ between ranks: each is an error on all of them, and the next call is right."""
    c = create()
    found = [
        _refused(lambda: c.allreduce(torch.ones(2 + rank))),
        _refused(lambda: c.allreduce([1]) if rank else c.barrier()),
        _refused(lambda: c.allreduce([1, 2], op="max" if rank else "sum")),
        _refused(lambda: c.broadcast([1], root=rank)),
        _refused(lambda: c.allreduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))),
        _refused(lambda: c.allreduce([1] if rank else torch.ones(1))),
    ]
    assert c.allreduce([1]) == [size]
    c.close()
    return found


def _refused(call: Any) -> str:
    try:
        call()
    except memfit.UsageError as error:
        return str(error)
    return ""


def alone() -> Communicator:
    """A communicator without a process group."""
    return create()
