"""A job without memfit inside: it trains plainly, and can be told to be wrong by the least amount.

In: a case, its optimizer, a defect ("" for none). Out: what `compare.JobLike` asks for.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from equivalence import zoo
from equivalence.plain import PlainTrainer, RandomState


class StandIn:
    """A job that trains plainly; `defect` spoils one thing by the least amount."""

    def __init__(self, case: zoo.Case, optimizer: torch.optim.Optimizer, defect: str, options: dict[str, Any]) -> None:
        if defect == "draws":
            torch.rand(())
        self.trainer = PlainTrainer(case, optimizer, **options)
        self.defect = defect
        self.gradients: dict[str, Tensor | None] = {}

    def step(self, batch: zoo.Batch) -> Any:
        # The harness lends its generator: the trainer goes on from there, and leaves it there.
        self.trainer.random = RandomState()
        self.trainer.accumulate(batch)
        norm = self.trainer.clip()
        self.gradients = self.trainer.gradients()
        if self.defect == "gradient":
            name = next(reversed(self.gradients))
            gradient = self.gradients[name]
            assert gradient is not None
            gradient.view(-1)[0] = torch.nextafter(gradient.view(-1)[0], torch.tensor(torch.inf))
            self.trainer.adopt({name: gradient})
        self.trainer.update()
        torch.set_rng_state(self.trainer.random.state)
        if self.defect == "skip":
            with torch.no_grad():
                next(self.trainer.model.parameters()).view(-1)[3].mul_(1 + 1e-6)
        loss = self.trainer.loss if self.defect != "loss" else self.trainer.loss * (1 + 2e-7)
        return type("Result", (), {"loss": loss, "losses": self.trainer.losses, "norm": norm, "departures": 0})()

    def gradient(self, name: str) -> Tensor | None:
        return self.gradients[name]

    def weights(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        if self.defect == "state":
            state = next(iter(self.trainer.optimizer.state.values()))
            state["exp_avg"].view(-1)[0] *= -1
