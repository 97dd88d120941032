"""Calls of a job that all ranks make together: agreed on before they move anything, and failed on
all ranks where one fails.

In: the ranks of a setup. Out: contexts for public calls; what ranks have said.

[Note: a call on several ranks]
A call begins with an agreement (`mesh.agreement`): what a rank finds wrong before it (its
batch, a limit) is told there, and nothing has moved on any rank. From then on ranks are inside of
collectives, and an error of one ends all: it is told to the others at once, and the ranks' group is
over. What homes on other ranks hold cannot be reached any more then.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from memfit.core.errors import LimitBreachError, PeerError
from memfit.homes import ByteHome
from memfit.homes.weights import BlockWeights
from memfit.mesh.agreement import DisagreementError, agree, optional_texts
from memfit.mesh.rank_group import RankGroup
from memfit.mesh.transport import gather_small
from memfit.tensors.trees import bytes_view, new_storage

T = TypeVar("T")
_PIECE_BYTES = 2 << 20


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


def is_breach(error: BaseException) -> bool:
    """Tells whether a step met the limit of this rank, or of another one."""
    if isinstance(error, PeerError):
        # By the text of `RankGroup.words_of`: words are all that comes from another rank.
        return re.match(rf"rank \d+: {LimitBreachError.__name__}: ", str(error)) is not None
    return isinstance(error, LimitBreachError)


def renew_behind(ranks: RankGroup | None, error: BaseException, *, goes_on: bool) -> None:
    """Makes the group of the ranks anew behind a step that failed, so that it can be made again.

    Args:
        ranks: of the job; None: this process alone.
        error: by which the step failed here.
        goes_on: this rank makes it again.

    Raises:
        PeerError: another rank does not, or was lost.
    """
    if ranks is not None and ranks.failure is not None:
        ranks.renew(None if goes_on else ranks.words_of(error))


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
            self._sums[id(parameter)] = checksum(parameter)

    def text(self, names: Mapping[int, str]) -> str:
        """Returns a line for each parameter.

        Args:
            names: by identity of the parameter.
        """
        return "\n".join(f"weight {names[key]!r}: checksum {total:08x}" for key, total in self._sums.items())


def checksum(values: torch.Tensor) -> int:
    """Returns the checksum of a tensor's bytes, which lie in host memory."""
    flat, found = values.detach().reshape(-1).view(torch.uint8), 0
    for piece in flat.split(_PIECE_BYTES) if flat.numel() else ():
        # Of a copy: NumPy's view of a storage makes it one that cannot be resized, as visits do it.
        found = zlib.crc32(piece.clone().numpy().data, found)
    return found


def checksum_at_home(home: ByteHome, offset: int, nbytes: int) -> int:
    """Returns the checksum of bytes at home, read a piece at a time."""
    staged, found = new_storage(min(_PIECE_BYTES, nbytes)), 0
    for start in range(0, nbytes, _PIECE_BYTES):
        count = min(_PIECE_BYTES, nbytes - start)
        home.read(offset + start, count, staged).wait()
        found = zlib.crc32(bytes_view(staged, 0, count).numpy().data, found)
    return found


def settings_text(optimizer: torch.optim.Optimizer) -> str:
    """Returns a line for each setting of an optimizer that is a number, a text or a few of them.

    Ranks update with their own settings, shares and whole weights alike: a scheduler that steps on
    some ranks only would make another model of each.
    """
    return "\n".join(
        f"param_groups[{number}][{key!r}]: {value!r}"
        for number, group in enumerate(optimizer.param_groups)
        for key, given in sorted(group.items())
        if key != "params" and (value := _plain(given)) is not None
    )


def _plain(value: object) -> object:
    """Returns a setting as numbers and texts; None for what is of neither."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if isinstance(value, bool | int | float | str) else None


def check_same_changes(ranks: RankGroup | None, changed: Sequence[BlockWeights]) -> None:
    """Checks that all ranks have changed the same weights to the same values; collective.

    Raises:
        DisagreementError: they have not.
    """
    if ranks is None:
        return
    slots = [slot for block in changed for slot in block.slots]
    lines = [f"{slot.name!r} changed: checksum {checksum(slot.parameter):08x}" for slot in slots]
    agree(ranks, "the end of job.weights", digest="\n".join(lines))


def done_by_all(ranks: RankGroup | None, name: str, digest: str, act: Callable[[], T]) -> T:
    """Does what moves nothing between ranks and must not be done by some of them only.

    What fails on all ranks leaves the job as usable as on one process; what fails on some ends it
    on all, since the others have it already.

    Args:
        ranks: of the job; None: this process alone.
        name: of the call.
        digest: what must be equal on all ranks.
        act: is done.

    Raises:
        DisagreementError: the ranks call different things.
        PeerError: it failed on another rank.
    """
    if ranks is None:
        return act()
    agree(ranks, name, digest=digest)
    error: Exception | None = None
    found: list[T] = []
    with failing_together(ranks):
        try:
            found.append(act())
        except Exception as own:  # noqa: BLE001, raised below, when the others have heard of it
            error = own
        failed = [flag for (flag, *_) in agree(ranks, f"the end of {name}", values=[float(error is not None)])]
    if not any(failed):
        return found[0]
    if error is not None and all(failed):
        raise error
    with failing_together(ranks):
        if error is not None:
            raise error
        # Only those that have done it come here: the others end this at once, with their cause.
        agree(ranks, f"{name} on all ranks")
    raise AssertionError("a rank that failed does not agree")


def add_up(ranks: RankGroup, own: float) -> float:
    """Adds a number up over ranks, in rank order; collective."""
    return math.fsum(
        ranks.call(lambda group: gather_small(group, torch.tensor([own], dtype=torch.float64))).flatten().tolist()
    )


def first_told(ranks: RankGroup | None, name: str, own: str | None) -> str | None:
    """Returns what the first rank that has something to tell tells, with its number, on all ranks;
    None if none has.

    Args:
        ranks: of the job; None: this process alone.
        name: of the call.
        own: text of this rank.
    """
    if ranks is None:
        return own
    if not any(has for (has, *_) in agree(ranks, name, values=[float(own is not None)])):
        return None
    told = enumerate(optional_texts(ranks, own))
    return next(f"rank {rank}: {text}" for rank, text in told if text is not None)


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
