"""A training run that is small, has everything that a commit must keep, and can be stopped anywhere.

In: names of a model and of a plan, a directory. Out: losses by step, final weights, states and registered values.

Everything random that a run can use is used: dropout (torch's default generator), batches from a generator of the run's own, a number of NumPy's and one
of Python's in every batch; a scheduler and an average that the loop keeps; a buffer that forward changes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from equivalence import plans
from memfit.core.numerics import ALLOWANCES
from memfit.core.plan import CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.core.tiers import Tier

ROWS, TOKENS, VOCABULARY, WIDTH = 8, 6, 29, 32


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))))


class TiedAndFrozen(nn.Module):
    """A head that is the embedding, a layer that does not train, a norm whose bias does not, a buffer that counts."""

    passes: Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layers = [Layer(width) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        layers[0].requires_grad_(requires_grad=False)
        layers[1].norm.bias.requires_grad = False
        self.register_buffer("passes", torch.zeros(width))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.training:
            self.passes.add_(1)
        return self.head(hidden)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=3, n_head=2,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def _wide() -> nn.Module:
    return TiedAndFrozen(width=64)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": _gpt2, "tied-and-frozen": TiedAndFrozen}
WIDE: dict[str, Callable[[], nn.Module]] = {"wide": _wide}
"""Large enough for states to be encoded."""


def _resident(_: Profile) -> tuple[Plan, dict[str, Any]]:
    return Plan(), {}


def _layer_major(found: Profile) -> tuple[Plan, dict[str, Any]]:
    return Plan(microbatches=2, blocks=plans.on_disk(found), tail=plans.tail(found)), {}


def _clipped(found: Profile) -> tuple[Plan, dict[str, Any]]:
    plan = Plan(
        microbatches=2,
        order=Order.MICROBATCH_MAJOR,
        blocks=plans.on_disk(found),
        calls=plans.fates(found, CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)),
        update=UpdateTime.AFTER_BACKWARD,
    )
    return plan, {"max_grad_norm": 0.5}


def _bf16(found: Profile) -> tuple[Plan, dict[str, Any]]:
    plan = replace(Plan(microbatches=2, blocks=plans.on_disk(found)), compute_dtype=ComputeDtype.BFLOAT16)
    return plan, {"allow": {"bf16"}}


PLANS: dict[str, Callable[[Profile], tuple[Plan, dict[str, Any]]]] = {
    "resident": _resident,
    "layer-major": _layer_major,
    "clipped": _clipped,
    "bf16": _bf16,
}


def in_format(*, on_disk: bool = True, **changes: Any) -> Callable[[Profile], tuple[Plan, dict[str, Any]]]:
    def make(found: Profile) -> tuple[Plan, dict[str, Any]]:
        plan = Plan(microbatches=2, blocks=plans.on_disk(found) if on_disk else {})
        return replace(plan, **changes), {"allow": set(ALLOWANCES)}

    return make


FORMATS: dict[str, Callable[[Profile], tuple[Plan, dict[str, Any]]]] = {
    "int8-state": in_format(state_format=StateFormat.INT8),
    "int4-state": in_format(state_format=StateFormat.INT4, on_disk=False),
    "fp8-state": in_format(state_format=StateFormat.FP8),
    "bf16-state": in_format(state_format=StateFormat.BF16),
    "fp16": in_format(compute_dtype=ComputeDtype.FLOAT16, update=UpdateTime.AFTER_BACKWARD),
    "fp16 resident": in_format(compute_dtype=ComputeDtype.FLOAT16, on_disk=False),
    "bf16-weights-sr": in_format(compute_dtype=ComputeDtype.BFLOAT16, drops_masters=True),
    "bf16-weights-sr resident, int8-state": in_format(
        compute_dtype=ComputeDtype.BFLOAT16, drops_masters=True, state_format=StateFormat.INT8, on_disk=False
    ),
    "split masters": in_format(compute_dtype=ComputeDtype.BFLOAT16, splits_masters=True),
    "split masters, bf16-state": in_format(
        compute_dtype=ComputeDtype.BFLOAT16, splits_masters=True, state_format=StateFormat.BF16
    ),
}
"""Plans that change the arithmetic."""


class Average:
    """A number that the loop keeps, as an average of weights would be kept."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state["value"], float):
            raise TypeError(f"the average is {state['value']!r:.80}, no number")
        self.value = state["value"]


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return (MODELS | WIDE)[model]()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    found = model(batch["tokens"][:, :-1])
    logits = found if isinstance(found, Tensor) else found.logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def draw(generator: torch.Generator, rows: int = ROWS) -> dict[str, Tensor]:
    """A batch that takes from every generator."""
    shift = int(np.random.randint(3)) + random.randrange(3)
    tokens = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator)
    return {"tokens": (tokens + shift + int(torch.randint(3, ()))) % VOCABULARY}


@cache
def profile(model: str) -> Profile:
    made = build(model)
    return memfit.profile(made, adamw(made), loss, draw(torch.Generator()))


@dataclass
class Result:
    """What a run came to. `first` is the step that it began at."""

    first: int = 0
    losses: dict[int, float] = field(default_factory=dict[int, float])
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    skipped: list[int] = field(default_factory=list[int])

    def digest(self) -> str:
        """Of the kept values' bits."""
        found = hashlib.sha256()
        for name, value in sorted(self.kept.items()):
            found.update(name.encode() + str(value.dtype).encode() + str(tuple(value.shape)).encode())
            found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def train(
    model: str,
    plan: str | Plan | None,
    store: Path,
    *,
    total: int = 5,
    stop: int | None = None,
    tell: Callable[[int], None] = lambda step: None,
    save: Path | None = None,
    rows: int = ROWS,
    rows_of: Callable[[int], int] | None = None,
    before_step: Callable[[int], None] = lambda step: None,
    steepness: float = 1.0,
    **options: Any,
) -> Result:
    """Trains from wherever the run in `store` stands to `total`, or to `stop`, where it ends without a word.

    Args:
        model: of `MODELS`.
        plan: of `PLANS` or `FORMATS`, or one; None: the run's own.
        store: the directory.
        total: steps of the run.
        stop: leave there, as if the process ended well.
        tell: called with the number of steps made, when the run begins or goes on, and after each.
        save: `Job.save` there after every second step.
        rows: of the sample, and of a batch where `rows_of` does not say otherwise.
        rows_of: rows of a step's batch.
        steepness: factor of the loss. Large ones overflow in fp16.
        before_step: called with a step's number (from 0) before its batch is drawn.
        options: for `memfit.fit`.
    """
    # Before anything is seeded.
    decided, known = (PLANS | FORMATS)[plan](profile(model)) if isinstance(plan, str) else (plan, dict[str, Any]())
    made = build(model)
    optimizer = adamw(made)
    average, generator = Average(), torch.Generator().manual_seed(3)
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    sample = {"tokens": torch.zeros(rows, TOKENS + 1, dtype=torch.int64)}
    criterion = loss if steepness == 1.0 else lambda model, batch: steepness * loss(model, batch)
    job = memfit.fit(made, optimizer, criterion, sample, plan=decided, store=store, **{**known, **options})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for name, thing in (("scheduler", scheduler), ("average", average), ("data", generator)):
        job.register(name, thing)
    result = Result(first=job.steps)
    tell(job.steps)
    for step in range(job.steps, total):
        if step == stop:
            job.close(restore=False)
            return result
        before_step(step)
        found = job.step(draw(generator, rows if rows_of is None else rows_of(step)))
        scheduler.step()
        average.value = 0.5 * average.value + found.loss
        result.losses[step] = found.loss
        result.skipped += [step] if found.is_skipped else []
        tell(step + 1)
        if save is not None and step % 2:
            job.save(save)
    job.close()
    result.kept = {name: value.detach().clone() for name, value in made.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        result.kept |= {f"{index}.{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    for index, group in enumerate(optimizer.param_groups):
        result.kept[f"lr {index}"] = torch.tensor(group["lr"], dtype=torch.float64)
    result.kept["average"] = torch.tensor(average.value, dtype=torch.float64)
    if job.loss_scaler is not None:
        result.kept["loss scale"] = torch.tensor(job.loss_scaler.scale, dtype=torch.float64)
    result.kept["random"] = torch.randint(1 << 60, ())
    return result
