"""Bits of training on ranks: a grid of models, ZeRO's stages, tiers and optimizers against PyTorch.

Each case trains some steps under memfit on Gloo ranks of this machine and again in another way, and
compares all weights bit by bit, on every rank:

- on two ranks against FSDP2 (`set_requires_gradient_sync(False)` until the last microbatch): four
  models, ZeRO-1, 2 and 3, resting on the device, on the host beside an emulated device and on disk,
  one microbatch and three; with SGD; in bf16 against its `MixedPrecisionPolicy`;
- one microbatch on two, three and four ranks against one process that adds the ranks' gradients up
  in their order; tied weights too;
- on two ranks against `DistributedDataParallel` and `ZeroRedundancyOptimizer`;
- Muon, whose shares are whole parameters, and states in eight bits, against memfit on one process,
  weights and states.

    OMP_NUM_THREADS=1 python benchmarks/rank_bits.py

Writes `benchmarks/results/rank_bits.json`: of each case the names of what differs, or the error.
With `--only` the rows of other groups stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from distributed.processes import RankFailedError, Ranks

MODELS = ("llama", "gpt2 untied", "bert", "vit")
STAGES = (1, 2, 3)
TIERS = ("device", "host", "disk")
AGAINST = "distributed.training:against"
IN_BF16 = {"allow": {"bf16"}, "plan": {"compute_dtype": "bfloat16"}}


def _options(tier: str) -> dict[str, Any]:
    return {"emulate_device": True} if tier == "host" else {}


def cases() -> Iterator[tuple[str, int, str, tuple[Any, ...], dict[str, Any]]]:
    """Yields (group, ranks, function, arguments, keywords)."""
    for name in MODELS:
        for stage in STAGES:
            for tier in TIERS:
                for k in (1, 3):
                    yield "FSDP2", 2, AGAINST, ("fsdp", name, "adamw", stage, tier, k), _options(tier)
        for stage in STAGES:
            for k in (1, 3):
                yield "FSDP2, SGD", 2, AGAINST, ("fsdp", name, "sgd", stage, "device", k), {}
                yield "FSDP2, bf16", 2, AGAINST, ("fsdp in bf16", name, "adamw", stage, "device", k), IN_BF16
        yield "DDP", 2, AGAINST, ("ddp", name, "adamw", 0, "device", 1), {}
        yield "ZeroRedundancyOptimizer", 2, AGAINST, ("zero redundancy optimizer", name, "adamw", 1, "device", 1), {}
    for name in (*MODELS, "gpt2"):
        for size in (2, 3, 4):
            for stage in (0, *STAGES):
                for tier in TIERS:
                    arguments = (name, "adamw", stage, tier, 1, 2, _options(tier))
                    yield "one process", size, "distributed.training:train", arguments, {}
    for kind in ("muon", "int8"):
        for size in (2, 3):
            for stage in (0, *STAGES):
                for tier in ("device", "disk"):
                    yield f"one process, {kind}", size, "distributed.training:like_one_job", (kind, stage, tier), {}


def main() -> None:
    """Runs the grid, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rank_bits.json")
    parser.add_argument("--only", default="", help="groups that begin with this")
    options = parser.parse_args()
    before = (
        json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.only and options.out.exists() else []
    )
    rows: list[dict[str, Any]] = [row for row in before if not row["against"].startswith(options.only)]
    ranks, begun_s = Ranks(), time.perf_counter()
    try:
        for group, size, function, arguments, keywords in cases():
            if not group.startswith(options.only):
                continue
            row: dict[str, Any] = {"against": group, "ranks": size, "case": [*arguments[:6]]}
            try:
                found = ranks.run(size, "distributed.test_training:call", function, arguments, keywords)
                row["differs"] = sorted({name for told in found for name in told})
            except RankFailedError as error:
                row["error"] = str(error).splitlines()[0][:500]
            rows.append(row)
            if row.get("differs") or "error" in row:
                print(row, flush=True)
    finally:
        ranks.close()
    made = Counter(row["against"] for row in rows)
    equal = Counter(row["against"] for row in rows if row.get("differs") == [])
    summary = {group: f"{equal[group]} of {count} with the same bits" for group, count in made.items()}
    print(json.dumps(summary, indent=1), f"{time.perf_counter() - begun_s:.0f} s")
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    text = f'{{"summary": {json.dumps(summary, indent=2)},\n "rows": [\n  {lines}\n ]}}\n'
    options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
