"""A small model with dropout and a tied head, and training loops as people write them, for `job.lines()`.

In: a way to loop. Out: what the loop logs, and weights and states at its end, in plain PyTorch and under memfit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import memfit
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

WIDTH, WORDS, LAYERS = 16, 11, 3
BLOCKS = tuple(f"layers.{index}" for index in range(LAYERS))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(torch.tanh(self.up(hidden))))


class Words(nn.Module):
    """Embedding, layers, and a head that is the embedding: its gradient has two parts, and one of them comes outside of
    the layers' calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def batch(index: int, rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(index))


def away(gradients: Tier) -> Plan:
    """Weights and states of all layers on disk, saved tensors moved or made again, gradients where they are said to rest."""
    homes = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=gradients)
    return Plan(
        blocks=dict.fromkeys(BLOCKS, homes),
        calls=(
            CallPlan(),
            CallPlan(saved=Saved.OFFLOAD),
            CallPlan(saved=Saved.RECOMPUTE),
            CallPlan(saved=Saved.SELECT),
            CallPlan(),
        ),
        update=UpdateTime.AFTER_BACKWARD,
    )


PLANS: Mapping[str, Plan | None] = {
    "resident": None,
    "gradients on the device": away(Tier.DEVICE),
    "gradients on disk": away(Tier.DISK),
}


@dataclass
class Run:
    """A model in training, as a loop gets it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    log: list[Any] = field(default_factory=list)

    @classmethod
    def new(cls, build: Callable[[], nn.Module] = Words) -> Run:
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return cls(model, optimizer, scheduler)

    def result(self) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]:
        """What the loop logged, the weights, and the optimizer's states."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        states = {
            f"{names[p]}/{key}": value.clone()
            for p, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        return self.log, {name: p.detach().clone() for name, p in self.model.named_parameters()}, states


Loop = Callable[[Run], None]


def plain(loop: Loop, build: Callable[[], nn.Module] = Words) -> Run:
    run = Run.new(build)
    torch.manual_seed(5)
    loop(run)
    return run


def under(
    loop: Loop,
    plan: Plan | None,
    build: Callable[[], nn.Module] = Words,
    loss: Callable[[Any, Any], Any] = loss_of,
    sample: Any = None,
    **options: Any,
) -> tuple[Run, tuple[str, ...]]:
    """The same under memfit; and what the trace did not foresee in the last step."""
    run = Run.new(build)
    given = batch(0) if sample is None else sample
    with memfit.fit(run.model, run.optimizer, loss, given, plan=plan, lines=True, **options) as job:
        torch.manual_seed(5)
        with job.lines() as lines:
            loop(run)
        departures = lines.departures
    return run, departures


def check_equal(ours: Run, theirs: Run) -> None:
    """All that was logged, weights and states, bit for bit."""
    (log, weights, states), (plain_log, plain_weights, plain_states) = ours.result(), theirs.result()
    assert log == plain_log
    for found, expected in ((weights, plain_weights), (states, plain_states)):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


# --- loops ----------------------------------------------------------------------------------------


def accumulating(
    backwards: int,
    *,
    clip: float | None = None,
    skips: int | None = None,
    zero: str = "optimizer",
    autocast: bool = False,
    steps: int = 5,
) -> Loop:
    """Batches of different shapes; the last window is shorter, and an evaluation comes in between."""

    def loop(run: Run) -> None:
        index = 0
        for step in range(steps):
            for _ in range(backwards if step < steps - 1 else 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = loss_of(run.model, batch(index, rows=3 if index % 3 == 1 else 2)) / backwards
                loss.backward()
                run.log.append(loss.item())
                index += 1
            if clip is not None:
                run.log.append(float(clip_grad_norm_(run.model.parameters(), clip)))
            if skips is not None and step % skips == 1:
                run.optimizer.zero_grad()
                continue
            run.optimizer.step()
            run.scheduler.step()
            {"optimizer": run.optimizer, "model": run.model}[zero].zero_grad()
            if step == 2:
                run.model.eval()
                with torch.no_grad():
                    run.log.append(loss_of(run.model, batch(99)).item())
                run.model.train()

    return loop
