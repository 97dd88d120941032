"""Random plans for random models: are the tensors of a step ever above what was predicted of it?

    .venv/bin/python benchmarks/plan_peaks.py --seed 1 --cases 200 --out benchmarks/results/plan-peaks-1.json
    .venv/bin/python benchmarks/plan_peaks.py --seed 1 --only 17

A case is a model, an optimizer and a plan, all drawn from the seed and its number: a home for each block's weights, gradients and states, a fate for each
call, segments, order, time of updates, tail, prefetch, one to three microbatches; a norm that is clipped, bf16, the user's own autocast, parameter groups.
Three steps; what the allocator under torch counted in them beside what was predicted. A failure is a measured peak above the predicted one by more than 1 % or
2 MiB, whichever is larger, or an error that is none of memfit's refusals. Each case is a fork of a process that has loaded torch and transformers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
from sweep import commit, in_a_fork

MOST_ABOVE, MOST_ABOVE_BYTES = 1.01, 2 * common.MIB
STEPS = 3
Row = dict[str, Any]


def draw(seed: int, number: int) -> Row:
    """The case of that number, but for its plan, which needs the model's profile."""
    from limiting.wide import OPTIMIZERS, WIDE

    rng = random.Random(f"plans {seed}/{number}")
    family, config, batch, sizes = rng.choice(WIDE)(rng)
    # Plain PyTorch does not bear its own autocast over bf16 weights everywhere.
    way = rng.choices(("plain", "autocast", "bf16"), weights=(65, 15, 20))[0]
    return {
        "number": number, "family": family, "config": config, "batch": batch, "sizes": sizes, "optimizer": rng.choice(OPTIMIZERS),
        "microbatches": rng.choice((1, 1, 2, 2, 3)), "clip": rng.choice((None, None, 1.0)), "grouped": rng.random() < 0.2,
        "autocast": "bfloat16" if way == "autocast" else None, "bf16": way == "bf16", "has_host": rng.random() < 0.5,
    }  # fmt: skip


def measure(seed: int, case: Row) -> Row:
    """Trains under the case's plan; predicted and measured bytes, or the refusal."""
    import torch

    import memfit
    from limiting.building import build_batch, build_loss, build_model, build_optimizer
    from memfit.core.hardware import Hardware, Link, TierSpec
    from memfit.core.storage_formats import ComputeDtype
    from memfit.core.tiers import Tier
    from memfit.devices.binding import install
    from memfit.step.lower import lower
    from memfit.step.predict import predict
    from sweeping.drawing import draw_plan, relaxed
    from sweeping.tracing import traced_once

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    install()
    rng = random.Random(f"plan {seed}/{case['number']}")
    family, microbatches = tuple(case["family"]), min(case["microbatches"], case["sizes"][0])
    torch.manual_seed(0)
    loss, batch = build_loss(family, case["batch"], case["autocast"]), build_batch(case["batch"], tuple(case["sizes"]))

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = build_model(family, case["config"])
        name, settings = case["optimizer"]
        return model, build_optimizer(name, settings, model, grouped=case["grouped"])

    refusal, known = "", {}
    link = Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    tiers = {Tier.DEVICE: TierSpec(nbytes=1 << 34), Tier.DISK: TierSpec(nbytes=1 << 36, link=link)}
    if case["has_host"]:
        tiers[Tier.HOST] = TierSpec(nbytes=1 << 34, link=link)
    hardware = Hardware(device="cpu", flops_per_s=1e10, tiers=tiers)
    try:
        model, optimizer = make()
        with traced_once(known):
            profile = memfit.profile(model, optimizer, loss, batch, microbatches=[microbatches])
        plan = draw_plan(profile, microbatches, rng, has_host=case["has_host"])
    except memfit.MemfitError as error:
        return {"outcome": "refused", "detail": f"{type(error).__name__}: {error}"[:400]}
    del profile
    for what, wider in (("", plan), *relaxed(plan)):
        tried = replace(wider, compute_dtype=ComputeDtype.BFLOAT16) if case["bf16"] else wider
        with tempfile.TemporaryDirectory() as directory, traced_once(known):
            try:
                job = memfit.fit(
                    model, optimizer, loss, batch, plan=tried, directory=Path(directory) / "homes", emulate_device=case["has_host"],
                    hardware=hardware,
                    max_grad_norm=case["clip"], allow={"nonadditive-loss", "bf16"} if case["bf16"] else {"nonadditive-loss"},
                )  # fmt: skip
            except memfit.MemfitError as error:
                refusal = f"{what}: {type(error).__name__}: {error}"[:400]
                model, optimizer = make()
                continue
            # Staging of the disk's threads is no tensor.
            timeline = predict(lower(job.schedule, job.plan, job.profile, staging_bytes=0))
            for _ in range(STEPS):
                job.step(batch)
            peaks = {record.name: record.peak_bytes for record in job.proof().phases}
            measured = max(peak for name, peak in peaks.items() if "step" in name or name == "steady")
            others = {name: peak for name, peak in peaks.items() if not ("step" in name or name == "steady")}
            predicted = timeline.peak_bytes
            job.close(restore=False)
            bad = measured > max(predicted * MOST_ABOVE, predicted + MOST_ABOVE_BYTES)
            at = max(timeline.moments, key=lambda moment: moment.peak_bytes)
            return {
                "outcome": "ABOVE" if bad else "holds", "measured": measured, "predicted": predicted, "others": others, "changed": what,
                "at": at.action, "parts": {name: count for name, count in at.by_category.items() if count}, "plan": json.loads(tried.to_json()),
            }  # fmt: skip
    return {"outcome": "refused", "detail": refusal}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--only", type=int, action="append", help="cases of these numbers (may be repeated)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    arguments = parser.parse_args()
    import torch
    import transformers

    import memfit.api  # noqa: F401 - loaded once, for all forks

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for number in arguments.only or range(arguments.cases):
        case, began = draw(arguments.seed, number), time.monotonic()

        def work(case: Row = case) -> list[Row]:
            return [measure(arguments.seed, case)]

        found, ended = in_a_fork(work, 300.0)
        row = {**case, **(found[0] if found else {"outcome": "FAILED", "detail": ended})}
        rows.append(row)
        print(_row_text(row), f"{time.monotonic() - began:.0f} s", flush=True)
        if arguments.out is not None:
            head = {"command": "python benchmarks/plan_peaks.py " + " ".join(sys.argv[1:]), "commit": commit()}
            kept = [{name: value for name, value in row.items() if name != "plan"} for row in rows]
            arguments.out.write_text(json.dumps({**head, "machine": common.machine(), "rows": kept}, indent=0) + "\n")
    bad = [row["number"] for row in rows if row["outcome"] in ("ABOVE", "FAILED")]
    ratios = sorted(row["measured"] / row["predicted"] for row in rows if "measured" in row)
    print(f"{len(rows)} cases, {len(ratios)} measured; above or failed: {bad or 'none'}")
    if ratios:
        print(
            f"measured / predicted: least {ratios[0]:.3f}, median {ratios[len(ratios) // 2]:.3f}, most {ratios[-1]:.3f}"
        )
    return 1 if bad else 0


def _row_text(row: Row) -> str:
    name = row["config"].get("kind") or row["family"][1]
    words = f"{row['number']:4d} {name:30s} {row['optimizer'][0]:9s} x{row['microbatches']} {row['outcome']:8s}"
    if "measured" in row:
        gap = row["measured"] - row["predicted"]
        return f"{words} {row['measured'] / common.MIB:7.2f} of {row['predicted'] / common.MIB:7.2f} ({gap / common.MIB:+.2f}) {row['at']}"
    return f"{words} {row['detail'][:200]}"


if __name__ == "__main__":
    sys.exit(main())
