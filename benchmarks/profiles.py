"""Seconds and memory that large models take to be built empty and to be profiled, on a machine that could not hold their weights.

    python benchmarks/profiles.py --out benchmarks/results/profiles.json
    python benchmarks/profiles.py --models llama-8b --rounds 5

Llama's configurations with 8 billion, 70 billion and 405 billion parameters in fp32, one sequence of 4,096 tokens, AdamW. Every figure is of a
process of its own, imports included where it says so; the median of the rounds is shown. Two roads: `memfit profile --model CONFIG` (whole command),
and from Python `memfit.empty`, then `memfit.profile`, where imports are not counted. That weights are bit for bit those of plain building is the
matter of `tests/unit/test_draws.py`. Seconds are those of the wall, with those of the process beside them: they tell what others took meanwhile.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

TOKENS = 4096
SIZES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-405b": {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}  # fmt: skip
PYTHON = [sys.executable]


def peak_bytes() -> int:
    """Most that was resident of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def from_python(name: str) -> dict[str, Any]:
    """Figures of this process, which imports everything first."""
    import torch
    import transformers
    from transformers.models.llama import modeling_llama

    import memfit

    imported = peak_bytes()
    config = transformers.LlamaConfig(**SIZES[name], max_position_embeddings=2 * TOKENS, use_cache=False)
    torch.manual_seed(0)
    began, began_cpu = time.perf_counter(), time.process_time()
    model = memfit.empty(lambda: modeling_llama.LlamaForCausalLM(config))
    built, built_cpu = time.perf_counter(), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    found = memfit.profile(model, optimizer, lambda m, t: m(input_ids=t, labels=t).loss, tokens)
    return {
        "empty_s": built - began,
        "empty_cpu_s": built_cpu - began_cpu,
        "profile_s": time.perf_counter() - built,
        "profile_cpu_s": time.process_time() - built_cpu,
        "peak_bytes": peak_bytes(),
        "imported_bytes": imported,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": found.weight_bytes,
    }


def command(config: Path) -> dict[str, Any]:
    """Figures of `memfit profile --model CONFIG`, from the start of the process to its end."""
    arguments = ["-m", "memfit", "profile", "--model", str(config), "--batch", "1", "--sequence", str(TOKENS)]
    began = time.perf_counter()
    with subprocess.Popen([*PYTHON, *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"memfit profile ended with {process.returncode}")
    return {
        "command_s": time.perf_counter() - began,
        "command_cpu_s": usage.ru_utime + usage.ru_stime,
        "command_peak_bytes": usage.ru_maxrss << 10,
    }


def measure(name: str, rounds: int) -> dict[str, Any]:
    """The medians of a model."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"
        fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2 * TOKENS}
        config.write_text(json.dumps({**fields, **SIZES[name]}))
        for _ in range(rounds):
            told = subprocess.run([*PYTHON, __file__, "--one", name], check=True, capture_output=True, text=True).stdout
            found.append({**json.loads(told), **command(config)})
    return {"model": name, "rounds": rounds} | {
        key: round(statistics.median(one[key] for one in found), 2 if key.endswith("_s") else None) for key in found[0]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=list(SIZES), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(from_python(arguments.one)))
        return 0
    rows: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        rows.append(measure(name, arguments.rounds))
        print(rows[-1], file=sys.stderr, flush=True)
    print(
        common.table(
            ["model", "empty, s (CPU)", "profile, s (CPU)", "peak, MiB", "memfit profile, s (CPU)", "peak, MiB"],
            [
                [
                    row["model"], f"{row['empty_s']} ({row['empty_cpu_s']})", f"{row['profile_s']} ({row['profile_cpu_s']})",
                    common.mib(row["peak_bytes"]), f"{row['command_s']} ({row['command_cpu_s']})", common.mib(row["command_peak_bytes"]),
                ]
                for row in rows
            ],
        )
    )  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": common.machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
