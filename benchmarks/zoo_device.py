"""The zoo under its plans and random modules under random plans on an accelerator, in ways drawn from seeds, with a table.

    python benchmarks/zoo_device.py                                   on the late device: every pair in 3 ways, 300 modules
    python benchmarks/zoo_device.py --device cuda --ways 1 --modules 50

In: how many ways and modules. Out: `benchmarks/results/zoo-device-DEVICE.json` and a summary. Each training is compared with plain PyTorch on the same device:
losses, gradients, weights, buffers, states, random numbers, bit for bit. The late device (tests/accelerator; it needs a C++ compiler) reports every access that
nothing orders. A way (`tests/equivalence/carried.py`) is where homes are (disk, host memory, both), how late streams run, whether the device is the current one,
and whether the caller is in a stream of his own; number 0 is the plainest.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Runs all and writes the table; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["late", "cuda"], default="late")
    parser.add_argument("--ways", type=int, default=3, help="of each pair (default 3)")
    parser.add_argument("--modules", type=int, default=300, help="random modules (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of modules and plans")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/zoo-device-DEVICE.json")
    options = parser.parse_args()

    import torch

    if options.device == "late":
        from accelerator import late  # pyright: ignore[reportMissingImports]

        counts = late.native.counts
    else:
        counts = dict
    device = torch.device(options.device, 0)
    out = options.out or RESULTS / f"zoo-device-{options.device}.json"
    begun = time.perf_counter()
    table = Table(trained_modules=0, failed_module=None, rows=[])
    what = {
        "command": " ".join(["benchmarks/zoo_device.py", *sys.argv[1:]]),
        "commit": _commit(),
        "torch": torch.__version__,
    }

    def save(*, is_done: bool = False) -> dict[str, Any]:
        told = {
            **what,
            "is done": is_done,
            "pairs": len({(row["model"], row["plan"]) for row in table.rows}),
            "trainings of pairs": len(table.rows),
            "of them failed": sum(row["failed"] is not None for row in table.rows),
            "random modules": table.trained_modules,
            "random modules failed": table.failed_module,
            **{name.replace("_", " "): value for name, value in counts().items()},
            "wall seconds": round(time.perf_counter() - begun),
        }
        out.write_text(json.dumps({**told, "rows": table.rows}, indent=1) + "\n")
        return told

    _pairs(device, options.ways, table, save)
    _modules(device, options.modules, options.seed, table, save)
    for key, value in save(is_done=True).items():
        print(f"{key:>24}  {value}")
    failed = [row for row in table.rows if row["failed"] is not None]
    for row in failed:
        print(f"FAILED {row['model']} {row['plan']} way {row['way']}: {row['failed']}")
    return int(table.failed_module is not None or bool(failed))


@dataclass
class Table:
    """Trainings so far.

    Attributes:
        trained_modules: random ones.
        failed_module: what was wrong with the last one, and how to draw it again.
        rows: one a training of a pair.
    """

    trained_modules: int
    failed_module: str | None
    rows: list[dict[str, Any]]


def _pairs(device: Any, ways: int, table: Table, save: Callable[[], object]) -> None:
    from equivalence.carried import Way, train_pair  # pyright: ignore[reportMissingImports]
    from equivalence.zoo_pairs import DEFAULT_PAIRS  # pyright: ignore[reportMissingImports]

    pairs = sorted(DEFAULT_PAIRS)
    for turn in range(ways):
        for place, (model, plan) in enumerate(pairs):
            number = turn and turn * len(pairs) + place
            way = Way.numbered(number)
            failed = None
            with tempfile.TemporaryDirectory() as directory:
                try:
                    train_pair(model, plan, device, Path(directory), way)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a row of the table
                    failed = f"{type(error).__name__}: {error}"[:600]
            table.rows.append({"model": model, "plan": plan, "way": number, "meaning": str(way), "failed": failed})
            print(f"{len(table.rows)}/{len(pairs) * ways} {model} {plan} {number} {failed or 'equal'}", flush=True)
            save()


def _modules(device: Any, examples: int, seed: int, table: Table, save: Callable[[], object]) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    from equivalence.carried import train_drawn  # pyright: ignore[reportMissingImports]

    # No shrinking: a failure here is drawn again, and made small, by `pytest tests/device --examples`.
    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        train_drawn(data, device)
        table.trained_modules += 1
        print(f"module {table.trained_modules}", flush=True)
        save()

    if not examples:
        return
    try:
        draw()
    except Exception as error:  # noqa: BLE001 - as above
        notes = "\n".join(getattr(error, "__notes__", ()))
        table.failed_module = f"{type(error).__name__}: {error}\n{notes}"[:4000]


def _commit() -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
