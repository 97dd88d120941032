"""Gradients that processes which train together sum as they go home.

In: `.grad` of a block's parameters on each process, an exchange of `mesh`. Out: the
sum at home, whole or in shares; norms and checks of it that are equal on all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from memfit.homes.factories import HomeRequest
from memfit.homes.gradients import GradientHomes, dense_gradient
from memfit.homes.home import ByteHome, TransferHandle
from memfit.homes.optimizer_states import StateRanks
from memfit.homes.weights import BlockWeights


class GradientExchange:
    """Sums of gradients over all processes that train the model; abstract.

    Its methods are collective: all processes call them in the same order.
    """

    def accumulate(
        self,
        block: BlockWeights,
        home: ByteHome,
        gradients: Sequence[torch.Tensor | None],
        added: Sequence[bool],
        note: Callable[[ArrivedGradients], None],
    ) -> TransferHandle:
        """Begins to sum a block's gradients over processes and to add them to their home.

        Args:
            block: the block.
            home: of its gradients: of all of them, or of this process's share.
            gradients: by parameter, dense, or None where this process has none; they live until the
                handle is done.
            added: by parameter, whether the home holds a sum already.
            note: called with what came, before the handle is done.
        """
        raise NotImplementedError

    def all_values(self, own: torch.Tensor) -> torch.Tensor:
        """Returns a small tensor of each process, stacked in rank order."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ArrivedGradients:
    """Gradients of a block that were summed over processes.

    Attributes:
        names: parameters of which some process had a gradient.
        norms: by parameter, 2-norms of the runs of the sum that this process has added.
        peaks: by parameter, their largest magnitudes.
    """

    names: tuple[str, ...]
    norms: Mapping[str, Sequence[torch.Tensor]]
    peaks: Mapping[str, Sequence[torch.Tensor]]


class ExchangedGradients(GradientHomes):
    """Gradients of all blocks, summed over processes. Every block that trains has a home for them.

    Memory: see `GradientHomes`, and what the exchange stages.

    Args:
        blocks: all blocks.
        homes: by block index.
        exchange: of the processes.
        keeps_norms: as in `GradientHomes`, like the next three.
        keeps_gradients: see there.
        keeps_peaks: see there.
        adds_apart: see there.
    """

    are_exchanged = True

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        homes: Mapping[int, ByteHome],
        exchange: GradientExchange,
        *,
        keeps_norms: bool,
        keeps_gradients: bool = False,
        adds_apart: bool = False,
        keeps_peaks: bool = False,
    ) -> None:
        super().__init__(
            blocks,
            homes,
            keeps_norms=keeps_norms,
            keeps_gradients=keeps_gradients,
            adds_apart=adds_apart,
            keeps_peaks=keeps_peaks,
        )
        self._exchange = exchange
        # By parameter, of the runs of sums that were added here.
        self._runs: dict[str, Sequence[torch.Tensor]] = {}
        self._peaks_of_runs: dict[str, Sequence[torch.Tensor]] = {}
        shared = {index for index, home in homes.items() if home.is_shared}
        self._cut_names = frozenset(s.name for b in blocks if b.index in shared for s in b.slots if s.requires_grad)

    def begin_step(self) -> None:
        """See `GradientHomes.begin_step`."""
        super().begin_step()
        self._runs.clear()
        self._peaks_of_runs.clear()

    def accumulate(self, block: BlockWeights) -> None:
        """See `GradientHomes.accumulate`. What this process lacks others may have: it takes part
        without any gradient too.
        """
        home = self.homes.get(block.index)
        if home is None:
            return
        # Which parameters have a sum at home is known when the exchange before is through.
        self.wait()
        gradients: list[torch.Tensor | None] = []
        for slot in block.slots:
            gradient = self.here.of(slot)
            # Off the leaf at once: a gradient that comes now belongs to the next accumulate.
            self.here.give_up(slot)
            gradients.append(None if gradient is None else dense_gradient(gradient.detach(), slot))
        added = [slot.name in self._held for slot in block.slots]
        self._leaving = self._exchange.accumulate(block, home, gradients, added, self._note_arrived)

    def _note_arrived(self, arrived: ArrivedGradients) -> None:
        # In the thread of the exchange: whoever asks has waited for its handle.
        self._held.update(arrived.names)
        self._runs.update(arrived.norms)
        self._peaks_of_runs.update(arrived.peaks)

    def norm(self, order: Sequence[str]) -> torch.Tensor:
        """Computes the 2-norm of the sums, of which each process has its share or the whole.

        Runs of a parameter, then parameters, then processes: other roundings than of whole
        gradients, but the same on every process.
        """
        self.wait()
        whole, cut = [
            [
                torch.linalg.vector_norm(torch.stack(list(self._runs[name])))
                for name in order
                if self._runs.get(name) and (name in self._cut_names) is is_cut
            ]
            for is_cut in (False, True)
        ]
        if self._cut_names:
            own = torch.linalg.vector_norm(torch.stack(cut)) if cut else torch.tensor(0.0)
            whole += [*self._exchange.all_values(own.float().reshape(1)).flatten()]
        found = torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.tensor(0.0)
        return found * self.scaling.factor

    def is_finite(self, names: Collection[str]) -> bool:
        """Tells whether no sum of these parameters holds an infinity or a NaN, on any process."""
        self.wait()
        own = [peak for name, runs in self._peaks_of_runs.items() if name in names for peak in runs]
        largest = torch.stack(own).amax() if own else torch.tensor(0.0)
        return bool(self._exchange.all_values(largest.float().reshape(1)).isfinite().all())


# Sharing of a job's homes between ranks: the protocol by which whoever places homes asks for it.
#
# In: requests for homes of a process alone. Out: requests for what this rank has at home, and homes
# whose visits reach what the others have. Made by `mesh`.


@dataclass(frozen=True, kw_only=True)
class RegionPart:
    """Part of a region that a rank has.

    Attributes:
        first: its first byte in the whole region.
        nbytes: its length: whole pages, at least one.
        elements: by parameter, the elements that it holds.
    """

    first: int
    nbytes: int
    elements: tuple[range, ...]


class Sharing:
    """Ranks that train a model together; abstract."""

    def states(self, block: int) -> StateRanks | None:
        """Returns what gathers a block's optimizer states; None if each rank has all of them."""
        raise NotImplementedError

    def held(self, block: int) -> tuple[range, ...]:
        """Returns the elements of a block's parameters that this rank updates."""
        raise NotImplementedError

    def part(self, block: BlockWeights, tag: str) -> RegionPart:
        """Returns what this rank has at home of a block's region.

        Args:
            block: the block.
            tag: "weight", "master" or "gradient"; states are laid out by `held` already.
        """
        raise NotImplementedError

    def request(self, block: BlockWeights, request: HomeRequest) -> HomeRequest:
        """Returns the request for this rank's part of a region."""
        raise NotImplementedError

    def home(self, block: BlockWeights, request: HomeRequest, local: ByteHome) -> ByteHome:
        """Returns the home of a whole region.

        Args:
            block: the block.
            request: of the whole.
            local: of this rank's part.
        """
        raise NotImplementedError

    def exchange(self, *, keeps_norms: bool, keeps_peaks: bool) -> GradientExchange:
        """Returns what sums gradients over ranks."""
        raise NotImplementedError
