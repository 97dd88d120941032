"""Plans of uniform decisions, from the words of a request.

In: a profile, homes and fates. Out: a `Plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.tiers import Tier


def make_plan(
    profile: Profile,
    *,
    homes: str = "device",
    updates_on_host: bool = False,
    fate: Mapping[str, str] | None = None,
    plan: Mapping[str, Any] | None = None,
    chunk_tokens: int | None = None,
) -> Plan:
    """Weights and states of every block that may leave at one home, every layer's activations with one fate.

    Args:
        profile: of the model.
        homes: of weights and states; gradients stay where the update in backward takes them.
        updates_on_host: the host's cores run the optimizer (ZeRO-Offload); gradients then have their home there.
        fate: of what repeated calls save, as `CallPlan` has it.
        plan: all else, as `Plan` has it; `tail=True` is the first call behind the last layer.
        chunk_tokens: of a piece of the loss; None: the loss runs as it is written.
    """
    decided = dict(plan or {})
    calls = next(iter(profile.traces.values())).calls
    repeated = [call.index for call in calls if call.is_repeated]
    if decided.pop("tail", False) and repeated and repeated[-1] + 1 < len(calls):
        decided["tail"] = repeated[-1] + 1
    home = BlockPlan(weight_home=Tier(homes), state_home=Tier(homes))
    if updates_on_host:
        home = BlockPlan(weight_home=Tier(homes), gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
    each = CallPlan(**(fate or {}))  # type: ignore[arg-type]  # words become what they name
    return Plan(
        blocks={block.name: home for block in profile.blocks if not block.is_spanning},
        calls=tuple(each if call.is_repeated and call.has_backward else CallPlan() for call in calls),
        loss_chunk_tokens=chunk_tokens,
        **decided,
    )
