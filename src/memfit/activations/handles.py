"""Handles that autograd holds in place of tensors it saved.

In: one saved tensor. Out: an object with `unpack`, which gives it back.

[Note: who holds whom]
Everything here dies by reference counting, as plain autograd's saved tensors do. Autograd's node
holds a handle and the function `unpack` below, which is nobody's method. A handle holds what can
make its tensor again (a segment, or a moved storage). These know their handles by weak reference
only, and never hold an output of the call or a tensor with a graph. So when a node lets go of what
it saved, the handle dies, and with it the one strong reference to the tensor: memory falls at the
same instant as in plain PyTorch.
"""

from __future__ import annotations

from typing import Protocol

import torch

from memfit.activations.saved_tensors import NO_VERSION, check_unchanged, version_of
from memfit.activations.writes import Watched
from memfit.core.errors import UnsupportedError


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
