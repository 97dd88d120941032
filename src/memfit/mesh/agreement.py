"""Agreement of ranks before they move anything: names, digests, small values, texts.

In: what a rank is about to do. Out: what all ranks said; or one error on all of them.

[Note: agree, then move]
A collective that only some ranks enter hangs, and one that they enter with other sizes or in
another order is silently wrong or ends the process. So every public call of a job that is
collective begins with one small exchange: its name, a digest of what it will do, and whether this
rank can. Where ranks differ, all of them raise, and the group is as usable as before.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import time
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.core.errors import PeerError, UsageError
from memfit.core.hardware import Link
from memfit.mesh.rank_group import RankGroup, is_initialized
from memfit.mesh.transport import Group, equal_borders, free_exchanged, gather_in_place, gather_small

_MOST_VALUES = 6
_LONGEST = 1 << 20


class DisagreementError(UsageError):
    """Ranks are about to do different things: all of them raise it, and nobody need be told."""


def agree(
    ranks: RankGroup,
    name: str,
    *,
    digest: str = "",
    values: Sequence[float] = (),
    problem: str | None = None,
    advice: str = "",
) -> list[list[float]]:
    """Agrees with all ranks on the call that comes.

    Args:
        ranks: all of them call.
        name: of the call, for people.
        digest: text that must be equal on all ranks: only its hash travels.
        values: numbers to exchange.
        problem: why this rank cannot; then the others raise, and this one raises its own error.
        advice: sentence for people whose ranks have other digests.

    Returns:
        The values of each rank.

    Raises:
        DisagreementError: the ranks are about to do different things.
        PeerError: another rank cannot.
    """
    assert len(values) <= _MOST_VALUES
    numbers = torch.tensor([*values, *[0.0] * (_MOST_VALUES - len(values))], dtype=torch.float64)
    words = torch.tensor([_hash(name), _hash(digest), problem is not None, len(values)])
    found = ranks.call(lambda group: gather_small(group, torch.cat([words, numbers.view(torch.int64)])))
    names, digests, problems = (found[:, column].tolist() for column in range(3))
    if any(problems) or len(set(names)) > 1 or len(set(digests)) > 1:
        told = texts(ranks, problem if problem is not None else f"{name}: {digest}")
        _refuse(ranks.rank, problems, names, digests, told, advice)
    return found[:, 4:].contiguous().view(torch.float64).tolist()


def _refuse(
    rank: int, problems: Sequence[int], names: Sequence[int], digests: Sequence[int], told: Sequence[str], advice: str
) -> None:
    if any(problems):
        if problems[rank]:
            return  # its own error is raised by whoever asked
        failed = problems.index(1)
        raise PeerError(f"rank {failed}: {told[failed]}")
    if len(set(names)) > 1:
        shown = "; ".join(f"rank {other}: {text.partition(':')[0]}" for other, text in enumerate(told))
        raise DisagreementError(
            f"the ranks have called different things ({shown}): calls of a job on several ranks are made by all of them, in the same order. Nothing was moved"
        )
    other = next(r for r, digest in enumerate(digests) if digest != digests[rank])
    raise DisagreementError(
        f"ranks {rank} and {other} are about to do different things. {difference(told[rank], told[other])}. {advice}"
    )


def difference(one: str, other: str) -> str:
    """Shows the first line in which two texts differ."""
    lines = itertools.zip_longest(one.splitlines(), other.splitlines(), fillvalue="")
    for number, (mine, theirs) in enumerate(lines, start=1):
        if mine != theirs:
            return f"Line {number} here: {mine!r:.200}; there: {theirs!r:.200}"
    return f"They are alike in the first {len(one.splitlines())} lines"


def texts(ranks: RankGroup, own: str) -> list[str]:
    """Exchanges texts; the first MiB of each."""
    return [text if text is not None else "" for text in optional_texts(ranks, own, longest=_LONGEST)]


def optional_texts(ranks: RankGroup, own: str | None, *, longest: int | None = None) -> list[str | None]:
    """Exchanges texts of any length, or None."""
    encoded = None if own is None else own.encode()[:longest]

    def act(group: Group) -> list[str | None]:
        length = torch.tensor([-1 if encoded is None else len(encoded)])
        lengths = gather_small(group, length).flatten().tolist()
        borders = [0]
        for each in lengths:
            borders.append(borders[-1] + max(each, 0))
        whole = torch.empty(borders[-1], dtype=torch.uint8)
        if encoded:
            own_part = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            whole[borders[ranks.rank] : borders[ranks.rank + 1]] = own_part
        gather_in_place(group, whole, borders)
        data = bytes(whole.tolist()) if borders[-1] < 1 << 16 else whole.numpy().tobytes()
        parts = [data[first:last] for first, last in itertools.pairwise(borders)]
        return [None if each < 0 else part.decode(errors="replace") for each, part in zip(lengths, parts, strict=True)]

    return ranks.call(act)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


# Models that are parts of one model over several processes.
#
# In: a model. Out: the process groups that it holds, with which ranks refuse it. Until there are
# meshes, ranks train data parallel: each has the whole model. With a part, a rank would take the
# norm of its own gradients for that of all, and weights that all ranks have would drift apart.

WHOLE = (
    "Ranks of memfit train data parallel: each has the whole model, from the same seed or files, and fit divides it. "
    "Parts of one model on each rank (tensor, pipeline or expert parallel) are not supported yet"
)
_MOST_OBJECTS = 1 << 18
_CONTAINERS = (dict, list, tuple, set, frozenset, functools.partial, types.MethodType, types.CellType)
_LEAVES = (str, bytes, int, float, complex, torch.Tensor, type, types.ModuleType, type(None))


def groups_of(model: nn.Module) -> list[list[int]]:
    """Returns the ranks of the process groups of several ranks that a model's modules, hooks and
    replaced methods hold, in attributes or closures; not those that they reach by name only.
    """
    if not is_initialized():
        return []
    groups: set[tuple[int, ...]] = set()
    seen: set[int] = set()
    queue: deque[Any] = deque([model])
    while queue and len(seen) < _MOST_OBJECTS:
        held = queue.popleft()
        if id(held) in seen or isinstance(held, _LEAVES):
            continue
        seen.add(id(held))
        if isinstance(held, dist.ProcessGroup):
            groups.add(tuple(dist.get_process_group_ranks(held)))
        elif hasattr(type(held), "get_all_groups"):  # a mesh, which knows its groups by name
            queue.extend(held.get_all_groups())
        else:
            queue.extend(_parts(held))
    return sorted(list(ranks) for ranks in groups if len(ranks) > 1)


def _parts(held: Any) -> Iterable[Any]:
    if isinstance(held, _CONTAINERS):
        return gc.get_referents(held)
    if isinstance(held, types.FunctionType):
        return held.__closure__, held.__defaults__, held.__kwdefaults__, held.__dict__
    return vars(held).values() if hasattr(held, "__dict__") else ()


# Speed of the links between ranks, as gathers see it.
#
# In: ranks. Out: a `Link`, the same on all of them.

_SMALL_BYTES = 4096
_LARGE_BYTES = 4 << 20
_TIMES = 3
_LEAST_S = 1e-7


def probe_network(ranks: RankGroup) -> Link:
    """Measures what a rank receives in a second while all give all their shares; collective.

    Memory: 4 MiB. Takes some hundredths of a second on one machine.

    Returns:
        The slowest rank's figures, of the fastest of three tries; `spread` is how far these were
        apart.
    """
    small = [_seconds(ranks, _SMALL_BYTES) for _ in range(_TIMES)]
    large = [_seconds(ranks, _LARGE_BYTES) for _ in range(_TIMES)]
    told = agree(ranks, "the links between ranks", values=[min(small), min(large), max(large)])
    latency, fast, slow = (max(said[index] for said in told) for index in range(3))
    received = _LARGE_BYTES * (ranks.size - 1) / ranks.size
    rate = received / max(fast - latency, _LEAST_S)
    spread = min(round(slow / max(fast, _LEAST_S) - 1, 3), 1.0)
    return Link(read_bytes_per_s=rate, write_bytes_per_s=rate, latency_s=min(latency, 1.0), spread=spread)


def _seconds(ranks: RankGroup, nbytes: int) -> float:
    # All begin together: a rank that waits for another would measure that.
    agree(ranks, "a probe of the links")
    whole = torch.zeros(nbytes, dtype=torch.uint8)
    began = time.perf_counter()
    ranks.call(lambda group: gather_in_place(group, whole, equal_borders(nbytes, ranks.size)))
    seconds = time.perf_counter() - began
    free_exchanged(whole)
    return seconds
