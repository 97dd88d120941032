"""A step that is committed by a journal: decided once all gradients are durable, then updated and
committed in turns.

In: a schedule whose updates come after backward, turns of blocks as the store's room allows them.
Out: the same with `decide`, its updates in the order of the turns, and a `keep` for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from memfit.core.errors import PlanError
from memfit.core.schedule import Action, Backward, Clear, Commit, Decide, Keep, Schedule, Update
from memfit.core.step import Token


def place_turns(schedule: Schedule, turns: Sequence[Sequence[int]]) -> Schedule:
    """Puts a journal's actions into a training step.

    All updates are asked for before the first `keep`: what those of later turns read comes while
    earlier ones are committed.

    Args:
        schedule: with all updates behind all backwards, and no gradient at home on the device.
        turns: blocks by index; those of a turn may be written when all before it are kept.

    Raises:
        PlanError: an update in backward, or gradients at home on the device.
    """
    actions = schedule.actions
    updates = [a for a in actions if isinstance(a, Update)]
    if any(isinstance(a, Clear) for a in actions):
        raise PlanError("a journal needs every gradient at home, and some are cleared on the device")
    # Before the commit, where nothing trains: nothing may stand behind it.
    first = next((i for i, a in enumerate(actions) if isinstance(a, Update | Commit)), len(actions))
    if any(isinstance(a, Backward) for a in actions[first:]):
        raise PlanError("a journal's updates come after backward, and some come in it: plan update='after-backward'")
    position = {block: i for i, turn in enumerate(turns) for block in turn}
    ordered = sorted(updates, key=lambda update: position.get(update.block, -1))
    rest = [a for a in actions[first:] if not isinstance(a, Update)]
    in_turns: list[Action] = [Decide(), *ordered, *(Keep(tuple(turn)) for turn in turns)]
    return replace(schedule, actions=(*actions[:first], *in_turns, *rest))


def kept_token(action: Keep) -> Token:
    """Returns the token of a turn's commit."""
    return Token("keep", str(action))


def turns_before(schedule: Schedule) -> dict[int, list[Token]]:
    """Returns, by block, what is kept before its update changes anything."""
    turns = [action for action in schedule if isinstance(action, Keep)]
    return {b: [kept_token(before)] for before, turn in pairwise(turns) for b in turn.blocks}
