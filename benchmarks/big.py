"""Models several times larger than the limit, trained in bf16, built empty.

    .venv/bin/python benchmarks/big.py                   # a GPT of 1.3 billion parameters, 8 sequences of 512 tokens, under 2 GiB, 20 steps
    .venv/bin/python benchmarks/big.py --model llama     # a Llama of 4.1 billion under 4 GiB, 3 steps: 50 GB of disk; --layers 24 makes it 3 billion, 37 GB
    .venv/bin/python benchmarks/big.py --model small     # 4 layers of 512: minutes, to see what a change does

The model is built by `memfit.empty`, its plan is `fit`'s own choice under `allow={"bf16"}`, homes are on disk, the text is Python's own standard
library. Three processes: one trains; one holds a single layer and the head, resident, and times them with plain PyTorch; this one, which imports neither
until then, starts both, probes the disk, and reads the first one's peak from outside.

A round is one step of training, and in some rounds what it is held against: *moving*, the seconds that the disk alone takes to read and write as many bytes at
once; *computing*, the seconds of all layers (forward, forward again where the plan recomputes, backward, sums of gradients in fp32, update) and of the embedding
and the head, one at a time and resident. The step's ratio is to the larger of the two, medians over rounds. The result file is written anew after every round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import common  # sets the environment before torch is imported

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

RESULTS = Path(__file__).with_name("results")
_TEXT_VOCABULARY = 16_384
_HEAD_CHUNK_TOKENS = 128

# What is moved to learn the disk's speed, over half as large a file: homes are larger than what lies between a disk and us, and steps longer than its bursts.
PROBE_BYTES = 24 << 30


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, its batch and its limit."""

    family: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    rows: int
    tokens: int
    limit: str
    steps: int
    learning_rate: float
    inner: int = 0
    """Width of the hidden part of a Llama's layers."""
    key_heads: int = 0
    """Heads of keys and values of a Llama; 0: as many as of queries."""
    device: str = "cpu"


SIZES = {
    "gpt": Size(
        family="gpt2", layers=24, width=2048, heads=16, vocabulary=50_257, rows=8, tokens=512, limit="2GiB", steps=20,
        learning_rate=2e-4,
    ),
    "llama": Size(
        family="llama", layers=33, width=3072, heads=24, vocabulary=32_000, rows=4, tokens=256, limit="4GiB", steps=3,
        learning_rate=1e-4, inner=8_704,
    ),
    "small": Size(
        family="gpt2", layers=4, width=512, heads=8, vocabulary=50_257, rows=8, tokens=512, limit="1GiB", steps=4,
        learning_rate=6e-4,
    ),
}  # fmt: skip


def main() -> int:
    """Runs one size and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SIZES), default="gpt")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", help="instead of the size's own, such as 2GiB")
    parser.add_argument("--rows", type=int, help="sequences of a step's batch")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--allow", nargs="*", default=["bf16"])
    parser.add_argument(
        "--bounds-every", type=int, default=3, help="rounds from one measurement of the bounds to the next; 0: none"
    )
    parser.add_argument("--plan", type=Path, help="take this plan instead of the one that fit chooses")
    parser.add_argument("--directory", type=Path, help="where homes are made (on the disk to be measured)")
    parser.add_argument("--disk-limit", help="of homes; what is free if not given")
    parser.add_argument(
        "--output", type=Path, help="result file; by default under benchmarks/results, except for small"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        request = json.loads(arguments.worker)
        {"train": _train, "compute": _compute}[request.pop("role")](**request)
        return 0
    size = SIZES[arguments.model]
    changed = {k: getattr(arguments, k) for k in ("steps", "limit", "rows", "layers") if getattr(arguments, k)}
    size = replace(size, **changed)
    output = arguments.output
    if output is None and arguments.model != "small":
        output = RESULTS / f"big-{arguments.model}.json"
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="memfit-big-") as folder:
        found = run(
            size,
            Path(folder),
            allow=arguments.allow,
            plan=None if arguments.plan is None else arguments.plan.read_text(),
            bounds_every=arguments.bounds_every,
            output=output,
            disk_limit=arguments.disk_limit,
        )
    print(summary(found))
    return 0


def run(
    size: Size,
    directory: Path,
    *,
    allow: list[str],
    plan: str | None,
    bounds_every: int,
    output: Path | None,
    host_limit: str | None = None,
    disk_limit: str | None = None,
) -> dict[str, Any]:
    """All rounds; the result so far is in `output` after each."""
    request = {"size": vars(size)}
    training = {
        "role": "train",
        **request,
        "directory": str(directory),
        "allow": allow,
        "plan": plan,
        "host_limit": host_limit,
        "disk_limit": disk_limit,
    }
    found: dict[str, Any] = {"size": vars(size), "rounds": []}
    with Outside() as outside, common.Worker(__file__, "train", training, on_start=outside.watch) as trainer:
        found |= {"machine": common.machine(), **trainer.hello}
        _say(f"{found['parameters']:,} parameters, plan: {found['reason']}")
        compute = None
        if bounds_every:
            recomputes = any(call["saved"] == "recompute" for call in found["plan"]["calls"])
            blocks = {
                "role": "compute", **request, "microbatches": found["microbatches"], "recomputes": recomputes
            }  # fmt: skip
            compute = common.Worker(__file__, "compute", blocks)
        try:
            for number in range(size.steps):
                step = trainer.ask("step")
                row: dict[str, Any] = {"step": number + 1, **step}
                # The first step meets no states at home and cold libraries.
                if compute is not None and number and (number - 1) % bounds_every == 0:
                    row["moving_s"] = common.disk_seconds(
                        directory,
                        sum(step["read"].values()),
                        sum(step["written"].values()),
                        most_bytes=PROBE_BYTES,
                        file_bytes=PROBE_BYTES // 2,
                    )
                    row |= compute.ask("compute")
                found["rounds"].append(row)
                found["outside_peak_bytes"] = outside.peak_bytes
                found |= trainer.ask("summary")
                _say(_line(row))
                if output is not None:
                    output.parent.mkdir(exist_ok=True)
                    output.write_text(json.dumps(found, indent=1) + "\n")
        finally:
            if compute is not None:
                compute.close()
    return found


class Outside:
    """The most that a process and its children were seen to hold, read by another: VmHWM, every 50 ms.

    memfit lets the kernel count peaks anew at the beginning of each phase, so that one reading at the end would be the last phase's. Of children, which come and
    go, the resident bytes are added up.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, pid: int) -> None:
        """Begins to look at a process, until the context ends."""
        self._pid = pid
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.05):
            try:
                own = _status(self._pid, "VmHWM:")
                children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
                seen = own + sum(_status(int(child), "VmRSS:") for child in children)
            except (FileNotFoundError, ProcessLookupError):
                continue  # a process that has just ended
            self.peak_bytes = max(self.peak_bytes, seen)


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    return 0  # a process that has ended has no memory


def summary(found: Mapping[str, Any]) -> str:
    """The figures in words."""
    rounds = found["rounds"]
    held = [row for row in rounds if "moving_s" in row]
    peaks = ", ".join(
        f"{what} {common.mib(found[key])}"
        for what, key in (
            ("predicted", "predicted_peak_bytes"),
            ("measured", "measured_peak_bytes"),
            ("of the process seen from outside", "outside_peak_bytes"),
        )
    )
    lines = [
        f"{found['parameters']:,} parameters under {found['limit_bytes'] / common.MIB:,.0f} MiB; {found['plan_words']}",
        f"peaks, MiB: {peaks}",
        f"loss {rounds[0]['loss']:.3f} -> {rounds[-1]['loss']:.3f} in {len(rounds)} steps",
    ]
    if held:
        step, moving, computing, cpu, bound_cpu = (
            statistics.median(row[key] for row in held)
            for key in ("wall_s", "moving_s", "computing_s", "cpu_s", "computing_cpu_s")
        )
        ratio = statistics.median(row["wall_s"] / max(row["moving_s"], row["computing_s"]) for row in held)
        lines.append(
            f"step {step:.1f} s ({cpu:.1f} CPU-s); moving alone {moving:.1f} s, computing alone {computing:.1f} s ({bound_cpu:.1f} CPU-s); ratio "
            f"{ratio:.2f} (CPU-s {cpu / bound_cpu:.2f}), medians of {len(held)} rounds"
        )
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    text = f"step {row['step']}: loss {row['loss']:.4f}, {row['wall_s']:.1f} s, {row['cpu_s']:.1f} CPU-s, peak {row['process_peak_bytes'] / common.MIB:,.0f} MiB"
    if "moving_s" in row:
        text += f"; moving {row['moving_s']:.1f} s, computing {row['computing_s']:.1f} s ({row['computing_cpu_s']:.1f} CPU-s)"
    return text


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


# --- the process that trains ----------------------------------------------------------------------------------------------------


def _train(
    *,
    size: dict[str, Any],
    directory: str,
    allow: list[str],
    plan: str | None,
    host_limit: str | None,
    disk_limit: str | None,
) -> None:
    from dataclasses import asdict

    import memfit
    import memfit.api  # counts as an import: memfit loads its names when they are used
    from memfit.integrations.recipes.gpt import build_adamw, build_warmup, causal_language_loss
    from memfit.machine.machine import prepare_process

    prepare_process()
    shape = Size(**size)
    model_class, config = _model_of(shape, shape.layers)

    def build() -> nn.Module:
        import torch

        torch.manual_seed(0)
        with torch.device(shape.device):
            model = model_class(config).train()
        # On a GPU masters begin as bf16 weights, as they do where such a model is loaded.
        model = model if shape.device == "cpu" else model.bfloat16()
        model.loss_type = "ForCausalLM"
        return model

    batches = (batch.to(shape.device) for batch in _text(shape))
    sample = next(batches)
    began = time.perf_counter()
    model = memfit.empty(build)
    built_s = time.perf_counter() - began
    optimizer = build_adamw(model, learning_rate=shape.learning_rate)
    scheduler = build_warmup(optimizer, 20)
    job = memfit.fit(
        model, optimizer, causal_language_loss, sample, limit=shape.limit, allow=set(allow), plan=plan,
        directory=Path(directory) / "homes", host_limit=host_limit, disk_limit=disk_limit,
    )  # fmt: skip

    def step() -> dict[str, Any]:
        found = common.measured_job_step(job, next(batches))
        scheduler.step()
        return asdict(found)

    def summarise() -> dict[str, Any]:
        proof = job.proof()
        return {
            "measured_peak_bytes": proof.measured_peak_bytes,
            "phases": {record.name: record.process_peak_bytes for record in proof.phases},
            "live_bytes": job.proof().phases[-1].peak_bytes,
        }

    hello = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "built_s": built_s,
        "fit_s": time.perf_counter() - began - built_s,
        "limit_bytes": job.proof().limit_bytes,
        "predicted_peak_bytes": job.predicted_peak_bytes,
        "microbatches": job.plan.microbatches,
        "reason": job.reason,
        "plan_words": job.reason.split(": predicted")[0],
        "plan": json.loads(job.plan.to_json()),
        **summarise(),
    }
    common.serve(hello, {"step": step, "summary": summarise})
    job.close(restore=False)


def _model_of(size: Size, layers: int) -> tuple[type[PreTrainedModel], Any]:
    if size.family == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel, GPT2Config(
            n_layer=layers, n_embd=size.width, n_head=size.heads, n_positions=size.tokens, vocab_size=size.vocabulary, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig(
        num_hidden_layers=layers, hidden_size=size.width, intermediate_size=size.inner, num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads or size.heads, max_position_embeddings=size.tokens, vocab_size=size.vocabulary, tie_word_embeddings=False,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def _text(size: Size) -> Iterator[Tensor]:
    from memfit.integrations.recipes.token_batches import TokenWindows, read_tokens

    tokens = read_tokens(_TEXT_VOCABULARY)
    return iter(TokenWindows(tokens=tokens, batch_size=size.rows, sequence_length=size.tokens, seed=0))


# --- the process that holds one layer ----------------------------------------------------------------------------------------------


def _compute(*, size: dict[str, Any], microbatches: int, recomputes: bool) -> None:
    import torch

    torch.manual_seed(0)
    shape = Size(**size)
    model_class, config = _model_of(shape, 1)
    built: Any = model_class(config)
    model = built.train().bfloat16().to(shape.device)
    backbone = next(model.children())  # the decoder; the head is the other
    layer = next(m for m in backbone.modules() if isinstance(m, torch.nn.ModuleList))[0]
    head = model.get_output_embeddings()
    rows = -(-shape.rows // microbatches)
    tokens = torch.randint(0, shape.vocabulary, (rows, shape.tokens), device=shape.device)
    kept: dict[str, Any] = {}

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.update(args=args, kwargs=kwargs)

    with torch.no_grad(), _hooked(layer, keep):
        model(input_ids=tokens, use_cache=False)
    hidden, rest, named = kept["args"][0].detach(), kept["args"][1:], kept["kwargs"]
    trained_layer = _Trained(layer)
    trained_head = _Trained(head)
    target = torch.randint(0, shape.vocabulary, (rows * shape.tokens,), device=shape.device)

    def run_layer() -> None:
        for _ in range(microbatches if recomputes else 0):
            with torch.no_grad():
                layer(hidden, *rest, **named)
        for _ in range(microbatches):
            entered = hidden.detach().requires_grad_()
            output = layer(entered, *rest, **named)
            output = output[0] if isinstance(output, tuple) else output
            output.backward(torch.ones_like(output))
            trained_layer.add()
        trained_layer.update()

    def run_ends() -> None:
        embedding = model.get_input_embeddings()
        for _ in range(microbatches):
            states = hidden.reshape(-1, shape.width)
            weight = head.weight.detach()
            head.weight.grad = torch.zeros_like(weight)
            for first in range(0, len(states), _HEAD_CHUNK_TOKENS):
                piece = states[first : first + _HEAD_CHUNK_TOKENS]
                logits = (piece @ weight.t()).float().requires_grad_()
                wanted = target[first : first + _HEAD_CHUNK_TOKENS]
                (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, wanted), [logits])
                slope = slope.to(weight.dtype)
                torch.mm(slope, weight)
                head.weight.grad.addmm_(slope.t(), piece)
            trained_head.add()
            embedding(tokens).backward(hidden)
            if embedding.weight is head.weight:
                trained_head.add()
            else:
                embedding.weight.grad = None
        trained_head.update()

    def compute() -> dict[str, float]:
        timed = {"layer": run_layer, "ends": run_ends}
        wall: dict[str, float] = {}
        cpu: dict[str, float] = {}
        for name, work in timed.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            work()
            if shape.device == "cuda":
                torch.cuda.synchronize()
            wall[name], cpu[name] = time.perf_counter() - began, time.process_time() - began_cpu
        return {
            "computing_s": shape.layers * wall["layer"] + wall["ends"],
            "computing_cpu_s": shape.layers * cpu["layer"] + cpu["ends"],
        }

    compute()  # warm
    common.serve({"microbatches": microbatches}, {"compute": compute})


class _Trained:
    """A module's bf16 weights with fp32 masters and sums, as the reference of mixed precision keeps them; everything resident."""

    def __init__(self, module: nn.Module) -> None:
        import torch

        self.weights = list(module.parameters())
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def add(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

    def update(self) -> None:
        import torch

        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
                master.grad = None


def _hooked(module: torch.nn.Module, hook: Any) -> Any:
    from contextlib import closing

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    handle.close = handle.remove  # type: ignore[attr-defined]
    return closing(handle)  # type: ignore[type-var]


if __name__ == "__main__":
    sys.exit(main())
