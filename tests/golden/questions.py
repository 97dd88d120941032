"""Questions to the planner, drawn from numbers, and its answers as text.

Run this file as a script to write the answers anew (`--only 3 17` some of them); then read the difference.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    ResNetConfig,
    T5Config,
    ViTConfig,
)

import memfit
from memfit.planner.advise import Advice, advise

HERE = Path(__file__).parent
ANSWERS = HERE / "answers.json"
QUESTIONS = 60
PROCESSOR = "laptop-cpu"
MACHINES = ("h200", "a100-40gb", "mi300x", "rtx-3090", "rtx-4090", PROCESSOR)
LINKED = ("h200", "a100-80gb", "h100-sxm")
"""Machines whose descriptions say what links between ranks carry."""
ALLOWANCES: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset(),
    frozenset({"bf16"}),
    frozenset({"fp16"}),
    frozenset({"bf16", "int8-state"}),
    frozenset({"bf16", "bf16-weights-sr"}),
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a machine and wishes.

    Attributes:
        family: a function of `FAMILIES`.
        width, layers, rows: of the model and its batch.
        optimizer: a class of torch.optim.
        machine: a description by name.
        share: of the way from the smallest limit to the peak of training without a limit.
        wishes: keywords of `advise`.
    """

    family: str
    width: int
    layers: int
    rows: int
    optimizer: str
    machine: str
    share: float
    wishes: dict[str, Any]


Parts = tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], Any]
TOKENS, VOCABULARY = 128, 2048
# Fields that transformers adds to each configuration are unknown to type checkers.
_t5: Any = T5Config
_vit: Any = ViTConfig
_resnet: Any = ResNetConfig


def _text_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _text(rows: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * TOKENS).reshape(rows, TOKENS) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def _causal(config: Any) -> Callable[[int], Parts]:
    return lambda rows: (lambda: AutoModelForCausalLM.from_config(config), _text_loss, _text(rows))


def gpt2(q: Question) -> Parts:
    config = GPT2Config(
        n_embd=q.width, n_layer=q.layers, n_head=4, vocab_size=VOCABULARY, n_positions=TOKENS, use_cache=False
    )
    return _causal(config)(q.rows)


def llama(q: Question) -> Parts:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "use_cache": False}
    return _causal(
        LlamaConfig(hidden_size=q.width, intermediate_size=3 * q.width, num_hidden_layers=q.layers, **sizes)
    )(q.rows)


def qwen3(q: Question) -> Parts:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY, "use_cache": False}
    config = Qwen3Config(
        hidden_size=q.width,
        intermediate_size=2 * q.width,
        num_hidden_layers=q.layers,
        head_dim=32,
        tie_word_embeddings=True,
        **sizes,
    )
    return _causal(config)(q.rows)


def mixtral(q: Question) -> Parts:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "use_cache": False}
    config = MixtralConfig(
        hidden_size=q.width, intermediate_size=2 * q.width, num_hidden_layers=q.layers, num_local_experts=4, **sizes
    )
    return _causal(config)(q.rows)


def t5(q: Question) -> Parts:
    config = _t5(
        d_model=q.width,
        d_ff=2 * q.width,
        num_layers=q.layers,
        num_heads=4,
        d_kv=32,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )
    return lambda: AutoModelForSeq2SeqLM.from_config(config), _text_loss, _text(q.rows)


def bert(q: Question) -> Parts:
    config = BertConfig(
        hidden_size=q.width,
        intermediate_size=4 * q.width,
        num_hidden_layers=q.layers,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
    )
    return lambda: AutoModelForMaskedLM.from_config(config), _text_loss, _text(q.rows)


def _images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(rows, 3, 64, 64), "labels": torch.zeros(rows, dtype=torch.long)}


def vit(q: Question) -> Parts:
    config = _vit(
        hidden_size=q.width,
        intermediate_size=4 * q.width,
        num_hidden_layers=q.layers,
        num_attention_heads=4,
        image_size=64,
        num_labels=10,
    )
    return lambda: AutoModelForImageClassification.from_config(config), _text_loss, _images(q.rows)


def resnet(q: Question) -> Parts:
    config = _resnet(
        embedding_size=q.width // 4, hidden_sizes=[q.width, 2 * q.width], depths=[q.layers, 2], num_labels=10
    )
    return lambda: AutoModelForImageClassification.from_config(config), _text_loss, _images(q.rows)


def perceptron(q: Question) -> Parts:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(q.width, q.width), nn.GELU()) for _ in range(4 * q.layers)))

    return build, lambda model, batch: functional.mse_loss(model(batch), batch), torch.zeros(8 * q.rows, q.width)


FAMILIES: tuple[Callable[[Question], Parts], ...] = (gpt2, llama, qwen3, mixtral, t5, bert, vit, resnet, perceptron)


def drawn(number: int) -> Question:
    """Draws a question; every sixth is for several ranks."""
    draw = random.Random(number)
    has_ranks = number % 6 == 5
    optimizer = draw.choice(("SGD", "AdamW", "Adam", "RMSprop"))
    wishes: dict[str, Any] = {"allow": draw.choice(ALLOWANCES) - ({"int8-state"} if optimizer == "SGD" else set())}
    if draw.random() < 0.3:
        wishes["max_grad_norm"] = 1.0
    if has_ranks:
        wishes["ranks"] = draw.choice((2, 4, 8))
    elif draw.random() < 0.2:
        wishes["lines"] = True
    elif draw.random() < 0.2:
        wishes["durability"] = "step"
    if not has_ranks and draw.random() < 0.2:
        wishes["host_limit"] = "64MiB"
    if "lines" in wishes:
        wishes.pop("max_grad_norm", None)
    return Question(
        family=draw.choice(FAMILIES).__name__,
        width=draw.choice((128, 256, 512)),
        layers=draw.randint(2, 6),
        rows=draw.choice((4, 8, 12)),
        optimizer=optimizer,
        machine=draw.choice(LINKED if has_ranks else MACHINES),
        share=draw.choice((0.02, 0.1, 0.3, 0.6, 0.9)),
        wishes=wishes,
    )


def _words(advice: Advice | memfit.MemfitError) -> Any:
    """Returns an answer as JSON has it; a refusal as its text."""
    if isinstance(advice, memfit.MemfitError):
        return f"{type(advice).__name__}: {advice}"
    return {
        "plan": json.loads(advice.plan.to_json()),
        "peak_bytes": advice.timeline.peak_bytes,
        "seconds": float(f"{advice.timeline.seconds:.9g}"),
        "reason": advice.reason,
        "front": [(point.name, point.peak_bytes, float(f"{point.seconds:.9g}")) for point in advice.front],
    }


def answer(question: Question) -> dict[str, Any]:
    """Returns the answers without a limit, with a limit that is too small, and with a limit between."""
    build, loss, batch = next(each for each in FAMILIES if each.__name__ == question.family)(question)

    def ask(limit: int | None) -> Advice | memfit.MemfitError:
        torch.manual_seed(0)
        model = memfit.empty(build)
        optimizer = getattr(torch.optim, question.optimizer)(model.parameters(), lr=1e-3)
        try:
            return advise(model, optimizer, loss, batch, limit=limit, hardware=question.machine, **question.wishes)
        except memfit.MemfitError as error:
            return error

    whole = ask(None)
    if question.machine == PROCESSOR:
        # Limits there begin with the bytes that this process holds, which differ from run to run.
        words = _words(whole)
        if isinstance(whole, Advice):
            del words["reason"]
        return {"without a limit": words}
    least = ask(1 << 20)
    answers = {"without a limit": _words(whole), "1 MiB": _words(least)}
    smallest = getattr(least, "smallest_limit_bytes", None)
    if isinstance(whole, Advice) and smallest is not None:
        limit = int(smallest + question.share * max(whole.predicted_peak_bytes - smallest, 0))
        answers[f"{limit} bytes"] = _words(ask(limit))
    return answers


def question_text(number: int) -> str:
    """Returns a question as the file of answers names it."""
    question = drawn(number)
    wishes = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in question.wishes.items()}
    return repr(replace(question, wishes=wishes)).removeprefix("Question")


def read_answers() -> dict[str, Any]:
    """Returns the answers on file: number -> {"question", "answer"}."""
    return json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", type=int, nargs="*", help="numbers of questions")
    asked, answers = parser.parse_args(), read_answers()
    for number in asked.only if asked.only is not None else range(QUESTIONS):
        answers[str(number)] = {"question": question_text(number), "answer": answer(drawn(number))}
        print(number, question_text(number), flush=True)
    ANSWERS.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sys.exit(0)
