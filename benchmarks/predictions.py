"""Predicted and measured peaks of jobs drawn from a seed: architectures, plans, batches, optimizers,
precisions.

    .venv/bin/python benchmarks/predictions.py --seed 1 --cases 48 --draw benchmarks/results/prediction-cases.json
    .venv/bin/python benchmarks/predictions.py --given benchmarks/results/prediction-cases.json --out benchmarks/results/predictions.json
    .venv/bin/python benchmarks/predictions.py --given benchmarks/results/prediction-cases.json --only 17
    .venv/bin/python benchmarks/predictions.py --shown benchmarks/results/predictions.json

A case (`predicting.drawing`) is a process of its own: three steps, and a fourth that is measured
action by action. Errors are predicted less measured, by what the job took: the kernel's peak of the
process (VmHWM, over loading and steps) less what was resident after the imports. Tensors: what the
allocator under torch counted in the steps, beside the sum of the operations. The instant of the
peak is foretold if the same action is highest, or if what was measured at the foretold one is
within 1 % of the measured peak. Seconds are recorded and not judged here.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
from predicting.drawing import Case, as_json, decided, draw
from sweep import commit, in_a_fork

TIMEOUT_S = 600
WITHIN = 0.01
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=48, help="draw so many")
    parser.add_argument("--draw", type=Path, help="only draw, and write the cases there")
    parser.add_argument("--given", type=Path, help="measure the cases that --draw wrote")
    parser.add_argument("--only", type=int, action="append", help="cases of these numbers (may be repeated)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--shown", type=Path, help="only show what --out wrote")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(_work(json.loads(sys.stdin.read()))))
        return 0
    if arguments.shown is not None:
        print(report(json.loads(arguments.shown.read_text())["rows"]))
        return 0
    if arguments.given is None:
        cases = _drawn(arguments.seed, arguments.only or range(arguments.cases))
        if arguments.draw is not None:
            head = {"command": "python benchmarks/predictions.py " + " ".join(sys.argv[1:]), "commit": commit()}
            arguments.draw.write_text(json.dumps({**head, "cases": [as_json(case) for case in cases]}) + "\n")
            return 0
    else:
        cases = [Case.read(one) for one in json.loads(arguments.given.read_text())["cases"]]
        cases = [case for case in cases if arguments.only is None or case.number in arguments.only]
    rows: list[Row] = []
    for case in cases:
        rows.append(_measured(case))
        print(_line(rows[-1]), flush=True)
        if arguments.out is not None:
            head = {"command": "python benchmarks/predictions.py " + " ".join(sys.argv[1:]), "commit": commit()}
            arguments.out.write_text(
                json.dumps({**head, "machine": common.machine(), "rows": [_lean(row) for row in rows]}, indent=0) + "\n"
            )
    print(report(rows))
    return 1 if any("failed" in row for row in rows) else 0


def _drawn(seed: int, numbers: Sequence[int]) -> list[Case]:
    import torch
    import transformers

    import memfit.api  # noqa: F401 - loaded once, for all forks
    from memfit.devices import procfs

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    resident = procfs.read_status().resident_bytes
    cases: list[Case] = []
    for number in numbers:

        def work(number: int = number) -> list[Any]:
            found = decided(seed, draw(seed, number), resident)
            return [found if isinstance(found, str) else as_json(found)]

        found, ended = in_a_fork(work, TIMEOUT_S)
        if found and not isinstance(found[0], str):
            cases.append(Case.read(found[0]))
            print(f"{cases[-1].name}: {cases[-1].kind}, {cases[-1].sizes}", flush=True)
        else:
            print(f"{number}: left out: {found[0] if found else ended}", flush=True)
    return cases


def _measured(case: Case) -> Row:
    command = [sys.executable, __file__, "--worker"]
    row: Row = {"case": as_json(case), "name": case.name}
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, input=json.dumps(as_json(case))
        )
    except subprocess.TimeoutExpired:
        return {**row, "failed": f"not done after {TIMEOUT_S} s"}
    if done.returncode:
        return {**row, "failed": done.stderr[-1500:]}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def _work(request: dict[str, Any]) -> Row:
    from predicting.measuring import measure

    warnings.simplefilter("ignore")
    return measure(Case.read(request))


# --- what is said of it ---------------------------------------------------------------------------


def errors(row: Row) -> dict[str, float]:
    """Errors of one case: bytes by which the prediction is above the measurement, and shares."""
    own = max(1, row["process_bytes"] - row["resident_bytes"])
    process = row["predicted_process_bytes"] - row["process_bytes"]
    tensors = row["predicted_tensor_bytes"] - row["tensor_bytes"]
    return {
        "own_bytes": own,
        "process_bytes": process,
        "process": process / own,
        "tensor_bytes": tensors,
        "tensors": tensors / max(1, row["tensor_bytes"]),
    }


def is_foretold(row: Row) -> bool:
    """The instant of the peak is the foretold one, or as good as that."""
    peak = row["peak"]
    near = peak["measured_where_predicted_bytes"] >= (1 - WITHIN) * peak["measured_bytes"]
    return peak["predicted_at"] == peak["measured_at"] or near


def report(rows: Sequence[Row]) -> str:
    """A table of all cases, and the sums that the goals are about."""
    good = [row for row in rows if "failed" not in row]
    if not good:
        return f"{len(rows)} cases, all failed"
    found = [errors(row) for row in good]
    lines = [
        common.table(
            ["case", "kind", "optimizer", "precision", "took", "process", "error", "tensors", "error", "peak at", "s"],
            [_cells(row, error) for row, error in zip(good, found, strict=True)],
        ),
        "",
    ]
    for what, share, nbytes in (("process", "process", "process_bytes"), ("tensors", "tensors", "tensor_bytes")):
        sizes = sorted(abs(error[share]) for error in found)
        low = min(found, key=lambda error: error[share])
        worst = max(found, key=lambda error: abs(error[nbytes]))
        lines.append(
            f"{what}: median error {statistics.median(sizes):.2%}, nine in ten within {sizes[int(0.9 * (len(sizes) - 1))]:.2%}, "
            f"most {sizes[-1]:.2%}; by bytes most {worst[nbytes] / common.MIB:+.1f} MiB; lowest {low[share]:+.2%} "
            f"({low[nbytes] / common.MIB:+.1f} MiB)"
        )
    far = [
        row["name"]
        for row, error in zip(good, found, strict=True)
        if abs(error["process"]) > 0.05 and abs(error["process_bytes"]) > 16 * common.MIB
    ]
    low = [
        row["name"]
        for row, error in zip(good, found, strict=True)
        if error["process"] < -0.01 and error["process_bytes"] < -8 * common.MIB
    ]
    small = [row["name"] for row, error in zip(good, found, strict=True) if error["own_bytes"] < 300 * common.MIB]
    lines += [
        f"process off by more than 5 % and 16 MiB: {len(far)} ({', '.join(far) or 'none'})",
        f"process too low by more than 1 % and 8 MiB: {len(low)} ({', '.join(low) or 'none'})",
        f"tensors off by more than 1 %: {sum(abs(error['tensors']) > WITHIN for error in found)}",
        f"instant of the peak foretold, or within 1 %: {sum(map(is_foretold, good))} of {len(good)}",
        f"took less than 300 MiB: {', '.join(small) or 'none'}",
        f"{len(rows)} cases; failed: {', '.join(row['name'] for row in rows if 'failed' in row) or 'none'}",
    ]
    return "\n".join(lines)


def _cells(row: Row, error: Mapping[str, float]) -> list[str]:
    case = row["case"]
    seconds = statistics.median(step["cpu_s"] for step in row["steps"])
    return [
        row["name"],
        case["kind"],
        case["optimizer"][0],
        case["precision"],
        common.mib(error["own_bytes"]),
        f"{error['process_bytes'] / common.MIB:+.1f}",
        f"{error['process']:+.2%}",
        f"{error['tensor_bytes'] / common.MIB:+.1f}",
        f"{error['tensors']:+.2%}",
        row["peak"]["measured_at"] + ("" if is_foretold(row) else f" ({row['peak']['predicted_at']})"),
        f"{row['predicted_s']:.2f}/{seconds:.2f}",
    ]


def _line(row: Row) -> str:
    if "failed" in row:
        return f"{row['name']}: FAILED {row['failed'][-400:]}"
    return "  ".join(_cells(row, errors(row)))


def _lean(row: Row) -> Row:
    """Without the plan, which the cases' file has."""
    return {**row, "case": {name: value for name, value in row["case"].items() if name != "plan"}}


if __name__ == "__main__":
    sys.exit(main())
