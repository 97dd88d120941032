"""Published memory figures beside memfit's predictions of the same configurations.

    .venv/bin/python benchmarks/published.py --out benchmarks/results/published.json   # some minutes
    .venv/bin/python benchmarks/published.py --only bert-large --table

The figures stand in `published_cases.json`, each with its source. Models are built empty and traced
on no device; nothing is trained. Three kinds of case:

- `step`: the peak of a whole training step. memfit prices the plan that the source describes
  (`memfit.planner.advise`, with gradients of all blocks held to the end, as plain loops hold them) for
  a described machine. What the source says lies beside tensors (a CUDA context) is added and named.
- `states`: weights, gradients and optimizer states alone, from memfit's profile of an empty model.
- `terms`: bytes a parameter, cut over ranks, times a stated number of parameters. memfit does not
  cut over ranks: this is what one device holds by closed form.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if TYPE_CHECKING:
    from memfit.core.plan import Plan
    from memfit.core.profile import CallProfile, Profile
    from published_subjects import Subject

CASES = Path(__file__).with_name("published_cases.json")
UNITS = {"MB": 10**6, "MiB": 1 << 20, "GB": 10**9, "GiB": 1 << 30}
MACHINE = "a100-80gb"
"""Bytes of a step depend on the kind of its device alone; seconds are not compared here."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes, and the largest parts of them by name."""

    nbytes: float
    parts: Mapping[str, float]


def read_cases(path: Path = CASES) -> tuple[dict[str, Row], list[Row]]:
    """Reads sources by name, and cases."""
    read = json.loads(path.read_text(encoding="utf-8"))
    return read["sources"], read["cases"]


def published_bytes(case: Row) -> float:
    """Returns the figure of a source in bytes."""
    return case["published"] * UNITS[case["unit"]]


def by_terms(case: Row) -> Prediction:
    """Adds up bytes a parameter, each cut over a number of ranks."""
    parts = {term["what"]: term["bytes"] * case["parameters"] / term.get("ranks", 1) for term in case["terms"]}
    return Prediction(nbytes=sum(parts.values()), parts=parts)


def by_states(case: Row, profile: Profile) -> Prediction:
    """Adds up the named parts of a model's states, as often as the source counts each."""
    sizes = {
        "weight": profile.weight_bytes,
        "gradient": sum(block.gradient_bytes for block in profile.blocks),
        "state": sum(profile.state_bytes.values()),
        "buffers": profile.buffer_bytes,
    }
    # PyTorch's `foreach` optimizers make a list of intermediates as large as all gradients.
    sizes["intermediates"] = sizes["gradient"]
    parts = {part: sizes[part] for part in case["parts"]}
    if "beside_mib" in case:
        parts["context"] = case["beside_mib"] * UNITS["MiB"]
    return Prediction(nbytes=sum(parts.values()), parts=parts)


def plan_of(case: Row, calls: Sequence[CallProfile], blocks: Sequence[str]) -> Plan:
    """Returns the plan that a case describes."""
    from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
    from memfit.core.saved_policies import Saved
    from memfit.core.storage_formats import ComputeDtype, StateFormat
    from memfit.core.tiers import Tier

    asked = case.get("plan", {})
    away: dict[str, Any] = dict.fromkeys(asked.get("on_host", ()), Tier.HOST)
    return Plan(
        microbatches=asked.get("microbatches", 1),
        order=Order.MICROBATCH_MAJOR,
        blocks=dict.fromkeys(blocks, BlockPlan(**away)) if away else {},
        calls=tuple(
            CallPlan(saved=Saved.RECOMPUTE) if asked.get("recompute") and call.is_repeated else CallPlan()
            for call in calls
        ),
        update=UpdateTime(asked.get("update", "after-backward")),
        state_format=StateFormat(asked.get("states", "given")),
        compute_dtype=ComputeDtype.BFLOAT16 if asked.get("drops_masters") else ComputeDtype.GIVEN,
        drops_masters=asked.get("drops_masters", False),
    )


def by_step(case: Row, subject: Subject, profile: Profile) -> Prediction:
    """Prices a whole step under the plan of a case."""
    from memfit.core.hardware import read_hardware
    from memfit.planner.advise import advise
    from memfit.step.build import build_step
    from memfit.step.lower import lower
    from memfit.step.predict import predict

    plan = plan_of(case, next(iter(profile.traces.values())).calls, [block.name for block in profile.blocks])
    if "states" in case.get("plan", {}):
        allow = {plan.state_format.allowance, *(["bf16", "bf16-weights-sr"] if plan.drops_masters else [])}
        asked: dict[str, Any] = {"plan": plan, "allow": allow, "hardware": MACHINE}
        timeline = advise(subject.model, subject.optimizer, subject.loss, subject.batch, **asked).timeline
    else:
        hardware = read_hardware(MACHINE)
        assert hardware is not None, "a name is given"
        step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device=hardware.device)
        timeline = predict(step, hardware)
    peak = timeline.peak
    assert peak is not None, "a step has actions"
    beside = case.get("beside_mib", 0) * UNITS["MiB"]
    parts = {**peak.by_category, **({"context": beside} if beside else {})}
    for part in case.get("less", ()):
        del parts[part]
    return Prediction(nbytes=sum(parts.values()), parts=parts)


def predict_all(cases: Sequence[Row]) -> Iterator[Row]:
    """Predicts cases one after the other; those of one subject share its model and trace."""
    import memfit
    from published_subjects import build

    counts: dict[str, set[int]] = {}
    for case in cases:
        key = json.dumps(case.get("subject"), sort_keys=True)
        counts.setdefault(key, {1}).add(case.get("plan", {}).get("microbatches", 1))
    known: dict[str, tuple[Subject, Profile]] = {}
    for case in cases:
        began = time.monotonic()
        if case["kind"] == "terms":
            found = by_terms(case)
        else:
            key = json.dumps(case["subject"], sort_keys=True)
            if key not in known:
                known.clear()
                of = build(case["subject"])
                traced = memfit.profile(of.model, of.optimizer, of.loss, of.batch, microbatches=sorted(counts[key]))
                known[key] = of, traced
            subject, profile = known[key]
            found = by_states(case, profile) if case["kind"] == "states" else by_step(case, subject, profile)
        published = published_bytes(case)
        row: Row = {
            "id": case["id"],
            "source": case["source"],
            "published_bytes": round(published),
            "predicted_bytes": round(found.nbytes),
            "error": round(found.nbytes / published - 1, 4),
            "parts": {name: round(nbytes) for name, nbytes in found.parts.items() if nbytes},
        }
        sizes = f"{published / 2**30:9.3f} {found.nbytes / 2**30:9.3f} GiB"
        print(f"{row['id']:<36} {sizes} {row['error']:+8.1%} {time.monotonic() - began:6.1f} s", flush=True)
        yield row


def table(cases: Sequence[Row], rows: Sequence[Row]) -> str:
    """Returns the table of `docs/published.md`."""
    sources, _ = read_cases()
    lines = [
        "| configuration | source | published | predicted | error | why |",
        "|---|---|---|---|---|---|",
    ]
    by_id = {row["id"]: row for row in rows}
    for case in cases:
        row, source = by_id[case["id"]], sources[case["source"]]
        predicted = row["predicted_bytes"] / UNITS[case["unit"]]
        digits = max(0, 3 - len(str(int(predicted)))) if case["unit"][0] == "G" else 0
        lines.append(
            f"| {case['what']} | [{source['short']}]({source['link']}) | {case['published']} {case['unit']} "
            f"| {predicted:.{digits}f} {case['unit']} | {row['error']:+.1%} | {case.get('why', '')} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Predicts the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose id contains this")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--table", action="store_true", help="print the rows of --out, or of this run, as Markdown")
    parser.add_argument("--keep", action="store_true", help="keep the rows that --out has already")
    asked = parser.parse_args(arguments)
    _, cases = read_cases()
    cases = [case for case in cases if asked.only in case["id"]]
    kept: list[Row] = []
    if asked.keep and asked.out is not None and asked.out.exists():
        kept = json.loads(asked.out.read_text(encoding="utf-8"))["rows"]
    rows = kept
    for row in predict_all([case for case in cases if case["id"] not in {row["id"] for row in kept}]):
        rows.append(row)
        if asked.out is not None:
            # After each case: the larger ones take a minute on a busy machine.
            order = {case["id"]: index for index, case in enumerate(read_cases()[1])}
            rows.sort(key=lambda row: order.get(row["id"], len(order)))
            asked.out.write_text(json.dumps({"machine": MACHINE, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if asked.table:
        print(table(cases, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
