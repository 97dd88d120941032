"""Models that are built without their weights' bytes: the same bits as plain building and plain loading, and they train as those do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import plans, zoo
from equivalence.compare import assert_equal_training, same_bits
from equivalence.plain import adamw
from equivalence.with_memfit import fit_case, fit_variant
from memfit.core.errors import AwayError, StoreError, UsageError
from memfit.files import recording as recorder
from memfit.files.origin import build_empty, find_origins
from memfit.tensors.guard import is_away


def built_empty(build: Callable[[], nn.Module], *, draws: bool = True) -> nn.Module:
    """Built empty, down to the smallest parameter."""
    return build_empty(build, draws=draws, least_bytes=1)


def bring_all(model: nn.Module) -> None:
    for origin in find_origins(model):
        origin.bring(model.parameters())


def assert_same_model(ours: nn.Module, plain: nn.Module) -> None:
    for mine, theirs in (
        (dict(ours.named_parameters()), dict(plain.named_parameters())),
        (dict(ours.named_buffers()), dict(plain.named_buffers())),
        (ours.state_dict(), plain.state_dict()),
    ):
        assert list(mine) == list(theirs)
        for name, tensor in mine.items():
            other = theirs[name]
            assert same_bits(tensor.detach(), other.detach()), name
            assert (tensor.stride(), tensor.requires_grad) == (other.stride(), other.requires_grad), name


def slow_unless(names: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=[] if name in names else [pytest.mark.slow]) for name in zoo.ZOO]


@pytest.fixture(params=["untouched", "without bytes"])
def deferral(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a deferred tensor costs nothing: as on a CPU, or as on a GPU."""
    if request.param == "without bytes":
        monkeypatch.setattr(recorder, "_untouch", lambda storage: storage.resize_(0))
    return request.param


@pytest.mark.parametrize("name", slow_unless(zoo.CORE))
@pytest.mark.usefixtures("deferral")
def test_a_model_built_empty_gets_the_bits_and_leaves_the_generator_of_plain_building(name: str) -> None:
    plain = zoo.ZOO[name]().model
    after = torch.get_rng_state()
    ours = built_empty(lambda: zoo.ZOO[name]().model)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(is_away(p) for p in ours.parameters())
    bring_all(ours)
    assert find_origins(ours) == []
    assert torch.equal(torch.get_rng_state(), after)
    assert_same_model(ours, plain)


class Odd(nn.Module):
    """What initialisations do beyond filling: decompositions, copies, parts, layouts, values asked for, generators of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Linear(20, 30)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.orthogonal.bias)
        self.scaled = nn.Parameter(torch.randn(20, 30) * 0.02)
        self.partly = nn.Parameter(torch.zeros(40, 10))
        self.partly.data[3] = 2.0
        self.embedding = nn.Embedding(50, 20, padding_idx=2)
        self.recurrent = nn.LSTM(20, 20, 2)
        self.copied = nn.Parameter(self.scaled.detach().clone() * 3)
        self.shared = nn.Parameter(self.scaled.data)
        nn.init.sparse_(self.scaled.data, 0.3)
        self.seen = self.orthogonal.weight.data
        self.channels_last = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(20, 20))
        self.lower = nn.Linear(20, 20).to(torch.bfloat16)
        self.norm = float(self.lower.weight.detach().float().norm())
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 100)]
        self.mask = torch.ones(40, 40).tril()
        self.register_buffer("summed", torch.randn(40, 40).cumsum(0), persistent=False)
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.randn(30, 30, generator=own))
        nn.init.normal_(self.own[:10].detach(), generator=own)


def odd() -> Odd:
    torch.manual_seed(3)
    return Odd()


@pytest.mark.usefixtures("deferral")
def test_initialisations_of_every_kind_are_played_again_exactly() -> None:
    plain = odd()
    after = torch.get_rng_state()
    ours: Any = built_empty(odd)
    assert isinstance(ours, Odd)
    assert torch.equal(torch.get_rng_state(), after)
    assert (ours.norm, ours.rates) == (plain.norm, plain.rates)
    assert torch.equal(ours.mask, plain.mask)
    # Somebody else holds this weight's memory, so it has its bytes from the beginning, and shares them.
    assert ours.seen.data_ptr() == ours.orthogonal.weight.data_ptr()
    weights = dict(ours.named_parameters())
    one, other = weights["recurrent.weight_hh_l1"], weights["recurrent.weight_hh_l0"]
    for origin in find_origins(ours):
        origin.bring([one])
    assert not is_away(one)
    assert is_away(other)
    bring_all(ours)
    assert_same_model(ours, plain)
    assert ours.shared.data_ptr() == ours.scaled.data_ptr()


def test_weights_are_the_same_objects_before_and_after_and_reading_them_too_early_is_an_error() -> None:
    model: Any = memfit.empty(lambda: nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 4)))
    large, small = model[0].weight, model[1].weight
    assert is_away(large)
    assert not is_away(small)  # below 64 KiB
    with pytest.raises(AwayError, match=r"'0\.weight', which has none yet: its model was built by memfit\.empty"):
        large.sum()
    bring_all(model)
    assert model[0].weight is large
    assert isinstance(large.sum().item(), float)


def test_without_draws_nothing_is_drawn_and_values_must_come_from_files() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = memfit.empty(lambda: nn.Linear(200, 200, bias=False), initialises=False)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(UsageError, match=r"initialises=False.*weights=directory"):
        bring_all(model)


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(UsageError, match="must return a torch.nn.Module, not int"):
        memfit.empty(lambda: 3)  # type: ignore[type-var,return-value]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt2", "disk"),
        pytest.param("gpt2", "resident", marks=pytest.mark.slow),
        pytest.param("mixtral", "disk", marks=pytest.mark.slow),
        pytest.param("t5", "disk", marks=pytest.mark.slow),
        pytest.param("lora", "disk", marks=pytest.mark.slow),
    ],
)
def test_a_model_built_empty_trains_as_a_plain_one_bit_for_bit(name: str, plan: str, tmp_path: Path) -> None:
    cases: list[zoo.Case] = []

    def build() -> zoo.Case:
        case = zoo.ZOO[name]()
        if not cases:
            case = replace(case, model=built_empty(lambda: zoo.ZOO[name]().model))
        cases.append(case)
        return case

    variant = plans.BY_NAME[plan]
    assert_equal_training(
        build,
        adamw(),
        fit_variant(name, variant, tmp_path, keep_gradients=True),
        microbatches=variant.microbatches,
        max_grad_norm=variant.max_grad_norm,
        may_reorder=variant.reorders,
    )


def fit_from(model: nn.Module, case: zoo.Case, weights: Path) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return memfit.fit(model, optimizer, case.loss, case.batch(0), weights=weights)


def test_the_base_models_prefix_is_added_or_left_out_as_from_pretrained_does(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel, GPT2Model

    case = zoo.gpt2()
    config = case.model.config
    case.model.transformer.save_pretrained(tmp_path / "base")  # type: ignore[union-attr,operator]
    case.model.save_pretrained(tmp_path / "head")  # type: ignore[operator]
    with_head = built_empty(lambda: GPT2LMHeadModel(config), draws=False)  # type: ignore[arg-type]
    with fit_from(with_head, case, tmp_path / "base"):
        pass
    assert_same_model(with_head, GPT2LMHeadModel.from_pretrained(tmp_path / "base"))
    base = built_empty(lambda: GPT2Model(config), draws=False)  # type: ignore[arg-type]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["input_ids"]).last_hidden_state.square().mean()

    with fit_from(base, replace(case, loss=loss), tmp_path / "head"):
        pass
    assert_same_model(base, GPT2Model.from_pretrained(tmp_path / "head"))


def test_saved_buffers_are_loaded_and_other_floats_convert(tmp_path: Path) -> None:
    import safetensors.torch

    case = zoo.ZOO["batch-norm"]()
    state = {name: torch.randn(t.shape).to(t.dtype) for name, t in case.model.state_dict().items()}
    half = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in state.items()}
    safetensors.torch.save_file(half | {"spare": torch.zeros(2)}, tmp_path / "model.safetensors")
    model = built_empty(lambda: zoo.ZOO["batch-norm"]().model, draws=False)
    with pytest.warns(UserWarning, match="1 tensors of the weight files have no place in the model: .spare."):
        job = fit_from(model, case, tmp_path)
    job.close()
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, half[name].to(tensor.dtype)), name


def test_an_ordinary_model_is_overwritten_from_files(tmp_path: Path) -> None:
    case, other = zoo.llama(), zoo.llama()
    with torch.no_grad():
        for p in case.model.parameters():
            p.mul_(2)
    case.model.save_pretrained(tmp_path)  # type: ignore[operator]
    with fit_from(other.model, other, tmp_path):
        pass
    assert_same_model(other.model, case.model)


def test_files_that_do_not_fit_the_model_are_refused_before_anything_changes(tmp_path: Path) -> None:
    import safetensors.torch

    case = zoo.ZOO["sequential"]()
    model = built_empty(lambda: zoo.ZOO["sequential"]().model, draws=False)
    state = dict(case.model.state_dict())
    name = next(iter(state))
    with pytest.raises(StoreError, match="does not exist"):
        fit_from(model, case, tmp_path / "absent")
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({n: t for n, t in state.items() if n != name}, file)
    with pytest.raises(UsageError, match=f"has no '{name}'"):
        fit_from(model, case, tmp_path)
    safetensors.torch.save_file(state | {name: torch.zeros(3)}, file)
    with pytest.raises(UsageError, match=f"'{name}' has shape .* it has \\[3\\]"):
        fit_from(model, case, tmp_path)
    assert all(is_away(p) for p in model.parameters())


@pytest.mark.parametrize("way", ["load_state_dict", "a save"])
@pytest.mark.parametrize("is_bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_optimizer_states_go_into_a_model_built_empty_and_training_goes_on(
    way: str, is_bf16: bool, tmp_path: Path
) -> None:
    from equivalence.with_memfit import profile_by_name
    from memfit.core.plan import Plan
    from memfit.core.storage_formats import ComputeDtype

    plan = Plan(
        blocks=plans.on_disk(profile_by_name("gpt2")),
        compute_dtype=ComputeDtype.BFLOAT16 if is_bf16 else ComputeDtype.GIVEN,
    )
    allow = {"bf16"} if is_bf16 else set[str]()
    case = zoo.gpt2()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    job = memfit.fit(case.model, optimizer, case.loss, case.batch(0), plan=plan, allow=allow)
    job.step(case.batch(0))
    optimizer.param_groups[0]["lr"] = 3e-3
    job.save(tmp_path / "saved", extra={"note": 7})
    expected = [job.step(case.batch(step)).loss for step in (1, 2)]
    job.close()

    model = built_empty(lambda: zoo.gpt2().model, draws=False)
    ours = torch.optim.AdamW(model.parameters())
    if way == "load_state_dict":
        from memfit.job.loading import load

        plain = zoo.gpt2().model
        other = torch.optim.AdamW(plain.parameters())
        load(tmp_path / "saved", plain, other)
        ours.load_state_dict(other.state_dict())
    again = memfit.fit(model, ours, case.loss, case.batch(0), plan=plan, allow=allow, weights=tmp_path / "saved")
    with again:
        if way == "a save":
            found = again.load_states(tmp_path / "saved")
            assert (found.steps, found.extra) == (1, {"note": 7})
        assert ours.param_groups[0]["lr"] == 3e-3
        assert [again.step(case.batch(step)).loss for step in (1, 2)] == expected
    assert_same_model(model, case.model)
    for mine, theirs in zip(model.parameters(), case.model.parameters(), strict=True):
        for key, value in optimizer.state[theirs].items():
            assert same_bits(ours.state[mine][key], value), key


def test_states_that_do_not_fit_the_optimizer_are_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    case = zoo.gpt2()
    with fit_case(case) as job:
        job.step(case.batch(0))
        job.save(tmp_path / "saved")
    other = zoo.gpt2()
    with memfit.fit(other.model, torch.optim.SGD(other.model.parameters(), lr=0.1), other.loss, other.batch(0)) as job:
        with pytest.raises(UsageError, match=r"was saved with .*AdamW, this optimizer is .*SGD"):
            job.load_states(tmp_path / "saved")
        with pytest.raises(StoreError):
            job.load_states(tmp_path)
        assert job.step(case.batch(0)).is_finite


def test_a_saved_job_goes_into_a_model_built_empty_through_fit_and_not_through_load(tmp_path: Path) -> None:
    from memfit.job.loading import load

    case = zoo.ZOO["mixtral"]()
    with fit_case(case) as job:
        job.step(case.batch(0))
        job.save(tmp_path / "saved")
    model = built_empty(lambda: zoo.ZOO["mixtral"]().model)
    with pytest.raises(UsageError, match=r"built by memfit\.empty.*memfit\.fit\(weights="):
        load(tmp_path / "saved", model)
    with fit_from(model, case, tmp_path / "saved"):
        pass
    assert_same_model(model, case.model)
