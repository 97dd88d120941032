"""Which blocks may move, by arithmetic over all blocks; and a model of small blocks only, trained in half of what it takes."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.core.plan import CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.devices.binding import install
from memfit.planner.search.candidates import movable_blocks, movable_sets
from memfit.step.segment_facts import KnownFacts
from unit.profiles import gpt_profile

KIB, MIB = 1 << 10, 1 << 20


def _profile(sizes: list[int]) -> Profile:
    blocks = [SimpleNamespace(name=f"b{i}", weight_bytes=size) for i, size in enumerate(sizes)]
    return cast("Profile", SimpleNamespace(blocks=blocks))


@given(sizes=st.lists(st.integers(0, 64).map(lambda n: n * n * 512), min_size=1, max_size=300))
def test_what_never_moves_is_little_beside_the_largest_block(sizes: list[int]) -> None:
    moves = movable_blocks(_profile(sizes))
    by_name = {f"b{i}": size for i, size in enumerate(sizes)}
    stay = [size for name, size in by_name.items() if name not in moves]
    assert all(size < MIB for size in stay)
    # one more size of blocks would be too many, but for pages
    assert sum(size for size in stay if size >= 16 * KIB) <= max(MIB, max(sizes) // 4)
    assert not {by_name[name] for name in moves} & set(stay)
    assert all(size >= 16 * KIB for name, size in by_name.items() if name in moves)
    if sum(size for size in sizes if size < MIB) <= MIB:
        assert moves == {name for name, size in by_name.items() if size >= MIB}


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([512 * KIB], []),
        ([512 * KIB] * 2, []),
        ([512 * KIB] * 3, [3]),
        ([3 * MIB, *[512 * KIB] * 2], [1]),
        ([3 * MIB, *[512 * KIB] * 3], [1, 4]),
        ([16 * MIB, *[512 * KIB] * 8], [1]),
        ([8 * KIB] * 1000, []),
    ],
)
def test_large_ones_move_alone_or_with_small_ones(sizes: list[int], counts: list[int]) -> None:
    assert [len(names) for names in movable_sets(_profile(sizes))] == counts


def test_a_model_of_small_blocks_trains_in_half_of_what_it_takes(tmp_path: Path) -> None:
    """40 layers of 64 KiB, each too small to move by itself."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(40)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return (model(rows) - rows).square().mean()

    rows = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))

    def trained_plainly() -> tuple[nn.Module, list[float]]:
        plain, optimizer = made()
        losses: list[float] = []
        for _ in range(2):
            optimizer.zero_grad()
            found = loss(plain, rows)
            found.backward()
            optimizer.step()
            losses.append(found.item())
        return plain, losses

    plain, expected = trained_plainly()
    weights = sum(p.nbytes for p in plain.parameters())
    gc.collect()
    install().trim()
    model, own = made()
    asked: dict[str, Any] = {"emulate_device": True, "directory": tmp_path, "numerics": "exact"}
    # plain training holds weights, gradients and two states of each
    others = install().stats().mapped_bytes - weights
    with memfit.fit(model, own, loss, rows, limit=others + 2 * weights, **asked) as job:
        assert [job.step(rows).loss for _ in range(2)] == expected
        assert job.proof().measured_peak_bytes <= others + 2 * weights
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_search_that_is_held_to_a_limit_keeps_facts_of_few_plans() -> None:
    profile = gpt_profile(layers=6)
    known = KnownFacts(40)
    trace = next(iter(profile.traces.values()))
    found = []
    for count in range(1, 7):
        calls = (*[CallPlan(saved=Saved.RECOMPUTE)] * count, *[CallPlan()] * (len(trace.calls) - count))
        plan = Plan(calls=calls)
        found.append((plan, known.segments(trace, plan, known.shape(plan, profile), profile)))
    latest, facts = found[-1]
    assert known.segments(trace, latest, known.shape(latest, profile), profile) is facts
    first = found[0][0]
    assert known.segments(trace, first, known.shape(first, profile), profile) is not found[0][1]
    everything = KnownFacts()
    again = [everything.segments(trace, plan, everything.shape(plan, profile), profile) for plan, _ in found * 2]
    assert all(one is other for one, other in zip(again[:6], again[6:], strict=True))
