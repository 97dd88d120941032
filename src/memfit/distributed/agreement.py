"""Agreement of ranks before they move anything: names, digests, small values, texts.

In: what a rank is about to do. Out: what all ranks said; or one error on all of them.

[Note: agree, then move]
A collective that only some ranks enter hangs, and one that they enter with other sizes or in
another order is silently wrong or ends the process. So every public call of a job that is
collective begins with one small exchange: its name, a digest of what it will do, and whether this
rank can. Where ranks differ, all of them raise, and the group is as usable as before.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import torch

from memfit.core.errors import PeerError, UsageError
from memfit.distributed.rank_group import RankGroup
from memfit.distributed.transport import Group, gather_in_place, gather_small

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
