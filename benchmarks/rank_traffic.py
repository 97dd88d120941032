"""Bytes on the wire and peak memory of two ranks: memfit's ZeRO-3 beside FSDP2.

A Llama with layers of equal size, AdamW, two Gloo ranks of this machine, k microbatches a rank. For
each way a process of its own on each rank, and the third step: bytes that the kernel counted on the
loopback device (of both ranks, everything that is sent), bytes that memfit counted and predicted,
and the peak of the process above what it held before the model was built. FSDP2 is run with
`set_requires_gradient_sync` (gradients reduced once a step) and without (each microbatch).

Other programs' loopback traffic is counted too, so run it where there is none:

    unshare -n sh -c 'ip link set lo up && OMP_NUM_THREADS=1 python benchmarks/rank_traffic.py'

Writes `benchmarks/results/rank_traffic.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist

from distributed.processes import Ranks

STEPS = 3
ROWS, TOKENS = 8, 32


def build() -> Any:
    """A Llama of 18 million parameters, 72 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4, hidden_size=384, intermediate_size=1152,
        vocab_size=1000, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The mean over tokens."""
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def batch_of(rank: int, step: int) -> torch.Tensor:
    """A rank's rows of a step."""
    return torch.randint(0, 1000, (ROWS, TOKENS), generator=torch.Generator().manual_seed(100 * step + rank))


def _sent_bytes() -> int:
    """Bytes sent over the loopback device since it came up."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    raise LookupError("no loopback device")


class _Peak:
    """The most that this process holds without files, above what it held at the beginning."""

    def __init__(self) -> None:
        self._before = self._anonymous("RssAnon")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    @staticmethod
    def _anonymous(name: str) -> int:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        found = {line.partition(":")[0]: line.split()[1] for line in text.splitlines() if line.endswith("kB")}
        value = int(found[name])
        return 1024 * (value - int(found["RssFile"]) if name == "VmHWM" else value)

    def read(self) -> int:
        """Returns those bytes."""
        return self._anonymous("VmHWM") - self._before


def _measured(rank: int, steps: Callable[[int], object]) -> int:
    """Makes the steps; returns what was sent in the last, by both ranks."""
    for step in range(STEPS - 1):
        steps(step)
    dist.barrier()
    time.sleep(0.3)
    before = _sent_bytes()
    steps(STEPS - 1)
    dist.barrier()
    time.sleep(0.3)
    return _sent_bytes() - before


def by_memfit(rank: int, size: int, k: int, where: str) -> dict[str, Any]:
    """ZeRO-3 under memfit; where: the tier of the shares, and whether layers are recomputed.

    In layer-major order what is kept is of all microbatches at once.
    """
    import memfit
    from distributed.training import plan_for
    from memfit.core.plan import CallPlan
    from memfit.core.saved_policies import Saved
    from memfit.devices.binding import install

    install()
    peak = _Peak()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tier, _, saved = where.partition(", ")
    more = {"calls": (CallPlan(saved=Saved.RECOMPUTE),) * 10} if saved else {}
    plan = plan_for(model, size, 3, tier, k, **more)
    job = memfit.fit(model, optimizer, loss, batch_of(rank, 0), plan=plan, enforce=False)
    assembly = job._assembly  # noqa: SLF001, a benchmark of what is inside
    group = assembly.setup.ranks
    assert group is not None
    counted: list[int] = []

    def step(index: int) -> None:
        before = sum(group.received.values())
        job.step(batch_of(rank, index))
        counted.append(sum(group.received.values()) - before)

    sent, most = _measured(rank, step), peak.read()
    predicted = sum(assembly.planned.prepared.timeline.bytes_received.values())
    weights = sum(p.numel() for p in build().parameters()) * 4
    job.close()
    return {"sent": sent, "counted": counted[-1], "predicted": predicted, "peak": most, "weights": weights}


def by_fsdp(rank: int, size: int, k: int, syncs: bool) -> dict[str, Any]:  # noqa: FBT001, called by name over a pipe
    """FSDP2, a group a layer."""
    from torch.distributed.fsdp import fully_shard

    from memfit.devices.binding import install

    install()
    peak = _Peak()
    model = build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(index: int) -> None:
        parts = batch_of(rank, index).tensor_split(k)
        for number, part in enumerate(parts):
            if syncs:
                model.set_requires_gradient_sync(number == k - 1)
            (loss(model, part) / k).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"sent": _measured(rank, step), "peak": peak.read()}


def main() -> None:
    """Runs all ways, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rank_traffic.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cases = [("by_memfit", k, "device") for k in (1, 2, 4, 8)]
    cases += [("by_memfit", 4, "device, recomputed"), ("by_memfit", 4, "disk")]
    for name, k, more in [*cases, ("by_fsdp", 1, True), ("by_fsdp", 4, True), ("by_fsdp", 4, False)]:
        ranks = Ranks()  # fresh processes: what one way leaves in memory is not the next one's
        try:
            found = ranks.run(2, f"rank_traffic:{name}", k, more, timeout_s=300.0)
        finally:
            ranks.close()
        row = {"way": name, "k": k, "with": more, "sent": found[0]["sent"], "peak": max(f["peak"] for f in found)}
        if name == "by_memfit":
            row |= {what: sum(f[what] for f in found) for what in ("counted", "predicted")}
            row["weights"] = found[0]["weights"]
        rows.append(row)
        print(row, flush=True)
    by_home = {r["with"]: r for r in rows if r["way"] == "by_memfit" and r["k"] == 4}
    synced, unsynced = (
        next(r for r in rows if r["way"] == "by_fsdp" and r["k"] == 4 and r["with"] is s) for s in (True, False)
    )
    summary = {
        f"of FSDP2's {key}, gradients synced once and each microbatch": {
            where: [round(r[name] / other[name], 3) for other in (synced, unsynced)] for where, r in by_home.items()
        }
        for key, name in (("bytes", "sent"), ("peaks", "peak"))
    } | {
        "kernel over predicted": [
            round(r["sent"] / r["predicted"], 4) for r in rows if r["way"] == "by_memfit"
        ],
    }  # fmt: skip
    options.out.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
