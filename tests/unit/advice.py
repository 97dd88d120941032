"""Tools of the cases that follow what refusals advise: a model with its jobs, and the list of cases.

Cases stand in `test_advice.py` and in modules named `advice_of_*.py`, which `test_advice.py` imports.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from distributed.processes import Ranks
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import install

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
ON_DISK = Plan(blocks={"0": DISK, "2": DISK})

CASES: dict[tuple[str, str], Callable[[Scene], None]] = {}


def follows(path: str, text: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Registers the case of a refusal by its file and a part of its text."""

    def register(case: Callable[[Scene], None]) -> Callable[[Scene], None]:
        CASES[path, text] = case
        return case

    return register


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Scene:
    """A model, its optimizer, and jobs that are closed at the end."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.words = ""
        self.begin(three_layers)

    def begin(self, build: Callable[[], nn.Module] | None = None) -> None:
        """Makes the model anew, from now on by `build` where that is there."""
        self._build = build or self._build
        torch.manual_seed(0)
        self.model: Any = self._build()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def fit(self, function: Any = loss, sample: Any = BATCH, **wishes: Any) -> memfit.Job:
        job = memfit.fit(self.model, self.optimizer, function, sample, **wishes)
        self._stack.callback(lambda: job.close(restore=False, commit=False))
        return job

    def refused(self, act: Callable[[], object], kind: type[Exception] = memfit.MemfitError) -> None:
        with pytest.raises(kind) as found:
            act()
        self.words = str(found.value)

    def trains_as(self, body: Callable[[Any], object], *, atol: float = 0.0) -> None:
        """Compares the model with one that a plain loop has trained by the same body once.

        Bit for bit; `atol` is for sums that are declared to add up in another order.
        """
        mine = [p.detach().clone() for p in self.model.parameters()]
        self.begin()
        body(self.model)
        self.optimizer.step()
        for one, other in zip(mine, self.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=atol)


def live_bytes() -> int:
    """Returns the bytes of tensors that the process holds, those of other tests too: a limit of an emulated device counts them."""
    gc.collect()
    return install().stats().live_bytes


def on_two_ranks(function: str, *args: Any) -> list[Any]:
    """Calls a function of a module, as "module:name", on two ranks; returns what it gave on each.

    The ranks are processes of their own: a fork of one in which threads run may hang.
    """
    ranks = Ranks()
    try:
        return ranks.run(2, function, *args)
    finally:
        ranks.close()
