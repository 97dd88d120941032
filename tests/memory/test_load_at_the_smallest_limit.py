"""At the smallest limit that a device is named no phase passes it, the load included, whatever the load does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import DoesNotFitError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import MIB
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import installed

MACHINE = Hardware(
    device="cpu",
    flops_per_s=5e10,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 34),
        Tier.HOST: TierSpec(nbytes=1 << 34, link=Link(read_bytes_per_s=4e9, write_bytes_per_s=4e9)),
        Tier.DISK: TierSpec(nbytes=1 << 34, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)),
    },
)
TOO_SMALL = 1 << 16
BELOW = 0.97


def _of_other_tests() -> int:
    """Bytes of tensors that are alive already, which count in the limit of an emulated device."""
    gc.collect()
    allocator = installed()
    return 0 if allocator is None else allocator.stats().live_bytes


def _tower() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(2)])


def _pictures() -> nn.Module:
    """A convolution, which is tried out on some MiB to find out what it takes inside, and more weights than a step takes."""
    stem = nn.Sequential(nn.Conv2d(3, 512, 16, stride=16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, *[nn.Linear(512, 512) for _ in range(16)])


def _frozen() -> nn.Module:
    """Weights that are encoded on their way home, and one whose elements do not lie together."""
    model = nn.Sequential(*_tower().requires_grad_(False).children(), nn.Linear(256, 8))
    apart = torch.randn(256, 1024)[:, ::2].t()
    model.get_submodule("1.0").register_parameter("weight", nn.Parameter(apart, requires_grad=False))
    return model


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how.

    Attributes:
        about: name of the test.
        build: the model.
        x: the batch's shape.
        allow: declared changes of arithmetic.
        steps_before: steps of plain PyTorch before `fit`, whose states are on the device then.
        stores: the run is committed, and goes on at the same limit.
    """

    about: str
    build: Callable[[], nn.Module] = _tower
    x: tuple[int, ...] = (8, 256)
    allow: frozenset[str] = field(default_factory=frozenset)
    steps_before: int = 0
    stores: bool = False

    def fit(self, limit: int, directory: Path, **more: Any) -> tuple[memfit.Job, dict[str, Tensor]]:
        """Fits a new model."""
        gc.collect()  # the model of the fit before
        torch.manual_seed(0)
        model, batch = self.build(), {"x": torch.randn(self.x)}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for _ in range(self.steps_before):
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if self.stores:
            more["store"] = directory / "run"
        more.setdefault("hardware", MACHINE)
        job = memfit.fit(
            model,
            optimizer,
            _loss,
            batch,
            limit=limit,
            emulate_device=True,
            allow=self.allow,
            numerics="auto" if self.allow else "exact",
            directory=directory / "homes",
            **more,
        )
        return job, batch

    def smallest(self, directory: Path) -> int:
        """The limit that a refusal names."""
        with pytest.raises(DoesNotFitError) as caught:
            self.fit(TOO_SMALL, directory)
        named = caught.value.smallest_limit_bytes
        assert named is not None
        return named


CASES = (
    Case(about="trials of convolutions", build=_pictures, x=(16, 3, 128, 128)),
    Case(about="states that are there before", steps_before=1),
    Case(about="bf16", x=(1, 256), allow=frozenset({"bf16"})),
    Case(about="few bits", build=_frozen, x=(1, 256), allow=frozenset({"nf4-frozen"})),
    Case(about="a store", stores=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.about)
def test_every_phase_stays_inside_the_smallest_limit(case: Case, tmp_path: Path) -> None:
    smallest = case.smallest(tmp_path)
    with pytest.raises(DoesNotFitError):
        case.fit(int(BELOW * smallest), tmp_path)

    def check(job: memfit.Job, limit: int = smallest) -> None:
        held = {phase.name: phase.held_peak_bytes for phase in job.proof().phases}
        assert max(held.values()) <= limit, held
        assert job.proof().holds, job.proof().line()

    # The probe makes tensors, too: once is enough.
    job, batch = case.fit(smallest, tmp_path, hardware=None if case.build is _pictures else MACHINE)
    with job:
        assert all(job.step(batch).is_finite for _ in range(2))
        job.evaluate(batch)
        job.save(tmp_path / "saved")
        if not case.stores:
            job.load(tmp_path / "saved")
        check(job)
    del job, batch  # they would be alive beside the next ones
    if case.stores:
        limit = smallest + 4096  # for the few bytes that are alive of the job before
        job, batch = case.fit(limit, tmp_path)
        with job:
            assert job.steps == 2
            assert job.step(batch).is_finite
            check(job, limit)


def test_a_block_that_stays_is_moved_where_the_device_has_no_room_for_it_twice(tmp_path: Path) -> None:
    """All weights stay, 16 MiB in blocks of four; the limit leaves less than a block beside them."""

    def build() -> nn.Module:
        blocks = [nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]) for _ in range(4)]
        return nn.Sequential(*blocks).requires_grad_(False).append(nn.Linear(512, 2))

    case = Case(about="", build=build, x=(2, 512))
    limit = _of_other_tests() + 19 * MIB
    job, batch = case.fit(limit, tmp_path, plan=Plan(), blocks=[str(i) for i in range(5)])
    with job:
        result = job.step(batch)
        held = {phase.name: phase.held_peak_bytes for phase in job.proof().phases}
        assert max(held.values()) <= limit
    torch.manual_seed(0)
    plain = build()
    assert result.loss == _loss(plain, {"x": torch.randn(2, 512)}).item()


def test_a_given_plan_is_refused_where_the_model_as_it_was_built_passes_the_limit(tmp_path: Path) -> None:
    case = Case(about="", build=lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(40)]))
    homes = BlockPlan(weight_home=Tier.HOST, gradient_home=Tier.HOST, state_home=Tier.HOST)
    plan = Plan(blocks=dict.fromkeys(map(str, range(40)), homes))
    job, batch = case.fit(_of_other_tests() + 16 * MIB, tmp_path, plan=plan)
    with job:
        assert job.step(batch).is_finite
        steps = max(phase.held_peak_bytes for phase in job.proof().phases if phase.name != "load")
    del job, batch
    with pytest.raises(DoesNotFitError, match="are there at first"):
        case.fit(steps + 2 * MIB, tmp_path, plan=plan)
