"""Parts of a block that a commit to a store writes: one rule for the price and for what is done.

In: the form of masters, the store's scheme. Out: names of parts, which `scheduling.sizes` turns
into bytes and `checkpoints.schemes` into regions.
"""

from __future__ import annotations

from typing import Literal

from memfit.core.layout import Scheme
from memfit.core.plan import Plan

Masters = Literal["whole", "split", "none"]
"""How masters rest: whole, as what they differ from the weights by, or not at all."""
Part = Literal["weight", "master", "state"]


def masters_of(plan: Plan) -> Masters:
    """Names the form in which a plan's masters rest."""
    if plan.drops_masters:
        return "none"
    return "split" if plan.splits_masters else "whole"


def committed_parts(masters: Masters, *, has_masters: bool, scheme: Scheme = "generations") -> tuple[Part, ...]:
    """Lists the parts of a block that belong to a commit; those at home in the store are there
    already.

    Weights are left out where a whole master says them: they are rounded from it again when the run
    goes on. A split master is only what its weight does not say, so both are needed. A journal
    keeps one version of a block, all parts of which are written together.

    Args:
        masters: how they rest.
        has_masters: the block has any.
        scheme: of the store.
    """
    is_said = has_masters and masters == "whole" and scheme == "generations"
    return ("master", "state") if is_said else ("weight", "master", "state")
