"""Least examples that the random search once found to go wrong, kept with the rule that they broke.

In: nothing. Out: `FOUND`, by what is special about each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import pytest

from equivalence.random_modules import BlockSpec, CallSpec, Glue, Kind, ModelSpec, Side
from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class Found:
    """A model, the plan under which it went wrong, and whether gradients were clipped.

    Such a plan may be refused today: backward reads the weights where no call announces it, so they stay.
    """

    spec: ModelSpec
    plan: Plan
    clips: bool = False

    def outcome(self) -> AbstractContextManager[object]:
        """In what the training of it is to be tried."""
        is_beside = self.spec.blocks[0].side is Side.ATTRIBUTE and self.plan.blocks == _AWAY
        is_beside = is_beside and (len(self.spec.calls) == 1 or self.plan == Plan(blocks=_AWAY))
        return pytest.raises(PlanError, match="read outside of the calls") if is_beside else nullcontext()


_AWAY = {"blocks.0": BlockPlan(weight_home=Tier.DISK)}
_RECOMPUTE = CallPlan(saved=Saved.RECOMPUTE)
_PLAIN = BlockSpec()
_SIDE_DOOR = BlockSpec(side=Side.ATTRIBUTE)
_SIDE_DOOR_ONLY = BlockSpec(kind=Kind.IDENTITY, side=Side.ATTRIBUTE)
_ONE_CALL = (CallSpec(block=0, source=0),)

# Step 0 makes calls 0 (entry), 1 and 2 (exit); step 1 leaves out call 1.
_LEFT_OUT = ModelSpec(blocks=(_PLAIN,), calls=(CallSpec(block=0, source=0, is_optional=True),))
_LEFT_OUT_DETACHED = ModelSpec(
    blocks=(_PLAIN,), calls=(CallSpec(block=0, source=0, glue=Glue.DETACH, is_optional=True),)
)

# In step 1 the gradient reaches call 1 by what its module keeps, and its output is not used; the trace saw call 2 in its place.
_SIDE_DOOR_LATER = ModelSpec(
    blocks=(_SIDE_DOOR,), calls=(CallSpec(block=0, source=0), CallSpec(block=0, source=0, is_optional=True))
)

FOUND = {
    "side door in a later step only, weight away": Found(
        spec=_SIDE_DOOR_LATER, plan=Plan(blocks=_AWAY, calls=(CallPlan(),) * 4, prefetch=0)
    ),
    # Gradients reach a block by what it keeps on itself for the loss, never by what it returns.
    "side door of a block whose output nobody uses, weight away": Found(
        spec=ModelSpec(blocks=(_SIDE_DOOR, _PLAIN), calls=(CallSpec(block=0, source=0), CallSpec(block=1, source=0))),
        plan=Plan(blocks=_AWAY),
    ),
    "side door only, weight away": Found(
        spec=ModelSpec(blocks=(_SIDE_DOOR_ONLY,), calls=_ONE_CALL), plan=Plan(blocks=_AWAY)
    ),
    "side door only, weight away, nothing prefetched": Found(
        spec=ModelSpec(blocks=(_SIDE_DOOR_ONLY,), calls=_ONE_CALL), plan=Plan(blocks=_AWAY, prefetch=0)
    ),
    "side door only, weight away, recomputed": Found(
        spec=ModelSpec(blocks=(_SIDE_DOOR_ONLY,), calls=_ONE_CALL),
        plan=Plan(blocks=_AWAY, calls=(CallPlan(), _RECOMPUTE)),
    ),
    "side door only, weight away, clipped": Found(
        spec=ModelSpec(blocks=(_SIDE_DOOR_ONLY,), calls=_ONE_CALL),
        plan=Plan(blocks=_AWAY, update=UpdateTime.AFTER_BACKWARD),
        clips=True,
    ),
    "side door only, weight away, one microbatch at a time": Found(
        spec=ModelSpec(blocks=(_SIDE_DOOR_ONLY,), calls=_ONE_CALL),
        plan=Plan(blocks=_AWAY, microbatches=4, order=Order.MICROBATCH_MAJOR),
    ),
    # The same in the second call of a recomputed segment: the first call runs again before its own block was fetched.
    **{
        f"side door of a segment's last call, weight of its first away, prefetch {prefetch}": Found(
            spec=ModelSpec(
                blocks=(_PLAIN, _SIDE_DOOR_ONLY, _PLAIN),
                calls=(CallSpec(block=0, source=0, glue=Glue.READ_WEIGHT, reads=2), CallSpec(block=1, source=1)),
            ),
            plan=Plan(
                blocks=_AWAY,
                calls=(CallPlan(), _RECOMPUTE, replace(_RECOMPUTE, joins_previous=True), CallPlan()),
                prefetch=prefetch,
            ),
        )
        for prefetch in (0, 1)
    },
    # A step that does not make the call with which the tail begins.
    "first call of the tail left out": Found(spec=_LEFT_OUT, plan=Plan(tail=1)),
    "first call of the tail left out, gradients cut off": Found(spec=_LEFT_OUT_DETACHED, plan=Plan(tail=1)),
    "first call of the tail left out, microbatches": Found(spec=_LEFT_OUT, plan=Plan(tail=1, microbatches=4)),
    "first call of the tail left out, recomputed": Found(
        spec=_LEFT_OUT, plan=Plan(tail=1, calls=(CallPlan(), _RECOMPUTE, _RECOMPUTE))
    ),
    "first call of the tail left out, clipped": Found(
        spec=_LEFT_OUT, plan=Plan(tail=1, update=UpdateTime.AFTER_BACKWARD), clips=True
    ),
    # The block is fetched for the call that is left out, and updated while that visit, which nobody waits for, still arrives.
    "left out with its weight on the way, updated meanwhile": Found(
        spec=ModelSpec(
            blocks=(_PLAIN, _PLAIN),
            calls=(
                CallSpec(block=0, source=0, is_optional=True),
                CallSpec(block=1, source=1),
                CallSpec(block=0, source=2),
                CallSpec(block=1, source=3),
            ),
        ),
        plan=Plan(blocks={name: BlockPlan(weight_home=Tier.DISK) for name in ("blocks.0", "blocks.1")}, prefetch=1),
    ),
    # Code before the tail's first call reads a weight of that call: refused with the way out, which has to work.
    "tail reads what code before it reads": Found(
        spec=ModelSpec(blocks=(_PLAIN,), calls=(CallSpec(block=0, source=0, glue=Glue.READ_WEIGHT),)),
        plan=Plan(tail=1),
    ),
}
