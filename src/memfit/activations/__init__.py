"""Handles what autograd saves inside a call: kept, recomputed, selected or offloaded.

In: a `CallPlan` for each call, and the call itself (`CallSite`, args, kwargs).
Out: a `Frame`, entered before the call and left after it, that gives backward the same tensors bit
for bit.
Parts: `frames` (what the engine drives), `recompute` and `select` (made again), `offload` (moved
away and back), `call_arguments`, `attributes` and `surroundings` (what running again needs),
`handles` (what autograd holds), `reads` and `writes` (what operations of a forward read and
change), `structure` and `saved_tensors` (tools over nested values, and over one tensor).
"""

from memfit.activations.frames import CallSite, Frame, make_frame
from memfit.activations.offload import Offloader
from memfit.activations.recompute import SegmentGroup
from memfit.activations.surroundings import Buffers
from memfit.activations.writes import Writes

__all__ = [
    "Buffers",
    "CallSite",
    "Frame",
    "Offloader",
    "SegmentGroup",
    "Writes",
    "make_frame",
]
