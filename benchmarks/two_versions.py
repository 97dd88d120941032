"""Seconds a step of this version of memfit beside those of another one, in turns.

    git worktree add /tmp/old f6c4bdf
    .venv/bin/python benchmarks/two_versions.py --other /tmp/old/src --rounds 20

Each subject runs in a process of its own for either version, with memfit loaded from the given folder. All take steps in turn, and the
order turns around from round to round. A ratio is this version's median over the other's; "same" is this version beside itself (a second process),
which says what the machine's noise makes of a ratio of 1.

readme    README's ten lines: 32 layers of 1024 x 1024, AdamW, 64 rows, 640 MiB, the plan that each version chooses.
disk      a GPT-2 of 4 layers (width 256, vocabulary 4,096, 4 x 64 tokens), weights and states on disk.
resident  the same, all in memory.
small     200 layers of 64 x 64, weights and states on disk: what a visit costs beside its work.
lines     the same GPT-2 on disk in a loop of its own under `job.lines()`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common

SUBJECTS = ("readme", "disk", "resident", "small", "lines")
VERSIONS = ("this", "other", "same")
WARM = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="the folder that holds the other version's package")
    parser.add_argument("--only", action="append", choices=SUBJECTS)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    this = Path(__file__).resolve().parents[1] / "src"
    folders = {"this": this, "other": args.other.resolve(), "same": this}
    for subject in args.only or SUBJECTS:
        workers = {
            version: common.Worker(__file__, version, {"subject": subject}, {"PYTHONPATH": str(folders[version])})
            for version in VERSIONS
        }
        for version, worker in workers.items():
            assert Path(worker.hello["memfit"]).is_relative_to(folders[version]), worker.hello
        steps = common.interleave(list(workers.values()), args.rounds, warm_up=WARM, note=subject)
        for worker in workers.values():
            worker.close()
        for version in ("other", "same"):
            wall, cpu = (common.ratio(steps["this"], steps[version], clock) for clock in ("wall_s", "cpu_s"))
            print(f"{subject:9} this / {version:5}  wall {wall:.3f}  CPU {cpu:.3f}  ({args.rounds} rounds)", flush=True)


def serve(request: dict[str, Any]) -> None:
    import torch
    import transformers
    from torch import nn

    import memfit
    from memfit.core.plan import BlockPlan, Plan
    from memfit.core.tiers import Tier

    torch.manual_seed(0)
    subject, options = request["subject"], dict[str, Any]()
    if subject == "readme":
        model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))
        batch: Any = torch.randn(64, 1024)
        options["limit"] = "640MiB"
    elif subject == "small":
        model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200))), torch.randn(16, 64)
    else:
        config = transformers.GPT2Config(
            n_layer=4, n_embd=256, n_head=4, vocab_size=4096, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )  # fmt: skip
        model, batch = transformers.GPT2LMHeadModel(config).train(), torch.randint(4096, (4, 64))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if batch.is_floating_point():
            return (model(batch) - batch).square().mean()
        return model(input_ids=batch, labels=batch).loss

    optimizer = torch.optim.AdamW(model.parameters())
    if subject in ("disk", "small", "lines"):
        profile = memfit.profile(model, optimizer, loss, batch)
        at_home = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
        options["plan"] = Plan(blocks={block.name: at_home for block in profile.blocks}, prefetch=2)
    if subject == "resident":
        options["plan"] = Plan()
    if subject == "lines":
        options["lines"] = True
    job = memfit.fit(model, optimizer, loss, batch, **options)

    def line_step() -> float:
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    run = line_step if subject == "lines" else lambda: job.step(batch).loss
    with job.lines() if subject == "lines" else nullcontext():
        common.serve({"memfit": memfit.__file__}, {"step": lambda: timed(run)})
    job.close(restore=False, commit=False)


def timed(step: Callable[[], float]) -> common.Step:
    """Times a step by public names alone: modules of another version may lie elsewhere."""
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return common.Step(wall_s=wall, cpu_s=cpu, loss=loss, live_peak_bytes=None, process_peak_bytes=peak)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
