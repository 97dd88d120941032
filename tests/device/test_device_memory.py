"""Bytes that an accelerator's allocator counts in a step, beside the prediction.

Independent roads: the prediction adds up a schedule over a trace of fake tensors; torch's allocator knows nothing of schedules. Two of its counters are
compared. *Requested* bytes are those of tensors, which is what is predicted. *Allocated* bytes are those of blocks: rounded to 512, and of a block above
1 MiB a rest of up to 1 MiB is not split off, which no prediction foresees.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from equivalence import plans
from memfit import devices
from memfit.core.limits import DEVICE_RESERVE_BYTES
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.step.lower import lower
from memfit.step.predict import predict
from memory.subjects import gpt2

MIB = 1 << 20
# Losses, batch slices and what autograd's own thread lets go of a moment after backward has returned.
SMALL_BYTES = MIB // 8
ABOVE = 1.01
UNSPLIT_BYTES = 2 * MIB

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model that is built on the CPU, and its loss and batch."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batch: Callable[[], Batch]


class _Wide(nn.Module):
    """One product whose weight is most of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(2)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(256, 256)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4)]
        )
        self.head = nn.Linear(256, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(rows)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def _rows() -> Batch:
    return {"rows": torch.randn(128, 256), "labels": torch.randint(0, 10, (128,))}


def _rows_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["rows"]), batch["labels"])


def _tokens() -> Batch:
    tokens = torch.randint(1, 1000, (8, 64))
    return {"input_ids": tokens, "labels": tokens}


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=4, vocab_size=1000,
                    num_key_value_heads=2, max_position_embeddings=64, use_cache=False)
    )  # fmt: skip


SUBJECTS = {
    "wide": Subject(
        _Wide,
        lambda model, batch: model(batch["rows"]).square().mean(),
        lambda: {"rows": torch.randn(12, 1024)},
    ),
    "tower": Subject(_Tower, _rows_loss, _rows),
    "gpt2": Subject(gpt2, _own_loss, _tokens),
    "llama": Subject(_llama, _own_loss, _tokens),
}
RECOMPUTE = CallPlan(saved=Saved.RECOMPUTE)


def _away(profile: Profile, tier: Tier, gradients: Tier) -> dict[str, BlockPlan]:
    home = BlockPlan(weight_home=tier, gradient_home=gradients, state_home=tier)
    return {b.name: home for b in profile.blocks if not b.is_spanning}


def _updated_there(profile: Profile, weights: Tier) -> dict[str, BlockPlan]:
    home = BlockPlan(weight_home=weights, gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
    return {b.name: home for b in profile.blocks if not b.is_spanning}


def _known(name: str) -> Callable[[Profile], Plan]:
    return plans.BY_NAME[name].plan


VARIANTS: dict[str, Callable[[Profile], Plan]] = {
    **{variant.name: variant.plan for variant in plans.VARIANTS if variant.max_grad_norm is None},
    "host": lambda p: Plan(blocks=_away(p, Tier.HOST, Tier.HOST)),
    "host, gradients here": lambda p: Plan(blocks=_away(p, Tier.HOST, Tier.DEVICE)),
    "states on the host": lambda p: Plan(blocks={b.name: BlockPlan(state_home=Tier.HOST) for b in p.blocks}),
    "host, recompute, 4": lambda p: Plan(
        microbatches=4,
        blocks=_away(p, Tier.HOST, Tier.DEVICE),
        calls=plans.fates(p, RECOMPUTE),
        tail=plans.tail(p),
    ),
    "host, offload": lambda p: Plan(
        blocks=_away(p, Tier.HOST, Tier.HOST),
        calls=plans.fates(p, CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST)),
    ),
    "host, 4 by microbatch": lambda p: Plan(
        microbatches=4, order=Order.MICROBATCH_MAJOR, blocks=_away(p, Tier.HOST, Tier.HOST)
    ),
    "gradients wait, 3": lambda p: Plan(microbatches=3, update=UpdateTime.AFTER_BACKWARD),
    "host, updated there": lambda p: Plan(blocks=_updated_there(p, Tier.HOST)),
    "states on the host, updated there": lambda p: Plan(blocks=_updated_there(p, Tier.DEVICE)),
    "bf16, states on the host, updated there": lambda p: Plan(
        blocks=_updated_there(p, Tier.DEVICE), compute_dtype=ComputeDtype.BFLOAT16
    ),
    "bf16, host": lambda p: Plan(blocks=_away(p, Tier.HOST, Tier.DEVICE), compute_dtype=ComputeDtype.BFLOAT16),
    "bf16, disk, 4": lambda p: replace(_known("disk-recompute-4")(p), compute_dtype=ComputeDtype.BFLOAT16),
}
DEFAULT = {
    ("wide", "gradients wait, 3"), ("tower", "states on the host, updated there"), ("tower", "host, recompute, 4"), ("gpt2", "host, 4 by microbatch"),
}  # fmt: skip


def _cases() -> Iterator[Any]:
    for name in SUBJECTS:
        for variant in VARIANTS:
            marks = [] if (name, variant) in DEFAULT else [pytest.mark.slow]
            yield pytest.param(name, variant, marks=marks, id=f"{name}-{variant}")


@pytest.mark.parametrize(("name", "variant"), list(_cases()))
def test_a_step_takes_no_more_than_predicted(device: torch.device, name: str, variant: str, tmp_path: Path) -> None:
    subject, accelerator = SUBJECTS[name], devices.of(device)
    gc.collect()
    accelerator.empty_cache()

    def read(counter: str, when: str) -> int:
        return int(accelerator.statistics(device).get(f"{counter}_bytes.all.{when}", 0))

    before = {counter: read(counter, "current") for counter in ("requested", "allocated")}
    model = subject.build().to(device)
    batch = {key: value.to(device) for key, value in subject.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = VARIANTS[variant](memfit.profile(model, optimizer, subject.loss, batch))
    allow = {"bf16"} if plan.compute_dtype is ComputeDtype.BFLOAT16 else set[str]()
    found = dict.fromkeys(before, 0)
    with memfit.fit(model, optimizer, subject.loss, batch, plan=plan, allow=allow, directory=tmp_path / "homes") as job:
        # As on every accelerator, the disk's threads stage in host memory.
        predicted = predict(lower(job.schedule, plan, job.profile, device=device.type)).peak_bytes
        job.step(batch)

        def look(_action: object) -> None:
            for counter in found:
                found[counter] = max(found[counter], read(counter, "peak") - before[counter])

        job._assembly.engine._observe = look
        job.step(batch)
    beside = DEVICE_RESERVE_BYTES if device.type == "cuda" else 0  # workspaces of its libraries
    assert found["requested"] <= predicted * ABOVE + SMALL_BYTES + beside
    assert found["allocated"] <= predicted + max((ABOVE - 1) * predicted, UNSPLIT_BYTES) + beside
