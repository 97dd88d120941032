"""Overlap of ranks' transfers with compute: seconds and waits of a step, predicted and measured.

ZeRO-3 over two Gloo ranks of this machine, whose links are throttled and whose layers only sleep:
so neither takes a processor, and a busy machine measures the order of things all the same. A layer
sleeps as long as it is predicted to compute, what a rank receives takes as long as its bytes do on
the link of the hardware file, and that link is as fast as makes all transfers of a step take
`--share` of the step's compute (1: neither has time to spare). Everything is received one after the
other, as the ranks' one thread has it. Expected: a step takes at most 1.15 of the longer of the two,
and waits as predicted within a tenth of the step's waits.

    OMP_NUM_THREADS=1 python benchmarks/rank_overlap.py

Writes `benchmarks/results/rank_overlap.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn

from distributed.processes import Ranks

LAYERS, WIDTH, ROWS, STEPS = 12, 256, 8, 3
FLOPS_PER_S = 3e7


class _Sleeping(torch.autograd.Function):
    """A layer's compute: nothing is done, for as long."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: tuple[float, float]) -> torch.Tensor:  # type: ignore[override]
        ctx.seconds = seconds[1]
        _sleep(seconds[0])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        _sleep(ctx.seconds)
        return gradient, None


def _sleep(seconds: float) -> None:
    import memfit

    if seconds > 0 and not memfit.is_tracing():
        time.sleep(seconds)


class Layer(nn.Module):
    """A linear layer that takes the seconds that it is given."""

    seconds = (0.0, 0.0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes at once, and then sleeps."""
        return _Sleeping.apply(self.linear(x), self.seconds)


@contextmanager
def throttled(group: Any, bytes_per_s: float) -> Iterator[None]:
    """Context in which everything that the group's thread does takes as long as what it received."""
    own = group.submit

    def submit(act: Any) -> Any:
        def slowly(inner: Any) -> Any:
            before, began = sum(group.received.values()), time.perf_counter()
            found = act(inner)
            due = (sum(group.received.values()) - before) / bytes_per_s
            time.sleep(max(0.0, due - (time.perf_counter() - began)))
            return found

        return own(slowly)

    group.submit = submit
    try:
        yield
    finally:
        group.submit = own


def hardware(link: float) -> dict[str, Any]:
    """A machine whose products take as long as layers sleep, with links of that speed."""
    way = {"read_bytes_per_s": 1e11, "write_bytes_per_s": 1e11}
    return {
        "format": 1, "device": "cpu", "flops_per_s": FLOPS_PER_S, "device_bytes": 1 << 40,
        "disk_bytes": 1 << 40, "disk": way,
        "network": {"data": {"read_bytes_per_s": link, "write_bytes_per_s": link}},
    }  # fmt: skip


def measure(rank: int, size: int, share: float, prefetch: int, steps: int = STEPS) -> dict[str, Any]:
    """Trains some steps; returns predicted and measured seconds of the fastest one."""
    import memfit
    from distributed.training import plan_for
    from memfit.core.hardware import Hardware
    from memfit.step.predict import predict

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))

    def begin(link: float) -> Any:
        return memfit.fit(
            model, optimizer, lambda given, batch: given(batch).square().mean(), rows, enforce=False,
            plan=plan_for(model, size, 3, "device", 1, prefetch=prefetch), hardware=json.dumps(hardware(link)),
        )  # fmt: skip

    job = begin(1e12)
    step = job._assembly.planned.prepared.step  # noqa: SLF001, a benchmark of what is inside
    free = predict(step, Hardware.from_json(json.dumps(hardware(1e12))))
    compute_s, received = free.seconds, sum(free.bytes_received.values())
    job.close()
    link = received / (share * compute_s)
    # Two products back, but for the first layer, whose input needs no gradient.
    each = compute_s / (3 * LAYERS - 1)
    for index, layer in enumerate(model):
        layer.seconds = each, each * (1 + (index > 0))
    job = begin(link)
    predicted = predict(step, Hardware.from_json(json.dumps(hardware(link))))
    group, found = job._assembly.setup.ranks, []  # noqa: SLF001
    with throttled(group, link):
        for _ in range(steps):
            began = time.perf_counter()
            job.step(rows)
            seconds = time.perf_counter() - began
            found.append((seconds, dict(job._runner.measured.timeline.stalls_s)))  # noqa: SLF001
    job.close()
    seconds, stalls = min(found, key=lambda each: each[0])
    return {
        "compute": compute_s,
        "links": received / link,
        "step predicted": predicted.seconds,
        "step measured": seconds,
        "all measured": [each for each, _ in found],
        "waits predicted": dict(predicted.stalls_s),
        "waits measured": stalls,
    }


def main() -> None:
    """Measures all cases, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rank_overlap.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    ranks = Ranks()
    try:
        for share, prefetch in ((0.5, 2), (1.0, 2), (1.0, 3), (1.5, 2)):
            first, *_ = ranks.run(2, "rank_overlap:measure", share, prefetch, timeout_s=300.0)
            row = {"share": share, "prefetch": prefetch, **first}
            row["step over the longer"] = first["step measured"] / max(first["compute"], first["links"])
            row["waits, predicted over measured"] = sum(first["waits predicted"].values()) / max(
                sum(first["waits measured"].values()), 1e-9
            )
            rows.append(row)
            print(json.dumps(row), flush=True)
    finally:
        ranks.close()
    options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
