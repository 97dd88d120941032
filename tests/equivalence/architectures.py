"""Architectures of transformers, built small from their configurations: other people's models, as they are.

In: a name of `ARCHITECTURES`. Out: a `Case`. A model gets those of the settings below that its configuration knows, and what its own entry adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equivalence import zoo

_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "block_size", "attention_window"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "state_size", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "sliding_window"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_d_head", "relative_attention_num_buckets"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "expert_capacity"), 64),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "mamba_expand"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "vocab_size": zoo.VOCABULARY, "image_size": 32, "patch_size": 8, "rotary_dim": 4, "eos_token_id": 2, "num_labels": 5, "use_cache": False,
    "use_mambapy": False, "router_jitter_noise": 0.0, "max_relative_positions": 16,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How a model is built and asked.

    Attributes:
        head: the auto class that puts a loss on it.
        batch: of a step.
        settings: beyond or instead of the common ones; None: not to be set.
        weight: of a microbatch, where it is not its rows.
    """

    head: str
    batch: Callable[[int], zoo.Batch]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weight: Callable[[zoo.Batch], float] | None = None


def _pictures(step: int) -> zoo.Batch:
    pixels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(step))
    return {"pixel_values": pixels, "labels": torch.arange(8) % 5}


def _sounds(step: int) -> zoo.Batch:
    waves = torch.randn(8, 800, generator=torch.Generator().manual_seed(step))
    return {"input_values": waves, "labels": torch.arange(8) % 5}


def _spectra(step: int) -> zoo.Batch:
    spectra = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(step))
    return {"input_values": spectra, "labels": torch.arange(8) % 5}


def _speech(step: int) -> zoo.Batch:
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(8, 16, 32, generator=generator)
    return {"input_features": features, "labels": torch.randint(3, zoo.VOCABULARY, (8, 6), generator=generator)}


def _frames(step: int) -> zoo.Batch:
    speech = _speech(step)
    return {**speech, "input_features": speech["input_features"].transpose(1, 2)}


_STAGES = {"depths": [1, 1, 1, 1]}
_NARROW = {**_STAGES, "hidden_sizes": [8, 16, 24, 32]}
_WINDOWS = {
    "num_attention_heads": None, "num_hidden_layers": None, "depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "patch_size": 4, "window_size": 4,
}  # fmt: skip
_PYRAMID = {**_STAGES, "num_attention_heads": [1, 2, 4, 8], "hidden_sizes": [8, 16, 32, 64]}
_WAVES = {
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2, "mask_time_prob": 0.0, "apply_spec_augment": False, "layerdrop": 0.0, "classifier_proj_size": 16,
}  # fmt: skip
_STREAMS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_attention_heads")), "num_encoder_layers": 2, "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "relative_max_distance": 16, "num_buckets": 8,
}  # fmt: skip
_HEADS = {"num_key_value_heads": 4}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_OWN: dict[str, Mapping[str, Any]] = {
    "opt": {"word_embed_proj_dim": 32},
    "mobilebert": {"embedding_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "deepseek_v3": {"num_key_value_heads": 4},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 4},
    "longt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "convnext": {**_NARROW, "num_hidden_layers": 4, "patch_size": 4},
    "convnextv2": {**_NARROW, "num_hidden_layers": 4, "patch_size": 4},
    "segformer": {**_NARROW, "num_attention_heads": [1, 2, 3, 4]},
    "donut-swin": _WINDOWS,
    "pvt": _PYRAMID,
    "pvt_v2": _PYRAMID,
    "efficientnet": {"hidden_dim": None},
    **dict.fromkeys(("poolformer", "resnet", "regnet", "focalnet"), _STAGES),
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "sew", "sew-d", "unispeech", "unispeech-sat"), _WAVES),
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 16},
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        _HEADS,
    ),
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"v_head_dim": None},
    "mpnet": {"relative_attention_num_buckets": 32},
    "bit": {**_NARROW, "embedding_size": 8, "num_groups": 4},
    "hiera": {
        "image_size": [32, 32],
        "num_heads": [1, 2, 2, 4],
        "depths": [1, 1, 1, 1],
        "embed_dim": 8,
        "patch_size": None,
        "num_layers": None,
    },
    "data2vec-audio": _WAVES,
    "mt5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "prophetnet": _STREAMS,
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _LINEAR),
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1, 1], "d_inner": 64},
    "ctrl": {"dff": 64},
    "luke": {"entity_vocab_size": 61, "entity_emb_size": 32},
    "whisper": {"num_mel_bins": 16, "max_source_positions": 16},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32},
}
_TEXT = """
    gpt_neox opt bloom qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text phi phi3 phimoe mistral stablelm olmo mamba mamba2 falcon_mamba rwkv
    deepseek_v3 jamba recurrent_gemma lfm2 gpt_oss
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam bert-generation biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl cwm
    deepseek_v2 deepseek_v32 deepseek_v4 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 flex_olmo flint glm glm4
    glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt_bigcode gpt_neo gpt_neox_japanese gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe
    kolibri1 laguna lfm3 llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3
    modernbert-decoder mpt nanochat nemotron nemotron_h olmo2 olmo3 olmo_hybrid olmoe openai-gpt persimmon qwen3_5_moe_text qwen3_5_text qwen3_next
    qwen4_exp_text seed_oss smollm3 solar_open starcoder2 trocr vaultgemma xglm xlnet xlstm youtu
"""
_MASKED = """
    roberta deberta deberta-v2 electra distilbert longformer convbert mobilebert modernbert camembert squeezebert fnet nystromformer yoso xlm-roberta
    megatron-bert rembert roformer mra esm data2vec-text big_bird ibert flaubert xlm layoutlm
    ernie funnel jina_embeddings_v3 luke mpnet nomic_bert ultrabert
    albert eurobert gte roberta-prelayernorm tapas xlm-roberta-xl xmod
"""
_TRANSLATING = """
    bart mbart pegasus marian m2m_100 blenderbot blenderbot-small led umt5 mvp plbart longt5 switch_transformers pegasus_x bigbird_pegasus
    mt5 nllb-moe prophetnet
"""
_SEEING = """
    beit swin swinv2 convnext convnextv2 dinov2 poolformer resnet regnet mobilevit segformer pvt focalnet efficientnet
    bit dinov2_with_registers hiera
    data2vec-vision donut-swin ijepa pvt_v2 vit_msn
"""
_HEARING = "wav2vec2 hubert wavlm sew sew-d data2vec-audio unispeech unispeech-sat"


def _group(names: str, head: str, batch: Callable[[int], zoo.Batch], **more: Any) -> dict[str, Architecture]:
    return {
        name: Architecture(head=f"AutoModelFor{head}", batch=batch, settings=_OWN.get(name, {}), **more)
        for name in names.split()
    }


ARCHITECTURES: dict[str, Architecture] = {
    **_group(_TEXT, "CausalLM", zoo.text),
    **_group(_MASKED, "MaskedLM", zoo.masked_text, weight=zoo.count_labels),
    **_group(_TRANSLATING, "Seq2SeqLM", zoo.translated_text),
    **_group(_SEEING, "ImageClassification", _pictures),
    **_group(_HEARING, "AudioClassification", _sounds),
    **_group("audio-spectrogram-transformer", "AudioClassification", _spectra),
    **_group("whisper", "SpeechSeq2Seq", _speech),
    **_group("speech_to_text", "SpeechSeq2Seq", _frames),
}
"""Every architecture by name. Reformer is none of them: while it trains, each of its layers calls `torch.seed()`, so that plain PyTorch itself does not
repeat its losses from equal seeds."""


def build(name: str) -> zoo.Case:
    """The case of an architecture; the same bits at every call."""
    import transformers

    found = ARCHITECTURES[name]
    plain: Any = transformers.AutoConfig.for_model(name)
    settings = {key: value for key, value in _SETTINGS.items() if hasattr(plain, key)} | dict(found.settings)
    config = type(plain)(**{key: value for key, value in settings.items() if value is not None})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, found.head).from_config(config).train()
    times = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {n for n, p in model.named_parameters() if times[id(p)] > 1}
    return zoo.Case(
        model=model,
        loss=own_loss,
        batch=found.batch,
        shared=frozenset(shared),
        untouched=None,
        allow=frozenset({"nonadditive-loss"}),
        weight=found.weight,
    )


def own_loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
    """The loss that the model computes itself."""
    return model(**batch).loss
