"""Memory of deferred weights: the process's peak while a model that would fill it several times is built, filled or loaded, and moved to disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import save_torch_state_dict

MIB = 1 << 20
LAYERS, WIDTH = 19, 1280
LAYER_BYTES = 2 * 4 * WIDTH * WIDTH
# Of loading: the pieces of reading and of the disk's workers, the trace of the model.
OVERHEAD_BYTES = 64 * MIB

_MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def build(layers, width):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers)))
"""

_CHILD = f"""{_MODEL}
import json, sys
import memfit
import memfit.api
from memfit.machine.machine import prepare_process
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import install

layers, width, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def loss(model, batch):
    return model(batch).square().mean()

def plan(count):
    home = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    return Plan(blocks={{str(i): home for i in range(count)}})

def begin(count, how):
    global built
    make = lambda: build(count, width)
    weights = directory if how == "files" else None
    model = make() if how == "plain" else memfit.empty(make, initialises=weights is None)
    built = meter.peak_bytes().whole_bytes  # the job's phases start the kernel's peak anew
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, memfit.fit(model, optimizer, loss, torch.ones(2, width), plan=plan(count), weights=weights,
                             blocks=[str(i) for i in range(count)])

def measure(how):
    install().trim()
    meter.reset_peak()
    base = meter.resident_bytes().whole_bytes
    model, job = begin(layers, how)
    peak = max(built, job.proof().measured_peak_bytes)
    first = job.step(torch.ones(2, width)).loss
    with job.weights("0"):
        sample = float(model[0].up.weight.double().sum())
    job.close(restore=False)
    print(json.dumps({{"above": peak - base, "loss": first, "sample": sample}}))

meter = prepare_process()
model, job = begin(2, "built")  # libraries, threads and code are there from here on
job.step(torch.ones(2, width))
job.close(restore=False)
del model, job
for how in sys.argv[4:]:
    measure(how)
"""


def run(directory: Path, *ways: str) -> list[dict[str, float]]:
    """A child process's figures of a model that gets its weights in these ways, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(LAYERS), str(WIDTH), str(directory), *ways],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def save(directory: Path) -> None:
    """The same model in files, built plainly in this process."""
    scope: dict[str, Any] = {}
    exec(_MODEL, scope)
    save_torch_state_dict(scope["build"](LAYERS, WIDTH).state_dict(), directory, max_shard_size=30 * MIB)


def test_a_model_is_born_and_loaded_within_its_largest_block_and_64_mib(tmp_path: Path) -> None:
    save(tmp_path)
    allowed = LAYER_BYTES + OVERHEAD_BYTES
    assert 3 * allowed < LAYERS * LAYER_BYTES  # the whole model would be seen
    built, loaded = run(tmp_path, "built", "files")
    assert built["above"] <= allowed, f"{built['above'] / MIB:.1f} MiB above the base"
    assert loaded["above"] <= allowed, f"{loaded['above'] / MIB:.1f} MiB above the base"
    assert (built["loss"], built["sample"]) == (loaded["loss"], loaded["sample"])


@pytest.mark.slow
def test_a_plainly_built_model_is_seen_whole_by_the_same_measurement(tmp_path: Path) -> None:
    (plain,) = run(tmp_path, "plain")
    assert plain["above"] >= LAYERS * LAYER_BYTES


_LARGE = """
import json, resource, torch
import memfit
from torch import nn

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

def ask(layers, width):
    model = memfit.empty(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.profile(model, optimizer, lambda m, rows: m(rows).square().mean(), torch.zeros(8, width))

ask(2, 512)  # code that is imported on the way
base = peak()
found = ask(120, 8192)
print(json.dumps({"above": peak() - base, "weights": found.weight_bytes}))
"""


@pytest.mark.slow
def test_eight_billion_weights_are_built_empty_and_profiled_in_64_mib() -> None:
    done = subprocess.run([sys.executable, "-c", _LARGE], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["weights"] == 120 * 8192 * 8192 * 4
    # A draw of one weight alone takes 256 MiB.
    assert found["above"] <= 64 * MIB
