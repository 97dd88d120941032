"""Cures that `memfit.fit` names for its arguments and plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.plan import Plan
from memfit.core.storage_formats import ComputeDtype, FrozenFormat, StateFormat
from unit.advice import BATCH, ON_DISK, Scene, follows, loss


def steps(job: memfit.Job, batch: Any = BATCH) -> None:
    assert job.step(batch).is_finite
    job.close()


# --- arguments -----------------------------------------------------------------------------------


@follows("planner/compiled_blocks.py", "rounds otherwise than plain PyTorch: leave it out")
def exact_steps_are_not_compiled(s: Scene) -> None:
    s.refused(lambda: s.fit(compile="blocks", numerics="exact"))
    steps(s.fit(numerics="exact"))
    s.trains_as(lambda model: loss(model, BATCH).backward())
    s.begin()
    steps(s.fit(compile="blocks"))


@follows("planner/compiled_blocks.py", 'compile="blocks" is for job.step of one process')
def lines_are_not_compiled(s: Scene) -> None:
    s.refused(lambda: s.fit(compile="blocks", lines=True))
    s.fit(lines=True).close()
    steps(s.fit(compile="blocks"))


@follows("planner/compiled_blocks.py", "needs a C++ compiler")
def a_compiler_is_put_on_the_path(s: Scene) -> None:
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("PATH", str(s.directory))
        machine.delenv("CXX", raising=False)
        s.refused(lambda: s.fit(compile="blocks"))
        steps(s.fit())
    steps(s.fit(compile="blocks"))


@follows("planner/problem.py", "loss is called as loss(model, batch), which")
def a_criterion_is_called_with_outputs_and_targets(s: Scene) -> None:
    criterion, batch = nn.MSELoss(), (BATCH, BATCH.flip(0))
    s.refused(lambda: s.fit(criterion))
    with memfit.fit(s.model, s.optimizer, lambda model, batch: criterion(model(batch[0]), batch[1]), batch) as job:
        job.step(batch)
    s.trains_as(lambda model: criterion(model(batch[0]), batch[1]).backward())


@follows("planner/problem.py", "max_grad_norm must be a number above 0, not")
def a_norm_to_clip_to_or_none(s: Scene) -> None:
    s.refused(lambda: s.fit(max_grad_norm=0))
    steps(s.fit(max_grad_norm=None))
    s.begin()
    steps(s.fit(max_grad_norm=0.5))


@follows("planner/problem.py", "a live job has this optimizer, and its model, in hand")
def an_optimizer_after_its_job(s: Scene) -> None:
    job = s.fit(plan=ON_DISK)
    other = nn.Linear(8, 8)
    s.refused(lambda: memfit.fit(other, s.optimizer, loss, BATCH))
    job.close()
    steps(s.fit(plan=ON_DISK))


@follows("planner/problem.py", "plan must be a Plan, its JSON text or a path to it, not")
def a_plan_its_text_or_a_path(s: Scene) -> None:
    s.refused(lambda: s.fit(plan=7))
    (s.directory / "plan.json").write_text(ON_DISK.to_json())
    for plan in (ON_DISK, ON_DISK.to_json(), s.directory / "plan.json"):
        steps(s.fit(plan=plan))


class OverAll(torch.optim.SGD):
    """Divides the learning rate by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        norm = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad * (0.1 / norm))


@follows("planner/problem.py", "must see all parameters at once (")
def an_optimizer_of_single_parameters(s: Scene) -> None:
    s.optimizer = OverAll(s.model.parameters(), lr=0.1)
    s.refused(s.fit)
    s.begin()
    steps(s.fit())


def wide(s: Scene) -> None:
    torch.manual_seed(0)
    s.model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)


@follows("planner/problem.py", "the plan keeps optimizer states in")
def states_in_few_bits_that_are_allowed(s: Scene) -> None:
    wide(s)
    plan = Plan(state_format=StateFormat("int8"))
    s.refused(lambda: s.fit(plan=plan))
    steps(s.fit(plan=plan, allow={"int8-state"}))


@follows("planner/problem.py", "the plan computes in")
def bf16_that_is_allowed(s: Scene) -> None:
    plan = Plan(compute_dtype=ComputeDtype.BFLOAT16)
    s.refused(lambda: s.fit(plan=plan))
    steps(s.fit(plan=plan, allow={"bf16"}))


@follows("planner/problem.py", "which rounds them once: fit(..., allow={")
def frozen_weights_in_few_bits_that_are_allowed(s: Scene) -> None:
    wide(s)
    s.model[0].requires_grad_(requires_grad=False)
    plan = Plan(frozen_format=FrozenFormat("int8"))
    s.refused(lambda: s.fit(plan=plan))
    steps(s.fit(plan=plan, allow={"int8-frozen"}))


@follows("machine/limits_of_process.py", "a number counts bytes. Write it with its unit")
def a_limit_with_its_unit(s: Scene) -> None:
    s.refused(lambda: s.fit(limit=8))
    steps(s.fit(limit="4GiB"))


@follows("machine/limits_of_process.py", "nobody could be held to it. Give less, or None for no limit")
def a_limit_that_the_machine_has(s: Scene) -> None:
    s.refused(lambda: s.fit(limit="800TiB"))
    for limit in ("4GiB", None):
        steps(s.fit(limit=limit))
