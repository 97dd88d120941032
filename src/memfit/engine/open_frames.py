"""Frames of the calls whose backward is still to come, and of those that autograd is in.

In: frames as calls begin, backwards as they begin. Out: frames that are emptied when their backward
is over.
"""

from __future__ import annotations

from collections.abc import Collection

from memfit.activations import Frame
from memfit.core.schedule import Drop, Offload, Reload


class OpenFrames:
    """Frames of one run by (call, microbatch)."""

    def __init__(self) -> None:
        self._frames: dict[tuple[int, int], Frame] = {}
        self._current: list[tuple[int, int]] = []

    def add(self, call: int, microbatch: int, frame: Frame) -> None:
        """Adds the frame of a call that has begun."""
        self._frames[call, microbatch] = frame

    def move(self, action: Offload | Drop | Reload) -> None:
        """Offloads, drops or reloads the tensors that a call saved; does nothing if it keeps
        all.
        """
        frame = self._frames.get((action.call, action.microbatch))
        if frame is None:
            return
        match action:
            case Offload():
                frame.offload()
            case Drop():
                frame.drop()
            case Reload():
                frame.reload()

    def reach(self, first: int, last: int, microbatch: int) -> None:
        """Notes that autograd has reached the backward of these calls."""
        # The frames that autograd is in: they are emptied when it has left them, not before it has
        # read what they hold.
        self._current = [(call, microbatch) for call in range(first, last + 1)]

    def leave(self) -> None:
        """Empties the frames of the backward that has ended."""
        for key in self._current:
            # Out of the table first: a frame whose end fails is not ended again by `finish_all`.
            frame = self._frames.pop(key, None)
            if frame is not None:
                frame.finish()
        self._current = []

    def end_pass(self, microbatches: Collection[int]) -> None:
        """Ends a whole backward of these microbatches: none of their saved tensors can be needed
        any more.

        A backward that the schedule passes is not over by that: where calls left the traced order,
        its gradient may still come.
        """
        # What autograd was in last belongs to this pass.
        self.leave()
        for key in [key for key in self._frames if key[1] in microbatches]:
            self._frames.pop(key).finish()

    def withdraw_all(self) -> None:
        """Takes off what frames have pushed whose calls were never left."""
        # The latest first: each finds its own on top.
        for frame in reversed(self._frames.values()):
            frame.withdraw()

    def finish_all(self) -> None:
        """Ends all frames, after an error."""
        for frame in self._frames.values():
            frame.finish()
        # Frames hold storages: an error's traceback would keep them alive.
        self.forget()

    def forget(self) -> None:
        """Drops all references."""
        self._frames.clear()
        self._current = []
