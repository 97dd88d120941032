"""Chosen plans beside the field's techniques and the uniform plans of commit 88a046d, run for real: peaks, seconds, predictions.

    python benchmarks/holding.py --out benchmarks/results/holding-late.json
    python benchmarks/holding.py --models llama --limits 2 --rounds 1
    python benchmarks/holding.py --smallest --out benchmarks/results/smallest-device.json

In: three models of 18 to 21 million parameters (a Llama, a GPT-2, an encoder-decoder T5), 256 tokens a step, AdamW, and the late device
(tests/accelerator) with links of `--rate` bytes a second each way. Limits lie between 1.05 of the smallest that memfit names and 0.9 of what plain
training takes; the disk has no room. For each limit memfit's own plan, the fastest uniform plan of those that commit 88a046d listed (all by
today's prediction), and every technique by name that fits are trained one after the other, in one process, with the same weights and batches.

Of techniques those are trained that are predicted to be the fastest, `--techniques` of them at each limit; whether the others fit is told.

Out: a table and a JSON. Peaks are the device's, phase by phase; the largest behind the load is shown, since the model is built whole on the device
before `fit`, and may be above the limit until its weights have moved home. Seconds are on the device's counted clock (tests/accelerator/native/timing.h):
compute by the seconds that its thread was on a processor, copies by the rates of the links, so that a busy machine changes neither by much.
Predicted seconds are those of the machine's measured rates. Calibrated they are by two factors: what the device's thread worked in every other step, the
least of them, by what was predicted of it, and the same of the thread that updates on the host; of the steps between these the least is measured. A
processor that is shared changes its speed from minute to minute by a tenth and more, and Python around small pieces of updates takes longer here than
beside a real device. Waits, copies and what lies beside what are as predicted.

The rate. What matters is how long bytes cross beside what their use computes. An RTX 4090 (100 TFLOP/s, 22 GB/s) in a step of 16,384 tokens has
0.28 flops for a byte and a token; 40 GFLOP/s of this processor, 256 tokens and 500 MB/s have 0.31.

`--smallest`: each model is asked with 2 MiB, asked with 3 % less than the refusal names, which must be refused, and trained at what it names;
each training in a process of its own; with as much host memory as there is, with two thirds of what its states take there and the disk besides, and on the
emulated device of the processor.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MEMFIT_CORRECTIONS", "off")

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from sweep import commit

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memfit.core.hardware import Hardware
    from memfit.core.plan import Plan
    from memfit.job.job import Job
    from memfit.planner.search.pricing import BuiltCandidate

ROOT = Path(__file__).parents[1]
ROWS, TOKENS, WORDS = 4, 64, 2000
RATE = 500e6
SHARES = (0.0, 0.3, 0.65, 1.0)
WARM, CALIBRATING, MEASURED = 1, 5, 5
ALL, ON_HOST = "all", "updates on the host"
BELOW = 0.97
LEAST_LIMIT = 2 * common.MIB
SPECIAL: dict[str, Any] = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BEGINS_WITH_PAD: dict[str, Any] = {"decoder_start_token_id": 0}
MODELS = ("llama", "gpt2", "t5")
WAYS = DEVICE_ALONE, WITH_DISK, EMULATED = "device", "device, host and disk", "emulated"
Row = dict[str, Any]


def main() -> int:
    """Runs the models one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--limits", type=int, default=len(SHARES), help="so many of the four, the tightest first")
    parser.add_argument("--rate", type=float, default=RATE, help="bytes a second of each direction of the link")
    parser.add_argument("--techniques", type=int, default=3, help="so many of those that fit are trained")
    parser.add_argument("--rounds", type=int, default=1, help="trainings of each plan; the least seconds count")
    parser.add_argument("--smallest", action="store_true", help="the smallest limits, and 3 %% below them")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        for row in _work(json.loads(given.worker)):
            print("\n" + json.dumps(row), flush=True)
        return 0
    head = {"command": "python benchmarks/holding.py " + " ".join(sys.argv[1:]), "commit": commit()}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for model in given.models:
            request = {key: getattr(given, key) for key in ("limits", "rate", "rounds", "techniques")}
            request |= {"model": model, "hardware": f"{directory}/hardware.json"}
            for row in _smallest_rows(request) if given.smallest else _rows(request):
                rows.append(row)
                print(_line(row), flush=True)
                if given.out is not None:
                    text = {**head, "machine": common.machine(), "link_bytes_per_s": given.rate, "rows": rows}
                    given.out.write_text(json.dumps(text, indent=0) + "\n")
    print(smallest_report(rows) if given.smallest else report(rows))
    return 0


def _smallest_rows(request: Mapping[str, Any]) -> Iterator[Row]:
    """Yields a row for each way to limit. Of what a smallest limit counts nothing is to be left of a training before."""
    for way in WAYS:
        (asked,) = _rows({**request, "way": way})
        (trained,) = _rows({**request, "way": way, "limit_bytes": asked["smallest_bytes"]})
        yield asked | trained


def _rows(request: Mapping[str, Any]) -> Iterator[Row]:
    """Yields what a child says, line by line.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, __file__, "--worker", json.dumps(request)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if child.wait():
            errors.seek(0)
            raise RuntimeError(f"{request['model']} failed:\n{errors.read()[-3000:]}")


def _line(row: Row) -> str:
    if "below" in row:
        words = f"{row['model']} {row['way']}: {common.mib(row['smallest_bytes'])} MiB; peak {common.mib(row['peak_bytes'])}; {row['plan']}"
        return f"{words}; 3 % less: {row['below']}"
    words = f"{row['model']} {row['share']:.2f} {row['name']}: "
    if "seconds" not in row:
        return words + row["refused"]
    return words + (
        f"{row['seconds']:.3f} s ({row['calibrated_s']:.3f} predicted), peak {common.mib(row['peak_bytes'])} of "
        f"{common.mib(row['limit_bytes'])} MiB{'' if row['same_losses'] else '; OTHER LOSSES'}; {row['plan']}"
    )


# --- what the rows say ----------------------------------------------------------------------------


def cases(rows: Sequence[Row]) -> list[tuple[Row, list[Row], Row | None]]:
    """Returns for each limit memfit's row, those of techniques that fit, and that of 88a046d."""
    found: list[tuple[Row, list[Row], Row | None]] = []
    for mine in (row for row in rows if row["name"] == "memfit" and "seconds" in row):
        beside = [r for r in rows if r["model"] == mine["model"] and r["share"] == mine["share"] and "seconds" in r]
        old = next((row for row in beside if row["name"] == "88a046d"), None)
        found.append((mine, [row for row in beside if row["name"] not in ("memfit", "88a046d", "plain")], old))
    return found


def report(rows: Sequence[Row]) -> str:
    """A table of the limits, and the figures over all of them."""
    lines: list[list[str]] = []
    gains: list[float] = []
    over_old: list[float] = []
    every = {row["name"] for row in rows} - {"memfit", "88a046d", "plain"}
    for mine, techniques, old in cases(rows):
        best = min(techniques, key=lambda row: row["seconds"], default=None)
        gain = math.nan if best is None else best["seconds"] / mine["seconds"]
        older = math.nan if old is None else old["seconds"] / mine["seconds"]
        gains += [] if best is None else [gain]
        over_old += [] if old is None else [older]
        lines.append(
            [
                mine["model"],
                common.mib(mine["limit_bytes"]),
                common.mib(mine["peak_bytes"]),
                f"{mine['seconds']:.3f}",
                f"{mine['calibrated_s'] / mine['seconds'] - 1:+.0%}",
                "none fits" if best is None else f"{best['name']} {best['seconds']:.3f}",
                "-" if best is None else f"{gain:.2f}",
                "-" if old is None else f"{older:.2f}",
                f"{len(techniques) + _untrained(rows, mine)} of {len(every)}",
            ]
        )
    heads = ["model", "limit, MiB", "peak", "s", "predicted", "best technique", "gain", "over 88a046d", "fit"]
    ran = [row for row in rows if "seconds" in row and row["name"] != "plain"]
    near = [abs(row["calibrated_s"] / row["seconds"] - 1) for row in ran]
    above = sum(row["peak_bytes"] > row["limit_bytes"] for row in ran)
    others = sum(not row["same_losses"] for row in ran)
    within = sum(error <= 0.1 for error in near)
    words = [
        f"{len(ran)} trainings; above their limit: {above}; other losses than plain PyTorch's: {others}",
        f"predicted within 10 %: {within} of {len(near)}, median error {statistics.median(near):.1%}",
    ]
    if gains:
        words.append(
            f"over the best technique that fits: geometric mean {statistics.geometric_mean(gains):.2f}, least {min(gains):.2f}"
        )
    singles = {name: _single(rows, name) for name in every}
    if singles:
        best_name = min(singles, key=lambda name: (singles[name][0], singles[name][1]))
        words.append(
            f"over the best single technique ({best_name}): {singles[best_name][1]:.2f} where it was trained, and it was not in {singles[best_name][0]}"
        )
    if over_old:
        words.append(
            f"over the plans of 88a046d: geometric mean {statistics.geometric_mean(over_old):.2f}, least {min(over_old):.2f}"
        )
    return common.table(heads, lines) + "\n\n" + "\n".join(words)


def _untrained(rows: Sequence[Row], mine: Row) -> int:
    """Techniques that fit a limit by their prediction, and were not among the fastest."""
    beside = [row for row in rows if row["model"] == mine["model"] and row["share"] == mine["share"]]
    return sum("not trained" in row.get("refused", "") for row in beside)


def _single(rows: Sequence[Row], name: str) -> tuple[int, float]:
    """Limits at which one technique was not trained, and the mean gain over it where it was."""
    pairs = [
        (mine, next((row for row in techniques if row["name"] == name), None)) for mine, techniques, _ in cases(rows)
    ]
    fits = [theirs["seconds"] / mine["seconds"] for mine, theirs in pairs if theirs is not None]
    return len(pairs) - len(fits), statistics.geometric_mean(fits) if fits else math.inf


def smallest_report(rows: Sequence[Row]) -> str:
    """A line over all smallest limits."""
    good = [row for row in rows if row["below"] == "refused" and row["peak_bytes"] <= row["smallest_bytes"]]
    return f"{len(rows)} smallest limits: {len(good)} fit, and 3 % less is refused"


# --- the child ------------------------------------------------------------------------------------


def _work(request: Mapping[str, Any]) -> Iterator[Row]:
    sys.path.insert(0, str(ROOT / "tests"))
    from accelerator import late  # pyright: ignore[reportMissingImports]

    late.set_links(request["rate"], pace="counted")
    # All that times anything from here on reads the device's counted clock.
    time.perf_counter = late.native.now_s
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    runs = _Runs(request, late)
    if "way" in request:
        yield runs.smallest(request["way"], request.get("limit_bytes"))
    else:
        yield from runs.compare()


class _Runs:
    """Trainings of one model on the late device."""

    def __init__(self, request: Mapping[str, Any], late: Any) -> None:
        import torch

        self._request = request
        self._model = request["model"]
        self._late = late
        self._device = torch.device("late", 0)
        self._hardware = _measured_once(Path(request["hardware"]), self._device, request["rate"])
        self._batches = self._drawn(self._device)
        self._losses: list[float] = []

    def _drawn(self, device: torch.device) -> list[dict[str, Any]]:
        return [_batch(seed, device) for seed in range(WARM + CALIBRATING + MEASURED)]

    def compare(self) -> Iterator[Row]:
        """Yields a row for each plan at each limit."""
        from memfit.core.plan import Plan

        plain = self._train(Plan(), None)
        self._losses = plain["losses"]
        yield {"model": self._model, "share": -1.0, "name": "plain", "limit_bytes": plain["peak_bytes"], **plain}
        smallest = self._asked({"limit": LEAST_LIMIT})
        least, most = 1.05 * smallest, 0.9 * plain["peak_bytes"]
        for share in SHARES[: self._request["limits"]]:
            limit = int(least + share * (most - least))
            plans, refused = self._plans(limit)
            found: dict[str, Row] = {name: {"refused": why} for name, why in refused.items()}
            for _ in range(self._request["rounds"]):
                for name, plan in plans.items():
                    row = self._train(plan, limit)
                    if "refused" in row or row["seconds"] < found.get(name, row | {"seconds": math.inf})["seconds"]:
                        found[name] = row
                plans = {name: plan for name, plan in plans.items() if "refused" not in found[name]}
            for name, row in found.items():
                yield {"model": self._model, "share": share, "name": name, "limit_bytes": limit, **row}

    def _plans(self, limit: int) -> tuple[dict[str, Plan], dict[str, str]]:
        """Returns the plan that memfit chooses, that of 88a046d, and those of techniques; and why others are none."""
        import memfit
        from memfit.core.tiers import Tier
        from memfit.planner.search.candidates import MasterForms, list_candidates
        from memfit.planner.search.classics import CLASSICS
        from memfit.planner.search.pricing import PlanQuestion, price, price_all

        model, optimizer = self._parts()
        job = memfit.fit(model, optimizer, _loss, self._batches[0], limit=limit, hardware=self._hardware)
        plan, planned = job.plan, job._assembly.planned  # noqa: SLF001, its budget is nowhere public
        job.close(restore=False)
        model, optimizer = self._parts()
        profile = memfit.profile(model, optimizer, _loss, self._batches[0], microbatches=(1, 2, 4))
        profile = replace(profile, agrees_on_host=planned.prepared.profile.agrees_on_host)
        away = {tier: spec.nbytes for tier, spec in self._hardware.away.items()}
        question = PlanQuestion(
            profile=profile, budget=planned.budget, hardware=self._hardware, clips_norm=False, tiers=(Tier.HOST, Tier.DISK),
            may_split=True, limits=away, scheme=None, staging_bytes=4 << 20, masters=MasterForms(), compute=None, like=None,
            checked_rows=0, numerics="auto", commits=0.0, decided={},
        )  # fmt: skip
        counts = [profile.batch_rows // rows for rows in profile.traces]
        asked = {"tiers": question.tiers, "clips_norm": False}
        old = [c for k in counts for c in list_candidates(profile, microbatches=k, **asked)]
        built = [question.build(price(0, candidate, question)) for candidate in old]
        techniques = [question.build(p) for p in price_all(question) if p.candidate.classic]
        by_name = {"88a046d": built}
        by_name |= {name: [b for b in techniques if b.priced.candidate.classic == name] for name in CLASSICS}
        plans, refused = {"memfit": plan}, dict[str, str]()
        known: dict[str, BuiltCandidate] = {}
        for name, candidates in by_name.items():
            fitting = [b for b in candidates if b.fits]
            if fitting:
                known[name] = min(fitting, key=lambda b: b.weighed_s if name == "88a046d" else b.cost.seconds)
            elif candidates:
                refused[name] = "it is predicted not to fit"
        fastest = sorted((name for name in known if name in CLASSICS), key=lambda name: known[name].cost.seconds)
        for place, name in enumerate(("88a046d", *fastest)):
            if name in known and place <= self._request["techniques"]:
                plans[name] = known[name].priced.candidate.plan
            elif name in known:
                refused[name] = f"{known[name].cost.seconds:.3f} s are predicted: not trained"
        return plans, refused

    def smallest(self, way: str, limit: int | None) -> Row:
        """Returns part of a row: the smallest limit that is named, and 3 % less; or training at a limit."""
        import torch

        here = _hardware(torch.device("cpu"), RATE) if way == EMULATED else self._hardware
        states = 8 * sum(p.numel() for p in self._parts(is_on_host=way == EMULATED)[0].parameters())
        asked: dict[str, Any] = {
            DEVICE_ALONE: {},
            WITH_DISK: {"host_limit": states * 2 // 3, "hardware": _with_disk(self._hardware)},
            EMULATED: {"emulate_device": True, "hardware": _with_disk(here)},
        }[way]
        self._batches = self._drawn(torch.device("cpu") if way == EMULATED else self._device)
        if limit is not None:
            row = self._train(None, limit, **asked)
            found = {"peaks": row.get("peaks"), "peak_bytes": row.get("peak_bytes", math.inf)}
            return {**found, "plan": row.get("plan", row.get("refused"))}
        smallest = self._asked({"limit": LEAST_LIMIT, **asked})
        try:
            less, below = self._asked({"limit": int(BELOW * smallest), **asked}), "refused"
        except RuntimeError as error:
            less, below = None, str(error)
        return {"model": self._model, "way": way, "smallest_bytes": smallest, "below": below, "named_below": less}

    def _asked(self, asked: Mapping[str, Any]) -> int:
        """Returns the smallest limit that a refusal names.

        Raises:
            RuntimeError: it is not refused.
        """
        import memfit
        from memfit.core.errors import DoesNotFitError

        model, optimizer = self._parts(is_on_host=asked.get("emulate_device", False))
        try:
            with tempfile.TemporaryDirectory() as directory:
                job = memfit.fit(
                    model, optimizer, _loss, self._batches[0], directory=Path(directory) / "homes",
                    **{"hardware": self._hardware, **asked},
                )  # fmt: skip
                reason = job.reason
                job.close(restore=False)
        except DoesNotFitError as error:
            if error.smallest_limit_bytes is None:
                raise
            return error.smallest_limit_bytes
        raise RuntimeError(f"it trains: {reason}")

    def _train(self, plan: Plan | None, limit: int | None, **asked: Any) -> Row:
        """Trains some steps; seconds are the least of every other one behind the first."""
        import memfit
        from memfit.core.errors import MemfitError

        is_on_host = asked.get("emulate_device", False)
        model, optimizer = self._parts(is_on_host=is_on_host)
        with tempfile.TemporaryDirectory() as directory:
            try:
                job = memfit.fit(
                    model, optimizer, _loss, self._batches[0], limit=limit, plan=plan, directory=Path(directory) / "homes",
                    **{"hardware": self._hardware, **asked},
                )  # fmt: skip
                with job:
                    row = self._steps(job)
                    job.close(restore=False)
            except MemfitError as error:
                return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300], "seconds": math.inf}
        return row

    def _steps(self, job: Job) -> Row:
        from memfit.core.step import COMPUTE_LANE, HOST_LANE, UPDATE_LANE
        from memfit.step.lower import lower
        from memfit.step.predict import GROUPS, appraise, calibrated, predict

        losses = [job.step(batch).loss for batch in self._batches[:WARM]]
        # In turns, so that a processor that becomes slower is so in both.
        calibrating, measured = _Worked(self._late, job), _Worked(self._late, job)
        for number, batch in enumerate(self._batches[WARM:]):
            with measured if number % 2 else calibrating:
                losses.append(job.step(batch).loss)
        peaks = {phase.name: phase.held_peak_bytes for phase in job.proof().phases}
        step = lower(job.schedule, job.plan, job.profile, device=self._device.type)
        busy = appraise(step, self._hardware).busy_s
        foretold = busy[COMPUTE_LANE] + busy.get(UPDATE_LANE, 0.0)
        # Of the emulated device of the processor nothing tells.
        factor: float = calibrating.least_s("compute") / foretold or 1.0
        machine = calibrated(self._hardware, dict.fromkeys(GROUPS, factor))
        host_factor = calibrating.least_s(ON_HOST) / busy[HOST_LANE] if busy.get(HOST_LANE) else 1.0
        machine = _with_slower_host(machine, self._hardware, host_factor) if busy.get(HOST_LANE) else machine
        return {
            "seconds": measured.least_s(ALL), "factor": factor, "host_factor": host_factor,
            "predicted_s": predict(step, self._hardware).seconds, "calibrated_s": predict(step, machine).seconds,
            "worked_s": {lane: measured.least_s(lane) for lane in measured.steps[0]}, "peaks": peaks,
            "peak_bytes": max(nbytes for phase, nbytes in peaks.items() if phase != "load"), "losses": losses,
            "plan": _words(job), "microbatches": job.plan.microbatches,
            # Sums over microbatches are added up in another order.
            "same_losses": losses == self._losses or not self._losses or job.plan.microbatches > 1,
        }  # fmt: skip

    def _parts(self, *, is_on_host: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
        import gc

        import torch

        gc.collect()
        torch.manual_seed(0)
        model = _build(self._model)
        if not is_on_host:
            model = model.to(self._device)
            model.tie_weights()  # `to` unties on a backend of PrivateUse1
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class _Worked:
    """Counts steps that are made within it: what they took, and what each thread and link of the late device worked.

    Attributes:
        steps: seconds of each, by lane.
    """

    def __init__(self, late: Any, job: Job) -> None:
        self._native = late.native
        self._worker = job._assembly.updates  # noqa: SLF001, nothing public tells of its thread
        self.steps: list[dict[str, float]] = []

    def least_s(self, lane: str) -> float:
        """Least seconds of a step: what others on the machine slow is not among them."""
        return min(step[lane] for step in self.steps)

    def __enter__(self) -> None:
        self._before = self._read()

    def __exit__(self, *_: object) -> None:
        self.steps.append({lane: seconds - self._before[lane] for lane, seconds in self._read().items()})

    def _read(self) -> dict[str, float]:
        import torch

        torch.accelerator.synchronize(torch.device("late", 0))
        return {**self._native.worked_s(), ON_HOST: self._worker.busy_s(), ALL: self._native.now_s()}


def _words(job: Job) -> str:
    plan = job.plan
    policies = {str(call.saved) for call in plan.calls}
    homes = {f"{home.weight_home}/{home.gradient_home}/{home.state_home}" for home in plan.blocks.values()}
    return f"{plan.microbatches} microbatches; {'+'.join(sorted(policies)) or 'keep'}; {', '.join(sorted(homes)) or 'device'}"


def _measured_once(path: Path, device: torch.device, rate: float) -> Hardware:
    """Returns the device's description: all models are priced on the same."""
    from memfit.core.hardware import Hardware

    if not path.exists():
        path.write_text(_hardware(device, rate).to_json())
    return Hardware.from_json(path.read_text())


def _hardware(device: torch.device, rate: float) -> Hardware:
    """Rates of the device as `memfit probe` measures them, on the counted clock; links as they were set."""
    import torch

    from memfit.core.hardware import Hardware, Link, TierSpec
    from memfit.core.tiers import Tier
    from memfit.core.work_kinds import WorkKind
    from memfit.machine.measuring_rates import measure_rates
    from memfit.optimizers.detect import probe_updates

    rates = measure_rates(device, rounds=2, has_half=False)
    memory = 4 << 30
    link = Link(read_bytes_per_s=rate, write_bytes_per_s=rate)
    return Hardware(
        device="late device" if device.type == "late" else "cpu",
        flops_per_s=rates[WorkKind.PRODUCTS_256].per_s,
        update_elements_per_s=probe_updates(device),
        host_update_elements_per_s=probe_updates(torch.device("cpu")),
        tiers={
            Tier.DEVICE: TierSpec(nbytes=memory),
            Tier.HOST: TierSpec(nbytes=memory, link=link),
            Tier.DISK: TierSpec(nbytes=0, link=link),
        },
        rates=rates,
    )


def _with_slower_host(machine: Hardware, measured: Hardware, factor: float) -> Hardware:
    """Returns a machine on whose host updates take `factor` times as long as measured rates say."""
    from memfit.core.hardware import Rate, rates_of
    from memfit.core.work_kinds import WorkKind

    pieces = rates_of(measured)[WorkKind.PIECES].per_s / factor
    return replace(
        machine,
        host_update_elements_per_s=measured.host_update_elements_per_s / factor,
        rates={**machine.rates, WorkKind.PIECES: Rate(pieces)},
    )


def _with_disk(hardware: Hardware) -> Hardware:
    from memfit.core.tiers import Tier

    return hardware.with_capacities({Tier.DISK: 4 << 30})


def _build(name: str) -> Any:
    import transformers as hf

    if name == "llama":
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=384, num_hidden_layers=10, num_attention_heads=6, num_key_value_heads=6, intermediate_size=1024,
                vocab_size=WORDS, tie_word_embeddings=False, **SPECIAL,
            )
        )  # fmt: skip
    elif name == "gpt2":
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_embd=384, n_layer=10, n_head=6, n_positions=TOKENS, vocab_size=WORDS, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, **SPECIAL,
            )
        )  # fmt: skip
    else:
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=384, d_kv=64, num_heads=6, d_ff=1536, num_layers=5, vocab_size=WORDS, dropout_rate=0.0, use_cache=False,
                pad_token_id=0, **BEGINS_WITH_PAD,
            )
        )  # fmt: skip
    return model.train()


def _batch(seed: int, device: torch.device) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, WORDS, (ROWS, TOKENS), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def _loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return model(**batch).loss


if __name__ == "__main__":
    sys.exit(main())
