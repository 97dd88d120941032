"""Limits at which plain PyTorch dies and memfit trains: GPT-2 small, a 100M Llama, T5-base, ViT-base.

    .venv/bin/python benchmarks/limits.py                 # all, some minutes each
    .venv/bin/python benchmarks/limits.py --only vit-base --cgroup

Every measurement is a fresh process. R: resident after imports. P: peak of plain training (fp32 AdamW). At R + (P - R) / 2 and at R + (P - R) / 4
plain training must end in `torch.OutOfMemoryError` under memfit's allocator, and memfit must train, evaluate and save with the kernel's peak of the
process (VmHWM, from the end of imports on, building the model included) within the limit in every phase. With `--cgroup` the process also runs in a
memory cgroup of that limit, where an overrun is a kill (needs root and the version 1 memory controller).

    .venv/bin/python benchmarks/limits.py --smallest --only vit-base --only t5-base --out benchmarks/results/smallest-100m.json

`--smallest`: each case is asked with 2 MiB, trained at the smallest limit that the refusal names, and asked with 3 % less, which must be refused:
once with the limit of the process, which holds the model as it was built until its weights have moved home, once with that of an emulated device,
where the plan alone decides. Each is a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]
SHARES = (2, 4)
LEAST_LIMIT = 2 << 20
BELOW = 0.97
STEPS = 3
_IS_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")
# Settings that transformers takes by keyword but does not declare on these classes.
THOUSAND_CLASSES: dict[str, Any] = {"num_labels": 1000}
BEGINS_WITH_PAD: dict[str, Any] = {"decoder_start_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a small batch for it. All three run inside the child, so that transformers is imported there."""

    about: str
    imports: Callable[[], object]
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


def _gpt2_class() -> object:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel, GPT2Config


def _gpt2_small() -> nn.Module:
    return common.build_gpt(common.Shape())


def _gpt_tiny() -> nn.Module:
    return common.build_gpt(common.Shape(layers=4, vocabulary=4096))


def _llama_class() -> object:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048, vocab_size=12_288,
                    tie_word_embeddings=False, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    )  # fmt: skip


def _t5_class() -> object:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration, T5Config


def _t5_base() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(num_layers=12, d_model=768, d_kv=64, num_heads=12, d_ff=3072, vocab_size=32_128, dropout_rate=0.0, use_cache=False,
                 **BEGINS_WITH_PAD, pad_token_id=0)
    )  # fmt: skip


def _vit_class() -> object:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification, ViTConfig


def _vit_base() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**THOUSAND_CLASSES))


def _text(vocabulary: int, rows: int, tokens: int) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        found = common.token_batch(rows, tokens - 1, vocabulary, seed)
        return {"input_ids": found, "labels": found}

    return batch


def _images(seed: int) -> Batch:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(4, 3, 224, 224, generator=generator),
        "labels": torch.randint(0, 1000, (4,), generator=generator),
    }


CASES = {
    "gpt2-small": Case(
        about="124M, 4 x 128 tokens", imports=_gpt2_class, build=_gpt2_small, batch=_text(50_257, 4, 128)
    ),
    "llama-100m": Case(about="104M, 4 x 128 tokens", imports=_llama_class, build=_llama, batch=_text(12_288, 4, 128)),
    "t5-base": Case(about="223M, 4 x 64 tokens", imports=_t5_class, build=_t5_base, batch=_text(32_128, 4, 64)),
    "vit-base": Case(about="86M, 4 images of 224 x 224", imports=_vit_class, build=_vit_base, batch=_images),
    "gpt-quick": Case(
        about="32M, 4 x 64 tokens, for a quick look", imports=_gpt2_class, build=_gpt_tiny, batch=_text(4096, 4, 64)
    ),
}
"""`gpt-quick` runs only when it is asked for."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case (may be repeated)")
    parser.add_argument("--cgroup", action="store_true", help="check from outside as well")
    parser.add_argument("--smallest", action="store_true", help="the smallest limits, and 3 %% below them")
    parser.add_argument("--directory", type=Path, help="for the homes on disk (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(**json.loads(arguments.worker))
        return 0
    directory = Path(tempfile.mkdtemp(prefix="memfit-limits-", dir=arguments.directory))
    results: list[dict[str, Any]] = []
    try:
        for name in arguments.only or [name for name in CASES if name != "gpt-quick"]:
            if arguments.smallest:
                results += [measure_smallest(name, way, directory) for way in ("process", "emulated device")]
            else:
                results += measure(name, directory, uses_cgroup=arguments.cgroup)
    finally:
        shutil.rmtree(directory)
    print(_smallest_table(results) if arguments.smallest else _table(results))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": common.machine(), "results": results}, indent=1) + "\n")
    return 0 if all(result["holds"] for result in results) else 1


def measure(name: str, directory: Path, *, uses_cgroup: bool = False) -> list[dict[str, Any]]:
    """One case: R, P, then plain and memfit at each limit."""
    free = _run(name, "plain", None, directory)
    resident, peak = free["imports_bytes"], free["peak_bytes"]
    results: list[dict[str, Any]] = []
    for share in SHARES:
        limit = resident + (peak - resident) // share
        plain = _run(name, "plain", limit, directory)
        with common.memory_group(limit) if uses_cgroup else nullcontext() as group:
            mine = _run(name, "memfit", limit, directory, group)
            seen = int((group / "memory.max_usage_in_bytes").read_text()) if group is not None else None
        agrees = "losses" in mine and all(
            abs(a - b) <= 1e-3 * abs(b) for a, b in zip(mine["losses"], free["losses"], strict=True)
        )
        stays = "peaks" in mine and all(nbytes <= limit for nbytes in mine["peaks"].values())
        results.append(
            {
                "case": name,
                "about": CASES[name].about,
                "share": share,
                "limit_bytes": limit,
                "resident_bytes": resident,
                "plain_peak_bytes": peak,
                "plain": plain,
                "plain_losses": free["losses"],
                "memfit": mine,
                "cgroup_peak_bytes": seen,
                "plain_died": "died" in plain and "OutOfMemoryError" in plain["died"],
                "losses_agree": agrees,
                "holds": stays and agrees and "died" in plain and "OutOfMemoryError" in plain["died"],
            }
        )
        print(_table(results[-1:]), file=sys.stderr, flush=True)
    return results


def measure_smallest(name: str, way: str, directory: Path) -> dict[str, Any]:
    """The smallest limit that is named for a case, a training at it, and the refusal of 3 % less."""
    mode = "emulated" if way == "emulated device" else "memfit"
    asked = _run(name, mode, LEAST_LIMIT, directory)
    found: dict[str, Any] = {"case": name, "about": CASES[name].about, "way": way, "asked": asked, "holds": False}
    smallest = asked.get("smallest")
    if smallest is None:
        return found
    trained = _run(name, mode, smallest, directory)
    below = _run(name, mode, int(BELOW * smallest), directory)
    # Before fit the process holds the interpreter, its imports and the model, whatever the limit is.
    stays = trained.get("proof_holds", False) and trained["proof_peak_bytes"] <= smallest
    found |= {"smallest_bytes": smallest, "trained": trained, "below": below, "holds": stays and "smallest" in below}
    print(_smallest_table([found]), file=sys.stderr, flush=True)
    return found


def _smallest_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        trained, below = r.get("trained", {}), r.get("below", {})
        rows.append(
            [
                f"{r['case']} ({r['about']})",
                r["way"],
                common.mib(r.get("smallest_bytes")),
                common.mib(trained.get("proof_peak_bytes")),
                f"{trained['seconds'][-1]:.1f}" if "seconds" in trained else str(trained)[:200],
                "refused" if "smallest" in below else str(below)[:200],
                "yes" if r["holds"] else "NO",
            ]
        )
    heads = ["case", "limit of", "smallest named, MiB", "measured peak, MiB", "step, s", "at 3 % less", "holds"]
    return common.table(heads, rows)


def _run(name: str, mode: str, limit: int | None, directory: Path, group: Path | None = None) -> dict[str, Any]:
    """One child; its JSON, or how it ended."""
    home = Path(tempfile.mkdtemp(dir=directory))
    request = {"name": name, "mode": mode, "limit": limit, "directory": str(home), "group": group and str(group)}
    done = subprocess.run(
        [sys.executable, __file__, "--worker", json.dumps(request)],
        check=False,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    shutil.rmtree(home)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    lines = done.stderr.strip().splitlines() or [""]
    # An exception's text may have several lines.
    first = max((n for n, line in enumerate(lines) if _IS_EXCEPTION.match(line)), default=len(lines) - 1)
    return {"died": f"exit {done.returncode}: {' '.join(lines[first:])}"[:2000]}


def _table(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        mine = r["memfit"]
        peaks = mine.get("peaks", {})
        rows.append(
            [
                f"{r['case']} ({r['about']})",
                f"R + (P - R) / {r['share']}",
                *(common.mib(r[k]) for k in ("resident_bytes", "plain_peak_bytes", "limit_bytes")),
                "dies" if r["plain_died"] else r["plain"].get("died", "TRAINS"),
                f"{common.mib(max(peaks.values()))} ({max(peaks, key=lambda k: peaks[k])})"
                if peaks
                else str(mine.get("died", mine))[:160],
                common.mib(r["cgroup_peak_bytes"]),
                f"{mine['seconds'][-1]:.1f}" if peaks else "-",
                "yes" if r["holds"] else "NO",
            ]
        )
    heads = [
        "case",
        "limit",
        "R, MiB",
        "P, MiB",
        "limit, MiB",
        "plain",
        "memfit's peak, MiB",
        "cgroup's, MiB",
        "step, s",
        "holds",
    ]
    return common.table(heads, rows)


# --- the child ------------------------------------------------------------------------------------------------------------------


def _work(*, name: str, mode: str, limit: int | None, directory: str, group: str | None) -> None:
    if group is not None:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    import torch

    import memfit
    import memfit.api  # counts as an import: memfit loads its names when they are used
    from memfit.machine.machine import prepare_process
    from memfit.machine.meters import ProcessMeter

    case = CASES[name]
    case.imports()
    meter = ProcessMeter()
    imports_bytes = meter.resident_bytes().whole_bytes
    prepare_process()
    meter.reset_peak()
    torch.manual_seed(0)
    peaks: dict[str, int] = {}
    if mode == "plain":
        losses = _train_plainly(case, None if limit is None else limit - imports_bytes)
        peaks["plain"] = meter.peak_bytes().whole_bytes
        found: dict[str, Any] = {"losses": losses}
    else:
        model = _built(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        sample = case.batch(0)
        peaks["build"] = meter.peak_bytes().whole_bytes
        homes = Path(directory) / "homes"
        try:
            job = memfit.fit(
                model, optimizer, _loss, sample, limit=limit, directory=homes, emulate_device=mode == "emulated"
            )
        except memfit.DoesNotFitError as error:
            print(json.dumps({"smallest": error.smallest_limit_bytes, "message": str(error)}))
            return
        steps = [job.step(case.batch(step)) for step in range(STEPS)]
        evaluated = job.evaluate(case.batch(0)).loss
        job.save(Path(directory) / "saved")
        peaks.update({record.name: record.process_peak_bytes or 0 for record in job.proof().phases})
        found = {
            "losses": [step.loss for step in steps],
            "evaluated": evaluated,
            "seconds": [step.seconds for step in steps],
            "plan": job.plan.to_json(),
            "reason": job.reason,
            "predicted_peak_bytes": job.predicted_peak_bytes,
            "proof_holds": job.proof().holds,
            "proof_peak_bytes": job.proof().measured_peak_bytes,
        }
        job.close(restore=False)
    found |= {"imports_bytes": imports_bytes, "peaks": peaks, "peak_bytes": max(peaks.values())}
    print(json.dumps(found))


def _built(case: Case) -> Any:
    """The model, initialised after its tied weights were tied.

    Made in the ordinary way, T5-base fills its embedding four times before three of them are dropped: 282 MiB for a moment, which is the making's
    and not the training's. Memory that nobody has written to is not resident.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: Any = case.build()
    model.tie_weights()
    model.init_weights()
    return model.train()


def _train_plainly(case: Case, limit_bytes: int | None) -> list[float]:
    import torch

    from memfit.devices.binding import install

    allocator = install()
    allocator.set_limit(limit_bytes)
    model = _built(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses: list[float] = []
    for step in range(STEPS):
        loss = _loss(model, case.batch(step))
        losses.append(loss.item())
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


if __name__ == "__main__":
    sys.exit(main())
