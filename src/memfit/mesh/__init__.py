"""Ranks that train one model together: groups, agreement, shares of homes, exchange of gradients.

In: torch.distributed, started by `torchrun` or by the program; buffers and homes. Out: a
`Communicator` for people (`collectives`); for a job, a `RankGroup` with one thread that does all
collectives. Transport is torch.distributed's own (Gloo, NCCL).
"""
