"""Chosen plans on two described machines with accelerators, beside the best of the uniform plans of commit 88a046d, all predicted by today's judge.

    python benchmarks/planner.py [--profiles DIRECTORY] [--cases llama1b,4090,16 ...] [--out results.json]

In: four models that are never allocated (Llama 1.2B and 8B, GPT-2 medium, ViT-L), limits in GiB. Out: a row a case: seconds of the old best, of
the chosen plan, of the best technique of the field that fits; how many plans were judged and the seconds that planning took (with all techniques); and
the geometric mean of the gains. Profiles (7 to 26 s each) are kept in a directory, if one is named. Nothing is trained and no accelerator is needed.

Machines: "4090" has 100 TFLOP/s in bf16, 22 GB/s to 64 GiB of host memory, a disk of 5 and 4 GB/s, updates of 25 G elements a second on the device and 2
on the host; "h100" has 450 TFLOP/s, 50 GB/s, 256 GiB, 10 GB/s, 80 and 4 G. The reserve is 1 GiB, 0.25 GiB up to 6 GiB.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.errors import DoesNotFitError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import Budget
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.planner.search.candidates import MasterForms, list_candidates
from memfit.planner.search.planner import choose_plan
from memfit.planner.search.pricing import PlanQuestion, price

if TYPE_CHECKING:
    from memfit.core.profile import Profile

GIB = 1 << 30
CHUNK_TOKENS = 1024
LIMITS = {
    "gpt2m": {"4090": (2, 3, 4, 5), "h100": (2, 3, 4, 5)},
    "llama1b": {"4090": (8, 12, 16, 20), "h100": (8, 16, 20, 24)},
    "llama8b": {"4090": (16, 20, 22, 24), "h100": (24, 48, 64, 79)},
    "vitl": {"4090": (2, 3, 4, 5), "h100": (2, 3, 4, 5)},
}


def machines() -> dict[str, Hardware]:
    """Returns the two machines, as numbers."""

    def machine(
        name: str,
        tflops: float,
        host: tuple[float, int],
        disk: tuple[float, float],
        updates: tuple[float, float],
        device: int,
    ) -> Hardware:
        return Hardware(
            device=name,
            flops_per_s=tflops * 1e12,
            bf16_flops_per_s=tflops * 1e12,
            update_elements_per_s=updates[0],
            host_update_elements_per_s=updates[1],
            tiers={
                Tier.DEVICE: TierSpec(nbytes=device * GIB),
                Tier.HOST: TierSpec(
                    nbytes=host[1] * GIB, link=Link(read_bytes_per_s=host[0], write_bytes_per_s=host[0])
                ),
                Tier.DISK: TierSpec(nbytes=4000 * GIB, link=Link(read_bytes_per_s=disk[0], write_bytes_per_s=disk[1])),
            },
        )

    return {
        "4090": machine("4090", 100, (22e9, 64), (5e9, 4e9), (25e9, 2e9), 24),
        "h100": machine("h100", 450, (50e9, 256), (10e9, 10e9), (80e9, 4e9), 80),
    }


def profile_of(name: str, *, layers: int = 16) -> Profile:
    """Traces a model that has no bytes, in bf16 with masters under AdamW; of "llama1b" so many layers."""
    import torch
    import transformers as hf

    import memfit
    from memfit.planner.problem import Problem, driver_of
    from memfit.trace.blocks import find_blocks

    def llama(hidden: int, inner: int, layers: int) -> Any:
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=32,
                num_key_value_heads=8, max_position_embeddings=8192,
            )
        )  # fmt: skip

    def gpt() -> Any:
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=1024, n_layer=24, n_head=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        )

    def vit() -> Any:
        return hf.ViTForImageClassification(
            hf.ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        )

    def words(model: Any, batch: Any) -> Any:
        return model(input_ids=batch, labels=batch).loss

    def images(model: Any, batch: Any) -> Any:
        return model(pixel_values=batch["x"], labels=batch["y"]).loss

    build = {
        "llama1b": lambda: llama(2048, 8192, layers),
        "llama8b": lambda: llama(4096, 14336, 32),
        "gpt2m": gpt,
        "vitl": vit,
    }[name]
    model = memfit.empty(build, initialises=False).train()
    if name == "vitl":
        sample: Any = {"x": torch.zeros(128, 3, 224, 224), "y": torch.zeros(128, dtype=torch.long)}
    else:
        sample = torch.zeros((16, 1024) if name == "gpt2m" else (8, 2048), dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = images if name == "vitl" else words
    problem = Problem(
        model=model,
        loss=loss,
        driver=driver_of(optimizer, model),
        block_map=find_blocks(model, None),
        is_for_accelerator=True,
    )
    problem = replace(problem, cut=problem.ways(sample, None)[0])
    return problem.profile(
        sample, (1, 2, 4, 8), chunk_tokens=None if name == "vitl" else CHUNK_TOKENS, compute=ComputeDtype.BFLOAT16
    )


def kept_profile(name: str, directory: Path | None) -> Profile:
    """Returns a model's profile, from the directory if it is there."""
    path = None if directory is None else directory / f"{name}.pickle"
    if path is not None and path.exists():
        return pickle.loads(path.read_bytes())
    found = profile_of(name)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(found))
    return found


def old_best_s(profile: Profile, budget: Budget, hardware: Hardware) -> float:
    """Seconds of the fastest plan that fits of those that commit 88a046d listed: uniform ones, updated on the device."""
    question = PlanQuestion(
        profile=profile, budget=budget, hardware=hardware, clips_norm=False, tiers=(Tier.HOST, Tier.DISK), may_split=True,
        limits={tier: spec.nbytes for tier, spec in hardware.away.items()}, scheme=None, staging_bytes=4 << 20, masters=MasterForms(),
        compute=ComputeDtype.BFLOAT16, like=None, checked_rows=0, numerics="auto", commits=0.0, decided={},
    )  # fmt: skip
    listed = [
        price(0, candidate, question)
        for rows in profile.traces
        for candidate in list_candidates(
            profile, microbatches=profile.batch_rows // rows, tiers=question.tiers, clips_norm=False
        )
    ]
    best = math.inf
    for priced in sorted(listed, key=lambda p: p.weighed_bound):
        if priced.weighed_bound >= best:
            break
        built = question.build(priced)
        if built.fits:
            best = min(best, built.weighed_s)
    return best


def run_case(name: str, machine: str, limit: float, profile: Profile) -> dict[str, Any]:
    """Plans one case in both ways."""
    # Plans are compared by their seconds: those that regroup sums are none the worse for it, nor are updates on the host.
    hardware, profile = machines()[machine], replace(profile, agrees_on_host=True)
    reserve = GIB if limit > 6 else GIB // 4
    budget = Budget(limit_bytes=int(limit * GIB), reserve_bytes=reserve)
    asked: dict[str, Any] = {"allow": {"bf16"}, "compute": ComputeDtype.BFLOAT16, "tiers": (Tier.HOST, Tier.DISK)}
    row: dict[str, Any] = {
        "model": name,
        "machine": machine,
        "limit": limit,
        "old": old_best_s(profile, budget, hardware),
    }
    begin = time.process_time()
    try:
        choice = choose_plan(profile, budget, hardware, compares=True, **asked)
    except DoesNotFitError as error:
        return {**row, "refused": str(error).splitlines()[0]}
    row |= {
        "chosen": choice.weighed_s,
        "judged": choice.built,
        "planning_s": time.process_time() - begin,
        "plan": choice.name,
    }
    fitting = [point for point in choice.classics if point.fits]
    row["classic"] = min((point.seconds for point in fitting), default=math.inf)
    row["classics_that_fit"] = len(fitting)
    row["gain"] = row["old"] / row["chosen"]
    row["gap"] = None if choice.bound_s is None else row["chosen"] / choice.bound_s - 1
    return row


def main() -> None:
    """Runs the cases and prints their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, help="directory that profiles are kept in")
    parser.add_argument("--cases", nargs="*", help="model,machine,limit; all if none is named")
    parser.add_argument("--out", type=Path, help="file for the rows as JSON")
    given = parser.parse_args()
    listed = [case.split(",") for case in given.cases or ()]
    cases = [(name, machine, float(limit)) for name, machine, limit in listed] or [
        (name, machine, float(limit))
        for name, on in LIMITS.items()
        for machine, limits in on.items()
        for limit in limits
    ]
    profiles: dict[str, Profile] = {}
    rows: list[dict[str, Any]] = []
    for name, machine, limit in cases:
        if name not in profiles:
            profiles[name] = kept_profile(name, given.profiles)
        row = run_case(name, machine, limit, profiles[name])
        rows.append(row)
        if "refused" in row:
            print(f"{name:8} {machine:5} {limit:5g}  {row['refused']}", flush=True)
            continue
        print(
            f"{name:8} {machine:5} {limit:5g}  old {row['old']:7.3f}  chosen {row['chosen']:7.3f}  "
            f"technique {row['classic']:7.3f}  gain {row['gain']:5.2f}  "
            f"above the bound {row['gap'] or math.nan:6.1%}  judged {row['judged']:4d}  {row['planning_s']:5.1f} s  {row['plan']}",
            flush=True,
        )
    gains = [row["gain"] for row in rows if math.isfinite(row.get("gain", math.inf))]
    if gains:
        print(
            f"{len(gains)} cases: gain, geometric mean {statistics.geometric_mean(gains):.3f}, least {min(gains):.2f}, most {max(gains):.2f}"
        )
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
