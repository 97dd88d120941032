"""What loading and saving cost where the files are laid out otherwise than the model: experts one by one in shards, packed in the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20

_CHILD = """
import json, sys
import torch
import memfit
import memfit.api
from memfit.machine.machine import prepare_process
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from transformers import MixtralConfig, MixtralForCausalLM

def config(layers, width):
    return MixtralConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32, use_cache=False,
        experts_implementation="grouped_mm",
    )

def loss(model, batch):
    return model(input_ids=batch, labels=batch).loss

def begin(made, weights):
    torch.manual_seed(0)
    model = memfit.empty(lambda: MixtralForCausalLM(made).train(), initialises=weights is None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    home = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    batch = torch.ones(2, 8, dtype=torch.int64)
    names = [block.name for block in memfit.profile(model, optimizer, loss, batch).blocks]
    plan = Plan(blocks=dict.fromkeys(names, home))
    return model, memfit.fit(model, optimizer, loss, batch, plan=plan, weights=weights)

meter = prepare_process()
how, directory = sys.argv[1], sys.argv[2]
wanted = config(8, 512)
if how == "make":
    model, job = begin(wanted, None)
    job.save(directory, max_shard_bytes="40MiB")
    job.close(restore=False)
    sys.exit()
model, job = begin(config(1, 64), None)  # libraries, threads and code are there from here on
job.save(directory + "-small")
job.close(restore=False)
del model, job
install().trim()
meter.reset_peak()
base = meter.resident_bytes().whole_bytes
if how == "plain":
    model = MixtralForCausalLM.from_pretrained(directory)
    loaded = meter.peak_bytes().whole_bytes
    largest = 0
    saved = 0
else:
    model, job = begin(wanted, directory)
    loaded = job.proof().measured_peak_bytes
    largest = max(block.weight_bytes for block in job.profile.blocks)
    install().trim()
    before = meter.resident_bytes().whole_bytes
    job.save(directory + "-again", max_shard_bytes="40MiB")
    saved = next(r for r in job.proof().phases if r.name == "save").process_peak_bytes - before
    job.close(restore=False)
total = sum(p.numel() * 4 for p in model.parameters())
print(json.dumps({"above": loaded - base, "largest": largest, "saved": saved, "total": total}))
"""


def run(how: str, directory: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, how, str(directory)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}


@pytest.mark.slow
def test_experts_in_shards_are_packed_within_the_largest_block_and_64_mib(tmp_path: Path) -> None:
    from safetensors import safe_open

    run("make", tmp_path / "model")
    names: set[str] = set()
    for file in (tmp_path / "model").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    assert "model.layers.3.block_sparse_moe.experts.2.w1.weight" in names  # as transformers writes them
    found, plain = run("pieces", tmp_path / "model"), run("plain", tmp_path / "model")
    print(found, plain)
    assert plain["above"] >= plain["total"] == found["total"]
    assert found["above"] <= found["largest"] + 64 * MIB, found
    assert 2 * (found["largest"] + 64 * MIB) < found["total"]
    # Two pieces of 8 MiB, and what the disk's threads stage.
    assert found["saved"] <= 32 * MIB, found
