"""A model whose weights are several times the limit generates below it, as seen by another process, and says what it says plainly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from memory.outside import peak_bytes

MIB = 1 << 20
LAYERS, WIDTH = 20, 1024
WEIGHT_BYTES = 4 * LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * 2 * WIDTH)
# What the process may hold above what it holds with all libraries in use.
ROOM = 200 * MIB

_CHILD = """
import json, sys
import torch
import memfit
import memfit.api
from memfit.machine.machine import prepare_process
from memfit.devices.binding import install
from transformers import LlamaConfig, LlamaForCausalLM

layers, width, room = map(int, sys.argv[1:4])

def build(count):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=count, num_attention_heads=8,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    ))

def say(model):
    prompt = torch.arange(2, 34).view(2, 16)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, min_new_tokens=6, do_sample=True, pad_token_id=0
    ).tolist()

meter = prepare_process()
with memfit.infer(memfit.empty(lambda: build(2)), limit="8GiB") as session:
    say(session.model)  # libraries, threads and code are there from here on
install().trim()
limit = meter.resident_bytes().whole_bytes + room
meter.reset_peak()
print("begins", flush=True)
model = memfit.empty(lambda: build(layers))
with memfit.infer(model, limit=limit) as session:
    torch.manual_seed(7)
    said = say(session.model)
print(json.dumps({"limit": limit, "measured": session.measured_peak_bytes}), flush=True)
sys.stdin.readline()  # looked at from outside
plain = build(layers).eval()
torch.manual_seed(7)
print(json.dumps({"is_same": say(plain) == said}))
"""


@pytest.mark.slow
def test_a_model_several_times_the_limit_generates_below_it() -> None:
    assert WEIGHT_BYTES > 3 * ROOM
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(LAYERS), str(WIDTH), str(ROOM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert child.stdin is not None and child.stdout is not None
    begins = child.stdout.readline()
    line = child.stdout.readline()
    seen = peak_bytes(child.pid) if line else 0
    output, errors = child.communicate("over\n")
    assert (child.returncode, begins) == (0, "begins\n"), errors
    found = json.loads(line)
    assert max(found["measured"], seen) <= found["limit"]
    assert seen >= 0.9 * found["measured"]
    assert json.loads(output)["is_same"]
