"""Sums of gradients over ranks, in rank order, into each rank's share or into the whole.

In: a block's gradients on each rank. Out: their sum at home, in the masters' dtype.

[Note: an exchange in pieces]
The elements that a rank holds of a block's parameters, one behind the other, are its *run*. Runs of
all ranks are cut at the same lengths, and the ranks exchange one piece of each at a time: what is
staged is bounded whatever the block's size. Each rank adds what it got in ascending rank order,
then to what its home holds. Where all ranks have the whole sum, its pieces go to all of them next.

[Note: buffers of an exchange]
There are two, as large as the first pieces: what goes, and what comes. All pieces pass through
them, and so do the sum on its way to all ranks and what a home holds already. Whoever begins the
exchange makes them, not the group's thread: so it is known at which action of a step they come, and
memory that is short is an error before anything moves.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memfit.core.layout import EXCHANGED_ELEMENTS, BlockCut
from memfit.homes.exchanged_gradients import ArrivedGradients, GradientExchange
from memfit.homes.gradients import flat_gradient
from memfit.homes.home import ByteHome, TransferHandle, write_tensor
from memfit.homes.weights import BlockWeights
from memfit.mesh.rank_group import RankGroup
from memfit.mesh.transport import (
    Group,
    exchange,
    free_exchanged,
    gather_in_place,
    gather_small,
    sum_in_order,
)


@dataclass(frozen=True)
class _Part:
    """A range of a parameter's elements, and where it begins in a rank's run."""

    index: int
    first: int
    count: int
    begin: int


class RankExchange(GradientExchange):
    """Sums of gradients over the ranks of a group.

    Memory: while a block's gradient is exchanged, at most 1 MiB for each rank that goes, and as
    much that comes (`step.sizes.exchange_bytes`).

    Args:
        group: the ranks.
        cuts: by block index, where it is cut.
        keeps_norms: norms are taken of what is added.
        keeps_peaks: largest magnitudes are.
    """

    def __init__(self, group: RankGroup, cuts: Sequence[BlockCut], *, keeps_norms: bool, keeps_peaks: bool) -> None:
        self._group = group
        self._cuts = tuple(cuts)
        self._orders = [o for o, wanted in ((2, keeps_norms), (math.inf, keeps_peaks)) if wanted]

    def accumulate(
        self,
        block: BlockWeights,
        home: ByteHome,
        gradients: Sequence[torch.Tensor | None],
        added: Sequence[bool],
        note: Callable[[ArrivedGradients], None],
    ) -> TransferHandle:
        """See `GradientExchange.accumulate`."""
        work = _BlockExchange(self._group, self._cuts[block.index], block, home, list(gradients), added, self._orders)
        # The handle's function holds the gradients until the exchange is through, and no longer.
        return self._group.submit(lambda group: note(work.run(group)))

    def all_values(self, own: torch.Tensor) -> torch.Tensor:
        """See `GradientExchange.all_values`."""
        return self._group.call(lambda group: gather_small(group, own))


class _BlockExchange:
    """The exchange of one block: made by whoever begins it, run in the group's thread."""

    def __init__(
        self,
        ranks: RankGroup,
        cut: BlockCut,
        block: BlockWeights,
        home: ByteHome,
        gradients: list[torch.Tensor | None],
        added: Sequence[bool],
        orders: Sequence[float],
    ) -> None:
        self._ranks = ranks
        self._rank, self._size = ranks.rank, ranks.size
        self._cut = cut
        self._slots = block.slots
        self._home = home
        self._gradients = gradients
        self._added = added
        self._orders = orders
        self._runs: dict[float, dict[str, list[torch.Tensor]]] = {o: defaultdict(list) for o in orders}
        self._sent, self._received = self._buffers()

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the two buffers, as bytes. See [Note: buffers of an exchange]."""
        sent = received = 0
        trained = [index for index, slot in enumerate(self._slots) if slot.requires_grad]
        for dtype in dict.fromkeys(self._slots[index].master_dtype for index in trained):
            lengths = self._lengths([i for i in trained if self._slots[i].master_dtype is dtype])
            sizes = [min(length, EXCHANGED_ELEMENTS) for length in lengths]
            sent = max(sent, dtype.itemsize * sum(sizes))
            received = max(received, dtype.itemsize * max(self._size * sizes[self._rank], *sizes))
        made = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for nbytes in (sent, received)]
        return made[0], made[1]

    def _lengths(self, indices: Sequence[int]) -> list[int]:
        """Returns the elements of each rank's run of these parameters."""
        return [sum(len(self._cut.held(rank)[index]) for index in indices) for rank in range(self._size)]

    def run(self, group: Group) -> ArrivedGradients:
        """Exchanges everything, and adds it to the home."""
        own = torch.tensor([gradient is not None for gradient in self._gradients], dtype=torch.uint8)
        # A parameter that some ranks did not use has a gradient if any has: they add zeros.
        has = gather_small(group, own).amax(0).tolist()
        found = [index for index, is_there in enumerate(has) if is_there]
        for dtype in dict.fromkeys(self._slots[index].master_dtype for index in found):
            self._exchange(group, dtype, [i for i in found if self._slots[i].master_dtype is dtype])
        self._gradients = []
        # Not by dropping them: [Note: who holds a buffer that was exchanged].
        free_exchanged(self._sent)
        free_exchanged(self._received)
        return ArrivedGradients(
            names=tuple(self._slots[index].name for index in found),
            norms=dict(self._runs.get(2, {})),
            peaks=dict(self._runs.get(math.inf, {})),
        )

    def _exchange(self, group: Group, dtype: torch.dtype, indices: Sequence[int]) -> None:
        runs = [self._run_of(rank, indices) for rank in range(self._size)]
        lengths = self._lengths(indices)
        buffer, received = [
            made[: made.numel() // dtype.itemsize * dtype.itemsize].view(dtype) for made in (self._sent, self._received)
        ]
        for start in range(0, max(lengths), EXCHANGED_ELEMENTS):
            sizes = [min(max(length - start, 0), EXCHANGED_ELEMENTS) for length in lengths]
            sent = buffer[: sum(sizes)]
            for piece, run in zip(sent.split(sizes), runs, strict=True):
                self._fill(piece, start, run)
            parts = exchange(group, sent, sizes, [sizes[self._rank]] * self._size, received)
            self._ranks.received["gradient"] += sizes[self._rank] * (self._size - 1) * dtype.itemsize
            total = sum_in_order(parts)
            # What was sent is through: its memory is free for what comes next.
            if self._home.is_shared:
                self._add(total, start, runs[self._rank], buffer)
                continue
            borders = [0, *itertools.accumulate(sizes)]
            sent[borders[self._rank] : borders[self._rank + 1]] = total
            gather_in_place(group, sent, borders)
            self._ranks.received["gradient"] += (borders[-1] - sizes[self._rank]) * dtype.itemsize
            for piece, run in zip(sent.split(sizes), runs, strict=True):
                self._add(piece, start, run, received)

    @property
    def _device(self) -> torch.device:
        return self._slots[0].parameter.device

    def _run_of(self, rank: int, indices: Sequence[int]) -> list[_Part]:
        held, begin, run = self._cut.held(rank), 0, list[_Part]()
        for index in indices:
            if held[index]:
                run.append(_Part(index, held[index].start, len(held[index]), begin))
                begin += len(held[index])
        return run

    def _fill(self, piece: torch.Tensor, start: int, run: Sequence[_Part]) -> None:
        """Copies this rank's gradients of a piece of a rank's run."""
        for index, first, count, at in _within(run, start, piece.numel()):
            gradient, place = self._gradients[index], piece[at : at + count]
            if gradient is None:
                place.zero_()
            else:
                place.copy_(flat_gradient(gradient)[first : first + count])

    def _add(self, piece: torch.Tensor, start: int, run: Sequence[_Part], free: torch.Tensor) -> None:
        """Adds a piece of a sum to the home; changes it, and what is free."""
        for index, first, count, at in _within(run, start, piece.numel()):
            slot, values = self._slots[index], piece[at : at + count]
            offset = slot.master_offset_bytes + first * values.element_size()
            if self._added[index]:
                staged = free[: values.numel()]
                self._home.read(offset, staged.nbytes, staged.untyped_storage()).wait()
                values.add_(staged)
            for order in self._orders:
                self._runs[order][slot.name].append(torch.linalg.vector_norm(values, order))
            write_tensor(self._home, offset, values).wait()


def _within(run: Sequence[_Part], start: int, length: int) -> list[tuple[int, int, int, int]]:
    """Returns (parameter, first element, elements, place in the piece) of what a piece of a run
    holds.
    """
    found: list[tuple[int, int, int, int]] = []
    for part in run:
        begin, end = max(part.begin, start), min(part.begin + part.count, start + length)
        if begin < end:
            found.append((part.index, part.first + begin - part.begin, end - begin, begin - start))
    return found
