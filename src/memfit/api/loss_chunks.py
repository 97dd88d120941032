"""Chunks of the loss: how large they are, and what they spare at most.

In: a model, a profile with the loss whole. Out: figures from which `choosing` tells whether plans
with the loss in chunks may be faster, before any is traced.
"""

from __future__ import annotations

from torch import nn

from memfit.core.hardware import Hardware
from memfit.core.profile import Profile, TraceProfile
from memfit.core.units import MIB
from memfit.core.work_kinds import PRODUCT_KINDS, summed
from memfit.huggingface.causal_loss import known_head
from memfit.prediction.pace import work_seconds


def chunk_tokens(model: nn.Module) -> int:
    """Tokens whose logits take about 64 MiB in fp32, a power of two of at least 32."""
    head = known_head(model)
    assert head is not None, "asked of models whose loss is known"
    tokens = (64 * MIB) // (4 * head.out_features)
    return max(32, 1 << max(0, tokens.bit_length() - 1))


def bytes_of_loss(profile: Profile) -> int:
    """Most bytes that the last call, with the loss behind it, has at any instant beyond those of
    calls before: a loss in chunks takes so many less at most.
    """
    last = [(trace.calls[-1], trace.seed_peak_bytes) for trace in profile.traces.values()]
    return max(call.forward_peak_bytes + seed + max(0, call.backward_peak_bytes) for call, seed in last)


def seconds_of_loss(profile: Profile, hardware: Hardware) -> float:
    """Seconds of a step that the last call, with the loss behind it, computes beside products: a
    loss in chunks takes so many less at most.
    """

    def seconds(trace: TraceProfile) -> float:
        call = trace.calls[-1]
        works = [(work, 1.0) for work in (call.forward_work, call.backward_work, trace.seed_work)]
        beside = tuple((kind, amount) for kind, amount in summed(works) if kind not in PRODUCT_KINDS)
        return work_seconds(beside, hardware)

    return max(-(-profile.batch_rows // rows) * seconds(trace) for rows, trace in profile.traces.items())
