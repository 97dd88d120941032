"""Kills of ranks at random instants: how soon every other rank knows, and what a run goes on with.

Ranks train, commit each step and save, over Gloo on this machine. One of them is killed (SIGKILL)
at a random instant; the others must end in the `PeerError` that names it. Then the run goes on with
another number of ranks, other homes and other cuts; at the end its weights and states are compared
with plain PyTorch, which adds the same ranks' gradients in the same order.

    OMP_NUM_THREADS=1 python benchmarks/rank_kills.py --kills 50 --seed 0

Writes `benchmarks/results/rank_kills.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from distributed.processes import Ranks

LONG_S = 100.0
HOMES = ((3, "disk"), (3, "device"), (1, "device"), (2, "disk"), (0, "device"))
SIZES = (2, 3)


def one_kill(ranks: Ranks, draw: random.Random, run: Path, turn: int, made: list[int]) -> dict[str, Any]:
    """Lets ranks train, kills one, and returns what the others said; notes which ranks made each step."""
    size, (stage, tier) = draw.choice(SIZES), draw.choice(HOMES)
    victim, delay = draw.randrange(size), draw.uniform(0.0, 2.5)
    started = run.parent / f"started-{turn}"
    ranks.begin(size, "distributed.storing:endless", str(run), stage, tier, str(started), timeout_s=LONG_S)
    deadline = time.time() + 60
    while time.time() < deadline and not all(Path(f"{started}-{rank}").exists() for rank in range(size)):
        time.sleep(0.02)
    time.sleep(delay)
    at = time.time()
    os.kill(ranks.pid(victim), signal.SIGKILL)
    told: list[tuple[str, float]] = []
    for rank in range(size):
        is_good, answer = ranks.answer(rank)
        if rank == victim:
            continue
        assert is_good, (turn, rank, answer)
        done, error, when = answer
        # Which ranks made a step is known from the run that goes on behind it.
        del made[done:]
        told.append((error, when - at))
    made += [size] * 10_000
    return {
        "ranks": size, "stage": stage, "tier": tier, "victim": victim,
        "named": all(f"rank {victim} was lost" in error for error, _ in told),
        "errors": sorted({error.partition(":")[0] for error, _ in told}),
        "seconds": [round(seconds, 4) for _, seconds in told],
    }  # fmt: skip


def main() -> None:
    """Runs the kills, and goes on with the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rank_kills.json")
    options = parser.parse_args()
    draw, ranks, kills, made = random.Random(options.seed), Ranks(), list[dict[str, Any]](), list[int]()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        try:
            for turn in range(options.kills):
                kills.append(one_kill(ranks, draw, run, turn, made))
                print(turn, kills[-1], flush=True)
            ends = {}
            # 4 -> 2 -> 3, from the last common step of the last kill.
            for size, (stage, tier) in ((4, HOMES[0]), (2, HOMES[2]), (3, HOMES[0])):
                found = ranks.run(size, "distributed.storing:two_more", str(run), stage, tier, made[:10_000])
                done, differing = found[0]
                assert found == [(done, differing)] * size, found
                del made[done:]
                made += [size] * 2
                ends[f"{size} ranks"] = {"steps": done + 2, "differing": differing}
                print(ends, flush=True)
        finally:
            ranks.close()
    seconds = sorted(s for kill in kills for s in kill["seconds"])
    summary = {
        "kills": len(kills), "others": len(seconds), "median_s": statistics.median(seconds), "most_s": seconds[-1],
        "named": sum(kill["named"] for kill in kills), "went_on": ends,
    }  # fmt: skip
    options.out.write_text(json.dumps({"summary": summary, "kills": kills}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
