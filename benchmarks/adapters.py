"""LoRA on a frozen base: at home in fp32, NF4 or int8, on the device or on disk, beside plain PyTorch and QLoRA.

`python benchmarks/adapters.py [way ...]`: a 46M Llama with LoRA of rank 8 on all linear layers, 4 x 64 tokens, AdamW; a process for
each way. QLoRA (bitsandbytes' `Linear4bit`) runs where bitsandbytes is installed. Of each: bytes of the frozen linear weights where
they rest, the process's peak above that of a process that has only imported everything, CPU seconds a step, the last loss.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memfit  # first: settings that torch reads when it is loaded
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import FrozenFormat
from memfit.core.tiers import Tier

LAYERS, STEPS = 6, 8
WAYS = (
    "imports",
    "plain",
    "QLoRA",
    "memfit",
    "memfit disk",
    "memfit nf4",
    "memfit nf4 disk",
    "memfit int8",
    "memfit int8 disk",
)


def adapted(*, in_four_bits: bool = False) -> Any:
    import peft

    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4000, hidden_size=768, intermediate_size=2048, num_hidden_layers=LAYERS, num_attention_heads=12
        )
    )
    if in_four_bits:
        _replace(base.model)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM")).train()


def _replace(module: nn.Module) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit  # pyright: ignore[reportMissingImports]

    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            made = Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=torch.float32,
                compress_statistics=False, quant_type="nf4",
            )  # fmt: skip
            made.weight = Params4bit(
                child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False, module=made
            )
            setattr(module, name, made.to("cpu"))
        else:
            _replace(child)


def run(way: str) -> dict[str, Any]:
    if way == "imports":
        import peft  # noqa: F401, its memory counts

        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
    model = adapted(in_four_bits=way == "QLoRA")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    words = torch.randint(0, 4000, (4, 64), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": words, "labels": words}
    frozen = [p for n, p in model.named_parameters() if not p.requires_grad and "layers" in n and "norm" not in n]
    resting = sum(p.nbytes for p in frozen)
    if way in ("plain", "QLoRA"):
        step = _plain(model, optimizer, batch)
    else:
        words_of_way = way.split()
        chosen = next((one for one in FrozenFormat if one in words_of_way), FrozenFormat.GIVEN)
        home = BlockPlan(weight_home=Tier.DISK) if "disk" in words_of_way else BlockPlan()
        blocks = {f"base_model.model.model.layers.{index}": home for index in range(LAYERS)}
        plan = Plan(blocks=blocks, frozen_format=chosen)
        job = memfit.fit(
            model, optimizer, lambda m, b: m(**b).loss, batch, plan=plan, allow={chosen.allowance} - {"given-frozen"}
        )
        if chosen is not FrozenFormat.GIVEN:
            resting = sum(sum(chosen.parts(p.shape)) for p in frozen)

        def step() -> float:
            return job.step(batch).loss

    step()
    began = time.process_time()
    loss = 0.0
    for _ in range(STEPS):
        loss = step()
    seconds = (time.process_time() - began) / STEPS
    # Of training: what building took before is the same in all ways.
    return {"peak": _peak_of_step(step), "bytes": resting, "seconds": seconds, "loss": loss}


def _plain(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _peak_of_step(step: Any) -> int:
    """Peak of one step, by the kernel's high-water mark, begun anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    step()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main(ways: list[str]) -> None:
    base = 0
    print("| way | frozen weights, MiB | peak of a step, MiB | CPU s a step | loss |\n|---|---|---|---|---|")
    for way in ways:
        done = subprocess.run([sys.executable, __file__, "--one", way], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {way} | {done.stderr.strip().splitlines()[-1][:80]} |")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        if way == "imports":
            base = found["peak"]
            continue
        print(
            f"| {way} | {found['bytes'] / 2**20:.1f} | {(found['peak'] - base) / 2**20:.0f} | {found['seconds']:.3f} | {found['loss']:.6f} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(run(sys.argv[2])))
    else:
        main([*sys.argv[1:]] or [*WAYS])
