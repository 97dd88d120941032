"""The formats by name. `int<bits>`, `sm<bits>` and `q<m>.<n>` are made when they are asked for."""

from __future__ import annotations

import difflib
import re
from fractions import Fraction

from memfit.core.errors import UsageError
from memfit.formats.blockwise import FP32, BlockFormat, dynamic_levels, symmetric_integer_format, table_format
from memfit.formats.floating import FloatFormat, Overflow, Specials
from memfit.formats.integers import FixedPoint, SignMagnitude
from memfit.formats.number_format import Number, NumberFormat
from memfit.formats.rounding import NEAREST_EVEN, Rounding

_MOST_BITS = 64

# QLoRA's table, as fp32 values. Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of
# Quantized LLMs", appendix E; the rule behind it is in section 3: quantiles of the normal
# distribution, divided by the outermost, eight steps above zero and seven below.
_NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

_E4M3 = FloatFormat(
    name="fp8-e4m3",
    # Both overflows are in the standard; torch casts to NaN before 2.12 and saturates since,
    # ml_dtypes casts to NaN.
    description="8 bits for weights and activations (OCP OFP8); overflow saturates, as torch's casts since 2.12",
    exponent_bits=4,
    mantissa_bits=3,
    specials=Specials.ONE_NAN,
    overflow=Overflow.SATURATE,
)


def _fp8_block_format() -> BlockFormat:
    """e4m3 values from -256 to 256 as levels: the largest of a block is 256, a power of two, and
    comes back as it was.
    """
    values = {
        Fraction(value): code for code in range(256) if -256 <= (value := _E4M3.decode(code)) <= 256 and code != 0x80
    }
    return BlockFormat(
        name="fp8-block",
        description="e4m3 of a scale: absmax is 256 (optimizer states in fp8)",
        code_bits=8,
        levels=tuple(value / 256 for value in sorted(values)),
        codes=tuple(values[value] for value in sorted(values)),
        block_size=256,
    )


_ALL: tuple[NumberFormat, ...] = (
    FloatFormat(name="fp64", description="double precision (IEEE 754 binary64)", exponent_bits=11, mantissa_bits=52),
    FP32,
    FloatFormat(
        name="tf32",
        description="what tensor cores read of an fp32 value: fp32's range, fp16's precision (NVIDIA Ampere)",
        exponent_bits=8,
        mantissa_bits=10,
        storage_bits=32,
    ),
    FloatFormat(name="fp16", description="half precision (IEEE 754 binary16)", exponent_bits=5, mantissa_bits=10),
    FloatFormat(
        name="bf16", description="brain float: the upper half of an fp32 value", exponent_bits=8, mantissa_bits=7
    ),
    _E4M3,
    FloatFormat(
        name="fp8-e5m2",
        description="8 bits for gradients (OCP OFP8): the upper half of an fp16 value",
        exponent_bits=5,
        mantissa_bits=2,
    ),
    FloatFormat(
        name="fp4",
        description="4 bits, e2m1 (OCP Microscaling Formats)",
        exponent_bits=2,
        mantissa_bits=1,
        specials=Specials.NONE,
        overflow=Overflow.SATURATE,
    ),
    FixedPoint(name="int8", description="8-bit integer, two's complement", integer_bits=7),
    FixedPoint(name="int4", description="4-bit integer, two's complement", integer_bits=3),
    SignMagnitude(name="sm8", description="8-bit integer, sign and magnitude", magnitude_bits=7),
    FixedPoint(
        name="q3.4", description="fixed point: sign, 3 integer bits, 4 fraction bits", integer_bits=3, fraction_bits=4
    ),
    symmetric_integer_format("int8-block", bits=8, block_size=256),
    symmetric_integer_format("int4-block", bits=4, block_size=128),
    table_format("nf4", "quantiles of a normal distribution (QLoRA)", _NF4_LEVELS, bits=4, block_size=64),
    table_format(
        "dynamic8",
        "dynamic map, signed: seven decades, the upper ones finer (8-bit optimizers' first moment)",
        dynamic_levels(signed=True),
        bits=8,
        block_size=256,
    ),
    table_format(
        "dynamic8-unsigned",
        "dynamic map without signs (8-bit optimizers' second moment)",
        dynamic_levels(signed=False),
        bits=8,
        block_size=256,
    ),
    table_format(
        "dynamic4",
        "dynamic map, signed, of three decades (4-bit optimizers' first moment)",
        dynamic_levels(signed=True, decades=3),
        bits=4,
        block_size=128,
    ),
    table_format(
        "linear4-unsigned",
        "16 equal steps above zero, without zero (4-bit optimizers' second moment)",
        [Fraction(step, 16) for step in range(1, 17)],
        bits=4,
        block_size=128,
    ),
    _fp8_block_format(),
)

FORMATS: dict[str, NumberFormat] = {one.name: one for one in _ALL}
"""Every named format, in the order of the table that a person reads."""

# Other people's words: read, never written.
_ALSO_CALLED = {
    "double": "fp64", "float64": "fp64", "e11m52": "fp64",
    "float": "fp32", "float32": "fp32", "single": "fp32", "e8m23": "fp32",
    "half": "fp16", "float16": "fp16", "e5m10": "fp16",
    "bfloat16": "bf16", "e8m7": "bf16",
    "e4m3": "fp8-e4m3", "e4m3fn": "fp8-e4m3", "float8_e4m3fn": "fp8-e4m3",
    "e5m2": "fp8-e5m2", "float8_e5m2": "fp8-e5m2",
    "e2m1": "fp4", "float4_e2m1fn": "fp4",
    "dynamic8-signed": "dynamic8",
}  # fmt: skip

_MADE_WHEN_ASKED = re.compile(
    r"(?P<kind>int|sm)(?P<bits>[0-9]{1,3})|q(?P<integer>[0-9]{1,3})\.(?P<fraction>[0-9]{1,3})"
)


def find_format(name: str | NumberFormat) -> NumberFormat:
    """The format of a name, torch's names included.

    `int12`, `sm12` and `q7.8` (of at most 64 bits) are made. A format is given back.

    Raises:
        UsageError: there is none of this name.
    """
    if isinstance(name, NumberFormat):
        return name
    wanted = name.strip().lower().removeprefix("torch.")
    wanted = _ALSO_CALLED.get(wanted, wanted)
    if wanted in FORMATS:
        return FORMATS[wanted]
    match = _MADE_WHEN_ASKED.fullmatch(wanted)
    if match is not None:
        return _make_format(wanted, match)
    near = difflib.get_close_matches(wanted, [*FORMATS, *_ALSO_CALLED], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"no number format is called {name!r}: {hint}there are {', '.join(FORMATS)}, and int<bits>, sm<bits>, q<m>.<n>"
    )


def encode(value: Number, format: str | NumberFormat, rounding: Rounding = NEAREST_EVEN) -> int:  # noqa: A002, the word is format
    """The code of a value in a format; see the format's own `encode`.

    Its bits, field by field: `find_format(format).split(code)`.
    """
    return find_format(format).encode(value, rounding)


def decode(code: int, format: str | NumberFormat) -> Number:  # noqa: A002, the word is format
    """The exact value of a code in a format; see the format's own `decode`."""
    return find_format(format).decode(code)


def _make_format(name: str, match: re.Match[str]) -> NumberFormat:
    kind = match["kind"]
    bits = int(match["bits"]) if kind else 1 + int(match["integer"]) + int(match["fraction"])
    if not 2 <= bits <= _MOST_BITS:
        raise UsageError(f"{name} has {bits} bits: 2 to {_MOST_BITS} are possible")
    if kind == "int":
        return FixedPoint(name=name, description=f"{bits}-bit integer, two's complement", integer_bits=bits - 1)
    if kind == "sm":
        return SignMagnitude(name=name, description=f"{bits}-bit integer, sign and magnitude", magnitude_bits=bits - 1)
    integer, fraction = int(match["integer"]), int(match["fraction"])
    return FixedPoint(
        name=name,
        description=f"fixed point: sign, {integer} integer bits, {fraction} fraction bits",
        integer_bits=integer,
        fraction_bits=fraction,
    )
