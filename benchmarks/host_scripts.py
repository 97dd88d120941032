"""Training scripts as their hosts' documentation writes them, plain and inside half the memory.

    python benchmarks/host_scripts.py                       # all; some minutes
    python benchmarks/host_scripts.py --only trainer --out benchmarks/results/host-scripts.json

`scripts/NAME.py` is the plain script, `scripts/NAME_memfit.py` the same inside a limit. Each runs twice: a first process trains, evaluates, saves and stops
between two saves; a second one resumes and comes to the end. R: resident after the imports; P: peak of the plain processes. The memfit script then runs with
`limit=` R + (P - R) / 2, in a memory cgroup of the kernel (version 1, root) of that limit; its own peak (VmHWM) must be within it too, since the kernel charges
pages of libraries to whoever read them first. The plain script runs once more in a group that has (P - R) / 2 of room above what it holds after the imports.
All numbers that the two print (losses, norms, evaluations) are compared exactly. Where the memfit script differs from the plain one behind the resume, a third
plain run goes to the end without a break: a host whose own resume does not go on from where it stopped is no reference, and the table says so. Lines: of the
memfit script that the plain one does not have, and the other way round, without looking at indentation.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = (
    "trainer", "sft", "dpo", "lora", "qlora", "lightning_trainer", "accelerate_loop", "nanogpt", "vision", "detection",
    "vision_language", "distillation",
)  # fmt: skip
COMPARED = ("losses", "norms", "evaluations", "final")


def changed_lines(name: str) -> tuple[int, int]:
    """Returns lines that the memfit script has and the plain one has not, and the other way round."""
    plain, ours = (
        [line.strip() for line in (SCRIPTS / f"{name}{suffix}.py").read_text("utf-8").splitlines()]
        for suffix in ("", "_memfit")
    )
    found = list(difflib.ndiff(plain, ours))
    counts = [sum(line.startswith(sign) and bool(line[2:].strip()) for line in found) for sign in "+-"]
    return counts[0], counts[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=NAMES, help="this script (may be repeated)")
    parser.add_argument(
        "--out", type=Path, help="write all figures there as JSON; scripts that were run before stay in it"
    )
    arguments = parser.parse_args()
    results = json.loads(arguments.out.read_text())["scripts"] if arguments.out and arguments.out.is_file() else {}
    for name in arguments.only or NAMES:
        results[name] = measure(name)
        print(table({name: results[name]}), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({"machine": common.machine(), "scripts": results}, indent=1) + "\n")
    print(table(results))
    return 0 if all(result["holds"] for result in results.values()) else 1


def measure(name: str) -> dict[str, Any]:
    """Runs one script: plain, plain in the group, memfit in the group."""
    with tempfile.TemporaryDirectory(prefix="memfit-scripts-") as directory:
        base = Path(directory)
        plain = _both(name, base / "plain")
        found: dict[str, Any] = {"plain": plain, "lines": changed_lines(name)}
        died = [run["died"] for run in plain if "died" in run]
        if died:
            return found | {"holds": False, "why": died[0]}
        resident = max(run["resident"] for run in plain)
        room = (max(run["peak"] for run in plain) - resident) // 2
        limit = resident + room
        shutil.rmtree(base / "plain")
        found |= {"resident": resident, "peak": resident + 2 * room, "limit": limit}
        found["plain_in_group"] = _run(name, base / "killed", room=room)
        ours = found["memfit"] = _both(f"{name}_memfit", base / "ours", limit=limit)
        died = [run["died"] for run in ours if "died" in run]
        equal = not died and all(map(_is_equal, ours, plain))
        if not died and not equal and _is_equal(ours[0], plain[0]):
            unbroken = found["unbroken"] = _run(name, base / "unbroken", is_unbroken=True)
            found["resume_is_off"] = not _is_end(plain[1], unbroken)
            equal = found["resume_is_off"] and _is_end(ours[1], unbroken)
    within = not died and all(run["peak"] <= limit for run in ours)
    return found | {
        "equal": equal, "within": within, "plain_ends": "died" in found["plain_in_group"], "why": died[0] if died else "",
        "holds": equal and within and "died" in found["plain_in_group"] and found["lines"][0] <= 5,
    }  # fmt: skip


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in COMPARED)


def _is_end(resumed: dict[str, Any], unbroken: dict[str, Any]) -> bool:
    """Tells whether a resumed run logged what a run without a break did, as far back as it logged."""
    if "died" in unbroken:
        return False
    pairs = [(resumed[key], unbroken[key]) for key in COMPARED if key in resumed]
    return all(one == (whole[-len(one) :] if isinstance(one, list) else whole) for one, whole in pairs)


def _both(name: str, out: Path, **group: Any) -> list[dict[str, Any]]:
    runs = [_run(name, out, **group)]
    if "died" not in runs[0]:
        runs.append(_run(name, out, is_resumed=True, **group))
    return runs


def _run(
    name: str,
    out: Path,
    *,
    limit: int | None = None,
    room: int | None = None,
    is_resumed: bool = False,
    is_unbroken: bool = False,
) -> dict[str, Any]:
    environment = os.environ | {"SCRIPT_OUT": str(out), "OMP_NUM_THREADS": "1"}
    if is_resumed:
        environment["SCRIPT_RESUME"] = "1"
    if is_unbroken:
        environment["SCRIPT_UNBROKEN"] = "1"
    if limit is not None:
        environment["SCRIPT_LIMIT"] = str(limit)
    if room is not None:
        environment["SCRIPT_ROOM"] = str(room)
    with nullcontext() if limit is None and room is None else common.memory_group(limit) as group:
        if group is not None:
            environment["SCRIPT_GROUP"] = str(group)
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / f"{name}.py")],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        seen = int((group / "memory.max_usage_in_bytes").read_text()) if group is not None else None
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"resident"')]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]) | {"group_peak": seen}
    print(done.stderr[-3000:], file=sys.stderr)
    return {"died": f"exit {done.returncode}"}


def _numbers(found: dict[str, Any]) -> str:
    if not found["equal"]:
        return "DIFFERS"
    return "equal to the run without a break (the plain resume is not)" if "unbroken" in found else "equal"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns a row for each script."""
    rows: list[list[str]] = []
    for name, found in results.items():
        ours, plain = found.get("memfit", [{}]), found["plain"]
        if "limit" not in found or any("died" in run for run in ours):
            rows.append(
                [name, "-", "-", "-", "-", "-", "-", found["why"].splitlines()[-1][:120] if found["why"] else "?"]
            )
            continue
        rows.append([
            name, *(common.mib(found[key]) for key in ("resident", "peak", "limit")), common.mib(max(run["peak"] for run in ours)),
            f"{max(run['step_cpu_s'] for run in plain):.2f}", f"{max(run['step_cpu_s'] for run in ours):.2f}", "{} (-{})".format(*found["lines"]),
            "killed" if found["plain_ends"] else "TRAINS", _numbers(found),
        ])  # fmt: skip
    heads = [
        "script", "R, MiB", "P, MiB", "limit, MiB", "memfit's peak, MiB", "plain, CPU s a step", "memfit", "lines", "plain in the group", "numbers",
    ]  # fmt: skip
    return common.table(heads, [row + [""] * (len(heads) - len(row)) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
