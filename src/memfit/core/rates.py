"""Rates of classes of work where a machine's description does not state them.

In: what a `Hardware` states in any case (matrix products a second, updates), and its data sheet.
Out: a `Rate` for each `WorkKind`. Measured ones (`memfit probe`) stand in `Hardware.rates` and win.

[Note: derived rates]
Ratios to matrix products and to memory's bandwidth, as measured on a server's core with AVX-512 for
processors, and assumed for accelerators. They say what a class costs roughly; their spread says so.
What an accelerator's update does with bf16 weights beside the optimizer's class is derived from the
bytes that its operations move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from memfit.core.precision import ComputeDtype
from memfit.core.tiers import is_processor
from memfit.core.work_kinds import SMALLER_FIRST, WorkKind

if TYPE_CHECKING:
    from memfit.core.hardware import Hardware

DERIVED_SPREAD = 0.3

SPLIT_ELEMENTS_PER_S = 1.3e9
"""Joining a master from its weight and the rest, and splitting it again, parameters a second on one
core, without launching (measured: 512 Ki in 0.2 ms on a server's core with AVX-512, in 0.55 ms on
one with AVX2).
"""
ROUNDED_ELEMENTS_PER_S = 4.4e8
"""Rounding weights that have no masters stochastically, likewise (0.55 and 2.6 ms).
"""
SPLIT_BYTES = 30.0
"""Bytes that the operations of joining a master, splitting it again and rounding its weight read
and write.
"""
ROUNDED_BYTES = 116.0
"""Bytes that the operations of drawing a parameter's noise and rounding it read and write.
"""


class Rate(NamedTuple):
    """Amount a second, and the share by which measurements of it differed."""

    per_s: float
    spread: float = 0.0


# By class: its share of the rate of products, on a processor and on an accelerator.
_OF_PRODUCTS: Mapping[str, tuple[float, float]] = {
    "products-256": (1.0, 1.0),
    "products-128": (1.0, 1.0),
    "products-64": (0.9, 1.0),
    "products-16": (0.85, 0.5),
    "products-4": (0.5, 0.15),
    "batched-products": (0.65, 0.6),
    "attention": (0.75, 0.6),
    "attention-backward": (0.6, 0.5),
    "convolution": (0.6, 0.6),
    "convolution-backward": (0.5, 0.5),
    "narrow-convolution": (0.35, 0.4),
    "narrow-convolution-backward": (0.3, 0.3),
}
_WHATEVER_DTYPE = {"convolution-backward", "narrow-convolution", "narrow-convolution-backward"}
# By class: amounts for each byte a second of memory. Elements: as many bytes each as the divisor.
_OF_MEMORY: Mapping[WorkKind, tuple[float, float]] = {
    WorkKind.PRODUCTS_1: (0.5, 0.4),
    WorkKind.HALF_PRODUCTS_1: (0.5, 0.8),
    WorkKind.GROUPED_CONVOLUTION: (0.5, 1.0),
    WorkKind.STREAMED: (1.0, 1.0),
    WorkKind.STREAMED_LARGE: (0.8, 1.0),
    WorkKind.REDUCED: (0.7, 1.0),
    WorkKind.TRANSPOSED: (0.3, 0.6),
    WorkKind.GATHERED: (0.2, 0.4),
    WorkKind.HALF_ATTENTION_ROWS: (1 / 80_000, 1 / 1_000),
    # A processor converts; an accelerator reads two of them and writes one.
    WorkKind.HALF_ELEMENTS: (1 / 20, 1 / 6),
    WorkKind.FUNCTIONS: (1 / 18, 1 / 8),
    WorkKind.SLOW_FUNCTIONS: (1 / 60, 1 / 8),
    WorkKind.NORMALIZED: (1 / 22, 1 / 8),
    WorkKind.NORMALIZED_BACKWARD: (1 / 40, 1 / 16),
    WorkKind.WINDOWED: (1 / 120, 1 / 8),
    WorkKind.DRAWN: (1 / 180, 1 / 8),
    WorkKind.FRESH: (1 / 12, 1.0),
}
_FLOPS_PER_BYTE = 3.3, 14.0
_OPERATIONS_PER_S = 2e5, 1.5e5
# Python's part of a step, in operations that take as long (measured by `memfit probe` on a server's
# core, where an operation took 5.8 us).
_OPERATIONS_OF: Mapping[WorkKind, float] = {
    WorkKind.PYTHON: 0.25,
    WorkKind.NODES: 0.5,
    WorkKind.WATCHED: 5.0,
    WorkKind.SELECTED: 3.0,
    WorkKind.CALLS: 17.0,
    WorkKind.FRAMES: 35.0,
    WorkKind.SWITCHES: 40.0,
    WorkKind.STEPS: 400.0,
    WorkKind.VISITS: 28.0,
    WorkKind.VISITED: 7.0,
    WorkKind.PIECES: 30.0,
    WorkKind.PIECE_TRANSFERS: 12.0,
}


def rates_of(hardware: Hardware) -> Mapping[WorkKind, Rate]:
    """Returns the rate of each class on the device. See [Note: derived rates]."""
    found = _derived(hardware)
    found.update(hardware.rates)
    calls = found[WorkKind.OPERATIONS]
    for kind, operations in _OPERATIONS_OF.items():
        if kind not in hardware.rates:
            found[kind] = Rate(calls.per_s / operations, DERIVED_SPREAD)
    return found


def host_rates_of(hardware: Hardware) -> Mapping[WorkKind, Rate]:
    """Returns the rates of updates on the host's cores, beside an accelerator."""
    # Python's part is the same on either processor.
    beside = rates_of(hardware)
    return {
        WorkKind.UPDATED: Rate(hardware.host_update_elements_per_s),
        WorkKind.PIECES: beside[WorkKind.PIECES],
        WorkKind.PIECE_TRANSFERS: beside[WorkKind.PIECE_TRANSFERS],
        WorkKind.ENCODED: Rate(hardware.host_codec_elements_per_s),
        WorkKind.SPLIT: Rate(hardware.host_split_elements_per_s),
        WorkKind.ROUNDED: Rate(hardware.host_rounded_elements_per_s),
    }


def _derived(hardware: Hardware) -> dict[WorkKind, Rate]:
    column = 0 if is_processor(hardware.device) else 1
    products = hardware.flops_per_s
    half = hardware.bf16_flops_per_s or products
    sheet = hardware.datasheet
    memory = products / _FLOPS_PER_BYTE[column] if sheet is None else sheet.memory_bytes_per_s * sheet.utilisation
    found = {WorkKind.FLOPS: Rate(products)}
    for name, shares in _OF_PRODUCTS.items():
        found[WorkKind(name)] = Rate(products * shares[column], DERIVED_SPREAD)
        if name not in _WHATEVER_DTYPE:
            found[WorkKind(f"bf16-{name}")] = Rate(half * shares[column], DERIVED_SPREAD)
    found[WorkKind.FP16] = Rate(half * 0.8, DERIVED_SPREAD)
    for kind, shares in _OF_MEMORY.items():
        found[kind] = Rate(memory * shares[column], DERIVED_SPREAD)
    found[WorkKind.OPERATIONS] = Rate(_OPERATIONS_PER_S[column], DERIVED_SPREAD)
    found[WorkKind.UPDATED] = Rate(hardware.update_elements_per_s)
    found[WorkKind.ENCODED] = Rate(hardware.codec_elements_per_s)
    is_beside = not is_processor(hardware.device)
    split_per_s = memory / SPLIT_BYTES if is_beside else SPLIT_ELEMENTS_PER_S
    rounded_per_s = memory / ROUNDED_BYTES if is_beside else ROUNDED_ELEMENTS_PER_S
    found[WorkKind.SPLIT] = Rate(split_per_s, DERIVED_SPREAD)
    found[WorkKind.ROUNDED] = Rate(rounded_per_s, DERIVED_SPREAD)
    return found


def in_dtype(hardware: Hardware, compute: ComputeDtype) -> Hardware:
    """Returns the machine with its speed of matrix products in a plan's dtype."""
    if compute is ComputeDtype.GIVEN:
        return hardware
    flops_per_s = hardware.bf16_flops_per_s or hardware.flops_per_s
    # What is derived from products in the given dtype, memory's rates for instance, stays as it is.
    rates = {**rates_of(hardware), WorkKind.FLOPS: Rate(flops_per_s)}
    return replace(hardware, flops_per_s=flops_per_s, rates=rates)


def at_rates_of_smaller(hardware: Hardware) -> Hardware:
    """Returns the machine with each class of work at least as fast as those that the same operation
    is of on fewer rows: with smaller sizes, or within caches.
    """
    rates = dict(rates_of(hardware))
    for smaller_first in SMALLER_FIRST:
        for smaller, kind in pairwise(smaller_first):
            rates[kind] = max(rates[kind], rates[smaller])
    return replace(hardware, rates=rates)
