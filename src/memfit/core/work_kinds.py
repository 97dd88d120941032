"""Kinds of work and their amounts: what computing costs, apart from the machine that does it.

In: counted by `trace` for each operation of a trace, and by `step` for updates. Out:
amounts by kind, which `step.clock` divides by the rates of a `Hardware`.

[Note: classes of work]
One rate for all operations is off by factors: on a processor a GELU by its formula with tanh passes
0.6 billion elements a second, an addition moves 30 GB, and a product with eight rows reaches half
of what one with 128 does, and that two thirds of one with 256. So each operation counts in the
class whose operations take about equally long for an amount: floating point operations for
products, by dtype and by the smallest of their three sizes (which bounds how often a value in cache
is used again); bytes read and written where memory is what is waited for; elements where a function
is; and every operation counts once besides, for what torch and Python spend on it, which is less
where autograd calls it and more where somebody watches it. An amount is of the model alone, so
plans that are lowered to equal steps have equal amounts, on each machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class WorkKind(StrEnum):
    """Kinds of computation, each with its own rate. See [Note: classes of work].

    FLOPS: floating point operations of products of an unknown class. PRODUCTS_N: of matrix products
    in fp32 whose smallest size is at least N (and below the next class's). BATCHED: of many small
    products at once. ATTENTION, CONVOLUTION: of kernels of their own, forward and backward;
    NARROW_CONVOLUTION: of or to less than 64 channels; GROUPED_CONVOLUTION: with sums of less than
    64 products. HALF_...: the same in bf16; FP16: any of them in fp16.

    STREAMED: bytes read and written by point-wise operations and copies; STREAMED_LARGE: the same
    where an operation moves more than caches and pools hold. REDUCED: by sums. TRANSPOSED: by
    copies between different orders of dimensions. GATHERED: by indexed reads and writes.
    HALF_ATTENTION_ROWS: rows of all heads through the backward of attention in bf16 over fewer than
    192 places, which a processor does in blocks so small that it follows them, and not their sizes.
    HALF_ELEMENTS: elements through point-wise operations and sums in bf16 and fp16, for which a
    processor converts each.

    FUNCTIONS, SLOW_FUNCTIONS: elements through exponentials and error functions; through hyperbolic
    ones, powers, logarithms, cumulative sums and sorting, norms that run across memory, and batch
    normalisation. NORMALIZED, NORMALIZED_BACKWARD: through
    normalisation and softmax. WINDOWED: elements that windows of pooling and resizing look at.
    DRAWN: random numbers.

    FRESH: bytes of memory that the process touches for the first time: of its first step alone.

    OPERATIONS: operations that a model's code calls. PYTHON: functions of Python that it calls
    around them. NODES: operations that autograd calls in backward.
    WATCHED: operations of calls that do not keep what they save, which a dispatch mode and the
    hooks of saved tensors see besides. SELECTED: those of calls whose policy keeps results of some
    operators, which another mode sees. CALLS: entries of calls. FRAMES: entries of calls that do
    not keep what they save. SWITCHES: from one microbatch to another in the middle of its forward,
    with the states of all random generators. STEPS: steps. VISITS: of a block, whose weights come
    from elsewhere and go again. VISITED: their tensors. PIECES: updates of a piece of a
    parameter. PIECE_TRANSFERS: tensors of a piece that come from files for its update, or go
    there after it, whatever their bytes.
    UPDATED, ENCODED, SPLIT, ROUNDED: elements that an update passes (as AdamW's would), that it
    decodes and encodes, whose masters it joins and splits, that it rounds stochastically.
    """

    FLOPS = "flops"
    PRODUCTS_256 = "products-256"
    PRODUCTS_128 = "products-128"
    PRODUCTS_64 = "products-64"
    PRODUCTS_16 = "products-16"
    PRODUCTS_4 = "products-4"
    PRODUCTS_1 = "products-1"
    BATCHED = "batched-products"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention-backward"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution-backward"
    NARROW_CONVOLUTION = "narrow-convolution"
    NARROW_CONVOLUTION_BACKWARD = "narrow-convolution-backward"
    GROUPED_CONVOLUTION = "grouped-convolution"
    HALF_PRODUCTS_256 = "bf16-products-256"
    HALF_PRODUCTS_128 = "bf16-products-128"
    HALF_PRODUCTS_64 = "bf16-products-64"
    HALF_PRODUCTS_16 = "bf16-products-16"
    HALF_PRODUCTS_4 = "bf16-products-4"
    HALF_PRODUCTS_1 = "bf16-products-1"
    HALF_BATCHED = "bf16-batched-products"
    HALF_ATTENTION = "bf16-attention"
    HALF_ATTENTION_BACKWARD = "bf16-attention-backward"
    HALF_CONVOLUTION = "bf16-convolution"
    FP16 = "fp16-products"
    STREAMED = "streamed"
    STREAMED_LARGE = "streamed-large"
    REDUCED = "reduced"
    TRANSPOSED = "transposed"
    GATHERED = "gathered"
    HALF_ATTENTION_ROWS = "bf16-attention-rows"
    HALF_ELEMENTS = "bf16-elements"
    FUNCTIONS = "functions"
    SLOW_FUNCTIONS = "slow-functions"
    NORMALIZED = "normalized"
    NORMALIZED_BACKWARD = "normalized-backward"
    WINDOWED = "windowed"
    DRAWN = "drawn"
    FRESH = "fresh-memory"
    OPERATIONS = "operations"
    PYTHON = "python-calls"
    NODES = "backward-operations"
    WATCHED = "watched-operations"
    SELECTED = "selected-operations"
    CALLS = "calls"
    FRAMES = "frames"
    SWITCHES = "switches"
    STEPS = "steps"
    VISITS = "visits"
    VISITED = "visited-tensors"
    PIECES = "update-pieces"
    PIECE_TRANSFERS = "piece-transfers"
    UPDATED = "updated"
    ENCODED = "encoded"
    SPLIT = "split"
    ROUNDED = "rounded"


Work = tuple[tuple[WorkKind, float], ...]
"""Amounts by kind, each kind once, in the order of `WorkKind`.
"""

_ORDER = {kind: index for index, kind in enumerate(WorkKind)}
# Of one number, three sizes: a class's rate is measured near its lower end.
_SIZES = (256, 128, 64, 16, 4)
_FP32 = (
    WorkKind.PRODUCTS_256,
    WorkKind.PRODUCTS_128,
    WorkKind.PRODUCTS_64,
    WorkKind.PRODUCTS_16,
    WorkKind.PRODUCTS_4,
    WorkKind.PRODUCTS_1,
)
_HALF = (
    WorkKind.HALF_PRODUCTS_256,
    WorkKind.HALF_PRODUCTS_128,
    WorkKind.HALF_PRODUCTS_64,
    WorkKind.HALF_PRODUCTS_16,
    WorkKind.HALF_PRODUCTS_4,
    WorkKind.HALF_PRODUCTS_1,
)
SMALLER_FIRST = (_FP32[::-1], _HALF[::-1], (WorkKind.STREAMED, WorkKind.STREAMED_LARGE))
"""Classes that an operation may be of by its size, from the smallest on.
"""
FEW_PLACES = 192
"""From as many on, attention on a processor works in larger blocks (torch's
FlashAttentionKernel.cpp).
"""
# Places of attention whose work is what blocks that are not full take besides.
_FULL_PLACES = 24
BACKWARD_OF = {"gelu_backward": 2.0, "silu_backward": 1.4}
"""Elements that an element counts as in these, of the class of their forwards (measured: 1.8 to
2.2, and 1.4, of the time).
"""
LAUNCHED = frozenset({WorkKind.OPERATIONS, WorkKind.PYTHON, WorkKind.NODES})
"""Kinds of what the host does to launch operations, beside an accelerator.
"""
PRODUCT_KINDS = frozenset(kind for kind in WorkKind if _ORDER[kind] <= _ORDER[WorkKind.FP16])
"""Kinds whose amounts are floating point operations.
"""


def product_kind(smallest: int, dtype: str) -> WorkKind:
    """Returns the class of a matrix product by the smallest of its three sizes and its dtype."""
    if dtype == "float16":
        return WorkKind.FP16
    kinds = _HALF if dtype == "bfloat16" else _FP32
    return next((kind for kind, size in zip(kinds, _SIZES, strict=False) if smallest >= size), kinds[-1])


def attention_flops(flops: float, places: int) -> float:
    """Returns the operations of attention over many places that take as long as these over few: a
    kernel's blocks are then not full (measured: 74 billion a second over 256 places, 64 over 128,
    55 to 60 over 64).
    """
    return flops * (1 + _FULL_PLACES / max(1, places))


def as_work(amounts: Mapping[WorkKind, float]) -> Work:
    """Returns the amounts that are not 0, in order."""
    return tuple(sorted(((k, a) for k, a in amounts.items() if a), key=lambda one: _ORDER[one[0]]))


def summed(works: Iterable[tuple[Work, float]]) -> Work:
    """Returns the sum of amounts, each multiplied by its factor."""
    total: dict[WorkKind, float] = {}
    for work, factor in works:
        for kind, amount in work:
            total[kind] = total.get(kind, 0.0) + factor * amount
    return as_work(total)
