"""A model whose training state is several times the limit trains in bf16, built empty, below it, as seen by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memory.outside import peak_bytes

MIB = 1 << 20
LAYERS, WIDTH = 14, 1024
PARAMETERS = 8 * WIDTH * WIDTH * LAYERS
# What the process may hold above what it holds with all libraries in use.
ROOM = 200 * MIB

_CHILD = """
import json, sys
import torch
from torch import nn
import memfit
import memfit.api
from memfit.machine.machine import prepare_process
from memfit.devices.binding import install

layers, width, room, directory = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Tower(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def loss(model, batch):
    return (model(batch).float() - batch).square().mean()

def job_of(count, limit):
    torch.manual_seed(0)
    model = memfit.empty(lambda: Tower(count))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return memfit.fit(model, optimizer, loss, batch, limit=limit, allow={"bf16"}, directory=directory)

meter = prepare_process()
batch = torch.randn(4, width)
first = job_of(2, "8GiB")  # libraries, threads and code are there from here on
first.step(batch)
first.close(restore=False)
del first
install().trim()
limit = meter.resident_bytes().whole_bytes + room
meter.reset_peak()
print("begins", flush=True)
job = job_of(layers, limit)
losses = [job.step(batch).loss for _ in range(2)]
print(json.dumps({
    "limit": limit, "losses": losses, "measured": job.proof().measured_peak_bytes, "predicted": job.predicted_peak_bytes,
    "dtype": job.plan.compute_dtype, "splits": job.plan.splits_masters,
}), flush=True)
job.close(restore=False)
print("closed", flush=True)
sys.stdin.readline()  # looked at from outside; how the interpreter ends is not training
"""


@pytest.mark.slow
def test_a_model_born_empty_trains_in_bf16_below_a_limit_of_a_fraction_of_its_state(tmp_path: Path) -> None:
    arguments = [str(LAYERS), str(WIDTH), str(ROOM), str(tmp_path / "homes")]
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(3)]
        seen = peak_bytes(child.pid) if lines[-1] else 0
        _, errors = child.communicate("\n")
    assert (child.returncode, lines[0], lines[-1]) == (0, "begins\n", "closed\n"), errors
    found = json.loads(lines[1])
    # Weights, gradients and two moments in fp32; the weights alone in bf16 would not fit.
    assert 16 * PARAMETERS > 8 * ROOM
    assert 2 * PARAMETERS > ROOM
    assert found["dtype"] == "bfloat16"
    assert found["losses"][-1] < found["losses"][0]
    assert abs(found["measured"] - seen) < 4 * MIB  # the process's own word is what others see
    assert max(found["measured"], found["predicted"], seen) <= found["limit"]
    assert seen >= 0.9 * found["measured"]
