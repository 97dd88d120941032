"""What programs around a training loop do to a model: move it where it is, wrap two models into one, read weights past their modules, read logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import memfit
from equivalence import zoo
from equivalence.compare import JobLike, MakeJob, assert_equal_training
from equivalence.plain import adamw, sgd
from equivalence.plans import OFFLOAD, RECOMPUTE, fates
from equivalence.test_users_code import Net, batch_of, case_of, loss_of, on_disk
from equivalence.with_memfit import profile_of
from equivalence.zoo import Batch, Case
from memfit.core.errors import AwayError, PlanError, UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, Order, Plan
from memfit.core.tiers import Tier


def fit_with(plan: Plan) -> MakeJob:
    """Makes jobs that follow `plan`, with temporary homes."""

    def make(case: Case, optimizer: torch.optim.Optimizer) -> JobLike:
        return memfit.fit(case.model, optimizer, case.loss, case.batch(0), plan=plan)

    return make


# Conversions

HARMLESS: dict[str, Callable[[nn.Module], object]] = {
    "to its device": lambda m: m.to("cpu"),
    "to device and dtype": lambda m: m.to(torch.device("cpu"), torch.float32),
    "as a tensor": lambda m: m.to(torch.zeros(1)),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "type": lambda m: m.type(torch.float32),
    "the weight alone": lambda m: [p.contiguous() for p in m.parameters()],
}
CHANGING: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "to a dtype": lambda m: m.to(torch.float64),
    "to meta": lambda m: m.to("meta"),
    "a copy": lambda m: [p.to("cpu", copy=True) for p in m.parameters()],
}


@pytest.mark.parametrize("convert", HARMLESS.values(), ids=HARMLESS)
def test_a_conversion_that_changes_nothing_passes_while_weights_are_away(
    convert: Callable[[nn.Module], object],
) -> None:
    make = fit_with(on_disk(case_of()))

    def make_moved(case: Case, optimizer: torch.optim.Optimizer) -> JobLike:
        job = make(case, optimizer)
        before = [id(p) for p in case.model.parameters()]
        convert(case.model)
        assert [id(p) for p in case.model.parameters()] == before
        return job

    assert_equal_training(case_of, adamw(), make_moved, has_gradients=False, steps=2)


@pytest.mark.parametrize("convert", CHANGING.values(), ids=CHANGING)
def test_a_conversion_that_would_change_weights_that_are_away_is_refused(
    convert: Callable[[nn.Module], object],
) -> None:
    case = case_of()
    optimizer = adamw()(case.model)
    with memfit.fit(case.model, optimizer, case.loss, batch_of(0), plan=on_disk(case)) as job:
        with pytest.raises(AwayError, match=r"would move or convert the weight 'words\.weight'.*job\.close"):
            convert(case.model)
        job.step(batch_of(0))  # it did nothing


def test_a_conversion_that_changed_weights_which_stay_is_told_at_the_next_step() -> None:
    case = case_of()
    with memfit.fit(case.model, adamw()(case.model), case.loss, batch_of(0)) as job:
        case.model.half()
        with pytest.raises(UsageError, match=r"other memory \(parameter\.data = \.\.\., model\.to"):
            job.step(batch_of(0))


# Weights that are read past their module


def read_past_its_module(model: nn.Module, batch: Batch) -> Tensor:
    """Calls the layers, and multiplies with the head's weight by itself, as fused losses do."""
    assert isinstance(model, Net)
    hidden = model.words(batch["words"])
    for layer in model.layers:
        hidden = layer(hidden)
    logits = functional.linear(hidden, model.head.weight, model.head.bias)
    return functional.cross_entropy(logits.flatten(0, 1), batch["words"].flatten())


def test_a_plan_that_sends_away_what_is_read_past_its_module_is_refused_at_fit() -> None:
    away = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    case = case_of(read_past_its_module)
    before = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    plan = on_disk(case)
    assert "head" not in plan.blocks
    wrong = Plan(blocks={**plan.blocks, "head": away})
    with pytest.raises(PlanError, match=r"'head'.*'head\.weight'.*weight_home='device'"):
        memfit.fit(case.model, adamw()(case.model), case.loss, batch_of(0), plan=wrong)
    assert all(torch.equal(p, before[name]) for name, p in case.model.named_parameters())
    right = Plan(blocks={**plan.blocks, "head": BlockPlan(gradient_home=Tier.DISK, state_home=Tier.DISK)})
    assert_equal_training(lambda: case_of(read_past_its_module), adamw(), fit_with(right), has_gradients=False)


def test_a_batch_for_which_a_weight_is_read_past_its_module_is_refused_with_its_name() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (read_past_its_module if batch["words"].shape[1] > 5 else loss_of)(model, batch)

    case = case_of(loss)
    with memfit.fit(case.model, sgd()(case.model), loss, batch_of(0), plan=on_disk(case)) as job:
        job.step(batch_of(0))
        with pytest.raises(PlanError, match=r"head\.weight"):
            job.step({"words": batch_of(0)["words"].repeat(1, 2)})
        job.step(batch_of(0))


# Two models in one, and logits that somebody reads


class Two(nn.Module):
    """A model that learns and one that it is compared with: under one limit, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = zoo.llama().model.requires_grad_(requires_grad=False)
        self.policy = zoo.llama().model


def compared(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Two)
    with torch.no_grad():
        known = model.reference(**batch).loss
    return model.policy(**batch).loss + functional.relu(known - 100.0)


def case_of_two(loss: Callable[[nn.Module, Batch], Tensor] = compared) -> Case:
    return Case(
        model=Two(),
        loss=loss,
        batch=lambda step: {name: value[:2] for name, value in zoo.text(step).items()},
        untouched=None,
    )


def test_two_transformers_models_in_one_module_are_planned_under_a_limit_and_trained() -> None:
    def make(case: Case, optimizer: torch.optim.Optimizer) -> memfit.Job:
        return memfit.fit(case.model, optimizer, case.loss, case.batch(0), limit="6GiB", enforce=False)

    assert_equal_training(case_of_two, adamw(), make, has_gradients=False, steps=2)


def penalized(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss, and a penalty on its logits."""
    output = model(**batch)
    return output.loss + 0.1 * output.logits.float().logsumexp(-1).square().mean()


def from_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Leaves the loss of the model alone."""
    logits = model(batch["input_ids"]).logits
    return functional.cross_entropy(logits.view(-1, zoo.VOCABULARY), batch["labels"].view(-1))


@pytest.mark.parametrize("loss", [penalized, from_logits])
def test_logits_that_the_loss_reads_are_never_hidden_states(loss: Callable[[nn.Module, Batch], Tensor]) -> None:
    case = zoo.llama()
    with pytest.raises(UnsupportedError, match="needs the logits, which are never whole while the loss runs in chunks"):
        memfit.fit(case.model, sgd()(case.model), loss, case.batch(0), plan=Plan(loss_chunk_tokens=32))
    with memfit.fit(case.model, sgd()(case.model), loss, case.batch(0), limit="6GiB", enforce=False) as job:
        assert job.plan.loss_chunk_tokens is None
        plain = zoo.llama()
        random = torch.get_rng_state()
        expected = loss(plain.model, plain.batch(0)).item()
        torch.set_rng_state(random)
        assert job.step(case.batch(0)).loss == expected


# Calls with other tensors in the places of weights


def with_scaled_weights(model: nn.Module, batch: Batch) -> Tensor:
    """The second layer runs with weights that are made from its own."""
    assert isinstance(model, Net)
    hidden = model.words(batch["words"])
    for index, layer in enumerate(model.layers):
        scaled = {name: p * 1.5 for name, p in layer.named_parameters()} if index == 1 else {}
        hidden = functional_call(layer, scaled, (hidden,))
    return functional.cross_entropy(model.head(hidden).flatten(0, 1), batch["words"].flatten())


def test_calls_with_other_tensors_in_the_places_of_weights_are_exact_or_refused() -> None:
    def case() -> Case:
        return case_of(with_scaled_weights)

    found = profile_of(case())
    spans = {b.name for b in found.blocks if b.is_spanning}
    assert "layers.1" in spans, "its weights are read before it is called"
    assert_equal_training(case, adamw(), fit_with(Plan(calls=fates(found, OFFLOAD))), has_gradients=False)
    again = case()
    with pytest.raises(UnsupportedError, match=r"\(layers\.1\) is called with other tensors.*saved='keep'"):
        memfit.fit(again.model, adamw()(again.model), again.loss, batch_of(0), plan=Plan(calls=fates(found, RECOMPUTE)))
    turns = case()
    with pytest.raises(UnsupportedError, match=r"'layers\.1' is called with other tensors.*microbatch-major"):
        memfit.fit(turns.model, adamw()(turns.model), turns.loss, batch_of(0), plan=Plan(microbatches=2))
    assert_equal_training(
        case, adamw(), fit_with(Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)), microbatches=2, has_gradients=False
    )  # fmt: skip
