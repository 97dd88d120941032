"""Loss curves of every lossy choice beside fp32, on the same text in the same order.

A GPT of 0.3 M parameters (4 layers of width 64, vocabulary 512, untied head) reads 8 windows of 64 tokens of the Python standard library a step,
with the recipes' tokenizer, AdamW and warm-up. For each seed (of the weights and of the order of the text) every variant takes 500 steps. What is
kept: the mean loss of every ten steps, and the *final loss*, the mean of the last hundred.

The question is whether a variant ends where fp32 ends: `apart` is the mean over seeds of its final loss minus fp32's at the same seed, `spread` is
the standard deviation of fp32's final losses over seeds. A variant passes if |apart| is at most the spread.

    python benchmarks/curves.py --output benchmarks/results/curves.json            (adds what is missing there, prints the table)
    python benchmarks/curves.py --output benchmarks/results/curves.json --table    (prints only)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfit
from memfit.core.plan import Plan
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.integrations.recipes.gpt import build_adamw, build_warmup, causal_language_loss
from memfit.integrations.recipes.token_batches import TokenWindows, read_tokens

STEPS = 500
EVERY = 10
LAST = 100
SEEDS = (0, 1, 2)
VOCABULARY = 512
VARIANTS: dict[str, tuple[Plan, frozenset[str]]] = {
    "fp32": (Plan(), frozenset()),
    **{
        one.allowance: (Plan(state_format=one), frozenset({one.allowance}))
        for one in StateFormat
        if one is not StateFormat.GIVEN
    },
    "bf16": (Plan(compute_dtype=ComputeDtype.BFLOAT16), frozenset({"bf16"})),
    "bf16-weights-sr": (
        Plan(compute_dtype=ComputeDtype.BFLOAT16, drops_masters=True),
        frozenset({"bf16-weights-sr"}),
    ),
    "fp16": (Plan(compute_dtype=ComputeDtype.FLOAT16), frozenset({"fp16"})),
}


def build(seed: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=4, n_embd=64, n_head=4, n_positions=64, vocab_size=VOCABULARY, tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    model.loss_type = "ForCausalLM"
    return model.train()


def train(variant: str, seed: int, tokens: torch.Tensor) -> dict[str, Any]:
    plan, allow = VARIANTS[variant]
    model = build(seed)
    optimizer = build_adamw(model, learning_rate=3e-3)
    scheduler = build_warmup(optimizer, STEPS)
    windows = iter(TokenWindows(tokens=tokens, batch_size=8, sequence_length=64, seed=seed))
    began = time.process_time()
    losses: list[float] = []
    with memfit.fit(model, optimizer, causal_language_loss, next(windows), plan=plan, allow=allow) as job:
        for _ in range(STEPS):
            losses.append(job.step(next(windows)).loss)
            scheduler.step()
    means = [round(statistics.fmean(losses[i : i + EVERY]), 4) for i in range(0, STEPS, EVERY)]
    final = statistics.fmean(losses[-LAST:])
    return {"loss": means, "final": round(final, 5), "cpu_s": round(time.process_time() - began, 1)}


def print_table(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    exact = {seed: run["final"] for seed, run in found["fp32"].items()}
    spread = statistics.stdev(exact.values()) if len(exact) > 1 else float("nan")
    print(f"final loss of fp32 {', '.join(f'{final:.4f}' for final in exact.values())}; spread over seeds {spread:.4f}")
    print("| variant | final loss, by seed | apart from fp32 at the same seed, mean | largest | within the spread |")
    print("|---|---|---|---|---|")
    for name in VARIANTS:
        apart = {seed: run["final"] - exact[seed] for seed, run in found.get(name, {}).items() if seed in exact}
        if not apart:
            continue
        mean, largest = statistics.fmean(apart.values()), max(apart.values(), key=abs)
        text = ", ".join(f"{found[name][seed]['final']:.4f}" for seed in apart)
        print(f"| {name} | {text} | {mean:+.4f} | {largest:+.4f} | {'yes' if abs(mean) <= spread else 'no'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--table", action="store_true", help="print what is there")
    arguments = parser.parse_args()
    output: Path = arguments.output
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(output.read_text()) if output.exists() else {}
    if not arguments.table:
        tokens = read_tokens(VOCABULARY)
        for seed in arguments.seeds:
            for variant in arguments.variants:
                if str(seed) in found.setdefault(variant, {}):
                    continue
                found[variant][str(seed)] = train(variant, seed, tokens)
                print(variant, seed, found[variant][str(seed)]["final"], found[variant][str(seed)]["cpu_s"], flush=True)
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    print_table(found)


if __name__ == "__main__":
    main()
