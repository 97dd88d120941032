"""Tiny real models, each with its loss and batches: what memfit must train exactly as plain PyTorch does.

In: a name of `ZOO`. Out: a `Case`, the same bits at every call. All have 3 or 4 layers, 32 or 48 wide, 8 rows a batch,
dropout on. The transformers library is imported only when one of its models is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equivalence import small_models

Batch = Mapping[str, Any]

ROWS = 8
TOKENS = 12
VOCABULARY = 61
WIDTH = 32
DROPOUT = 0.1

# Settings that transformers takes by keyword but does not declare on these classes.
_FIVE_CLASSES: dict[str, Any] = {"num_labels": 5}
_GROUPED_EXPERTS: dict[str, Any] = {"experts_implementation": "grouped_mm"}
_BEGINS_WITH_PAD: dict[str, Any] = {"decoder_start_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to train, and what is known about it beforehand.

    Attributes:
        model: in training mode.
        loss: what the user would write.
        batch: the batch of a step; the same for the same step.
        shared: parameters that several calls use: with more than one microbatch their gradients may differ by a
            rounding.
        untouched: parameters whose gradient stays None; None where nobody knows beforehand.
        allow: what `memfit.fit` has to be allowed to split the batch.
        weight: the weight of a microbatch's loss where it is not its rows.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[int], Batch]
    shared: frozenset[str] = frozenset()
    untouched: frozenset[str] | None = frozenset()
    allow: frozenset[str] = frozenset()
    weight: Callable[[Batch], float] | None = None


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a transformers model computes itself."""
    return model(**batch).loss


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000 + step)


def text(step: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=_generator(step))
    return {"input_ids": ids, "labels": ids.clone()}


def masked_text(step: int) -> Batch:
    """A third of the tokens is asked for, another number in each row."""
    generator = _generator(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    asked = torch.rand((ROWS, TOKENS), generator=generator) < 0.33
    asked[:, 0] = True
    return {"input_ids": ids.masked_fill(asked, VOCABULARY - 1), "labels": ids.masked_fill(~asked, -100)}


def count_labels(batch: Batch) -> float:
    return float((batch["labels"] != -100).sum())


def _classified_text(step: int) -> Batch:
    generator = _generator(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, 5, (ROWS,), generator=generator)}


def translated_text(step: int) -> Batch:
    generator = _generator(step)
    ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(1, VOCABULARY, (ROWS, TOKENS - 3), generator=generator)}


def images(step: int) -> Batch:
    generator = _generator(step)
    pixels = torch.randn((ROWS, 3, 16, 16), generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (ROWS,), generator=generator)}


def gpt2(*, is_tied: bool = True) -> Case:
    """GPT-2; its token embedding is its head when tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=3, n_head=2, tie_word_embeddings=is_tied,
        resid_pdrop=DROPOUT, embd_pdrop=DROPOUT, attn_pdrop=DROPOUT, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    shared = frozenset({"transformer.wte.weight"}) if is_tied else frozenset()
    return Case(model=GPT2LMHeadModel(config).train(), loss=model_loss, batch=text, shared=shared)


def _llama_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS, attention_dropout=DROPOUT, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def llama() -> Case:
    """Llama with grouped queries and dropout in attention."""
    return Case(model=_llama_model(), loss=model_loss, batch=text)


def frozen() -> Case:
    """A frozen Llama under a head that trains: no gradient flows below the head."""
    model = _llama_model()
    model.model.requires_grad_(requires_grad=False)
    untouched = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    return Case(model=model, loss=model_loss, batch=text, untouched=untouched)


def lora() -> Case:
    """Low-rank adapters on a frozen Llama: gradients flow through frozen weights."""
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=DROPOUT, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    with warnings.catch_warnings():
        # peft asks transformers by a name that transformers has given up; neither is ours.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        model = peft.get_peft_model(_llama_model(), config).train()
    untouched = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    return Case(model=model, loss=model_loss, batch=text, untouched=untouched)


def mixtral() -> Case:
    """A mixture of experts whose router loss is made of logits that transformers captures with hooks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=TOKENS,
        output_router_logits=True, router_aux_loss_coef=0.1, router_jitter_noise=0.01, attention_dropout=DROPOUT,
        use_cache=False, **_GROUPED_EXPERTS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).train()
    return Case(model=model, loss=model_loss, batch=text, allow=frozenset({"nonadditive-loss"}))


def t5() -> Case:
    """Encoder and decoder; one embedding serves both and the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=2,
        dropout_rate=DROPOUT, use_cache=False, pad_token_id=0, **_BEGINS_WITH_PAD,
    )  # fmt: skip
    torch.manual_seed(0)
    return Case(
        model=T5ForConditionalGeneration(config).train(),
        loss=model_loss,
        batch=translated_text,
        shared=frozenset({"shared.weight"}),
    )


def bert() -> Case:
    """BERT on masked tokens: a mean over another number of tokens in each microbatch."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=TOKENS, hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT,
    )  # fmt: skip
    torch.manual_seed(0)
    return Case(
        model=BertForMaskedLM(config).train(),
        loss=model_loss,
        batch=masked_text,
        shared=frozenset({"bert.embeddings.word_embeddings.weight"}),
        weight=count_labels,
    )


def albert() -> Case:
    """One layer's weights, used by four calls."""
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=16, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=TOKENS, hidden_dropout_prob=DROPOUT, **_FIVE_CLASSES,
        attention_probs_dropout_prob=DROPOUT, classifier_dropout_prob=DROPOUT,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AlbertForSequenceClassification(config).train()
    shared = frozenset(name for name, _ in model.named_parameters() if "albert_layer_groups" in name)
    return Case(model=model, loss=model_loss, batch=_classified_text, shared=shared)


def vit() -> Case:
    """A vision transformer that classifies images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=48, hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT, **_FIVE_CLASSES,
    )  # fmt: skip
    torch.manual_seed(0)
    return Case(model=ViTForImageClassification(config).train(), loss=model_loss, batch=images)


def resnet() -> Case:
    """A residual network with batch statistics: whole batches only."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", **_FIVE_CLASSES
    )  # fmt: skip
    torch.manual_seed(0)
    model = ResNetForImageClassification(config).train()
    return Case(model=model, loss=model_loss, batch=images)


def rows(step: int) -> Batch:
    generator = _generator(step)
    inputs = torch.randn((ROWS, 6, WIDTH), generator=generator)
    return {"inputs": inputs, "targets": torch.randn((ROWS, 6, WIDTH), generator=generator)}


def distance(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["inputs"]).to(batch["targets"].dtype), batch["targets"])


def picture_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def _small(make: Callable[[], nn.Module], **known: Any) -> Callable[[], Case]:
    def build() -> Case:
        torch.manual_seed(0)
        return Case(model=make().train(), **{"loss": distance, "batch": rows, **known})

    return build


ZOO: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(is_tied=False),
    "llama": llama,
    "mixtral": mixtral,
    "t5": t5,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "albert": albert,
    "frozen": frozen,
    "lora": lora,
    "unused": _small(
        lambda: small_models.WithUnused(WIDTH),
        untouched=frozenset({"blocks.1.spare", "never_called.weight", "never_called.bias"}),
    ),
    "sequential": _small(lambda: small_models.sequential(WIDTH)),
    "convolution": _small(small_models.ConvolutionNet, loss=picture_loss, batch=images),
    "batch-norm": _small(lambda: small_models.ConvolutionNet(norm="batch"), loss=picture_loss, batch=images),
    "kwargs": _small(lambda: small_models.Stack(small_models.KeywordBlock, WIDTH)),
    "tuple": _small(lambda: small_models.Stack(small_models.TupleBlock, WIDTH)),
    "dict": _small(lambda: small_models.Stack(small_models.DictBlock, WIDTH)),
    "dataclass": _small(lambda: small_models.Stack(small_models.DataclassBlock, WIDTH)),
    "in-place": _small(lambda: small_models.InPlace(WIDTH)),
    "hooks": _small(lambda: small_models.Captured(WIDTH), loss=small_models.captured_loss),
}
"""Every case by name."""

CORE = ("gpt2", "gpt2-untied", "llama", "mixtral", "t5", "bert", "vit", "resnet", "albert", "frozen", "lora", "unused")
"""The models that the project promises by name; they meet every plan, in the default suite too."""

WHOLE_BATCH_ONLY = ("resnet", "batch-norm")
"""Models with statistics over the batch: microbatches would be another model."""
