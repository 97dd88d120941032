"""What others do to train in less memory, beside memfit at the same bytes, in one run.

    .venv/bin/python benchmarks/technique_peers.py --out benchmarks/results/technique-peers.json
    .venv/bin/python benchmarks/technique_peers.py --models llama --ways checkpoint fused-backward

Two models of transformers (a Llama and a GPT-2 without dropout, fp32, AdamW) are trained in plain PyTorch and in each way:

- checkpoint: `gradient_checkpointing_enable`, every layer;
- budget: torch.compile of every layer with `activation_memory_budget` of 0.3;
- fused-backward: an optimizer for each parameter, stepped by a hook as soon as its gradient is there (PyTorch's tutorial);
- fused-checkpoint: both of these;
- fsdp2-offload: `fully_shard` of every layer with `CPUOffloadPolicy`, one process, gloo;
- zero3-offload: DeepSpeed's ZeRO stage 3 with parameters and optimizer offloaded, one process, gloo, its own Adam for processors, without the
  clipping that is its default; needs `pip install --no-build-isolation deepspeed` and a compiler, and the first run compiles for minutes.

Then memfit under a limit that leaves about as many bytes to tensors as that way took, with plain PyTorch's bits (`numerics="exact"`): without a
disk, since the others have none; where that is refused, with one. All step in turn, each in a process of its own; tensors are counted by memfit's
allocator under all of them. On a processor host and device are one memory, so that what FSDP2 and DeepSpeed offload stays where it was, and what
DeepSpeed keeps on the host beside it (a second copy of weights and of gradients) is counted with it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from budgets import BESIDE_TENSORS_BYTES
from sweep import commit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn

MODELS = ("llama", "gpt2")
WAYS = ("checkpoint", "budget", "fused-backward", "fused-checkpoint", "fsdp2-offload", "zero3-offload")
ROWS, TOKENS, WORDS = 4, 128, 4000
BUDGET = 0.3
# Losses of workers that have made different numbers of steps are to agree.
RATE = 1e-9
Row = dict[str, Any]


def main() -> int:
    """Measures way by way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each, after one of warm-up")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        _work(json.loads(given.worker))
        return 0
    rows: list[Row] = []
    for model in given.models:
        with common.Worker(__file__, "plain", {"model": model, "way": "plain"}) as plain:
            for _ in range(2):
                plain.step()
            for way in given.ways:
                rows.append({"model": model, "way": way, **_measured(plain, model, way, given.rounds)})
                print(_table(rows), flush=True)
                if given.out is not None:
                    head = {
                        "command": "python benchmarks/technique_peers.py " + " ".join(sys.argv[1:]),
                        "commit": commit(),
                    }
                    text = {**head, "machine": common.machine(), "rows": rows}
                    given.out.write_text(json.dumps(text, indent=0) + "\n")
    return 0


def _measured(plain: common.Worker, model: str, way: str, rounds: int) -> Row:
    try:
        peer = common.Worker(__file__, way, {"model": model, "way": way})
    except RuntimeError as error:
        return {"failed": str(error).strip().splitlines()[-1][:300]}
    with peer:
        try:
            # The first step makes the states, the second one is the first with them.
            target = max(peer.step().live_peak_bytes or 0, peer.step().live_peak_bytes or 0)
            ours = common.Worker(__file__, "memfit", {"model": model, "way": "memfit", "tensor_bytes": target})
        except RuntimeError as error:
            return {"failed": str(error).strip().splitlines()[-1][:300]}
        with ours:
            steps = common.interleave([plain, peer, ours], rounds, note=f"{model} {way}")
            row: Row = {"plan": ours.hello["plan"]}
            if "optimizer" in peer.hello:
                row["optimizer"] = peer.hello["optimizer"]
            for name, worker in (("plain", plain), ("peer", peer), ("memfit", ours)):
                found = steps[worker.name]
                row[name] = {
                    "tensor_peak_bytes": max(step.live_peak_bytes or 0 for step in found),
                    "process_bytes": max(step.process_peak_bytes for step in found) - worker.hello["imports_bytes"],
                    "cpu_s": common.median(found, "cpu_s"),
                    "cpu_ratio": common.ratio(found, steps[plain.name], "cpu_s"),
                }
    return row


def _table(rows: Sequence[Row]) -> str:
    heads = [
        "model",
        "way",
        "plain: tensors, MiB",
        "its tensors",
        "its CPU of plain",
        "memfit: tensors",
        "memfit: CPU of plain",
        "memfit's plan",
    ]
    lines: list[list[object]] = []
    for row in rows:
        if "failed" in row:
            lines.append([row["model"], row["way"], "-", row["failed"], "-", "-", "-", "-"])
            continue
        peer, ours = row["peer"], row["memfit"]
        cells = [
            common.mib(row["plain"]["tensor_peak_bytes"]),
            common.mib(peer["tensor_peak_bytes"]),
            f"{peer['cpu_ratio']:.2f}",
        ]
        cells += [common.mib(ours["tensor_peak_bytes"]), f"{ours['cpu_ratio']:.2f}", row["plan"]]
        way = f"{row['way']} ({row['optimizer']})" if "optimizer" in row else row["way"]
        lines.append([row["model"], way, *cells])
    return common.table(heads, lines)


# --- the child ------------------------------------------------------------------------------------


def _loss(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[:, :-1], labels=batch[:, 1:]).loss


def _build(name: str) -> tuple[Any, Sequence[nn.Module]]:
    """Returns a model of some 20 million parameters and its layers."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    special: dict[str, Any] = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "llama":
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
            num_key_value_heads=6, tie_word_embeddings=False, **special,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config).train()
        return model, list(model.model.layers)
    config = GPT2Config(
        vocab_size=WORDS, n_embd=384, n_layer=8, n_head=6, n_positions=TOKENS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **special,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    return model, list(model.transformer.h)


def _work(request: Mapping[str, Any]) -> None:
    import torch

    import memfit
    from memfit.devices.binding import install
    from memfit.machine.meters import ProcessMeter

    way = request["way"]
    if way == "zero3-offload":
        _import_deepspeed()  # as part of the imports
    allocator = install()
    imports = ProcessMeter().resident_bytes().whole_bytes
    model, layers = _build(request["model"])
    batch = common.token_batch(ROWS, TOKENS, WORDS, seed=0)
    hello: dict[str, Any] = {"imports_bytes": imports}
    if way == "memfit":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        held = ProcessMeter().resident_bytes().whole_bytes - allocator.stats().live_bytes
        limit = held + request["tensor_bytes"] + BESIDE_TENSORS_BYTES
        try:
            job = memfit.fit(model, optimizer, _loss, batch, limit=limit, disk_limit=0, numerics="exact")
            hello["plan"] = job.reason.split(": predicted")[0]
        except memfit.DoesNotFitError:
            job = memfit.fit(model, optimizer, _loss, batch, limit=limit, numerics="exact")
            hello["plan"] = "refused without a disk; " + job.reason.split(": predicted")[0]
        common.serve(hello, {"step": lambda: common.measured_job_step(job, batch)})
        return
    if way == "zero3-offload":
        step, hello["optimizer"] = _zero3(model, batch)
    else:
        step = _step_of(way, model, layers, batch)
    common.serve(hello, {"step": lambda: common.measured(step)})


def _step_of(way: str, model: Any, layers: Sequence[nn.Module], batch: torch.Tensor) -> Callable[[], float]:
    """Prepares a model for a way to train it, and returns its step."""
    import torch

    if "checkpoint" in way:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if way == "budget":
        from torch._functorch import config as functorch_config
        from torch._inductor import config as inductor_config

        inductor_config.compile_threads = 1
        functorch_config.activation_memory_budget = BUDGET
        for layer in layers:
            layer.compile()
    if way == "fsdp2-offload":
        _shard(model, layers)
    if way.startswith("fused"):
        own = {p: torch.optim.AdamW([p], lr=RATE) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(update)

        def fused() -> float:
            loss = _loss(model, batch)
            loss.backward()
            return float(loss.detach())

        return fused
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step() -> float:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _join() -> None:
    """Makes a process group of this process alone."""
    import torch.distributed as dist

    met = f"file://{Path(tempfile.mkdtemp()) / 'met'}"
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=met)


def _shard(model: Any, layers: Sequence[nn.Module]) -> None:
    """Shards over one rank, with what is sharded in host memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _join()
    mesh = init_device_mesh("cpu", (1,))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _import_deepspeed() -> Any:
    # DeepSpeed asks for both; its launcher, which is not used here, would set the second.
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    try:
        return importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        sys.exit("deepspeed is not installed: pip install --no-build-isolation deepspeed")


def _zero3(model: Any, batch: torch.Tensor) -> tuple[Callable[[], float], str]:
    """Hands the model to ZeRO stage 3 with parameters and optimizer in host memory; returns its step and what updates."""
    deepspeed = _import_deepspeed()
    _join()
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=RATE, weight_decay=0.01, adamw_mode=True)
    host = {"device": "cpu", "pin_memory": False}
    # Sizes as transformers' Trainer sets them; a bucket of the default's 500 million elements takes 2 GB at once.
    width = model.config.hidden_size
    sizes = {
        "reduce_bucket_size": width**2,
        "stage3_prefetch_bucket_size": int(0.9 * width**2),
        "stage3_param_persistence_threshold": 10 * width,
    }
    zero = {"stage": 3, "offload_optimizer": host, "offload_param": host, **sizes}
    # Clipping is on by default, at 1.0; so small a rate hides from the check of losses what it does.
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0, "zero_optimization": zero}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step() -> float:
        loss = _loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, f"deepspeed {deepspeed.__version__}, {type(optimizer).__name__}"


if __name__ == "__main__":
    sys.exit(main())
