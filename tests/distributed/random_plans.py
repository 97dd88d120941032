"""Random plans for ranks, which the ranks may disagree about: trained with the bits of one process, or refused on all."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

import memfit
from distributed.training import OPTIMIZERS, Tower, accumulated, batch_of, build, loss, same, weights_of
from memfit.core.errors import MemfitError
from memfit.core.layout import Share
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.trace.blocks import find_blocks

STEPS = 2
# Weights, gradients, states: what is cut of one is cut of those behind it.
_CUTS = [[Share.DATA if i >= first else Share.WHOLE for i in range(3)] for first in range(4)]


def drawn_plan(draw: random.Random, ranks: int) -> Plan:
    """A plan for the tower: every block by itself."""
    names = [block.name for block in find_blocks(Tower(), None).blocks]
    blocks: dict[str, BlockPlan] = {}
    for name in names:
        weights, gradients, states = draw.choice(_CUTS)
        tiers = [draw.choice((Tier.DEVICE, Tier.DISK)) for _ in range(3)]
        blocks[name] = BlockPlan(
            weight_home=tiers[0], gradient_home=tiers[1], state_home=tiers[2],
            weights_over=weights, gradients_over=gradients, states_over=states,
        )  # fmt: skip
    update = draw.choice((UpdateTime.IN_BACKWARD, UpdateTime.AFTER_BACKWARD))
    return Plan(
        ranks=ranks,
        blocks=blocks,
        calls=tuple(CallPlan(saved=draw.choice((Saved.KEEP, Saved.RECOMPUTE))) for _ in range(6)),
        microbatches=draw.choice((1, 1, 2, 3)),
        order=draw.choice((Order.LAYER_MAJOR, Order.MICROBATCH_MAJOR)),
        update=update,
        tail=draw.choice((None, 5)),
        prefetch=draw.choice((1, 2, 3)),
        update_backlog=draw.choice((0, 1, 1, 2, 3)),
        is_atomic=draw.random() < 0.2,
    )


def disagreeing(draw: random.Random, plan: Plan) -> Plan:
    """The plan of a rank that decides one thing otherwise."""
    other = drawn_plan(random.Random(draw.random()), plan.ranks)
    field = draw.choice(("microbatches", "order", "update", "tail", "prefetch", "update_backlog", "calls", "blocks"))
    return replace(plan, **{field: getattr(other, field)})


def one(rank: int, size: int, seed: int) -> str:
    """Trains under a drawn plan, or one that rank 1 has otherwise; returns "refused", "" for the bits of one process, or what differs."""
    draw = random.Random(seed)
    try:
        plan = drawn_plan(draw, size)
        if draw.random() < 0.3:
            other = disagreeing(draw, plan)
            plan = other if rank == 1 else plan
    except MemfitError:
        return "refused"  # it is no plan
    model = build("tower")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    job: Any = None
    try:
        job = memfit.fit(model, optimizer, loss, batch_of("tower", 0, rank), plan=plan, enforce=False)
        for step in range(STEPS):
            job.step(batch_of("tower", step, rank))
    except MemfitError as error:
        text = f"{type(error).__name__}: {error}"
        if job is not None:
            job.close()
            return f"in a step: {text}"
        return "refused"
    job.close()
    weights = weights_of(model)
    is_major = plan.order is Order.MICROBATCH_MAJOR
    wrong = same(weights, accumulated("tower", "adamw", size, plan.microbatches, STEPS, is_major=is_major))
    return f"{plan.to_json()} differs in {wrong}" if wrong else ""


def many(rank: int, size: int, seeds: list[int]) -> list[str]:
    """Does `one` for each seed."""
    torch.set_num_threads(1)
    return [one(rank, size, seed) for seed in seeds]
