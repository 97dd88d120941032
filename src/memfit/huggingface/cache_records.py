"""One cache layer's keys and values: what is on the device, what rests at home, and the way
between.

In: a layer of a transformers cache, and homes for storages. Out: its tensors fetched and sent home.

[Note: rows at home]
A layer grows by making a new tensor of its old rows (one a token) and the new ones. Its rows of
before are at home already, so from the second time that it leaves on only what is new is written:
at home it lies row by row, in *pages* of some rows each, of which the last, if it is not full, is
written again. It comes back in that order as well, as a tensor whose strides say so; growing makes
an ordinary one of it, and so does reading it for anything else, because kernels may choose their
way of adding up by strides. Rows count as those of before while the tensor's version counter says
that nobody wrote to them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.homes.home import TransferHandle
from memfit.homes.offloaded import HomePool, OffloadedStorage
from memfit.tensors.trees import new_storage, typed_view

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
