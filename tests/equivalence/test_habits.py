"""What users hang on their models and do in their losses: hooks, parametrizations, checkpoints, teachers. Equal to plain PyTorch, whatever the plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import memfit
from equivalence import plans, zoo
from equivalence.compare import JobLike, assert_equal_training
from equivalence.plain import adamw
from equivalence.test_users_code import Layer, Net, batch_of, case_of, loss_of
from equivalence.with_memfit import profile_of
from equivalence.zoo import Batch, Case
from memfit.core.errors import PlanError, UnsupportedError, UsageError
from memfit.core.plan import CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.search.candidates import list_candidates

# What hangs on the model


def _layer(model: nn.Module) -> nn.Module:
    return model.get_submodule("layers.1")


def forward_hooks(model: nn.Module) -> None:
    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (given[0] * 1.5,)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return output * 0.5

    _layer(model).register_forward_pre_hook(before)
    _layer(model).register_forward_hook(after)
    _layer(model).get_submodule("mix").register_forward_hook(after)


def backward_hooks(model: nn.Module) -> None:
    _layer(model).register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 2,))
    _layer(model).get_submodule("mix").register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 0.5,))


def parameter_hooks(model: nn.Module) -> None:
    weight = model.get_parameter("layers.1.mix.weight")
    weight.register_hook(lambda gradient: gradient * 2)


def accumulate_hooks(model: nn.Module) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model.get_parameter("layers.1.mix.weight").register_post_accumulate_grad_hook(halve)


def weight_norm(model: nn.Module) -> None:
    parametrizations.weight_norm(_layer(model).get_submodule("mix"))


def old_weight_norm(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(_layer(model).get_submodule("mix"))


def spectral_norm(model: nn.Module) -> None:
    parametrizations.spectral_norm(_layer(model).get_submodule("mix"))


def checkpoints_inside(model: nn.Module, *, use_reentrant: bool) -> None:
    for layer in model.get_submodule("layers").children():
        forward = layer.forward
        layer.forward = lambda x, own=forward: checkpoint(own, x, use_reentrant=use_reentrant)  # type: ignore[method-assign]


HABITS: dict[str, Callable[[nn.Module], None]] = {
    "forward hooks": forward_hooks,
    "backward hooks": backward_hooks,
    "hooks on a parameter": parameter_hooks,
    "weight norm": weight_norm,
    "old weight norm": old_weight_norm,
}
# Those that see, or change, each microbatch's share for itself.
ONE_BATCH: dict[str, Callable[[nn.Module], None]] = {
    "accumulate hooks": accumulate_hooks,
    "spectral norm": spectral_norm,
    "reentrant checkpoints": lambda model: checkpoints_inside(model, use_reentrant=True),
    "checkpoints": lambda model: checkpoints_inside(model, use_reentrant=False),
}


# What the loss does


def with_teacher(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        wanted = model(batch["words"]).softmax(-1)
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), wanted.flatten(0, 1))


def with_inference(model: nn.Module, batch: Batch) -> Tensor:
    with torch.inference_mode():
        wanted = model(batch["words"]).softmax(-1)
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), wanted.clone().flatten(0, 1))


def partly_frozen(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Net)
    with torch.no_grad():
        hidden = model.layers[0](model.words(batch["words"]))
    for layer in model.layers[1:]:
        hidden = layer(hidden)
    return functional.cross_entropy(model.head(hidden).flatten(0, 1), batch["words"].flatten())


def with_hooked_activations(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Net)
    hidden = model.words(batch["words"])
    hidden.retain_grad()
    for layer in model.layers:
        hidden = layer(hidden)
        hidden.register_hook(lambda gradient: gradient * 1.5)
    return functional.cross_entropy(model.head(hidden).flatten(0, 1), batch["words"].flatten())


LOSSES = [with_teacher, with_inference, partly_frozen, with_hooked_activations]


def build(habit: Callable[[nn.Module], None] | None, loss: Callable[[nn.Module, Batch], Tensor] = loss_of) -> Case:
    case = replace(case_of(loss), untouched=None)
    if habit is not None:
        habit(case.model)
    return case


def fit_with(plan: Plan | None) -> Callable[[Case, torch.optim.Optimizer], JobLike]:
    """Makes jobs that follow the plan, or choose one."""
    return lambda case, optimizer: memfit.fit(case.model, optimizer, case.loss, case.batch(0), plan=plan)


def assert_equal_under(make: Callable[[], Case], microbatches: int, **options: Any) -> None:
    """Trains with weights on disk and layers recomputed."""
    profile = profile_of(make())
    plan = Plan(
        microbatches=microbatches,
        blocks=plans.on_disk(profile),
        calls=plans.fates(profile, CallPlan(saved=Saved.RECOMPUTE)),
        tail=plans.tail(profile) if microbatches > 1 else None,
    )

    def fit(case: Case, optimizer: torch.optim.Optimizer) -> JobLike:
        return memfit.fit(
            case.model, optimizer, case.loss, case.batch(0), plan=plan, allow={"nonadditive-loss"}, weight=case.weight
        )

    assert_equal_training(make, adamw(), fit, microbatches=microbatches, has_gradients=False, steps=2, **options)


@pytest.mark.thinned
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("habit", HABITS.values(), ids=HABITS)
def test_what_hangs_on_a_model_works_as_in_plain_pytorch(habit: Callable[[nn.Module], None], microbatches: int) -> None:
    assert_equal_under(lambda: build(habit), microbatches)


@pytest.mark.parametrize("habit", ONE_BATCH.values(), ids=ONE_BATCH)
def test_what_hangs_on_a_model_works_as_in_plain_pytorch_with_a_whole_batch(habit: Callable[[nn.Module], None]) -> None:
    assert_equal_under(lambda: build(habit), 1)


@pytest.mark.thinned
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_loss_does_beside_is_as_in_plain_pytorch(
    loss: Callable[[nn.Module, Batch], Tensor], microbatches: int
) -> None:
    assert_equal_under(lambda: build(None, loss), microbatches)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_transformers_own_checkpointing_may_stay_on(*, use_reentrant: bool) -> None:
    def make() -> Case:
        case = zoo.llama()
        case.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # type: ignore[operator]
        case.model.enable_input_require_grads()  # type: ignore[operator]
        return replace(case, untouched=None)

    assert_equal_under(make, 1)


# Hooks on gradients that read weights, and what a layer finds changed


def reads_a_later_layer(model: nn.Module) -> None:
    later = model.get_submodule("layers.2.mix")
    model.get_parameter("layers.0.mix.weight").register_hook(
        lambda gradient: gradient * later.get_parameter("weight").detach().norm()
    )


def reads_a_weight_that_it_holds(model: nn.Module) -> None:
    later = model.get_parameter("layers.2.mix.weight")

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(later.detach().norm())

    model.get_parameter("layers.0.mix.weight").register_post_accumulate_grad_hook(scale)


@pytest.mark.parametrize("habit", [reads_a_later_layer, reads_a_weight_that_it_holds])
def test_a_gradients_hook_that_reads_another_layer_meets_it_before_its_update(
    habit: Callable[[nn.Module], None],
) -> None:
    """Layers are updated while backward still runs, the last one first."""
    found = profile_of(build(habit))
    assert [b.name for b in found.blocks if b.is_spanning] == ["layers.2"]
    for plan in (Plan(), Plan(blocks=plans.on_disk(found))):
        assert_equal_training(lambda: build(habit), adamw(), fit_with(plan), has_gradients=False, steps=2)


def adds_the_gradient_of_another(model: nn.Module) -> None:
    first, last = model.get_parameter("layers.0.mix.weight"), model.get_parameter("layers.2.mix.weight")

    def balance(gradient: Tensor) -> Tensor | None:
        return None if last.grad is None else gradient + 0.5 * last.grad

    first.register_hook(balance)


def divides_by_the_norm_so_far(model: nn.Module) -> None:
    def divide(parameter: Tensor) -> None:
        assert parameter.grad is not None
        so_far = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        parameter.grad.div_(1 + torch.stack(so_far).norm())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(divide)


def a_layers_hook_reads_a_gradient(model: nn.Module) -> None:
    first, last = model.get_submodule("layers.0"), model.get_parameter("layers.2.mix.weight")

    def scale(_: nn.Module, inputs: Any, __: Any) -> Any:
        return inputs if last.grad is None else tuple(x * (1 + last.grad.norm()) for x in inputs)

    first.register_full_backward_hook(scale)


@pytest.mark.parametrize(
    "habit", [adds_the_gradient_of_another, divides_by_the_norm_so_far, a_layers_hook_reads_a_gradient]
)
def test_a_hook_that_reads_other_gradients_finds_them(habit: Callable[[nn.Module], None]) -> None:
    found = profile_of(build(habit))
    assert "layers.2.mix.weight" in found.read_gradients
    waits = Plan(update=UpdateTime.AFTER_BACKWARD)
    away = {name: replace(homes, gradient_home=Tier.DEVICE) for name, homes in plans.on_disk(found).items()}
    for plan in (None, waits, replace(waits, blocks=away)):
        assert_equal_training(lambda: build(habit), adamw(), fit_with(plan), has_gradients=False, steps=2)


def test_no_plan_drops_gradients_that_a_hook_reads() -> None:
    case = build(adds_the_gradient_of_another)
    with pytest.raises(PlanError, match=r"a hook reads the gradient of 'layers\.2\.mix\.weight'.*after-backward"):
        memfit.fit(case.model, adamw()(case.model), case.loss, batch_of(0), plan=Plan())
    listed = [*list_candidates(profile_of(case), microbatches=1, tiers=(Tier.DISK,), clips_norm=False)]
    assert listed and all(candidate.plan.update is UpdateTime.AFTER_BACKWARD for candidate in listed)
    assert {b.gradient_home for candidate in listed for b in candidate.plan.blocks.values()} <= {Tier.DEVICE}
    # A parameter's own gradient is its hooks' own matter.
    assert profile_of(build(clips_itself)).read_gradients == ()
    assert "grad" not in vars(torch.Tensor)


def test_a_batch_is_not_cut_where_hooks_would_see_shares_of_gradients() -> None:
    case = build(clips_itself)
    with pytest.raises(UnsupportedError, match=r"'words\.weight' has a hook on its gradient.*microbatches=1"):
        memfit.fit(case.model, adamw()(case.model), case.loss, batch_of(0), plan=Plan(microbatches=2))


def clips_itself(model: nn.Module) -> None:
    model.get_parameter("words.weight").register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def test_a_weight_that_the_loss_holds_itself_is_named() -> None:
    case = build(None)
    held = case.model.get_parameter("head.weight")
    with pytest.raises(UnsupportedError, match=r"reads the weight 'head\.weight' from where the program keeps it"):
        memfit.profile(
            case.model, adamw()(case.model), lambda model, batch: loss_of(model, batch) + held.sum(), batch_of(0)
        )


class Moody(Layer):
    """Computes otherwise in evaluation."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (1.0 if self.training else 0.5)


def in_evaluation(model: nn.Module, batch: Batch) -> Tensor:
    """Calls one layer in another mode."""
    assert isinstance(model, Net)
    hidden = model.words(batch["words"])
    for index, layer in enumerate(model.layers):
        layer.train(index != 1)
        hidden = layer(hidden)
        layer.train()
    return functional.cross_entropy(model.head(hidden).flatten(0, 1), batch["words"].flatten())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_layer_keeps_the_mode_in_which_it_was_called(microbatches: int) -> None:
    def make() -> Case:
        case = build(None, in_evaluation)
        case.model.layers = nn.ModuleList(Moody() for _ in range(3))
        torch.manual_seed(5)
        for parameter in case.model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return case

    assert_equal_under(make, microbatches)


# Between steps

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "average": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=2),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_rates_and_averages_between_steps_are_as_in_plain_pytorch(
    scheduler: Callable[[torch.optim.Optimizer], Any],
) -> None:
    ours, plain = build(None), build(None)
    plan = Plan(blocks=plans.on_disk(profile_of(build(None))))
    optimizers = adamw()(ours.model), adamw()(plain.model)
    with memfit.fit(ours.model, optimizers[0], ours.loss, batch_of(0), plan=plan) as job:
        schedulers = [scheduler(optimizer) for optimizer in optimizers]
        with job.weights():
            averages = [torch.optim.swa_utils.AveragedModel(model) for model in (ours.model, plain.model)]
        for step in range(4):
            ours.model.train(step % 2 == 0)
            plain.model.train(step % 2 == 0)
            optimizers[1].zero_grad()
            loss_of(plain.model, batch_of(step)).backward()
            optimizers[1].step()
            job.step(batch_of(step))
            schedulers[0].step()
            schedulers[1].step()
            with job.weights():
                averages[0].update_parameters(ours.model)
                averages[1].update_parameters(plain.model)
                twin = copy.deepcopy(ours.model)
            assert loss_of(twin, batch_of(9)).item() == loss_of(plain.model, batch_of(9)).item()
    for one, other in ((ours.model, plain.model), (averages[0], averages[1])):
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name


def _freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    _layer(model).requires_grad_(requires_grad=False)


def _tie(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model.get_submodule("head").weight = model.get_parameter("words.weight")  # type: ignore[assignment]


def _replace(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    _layer(model).get_submodule("mix").weight = nn.Parameter(torch.zeros(16, 16))  # type: ignore[assignment]


def _add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    optimizer.add_param_group({"params": [model.get_parameter("extra")]})


@pytest.mark.parametrize("change", [_freeze, _tie, _replace, _add_group])
def test_a_model_that_becomes_another_one_is_told_before_the_next_step(
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    case = build(None)
    optimizer = adamw()(case.model)
    plan = Plan(blocks=plans.on_disk(profile_of(build(None))))
    with memfit.fit(case.model, optimizer, case.loss, batch_of(0), plan=plan) as job:
        job.step(batch_of(0))
        with pytest.raises((UsageError, UnsupportedError), match=r"[Cc]lose the job"):  # noqa: PT012  (a change may refuse itself)
            change(case.model, optimizer)
            job.step(batch_of(1))


def test_transforms_of_torch_func_in_a_loss_are_refused_in_words() -> None:
    def mapped(model: nn.Module, batch: Batch) -> Tensor:
        logits = torch.func.vmap(model)(batch["words"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["words"].flatten())

    case = build(None, mapped)
    case.loss(case.model, batch_of(0)).backward()
    case.model.zero_grad()
    with pytest.raises(UnsupportedError, match=r"transforms of torch\.func \(vmap, grad\)"):
        memfit.fit(case.model, adamw()(case.model), mapped, batch_of(0))
