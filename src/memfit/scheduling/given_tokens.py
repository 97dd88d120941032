"""Tokens of a step: names of work under way, and which of it has begun.

In: operations in the making. Out: the tokens that an operation waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.core.step import Token


class GivenTokens:
    """Tokens that were given, in order. Only these can be waited for.

    Args:
        owners: of blocks, by index.
    """

    def __init__(self, owners: Sequence[str]) -> None:
        self._owners = owners
        self._of_blocks: dict[str, list[Token]] = {}
        self._given: dict[Token, None] = {}

    def of_block(self, kind: str, block: int) -> Token:
        """Returns the token of a block's work."""
        tokens = self._of_blocks.get(kind)
        if tokens is None:
            tokens = self._of_blocks[kind] = [Token(kind, owner) for owner in self._owners]
        return tokens[block]

    def give(self, token: Token) -> None:
        """Notes that the work has begun."""
        self._given[token] = None

    def waits(self, kind: str, block: int) -> list[Token]:
        """Returns what there is to wait for of a block's work."""
        return self.only(self.of_block(kind, block))

    def only(self, token: Token) -> list[Token]:
        """Returns the token if it was given."""
        return [token] if token in self._given else []

    def of_kinds(self, kinds: Iterable[str]) -> list[Token]:
        """Returns all that were given of these kinds."""
        return [token for kind in kinds for token in self._given if token.kind == kind]


class UpdatePipelines:
    """Updates that are waited for by later ones: the last that took its turn behind all others, the
    last that an accelerator makes, and the last that is both. See [Note: what goes first] in
    `homes.updates`.
    """

    def __init__(self) -> None:
        self._in_turn: tuple[Token, ...] = ()
        self._by_device: tuple[Token, ...] = ()
        self._both: tuple[Token, ...] = ()

    def join(self, update: Token, *, takes_turns: bool, on_host: bool) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
        """Puts an update behind those of its pipelines; returns them, and what must have ended
        before it begins.
        """
        before = (*(self._in_turn if takes_turns else ()), *(() if on_host else self._by_device))
        ended = () if takes_turns else self._both
        self._in_turn = (update,) if takes_turns else self._in_turn
        self._by_device = self._by_device if on_host else (update,)
        self._both = (update,) if takes_turns and not on_host else self._both
        return tuple(dict.fromkeys(before)), ended
