"""What goes wrong while a job runs: named at once, or going on exactly as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from equivalence import plans, small_models, zoo
from equivalence.compare import assert_equal_training, number, same_bits
from equivalence.plain import PlainTrainer, RandomState, adamw, sgd
from equivalence.with_memfit import fit_case, fit_variant, fit_with, profile_by_name, profile_of
from memfit.core.errors import (
    AwayError,
    MemfitError,
    UnsupportedError,
    UsageError,
)
from memfit.core.plan import Plan

NAME = "kwargs"


def _lockstep(case: zoo.Case, reference: zoo.Case, job: Any, plain: PlainTrainer, batch: zoo.Batch) -> Any:
    random = RandomState(state=plain.random.state.clone())
    plain.accumulate(batch)
    plain.clip()
    plain.update()
    with random.in_use():
        result = job.step(batch)
    with job.weights():
        for name, parameter in case.model.named_parameters():
            assert same_bits(parameter.detach(), reference.model.get_parameter(name).detach()), name
    return result


def _pair(name: str, plan: str, directory: Path) -> tuple[zoo.Case, zoo.Case, Any, PlainTrainer]:
    case, reference = zoo.ZOO[name](), zoo.ZOO[name]()
    job = fit_variant(name, plans.BY_NAME[plan], directory)(case, sgd(lr=0.1, momentum=0.9)(case.model))
    return case, reference, job, PlainTrainer(reference, sgd(lr=0.1, momentum=0.9)(reference.model))


@pytest.mark.parametrize("plan", ["resident", "pairs"])
def test_a_batch_of_another_shape_is_trained_as_plain_pytorch_would_or_refused_with_both_shapes(
    plan: str, tmp_path: Path
) -> None:
    case, reference, job, plain = _pair(NAME, plan, tmp_path)
    _lockstep(case, reference, job, plain, case.batch(0))
    batch = case.batch(1)
    for other in ({k: v[:5] for k, v in batch.items()}, {k: v[:, :4] for k, v in batch.items()}):
        try:
            _lockstep(case, reference, job, plain, other)
        except UsageError as error:
            assert "8, 6, 32" in str(error)  # noqa: PT017
            assert str(tuple(other["inputs"].shape))[1:-1] in str(error)  # noqa: PT017
            break
    _lockstep(case, reference, job, plain, case.batch(2)) if plain.loss.isfinite() else None
    job.close()


@pytest.mark.parametrize("plan", ["resident", "disk", "clipped"])
def test_a_loss_that_is_nan_goes_on_as_in_plain_pytorch_and_is_reported(plan: str, tmp_path: Path) -> None:
    case, reference, job, plain = _pair(NAME, plan, tmp_path)
    plain.max_grad_norm = plans.BY_NAME[plan].max_grad_norm
    batch = {name: tensor.clone() for name, tensor in case.batch(0).items()}
    batch["inputs"][0, 0, 0] = torch.inf
    result = _lockstep(case, reference, job, plain, batch)
    assert number(result.loss) != number(result.loss)
    result = _lockstep(case, reference, job, plain, case.batch(1))
    assert number(result.loss) != number(result.loss)
    job.close()


@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_a_parameter_replaced_behind_its_back_is_named_at_the_next_step(plan: str, tmp_path: Path) -> None:
    case, _, job, _ = _pair(NAME, plan, tmp_path)
    job.step(case.batch(0))
    case.model.get_submodule("blocks.1.mix.up").weight = nn.Parameter(torch.zeros(64, 32))
    with pytest.raises(MemfitError, match=r"blocks\.1\.mix\.up\.weight"):
        job.step(case.batch(1))


@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_weight_data_exchanged_behind_its_back_is_named(plan: str, tmp_path: Path) -> None:
    case, _, job, _ = _pair(NAME, plan, tmp_path)
    job.step(case.batch(0))
    weight = case.model.get_parameter("blocks.1.mix.up.weight")
    if plan == "disk":
        # The data of a weight that is away cannot even be had.
        with pytest.raises(AwayError, match=r"blocks\.1\.mix\.up\.weight"):
            weight.data = torch.zeros(64, 32)
        return
    weight.data = torch.zeros(64, 32)
    with pytest.raises(MemfitError, match=r"blocks\.1\.mix\.up\.weight"):
        job.step(case.batch(1))


@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_freezing_a_parameter_behind_its_back_is_named_at_the_next_step(plan: str, tmp_path: Path) -> None:
    case, _, job, _ = _pair(NAME, plan, tmp_path)
    job.step(case.batch(0))
    case.model.get_parameter("blocks.1.mix.up.weight").requires_grad_(False)
    with pytest.raises(MemfitError, match=r"blocks\.1\.mix\.up\.weight"):
        job.step(case.batch(1))


@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_weights_changed_where_they_may_be_changed_count(plan: str, tmp_path: Path) -> None:
    case, reference, job, plain = _pair(NAME, plan, tmp_path)
    _lockstep(case, reference, job, plain, case.batch(0))
    with job.weights("blocks.1"), torch.no_grad():
        case.model.get_parameter("blocks.1.mix.up.weight").mul_(0.5)
    with torch.no_grad():
        reference.model.get_parameter("blocks.1.mix.up.weight").mul_(0.5)
    _lockstep(case, reference, job, plain, case.batch(1))
    job.close()


def test_weights_of_an_unknown_block_are_refused_with_the_known_names(tmp_path: Path) -> None:
    _, _, job, _ = _pair(NAME, "disk", tmp_path)
    with pytest.raises(UsageError, match=r"blocks\.9") as caught, job.weights("blocks.9"):
        pass
    assert "the nearest name is 'blocks." in str(caught.value) and "job.block_names" in str(caught.value)
    job.close()


def test_a_closed_job_says_so(tmp_path: Path) -> None:
    case, _, job, _ = _pair(NAME, "disk", tmp_path)
    job.step(case.batch(0))
    job.close()
    job.close()
    with pytest.raises(MemfitError, match="closed"):
        job.step(case.batch(1))


# Backward of the user's own


def _penalty(model: nn.Module, batch: zoo.Batch) -> Tensor:
    """A gradient penalty: a backward through a backward."""
    inputs = batch["inputs"].clone().requires_grad_()
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    return functional.mse_loss(outputs, batch["targets"]) + 0.01 * gradient.square().mean()


def _retained(model: nn.Module, batch: zoo.Batch) -> Tensor:
    loss = functional.mse_loss(model(batch["inputs"]), batch["targets"])
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.thinned
@pytest.mark.parametrize("plan", ["resident", "recompute", "disk", "offload"])
@pytest.mark.parametrize("loss", [_penalty, _retained])
def test_a_backward_inside_the_loss_is_refused_clearly(loss: Callable[..., Tensor], plan: str, tmp_path: Path) -> None:
    case = zoo.ZOO[NAME]()
    plan_by_hand = plans.BY_NAME[plan].plan(profile_by_name(NAME))
    with pytest.raises(UnsupportedError, match="backward of its own"):
        fit_case(case, loss=loss, plan=plan_by_hand, directory=tmp_path / "homes").step(case.batch(0))


def test_a_second_backward_on_the_result_is_refused() -> None:
    case = zoo.ZOO[NAME]()
    job = fit_case(case, plan=Plan())
    result = job.step(case.batch(0))
    assert not getattr(result.loss, "requires_grad", False), "a result that holds its graph holds its memory"
    job.close()


class _CheckpointedBlock(small_models.KeywordBlock):
    """Checkpoints its own inside, non-reentrant or reentrant."""

    is_reentrant = False

    def forward(self, *, hidden: Tensor, scale: float) -> Tensor:
        mixed = checkpoint.checkpoint(self.mix, hidden, use_reentrant=self.is_reentrant)
        assert isinstance(mixed, Tensor)
        return hidden + scale * mixed


class _ReentrantBlock(_CheckpointedBlock):
    is_reentrant = True


class _OutsideCheckpointed(small_models.Stack):
    """Checkpoints whole blocks from outside, as many training scripts do."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            assert isinstance(block, small_models.KeywordBlock)
            hidden = checkpoint.checkpoint(block.step, hidden, use_reentrant=False)
        assert isinstance(hidden, Tensor)
        return self.exit(hidden)


def _own_checkpointing(kind: str) -> zoo.Case:
    if kind == "transformers":
        case = zoo.ZOO["llama"]()
        case.model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return case
    plain = zoo.ZOO[NAME]()
    torch.manual_seed(0)
    if kind == "outside":
        model: nn.Module = _OutsideCheckpointed(small_models.KeywordBlock, zoo.WIDTH)
    else:
        model = small_models.Stack(_ReentrantBlock if kind == "reentrant" else _CheckpointedBlock, zoo.WIDTH)
    return zoo.Case(model=model.train(), loss=plain.loss, batch=plain.batch)


# A whole model of theirs takes seconds; what checkpoints and plans do to each other shows in the small ones.
_TRANSFORMERS_PLANS = ("recompute", "disk-recompute-4")


# torch's reentrant kind warns where no input asks for a gradient, as in a forward without any.
@pytest.mark.thinned
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(
            kind, plan, marks=[] if kind != "transformers" or plan in _TRANSFORMERS_PLANS else pytest.mark.slow
        )
        for kind in ("inside", "reentrant", "outside", "transformers")
        for plan in ("resident", "recompute", "disk", "offload", "select", "disk-recompute-4")
    ],
)
def test_a_model_with_its_own_checkpointing_is_trained_exactly_or_refused_clearly(
    kind: str, plan: str, tmp_path: Path
) -> None:
    variant = plans.BY_NAME[plan]
    try:
        plan_by_hand = variant.plan(profile_of(_own_checkpointing(kind)))
        assert_equal_training(
            lambda: _own_checkpointing(kind),
            adamw(),
            fit_with(plan_by_hand, tmp_path, keep_gradients=True),
            microbatches=variant.microbatches,
            steps=2,
            may_reorder=False,
        )
    except UnsupportedError as error:
        assert "checkpoint" in str(error)  # noqa: PT017
