"""What the rules do not reach: settings of model types, by hand. None: leave the attribute to its class.

A name with a dot is set on a sub-configuration after all were made; a function is called for the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

DROPPED = frozenset({
    "layer_types", "mlp_layer_types", "stage_names", "id2label", "label2id", "transformers_version", "architectures", "rope_parameters", "rope_scaling",
    "attention_layers", "out_features", "out_indices", "torch_dtype", "dtype", "layers_block_type", "no_rope_layers", "layer_rope_theta",
    "indexer_types", "activation_sparsity_pattern", "name_or_path", "problem_type",
})  # fmt: skip
"""Attributes that a class derives from others, or that belong to saved files."""


def _each(names: Iterable[str], settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The same settings for several types."""
    return dict.fromkeys(names, settings)


def _resnet(kind: str = "ResNetConfig", **more: Any) -> Any:
    import transformers

    settings = {
        "embedding_size": 8,
        "hidden_sizes": [16, 32, 64, 64],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": ["stage4"],
        **more,
    }
    return getattr(transformers, kind)(**settings)


def _three_levels() -> Any:
    return _resnet("RTDetrResNetConfig", layer_type="bottleneck", out_features=["stage2", "stage3", "stage4"])


def _swin() -> Any:
    import transformers

    settings = {name: value for name, value in _WINDOWS.items() if value is not None}
    return transformers.SwinConfig(**{**settings, "out_features": ["stage1", "stage2", "stage3", "stage4"]})


def _hgnet() -> Any:
    import transformers

    return transformers.HGNetV2Config(**{**_HGNET, "out_features": ["stage2", "stage3", "stage4"]})


def _four_layers(kind: str = "Dinov2Config", **more: Any) -> Any:
    import transformers

    settings = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "intermediate_size": 48,
        "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False, **more,
    }  # fmt: skip
    return getattr(transformers, kind)(**settings)


def _vitpose() -> Any:
    import transformers

    settings: dict[str, Any] = {"image_size": [64, 32], "patch_size": [8, 8], "out_indices": [2]}
    return transformers.VitPoseBackboneConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **settings)


_WINDOWS: Mapping[str, Any] = {
    "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 4], "embed_dim": 16, "patch_size": 4, "window_size": 4, "num_layers": None, "hidden_size": None,
    "image_size": 64,
}  # fmt: skip
_HGNET: Mapping[str, Any] = {
    "embedding_size": 8, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64], "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 32, 64],
    "stage_mid_channels": [8, 8, 8, 8], "stage_out_channels": [16, 32, 64, 64], "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1],
}  # fmt: skip
_LEVELS: Mapping[str, Any] = {
    "backbone_config": _three_levels, "encoder_in_channels": [32, 64, 64], "decoder_in_channels": [64, 64, 64], "num_queries": 8, "num_denoising": 4,
    "image_size": 64,
}  # fmt: skip
_DETR: Mapping[str, Any] = {
    "backbone_config": _resnet, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "image_size": 64,
}  # fmt: skip
_SERIES: Mapping[str, Any] = {
    "prediction_length": 4,
    "context_length": 8,
    "num_time_features": 1,
    "num_parallel_samples": 2,
    "label_length": 4,
    "moving_average": 3,
    "feature_size": None,
}
_HIERA: Mapping[str, Any] = {
    "image_size": [64, 64], "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [16, 32, 32, 64], "num_attention_heads_per_stage": [1, 2, 2, 4],
    "window_size_per_stage": [8, 4, 4, 4], "hidden_size": 16, "num_attention_heads": 1, "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [2, 2],
}  # fmt: skip


def _hiera() -> Any:
    import transformers

    return transformers.Sam2HieraDetConfig(**_HIERA)


_PYRAMID: Mapping[str, Any] = {
    "backbone_config": _hiera, "backbone_channel_list": [64, 32, 32, 16], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], "fpn_hidden_size": 32,
}  # fmt: skip


def _pyramid() -> Any:
    import transformers

    return transformers.Sam2VisionConfig(**{**_PYRAMID, "backbone_config": _hiera()})


def _of_sam2(kind: str, **settings: Any) -> Any:
    def make() -> Any:
        import transformers

        return getattr(transformers, kind)(hidden_size=32, **settings)

    return make


def _bert() -> Any:
    import transformers

    # The signs between phrases are BERT's: 101, 102, 1012, 1029.
    return transformers.BertConfig(
        vocab_size=1040, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )


_MAMBA: Mapping[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_ssm": None}
_BITS: Mapping[str, Any] = {"num_groups": 4, "embedding_size": 8}

ENTRIES: dict[str, Mapping[str, Any]] = {
    **_each(("swin", "swinv2", "maskformer-swin", "swin2sr"), _WINDOWS),
    "donut-swin": {**_WINDOWS, "window_size": 2},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _PYRAMID,
    "sam2": {
        "vision_config": _pyramid, "prompt_encoder_config": _of_sam2("Sam2PromptEncoderConfig", image_size=64, patch_size=16),
        "mask_decoder_config": _of_sam2("Sam2MaskDecoderConfig", mlp_dim=48, num_attention_heads=4, iou_head_hidden_dim=32),
    },
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"], "n_mamba_heads": 2,
        "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 8,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "n_mamba_heads": 8, "mamba_ngroups": 1,
        **dict.fromkeys(("attention_hidden_size", "attention_head_dim", "mamba_headdim", "kv_channels", "num_query_groups", "hybrid_layer_ids")),
        "adapter_rank": 8,
    },
    **_each(("detr", "conditional_detr", "dab-detr", "table-transformer"), _DETR),
    "deformable_detr": {**_DETR, "backbone_config": lambda: _resnet(out_features=["stage2", "stage3", "stage4"]), "two_stage": False},
    **_each(("rt_detr", "rt_detr_v2", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4"), _LEVELS),
    **_each(("d_fine", "deimv2"), {**_LEVELS, "backbone_config": _hgnet, "max_num_bins": 8, "lqe_hidden_dim": 8, "lqe_layers": 2}),
    "hgnet_v2": _HGNET,
    **_each(("grounding-dino", "mm-grounding-dino"), {
        "backbone_config": _swin, "text_config": _bert, "image_size": 64, "two_stage": True, "num_feature_levels": 4, "max_text_len": 16, "num_queries": 6,
    }),
    "mask2former": {"backbone_config": _swin, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "train_num_points": 16, "image_size": 64},
    "oneformer": {"backbone_config": _swin, "conv_dim": 32, "mask_dim": 32, "hidden_dim": 32, "train_num_points": 16, "max_seq_len": 12, "task_seq_len": 12},
    "maskformer": {"backbone_config": _swin, "fpn_feature_size": 32, "mask_feature_size": 32, "image_size": 64},
    "upernet": {"backbone_config": lambda: _resnet(out_features=["stage1", "stage2", "stage3", "stage4"]), "hidden_size": 32, "pool_scales": [1, 2]},
    "zoedepth": {
        "backbone_config": lambda: _four_layers("BeitConfig", use_relative_position_bias=True), "neck_hidden_sizes": [16, 16, 16, 16],
        "fusion_hidden_size": 16, "bottleneck_features": 16, "num_relative_features": 8, "bin_embedding_dim": 16, "num_attractors": [4, 2, 2, 1],
    },
    "gemma3n_text": {
        "intermediate_size": 48, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 16,
    },
    "perceiver": {
        "d_latents": 32, "d_model": 32, "num_latents": 8, "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
        "max_position_embeddings": 12,
    },
    "timesfm": {"context_length": 64, "horizon_length": 16, "patch_length": 16, "intermediate_size": 64},
    "timesfm2_5": {"context_length": 64, "horizon_length": 16, "patch_length": 16, "output_quantile_len": 16},
    **_each(("autoformer", "informer", "time_series_transformer"), _SERIES),
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    **_each(("bamba", "granitemoehybrid"), _MAMBA),
    "jamba": {"attn_layer_offset": 1, "mamba_dt_rank": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zaya": {"num_experts_per_tok": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 160, "mask_token_id": 159, "pad_token_id": 1},
    **_each(("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"), {"head_dim": 16}),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mpnet": {"relative_attention_num_buckets": 32},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": None},
    "xmod": {"default_language": "en_XX"},
    **_each(("convnext", "convnextv2"), {"patch_size": 4}),
    "bit": _BITS,
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16, "input_size": 32, "max_2d_position_embeddings": 128},
    "lilt": {"hidden_size": 48},
    **_each(("kimi_linear", "bailing_hybrid"), {"num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1}),
    "reformer": {
        "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [3, 4], "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
        "num_buckets": 2, "attention_head_size": 16,
    },
    "clvp_encoder": {"use_rotary_embedding": False},
    "cvt": {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 1, 1]},
    **_each(("efficientnet", "align_vision_model"), {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 32, "depth_divisor": 4}),
    "focalnet": {"embed_dim": 16, "depths": [1, 1, 1, 1], "image_size": 64, "patch_size": 4},
    "sam": {"vision_config.output_channels": 64},
    "wav2vec2-bert": {"feature_projection_input_dim": 16, "conformer_conv_dropout": 0.0},
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 16},
    "glpn": {"depths": [1, 1, 1, 1]},
    "llama4_vision_model": {"intermediate_size": 256, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 16], "moe_num_experts": 4},
    "canine": {"num_hash_buckets": 64},
    "kosmos_2_text_model": {"layers": 2},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [2, 2]]},
    "videomt": {"num_blocks": 1},
    "vitpose": {"backbone_config": _vitpose},
    "encodec": {"num_filters": 4, "upsampling_ratios": [4, 2], "codebook_dim": 64, "hidden_size": 64},
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 16, "hidden_size": 32, "codebook_dim": 4, "downsampling_ratios": [2, 4], "upsampling_ratios": [4, 2]},
    "superpoint": {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "descriptor_decoder_dim": 16},
    "chmv2": {"neck_hidden_sizes": [16, 16, 16, 16], "fusion_hidden_size": 16, "reassemble_hidden_size": 16, "head_hidden_size": 16},
    "mobilevitv2": {"patch_size": 2},
    **_each(("gemma3", "shieldgemma2"), {"mm_tokens_per_image": 4}),
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    **_each(("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder"), {"decoder_start_token_id": 1, "pad_token_id": 0}),
    **_each(("glm4v_moe_text", "glm4v_text", "glm_ocr_text"), {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    }),
    **_each(("instructblip", "instructblipvideo", "blip-2"), {"image_token_index": 150, "video_token_index": 149}),
}  # fmt: skip
