"""A job's steps beside plain PyTorch's on a twin, for a model, an optimizer and a plan by blocks.

In: what makes the two of each, a batch, homes. Out: which weights have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import BlockPlan, Plan

STEPS = 3


def same_bits_beside_plain(
    parts: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    home_of: Callable[[int], BlockPlan],
    directory: Path,
    **decided: Any,
) -> list[bool]:
    """Tells, parameter by parameter, whether `STEPS` steps under a plan gave the bits of plain PyTorch.

    Args:
        parts: makes a model and its optimizer, each time the same.
        loss: of a model and a batch.
        batch: of every step.
        home_of: homes of a block, by its index.
        directory: of homes on disk.
        decided: further fields of the plan.
    """
    (plain, optimizer), (found, of_job) = parts(), parts()
    blocks = memfit.profile(found, of_job, loss, batch).blocks
    plan = Plan(blocks={block.name: home_of(index) for index, block in enumerate(blocks)}, **decided)
    with memfit.fit(found, of_job, loss, batch, plan=plan, directory=directory / "homes") as job:
        for _ in range(STEPS):
            job.step(batch)
            plain.zero_grad()
            loss(plain, batch).backward()
            optimizer.step()
    return [torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True)]
