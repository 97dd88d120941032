"""What a user's own loss and layers may do beside computing: change weights, autocast, ask a teacher, look at other rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from equivalence import plans
from equivalence.compare import assert_equal_training
from equivalence.plain import sgd
from equivalence.with_memfit import fit_case, fit_with, profile_of
from equivalence.zoo import Batch, Case
from memfit.core.errors import MemfitWarning, UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier

WIDTH, WORDS, ROWS = 16, 23, 6


class Layer(nn.Module):
    """Adds a hidden layer's output; `change`, if set, is done to the layer's weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.change: Callable[[Tensor], object] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.change is not None:
            self.change(self.mix.weight)
        return hidden + torch.tanh(self.mix(hidden))


class Net(nn.Module):
    """An embedding, three layers, a head."""

    def __init__(self, *, max_norm: float | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, max_norm=max_norm)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Of each word, from itself."""
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1).float(), batch["words"].flatten())


def batch_of(step: int) -> Batch:
    return {"words": torch.randint(WORDS, (ROWS, 5), generator=torch.Generator().manual_seed(100 + step))}


def case_of(loss: Callable[[nn.Module, Batch], Tensor] = loss_of, **options: Any) -> Case:
    torch.manual_seed(4)
    return Case(model=Net(**options), loss=loss, batch=batch_of)


def on_disk(case: Case, microbatches: int = 1, **options: Any) -> Plan:
    profile = profile_of(case)
    tail = plans.tail(profile) if microbatches > 1 else None
    return Plan(microbatches=microbatches, blocks=plans.on_disk(profile), tail=tail, **options)


# Weights that the forward changes


@pytest.mark.parametrize("change", [None, lambda weight: weight.data.mul_(0.9)])
def test_what_the_forward_writes_stays_and_the_rest_may_go(
    change: Callable[[Tensor], object] | None, tmp_path: Path
) -> None:
    def build() -> Case:
        case = case_of(max_norm=0.5)
        case.model.layers[1].change = change  # type: ignore[union-attr]
        return case

    plan = on_disk(build())
    assert {"words", "layers.1"} - plan.blocks.keys() == ({"words"} if change is None else {"words", "layers.1"})
    assert_equal_training(build, sgd(0.5), fit_with(plan, tmp_path, keep_gradients=True))


def test_an_embedding_that_bounds_its_rows_has_no_masters() -> None:
    case = case_of(max_norm=0.5)
    with pytest.raises(UnsupportedError, match="'words' bounds its rows"):
        fit_case(
            case,
            sgd()(case.model),
            plan=Plan(compute_dtype=ComputeDtype.BFLOAT16),
            allow={"bf16"},  # type: ignore[arg-type]
        )


def test_a_change_that_no_trace_has_seen_is_refused_when_it_would_be_lost(tmp_path: Path) -> None:
    case = case_of()
    plan = on_disk(case)
    with fit_case(case, sgd()(case.model), plan=plan, directory=tmp_path / "homes") as job:
        job.step(batch_of(0))
        case.model.layers[1].change = lambda weight: weight.detach().mul_(0.5)  # type: ignore[union-attr]
        with pytest.raises(UnsupportedError, match=r"'layers\.1\.mix\.weight'.*job\.weights\('layers\.1'\)"):
            job.step(batch_of(1))


# Autocast of the user's own


def half_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_microbatches_inside_the_users_own_autocast_do_not_share_its_casts(microbatches: int, tmp_path: Path) -> None:
    plan = on_disk(case_of(half_loss), microbatches)
    assert_equal_training(
        lambda: case_of(half_loss), sgd(0.5), fit_with(plan, tmp_path, keep_gradients=True), microbatches=microbatches
    )


# Weights of another model


def test_a_teacher_whose_weights_could_train_may_be_asked_without_gradients(tmp_path: Path) -> None:
    torch.manual_seed(9)
    teacher = Net()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch["words"])
        return functional.mse_loss(model(batch["words"]), wanted)

    plan = on_disk(case_of(loss), 2)
    assert_equal_training(
        lambda: case_of(loss), sgd(0.5), fit_with(plan, tmp_path, keep_gradients=True), microbatches=2
    )


def test_a_teacher_that_would_get_gradients_is_refused() -> None:
    teacher = Net()
    case = case_of(lambda model, batch: functional.mse_loss(model(batch["words"]), teacher(batch["words"])))
    with pytest.raises(UnsupportedError, match="not part of the model"):
        memfit.fit(case.model, sgd()(case.model), case.loss, batch_of(0))


# Rows that are not rows


def test_a_list_of_samples_is_told_from_a_batch_of_rows() -> None:
    case = case_of(lambda model, batch: model.head(torch.stack(batch["rows"])).square().mean())  # type: ignore[operator]
    batch = {"rows": [torch.full((WIDTH,), float(n)) for n in range(4)]}
    with memfit.fit(case.model, sgd()(case.model), case.loss, batch, plan=Plan(microbatches=2)) as job:
        assert job.step(batch).rows == 4


class Centred(nn.Module):
    """Looks at the other rows while it trains, as a batch norm does that memfit does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mix(hidden - hidden.mean(0) if self.training else hidden)


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("is_dropping", [False, True])
def test_a_layer_that_looks_at_other_rows_only_in_training_is_not_split(rows: int, is_dropping: bool) -> None:
    dropout = nn.Dropout(0.5 if is_dropping else 0.0)
    model = nn.Sequential(Centred(), dropout, Centred(), nn.Linear(WIDTH, 3))
    batch = torch.randn(rows, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"does not add up over microbatches"):
        memfit.fit(
            model, optimizer, lambda model, rows: (model(rows) + 1).square().mean(), batch, plan=Plan(microbatches=2)
        )


def test_two_rows_that_are_compared_are_not_split() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def contrastive(model: nn.Module, rows: Tensor) -> Tensor:
        found = functional.normalize(model(rows), dim=1)
        return functional.cross_entropy(found @ found.t(), torch.arange(len(found)))

    with pytest.raises(UnsupportedError, match=r"loss of 2 rows.*over 1 and 1 of them"):
        memfit.fit(model, optimizer, contrastive, torch.randn(2, WIDTH), plan=Plan(microbatches=2))


def test_rounding_in_a_model_of_16_bits_is_not_taken_for_a_loss_that_does_not_add_up() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 5)).bfloat16()
    batch = (torch.randn(9, WIDTH).bfloat16(), torch.randint(5, (9,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    parts = [loss(model, tuple(t[a:b] for t in batch)).item() for a, b in ((0, 3), (0, 2), (2, 3))]  # type: ignore[arg-type]
    assert abs((2 * parts[1] + parts[2]) / 3 - parts[0]) > 1e-5 * parts[0]  # the rounding is there
    with memfit.fit(model, optimizer, loss, batch, plan=Plan(microbatches=3)) as job:
        assert job.step(batch).is_finite


# Copies, second fits, compiled parts


def test_a_model_is_pickled_between_steps_as_an_ordinary_one(tmp_path: Path) -> None:
    case = case_of()
    plan = on_disk(case)
    with fit_case(case, sgd()(case.model), plan=plan, directory=tmp_path / "homes") as job:
        job.step(batch_of(0))
        with job.weights():
            copy = pickle.loads(pickle.dumps(case.model))
        expected = job.evaluate(batch_of(1)).loss
    assert loss_of(copy.eval(), batch_of(1)).item() == expected


def test_what_a_live_job_has_in_hand_is_not_fitted_again() -> None:
    case = case_of()
    optimizer = sgd()(case.model)
    with memfit.fit(case.model, optimizer, case.loss, batch_of(0)) as job:
        for again in (optimizer, sgd()(case.model)):
            with pytest.raises(UsageError, match=r"live job.*job\.close\(\)"):
                memfit.fit(case.model, again, case.loss, batch_of(0))
        with pytest.raises(UsageError, match=r"live job.*job\.close\(\)"), memfit.infer(case.model):
            pass
        assert job.step(batch_of(0)).is_finite
    with memfit.infer(case.model), pytest.raises(UsageError, match=r"session of memfit\.infer"):
        memfit.fit(case.model, optimizer, case.loss, batch_of(0))
    memfit.fit(case.model, optimizer, case.loss, batch_of(0)).close()


def test_a_job_that_nobody_can_reach_any_more_has_nothing_in_hand() -> None:
    case = case_of()
    memfit.fit(case.model, sgd()(case.model), case.loss, batch_of(0))
    with memfit.fit(case.model, sgd()(case.model), case.loss, batch_of(0)) as job:
        assert job.step(batch_of(0)).is_finite


def test_a_complex_loss_is_refused_as_such() -> None:
    case = case_of(lambda model, batch: loss_of(model, batch) * 1j)
    with pytest.raises(UsageError, match="real number, not one of torch.complex64"):
        fit_case(case, sgd()(case.model), limit="4GiB")


def _compile_layers(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")
    return model


def _wrap_layers(model: nn.Module) -> nn.Module:
    model.layers = nn.ModuleList([torch.compile(layer, backend="aot_eager") for layer in model.layers])  # type: ignore[union-attr, arg-type]
    return model


def _compile_forwards(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    return model


COMPILERS = {"compile": _compile_layers, "wrapper": _wrap_layers, "forward": _compile_forwards}


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.14 looks there while it compiles
@pytest.mark.parametrize(("how", "fate"), [("compile", "recompute"), ("wrapper", "keep"), ("forward", "recompute")])
def test_compiled_layers_stay_compiled_and_train_exactly(how: str, fate: str, tmp_path: Path) -> None:
    compiled = COMPILERS[how]

    def build() -> Case:
        case = case_of()
        return replace(case, model=compiled(case.model))

    def graphs() -> tuple[int, int]:
        counted = torch._dynamo.utils.counters  # type: ignore[attr-defined]
        found = sum(counted["graph_break"].values()), counted["stats"]["unique_graphs"]
        torch._dynamo.reset()
        counted.clear()
        return found

    plan = on_disk(build())
    plan = replace(plan, calls=plans.fates(profile_of(build()), CallPlan(saved=Saved(fate))))
    torch._dynamo.reset()
    graphs()
    plain = build()
    optimizer = sgd(0.5)(plain.model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(plain.model, batch_of(step)).backward()
        optimizer.step()
    expected = graphs()
    assert expected[1] > 0
    ours = build()
    with fit_case(ours, sgd(0.5)(ours.model), plan=plan, directory=tmp_path / "homes") as job:
        for step in range(2):
            job.step(batch_of(step))
    assert graphs() == expected == (0, expected[1])
    for (name, p), q in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.compiles
@pytest.mark.parametrize("how", ["model", "wrapper", "loss"])
def test_code_that_is_compiled_around_calls_is_told_and_keeps_weights_from_travelling(how: str, tmp_path: Path) -> None:
    case = case_of()
    if how == "model":
        case.model.compile(backend="eager")
    elif how == "wrapper":
        case = replace(case, model=torch.compile(case.model, backend="eager"))  # type: ignore[arg-type]
    else:
        case = replace(case, loss=torch.compile(loss_of, backend="eager"))
    away = BlockPlan(weight_home=Tier.DISK)
    name = "_orig_mod.layers.0" if how == "wrapper" else "layers.0"
    with pytest.raises(UnsupportedError, match=r"torch\.compile around the calls.*layer\.compile\(\)"):
        fit_case(case, sgd()(case.model), plan=Plan(blocks={name: away}), directory=tmp_path / "homes")
    with pytest.warns(MemfitWarning, match=r"torch\.compile around the calls.*layer\.compile\(\)"):
        fit_case(case, sgd()(case.model)).close()


# Context variables

TEMPERATURE: ContextVar[float] = ContextVar("temperature", default=1.0)


class Tempered(Layer):
    """A layer that reads a context variable in its forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.mix(hidden) * TEMPERATURE.get())


def tempered_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Sets the variable for the forward only: backward, and so recomputation, comes after."""
    token = TEMPERATURE.set(2.0)
    try:
        return loss_of(model, batch)
    finally:
        TEMPERATURE.reset(token)


def tempered_case() -> Case:
    torch.manual_seed(4)
    model = Net()
    model.layers = nn.ModuleList([Tempered() for _ in range(3)])
    return Case(model=model, loss=tempered_loss, batch=batch_of)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_recomputed_call_meets_the_context_variables_of_its_first_run(microbatches: int, tmp_path: Path) -> None:
    profile = profile_of(tempered_case())
    plan = on_disk(tempered_case(), microbatches, calls=plans.fates(profile, CallPlan(saved=Saved.RECOMPUTE)))
    assert_equal_training(
        tempered_case, sgd(0.5), fit_with(plan, tmp_path, keep_gradients=True), microbatches=microbatches
    )
