"""Number formats on random values: against exact neighbours found by search, torch's casts and the machine's bit patterns."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.format_catalog import FORMATS, BlockFormat, decode, encode
from memfit.core.number_formats import (
    NEAREST_EVEN,
    TOWARD_ZERO,
    FixedPoint,
    FloatFormat,
    NumberFormat,
    Overflow,
    Rounding,
    SignMagnitude,
    Specials,
    Stochastic,
)

BLOCK_FORMATS = [one for one in FORMATS.values() if isinstance(one, BlockFormat)]


@st.composite
def small_formats(draw: st.DrawFn) -> NumberFormat:
    """Formats with so few codes that all can be listed: no named one among them, mostly."""
    kind = draw(st.sampled_from(["float", "fixed", "sign"]))
    if kind == "fixed":
        integer, fraction = draw(st.integers(0, 4)), draw(st.integers(1, 4))
        return FixedPoint(name="fixed", description="", integer_bits=integer, fraction_bits=fraction)
    if kind == "sign":
        return SignMagnitude(name="sign", description="", magnitude_bits=draw(st.integers(1, 6)))
    return FloatFormat(
        name="float",
        description="",
        exponent_bits=draw(st.integers(2, 4)),
        mantissa_bits=draw(st.integers(1, 4)),
        specials=draw(st.sampled_from(Specials)),
        overflow=Overflow.SATURATE,
    )


def finite_values(one: NumberFormat) -> list[tuple[Fraction, int]]:
    """All finite values with a code of theirs, in order, zero once."""
    found = {Fraction(value): code for code in range(1 << one.bits) if math.isfinite(value := one.decode(code))}
    return sorted(found.items())


@given(one=small_formats(), place=st.fractions(0, 1, max_denominator=97), uniform=st.floats(0, 1, exclude_max=True))
def test_the_neighbour_chosen_is_the_one_that_a_search_finds(
    one: NumberFormat, place: Fraction, uniform: float
) -> None:
    values = finite_values(one)
    value = one.lowest + place * (one.largest - one.lowest)
    below, below_code = max(pair for pair in values if pair[0] <= value)
    above, above_code = min(pair for pair in values if pair[0] >= value)
    inner, outer = sorted((below, above), key=abs)
    assert above - below in (0, one.gap(value))

    def back(rounding: Rounding) -> Fraction:
        chosen = Fraction(one.decode(one.encode(value, rounding)))
        assert abs(chosen - value) <= one.error_bound(value, rounding)
        return chosen

    assert back(TOWARD_ZERO) == inner
    if value - below != above - value:
        assert back(NEAREST_EVEN) == (below if value - below < above - value else above)
    elif below != above:
        # Neighbours have consecutive codes, so that one of them is even: in its last bit, whatever the sign.
        assert back(NEAREST_EVEN) == (below if below_code % 2 == 0 else above)
        assert (below_code + above_code) % 2 == 1
    goes_out = inner != outer and Fraction(uniform) < (value - inner) / (outer - inner)
    assert back(Stochastic([uniform])) == (outer if goes_out else inner)


@given(code=st.integers(0, 2**32 - 1))
def test_codes_of_fp32_are_the_machines(code: int) -> None:
    value = struct.unpack(">f", code.to_bytes(4, "big"))[0]
    ours = decode(code, "fp32")
    assert ours == value or (math.isnan(value) and math.isnan(float(ours)))
    if not math.isnan(value):
        assert encode(ours, "fp32") == code


@given(value=st.floats(allow_nan=False))
def test_doubles_go_to_fp32_as_torch_sends_them(value: float) -> None:
    expected = torch.tensor(value, dtype=torch.float64).float().view(torch.int32).item()
    assert encode(value, "fp32") == int(expected) % 2**32


@given(significand=st.integers(-(2**26), 2**26), exponent=st.integers(-160, 110))
def test_middles_and_subnormals_go_to_fp32_as_torch_sends_them(significand: int, exponent: int) -> None:
    # Two bits more than fp32 keeps: every fourth is a tie.
    value = math.ldexp(significand, exponent)
    expected = torch.tensor(value, dtype=torch.float64).float().view(torch.int32).item()
    assert encode(value, "fp32") == int(expected) % 2**32


@given(value=st.floats(allow_nan=False))
def test_codes_of_fp64_are_the_machines(value: float) -> None:
    code = int.from_bytes(struct.pack(">d", value), "big")
    assert encode(value, "fp64") == code
    assert struct.pack(">d", decode(code, "fp64")) == struct.pack(">d", value)


@given(numerator=st.integers(-(10**40), 10**40), denominator=st.integers(1, 10**40))
def test_fractions_go_to_fp64_as_python_divides(numerator: int, denominator: int) -> None:
    # Division of Python's integers is rounded correctly, once.
    assert decode(encode(Fraction(numerator, denominator), "fp64"), "fp64") == numerator / denominator


@given(code=st.integers(0, 2**32 - 1))
def test_tf32_is_fp32_without_its_last_thirteen_bits(code: int) -> None:
    if (code >> 23) & 0xFF == 0xFF:
        return
    value = decode(code, "fp32")
    assert encode(value, "tf32", TOWARD_ZERO) == code >> 13
    last_kept = (code >> 13) & 1
    assert encode(value, "tf32") == (code + 0xFFF + last_kept) >> 13


@given(code=st.integers(0, 2**64 - 1), bits=st.integers(2, 64))
def test_integers_of_any_width_are_the_machines_shifted(code: int, bits: int) -> None:
    code %= 1 << bits
    as_int64 = int.from_bytes((code << (64 - bits)).to_bytes(8, "big"), "big", signed=True) >> (64 - bits)
    assert decode(code, f"int{bits}") == as_int64
    assert encode(as_int64, f"int{bits}") == code


@given(
    one=st.sampled_from(BLOCK_FORMATS),
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
    seed=st.integers(0, 2**16),
)
def test_no_value_of_a_block_moves_further_than_the_bound(one: BlockFormat, values: list[float], seed: int) -> None:
    if one.lowest >= 0:
        values = [abs(value) for value in values]
    for rounding in (NEAREST_EVEN, TOWARD_ZERO, Stochastic(random.Random(seed))):
        (block,) = one.encode_blocks(values, rounding)
        assert block.scale == max(
            abs(Fraction(value)) for value in values
        )  # fp32 numbers: nothing is lost in the scale
        for value, back in zip(values, block.decode(), strict=True):
            assert abs(back - Fraction(value)) <= block.error_bound(rounding)
            if rounding is TOWARD_ZERO:
                # Where zero is no level, what lies below the smallest goes up to it.
                assert abs(back) <= max(abs(Fraction(value)), block.scale * one.lowest)


@given(one=st.sampled_from(BLOCK_FORMATS), values=st.lists(st.fractions(0, 10**6), min_size=1, max_size=6))
def test_the_bound_holds_for_values_that_are_no_fp32_numbers(one: BlockFormat, values: list[Fraction]) -> None:
    (block,) = one.encode_blocks(values)
    assert block.scale >= max(values)
    assert struct.unpack("f", struct.pack("f", float(block.scale)))[0] == block.scale
    assert all(abs(back - v) <= block.error_bound() for back, v in zip(block.decode(), values, strict=True))
