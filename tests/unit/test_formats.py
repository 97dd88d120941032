"""Number formats against torch's casts, ml_dtypes' casts, the machine's own bit patterns and exact fractions.

Formats with at most 2^16 codes are looked at code by code, and at and beside every middle between two neighbours.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from memfit.cli import app
from memfit.core.errors import UsageError
from memfit.core.format_catalog import FORMATS, BlockFormat, decode, encode, find_format
from memfit.core.number_formats import (
    NEAREST_EVEN,
    TOWARD_ZERO,
    FixedPoint,
    FloatFormat,
    Overflow,
    SignMagnitude,
    Specials,
    Stochastic,
    find_rounding,
    read_code,
    read_number,
)

SMALL_FLOATS = {
    "fp16": (np.float16, torch.float16),
    "bf16": (ml_dtypes.bfloat16, torch.bfloat16),
    "fp8-e4m3": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "fp8-e5m2": (ml_dtypes.float8_e5m2, torch.float8_e5m2),
    "fp4": (ml_dtypes.float4_e2m1fn, None),
}
TORCH_FLOATS = {"fp64": torch.float64, "fp32": torch.float32} | {
    name: dtype for name, (_, dtype) in SMALL_FLOATS.items() if dtype is not None
}
TORCH_SATURATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
BLOCK_FORMATS = [one for one in FORMATS.values() if isinstance(one, BlockFormat)]


def float_format(name: str) -> FloatFormat:
    found = find_format(name)
    assert isinstance(found, FloatFormat)
    return found


def block_format(name: str) -> BlockFormat:
    found = find_format(name)
    assert isinstance(found, BlockFormat)
    return found


def same(value: Any, other: Any) -> bool:
    """Equal, zeros by their sign too, NaN to NaN."""
    value, other = float(value), float(other)
    return (value != value and other != other) or (
        value == other and math.copysign(1, value) == math.copysign(1, other)
    )


@cache
def values_of_codes(name: str) -> list[float]:
    """What numpy or ml_dtypes reads in every code."""
    bits = find_format(name).bits
    codes = np.arange(1 << bits, dtype=np.uint16 if bits > 8 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return codes.view(SMALL_FLOATS[name][0]).astype(np.float64).tolist()


@pytest.fixture(autouse=True, scope="module")
def values_are_dropped() -> Iterator[None]:
    """Each trace looks through what cached functions keep: 130,000 numbers would slow down all tests that come later in the process."""
    yield
    values_of_codes.cache_clear()


def cast_by_ml_dtypes(name: str, values: list[float]) -> list[int]:
    with np.errstate(all="ignore"):
        cast = np.array(values, dtype=np.float32).astype(SMALL_FLOATS[name][0])
    return cast.view(np.uint16 if cast.itemsize == 2 else np.uint8).tolist()


def cast_by_torch(name: str, values: list[float]) -> list[int]:
    cast = torch.tensor(values, dtype=torch.float32).to(TORCH_FLOATS[name])
    return cast.view(torch.uint16 if cast.itemsize == 2 else torch.uint8).tolist()


def hard_values(name: str) -> list[float]:
    """Every middle between two positive neighbours, the fp32 numbers beside it, what overflows, and some negatives; all are fp32 numbers."""
    positive = sorted({abs(value) for value in values_of_codes(name) if math.isfinite(value)})
    largest, its_gap = positive[-1], positive[-1] - positive[-2]
    middles = [(low + high) / 2 for low, high in pairwise([*positive, largest + its_gap])]
    infinity = np.float32(math.inf)
    beside = [np.nextafter(np.array(middles, dtype=np.float32), side).tolist() for side in (-infinity, infinity)]
    found = [*middles, *beside[0], *beside[1], largest + its_gap, 3e38, math.inf]
    return [*found, *(-value for value in found[:: 1 + len(found) // 4096]), -middles[-1], -math.inf, -0.0]


# --- every code of the small floats ---


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_code_of_a_small_float_is_the_value_that_its_own_library_reads(name: str) -> None:
    one = find_format(name)
    values = values_of_codes(name)
    assert len(values) == 1 << one.bits
    for code, value in enumerate(values):
        assert same(one.decode(code), value), (code, value)
        if not math.isnan(value):
            assert one.encode(value) == one.encode(value, TOWARD_ZERO) == code


@pytest.mark.parametrize("name", [name for name, (_, dtype) in SMALL_FLOATS.items() if dtype is not None])
def test_every_code_of_a_small_float_is_the_value_that_torch_reads(name: str) -> None:
    one = find_format(name)
    codes = torch.arange(1 << one.bits, dtype=torch.int32).to(torch.uint16 if one.bits > 8 else torch.uint8)
    values = codes.view(TORCH_FLOATS[name]).double().tolist()
    assert all(same(one.decode(code), value) for code, value in enumerate(values))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_rounding_to_nearest_is_the_cast_of_both_libraries_at_and_beside_every_middle(name: str) -> None:
    values = hard_values(name)
    one = float_format(name)
    codes = [one.encode(value) for value in values]
    # fp8-e4m3 overflows to NaN in ml_dtypes, and in torch until 2.12.
    to_nan = dataclasses.replace(one, overflow=Overflow.NAN) if name == "fp8-e4m3" else one
    codes_with_nan = [to_nan.encode(value) for value in values] if to_nan != one else codes
    assert codes_with_nan == cast_by_ml_dtypes(name, values)
    if name in TORCH_FLOATS:
        assert (codes if TORCH_SATURATES else codes_with_nan) == cast_by_torch(name, values)


@pytest.mark.parametrize("name", ["fp8-e4m3", "fp8-e5m2"])
def test_all_of_fp16_goes_to_fp8_as_torch_sends_it(name: str) -> None:
    one = find_format(name)
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite() & (halves.abs() <= float(one.largest))]
    codes = halves.to(TORCH_FLOATS[name]).view(torch.uint8).tolist()
    assert [one.encode(value) for value in halves.tolist()] == codes


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_toward_zero_takes_the_neighbour_nearer_to_zero_and_never_overflows(name: str) -> None:
    one = float_format(name)
    values = [value for value in hard_values(name)[:: 1 + one.bits // 16] if math.isfinite(value)]
    positive = np.array(sorted({abs(value) for value in values_of_codes(name) if math.isfinite(value)}))
    expected = np.copysign(positive[np.searchsorted(positive, np.abs(values), side="right") - 1], values)
    chosen = [one.decode(one.encode(value, TOWARD_ZERO)) for value in values]
    assert all(same(value, wanted) for value, wanted in zip(chosen, expected.tolist(), strict=True))


def test_a_nan_is_a_nan_where_there_is_one() -> None:
    for name in FORMATS:
        one = find_format(name)
        if isinstance(one, FloatFormat) and one.specials is not Specials.NONE:
            assert math.isnan(one.decode(one.encode(math.nan)))
        else:
            with pytest.raises(UsageError, match=name):
                one.encode(math.nan)
    # The machine's own quiet NaNs.
    assert encode(math.nan, "fp32") == 0x7FC00000
    assert encode(math.nan, "fp16") == np.array(math.nan, dtype=np.float16).view(np.uint16)
    assert encode(math.nan, "fp8-e4m3") == cast_by_ml_dtypes("fp8-e4m3", [math.nan])[0]
    assert encode(math.nan, "fp8-e5m2") == cast_by_ml_dtypes("fp8-e5m2", [math.nan])[0]


# --- facts ---


@pytest.mark.parametrize("name", TORCH_FLOATS)
def test_facts_of_a_float_are_torchs(name: str) -> None:
    one = float_format(name)
    facts = torch.finfo(TORCH_FLOATS[name])
    assert one.bits == facts.bits
    assert (one.largest, one.lowest) == (Fraction(facts.max), Fraction(facts.min))
    assert one.smallest_normal == Fraction(facts.tiny) == Fraction(facts.smallest_normal)
    assert one.epsilon == Fraction(facts.eps) == 2 * one.unit_roundoff


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_facts_of_a_small_float_are_those_of_its_codes(name: str) -> None:
    one = float_format(name)
    finite = sorted(value for value in values_of_codes(name) if math.isfinite(value))
    assert (one.lowest, one.largest) == (finite[0], finite[-1])
    assert one.smallest_subnormal == min(value for value in finite if value > 0)
    assert one.epsilon == min(value for value in finite if value > 1) - 1
    assert one.smallest_normal == values_of_codes(name)[1 << one.mantissa_bits]
    ml_facts = ml_dtypes.finfo(SMALL_FLOATS[name][0])
    assert one.smallest_subnormal == Fraction(float(ml_facts.smallest_subnormal))
    assert (one.exponent_bits, one.mantissa_bits) == (int(ml_facts.iexp), int(ml_facts.nmant))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_the_gap_is_the_distance_of_the_neighbours_among_subnormals_too(name: str) -> None:
    one = float_format(name)
    positive = sorted({Fraction(abs(value)) for value in values_of_codes(name) if math.isfinite(value)})
    for low, high in list(pairwise(positive))[:: 1 + 16 * (one.bits // 16)]:
        assert one.gap((low + high) / 2) == one.gap(-low) == high - low
    assert one.gap(one.smallest_subnormal / 3) == one.smallest_subnormal


@pytest.mark.parametrize("one", BLOCK_FORMATS, ids=lambda one: one.name)
def test_the_gap_of_levels_is_their_distance(one: BlockFormat) -> None:
    assert [one.gap((low + high) / 2) for low, high in pairwise(one.levels)] == [
        high - low for low, high in pairwise(one.levels)
    ]
    assert one.gap(one.largest) == one.levels[-1] - one.levels[-2]
    assert one.gap(one.lowest) == one.levels[1] - one.levels[0]


def test_facts_of_fp32_and_tf32() -> None:
    fp32, tf32, fp16 = float_format("fp32"), float_format("tf32"), float_format("fp16")
    assert fp32.smallest_subnormal == Fraction(float(np.finfo(np.float32).smallest_subnormal))
    # tf32 has the range of fp32 and the precision of fp16.
    assert (tf32.bits, tf32.storage_bits) == (19, 32)
    assert tf32.smallest_normal == fp32.smallest_normal
    assert tf32.epsilon == fp16.epsilon


def test_the_unit_roundoff_bounds_the_relative_error_and_is_approached() -> None:
    for name in SMALL_FLOATS:
        one = float_format(name)
        values = hard_values(name)[:: 1 + one.bits // 16]
        normal = [Fraction(v) for v in values if one.smallest_normal <= abs(v) <= one.largest and 0.25 <= abs(v) <= 16]
        errors = [abs(Fraction(one.decode(one.encode(value))) - value) / abs(value) for value in normal]
        assert max(errors) < one.relative_error_bound() == one.unit_roundoff
        # Just above a power of two it is u / (1 + u).
        assert max(errors) == one.unit_roundoff / (1 + one.unit_roundoff)


# --- the worked example: bit patterns of fp32 ---

FP32_PATTERNS = [
    (0x00000001, 2.0**-149), (0x007FFFFF, 2.0**-126 - 2.0**-149), (0x00800000, 2.0**-126),
    (0x7F800000, math.inf), (0xFF800000, -math.inf), (0x7FC00000, math.nan), (0x80000000, -0.0),
]  # fmt: skip


@pytest.mark.parametrize(("code", "value"), FP32_PATTERNS)
def test_bit_patterns_of_fp32(code: int, value: float) -> None:
    assert same(decode(code, "fp32"), value)
    assert encode(value, "fp32") == code
    assert same(struct.unpack(">f", code.to_bytes(4, "big"))[0], value)


def test_ends_of_fp32s_subnormals_and_the_exponent_they_share() -> None:
    fp32 = float_format("fp32")
    assert fp32.smallest_exponent == -126
    assert fp32.smallest_subnormal == Fraction(decode(0x00000001, "fp32"))
    assert Fraction(decode(0x007FFFFF, "fp32")) == fp32.smallest_normal - fp32.smallest_subnormal
    assert Fraction(decode(0x00800000, "fp32")) == fp32.smallest_normal
    # One code lower, no jump: 0.mantissa times 2^-126, not 2^-127.
    assert fp32.split(0x007FFFFF) == ("0", "0" * 8, "1" * 23)


def test_ranges_of_integers() -> None:
    int8 = find_format("int8")
    assert (int8.lowest, int8.largest) == (-128, 127)
    for bits in (2, 3, 7, 16, 31, 64):
        one = find_format(f"int{bits}")
        assert (one.lowest, one.largest) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        signs = find_format(f"sm{bits}")
        assert (signs.lowest, signs.largest) == (-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)


def test_sign_magnitude_has_two_zeros_and_every_other_value_once() -> None:
    one = find_format("sm8")
    values = [one.decode(code) for code in range(256)]
    assert [code for code, value in enumerate(values) if value == 0] == [0x00, 0x80]
    assert sorted(set(values)) == list(range(-127, 128))
    assert [one.encode(value) for value in values] == list(range(256))
    assert same(values[0x80], -0.0)
    assert one.encode(Fraction(-1, 4)) == 0x80


# --- integers and fixed point ---


@pytest.mark.parametrize(("bits", "dtype"), [(8, np.int8), (16, np.int16)])
def test_every_code_of_an_integer_is_the_machines(bits: int, dtype: Any) -> None:
    one = find_format(f"int{bits}")
    values = np.arange(1 << bits, dtype=f"uint{bits}").view(dtype).tolist()
    assert [one.decode(code) for code in range(1 << bits)] == values
    assert [one.encode(value) for value in values] == list(range(1 << bits))


def test_every_code_of_int4_is_ml_dtypes() -> None:
    one = find_format("int4")
    values = [int(value) for value in np.arange(16).astype(ml_dtypes.int4)]
    assert [one.decode(code) for code in range(16)] == values


def test_integers_round_as_torch_does_and_saturate() -> None:
    one = find_format("int8")
    quarters = [k / 4 for k in range(-600, 601)]
    expected = torch.tensor(quarters, dtype=torch.float64).round().clamp(-128, 127).to(torch.int8)
    assert [one.decode(one.encode(value)) for value in quarters] == expected.tolist()
    truncated = torch.tensor(quarters, dtype=torch.float64).trunc().clamp(-128, 127)
    assert [one.decode(one.encode(value, TOWARD_ZERO)) for value in quarters] == truncated.tolist()


def test_fixed_point_is_an_integer_of_steps() -> None:
    one = find_format("q3.4")
    assert isinstance(one, FixedPoint)
    assert (one.bits, one.step, one.lowest, one.largest) == (8, Fraction(1, 16), -8, 8 - Fraction(1, 16))
    int8 = find_format("int8")
    for code in range(256):
        value = one.decode(code)
        assert value == Fraction(int8.decode(code)) / 16
        assert one.encode(value) == code
    assert one.split(one.encode(Fraction(-9, 4))) == ("1", "101", "1100")  # -2.25 = -8 + 5 + 0.75
    q15 = find_format("q0.15")
    assert (q15.largest, q15.lowest, q15.bits) == (1 - Fraction(1, 1 << 15), -1, 16)
    assert q15.split(0x4000) == ("0", "100000000000000")


# --- stochastic rounding ---


def test_stochastic_rounding_of_fp32_to_bf16_is_the_addition_of_random_low_bits() -> None:
    # Adding 16 random bits below bf16's last one and cutting carries exactly as often as the low bits are large.
    generator = random.Random(3)
    for _ in range(2000):
        word = generator.getrandbits(32)
        if (word >> 23) & 0xFF in (0xFE, 0xFF):  # may carry into infinity, or is special
            continue
        drawn = generator.getrandbits(16)
        value = struct.unpack(">f", word.to_bytes(4, "big"))[0]
        expected = (word + 0xFFFF - drawn) >> 16
        assert encode(value, "bf16", Stochastic([drawn / 65536])) == expected


@pytest.mark.parametrize("name", ["bf16", "fp8-e4m3", "fp4", "q3.4", "sm8", "int8"])
def test_the_mean_of_stochastic_rounding_is_the_value(name: str) -> None:
    one = find_format(name)
    for numerator in (-53, -16, 1, 5, 37, 64, 83):
        value = Fraction(numerator, 64)
        # Each sixty-fourth of a gap is met exactly by 2^12 equally spaced uniform numbers.
        rounding = Stochastic(k / 4096 for k in range(4096))
        mean = sum(Fraction(one.decode(one.encode(value, rounding))) for _ in range(4096)) / 4096
        assert mean == value


def test_stochastic_rounding_takes_one_number_a_value_and_says_when_there_is_none() -> None:
    rounding = Stochastic([0.1, 0.9, 0.0])
    one = find_format("int8")
    assert [one.decode(one.encode(value, rounding)) for value in (2.5, 2.5, 2)] == [3, 2, 2]
    with pytest.raises(UsageError, match="used up its uniform numbers"):
        one.encode(2.5, rounding)
    with pytest.raises(UsageError, match=r"in \[0, 1\), not 1.0"):
        one.encode(2.5, Stochastic([1.0]))


def test_equal_seeds_draw_equal_numbers() -> None:
    def draw(seed: int) -> list[int]:
        rounding = find_rounding("stochastic", seed=seed)
        return [encode(Fraction(1, 3), "int8", rounding) for _ in range(64)]

    assert draw(1) == draw(1) != draw(2)
    generator = random.Random(1)
    assert draw(1) == [int(generator.random() < 1 / 3) for _ in range(64)]


def test_stochastic_rounding_overflows_only_when_it_rounds_away() -> None:
    value = 65504 + 8  # a quarter of the gap above the largest fp16
    assert decode(encode(value, "fp16", Stochastic([0.25])), "fp16") == 65504
    assert decode(encode(value, "fp16", Stochastic([0.2])), "fp16") == math.inf


# --- block-wise formats ---


def test_nf4_is_made_of_quantiles_of_the_normal_distribution() -> None:
    # QLoRA, section 3: eight steps above zero, seven below, the outermost quantile halfway between 1/30 and 1/32 from the end.
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(outermost + (0.5 - outermost) * k / 8) for k in range(8)]
    below = [-quantile(outermost + (0.5 - outermost) * k / 7) for k in range(7)]
    expected = [value / above[0] for value in sorted([*above, 0.0, *below])]
    levels = [float(level) for level in block_format("nf4").levels]
    assert levels == pytest.approx(expected, abs=1e-6)
    assert all(struct.unpack("f", struct.pack("f", level))[0] == level for level in levels)


@pytest.mark.parametrize(("name", "signed"), [("dynamic8", True), ("dynamic8-unsigned", False)])
def test_the_dynamic_map_is_middles_of_equal_parts_of_decades(name: str, signed: bool) -> None:
    # Built in fp32 tensors, as the 8-bit optimizers do: a linspace a decade, and the means of its neighbours.
    parts: list[torch.Tensor] = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, (2**decade if signed else 2 ** (decade + 1)) + 1) * 10.0 ** (decade - 6)
        middles = (edges[:-1] + edges[1:]) / 2
        parts += [middles, -middles] if signed else [middles]
    expected = torch.cat(parts).sort().values
    one = block_format(name)
    levels = torch.tensor([float(level) for level in one.levels])
    assert levels.numel() == 256 == 1 << one.bits
    torch.testing.assert_close(levels, expected, rtol=4 * 2**-23, atol=0)
    assert all(float(level) == value for level, value in zip(one.levels, levels.tolist(), strict=True))  # fp32 numbers
    assert (float(one.largest), float(one.lowest)) == (1.0, pytest.approx(-(1 - 0.9 / 128)) if signed else 0.0)


@pytest.mark.parametrize("one", BLOCK_FORMATS, ids=lambda one: one.name)
def test_every_code_of_a_block_format_is_a_level_and_back(one: BlockFormat) -> None:
    for rounding in (NEAREST_EVEN, TOWARD_ZERO, Stochastic(random.Random(0))):  # exact values stay, whatever the rule
        assert [one.encode(one.decode(code), rounding) for code in one.codes] == list(one.codes)
    assert [one.decode(code) for code in one.codes] == list(one.levels)
    for code in set(range(1 << one.bits)) - set(one.codes):
        with pytest.raises(UsageError, match="stands for nothing"):
            one.decode(code)


@pytest.mark.parametrize("one", BLOCK_FORMATS, ids=lambda one: one.name)
def test_no_level_is_nearer_than_the_one_chosen_for_any_fp16_number(one: BlockFormat) -> None:
    halves = torch.arange(0, 1 << 16, 5, dtype=torch.int32).to(torch.uint16).view(torch.float16).double()
    halves = halves[(halves.abs() <= 1) & (halves >= float(one.lowest))]
    # Differences of these fp16 numbers and fp32 levels are exact in doubles; thirds and sevenths are met to 2^-53.
    levels = torch.tensor([float(level) for level in one.levels], dtype=torch.float64)
    nearest = (halves[:, None] - levels).abs().amin(dim=1)
    chosen = torch.tensor([float(one.decode(one.encode(value))) for value in halves.tolist()], dtype=torch.float64)
    torch.testing.assert_close((halves - chosen).abs(), nearest, rtol=0, atol=2**-50)


@pytest.mark.parametrize(("name", "largest"), [("int8-block", 127), ("int4-block", 7)])
def test_block_wise_integers_are_torchs_rounded_quotients(name: str, largest: int) -> None:
    # A scale of `largest` makes the quotient exact in torch: whole and half steps, ties included.
    halves = [k / 2 for k in range(-2 * largest, 2 * largest + 1)]
    (block,) = dataclasses.replace(block_format(name), block_size=len(halves)).encode_blocks(halves)
    assert block.scale == largest
    expected = torch.tensor(halves, dtype=torch.float64).round()
    assert list(block.decode()) == expected.tolist()
    codes = expected.to(torch.int8).numpy().view(np.uint8) & ((1 << block.format.bits) - 1)
    assert list(block.codes) == codes.tolist()


def test_the_bound_of_block_wise_rounding_is_reached_but_not_passed() -> None:
    for one in BLOCK_FORMATS:
        pairs = zip(one.levels, one.levels[1:], strict=False)
        low, high = max(pairs, key=lambda pair: pair[1] - pair[0])
        # Without a level for it, zero moves farthest of all: to the smallest level.
        farthest, bound = (Fraction(0), one.lowest) if one.lowest > 0 else ((low + high) / 2, one.largest_gap / 2)
        (block,) = one.encode_blocks([1, farthest, low])
        assert abs(block.decode()[1] - farthest) == block.error_bound() == bound
    # Known by arithmetic: half a step of absmax / 127 and absmax / 7, and NF4's widest gap, from -1.
    assert block_format("int8-block").block_error_bound() == Fraction(1, 254)
    assert block_format("int8-block").block_error_bound(TOWARD_ZERO) == Fraction(1, 127)
    assert block_format("int4-block").block_error_bound() == Fraction(1, 14)
    assert float(block_format("nf4").block_error_bound()) == pytest.approx((1 - 0.6961928009986877) / 2)
    # The dynamic map's upper decade: 0.9 cut in 64, or in 128 where no code is spent on signs.
    assert float(block_format("dynamic8").block_error_bound()) == pytest.approx(0.9 / 64 / 2, rel=1e-5)
    assert float(block_format("dynamic8-unsigned").block_error_bound()) == pytest.approx(0.9 / 128 / 2, rel=1e-4)
    assert float(block_format("dynamic4").block_error_bound()) == pytest.approx(0.9 / 4 / 2, rel=1e-5)
    assert block_format("linear4-unsigned").block_error_bound() == Fraction(1, 16)
    # Between 128 and 256, e4m3 values are 16 apart.
    assert block_format("fp8-block").block_error_bound() == Fraction(1, 32)


def test_a_dynamic_block_loses_its_lowest_end_within_the_bound() -> None:
    (block,) = block_format("dynamic8").encode_blocks([-2.0, 1.0])
    assert block.codes[0] == 0
    lost = block.decode()[0] + 2
    assert 0 < lost <= block.error_bound()


def test_blocks_are_cut_by_size_and_an_outlier_stays_in_its_own() -> None:
    one = dataclasses.replace(block_format("int8-block"), block_size=4)
    values = [1000.0, 1.0, 1.0, 1.0, 1.0, -0.5, 0.25, 0.125, 3.0]
    blocks = one.encode_blocks(values)
    assert [len(block.codes) for block in blocks] == [4, 4, 1]
    assert [block.scale for block in blocks] == [1000, 1, 3]
    assert blocks[0].decode()[1:] == (0, 0, 0)
    assert all(
        abs(back - Fraction(v)) <= Fraction(1, 254) for back, v in zip(blocks[1].decode(), values[4:8], strict=True)
    )
    assert one.encode_blocks([]) == ()
    assert block_format("int8-block").bits_per_value == 8 + Fraction(32, 256)
    assert block_format("nf4").bits_per_value == Fraction(9, 2)


def test_a_block_of_zeros_and_a_scale_that_is_no_fp32_number() -> None:
    one = block_format("int8-block")
    (zeros,) = one.encode_blocks([0.0, -0.0, 0])
    assert (zeros.scale, zeros.codes, zeros.decode()) == (0, (0, 0, 0), (0, 0, 0))
    (third,) = one.encode_blocks([Fraction(1, 3)])
    expected = np.float32(1 / 3)
    expected = expected if Fraction(float(expected)) >= Fraction(1, 3) else np.nextafter(expected, np.float32(1))
    assert third.scale == Fraction(float(expected)) > Fraction(1, 3)
    (tiny,) = one.encode_blocks([Fraction(1, 10**60)])
    assert tiny.scale == Fraction(1, 1 << 149)


# --- what is refused ---


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: find_format("bf61"), "no number format is called 'bf61': did you mean bf16?"),
        (lambda: find_format("int1"), "int1 has 1 bits: 2 to 64 are possible"),
        (lambda: find_format("q60.10"), "q60.10 has 71 bits"),
        (lambda: find_rounding("up"), "no rounding is called 'up'"),
        (lambda: encode(math.inf, "int8"), "int8 has no code for inf"),
        (lambda: encode(True, "int8"), "a value is an int, a float or a Fraction, not True"),
        (lambda: encode(-0.5, "dynamic8-unsigned"), "dynamic8-unsigned has no negative values"),
        (lambda: decode(256, "fp8-e4m3"), "a code of fp8-e4m3 is an integer of 8 bits, not 256"),
        (lambda: decode(-1, "int8"), "a code of int8 is an integer of 8 bits"),
        (lambda: find_format("fp16").error_bound(65505), "65505 is outside the range of fp16"),
        (lambda: find_format("int8").error_bound(math.nan), "nan is outside the range of int8"),
        (lambda: block_format("nf4").encode_blocks([1.0, math.nan]), "nf4 has no code for nan"),
        (lambda: block_format("nf4").encode_blocks([10**39]), "a value here is above the range of fp32"),
        (lambda: block_format("nf4").encode_blocks([10**400]), "above the range of fp32"),
        (lambda: dataclasses.replace(block_format("nf4"), block_size=0), "a block has at least one value, not 0"),
        (
            lambda: dataclasses.replace(float_format("fp4"), overflow=Overflow.INFINITY),
            "fp4 has no infinity to overflow to",
        ),
        (
            lambda: dataclasses.replace(float_format("fp4"), mantissa_bits=0),
            "at least 2 exponent bits and 1 mantissa bit",
        ),
        (lambda: FixedPoint(name="q0.0", description="", integer_bits=0), "needs a bit beside the sign"),
        (lambda: SignMagnitude(name="sm1", description="", magnitude_bits=0), "need a bit beside the sign"),
        (lambda: read_number("3,14"), "cannot read the number '3,14'"),
        (lambda: read_number("1/0"), "cannot read the number '1/0'"),
        (lambda: read_number("1e99999"), "has more than 4 digits"),
        (lambda: read_code("0x100", find_format("fp8-e5m2")), "'0x100' is more than the 8 bits of fp8-e5m2"),
        (lambda: read_code("012", find_format("fp8-e5m2")), "cannot read the bits '012'"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(action: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        action()
    assert message in str(caught.value)


def test_values_beyond_every_double_are_read_and_overflow() -> None:
    assert decode(encode(read_number("-1e400"), "fp32"), "fp32") == -math.inf
    assert decode(encode(10**400, "int8"), "int8") == 127
    assert decode(encode(Fraction(10) ** 400, "fp64"), "fp64") == math.inf
    assert not find_format("fp64").covers(10**400)


def test_numbers_and_codes_are_read_as_people_write_them() -> None:
    assert read_number("3.14159") == Fraction(314159, 100000)
    assert read_number("-2^-149") == -Fraction(1, 1 << 149)
    assert read_number("2**3") == 8
    assert read_number(" 1/3 ") == Fraction(1, 3)
    assert same(read_number("-0"), -0.0) and same(read_number("-0.0e5"), -0.0)
    assert read_number("-inf") == -math.inf and math.isnan(float(read_number("NaN")))
    bf16, fp32 = find_format("bf16"), find_format("fp32")
    for text in (
        "0x4049",
        "4049",
        "0b100000001001001",
        "0 10000000 1001001",
        "0|10000000|1001001",
        "0100_0000_0100_1001",
    ):
        assert read_code(text, bf16) == 0x4049
    assert read_code("00000001", fp32) == 1
    assert read_code("00000001", find_format("int8")) == 1


def test_torchs_names_are_understood() -> None:
    for name, dtype in TORCH_FLOATS.items():
        assert find_format(str(dtype)) is find_format(name)
    assert find_format(find_format("bf16")) is find_format("bf16")


def test_decimal_text_is_rounded_once() -> None:
    # Through a double this would be a tie and go to the even 1.0.
    text = "1.00390625000000000000000001"
    assert float(text) == 1.00390625
    assert decode(encode(float(text), "bf16"), "bf16") == 1.0
    assert decode(encode(read_number(text), "bf16"), "bf16") == 1.0078125


# --- the command ---


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["formats", *arguments])
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def row(text: str, first: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(first))


def test_the_table_has_every_format() -> None:
    text = run()
    assert {line.split()[0] for line in text.splitlines() if line} >= set(FORMATS)
    assert row(text, "bf16").split()[:4] == ["bf16", "16", "1/8/7", "3.389531e+38"]
    assert "2^-133" in row(text, "bf16") and "2^-8 (0.00391)" in row(text, "bf16")
    assert row(text, "fp8-e4m3").split()[3] == "448" and row(text, "fp8-e4m3").split()[-2:] == ["NaN", "largest"]
    assert row(text, "sm8").split()[2:7] == ["-127", "127", "1", "0.5", "2"]
    assert row(text, "nf4").split()[1:5] == ["4", "4.5", "64", "16"]


def test_json_has_the_figures_of_the_tables() -> None:
    tables = json.loads(run("--json"))
    names = [row["format"] for table in tables for row in table["rows"]]
    assert sorted(names) == sorted(FORMATS)
    text, (table,) = run("bf16", "3.14159"), json.loads(run("bf16", "3.14159", "--json"))
    found = {row["what"]: row["is"] for row in table["rows"]}
    assert found["code"] == "0x4049" and found["comes back"] == "3.140625"
    assert all(what in text and value in text for what, value in found.items())


def test_a_value_is_shown_bit_by_bit_with_its_error_beside_the_bound() -> None:
    text = run("bf16", "3.14159")
    assert "0x4049" in row(text, "code")
    assert "0 10000000 1001001" in row(text, "bits")
    assert "2^(128 - 127) = 2^1" in row(text, "exponent")
    assert "1.1001001" in row(text, "mantissa")
    assert "3.140625" in row(text, "comes back")
    assert row(text, "error").split() == ["error", "-0.000965", "bound", "0.0078125"]
    assert row(text, "relative error").split()[2] == f"{0.000965 / 3.14159:.7g}"
    assert "2^-8" in row(text, "relative error")
    assert "bound 0.015625" in run("bf16", "3.14159", "--rounding", "toward-zero")


def test_a_code_is_decoded() -> None:
    assert "3.140625" in row(run("bf16", "--bits", "0x4049"), "value")
    text = run("fp32", "--bits", "00000001")
    assert "1.401298e-45" in row(text, "value")
    assert "zero or subnormal: 2^-126" in row(text, "exponent")
    assert "special" in run("fp16", "--bits", "0x7c00") and "inf" in row(run("fp16", "--bits", "0x7c00"), "value")


def test_negative_values_are_values_and_a_block_shares_a_scale() -> None:
    text = run("nf4", "0.3", "-1.5", "0.05")
    assert "Scale 1.5; no error above 0.2278554" in text  # 1.5 times half of NF4's widest gap
    assert row(text, "-1.5").split()[1:5] == ["0x0", "0000", "-1", "-1.5"]
    assert "-0" in row(run("bf16", "-1e-45"), "comes back")
    assert "outside the range" in row(run("int8", "-300.5"), "error")
    assert "error" not in run("fp16", "nan") + run("fp16", "-inf")
    assert "outside the range" in row(run("fp8-e4m3", "inf"), "error") and "448" in row(
        run("fp8-e4m3", "inf"), "comes back"
    )


def test_stochastic_rounding_on_the_command_line_follows_its_seed() -> None:
    seen = {run("int8", "2.5", "--rounding", "stochastic", "--seed", str(seed)) for seed in range(8)}
    assert len(seen) == 2
    assert run("int8", "2.5", "--rounding", "stochastic") == run(
        "int8", "2.5", "--rounding", "stochastic", "--seed", "0"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fp33",), "no number format is called 'fp33': did you mean fp32?"),
        (("--bits", "0x1"), "bits mean nothing without a format"),
        (("bf16", "1", "--bits", "0x1"), "not both"),
        (("bf16", "--bots"), "cannot read the number '--bots'"),
        (("fp32", "0x7F800000"), "asked with --bits 0x7F800000"),
        (("bf16", "1", "--rounding", "up"), "no rounding is called 'up'"),
        (("fp4", "nan"), "fp4 has no NaN"),
    ],
)
def test_what_the_command_cannot_take_is_one_clear_message(arguments: tuple[str, ...], message: str) -> None:
    text = run(*arguments, code=2)
    assert text.startswith("memfit: ") and message in text


def test_nearest_is_the_default() -> None:
    for value in (Fraction(1, 3), -2.75, 100):
        assert encode(value, "fp8-e4m3") == encode(value, "fp8-e4m3", NEAREST_EVEN)
