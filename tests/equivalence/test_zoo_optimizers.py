"""Optimizers, schedules and uneven splits, where the plan is the hard one: everything on disk, recompute, microbatches.

SGD with a learning rate of 1 shows every bit of a gradient in the weights, without memfit being asked to hold gradients
for the test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from equivalence import plans, zoo
from equivalence.compare import JobLike, assert_equal_training, number
from equivalence.plain import MakeOptimizer, PlainTrainer, RandomState, adamw, rows_of, sgd, split_rows
from equivalence.with_memfit import fit_variant, fit_with, profile_by_name
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.optimizers import OptimizerDriver


def _every_third(names: Sequence[Any]) -> list[Any]:
    """All as parameters; two of three run only with `--slow`."""
    return [pytest.param(name, marks=[pytest.mark.slow] if place % 3 else []) for place, name in enumerate(names)]


@pytest.mark.parametrize("name", _every_third(sorted(zoo.ZOO)))
def test_a_plain_sgd_step_of_one_shows_every_bit_of_the_gradients(name: str, tmp_path: Path) -> None:
    # Batches that may not be split, and weights whose gradients may round otherwise in a split, meet the plan without one.
    is_whole = name in zoo.WHOLE_BATCH_ONLY or bool(zoo.ZOO[name]().shared)
    variant = plans.BY_NAME["disk" if is_whole else "disk-recompute-4"]
    report = assert_equal_training(
        zoo.ZOO[name],
        sgd(lr=1.0),
        fit_variant(name, variant, tmp_path),
        microbatches=variant.microbatches,
        steps=2,
        has_gradients=False,
        may_reorder=False,
    )
    assert all(loss == loss for loss in report.losses), "NaN hides everything"


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices only, another learning rate for the rest: as most recipes have it."""
    matrices = [p for p in _trained(model) if p.ndim > 1]
    others = [p for p in _trained(model) if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)


def _over_all(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: kind(_trained(model), **options)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw(),
    "adamw-foreach": adamw(foreach=True),
    "adamw-fused": adamw(fused=True),
    "adamw-amsgrad": adamw(amsgrad=True, maximize=True),
    "adamw-groups": _two_groups,
    "adam": _over_all(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "sgd": sgd(lr=0.1),
    "sgd-momentum": sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": _over_all(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": _over_all(torch.optim.Adagrad, lr=1e-2),
    "nadam": _over_all(torch.optim.NAdam, lr=1e-2),
    "radam": _over_all(torch.optim.RAdam, lr=1e-2),
    "adafactor": _over_all(torch.optim.Adafactor, lr=1e-2),
}


def _optimizer_pairs() -> list[object]:
    """All under the hard plan; the easy ones in turn, the rest with `--slow`."""
    pairs: list[object] = []
    for place, name in enumerate(OPTIMIZERS):
        for plan in ("disk-recompute-4", "resident", "clipped"):
            is_default = plan == "disk-recompute-4" or plan == ("resident", "clipped")[place % 2]
            pairs.append(pytest.param(name, plan, marks=[] if is_default else [pytest.mark.slow]))
    return pairs


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "plan"), _optimizer_pairs())
def test_optimizers_update_weights_and_states_bit_for_bit(name: str, plan: str, tmp_path: Path) -> None:
    variant = plans.BY_NAME[plan]
    assert_equal_training(
        zoo.ZOO["unused"],
        OPTIMIZERS[name],
        fit_variant("unused", variant, tmp_path, keep_gradients=True),
        microbatches=variant.microbatches,
        max_grad_norm=variant.max_grad_norm,
        # RAdam's formula changes at its sixth step.
        steps=7 if name == "radam" else 3,
        may_reorder=False,
    )


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in _trained(model) if p.ndim == 2], lr=1e-2)


def _only_matrices_train() -> zoo.Case:
    case = zoo.ZOO["sequential"]()
    for parameter in case.model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    return replace(case, untouched=None)


@pytest.mark.thinned
@pytest.mark.parametrize("plan", ["resident", "disk-recompute-4", "clipped"])
@pytest.mark.parametrize("build", [_only_matrices_train, zoo.ZOO["sequential"]], ids=["frozen", "not-held"])
def test_muon_updates_whole_matrices_and_leaves_what_it_does_not_hold(
    build: Callable[[], zoo.Case], plan: str, tmp_path: Path
) -> None:
    variant = plans.BY_NAME[plan]
    assert_equal_training(
        build,
        _muon,
        fit_variant("sequential", variant, tmp_path, keep_gradients=True),
        microbatches=variant.microbatches,
        max_grad_norm=variant.max_grad_norm,
        may_reorder=False,
    )


@pytest.mark.parametrize("plan", ["resident", "disk-recompute-4"])
def test_a_learning_rate_schedule_takes_effect_at_the_step_it_names(plan: str, tmp_path: Path) -> None:
    variant = plans.BY_NAME[plan]
    ours, reference = zoo.ZOO["llama"](), zoo.ZOO["llama"]()
    optimizer, plain_optimizer = adamw()(ours.model), adamw()(reference.model)
    plain = PlainTrainer(reference, plain_optimizer, microbatches=variant.microbatches)
    random = RandomState(state=plain.random.state.clone())
    job = fit_variant("llama", variant, tmp_path)(ours, optimizer)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)) for o in (optimizer, plain_optimizer)]
    for step in range(3):
        plain.accumulate(reference.batch(step))
        plain.update()
        with random.in_use():
            result = job.step(ours.batch(step))
        assert list(result.losses) == [number(loss) for loss in plain.losses]
        for schedule in schedules:
            schedule.step()
    job.close()
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, reference.model.get_parameter(name)), name


@pytest.mark.parametrize("microbatches", _every_third([3, 2, 5, 7, 8]))
def test_any_split_of_the_rows_equals_accumulation_in_the_same_split(microbatches: int, tmp_path: Path) -> None:
    plan = replace(plans.BY_NAME["disk-recompute-4"].plan(profile_by_name("llama")), microbatches=microbatches)
    assert_equal_training(
        zoo.ZOO["llama"],
        adamw(),
        fit_with(plan, tmp_path, keep_gradients=True),
        microbatches=microbatches,
        steps=2,
        may_reorder=False,
    )


def test_the_public_helper_seeds_a_plain_loop_as_memfit_seeds_its_microbatches() -> None:
    ours, reference = zoo.ZOO["gpt2"](), zoo.ZOO["gpt2"]()
    plain = PlainTrainer(reference, sgd()(reference.model), microbatches=3)
    random = RandomState(state=plain.random.state.clone())
    for step in range(2):
        plain.accumulate(reference.batch(step))
        batch = ours.batch(step)
        losses: list[float] = []
        with random.in_use():
            streams = memfit.microbatch_streams(3)
            for m, part in enumerate(split_rows(batch, 3)):
                with streams(m):
                    losses.append(number(ours.loss(ours.model, part)))
        assert losses == [number(loss) for loss in plain.losses]
        assert torch.equal(random.state, plain.random.state)


def test_one_stream_leaves_the_generator_as_a_plain_step_uses_it() -> None:
    random, plain = RandomState.seeded(3), RandomState.seeded(3)
    with random.in_use(), memfit.microbatch_streams(1)(0):
        ours = torch.rand(4)
    with plain.in_use():
        expected = torch.rand(4)
    assert torch.equal(ours, expected)
    assert torch.equal(random.state, plain.state)


def test_a_loss_that_returns_sum_and_count_is_weighted_by_its_counts(tmp_path: Path) -> None:
    def sum_and_count(model: nn.Module, batch: zoo.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        count = (batch["labels"] != -100).sum()
        return model(**batch).loss * count, count

    ours, reference = zoo.ZOO["bert"](), zoo.ZOO["bert"]()
    job: JobLike = memfit.fit(
        ours.model,
        sgd(lr=0.1)(ours.model),
        sum_and_count,
        ours.batch(0),
        plan=Plan(microbatches=3),
        directory=tmp_path / "homes",
        keep_gradients=True,
    )
    plain_optimizer = sgd(lr=0.1)(reference.model)
    random, plain_random = RandomState.seeded(5), RandomState.seeded(5)
    batch = ours.batch(0)
    with random.in_use():
        result = job.step(batch)
    with plain_random.in_use():
        streams = memfit.microbatch_streams(3)
        parts = split_rows(batch, 3)
        total = sum(float((part["labels"] != -100).sum()) for part in parts)
        loss = 0.0
        for m, part in enumerate(parts):
            with streams(m):
                value, _ = sum_and_count(reference.model, part)
                (value / total).backward()
                loss += number(value) / total
    assert number(result.loss) == pytest.approx(loss, rel=1e-6)
    for name, parameter in reference.model.named_parameters():
        gradient = job.gradient(name)
        assert gradient is not None
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-7, msg=name)
    plain_optimizer.step()
    job.close()


def test_the_weight_of_rows_is_their_number() -> None:
    assert rows_of({"x": torch.zeros(3, 2)}) == 3.0


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("where", ["device", "disk"])
def test_parameters_of_a_resident_block_are_updated_in_one_step_of_the_class(
    where: str, monkeypatch: pytest.MonkeyPatch, *, foreach: bool | None
) -> None:
    """Where nothing of them comes or goes; all at once in memory no more than the largest alone."""
    together: list[list[str]] = []
    plain_update = OptimizerDriver.update_together

    def noted(self: OptimizerDriver, lent: Any) -> Any:
        together.append([name for name, *_ in lent])
        return plain_update(self, lent)

    standing_update = OptimizerDriver.update_standing

    def noted_standing(self: OptimizerDriver, lent: Any) -> Any:
        together.append([standing.name for standing, *_ in lent])
        return standing_update(self, lent)

    monkeypatch.setattr(OptimizerDriver, "update_together", noted)
    monkeypatch.setattr(OptimizerDriver, "update_standing", noted_standing)

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)

    def loss(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
        return model(values).square().mean()

    (ours, our_optimizer), (theirs, optimizer) = new(), new()
    homes = BlockPlan(weight_home=Tier(where), state_home=Tier(where))
    with memfit.fit(ours, our_optimizer, loss, torch.ones(2, 8), plan=Plan(blocks={"0": homes, "1": homes})) as job:
        for _ in range(3):
            job.step(torch.ones(2, 8))
            loss(theirs, torch.ones(2, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    joined = where == "device" and foreach is None  # a bias does not fit beside its weight
    assert together == ([["1.weight", "1.bias"], ["0.weight", "0.bias"]] * 2 if joined else [])
