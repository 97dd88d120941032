"""The proof phase by phase: load, first step, steady, evaluate, save, resume; predicted, measured on the process, limit; as a table, as JSON, in the report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import BlockPlan, Plan
from memfit.core.step_report import PhaseProof
from memfit.core.tiers import Tier
from memfit.files.writer import PIECE_BYTES

MIB = 1 << 20
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
ORDER = ["first step", "steady", "evaluate", "save"]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def objects() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)) for _ in range(2)))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(256, 256)


def run(directory: Path, plan: Plan, **wishes: Any) -> memfit.Job:
    model, optimizer, batch = objects()
    job = memfit.fit(model, optimizer, loss, batch, plan=plan, limit="64GiB", enforce=False, **wishes)
    for _ in range(3):
        job.step(batch)
    job.evaluate(batch)
    job.save(directory)
    return job


def check(proof: PhaseProof) -> None:
    assert proof.predicted_bytes is not None
    assert proof.limit_bytes == 64 << 30 and proof.holds
    # Tests before this one have left memory to the process, of which some is used and some grows.
    assert proof.measured_bytes <= proof.predicted_bytes + 16 * MIB
    if proof.name not in ("load", "resume"):
        assert proof.predicted_tensor_bytes is not None
        assert proof.measured_tensor_bytes <= proof.predicted_tensor_bytes + MIB // 2, proof.name


@pytest.mark.parametrize("plan", [Plan(), Plan(blocks={"0": DISK, "1": DISK})], ids=["resident", "disk"])
def test_every_phase_is_predicted_and_measured_and_a_resumed_job_says_resume(tmp_path: Path, plan: Plan) -> None:
    first = run(tmp_path / "a", plan)
    phases = first.proof().by_phase()
    first.close(restore=False)
    assert [phase.name for phase in phases] == ["load", *ORDER]
    assert [phase.times for phase in phases] == [1, 1, 2, 1, 1]
    second = run(tmp_path / "b", plan, resume=tmp_path / "a")
    again = second.proof().by_phase()
    second.report(tmp_path / "report.html")
    second.close(restore=False)
    assert [phase.name for phase in again] == ["resume", *ORDER]
    for phase in (*phases[1:], *again[1:]):
        check(phase)
    weights = 2 * (2 * 256 * 1024 + 1024 + 256) * 4
    by_name = {phase.name: phase for phase in phases}
    # An evaluation makes no gradients; a save needs two pieces of 2 MiB at most.
    assert by_name["evaluate"].predicted_tensor_bytes is not None
    assert (by_name["steady"].predicted_tensor_bytes or 0) - by_name["evaluate"].predicted_tensor_bytes >= weights // 2
    at_rest = 0 if plan.blocks else 3 * weights
    assert at_rest <= (by_name["save"].predicted_tensor_bytes or 0) - 2 * PIECE_BYTES
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])
    assert [(p["name"], p["measured_bytes"]) for p in data["phases"]] == [(p.name, p.measured_bytes) for p in again]


def test_what_a_phase_takes_outside_of_tensors_is_measured_too(tmp_path: Path) -> None:
    taken: list[int] = []

    def loss_with_arrays(model: nn.Module, batch: Tensor) -> Tensor:
        if not model.training and not memfit.is_tracing():
            taken.append(int(np.ones(96 * MIB, dtype=np.uint8).sum()))
        return loss(model, batch)

    model, optimizer, batch = objects()
    with memfit.fit(model, optimizer, loss_with_arrays, batch, plan=Plan()) as job:
        for _ in range(2):
            job.step(batch)
        job.evaluate(batch)
        found = {phase.name: phase for phase in job.proof().by_phase()}
    assert taken == [96 * MIB]
    # NumPy's memory is not torch's: the allocator counts none of it, the kernel counts all.
    assert found["evaluate"].measured_tensor_bytes < found["steady"].measured_tensor_bytes
    assert found["evaluate"].measured_bytes - found["steady"].measured_bytes > 80 * MIB


def test_the_table_fits_80_columns_and_says_what_json_says(tmp_path: Path) -> None:
    job = run(tmp_path / "a", Plan())
    proof = job.proof()
    job.close(restore=False)
    lines = proof.table().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["phase", "times", "predicted", "measured", "limit", "tensors", "predicted", "measured"]
    told = json.loads(json.dumps(proof.data()))
    assert told["counts"] == "process"
    assert [phase["name"] for phase in told["phases"]] == ["load", *ORDER]
    for line, phase in zip(lines[1:], told["phases"], strict=True):
        assert line.startswith(phase["name"])
        assert f"{phase['measured_bytes'] / MIB:.1f} MiB" in line or "GiB" in line
    assert told["measured_peak_bytes"] == max(phase["measured_bytes"] for phase in told["phases"])


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import json
from memory.test_proof_by_phase import run, Plan, DISK
plan = Plan(blocks={"0": DISK, "1": DISK}) if sys.argv[2] == "disk" else Plan()
wishes = {"resume": Path(sys.argv[4])} if len(sys.argv) > 4 else {}
job = run(Path(sys.argv[3]), plan, **wishes)
print(json.dumps(job.proof().data()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["resident", "disk"])
def test_in_a_fresh_process_each_phase_takes_what_was_predicted(tmp_path: Path, how: str) -> None:
    tests = str(Path(__file__).parents[1])
    for arguments in ((str(tmp_path / "a"),), (str(tmp_path / "b"), str(tmp_path / "a"))):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, tests, how, *arguments], capture_output=True, text=True, check=True
        )
        told = json.loads(child.stdout)
        assert [phase["name"] for phase in told["phases"]] == ["resume" if len(arguments) > 1 else "load", *ORDER]
        for phase in told["phases"]:
            assert -24 * MIB <= phase["measured_bytes"] - phase["predicted_bytes"] <= MIB, phase
