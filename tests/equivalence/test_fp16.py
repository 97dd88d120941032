"""fp16 beside torch.amp.GradScaler with autocast on the same microbatches: losses, scales, skipped steps, weights and states, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import plans
from memfit.core.errors import PlanError, UsageError
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.schedule import Schedule
from memfit.core.storage_formats import ComputeDtype
from memfit.engine.loss_scaling import LossScaler
from memfit.step.build import build_step
from unit.checking import check_schedule

FP16 = ComputeDtype.FLOAT16
ROWS = 8


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.back = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.back(torch.nn.functional.gelu(self.wide(self.norm(hidden))))


class Net(nn.Module):
    """Three equal layers and a head that is used once."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.rows(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def build() -> Net:
    torch.manual_seed(11)
    return Net()


def batch(step: int) -> Tensor:
    return torch.randint(0, 50, (ROWS, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def scaler_state(scale: float, interval: int) -> dict[str, Any]:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval).state_dict()


class Reference:
    """Plain PyTorch, as its documentation writes it."""

    def __init__(self, microbatches: int, max_norm: float | None, scale: float, interval: int) -> None:
        self.model = build()
        self.optimizer = adamw(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        self.microbatches, self.max_norm = microbatches, max_norm

    def step(self, tokens: Tensor) -> tuple[list[float], float]:
        self.optimizer.zero_grad()
        parts = tokens.chunk(self.microbatches)
        losses: list[float] = []
        for part in parts:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(self.model, part)
            losses.append(loss.item())
            self.scaler.scale(loss * (len(part) / len(tokens)) if len(parts) > 1 else loss).backward()
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return losses, self.scaler.get_scale()


def profile() -> Any:
    model = build()
    return memfit.profile(model, adamw(model), loss_of, batch(0))


def plan_of(where: str) -> Plan:
    found = profile()
    disk = plans.on_disk(found)
    recompute = plans.fates(found, plans.RECOMPUTE)
    made = {
        "resident": Plan(),
        "disk": Plan(blocks=disk),
        "layer-major": Plan(microbatches=4, blocks=disk, calls=recompute, tail=plans.tail(found)),
        "microbatch-major": Plan(microbatches=4, order=Order.MICROBATCH_MAJOR, blocks=disk),
        "atomic": Plan(blocks=disk, is_atomic=True, update=UpdateTime.AFTER_BACKWARD),
        "interleaved": Plan(microbatches=2),
    }[where]
    return Plan(**{**vars(made), "compute_dtype": FP16})


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, directory: Path, **options: Any) -> memfit.Job:
    return memfit.fit(
        model, optimizer, loss_of, batch(0), plan=plan, allow={"fp16"}, directory=directory / "homes", **options
    )


@pytest.mark.parametrize(
    ("where", "max_norm"),
    [
        ("layer-major", None),
        ("microbatch-major", 0.1),
        pytest.param("disk", None, marks=pytest.mark.slow),
        pytest.param("resident", None, marks=pytest.mark.slow),
        pytest.param("atomic", 0.1, marks=pytest.mark.slow),
        pytest.param("interleaved", None, marks=pytest.mark.slow),
        pytest.param("resident", 0.1, marks=pytest.mark.slow),
    ],
)
def test_fp16_training_equals_grad_scaler_with_autocast_bit_for_bit(
    where: str, max_norm: float | None, tmp_path: Path
) -> None:
    plan = plan_of(where)
    model = build()
    optimizer = adamw(model)
    scale, interval = 2.0**26, 2  # overflows at first, and grows often
    reference = Reference(plan.microbatches, max_norm, scale, interval)
    seen: list[bool] = []
    with fit(model, optimizer, plan, tmp_path, max_grad_norm=max_norm) as job:
        assert job.loss_scaler is not None
        job.loss_scaler.load_state_dict(scaler_state(scale, interval))
        for step in range(11):
            before = reference.scaler.get_scale()
            result = job.step(batch(step))
            losses, after = reference.step(batch(step))
            assert list(result.losses) == losses
            assert job.loss_scaler.scale == after
            assert result.is_skipped == (after < before or step == 0)
            assert result.departures == ()
            seen.append(result.is_skipped)
        assert job.loss_scaler.state_dict() == reference.scaler.state_dict()
    assert True in seen[3:] and False in seen, f"overflows and steps on both sides of a growth: {seen}"
    for (name, mine), plain in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(mine, plain), name
        ours, theirs = optimizer.state[mine], reference.optimizer.state[plain]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


@pytest.mark.parametrize("where", ["resident", "disk", "layer-major"])
def test_a_skipped_step_changes_nothing_and_tells_nobody(where: str, tmp_path: Path) -> None:
    model = build()
    optimizer = adamw(model)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("pre"))
    optimizer.register_step_post_hook(lambda *_: heard.append("post"))
    with fit(model, optimizer, plan_of(where), tmp_path) as job:
        assert job.loss_scaler is not None
        assert not job.step(batch(0)).is_skipped
        assert heard == ["pre", "post"]
        with job.weights():
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        states = optimizer.state_dict()
        job.loss_scaler.load_state_dict(scaler_state(2.0**60, 2000))
        assert job.step(batch(1)).is_skipped
        assert job.loss_scaler.scale == 2.0**59
        assert job.loss_scaler.skipped == 1
        assert heard == ["pre", "post"]
        with job.weights():
            assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
        for index, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, states["state"][index][key]) for key, value in state.items())
        job.loss_scaler.load_state_dict(scaler_state(2.0**10, 2000))
        assert not job.step(batch(1)).is_skipped
        assert heard == ["pre", "post"] * 2


def test_the_scale_follows_torch_s_rule_to_both_ends() -> None:
    ours = LossScaler(growth_interval=1)
    theirs: Any = torch.amp.GradScaler("cpu", growth_interval=1)
    theirs.scale(torch.zeros(()))
    update_scale: Any = getattr(torch, "_amp_update_scale_")  # noqa: B009, what GradScaler calls; torch does not export it
    generator = torch.Generator().manual_seed(0)
    for share in (0.5, 0.0, 1.0):
        for _ in range(200):
            overflows = bool(torch.rand((), generator=generator) < share)
            ours.update(has_overflowed=overflows)
            update_scale(
                theirs._scale,
                theirs._growth_tracker,
                torch.tensor(float(overflows)),
                2.0,
                0.5,
                1,  # type: ignore[arg-type]
            )
            assert ours.scale == theirs.get_scale()
    assert ours.state_dict() == theirs.state_dict()
    theirs.load_state_dict(LossScaler(init_scale=8.0).state_dict())
    with pytest.raises(UsageError, match="growth_interval"):
        ours.load_state_dict({"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "_growth_tracker": 0})


@pytest.mark.parametrize("overflows", [True, False])
def test_a_step_whose_commit_fails_leaves_the_scale_as_it_was(
    overflows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with fit(model, adamw(model), plan_of("atomic"), tmp_path) as job:
        assert job.loss_scaler is not None
        job.step(batch(0))
        job.loss_scaler.load_state_dict(scaler_state(2.0**60 if overflows else 2.0**10, 2))
        before = job.loss_scaler.state_dict()

        def fail() -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(job._assembly.house, "commit", fail)
            with pytest.raises(OSError, match="full"):
                job.step(batch(1))
        assert job.loss_scaler.state_dict() == before
        assert job.step(batch(1)).is_skipped is overflows
        assert job.loss_scaler.state_dict() != before


def test_evaluation_runs_in_fp16_and_is_not_scaled(tmp_path: Path) -> None:
    model = build()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        expected = loss_of(build(), batch(3)).item()
    with fit(model, adamw(model), plan_of("disk"), tmp_path) as job:
        assert job.evaluate(batch(3)).loss == expected
    assert not torch.is_autocast_enabled("cpu")


def test_the_schedule_says_scale_unscale_and_check() -> None:
    for where in ("resident", "layer-major"):
        plan = plan_of(where)
        model = build()
        traced = memfit.profile(model, adamw(model), loss_of, batch(0), microbatches=(plan.microbatches,))
        schedule = build_step(plan, traced, clips_norm=True)
        texts = [str(action) for action in schedule.actions]
        assert texts[0] == "scale"
        updates = [i for i, text in enumerate(texts) if text.startswith("update")]
        last = max(i for i, text in enumerate(texts) if text.startswith(("backward", "accumulate")))
        assert last < texts.index("unscale") < texts.index("check") < texts.index("norm") < min(updates)
        assert Schedule.parse(schedule.text()) == schedule
        for dropped in ("scale", "unscale", "check"):
            lame = replace(schedule, actions=tuple(a for a in schedule.actions if str(a) != dropped))
            with pytest.raises(PlanError):
                check_schedule(lame, plan, traced, clips_norm=True)


def test_fp16_has_to_be_allowed() -> None:
    model = build()
    with pytest.raises(UsageError, match='allow={"fp16"}'):
        memfit.fit(model, adamw(model), loss_of, batch(0), plan=plan_of("resident"), allow={"bf16"})
