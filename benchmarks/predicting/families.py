"""Models whose training takes some hundred MiB and some seconds, by architecture.

In: a generator. Out: (family, configuration, kind of batch, its sizes), as `limiting.building` has
them: transformers' names of config and model, or ("torch", a kind of `limiting.modules`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Drawn = tuple[tuple[str, str], dict[str, Any], str, tuple[int, int, int]]
Make = Callable[[random.Random], Drawn]
TEXT: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
PAIRS: dict[str, Any] = {**TEXT, "decoder_start_token_id": 0}


def _text(
    name: str,
    task: str,
    config: Callable[[int, int], dict[str, Any]],
    *,
    batch: str = "text",
    tokens: tuple[int, ...] = (64, 100, 128, 192),
    widths: tuple[int, ...] = (256, 384, 512),
) -> Make:
    """A language model: `config` is told a width and a number of layers."""

    def make(rng: random.Random) -> Drawn:
        words = rng.choice((8000, 16_000, 32_000))
        special = PAIRS if batch == "pairs" else TEXT
        made = {**special, "vocab_size": words, **config(rng.choice(widths), rng.randint(3, 8))}
        sizes = (rng.choice((2, 3, 4, 6)), rng.choice(tokens), words)
        return (f"{name}Config", f"{name}{task}"), made, batch, sizes

    return make


def _images(
    name: str, config: Callable[[int, int], dict[str, Any]], *, pixels: tuple[int, ...] = (96, 128, 160)
) -> Make:
    def make(rng: random.Random) -> Drawn:
        side = rng.choice(pixels)
        made = {"num_labels": 100, **config(rng.choice((256, 384)), rng.randint(3, 8))}
        if "image_size" in made:
            made["image_size"] = side
        sizes = (rng.choice((4, 6, 8)), side, 100)
        return (f"{name}Config", f"{name}ForImageClassification"), made, "images", sizes

    return make


def _attention(width: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8,
        "intermediate_size": 3 * width, **more,
    }  # fmt: skip


def _bart(width: int, layers: int) -> dict[str, Any]:
    return {
        "d_model": width, "encoder_layers": layers, "decoder_layers": layers // 2 + 1, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 3 * width, "decoder_ffn_dim": 3 * width,
        "max_position_embeddings": 256,
    }  # fmt: skip


def _t5(width: int, layers: int) -> dict[str, Any]:
    return {"d_model": width, "num_layers": layers // 2 + 1, "num_heads": 8, "d_kv": 64, "d_ff": 3 * width}


def _mixtral(width: int, layers: int) -> dict[str, Any]:
    more = {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    return _attention(width, layers // 2 + 1, **more)


def _qwen_moe(width: int, layers: int) -> dict[str, Any]:
    more = {"num_key_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 2}
    inner = {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    return _attention(width, layers // 2 + 1, **more, **inner)


def _gpt2(width: int, layers: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": 8, "n_positions": 256}


def _opt(width: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8, "ffn_dim": 4 * width,
        "word_embed_proj_dim": width, "max_position_embeddings": 256,
    }  # fmt: skip


def _mamba(width: int, layers: int) -> dict[str, Any]:
    return {"hidden_size": width, "num_hidden_layers": layers // 2 + 1, "state_size": 16, "use_mambapy": False}


def _mamba2(width: int, layers: int) -> dict[str, Any]:
    heads = {"num_heads": 2 * width // 32, "head_dim": 32, "n_groups": 1, "chunk_size": 32}
    return {"hidden_size": width, "num_hidden_layers": layers // 2 + 1, "state_size": 16, **heads}


def _vit(width: int, layers: int) -> dict[str, Any]:
    return _attention(width, layers, image_size=128, patch_size=8)


def _dino(width: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8, "image_size": 128, "patch_size": 8,
    }  # fmt: skip


def _swin(width: int, layers: int) -> dict[str, Any]:
    heads = {"num_heads": [4, 8], "window_size": 4}
    return {"image_size": 128, "patch_size": 4, "embed_dim": width // 2, "depths": [2, layers], **heads}


def _resnet(width: int, layers: int) -> dict[str, Any]:
    sizes = {"embedding_size": 64, "hidden_sizes": [width // 4, width // 2, width]}
    return {**sizes, "depths": [1, layers // 2, 2], "layer_type": "bottleneck"}


def _convnext(width: int, layers: int) -> dict[str, Any]:
    return {"hidden_sizes": [width // 4, width // 2, width], "depths": [1, layers // 2, layers], "num_stages": 3}


def _unet(rng: random.Random) -> Drawn:
    config = {"kind": "unet", "width": rng.choice((24, 32)), "layers": rng.choice((3, 4))}
    return ("torch", "unet"), config, "pictures", (rng.choice((2, 4)), rng.choice((64, 96)), 96)


ARCHITECTURES: dict[str, tuple[Make, ...]] = {
    "decoder": (
        _text("GPT2", "LMHeadModel", _gpt2),
        _text("Llama", "ForCausalLM", lambda w, n: _attention(w, n, num_key_value_heads=4)),
        _text("Qwen3", "ForCausalLM", lambda w, n: _attention(w, n, num_key_value_heads=4, head_dim=64)),
        _text("OPT", "ForCausalLM", _opt),
    ),
    "encoder": (
        _text("Bert", "ForMaskedLM", _attention),
        _text(
            "ModernBert",
            "ForMaskedLM",
            lambda w, n: _attention(
                w, n, global_attn_every_n_layers=2, local_attention=64, cls_token_id=1, sep_token_id=2
            ),
        ),
    ),
    "encoder-decoder": (
        _text("T5", "ForConditionalGeneration", _t5, batch="pairs"),
        _text("Bart", "ForConditionalGeneration", _bart, batch="pairs"),
    ),
    "vision": (_images("ViT", _vit), _images("Dinov2", _dino), _images("Swin", _swin, pixels=(64, 128))),
    "convolution": (_images("ResNet", _resnet), _images("ConvNext", _convnext), _unet),
    "state space": (
        _text("Mamba", "ForCausalLM", _mamba, tokens=(24, 32)),
        _text("Mamba2", "ForCausalLM", _mamba2, tokens=(32, 64)),
    ),
    "experts": (
        _text("Mixtral", "ForCausalLM", _mixtral, widths=(256, 384)),
        _text("Qwen2Moe", "ForCausalLM", _qwen_moe, widths=(256, 384)),
    ),
}
