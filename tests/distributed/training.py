"""Training on ranks and on one process, in tests of jobs over ranks."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import memfit
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.planning.over_ranks_plans import share_out
from memfit.profiling.blocks import find_blocks

ROWS = 6
WIDTH = 72


class Tower(nn.Module):
    """Layers of widths that no number of ranks divides, with a weight that is read twice if tied."""

    def __init__(self, layers: int = 4, *, ties: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Tanh(), nn.Linear(2 * WIDTH + 1, WIDTH))
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build(name: str) -> nn.Module:
    """A model, with the same values wherever it is built."""
    torch.manual_seed(0)
    if name == "tower":
        return Tower()
    if name == "tied":
        return Tower(ties=True)
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=64,
            vocab_size=128,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return GPT2LMHeadModel(config)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_size=64,
        intermediate_size=160,
        vocab_size=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean over rows."""
    if isinstance(model, Tower):
        return ((model(batch) - 0.3) ** 2).mean()
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def batch_of(name: str, step: int, rank: int, rows: int = ROWS) -> torch.Tensor:
    """A rank's rows of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if name in ("tower", "tied"):
        return torch.randn(rows, WIDTH, generator=generator)
    return torch.randint(0, 128, (rows, 12), generator=generator)


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=False),
    "muon": lambda p: torch.optim.Muon(p, lr=1e-2),
}


def plan_for(model: nn.Module, ranks: int, stage: int, tier: str, k: int, **more: Any) -> Plan:
    """A plan with a stage of ZeRO, whose shares rest in a tier."""
    names = [block.name for block in find_blocks(model, None).blocks]
    homes = BlockPlan(weight_home=Tier(tier), gradient_home=Tier(tier), state_home=Tier(tier))
    plan = Plan(microbatches=k, blocks=dict.fromkeys(names, homes), **more)
    return share_out(plan, ranks, stage, names)


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def accumulated(
    name: str,
    optimizer: str,
    ranks: int,
    k: int,
    steps: int,
    *,
    max_norm: float | None = None,
    rows: Callable[[int, int], int] | None = None,
) -> dict[str, torch.Tensor]:
    """Weights of plain PyTorch in one process: each rank's microbatches are added up, then the ranks in order."""
    model = build(name)
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    count = rows or (lambda step, rank: ROWS)
    for step in range(steps):
        total = sum(count(step, rank) for rank in range(ranks))
        sums: dict[str, torch.Tensor] = {}
        for rank in range(ranks):
            own = copy.copy(count(step, rank))
            if own == 0:
                continue
            model.zero_grad()
            for part in batch_of(name, step, rank, own).tensor_split(min(k, own)):
                (loss(model, part) * torch.tensor(len(part) / total)).backward()
            for parameter_name, p in model.named_parameters():
                if p.grad is not None:
                    before = sums.get(parameter_name)
                    sums[parameter_name] = p.grad.clone() if before is None else before + p.grad
        for parameter_name, p in model.named_parameters():
            p.grad = sums.get(parameter_name)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer_.step()
    return weights_of(model)


def train(
    rank: int,
    size: int,
    name: str,
    optimizer: str,
    stage: int,
    tier: str,
    k: int,
    steps: int,
    fit_options: Mapping[str, Any] | None = None,
    plan_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Trains on ranks; returns what differs from one process."""
    model = build(name)
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    options = dict(fit_options or {})
    plan = plan_for(model, size, stage, tier, k, **(plan_options or {}))
    job = memfit.fit(model, optimizer_, loss, batch_of(name, 0, rank), plan=plan, enforce=False, **options)
    told = []
    for step in range(steps):
        result = job.step(batch_of(name, step, rank))
        told += result.departures
    job.close()
    return told + same(
        weights_of(model), accumulated(name, optimizer, size, k, steps, max_norm=options.get("max_grad_norm"))
    )


def hindered(rank: int, size: int, how: str, stage: int = 3, tier: str = "disk") -> dict[str, Any]:
    """Trains two steps, the second with something wrong on rank 1 only; returns what this rank raised, and what lives after closing."""
    name, armed = "tower", [False]
    model = build(name)
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def own_loss(given: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = loss(given, batch)
        if armed[0] and rank == 1 and how == "an exception in the loss":
            raise KeyError("of the loss")
        if armed[0] and rank == 1 and how == "a refused allocation":
            raise torch.OutOfMemoryError("emulated: 12 MiB above the limit")
        if armed[0] and rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    job = memfit.fit(
        model, optimizer, own_loss, batch_of(name, 0, rank), plan=plan_for(model, size, stage, tier, 2), enforce=False
    )
    job.step(batch_of(name, 0, rank))
    armed[0] = True
    raised = ""
    try:
        if rank == 1 and how == "a save on one rank":
            job.save("/nonexistent")
        elif rank == 1 and how == "an invalid batch":
            job.step(torch.zeros(3, WIDTH + 1))
        else:
            job.step(batch_of(name, 1, rank))
    except Exception as error:  # noqa: BLE001, told to the test
        raised = f"{type(error).__name__}: {error}"
    armed[0] = False
    after = ""
    try:
        after = f"{len(job.step(batch_of(name, 1, rank)).losses)} losses"
    except Exception as error:  # noqa: BLE001, told to the test
        after = f"{type(error).__name__}: {error}"
    job.close()
    # The process group of the program is as it was: another job begins.
    again = ""
    if how != "killed":
        del job
        model = build(name)
        job = memfit.fit(
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            loss,
            batch_of(name, 0, rank),
            plan=plan_for(model, size, 3, "device", 1),
            enforce=False,
        )
        again = f"{len(job.step(batch_of(name, 0, rank)).losses)} losses"
        job.close()
    return {"raised": raised, "after": after, "again": again}
