"""What memfit costs in time, bytes and memory, beside plain PyTorch and its own tools: GPT-2 small, 4 and 16 microbatches.

    .venv/bin/python benchmarks/cost.py --pairs 10 --out cost.json     # hours
    .venv/bin/python benchmarks/cost.py --small --pairs 3              # minutes
    .venv/bin/python benchmarks/cost.py --only disk-4 --pairs 3        # one part
    .venv/bin/python benchmarks/cost.py --only disk-16 --order layer-major

Each part steps its configurations in turn, each in a process of its own, and reports medians of ratios within a round:

resident-K    plain accumulation over K microbatches; memfit with everything resident, updating after backward and in backward; torch's own
              recipe of an optimizer step in post-accumulate-grad hooks (in the last microbatch).
recompute-K   plain; torch.utils.checkpoint (non-reentrant) on each layer; memfit recomputing each layer.
disk-K        plain; weights and states on disk in layer-major and in microbatch-major order, each beside the same plan with everything resident. Bound:
              the larger of that compute and of what the disk alone takes for the same bytes at the same mix of reads and writes, in the same run.

"plain" runs on torch's own allocator. Peaks of tensors need memfit's: they come from separate steps (`counted`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memfit.core.plan import Plan
    from memfit.core.profile import Profile
    from memfit.job.job import Job

PARTS = ("resident", "recompute", "disk")
MICROBATCHES = (4, 16)
ORDERS = ("layer-major", "microbatch-major")
BUFFERS = 4  # for visits: what `fit` takes where it fits and helps
SMALL = common.Shape(layers=4, vocabulary=8192, rows=16, tokens=64)
Run = dict[str, list[common.Step]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [f"{part}-{k}" for part in PARTS for k in MICROBATCHES]
    parser.add_argument("--only", action="append", choices=names, help="this part (may be repeated)")
    parser.add_argument("--order", choices=ORDERS, help="of the disk parts, only this one (both together hold 16 GB)")
    parser.add_argument("--pairs", type=int, default=10, help="rounds")
    parser.add_argument("--small", action="store_true", help="4 layers, vocabulary 8192, 64 tokens a row")
    parser.add_argument("--tokens", type=int, help="tokens a row (default 256; 64 with --small)")
    parser.add_argument("--directory", type=Path, help="for the homes on disk (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(**json.loads(arguments.worker))
        return
    shape = SMALL if arguments.small else common.Shape()
    if arguments.tokens:
        shape = replace(shape, tokens=arguments.tokens)
    found: dict[str, Any] = {"machine": common.machine(), "shape": asdict(shape), "pairs": arguments.pairs, "parts": {}}
    for name in arguments.only or names:
        part, _, count = name.partition("-")
        directory = Path(tempfile.mkdtemp(prefix="memfit-cost-", dir=arguments.directory))
        try:
            rows = measure(part, int(count), shape, arguments.pairs, directory, order=arguments.order)
        finally:
            shutil.rmtree(directory)
        found["parts"][name] = rows
        print(
            f"\n{name}: {shape.rows} rows of {shape.tokens} tokens, {arguments.pairs} rounds\n\n{_table(rows)}",
            flush=True,
        )
        if arguments.out is not None:  # after each part: a long run that is cut short keeps what it has
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


# --- the parent -----------------------------------------------------------------------------------------------------------------


CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "resident": (
        "plain",
        "memfit resident, update after",
        "torch step in hooks",
        "memfit resident, update in backward",
    ),
    "recompute": ("plain", "torch checkpoint", "memfit recompute"),
    "disk": (
        "plain",
        "memfit resident, layer-major",
        "memfit disk, layer-major",
        "memfit resident, microbatch-major",
        "memfit disk, microbatch-major",
    ),
}
REFERENCES = {
    "memfit resident, update in backward": "torch step in hooks",
    "memfit recompute": "torch checkpoint",
    "memfit disk, layer-major": "memfit resident, layer-major",
    "memfit disk, microbatch-major": "memfit resident, microbatch-major",
}
"""What a configuration is compared with, beside plain."""


def measure(
    part: str, microbatches: int, shape: common.Shape, pairs: int, directory: Path, *, order: str | None = None
) -> list[dict[str, Any]]:
    """One part: a row a configuration; of the disk parts, those of one order if it is given."""
    others = () if order is None else tuple(other for other in ORDERS if other != order)
    names = tuple(name for name in CONFIGURATIONS[part] if not name.endswith(others))
    request = {"microbatches": microbatches, "shape": asdict(shape), "directory": str(directory)}
    counted = {name: _count(name, request) for name in names if not name.startswith("memfit")}
    with ExitStack() as stack:
        workers = [stack.enter_context(common.Worker(__file__, n, {"name": n, **request})) for n in names]
        steps = common.interleave(workers, pairs, note=f"{part}-{microbatches}")
        hello = {worker.name: worker.hello for worker in workers}
        disk_s = {name: _disk_seconds(steps[name], directory) for name in names if steps[name][-1].read_bytes}
    return [_row(name, steps, hello[name], counted.get(name), disk_s.get(name)) for name in names]


def _count(name: str, request: dict[str, Any]) -> common.Step:
    """The second step under memfit's allocator, which plain configurations are not timed under."""
    with common.Worker(__file__, f"{name} (counted)", {"name": name, "is_counted": True, **request}) as worker:
        worker.step()
        return worker.step()


def _disk_seconds(steps: list[common.Step], directory: Path) -> float:
    read, written = (int(common.median(steps, what)) for what in ("read_bytes", "written_bytes"))
    return statistics.median(common.disk_seconds(directory, read, written) for _ in range(3))


def _row(
    name: str, steps: Run, hello: dict[str, Any], counted: common.Step | None, disk_s: float | None
) -> dict[str, Any]:
    mine, reference = steps[name], REFERENCES.get(name)
    row: dict[str, Any] = {
        "name": name,
        "wall_s": common.median(mine, "wall_s"),
        "cpu_s": common.median(mine, "cpu_s"),
        "wall_to_plain": common.ratio(mine, steps["plain"]),
        "cpu_to_plain": common.ratio(mine, steps["plain"], "cpu_s"),
        "reference": reference,
        "wall_to_reference": reference and common.ratio(mine, steps[reference]),
        "cpu_to_reference": reference and common.ratio(mine, steps[reference], "cpu_s"),
        "live_peak_bytes": (counted or mine[-1]).live_peak_bytes,
        "process_peak_above_imports_bytes": max(s.process_peak_bytes for s in mine) - hello["imports_bytes"],
        "read": mine[-1].read,
        "written": mine[-1].written,
        "losses": [step.loss for step in mine],
        "rounds": [asdict(step) for step in mine],
        **{
            key: hello[key]
            for key in ("fetches", "shared_blocks", "predicted_bytes", "weight_bytes", "state_bytes")
            if key in hello
        },
    }
    if disk_s is not None:
        assert reference is not None
        row["disk_s"] = disk_s
        bounds = [max(step.wall_s, disk_s) for step in steps[reference]]
        row["bound_s"] = statistics.median(bounds)
        row["ratio_to_bound"] = statistics.median(s.wall_s / b for s, b in zip(mine, bounds, strict=True))
    return row


def _table(rows: list[dict[str, Any]]) -> str:
    heads = ["", "s a step (CPU-s)", "to plain, wall (CPU)", "to reference, wall (CPU)", "tensors' peak, MiB",
             "process above imports, MiB", "read, GB", "written, GB", "disk alone, s", "to bound", "most fetches a block"]  # fmt: skip
    lines: list[list[object]] = []
    for row in rows:
        pair = row["wall_to_reference"]
        lines.append(
            [
                row["name"],
                f"{row['wall_s']:.2f} ({row['cpu_s']:.2f})",
                f"{row['wall_to_plain']:.3f} ({row['cpu_to_plain']:.3f})",
                f"{pair:.3f} ({row['cpu_to_reference']:.3f})" if pair else "-",
                common.mib(row["live_peak_bytes"]),
                common.mib(row["process_peak_above_imports_bytes"]),
                _moved(row["read"]),
                _moved(row["written"]),
                f"{row['disk_s']:.2f}" if "disk_s" in row else "-",
                f"{row['ratio_to_bound']:.3f}" if "disk_s" in row else "-",
                _most_fetches(row),
            ]
        )
    return common.table(heads, lines)


def _most_fetches(row: dict[str, Any]) -> str:
    fetches, shared = row.get("fetches") or {}, row.get("shared_blocks") or ()
    if not fetches:
        return "-"
    words = str(max(n for name, n in fetches.items() if name not in shared))
    return words + "".join(f", {name} {fetches[name]}" for name in shared if name in fetches)


def _moved(moved: dict[str, int]) -> str:
    if not moved:
        return "-"
    return f"{sum(moved.values()) / 1e9:.2f} (" + ", ".join(f"{tag} {n / 1e9:.2f}" for tag, n in moved.items()) + ")"


# --- a worker -------------------------------------------------------------------------------------------------------------------


def _work(*, name: str, microbatches: int, shape: dict[str, Any], directory: str, is_counted: bool = False) -> None:
    import torch
    from transformers import GPT2LMHeadModel  # noqa: F401, counts as an import: the model's class is loaded lazily

    import memfit
    import memfit.api  # counts as an import: memfit loads its names when they are used
    from memfit.devices.binding import install
    from memfit.integrations.recipes.gpt import build_adamw, causal_language_loss
    from memfit.machine.meters import ProcessMeter

    meter = ProcessMeter()
    hello: dict[str, Any] = {"imports_bytes": meter.resident_bytes().whole_bytes}
    is_mine = name.startswith("memfit")
    if is_counted or is_mine:
        install()
    built = common.Shape(**shape)
    model = common.build_gpt(built)
    batches = (common.token_batch(built.rows, built.tokens, built.vocabulary, seed) for seed in range(1_000_000))
    if not is_mine:
        step = _plain_step(name, model, microbatches)
        common.serve(hello, {"step": lambda: common.measured(lambda: step(next(batches)))})
        return
    optimizer = build_adamw(model, learning_rate=1e-4)
    sample = common.token_batch(built.rows, built.tokens, built.vocabulary, 0)
    profile = memfit.profile(model, optimizer, causal_language_loss, sample, microbatches=(microbatches,))
    plan = _plan(name, profile, microbatches)
    home = Path(directory) / name.replace(" ", "-").replace(",", "")
    job = memfit.fit(model, optimizer, causal_language_loss, sample, plan=plan, directory=home)
    meter.reset_peak()  # building the model is not what these figures are about
    hello |= {
        "fetches": _fetches(job),
        "shared_blocks": _shared(job),
        "weight_bytes": profile.weight_bytes,
        "state_bytes": sum(profile.state_bytes.values()),
    }
    hello["predicted_bytes"] = job.predicted_peak_bytes
    torch.manual_seed(0)
    common.serve(hello, {"step": lambda: common.measured_job_step(job, next(batches))})
    job.close(restore=False)


def _fetches(job: Job) -> dict[str, int]:
    """How often a step fetches each block, read from the schedule's own text."""
    from memfit.core.schedule import Fetch, Schedule

    schedule = Schedule.parse(job.schedule.text())
    return dict(Counter(schedule.blocks[action.block] for action in schedule if isinstance(action, Fetch)))


def _shared(job: Job) -> list[str]:
    """Blocks that calls of several sites read (tied weights)."""
    sites: dict[int, set[str]] = {}
    for call in job.schedule.calls:
        for block in call.blocks:
            sites.setdefault(block, set()).add(call.site)
    return [job.schedule.blocks[block] for block, names in sites.items() if len(names) > 1]


def _plan(name: str, profile: Profile, microbatches: int) -> Plan:
    from memfit.core.plan import CallPlan, Order, Plan, UpdateTime
    from memfit.core.saved_policies import Saved

    calls = next(iter(profile.traces.values())).calls
    plain_order = Plan(microbatches=microbatches, order=Order.MICROBATCH_MAJOR)
    layers = Plan(microbatches=microbatches, tail=common.tail_of(profile))
    fates = tuple(CallPlan(saved=Saved.RECOMPUTE) if call.is_repeated else CallPlan() for call in calls)
    away = {"blocks": common.on_disk(profile), "prefetch": BUFFERS - 1}
    return {
        "memfit resident, update after": replace(plain_order, update=UpdateTime.AFTER_BACKWARD),
        "memfit resident, update in backward": plain_order,
        "memfit recompute": replace(plain_order, calls=fates, update=UpdateTime.AFTER_BACKWARD),
        "memfit resident, layer-major": layers,
        "memfit disk, layer-major": replace(layers, **away),
        "memfit resident, microbatch-major": plain_order,
        "memfit disk, microbatch-major": replace(plain_order, **away),
    }[name]


def _plain_step(name: str, model: nn.Module, microbatches: int) -> Callable[[torch.Tensor], float]:
    """Plain accumulation, with torch's own means where the name says so."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from memfit.integrations.recipes.gpt import build_adamw, causal_language_loss

    uses_hooks = name == "torch step in hooks"
    is_last = [False]
    if name == "torch checkpoint":
        for layer in model.transformer.h:  # type: ignore[union-attr]
            layer.forward = _checkpointed(checkpoint, layer.forward)  # type: ignore[union-attr]
    if uses_hooks:
        # Source: PyTorch tutorial "How to save memory by fusing the optimizer step into the backward pass".
        own = {p: build_adamw(torch.nn.ParameterList([p]), learning_rate=1e-4) for p in model.parameters()}

        def hook(parameter: torch.Tensor) -> None:
            if is_last[0]:
                own[parameter].step()  # type: ignore[index]
                own[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    optimizer = None if uses_hooks else build_adamw(model, learning_rate=1e-4)

    def step(batch: torch.Tensor) -> float:
        total = 0.0
        parts = batch.chunk(microbatches)
        for index, rows in enumerate(parts):
            is_last[0] = index == len(parts) - 1
            loss = causal_language_loss(model, rows) * (len(rows) / len(batch))
            loss.backward()
            total += loss.item()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return total

    return step


def _checkpointed(checkpoint: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


if __name__ == "__main__":
    sys.exit(main())
