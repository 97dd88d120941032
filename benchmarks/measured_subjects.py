"""Programs that were measured on GPUs, as memfit profiles them: adapters on a language model whose
layers are checkpointed.

In: a row of `measured_t4.json`. Out: `Subject`, whose weights have no bytes. What the programs do
stands in that file under `how`. Shapes are those of the named models, written by hand; a layer in 4
bits is a stand-in with as many bytes that computes what bitsandbytes' does.

Sources: bitsandbytes, `autograd/_functions.py: MatMul4Bit`, `nn/modules.py: Linear4bit`; peft,
`tuners/lora/layer.py: Linear`, `tuners/lora/bnb.py: Linear4bit`, `utils/other.py:
prepare_model_for_kbit_training`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import memfit
from published_subjects import Subject

Row = dict[str, Any]

_LLAMA, _QWEN = "LlamaForCausalLM", "Qwen2ForCausalLM"
SHAPES: dict[str, tuple[str, tuple[int, int, int, int, int, int], bool]] = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (_LLAMA, (2048, 5632, 22, 32, 4, 32000), False),
    "HuggingFaceTB/SmolLM2-135M": (_LLAMA, (576, 1536, 30, 9, 3, 49152), True),
    "HuggingFaceTB/SmolLM2-360M": (_LLAMA, (960, 2560, 32, 15, 5, 49152), True),
    "HuggingFaceTB/SmolLM2-1.7B": (_LLAMA, (2048, 8192, 24, 32, 32, 49152), True),
    "deepseek-ai/deepseek-coder-1.3b-instruct": (_LLAMA, (2048, 5504, 24, 16, 16, 32256), False),
    "Qwen/Qwen2.5-1.5B-Instruct": (_QWEN, (1536, 8960, 28, 12, 2, 151936), True),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": (_QWEN, (1536, 8960, 28, 12, 2, 151936), True),
    "Qwen/Qwen2.5-7B-Instruct": (_QWEN, (3584, 18944, 28, 28, 4, 152064), False),
}
"""Class of transformers; width, inner width, layers, heads, heads of keys and values, words; whether
the output head is the embedding."""
_BLOCK = 64
"""Weights in 4 bits that share a scale in fp32: 4.5 bits a weight. Source: Dettmers et al. 2023,
"QLoRA", section 3."""


class _Product(torch.autograd.Function):
    """A product with weights in 4 bits, which are made wide for the forward and again for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        ctx.packed, ctx.shape = packed, shape
        return nn.functional.linear(x, _wide(packed, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = grad_outputs
        return torch.matmul(gradient, _wide(ctx.packed, ctx.shape, gradient.dtype)), None, None, None


def _wide(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Weights as a kernel of bitsandbytes makes them of their bits: nothing else is allocated."""
    return packed.new_empty(shape, dtype=dtype)


class FourBits(nn.Module):
    """A stand-in for a linear layer in 4 bits: 4.5 bits a weight, products in fp16."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.shape = base.out_features, base.in_features
        self.register_buffer("packed", torch.empty(base.weight.numel() // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(-(-base.weight.numel() // _BLOCK)))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product in the dtype that came."""
        bias = None if self.bias is None else self.bias.half()
        return _Product.apply(x.half(), self.packed, self.shape, bias).to(x.dtype)


class Adapted(nn.Module):
    """A frozen layer with low-rank additions in fp32."""

    def __init__(self, base: nn.Module, shape: tuple[int, int], rank: int) -> None:
        super().__init__()
        self.base, self.is_narrow = base, isinstance(base, FourBits)
        self.down = nn.Linear(shape[1], rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, shape[0], bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the low-rank product to the base's output, as peft does."""
        result = self.base(x)
        before = result.dtype
        if self.is_narrow:
            # As peft does of layers in 4 bits, beside converting what is added before the sum.
            result = result.clone()
            return result + (self.up(self.down(x.float())) * 2.0).to(before)
        return (result + self.up(self.down(x.float())) * 2.0).to(before)


def model_of(row: Row) -> nn.Module:
    """Builds the model of a row without the bytes of its weights."""
    class_name, (width, inner, layers, heads, key_heads, words), is_tied = SHAPES[row["model"]]
    model_class: Any = getattr(transformers, class_name)
    config = model_class.config_class(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=words,
        tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
        use_cache=False,
        attn_implementation=row["attn"],
    )

    def made() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            model = model_class(config)
        finally:
            torch.set_default_dtype(before)
        model.requires_grad_(requires_grad=False)
        is_narrow = row["quant"] == "nf4"
        for module in [*model.model.layers.modules()]:
            for name, child in [*module.named_children()]:
                if isinstance(child, nn.Linear):
                    base = FourBits(child) if is_narrow else child
                    shape = child.out_features, child.in_features
                    is_adapted = name in row["targets"]
                    setattr(module, name, Adapted(base, shape, row["lora_rank"]) if is_adapted else base)
        if is_narrow:
            model.float()  # what is not in 4 bits; buffers of bits stay
        # Its name until transformers 5.20.
        old: Any = getattr(model, "gradient_checkpointing_enable", None)
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        model.enable_input_require_grads()
        return model.train()

    return memfit.empty(made)


def build(row: Row) -> Subject:
    """Builds the subject of a row."""
    model = model_of(row)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batch = torch.zeros(row["batch"], row["seq"], dtype=torch.long)
    return Subject(model=model, optimizer=torch.optim.AdamW(trained), loss=_loss, batch=batch)


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(input_ids=ids, labels=ids)
    # The measured program holds the output, and so the logits, while it goes backward.
    output.loss.held = output.logits
    return output.loss
