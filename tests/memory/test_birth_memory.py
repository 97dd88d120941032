"""What being born in pieces costs: the process's peak while a model that would fill it several times is built, filled or loaded, and moved to disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
LAYERS, WIDTH = 24, 1280
LAYER_BYTES = 2 * 4 * WIDTH * WIDTH
# Of loading: the pieces of reading and of the disk's workers, the trace of the model.
OVERHEAD_BYTES = 64 * MIB

_CHILD = """
import json, sys
import torch
from torch import nn
import memfit
from memfit.api.machine import prepare_process
from memfit.core.plan import BlockPlan, Plan, Tier
from memfit.runtime.allocator import install

layers, width, how, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)))

def loss(model, batch):
    return model(batch).square().mean()

def plan(count):
    home = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    return Plan(blocks={str(i): home for i in range(count)})

def begin(count, how, weights):
    global layers, built
    layers = count
    model = build() if how == "plain" else memfit.empty(build, initialises=weights is None)
    built = meter.peak_bytes().whole_bytes  # the job's phases start the kernel's peak anew
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, memfit.fit(model, optimizer, loss, torch.ones(2, width), plan=plan(count), weights=weights,
                             blocks=[str(i) for i in range(count)])

meter = prepare_process()
wanted = layers
if how == "save":
    model, job = begin(wanted, "plain", None)
    job.save(directory, max_shard_bytes="30MiB")
    job.close(restore=False)
    sys.exit()
model, job = begin(2, "born", None)  # libraries, threads and code are there from here on
job.step(torch.ones(2, width))
job.close(restore=False)
del model, job
install().trim()
meter.reset_peak()
base = meter.resident_bytes().whole_bytes
model, job = begin(wanted, how, directory if how == "files" else None)
peak = max(built, job.proof().measured_peak_bytes)
first = job.step(torch.ones(2, width)).loss
with job.weights("0"):
    sample = float(model[0].up.weight.double().sum())
job.close(restore=False)
print(json.dumps({"above": peak - base, "loss": first, "sample": sample}))
"""


def run(how: str, directory: Path, *, layers: int = LAYERS) -> dict[str, float]:
    """A child process's figures."""
    arguments = [str(layers), str(WIDTH), how, str(directory)]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else {}


def test_a_model_is_born_and_loaded_within_its_largest_block_and_64_mib(tmp_path: Path) -> None:
    run("save", tmp_path / "saved")
    allowed = LAYER_BYTES + OVERHEAD_BYTES
    assert 3 * allowed < LAYERS * LAYER_BYTES  # the whole model would be seen
    born, loaded = run("born", tmp_path), run("files", tmp_path / "saved")
    assert born["above"] <= allowed, f"{born['above'] / MIB:.1f} MiB above the base"
    assert loaded["above"] <= allowed, f"{loaded['above'] / MIB:.1f} MiB above the base"
    assert (born["loss"], born["sample"]) == (loaded["loss"], loaded["sample"])


@pytest.mark.slow
def test_a_plainly_built_model_is_seen_whole_by_the_same_measurement(tmp_path: Path) -> None:
    plain = run("plain", tmp_path)
    assert plain["above"] >= LAYERS * LAYER_BYTES
