"""fp16 weights with fp32 masters beside a plain loop over fp16 copies with GradScaler: losses, scales, skipped steps, masters, weights and states, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import plans
from equivalence.test_fp16 import Net, adamw, batch, build, loss_of, scaler_state
from memfit.core.errors import PlanError, UnsupportedError, UsageError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.core.tiers import Tier
from memfit.planner.advise import advise
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict

FP16 = ComputeDtype.FLOAT16_WEIGHTS


class TiedNet(Net):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.rows.weight


def build_tied() -> TiedNet:
    torch.manual_seed(11)
    return TiedNet()


class Reference:
    """Plain PyTorch: an fp16 model, fp32 masters that the optimizer updates, gradients of microbatches added in fp32, and GradScaler's own rules."""

    def __init__(
        self, model: nn.Module, microbatches: int, max_norm: float | None, scale: float, interval: int
    ) -> None:
        self.masters = [nn.Parameter(p.detach().clone().float()) for p in model.parameters()]
        self.model = model.half()
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        self.microbatches, self.max_norm = microbatches, max_norm

    def step(self, tokens: Tensor) -> tuple[list[float], float]:
        self.optimizer.zero_grad()
        parts = tokens.chunk(self.microbatches)
        losses: list[float] = []
        for part in parts:
            loss = loss_of(self.model, part)
            losses.append(loss.item())
            self.scaler.scale(loss * (len(part) / len(tokens)) if len(parts) > 1 else loss).backward()
            for weight, master in zip(self.model.parameters(), self.masters, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float() if master.grad is None else master.grad + weight.grad
                weight.grad = None
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for weight, master in zip(self.model.parameters(), self.masters, strict=True):
                weight.copy_(master)
        return losses, self.scaler.get_scale()


def plan_of(where: str, **options: Any) -> Plan:
    model = build()
    found = memfit.profile(model, adamw(model), loss_of, batch(0))
    disk = plans.on_disk(found)
    recompute = plans.fates(found, plans.RECOMPUTE)
    made = {
        "resident": Plan(),
        "disk": Plan(blocks=disk),
        "layer-major": Plan(microbatches=4, blocks=disk, calls=recompute, tail=plans.tail(found)),
        "microbatch-major": Plan(microbatches=4, order=Order.MICROBATCH_MAJOR, blocks=disk),
        "atomic": Plan(blocks=disk, is_atomic=True, update=UpdateTime.AFTER_BACKWARD),
        "interleaved": Plan(microbatches=2),
        "offload": Plan(microbatches=2, blocks=disk, calls=plans.fates(found, plans.OFFLOAD)),
    }[where]
    return Plan(**{**vars(made), "compute_dtype": FP16, **options})


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, directory: Path, **options: Any) -> memfit.Job:
    allow = {"fp16-weights", *options.pop("allow", ())}
    if "store" not in options and "resume" not in options:
        options["directory"] = directory / "homes"
    return memfit.fit(model, optimizer, loss_of, batch(0), plan=plan, allow=allow, **options)


@pytest.mark.parametrize(
    ("where", "max_norm"),
    [
        ("layer-major", None),
        ("microbatch-major", 0.1),
        ("disk", None),
        pytest.param("resident", None, marks=pytest.mark.slow),
        pytest.param("offload", 0.1, marks=pytest.mark.slow),
        pytest.param("atomic", 0.1, marks=pytest.mark.slow),
        pytest.param("interleaved", None, marks=pytest.mark.slow),
        pytest.param("resident", 0.1, marks=pytest.mark.slow),
    ],
)
def test_fp16_weights_train_as_a_plain_loop_over_fp16_copies_with_grad_scaler_bit_for_bit(
    where: str, max_norm: float | None, tmp_path: Path
) -> None:
    plan = plan_of(where)
    model = build()
    optimizer = adamw(model)
    scale, interval = 2.0**17, 2  # overflows at first, and grows often
    reference = Reference(build(), plan.microbatches, max_norm, scale, interval)
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
            assert result.is_skipped == (after < before)
            assert result.departures == ()
            seen.append(result.is_skipped)
        with job.weights():
            for (name, mine), plain in zip(model.named_parameters(), reference.model.parameters(), strict=True):
                assert mine.dtype is torch.float16
                assert torch.equal(mine, plain), name
        assert job.loss_scaler.state_dict() == reference.scaler.state_dict()
    assert True in seen[3:] and seen.count(False) > 3, f"overflows and steps on both sides of a growth: {seen}"
    for (name, mine), plain in zip(model.named_parameters(), reference.masters, strict=True):
        assert torch.equal(mine, plain), name
        ours, theirs = optimizer.state[mine], reference.optimizer.state[plain]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


def test_a_tied_weight_trains_bit_for_bit_where_microbatches_run_one_after_the_other(tmp_path: Path) -> None:
    reference = Reference(build_tied(), 4, None, 2.0**12, 2000)
    model = build_tied()
    optimizer = adamw(model)
    plan = Plan(microbatches=4, order=Order.MICROBATCH_MAJOR, compute_dtype=FP16)
    with fit(model, optimizer, plan, tmp_path) as job:
        assert job.loss_scaler is not None
        job.loss_scaler.load_state_dict(scaler_state(2.0**12, 2000))
        for step in range(3):
            losses, _ = reference.step(batch(step))
            assert list(job.step(batch(step)).losses) == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.masters, strict=True))


@pytest.mark.parametrize("where", ["disk", "layer-major"])
def test_a_skipped_step_changes_neither_masters_nor_states_nor_weights(where: str, tmp_path: Path) -> None:
    model = build()
    optimizer = adamw(model)
    with fit(model, optimizer, plan_of(where), tmp_path) as job:
        assert job.loss_scaler is not None
        job.loss_scaler.load_state_dict(scaler_state(2.0**10, 2000))
        assert not job.step(batch(0)).is_skipped
        with job.weights():
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        job.save(tmp_path / "before")
        states = optimizer.state_dict()
        job.loss_scaler.load_state_dict(scaler_state(2.0**60, 2000))
        assert job.step(batch(1)).is_skipped
        assert job.loss_scaler.scale == 2.0**59
        job.save(tmp_path / "after")
        with job.weights():
            assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
        for index, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, states["state"][index][key]) for key, value in state.items())
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after"))
    assert first == second


def test_runs_and_saves_go_on_bit_for_bit(tmp_path: Path) -> None:
    """From a store, and from what `Job.save` wrote: masters, states and the scale."""

    def finish(job: memfit.Job, model: nn.Module) -> list[Tensor]:
        with job:
            for step in range(job.steps, 4):
                job.step(batch(step))
        return [p.detach().clone() for p in model.parameters()]

    plan = plan_of("disk")
    whole = build()
    wanted = finish(fit(whole, adamw(whole), plan, tmp_path), whole)
    begun = build()
    with fit(begun, adamw(begun), plan, tmp_path, store=tmp_path / "run") as job:
        for step in range(2):
            job.step(batch(step))
        job.save(tmp_path / "saved")
    for options in ({"store": tmp_path / "run"}, {"resume": tmp_path / "saved"}):
        model = build()
        found = finish(fit(model, adamw(model), plan, tmp_path, **options), model)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_evaluation_and_inference_run_on_fp16_weights_and_are_not_scaled(tmp_path: Path) -> None:
    half = build().half()
    with torch.no_grad():
        expected, logits = loss_of(half, batch(3)).item(), half(batch(3))
    model = build()
    with fit(model, adamw(model), plan_of("disk"), tmp_path) as job:
        assert job.evaluate(batch(3)).loss == expected
        with job.inference():
            assert torch.equal(model(batch(3)), logits)


def test_a_model_that_came_in_fp16_gets_masters_of_its_values(tmp_path: Path) -> None:
    model = build().half()
    given = [p.detach().float() for p in model.parameters()]
    with fit(model, adamw(model), plan_of("disk"), tmp_path) as job:
        job.evaluate(batch(0))
        job.save(tmp_path / "saved")
    other = build()
    with memfit.fit(
        other, adamw(other), loss_of, batch(0), plan=Plan(), weights=tmp_path / "saved", directory=tmp_path / "other"
    ):
        pass
    assert all(torch.equal(a, b.detach()) for a, b in zip(given, other.parameters(), strict=True))


@pytest.mark.slow
def test_states_in_few_bits_go_with_fp16_weights(tmp_path: Path) -> None:
    model = build()
    plan = plan_of("disk", state_format=StateFormat.INT8)
    with fit(model, adamw(model), plan, tmp_path, allow={"int8-state"}) as job:
        assert job.loss_scaler is not None
        job.loss_scaler.load_state_dict(scaler_state(2.0**10, 2000))
        losses = [job.step(batch(0)).loss for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_step_reads_half_of_a_weight_at_each_visit(tmp_path: Path) -> None:
    """Of a block at home on disk, forward and backward each read two bytes a parameter, where autocast reads four; predicted and measured."""
    moved: dict[ComputeDtype, tuple[int, int]] = {}
    for compute, allowed in ((ComputeDtype.FLOAT16, "fp16"), (FP16, "fp16-weights")):
        model = Net(256)  # pages are no longer a large part of it
        plan = plan_of("disk", compute_dtype=compute, prefetch=0)
        with memfit.fit(
            model, adamw(model), loss_of, batch(0), plan=plan, allow={allowed}, directory=tmp_path / allowed
        ) as job:
            assert job.loss_scaler is not None
            job.loss_scaler.load_state_dict(scaler_state(2.0**60, 2000))
            before = job.bytes_moved[0].get("weight", 0)
            assert job.step(batch(0)).is_skipped  # only visits read weights then
            timeline = predict(lower(build_step(plan, job.profile, clips_norm=False), plan, job.profile))
            moved[compute] = job.bytes_moved[0]["weight"] - before, timeline.bytes_read["weight"]
    whole, half = moved[ComputeDtype.FLOAT16], moved[FP16]
    assert 0 < half[0] < 0.51 * whole[0]
    assert half[0] == half[1]


def test_fp16_weights_have_to_be_allowed_and_have_whole_masters() -> None:
    model = build()
    with pytest.raises(UsageError, match='allow={"fp16-weights"}'):
        memfit.fit(model, adamw(model), loss_of, batch(0), plan=plan_of("resident"), allow={"fp16", "bf16"})
    other = build().bfloat16()
    with pytest.raises(UnsupportedError, match="models in fp32 or fp16"):
        memfit.fit(other, adamw(other), loss_of, batch(0), plan=plan_of("resident"), allow={"fp16-weights"})
    with pytest.raises(PlanError, match="splits_masters"):
        Plan(compute_dtype=FP16, splits_masters=True)
    with pytest.raises(PlanError, match="drops_masters"):
        Plan(compute_dtype=FP16, drops_masters=True)
    assert Plan.from_json(plan_of("disk").to_json()) == plan_of("disk")


def test_the_planner_takes_fp16_weights_where_they_are_allowed_and_faster() -> None:
    model = Net(1024)  # in a smaller one, autocast's casts take longer than its products save
    link = Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    hardware = Hardware(
        device="a GPU",
        flops_per_s=1e12,
        tiers={Tier.DEVICE: TierSpec(nbytes=1 << 40), Tier.DISK: TierSpec(nbytes=1 << 40, link=link)},
        bf16_flops_per_s=4e12,
    )
    for allow, expected in (({"fp16-weights"}, {FP16}), ({"fp16"}, {ComputeDtype.FLOAT16})):
        plan = advise(model, adamw(model), loss_of, batch(0), limit="8GiB", allow=allow, hardware=hardware).plan
        assert {plan.compute_dtype} == expected
