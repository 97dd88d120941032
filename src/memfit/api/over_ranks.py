"""`fit` on several ranks: they agree on the model and on one plan, and begin together.

In: a process group of torch.distributed, a setup on each rank. Out: a runner of steps on each,
under the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.api.deciding import begin_given
from memfit.core.errors import DoesNotFitError, PlanError, UnsupportedError
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.core.units import format_bytes
from memfit.distributed.agreement import agree, optional_texts
from memfit.distributed.rank_group import RankGroup, is_initialized, open_group
from memfit.job.preparing import prepared_for
from memfit.job.setup import Setup
from memfit.job.step_runner import StepRunner
from memfit.job.together import failing_together
from memfit.planning.candidates import update_time
from memfit.planning.over_ranks_plans import STAGES, data_parallel, share_out


@contextmanager
def fitting_ranks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[RankGroup | None]:
    """Context of `fit`: the ranks of the process group, which have models of the same shapes. An
    error inside is told to all of them, and their group ends.

    Yields:
        None where this process is alone.

    Raises:
        UsageError: the ranks' models or optimizers differ, or they call different things.
        PeerError: another rank failed.
    """
    if not is_initialized() or torch.distributed.get_world_size() == 1:
        yield None
        return
    ranks = open_group()
    try:
        agree(ranks, "memfit.fit", digest=_described(model, optimizer))
        with failing_together(ranks):
            yield ranks
    except BaseException:
        ranks.close()
        raise


def begin_over_ranks(setup: Setup, ranks: RankGroup, sample: Any, given: Plan | None) -> StepRunner:
    """Begins the steps of this rank under the plan that all ranks have: the given one, or rank 0's.

    Raises:
        PlanError: the plan is for another number of ranks.
        UnsupportedError: something that works on one process only was asked for.
    """
    asked = {
        'on_breach="replan"': setup.replans,
        "lines=": setup.lines_sample is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedError(f"{name} is for one process: leave it out on {ranks.size} ranks")
    if setup.machine.device.type != "cpu":
        raise UnsupportedError(
            f"several ranks train on processors, and this model lies on {setup.machine.device.type}: a GPU's ranks are to come"
        )
    plan = _chosen(setup, ranks, sample) if given is None else given
    if plan.ranks not in (1, ranks.size):
        raise PlanError(f"the plan is for {plan.ranks} ranks, and there are {ranks.size}")
    plan = replace(plan, ranks=ranks.size)
    # Rank 0's, where each has chosen: two plans that are both legal would meet in other orders.
    text = next(text for text in optional_texts(ranks, plan.to_json()) if text is not None)
    agree(ranks, "the plan", digest=plan.to_json() if given is not None else text)
    return begin_given(setup, sample, Plan.from_json(text))


def _chosen(setup: Setup, ranks: RankGroup, sample: Any) -> Plan:
    """Chooses the first of a few uniform plans that is predicted to fit the rank with the least
    memory, those that move least first; collective.

    Raises:
        DoesNotFitError: none does.
    """
    if setup.machine.limits.device_bytes is None:
        return data_parallel(ranks.size)
    own = setup.cut_by(setup.problem.ways(sample, setup.split)[0])
    counts = own.problem.counts(sample)
    found = own.problem.profile(sample, counts, chunk_tokens=None)
    budget = own.budget(sample, found).tensor_bytes
    assert budget is not None
    least = min(room for (room, *_) in agree(ranks, "the room of each rank", values=[float(budget)]))
    smallest: tuple[int, str] | None = None
    for tier, stage in _WAYS:
        for count in counts if found.may_split else (1,):
            for saved in (Saved.KEEP, Saved.RECOMPUTE):
                plan = _uniform(found, ranks.size, tier, stage, count, saved)
                ready = prepared_for(found, plan, clips_norm=setup.clips_norm, device=setup.device)
                peak = ready.timeline.peak_bytes
                if peak <= least:
                    return plan
                words = f"ZeRO-{stage} on {tier}, {count} microbatches, {saved}"
                smallest = min(smallest or (peak, words), (peak, words))
    assert smallest is not None
    raise DoesNotFitError(
        f"no plan fits the rank with the least room, {format_bytes(max(int(least), 0))} of tensors: the smallest takes {format_bytes(smallest[0])} ({smallest[1]}). "
        "Use more ranks, or a larger limit"
    )


_WAYS = (*((Tier.DEVICE, stage) for stage in STAGES), (Tier.DISK, STAGES[-1]))
"""Tiers and stages that are tried: one after the other moves more.
"""


def _uniform(found: Profile, ranks: int, tier: Tier, stage: int, microbatches: int, saved: Saved) -> Plan:
    """Returns a plan that treats all blocks and calls alike, as far as they allow it."""
    names = [block.name for block in found.blocks]
    staying = {block.name for block in found.blocks if block.is_spanning or block.name in found.written_blocks}
    homes = {
        name: BlockPlan(weight_home=Tier.DEVICE if name in staying else tier, gradient_home=tier, state_home=tier)
        for name in names
    }
    calls = next(iter(found.traces.values())).calls
    plan = Plan(
        microbatches=microbatches,
        blocks=homes,
        calls=tuple(CallPlan(saved=saved) for _ in calls),
        update=update_time(found, clips_norm=False),
    )
    return share_out(plan, ranks, stage, names, staying)


def _described(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Describes what must be equal on all ranks."""
    lines = [type(optimizer).__name__, str(len(optimizer.param_groups))]
    lines += [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    return "\n".join(lines)
