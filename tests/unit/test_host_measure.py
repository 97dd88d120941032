"""What the trials measure, how their figures are put together, and what `memfit doctor` prints of them."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from memfit.cli import app
from memfit.core.errors import TierUnavailableError
from memfit.machine.host import measure, trials
from memfit.machine.host.measure import Measurements, measure_host
from memfit.machine.host.read import read_host
from memfit.machine.host.settings import compute_threads

MIB = 2**20
# By its name: `memfit.cli.doctor_command` as an attribute is the function.
COMMAND = sys.modules["memfit.cli.doctor_command"]


@pytest.mark.slow
def test_everything_is_measured_on_this_machine(tmp_path: Path) -> None:
    host = read_host(tmp_path)
    measured = measure_host(host, rounds=1, slice_s=0.02)
    assert measured.waiting.threads == compute_threads(host)
    assert {one.threads for one in measured.threads} >= {1, compute_threads(host), len(os.sched_getaffinity(0))}
    figures = [
        measured.waiting.before_alone_s,
        measured.waiting.passive_contended_s,
        *(one.step_s for one in measured.threads),
        measured.first_touch.small_bytes_per_s,
        measured.first_touch.huge_bytes_per_s,
    ]
    assert all(figure > 0 for figure in figures)
    assert measured.disk_cached is not None and measured.file_bytes == 64 * MIB


def test_a_contended_step_has_a_busy_thread_beside_it_and_none_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    sums: list[int] = []
    monkeypatch.setattr("zlib.crc32", lambda data: sums.append(len(data)))
    try:
        alone = trials.time_step(threads=1, seconds=0.0, is_contended=False)
        assert sums == []
        contended = trials.time_step(threads=1, seconds=0.0, is_contended=True)
    finally:
        torch.set_num_threads(threads)
    assert sums and set(sums) == {MIB}
    assert alone["step_s"] > 0 and contended["step_s"] > 0
    count = len(sums)
    time.sleep(0.02)
    assert len(sums) == count


def test_direct_io_leaves_nothing_in_the_page_cache(tmp_path: Path) -> None:
    cached = trials.use_disk(directory=str(tmp_path), nbytes=8 * MIB, is_direct=False)
    assert cached["cached_bytes"] == 8 * MIB
    found = read_host(tmp_path).disk
    assert found is not None
    if found.direct_io_refusal is not None:
        pytest.skip("no direct I/O here")
    direct = trials.use_disk(directory=str(tmp_path), nbytes=8 * MIB, is_direct=True)
    assert direct["cached_bytes"] == 0
    assert list(tmp_path.iterdir()) == []


def test_huge_pages_are_counted_where_they_are_asked_for() -> None:
    if read_host().huge_pages.mode not in ("madvise", "always"):
        pytest.skip("no huge pages")
    answer = trials.touch_pages(nbytes=32 * MIB)
    share = answer["huge_share"]
    assert share is not None and 0 <= share <= 1
    # The kernel may have none to give, but small pages that were asked for are never counted as huge ones.
    assert trials._touch(32 * MIB, mmap.MADV_NOHUGEPAGE)[2] == 0


# A stand-in for trials.py: figures follow from the environment and the request, and are worse each time.
STAND_IN = """
import json, os, sys
count = 0
for line in sys.stdin:
    request = json.loads(line)
    count += 1
    if request["trial"] == "step":
        step = 0.010 if os.environ.get("OMP_WAIT_POLICY") == "PASSIVE" else 0.020
        answer = {"step_s": step * (3 if request["is_contended"] else 1) / request["threads"] + count * 1e-6}
    elif request["trial"] == "touch":
        answer = {"small_bytes_per_s": 2e9 - count, "huge_bytes_per_s": 8e9, "again_bytes_per_s": 16e9, "huge_share": 0.5}
    else:
        rate = 2e9 if request["is_direct"] else 1e9
        cached = 0 if request["is_direct"] else request["nbytes"]
        answer = {"write_bytes_per_s": rate, "read_bytes_per_s": 2 * rate, "cached_bytes": cached}
    with open(os.environ["ASKED"], "a") as asked:
        print(json.dumps({**request, "environment": dict(os.environ)}), file=asked)
    print(json.dumps(answer), flush=True)
"""


def measure_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **own: str) -> tuple[Measurements, list[Any]]:
    """What is made of the stand-in's figures, and what it was asked."""
    program, asked = tmp_path / "stand_in.py", tmp_path / "asked"
    program.write_text(STAND_IN)
    monkeypatch.setattr(measure, "_TRIALS", program)
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"ASKED": str(asked), **own}.items():
        monkeypatch.setenv(name, value)
    host = read_host(tmp_path)
    disk = host.disk
    assert disk is not None
    host = replace(
        host,
        processors=replace(host.processors, allowed=(0, 1, 2, 3), physical_cores=2, quota=None),
        disk=replace(disk, direct_io_refusal=None, free_bytes=100 * MIB),
    )
    found = measure_host(host, rounds=3)
    return found, [json.loads(line) for line in asked.read_text().splitlines()]


def test_figures_are_put_together_from_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = measure_stand_in(tmp_path, monkeypatch)
    waiting = found.waiting
    assert (waiting.before, waiting.threads) == ("OpenMP's default", 2)
    assert waiting.before_alone_s == pytest.approx(0.010, abs=1e-4)
    assert waiting.passive_alone_s == pytest.approx(0.005, abs=1e-4)
    assert waiting.alone_gain == pytest.approx(2, rel=0.02)
    assert waiting.contended_gain == pytest.approx(2, rel=0.02)
    assert [one.threads for one in found.threads] == [1, 2, 4]
    assert found.fastest_threads.threads == 4
    assert found.first_touch.huge_share == 0.5
    assert found.file_bytes == 24 * MIB  # a quarter of what is free, in whole pieces
    assert found.disk_direct is not None and found.disk_cached is not None
    assert (found.disk_direct.read_bytes_per_s, found.disk_cached.read_bytes_per_s) == (4e9, 2e9)
    assert (found.disk_direct.cached_bytes, found.disk_cached.cached_bytes) == (0, 24 * MIB)
    # Who is compared takes turns: of the steps with two threads no two in a row come from the same process.
    steps = [one for one in asked if one["trial"] == "step" and one["seconds"] > 0]
    turns = [(one["environment"].get("OMP_WAIT_POLICY"), one["is_contended"]) for one in steps][:4]
    assert turns == [(None, False), ("PASSIVE", False), (None, True), ("PASSIVE", True)]
    assert {one["environment"]["OMP_NUM_THREADS"] for one in asked} == {"4"}


@pytest.mark.parametrize(
    ("own", "before"),
    [
        ({"OMP_WAIT_POLICY": "passive"}, "OpenMP's default"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY=ACTIVE"),
        ({"GOMP_SPINCOUNT": "9", "OMP_NUM_THREADS": "3"}, "GOMP_SPINCOUNT=9"),
    ],
)
def test_passive_waiting_is_compared_with_the_users_own(
    own: dict[str, str], before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = measure_stand_in(tmp_path, monkeypatch, **own)
    assert found.waiting.before == before
    counts = {1, 2, 4} | ({3} if "OMP_NUM_THREADS" in own else set())
    assert {one.threads for one in found.threads} == counts
    spun = [one["environment"] for one in asked if one["environment"].get("OMP_WAIT_POLICY") != "PASSIVE"]
    slept = [one["environment"] for one in asked if one["environment"].get("OMP_WAIT_POLICY") == "PASSIVE"]
    assert spun and slept and not any("GOMP_SPINCOUNT" in environment for environment in slept)
    assert all(
        before in ("OpenMP's default", *(f"{name}={value}" for name, value in environment.items()))
        for environment in spun
    )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit('no torch here')", "ended with 1: no torch here"),
        ("import time; time.sleep(60)", "ended with -9: it said nothing"),
    ],
)
def test_a_child_that_fails_or_hangs_is_one_clear_error(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "program.py"
    path.write_text(program)
    monkeypatch.setattr(measure, "_TRIALS", path)
    monkeypatch.setattr(measure, "_PATIENCE_S", 0.5 if "sleep" in program else 60)
    with pytest.raises(TierUnavailableError, match=message):
        measure_host(read_host())


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurements:
    """Figures of the stand-in."""
    with monkeypatch.context() as patched:
        return measure_stand_in(tmp_path, patched)[0]


# The command.


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def test_doctor_prints_what_was_found_set_and_measured(
    measured: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMMAND, "measure_host", lambda host: measured)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = run("--directory", str(tmp_path))
    assert f"{os.cpu_count()} logical" in text and str(tmp_path) in text
    assert "yours stays: OMP_WAIT_POLICY=PASSIVE" in text
    line = next(line for line in text.splitlines() if line.startswith("OMP_NUM_THREADS="))
    assert line.split()[1] == "memfit"
    assert f"{measured.waiting.passive_alone_s * 1e3:.1f} ms" in text
    assert f"{measured.waiting.contended_gain:.2f}x" in text
    assert "page cache" in text and "huge pages" in text


def test_doctor_as_json_holds_the_same(measured: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COMMAND, "measure_host", lambda host: measured)
    document = json.loads(run("--directory", str(tmp_path), "--json"))
    assert document["found"]["disk"]["directory"] == str(tmp_path)
    assert document["found"]["processors"]["allowed"] == sorted(os.sched_getaffinity(0))
    assert [one["name"] for one in document["settings"]][:2] == ["OMP_WAIT_POLICY", "OMP_NUM_THREADS"]
    assert document["measured"] == json.loads(json.dumps(asdict(measured)))


def test_doctor_without_measuring_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    text = run("--directory", str(tmp_path), "--no-measure")
    assert "Measured" not in text
    assert "OMP_NUM_THREADS=4096, and" in text and "\n   not measured\n" in text
    assert json.loads(run("--json", "--no-measure"))["measured"] is None


def test_doctor_refuses_a_directory_that_is_not_there() -> None:
    text = run("--directory", "/no/such/place", "--no-measure", code=2)
    assert text.startswith("memfit: /no/such/place is not a directory")


def test_doctor_leaves_the_environment_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    run("--directory", str(tmp_path), "--no-measure")
    assert dict(os.environ) == before
