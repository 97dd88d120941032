"""A built-in recipe in an ordinary PyTorch loop, without memfit's engine: what every other run is compared with.

    .venv/bin/python examples/plain_loop.py --recipe gpt-tiny --steps 20

`--microbatches` accumulates gradients over that many slices of the batch, as one would by hand.
"""

from __future__ import annotations

import argparse
import time

from memfit.integrations.recipes.gpt import RECIPES, find_recipe


def main() -> None:
    """Trains and prints one line a step."""
    parser = argparse.ArgumentParser(description="A built-in recipe in a plain PyTorch loop.")
    parser.add_argument("--recipe", default="gpt-tiny", choices=[recipe.name for recipe in RECIPES])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    recipe = find_recipe(arguments.recipe)
    model = recipe.build_model(arguments.seed)
    optimizer = recipe.build_optimizer(model)
    scheduler = recipe.build_scheduler(optimizer, arguments.steps)
    batches = recipe.batches(arguments.seed)
    losses: list[float] = []
    for step in range(1, arguments.steps + 1):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        batch = next(batches)
        total = 0.0
        for rows in batch.chunk(arguments.microbatches):
            # A slice's mean counts by its share of the rows: the sum is the mean over the whole batch.
            loss = recipe.loss(model, rows) * (len(rows) / len(batch))
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        print(f"step {step}/{arguments.steps}  loss {total:.4f}  {wall_s:.2f} s  {cpu_s:.2f} CPU-s", flush=True)
    last = losses[-3:]
    print(f"mean of the last {len(last)} losses is {losses[0] - sum(last) / len(last):.4f} nats below the first")


if __name__ == "__main__":
    main()
