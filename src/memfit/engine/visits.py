"""Weights that come and go while a schedule runs: as it says, and on demand where the model does
what its trace did not foresee.

In: the blocks, the sites, when their updates are through. Out: weights that are there when code
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.core.errors import UnsupportedError
from memfit.homes.weights import BlockWeights, check_untouched


class Visits:
    """Fetches and releases for one engine. A block whose update is under way is waited for before
    it moves.

    Args:
        blocks: by the schedule's block index.
        settle: returns when a block's update is through, if one is under way.
        settle_here: the same of an update that works on the block's device bytes; one on the host
            goes on.
        depart: is told what the schedule did not foresee.
    """

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        settle: Callable[[int], None],
        depart: Callable[[str], None],
        settle_here: Callable[[int], None] | None = None,
    ) -> None:
        self._blocks = tuple(blocks)
        self._settle = settle
        self._settle_here = settle if settle_here is None else settle_here
        self._depart = depart
        self._on_demand: set[int] = set()
        self._versions: dict[int, tuple[int, ...]] = {}

    def fetch(self, b: int) -> None:
        """Begins a visit that the schedule asks for."""
        self._settle(b)
        self._begin(b)
        self._on_demand.discard(b)

    def release(self, b: int) -> None:
        """Ends a visit.

        Raises:
            UnsupportedError: the model's own code has changed a weight meanwhile, which would be
                lost.
        """
        self._settle_here(b)
        block = self._blocks[b]
        check_untouched([block])
        before = self._versions.pop(b, None)
        if before is not None and block.travels and block.versions() != before:
            name = next(s.name for s, old in zip(block.slots, before, strict=True) if s.parameter._version != old)
            raise UnsupportedError(
                f"the model's code changed the weight {name!r} in place while it visited; the change would be lost, since only updates go home. Change weights "
                f"between steps, inside `with job.weights({block.name!r}):`"
            )
        block.release()

    def _begin(self, b: int) -> None:
        block = self._blocks[b]
        if not block.is_here:
            self._versions[b] = block.versions()
        block.fetch()

    def ensure(self, blocks: Sequence[int], *, is_foreseen: bool = False) -> None:
        """The blocks' weights are here when this returns; those that had to be fetched now are
        counted, unless that was to be expected.
        """
        for b in blocks:
            block = self._blocks[b]
            if not block.is_here:
                if not is_foreseen:
                    self._depart(f"block {block.name!r} was needed where the schedule had not fetched it")
                self._settle(b)
                self._begin(b)
                self._on_demand.add(b)
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
