"""Models, losses and batches of published configurations, built empty.

In: a subject as `published_cases.json` says it. Out: `Subject`. The shapes are those of the named
models; the code is that of transformers, or written here where transformers has no such model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, the usual name
import transformers
from torch import Tensor, nn

import memfit

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Arguments of `memfit.profile`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Any


SHAPES: dict[str, tuple[str, Row]] = {
    "bert-large": (
        "BertForSequenceClassification",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "bert-base-cased": ("BertModel", {"vocab_size": 28996}),
    "gpt2-padded": ("GPT2LMHeadModel", {"vocab_size": 50304}),
    "llama-60m": ("LlamaForCausalLM", {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}),
    "llama-130m": ("LlamaForCausalLM", {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}),
    "llama-350m": ("LlamaForCausalLM", {"hidden_size": 1024, "intermediate_size": 2736, "num_hidden_layers": 24, "num_attention_heads": 16}),
    "llama-1b": ("LlamaForCausalLM", {"hidden_size": 2048, "intermediate_size": 5461, "num_hidden_layers": 24, "num_attention_heads": 32}),
    "llama-2-7b": ("LlamaForCausalLM", {}),
    "llama-3.2-3b": (
        "LlamaForCausalLM",
        {
            "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
            "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "LlamaForCausalLM",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256,
        },
    ),
    "phi-1.5": (
        "PhiForCausalLM",
        {"hidden_act": "gelu_pytorch_tanh", "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    ),
    "stablelm-alpha-3b": (
        "GPTNeoXForCausalLM",
        {"vocab_size": 50688, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 16, "num_attention_heads": 32},
    ),
    "vit-l-16": (
        "ViTForImageClassification",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "num_labels": 1000},
    ),
    "vit-h-14": (
        "ViTForImageClassification",
        {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120, "patch_size": 14, "num_labels": 45},
    ),
    "dinov2-giant": (
        "Dinov2ForImageClassification",
        {
            "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True,
            "patch_size": 14, "image_size": 224, "num_labels": 45,
        },
    ),
    "t5-3b": (
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32, "num_layers": 24, "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
}  # fmt: skip
"""Class of transformers and what its config says beyond the defaults."""


class LoRA(nn.Module):
    """A frozen linear layer with low-rank additions to parts of its output.

    Args:
        base: the layer.
        rank: of each addition.
        parts: number of equal parts of the output, and which of them get one.
        dropout: of the additions' input.
    """

    def __init__(self, base: nn.Linear, rank: int, parts: tuple[int, tuple[int, ...]], dropout: float) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.width, self.chosen = base.out_features // parts[0], parts[1]
        self.down = nn.ModuleList(nn.Linear(base.in_features, rank, bias=False) for _ in parts[1])
        self.up = nn.ModuleList(nn.Linear(rank, self.width, bias=False) for _ in parts[1])

    def forward(self, x: Tensor) -> Tensor:
        """Adds each part's product to the base's output."""
        y, dropped = self.base(x), self.dropout(x)
        added = [up(down(dropped)) for down, up in zip(self.down, self.up, strict=True)]
        whole = y.shape[-1]
        placed = [
            F.pad(part, (at * self.width, whole - (at + 1) * self.width))
            for at, part in zip(self.chosen, added, strict=True)
        ]
        return y + sum(placed[1:], placed[0])


def add_lora(model: nn.Module, names: tuple[str, ...], rank: int, dropout: float) -> None:
    """Freezes a model and adds LoRA to the named layers; of a fused projection to Q and V."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if name in names and isinstance(child, nn.Linear):
                parts = (3, (0, 2)) if name == "query_key_value" else (1, (0,))
                setattr(module, name, LoRA(child, rank, parts, dropout))


class DenseNetBC(nn.Module):
    """DenseNet-BC for 32 x 32 images. Source: Huang et al. 2017, section 3."""

    def __init__(self, depth: int, growth: int) -> None:
        super().__init__()
        channels, stages = 2 * growth, [nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False)]
        parts: list[nn.Module] = [*stages]
        for stage in range(3):
            for _ in range((depth - 4) // 6):
                parts.append(DenseLayer(channels, growth))
                channels += growth
            norm = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if stage < 2:
                parts += [*norm, nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
            else:
                parts += [*norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        self.parts = nn.Sequential(*parts)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits."""
        return self.parts(images)


class DenseLayer(nn.Module):
    """Adds `growth` channels to its input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input with the new channels behind it."""
        return torch.cat([x, self.body(x)], 1)


class Head(nn.Module):
    """The classifier of a language model, whose input is a parameter so that it gets a gradient."""

    def __init__(self, tokens: int, width: int, words: int) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(tokens, width))
        self.classifier = nn.Parameter(torch.empty(words, width))

    def forward(self) -> Tensor:
        """Returns logits."""
        return self.embeddings @ self.classifier.T


def _model_of(subject: Row) -> nn.Module:
    name = subject["model"]
    if name == "densenet-bc-100-12":
        return DenseNetBC(100, 12)
    if name == "head":
        return Head(subject["tokens"], subject["width"], subject["words"])
    class_name, shape = SHAPES[name]
    model_class: Any = getattr(transformers, class_name)
    config = model_class.config_class(**shape, attn_implementation=subject.get("attention", "sdpa"))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = model_class(config)
    if "lora" in subject:
        lora = subject["lora"]
        add_lora(model, tuple(lora["layers"]), lora["rank"], lora.get("dropout", 0.0))
    return model.train()


def build(subject: Row) -> Subject:
    """Builds a subject's model empty, with its optimizer, loss and batch."""
    dtype = getattr(torch, subject.get("dtype", "float32"))

    def made() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return _model_of(subject)
        finally:
            torch.set_default_dtype(before)

    model = memfit.empty(made)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name, settings = subject.get("optimizer", ["AdamW", {}])
    optimizer = getattr(torch.optim, name)(trained, **settings)
    rows = subject.get("rows", 1)
    is_image = "pixels" in subject
    batch: Any
    if is_image:
        size = subject["pixels"]
        batch = torch.zeros(rows, 3, size, size, dtype=dtype), torch.zeros(rows, dtype=torch.long)
    else:
        tokens = torch.zeros(rows, subject.get("tokens", 8), dtype=torch.long)
        batch = tokens, torch.zeros(rows, dtype=torch.long) if subject.get("loss") == "classes" else tokens
    loss = {
        "classes": _classes,
        "words": _words,
        "chunks": _chunks,
        "chunks-fp32": _chunks_fp32,
        "words-fp32": _words_fp32,
        "sum": _sum,
        "pairs": _pairs,
        "head": _head,
    }
    chosen = loss[subject.get("loss", "classes" if is_image else "words")]
    half = getattr(torch, subject["autocast"]) if "autocast" in subject else None

    def computed(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=half) if half is not None else nullcontext():
            return chosen(model, batch)

    return Subject(model=model, optimizer=optimizer, loss=computed, batch=batch)


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def _classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(_logits(model(batch[0])), batch[1])


def _sum(model: nn.Module, batch: Any) -> Tensor:
    return _logits(model(batch[0])).sum()


def _words(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(_logits(model(batch[0])).flatten(0, 1), batch[1].flatten())


def _words_fp32(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(_logits(model(batch[0])).float().flatten(0, 1), batch[1].flatten())


def _pairs(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch[0], labels=batch[1]).loss


def _head(model: Any, batch: Any) -> Tensor:
    """Gemma-2's: logits are capped, and widened for the loss."""
    logits = model()
    return F.cross_entropy((torch.tanh(logits / 30) * 30).float(), batch[1].flatten())


def _in_chunks(model: Any, batch: Any, chunks: int, *, widens: bool) -> Tensor:
    base = getattr(model, model.base_model_prefix)
    hidden = base(batch[0])[0]
    head = model.get_output_embeddings()
    total = hidden.new_zeros(())
    for part, targets in zip(hidden.chunk(chunks, 1), batch[1].chunk(chunks, 1), strict=True):
        logits = head(part).flatten(0, 1)
        total = total + F.cross_entropy(logits.float() if widens else logits, targets.flatten(), reduction="sum")
    return total / batch[1].numel()


def _chunks(model: nn.Module, batch: Any) -> Tensor:
    """Logits of nine parts of the sequence, in the model's dtype."""
    return _in_chunks(model, batch, 9, widens=False)


def _chunks_fp32(model: nn.Module, batch: Any) -> Tensor:
    """Logits of eight parts of the sequence, each widened for its loss."""
    return _in_chunks(model, batch, 8, widens=True)
