"""Key-value caches, which transformers' decoders make by default also while they train: the user's numbers, and nothing kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence import plans
from equivalence.compare import assert_equal_training
from equivalence.plain import adamw
from equivalence.with_memfit import fit_case, fit_with, profile_of
from equivalence.zoo import Batch, Case
from memfit.core.errors import UnsupportedError
from memfit.core.plan import CallPlan, Plan

transformers = pytest.importorskip("transformers")

WORDS, TOKENS = 61, 12


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch["words"], labels=batch["words"]).loss


def loss_in_two_halves(model: nn.Module, batch: Batch) -> Tensor:
    """The second half sees the first one's keys and values."""
    first, second = batch["words"].chunk(2, dim=1)
    begun = model(input_ids=first, labels=first, use_cache=True)
    return begun.loss + model(input_ids=second, labels=second, past_key_values=begun.past_key_values).loss


def batch_of(step: int) -> Batch:
    return {"words": torch.randint(WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(40 + step))}


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "gpt2 eager": lambda: gpt2(attn_implementation="eager"), "t5": t5}


def case_of(name: str, loss: Any = loss_of) -> Case:
    torch.manual_seed(8)
    model = MODELS[name]().train()
    assert model.config.use_cache
    shared = frozenset(n for n, _ in model.named_parameters() if n in ("shared.weight", "transformer.wte.weight"))
    return Case(model=model, loss=loss, batch=batch_of, shared=shared)


FATES = {"keep": CallPlan(), "recompute": plans.RECOMPUTE, "offload": plans.OFFLOAD}


# What keeps, runs again or travels is the same for a model's two kinds of attention, and T5 is the largest.
_SLOW = {("gpt2 eager", "keep"), ("gpt2 eager", "offload"), ("t5", "keep"), ("t5", "offload")}


def plan_of(case: Case, how: str) -> Plan:
    profile = profile_of(case)
    return Plan(blocks=plans.on_disk(profile), calls=plans.fates(profile, FATES[how]))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=pytest.mark.slow if (name, how) in _SLOW else ())
        for name in MODELS
        for how in FATES
    ],
)
def test_a_model_that_makes_caches_trains_bit_for_bit(name: str, how: str, tmp_path: Path) -> None:
    plan = plan_of(case_of(name), how)
    assert_equal_training(lambda: case_of(name), adamw(), fit_with(plan, tmp_path, keep_gradients=True), steps=2)


def test_nothing_is_kept_in_them() -> None:
    """Keys and values of all layers: what a cache would hold until the forward ends."""
    seen: list[Any] = []
    case = case_of("gpt2")

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        output: Any = model(input_ids=batch["words"], labels=batch["words"])
        seen.append(output.past_key_values)
        return output.loss

    with fit_case(case, adamw()(case.model), loss=loss) as job:
        seen.clear()
        job.step(batch_of(0))
    layers = [layer for cache in seen for layer in cache.layers]
    assert layers and all(layer.keys is None and layer.values is None for layer in layers)


def test_a_cache_that_the_loss_hands_on_is_a_real_one(tmp_path: Path) -> None:
    case = case_of("gpt2", loss_in_two_halves)
    plan = plan_of(case, "keep")
    assert_equal_training(
        lambda: case_of("gpt2", loss_in_two_halves), adamw(), fit_with(plan, tmp_path, keep_gradients=True), steps=2
    )
    again = case_of("gpt2", loss_in_two_halves)
    with pytest.raises(UnsupportedError, match="key-value cache"):
        fit_with(plan_of(again, "recompute"), tmp_path)(again, adamw()(again.model))


def test_another_thread_generates_with_caches_of_its_own_meanwhile() -> None:
    case, other = case_of("gpt2"), case_of("gpt2").model.eval()
    prompt = batch_of(5)["words"][:1, :4]
    found: list[Tensor] = []

    def generate() -> Tensor:
        net: Any = other
        return net.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if is_training:
            thread = threading.Thread(target=lambda: found.append(generate()))
            thread.start()
            thread.join()
        return loss_of(model, batch)

    expected, is_training = generate(), False
    with fit_case(case, adamw()(case.model), loss=loss) as job:
        is_training = True
        job.step(batch_of(0))
    assert len(found) == 1 and torch.equal(found[0], expected)
    assert torch.equal(generate(), expected)
