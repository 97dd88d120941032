"""Models of transformers that draw random numbers in their forward, other than dropout: small, with random weights, and a batch of four rows.

In: a name. Out: model, batch, loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Drawing = tuple[nn.Module, dict[str, Tensor], Callable[[nn.Module, Any], Tensor]]


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(1))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def switch_transformers() -> Drawing:
    """Jitter in the router."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 24,
        "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "num_experts": 4, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.1, "decoder_start_token_id": 0, "dropout_rate": 0.1, "tie_word_embeddings": False,
    }  # fmt: skip
    ids = _ids(4, 8)
    config = transformers.SwitchTransformersConfig(**settings)
    return transformers.SwitchTransformersForConditionalGeneration(config), {"input_ids": ids, "labels": ids}, _loss


def phimoe() -> Drawing:
    """Jitter in the router and on its input."""
    import transformers

    config = transformers.PhimoeConfig(
        vocab_size=99, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, router_jitter_noise=0.05, input_jitter_noise=0.1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ids = _ids(4, 8)
    return transformers.PhimoeForCausalLM(config), {"input_ids": ids, "labels": ids}, _loss


def hiera() -> Drawing:
    """A mask over patches, drawn in evaluation mode as well."""
    import transformers

    config = transformers.HieraConfig(
        embed_dim=8, image_size=[64, 64], patch_stride=[4, 4], patch_size=[7, 7], patch_padding=[3, 3], masked_unit_size=[8, 8], depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1], mask_ratio=0.6, decoder_hidden_size=16, decoder_depth=1, decoder_num_heads=1, query_stride=[2, 2], num_query_pool=2,
    )  # fmt: skip
    return transformers.HieraForPreTraining(config), {"pixel_values": _randn(4, 3, 64, 64)}, _loss


def dinov3_vit() -> Drawing:
    """Jitter of rotary positions, which lie in a cache of a function."""
    import transformers

    config = transformers.DINOv3ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4, num_register_tokens=1,
        pos_embed_rescale=2.0, pos_embed_jitter=1.1, pos_embed_shift=0.1, drop_path_rate=0.1,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).last_hidden_state.square().mean()

    return transformers.DINOv3ViTModel(config), {"pixel_values": _randn(4, 3, 16, 16)}, loss


def patchtst() -> Drawing:
    """A mask over patches of a series."""
    import transformers

    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2, num_hidden_layers=2, ffn_dim=24,
        do_mask_input=True, random_mask_ratio=0.4, norm_type="layernorm",
    )  # fmt: skip
    return transformers.PatchTSTForPretraining(config), {"past_values": _randn(4, 32, 2)}, _loss


def wav2vec2() -> Drawing:
    """A mask over time from NumPy's generator, and layers that are left out."""
    import transformers

    settings: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "conv_dim": [8, 8], "conv_kernel": [8, 4], "conv_stride": [4, 4],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.5, "mask_time_length": 2, "layerdrop": 0.3,
        "vocab_size": 12, "feat_extract_norm": "layer", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = transformers.Wav2Vec2Config(**settings)
    labels = _ids(4, 4) % 11 + 1
    return transformers.Wav2Vec2ForCTC(config), {"input_values": _randn(4, 800), "labels": labels}, _loss


ALL: Mapping[str, Callable[[], Drawing]] = {
    one.__name__: one for one in (switch_transformers, phimoe, hiera, dinov3_vit, patchtst, wav2vec2)
}
