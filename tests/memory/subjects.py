"""Models that both the process and an accelerator are measured with.

In: nothing. Out: small models, large enough that a missed tensor stands out.
"""

from __future__ import annotations

from torch import nn


def gpt2() -> nn.Module:
    """GPT-2 of three layers with a head of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=192, n_head=3, vocab_size=1200, n_positions=64, use_cache=False,
                   tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
    )  # fmt: skip
    model.loss_type = "ForCausalLM"
    return model
