"""Large draws that are skipped while a model is built: the generator stands where drawing leaves it, and the weights are those of plain building."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memfit.files import recording
from memfit.files import recording as draws
from memfit.files.origin import build_empty, find_origins
from memfit.tensors import random_streams

LARGE = 1 << 19


def state_after(words: int, before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States of a generator after `before` words, and after so many more: a number in fp32 takes one."""
    generator = torch.Generator().manual_seed(7)
    torch.empty(before).uniform_(generator=generator)
    state = generator.get_state()
    torch.empty(words).uniform_(generator=generator)
    return state, generator.get_state()


@given(words=st.integers(0, 1 << 18), before=st.integers(0, 2000))
def test_a_skipped_state_is_that_after_drawing(words: int, before: int) -> None:
    state, after = state_after(words, before)
    assert torch.equal(random_streams.skipped(state, words), after)


def test_blocks_that_begin_and_end_at_every_edge_are_skipped_exactly() -> None:
    for before in (0, 1, 623, 624, 625, 1248):  # 0: a seed's own words, before the first block is made
        for words in (0, 1, 622, 623, 624, 625, 160 * 624, 161 * 624 - 1, 161 * 624, 161 * 624 + 1, 162 * 624 + 1):
            state, after = state_after(words, before)
            assert torch.equal(random_streams.skipped(state, words), after), (before, words)


def test_a_skip_by_far_more_than_can_be_drawn_is_the_sum_of_its_parts() -> None:
    state, _ = state_after(0, 10)
    at_once = random_streams.skipped(state, (1 << 45) + 12345)
    in_parts = random_streams.skipped(random_streams.skipped(random_streams.skipped(state, 1 << 44), 12345), 1 << 44)
    assert torch.equal(at_once, in_parts)


def test_the_polynomial_is_the_one_of_the_generators_numbers() -> None:
    """Finds the shortest recurrence of a bit of NumPy's MT19937 (Berlekamp and Massey)."""
    degree = 19937
    words = np.random.RandomState(5).randint(0, 1 << 32, size=2 * degree + 64, dtype=np.uint64)
    found, last, length, gap, window = 1, 1, 0, 1, 0
    for n, bit in enumerate((words >> np.uint64(7)) & np.uint64(1)):
        window = ((window << 1) | int(bit)) & ((1 << (degree + 2)) - 1)
        if not (found & window).bit_count() & 1:
            gap += 1
        elif 2 * length <= n:
            found, last, length, gap = found ^ (last << gap), found, n + 1 - length, 1
        else:
            found, gap = found ^ (last << gap), gap + 1
    exponents = [length - place for place in range(length + 1) if found >> place & 1]
    assert length == degree
    assert exponents == [degree, *random_streams._EXPONENTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [0, 1, 15, 17])
def test_draws_of_every_dtype_and_size_are_skipped(dtype: torch.dtype, odd: int) -> None:
    aten: Any = torch.ops.aten
    shape = (LARGE + odd,)
    fills = [
        (aten.normal_.default, (torch.empty(shape, dtype=dtype), 0.0, 0.02), {}),
        (aten.normal_.default, (torch.empty(shape, dtype=dtype), 1.0, 0.0), {}),
        (aten.uniform_.default, (torch.empty(shape, dtype=dtype), -0.1, 0.3), {}),
        (aten.randn.default, (shape,), {"dtype": dtype}),
        (aten.rand.default, (shape,), {"dtype": dtype}),
    ]
    generator, twin = torch.Generator(), torch.Generator()
    for seed, (func, args, kwargs) in enumerate(fills):
        for one in (generator, twin):
            torch.empty(31 * seed + odd).uniform_(generator=one.manual_seed(seed))
        func.overloadpacket(*args, **kwargs, generator=generator)
        assert draws.skip_draw(func, args, kwargs, twin), func
        assert torch.equal(generator.get_state(), twin.get_state()), func


def test_other_draws_are_left_to_be_drawn() -> None:
    aten: Any = torch.ops.aten
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    scattered = torch.empty(LARGE, 2)[:, 0]
    for func, args in (
        (aten.normal_.default, (scattered, 0.0, 1.0)),
        (aten.normal_.default, (torch.empty(LARGE - 1), 0.0, 1.0)),
        (aten.bernoulli_.float, (torch.empty(LARGE), 0.5)),
        (aten.random_.default, (torch.empty(LARGE),)),
    ):
        assert not draws.skip_draw(func, args, {}, generator)
    assert torch.equal(generator.get_state(), before)


def test_a_build_of_torch_that_follows_no_known_rule_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_RULES", (lambda elements: elements + 1,))
    draws._rule.cache_clear()
    try:
        generator = torch.Generator().manual_seed(1)
        assert not draws.skip_draw(torch.ops.aten.normal_.default, (torch.empty(LARGE), 0.0, 1.0), {}, generator)
    finally:
        draws._rule.cache_clear()


class Wide(nn.Module):
    """Large weights by initialisers that draw, in dtypes and sizes that divide by nothing, with small draws between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 513)
        self.normal = nn.Parameter(torch.empty(LARGE + 7))
        nn.init.normal_(self.normal, 0.1, 0.02)
        self.lower = nn.Linear(1024, 515, dtype=torch.bfloat16)
        nn.init.xavier_normal_(self.lower.weight)
        self.precise = nn.Parameter(torch.rand(3, 174763, dtype=torch.float64))
        self.kaiming = nn.Conv2d(64, 1025, 3)
        nn.init.kaiming_normal_(self.kaiming.weight)
        self.embedding = nn.Embedding(1031, 512, padding_idx=5)
        self.drawn = nn.Parameter(torch.randn(1024, 512) * 0.5)
        self.clipped = nn.Parameter(nn.init.trunc_normal_(torch.empty(LARGE + 3)))
        self.parts = nn.Parameter(torch.zeros(3, LARGE + 8))
        for part in self.parts.data:
            part.normal_()
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.empty(1024, 700).uniform_(-1, 1, generator=own))
        self.dropped = nn.Parameter(torch.empty(LARGE).bernoulli_(0.3))
        self.last = nn.Linear(9, 5)
        self.register_buffer("noise", torch.randn(20))


def wide() -> Wide:
    torch.manual_seed(11)
    return Wide()


@pytest.mark.parametrize("bring", [list, reversed], ids=["in order", "backwards"])
def test_a_model_of_large_weights_is_that_of_plain_building(
    bring: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped, skip_draw = list[bool](), draws.skip_draw

    def noted(*args: Any) -> bool:
        skipped.append(skip_draw(*args))
        return skipped[-1]

    plain = wide()
    state, later = torch.get_rng_state(), torch.randn(100)
    monkeypatch.setattr(recording, "skip_draw", noted)
    ours: Any = build_empty(wide, draws=True)
    assert skipped.count(True) >= 14
    assert skipped.count(False) == 1, "of these only Bernoulli's numbers are drawn"
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.randn(100), later)
    (origin,) = find_origins(ours)
    torch.manual_seed(99)  # what the user draws before the weights are made changes none of them
    for parameter in bring(list(ours.parameters())):
        origin.bring([parameter])
    for name, tensor in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
