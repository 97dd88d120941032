"""CPU-seconds that a batch of a new shape takes before it can run, and that `fit` takes, first and again, by models and layers.

    python benchmarks/new_shapes.py
    python benchmarks/new_shapes.py --models gpt2 --layers 16 --out benchmarks/results/new-shapes.json

Tiny widths: what is measured is the work of a trace, which goes by operations and not by elements. `time.process_time` of one thread, the best of several shapes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import common

WORDS, ROWS, PLACES = 512, 8, 32
# Room for everything: `fit` probes the disk, tries the loss on rows and looks for a plan.
LIMIT = "4GiB"


def build(name: str, layers: int) -> Any:
    """A model of a width of 64 in training mode, with its dropout."""
    import transformers

    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=WORDS, **tokens)
        return transformers.GPT2LMHeadModel(config).train()
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=WORDS, **tokens
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def measure(name: str, layers: int, shapes: int) -> dict[str, Any]:
    """Seconds of one model: of a `fit` that looks for a plan, and of batches of new shapes under it."""
    import torch

    import memfit

    def batch(places: int) -> torch.Tensor:
        return torch.randint(1, WORDS, (ROWS, places))

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    def fit() -> tuple[Any, float]:
        torch.manual_seed(0)
        model = build(name, layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        began = time.process_time()
        job = memfit.fit(model, optimizer, loss, batch(PLACES), limit=LIMIT)
        return job, time.process_time() - began

    first, fit_s = fit()
    first.close()
    job, again_s = fit()
    job.step(batch(PLACES))
    assembly, found = job._assembly, []  # noqa: SLF001, the look at a batch alone, without its step
    for index in range(shapes):
        tokens = batch(PLACES + 1 + index)
        began = time.process_time()
        assembly.shapes.try_batch(tokens)
        found.append(time.process_time() - began)
    job.close()
    return {
        "model": name,
        "layers": layers,
        "fit_s": round(fit_s, 3),
        "fit_again_s": round(again_s, 3),
        "least_s": round(min(found), 3),
        "median_s": round(statistics.median(found), 3),
        "shapes": shapes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--layers", default="2,16,32")
    parser.add_argument("--shapes", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [(name, int(layers)) for name in arguments.models.split(",") for layers in arguments.layers.split(",")]
    measure(cases[0][0], 1, 1)  # what is imported and compiled once
    rows = []
    for name, layers in cases:
        rows.append(measure(name, layers, arguments.shapes))
        print(rows[-1], file=sys.stderr, flush=True)
    keys = ["model", "layers", "fit_s", "fit_again_s", "least_s", "median_s"]
    print(common.table(keys, [[row[key] for key in keys] for row in rows]))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": common.machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
