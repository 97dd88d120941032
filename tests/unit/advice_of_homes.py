"""Cures of the refusals of `homes`, `tensors` and `huggingface`: values that are away, gradients that a loop asks for, tensors of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import memfit
from equivalence.zoo import ZOO
from memfit.core.plan import Plan
from memfit.core.tiers import Tier
from unit.advice import BATCH, DISK, ON_DISK, Scene, follows, loss

ALL_ON_DISK = Plan(blocks=dict.fromkeys(("0", "2"), replace(DISK, gradient_home=Tier.DISK)))


def by_lines(s: Scene, body: Callable[[Any], object], plan: Plan = ALL_ON_DISK, **wishes: Any) -> memfit.Job:
    """Trains a new model by lines of a loop, to the bits that they make in plain PyTorch."""
    s.begin()
    job = s.fit(lines=True, plan=plan, **wishes)
    with job.lines():
        body(s.model)
        s.optimizer.step()
        s.optimizer.zero_grad()
    with job.weights():
        s.trains_as(body)
    return job


def refused_lines(s: Scene, body: Callable[[Any], object], cured: Callable[[Any], object] | None = None) -> None:
    """Meets a refusal in lines of a loop, which then go on with the cured ones to the bits of plain PyTorch."""
    s.begin()
    job = s.fit(lines=True, plan=ALL_ON_DISK)
    with job.lines():
        s.refused(lambda: [body(s.model), s.optimizer.step()])
        s.optimizer.zero_grad()
        if cured is not None:
            cured(s.model)
            s.optimizer.step()
    job.close()
    if cured is not None:
        s.trains_as(cured)


ON_DEVICE = replace(ALL_ON_DISK, blocks=dict.fromkeys(("0", "2"), DISK))


def clipped(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def backward(model: nn.Module) -> None:
    loss(model, BATCH).backward()


@follows("homes/gradient_standins.py", "For anything else plan gradient_home='device'")
def gradients_that_stay_on_the_device(s: Scene) -> None:
    def looking(model: Any) -> None:
        backward(model)
        model[0].weight.grad.add_(0.01)

    refused_lines(s, looking, lambda model: [backward(model), clipped(model)])
    by_lines(s, looking, ON_DEVICE)
    job = by_lines(s, backward, keep_gradients=True)
    assert job.gradient("0.weight") is not None


@follows("homes/gradient_standins.py", "Read gradients before the step")
def gradients_before_the_step(s: Scene) -> None:
    job = s.fit(lines=True)
    with job.lines():
        backward(s.model)
        before = s.model[0].weight.grad.clone()
        s.optimizer.step()
        s.refused(s.model[0].weight.grad.sum)
    job.close()
    for plan in (Plan(), ALL_ON_DISK):
        s.begin()
        job = s.fit(lines=True, plan=plan, keep_gradients=True)
        with job.lines():
            backward(s.model)
            kept = [job.gradient("0.weight")]
            s.optimizer.step()
            kept.append(job.gradient("0.weight"))
        kept.append(job.gradient("0.weight"))
        job.close()
        assert all(one is not None and torch.equal(one, before) for one in kept)


@follows("homes/gradient_standins.py", "optimizer.zero_grad() before the backward")
def gradients_zeroed_before_a_backward(s: Scene) -> None:
    job = s.fit(lines=True, plan=ON_DISK)
    with job.lines() as lines:
        backward(s.model)
        s.optimizer.step()
        backward(s.model)
        s.refused(s.optimizer.step)
        s.optimizer.zero_grad()
        backward(s.model)
        s.optimizer.step()
        s.optimizer.zero_grad()
        assert lines.steps == 2


def clipped_twice(model: nn.Module) -> None:
    for _ in range(2):
        backward(model)
        clipped(model)


@follows("homes/gradient_standins.py", "was multiplied (clipped)")
def gradients_clipped_once(s: Scene) -> None:
    refused_lines(s, clipped_twice, lambda model: [backward(model), backward(model), clipped(model)])
    by_lines(s, clipped_twice, ON_DEVICE)


@follows("homes/gradient_standins.py", "Leave set_to_none=False out")
def gradients_set_to_none(s: Scene) -> None:
    def zeroing(**how: bool) -> Callable[[Any], None]:
        def body(model: Any) -> None:
            backward(model)
            s.optimizer.zero_grad(**how)
            model[2](BATCH).square().mean().backward()

        return body

    refused_lines(s, zeroing(set_to_none=False), zeroing())


@follows("homes/gradient_standins.py", "take the norm that clip_grad_norm_ returns")
def the_norm_that_clipping_returns(s: Scene) -> None:
    norms = list[Tensor]()

    def asking(model: nn.Module) -> None:
        backward(model)
        clipped(model)
        norms.append(nn.utils.get_total_norm([g for p in model.parameters() if (g := p.grad) is not None]))

    refused_lines(s, asking, lambda model: [backward(model), norms.append(clipped(model))])
    by_lines(s, asking, ON_DEVICE)


@follows("homes/gradient_standins.py", "begin with a smaller scale")
def a_smaller_scale(s: Scene) -> None:
    def scaling(init_scale: float) -> Callable[[nn.Module], None]:
        def body(model: nn.Module) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
            scaler.scale(loss(model, BATCH)).backward()
            scaler.unscale_(s.optimizer)
            clipped(model)

        return body

    refused_lines(s, scaling(2.0**80), scaling(2.0**16))
    by_lines(s, scaling(2.0**80), ON_DEVICE)


@follows("homes/weights.py", "in place while it visited")
def weights_that_change_between_steps(s: Scene) -> None:
    bounds = list[bool]()

    def bound(*_: object) -> None:
        if bounds:
            s.model[0].weight.data.mul_(0.5)

    s.model[0].register_forward_hook(bound)
    job = s.fit(plan=ON_DISK)
    bounds.append(True)
    s.refused(lambda: job.step(BATCH))
    bounds.clear()
    with job.weights():
        s.model[0].weight.data.mul_(0.5)
    job.step(BATCH)
    job.close()
    s.trains_as(lambda model: [model[0].weight.data.mul_(0.5), backward(model)])


def over_two(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch[0]) + loss(model, batch[1])


@follows("tensors/write_marks.py", "a nested tensor")
def parts_of_a_nested_tensor(s: Scene) -> None:
    nested = torch.nested.nested_tensor([BATCH[:1], BATCH[1:]], layout=torch.jagged)
    parts, padded = list(nested.unbind()), nested.to_padded_tensor(0.0)
    s.refused(lambda: s.fit(lambda model, batch: loss(model, batch.to_padded_tensor(0.0)), nested))
    ways: list[tuple[Callable[[Any, Any], Tensor], Any]] = [(over_two, parts), (loss, padded)]
    for function, sample in ways:
        s.begin()
        job = s.fit(function, sample)
        job.step(sample)
        job.close()
        s.trains_as(lambda model, function=function, sample=sample: function(model, sample).backward())


@follows("tensors/guard.py", "Put `with job.weights(")
def weights_that_are_brought(s: Scene) -> None:
    job, weight = s.fit(plan=ON_DISK), s.model[0].weight
    s.refused(weight.sum)
    with job.weights("0"):
        expected = weight.sum().item()
    with job.weights():
        assert weight.sum().item() == expected
    job.close()
    assert weight.sum().item() == expected


@follows("tensors/guard.py", "would move or convert the weight")
def a_model_that_is_converted_when_its_job_is_closed(s: Scene) -> None:
    job = s.fit(plan=ON_DISK)
    s.refused(s.model.double)
    with job.weights("0"):
        assert s.model[0].weight.double().dtype is torch.float64
    job.close()
    s.model.double()
    assert s.fit(loss, BATCH.double(), plan=ON_DISK).step(BATCH.double()).is_finite


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 8))


@follows("tensors/guard.py", "which has none yet")
def values_that_the_function_changes(s: Scene) -> None:
    def halved() -> nn.Module:
        model: Any = wide()
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        return model

    model: Any = memfit.empty(wide)
    s.refused(lambda: model[0].weight.mul_(0.5))
    s.begin(halved)
    torch.manual_seed(0)
    s.model = memfit.empty(halved)
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)
    job = s.fit()
    job.step(BATCH)
    job.close()
    s.trains_as(backward)


@follows("tensors/guard.py", "only values that are changed in place stay")
def values_that_are_copied_into_a_weight(s: Scene) -> None:
    job = s.fit(plan=ON_DISK)

    def put() -> None:
        with job.weights():
            s.model[0].weight.data = torch.ones(8, 8)

    s.refused(put)
    with job.weights("0"), torch.no_grad():
        s.model[0].weight.copy_(torch.ones(8, 8))
    job.step(BATCH)
    job.close()
    s.trains_as(lambda model: [model[0].weight.data.fill_(1.0), backward(model)])


@follows("tensors/with_frozen.py", "give the frozen one another name")
def another_name(s: Scene) -> None:
    teacher = nn.Linear(8, 8).requires_grad_(False)
    s.refused(lambda: memfit.WithFrozen(s.model, **{"0": teacher}))
    assert memfit.WithFrozen(s.model, teacher=teacher).get_submodule("teacher") is teacher


@follows("tensors/with_frozen.py", "would train: call")
def a_teacher_that_does_not_train(s: Scene) -> None:
    teacher = nn.Linear(8, 8)
    s.refused(lambda: memfit.WithFrozen(s.model, teacher=teacher))
    teacher.requires_grad_(False)
    s.model = memfit.WithFrozen(s.model, teacher=teacher)
    job = s.fit(lambda model, batch: (model(batch) - model.teacher(batch)).square().mean())
    job.step(BATCH)
    job.close()
    s.model = s.model.trained
    s.trains_as(lambda model: (model(BATCH) - teacher(BATCH)).square().mean().backward())


@follows("engine/causal_loss.py", "leave loss_chunk_tokens out")
def a_loss_in_chunks_of_its_own(s: Scene) -> None:
    targets = torch.arange(4)

    def inner(model: Any, batch: Tensor) -> Tensor:
        return model[1](model[0](batch))

    def chunked(model: Any, batch: Tensor) -> Tensor:
        return memfit.losses.chunked_cross_entropy(inner(model, batch), model[2], targets, chunk_tokens=2)

    s.refused(lambda: s.fit(plan=Plan(loss_chunk_tokens=2)))
    job = s.fit(chunked)
    job.step(BATCH)
    job.close()
    s.trains_as(lambda m: nn.functional.cross_entropy(m[2](inner(m, BATCH)), targets).backward(), atol=1e-5)


@follows("engine/conversions.py", "do not make")
def files_that_are_all_there(s: Scene) -> None:
    case = ZOO["mixtral"]()
    whole = s.directory / "model.safetensors"
    case.model.save_pretrained(s.directory)  # type: ignore[operator]
    state = safetensors.torch.load_file(whole)
    expert = next(name for name in sorted(state) if "experts.1.w" in name)

    def loaded() -> None:
        s.model = memfit.empty(lambda: ZOO["mixtral"]().model, initialises=False)
        s.optimizer = torch.optim.AdamW(s.model.parameters())
        s.fit(case.loss, case.batch(0), weights=s.directory).close()

    safetensors.torch.save_file({name: t for name, t in state.items() if name != expert}, whole, {"format": "pt"})
    s.refused(loaded)
    safetensors.torch.save_file(state, whole, {"format": "pt"})
    loaded()
    for name, value in case.model.state_dict().items():
        assert torch.equal(s.model.state_dict()[name], value)
