"""Gates of a journal's turns: the updates of a turn change nothing before the turn before it is
kept.

In: updates and keeps as a run comes to them. Out: what an update waits for, in its own thread.
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
        """What an update waits for: a keep that the list has behind it."""
        turn = next((token for token in update.after if token.kind == "keep"), None)
        return DONE if turn is None else self._gates.setdefault(turn, Gate())

    def open(self, keep: Operation) -> None:
        """A turn is kept."""
        if keep.gives is not None and keep.gives in self._gates:
            self._gates[keep.gives].open()

    def shut(self) -> None:
        """After an error: whoever waits gives up. Before updates are waited for, which would wait
        for these.
        """
        for gate in self._gates.values():
            gate.shut(StoreError("the step was given up before this block's turn"))
