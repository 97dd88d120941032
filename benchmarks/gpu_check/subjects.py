"""Models and batches, sized for the memory of a device.

In: a size's name. Out: `Subject`: how to build a model on a device, its batch, its loss, its optimizer. A GPT-2, a Llama, a convolutional network and a mixture
of experts. The larger sizes keep plain PyTorch's peak at a fraction of the device, so that it can stand beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

GIB = 1 << 30
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the models of one run.

    Attributes:
        layers, width: of the language models; heads are 64 wide, or 16 in the tiny size.
        vocabulary, rows, tokens: of the language models and their batch.
        experts: of the mixture, in each layer.
        channels, pixels: of the convolutional network.
    """

    layers: int
    width: int
    vocabulary: int
    rows: int
    tokens: int
    experts: int
    channels: int
    pixels: int

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.width // (64 if self.width >= 512 else 16)


SIZES: Mapping[str, Size] = {
    # Plain PyTorch's largest peak by arithmetic (16 bytes a parameter, activations, three times the logits): a few MiB, some 4, 8 and 25 GiB.
    "tiny": Size(layers=2, width=64, vocabulary=512, rows=4, tokens=32, experts=4, channels=16, pixels=32),
    "small": Size(layers=10, width=768, vocabulary=32_000, rows=4, tokens=512, experts=4, channels=96, pixels=64),
    "medium": Size(layers=12, width=1024, vocabulary=32_000, rows=8, tokens=512, experts=4, channels=128, pixels=96),
    "large": Size(layers=16, width=1280, vocabulary=50_257, rows=16, tokens=512, experts=8, channels=192, pixels=96),
}


def size_for(total_bytes: int, *, is_emulated: bool) -> str:
    """Name of the size for a device with that much memory."""
    if is_emulated:
        return "tiny"
    return "small" if total_bytes < 11 * GIB else "medium" if total_bytes < 30 * GIB else "large"


class _Residual(nn.Module):
    """Norm, convolution, activation, twice, beside an identity. GroupNorm: a norm over the batch would forbid microbatches."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, channels) for _ in range(2)])

    def forward(self, images: Tensor) -> Tensor:
        inner = self.first(torch.relu(self.norms[0](images)))
        return images + self.second(torch.relu(self.norms[1](inner)))


class ConvNet(nn.Module):
    """A stem, equal residual layers, a classifier."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.channels, 4, stride=2, padding=1)
        self.layers = nn.ModuleList([_Residual(size.channels) for _ in range(size.layers)])
        self.head = nn.Linear(size.channels, 100)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of 100 classes, (rows, 100)."""
        hidden = self.stem(images)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean((2, 3)))


def _gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=size.layers, n_embd=size.width, n_head=size.heads, vocab_size=size.vocabulary, n_positions=max(64, size.tokens),
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama_settings(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width, "intermediate_size": 8 * size.width // 3 // 64 * 64, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": max(1, size.heads // 4), "vocab_size": size.vocabulary,
        "max_position_embeddings": max(64, 2 * size.tokens), "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_llama_settings(size)))


def _mixtral(size: Size) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = {
        **_llama_settings(size),
        "num_hidden_layers": max(2, size.layers // 2),
        "num_local_experts": size.experts,
    }
    return MixtralForCausalLM(MixtralConfig(**settings, num_experts_per_tok=2))


def _tokens(size: Size, generator: torch.Generator) -> Batch:
    tokens = torch.randint(3, size.vocabulary, (size.rows, size.tokens), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(size: Size, generator: torch.Generator) -> Batch:
    images = torch.randn(4 * size.rows, 3, size.pixels, size.pixels, generator=generator)
    return {"images": images, "labels": torch.randint(0, 100, (4 * size.rows,), generator=generator)}


def _text_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["images"]), batch["labels"])


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A kind of model with all that trains it.

    Attributes:
        title: for the table.
        make: the model, on the default device.
        draw: a batch on the processor.
        loss: the user's, in memfit's words.
        layers: name of the list of equal layers, which FSDP2 wraps one by one.
        is_text: it is a language model of transformers.
    """

    title: str
    make: Callable[[Size], nn.Module]
    draw: Callable[[Size, torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    layers: str
    is_text: bool = True

    def build(self, size: Size, device: torch.device) -> nn.Module:
        """The same weights at every call, in training mode. Built on its device: tied weights stay tied on every backend."""
        torch.manual_seed(0)
        with device:
            return self.make(size).train()

    def batch(self, size: Size, device: torch.device, seed: int = 1) -> Batch:
        """Random rows on the device."""
        generator = torch.Generator().manual_seed(seed)
        return {name: each.to(device) for name, each in self.draw(size, generator).items()}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, or for images SGD with momentum."""
        if self.is_text:
            return torch.optim.AdamW(model.parameters(), lr=1e-4)
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


SUBJECTS: Mapping[str, Subject] = {
    "gpt2": Subject(title="GPT-2", make=_gpt2, draw=_tokens, loss=_text_loss, layers="transformer.h"),
    "llama": Subject(title="Llama", make=_llama, draw=_tokens, loss=_text_loss, layers="model.layers"),
    "conv": Subject(title="conv net", make=ConvNet, draw=_images, loss=_image_loss, layers="layers", is_text=False),
    "moe": Subject(title="Mixtral", make=_mixtral, draw=_tokens, loss=_text_loss, layers="model.layers"),
}
