"""Encoded optimizer states: nearest levels by exhaustive search, the bound that `memfit formats` shows, round trips, the noise of stochastic rounding."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memfit.core.format_catalog import BlockFormat, find_format
from memfit.core.storage_formats import StateFormat, StateMoment, records_of
from memfit.homes.state_codecs import StateCodec, codec_of
from memfit.tensors.noise import RoundingNoise, round_stochastically

ENCODED = [f for f in StateFormat if f is not StateFormat.GIVEN]
SCALED = [f for f in ENCODED if f is not StateFormat.BF16]
BOTH = list(itertools.product(ENCODED, StateMoment))
SCALED_BOTH = list(itertools.product(SCALED, StateMoment))
TABLES = {
    (StateFormat.INT8, StateMoment.FIRST): "dynamic8",
    (StateFormat.INT8, StateMoment.SECOND): "dynamic8-unsigned",
    (StateFormat.INT4, StateMoment.FIRST): "dynamic4",
    (StateFormat.INT4, StateMoment.SECOND): "linear4-unsigned",
    (StateFormat.FP8, StateMoment.FIRST): "fp8-block",
    (StateFormat.FP8, StateMoment.SECOND): "fp8-block",
}


def table_of(chosen: StateFormat, moment: StateMoment) -> BlockFormat:
    found = find_format(TABLES[chosen, moment])
    assert isinstance(found, BlockFormat)
    return found


def encode(codec: StateCodec, values: Tensor, *, seed: int = 0) -> Tensor:
    into = torch.full((codec.records.size(values.numel()),), 0xAB, dtype=torch.uint8)
    codec.encode(values, into, RoundingNoise(seed=seed), "state", 0)
    return into


def scales_of(values: Tensor, block: int) -> Tensor:
    """The largest magnitude of each scale block, by value."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)
    return padded.abs().amax(1).repeat_interleave(block)[: len(values)]


@pytest.mark.parametrize(("chosen", "moment"), SCALED_BOTH)
def test_the_level_is_the_nearest_for_every_bf16_value_and_its_neighbours(
    chosen: StateFormat, moment: StateMoment
) -> None:
    # All upper halves of fp32 values up to 1 in magnitude, each with the first, a middle and the last of its lower halves: all bins, from end to end.
    upper = torch.arange(0, 0x3F80, dtype=torch.int32) << 16
    bits = torch.cat([upper, upper | 0x8000, upper | 0xFFFF])
    values = bits.view(torch.float32)
    if moment is StateMoment.FIRST:
        values = torch.cat([values, -values])
    codec, table = codec_of(chosen, moment), table_of(chosen, moment)
    # One value of each record is 1, so that every scale is.
    rows = values.view(-1, 1).expand(-1, 1)
    per = codec.records.elements - 1
    rows = torch.nn.functional.pad(rows.reshape(-1), (0, -len(values) % per)).view(-1, per)
    stored = encode(codec, torch.cat([torch.ones(len(rows), 1), rows], 1).reshape(-1))
    found = codec.decode(stored, rows.numel() + len(rows)).view(len(rows), -1)
    assert bool((found[:, 0] == 1).all())
    found = found[:, 1:].reshape(-1)[: len(values)].double()
    levels = torch.tensor(
        [float(level) for level in table.levels if moment is StateMoment.FIRST or level >= 0], dtype=torch.float64
    )
    exact = values.double()
    places = torch.searchsorted(levels, exact).clamp(1, len(levels) - 1)
    best = torch.minimum((exact - levels[places - 1]).abs(), (exact - levels[places]).abs())
    lifted = (moment is StateMoment.SECOND) & (exact > 0) & (exact < levels[levels > 0][0])
    assert torch.equal((found - exact).abs()[~lifted], best[~lifted])
    assert bool((found[lifted] == levels[levels > 0][0]).all())


@pytest.mark.parametrize(("chosen", "moment"), SCALED_BOTH)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 700), spread=st.floats(0, 6), magnitude=st.floats(-30, 30))
def test_no_value_moves_by_more_than_the_bound_that_formats_show(
    chosen: StateFormat, moment: StateMoment, seed: int, count: int, spread: float, magnitude: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    values *= torch.exp(spread * torch.randn(count, generator=generator)) * 10.0**magnitude
    values = values.abs() if moment is StateMoment.SECOND else values
    codec, table = codec_of(chosen, moment), table_of(chosen, moment)
    found = codec.decode(encode(codec, values), count)
    bound = float(table.block_error_bound()) * scales_of(values, table.block_size).double()
    # Division by the scale and multiplication with it are roundings of fp32, of at most 2^-24 of the scale each.
    assert bool(
        ((found.double() - values.double()).abs() <= bound + 2**-23 * scales_of(values, table.block_size)).all()
    )
    if moment is StateMoment.SECOND:
        assert not bool(((found == 0) & (values > 0)).any())
        assert bool((found >= 0).all())


@pytest.mark.parametrize(("chosen", "moment"), BOTH)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 700), magnitude=st.floats(-30, 30))
def test_encoding_what_was_decoded_gives_the_same_bytes(
    chosen: StateFormat, moment: StateMoment, seed: int, count: int, magnitude: float
) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    values = values.abs() if moment is StateMoment.SECOND else values
    codec = codec_of(chosen, moment)
    stored = encode(codec, values)
    assert torch.equal(encode(codec, codec.decode(stored, count), seed=1), stored)


@pytest.mark.parametrize(("chosen", "moment"), SCALED_BOTH)
def test_every_code_comes_back(chosen: StateFormat, moment: StateMoment) -> None:
    codec, table = codec_of(chosen, moment), table_of(chosen, moment)
    levels = [float(v) for v in table.levels if moment is StateMoment.FIRST or v >= 0]
    values = torch.tensor([1.0, *levels])
    assert torch.equal(codec.decode(encode(codec, values), len(values)), values)


@pytest.mark.parametrize(("chosen", "moment"), BOTH)
def test_records_take_the_bytes_that_are_planned_and_lie_apart(chosen: StateFormat, moment: StateMoment) -> None:
    codec, records = codec_of(chosen, moment), records_of(chosen)
    values = torch.rand(4 * records.elements + 1) + 0.1
    whole = encode(codec, values)
    assert whole.numel() == records.size(values.numel())
    first = 2 * records.elements
    piece = torch.empty(records.size(values.numel() - first), dtype=torch.uint8)
    codec.encode(values[first:], piece, RoundingNoise(seed=0), "state", first)
    assert torch.equal(whole[records.offset(first) :], piece)


@pytest.mark.parametrize(("chosen", "moment"), BOTH)
def test_zeros_stay_and_what_is_no_number_is_not_hidden(chosen: StateFormat, moment: StateMoment) -> None:
    codec = codec_of(chosen, moment)
    assert torch.equal(codec.decode(encode(codec, torch.zeros(300)), 300), torch.zeros(300))
    for strange in (float("nan"), float("inf")):
        values = torch.rand(300)
        values[7] = strange
        assert not bool(codec.decode(encode(codec, values), 300)[7].isfinite())


def test_a_block_of_one_sign_keeps_its_largest_value_exactly() -> None:
    values = -torch.rand(256)
    found = codec_of(StateFormat.INT8, StateMoment.FIRST)
    assert found.decode(encode(found, values), 256).min() == values.min()


# --- noise ----------------------------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**40),
    first=st.integers(0, 2**34),
    count=st.integers(1, 300),
    cut=st.integers(0, 300),
)
def test_noise_is_the_same_however_it_is_cut(seed: int, step: int, first: int, count: int, cut: int) -> None:
    noise = RoundingNoise(seed=seed, step=step)
    cpu = torch.device("cpu")
    whole = noise.bits("name", first, count, cpu)
    cut = min(cut, count)
    parts = [noise.bits("name", first, cut, cpu), noise.bits("name", first + cut, count - cut, cpu)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.dtype == torch.int32 and int(whole.min()) >= 0 and int(whole.max()) < 1 << 16


def test_noise_is_uniform_and_its_neighbours_steps_and_names_are_independent() -> None:
    count = 1 << 18
    cpu = torch.device("cpu")
    bits = RoundingNoise(seed=1, step=5).bits("a", 0, count, cpu)
    # Chi-square of 256 cells, for the upper and the lower byte: mean 255, standard deviation 22.6; 5 of them.
    for byte in (bits >> 8, bits & 0xFF):
        expected = count / 256
        chi = ((byte.bincount(minlength=256) - expected) ** 2 / expected).sum()
        assert 142 < chi < 368
    centred = (bits.double() - 32767.5) / 18918.6  # standard deviation of a uniform number below 2^16
    others = {
        "next element": centred.roll(1),
        "pair": centred.roll(2),
        "next step": (RoundingNoise(seed=1, step=6).bits("a", 0, count, cpu).double() - 32767.5) / 18918.6,
        "seed": (RoundingNoise(seed=2, step=5).bits("a", 0, count, cpu).double() - 32767.5) / 18918.6,
        "name": (RoundingNoise(seed=1, step=5).bits("b", 0, count, cpu).double() - 32767.5) / 18918.6,
    }
    for what, other in others.items():
        assert abs(float((centred * other).mean())) < 5 / count**0.5, what


def test_stochastic_rounding_has_the_right_mean_and_goes_to_neighbours_only() -> None:
    values = torch.tensor([1.0, 1.001, 1.0039, -3.1415927, 1e-39, 2.5e38, 0.1])
    trials = 20_000
    noise = RoundingNoise(seed=3)
    bits = noise.bits("weight", 0, trials * len(values), torch.device("cpu"))
    rounded = round_stochastically(values.repeat(trials), bits).double().view(trials, -1)
    exact = values.double()
    below = (values.view(torch.int32) & -65536).view(torch.float32).double()
    above = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32).double()
    assert bool(((rounded == below) | (rounded == above)).all())
    fraction = (exact - below) / (above - below)
    deviation = (fraction * (1 - fraction) / trials).sqrt() * (above - below).abs()
    assert bool(((rounded.mean(0) - exact).abs() <= 5 * deviation + 1e-12 * exact.abs()).all())


def test_values_that_bf16_has_and_special_ones_stay() -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32)
    values = (codes << 16).view(torch.float32)
    strange = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    values = torch.cat([values, strange])
    rounded = round_stochastically(values, torch.full((len(values),), 0xFFFF, dtype=torch.int32))
    is_nan = values.isnan()
    assert torch.equal(rounded.isnan(), is_nan)
    assert torch.equal(rounded[~is_nan].view(torch.int16), values[~is_nan].to(torch.bfloat16).view(torch.int16))


def test_noise_leaves_the_generators_alone_and_goes_on_from_its_state() -> None:
    before = torch.get_rng_state()
    noise = RoundingNoise(seed=9, step=4)
    found = noise.bits("a", 0, 100, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    other = RoundingNoise(seed=0)
    other.load_state_dict(noise.state_dict())
    assert torch.equal(other.bits("a", 0, 100, torch.device("cpu")), found)
