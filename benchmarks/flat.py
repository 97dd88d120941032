"""Long streamed training holds no more at its end than after its third step.

    .venv/bin/python benchmarks/flat.py --steps 300

A small GPT (4 layers of width 768, vocabulary 8192) with weights, states and held arguments on disk, recompute, 4 microbatches. After each step: live
bytes and blocks of memfit's allocator (exact), resident memory, open descriptors, threads and bytes of files (as the operating system counts them).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import common

FIRST_FLAT_STEP = 3
MOST_RESIDENT_GROWTH = 0.01


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the process holds after a step; `resident_bytes` may waver, the rest may not."""

    live_bytes: int
    live_blocks: int
    descriptors: int
    threads: int
    files_bytes: int
    resident_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="a row; 4 rows")
    parser.add_argument("--directory", type=Path, help="for the homes on disk (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    arguments = parser.parse_args()
    if arguments.steps <= FIRST_FLAT_STEP:
        parser.error(f"--steps must be above {FIRST_FLAT_STEP}")
    directory = Path(tempfile.mkdtemp(prefix="memfit-flat-", dir=arguments.directory))
    shape = common.Shape(layers=arguments.layers, vocabulary=8192, rows=4, tokens=arguments.tokens)
    try:
        held = train(shape, arguments.steps, directory)
    finally:
        shutil.rmtree(directory)
    rows, is_flat = compare(held)
    print(common.table(["", f"after step {FIRST_FLAT_STEP}", f"after step {len(held)}", "least", "most", "flat"], rows))
    if arguments.out is not None:
        found: dict[str, Any] = {
            "machine": common.machine(),
            "shape": asdict(shape),
            "steps": [asdict(h) for h in held],
        }
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_flat else 1


def train(shape: common.Shape, steps: int, directory: Path) -> list[Held]:
    """Trains and looks after each step."""
    import torch

    import memfit
    from memfit.core.plan import CallPlan, Plan
    from memfit.core.saved_policies import Saved
    from memfit.core.tiers import Tier
    from memfit.devices.binding import install
    from memfit.integrations.recipes.gpt import build_adamw, causal_language_loss
    from memfit.machine.meters import ProcessMeter

    allocator, meter = install(), ProcessMeter()
    model = common.build_gpt(shape)
    optimizer = build_adamw(model, learning_rate=1e-4)
    sample = common.token_batch(shape.rows, shape.tokens, shape.vocabulary, 0)
    profile = memfit.profile(model, optimizer, causal_language_loss, sample, microbatches=(4,))
    fate = CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.DISK)
    calls = next(iter(profile.traces.values())).calls
    plan = Plan(
        microbatches=4,
        blocks=common.on_disk(profile),
        calls=tuple(fate if call.is_repeated else CallPlan() for call in calls),
        tail=common.tail_of(profile),
    )
    job = memfit.fit(
        model, optimizer, causal_language_loss, sample, plan=plan, limit="8GiB", directory=directory / "homes"
    )
    held: list[Held] = []
    torch.manual_seed(0)
    for step in range(steps):
        # A batch that lives on into the count would be a tensor of the user's, so it is dropped before.
        job.step(common.token_batch(shape.rows, shape.tokens, shape.vocabulary, step))
        stats = allocator.stats()
        held.append(
            Held(
                live_bytes=stats.live_bytes,
                live_blocks=stats.live_blocks,
                descriptors=len(list(Path("/proc/self/fd").iterdir())),
                threads=threading.active_count(),
                files_bytes=sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file()),
                resident_bytes=meter.resident_bytes().private_bytes,
            )
        )
        if (step + 1) % 50 == 0:
            print(f"  step {step + 1} of {steps}: {held[-1]}", file=sys.stderr, flush=True)
    job.close(restore=False)
    return held


def compare(held: list[Held]) -> tuple[list[list[object]], bool]:
    """A row a figure, from the third step on, and whether all are flat."""
    flat = held[FIRST_FLAT_STEP - 1 :]
    rows: list[list[object]] = []
    verdicts: list[bool] = []
    for field in fields(Held):
        values = [getattr(h, field.name) for h in flat]
        if field.name == "resident_bytes":
            half = len(values) // 2
            verdicts.append(max(values[half:]) <= max(values[:half]) * (1 + MOST_RESIDENT_GROWTH))
        else:
            verdicts.append(len(set(values)) == 1)
        words = field.name.replace("_", " ")
        rows.append(
            [
                words,
                *(f"{n:,}" for n in (values[0], values[-1], min(values), max(values))),
                "yes" if verdicts[-1] else "NO",
            ]
        )
    return rows, all(verdicts)


if __name__ == "__main__":
    sys.exit(main())
