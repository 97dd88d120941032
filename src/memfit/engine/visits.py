"""Visits of weights while a schedule runs: as it says, and on demand if the model does what its
trace did not foresee.

In: the blocks, and waits for their updates. Out: weights that are on the device when code reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.homes.weights import BlockWeights, check_untouched


class Visits:
    """Fetches and releases for one engine. A block whose update is under way is waited for before
    it moves.

    Args:
        blocks: by the schedule's block index.
        wait_for_update: waits for a block's update, if one is under way.
        wait_on_device: the same for an update that works on the block's device bytes, and not for
            one on the host.
        depart: called with a description of what the schedule did not foresee.
    """

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        wait_for_update: Callable[[int], None],
        depart: Callable[[str], None],
        wait_on_device: Callable[[int], None] | None = None,
    ) -> None:
        self._blocks = tuple(blocks)
        self._wait_for_update = wait_for_update
        self._wait_on_device = wait_for_update if wait_on_device is None else wait_on_device
        self._depart = depart
        self._on_demand: set[int] = set()

    def fetch(self, b: int) -> None:
        """Begins a visit that the schedule asks for."""
        # Before the bytes come: until the update is through, its home has those of before it.
        self._wait_for_update(b)
        self._blocks[b].fetch()
        self._on_demand.discard(b)

    def release(self, b: int) -> None:
        """Ends a visit.

        Raises:
            UnsupportedError: the model's own code has changed a weight meanwhile, which would be
                lost.
        """
        # Before the bytes go: an update that works on them here would write into freed memory.
        self._wait_on_device(b)
        block = self._blocks[b]
        # Before the release: afterwards nothing shows what the model's code wrote.
        check_untouched([block])
        block.release()

    def ensure(self, blocks: Sequence[int], *, is_foreseen: bool = False) -> None:
        """Makes sure that the blocks' weights are here. Those that had to be fetched now are
        counted as departures, unless that was foreseen.
        """
        for b in blocks:
            block = self._blocks[b]
            if not block.is_here:
                if not is_foreseen:
                    self._depart(f"block {block.name!r} was needed where the schedule had not fetched it")
                # As for a visit of the schedule, which would have waited too.
                self._wait_for_update(b)
                block.fetch()
                self._on_demand.add(b)
            # Also for a visit that is under way: code is about to read the bytes.
            block.wait()

    def end_on_demand(self) -> None:
        """Releases what came on demand and was not asked for by the schedule since."""
        came = [self._blocks[b] for b in self._on_demand]
        self._on_demand.clear()
        try:
            check_untouched(came)
        finally:
            for block in came:
                block.release()
