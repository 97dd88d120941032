"""One plan tried on one subject: trained by memfit, compared with plain PyTorch, and put into a class.

In: a subject, its reference, a plan. Out: a `Trial`.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memfit
from memfit.core.errors import MemfitError
from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile
from sweeping.drawing import relaxed
from sweeping.reference import Step, make_optimizer, same_bits, within_roundings
from sweeping.subjects import Subject, loss_of, seed_all

OUTCOMES = ("bitwise", "declared rounding", "refused", "plain does not repeat", "FAILED")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one plan went.

    Attributes:
        outcome: one of `OUTCOMES`.
        detail: the first differences, the refusal or the error.
        changed: what was taken from the plan as drawn because it was refused, and the refusal's words.
        seconds: that it took.
    """

    outcome: str
    detail: str = ""
    changed: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What was drawn beside the plan.

    Attributes:
        optimizer: its name.
        seed: of the step's random numbers.
        has_host: an emulated device, with host memory beside it.
        profile: of the subject.
        split: what cuts its batches, where memfit does not find that out.
    """

    optimizer: str
    seed: int
    has_host: bool
    profile: Profile
    split: Callable[[Any, int], list[Any]] | None = None


def try_plan(subject: Subject, plain: Step, plan: Plan, draw: Draw, first: nn.Module | None) -> Trial:
    """Trains under the plan; where it is refused, under what the refusal leaves of it.

    Args:
        subject: what is trained.
        plain: its reference.
        plan: as drawn.
        draw: the rest.
        first: a model that was traced already and is to be trained before new ones are built.
    """
    began = time.perf_counter()
    changed: list[str] = []
    refusal = ""
    for name, tried in (("", plan), *relaxed(plan)):
        if name:
            changed.append(f"{name}: {refusal}")
        model, first = first if first is not None else subject.build(), None
        try:
            outcome, detail = _train(subject, model, plain, tried, draw)
        except MemfitError as error:
            refusal = f"{type(error).__name__}: {brief(error)}"
            continue
        except Exception as error:  # noqa: BLE001 - a raw error of memfit's or of the model's under memfit is a failure, whatever it is
            outcome, detail = "FAILED", f"{type(error).__name__}: {brief(error)}"
        return Trial(outcome=outcome, detail=detail, changed=tuple(changed), seconds=time.perf_counter() - began)
    return Trial(outcome="refused", detail=refusal, seconds=time.perf_counter() - began)


def _train(subject: Subject, model: nn.Module, plain: Step, plan: Plan, draw: Draw) -> tuple[str, str]:
    steps = make_optimizer(draw.optimizer, model)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        job = memfit.fit(
            model,
            steps,
            loss_of,
            subject.copy_of_batch(),
            plan=plan,
            allow={"nonadditive-loss"} if plan.microbatches > 1 else (),
            directory=directory,
            keep_gradients=True,
            emulate_device=draw.has_host,
            split=draw.split,
            weight=None if draw.split is None else alike,
        )
        stack.callback(job.close)
        seed_all(draw.seed)
        result = job.step(subject.copy_of_batch())
        return compare(job, result, model, plain, declared_names(draw.profile, plain, plan))


def alike(_: Any) -> float:
    """Halves count alike."""
    return 1.0


def compare(job: Any, result: Any, model: nn.Module, plain: Step, declared: frozenset[str]) -> tuple[str, str]:
    """The outcome and its detail: losses, gradients, then weights and buffers after the step."""
    wrong: list[str] = []
    losses = [float(loss) for loss in result.losses]
    if losses != plain.losses:
        wrong.append(f"losses {losses}, plain {plain.losses}")
    rounded: list[str] = []
    for name, expected in plain.gradients.items():
        ours = job.gradient(name)
        if same_bits(ours, expected):
            continue
        if name in declared and within_roundings(ours, expected, plain.magnitudes.get(name), plain.terms.get(name, 1)):
            rounded.append(name)
        else:
            wrong.append(f"gradient {name}{'' if name not in declared else ' (declared)'}: {_gap(ours, expected)}")
    with job.weights():
        for name, parameter in model.named_parameters():
            if name not in rounded and not wrong and not same_bits(parameter.detach(), plain.weights[name]):
                wrong.append(f"weight {name} after the step: {_gap(parameter.detach(), plain.weights[name])}")
        for name, buffer in model.named_buffers():
            if not wrong and not same_bits(buffer.detach(), plain.buffers.get(name)):
                wrong.append(f"buffer {name} after the step: {_gap(buffer.detach(), plain.buffers.get(name))}")
    if wrong:
        return "FAILED", "; ".join([*wrong[:3], *([f"and {len(wrong) - 3} more"] if len(wrong) > 3 else [])])
    if rounded:
        return "declared rounding", f"{len(rounded)} of {len(declared)} declared: {', '.join(rounded[:4])}"
    return "bitwise", ""


def declared_names(profile: Profile, plain: Step, plan: Plan) -> frozenset[str]:
    """Weights whose sums memfit says it regroups: those with several uses, where microbatches go layer by layer.

    A version of memfit that does not name them is asked nothing: then they are the weights that plain PyTorch was seen to use several times.
    """
    if plan.microbatches == 1 or plan.order is not Order.LAYER_MAJOR:
        return frozenset()
    seen = (name for name, terms in plain.terms.items() if terms > plan.microbatches)
    return frozenset(getattr(profile, "shared_weights", seen))


def _gap(ours: torch.Tensor | None, plain: torch.Tensor | None) -> str:
    if ours is None or plain is None:
        return f"{'none' if ours is None else 'some'}, plain has {'none' if plain is None else 'some'}"
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return f"{tuple(ours.shape)} {ours.dtype}, plain {tuple(plain.shape)} {plain.dtype}"
    gap = (ours.double() - plain.double()).abs().max().item()
    return f"off by {gap:.2g} at a magnitude of {plain.double().abs().max().item():.2g}"


def brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
