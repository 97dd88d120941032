"""The list of what is run: one `Part` a child process, most telling first.

In: a device's kind and a size. Out: parts, each a request that `work.py` understands, with a time limit. What makes no sense on a device is not in its list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Homes of all blocks that may leave, as (weights and states); gradients stay where the update in backward takes them.
_AWAY = {"microbatches": 4, "order": "layer-major", "tail": True}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One child process.

    Attributes:
        name: unique; for `--only` and for the table.
        work: what the child does: a name in `work.WORK`.
        limit_s: after so many seconds it is killed, and what it noted until then is kept.
        request: what the work is given.
        after: name of a part without whose result this one cannot run.
    """

    name: str
    work: str
    limit_s: float = 150.0
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])
    after: str | None = None


def _plain(subject: str, counts: list[int]) -> Part:
    return Part(name=f"{subject}: plain", work="plain", request={"subject": subject, "counts": counts})


def _ours(subject: str, title: str, **request: Any) -> Part:
    return Part(name=f"{subject}: {title}", work="memfit", request={"subject": subject, **request})


def _limited(subject: str, share: float, **request: Any) -> Part:
    words = "half" if share == 0.5 else "a third"
    return Part(
        name=f"{subject}: chosen by fit for {words} of plain's memory{', bf16 allowed' if request else ''}",
        work="memfit",
        request={"subject": subject, "limit_share": share, **request},
        after=f"{subject}: plain",
    )


def all_parts(kind: str) -> list[Part]:
    """Everything for a device of that kind: "cuda" (or another of torch's), or "late"."""
    recompute, select = {"saved": "recompute"}, {"saved": "select"}
    to_host, to_disk = ({"saved": "offload", "saved_home": home} for home in ("host", "disk"))
    parts = [
        Part(name="machine", work="machine", limit_s=120),
        Part(name="device tests", work="tests", limit_s=420),
        _plain("gpt2", [1, 4]),
        _ours("gpt2", "resident"),
        _ours("gpt2", "resident, recomputed", fate=recompute),
        Part(name="gpt2: torch.utils.checkpoint", work="plain", request={"subject": "gpt2", "checkpoints": True}),
        _ours("gpt2", "weights and states on the host, recomputed", homes="host", fate=recompute),
        _ours("gpt2", "the same, updated on the host's cores", homes="host", updates_on_host=True, fate=recompute),
        _ours("gpt2", "weights on the device, states on the host and updated there", updates_on_host=True, fate=recompute),
        Part(name="gpt2: FSDP2, CPU offload, checkpointed", work="fsdp", request={"subject": "gpt2", "checkpoints": True}),
        _limited("gpt2", 0.5),
        _ours("gpt2", "weights and states on disk, recomputed", homes="disk", fate=recompute),
        _ours("gpt2", "on the host, 4 microbatches layer by layer, recomputed", homes="host", fate=recompute, plan=_AWAY),
        _ours("gpt2", "selected", fate=select),
        _ours("gpt2", "activations offloaded to the host", fate=to_host),
        _ours("gpt2", "activations offloaded to disk, weights on the host", homes="host", fate=to_disk),
        _ours("gpt2", "loss in chunks", chunks=True),
        _plain("llama", [1]),
        _ours("llama", "weights and states on the host", homes="host"),
        Part(name="llama: FSDP2, CPU offload", work="fsdp", request={"subject": "llama"}),
        _ours("llama", "bf16 with split masters on the host, recomputed", homes="host", fate=recompute,
              plan={"compute_dtype": "bfloat16", "splits_masters": True}, allow=["bf16"]),
        _limited("llama", 0.34, allow=["bf16"]),
        Part(name="llama: generation, weights on disk", work="inference", request={"subject": "llama", "cache_limit": None}),
        Part(name="llama: generation, weights and caches away", work="inference", request={"subject": "llama", "cache_limit": 0}),
        _plain("conv", [1, 4]),
        _ours("conv", "resident"),
        _ours("conv", "activations offloaded to the host, 4 microbatches", fate=to_host, plan=_AWAY),
        _ours("conv", "weights and states on disk, recomputed", homes="disk", fate=recompute),
        _plain("moe", [1]),
        _ours("moe", "resident"),
        _ours("moe", "weights and states on the host, recomputed", homes="host", fate=recompute),
        _ours("moe", "weights and states on disk, recomputed", homes="disk", fate=recompute),
    ]  # fmt: skip
    if kind == "late":
        # It has no process group of its own: the code runs on the processor there, and its row says so.
        parts = [
            Part(name=f"{part.name} (on the processor)", work=part.work, request={**part.request, "device": "cpu"})
            if part.work == "fsdp"
            else part
            for part in parts
        ]
    return parts
