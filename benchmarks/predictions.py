"""Predicted and measured peaks of streamed plans: eight families of models, four optimizers, every kind of home and fate.

    .venv/bin/python benchmarks/predictions.py                       # all, half a minute each
    .venv/bin/python benchmarks/predictions.py --only mamba-recompute

Each case is a process of its own: three steps under a given plan, random weights and data. Tensors: the prediction of the schedule beside what the allocator
under torch counted in the steps after the first. Process: what a limit is compared with (tensors, what the process held before, the reserve) beside the
kernel's peak. The measured peak must not be above the predicted one. What the predicted peak holds beyond the measured one at the same action is mostly
an update beside backward: whether it is still under way when backward comes to its highest is the disk's business, and counted as if it were.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.core.plan import Plan
    from memfit.core.profile import Profile

STEPS = 3
ROWS = 8
LANGUAGE = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batch, an optimizer and a plan, as JSON would say it.

    Attributes:
        family: transformers' names of config and model.
        config: of the model.
        batch: "text" (tokens and vocabulary), "pairs" (the same, with a target) or "images" (size and classes).
        sizes: of the batch: tokens or pixels, and vocabulary or classes.
        optimizer: class in `torch.optim`, and its settings.
        homes: of all blocks that may leave: (weights, gradients, states).
        fate: of all repeated calls.
        plan: everything else of the plan.
        fit: further arguments of `memfit.fit`.
    """

    family: tuple[str, str]
    config: Mapping[str, Any]
    batch: str = "text"
    sizes: tuple[int, int] = (128, 8192)
    optimizer: tuple[str, Mapping[str, Any]] = ("AdamW", {})
    homes: tuple[str, str, str] = ("disk", "device", "disk")
    fate: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fit: Mapping[str, Any] = field(default_factory=dict[str, Any])


GPT2: dict[str, Any] = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 256}
LLAMA: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1408,
    "vocab_size": 8192, **LANGUAGE,
}  # fmt: skip
# fp16 has no fast products on a CPU.
LLAMA_SHORT: dict[str, Any] = {**LLAMA, "num_hidden_layers": 2}
QWEN3: dict[str, Any] = {
    **LLAMA,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 12_000,
    "tie_word_embeddings": True,
}
MIXTRAL: dict[str, Any] = {
    "hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 768,
    "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 4000, **LANGUAGE,
}  # fmt: skip
T5: dict[str, Any] = {
    "num_layers": 4, "d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 1536, "vocab_size": 8000, "use_cache": False,
    "decoder_start_token_id": 0,
}  # fmt: skip
BERT: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 8000,
}
VIT: dict[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048, "image_size": 128, "patch_size": 8,
    "num_labels": 100,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "state_size": 16,
    "vocab_size": 8000,
    "tie_word_embeddings": False,
    "use_cache": False,
}
RECOMPUTE = {"saved": "recompute"}
ALL_ON_DISK = ("disk", "disk", "disk")
BF16, FP16 = "bfloat16", "float16"

CASES = {
    "gpt2-kept": Case(family=("GPT2Config", "GPT2LMHeadModel"), config=GPT2),
    "gpt2-recompute-4": Case(family=("GPT2Config", "GPT2LMHeadModel"), config=GPT2, fate=RECOMPUTE, plan={"microbatches": 4, "tail": True}),
    "gpt2-states-only": Case(
        family=("GPT2Config", "GPT2LMHeadModel"), config=GPT2, homes=("device", "device", "disk"), fate=RECOMPUTE, plan={"microbatches": 2, "tail": True}
    ),
    "llama-bf16-4": Case(
        family=("LlamaConfig", "LlamaForCausalLM"), config=LLAMA, fate=RECOMPUTE, plan={"microbatches": 4, "tail": True, "compute_dtype": BF16},
        fit={"allow": ["bf16"]},
    ),
    "llama-bf16-split": Case(
        family=("LlamaConfig", "LlamaForCausalLM"), config=LLAMA, fate=RECOMPUTE, plan={"compute_dtype": BF16, "splits_masters": True},
        fit={"allow": ["bf16"]},
    ),
    "llama-fp16-4": Case(
        family=("LlamaConfig", "LlamaForCausalLM"), config=LLAMA_SHORT, sizes=(32, 8192),
        homes=ALL_ON_DISK, fate=RECOMPUTE,
        plan={"microbatches": 4, "tail": True, "compute_dtype": FP16}, fit={"allow": ["fp16"]},
    ),
    "qwen3-clipped": Case(
        family=("Qwen3Config", "Qwen3ForCausalLM"), config=QWEN3, sizes=(128, 12_000), optimizer=("SGD", {"lr": 1e-3, "momentum": 0.9}),
        homes=ALL_ON_DISK, fate=RECOMPUTE, plan={"update": "after-backward"}, fit={"max_grad_norm": 0.5},
    ),
    "qwen3-microbatch-major-4": Case(
        family=("Qwen3Config", "Qwen3ForCausalLM"), config=QWEN3, sizes=(128, 12_000), homes=ALL_ON_DISK,
        plan={"microbatches": 4, "order": "microbatch-major", "prefetch": 3},
    ),
    "mixtral-2": Case(
        family=("MixtralConfig", "MixtralForCausalLM"), config=MIXTRAL, sizes=(128, 4000), plan={"microbatches": 2, "tail": True},
        fit={"allow": ["nonadditive-loss"]},
    ),
    "t5-boundaries-away-2": Case(
        family=("T5Config", "T5ForConditionalGeneration"), config=T5, batch="pairs", sizes=(128, 8000), optimizer=("Adafactor", {}),
        fate={**RECOMPUTE, "boundary_home": "disk"}, plan={"microbatches": 2, "tail": True},
    ),
    "bert-offload-2": Case(
        family=("BertConfig", "BertForMaskedLM"), config=BERT, sizes=(128, 8000), fate={"saved": "offload"}, plan={"microbatches": 2, "tail": True}
    ),
    "vit-microbatch-major-4": Case(
        family=("ViTConfig", "ViTForImageClassification"), config=VIT, batch="images", sizes=(128, 100), optimizer=("SGD", {"lr": 1e-3}),
        homes=ALL_ON_DISK, plan={"microbatches": 4, "order": "microbatch-major"},
    ),
    "vit-select": Case(family=("ViTConfig", "ViTForImageClassification"), config=VIT, batch="images", sizes=(128, 100), fate={"saved": "select"}),
    "mamba-recompute": Case(family=("MambaConfig", "MambaForCausalLM"), config=MAMBA, sizes=(64, 8000), fate=RECOMPUTE),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case (may be repeated)")
    parser.add_argument("--directory", type=Path, help="for the homes on disk (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(arguments.worker, arguments.directory)
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="memfit-predictions-", dir=arguments.directory) as directory:
        for name in arguments.only or CASES:
            command = [sys.executable, __file__, "--worker", name, "--directory", directory]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(_table({name: found[name]}).splitlines()[-1], file=sys.stderr, flush=True)
    print(_table(found))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": common.machine(), "cases": found}, indent=1) + "\n")


def _table(found: Mapping[str, Mapping[str, Any]]) -> str:
    headers = ["case", "predicted tensors", "measured", "ratio", "of it updates", "predicted process", "measured", "at"]
    rows = [
        [
            name,
            f"{case['predicted_bytes'] / common.MIB:.1f}",
            f"{case['measured_bytes'] / common.MIB:.1f}",
            f"{case['predicted_bytes'] / case['measured_bytes']:.3f}",
            f"{case['staging_bytes'] / common.MIB:.1f}",
            common.mib(case["predicted_process_bytes"]),
            common.mib(case["measured_process_bytes"]),
            case["action"],
        ]
        for name, case in found.items()
    ]
    return common.table(headers, rows)


# --- the child --------------------------------------------------------------------------------------------------------------------


def _work(name: str, directory: Path) -> None:
    import torch

    import memfit
    from memfit.allocator import install
    from memfit.prediction import predict
    from memfit.scheduling.lower import lower

    case = CASES[name]
    torch.manual_seed(0)
    allocator = install()
    gc.collect()
    before = allocator.stats().live_bytes
    model, batch = _build(case), _batch(case)
    kind, settings = case.optimizer
    optimizer: Optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
    plan = _plan(case, memfit.profile(model, optimizer, _loss, batch))
    with memfit.fit(model, optimizer, _loss, batch, plan=plan, directory=directory / name, **case.fit) as job:
        for _ in range(STEPS):
            if job.step(batch).departures:
                raise RuntimeError("a step departed from its schedule")
        steady = next(phase for phase in job.proof().phases if phase.name == "steady")
        highest = predict(lower(job.schedule, plan, job.profile)).peak
        assert highest is not None
        found = {
            "predicted_bytes": highest.peak_bytes,
            "measured_bytes": steady.peak_bytes - before,
            "staging_bytes": highest.by_category["staging"],
            "predicted_process_bytes": job.predicted_peak_bytes,
            "measured_process_bytes": steady.process_peak_bytes,
            "action": highest.action,
        }
        job.close(restore=False)
    print(json.dumps(found))


def _loss(model: nn.Module, batch: dict[str, Any]) -> Any:
    return model(**batch).loss


def _build(case: Case) -> nn.Module:
    import transformers

    config, model = (getattr(transformers, name) for name in case.family)
    return model(config(**case.config)).train()


def _batch(case: Case) -> dict[str, Any]:
    import torch

    length, count = case.sizes
    if case.batch == "images":
        return {"pixel_values": torch.randn(ROWS, 3, length, length), "labels": torch.randint(0, count, (ROWS,))}
    tokens = torch.randint(1, count, (ROWS, length))
    target = tokens if case.batch == "text" else torch.randint(1, count, (ROWS, length * 3 // 4))
    return {"input_ids": tokens, "labels": target}


def _plan(case: Case, profile: Profile) -> Plan:
    from memfit.core.plan import BlockPlan, CallPlan, Plan

    weights, gradients, states = case.homes
    homes = BlockPlan(weight_home=weights, gradient_home=gradients, state_home=states)  # type: ignore[arg-type]
    calls = next(iter(profile.traces.values())).calls
    fates = tuple(CallPlan(**case.fate) if c.is_repeated and c.has_backward else CallPlan() for c in calls)
    decided = dict(case.plan)
    tail = common.tail_of(profile) if decided.pop("tail", False) else None
    return Plan(blocks=common.on_disk(profile, homes), calls=fates, tail=tail, **decided)


if __name__ == "__main__":
    main()
