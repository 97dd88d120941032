"""Calls of a job that all ranks make together: agreed on before they move anything, and failed on
all ranks where one fails.

In: the ranks of a setup. Out: contexts for public calls; what ranks have said.

[Note: a call on several ranks]
A call begins with an agreement (`distributed.agreement`): what a rank finds wrong before it (its
batch, a limit) is told there, and nothing has moved on any rank. From then on ranks are inside of
collectives, and an error of one ends all: it is told to the others at once, and the ranks' group is
over. What homes on other ranks hold cannot be reached any more then.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from memfit.core.errors import PeerError
from memfit.distributed.agreement import DisagreementError, agree
from memfit.distributed.rank_group import RankGroup
from memfit.distributed.transport import gather_small

T = TypeVar("T")


@contextmanager
def together(
    ranks: RankGroup | None, name: str, *, digest: str = "", values: Sequence[float] = ()
) -> Iterator[list[list[float]]]:
    """Context of a collective call; see [Note: a call on several ranks].

    Args:
        ranks: of the job; None: this process alone, for which nothing happens.
        name: of the call.
        digest: what must be equal on all ranks.
        values: numbers to exchange.

    Yields:
        The values of each rank.

    Raises:
        UsageError: the ranks call different things.
        PeerError: another rank failed.
    """
    if ranks is None:
        yield [list(values)]
        return
    found = agree(ranks, name, digest=digest, values=values)
    with failing_together(ranks):
        yield found


@contextmanager
def failing_together(ranks: RankGroup | None) -> Iterator[None]:
    """Context from which an error is told to all ranks."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            fail_together(ranks, error)
        raise


def fail_together(ranks: RankGroup, error: BaseException) -> None:
    """Tells all ranks of an error of this one, unless they know."""
    if not isinstance(error, PeerError | DisagreementError):
        ranks.fail(error)


class WeightSums:
    """Checksums of weights on their way home, by which ranks see that they begin with the same.

    Args:
        bring: materializes parameters.
    """

    def __init__(self, bring: Callable[[Iterable[torch.nn.Parameter]], None]) -> None:
        self._bring = bring
        self._sums: dict[int, int] = {}

    def bring(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Materializes parameters, and sums their bytes."""
        parameters = list(parameters)
        self._bring(parameters)
        for parameter in parameters:
            flat = parameter.detach().reshape(-1).view(torch.uint8)
            self._sums[id(parameter)] = zlib.crc32(flat.numpy().data) if flat.numel() else 0

    def text(self, names: Mapping[int, str]) -> str:
        """Returns a line for each parameter.

        Args:
            names: by identity of the parameter.
        """
        return "\n".join(f"weight {names[key]!r}: checksum {total:08x}" for key, total in self._sums.items())


def add_up(ranks: RankGroup, own: float) -> float:
    """Adds a number up over ranks, in rank order; collective."""
    return math.fsum(
        ranks.call(lambda group: gather_small(group, torch.tensor([own], dtype=torch.float64))).flatten().tolist()
    )


def prepare_together(ranks: RankGroup | None, name: str, prepare: Callable[[], T]) -> T:
    """Prepares a call without collectives. Where that fails on a rank it raises, and the others
    hear of it in the agreement that they are in.
    """
    try:
        return prepare()
    except BaseException as error:
        if ranks is not None and ranks.failure is None and isinstance(error, Exception):
            agree(ranks, name, problem=f"{type(error).__name__}: {error}")
        raise
