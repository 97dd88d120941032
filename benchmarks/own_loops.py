"""Cost of a loop of one's own under `job.lines()`, and transformers' Trainer inside a limit.

`python benchmarks/own_loops.py cost [33M]`: CPU milliseconds a step of a resident 5.8M Llama (2 x 64 tokens, AdamW, clipped), or
of one of 33M (4 x 128 tokens), plain, under `job.lines()`, and by `job.step`. They take turns in one process, behind 17 steps
each; the share is the median of the rounds' shares, each of neighbours in time.
`python benchmarks/own_loops.py trainer plain|900MiB`: a 33M Llama in `Trainer` (2 x 4 x 128 tokens, evaluation and saves), as it
is or inside a limit of the whole process: its peak, CPU seconds and losses; a process for each.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import memfit  # first: settings that torch reads when it is loaded
from memfit.integrations.transformers import MemfitTrainer

WARM = 17


def llama(vocabulary: int, width: int, inner: int, layers: int, heads: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads
        )
    ).train()  # fmt: skip


def cost(*, is_small: bool) -> None:
    rounds, steps = (21, 4) if is_small else (7, 2)
    words = torch.randint(0, 2048, (2, 64) if is_small else (4, 128))
    batch = {"input_ids": words, "labels": words}

    def build() -> Any:
        return llama(2048, 256, 688, 6, 4) if is_small else llama(8192, 512, 1376, 8, 8)

    def fitted(**options: Any) -> tuple[Any, torch.optim.Optimizer, memfit.Job]:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, memfit.fit(model, optimizer, lambda m, b: m(**b).loss, batch, **options)

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def run() -> None:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return run

    plain = build()
    own_model, own_optimizer, own_job = fitted(lines=True)
    _, _, step_job = fitted(max_grad_norm=1.0)
    ways: dict[str, Callable[[], object]] = {
        "plain": loop(plain, torch.optim.AdamW(plain.parameters())),
        "job.lines": loop(own_model, own_optimizer),
        "job.step": lambda: step_job.step(batch),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with own_job.lines():
        # A job's first 16 steps are measured action by action, then one of 16.
        for way in ways.values():
            for _ in range(WARM):
                way()
        for _ in range(rounds):
            for name, way in ways.items():
                began = time.process_time()
                for _ in range(steps):
                    way()
                taken[name].append(1e3 * (time.process_time() - began) / steps)
    for name, found in taken.items():
        share = statistics.median(one / plain for one, plain in zip(found, taken["plain"], strict=True))
        least = min(found) / min(taken["plain"])
        print(
            f"{name:10} {statistics.median(found):7.1f} ms a step, {share:.2f} of plain ({least:.2f} by the least); {min(found):.1f} to {max(found):.1f}"
        )


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of words, equal in every run."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(3, 8000, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def trainer(limit: str) -> None:
    model = llama(8000, 512, 1376, 8, 8)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, logging_steps=1,
            eval_strategy="steps", eval_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
        )  # fmt: skip
        data: dict[str, Any] = {"train_dataset": Rows(64), "eval_dataset": Rows(8)}
        began = time.process_time()
        if limit == "plain":
            made: Any = Trainer(model, arguments, **data)
            made.train()
        else:
            made = MemfitTrainer(model, arguments, **data, memfit={"limit": limit})
            made.train()
            print(made.job.reason, made.job.proof(), sep="\n")
        print(
            f"{limit}: peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB, {time.process_time() - began:.1f} s of CPU"
        )
        print([entry.get("loss", entry.get("eval_loss")) for entry in made.state.log_history])


if __name__ == "__main__":
    if sys.argv[1] == "cost":
        cost(is_small="33M" not in sys.argv)
    else:
        trainer(sys.argv[2])
