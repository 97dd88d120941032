"""Frames of saved tensors give the losses, gradients, buffers and random numbers of plain PyTorch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equivalence.saved_harness import POLICIES, Driver, Loss, make_offloader, run_driven, run_plain
from memfit.engine.offload import Offloader


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[Offloader]:
    with make_offloader(tmp_path) as made:
        yield made


@dataclass(frozen=True)
class Case:
    """A model, its sites and its loss."""

    model: nn.Module
    sites: tuple[str, ...]
    loss: Loss
    copies_inputs: tuple[str, ...] = ()


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=3, n_head=2))
    tokens = torch.randint(0, 61, (2, 12))
    # use_cache stays at its default, so a key-value cache object is passed from layer to layer and grows.
    return Case(model, tuple(f"transformer.h.{i}" for i in range(3)), lambda m: m(input_ids=tokens, labels=tokens).loss)


def _llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, attention_dropout=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 61, (2, 12))
    return Case(model, tuple(f"model.layers.{i}" for i in range(4)), lambda m: m(input_ids=tokens, labels=tokens).loss)


def _bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    tokens, mask = torch.randint(0, 61, (3, 10)), torch.ones(3, 10, dtype=torch.long)
    mask[0, 6:] = 0
    labels = torch.tensor([0, 1, 1])
    sites = ("bert.embeddings", *(f"bert.encoder.layer.{i}" for i in range(3)), "bert.pooler")
    return Case(model, sites, lambda m: m(input_ids=tokens, attention_mask=mask, labels=labels).loss)


def _resnet() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], layer_type="basic", hidden_act="relu")
    model = ResNetForImageClassification(config)
    images, labels = torch.randn(3, 3, 16, 16), torch.tensor([0, 1, 1])
    sites = (
        "resnet.embedder",
        *(f"resnet.encoder.stages.0.layers.{i}" for i in range(2)),
        "resnet.encoder.stages.1.layers.0",
    )
    return Case(model, sites, lambda m: m(pixel_values=images, labels=labels).loss)


class Shared(nn.Module):
    """One block used three times, a frozen one, keywords only, spectral norm, and a counter in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Keywords(8)
        self.frozen = Keywords(8).requires_grad_(False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.block(values=values, scale=0.5)["hidden"]
        hidden = self.frozen(values=hidden, scale=2.0)["hidden"]
        hidden = self.block(values=self.spectral(hidden), scale=0.25)["hidden"]
        found = self.block(values=hidden.transpose(0, 1).contiguous().transpose(0, 1), scale=1.0)
        return self.last(found["hidden"]).pow(2).mean() + found["side"]


class Keywords(nn.Module):
    """Keywords only, a nested output, dropout, and a buffer that is replaced."""

    count: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, *, values: torch.Tensor, scale: float) -> dict[str, Any]:
        self.count = self.count + 1
        grown = nn.functional.gelu(self.up(self.norm(values)))
        hidden = values + scale * self.count * self.dropout(self.down(grown))
        return {"hidden": hidden, "side": grown.pow(2).mean(), "nothing": None}


def _shared() -> Case:
    values = torch.randn(4, 5, 8)
    return Case(Shared(), ("block", "frozen", "spectral"), lambda m: m(values))


class InPlace(nn.Module):
    """Changes its argument in place, in a slice of it too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values.mul_(1.5)
        values[:, :2] += 1
        return self.second(self.act(self.first(values)))


def _in_place() -> Case:
    blocks = [InPlace() for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 1))
    values = torch.randn(6, 8)
    sites = tuple(str(i) for i in range(1, 5))
    return Case(model, sites, lambda m: m(values).pow(2).mean(), copies_inputs=sites)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": _gpt2, "llama": _llama, "bert": _bert, "resnet": _resnet, "shared": _shared, "in place": _in_place,
}  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_buffers_are_those_of_plain_pytorch(name: str, policy: str, offloader: Offloader) -> None:
    case = CASES[name]()
    case.model.train()
    plain = run_plain(case.model, case.loss)
    driver = Driver(case.model, case.sites, POLICIES[policy], offloader=offloader, copies_inputs=case.copies_inputs)
    run_driven(case.model, case.loss, driver).assert_equal(plain)
    assert not offloader.live_storages()
