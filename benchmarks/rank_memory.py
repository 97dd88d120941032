"""Memory of each rank by ZeRO's stages, predicted and measured: the table of the ZeRO paper.

A tower of linear layers under AdamW, every rank on an emulated device of its own (tensors alone
count), 2 to 4 Gloo ranks of this machine. *Resting* is what a rank holds of weights, gradients and
optimizer states between two steps, *step* the most at any action of a step, *actions* the least and
the most that an action was predicted over what was measured in it; each as predicted for the rank
that has most and as the allocator has counted it on the rank and in the step that had most, the
first one included, in which the optimizer makes its states. The closed
form is the paper's (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", section 5 and figure 1), with 4 bytes a weight, 4 a gradient and 8 of states; in
bf16 2, 4 (sums of gradients are fp32 here; the paper has 2) and K = 12.

    OMP_NUM_THREADS=1 python benchmarks/rank_memory.py

Writes `benchmarks/results/rank_memory.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn

from distributed.processes import Ranks

LAYERS, WIDTH, ROWS, STEPS = 24, 768, 8, 3
STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
# Bytes a parameter of weights, gradients and states.
BYTES = {"fp32": (4, 4, 8), "bf16": (2, 4, 12)}


def build() -> nn.Module:
    """The tower: 14 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def closed_form(psi: int, ranks: int, stage: int, precision: str) -> int:
    """Bytes that a rank holds, as the paper has them."""
    weights, gradients, states = BYTES[precision]
    cut = [states, gradients, weights]
    return sum(psi * each // (ranks if number < stage else 1) for number, each in enumerate(cut))


def measure(rank: int, size: int, stage: int, precision: str, k: int) -> dict[str, Any]:
    """Trains some steps; returns bytes between two, and by action the most in any."""
    import memfit
    from distributed.training import plan_for

    gc.collect()  # of the case before
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    more = {} if precision == "fp32" else {"compute_dtype": "bfloat16"}
    job = memfit.fit(
        model,
        optimizer,
        lambda given, batch: (given(batch) - 0.3).square().mean(),
        rows,
        plan=plan_for(model, size, stage, "device", k, **more),
        enforce=False,
        emulate_device=True,
        allow=set() if precision == "fp32" else {"bf16"},
    )
    measured: list[list[int]] = []
    for _ in range(STEPS):
        job.step(rows)
        step = job._runner.measured  # noqa: SLF001, a benchmark of what is inside
        assert step is not None
        measured.append([moment.peak_bytes for moment in step.timeline.moments])
    predicted = job._assembly.planned.prepared.timeline.moments  # noqa: SLF001
    first = predicted[0]
    batch = sum(first.by_category.get(name, 0) for name in ("transient", "activation", "staging"))
    job.close()
    return {
        "resting predicted": first.peak_bytes - batch,
        "resting measured": measured[-1][0] - rows.nbytes,
        "actions": [moment.action for moment in predicted],
        "predicted": [moment.peak_bytes for moment in predicted],
        "measured": [max(peaks) for peaks in zip(*measured, strict=True)],
    }


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's row: of all ranks."""
    row = {key: max(each[key] for each in found) for key in ("resting predicted", "resting measured")}
    predicted, measured = [
        [max(peaks) for peaks in zip(*(each[key] for each in found), strict=True)] for key in ("predicted", "measured")
    ]
    over = [(a / b, name) for a, b, name in zip(predicted, measured, found[0]["actions"], strict=True)]
    return row | {
        "step predicted": max(predicted),
        "step measured": max(measured),
        "actions": [round(ratio, 5) for ratio in (min(over)[0], max(over)[0])],
        "highest action": max(over)[1],
    }


def main() -> None:
    """Measures all cases, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rank_memory.json")
    options = parser.parse_args()
    psi = sum(p.numel() for p in build().parameters())
    rows: list[dict[str, Any]] = []
    ranks = Ranks()
    try:
        cases = [("fp32", n, 1) for n in (2, 3, 4)] + [("fp32", 2, 3), ("bf16", 2, 1), ("bf16", 3, 1)]
        for precision, size, k in cases:
            for stage, name in enumerate(STAGES):
                found = ranks.run(size, "rank_memory:measure", stage, precision, k, timeout_s=300.0)
                row = {"precision": precision, "ranks": size, "k": k, "stage": name}
                row["closed form"] = closed_form(psi, size, stage, precision)
                rows.append(row | joined(found))
                print(rows[-1], flush=True)
    finally:
        ranks.close()
    pairs = {
        "resting, predicted over closed form": ("resting predicted", "closed form"),
        "resting, predicted over measured": ("resting predicted", "resting measured"),
        "step, predicted over measured": ("step predicted", "step measured"),
    }
    summary = {
        name: [round(pick(row[one] / row[other] for row in rows), 4) for pick in (min, max)]
        for name, (one, other) in pairs.items()
    }
    summary["actions, predicted over measured"] = [
        min(row["actions"][0] for row in rows), max(row["actions"][1] for row in rows),
    ]  # fmt: skip
    options.out.write_text(
        json.dumps({"psi": psi, "summary": summary, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
