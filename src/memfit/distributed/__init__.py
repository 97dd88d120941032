"""Processes that compute together: collectives, agreement, failure, homes that ranks share.

In: torch.distributed, started by `torchrun` or by the program; buffers and homes. Out: a
`Communicator` for people; for a job, a `RankGroup` with one thread that does all collectives.
Transport is torch.distributed's own (Gloo, NCCL).
"""

from memfit.distributed.collectives import Communicator, create
from memfit.distributed.rank_group import RankGroup

__all__ = ["Communicator", "RankGroup", "create"]
