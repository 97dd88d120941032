"""Checks memfit on a GPU and measures it, in about ten minutes: docs/gpu.md says how to read the table and where to send it.

    python benchmarks/gpu.py                          # the first CUDA device; CUDA_VISIBLE_DEVICES chooses another
    python benchmarks/gpu.py --device late            # the emulated device of tests/accelerator: its times mean nothing
    python benchmarks/gpu.py --only gpt2 --only llama # parts whose names contain this; --list prints all names

Needs the test extras: `make install`, then `.venv/bin/python` in place of `python`. Nothing is downloaded and nothing is sent.

Every part is a process of its own with a time limit: the device tests; plain PyTorch, torch.utils.checkpoint and FSDP2 with CPU offload; memfit with homes on
the device, the host and the disk, activations kept, recomputed, selected and offloaded, the loss in chunks, limits; generation with weights away. Results are
written after every part (`gpu-report.json`, `gpu-report.md`): a crash, a hang or Ctrl-C costs that part alone. `--again` does anew what a report has already.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_check.notes import Notes, read_notes, write_whole
from gpu_check.parts import Part, all_parts
from gpu_check.report import markdown
from gpu_check.running import Ending, run_child

Record = dict[str, Any]
ROOT = Path(__file__).parents[1]


def main() -> int:
    """Runs what is asked for; the exit status is 0 where all of it was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, another of torch's kinds, or late (default: cuda)")
    parser.add_argument(
        "--size", choices=("tiny", "small", "medium", "large"), help="of models (default: by the device's memory)"
    )
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="parts whose names contain this")
    parser.add_argument("--minutes", type=float, default=20.0, help="no part begins after this time (default: 20)")
    parser.add_argument(
        "--directory",
        type=Path,
        help="on the disk to be measured, for homes; some GB (default: the temporary directory)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu-report"), help="report without its suffix (default: ./gpu-report)"
    )
    parser.add_argument("--again", action="store_true", help="begin a new report where there is one")
    parser.add_argument("--list", action="store_true", help="print the names of all parts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        return work(json.loads(arguments.child))
    parts = chosen(all_parts(arguments.device), arguments.only)
    if arguments.list:
        print("\n".join(part.name for part in parts))
        return 0
    if not parts:
        parser.error(f"no part has {arguments.only} in its name; --list prints all names")
    output = arguments.output.with_name(arguments.output.name + ("-late" if arguments.device == "late" else ""))
    found = look_at(arguments.device)
    record = begun(arguments.device, arguments.size or found["size"], found["stamp"], output, again=arguments.again)
    if arguments.directory is not None:
        arguments.directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="memfit-gpu-") as folder:
            run(parts, record, Path(folder), output, minutes=arguments.minutes)
    except KeyboardInterrupt:
        print(f"\nstopped; {output}.md has what is done, and the same command goes on", file=sys.stderr)
        return 130
    print("\n" + markdown(record))
    print(f"Report: {output}.md and {output}.json (docs/gpu.md says where to send them)")
    return 0 if all(part["outcome"] == "done" for part in record["parts"].values()) else 1


def chosen(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Parts whose names contain one of the words, and those that they cannot do without."""
    wanted = [part for part in parts if not only or any(words in part.name for words in only)]
    needed = {part.after for part in wanted}
    return [part for part in parts if part in wanted or part.name in needed]


def look_at(device: str) -> Mapping[str, str]:
    """The size for the device's memory, and a stamp of what is measured; read in a child, so that this process never touches the device.

    Raises:
        SystemExit: the device cannot be used, with torch's reason.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-gpu-") as folder:
        notes = Path(folder) / "size.json"
        ending = run_child(_command({"work": "size", "device": device, "notes": str(notes)}), 300, _environment(device))
        if ending.outcome != "done":
            raise SystemExit(f"{device} cannot be used: {ending.words}")
        return read_notes(notes)


def begun(device: str, size: str, stamp: str, output: Path, *, again: bool = False) -> Record:
    """An empty record, or that of a report which this run goes on with.

    Raises:
        SystemExit: the report is of another device, size or version.
    """
    record: Record = {
        "format": 1, "device": device, "size": size, "stamp": stamp, "is_emulated": device == "late", "asked": 0, "seconds": 0.0,
        "begun": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "is_complete": False, "parts": {},
    }  # fmt: skip
    path = Path(f"{output}.json")
    if again or not path.exists():
        return record
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if other := [name for name in ("format", "device", "size", "stamp") if earlier.get(name) != record[name]]:
        raise SystemExit(f"{path} is a report of another {other[0]}: --again replaces it, --output names another file")
    return {**record, **{name: earlier[name] for name in ("parts", "seconds", "begun")}}


def run(parts: Sequence[Part], record: Record, folder: Path, output: Path, *, minutes: float) -> None:
    """All parts that the record does not have yet; the report is written after each."""
    began = time.monotonic()
    done = {name for name, part in record["parts"].items() if part["outcome"] == "done"}
    missing = [part for part in parts if part.name not in done]
    record["asked"] = len({part.name for part in parts} | record["parts"].keys())
    for number, part in enumerate(parts):
        # Weights of plain PyTorch lie in this run's folder: they are made again for whoever is to be compared with them.
        if part not in missing and not (part.work == "plain" and any(_is_beside(part, each) for each in missing)):
            continue
        print(f"[{number + 1}/{len(parts)}] {part.name} ...", file=sys.stderr, end=" ", flush=True)
        ending, notes = _run_part(part, folder, record, left_s=60 * minutes - (time.monotonic() - began))
        print(
            f"{ending.outcome}, {ending.seconds:.0f} s{': ' if ending.words else ''}{ending.words}",
            file=sys.stderr,
            flush=True,
        )
        record["parts"][part.name] = {
            "work": part.work,
            "outcome": ending.outcome,
            "words": private(ending.words),
            "said": "" if ending.outcome == "done" else private(ending.said),
            "seconds": round(ending.seconds, 1),
            "notes": notes,
        }
        record["seconds"] += ending.seconds
        write(record, output)
    record["is_complete"] = True
    write(record, output)


def _is_beside(plain: Part, other: Part) -> bool:
    return other.name.split(":")[0] == plain.name.split(":")[0]


def _run_part(part: Part, folder: Path, record: Record, *, left_s: float) -> tuple[Ending, Mapping[str, Any]]:
    if left_s <= 0:
        return Ending(outcome="not run", words="the minutes were over (--minutes gives more)", said="", seconds=0.0), {}
    if part.after is not None and record["parts"].get(part.after, {}).get("outcome") != "done":
        return Ending(outcome="not run", words=f"it needs what {part.after!r} measures", said="", seconds=0.0), {}
    notes = folder / "notes.json"
    notes.unlink(missing_ok=True)
    request = {
        "work": part.work, "device": record["device"], "size": record["size"], "folder": str(folder), "notes": str(notes), "request": part.request,
        "earlier": {name: each["notes"] for name, each in record["parts"].items() if name == "machine" or name.endswith(": plain")},
    }  # fmt: skip
    ending = run_child(_command(request), part.limit_s, _environment(record["device"]))
    return ending, read_notes(notes)


def write(record: Record, output: Path) -> None:
    """Both files, each replaced in one step."""
    write_whole(Path(f"{output}.json"), json.dumps(record, indent=1) + "\n")
    write_whole(Path(f"{output}.md"), markdown(record))


def private(text: str) -> str:
    """Text without the reader's directories."""
    words = {str(ROOT): "<memfit>", tempfile.gettempdir(): "<tmp>", str(Path.home()): "~"}
    for path in sorted(words, key=len, reverse=True):  # one may lie inside another
        text = text.replace(path, words[path]) if len(path) > 1 else text
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _command(request: Mapping[str, Any]) -> list[str]:
    return [sys.executable, __file__, "--child", json.dumps(request)]


def _environment(device: str) -> dict[str, str]:
    found = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    inherited = os.environ.get("PYTHONPATH")
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *([inherited] if inherited else [])])
    if device == "late":
        found |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return found


# --- the child --------------------------------------------------------------------------------------------------------------------


def work(request: Mapping[str, Any]) -> int:
    """One part, in this process; what it measures goes into the notes."""
    import contextlib
    import importlib

    import torch

    notes = Notes(Path(request["notes"]))
    kind = request["device"]
    checked: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if kind == "late":
        sys.path.insert(0, str(ROOT / "tests"))
        checked = importlib.import_module("accelerator.late").checked()  # a race fails its part
    elif kind == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "torch sees no CUDA device (nvidia-smi, and torch.version.cuda, say why); --device late runs without one"
        )
    device = torch.device(kind, 0)
    if request["work"] == "size":
        from gpu_check.subjects import size_for
        from gpu_check.views import commit

        total = torch.accelerator.get_memory_info(device)[1]
        stamp = f"{commit()}, torch {torch.__version__}, {total} bytes"
        notes.note(size=size_for(total, is_emulated=kind == "late"), stamp=stamp)
        return 0
    from gpu_check.work import WORK, Setting

    setting = Setting(
        device=device, size=request["size"], directory=Path(request["folder"]), earlier=request["earlier"], notes=notes
    )
    with checked:
        WORK[request["work"]](setting, **request["request"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
