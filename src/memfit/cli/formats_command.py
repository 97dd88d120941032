"""`memfit formats`: number formats side by side, and numbers in them bit by bit."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Sequence
from decimal import Decimal, Inexact, localcontext
from fractions import Fraction
from typing import Annotated

import typer
from rich.console import Console

from memfit.cli.options import TableList, open_console, print_table
from memfit.core.errors import UsageError
from memfit.core.format_catalog import FORMATS, BlockFormat, find_format
from memfit.core.number_formats import (
    NEAREST_EVEN,
    TOWARD_ZERO,
    FixedPoint,
    FloatFormat,
    Number,
    NumberFormat,
    Rounding,
    SignMagnitude,
    Specials,
    find_rounding,
    read_code,
    read_number,
)

FORMATS_SETTINGS = {"ignore_unknown_options": True}
"""Negative numbers begin like options: what is no option of this command is read as a value."""


def formats(
    name: Annotated[
        str | None, typer.Argument(metavar="[FORMAT]", help="A format, such as bf16; int12, sm12 and q7.8 too.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VALUE]...",
            help="Numbers to encode: 3.14159, -1e-45, 1/3, 2^-149, inf. A block format takes them as one block.",
        ),
    ] = None,
    bits: Annotated[str | None, typer.Option(help="A code to decode: 0x4049, 0b..., or all its binary digits.")] = None,
    rounding: Annotated[str, typer.Option(help="nearest-even, toward-zero or stochastic.")] = NEAREST_EVEN.name,
    seed: Annotated[int, typer.Option(help="For stochastic rounding.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables: figures as texts.")] = False,
) -> None:
    """Shows size, range, special values and rounding error of number formats.

    Encodes values and decodes bits.
    """
    rule = find_rounding(rounding, seed=seed)
    if name is None and bits is not None:
        raise UsageError("bits mean nothing without a format: memfit formats bf16 --bits 0x4049")
    if bits is not None and values:
        raise UsageError("give values to encode or --bits to decode, not both")
    console = TableList() if json else open_console()
    _show(console, name, values, bits, rule)
    if isinstance(console, TableList):
        typer.echo(json_module.dumps(console.tables, indent=1))


def _show(console: Console, name: str | None, values: list[str] | None, bits: str | None, rule: Rounding) -> None:
    if name is None:
        _print_all(console, list(FORMATS.values()))
        return
    chosen = find_format(name)
    if bits is not None:
        _print_code(console, chosen, read_code(bits, chosen))
    elif not values:
        _print_all(console, [chosen])
        console.print(f"{chosen.name}: {chosen.description}", markup=False)
    elif isinstance(chosen, BlockFormat):
        _print_blocks(console, chosen, values, rule)
    else:
        for text in values:
            _print_value(console, chosen, text, rule)


def _print_all(console: Console, every: Sequence[NumberFormat]) -> None:
    floats = [_float_row(one) for one in every if isinstance(one, FloatFormat)]
    if floats:
        columns = (
            "format", "bits", "fields", "largest", "smallest normal", "smallest subnormal",
            "epsilon", "unit roundoff", "specials", "overflow to",
        )  # fmt: skip
        title = "Floating point; fields are sign/exponent/mantissa bits, zero has two codes"
        print_table(console, title, columns, floats, left=columns[-2:])
    integers = [_integer_row(one) for one in every if isinstance(one, FixedPoint | SignMagnitude)]
    if integers:
        columns = ("format", "bits", "lowest", "largest", "step", "error to nearest", "zeros", "what it is")
        print_table(console, "Integers and fixed point", columns, integers, left=columns[-1:])
    blocks = [_block_row(one) for one in every if isinstance(one, BlockFormat)]
    if blocks:
        columns = (
            "format", "bits", "with scale", "block", "levels", "lowest", "smallest above 0", "error to nearest", "error otherwise",
            "what it is",
        )  # fmt: skip
        title = "Block-wise; levels and errors are parts of the block's scale, its largest magnitude in fp32"
        print_table(console, title, columns, blocks, left=columns[-1:])


def _float_row(one: FloatFormat) -> tuple[str, ...]:
    specials = {Specials.IEEE: "inf, NaN", Specials.ONE_NAN: "NaN", Specials.NONE: ""}
    return (
        one.name,
        f"{one.bits} (in {one.storage_bits})" if one.storage_bits else str(one.bits),
        "/".join(str(field.bits) for field in one.fields),
        _decimal(one.largest),
        _power(one.smallest_normal),
        _power(one.smallest_subnormal),
        _power(one.epsilon),
        _power(one.unit_roundoff),
        specials[one.specials],
        one.overflow.value,
    )


def _integer_row(one: FixedPoint | SignMagnitude) -> tuple[str, ...]:
    return (
        one.name,
        str(one.bits),
        _decimal(one.lowest),
        _decimal(one.largest),
        _decimal(one.step),
        _decimal(one.step / 2),
        "2" if isinstance(one, SignMagnitude) else "1",
        one.description,
    )


def _block_row(one: BlockFormat) -> tuple[str, ...]:
    return (
        one.name,
        str(one.bits),
        _decimal(one.bits_per_value),
        str(one.block_size),
        str(len(one.levels)),
        _decimal(one.lowest, digits=5),
        _decimal(one.smallest_positive, digits=3),
        _decimal(one.block_error_bound(NEAREST_EVEN), digits=4),
        _decimal(one.block_error_bound(TOWARD_ZERO), digits=4),
        one.description,
    )


def _print_value(console: Console, chosen: NumberFormat, text: str, rounding: Rounding) -> None:
    value = read_number(text)
    code = chosen.encode(value, rounding)
    back = chosen.decode(code)
    rows = [("value", text, ""), ("rounding", rounding.name, ""), *_code_rows(chosen, code, "comes back")]
    if chosen.covers(value):
        exact = Fraction(value)
        error = Fraction(back) - exact
        rows.append(("error", _decimal(error), f"bound {_decimal(chosen.error_bound(value, rounding))}"))
        if exact:
            rows.append(("relative error", _decimal(abs(error / exact)), _relative_bound(chosen, exact, rounding)))
    elif not _is_nan(value) and back != value:
        outside = f"outside the range, {_decimal(chosen.lowest)} to {_decimal(chosen.largest)}"
        rows.append(("error", outside, "no bound"))
    print_table(console, f"{chosen.name}: {chosen.description}", ("what", "is", ""), rows, left=("is", ""))


def _relative_bound(chosen: NumberFormat, exact: Fraction, rounding: Rounding) -> str:
    if not isinstance(chosen, FloatFormat):
        return "no bound: the step is the same for small values"
    if abs(exact) < chosen.smallest_normal:
        return "no bound: below the smallest normal value"
    return f"bound {_power(chosen.relative_error_bound(rounding))}"


def _print_code(console: Console, chosen: NumberFormat, code: int) -> None:
    rows = _code_rows(chosen, code, "value")
    print_table(console, f"{chosen.name}: {chosen.description}", ("what", "is", ""), rows, left=("is", ""))


def _code_rows(chosen: NumberFormat, code: int, label: str) -> list[tuple[str, str, str]]:
    value = chosen.decode(code)
    parts = chosen.split(code)
    rows = [("code", f"{code:#0{2 + -(-chosen.bits // 4)}x}", ""), ("bits", " ".join(parts), "")]
    notes = _float_notes(chosen, parts, value) if isinstance(chosen, FloatFormat) else {}
    rows += [(field.name, part, notes.get(field.name, "")) for field, part in zip(chosen.fields, parts, strict=True)]
    note = "times the scale of its block" if isinstance(chosen, BlockFormat) else ""
    return [*rows, (label, _decimal(value), note)]


def _float_notes(chosen: FloatFormat, parts: Sequence[str], value: Number) -> dict[str, str]:
    if isinstance(value, float) and not math.isfinite(value):
        return {"exponent": "special: infinity or NaN"}
    _, exponent, mantissa = parts
    field = int(exponent, 2)
    if field == 0:
        return {"exponent": f"zero or subnormal: 2^{chosen.smallest_exponent}", "mantissa": f"0.{mantissa} in binary"}
    return {
        "exponent": f"2^({field} - {chosen.bias}) = 2^{field - chosen.bias}",
        "mantissa": f"1.{mantissa} in binary",
    }


def _print_blocks(console: Console, chosen: BlockFormat, texts: Sequence[str], rounding: Rounding) -> None:
    values = [read_number(text) for text in texts]
    blocks = chosen.encode_blocks(values, rounding)
    console.print(f"{chosen.name}: {chosen.description}; {rounding.name}", markup=False)
    rest = list(zip(texts, values, strict=True))
    for block in blocks:
        rows: list[tuple[str, ...]] = []
        for (text, value), code, back in zip(rest, block.codes, block.decode(), strict=False):
            level, error = _decimal(chosen.decode(code)), _decimal(back - Fraction(value))
            rows.append((text, f"{code:#x}", chosen.split(code)[0], level, _decimal(back), error))
        rest = rest[len(block.codes) :]
        title = f"Scale {_decimal(block.scale)}; no error above {_decimal(block.error_bound(rounding))}"
        print_table(console, title, ("value", "code", "bits", "level", "comes back", "error"), rows)


def _is_nan(value: Number) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _decimal(value: Number, digits: int = 7) -> str:
    """All decimal digits where they are few, else so many."""
    if isinstance(value, float) and (
        value == 0 or not math.isfinite(value)
    ):  # the sign of a zero, and what is no fraction
        return f"{value:g}"
    exact = Fraction(value)
    with localcontext() as context:
        context.prec = max(digits, 12)
        context.clear_flags()
        quotient = Decimal(exact.numerator) / Decimal(exact.denominator)
        is_short = not context.flags[Inexact]
    return f"{quotient:g}" if is_short else f"{quotient:.{digits}g}"


def _power(value: Fraction) -> str:
    """A power of two, and the same in decimal."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return f"2^{exponent} ({float(value):.3g})"
