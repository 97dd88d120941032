"""Speed of the links between ranks, as gathers see it.

In: ranks. Out: a `Link`, the same on all of them.
"""

from __future__ import annotations

import time

import torch

from memfit.core.hardware import Link
from memfit.distributed.agreement import agree
from memfit.distributed.rank_group import RankGroup
from memfit.distributed.transport import equal_borders, free_exchanged, gather_in_place

_SMALL_BYTES = 4096
_LARGE_BYTES = 4 << 20
_TIMES = 3
_LEAST_S = 1e-7


def probe_network(ranks: RankGroup) -> Link:
    """Measures what a rank receives in a second while all give all their shares; collective.

    Memory: 4 MiB. Takes some hundredths of a second on one machine.

    Returns:
        The slowest rank's figures, of the fastest of three tries; `spread` is how far these were
        apart.
    """
    small = [_seconds(ranks, _SMALL_BYTES) for _ in range(_TIMES)]
    large = [_seconds(ranks, _LARGE_BYTES) for _ in range(_TIMES)]
    told = agree(ranks, "the links between ranks", values=[min(small), min(large), max(large)])
    latency, fast, slow = (max(said[index] for said in told) for index in range(3))
    received = _LARGE_BYTES * (ranks.size - 1) / ranks.size
    rate = received / max(fast - latency, _LEAST_S)
    spread = min(round(slow / max(fast, _LEAST_S) - 1, 3), 1.0)
    return Link(read_bytes_per_s=rate, write_bytes_per_s=rate, latency_s=min(latency, 1.0), spread=spread)


def _seconds(ranks: RankGroup, nbytes: int) -> float:
    # All begin together: a rank that waits for another would measure that.
    agree(ranks, "a probe of the links")
    whole = torch.zeros(nbytes, dtype=torch.uint8)
    began = time.perf_counter()
    ranks.call(lambda group: gather_in_place(group, whole, equal_borders(nbytes, ranks.size)))
    seconds = time.perf_counter() - began
    free_exchanged(whole)
    return seconds
