"""Caches of keys and values with a home, layer by layer.

In: the cache objects of transformers that pass through a model's calls. Out: the same objects, whose tensors are here while their layer is used.

[Note: caches that travel]
While a program generates, each layer's keys and values are read once a token, in the order of the layers, and then not before the next token. So what
does not fit the share of the limit that caches have goes home as soon as the next layer's are used, and comes back with the layer before its own,
as weights do. Which comes next is learned: it is the one that followed last time. Of those that are here the one used last leaves first: in a round
it is the one that is needed again the latest, so that as many as fit never travel. A cache layer's class is exchanged for one whose `keys` and `values`
fetch what they give, so whoever reads them (attention, beam search that reorders, the user) finds them here. Its storage keeps its identity, as a
block's does: see [Note: visits by storage identity].

[Note: rows at home]
A layer grows by making a new tensor of its old rows (one a token) and the new ones. Its rows of before are at home already, so from its second departure on only
what is new is written: at home it lies row by row, in *pages* of some rows each, of which the last, if it is not full, is written again. It comes back in that
order as well, as a tensor whose strides say so; growing makes an ordinary one of it, and so does reading it for anything else, because kernels may
choose their way of adding up by strides. Rows count as those of before while the tensor's version counter says that nobody wrote to them.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.homes.home import TransferHandle
from memfit.homes.offloaded import HomePool, OffloadedStorage
from memfit.tensors.trees import new_storage, typed_view

PAGE_BYTES = 256 << 10
"""Of rows at home; see [Note: rows at home]. Smaller pages write less again, larger ones are fewer to read."""

_RECORD = "_memfit_record"
_DESCRIBES = "_memfit_describes"
_GROWS = "_memfit_grows"
_TENSORS = ("keys", "values")
# What they tell of a layer follows from shapes and counters.
_DESCRIPTIVE = ("get_seq_length", "get_mask_sizes", "get_max_length", "get_max_cache_shape")
# Layers that hold their keys and values as two tensors, replace them when they change, and hold nothing else of that size.
_KINDS = ("DynamicLayer", "DynamicSlidingWindowLayer")
# The one whose `update` puts new rows behind those that it has.
_GROWING_KIND = "DynamicLayer"
_classes: dict[type, type] = {}


class TravellingCaches:
    """Keeps what caches hold on the device below a limit; see [Note: caches that travel].

    Memory: `limit_bytes`, or the caches of the layer that runs and the one that comes next, whichever is more; what a layer makes of its cache (its
    concatenation with the new token) is the program's own.
    Time: a cache layer that travels is read once a token; of what it grows by, a page is written (see [Note: rows at home]).

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
        self._recent: dict[int, weakref.ref[_Record]] = {}  # here, the one used last at the end
        self._last: weakref.ref[_Record] | None = None
        self._adopted: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._all: weakref.WeakSet[_Record] = weakref.WeakSet()

    @property
    def least_bytes(self) -> int:
        """What is here whatever the limit: the caches of the two layers that have most."""
        return sum(sorted((record.whole_bytes for record in self._all), reverse=True)[:2])

    def look_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes care of the cache objects among a call's arguments. Layers of other kinds (static, quantized, recurrent states) stay on the device."""
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
                record = _Record(layer, self)
                layer.__dict__[_RECORD] = record
                self._all.add(record)
                layer.__class__ = _travelling_class(type(layer))
                if record.nbytes:
                    self.changed(record)

    def use(self, record: _Record) -> None:
        """A layer's tensors are read: they are here when this returns, and what follows is on its way."""
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

    def changed(self, record: _Record) -> None:
        """A layer got other tensors: what rests of the old ones is void, and if there is too much now, others leave."""
        self.here_bytes += record.recount()
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)
        self._touch(record)
        self._make_room(0, record)

    def drop(self, key: int, nbytes: int) -> None:
        """A layer is gone, which had so much here."""
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

    def _fetch(self, record: _Record) -> None:
        read = record.fetch()
        self.moved_bytes[0] += read
        self.here_bytes += read
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)
        if read:
            self._touch(record)

    def _touch(self, record: _Record) -> None:
        self._recent.pop(id(record), None)
        self._recent[id(record)] = weakref.ref(record)

    def _make_room(self, coming_bytes: int, current: _Record) -> None:
        """The ones used last, but for the current one, leave first."""
        if self.here_bytes + coming_bytes <= self.limit_bytes:
            return
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


@dataclass
class _Pages:
    """The rows of a tensor that rest row by row: `rows` of them, `page_rows` a page; `version` of the tensor whose first rows they are."""

    rests: list[OffloadedStorage]
    rows: int
    page_rows: int
    version: object


class _Record:
    """One cache layer's keys and values: where they are."""

    def __init__(self, layer: Any, caches: TravellingCaches) -> None:
        self.layer = weakref.ref(layer)
        self.caches = caches
        self.follower: weakref.ref[_Record] | None = None
        self._rests: dict[
            int, tuple[torch.UntypedStorage, int, OffloadedStorage, object]
        ] = {}  # storage -> (it, bytes, rest, version)
        self._pages: dict[str, _Pages] = {}
        self._growing: set[str] = set()
        self._coming: list[TransferHandle] = []
        self._counted = 0
        self.is_here = True

    @property
    def nbytes(self) -> int:
        """Of what is here."""
        return sum(storage.nbytes() for storage, _ in self._storages())

    @property
    def whole_bytes(self) -> int:
        """Wherever it is."""
        return self.nbytes if self.is_here else self.away_bytes

    @property
    def away_bytes(self) -> int:
        """Of what would have to come."""
        if self.is_here:
            return 0
        own = self._own()
        return sum(nbytes for _, nbytes, _, _ in self._rests.values()) + sum(own[name].nbytes for name in self._pages)

    @property
    def is_coming(self) -> bool:
        """On its way."""
        return bool(self._coming)

    def _own(self) -> dict[str, Any]:
        layer = self.layer()
        return {} if layer is None else layer.__dict__

    def _storages(self) -> Iterator[tuple[torch.UntypedStorage, torch.Tensor]]:
        seen: set[int] = set()
        own = self._own()
        for name in _TENSORS:
            tensor = own.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in seen:
                seen.add(tensor.untyped_storage()._cdata)
                yield tensor.untyped_storage(), tensor

    def recount(self) -> int:
        """By how much more is here than was counted; rests of tensors that are held no more are given up."""
        held = {storage._cdata for storage, _ in self._storages()}
        for key in [key for key in self._rests if key not in held]:
            self._rests.pop(key)[2].free()
        now = self.nbytes if self.is_here else 0
        more, self._counted = now - self._counted, now
        return more

    def replace(self, name: str, new: Any) -> None:
        """Before a tensor takes another's place: whether rows of the old one are rows of the new one as well."""
        own = self._own()
        old = own.get(name)
        pages = self._pages.get(name)
        if own.get(_GROWS) and isinstance(old, torch.Tensor) and _continues(old, new):
            self._growing.add(name)
            if pages is not None and pages.version == _version(old):
                pages.version = _version(new)
                return
        else:
            self._growing.discard(name)
        if pages is not None:
            self._free_pages(name)

    def straighten(self) -> None:
        """Makes tensors that came row by row ordinary ones. Costs one of them twice for a moment."""
        own = self._own()
        for name, pages in self._pages.items():
            old = own[name]
            if not old.is_contiguous():
                own[name] = old.contiguous()
                pages.version = _version(own[name]) if pages.version == _version(old) else None

    def _free_pages(self, name: str) -> None:
        for rest in self._pages.pop(name).rests:
            rest.free()

    def fetch(self) -> int:
        """Begins to bring what is away; its bytes."""
        if self.is_here:
            return 0
        total = 0
        own = self._own()
        for name, pages in self._pages.items():
            away = own[name]
            storage = new_storage(away.nbytes, away.device)
            at = 0
            for start, rest in zip(range(0, pages.rows, pages.page_rows), pages.rests, strict=True):
                self._coming.append(rest.begin_read(storage, at))
                at += min(pages.page_rows, pages.rows - start) * (away.nbytes // pages.rows)
            *outer, rows, width = away.shape
            by_rows = torch.empty((rows, *outer, width), device="meta").movedim(0, -2)
            # Not a view of a view: what the base holds would count as a second holder.
            own[name] = typed_view(storage, 0, away.dtype, tuple(away.shape), by_rows.stride())
            pages.version = _version(own[name])
            total += away.nbytes
        for storage, nbytes, rest, _ in self._rests.values():
            if not storage.nbytes():
                storage.resize_(nbytes)
                self._coming.append(rest.begin_read(storage))
                total += nbytes
        self.is_here = True
        self._counted += total
        return total

    def wait(self) -> None:
        """What was on its way is here."""
        while self._coming:
            self._coming.pop().wait()

    def leave(self, pool: HomePool) -> tuple[int, int]:
        """Sends everything home: (bytes freed, bytes written). Nothing where somebody else holds a tensor's memory."""
        if _is_held(self._own()):
            return 0, 0
        storages = list(self._storages())
        if any(_is_shared(storage) or not storage.resizable() for storage, _ in storages):
            return 0, 0
        written = 0
        paged = {id(tensor): name for name, tensor in self._own().items() if name in self._growing}
        for storage, tensor in storages:
            name = paged.get(id(tensor))
            if name is not None and storage.nbytes() == tensor.nbytes:
                written += self._write_rows(name, tensor, pool)
                continue
            known = self._rests.get(storage._cdata)
            version = _version(tensor)
            if known is not None and known[3] == version:
                continue
            if known is not None:
                known[2].free()
            if storage.nbytes():
                self._rests[storage._cdata] = (storage, storage.nbytes(), OffloadedStorage(pool, storage), version)
                written += storage.nbytes()
        freed = 0
        for storage, _ in storages:
            if storage.nbytes():
                if storage._cdata in self._rests:
                    self._rests[storage._cdata][2].wait()
                freed += storage.nbytes()
                storage.resize_(0)
        self.is_here = freed == 0
        self._counted -= freed
        return freed, written

    def _write_rows(self, name: str, tensor: torch.Tensor, pool: HomePool) -> int:
        """Takes the rows home that are not there; the bytes written. Costs two pages of memory."""
        rows = tensor.shape[-2]
        pages = self._pages.get(name)
        if pages is not None and (pages.version != _version(tensor) or pages.rows > rows):
            self._free_pages(name)
            pages = None
        if pages is None:
            page_rows = max(1, PAGE_BYTES // (tensor.nbytes // rows))
            pages = self._pages[name] = _Pages(rests=[], rows=0, page_rows=page_rows, version=_version(tensor))
        if pages.rows == rows:
            return 0
        whole = pages.rows // pages.page_rows
        for rest in pages.rests[whole:]:
            rest.free()
        del pages.rests[whole:]
        written = 0
        for start in range(whole * pages.page_rows, rows, pages.page_rows):
            page = (
                tensor.narrow(-2, start, min(pages.page_rows, rows - start))
                .movedim(-2, 0)
                .clone(memory_format=torch.contiguous_format)
            )
            if pages.rests:
                pages.rests[-1].wait()
            pages.rests.append(OffloadedStorage(pool, page.untyped_storage()))
            written += page.nbytes
        pages.rests[-1].wait()
        pages.rows = rows
        return written

    def free(self) -> None:
        """Gives up what rests."""
        for name in tuple(self._pages):
            self._free_pages(name)
        for _, _, rest, _ in self._rests.values():
            rest.free()
        self._rests.clear()

    def __del__(self) -> None:
        self.free()
        self.caches.drop(id(self), self._counted)


def _version(tensor: torch.Tensor) -> object:
    """Equal as long as the values are the same; tensors of inference mode do not count their changes."""
    return object() if tensor.is_inference() else tensor._version


def _continues(old: torch.Tensor, new: Any) -> bool:
    """The new tensor can be the old one's rows and some more."""
    if not isinstance(new, torch.Tensor) or old.dim() < 2 or new.dim() < 2:
        return False
    is_alike = (*old.shape[:-2], old.shape[-1], old.dtype) == (*new.shape[:-2], new.shape[-1], new.dtype)
    return is_alike and 0 < old.shape[-2] <= new.shape[-2] and new.numel() > 0


def _is_held(own: dict[str, Any]) -> bool:
    """Somebody beside the cache layer holds one of its tensors: its own entry and the argument of the question are two."""
    return any(own.get(name) is not None and sys.getrefcount(own[name]) > 2 for name in _TENSORS)


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """Another tensor has the same memory: the cache's own tensor, and the Python object of the storage, are two holders."""
    return torch._C._storage_Use_Count(storage._cdata) > 2  # pyright: ignore[reportAttributeAccessIssue], no public reader


def _travelling_class(kind: type) -> type:
    if kind not in _classes:
        members: dict[str, Any] = {name: _fetched(name) for name in _TENSORS}
        members |= {name: _described(getattr(kind, name)) for name in _DESCRIPTIVE if hasattr(kind, name)}
        if kind.__name__ == _GROWING_KIND:
            members["update"] = _grown(kind.update)  # type: ignore[attr-defined]
        # The library registers subclasses by this; ours is no other kind of layer.
        members |= {"_layer_type": None, "__deepcopy__": _deepcopy, "__module__": kind.__module__}
        _classes[kind] = type(kind.__name__, (kind,), members)
    return _classes[kind]


def _plain_class(layer: Any) -> Any:
    """What a layer was before it travelled."""
    return type(layer).__base__


def _fetched(name: str) -> property:
    def read(self: Any) -> Any:
        own = self.__dict__
        record: _Record = own[_RECORD]
        if not own.get(_DESCRIBES):
            record.caches.use(record)
            if not own.get(_GROWS):
                record.straighten()
        return own[name]

    def write(self: Any, value: Any) -> None:
        own = self.__dict__
        record: _Record = own[_RECORD]
        record.replace(name, value)
        own[name] = value
        record.caches.changed(record)

    return property(read, write)


def _described(method: Callable[..., Any]) -> Callable[..., Any]:
    return _flagged(method, _DESCRIBES)


def _grown(method: Callable[..., Any]) -> Callable[..., Any]:
    return _flagged(method, _GROWS)


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
    record: _Record = self.__dict__[_RECORD]
    record.caches.use(record)
    record.straighten()
    plain = _plain_class(self)
    made = plain.__new__(plain)
    memo[id(self)] = made
    for name, value in self.__dict__.items():
        if not name.startswith("_memfit"):
            made.__dict__[name] = copy.deepcopy(value, memo)
    return made
