"""Split masters train as whole ones do, bit for bit, and rest in 17 bits a parameter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import plans, zoo
from equivalence.compare import Differences
from equivalence.plain import adamw, clone_all, clone_states
from equivalence.with_memfit import profile_by_name
from memfit.core.errors import PlanError, StoreError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.homes.masters import SplitMasters
from memfit.job.loading import load
from memfit.step.lower import lower
from memfit.step.predict import predict

BF16 = ComputeDtype.BFLOAT16


def _with_ties(model: torch.nn.Module) -> None:
    """Some weights half-way between two bf16 numbers, rounded up as well as down."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.data.view(-1)
            flat[::5] = 1 + 2**-8
            flat[1::5] = -(1 + 3 * 2**-8)
            flat *= 2**-6


def _train(case: zoo.Case, plan: Plan, directory: Path, *, steps: int = 3) -> tuple[list[Any], dict[str, Any], Any]:
    _with_ties(case.model)
    optimizer = adamw()(case.model)
    job = memfit.fit(
        case.model, optimizer, case.loss, case.batch(0), plan=plan, allow=case.allow | {"bf16"}, weight=case.weight,
        directory=directory / "homes",
    )  # fmt: skip
    with job:
        torch.manual_seed(1)
        losses = [x for index in range(steps) for x in job.step(case.batch(index)).losses]
        job.save(directory / "save")
        losses.append(job.step(case.batch(steps)).loss)
    return losses, clone_all(case.model.named_parameters()), clone_states(case.model, optimizer)


_CHEAP = ("disk", "disk-recompute-4", "microbatch-major-4", "atomic", "everything")
_SLOW = ("disk-recompute-4", "microbatch-major-4", "atomic", "offload", "resident", "clipped", "everything")


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *(("sequential", variant) for variant in _CHEAP),
        *(pytest.param(n, v, marks=pytest.mark.slow) for n in ("gpt2", "llama", "mixtral", "t5") for v in _SLOW),
    ],
)
def test_split_masters_train_as_whole_ones_bit_for_bit(name: str, variant: str, tmp_path: Path) -> None:
    plan = replace(plans.BY_NAME[variant].plan(profile_by_name(name)), compute_dtype=BF16)
    (tmp_path / "whole").mkdir()
    (tmp_path / "split").mkdir()
    losses, masters, states = _train(zoo.ZOO[name](), plan, tmp_path / "whole")
    split = zoo.ZOO[name]()
    split_losses, split_masters, split_states = _train(split, replace(plan, splits_masters=True), tmp_path / "split")
    found = Differences()
    found.compare("losses", split_losses, losses)
    found.compare_all("master", split_masters, masters)
    for parameter in states:
        found.compare_all(f"state of {parameter}:", split_states[parameter], states[parameter])
    saves = [zoo.ZOO[name]().model for _ in range(2)]
    for model, kind in zip(saves, ("whole", "split"), strict=True):
        load(tmp_path / kind / "save", model)
    found.compare_all("saved", clone_all(saves[1].named_parameters()), clone_all(saves[0].named_parameters()))
    found.check(f"{name}, {variant}")


def test_a_model_born_empty_with_split_masters_trains_as_one_built_plainly_with_whole_ones(tmp_path: Path) -> None:
    plan = replace(plans.BY_NAME["disk-recompute-4"].plan(profile_by_name("llama")), compute_dtype=BF16)
    trained: list[dict[str, torch.Tensor]] = []
    for is_born in (False, True):
        case = zoo.ZOO["llama"]()
        model = memfit.empty(lambda: zoo.ZOO["llama"]().model) if is_born else case.model
        optimizer = adamw()(model)
        job = memfit.fit(
            model, optimizer, case.loss, case.batch(0), plan=replace(plan, splits_masters=is_born),
            allow=case.allow | {"bf16"}, weight=case.weight, directory=tmp_path / f"homes-{is_born}",
        )  # fmt: skip
        with job:
            torch.manual_seed(1)
            for index in range(2):
                job.step(case.batch(index))
        trained.append(clone_all(model.named_parameters()))
    found = Differences()
    found.compare_all("master", trained[1], trained[0])
    found.check("llama")


def test_what_is_changed_between_steps_becomes_the_master_and_the_rest_keeps_its_digits(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 7, bias=False))
    _with_ties(model)
    before = clone_all(model.named_parameters())
    disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    plan = Plan(blocks={"0": disk}, compute_dtype=BF16, splits_masters=True)
    rows = torch.randn(4, 33)
    job = memfit.fit(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).float().square().mean(), rows, plan=plan,
        allow={"bf16"}, directory=tmp_path / "homes",
    )  # fmt: skip
    with job.weights(), torch.no_grad():
        model.get_parameter("0.bias").fill_(1 / 3)
        model.get_parameter("1.weight").mul_(3)
    job.close()
    after = clone_all(model.named_parameters())
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["0.bias"], torch.tensor(1 / 3).bfloat16().float().expand(65))
    assert torch.equal(after["1.weight"], (before["1.weight"].bfloat16() * 3).float())


def test_a_step_moves_and_keeps_what_is_predicted(tmp_path: Path) -> None:
    """Measured at the disk: of 256 x 512 weights and 512 biases, 17 bits each beside the weights."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512)) for _ in range(2)))
    homes = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    rows, optimizer = torch.randn(4, 512), torch.optim.AdamW(model.parameters())

    def loss(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x).float().square().mean()

    names = [block.name for block in memfit.profile(model, optimizer, loss, rows).blocks]
    plan = Plan(blocks=dict.fromkeys(names, homes), compute_dtype=BF16, splits_masters=True)
    with memfit.fit(model, optimizer, loss, rows, plan=plan, allow={"bf16"}, directory=tmp_path / "homes") as job:
        job.step(rows)
        read, written = job.bytes_moved
        job.step(rows)
        read_after, written_after = job.bytes_moved
        predicted = predict(lower(job.schedule, plan, job.profile))
        kept = sum(f.stat().st_size for f in (tmp_path / "homes").rglob("*") if f.is_file())
    page = 4096
    block = 512 * 512 * 2 + 512 * 512 // 8 + 2 * page
    for category, nbytes in (("master", 2 * block), ("weight", 2 * (512 * 512 * 2 + page))):
        assert predicted.bytes_written[category] == nbytes
        assert written_after[category] - written[category] <= nbytes
        assert written_after[category] - written[category] > 0.9 * nbytes
    assert read_after["master"] - read["master"] <= predicted.bytes_read["master"] == 2 * block
    assert predicted.peak_in(Tier.DISK) <= kept <= predicted.peak_in(Tier.DISK) + (1 << 20)


def test_there_must_be_masters_to_split() -> None:
    with pytest.raises(PlanError, match="compute_dtype='bfloat16'"):
        Plan(splits_masters=True)
    plan = Plan(splits_masters=True, compute_dtype=BF16)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_fit_that_fails_half_way_gives_the_weights_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Linear(48, 48), torch.nn.Linear(48, 48))
    _with_ties(model)
    before = clone_all(model.named_parameters())
    disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    plan = Plan(blocks={"0": disk, "1": disk, "2": disk}, compute_dtype=BF16, splits_masters=True)
    writes: list[int] = []
    plain = SplitMasters.write

    def fails(home: SplitMasters, *args: Any) -> Any:
        writes.append(1)
        if len(writes) == 4:
            raise StoreError("the disk is full")
        return plain(home, *args)

    monkeypatch.setattr(SplitMasters, "write", fails)
    with pytest.raises(StoreError, match="the disk is full"):
        memfit.fit(
            model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).float().square().mean(),
            torch.randn(4, 48), plan=plan, allow={"bf16"}, directory=tmp_path / "homes",
        )  # fmt: skip
    found = Differences()
    found.compare_all("weight", clone_all(model.named_parameters()), before)
    found.check("a fit that failed")
