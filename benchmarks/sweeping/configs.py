"""Configurations of transformers made small: rules over the names of attributes, and as few entries by hand as are needed.

In: a model type. Out: a configuration of a few ten thousand parameters that keeps the type's own structure (its kinds of layers, its ratios of heads).

The default configuration is read, each attribute that a rule knows gets a small value, and the class is called again with these: what it derives from
them (kinds of layers, sizes of heads) it derives again. Sub-configurations are shrunk the same way, from the inside.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeping.entries import DROPPED, ENTRIES

VOCABULARY = 160
WIDTH = 64
HEADS = 4
IMAGE = 32
PATCH = 8

_RULES: tuple[tuple[str, Any], ...] = (
    (r"max_source_positions", 32),
    (r"upsample_groups", 4),
    (r"base_channels", 32),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"num_feat_extract_layers|num_adapter_layers", 2),
    (r"(text_|t2u_|src_|tgt_|decoder_|audio_|char_|codebook_)?vocab_size(_per_layer_input)?|entity_vocab_size|head_out_channels", VOCABULARY),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|swa_num_key_value_heads|cross_num_key_value_heads", "key-value heads"),
    (r"(.*_)?(num_)?attention_heads|n_heads?|num_heads|index_n_heads|(.*_)?num_attention_heads|linear_num_(value_)?heads|.*_n_heads|encoder_attention_heads", HEADS),
    (r"linear_num_key_heads", 2),
    (r"(.*_)?(head_dim|dim_head|d_kv|d_head|head_size)|v_head_dim|kv_channels|attention_head_dim|linear_(key|value)_head_dim", 16),
    (r"(moe_|shared_expert_|shared_|expert_|dense_)?(intermediate_size|ffn_hidden_size)(_mlp)?|.*intermediate_(size|dim)", 48),
    (r".*ffn_dim|d_ff|dim_ff|dff|d_inner|n_inner|mlp_dim|.*feedforward_dim|dim_feedforward|.*linear_units|.*mlp_hidden_size", 48),
    (r".*hidden_(size|dim)s?(_global)?|.*embed(ding)?_(dim|size)|.*proj(ect|ector|ection)?(_input|_output)?_(dim|size)|d_model|n_embd|emb_dim|dim", WIDTH),
    (r"lru_width|conv_dim|(model|output|vision_output|out)_dim|mask_feature_size|fpn_feature_size|pooler_output_size|.*output_proj_dims", WIDTH),
    (r"adapter_(in|out)_dim", WIDTH),
    (r"(.*_)?layers|[nl]_layers?|num_blocks?|depth|num_layers_per_stack", "layers"),
    (r"max_(source_|target_|2d_|encoder_|decoder_)?positions?(_embeddings)?|.*max_position_embeddings|n_positions|n_ctx|max_(seq_len|pos_emb)", 128),
    (r"model_max_length|max_sequence_length", 128),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|num_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_top_k|moe_k|top_k_experts", 2),
    (r"n_group|topk_group|first_k_dense_replace|num_expert_groups?", 1),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|time_step_rank|mamba_dt_rank|laurel_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim", 16),
    (r"state_size|mamba_d_state|ssm_state_size|rotary_dim|sliding_window(_size)?|index_topk|attention_window|.*chunk_size", 8),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"qk_head_dim", 32),
    (r"full_attention_interval|sliding_window_pattern|attn_layer_period|global_attn_every_n_layers", 2),
    (r"(pretrain_)?image_size|pretrain_img_size|img_size|crop_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_queries|num_query_tokens|two_stage_num_proposals|num_latents|.*num_latents|resampler_n_latents|latent_query_num", 8),
    (r"num_mel_bins|n_mels|feature_size|input_feat_size|input_feat_per_channel|n_mel_bins|mel_dim|model_in_dim", 16),
    (r"relative_attention_num_buckets|num_buckets|max_relative_positions", 16),
    (r"relative_attention_max_distance|relative_max_distance", 32),
    (r"codebook_size|num_codevectors_per_group|num_embeddings", 16),
    (r"codebook_dim|codevector_dim|proj_codevector_dim|latent_dim", 16),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups", 4),
    (r"classifier_proj_size|xvector_output_dim|head_hidden_size|fusion_hidden_size|reduce_dim|hash_.*", 16),
    (r"num_negatives|train_num_points|num_denoising", 4),
    (r"conv_depthwise_kernel_size|conv_kernel_size|decoder_kernel_size", 5),
    (r"mask_time_length|mask_feature_length", 2),
    (r"num_labels", 5),
    (r"use_cache|use_mambapy|output_router_logits", False),
    (r"num_filters|base_channels|upsample_initial_channel|encoder_hidden_size|decoder_channels|sampling_rate_x", 16),
    (r"shape_size|coordinate_size", 4),
)  # fmt: skip
_COMPILED = tuple((re.compile(rule), value) for rule, value in _RULES)
_LAYERS = 2

_LISTS: Mapping[str, Any] = {
    "depths": lambda found: [1] * len(found),
    "hidden_sizes": lambda found: [8 * 2**i for i in range(len(found))],
    "embed_dims": lambda found: [8 * 2**i for i in range(len(found))],
    "num_attention_heads": lambda found: [2 ** min(i, 2) for i in range(len(found))],
    "num_heads": lambda found: [2 ** min(i, 2) for i in range(len(found))],
    "conv_dim": lambda _: (16, 16),
    "conv_stride": lambda _: (5, 4),
    "conv_kernel": lambda _: (10, 8),
    "tdnn_dim": lambda found: [16] * len(found),
    "tdnn_dilation": lambda found: [1] * len(found),
    "image_size": lambda found: [IMAGE] * len(found),
    "neck_hidden_sizes": lambda found: [16] * len(found),
    "block_sizes": lambda found: [1] * len(found),
}
_TOKEN = re.compile(
    r"_?(.*_)?(token_id|token_index|token_idx|pad_id|bos_id|eos_id|patch_id|blank_id|(start|end|newline|stream)_id)"
)
_ENDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "sep_token_id",
    "cls_token_id",
    "unk_token_id",
)


def _small(name: str, value: Any, default: Any) -> Any:
    """The small value of an attribute, or the value itself."""
    if isinstance(value, (list, tuple)):
        return _LISTS[name](value) if name in _LISTS and value and not isinstance(value[0], (list, tuple)) else value
    for rule, small in _COMPILED:
        if rule.fullmatch(name):
            if small == "layers":
                return min(value, _LAYERS) if isinstance(value, int) and not isinstance(value, bool) else value
            if small == "key-value heads":
                heads = next(
                    (getattr(default, n, None) for n in ("num_attention_heads", "num_heads") if hasattr(default, n)),
                    None,
                )
                is_grouped = isinstance(heads, int) and isinstance(value, int) and value < heads
                return min(value, 2) if is_grouped else HEADS
            if isinstance(small, bool):
                return small
            if isinstance(value, bool) or not isinstance(value, int):
                return value
            return small if value > 0 else value
    return value


class _Tokens:
    """Numbers of special tokens, equal for equal names all over a configuration, from the top of the vocabulary down."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def small(self, name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.small(name, each) for each in value][:1]
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if name.lstrip("_") in _ENDS:
            return value if 0 <= value < 4 else {"bos_token_id": 1, "eos_token_id": 2}.get(name.lstrip("_"), 0)
        key = re.sub(r"(token_|_)?(id|index|idx)$", "", name)
        return self._known.setdefault(key, VOCABULARY - 1 - len(self._known))


def small_config(model_type: str) -> Any:
    """The small configuration of a model type.

    Raises:
        Exception: whatever its class raises.
    """
    import transformers

    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    return _shrink(kind, model_type, _Tokens())


def _shrink(kind: Any, model_type: str, tokens: _Tokens, given: Any = None) -> Any:
    from transformers import PreTrainedConfig

    own = dict(ENTRIES.get(model_type, {}))
    default = given if given is not None else _default(kind, own)
    settings: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name in own or name in DROPPED or name.startswith("_") or name == "model_type":
            continue
        if isinstance(value, PreTrainedConfig):
            settings[name] = _shrink(type(value), value.model_type or name, tokens, given=value)
        elif _TOKEN.fullmatch(name):
            settings[name] = tokens.small(name, value)
        else:
            small = _small(name, value, default)
            if small is not value and small != value:
                settings[name] = small
    if "rope_parameters" in vars(default) and "rope_parameters" not in own and _reads_sections(kind):
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    for name in ("num_labels", "use_cache"):
        if hasattr(default, name) and not own.get("plain"):
            settings.setdefault(name, 5 if name == "num_labels" else False)
    own.pop("plain", None)
    for name, value in own.items():
        if "." in name:
            continue
        if value is None:
            settings.pop(name, None)
        else:
            settings[name] = value() if callable(value) else value
    made = kind(**settings)
    for name, value in own.items():
        if "." in name:
            _set(made, name, value)
    return made


def _reads_sections(kind: Any) -> bool:
    """The rotary embedding of pictures, in three sections of half a head."""
    path = Path(inspect.getfile(kind))
    modeling = path.with_name(path.name.replace("configuration_", "modeling_"))
    return modeling.is_file() and "mrope_section" in modeling.read_text(encoding="utf-8")


def _set(config: Any, path: str, value: Any) -> None:
    *inner, last = path.split(".")
    for name in inner:
        config = getattr(config, name)
    setattr(config, last, value)


def _default(kind: Any, own: Mapping[str, Any]) -> Any:
    try:
        return kind()
    except Exception:  # noqa: BLE001 - some want their parts named
        return kind(
            **{k: v() if callable(v) else v for k, v in own.items() if "." not in k and k != "plain" and v is not None}
        )
