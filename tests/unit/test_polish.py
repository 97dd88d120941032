"""Polishing against all orders of three options: also through mixtures that are as fast in fewer bytes."""

from __future__ import annotations

import math
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.plan import BlockPlan
from memfit.planner.search import polish as room
from memfit.planner.search.mixed_units import Mixture
from memfit.planner.search.polish import GAIN, Ahead, JudgesAhead

Costs = dict[tuple[str, ...], tuple[float, int]]
OPTIONS: tuple[str, ...] = ("a", "b", "c")


class Judge:
    """Knows what each order of the options takes; up to 10 bytes fit."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.judged: dict[Mixture, Any] = {}
        self.units = SimpleNamespace(calls=(0, 1, 2))
        self.question = SimpleNamespace(allows=lambda _: True)

    def __call__(self, mixture: Mixture) -> Any:
        seconds, nbytes = self.costs[mixture.policies]  # type: ignore[index]
        built = SimpleNamespace(
            weighed_s=seconds, cost=SimpleNamespace(peak_bytes=nbytes), fits=nbytes <= 10, priced=None
        )
        return self.judged.setdefault(mixture, SimpleNamespace(mixture=mixture, built=built))


def mixture(order: tuple[str, ...]) -> Mixture:
    return Mixture(policies=order, homes=(BlockPlan(),) * 3, ends=())  # type: ignore[arg-type]


def polished(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """Only swaps are tried: no option is changed for another."""
    monkeypatch.setattr(room, "_changes", lambda *_: [])
    judge: Any = Judge(costs)
    none: Any = None
    built = room.polish(judge, judge(mixture(OPTIONS)), none, none, none).built
    return built.weighed_s, built.cost.peak_bytes


def test_what_is_as_fast_in_fewer_bytes_leads_to_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No swap of the first gains; one of the second, which has fewer bytes, does."""
    costs: Costs = dict.fromkeys(permutations(OPTIONS), (3.0, 11))
    costs |= {("a", "b", "c"): (2.0, 9), ("b", "a", "c"): (2.0, 7), ("b", "c", "a"): (1.0, 10)}
    assert polished(costs, monkeypatch) == (1.0, 10)


@given(
    costs=st.lists(
        st.tuples(st.sampled_from([1.0, 1.0 + GAIN / 3, 2.0, 3.0]), st.integers(5, 12)), min_size=6, max_size=6
    )
)
def test_polishing_ends_with_what_fits_and_is_no_slower(costs: list[tuple[float, int]]) -> None:
    by_order = dict(zip(permutations(OPTIONS), costs, strict=True))
    if by_order[OPTIONS][1] > 10:
        by_order[OPTIONS] = (by_order[OPTIONS][0], 10)
    with pytest.MonkeyPatch.context() as monkeypatch:
        seconds, nbytes = polished(by_order, monkeypatch)
    assert nbytes <= 10
    assert (seconds, nbytes) in by_order.values()
    assert seconds <= by_order[OPTIONS][0]
    # Nothing around it that fits is faster, or as fast in fewer bytes.
    ends = [order for order, cost in by_order.items() if cost == (seconds, nbytes)]
    around = [
        by_order[tuple(end[{i: j, j: i}.get(k, k)] for k in range(3))]
        for end in ends
        for i in range(3)
        for j in range(i)
    ]
    # Of several orders that take as much it is not told which one it was.
    for found_s, found_bytes in around if len(ends) == 1 else ():
        assert found_bytes > 10 or found_s >= seconds * (1 - GAIN)
        assert found_bytes > 10 or found_s > seconds or found_bytes >= nbytes


def test_the_best_of_all_is_as_fast_as_any_and_has_the_fewest_bytes() -> None:
    first = Judge({("a", "b", "c"): (1.0, 9), ("b", "a", "c"): (1.0 + GAIN / 2, 6), ("c", "a", "b"): (1.0, 11)})
    second = Judge({("a", "b", "c"): (1.0 + 3 * GAIN, 1)})
    for judge in (first, second):
        for order in judge.costs:
            judge(mixture(order))
    judges: Any = JudgesAhead.__new__(JudgesAhead)
    judges._question, judges._known = first.question, (0, math.inf)
    ways = [Ahead(prefetch=k, backlog=1) for k in (1, 2)]
    judges.by_ahead = dict(zip(ways, (first, second), strict=True))
    ahead, found = judges.best
    assert (ahead, found.built.cost.peak_bytes) == (ways[0], 6)
    assert judges.best_s == 1.0
