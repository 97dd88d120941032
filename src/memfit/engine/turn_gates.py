"""Gates of a journal's turns: the updates of a turn change nothing before the previous turn is
committed.

In: updates and keeps as a run reaches them. Out: handles that updates wait for, in their own
thread.
"""

from __future__ import annotations

from memfit.core.errors import StoreError
from memfit.core.step import Operation, Token
from memfit.homes.home import DONE, TransferHandle
from memfit.homes.updates import Gate


class TurnGates:
    """Gates of one run, by the token of the keep that opens them."""

    def __init__(self) -> None:
        self._gates: dict[Token, Gate] = {}

    def before(self, update: Operation) -> TransferHandle:
        """Returns the handle that an update waits for: of the keep of the previous turn, if the
        list has it later than the update.
        """
        turn = next((token for token in update.after if token.kind == "keep"), None)
        return DONE if turn is None else self._gates.setdefault(turn, Gate())

    def open(self, keep: Operation) -> None:
        """Opens the gate of a turn that was committed."""
        if keep.gives is not None and keep.gives in self._gates:
            # Only now may the next turn's blocks be written over the versions that were just
            # replaced.
            self._gates[keep.gives].open()

    def shut(self) -> None:
        """Ends all waits with an error. Must come before updates are waited for, which would wait
        for these gates.
        """
        for gate in self._gates.values():
            # In the thread of the run; the updates' thread wakes up with the error and changes
            # nothing.
            gate.shut(StoreError("the step was given up before this block's turn"))
