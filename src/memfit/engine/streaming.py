"""Streaming of weights outside of a step: they are fetched when a module is called and released
when it has run, while the next ones are prefetched.

In: call sites and their blocks. Out: hooks that fetch, wait and release; nothing is planned and
nothing is saved for backward.

[Note: two buffers]
While a site runs, the blocks that the next one needs arrive. Which is next is learned: a program
that generates tokens calls the same sites in the same order again and again, so it is the one that
followed last time. A wrong guess costs a read; the blocks that came in vain go before others are
fetched. So at any time the weights of two successive sites are here at most, whatever the depth,
beside those that live on the device.

[Note: requests together]
Several requests run as coroutines that pause at the entry of each site, as microbatches do. The
site at which most of them wait is next, and all of those pass it before its weights go: weights
travel once for all of them, though each request keeps its own shapes, its own cache and its own
random numbers, and computes what it computes alone. Those that fall out of step (another number of
layers passed, another end) are caught up with, since more wait where they come next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from io import BytesIO
from types import TracebackType
from typing import Any, Self

from memfit.engine.caches import OffloadedCaches
from memfit.engine.coroutines import Coroutine, can_pause
from memfit.engine.modules import ModuleNotes
from memfit.engine.sites import Site, SiteHooks
from memfit.homes.weights import BlockWeights, check_untouched
from memfit.tensors.one_call import OneCall
from memfit.tensors.random_streams import draw_streams


class WeightStream:
    """Streams blocks through the sites of a model until it is closed; a context manager.

    Memory: the blocks of two successive sites. See [Note: two buffers].

    Args:
        sites: the call sites; hooks are on them until `close`.
        blocks: by the sites' block indices, moved in.
        calls: guard of what the weights are of: a site's call is a call there.
        caches: of keys and values; they are found among the sites' arguments.
        observe: called between two visits (to deliver an interrupt, for example).

    Attributes:
        at: name of the module that runs or ran last, for messages.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        blocks: Sequence[BlockWeights],
        *,
        calls: OneCall,
        caches: OffloadedCaches | None = None,
        observe: Callable[[], None] | None = None,
    ) -> None:
        self._caches = caches
        self._running: Coroutine | None = None
        self._is_first = True
        self._more_wait = False
        self._sites = tuple(sites)
        self._blocks = tuple(blocks)
        self._observe = observe
        self._open: list[int] = []
        self._calls = calls
        self._token = BytesIO()
        self._last: int | None = None
        self._follower: dict[int, int] = {}
        self._visiting: set[int] = set()
        self.at = "the beginning"
        self._hooks = SiteHooks(self._sites, self)

    def enter(self, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `CallObserver`."""
        if self._caches is not None:
            self._caches.look_for(args, kwargs)
        if self._calls.is_mine:
            self._open.append(site)
            return  # inside another call, whose blocks include its own
        running = self._running
        if running is not None and running.is_current and can_pause():
            # Before the site's blocks are asked for: which site is next is decided when all
            # requests wait at one.
            running.pause(site)
        self._token = self._calls.enter(f"a call of {self._sites[site].name or 'the model'!r}")
        self._open.append(site)
        if self._observe is not None:
            self._observe()
        if self._last is not None and self._is_first:
            self._follower[self._last] = site
        self._last = site
        self.at = f"module {self._sites[site].name!r}"
        needed = self._travelling(site)
        if self._is_first:  # for the others of a group, what is next is on its way already
            # Before the fetch: a wrong guess goes before others come, so that two sites' weights
            # are the most.
            self._release(self._visiting - needed)
        self._fetch(needed)
        for b in sorted(needed):
            # Of this site alone: the next one's are asked for behind it and come while it runs.
            self._blocks[b].wait()
        follower = self._follower.get(site)
        if follower is not None:
            self._fetch(self._travelling(follower))

    def leave(self, site: int, output: Any) -> None:
        """See `CallObserver`."""
        del output
        if not self._open or self._open[-1] != site or not self._calls.is_mine:
            return
        # Inner calls first: only the outermost one's end gives anything up.
        self._open.pop()
        if self._open:
            return
        try:
            if not self._more_wait:
                follower = self._follower.get(site)
                coming = set[int]() if follower is None else self._travelling(follower)
                self._release(self._visiting - coming)
        finally:
            self._token.close()

    def together(
        self, requests: Sequence[Callable[[], Any]], *, device_types: tuple[str, ...], modules: ModuleNotes
    ) -> list[Any]:
        """Runs functions that call the model, so that all pass one site before any enters the next;
        see
        [Note: requests together].

        Args:
            requests: each without arguments. With more than one, the m-th draws its random numbers
                as `microbatch_streams` has it.
            device_types: devices whose thread state each request has for itself.
            modules: of the model.

        Returns:
            Their results, in order. An error of one ends all.
        """
        modules.begin_run(learns=True)
        streams = draw_streams(len(requests)) if requests else []
        coroutines = [
            Coroutine(number, run, stream=stream, device_types=device_types, modules=modules)
            for number, (run, stream) in enumerate(zip(requests, streams, strict=True))
        ]
        try:
            for one in coroutines:
                self._resume(one)
            while waiting := [one for one in coroutines if not one.is_finished]:
                counts = Counter(one.call for one in waiting)
                site = max(counts, key=lambda s: (counts[s], -s if s is not None else 0))
                group = [one for one in waiting if one.call == site]
                for number, one in enumerate(group):
                    # Read by `enter` and `leave` inside the coroutine: the first of a group
                    # fetches, the last one releases.
                    self._is_first, self._more_wait = number == 0, number + 1 < len(group)
                    self._resume(one)
            return [one.take_result() for one in coroutines]
        finally:
            self._is_first, self._more_wait = True, False
            for one in coroutines:
                # Also after an error: a paused request holds its arguments, its caches and its
                # modes.
                one.cancel()

    def _resume(self, coroutine: Coroutine) -> None:
        self._running = coroutine
        try:
            coroutine.resume()
        finally:
            self._running = None

    def close(self) -> None:
        """Removes the hooks and ends all visits."""
        # First: what ends below must not be called any more.
        self._hooks.remove()
        self._open.clear()
        self._token.close()
        if self._caches is not None:
            self._caches.close()
        self._release(set(self._visiting))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            # those that stay; the others were looked at when they left
            check_untouched(self._blocks)

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
            try:
                check_untouched([self._blocks[b]])
            finally:
                # Also where the check fails: its bytes would stay for good.
                self._blocks[b].release()
