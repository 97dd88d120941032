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
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn

from memfit.core.errors import UnsupportedError
from memfit.core.process_state import uncounted
from memfit.homes.home import TransferHandle
from memfit.homes.offloaded import HomePool, OffloadedStorage
from memfit.tensors.trees import modules_of, new_storage, typed_view

# One cache layer's keys and values: what is on the device, what rests at home, and the way between.
#
# In: a layer of a transformers cache, and homes for storages. Out: its tensors fetched and sent
# home.
#
# [Note: rows at home]
# A layer grows by making a new tensor of its old rows (one a token) and the new ones. Its rows of
# before are at home already, so from the second time that it leaves on only what is new is written:
# at home it lies row by row, in *pages* of some rows each, of which the last, if it is not full, is
# written again. It comes back in that order as well, as a tensor whose strides say so; growing
# makes an ordinary one of it, and so does reading it for anything else, because kernels may choose
# their way of adding up by strides. Rows count as those of before while the tensor's version
# counter says that nobody wrote to them.

PAGE_BYTES = 256 << 10
"""Size of a page of rows at home; see [Note: rows at home].

Smaller pages write less again, larger ones are fewer to read.
"""

TENSORS = ("keys", "values")
"""Attributes of a cache layer that hold its tensors."""
GROWS = "_memfit_grows"
"""Attribute of a layer while its `update` runs."""


class Caches(Protocol):
    """The owner of records; `OffloadedCaches`."""

    def use(self, record: CacheRecord) -> None:
        """Fetches a layer's tensors and waits for them."""
        ...

    def changed(self, record: CacheRecord) -> None:
        """Counts a layer's new tensors."""
        ...

    def drop(self, key: int, nbytes: int) -> None:
        """Forgets a layer that is gone."""
        ...


@dataclass
class _Pages:
    """The rows of a tensor that rest row by row: `rows` of them, `page_rows` a page.

    `version` of the tensor whose first rows they are.
    """

    rests: list[OffloadedStorage]
    rows: int
    page_rows: int
    version: object


class CacheRecord:
    """The keys and values of one cache layer, here or at home."""

    def __init__(self, layer: Any, caches: Caches) -> None:
        self.layer = weakref.ref(layer)
        self.caches = caches
        self.follower: weakref.ref[CacheRecord] | None = None
        # By address of the storage object: it, its bytes, where they rest, the tensor's version.
        self._rests: dict[int, tuple[torch.UntypedStorage, int, OffloadedStorage, object]] = {}
        self._pages: dict[str, _Pages] = {}
        self._growing: set[str] = set()
        self._coming: list[TransferHandle] = []
        self._counted = 0
        self.is_here = True

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's tensors that are on the device."""
        return sum(storage.nbytes() for storage, _ in self._storages())

    @property
    def whole_bytes(self) -> int:
        """Bytes of the layer's tensors, wherever they are."""
        return self.nbytes if self.is_here else self.away_bytes

    @property
    def away_bytes(self) -> int:
        """Bytes that must be read to bring the layer to the device."""
        if self.is_here:
            return 0
        own = self._own()
        return sum(nbytes for _, nbytes, _, _ in self._rests.values()) + sum(own[name].nbytes for name in self._pages)

    @property
    def is_coming(self) -> bool:
        """True while reads are under way."""
        return bool(self._coming)

    def _own(self) -> dict[str, Any]:
        layer = self.layer()
        return {} if layer is None else layer.__dict__

    def _storages(self) -> Iterator[tuple[torch.UntypedStorage, torch.Tensor]]:
        seen: set[int] = set()
        own = self._own()
        for name in TENSORS:
            tensor = own.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in seen:
                seen.add(tensor.untyped_storage()._cdata)
                yield tensor.untyped_storage(), tensor

    def recount(self) -> int:
        """Frees what rests of tensors that are gone.

        Returns by how much more is here than was counted.
        """
        held = {storage._cdata for storage, _ in self._storages()}
        for key in [key for key in self._rests if key not in held]:
            self._rests.pop(key)[2].free()
        now = self.nbytes if self.is_here else 0
        more, self._counted = now - self._counted, now
        return more

    def replace(self, name: str, new: Any) -> None:
        """Learns, before a tensor is replaced, whether rows of the old one are rows of the new one
        as well.
        """
        own = self._own()
        old = own.get(name)
        pages = self._pages.get(name)
        if own.get(GROWS) and isinstance(old, torch.Tensor) and _continues(old, new):
            self._growing.add(name)
            if pages is not None and pages.version == _version(old):
                pages.version = _version(new)
                return
        else:
            self._growing.discard(name)
        if pages is not None:
            self._free_pages(name)

    def straighten(self) -> None:
        """Makes tensors that came row by row ordinary ones.

        Costs one of them twice for a moment.
        """
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
        """Starts to read what is away; returns its bytes."""
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
        """Waits for the reads under way."""
        while self._coming:
            self._coming.pop().wait()

    def leave(self, pool: HomePool) -> tuple[int, int]:
        """Sends everything home: (bytes freed, bytes written).

        Nothing where somebody else holds a tensor's memory.
        """
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
                    # The write reads this memory: it may be given up only when the write has ended.
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
            # At most two pages of copies at once; each is dropped only when it has been written.
            if pages.rests:
                pages.rests[-1].wait()
            pages.rests.append(OffloadedStorage(pool, page.untyped_storage()))
            written += page.nbytes
        pages.rests[-1].wait()
        pages.rows = rows
        return written

    def free(self) -> None:
        """Frees what rests at home."""
        for name in tuple(self._pages):
            self._free_pages(name)
        for _, _, rest, _ in self._rests.values():
            rest.free()
        self._rests.clear()

    def __del__(self) -> None:
        self.free()
        self.caches.drop(id(self), self._counted)


def _version(tensor: torch.Tensor) -> object:
    """Equal as long as the values are the same.

    Tensors of inference mode do not count their changes.
    """
    return object() if tensor.is_inference() else tensor._version


def _continues(old: torch.Tensor, new: Any) -> bool:
    """The new tensor can be the old one's rows and some more."""
    if not isinstance(new, torch.Tensor) or old.dim() < 2 or new.dim() < 2:
        return False
    is_alike = (*old.shape[:-2], old.shape[-1], old.dtype) == (*new.shape[:-2], new.shape[-1], new.dtype)
    return is_alike and 0 < old.shape[-2] <= new.shape[-2] and new.numel() > 0


def _is_held(own: dict[str, Any]) -> bool:
    """Somebody beside the cache layer holds one of its tensors: its own entry and the argument of
    the question are two.
    """
    return any(own.get(name) is not None and sys.getrefcount(own[name]) > 2 for name in TENSORS)


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """Another tensor has the same memory: the cache's own tensor, and the Python object of the
    storage, are two holders.
    """
    return torch._C._storage_Use_Count(storage._cdata) > 2  # pyright: ignore[reportAttributeAccessIssue], no public reader


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
    written ([Note: rows at home]).

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


# Key-value caches of transformers that keep nothing, for training.
#
# In: a model whose configuration says `use_cache`, as transformers' default is. Out: a context in
# which the caches that its forward makes hand out what they are given and hold none of it.
#
# [Note: caches in training]
# Transformers' decoders make a cache for generation even while they train. It holds all keys and
# values until the end of the forward, and a layer that has appended to it cannot run again. Yet
# without it the numbers are others, by a rounding: what a cache hands out is a copy (`torch.cat`
# with nothing), and products of copies add in another order than those of views (GPT-2 with dropout
# or eager attention, T5). A cache that copies and forgets gives the user's numbers, holds nothing,
# and may be asked again in recompute.
#
# Where a model does more with its caches than to update them, or keeps states in its modules
# instead (RecurrentGemma), caches are switched off, as transformers does it under gradient
# checkpointing. Where the loss itself hands a cache to a second forward, it is a real one, and its
# layers run once.


class CacheUse(Enum):
    """Treatment of the caches that a model makes in training."""

    NO_OP = "no-op"
    OFF = "off"
    REAL = "real"


class HandedBackError(UnsupportedError):
    """A cache that kept nothing was given to another forward."""


@dataclass
class CacheChoice:
    """Treatment that was found to work with a model: once, at its first trace."""

    use: CacheUse = CacheUse.NO_OP
    is_decided: bool = False


class _Making(threading.local):
    """Counts this thread's nested contexts of no-op caches, and the caches made in them."""

    depth = 0
    made = 0


_making = _Making()


@contextmanager
def caches_in_training(model: nn.Module, use: CacheUse) -> Iterator[None]:
    """Caches that the model's forward makes are as `use` says; after the context all is as it was.

    Raises:
        HandedBackError: from a forward that gets a cache of an earlier one, which kept nothing.
    """
    utils = sys.modules.get("transformers.cache_utils")
    if utils is None or use is CacheUse.REAL or not (configs := _caching(model)):
        yield
        return
    if use is CacheUse.OFF or not hasattr(utils, "DynamicLayer"):
        for config in configs:
            config.use_cache = False
        try:
            yield
        finally:
            for config in configs:
                config.use_cache = True
        return
    _install(utils)
    with ExitStack() as stack:
        for outer in _outermost(model):
            stack.callback(outer.register_forward_pre_hook(_refuse_noop, with_kwargs=True).remove)
        _making.depth += 1
        try:
            yield
        finally:
            _making.depth -= 1


def asks_for_caches(model: nn.Module) -> bool:
    """A configuration in the model does."""
    return "transformers.cache_utils" in sys.modules and bool(_caching(model))


@dataclass
class Noted:
    """Observations of what a loss does with caches.

    Attributes:
        made: caches that keep nothing.
        keeps_elsewhere: modules hold tensors, as attributes of their own, that they did not hold
            before.
    """

    made: int = 0
    keeps_elsewhere: bool = False

    def watching(self, loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """The loss; what it does is noted."""

        def watched(model: nn.Module, batch: Any) -> Any:
            with uncounted():
                before, made = _kept_by(model), _making.made
            result = loss(model, batch)
            with uncounted():
                self.made += _making.made - made
                self.keeps_elsewhere |= bool(_kept_by(model) - before)
            return result

        return watched


def _kept_by(model: nn.Module) -> set[tuple[str, str]]:
    return {
        (where, name)
        for where, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _caching(model: nn.Module) -> list[Any]:
    # Asked only where there is one: a module answers for what it does not have at length.
    found: list[Any] = [
        getattr(module, "config", None)
        for module in modules_of(model)
        if "config" in vars(module) or hasattr(type(module), "config")
    ]
    return list({id(config): config for config in found if getattr(config, "use_cache", None) is True}.values())


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Models of transformers that are not parts of others."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return
    pending = [model]
    while pending:
        module = pending.pop()
        if isinstance(module, base):
            yield module
        else:
            pending += module.children()


def _refuse_noop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    # None: a hook before it in the same call has removed it, and torch forgot how to call it.
    for value in (*args, *(kwargs or {}).values()):
        caches = (value, getattr(value, "self_attention_cache", None))
        if any(getattr(cache, "keeps_nothing", False) for cache in caches):
            raise HandedBackError(
                "a key-value cache of one forward was given to another, but the caches that a model makes in training keep nothing: make one yourself "
                "(transformers.DynamicCache) outside of the loss function, or switch caches off (config.use_cache = False)"
            )


@functools.cache
def _install(cache_utils: Any) -> None:
    """Has transformers' caches look, when they are made, whether this thread trains.

    Once a process: what others make is as ever.
    """

    class NoOp:
        """Hands out what it is given, as the first update of a real layer does, and keeps none of
        it.
        """

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return _copied(key_states), _copied(value_states)

    class NoOpLayer(NoOp, cache_utils.DynamicLayer):
        pass

    class NoOpSlidingLayer(NoOp, cache_utils.DynamicSlidingWindowLayer):
        def __init__(self, sliding_window: int) -> None:
            cache_utils.DynamicSlidingWindowLayer.__init__(self, sliding_window)

    def without_memory(layer: Any) -> Any:
        if type(layer) is cache_utils.DynamicLayer:
            return NoOpLayer()
        if type(layer) is cache_utils.DynamicSlidingWindowLayer:
            return NoOpSlidingLayer(sliding_window=layer.sliding_window)
        return layer

    plain_cache, plain_pair = cache_utils.DynamicCache.__init__, cache_utils.EncoderDecoderCache.__init__

    @functools.wraps(plain_cache)
    def make_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_cache(self, *args, **kwargs)
        if not _making.depth or any(getattr(layer, "is_initialized", False) for layer in self.layers):
            return
        self.layers = [without_memory(layer) for layer in self.layers]
        if self.layer_class_to_replicate is cache_utils.DynamicLayer:
            self.layer_class_to_replicate = NoOpLayer
        self.keeps_nothing = True
        _making.made += 1

    @functools.wraps(plain_pair)
    def make_pair(self: Any, *caches: Any) -> None:
        plain_pair(self, *caches)
        if getattr(self.cross_attention_cache, "keeps_nothing", False):
            self.is_updated = _NeverNoted(self.is_updated)

    cache_utils.DynamicCache.__init__ = make_cache
    cache_utils.EncoderDecoderCache.__init__ = make_pair


class _NeverNoted(dict[int, bool]):
    """Which layers have the encoder's keys already: none ever does."""

    def __setitem__(self, layer: int, value: bool) -> None:
        pass


def _copied(states: torch.Tensor) -> torch.Tensor:
    """As the first update of a real cache hands it out."""
    return torch.cat([torch.tensor([], dtype=states.dtype, device=states.device), states], dim=-2)
