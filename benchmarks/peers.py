"""Published estimators beside memfit: the peak of tensors of a plain training step, on the models of
`predictions.py`.

    .venv/bin/python benchmarks/peers.py --given benchmarks/results/prediction-cases.json --out benchmarks/results/peers.json
    .venv/bin/python benchmarks/peers.py --shown benchmarks/results/peers.json

No other tool plans, so each case is its model, batch and optimizer in plain PyTorch (fp32, or the
user's own autocast): two steps, everything resident. Measured: the most bytes of tensors that the
allocator under torch counted. Every estimator is asked in the same process, on a model of its own,
as its documentation says; one that is not installed or fails on a case is left out there, and the
reason is kept. Some estimate less than a step, and say so: `COUNTS` names what.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
from predicting.drawing import Case, as_json
from sweep import commit

TIMEOUT_S = 600
STATES = "weights, gradients and Adam's states"
COUNTS = {
    "memfit.profile": "the step",
    "torch MemTracker": "the step",
    "torch FSDPMemTracker": "the step (FSDP2 on one rank)",
    "DeepSpeed estimate_zero2": f"{STATES} (fp16 with fp32 masters)",
    "DeepSpeed estimate_zero3": f"{STATES} (fp16 with fp32 masters)",
    "Accelerate estimate-memory": f"{STATES}; batch of 1, no activations",
    "transformers get_memory_footprint": "weights and buffers",
    "torchinfo": "weights, input and outputs of layers, twice",
    "torch-kitsune": "the step, with Adam or SGD; random inputs of one shape",
    "vram-check": "the step, by parameters, rows and tokens",
}
"""By estimator: its own claim of what it counts."""
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "torchinfo", "torch-kitsune", "vram-check")
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--given", type=Path, help="the cases that predictions.py --draw wrote")
    parser.add_argument("--only", type=int, action="append", help="cases of these numbers (may be repeated)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--shown", type=Path, help="only show what --out wrote")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.simplefilter("ignore")
        found = _work(Case.read(json.loads(sys.stdin.read())))
        print("\n" + json.dumps(found))
        return 0
    if arguments.shown is not None:
        print(report(json.loads(arguments.shown.read_text())["rows"]))
        return 0
    if arguments.given is None:
        parser.error("--given or --shown is needed")
    cases = [Case.read(one) for one in json.loads(arguments.given.read_text())["cases"]]
    rows: list[Row] = []
    for case in cases:
        if arguments.only is not None and case.number not in arguments.only:
            continue
        rows.append(_measured(case))
        print(_line(rows[-1]), flush=True)
        if arguments.out is not None:
            head = {"command": "python benchmarks/peers.py " + " ".join(sys.argv[1:]), "commit": commit()}
            text = {**head, "machine": common.machine(), "versions": _versions(), "rows": rows}
            arguments.out.write_text(json.dumps(text, indent=0) + "\n")
    print(report(rows))
    return 0


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _measured(case: Case) -> Row:
    row: Row = {"name": case.name, "architecture": case.architecture, "optimizer": case.optimizer[0]}
    row["sizes"], row["autocast"] = case.sizes, case.precision == "autocast"
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--worker"],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            input=json.dumps(as_json(case)),
        )
    except subprocess.TimeoutExpired:
        return {**row, "failed": f"not done after {TIMEOUT_S} s"}
    if done.returncode:
        return {**row, "failed": done.stderr[-1500:]}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def report(rows: Sequence[Row]) -> str:
    """A table of the estimators, errors relative to the measured peak of tensors."""
    good = [row for row in rows if "failed" not in row]
    lines: list[list[str]] = []
    for name, counts in COUNTS.items():
        errors = [
            row["estimates"][name] / row["measured_bytes"] - 1 for row in good if row["estimates"].get(name) is not None
        ]
        if not errors:
            lines.append([name, counts, f"0 of {len(good)}", "-", "-", "-", "-"])
            continue
        sizes = sorted(map(abs, errors))
        within = sum(size <= 0.01 for size in sizes) / len(good)
        lines.append(
            [
                name,
                counts,
                f"{len(errors)} of {len(good)}",
                f"{statistics.median(sizes):.1%}",
                f"{min(errors):+.1%}",
                f"{max(errors):+.1%}",
                f"{within:.0%}",
            ]
        )
    heads = ["estimator", "counts", "answers", "median error", "lowest", "highest", "within 1 % (of all)"]
    failed = ", ".join(row["name"] for row in rows if "failed" in row)
    return common.table(heads, lines) + f"\n\n{len(rows)} cases; not measured: {failed or 'none'}"


def _line(row: Row) -> str:
    if "failed" in row:
        return f"{row['name']}: FAILED {row['failed'][-300:]}"
    measured = row["measured_bytes"]
    shares = [
        f"{name} " + ("-" if found is None else f"{found / measured - 1:+.1%}")
        for name, found in row["estimates"].items()
    ]
    return f"{row['name']}: {common.mib(row['measured_bytes'])} MiB; " + ", ".join(shares)


# --- the child ------------------------------------------------------------------------------------


def _work(case: Case) -> Row:
    from predicting.measuring import load

    load(case)
    case = replace(case, precision="autocast" if case.precision == "autocast" else "fp32")
    estimates: dict[str, int | None] = {}
    reasons: dict[str, str] = {}
    measured = _plain_bytes(case)
    for name, estimate in ESTIMATORS.items():
        gc.collect()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                estimates[name] = int(estimate(case))
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is its answer here
            estimates[name] = None
            reasons[name] = f"{type(error).__name__}: {error}"[:300]
    return {"measured_bytes": measured, "estimates": estimates, "reasons": reasons}


def _step(parts: tuple[Any, ...]) -> None:
    model, optimizer, loss, batch = parts
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _plain_bytes(case: Case) -> int:
    from memfit.devices.binding import install
    from predicting.measuring import build

    allocator = install()
    before = allocator.stats().live_bytes
    parts = build(case)
    allocator.reset_peak()
    for _ in range(2):
        _step(parts)
    return allocator.stats().peak_bytes - before


def _memfit(case: Case) -> int:
    import memfit
    from memfit.tensors.trees import tensors_in
    from predicting.measuring import build

    parts = build(case)
    profile = memfit.profile(*parts)
    trace = profile.traces[profile.batch_rows]
    batch = sum(tensor.nbytes for tensor in tensors_in(parts[3]))
    return profile.plain_step_bytes(trace) + batch


def _fake_parts(case: Case) -> tuple[Any, tuple[Any, ...]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from predicting.measuring import build

    mode = FakeTensorMode()
    with mode:
        return mode, build(case)


def _mem_tracker(case: Case) -> int:
    from torch._subclasses.fake_tensor import DataDependentOutputException

    try:
        return _tracked(*_fake_parts(case))
    except DataDependentOutputException:
        from predicting.measuring import build

        return _tracked(contextlib.nullcontext(), build(case))  # an optimizer that asks for values


def _tracked(mode: Any, parts: tuple[Any, ...]) -> int:
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    with mode:
        tracker.track_external(parts[0], parts[1], *_leaves(parts[3]))
        with tracker:
            for step in range(2):
                _step(parts)
                if not step:
                    tracker.reset_mod_stats()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _fsdp_tracker(case: Case) -> int:
    import torch
    import torch.distributed as dist
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from limiting import building
    from predicting.measuring import build

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    # On real tensors: under fake ones sharding asks for values.
    model, _, loss, batch = build(case)
    mesh = init_device_mesh("cpu", (1,))
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = building.build_optimizer(case.optimizer[0], case.optimizer[1], model)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(tuple(_leaves(batch)))
    with tracker:
        for step in range(2):
            _step((model, optimizer, loss, batch))
            if not step:
                tracker.reset_mod_stats()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _leaves(batch: Any) -> list[Any]:
    from memfit.tensors.trees import tensors_in

    return list(tensors_in(batch))


def _module(name: str) -> Any:
    """A tool's module; memfit does not depend on it."""
    return importlib.import_module(name)


def _model(case: Case) -> Any:
    from predicting.measuring import build

    return build(case)[0]


def _zero(stage: int) -> Callable[[Case], int]:
    def estimate(case: Case) -> int:
        stage3, stage_1_and_2 = map(_module, ("deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.stage_1_and_2"))
        model = _model(case)
        total = sum(p.numel() for p in {p.data_ptr(): p for p in model.parameters()}.values())
        if stage == 2:
            _, device = stage_1_and_2.estimate_zero2_model_states_mem_needs(
                total_params=total, num_gpus_per_node=1, num_nodes=1, cpu_offload=False, additional_buffer_factor=1.0
            )
            return int(device)
        largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
        _, device, _ = stage3.estimate_zero3_model_states_mem_needs(
            total_params=total, largest_layer_params=largest, num_gpus_per_node=1, num_nodes=1, cpu_offload=False,
            cpu_offload_params=False, zero_init=True, additional_buffer_factor=1.0,
        )  # fmt: skip
        return int(device)

    return estimate


def _accelerate(case: Case) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(_model(case))
    precision = "bfloat16" if case.precision == "autocast" else "float32"
    found = estimate_training_usage(total, precision)
    return int(max(found["step"], found["model"] + found["gradients"] + found["optimizer"]))


def _footprint(case: Case) -> int:
    return int(_model(case).get_memory_footprint())


def _torchinfo(case: Case) -> int:
    from predicting.measuring import build

    model, _, _, batch = build(case)
    given: dict[str, Any] = {"input_data": batch} if isinstance(batch, dict) else {"input_data": [batch[0]]}
    found = _module("torchinfo").summary(model, **given, mode="train", verbose=0, device="cpu")
    return int(found.total_input + found.total_output_bytes + found.total_param_bytes)


def _known_optimizer(case: Case) -> str:
    return "sgd" if case.optimizer[0] == "SGD" else "adam"


def _kitsune(case: Case) -> int:
    from predicting.measuring import build

    model, _, _, rows = build(case)
    batch = _leaves(rows)[0]
    found = _module("kitsune").predict_memory(
        model, input_shape=tuple(batch.shape[1:]), batch_size=batch.shape[0], optimizer=_known_optimizer(case)
    )
    return int(found.total_bytes)


def _vram_check(case: Case) -> int:
    rows, tokens = case.sizes[0], case.sizes[1] if case.batch in ("text", "pairs") else 128
    found = _module("vram_check").analyze(
        _model(case), batch_size=rows, optimizer=_known_optimizer(case), seq_len=tokens
    )
    return int(found["estimate"].total_bytes)


ESTIMATORS: dict[str, Callable[[Case], int]] = {
    "memfit.profile": _memfit,
    "torch MemTracker": _mem_tracker,
    "torch FSDPMemTracker": _fsdp_tracker,
    "DeepSpeed estimate_zero2": _zero(2),
    "DeepSpeed estimate_zero3": _zero(3),
    "Accelerate estimate-memory": _accelerate,
    "transformers get_memory_footprint": _footprint,
    "torchinfo": _torchinfo,
    "torch-kitsune": _kitsune,
    "vram-check": _vram_check,
}


if __name__ == "__main__":
    sys.exit(main())
