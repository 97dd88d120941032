"""Forward passes outside of a step: weights come when a module is called and go when it has run, the next ones on their way meanwhile.

In: call sites and their blocks. Out: hooks that fetch, wait and release; nothing is planned and nothing is saved for backward.

[Note: two buffers]
While a site runs, the blocks that the next one needs arrive. Which is next is learned: a program that generates tokens calls the same sites in the same order
again and again, so it is the one that followed last time. A wrong guess costs a read; the blocks that came in vain go before others are fetched. So at any
time the weights of two successive sites are here at most, whatever the depth, beside those that live on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from memfit.runtime.sites import Site, SiteHooks
from memfit.runtime.weights import BlockWeights


class WeightStream:
    """Streams blocks through the sites of a model until it is closed; a context manager.

    Memory: the blocks of two successive sites. See [Note: two buffers].

    Args:
        sites: the call sites; hooks are on them until `close`.
        blocks: by the sites' block indices, moved in.
        observe: is called between two visits (to let an interrupt through, say).

    Attributes:
        at: which module runs or ran last, for messages.
    """

    def __init__(
        self, sites: Sequence[Site], blocks: Sequence[BlockWeights], *, observe: Callable[[], None] | None = None
    ) -> None:
        self._sites = tuple(sites)
        self._blocks = tuple(blocks)
        self._observe = observe
        self._open: list[int] = []
        self._last: int | None = None
        self._follower: dict[int, int] = {}
        self._visiting: set[int] = set()
        self.at = "the beginning"
        self._hooks = SiteHooks(self._sites, self)

    def enter(self, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `CallObserver`."""
        del args, kwargs
        self._open.append(site)
        if len(self._open) > 1:
            return  # inside another call, whose blocks include its own
        if self._observe is not None:
            self._observe()
        if self._last is not None:
            self._follower[self._last] = site
        self._last = site
        self.at = f"module {self._sites[site].name!r}"
        needed = self._travelling(site)
        self._release(self._visiting - needed)
        self._fetch(needed)
        for b in sorted(needed):
            self._blocks[b].wait()
        follower = self._follower.get(site)
        if follower is not None:
            self._fetch(self._travelling(follower))

    def leave(self, site: int, output: Any) -> None:
        """See `CallObserver`."""
        del output
        if not self._open or self._open[-1] != site:
            return
        self._open.pop()
        if not self._open:
            follower = self._follower.get(site)
            coming = set[int]() if follower is None else self._travelling(follower)
            self._release(self._visiting - coming)

    def close(self) -> None:
        """Takes the hooks off and ends all visits."""
        self._hooks.remove()
        self._open.clear()
        self._release(set(self._visiting))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _travelling(self, site: int) -> set[int]:
        return {b for b in self._sites[site].blocks if self._blocks[b].travels}

    def _fetch(self, blocks: set[int]) -> None:
        for b in sorted(blocks):
            if not self._blocks[b].is_here:
                self._visiting.add(b)
                self._blocks[b].fetch()

    def _release(self, blocks: set[int]) -> None:
        for b in sorted(blocks):
            self._visiting.discard(b)
            self._blocks[b].release()
