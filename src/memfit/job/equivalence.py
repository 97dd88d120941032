"""Proof that a plan trains as plain PyTorch does, by doing both.

In: the user's model, optimizer, loss and a batch. Out: an `Equivalence`: copies of the model were
trained for some steps plainly and under the plan, and are compared bit for bit. The user's own
objects are only read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.core.numerics import Exactness
from memfit.job.fit import fit
from memfit.planner.first_batch import sample_of
from memfit.planner.problem import Loss
from memfit.tensors.guard import is_away
from memfit.trace.batch import Parts

Kind = Literal["bitwise", "rounding", "approximate", "different"]

_NOT_HERE = (
    "store",
    "resume",
    "durability",
    "scheme",
    "on_breach",
    "adapt",
    "weights",
    "lines",
    "keep_gradients",
    "weight",
)
_MOST = {Exactness.REORDERED: 1e-4, Exactness.APPROXIMATE: 0.1}
"""Largest difference of a gradient, relative to its norm, that a plan of this exactness may make: a
thousand roundings of fp32; what numbers of 8 bits of mantissa, or fewer in states, come to.
"""


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Result of `memfit.verify`. Prints as text; true if it is what the plan declares.

    Attributes:
        kind: "bitwise": all losses, gradients, weights, buffers and optimizer states are equal.
            "rounding": they differ as sums in another order do, which the plan declares.
            "approximate": they differ as the declared arithmetic does. "different": by more, or
            where the plan declares that they are equal.
        steps: that were compared.
        compared: number of tensors.
        worst: name of the gradient that differs most, and by how much of its norm; empty and 0 if
            none does.
        declared: effect of the plan on the numbers, in words.
        words: more on how the comparison was made; may be empty.
    """

    kind: Kind
    steps: int
    compared: int
    worst: tuple[str, float]
    declared: str
    words: str = ""

    def __bool__(self) -> bool:
        return self.kind != "different"

    def __str__(self) -> str:
        name, size = self.worst
        by = f", most in the gradient of {name!r}, by {size:.1e} of it" if name else ""
        told = f"{self.kind}: {self.steps} steps, {self.compared} tensors compared with plain PyTorch{by}"
        return "\n".join([told, self.declared, *([self.words] if self.words else [])])


def verify(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, sample: Any, *, steps: int = 3, **options: Any
) -> Equivalence:
    """Trains a copy of the model plainly and another one under the plan, and compares them.

    Memory: the model, its gradients and optimizer states three times: meant for a small
    configuration of the model that is then trained in its full size.

    Args:
        model: as in `fit`, like the next three; none is changed.
        optimizer: of the model's parameters.
        loss: the user's.
        sample: the batch of each step, or its `memfit.Parts`; of a loader, its first batch.
        steps: at least 1.
        options: other arguments of `fit`, such as `limit`, `plan`, `allow` and `max_grad_norm`.

    Returns:
        What was found.

    Raises:
        UsageError: an option that has no meaning here, or a model without its weights.
        MemfitError: as `fit`.
    """
    sample = sample_of(sample)
    refused = [name for name in options if name in _NOT_HERE]
    if refused:
        raise UsageError(
            f"memfit.verify goes without {refused[0]}=: it compares steps of plain PyTorch with those of job.step. Leave it out"
        )
    if steps < 1:
        raise UsageError(f"memfit.verify compares at least 1 step, not {steps}")
    if any(is_away(p) for p in model.parameters()):
        raise UsageError(
            "memfit.verify copies the model, whose weights are away (a live job has them, or memfit.empty built it): give it a small model of the same kind"
        )
    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    ours, our_optimizer = copy.deepcopy((model, optimizer))
    before = _random_states()
    with _random_from(before):
        expected, gradients = _train_plainly(plain, plain_optimizer, loss, sample, steps, options.get("max_grad_norm"))
        draws = not all(map(torch.equal, before, _random_states()))
    with fit(ours, our_optimizer, loss, sample, keep_gradients=True, **options) as job, _random_from(before):
        found = [job.step(sample).loss]
        sizes = {name: _relative(job.gradient(name), gradient) for name, gradient in gradients.items()}
        found += [job.step(sample).loss for _ in range(steps - 1)]
        numerics, microbatches = job.numerics, job.plan.microbatches
    pairs = [
        *_pairs(ours.state_dict(), plain.state_dict()),
        *_pairs(our_optimizer.state_dict(), plain_optimizer.state_dict()),
    ]
    is_equal = found == expected and not any(sizes.values()) and all(torch.equal(a, b) for a, b in pairs)
    worst = max(sizes, key=lambda name: sizes[name], default="")
    size = sizes.get(worst, 0.0)
    kind: Kind = "different"
    if is_equal:
        kind = "bitwise"
    elif size <= _MOST.get(numerics.exactness, -1.0):
        kind = "rounding" if numerics.exactness is Exactness.REORDERED else "approximate"
    words = ""
    if kind == "different" and draws and microbatches > 1:
        words = f"The model draws random numbers, and {microbatches} microbatches draw others than the whole batch: compare it without dropout"
    elif kind == "different" and numerics.is_exact:
        words = "The plan declares that they are equal: please report it, with the model and the plan"
    return Equivalence(
        kind=kind,
        steps=steps,
        compared=len(pairs) + len(sizes) + steps,
        worst=(worst, size) if size else ("", 0.0),
        declared=numerics.sentence(),
        words=words,
    )


def _train_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, sample: Any, steps: int, max_norm: float | None
) -> tuple[list[float], dict[str, torch.Tensor | None]]:
    """Returns losses, and the gradients of the first step."""
    losses: list[float] = []
    first: dict[str, torch.Tensor | None] = {}
    for step in range(steps):
        optimizer.zero_grad()
        value = _run_back(model, loss, sample)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if not step:
            named = model.named_parameters()
            first = {n: None if p.grad is None else p.grad.detach().clone() for n, p in named if p.requires_grad}
        optimizer.step()
        losses.append(value)
    return losses, first


def _run_back(model: nn.Module, loss: Loss, sample: Any) -> float:
    """Runs a batch, or each part of `Parts`, forward and back; returns its loss."""
    if not isinstance(sample, Parts):
        result = loss(model, sample)
        value = result[0] / result[1] if isinstance(result, tuple) else result
        value.backward()
        return float(value.detach())
    shares = [1.0] * len(sample.batches) if sample.shares is None else sample.shares
    total = 0.0
    for batch, share in zip(sample.batches, map(float, shares), strict=True):
        result = loss(model, batch)
        if isinstance(result, tuple):
            raise UsageError(
                "memfit.verify compares parts whose loss is one number: of (sum, count) the counts of all parts come first, and a loop has no such step"
            )
        (result * share).backward()
        total += float(result.detach()) * share
    return total


def _relative(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Norm of the difference, relative to what is expected; infinite where one is missing."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if torch.equal(found, expected.to(found.dtype)):
        return 0.0
    wide = expected.double()
    difference = float(torch.linalg.vector_norm(found.double() - wide))
    norm = float(torch.linalg.vector_norm(wide))
    # What is not a number anywhere is no rounding.
    return difference / norm if norm > 0.0 and math.isfinite(difference) else float("inf")


def _pairs(found: Any, expected: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the tensors of two structures side by side; a number is a tensor too."""
    if isinstance(expected, Mapping):
        for key in expected.keys() | found.keys():
            yield from _pairs(found.get(key), expected.get(key))
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            yield from _pairs(one, other)
    elif isinstance(expected, torch.Tensor):
        yield found if isinstance(found, torch.Tensor) else torch.tensor(float("nan")), expected
    else:
        yield torch.tensor(float(found == expected)), torch.tensor(1.0)


def _random_states() -> list[torch.Tensor]:
    """States of torch's default generators."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module: Any = None if found is None else torch.get_device_module(found)
    return [torch.get_rng_state(), *([] if module is None else module.get_rng_state_all())]


@contextmanager
def _random_from(states: list[torch.Tensor]) -> Iterator[None]:
    """Context that begins with these states, and after which they are what they were before it."""
    before = _random_states()
    _set_random(states)
    try:
        yield
    finally:
        _set_random(before)


def _set_random(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
        module.set_rng_state_all(states[1:])
