"""Plans for several ranks: what is cut over them.

In: a plan for one process, the names of the blocks, the number of ranks. Out: the same plan over
ranks, as data parallel or with ZeRO's stages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memfit.core.plan import BlockPlan, Plan
from memfit.core.shares import Share

STAGES = (0, 1, 2, 3)
"""Stages of ZeRO: nothing is cut, optimizer states, gradients too, weights too.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.
"""


def data_parallel(ranks: int) -> Plan:
    """Returns the plan with which each rank has everything whole on its device."""
    return Plan(ranks=ranks)


def share_out(
    plan: Plan, ranks: int, stage: int, blocks: Collection[str], staying: Collection[str] = frozenset()
) -> Plan:
    """Returns a plan whose blocks are cut over ranks.

    Args:
        plan: the other decisions.
        ranks: their number.
        stage: one of `STAGES`.
        blocks: names of all blocks.
        staying: names of blocks whose weights every rank must have whole on its device.
    """
    states, gradients, weights = (Share.DATA if stage >= least else Share.WHOLE for least in (1, 2, 3))

    def shared(name: str) -> BlockPlan:
        own = Share.WHOLE if name in staying else weights
        return replace(plan.block(name), weights_over=own, gradients_over=gradients, states_over=states)

    return replace(plan, ranks=ranks, blocks={name: shared(name) for name in blocks})
