"""What autograd saves inside a call: kept, recomputed, selected or offloaded.

In: a `CallPlan` for each call, and the call itself (`CallSite`, args, kwargs).
Out: a `Frame`, entered before the call and left after it, that gives backward the same tensors bit for bit.
Parts: `frames` (what the engine drives), `recompute` and `select` (made again), `offload` and `tiers` (moved away and
back), `arguments` and `surroundings` (what running again needs), `handles` (what autograd holds).
"""

from memfit.runtime.saved.frames import CallSite, Frame, make_frame
from memfit.runtime.saved.offload import Offloader, TierStore
from memfit.runtime.saved.recompute import SegmentGroup
from memfit.runtime.saved.surroundings import Buffers
from memfit.runtime.saved.tiers import HostStore, ScratchStore, StagedScratchStore
from memfit.runtime.saved.writes import Writes

__all__ = [
    "Buffers",
    "CallSite",
    "Frame",
    "HostStore",
    "Offloader",
    "ScratchStore",
    "SegmentGroup",
    "StagedScratchStore",
    "TierStore",
    "Writes",
    "make_frame",
]
