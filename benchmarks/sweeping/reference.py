"""The reference: one step of plain PyTorch, whole or accumulated over the halves.

In: a subject. Out: losses, gradients, weights after the step, and of weights with several uses how many gradients were added and how large they were.

With two microbatches the random numbers are those of the public `memfit.microbatch_streams`; nothing else here is memfit's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equivalence.terms import Terms  # pyright: ignore[reportMissingImports] - tests/, which the program puts on its path
from memfit import microbatch_streams
from sweeping.batches import halves
from sweeping.subjects import Subject, loss_of, seed_all

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD over what trains."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2) if name == "adamw" else torch.optim.SGD(trained, lr=0.1, momentum=0.9)


@dataclass
class Step:
    """What one plain step leaves.

    Attributes:
        losses: one a microbatch.
        gradients: by name; None where there is none.
        weights, buffers: after the update.
        terms, magnitudes: of parameters whose gradient is a sum, its terms and the sum of their absolute values.
    """

    losses: list[float] = field(default_factory=list[float])
    gradients: dict[str, Tensor | None] = field(default_factory=dict[str, Tensor | None])
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    terms: dict[str, int] = field(default_factory=dict[str, int])
    magnitudes: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def repeats(self, other: Step) -> bool:
        """The same bits again."""
        if self.losses != other.losses or self.gradients.keys() != other.gradients.keys():
            return False
        return all(same_bits(self.gradients[name], other.gradients[name]) for name in self.gradients)


def plain_step(subject: Subject, microbatches: int, optimizer: str, seed: int) -> Step:
    """One step from the subject's first weights."""
    model = subject.build()
    steps = make_optimizer(optimizer, model)
    found = Step()
    sums = Terms(dict(model.named_parameters()))
    seed_all(seed)
    if microbatches == 1:
        loss = loss_of(model, subject.copy_of_batch())
        sums.watch(loss)
        loss.backward()
        found.losses.append(loss.item())
    else:
        stream = microbatch_streams(microbatches)
        for index, part in enumerate(halves(subject.copy_of_batch(), microbatches)):
            with stream(index):
                loss = loss_of(model, part)
                weighted = loss * (1.0 / microbatches)
                sums.watch(weighted)
                weighted.backward()
                found.losses.append(loss.item())
    found.terms, found.magnitudes = sums.counts, sums.magnitudes
    found.gradients = {
        name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()
    }
    steps.step()
    found.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    found.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return found


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    """Equal shape, dtype and bits; no gradient equals no gradient only."""
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.numel() == 0 or torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def within_roundings(ours: Tensor | None, plain: Tensor | None, magnitude: Tensor | None, terms: int) -> bool:
    """A sum of n terms in another order differs by at most n - 1 roundings at the magnitude of what was added.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 4.2. Each of two orders has its own roundings, so the bound is taken twice.
    """
    if ours is None or plain is None or ours.shape != plain.shape or ours.dtype != plain.dtype or magnitude is None:
        return False
    largest = magnitude.max()
    spacing = torch.nextafter(largest, torch.full_like(largest, torch.inf)) - largest
    return bool(((ours - plain).abs() <= 2 * max(terms - 1, 1) * spacing).all())
