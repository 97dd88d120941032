"""Caches of keys and values with a home, layer by layer.

In: the cache objects of transformers that pass through a model's calls. Out: the same objects,
whose tensors are here while their layer is used.

[Note: offloaded caches]
While a program generates, each layer's keys and values are read once a token, in the order of the
layers, and then not before the next token. So what does not fit the share of the limit that caches
have goes home as soon as the next layer's are used, and comes back with the layer before its own,
as weights do. Which comes next is learned: it is the one that followed last time. Of those that are
here the one used last leaves first: in a round it is the one that is needed again the latest, so
that as many as fit never leave. A cache layer's class is exchanged for one whose `keys` and
`values` fetch what they give, so whoever reads them (attention, beam search that reorders, the
user) finds them here. Its storage keeps its identity, as a block's does: see [Note: visits by
storage identity].
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

from memfit.homes.offloaded import HomePool
from memfit.huggingface.cache_records import GROWS, TENSORS, CacheRecord

_RECORD = "_memfit_record"
_DESCRIBES = "_memfit_describes"
# What they tell of a layer follows from shapes and counters.
_DESCRIPTIVE = ("get_seq_length", "get_mask_sizes", "get_max_length", "get_max_cache_shape")
# Layers that hold their keys and values as two tensors, replace them when they change, and hold
# nothing else of that size.
_KINDS = ("DynamicLayer", "DynamicSlidingWindowLayer")
# The one whose `update` puts new rows behind those that it has.
_GROWING_KIND = "DynamicLayer"
_classes: dict[type, type] = {}


class OffloadedCaches:
    """Keeps what caches hold on the device below a limit; see [Note: offloaded caches].

    Memory: `limit_bytes`, or the caches of the layer that runs and the one that comes next,
    whichever is more; what a layer makes of its cache (its concatenation with the new token) is the
    program's own.
    Time: a cache layer that is offloaded is read once a token; of what it grows by, a page is
    written (`cache_records`, [Note: rows at home]).

    Args:
        pool: makes homes of what leaves.
        limit_bytes: of keys and values that are here.

    Attributes:
        here_bytes, peak_bytes: of keys and values that are here, now and at most.
        moved_bytes: [read, written] so far.
    """

    def __init__(self, pool: HomePool, limit_bytes: int) -> None:
        self._pool = pool
        self.limit_bytes = limit_bytes
        self.here_bytes = 0
        self.peak_bytes = 0
        self.moved_bytes = [0, 0]
        self._recent: dict[int, weakref.ref[CacheRecord]] = {}  # here, the one used last at the end
        self._last: weakref.ref[CacheRecord] | None = None
        self._adopted: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._all: weakref.WeakSet[CacheRecord] = weakref.WeakSet()

    @property
    def least_bytes(self) -> int:
        """Bytes on the device whatever the limit: the caches of the two layers that have most."""
        return sum(sorted((record.whole_bytes for record in self._all), reverse=True)[:2])

    def look_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes care of the cache objects among a call's arguments.

        Layers of other kinds (static, quantized, recurrent states) stay on the device.
        """
        library: Any = sys.modules.get("transformers.cache_utils")
        if library is None:
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, library.EncoderDecoderCache):
                self._adopt(value.self_attention_cache)
                self._adopt(value.cross_attention_cache)
            elif isinstance(value, library.Cache):
                self._adopt(value)

    def _adopt(self, cache: Any) -> None:
        known = self._adopted.get(id(cache))
        count = len(cache.layers)
        if known is not None and known[0]() is cache and known[1] == count:
            return
        self._adopted = {key: entry for key, entry in self._adopted.items() if entry[0]() is not None}
        self._adopted[id(cache)] = (weakref.ref(cache), count)
        for layer in cache.layers:
            if _RECORD not in layer.__dict__ and type(layer).__name__ in _KINDS:
                record = CacheRecord(layer, self)
                layer.__dict__[_RECORD] = record
                self._all.add(record)
                layer.__class__ = _offloaded_class(type(layer))
                if record.nbytes:
                    self.changed(record)

    def use(self, record: CacheRecord) -> None:
        """A layer's tensors are read: they are here when this returns, and what follows is on its
        way.
        """
        last = None if self._last is None else self._last()
        if last is not record:
            if last is not None:
                last.follower = weakref.ref(record)
            self._last = weakref.ref(record)
        if not record.is_here:
            self._make_room(record.away_bytes, record)
        self._fetch(record)
        record.wait()
        self._touch(record)
        follower = None if record.follower is None else record.follower()
        if follower is not None and not follower.is_here and follower is not record:
            self._make_room(follower.away_bytes, record)
            self._fetch(follower)

    def changed(self, record: CacheRecord) -> None:
        """A layer got other tensors: what rests of the old ones is void, and if there is too much
        now, others leave.
        """
        more = record.recount()  # apart: it frees things, whose finalizers count here as well
        self.here_bytes += more
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)
        self._touch(record)
        self._make_room(0, record)

    def drop(self, key: int, nbytes: int) -> None:
        """Counts a layer off that is gone, which had so much here. May run in a finalizer."""
        self.here_bytes -= nbytes
        self._recent.pop(key, None)

    def close(self) -> None:
        """Brings everything back that somebody still holds; the layers are ordinary ones again."""
        for record in tuple(self._all):
            layer = record.layer()
            if layer is not None:
                self._fetch(record)
                record.wait()
                record.straighten()
                layer.__class__ = _plain_class(layer)
                del layer.__dict__[_RECORD]
            record.free()
        self._all.clear()

    def _fetch(self, record: CacheRecord) -> None:
        read = record.fetch()
        self.moved_bytes[0] += read
        self.here_bytes += read
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)
        if read:
            self._touch(record)

    def _touch(self, record: CacheRecord) -> None:
        self._recent.pop(id(record), None)
        self._recent[id(record)] = weakref.ref(record)

    def _make_room(self, coming_bytes: int, current: CacheRecord) -> None:
        """Sends layers home, those used last first, until there is room; never the current one."""
        if self.here_bytes + coming_bytes <= self.limit_bytes:
            return
        # A copy: a layer that is collected meanwhile takes itself out (`drop`).
        for key, reference in reversed(tuple(self._recent.items())):
            record = reference()
            if record is None or record is current or record.is_coming:
                continue
            freed, written = record.leave(self._pool)
            self.here_bytes -= freed
            self.moved_bytes[1] += written
            if not record.is_here:
                self._recent.pop(key, None)
            if self.here_bytes + coming_bytes <= self.limit_bytes:
                return


def _offloaded_class(kind: type) -> type:
    if kind not in _classes:
        members: dict[str, Any] = {name: _fetched(name) for name in TENSORS}
        members |= {name: _described(getattr(kind, name)) for name in _DESCRIPTIVE if hasattr(kind, name)}
        if kind.__name__ == _GROWING_KIND:
            members["update"] = _grown(kind.update)  # type: ignore[attr-defined]
        # The library registers subclasses by this; ours is no other kind of layer.
        members |= {"_layer_type": None, "__deepcopy__": _deepcopy, "__module__": kind.__module__}
        _classes[kind] = type(kind.__name__, (kind,), members)
    return _classes[kind]


def _plain_class(layer: Any) -> Any:
    """Returns the class that a layer had before."""
    return type(layer).__base__


def _fetched(name: str) -> property:
    def read(self: Any) -> Any:
        own = self.__dict__
        record: CacheRecord = own[_RECORD]
        if not own.get(_DESCRIBES):
            record.caches.use(record)
            if not own.get(GROWS):
                record.straighten()
        return own[name]

    def write(self: Any, value: Any) -> None:
        own = self.__dict__
        record: CacheRecord = own[_RECORD]
        record.replace(name, value)
        own[name] = value
        record.caches.changed(record)

    return property(read, write)


def _described(method: Callable[..., Any]) -> Callable[..., Any]:
    return _flagged(method, _DESCRIBES)


def _grown(method: Callable[..., Any]) -> Callable[..., Any]:
    return _flagged(method, GROWS)


def _flagged(method: Callable[..., Any], flag: str) -> Callable[..., Any]:
    """The method, with a note on the layer while it runs."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        before = own.get(flag, False)
        own[flag] = True
        try:
            return method(self, *args, **kwargs)
        finally:
            own[flag] = before

    return run


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """An ordinary layer."""
    record: CacheRecord = self.__dict__[_RECORD]
    record.caches.use(record)
    record.straighten()
    plain = _plain_class(self)
    made = plain.__new__(plain)
    memo[id(self)] = made
    for name, value in self.__dict__.items():
        if not name.startswith("_memfit"):
            made.__dict__[name] = copy.deepcopy(value, memo)
    return made
