"""Predicted and measured seconds of steps: models and plans from a seeded generator, raw and calibrated.

    .venv/bin/python benchmarks/clock.py --probe --seed 1 7 --out benchmarks/results/clock.json   # 36 cases and the probe: a quarter of an hour
    .venv/bin/python benchmarks/clock.py --seed 3 --count 30 --hardware mine.json --out clock.json
    .venv/bin/python benchmarks/clock.py --probe --limits 6 --out benchmarks/results/clock-limits.json   # 48 cases: three quarters of an hour

Each case is a process of its own: a given plan, random weights and data, ten steps. Measured are seconds of the processor where a step computes
and of the clock where it waits for a disk: the processor seconds of the main thread and of updates beside it, and its own waits, but for what
updates compute while it waits; the least of every second step behind the second. Raw: the prediction with the machine's file. Calibrated: the same with
factors by group of classes and by direction of the disk, fitted to the actions and transfers of the steps between, so that a machine
that grows faster or slower meanwhile does not count as an error; in the summary also without those of the disk. Beside them the old
way: products divided by one rate, of the same file.

Between steps anchors of plain PyTorch are timed: a product, a sum of large tensors, a forward and a backward of small layers. "load" is what they
took around the measured steps beside their least in the whole run: where it is above 1, others slowed the machine, processor seconds included.

`--limits`: not given plans but those that memfit chooses: one model of each family, at so many limits of the process from 1.05 of the smallest that a
refusal names to 0.9 of what the process takes without one. Beside the seconds, the kernel's peak of the process, the largest of all phases (`Job.proof`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import common

STEPS, WARM = 10, 2
ASKED = 2 << 20  # a limit that nothing fits: the refusal names the smallest that something does
CALIBRATED_ON = range(WARM, STEPS, 2)
LANGUAGE = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPTIMIZERS = (
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    ("Adafactor", {}),
)
_CLASSES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
    "resnet": ("ResNetConfig", "ResNetForImageClassification"),
}
GAP = 1.05  # pairs of plans that are further apart than this count for the order


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--probe", action="store_true", help="measure this machine first, with as many threads as OMP_NUM_THREADS says"
    )
    parser.add_argument("--count", type=int, default=18)
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="CASE", help="of the drawn cases those with these numbers"
    )
    parser.add_argument(
        "--limits", type=int, metavar="COUNT", help="not drawn cases: chosen plans at so many limits a model"
    )
    parser.add_argument("--families", nargs="+", default=list(_CLASSES), choices=_CLASSES, help="for --limits")
    parser.add_argument("--hardware", type=Path, help="the machine's file (default: that of memfit probe)")
    parser.add_argument("--directory", type=Path, help="for the homes on disk (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        from memfit.core.errors import MemfitError

        try:
            _work(json.loads(arguments.worker), arguments.hardware, arguments.directory)
        except MemfitError as error:  # a model that cannot compute in bf16, by its own code; a limit that does not hold
            print(json.dumps({"refused": f"{type(error).__name__}: {error}"}))
        return
    with tempfile.TemporaryDirectory(prefix="memfit-clock-", dir=arguments.directory) as directory:
        if arguments.probe:
            if arguments.hardware:
                raise SystemExit(
                    "--probe measures the machine, and --hardware names a description of it: leave one out"
                )
            arguments.hardware = Path(directory) / "machine.json"
            probe = [sys.executable, "-m", "memfit.cli", "probe", "--out", arguments.hardware, "--directory", directory]
            subprocess.run(probe, check=True, stdout=sys.stderr)
        if arguments.limits:
            runs = {"limits": _measured(arguments, _cases_of_limits(arguments, directory), directory)}
        else:
            runs = {f"seed {seed}": _measured(arguments, _drawn(arguments, seed), directory) for seed in arguments.seed}
    for name, cases in runs.items():
        found = [case for case in cases if "refused" not in case]
        refused = [case["name"] for case in cases if "refused" in case]
        print(f"{name}\n{_table(found)}\n{_summary(found)}\nrefused: {', '.join(refused) or 'none'}\n")
    if arguments.out is not None:
        whole = {name: {"machine": common.machine(), "cases": cases} for name, cases in runs.items()}
        arguments.out.write_text(json.dumps(whole, indent=1) + "\n")


def _drawn(arguments: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """The cases of a seed."""
    rng = random.Random(seed)
    cases = [draw_case(rng, index) for index in range(arguments.count)]
    return [case for index, case in enumerate(cases) if arguments.only is None or index in arguments.only]


def _cases_of_limits(arguments: argparse.Namespace, directory: str) -> Iterator[dict[str, Any]]:
    """Yields one model of each family at limits between the smallest one and what it takes without."""
    for family in arguments.families:
        case = {
            "family": family, "width": 384, "layers": 6, "rows": 8, "tokens": 128, "vocabulary": 4000,
            "optimizer": ["AdamW", {}], "bf16": False,
        }  # fmt: skip
        smallest = _child(arguments, {**case, "name": f"{family} asked", "limit_bytes": ASKED}, directory)
        plain = _child(arguments, {**case, "name": f"{family} without a limit", "limit_bytes": None}, directory)
        least = 1.05 * smallest["smallest_bytes"]
        most = max(least, 0.9 * plain["peak_bytes"])
        for number in range(arguments.limits):
            limit = int(least + (most - least) * number / max(arguments.limits - 1, 1))
            yield {**case, "name": f"{family} in {limit / common.MIB:.0f} MiB", "limit_bytes": limit}


def _child(arguments: argparse.Namespace, case: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """What a process of a case's own measured."""
    command = [sys.executable, __file__, "--worker", json.dumps(case), "--directory", directory]
    command += ["--hardware", str(arguments.hardware)] if arguments.hardware else []
    # Raw is what the probe measured, without what runs have taught since.
    environment = {**os.environ, "MEMFIT_CORRECTIONS": "off"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{case['name']} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _measured(arguments: argparse.Namespace, cases: Iterable[dict[str, Any]], directory: str) -> list[dict[str, Any]]:
    """The cases, each in a process of its own, with what was measured."""
    found: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for case in cases:
        measured = _child(arguments, case, directory)
        if "refused" in measured:
            said = f"{case['name']} is not measured, memfit refuses it: {measured['refused']}"
            print(said, file=sys.stderr, flush=True)
            refused.append({**case, **measured})
            continue
        found.append({**case, **measured})
        _note_load(found)
        print(_table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return found + refused


def draw_case(rng: random.Random, index: int) -> dict[str, Any]:
    """A model, a batch, an optimizer, a precision and a plan, as JSON would say them."""
    family = rng.choice(["gpt2", "llama", "qwen3", "bert", "vit", "mixtral", "t5", "resnet"])
    width, layers = rng.choice([256, 384, 512]), rng.choice([3, 4, 6])
    optimizer, settings = rng.choice(OPTIMIZERS)
    homes = rng.choice(["device", "device", "states", "disk"])
    case = {
        "family": family, "width": width, "layers": layers,
        "rows": rng.choice([4, 8]), "tokens": rng.choice([64, 128, 256]), "vocabulary": rng.choice([4000, 16000]),
        "optimizer": [optimizer, settings], "homes": homes, "saved": rng.choice(["keep", "recompute", "select"]),
        "microbatches": 1 if family in ("resnet", "mixtral") else rng.choice([1, 1, 2, 4]),
        "bf16": rng.random() < 0.2,
    }  # fmt: skip
    case["name"] = f"{index:02d} {family} {width}x{layers}, {case['rows']}x{case['tokens']}"
    return case


def _table(found: Sequence[Mapping[str, Any]]) -> str:
    headers = ["case", "plan", "measured s", "raw", "error", "calibrated", "error", "products alone", "load"]
    rows = [
        [
            one["name"],
            _plan_words(one),
            f"{one['measured_s']:.3f}",
            f"{one['raw_s']:.3f}",
            f"{_error(one, 'raw_s'):+.0%}",
            f"{one['calibrated_s']:.3f}",
            f"{_error(one, 'calibrated_s'):+.0%}",
            f"{_error(one, 'products_s'):+.0%}",
            f"{one['load']:.2f}",
        ]
        for one in found
    ]
    return common.table(headers, rows)


def _plan_words(one: Mapping[str, Any]) -> str:
    if "limit_bytes" in one:
        return one["plan"].partition(": ")[0][:80]
    words = f"{one['optimizer'][0]}{'/fused' if one['optimizer'][1].get('fused') else ''} {one['homes']} {one['saved']} {one['microbatches']}"
    return words + (" bf16" if one["bf16"] else "")


def _error(one: Mapping[str, Any], key: str) -> float:
    return one[key] / one["measured_s"] - 1


def _note_load(found: Sequence[dict[str, Any]]) -> None:
    """Sets each case's load: the mean over anchors of their seconds beside the least of all cases."""
    least = [min(one["anchors_s"][index][0] for one in found) for index in range(len(found[0]["anchors_s"]))]
    for one in found:
        one["load"] = statistics.fmean(around / best for (_, around), best in zip(one["anchors_s"], least, strict=True))


def _summary(found: Sequence[Mapping[str, Any]]) -> str:
    def least(one: Mapping[str, Any], turn: int) -> float:
        return min(one["computed_s"][WARM + turn :: 2])

    lines = [""]
    shown = {"raw_s": "raw", "calibrated_s": "calibrated", "links_raw_s": "calibrated but for the disk"}
    for key, name in (*shown.items(), ("products_s", "products alone")):
        errors = sorted(abs(_error(one, key)) for one in found)
        lines.append(
            f"{name}: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, Kendall tau {_tau(found, key):.2f}"
        )
    held = sum(one["fast_s"] <= one["measured_s"] <= one["slow_s"] for one in found)
    width = statistics.median((one["slow_s"] - one["fast_s"]) / one["raw_s"] for one in found)
    apart = sorted(abs(least(one, 0) / least(one, 1) - 1) for one in found)
    lines.append(
        f"the machine itself: steps calibrated on and steps measured are {statistics.median(apart):.1%} apart, worst {apart[-1]:.1%}"
    )
    lines.append(f"intervals hold {held} of {len(found)}; median width {width:.0%} of the prediction")
    near = sum(abs(_error(one, "calibrated_s")) <= 0.1 for one in found)
    lines.append(f"calibrated within 10 %: {near} of {len(found)}")
    limited = [one for one in found if "limit_bytes" in one]
    if limited:
        over = [one["name"] for one in limited if one["peak_bytes"] > one["limit_bytes"]]
        lines.append(f"processes above their limit: {len(over)} of {len(limited)} {', '.join(over)}".rstrip())
    return "\n".join(lines)


def _tau(found: Sequence[Mapping[str, Any]], key: str) -> float:
    """Kendall's tau over the pairs of cases whose measured seconds are more than 5 % apart."""
    agree = count = 0
    for a, b in combinations(found, 2):
        if max(a["measured_s"], b["measured_s"]) > GAP * min(a["measured_s"], b["measured_s"]):
            count += 1
            agree += 1 if (a[key] - b[key]) * (a["measured_s"] - b["measured_s"]) > 0 else -1
    return agree / count if count else 1.0


# --- the child --------------------------------------------------------------------------------------------------------------------


def _work(case: dict[str, Any], hardware: Path | None, directory: Path) -> None:
    import torch

    import memfit
    from memfit.core.hardware import read_hardware
    from memfit.core.work_kinds import PRODUCT_KINDS
    from memfit.devices.binding import install
    from memfit.job import step_watchers
    from memfit.job.comparing import median_traffic
    from memfit.machine.described import load_saved
    from memfit.step.lower import lower
    from memfit.step.predict import GROUPS, calibrated, fit_factors, largest_deviations, predict

    machine = load_saved(torch.device("cpu")) if hardware is None else read_hardware(hardware)
    if machine is None:
        raise SystemExit("run memfit probe first, with as many threads, or name a file with --hardware")
    install()
    # A job measures its first 16 steps for itself; here they are to be as the later ones.
    step_watchers._ALL_OF_FIRST = 0  # noqa: SLF001
    torch.manual_seed(0)
    model, batch = _model_and_batch(case)
    kind, settings = case["optimizer"]
    optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
    where = directory / case["name"].replace(" ", "-").replace(",", "")
    if "limit_bytes" in case:
        asked: dict[str, Any] = {"limit": case["limit_bytes"]}
    else:
        plan = _plan(case, memfit.profile(model, optimizer, _loss, batch))
        allow = {"nonadditive-loss", *({"bf16"} if case["bf16"] else ())}
        allow -= {"nonadditive-loss"} if plan.microbatches == 1 else set()
        asked = {"plan": plan, "allow": allow, "enforce": False}
    try:
        started = memfit.fit(model, optimizer, _loss, batch, directory=where, hardware=machine, **asked)
    except memfit.DoesNotFitError as error:
        if case.get("limit_bytes") != ASKED:
            raise
        print(json.dumps({"smallest_bytes": error.smallest_limit_bytes}))
        return
    with started as job:
        step = lower(job.schedule, job.plan, job.profile, device="cpu")
        predicted = predict(step, machine)
        busy, taken, waited, timelines, anchors = [], [], [], [], [_anchors()]
        measured_on = [index for index in range(WARM, STEPS) if index not in CALIBRATED_ON]
        for index in range(STEPS):
            computed, seconds, stalls, timeline = _one_step(job, batch, is_recorded=index in CALIBRATED_ON)
            busy.append(computed)
            taken.append(seconds)
            waited += [stalls] if index in measured_on else []
            timelines += [timeline] if timeline is not None else []
            anchors.append(_anchors())
        phases = job.proof().phases
        reason = job.reason
        job.close(restore=False)
    recorded = min(timelines, key=lambda timeline: timeline.moments[-1].end_s)
    moved = {lane: [one.traffic[lane] for one in timelines] for lane in recorded.traffic}
    recorded = replace(
        recorded, beside_s=statistics.median(one.beside_s for one in timelines), traffic=median_traffic(moved)
    )
    best = fit_factors(step, recorded, machine)
    again = predict(step, calibrated(machine, best))
    links_raw = predict(step, calibrated(machine, {name: best[name] for name in GROUPS}))
    products = sum(a for o in step for kind, a in o.work if kind in PRODUCT_KINDS) / machine.flops_per_s
    fastest = min(measured_on, key=taken.__getitem__)
    around = [(min(column), statistics.fmean(column[fastest : fastest + 2])) for column in zip(*anchors, strict=True)]
    assert predicted.interval_s is not None
    print(
        json.dumps({
            "plan": reason, "peak_bytes": max(phase.process_peak_bytes or 0 for phase in phases),
            "measured_s": taken[fastest], "steps_s": taken, "computed_s": busy, "raw_s": predicted.seconds, "calibrated_s": again.seconds,
            "links_raw_s": links_raw.seconds,
            "products_s": products, "fast_s": predicted.interval_s[0], "slow_s": predicted.interval_s[1], "factors": best,
            "stalls_s": dict(predicted.stalls_s), "measured_stalls_s": waited, "anchors_s": around,
            "calibrated_stalls_s": dict(again.stalls_s), "beside_s": recorded.beside_s,
            "traffic": {lane: [one.nbytes, one.seconds] for lane, one in recorded.traffic.items()},
            "deviations": [[d.action, d.predicted_s, d.measured_s] for d in largest_deviations(predicted, recorded, most=4)],
        })
    )  # fmt: skip


def _anchors() -> list[float]:
    """Processor seconds of work that has nothing to do with memfit, each the least of some."""
    import torch

    a, large = torch.full((512, 512), 0.5), torch.full((1 << 22,), 0.5)
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))

    def least(call: Any) -> float:
        best = float("inf")
        for _ in range(4):
            began = time.thread_time()
            call()
            best = min(best, time.thread_time() - began)
        return best

    return [
        least(lambda: torch.mm(a, a)),
        least(lambda: large + large),
        least(lambda: layers(a[:2, :8]).sum().backward()),
    ]


def _one_step(job: Any, batch: Any, *, is_recorded: bool) -> tuple[float, float, dict[str, float], Any]:
    """Processor seconds of a step, its seconds, its waits by cause, and its timeline in processor seconds of the main thread."""
    from memfit.engine.measured_step import StepRecorder
    from memfit.homes.factories import used_by

    class Waits(StepRecorder):
        """Notes besides what updates compute while the main thread waits: it costs no seconds of its own."""

        hidden_s = 0.0

        @contextmanager
        def stall(self, kind: str) -> Iterator[None]:
            before = worker.busy_s()
            with super().stall(kind):
                yield
            self.hidden_s += worker.busy_s() - before

    engine, worker = job._assembly.engine, job._assembly.updates  # noqa: SLF001, the engine records where nothing public does yet
    waits = Waits()
    factories = job._assembly.house.factories  # noqa: SLF001
    recorder = StepRecorder(clock=time.thread_time, beside=worker.busy_s, links=lambda: used_by(factories))
    updates, thread = worker.busy_s(), time.thread_time()
    with engine.recording(recorder if is_recorded else waits):
        job.step(batch)
    updates, thread = worker.busy_s() - updates, time.thread_time() - thread
    stalls = {} if is_recorded else dict(waits.timeline().stalls_s)
    return (
        thread + updates,
        thread + updates - waits.hidden_s + sum(stalls.values()),
        stalls,
        recorder.timeline() if is_recorded else None,
    )


def _loss(model: Any, batch: Mapping[str, Any]) -> Any:
    return model(**batch).loss


def _model_and_batch(case: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch
    import transformers

    width, layers, words = case["width"], case["layers"], case["vocabulary"]
    heads = width // 64
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    decoder = {**shape, "num_key_value_heads": max(1, heads // 2), "vocab_size": words, **LANGUAGE}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = {"vocab_size": words, "n_positions": 256, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    pairs = {"d_kv": 64, "vocab_size": words, "use_cache": False, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    stages = {"hidden_sizes": [width // 4, width // 2, width], "depths": [2, 2, 2], "embedding_size": 32}
    wide = {"intermediate_size": 4 * width}
    settings = {
        "gpt2": {"n_layer": layers, "n_embd": width, "n_head": heads, **text},
        "llama": {**decoder, "intermediate_size": 11 * width // 4},
        "qwen3": {**decoder, "head_dim": 64, "intermediate_size": 3 * width, "tie_word_embeddings": True},
        "bert": {**shape, **wide, "vocab_size": words, **quiet, "hidden_dropout_prob": 0.1},
        "vit": {**shape, **wide, "image_size": 128, "patch_size": 8, "num_labels": 100, **quiet},
        "mixtral": {**decoder, "intermediate_size": 2 * width, **experts},
        "t5": {"num_layers": layers, "d_model": width, "num_heads": heads, "d_ff": 3 * width, **pairs},
        "resnet": {**stages, "num_labels": 10},
    }[case["family"]]
    config, model = (getattr(transformers, name) for name in _CLASSES[case["family"]])
    built = model(config(**settings)).train()
    rows, tokens = case["rows"], case["tokens"]
    if case["family"] in ("vit", "resnet"):
        pixels = torch.randn(rows, 3, 128, 128)
        return built, {"pixel_values": pixels, "labels": torch.randint(0, 10, (rows,))}
    words_of_rows = torch.randint(1, words, (rows, tokens))
    return built, {"input_ids": words_of_rows, "labels": words_of_rows}


def _plan(case: Mapping[str, Any], profile: Any) -> Any:
    from memfit.core.plan import BlockPlan, CallPlan, Plan
    from memfit.core.saved_policies import Saved
    from memfit.core.storage_formats import ComputeDtype
    from memfit.core.tiers import Tier

    homes = {
        "device": None,
        "states": BlockPlan(state_home=Tier.DISK),
        "disk": BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK),
    }[case["homes"]]
    calls = next(iter(profile.traces.values())).calls
    saved = Saved(case["saved"])
    fates = tuple(CallPlan(saved=saved) if c.is_repeated and c.has_backward else CallPlan() for c in calls)
    return Plan(
        microbatches=case["microbatches"],
        blocks={} if homes is None else common.on_disk(profile, homes),
        calls=fates,
        tail=common.tail_of(profile) if case["microbatches"] > 1 else None,
        compute_dtype=ComputeDtype.BFLOAT16 if case["bf16"] else ComputeDtype.GIVEN,
    )


if __name__ == "__main__":
    main()
