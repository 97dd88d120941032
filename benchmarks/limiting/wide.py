"""Cases beyond those that `limit_sweep.draw` takes from the planner's own examples.

In: a generator. Out: (family, configuration, kind of batch, its sizes), as `limit_sweep` has them; an optimizer; a way to train.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Drawn = tuple[tuple[str, str], dict[str, Any], str, tuple[int, int, int]]
Make = Callable[[random.Random], Drawn]
TEXT: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
PAIRS: dict[str, Any] = {**TEXT, "decoder_start_token_id": 0}


def _text(name: str, task: str, config: Callable[[int, int], dict[str, Any]], *, batch: str = "text") -> Make:
    """A language model: `config` is told a width and a number of layers."""

    def make(rng: random.Random) -> Drawn:
        words = rng.choice((1000, 6000, 20_000, 40_000))
        made = {
            **(PAIRS if batch == "pairs" else TEXT),
            "vocab_size": words,
            **config(rng.choice((64, 128, 256)), rng.randint(2, 5)),
        }
        return (
            (f"{name}Config", f"{name}{task}"),
            made,
            batch,
            (rng.choice((2, 4, 7)), rng.choice((64, 96, 160)), words),
        )

    return make


def _images(name: str, config: Callable[[int, int], dict[str, Any]], *, pixels: tuple[int, ...] = (64, 96)) -> Make:
    def make(rng: random.Random) -> Drawn:
        side = rng.choice(pixels)
        made = {"num_labels": 10, **config(rng.choice((64, 128)), rng.randint(2, 4))}
        if "image_size" in made:
            made["image_size"] = side
        return (f"{name}Config", f"{name}ForImageClassification"), made, "images", (rng.choice((2, 4, 8)), side, 10)

    return make


def _torch(kind: str, widths: tuple[int, ...], layers: tuple[int, int], count: int, batch: str = "rows") -> Make:
    def make(rng: random.Random) -> Drawn:
        width = rng.choice(widths)
        config = {"kind": kind, "width": width, "layers": rng.randint(*layers)}
        rows = rng.choice((2, 4, 8))
        if kind == "mixer":
            config["tokens"] = count
        if kind in ("looped", "translator"):
            config["words"] = rng.choice((500, 8000, 30_000))
            return ("torch", kind), config, "words", (rows, count, config["words"])
        return ("torch", kind), config, batch, (rows, width if batch == "rows" else count, count)

    return make


def _attention(width: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 3 * width,
        **more,
    }


def _two_sided(width: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "d_model": width, "encoder_layers": layers, "decoder_layers": layers, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * width, "decoder_ffn_dim": 2 * width, "max_position_embeddings": 200, **more,
    }  # fmt: skip


# ruff: disable[E501]
WIDE: tuple[Make, ...] = (
    _text("OPT", "ForCausalLM", lambda w, n: {"hidden_size": w, "num_hidden_layers": n, "num_attention_heads": 4, "ffn_dim": 4 * w, "word_embed_proj_dim": w, "max_position_embeddings": 200}),
    _text("GPTNeoX", "ForCausalLM", _attention),
    _text("Gemma2", "ForCausalLM", lambda w, n: _attention(w, n, num_key_value_heads=2, head_dim=32, sliding_window=48)),
    _text("Phi3", "ForCausalLM", lambda w, n: _attention(w, n, num_key_value_heads=4, pad_token_id=0)),
    _text("Falcon", "ForCausalLM", lambda w, n: {"hidden_size": w, "num_hidden_layers": n, "num_attention_heads": 4}),
    _text("Bloom", "ForCausalLM", lambda w, n: {"hidden_size": w, "n_layer": n, "n_head": 4}),
    _text("Qwen2Moe", "ForCausalLM", lambda w, n: _attention(w, n, num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=w, shared_expert_intermediate_size=w)),
    _text("Olmo2", "ForCausalLM", lambda w, n: _attention(w, n, num_key_value_heads=2)),
    _text("GPTJ", "ForCausalLM", lambda w, n: {"n_embd": w, "n_layer": n, "n_head": 4, "rotary_dim": 8, "n_positions": 200}),
    _text("Mamba2", "ForCausalLM", lambda w, n: {"hidden_size": w, "num_hidden_layers": min(n, 2), "state_size": 16, "num_heads": 2 * w // 32, "head_dim": 32, "n_groups": 1, "chunk_size": 32}),
    _text("DistilBert", "ForMaskedLM", lambda w, n: {"dim": w, "n_layers": n, "n_heads": 4, "hidden_dim": 4 * w}),
    _text("Albert", "ForMaskedLM", lambda w, n: _attention(w, n, embedding_size=64)),
    _text("DebertaV2", "ForMaskedLM", lambda w, n: _attention(w, n, relative_attention=True, position_buckets=32, pos_att_type=["p2c", "c2p"])),
    _text("ModernBert", "ForMaskedLM", lambda w, n: _attention(w, n, global_attn_every_n_layers=2, local_attention=32, cls_token_id=1, sep_token_id=2)),
    _text("XLNet", "LMHeadModel", lambda w, n: {"d_model": w, "n_layer": n, "n_head": 4, "d_inner": 2 * w}),
    _text("Bart", "ForConditionalGeneration", _two_sided, batch="pairs"),
    _text("Pegasus", "ForConditionalGeneration", _two_sided, batch="pairs"),
    _text("LED", "ForConditionalGeneration", lambda w, n: {**_two_sided(w, n, attention_window=32), "max_encoder_position_embeddings": 256, "max_decoder_position_embeddings": 256}, batch="pairs"),
    _images("Swin", lambda w, n: {"image_size": 64, "patch_size": 4, "embed_dim": w // 2, "depths": [2, n], "num_heads": [2, 4], "window_size": 4}),
    _images("Dinov2", lambda w, n: {"image_size": 64, "patch_size": 8, "hidden_size": w, "num_hidden_layers": n, "num_attention_heads": 4}),
    _images("MobileNetV2", lambda w, n: {"image_size": 96, "depth_multiplier": 0.35 if w == 64 else 0.75}, pixels=(96, 128)),  # noqa: ARG005
    _images("RegNet", lambda w, n: {"embedding_size": 32, "hidden_sizes": [w, 2 * w], "depths": [2, n], "groups_width": 16}),
    _images("Segformer", lambda w, n: {"hidden_sizes": [32, w], "depths": [n, n], "num_encoder_blocks": 2, "sr_ratios": [4, 2], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [4, 4]}),
    _images("PoolFormer", lambda w, n: {"hidden_sizes": [32, w], "depths": [n, n], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}),
    _torch("unet", (16, 24, 32), (3, 4), 64, "pictures"),
    _torch("convolutional", (16, 32, 48), (3, 6), 64, "classes"),
    _torch("mixer", (64, 128), (3, 6), 96),
    _torch("experts", (64, 128), (2, 4), 128),
    _torch("looped", (64, 128), (2, 4), 96),
    _torch("translator", (64, 128), (2, 3), 96),
    _torch("gated", (64, 128), (2, 3), 64),
    _torch("sound", (16, 32), (4, 7), 4000, "waves"),
    _torch("uneven", (64, 100), (3, 5), 128),
)  # fmt: skip
# ruff: enable[E501]

OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 1e-3}),
    ("AdamW", {"lr": 1e-3, "amsgrad": True, "foreach": False}),
    ("Adam", {"lr": 1e-3, "weight_decay": 0.01}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
    ("Adafactor", {"lr": 1e-2}),
    ("Adadelta", {}),
    ("RAdam", {"lr": 1e-3}),
    ("Rprop", {"lr": 1e-3}),
    ("Adamax", {"lr": 1e-3}),
    ("ASGD", {"lr": 1e-3}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    ("Lion", {"lr": 1e-4}),
)
