"""Torch's own loaders and samplers over ranks, beside plain PyTorch in one process."""

from __future__ import annotations

import pytest

from distributed.processes import Ranks


@pytest.mark.parametrize(
    ("size", "stage", "items", "rows", "drops"),
    [(2, 3, 11, 4, False), pytest.param(3, 1, 13, 4, True, marks=pytest.mark.slow)],
)
def test_a_distributed_samplers_uneven_last_batch_is_weighted_clipped_and_evaluated_as_on_one_process(
    ranks: Ranks, size: int, stage: int, items: int, rows: int, drops: bool
) -> None:
    """11 rows for 2 ranks: 6 each, in batches of 4 and 2; a held-out batch has 4 rows on one rank and 3 on the other."""
    assert ranks.run(size, "distributed.loading:sampled", stage, items, rows, drops) == [[]] * size
