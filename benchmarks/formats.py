"""Bytes a parameter under each format of weights and states: at home on disk, moved in a step, resident; predicted beside measured.

GPT-2 small (124M parameters, tied head) takes two steps of one window of 64 tokens, in a process of its own for each format and place: once with
everything at home on disk, once with everything on the device. Measured are the lengths of the files, the bytes that the disk's workers read and wrote
in the second step, and the bytes of live tensors after it, as memfit's allocator counts them (of a step with homes on disk nothing
stays). Each is divided by the number of parameters.

    python benchmarks/formats.py --output benchmarks/results/formats.json     (about five minutes of one core, 6 GiB of disk, 2.5 GiB of memory)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import memfit
from memfit.core.plan import BlockPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.core.tiers import Tier
from memfit.integrations.recipes.gpt import find_recipe
from memfit.step.lower import lower
from memfit.step.predict import predict

BF16 = ComputeDtype.BFLOAT16
PLANS: dict[str, tuple[Plan, frozenset[str]]] = {
    "fp32": (Plan(), frozenset()),
    **{
        one.allowance: (Plan(state_format=one), frozenset({one.allowance}))
        for one in StateFormat
        if one is not StateFormat.GIVEN
    },
    "bf16-weights-sr": (Plan(compute_dtype=BF16, drops_masters=True), frozenset({"bf16-weights-sr"})),
    "bf16-weights-sr, int8-state": (
        Plan(compute_dtype=BF16, drops_masters=True, state_format=StateFormat.INT8),
        frozenset({"bf16-weights-sr", "int8-state"}),
    ),
    "bf16": (Plan(compute_dtype=BF16), frozenset({"bf16"})),
    "bf16, masters split": (Plan(compute_dtype=BF16, splits_masters=True), frozenset({"bf16"})),
    "fp16": (Plan(compute_dtype=ComputeDtype.FLOAT16), frozenset({"fp16"})),
    "fp16-weights": (Plan(compute_dtype=ComputeDtype.FLOAT16_WEIGHTS), frozenset({"fp16-weights"})),
}
PLACES = ("disk", "resident")
ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DEVICE, state_home=Tier.DISK)


def measure(name: str, place: str, directory: Path) -> dict[str, Any]:
    """One format in one place: (predicted, measured) bytes by what they are."""
    recipe = find_recipe("gpt2-small")
    model = recipe.build_model(0)
    optimizer = recipe.build_optimizer(model)
    sample = next(recipe.batches(0))[:1, :65].clone()
    plan, allow = PLANS[name]
    parameters = sum(p.numel() for p in model.parameters())
    if place == "disk":
        found = memfit.profile(model, optimizer, recipe.loss, sample)
        blocks = {block.name: ON_DISK for block in found.blocks if not block.is_spanning}
        plan = replace(plan, blocks=blocks)
    assert all(call.saved is Saved.KEEP for call in plan.calls)
    job = memfit.fit(model, optimizer, recipe.loss, sample, plan=plan, allow=allow, directory=directory / "homes")
    if job.loss_scaler is not None:  # a step that overflows updates nothing
        job.loss_scaler.load_state_dict({**job.loss_scaler.state_dict(), "scale": 2.0**8})
    job.step(sample)
    read, written = (sum(moved.values()) for moved in job.bytes_moved)
    began = time.process_time()
    assert not job.step(sample).is_skipped
    cpu_s = time.process_time() - began
    after = [sum(moved.values()) for moved in job.bytes_moved]
    timeline = predict(lower(job.schedule, job.plan, job.profile))
    live_bytes = job._machine.meter.live_bytes()  # noqa: SLF001, what the job's own proof reads
    files = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    job.close(restore=False)
    result: dict[str, Any] = {"parameters": parameters, "cpu_s": round(cpu_s, 2)}
    if place == "resident":
        result["resident"] = (timeline.moments[-1].after_bytes, live_bytes)
    if place == "disk":
        assert live_bytes < parameters / 100, "with homes on disk, weights and states are not resident between steps"
        result["on disk"] = (timeline.peak_in(Tier.DISK), files)
        result["read"] = (sum(timeline.bytes_read.values()), after[0] - read)
        result["written"] = (sum(timeline.bytes_written.values()), after[1] - written)
    return result


def print_table(found: dict[str, dict[str, Any]]) -> None:
    print(
        "| format | at home on disk | read a step | written a step | resident, all on the device | largest deviation | step with homes on disk, CPU s |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, places in found.items():
        disk, resident = places.get("disk", {}), places.get("resident", {})
        parameters = next((place["parameters"] for place in places.values()), 1)
        pairs = [disk.get("on disk"), disk.get("read"), disk.get("written"), resident.get("resident")]
        cells = ["-" if pair is None else f"{pair[0] / parameters:.3f} / {pair[1] / parameters:.3f}" for pair in pairs]
        deviation = max((abs(pair[0] - pair[1]) / pair[1] for pair in pairs if pair is not None), default=0.0)
        print(f"| {name} | {' | '.join(cells)} | {deviation:.2%} | {disk.get('cpu_s', '-')} |")
    print("bytes a parameter, predicted / measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("FORMAT", "PLACE"))
    parser.add_argument("--table", action="store_true", help="print what is there")
    arguments = parser.parse_args()
    if arguments.worker:
        with tempfile.TemporaryDirectory() as directory:
            name, place = arguments.worker
            print(json.dumps(measure(name, place, Path(directory))))
        return
    output: Path | None = arguments.output
    found: dict[str, dict[str, Any]] = json.loads(output.read_text()) if output is not None and output.exists() else {}
    for place in () if arguments.table else PLACES:
        for name in PLANS:
            if place in found.setdefault(name, {}):
                continue
            command = [sys.executable, __file__, "--worker", name, place]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[name][place] = json.loads(done.stdout.splitlines()[-1])
            print(name, place, found[name][place], flush=True)
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)


if __name__ == "__main__":
    main()
