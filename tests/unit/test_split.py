"""The bits of split masters: weight, difference and mark give every fp32 number back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.layout import split_layout
from memfit.homes.masters import join, split

# Around zero, around a tie, and at both ends of what the lower half of a word can be.
LOWER_HALVES = (0, 1, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF)


def _numbers(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int32).view(torch.float32)


def _check(master: torch.Tensor) -> None:
    difference, marks = split(master)
    is_nan = master.isnan()
    again = torch.empty_like(master)
    join(master.to(torch.bfloat16), difference, marks, again)
    assert torch.equal(again.isnan(), is_nan)
    assert torch.equal(again.view(torch.int32)[~is_nan], master.view(torch.int32)[~is_nan])


@pytest.mark.parametrize("skipped", [0, 1, 7])
def test_every_upper_half_comes_back_with_every_kind_of_lower_half(skipped: int) -> None:
    """All 65,536 upper halves: zeros, subnormals, normals, infinities and NaNs of both signs, odd and even, at every power of two."""
    upper = torch.arange(1 << 16, dtype=torch.int64).unsqueeze(1) << 16
    _check(_numbers((upper | torch.tensor(LOWER_HALVES)).reshape(-1))[skipped:].clone())


@pytest.mark.parametrize("upper", [0x0000, 0x0001, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0, 0x8000, 0xFF7F])
def test_every_lower_half_comes_back(upper: int) -> None:
    _check(_numbers((upper << 16) | torch.arange(1 << 16, dtype=torch.int64)))


def test_a_tie_that_was_rounded_down_is_the_only_thing_that_needs_a_mark() -> None:
    """1 + 2**-8 lies half-way between 1 and the next bf16 and goes down; 1 + 3 * 2**-8 goes up."""
    down, up = 1 + 2**-8, 1 + 3 * 2**-8
    master = torch.tensor([up, 1.0, down, 1 + 2**-9, -down, up])
    difference, marks = split(master)
    assert master.to(torch.bfloat16).tolist() == [1 + 2**-6, 1.0, 1.0, 1.0, -1.0, 1 + 2**-6]
    assert difference.tolist() == [-(2**15), 0, -(2**15), 2**14, -(2**15), -(2**15)]
    assert marks.tolist() == [0b010100]


def test_sixteen_bits_would_not_do() -> None:
    """65,537 masters round to 1.0: by counting, one of them needs more than 16 bits beside the weight."""
    bits = torch.arange(0x3F800000 - 70_000, 0x3F800000 + 70_000, dtype=torch.int64)
    assert int((_numbers(bits).to(torch.bfloat16) == 1.0).sum()) == (1 << 16) + 1


@given(
    words=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=1100),
    ties=st.lists(st.integers(0, 1099), max_size=40),
    first=st.integers(0, 1099),
    count=st.integers(1, 1100),
)
def test_any_part_comes_back_from_the_bytes_that_cover_it(
    words: list[int], ties: list[int], first: int, count: int
) -> None:
    numbers = torch.tensor(words, dtype=torch.int64)
    for place in ties:
        numbers[place % len(words)] = (numbers[place % len(words)] & ~0x1FFFF) | 0x8000
    master = _numbers(numbers)
    weight, (difference, marks) = master.to(torch.bfloat16), split(master)
    first %= len(words)
    end = min(len(words), first + count)
    part = torch.empty(end - first)
    join(weight[first:end], difference[first:end], marks[first // 8 : -(-end // 8)].contiguous(), part, skip=first % 8)
    wanted = master[first:end]
    is_nan = wanted.isnan()
    assert torch.equal(part.isnan(), is_nan)
    assert torch.equal(part.view(torch.int32)[~is_nan], wanted.view(torch.int32)[~is_nan])


def test_what_rests_is_seventeen_bits_a_parameter_each_part_on_a_page() -> None:
    page, parameters = 4096, 1 << 20
    places, nbytes = split_layout([(2 * parameters, 4 * parameters), (16, 16), (6, 12)])
    assert places[0] == (0, 2 * parameters)
    assert places[1][0] == 2 * parameters + parameters // 8
    assert nbytes == 2 * parameters + parameters // 8 + page + 2 * page
