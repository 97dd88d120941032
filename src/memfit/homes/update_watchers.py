"""Watchers of updates: functions that see each piece of a weight when it has been updated, before
it goes home.

In: functions of the user's. Out: calls of them, on the thread that updates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class UpdatedPiece:
    """A range of a parameter that was just updated.

    Attributes:
        block: name of the parameter's block.
        name: of the parameter, as in `model.named_parameters()`.
        first: index of the range's first element, in the parameter's memory order.
        weight: the new values, flat; the master's where there is one. Valid during the call only,
            and not to be changed.
        is_last: the parameter's last piece of this step.
        shape, stride: of the whole parameter.
    """

    block: str
    name: str
    first: int
    weight: torch.Tensor
    is_last: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]


UpdateWatcher = Callable[[UpdatedPiece], object]


class UpdateWatchers:
    """Functions that watch updates, in the order in which they came.

    Attributes:
        entries: by the number of a handle (`torch.utils.hooks.RemovableHandle`): a block's name, or
            None for all, and the function.
    """

    def __init__(self) -> None:
        # Ordered: a handle holds it weakly, and plain dictionaries cannot be held so.
        self.entries: OrderedDict[int, tuple[str | None, UpdateWatcher]] = OrderedDict()

    def tell(self, block: str, make: Callable[[], UpdatedPiece]) -> None:
        """Calls those that watch a block.

        Args:
            block: its name.
            make: makes the piece; called only if there is a watcher.
        """
        if not self.entries:
            return
        # A copy: the main thread may remove one while this thread updates.
        for wanted, watcher in tuple(self.entries.values()):
            if wanted is None or wanted == block:
                watcher(make())
