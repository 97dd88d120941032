"""Selective recompute beside `torch._functorch.config.activation_memory_budget`, at nine budgets, in one run.

    .venv/bin/python benchmarks/budgets.py --out benchmarks/results/budgets.json
    .venv/bin/python benchmarks/budgets.py --scope model --backend aot_eager_decomp_partition

A Llama of transformers (fp32, plain SGD, so that activations are most of what is there) is trained in plain PyTorch and, for each budget, by
torch.compile with that budget and by memfit under a limit that leaves about as many bytes to tensors as torch's step took. memfit has no disk here and
`numerics="exact"`, so that all it can do is keep, select or recompute, call by call; its arithmetic is eager and has plain PyTorch's bits.

A third job of memfit's may compile its blocks (`compile="blocks"`), which rounds as torch's does. A first job of it compiles in the same process,
so that its limit, too, is set beside what the compiler has left there.

torch compiles each decoder layer (`--scope block`, as torchtitan does it) or the whole model. All step in turn, each in a process of its own;
peaks of tensors are counted by memfit's allocator under all of them. Processes: what each holds at most, above what it held when it had imported
what it needs: compiled code, and what the compiler itself leaves behind, are in torch's.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from sweep import commit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

ROWS, TOKENS, WORDS = 4, 256, 2000
LAYERS, WIDTH, INNER, HEADS = 8, 384, 1024, 6
BUDGETS = [tenth / 10 for tenth in range(1, 10)]
# Planning's, a first step's and the reserve's, which lie between a limit and what it leaves to tensors.
BESIDE_TENSORS_BYTES = 64 * common.MIB
# Limits that are tried for the compiled job, each lower by what the one before took too much.
_TRIES = 4
Row = dict[str, Any]


def main() -> int:
    """Measures budget by budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budgets", type=float, nargs="*", default=BUDGETS)
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each, after two of warm-up")
    parser.add_argument("--scope", choices=("block", "model"), default="block", help="what torch compiles")
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile; aot_eager_decomp_partition needs no compiler"
    )
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        _work(json.loads(given.worker))
        return 0
    rows: list[Row] = []
    how = {"scope": given.scope, "backend": given.backend}
    with common.Worker(__file__, "plain", {"way": "plain"}) as plain:
        plain.step()
        for budget in given.budgets:
            rows.append(_measured(plain, how, budget, given.rounds))
            print(_table(rows), flush=True)
            if given.out is not None:
                head = {"command": "python benchmarks/budgets.py " + " ".join(sys.argv[1:]), "commit": commit()}
                given.out.write_text(
                    json.dumps({**head, **how, "machine": common.machine(), "rows": rows}, indent=0) + "\n"
                )
    return 0


def _measured(plain: common.Worker, how: Mapping[str, str], budget: float, rounds: int) -> Row:
    with common.Worker(__file__, f"torch {budget}", {"way": "torch", "budget": budget, **how}) as torchs:
        compile_cpu_s = torchs.step().cpu_s
        target = torchs.step().live_peak_bytes
        with (
            common.Worker(__file__, f"memfit {budget}", {"way": "memfit", "tensor_bytes": target}) as ours,
            common.Worker(__file__, f"compiled {budget}", {"way": "compiled", "tensor_bytes": target}) as compiled,
        ):
            steps = common.interleave([plain, torchs, ours, compiled], rounds, warm_up=2)
            row: Row = {"budget": budget, "compile_cpu_s": compile_cpu_s}
            row |= {"policies": ours.hello["policies"], "compiled_policies": compiled.hello["policies"]}
            row |= {
                "compiled_microbatches": compiled.hello["microbatches"],
                "blocks_compiled": compiled.hello["compiled"],
            }
            for name, worker in (("plain", plain), ("torch", torchs), ("memfit", ours), ("compiled", compiled)):
                found = steps[worker.name]
                row[name] = {
                    "tensor_peak_bytes": max(step.live_peak_bytes or 0 for step in found),
                    "process_bytes": max(step.process_peak_bytes for step in found) - worker.hello["imports_bytes"],
                    "cpu_s": common.median(found, "cpu_s"),
                    "cpu_ratio": common.ratio(found, steps[plain.name], "cpu_s"),
                    "wall_ratio": common.ratio(found, steps[plain.name]),
                }
    return row


def _table(rows: list[Row]) -> str:
    heads = ["budget", *(f"torch: {what}" for what in ("tensors, MiB", "CPU of plain", "process, MiB"))]
    for side in ("memfit", "compiled"):
        heads += [f"{side}: {what}" for what in ("tensors, MiB", "CPU of plain", "process, MiB")]
        heads.append("keep, select, recompute")
    lines: list[list[object]] = []
    for row in rows:
        line: list[object] = [row["budget"]]
        for side, policies in (("torch", None), ("memfit", "policies"), ("compiled", "compiled_policies")):
            found = row[side]
            line += [
                common.mib(found["tensor_peak_bytes"]),
                f"{found['cpu_ratio']:.2f}",
                common.mib(found["process_bytes"]),
            ]
            if policies is not None:
                told = ", ".join(str(row[policies].get(name, 0)) for name in ("keep", "select", "recompute"))
                line.append(told if side == "memfit" else f"{told}; {row['blocks_compiled']} compiled")
        lines.append(line)
    found = rows[-1]["plain"]
    told = f"plain: tensors {common.mib(found['tensor_peak_bytes'])} MiB, {found['cpu_s']:.2f} CPU-s a step"
    return common.table(heads, lines) + "\n" + told


# --- the child ------------------------------------------------------------------------------------


def _loss(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[:, :-1], labels=batch[:, 1:]).loss


def _work(request: Mapping[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import memfit
    from memfit.core.plan import CallPlan
    from memfit.devices.binding import install
    from memfit.machine.meters import ProcessMeter

    if request["way"] == "torch":
        import torch._inductor.compile_fx  # as part of the imports
        from torch._functorch import config as functorch_config
        from torch._inductor import config as inductor_config

        inductor_config.compile_threads = 1
        functorch_config.activation_memory_budget = request["budget"]
    allocator = install()
    imports = ProcessMeter().resident_bytes().whole_bytes
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, use_cache=False, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    batch = common.token_batch(ROWS, TOKENS, WORDS, seed=0)
    if request["way"] in ("memfit", "compiled"):
        how: dict[str, Any] = {"disk_limit": 0, "numerics": "exact"}
        if request["way"] == "compiled":
            how = {"disk_limit": 0, "compile": "blocks"}
            with memfit.fit(model, optimizer, _loss, batch, limit="8GiB", **how) as first:
                first.step(batch)
            del first
        limit = (
            ProcessMeter().resident_bytes().whole_bytes
            - allocator.stats().mapped_bytes
            + request["tensor_bytes"]
            + BESIDE_TENSORS_BYTES
        )
        job = memfit.fit(model, optimizer, _loss, batch, limit=limit, **how)
        for _ in range(_TRIES if request["way"] == "compiled" else 0):
            # What a first job has left free in the process is room that no tensors had before.
            job.step(batch)
            steps = [phase.peak_bytes for phase in job.proof().phases if phase.name in ("first step", "steady")]
            above = max(steps) - request["tensor_bytes"]
            if above <= common.MIB:
                break
            job.close()
            limit -= above
            job = memfit.fit(model, optimizer, _loss, batch, limit=limit, **how)
        calls = [*job.plan.calls, *[CallPlan()] * LAYERS][: max(LAYERS, len(job.plan.calls))]
        policies = [str(call.saved) for call in calls]
        hello = {
            "imports_bytes": imports,
            "policies": {name: policies.count(name) for name in set(policies)},
            "microbatches": job.plan.microbatches,
            "compiled": len(job.profile.compiled),
        }
        common.serve(hello, {"step": lambda: common.measured_job_step(job, batch)})
        return
    if request["way"] == "torch":
        for module in model.model.layers if request["scope"] == "block" else [model]:
            module.compile(backend=request["backend"])

    def step() -> float:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    handlers: dict[str, Callable[[], common.Step]] = {"step": lambda: common.measured(step)}
    common.serve({"imports_bytes": imports}, handlers)


if __name__ == "__main__":
    sys.exit(main())
