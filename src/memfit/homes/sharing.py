"""Sharing of a job's homes between ranks: the protocol by which whoever places homes asks for it.

In: requests for homes of a process alone. Out: requests for what this rank has at home, and homes
whose visits reach what the others have. Made by the room `distributed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.homes.exchanged_gradients import GradientExchange
from memfit.homes.factories import HomeRequest
from memfit.homes.home import ByteHome
from memfit.homes.state_ranks import StateRanks
from memfit.homes.weights import BlockWeights


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
