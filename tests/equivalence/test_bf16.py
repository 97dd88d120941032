"""bf16 training beside FSDP2's mixed precision on one rank: losses, fp32 gradients, masters and moments, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from equivalence import plans, zoo
from equivalence.compare import Differences, number
from equivalence.fsdp import FsdpTrainer, one_rank
from equivalence.plain import MakeOptimizer, RandomState, adamw, clone_all, clone_states
from equivalence.with_memfit import profile_by_name
from memfit.core.errors import PlanError, UnsupportedError, UsageError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.plan import Plan
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import TIERS, Tier
from memfit.job.loading import load
from memfit.step.lower import lower
from memfit.step.predict import predict

ARCHITECTURES = ("gpt2", "llama", "mixtral", "t5", "bert")
BF16 = ComputeDtype.BFLOAT16

# FSDP2 tells that transformers' outputs may be views; nobody changes them in place here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


def _fit(case: zoo.Case, optimizer: torch.optim.Optimizer, plan: Plan, directory: Path, **options: Any) -> memfit.Job:
    return memfit.fit(
        case.model,
        optimizer,
        case.loss,
        case.batch(0),
        plan=replace(plan, compute_dtype=BF16),
        allow=case.allow | {"bf16"},
        weight=case.weight,
        directory=directory / "homes",
        **options,
    )


def _compare(
    name: str,
    plan: Plan,
    directory: Path,
    *,
    make_optimizer: MakeOptimizer,
    max_grad_norm: float | None = None,
    steps: int = 2,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Trains side by side. A weight that several calls use may differ where microbatches are interleaved: see `_check_reordered`."""
    ours, reference = zoo.ZOO[name](), zoo.ZOO[name]()
    ours.model.to(dtype)
    reference.model.to(dtype).float()
    fsdp = FsdpTrainer(reference, make_optimizer, microbatches=plan.microbatches, max_grad_norm=max_grad_norm)
    random = RandomState(state=fsdp.random.state.clone())
    optimizer = make_optimizer(ours.model)
    job = _fit(ours, optimizer, plan, directory, max_grad_norm=max_grad_norm, keep_gradients=True)
    reorders = plan.microbatches > 1 and plan.order is plans.Order.LAYER_MAJOR
    may_differ = ours.shared if reorders else frozenset[str]()
    try:
        for index in range(steps):
            batch = ours.batch(index)
            with random.in_use():
                result = job.step(batch)
            fsdp.accumulate(batch)
            found = Differences()
            found.compare("losses", list(result.losses), [number(loss) for loss in fsdp.losses])
            norm = fsdp.clip()
            if norm is not None:
                found.compare("norm", result.norm, number(norm.full_tensor()))  # type: ignore[operator]
            gradients = {n: job.gradient(n) for n, _ in ours.model.named_parameters()}
            expected = fsdp.local_gradients()
            for shared in may_differ:
                _check_reordered(fsdp, shared, gradients[shared], expected)
            found.compare_all("gradient of", gradients, expected)
            fsdp.update()
            with job.weights():
                computed = clone_all(ours.model.named_parameters())
            found.compare_all("bf16", computed, {n: w.to(torch.bfloat16) for n, w in fsdp.local_weights().items()})
            found.check(f"step {index} of {name}")
            assert result.departures == ()
    finally:
        job.close()
    found = Differences()
    found.compare_all("master", clone_all(ours.model.named_parameters()), fsdp.local_weights())
    expected_states, states = fsdp.local_states(), clone_states(ours.model, optimizer)
    for parameter in expected_states:
        found.compare_all(f"state of {parameter}:", states[parameter], expected_states[parameter])
    found.check(f"closed {name}")


def _check_reordered(fsdp: FsdpTrainer, name: str, gradient: Any, expected: dict[str, Any]) -> None:
    """FSDP2 adds the uses of one microbatch in bf16, memfit adds each use in fp32: as far apart as a rounding of bf16. Goes on with ours."""
    apart = torch.linalg.vector_norm(gradient - expected[name]) / torch.linalg.vector_norm(expected[name])
    assert apart < 2**-8
    expected[name] = gradient
    fsdp.adopt_local(name, gradient)


_DEFAULT = ("disk-recompute-4", "microbatch-major-4")
_SLOW = {"gpt2": ("offload", "select", "pairs", "atomic", "resident-3", "everything"), "llama": ("clipped",)}


def _pairs() -> list[Any]:
    in_default = {
        ("gpt2", "disk"),
        ("gpt2", _DEFAULT[1]),
        ("t5", _DEFAULT[1]),
        ("llama", _DEFAULT[0]),
        ("mixtral", _DEFAULT[0]),
    }
    return [
        pytest.param(name, variant, marks=[] if (name, variant) in in_default else [pytest.mark.slow])
        for name in ARCHITECTURES
        for variant in (*_DEFAULT, "disk", "resident", *_SLOW.get(name, ()))
    ]


@pytest.mark.parametrize(("name", "variant"), _pairs())
def test_bf16_training_equals_fsdp2_mixed_precision_bit_for_bit(name: str, variant: str, tmp_path: Path) -> None:
    known = plans.BY_NAME[variant]
    if name == "gpt2" and known.max_grad_norm is not None:
        known = replace(known, max_grad_norm=None)  # the tied weight's rounding would be in the norm
    plan = known.plan(profile_by_name(name))
    _compare(name, plan, tmp_path, make_optimizer=adamw(), max_grad_norm=known.max_grad_norm)


def test_a_model_that_comes_in_bf16_starts_its_masters_from_there(tmp_path: Path) -> None:
    plan = plans.BY_NAME["disk"].plan(profile_by_name("llama"))
    _compare("llama", plan, tmp_path, make_optimizer=adamw(), steps=2, dtype=torch.bfloat16)


def test_floating_inputs_are_cast_as_fsdp2_casts_them(tmp_path: Path) -> None:
    _compare("vit", Plan(), tmp_path, make_optimizer=adamw())


class _Rows(nn.Module):
    """Gradients of one weight a microbatch, of very different signs: what a sum in bf16 loses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows).relu()
        return rows


def _square(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).float().square().mean()


@pytest.mark.parametrize("order", list(plans.Order))
def test_the_gradients_of_32_microbatches_add_up_as_in_fp64(order: plans.Order, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rows = _Rows(), torch.randn(32, 48)
    plain = _Rows()
    plain.load_state_dict(model.state_dict())
    plain.bfloat16()
    exact: dict[str, torch.Tensor] = {}
    for row in rows:
        plain.zero_grad()
        (_square(plain, row[None].bfloat16()) / 32).backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            exact[name] = exact.get(name, torch.zeros(())) + p.grad.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = Plan(microbatches=32, order=order, compute_dtype=BF16)
    with memfit.fit(
        model,
        optimizer,
        _square,
        rows,
        plan=plan,
        allow={"bf16", "nonadditive-loss"},
        keep_gradients=True,
        directory=tmp_path / "homes",
    ) as job:
        job.step(rows)
        for name, expected in exact.items():
            gradient = job.gradient(name)
            assert gradient is not None
            assert gradient.dtype is torch.float32
            apart = torch.linalg.vector_norm(gradient.double() - expected) / torch.linalg.vector_norm(expected)
            assert apart < 1e-6, f"{name}: {float(apart)}"


def _small(dtype: torch.dtype = torch.float32) -> tuple[_Rows, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = _Rows().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(8, 48)


def test_states_are_loaded_in_fp32_while_the_parameters_are_bf16(tmp_path: Path) -> None:
    model, optimizer, rows = _small()
    with memfit.fit(model, optimizer, _square, rows, plan=Plan(compute_dtype=BF16), allow={"bf16"}) as job:
        job.step(rows)
        saved = optimizer.state_dict()
        job.step(rows)
        optimizer.load_state_dict(saved)
        loaded = optimizer.state_dict()
        for index, state in saved["state"].items():
            for key, value in state.items():
                assert loaded["state"][index][key].dtype is torch.float32
                assert torch.equal(loaded["state"][index][key], value), key
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [
            id(p) for p in model.parameters()
        ]
        job.step(rows)


def test_a_save_holds_the_masters_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    model, optimizer, rows = _small()
    plan = Plan(compute_dtype=BF16)
    with memfit.fit(model, optimizer, _square, rows, plan=plan, allow={"bf16"}) as job:
        job.step(rows)
        job.save(tmp_path / "save")
        assert job.evaluate(rows).loss == number(_square(model, rows))
        job.step(rows)
    again, other, _ = _small()
    load(tmp_path / "save", again, other)
    with memfit.fit(again, other, _square, rows, plan=plan, allow={"bf16"}) as job:
        job.step(rows)
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert left.dtype is torch.float32
        assert torch.equal(left, right)


@pytest.mark.parametrize("home", TIERS[::2])
def test_what_is_changed_between_steps_becomes_the_master_and_the_rest_keeps_its_digits(
    home: Any, tmp_path: Path
) -> None:
    model, optimizer, rows = _small()
    before = clone_all(model.named_parameters())
    homes = plans.BlockPlan(weight_home=home, state_home=home)
    plan = Plan(blocks={"layers.0": homes, "layers.1": homes}, compute_dtype=BF16)
    job = memfit.fit(model, optimizer, _square, rows, plan=plan, allow={"bf16"}, directory=tmp_path / "homes")
    with job.weights("layers.0"), torch.no_grad():
        model.get_parameter("layers.0.bias").fill_(1 / 3)
    job.close()
    after = clone_all(model.named_parameters())
    third = torch.tensor(1 / 3).bfloat16().float()
    assert torch.equal(after["layers.0.bias"], third.expand(48))
    assert torch.equal(after["layers.0.weight"], before["layers.0.weight"])
    assert torch.equal(after["layers.1.bias"], before["layers.1.bias"])


def test_bf16_is_refused_where_it_is_not_allowed_or_cannot_be() -> None:
    model, optimizer, rows = _small()
    with pytest.raises(UsageError, match=r'allow=\{"bf16"\}'):
        memfit.fit(model, optimizer, _square, rows, plan=Plan(compute_dtype=BF16))
    model, optimizer, rows = _small(torch.float64)
    with pytest.raises(UnsupportedError, match="float64"):
        memfit.fit(model, optimizer, _square, rows, plan=Plan(compute_dtype=BF16), allow={"bf16"})
    model, optimizer, rows = _small()
    _square(model, rows).backward()
    with pytest.raises(UnsupportedError, match="zero_grad"):
        memfit.fit(model, optimizer, _square, rows, plan=Plan(compute_dtype=BF16), allow={"bf16"})


def test_an_atomic_step_wants_a_spare_slot_for_masters_too(tmp_path: Path) -> None:
    model, optimizer, rows = _small()
    homes = plans.BlockPlan(weight_home=plans.Tier.DISK, state_home=plans.Tier.DEVICE)
    plan = Plan(blocks={"layers.0": homes}, is_atomic=True, compute_dtype=BF16)
    with pytest.raises(PlanError, match="spare slot"):
        memfit.fit(model, optimizer, _square, rows, plan=plan, allow={"bf16"}, directory=tmp_path / "homes")


def test_a_plan_in_bf16_reads_back_from_its_json() -> None:
    plan = Plan(compute_dtype=BF16)
    assert Plan.from_json(plan.to_json()) == plan


def test_two_bytes_a_parameter_travel_forward_and_two_backward(tmp_path: Path) -> None:
    """Measured at the disk: 4 microbatches, layer-major, every block away; the last one stays between forward and backward."""
    torch.manual_seed(0)
    model, rows = _Rows(), torch.randn(8, 48)
    homes = plans.ON_DISK
    plan = Plan(microbatches=4, blocks={"layers.0": homes, "layers.1": homes}, prefetch=0, compute_dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters())
    allow = {"bf16", "nonadditive-loss"}
    with memfit.fit(model, optimizer, _square, rows, plan=plan, allow=allow, directory=tmp_path / "homes") as job:
        job.step(rows)
        read, written = job.bytes_moved
        job.step(rows)
        read_after, written_after = job.bytes_moved
        predicted = predict(lower(job.schedule, plan, job.profile))
    # Each parameter begins on a page: 48 * 48 * 2 bytes take two, a bias one.
    block = 3 * 4096
    assert predicted.bytes_read["weight"] == 3 * block
    assert read_after["weight"] - read["weight"] == 3 * block
    assert set(read_after) >= {"weight", "master", "state"}
    assert written_after["master"] > written["master"]
    assert written_after["weight"] > written["weight"]


@pytest.mark.parametrize("allow", [frozenset[str](), frozenset({"bf16"})], ids=["exact", "bf16"])
def test_the_planner_takes_bf16_only_where_it_is_allowed(allow: frozenset[str]) -> None:
    model, optimizer, rows = _small()
    machine = Hardware(
        device="cpu",
        flops_per_s=1e9,
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 36),
            Tier.DISK: TierSpec(nbytes=1 << 36, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)),
        },
        bf16_flops_per_s=1e12,
    )
    with memfit.fit(
        model, optimizer, _square, rows, limit="64GiB", enforce=False, hardware=machine, allow=allow
    ) as job:
        assert job.plan.compute_dtype is (BF16 if allow else ComputeDtype.GIVEN)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if allow else torch.float32}
        job.step(rows)


def test_a_fit_that_is_refused_gives_a_bf16_model_back_as_it_was() -> None:
    model, optimizer, rows = _small(torch.bfloat16)
    before = clone_all(model.named_parameters())

    def depends_on_all_rows(given: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return given(batch).float().sum(0).square().sum()

    with pytest.raises(UnsupportedError, match="does not add up"):
        memfit.fit(
            model, optimizer, depends_on_all_rows, rows, plan=Plan(microbatches=2, compute_dtype=BF16), allow={"bf16"}
        )
    found = Differences()
    found.compare_all("weight", clone_all(model.named_parameters()), before)
    found.check("the model")
