"""Chunks of the loss: how large they are, and what they spare at most.

In: a model, a profile with the loss whole. Out: figures from which `choosing` tells whether plans
with the loss in chunks may be faster, before any is traced.
"""

from __future__ import annotations

import math

from torch import nn

from memfit.core.hardware import Hardware
from memfit.core.profile import CallProfile, Profile, TraceProfile
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


def bytes_of_loss(model: nn.Module, profile: Profile) -> int | None:
    """Most bytes that the head, with the loss behind it, has at any instant beyond those of calls
    before: a loss in chunks takes so many less at most. None: the head is not the last call, or not
    the only one of its kind.
    """
    last = _heads(model, profile)
    if last is None:
        return None
    return max(trace.seed_peak_bytes + c.forward_peak_bytes + max(0, c.backward_peak_bytes) for trace, c in last)


def seconds_of_loss(model: nn.Module, profile: Profile, hardware: Hardware) -> float:
    """Seconds of a step that the head, with the loss behind it, computes beside products: a loss in
    chunks takes so many less at most; infinite where `bytes_of_loss` is not known.
    """

    def seconds(trace: TraceProfile, call: CallProfile) -> float:
        works = [(work, 1.0) for work in (call.forward_work, call.backward_work, trace.seed_work)]
        beside = tuple((kind, amount) for kind, amount in summed(works) if kind not in PRODUCT_KINDS)
        return -(-profile.batch_rows // trace.rows) * work_seconds(beside, hardware)

    last = _heads(model, profile)
    return math.inf if last is None else max(seconds(trace, call) for trace, call in last)


def _heads(model: nn.Module, profile: Profile) -> list[tuple[TraceProfile, CallProfile]] | None:
    """The head's call in each trace; None where it is not the last one, once."""
    head = known_head(model)
    names = {name for name, module in model.named_modules(remove_duplicate=False) if module is head}
    found: list[tuple[TraceProfile, CallProfile]] = []
    for trace in profile.traces.values():
        calls = [call for call in trace.calls if call.site in names]
        if head is None or len(calls) != 1 or calls[0] is not trace.calls[-1]:
            return None
        found.append((trace, calls[0]))
    return found
