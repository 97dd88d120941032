"""Servers and workers between processes over Gloo, against plain PyTorch and by counting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memfit
from distributed.processes import Ranks

CALLS = "distributed.serving"
LONG_S = 100.0  # longer than a test may wait: nothing here is ended by a timeout


@pytest.mark.parametrize(
    ("size", "servers", "optimizer", "home"),
    [(3, 1, "adamw", "disk"), (4, 2, "sgd", "device")],
)
def test_synchronous_servers_give_the_bits_of_data_parallel_and_move_each_byte_once(
    ranks: Ranks, size: int, servers: int, optimizer: str, home: str
) -> None:
    assert ranks.run(size, f"{CALLS}:like_data_parallel", servers, optimizer, home, 3) == [[]] * size


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_pull_misses_more_pushes_than_the_staleness_allows(ranks: Ranks, staleness: int) -> None:
    found = ranks.run(3, f"{CALLS}:clocks", staleness, 6)
    for seen, told, _ in found[1:]:
        assert min(seen) >= -staleness
        assert told <= staleness
    # The fast worker has gone as far ahead as it may.
    assert min(found[2][0]) == -staleness
    assert found[2][1] == staleness


@pytest.mark.parametrize(("staleness", "home"), [(0, "disk"), (2, "device")])
def test_a_killed_worker_is_dropped_and_what_it_had_pushed_in_part_does_not_count(
    ranks: Ranks, staleness: int, home: str
) -> None:
    ranks.begin(3, f"{CALLS}:killed", staleness, home, timeout_s=LONG_S)
    (is_good, server), (goes_on, worker), ended = (ranks.answer(rank) for rank in range(3))
    assert (is_good, goes_on, ended) == (True, True, (False, "the process ended with -9"))
    assert server[2] == (2,)
    # The small parameter three times by the killed worker, the large one twice.
    assert worker[0] == [6, 3, 6, 2]
    assert worker[1] < 1.0


def test_what_a_server_holds_rests_on_disk_under_its_limit(ranks: Ranks) -> None:
    measured, predicted, armed, wrong = ranks.run(3, f"{CALLS}:under_a_limit", "5MiB")[0]
    weights = 24 * 256 * 256 * 4
    assert measured <= predicted <= armed <= weights
    assert measured > 0.6 * predicted
    assert wrong == []


def test_an_error_of_a_server_is_told_to_its_workers(ranks: Ranks) -> None:
    server, *workers = ranks.run(3, f"{CALLS}:full_disk", timeout_s=LONG_S)
    assert server.startswith("StoreError: could not write")
    assert workers == [f"PeerError: rank 0: {server}"] * 2


def test_parameters_without_gradients_and_gradients_of_other_strides(ranks: Ranks) -> None:
    assert ranks.run(3, f"{CALLS}:unused") == [[]] * 3


def test_ranks_that_ask_for_different_things_are_refused(ranks: Ranks) -> None:
    for text in ranks.run(2, f"{CALLS}:disagrees"):
        assert "Line 2 here: 'staleness" in text


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(memfit.UsageError, match="of 1 ranks: at least one is a server"):
        memfit.parameter_server.create(model, optimizer)
    with pytest.raises(memfit.UsageError, match="staleness is a number of clocks"):
        memfit.parameter_server.create(model, optimizer, staleness=-1)
    with pytest.raises(memfit.UsageError, match="home is"):
        memfit.parameter_server.create(model, optimizer, home="cloud")
