"""Cures that only a model on an accelerator needs, followed on the late device, which stays in the process that it is registered in.

Run as a program: prints as JSON what was refused.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerator import late
from memfit.core.plan import Order, Plan
from unit.advice import BATCH, Scene, loss, three_layers

DEVICE = torch.device("late", 0)
THERE = BATCH.to(DEVICE)
TURNS = Plan(microbatches=2)


class Detouring(nn.Module):
    """Computes the middle on the CPU, or on its device."""

    def __init__(self, *, detours: bool) -> None:
        super().__init__()
        self.layers, self.detours = three_layers(), detours

    def forward(self, batch: Tensor) -> Tensor:
        first, middle, last = self.layers.children()
        hidden = first(batch)
        return last(middle(hidden.cpu()).to(batch.device) if self.detours else middle(hidden))


class Shifted(nn.Module):
    """A model with what its loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = three_layers(), nn.Parameter(torch.ones(8))

    def forward(self, batch: Tensor) -> Tensor:
        return self.inner(batch) + self.shift


def trains(
    s: Scene, build: Callable[[], nn.Module], plan: Plan, function: Callable[[Any, Tensor], Tensor] = loss
) -> None:
    """Trains on the device, to the bits of a plain loop there."""
    s.begin(lambda: build().to(DEVICE))
    with s.fit(function, THERE, plan=plan) as job:
        job.step(THERE)
    parts = THERE.chunk(plan.microbatches)
    s.trains_as(lambda model: [(function(model, part) / len(parts)).backward() for part in parts])


def a_detour(s: Scene) -> None:
    s.refused(lambda: trains(s, lambda: Detouring(detours=True), TURNS))
    trains(s, lambda: Detouring(detours=False), TURNS)
    trains(s, lambda: Detouring(detours=True), Plan(microbatches=1))
    trains(s, lambda: Detouring(detours=True), replace(TURNS, order=Order.MICROBATCH_MAJOR))


def a_parameter_on_the_cpu(s: Scene) -> None:
    shift, is_read = nn.Parameter(torch.ones(8)), list[bool]()

    def beside(model: Any, batch: Tensor) -> Tensor:
        out = model(batch).cpu()
        return (out + shift if is_read else out).square().mean()

    s.begin(lambda: three_layers().to(DEVICE))
    with s.fit(beside, THERE, plan=TURNS) as job:
        is_read.append(True)
        s.refused(lambda: job.step(THERE))
    trains(s, Shifted, TURNS)
    shift.requires_grad_(False)
    trains(s, three_layers, TURNS, beside)


def main() -> None:
    words = list[str]()
    for case in (a_detour, a_parameter_on_the_cpu):
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack, late.checked():
            scene = Scene(Path(directory), stack)
            case(scene)
            words.append(scene.words)
    print(json.dumps(words))


if __name__ == "__main__":
    main()
