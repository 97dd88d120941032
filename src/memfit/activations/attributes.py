"""Tensors that modules keep on themselves from call to call, as they were when a call began.

In: a module. Out: the same tensors on it while the call runs again.

[Note: a module's memory]
A layer that reads what its last call left on it (a state, a running list) would, run again, read
what this call or a later one left. So the tensors on it at entry are held, those only that the call
both reads and replaces; what it changes in place is refused. They are looked for in attributes, and
in lists and dictionaries there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.activations.call_arguments import non_leaf
from memfit.activations.reads import ReadWatcher
from memfit.activations.saved_tensors import TRY_ANOTHER_POLICY, Stays, plain_storage
from memfit.activations.structure import direct_tensors
from memfit.activations.writes import Watched, Writes
from memfit.core.errors import UnsupportedError
from memfit.tensors.own_attributes import own_attributes


class HeldAttributes:
    """Tensors on a module and its submodules, from a call's entry on.

    Memory: nothing beyond what was there while the call runs; then what it reads and replaces,
    until it was run again.

    Args:
        module: the site.
        place: its name, for messages.
        stays: see `saved_tensors.Stays`.
        writes: of the job's forwards.
    """

    __slots__ = ("_entries", "_place", "_read")

    def __init__(self, module: torch.nn.Module, place: str, stays: Stays, writes: Writes) -> None:
        self._place = place
        self._read: set[int] = set()
        self._entries: list[_Entry] = []
        for owner in module.modules():
            for name, value in own_attributes(owner):
                if not isinstance(value, torch.Tensor | list | dict):
                    continue
                movable = [t for t in direct_tensors(value) if (s := plain_storage(t)) is not None and not stays(s)]
                if movable:
                    self._entries.append(_Entry(owner, name, value, movable, writes))

    def watcher(self) -> ReadWatcher | None:
        """A mode for the first run, which learns what the call reads.

        None if there is nothing to learn.
        """
        addresses = {address for entry in self._entries for address in entry.addresses}
        return ReadWatcher(addresses, self._read.add) if addresses else None

    def end_of_call(self) -> None:
        """Called when the call is over: holds what it reads and has changed, without the past."""
        self._entries = [e for e in self._entries if not self._read.isdisjoint(e.addresses) and e.has_changed]
        for entry in self._entries:
            entry.forget_the_past()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The module has them inside. Whoever calls puts the present ones back.

        Raises:
            UnsupportedError: one was changed in place.
        """
        for entry in self._entries:
            if any(watched.has_changed for watched in entry.watched):
                raise UnsupportedError(
                    f"{self._place} reads a tensor that it keeps on itself ({entry.name!r}) and changes it in place, so the call cannot be "
                    f"run again; {TRY_ANOTHER_POLICY}"
                )
            vars(entry.owner)[entry.name] = entry.made_again()
        yield


class _Entry:
    """One attribute at entry: a tensor, or a list or dictionary as it was."""

    def __init__(
        self, owner: torch.nn.Module, name: str, value: Any, tensors: list[torch.Tensor], writes: Writes
    ) -> None:
        self.owner, self.name = owner, name
        self._value = value
        self._content = value if isinstance(value, torch.Tensor) else value.copy()
        self.watched: list[Watched] = [found for t in tensors if (found := writes.watch(t)) is not None]
        self.addresses = {t.untyped_storage()._cdata for t in tensors}

    @property
    def has_changed(self) -> bool:
        """The call left something else there."""
        now = vars(self.owner).get(self.name)
        if now is not self._value or any(watched.has_changed for watched in self.watched):
            return True
        if isinstance(now, dict):
            return list(map(id, now.values())) != list(map(id, self._content.values()))
        return isinstance(now, list) and list(map(id, now)) != list(map(id, self._content))

    def forget_the_past(self) -> None:
        """Lets go of graphs, which hold what runs the call again."""
        self._value = None
        self._content = _each_tensor(self._content, _Bare)

    def made_again(self) -> Any:
        """The value for a second run."""
        return _each_tensor(self._content, lambda bare: bare.made_again())


class _Bare:
    """A tensor without its graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._requires_grad = tensor.detach(), tensor.requires_grad

    def made_again(self) -> torch.Tensor:
        value = self._tensor.detach()
        return non_leaf(value) if self._requires_grad else value


def _each_tensor(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor | _Bare):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, change) for key, item in value.items()}
    return [_each_tensor(item, change) for item in value] if isinstance(value, list) else value
