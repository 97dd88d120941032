"""How little memory a 98M-parameter GPT needs, beside the leanest peer.

    .venv/bin/python benchmarks/lean.py --steps 5

The recipe `bench-98m` (12 layers, width 768, vocabulary 8192, untied, 8 sequences of 256 tokens, fp32 AdamW) under a limit of what is resident after
imports plus `--above`. A worker trains under that limit; another runs the same plan with every home in memory, its steps interleaved with the
first one's. Bound: the larger of that compute, and of what the disk alone takes for the bytes of a step at the same mix of reads and writes.
The peak is the kernel's (VmHWM), from the end of imports to the last step: building the model and `fit` included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from torch import Tensor

    from memfit.core.plan import Plan
    from memfit.core.profile import Profile


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one of warm-up")
    parser.add_argument("--above", type=int, default=408, help="limit: MiB above what is resident after imports")
    parser.add_argument("--plan", choices=("lean", "auto"), default="lean", help="by hand, or what the planner takes")
    parser.add_argument(
        "--no-limit", action="store_true", help="do not arm the limit: only see where the peak would be"
    )
    parser.add_argument("--random-tokens", action="store_true", help="no text: reading it is not the training's memory")
    parser.add_argument("--without-bound", action="store_true", help="only the worker under the limit")
    parser.add_argument("--directory", type=Path, help="for the homes on disk (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(**json.loads(arguments.worker))
        return
    directory = Path(tempfile.mkdtemp(prefix="memfit-lean-", dir=arguments.directory))
    try:
        found = _measure(arguments, directory)
    finally:
        shutil.rmtree(directory)
    print(_table(found))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def _measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    request = {
        "plan": arguments.plan,
        "above": None if arguments.no_limit else arguments.above,
        "directory": str(directory / "lean"),
        "random_tokens": arguments.random_tokens,
    }
    with common.Worker(__file__, "under the limit", request) as lean:
        workers = [lean]
        if not arguments.without_bound:
            resident = {**request, "above": None, "directory": None, "given": lean.hello["plan_json"]}
            workers.append(common.Worker(__file__, "same plan, all in memory", resident))
        first = lean.step()
        for other in workers[1:]:
            other.step()
        steps = common.interleave(workers, arguments.steps, warm_up=0, note="lean")
        mine = steps[lean.name]
        read, written = (int(common.median(mine, name)) for name in ("read_bytes", "written_bytes"))
        disk_s = [common.disk_seconds(directory, read, written) for _ in range(3)]
        summary = lean.ask("summary")
        for other in workers[1:]:
            other.close()
    compute_s = common.median(steps[workers[1].name], "wall_s") if len(workers) > 1 else None
    bound_s = max(compute_s or 0.0, sorted(disk_s)[1])
    peak = max(summary["load_peak_bytes"], first.process_peak_bytes, *(s.process_peak_bytes for s in mine))
    return {
        "machine": common.machine(),
        "plan": lean.hello["plan"],
        "reason": lean.hello["reason"],
        "imports_bytes": lean.hello["imports_bytes"],
        "limit_bytes": lean.hello["limit_bytes"],
        "peaks_above_imports_bytes": {
            name: nbytes - lean.hello["imports_bytes"]
            for name, nbytes in (*summary["stations"].items(), *summary["phases"].items(), ("whole run", peak))
        },
        "predicted_peak_bytes": summary["predicted_peak_bytes"],
        "peak_bytes": peak,
        "live_peak_bytes": mine[-1].live_peak_bytes,
        "losses": [first.loss, *(s.loss for s in mine)],
        "read": mine[-1].read,
        "written": mine[-1].written,
        "read_bytes": read,
        "written_bytes": written,
        "wall_s": common.median(mine, "wall_s"),
        "cpu_s": common.median(mine, "cpu_s"),
        "compute_s": compute_s,
        "compute_cpu_s": common.median(steps[workers[1].name], "cpu_s") if len(workers) > 1 else None,
        "disk_s": sorted(disk_s)[1],
        "bound_s": bound_s,
        "ratio_to_bound": common.median(mine, "wall_s") / bound_s,
    }


def _table(found: dict[str, Any]) -> str:
    peaks = found["peaks_above_imports_bytes"]
    rows = [
        [
            "limit above imports, MiB",
            common.mib(found["limit_bytes"] and found["limit_bytes"] - found["imports_bytes"]),
        ],
        *([f"process peak above imports, {name}, MiB", common.mib(nbytes)] for name, nbytes in peaks.items()),
        [
            "predicted process peak above imports, MiB",
            common.mib(found["predicted_peak_bytes"] - found["imports_bytes"]),
        ],
        ["tensors' peak in a steady step, MiB", common.mib(found["live_peak_bytes"])],
        ["bytes read a step, GB", f"{found['read_bytes'] / 1e9:.2f} {_by_purpose(found['read'])}"],
        ["bytes written a step, GB", f"{found['written_bytes'] / 1e9:.2f} {_by_purpose(found['written'])}"],
        ["step, s (CPU-s)", f"{found['wall_s']:.2f} ({found['cpu_s']:.2f})"],
    ]
    if found["compute_s"] is not None:
        rows += [
            ["its compute, all in memory, s (CPU-s)", f"{found['compute_s']:.2f} ({found['compute_cpu_s']:.2f})"],
            ["its bytes alone at the same mix, s", f"{found['disk_s']:.2f}"],
            ["ratio to its bound", f"{found['ratio_to_bound']:.3f}"],
        ]
    return f"plan: {found['plan']}\n\n" + common.table(["", "measured"], rows)


def _by_purpose(moved: dict[str, int]) -> str:
    return "(" + ", ".join(f"{tag} {nbytes / 1e9:.2f}" for tag, nbytes in moved.items()) + ")"


# --- the worker -----------------------------------------------------------------------------------------------------------------


def _work(
    *, plan: str, above: int | None, directory: str | None, random_tokens: bool, given: str | None = None
) -> None:
    import torch
    from transformers import GPT2LMHeadModel  # noqa: F401, counts as an import: the model's class is loaded lazily

    import memfit
    import memfit.api  # counts as an import: memfit loads its names when they are used
    from memfit.core.plan import Plan
    from memfit.integrations.recipes.gpt import find_recipe
    from memfit.machine.machine import prepare_process
    from memfit.machine.meters import ProcessMeter

    meter = ProcessMeter()
    imports_bytes = meter.resident_bytes().whole_bytes
    prepare_process()  # as `memfit train` does: what is built before `fit` is then given back when it is freed
    meter.reset_peak()
    stations: dict[str, int] = {}

    recipe = find_recipe("bench-98m")
    torch.manual_seed(0)
    batches = _random_batches() if random_tokens else recipe.batches(0)
    sample = next(batches)
    stations["text"] = meter.peak_bytes().whole_bytes
    model = recipe.build_model(0)
    optimizer = recipe.build_optimizer(model)
    stations["model"] = meter.peak_bytes().whole_bytes
    limit = None if above is None else imports_bytes + above * common.MIB
    chosen: Plan | None = None
    if given is not None:
        chosen = _all_in_memory(Plan.from_json(given))
    elif plan == "lean":
        profile = memfit.profile(model, optimizer, recipe.loss, sample, microbatches=(recipe.batch_size,))
        chosen = _lean_plan(profile, recipe.batch_size)
    stations["profile"] = meter.peak_bytes().whole_bytes
    job = memfit.fit(model, optimizer, recipe.loss, sample, limit=limit, plan=chosen, directory=directory)

    def summary() -> dict[str, Any]:
        phases = {record.name: record.process_peak_bytes for record in job.proof().phases}
        return {
            "stations": stations,
            "phases": phases,
            "load_peak_bytes": max(*stations.values(), phases["load"] or 0),
            "predicted_peak_bytes": job.predicted_peak_bytes,
        }

    hello = {
        "imports_bytes": imports_bytes,
        "limit_bytes": limit,
        "plan": _in_words(job.plan),
        "plan_json": job.plan.to_json(),
        "reason": job.reason,
    }
    common.serve(hello, {"step": lambda: common.measured_job_step(job, next(batches)), "summary": summary})


def _random_batches() -> Iterator[Tensor]:
    return (common.token_batch(8, 256, 8192, seed) for seed in itertools.count())


def _lean_plan(profile: Profile, microbatches: int) -> Plan:
    """A row at a time, layer after layer; everything on disk; blocks recomputed; each block updated as its backward ends."""
    from memfit.core.plan import CallPlan, Plan
    from memfit.core.saved_policies import Saved

    calls = next(iter(profile.traces.values())).calls
    return Plan(
        microbatches=microbatches,
        blocks=common.on_disk(profile),
        calls=tuple(CallPlan(saved=Saved.RECOMPUTE) if call.is_repeated else CallPlan() for call in calls),
        tail=common.tail_of(profile),
    )


def _all_in_memory(plan: Plan) -> Plan:
    """The same compute, with nothing that moves."""
    from memfit.core.tiers import Tier

    return replace(plan, blocks={}, calls=tuple(replace(call, boundary_home=Tier.DEVICE) for call in plan.calls))


def _in_words(plan: Plan) -> str:
    homes = sorted(
        {f"weights {b.weight_home}, gradients {b.gradient_home}, states {b.state_home}" for b in plan.blocks.values()}
    )
    fates = sorted({f"{call.saved} (arguments {call.boundary_home})" for call in plan.calls})
    return (
        f"{plan.microbatches} microbatches {plan.order}; {'; '.join(homes) or 'all on the device'}; {', '.join(fates)}; update {plan.update}; "
        f"prefetch {plan.prefetch}"
    )


if __name__ == "__main__":
    sys.exit(main())
