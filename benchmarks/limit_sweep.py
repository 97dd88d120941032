"""Limits drawn at random: does the process stay below each, and below what was predicted?

    .venv/bin/python benchmarks/limit_sweep.py --seed 1 --smallest 30 --out benchmarks/results/smallest-limits.json
    .venv/bin/python benchmarks/limit_sweep.py --seed 1 --cases 60 --out benchmarks/results/limit-sweep.json

A case is a model, an optimizer, a batch and a limit, all drawn from the seed and its number; half of the cases have a known loss over a wide vocabulary
(which can run in chunks), very many small tensors, or are built with `memfit.empty`. Every measurement is a fresh process; with `--forks`, which takes a third of
the time, a fork of one that has loaded torch, transformers and memfit. With `--wide` models and optimizers are those of `limiting`, trained as they are, with a
clipped norm, in groups of parameters, or under autocast.

Half of the cases are trained in a way of their own (`HABITS`; arrays and workers not with the smallest limit): batches of shapes that alternate, batches from a
`DataLoader` with two workers, NumPy arrays that the program makes after `fit`, a given plan in fp16, or one in which every layer's saved tensors have one fate.
What arrays and workers take is added to the drawn limit; arrays are taken off what was measured before that is compared with what was predicted.

`--cases`: a process asks for 2 MiB and is told the smallest limit. A quarter of the cases get that limit, the others one between it and what training
without a limit would take. A second process trains three steps, evaluates and saves. It must not breach; the kernel's peak of the process (VmHWM, phase by
phase) must not be above the limit, nor above the predicted peak by more than 1 % or 8 MiB, whichever is larger; nor may the allocator's peak of tensors be
above the predicted one by more than 1 % or 2 MiB. Where the limit is the smallest, a third process asks for 3 % less and must be refused.

`--smallest`: every case gets its smallest limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from limiting import wide
from sweep import commit, in_a_fork

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memfit.core.plan import Plan

STEPS = 3
LEAST_LIMIT = 2 * common.MIB
BELOW = 0.97
MOST_ABOVE = 1.01
MOST_ABOVE_BYTES = {"process": 8 * common.MIB, "tensors": 2 * common.MIB}
TIMEOUT_S = 1200
HABITS = ("shapes", "workers", "arrays", "fp16", "recompute", "select", "offload")
ARRAY_BYTES = 32 * common.MIB
WORKER_BYTES = 96 * common.MIB  # of two forked processes
SPECIAL: dict[str, Any] = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its optimizer and batch, as JSON says it.

    Attributes:
        name: the seed's and the number's, and the family.
        family: transformers' config and model, or ("torch", a kind of `_modules`).
        config: of the model.
        batch: "text", "pairs", "images" or "rows".
        sizes: of the batch: rows, tokens (or pixels, or features), vocabulary (or classes).
        optimizer: a class of torch.optim, and its settings.
        is_empty: built by `memfit.empty`.
        share: of the way from the smallest limit to that of training without one; 0: the smallest limit itself.
        way: how it is trained, of a case of `limiting`: a norm that is clipped ("clip"), parameters in "groups", under "autocast".
        habit: one of `HABITS`, or "".
    """

    name: str
    family: tuple[str, str]
    config: Mapping[str, Any]
    batch: str
    sizes: tuple[int, int, int]
    optimizer: tuple[str, Mapping[str, Any]]
    is_empty: bool
    share: float
    way: Mapping[str, Any] = field(default_factory=dict[str, Any])
    habit: str = ""

    @property
    def extra_bytes(self) -> int:
        """What the program takes beside training, after `fit`."""
        return {"arrays": ARRAY_BYTES, "workers": WORKER_BYTES}.get(self.habit, 0)


# --- drawing ----------------------------------------------------------------------------------------------------------------------


def draw(seed: int, number: int, *, smallest: bool) -> Case:
    """The case of that number. Every fourth has the smallest limit; odd ones have wide vocabularies, small tensors or are empty."""
    rng = random.Random(f"{seed}/{number}")
    traits = ("chunks", "small", "empty")
    trait = traits[number // 2 % len(traits)] if number % 2 else "any"
    families = {"chunks": CAUSAL, "small": SMALL, "empty": (*CAUSAL, *OTHERS), "any": (*CAUSAL, *OTHERS, *SMALL)}[trait]
    make = rng.choice(families)
    family, config, batch, sizes = make(rng, trait == "chunks" or rng.random() < 0.3)
    # Adagrad makes its states from the weights' values when it is built; Muon takes matrices alone.
    kinds = [
        kind
        for kind in OPTIMIZERS
        if (kind != "Muon" or config.get("bias") is False) and not (kind == "Adagrad" and trait == "empty")
    ]
    kind = "Muon" if "Muon" in kinds and rng.random() < 0.5 else rng.choice(kinds)
    share = 0.0 if smallest or number % 4 == 3 else round(rng.uniform(0.02, 1.1), 3)
    habit = _habit(random.Random(f"habit {seed}/{number}"), family)
    # With the smallest limit and more, `fit` chooses a plan that uses what the program will take later.
    habit = "" if not share and habit in ("arrays", "workers") else habit
    return Case(
        name=f"{seed}/{number} {family[1]}",
        family=family,
        config=config,
        batch=batch,
        sizes=sizes,
        optimizer=(kind, OPTIMIZERS[kind]),
        is_empty=trait == "empty",
        share=share,
        habit=habit,
    )


def _habit(rng: random.Random, family: tuple[str, str]) -> str:
    habit = rng.choice((*HABITS, *("",) * len(HABITS)))
    # On a processor torch has no recurrent layers in fp16, and its convolutions in fp16 take minutes.
    lacks_fp16 = family[1] == "recurrent" or family[1].endswith("ImageClassification")
    return "" if habit == "fp16" and lacks_fp16 else habit


def draw_wide(seed: int, number: int, *, smallest: bool) -> Case:
    """The case of that number of `limiting`. Every fourth has the smallest limit."""
    rng = random.Random(f"wide {seed}/{number}")
    family, config, batch, sizes = rng.choice(wide.WIDE)(rng)
    ways: tuple[dict[str, Any], ...] = ({}, {}, {"clip": 1.0}, {"groups": True}, {"autocast": "bfloat16"})
    return Case(
        name=f"wide {seed}/{number} {family[1]}",
        family=family,
        config=config,
        batch=batch,
        sizes=sizes,
        optimizer=rng.choice(wide.OPTIMIZERS),
        is_empty=False,
        share=0.0 if smallest or number % 4 == 3 else round(rng.uniform(0.02, 1.1), 3),
        way={"wide": True, **rng.choice(ways)},
    )


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adafactor": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3},
    "Adagrad": {"lr": 1e-2},
    "NAdam": {"lr": 1e-3},
    "Muon": {"lr": 1e-3},
}
Drawn = tuple[tuple[str, str], dict[str, Any], str, tuple[int, int, int]]


def _text_sizes(rng: random.Random, *, is_wide: bool) -> tuple[int, int, int]:
    vocabulary = rng.choice((20_000, 32_000, 50_257)) if is_wide else rng.choice((500, 3000, 8000))
    return rng.choice((2, 3, 4, 6, 8)), rng.choice((32, 64, 100, 128)), vocabulary


def _gpt2(rng: random.Random, is_wide: bool) -> Drawn:  # noqa: FBT001, one table of functions
    rows, tokens, vocabulary = _text_sizes(rng, is_wide=is_wide)
    config = {
        "n_layer": rng.randint(2, 6), "n_embd": rng.choice((64, 128, 192, 256)), "n_head": 4, "vocab_size": vocabulary, "n_positions": 128, **SPECIAL,
        "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    return ("GPT2Config", "GPT2LMHeadModel"), config, "text", (rows, tokens, vocabulary)


def _llama_like(name: str, **more: Any) -> Callable[[random.Random, bool], Drawn]:
    def make(rng: random.Random, is_wide: bool) -> Drawn:  # noqa: FBT001
        rows, tokens, vocabulary = _text_sizes(rng, is_wide=is_wide)
        width = rng.choice((64, 128, 192, 256))
        config = {
            "hidden_size": width, "num_hidden_layers": rng.randint(2, 6), "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": rng.choice((2, 3)) * width, "vocab_size": vocabulary, "tie_word_embeddings": rng.random() < 0.5, **SPECIAL, **more,
        }  # fmt: skip
        return (f"{name}Config", f"{name}ForCausalLM"), config, "text", (rows, tokens, vocabulary)

    return make


def _mamba(rng: random.Random, is_wide: bool) -> Drawn:  # noqa: FBT001
    rows, _, vocabulary = _text_sizes(rng, is_wide=is_wide)
    config = {
        "hidden_size": rng.choice((64, 128)), "num_hidden_layers": rng.randint(2, 3), "state_size": 16, "vocab_size": vocabulary, "use_cache": False,
        "use_mambapy": False, "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    return ("MambaConfig", "MambaForCausalLM"), config, "text", (min(rows, 4), 24, vocabulary)


def _t5(rng: random.Random, is_wide: bool) -> Drawn:  # noqa: FBT001
    rows, tokens, vocabulary = _text_sizes(rng, is_wide=is_wide)
    config = {
        "num_layers": rng.randint(2, 4), "d_model": rng.choice((64, 128, 256)), "d_kv": 32, "num_heads": 4, "d_ff": 512, "vocab_size": vocabulary,
        "use_cache": False, "decoder_start_token_id": 0,
    }  # fmt: skip
    return ("T5Config", "T5ForConditionalGeneration"), config, "pairs", (rows, tokens, vocabulary)


def _bert(rng: random.Random, is_wide: bool) -> Drawn:  # noqa: FBT001
    rows, tokens, vocabulary = _text_sizes(rng, is_wide=is_wide)
    width = rng.choice((64, 128, 256))
    config = {
        "hidden_size": width,
        "num_hidden_layers": rng.randint(2, 6),
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
        "vocab_size": vocabulary,
    }
    return ("BertConfig", "BertForMaskedLM"), config, "text", (rows, tokens, vocabulary)


def _vit(rng: random.Random, _: bool) -> Drawn:  # noqa: FBT001
    width, pixels = rng.choice((128, 192, 256)), rng.choice((64, 96, 128))
    config = {
        "hidden_size": width, "num_hidden_layers": rng.randint(2, 6), "num_attention_heads": 4, "intermediate_size": 3 * width, "image_size": pixels,
        "patch_size": 8, "num_labels": 100,
    }  # fmt: skip
    return ("ViTConfig", "ViTForImageClassification"), config, "images", (rng.choice((2, 4, 8)), pixels, 100)


def _resnet(rng: random.Random, _: bool) -> Drawn:  # noqa: FBT001
    config = {
        "embedding_size": 32, "hidden_sizes": [64, 128, 256][: rng.randint(2, 3)], "layer_type": rng.choice(("basic", "bottleneck")), "num_labels": 10,
    }  # fmt: skip
    config["depths"] = [rng.randint(1, 3) for _ in config["hidden_sizes"]]
    return (
        ("ResNetConfig", "ResNetForImageClassification"),
        config,
        "images",
        (rng.choice((4, 8)), rng.choice((64, 96)), 10),
    )


def _convnext(rng: random.Random, _: bool) -> Drawn:  # noqa: FBT001
    config = {
        "hidden_sizes": [48, 96, 192],
        "depths": [rng.randint(1, 3) for _ in range(3)],
        "num_stages": 3,
        "num_labels": 10,
    }
    return (
        ("ConvNextConfig", "ConvNextForImageClassification"),
        config,
        "images",
        (rng.choice((2, 4)), rng.choice((64, 96)), 10),
    )


def _perceptron(rng: random.Random, _: bool) -> Drawn:  # noqa: FBT001
    width = rng.choice((256, 512, 700))
    config = {"kind": "perceptron", "width": width, "layers": rng.randint(3, 8), "bias": rng.random() < 0.5}
    return ("torch", "perceptron"), config, "rows", (rng.choice((8, 64, 500)), width, 0)


def _encoder(rng: random.Random, _: bool) -> Drawn:  # noqa: FBT001
    width = rng.choice((64, 128, 256))
    return (
        ("torch", "encoder"),
        {"kind": "encoder", "width": width, "layers": rng.randint(2, 5)},
        "rows",
        (rng.choice((2, 4, 8)), width, 96),
    )


def _recurrent(rng: random.Random, _: bool) -> Drawn:  # noqa: FBT001
    width = rng.choice((64, 128, 256))
    return (
        ("torch", "recurrent"),
        {"kind": "recurrent", "width": width, "layers": rng.randint(1, 3)},
        "rows",
        (rng.choice((4, 16)), width, 48),
    )


def _tiny(rng: random.Random, _: bool) -> Drawn:  # noqa: FBT001
    """Layers of tensors below the sizes that travel: 120 x 128 floats are 61,440 bytes."""
    width = rng.choice((24, 64, 120))
    return (
        ("torch", "tiny"),
        {"kind": "tiny", "width": width, "layers": rng.randint(20, 60)},
        "rows",
        (rng.choice((8, 100, 400)), width, 0),
    )


def _lean_gpt2(rng: random.Random, _: bool) -> Drawn:  # noqa: FBT001
    """A deep and narrow model: hundreds of tensors of a few KiB."""
    config = {
        "n_layer": rng.randint(8, 16),
        "n_embd": rng.choice((32, 48, 96)),
        "n_head": 4,
        "vocab_size": 500,
        "n_positions": 128,
        **SPECIAL,
    }
    return ("GPT2Config", "GPT2LMHeadModel"), config, "text", (rng.choice((2, 4, 8)), rng.choice((32, 64)), 500)


CAUSAL = (
    _gpt2,
    _llama_like("Llama"),
    _llama_like("Qwen3", head_dim=32),
    _llama_like("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _mamba,
)
OTHERS = (_t5, _bert, _vit, _resnet, _convnext, _perceptron, _encoder, _recurrent)
SMALL = (_tiny, _lean_gpt2)


# --- the parent -------------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=0, help="so many, a quarter at the smallest limit")
    parser.add_argument("--smallest", type=int, default=0, help="so many, each at the smallest limit and 3 %% below it")
    parser.add_argument("--only", type=int, action="append", help="cases of these numbers (may be repeated)")
    parser.add_argument("--directory", type=Path, help="for the homes on disk (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument(
        "--forks", action="store_true", help="measure in forks of one process that has loaded the libraries"
    )
    parser.add_argument("--wide", action="store_true", help="other architectures, optimizers and ways to train")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        print(json.dumps(_work(json.loads(arguments.worker))))
        return 0
    smallest = arguments.smallest > 0
    numbers = arguments.only or range(arguments.smallest or arguments.cases)
    results: list[dict[str, Any]] = []
    head = {"command": "python benchmarks/limit_sweep.py " + " ".join(sys.argv[1:]), "commit": commit()}
    run = _run_in_a_fork if arguments.forks else _run
    if arguments.forks:
        _load_libraries()
    with tempfile.TemporaryDirectory(prefix="memfit-sweep-", dir=arguments.directory) as directory:
        for number in numbers:
            case = (draw_wide if arguments.wide else draw)(arguments.seed, number, smallest=smallest)
            results.append(measure(case, Path(directory), run))
            print(_row_text(results[-1]), flush=True)
            if arguments.out is not None:
                arguments.out.write_text(
                    json.dumps(
                        {**head, "machine": common.machine(), "seed": arguments.seed, "results": results}, indent=1
                    )
                    + "\n"
                )
    failed = [r for r in results if not r["holds"]]
    print(f"{len(results)} cases, {len(failed)} failed: {', '.join(r['case']['name'] for r in failed) or 'none'}")
    return 1 if failed else 0


Run = Callable[[Case, int, Path], dict[str, Any]]


def measure(case: Case, directory: Path, run: Run) -> dict[str, Any]:
    """The smallest limit of a case, what happens at its own limit, and, if that is the smallest, 3 % below it."""
    asked = run(case, LEAST_LIMIT, directory)
    found: dict[str, Any] = {"case": asdict(case), "asked": asked, "holds": False, "problems": []}
    smallest = asked.get("smallest")
    if smallest is None:
        found["problems"] = [
            f"no smallest limit: {asked.get('died') or asked.get('message') or 'it trains with 2 MiB'}"
        ]
        return found
    limit = smallest if case.share == 0.0 else int(smallest + case.share * max(0, asked["plain_bytes"] - smallest))
    trained = run(case, limit + case.extra_bytes, directory)
    found |= {"smallest_bytes": smallest, "limit_bytes": limit, "trained": trained}
    problems = _problems(trained, limit + case.extra_bytes)
    if limit == smallest:
        less = run(case, int(smallest * BELOW), directory)
        found["below"] = less
        if "smallest" not in less:
            problems.append(f"3 % below: {less.get('died', 'it trains')}")
    found["problems"], found["holds"] = problems, not problems
    return found


def _problems(trained: Mapping[str, Any], limit: int) -> list[str]:
    if "peaks" not in trained:
        return [trained.get("died") or f"refused: {trained['message']}"]
    problems: list[str] = []
    peak = max(trained["peaks"].values())
    if peak > limit:
        problems.append(f"{peak} bytes measured, {limit} were the limit")
    own = max(n - (trained["array_bytes"] if name != "load" else 0) for name, n in trained["peaks"].items())
    # Workers count as the process does, for whatever they hold of their own.
    workers = WORKER_BYTES if trained["habit"] == "workers" else 0
    for what, measured, predicted in (
        ("process", own, trained["predicted_process_bytes"] + workers),
        ("tensors", trained["tensor_bytes"], trained["predicted_tensor_bytes"]),
    ):
        if measured > max(predicted * MOST_ABOVE, predicted + MOST_ABOVE_BYTES[what]):
            problems.append(f"{what}: {measured} bytes measured, {predicted} predicted")
    if not trained["is_finite"]:
        problems.append("a loss that is not finite")
    return problems


def _run(case: Case, limit: int, directory: Path) -> dict[str, Any]:
    """One child; its JSON, or how it ended."""
    home = Path(tempfile.mkdtemp(dir=directory))
    request = {"case": asdict(case), "limit": limit, "directory": str(home)}
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        [sys.executable, __file__, "--worker", json.dumps(request)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    shutil.rmtree(home)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    return {"died": f"exit {done.returncode}: {done.stderr.strip()[-1500:]}"}


def _load_libraries() -> None:
    """Loads the modules that every fork would: it is there in all of them, as in a process that loaded it itself."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def _run_in_a_fork(case: Case, limit: int, directory: Path) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(dir=directory))
    request = {"case": json.loads(json.dumps(asdict(case))), "limit": limit, "directory": str(home)}
    found, ended = in_a_fork(lambda: [_work(request)], TIMEOUT_S)
    shutil.rmtree(home)
    return found[0] if found else {"died": ended}


def _row_text(result: Mapping[str, Any]) -> str:
    case, trained = result["case"], result.get("trained", {})
    mib = common.mib
    words = [case["name"], case["optimizer"][0], "empty" if case["is_empty"] else "whole"]
    words += [case["habit"]] if case["habit"] else []
    words += [f"smallest {mib(result.get('smallest_bytes'))}", f"limit {mib(result.get('limit_bytes'))}"]
    if "peaks" in trained:
        peaks = trained["peaks"]
        highest = max(peaks, key=lambda name: peaks[name])
        words += [f"peak {mib(peaks[highest])} ({highest}) of {mib(trained['predicted_process_bytes'])} predicted"]
        words += [
            f"tensors {trained['tensor_bytes'] / common.MIB:.1f} of {trained['predicted_tensor_bytes'] / common.MIB:.1f}",
            trained["plan"],
        ]
    return "; ".join(words) + ("" if result["holds"] else f"\n   FAILED: {' | '.join(result['problems'])}")


# --- the child --------------------------------------------------------------------------------------------------------------------


def _work(request: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch

    import memfit
    import memfit.api  # counts as an import: memfit loads its names when they are used
    from limiting import building
    from memfit.core.errors import DoesNotFitError
    from memfit.devices.binding import install
    from memfit.machine.machine import prepare_process
    from memfit.step.lower import lower
    from memfit.step.predict import predict

    drawn = request["case"]
    case = Case(**{**drawn, "family": (drawn["family"][0], drawn["family"][1])})
    where = Path(request["directory"])
    loss = _import(case)
    prepare_process()
    torch.manual_seed(0)
    model = memfit.empty(lambda: _build(case)) if case.is_empty else _build(case)
    optimizer = building.build_optimizer(
        case.optimizer[0], case.optimizer[1], model, grouped=case.way.get("groups", False)
    )
    batch = _batch(case)
    try:
        job = memfit.fit(
            model,
            optimizer,
            loss,
            batch,
            limit=request["limit"],
            directory=where / "homes",
            max_grad_norm=case.way.get("clip"),
            plan=_plan(case, model, optimizer, loss, batch),
            allow={"fp16"} if case.habit == "fp16" else (),
        )
    except DoesNotFitError as error:
        return {
            "smallest": error.smallest_limit_bytes,
            "message": str(error),
            "plain_bytes": _plain_bytes(model, optimizer, loss, batch),
        }
    arrays = [np.ones(ARRAY_BYTES // 8)] if case.habit == "arrays" else []
    steps = [job.step(one) for one in _batches(case, batch)]
    evaluated = job.evaluate(batch)
    job.save(where / "saved")
    phases = job.proof().phases
    predicted = predict(lower(job.schedule, job.plan, job.profile)).peak_bytes
    found = {
        "is_finite": all(step.is_finite or step.is_skipped for step in steps) and evaluated.loss == evaluated.loss,
        # The arrays lie there from after the load on.
        "peaks": {phase.name: (phase.process_peak_bytes or 0) for phase in phases},
        "habit": case.habit,
        "array_bytes": sum(array.nbytes for array in arrays),
        "tensor_bytes": max(phase.peak_bytes for phase in phases if "step" in phase.name or phase.name == "steady"),
        "predicted_process_bytes": job.predicted_peak_bytes,
        "predicted_tensor_bytes": predicted,
        "plan": job.reason.split(":")[0]
        + (f"; loss in chunks of {job.plan.loss_chunk_tokens}" if job.plan.loss_chunk_tokens else ""),
        "phases": [phase.name for phase in phases],
    }
    del arrays
    job.close(restore=False)
    assert install().stats().limit_bytes is None
    return found


def _plan(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batch: Any) -> Plan | None:
    """The given plan of a habit; None: one is to be chosen."""
    import memfit
    from memfit.core.plan import CallPlan, Plan
    from memfit.core.saved_policies import Saved
    from memfit.core.storage_formats import ComputeDtype
    from memfit.core.tiers import Tier
    from memfit.planner.search.candidates import decided_calls

    if case.habit == "fp16":
        return Plan(compute_dtype=ComputeDtype.FLOAT16)
    if case.habit not in ("recompute", "select", "offload"):
        return None
    trace = next(iter(memfit.profile(model, optimizer, loss, batch).traces.values()))
    chosen = decided_calls(trace)
    again = case.habit != "offload"
    fate = CallPlan(saved=Saved(case.habit)) if again else CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)
    calls = [
        fate if c.index in chosen and not c.must_keep and not (again and c.runs_once) else CallPlan()
        for c in trace.calls
    ]
    return Plan(calls=tuple(calls))


def _batches(case: Case, batch: Any) -> Iterator[Any]:
    """A batch for each step, as the habit has them."""
    import torch
    from torch.utils._pytree import tree_map

    if case.habit == "workers":
        # Each worker makes the whole batch, and hands it over in shared memory.
        same: Any = _Same(batch)
        yield from torch.utils.data.DataLoader(same, batch_size=None, num_workers=2)
        return
    smaller = tree_map(lambda tensor: tensor[:-1], batch)
    for step in range(STEPS):
        yield smaller if case.habit == "shapes" and step % 2 else batch


class _Same:
    """A data set of one batch, `STEPS` times."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        return tree_map(torch.clone, self._batch)


def _import(case: Case) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The loss; whatever is imported for the model is imported now."""
    import torch

    if "wide" in case.way:
        from limiting.building import build_loss, load

        load(case.family)
        return build_loss(case.family, case.batch, case.way.get("autocast"))
    if case.family[0] == "torch":
        return lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    import transformers

    assert all(hasattr(transformers, name) for name in case.family)
    return lambda model, batch: model(**batch).loss


def _build(case: Case) -> nn.Module:
    if "wide" in case.way:
        from limiting.building import build_model

        return build_model(case.family, case.config)
    if case.family[0] == "torch":
        return _module(**case.config)
    import transformers

    config, model = (getattr(transformers, name) for name in case.family)
    return model(config(**case.config)).train()


def _module(kind: str, width: int, layers: int, bias: bool = True) -> nn.Module:  # noqa: FBT001, FBT002, as JSON has it
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)[0]
            return x

    if kind == "perceptron":
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 2 * width, bias=bias), nn.GELU(), nn.Linear(2 * width, width, bias=bias))
                for _ in range(layers)
            )
        )
    if kind == "encoder":
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 3 * width, batch_first=True), layers, enable_nested_tensor=False
        )
    if kind == "tiny":
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, width)) for _ in range(layers))
        )
    return Recurrent()


def _batch(case: Case) -> Any:
    import torch

    rows, length, count = case.sizes
    if "wide" in case.way:
        from limiting.building import build_batch

        return build_batch(case.batch, case.sizes)
    match case.batch:
        case "rows":
            shape = (rows, count, length) if count else (rows, length)
            return (torch.randn(shape), torch.randn(shape))
        case "images":
            return {"pixel_values": torch.randn(rows, 3, length, length), "labels": torch.randint(0, count, (rows,))}
        case "pairs":
            return {
                "input_ids": torch.randint(1, count, (rows, length)),
                "labels": torch.randint(1, count, (rows, length * 3 // 4)),
            }
        case _:
            tokens = torch.randint(3, count, (rows, length))
            return {"input_ids": tokens, "labels": tokens}


def _plain_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., torch.Tensor], batch: Any
) -> int:
    """Of the process, if it trained with everything resident."""
    import memfit
    from memfit.devices.binding import install
    from memfit.machine.meters import ProcessMeter

    base = ProcessMeter().resident_bytes().whole_bytes - install().stats().mapped_bytes
    profile = memfit.profile(model, optimizer, loss, batch)
    trace = next(iter(profile.traces.values()))
    return base + profile.weight_bytes + sum(profile.state_bytes.values()) + trace.plain_peak_bytes + 64 * common.MIB


if __name__ == "__main__":
    sys.exit(main())
