"""`benchmarks/gpu.py`: no crash, hang or interruption of a part costs another's results; its table says what ran and what did not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gpu
from gpu_check import notes as noting
from gpu_check.notes import Notes, write_whole
from gpu_check.parts import Part, all_parts
from gpu_check.report import markdown
from gpu_check.running import run_child
from gpu_check.subjects import GIB, SIZES, SUBJECTS, size_for

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu.py"
CHILDREN = {
    "good": "note(step_s=2.0, slowest_step_s=2.5, losses=[1.5, 1.25])",
    "killed": "note(step_s=1.0, slowest_step_s=1.0, losses=[1.0]); os.kill(os.getpid(), 9)",
    "wrong": "raise RuntimeError('no such kernel')",
    "hung": "subprocess.Popen(['sleep', '1000']); time.sleep(1000)",
}
BEFORE = """
import os, sys, json, subprocess, time
def note(**values): open(sys.argv[1], 'w').write(json.dumps(values))
"""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Children that do as they are called, and the list of those that were started."""
    started: list[str] = []

    def command(request: Mapping[str, Any]) -> list[str]:
        started.append(request["request"]["does"])
        return [sys.executable, "-c", BEFORE + CHILDREN[started[-1]], request["notes"]]

    monkeypatch.setattr(gpu, "_command", command)
    return started


def part(does: str, *, limit_s: float = 60) -> Part:
    return Part(name=f"gpt2: {does}", work="fsdp", limit_s=limit_s, request={"does": does})


def test_a_part_that_crashes_fails_or_hangs_costs_no_other_its_results(called: list[str], tmp_path: Path) -> None:
    parts = [part("killed"), part("wrong"), part("hung", limit_s=1.5), part("good")]
    parts += [Part(name="gpt2: needs more", work="memfit", request={"does": "good"}, after="gpt2: wrong")]
    output = tmp_path / "report"
    record = gpu.begun("late", "tiny", "version 1", output)
    gpu.run(parts, record, tmp_path, output, minutes=5)

    written = json.loads(Path(f"{output}.json").read_text())
    outcomes = {name: found["outcome"] for name, found in written["parts"].items()}
    assert outcomes == {
        "gpt2: killed": "crashed", "gpt2: wrong": "failed", "gpt2: hung": "out of time", "gpt2: good": "done", "gpt2: needs more": "not run",
    }  # fmt: skip
    assert written["parts"]["gpt2: killed"]["notes"]["step_s"] == 1.0
    assert written["parts"]["gpt2: wrong"]["words"] == "RuntimeError: no such kernel"
    text = Path(f"{output}.md").read_text()
    assert "meaningless" in text and "1 of 5 parts done" in text
    assert "| gpt2: good | 2 | - | 2.5 | - | - | - | 1.50000, 1.25000 |" in text
    assert "- **gpt2: killed**: crashed: ended by SIGKILL" in text
    assert "- **gpt2: hung**: out of time: not done after 2 s" in text
    assert "- **gpt2: needs more**: not run: it needs what 'gpt2: wrong' measures" in text

    # The same command again does what is not done, and nothing else.
    called.clear()
    again = gpu.begun("late", "tiny", "version 1", output)
    gpu.run([part("good"), part("wrong")], again, tmp_path, output, minutes=5)
    assert called == ["wrong"]
    assert again["parts"]["gpt2: good"]["outcome"] == "done"
    with pytest.raises(SystemExit, match=r"a report of another stamp: --again replaces it"):
        gpu.begun("late", "tiny", "version 2", output)
    assert gpu.begun("late", "tiny", "version 2", output, again=True)["parts"] == {}


def test_what_does_not_begin_in_time_is_said_not_to_have_run(called: list[str], tmp_path: Path) -> None:
    record = gpu.begun("cuda", "small", "version 1", tmp_path / "report")
    gpu.run([part("good")], record, tmp_path, tmp_path / "report", minutes=0)
    assert called == []
    assert "not run: the minutes were over" in Path(tmp_path / "report.md").read_text()


def test_children_of_a_child_end_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"import subprocess; p = subprocess.Popen(['sleep', '1000']); open({str(pid)!r}, 'w').write(str(p.pid))"
    assert run_child([sys.executable, "-c", script], 60).outcome == "done"
    status = Path(f"/proc/{pid.read_text()}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


def test_notes_are_whole_at_every_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notes.json"
    Notes(path).note(first=1)

    def half(self: Path, text: str, **_: Any) -> int:
        with self.open("w") as out:
            out.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, json.dumps({"second": 2}))
    assert noting.read_notes(path) == {"first": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_every_part_can_be_asked_for_and_names_what_there_is() -> None:
    for kind in ("cuda", "late"):
        parts = all_parts(kind)
        names = [each.name for each in parts]
        assert len(set(names)) == len(names)
        for number, each in enumerate(parts):
            assert each.after is None or each.after in names[:number]
            subject = each.request.get("subject")
            assert subject is None or (subject in SUBJECTS and each.name.startswith(f"{subject}: "))
    # What runs elsewhere than on the device that is named says so.
    assert all("on the processor" in each.name for each in all_parts("late") if each.work == "fsdp")
    assert [each.name for each in gpu.chosen(all_parts("cuda"), ["half of plain's"])] == [
        "gpt2: plain",
        "gpt2: chosen by fit for half of plain's memory",
    ]


def test_sizes_follow_the_memory_of_the_device() -> None:
    assert [size_for(n * GIB, is_emulated=False) for n in (6, 12, 24, 80)] == ["small", "medium", "medium", "large"]
    assert size_for(80 * GIB, is_emulated=True) == "tiny"
    assert all(size.rows % 4 == 0 and size.width % size.heads == 0 for size in SIZES.values())


def test_the_table_of_a_run_without_figures_is_honest() -> None:
    facts = {"outcome": "crashed", "words": "ended by SIGSEGV", "said": "", "seconds": 1.0, "notes": {}}
    record = {
        "device": "cuda", "is_emulated": False, "size": "small", "asked": 2, "seconds": 1.0, "begun": "now", "is_complete": True,
        "parts": {"machine": {"work": "machine", **facts}, "gpt2: resident": {"work": "memfit", **facts}},
    }  # fmt: skip
    text = markdown(record)
    assert "0 of 2 parts done" in text and "Peaks" not in text and "Steps" not in text
    assert text.count("ended by SIGSEGV") == 2


def test_a_report_names_no_directory_of_the_reader() -> None:
    said = f"File {ROOT}/src/x.py, {Path.home()}/data"
    assert gpu.private(said) == "File <memfit>/src/x.py, ~/data"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="the late device needs a C++ compiler")
def test_the_whole_check_runs_to_its_end_on_the_emulated_device(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--device", "late", "--minutes", "60", "--output", "report"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    record = json.loads((tmp_path / "report-late.json").read_text())
    assert record["parts"].keys() == {each.name for each in all_parts("late")}
    for name, found in record["parts"].items():
        if found["work"] == "memfit" and "difference" in found["notes"] and found["notes"]["numerics"] == "exact":
            assert found["notes"]["difference"]["other"] == 0, name
        if found["work"] == "inference":
            assert found["notes"]["same_tokens"], name
