"""`fit` on several ranks: they agree on the model and on one plan, and begin together.

In: a process group of torch.distributed, a setup on each rank. Out: a runner of steps on each,
under the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from memfit.core.errors import PlanError, UnsupportedError
from memfit.core.hardware import DATA_AXIS, Hardware
from memfit.core.plan import Plan
from memfit.job.deciding import GIVEN, begin_given
from memfit.job.step_runner import StepRunner
from memfit.mesh.agreement import WHOLE, agree, groups_of, optional_texts, probe_network
from memfit.mesh.rank_group import RankGroup, is_initialized, open_group
from memfit.planner.search.over_ranks_plans import choose_over_ranks, data_parallel
from memfit.planner.setup import Setup
from memfit.planner.together import checksum, failing_together, settings_text
from memfit.runs.checkpointer import stored_reason


@contextmanager
def fitting_ranks(
    model: nn.Module, optimizer: torch.optim.Optimizer, asked: Mapping[str, object]
) -> Iterator[RankGroup | None]:
    """Context of `fit`: the ranks of the process group, which have models of the same shapes and
    ask for the same. An error inside is told to all of them, and their group ends.

    Args:
        model: of this rank.
        optimizer: of this rank.
        asked: all arguments of `fit`, by name.

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
        agree(ranks, "memfit.fit", digest=_described(model, optimizer, asked))
        agree(ranks, "memfit.fit with these parameters", digest=_shapes(model), advice=WHOLE)
        with failing_together(ranks):
            yield ranks
    except BaseException:
        ranks.close()
        raise


def begin_over_ranks(
    setup: Setup, ranks: RankGroup, sample: Any, given: Plan | None, resumed: Plan | None
) -> StepRunner:
    """Begins the steps of this rank under the plan that all ranks have: the given one, that of the
    run, or rank 0's.

    Raises:
        PlanError: the plan is for another number of ranks.
        UnsupportedError: something that works on one process only was asked for.
    """
    asked = {
        "adapt=True": setup.adapts,
        "lines=": setup.lines_sample is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedError(f"{name} is for one process: leave it out on {ranks.size} ranks")
    if setup.machine.device.type != "cpu":
        raise UnsupportedError(
            f"several ranks train on processors, and this model lies on {setup.machine.device.type}: a GPU's ranks are to come"
        )
    setup = _with_network(setup, ranks)
    if given is not None:
        plan, reason = given, GIVEN
    elif resumed is not None:
        assert setup.run is not None, "only a run is resumed"
        plan, reason = resumed, stored_reason(setup.run)
    else:
        plan, reason = _chosen(setup, ranks, sample)
    if plan.ranks not in (1, ranks.size):
        raise PlanError(
            f"the plan is for {plan.ranks} ranks, and there are {ranks.size}: start as many, or leave plan= out"
        )
    plan = replace(plan, ranks=ranks.size)
    # Rank 0's, where each has chosen: two plans that are both legal would meet in other orders.
    text, reason = optional_texts(ranks, plan.to_json())[0], optional_texts(ranks, reason)[0]
    assert text is not None and reason is not None, "every rank tells its own"
    agree(ranks, "the plan", digest=plan.to_json() if given is not None else text)
    why = "there are several ranks" if given is None else "the plan was given"
    return begin_given(setup, sample, Plan.from_json(text), reason=reason, why=why)


def _chosen(setup: Setup, ranks: RankGroup, sample: Any) -> tuple[Plan, str]:
    """Chooses the plan that is predicted to be the fastest of those that fit the rank with the
    least memory, by rank 0's figures; collective.

    Returns:
        The plan, and why it is taken.

    Raises:
        DoesNotFitError: none does.
    """
    if setup.machine.limits.device_bytes is None:
        return data_parallel(ranks.size), "there is no limit: data parallel, everything whole on every rank's device."
    own = setup.cut_by(setup.problem.ways(sample, setup.split)[0])
    counts = own.problem.counts(sample)
    found = own.problem.profile(sample, counts, chunk_tokens=None)
    budget = own.budget(sample, found).tensor_bytes
    assert budget is not None
    least = min(room for (room, *_) in agree(ranks, "the room of each rank", values=[float(budget)]))
    chosen = choose_over_ranks(
        found,
        counts if found.may_split else (1,),
        ranks.size,
        int(least),
        # The others' choice is not asked for, only whether there is one.
        setup.hardware() if ranks.rank == 0 else None,
        clips_norm=setup.clips_norm,
        device=setup.device,
    )
    return chosen.plan, chosen.reason


def _with_network(setup: Setup, ranks: RankGroup) -> Setup:
    """Returns the setup with the links to other ranks among the machine's figures; collective."""
    link = probe_network(ranks)

    def found() -> Hardware:
        hardware = setup.hardware()
        return hardware if hardware.network else replace(hardware, network={DATA_AXIS: link})

    return replace(setup, hardware=cache(found))


_EQUAL = (
    "numerics",
    "max_grad_norm",
    "lines",
    "store",
    "resume",
    "durability",
    "scheme",
    "on_breach",
    "adapt",
    "keep_gradients",
    "compile",
)
"""Arguments of `fit` that have the same value on all ranks: they decide on what ranks exchange, or
on what they compute.
"""
_GIVEN_BY_ALL = ("limit", "plan", "blocks", "weight", "split", "weights")
"""Arguments that may have another value on each rank, and are given on all ranks or on none."""


def _described(model: nn.Module, optimizer: torch.optim.Optimizer, asked: Mapping[str, object]) -> str:
    """Describes what must be equal on all ranks."""
    allow = asked["allow"]
    lines = [f"allow={sorted(map(str, allow)) if isinstance(allow, Collection) else allow}"]
    lines += [f"{name}={asked[name]!s}" for name in _EQUAL]
    lines += [f"{name}= is {'left out' if asked[name] is None else 'given'}" for name in _GIVEN_BY_ALL]
    lines += [type(optimizer).__name__, str(len(optimizer.param_groups)), settings_text(optimizer)]
    for name, parameter in model.named_parameters():
        states = optimizer.state.get(parameter, {})
        lines += [
            f"{key!r} of {name!r}: checksum {checksum(value):08x}"
            for key, value in states.items()
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        ]
    return "\n".join(lines)


def _shapes(model: nn.Module) -> str:
    """Describes the parameters, and the process groups of a model that is a part."""
    lines = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    return "\n".join([*lines, *(f"a process group of ranks {ranks} in the model" for ranks in groups_of(model))])
