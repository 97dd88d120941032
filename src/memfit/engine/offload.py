"""Saved tensors that leave the device and come back.

In: tensors to register, and the actions offload, drop and reload. Out: the same bytes when backward
asks.

[Note: moved storages]
A moved storage is one storage at one version. Autograd saves many views of few storages, some of
them in several calls: each is moved once. Its life:
    here      the device holds the bytes; nothing was asked for
    leaving   the home is being written; the device still holds the bytes
    away      `drop` waited for the write and gave up the storage (others who hold it keep it
              alive, which is theirs to answer for)
    coming    `reload` made a fresh storage, which is being filled
    back      the first unpack waited for that

The moved storage is held by the handles in autograd's graph (or by held arguments) and by nobody
else. When the last handle dies, the moved storage dies, and with it the fresh storage and the room
at home. A moved storage's handle refuses what was written over its elements after it was saved; see
[Note: writes are known by storage].
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from memfit.core.errors import MemfitError, UnsupportedError, UsageError
from memfit.core.shape import MINIMUM_LEAVING_BYTES, is_movable, leaves
from memfit.core.tiers import Tier
from memfit.engine.writes import (
    NO_VERSION,
    ORDINARY,
    ByteRange,
    Geometry,
    Watched,
    Writes,
    Written,
    check_unchanged,
    plain_storage,
    raise_changed,
    version_of,
)
from memfit.homes.home import TransferHandle
from memfit.homes.offloaded import HomePool, OffloadedStorage
from memfit.tensors.trees import new_storage

# Handles that autograd holds in place of tensors it saved.
#
# In: one saved tensor. Out: an object with `unpack`, which gives it back.
#
# [Note: who holds whom]
# Everything here dies by reference counting, as plain autograd's saved tensors do. Autograd's node
# holds a handle and the function `unpack` below, which is nobody's method. A handle holds what can
# make its tensor again (a segment, or a moved storage). These know their handles by weak reference
# only, and never hold an output of the call or a tensor with a graph. So when a node lets go of
# what it saved, the handle dies, and with it the one strong reference to the tensor: memory falls
# at the same instant as in plain PyTorch.


class Handle(Protocol):
    """One saved tensor."""

    def unpack(self) -> torch.Tensor:
        """The tensor; may be asked more than once."""
        ...


def unpack(handle: Handle) -> torch.Tensor:
    """The unpack hook of every frame."""
    return handle.unpack()


def refuse_again(place: str) -> UnsupportedError:
    """The error for a backward that comes after the call's backward was declared over."""
    return UnsupportedError(
        f"{place}: backward asks again for a tensor whose memory was given up when the call's backward was over. "
        "Under a memory plan a graph is walked once; plan saved='keep' for this call, for retain_graph=True and a second backward."
    )


class KeptHandle:
    """A tensor that stays: a weight, or one too small or too special to move.

    Args:
        tensor: as autograd packed it; its graph is not held.
        place: the site, for messages.
    """

    __slots__ = ("__weakref__", "_place", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, place: str) -> None:
        self._tensor = tensor.detach()
        self._version = version_of(tensor)
        self._place = place

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is kept."""
        return self._tensor

    def unpack(self) -> torch.Tensor:
        """See `Handle`. Raises RuntimeError where autograd's own check would."""
        check_unchanged(self._tensor, self._version, self._place)
        return self._tensor


class Remade(Protocol):
    """Source that fills the handles of a recomputed call."""

    def refill(self) -> None:
        """Runs the calls again and fills every handle that is alive."""
        ...


class RemadeHandle:
    """A tensor that was dropped and is made again with its whole segment at the first unpack.

    Args:
        maker: fills this handle.
        tensor: as autograd packed it: only its description is kept.
        place: the site, for messages.
        watched: its elements from now on; None for a tensor that is no range of memory.
        sample: the bits of some of its elements; None if they say nothing.
    """

    __slots__ = (
        "__weakref__", "_maker", "_place", "_value", "_version", "_watched", "description", "is_closed", "sample"
    )  # fmt: skip

    def __init__(
        self, maker: Remade, tensor: torch.Tensor, place: str, watched: Watched | None, sample: bytes | None
    ) -> None:
        self.description = describe(tensor)
        self.sample = sample
        self._watched = watched
        self.is_closed = False
        self._maker = maker
        self._place = place
        self._value: torch.Tensor | None = None
        self._version = NO_VERSION

    @property
    def value(self) -> torch.Tensor | None:
        """The tensor, once it was made again."""
        return self._value

    def fill(self, tensor: torch.Tensor) -> None:
        """Takes the tensor, without its graph."""
        self._value = tensor.detach()
        self._version = version_of(tensor)

    def close(self) -> None:
        """Gives the tensor up for good."""
        self._value = None
        self.is_closed = True

    def unpack(self) -> torch.Tensor:
        """See `Handle`.

        Raises:
            UnsupportedError: the call's backward is over, or the call was different when run again.
            RuntimeError: the tensor was changed in place after it was saved, as in plain PyTorch.
        """
        if self.is_closed:
            raise refuse_again(self._place)
        if self._watched is not None:
            self._watched.check_saved(self._place)
        if self._value is None:
            self._maker.refill()
        value = self._value
        if value is None:
            raise refuse_again(self._place)
        check_unchanged(value, self._version, self._place)
        return value


Description = tuple[tuple[int, ...], torch.dtype, torch.device]


def describe(tensor: torch.Tensor) -> Description:
    """Properties that must be equal when a tensor is made again."""
    return tuple(tensor.shape), tensor.dtype, tensor.device


class MovedStorage:
    """One storage that may leave. See [Note: moved storages].

    Attributes:
        nbytes: of the whole storage.
    """

    def __init__(
        self, tensor: torch.Tensor, pool: HomePool, offloader: Offloader, place: str, written: Written
    ) -> None:
        # Holds the device memory. Detached: with its graph it would keep alive what keeps this
        # object.
        self._source: torch.Tensor | None = tensor.detach()
        self._written, self._mark = written, written.mark()
        self._version = version_of(tensor)
        self._seen_version = self._version
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self._device = tensor.device
        self._pool = pool
        self._offloader = weakref.ref(offloader)
        self._place = place
        self._rest: OffloadedStorage | None = None
        self._free: weakref.finalize[Any, Any] | None = None
        self._transfer: TransferHandle | None = None
        self._storage: torch.UntypedStorage | None = None
        # Backward on an accelerator unpacks in autograd's device thread, while the engine drops and
        # reloads in its own. Reentrant: `drop` calls `leave`, `bring` calls `reload`.
        self._lock = threading.RLock()

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage that holds device memory now, if any."""
        return self._source.untyped_storage() if self._source is not None else self._storage

    @property
    def is_away(self) -> bool:
        """The device holds nothing of it."""
        return self._source is None and self._storage is None

    def watched(self, geometry: Geometry) -> Watched:
        """Returns some of its elements, watched since it was made."""
        return Watched(self._written, self._mark, ByteRange.of(geometry))

    def leave(self) -> None:
        """Starts writing. Repeating it does nothing."""
        with self._lock:
            if self._source is None or self._rest is not None:
                return
            self._look()
            # The write reads this memory from now on: `_source` stays until `drop` has waited.
            self._rest = OffloadedStorage(self._pool, self._source.untyped_storage())
            self._free = weakref.finalize(self, self._rest.free)
            # At interpreter exit the pools may be gone before this.
            self._free.atexit = False
            self._count("written_bytes")

    def drop(self) -> None:
        """Waits for the write and gives the device memory up. Repeating it does nothing."""
        with self._lock:
            if self._source is None:
                return
            self.leave()
            assert self._rest is not None
            # First wait, then look: a change in place during the write would be at home in part
            # only.
            self._rest.wait()
            self._look()
            self._source = None

    def reload(self) -> None:
        """Starts reading into fresh memory. Does nothing unless the moved storage is away."""
        with self._lock:
            if not self.is_away:
                return
            # New memory, not the old: whoever still holds the old storage keeps it, and the read
            # must not write there.
            storage = new_storage(self.nbytes, self._device)
            assert self._rest is not None
            self._transfer = self._rest.begin_read(storage)
            # Only after the read has begun: an exception above leaves the storage away, to be asked
            # again.
            self._storage = storage
            self._count("read_bytes")

    def bring(self) -> torch.UntypedStorage:
        """The storage with its bytes: waits for the reload, and starts it if nobody has (which is
        counted).

        Raises:
            RuntimeError: it was changed in place between saving and leaving, as in plain PyTorch.
        """
        with self._lock:
            self._look()
            if self._source is not None:
                self._check(self._source)
                return self._source.untyped_storage()
            if self._seen_version != self._version:
                raise_changed((self.nbytes,), torch.uint8, self._version, self._seen_version, self._place)
            if self.is_away:
                self._count("demand_reloads", 1)
                self.reload()
            if self._transfer is not None:
                # Waits in the thread of backward; on an accelerator its stream waits, not the host.
                self._transfer.wait()
                self._transfer = None
            assert self._storage is not None
            return self._storage

    def _look(self) -> None:
        if self._source is not None:
            self._seen_version = version_of(self._source)

    def _check(self, source: torch.Tensor) -> None:
        if self._seen_version != self._version:
            raise_changed(tuple(source.shape), source.dtype, self._version, self._seen_version, self._place)

    def _count(self, name: str, amount: int | None = None) -> None:
        offloader = self._offloader()
        if offloader is not None:
            offloader.count(name, self.nbytes if amount is None else amount)

    def __del__(self) -> None:
        # A transfer into or out of memory that is about to be freed must end first. Only after an
        # abandoned step is one under way. If it failed, nobody needs the bytes any more, and a
        # finalizer has nobody to tell.
        with contextlib.suppress(MemfitError):
            if self._transfer is not None:
                self._transfer.wait()
            elif self._source is not None and self._rest is not None:
                self._rest.wait()


class MovedHandle:
    """A saved tensor as a view of a moved storage.

    Args:
        tensor: as autograd packed it.
        moved: the moved storage of its storage.
        place: the site, for messages.
    """

    __slots__ = ("__weakref__", "_geometry", "_moved", "_place")

    def __init__(self, tensor: torch.Tensor, moved: MovedStorage, place: str) -> None:
        self._geometry = Geometry.of(tensor)
        self._moved: MovedStorage | None = moved
        self._place = place

    @property
    def moved(self) -> MovedStorage | None:
        """The moved storage, until `close`."""
        return self._moved

    def close(self) -> None:
        """Gives the tensor up for good."""
        self._moved = None

    def unpack(self) -> torch.Tensor:
        """See `Handle`.

        Raises:
            UnsupportedError: the call's backward is over.
            RuntimeError: it was changed in place after it was saved.
        """
        if self._moved is None:
            raise refuse_again(self._place)
        self._moved.watched(self._geometry).check_saved(self._place)
        return self._geometry.over(self._moved.bring())


class Offloader:
    """All moved storages of a job.

    Args:
        pools: make the homes, by tier.
        device: whose tensors leave; others stay where they are.
        minimum_bytes: smaller storages stay.
        writes: of the job's forwards.

    Attributes:
        demand_reloads: moved storages that backward asked for before their reload was issued.
        written_bytes, read_bytes: moved so far.
    """

    def __init__(
        self,
        pools: Mapping[Tier, HomePool],
        *,
        device: torch.device,
        minimum_bytes: int = MINIMUM_LEAVING_BYTES,
        writes: Writes | None = None,
    ) -> None:
        self._writes = Writes() if writes is None else writes
        self._pools = dict(pools)
        # Tensors always name their GPU by number, and `cuda` and `cuda:0` are not equal.
        self._device = torch.empty(0, device=device).device
        self._minimum_bytes = minimum_bytes
        self._moved_storages: weakref.WeakValueDictionary[tuple[int, int, int], MovedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()
        self.demand_reloads = 0
        self.written_bytes = 0
        self.read_bytes = 0

    def register(self, tensor: torch.Tensor, home: Tier, *, place: str) -> MovedStorage | None:
        """Registers a tensor's storage at its present version; None if it cannot be moved.

        Args:
            tensor: any.
            home: a tier beside the device. A storage that is already registered keeps the home it
                has.
            place: the site, for messages.

        Raises:
            UsageError: the job has no pool in that tier.
        """
        storage = plain_storage(tensor)
        if storage is None or tensor.device != self._device:
            return None
        movable = is_movable(tensor, ORDINARY)
        if not leaves(storage.nbytes(), is_movable=movable, minimum_bytes=self._minimum_bytes):
            return None
        if home not in self._pools:
            raise UsageError(
                f"{place}: saved tensors shall go to {home}, but the job has homes in {[*map(str, self._pools)]} only"
            )
        # Its version may be that of another counter over the same storage: what was written since
        # makes another moved storage.
        written = self._writes.of(storage)
        # Address, version and writes: an address alone may come back for another storage, and a
        # version is a counter that not all tensors over a storage share.
        key = (storage._cdata, version_of(tensor), written.mark())
        with self._lock:
            # Looked up under the lock: two threads that save one storage must share one moved
            # storage.
            moved = self._moved_storages.get(key)
            if moved is None:
                moved = self._moved_storages[key] = MovedStorage(tensor, self._pools[home], self, place, written)
            return moved

    def count(self, name: str, amount: int) -> None:
        """Adds to one of the counters."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def live_storages(self) -> list[MovedStorage]:
        """Moved storages that somebody still needs."""
        return list(self._moved_storages.values())


# Stacks of a thread, from which something is taken that is not on top.
#
# In: a dispatch mode, or saved-tensor hooks, that a call pushed and never popped, because a Ctrl-C
# went past it. Out: the same stacks without it.

_default_hooks: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue] (not in torch's stubs)


def take_mode_off(mode: TorchDispatchMode) -> None:
    """Leaves a dispatch mode, if it is on the stack; those above it stay."""
    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return
    above: list[Any] = [_pop_mode() for _ in stack[stack.index(mode) + 1 :]]
    mode.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)


def take_hooks_off(pack: Callable[[torch.Tensor], Any]) -> None:
    """Takes the saved-tensor hooks with this `pack` off the stack, if they are there."""
    found: list[Any] = []
    while (top := _default_hooks._top_saved_tensors_default_hooks(True)) is not None:  # noqa: FBT003, a C function
        found.append(top)
        _default_hooks._pop_saved_tensors_default_hooks()
    for own, unpack in reversed(found):
        if own != pack:
            _default_hooks._push_saved_tensors_default_hooks(own, unpack)
