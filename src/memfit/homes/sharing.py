"""Sharing of a job's homes between ranks: the protocol by which whoever places homes asks for it.

In: requests for homes of a process alone. Out: requests for what this rank has at home, and homes
whose visits reach what the others have. Made by the room `distributed`.
"""

from __future__ import annotations

from memfit.homes.exchanged_gradients import GradientExchange
from memfit.homes.factories import HomeRequest
from memfit.homes.home import ByteHome
from memfit.homes.state_ranks import StateRanks
from memfit.homes.weights import BlockWeights


class Sharing:
    """Ranks that train a model together; abstract."""

    def states(self, block: int) -> StateRanks | None:
        """Returns what gathers a block's optimizer states; None if each rank has all of them."""
        raise NotImplementedError

    def held(self, block: int) -> tuple[range, ...]:
        """Returns the elements of a block's parameters that this rank updates."""
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
