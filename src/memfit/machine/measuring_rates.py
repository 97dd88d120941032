"""Rates of classes of work on this machine, each from several operations of its class.

In: a device. Out: a `Rate` by `WorkKind`.

[Note: measuring a rate]
Operations run as a step runs them: fresh results, from torch's allocator as it is installed, that
stay for a while; backward by autograd; operands in turn, so that no cache of a core holds them, and
weights of products cold. Where one thread computes, its seconds on a
processor are taken, which others lengthen less than those of the clock. All classes take turns in
rounds, so that work of others, which comes and goes, does not fall on one class alone. An
operation's time is the middle of the faster half of its rounds, since other work can only slow it
down, and in each round its median, since a step is the sum of many operations and not of the
luckiest ones. A class's
rate is the mean over its operations of seconds for an amount. Its spread is the larger of two: how
much the operations of a class differ (the class is then a rough one), and how much the rounds do
(the machine is then not quiet).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from memfit import devices
from memfit.core.hardware import Rate
from memfit.core.work_kinds import BACKWARD_OF, FEW_PLACES, WorkKind, attention_flops, product_kind

_ROUNDS = 4
_TURN_S = 0.012
_FEWEST_CALLS = 3
_SMALL = 1 << 20  # elements of an operation whose operands caches hold in part
_LARGE = 1 << 23
_FRESH_BYTES = 16 << 20
_COLD = 10 << 20  # elements that no cache of a core holds
_TURNS = 8  # of operands
_HELD, _HELD_BYTES = 16, 64 << 20  # results that stay: so many, or so large together
_HALF = torch.bfloat16
_FP32 = torch.float32

Trial = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """An operation to measure.

    Attributes:
        kind: its class.
        amount: of one call.
        make: makes its operands, and returns the call.
        turns: of so many calls with operands of their own.
    """

    kind: WorkKind
    amount: float
    make: Callable[[], Trial]
    turns: int = 1

    def in_turn(self) -> Trial:
        """Makes the calls; each call of the result is the next one's, whose own result stays until
        some more have come.
        """
        calls = itertools.cycle([self.make() for _ in range(self.turns)])
        held: deque[object] = deque(maxlen=_HELD)
        return lambda: held.append(next(calls)())


@dataclass
class _Times:
    """Seconds of an operation: the median of each round."""

    operation: _Operation
    rounds: list[float] = field(default_factory=list[float])


def measure_rates(
    device: torch.device, *, rounds: int = _ROUNDS, seconds: float = _TURN_S, has_half: bool = True
) -> Mapping[WorkKind, Rate]:
    """Measures all classes of work on a device; some 10 seconds. See [Note: measuring a rate].

    Args:
        device: whose processor works.
        rounds: turns of each operation.
        seconds: of one turn, at least two calls.
        has_half: bf16 and fp16 too.
    """
    found = [_Times(one) for one in _operations(device) if has_half or not _is_half(one.kind)]
    for _ in range(rounds):
        for times in found:
            times.rounds.append(_middle_of_turn(times.operation.in_turn(), device, seconds))
    by_kind: dict[WorkKind, list[_Times]] = {}
    for times in found:
        by_kind.setdefault(times.operation.kind, []).append(times)
    return {kind: _rate(group) for kind, group in by_kind.items()}


def _is_half(kind: WorkKind) -> bool:
    return kind.startswith("bf16") or kind is WorkKind.FP16


def _rate(group: list[_Times]) -> Rate:
    per_amount = [sorted(one.rounds)[len(one.rounds) // 4] / one.operation.amount for one in group]
    mean = statistics.fmean(per_amount)
    among = statistics.pstdev(per_amount) / mean
    over_time = statistics.fmean((statistics.median(one.rounds) - min(one.rounds)) / min(one.rounds) for one in group)
    return Rate(1 / mean, round(min(1.0, max(among, over_time)), 3))


def _middle_of_turn(call: Trial, device: torch.device, seconds: float) -> float:
    call()
    clock = devices.clock_of(device)
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < _FEWEST_CALLS or time.perf_counter() - began < seconds:
        devices.finish(device)
        start = clock()
        call()
        devices.finish(device)
        found.append(clock() - start)
    return statistics.median(found)


# --- operations --------------------------------------------------------------------------------


def _operations(device: torch.device) -> Iterator[_Operation]:
    # An accelerator needs larger ones to be busy.
    scale = 1 if device.type == "cpu" else 4
    for dtype in (_FP32, _HALF, torch.float16):
        yield from _products(device, dtype, scale)
        if dtype is not torch.float16:
            yield from _attention(device, dtype, scale)
            yield from _convolutions(device, dtype, scale)
    yield from _memory(device)
    yield from _elements(device)
    if device.type == "cpu":
        for nbytes, is_huge in ((_FRESH_BYTES // 32, False), (_FRESH_BYTES, True)):
            yield _Operation(kind=WorkKind.FRESH, amount=nbytes, make=lambda n=nbytes, h=is_huge: _fresh(n, is_huge=h))


def _tensor(*shape: int, device: torch.device, dtype: torch.dtype = _FP32, grad: bool = False) -> torch.Tensor:
    return torch.full(shape, 0.5, device=device, dtype=dtype, requires_grad=grad)


def _products(device: torch.device, dtype: torch.dtype, scale: int) -> Iterator[_Operation]:
    """Products of rows (m) by k by columns (n), as a linear layer makes them: by a transposed
    weight, and for the gradients of its input and of its weight.
    """
    name = str(dtype).removeprefix("torch.")
    widest = [(512, 512, 1024), (1024, 256, 512), (256, 384, 1536), (1024, 768, 768)]
    wide = [(128, 768, 768), (128, 384, 384), (192, 512, 1024)]
    middle = [(64, 512, 2048), (64, 2048, 512), (96, 768, 768)]
    narrow = [(32, 768, 768), (768, 32, 768), (16, 512, 1024)]
    thin = [(8, 768, 768), (768, 8, 768), (4, 1024, 1024)]
    sizes = (
        widest
        if dtype is torch.float16
        else [*widest, *wide, *middle, *narrow, *thin, (1, 2048, 1024), (2, 1024, 1024)]
    )
    for m, k, n in [tuple(size * scale if size >= 256 else size for size in one) for one in sizes]:
        for trial in _LINEAR if dtype is not torch.float16 else _LINEAR[:1]:
            yield _Operation(
                kind=product_kind(min(m, k, n), name),
                amount=2.0 * m * k * n,
                make=lambda m=m, k=k, n=n, t=trial: t(
                    _tensor(_TURNS, m, k, device=device, dtype=dtype),
                    _tensor(_cold(n * k), n, k, device=device, dtype=dtype),
                    _tensor(_TURNS, m, n, device=device, dtype=dtype),
                ),
            )
    if dtype is torch.float16:
        return
    kind = WorkKind.HALF_BATCHED if dtype is _HALF else WorkKind.BATCHED
    for count, m, k, n in ((48, 128, 64, 128), (48, 128, 128, 64), (8, 256, 64, 256)):
        yield _Operation(
            kind=kind,
            amount=2.0 * count * scale * m * k * n,
            make=lambda c=count * scale, m=m, k=k, n=n: _product(
                _tensor(c, m, k, device=device, dtype=dtype), _tensor(c, n, k, device=device, dtype=dtype).mT
            ),
        )


def _cold(elements: int) -> int:
    """Returns how many matrices of as many elements caches do not hold."""
    return max(2, _COLD // elements)


def _forward_of_cold(rows: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> Trial:
    x, weight = itertools.cycle(rows), itertools.cycle(weights)
    return lambda: next(x) @ next(weight).t()


def _input_gradient(_: torch.Tensor, weights: torch.Tensor, gradients: torch.Tensor) -> Trial:
    weight, gradient = itertools.cycle(weights), itertools.cycle(gradients)
    return lambda: next(gradient) @ next(weight)


def _weight_gradient(rows: torch.Tensor, _: torch.Tensor, gradients: torch.Tensor) -> Trial:
    x, gradient = itertools.cycle(rows), itertools.cycle(gradients)
    return lambda: next(gradient).t() @ next(x)


# The three products of a linear layer, of its rows, weights and gradients of its results.
_LINEAR = _forward_of_cold, _input_gradient, _weight_gradient


def _product(left: torch.Tensor, right: torch.Tensor) -> Trial:
    return lambda: left @ right


def _forward_and_backward(run: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> tuple[Trial, Trial]:
    """The two calls of a function: its forward and its backward, which uses what that has kept."""
    out = run()
    grad = torch.ones_like(out)
    return run, lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _both(
    kinds: tuple[WorkKind, WorkKind],
    amounts: tuple[float, float],
    make: Callable[[], tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]],
) -> Iterator[_Operation]:
    for index in (0, 1):
        yield _Operation(
            kind=kinds[index],
            amount=amounts[index],
            make=lambda index=index: _forward_and_backward(*make())[index],
            turns=_TURNS,
        )


def _attention(device: torch.device, dtype: torch.dtype, scale: int) -> Iterator[_Operation]:
    kinds = (
        (WorkKind.HALF_ATTENTION, WorkKind.HALF_ATTENTION_BACKWARD)
        if dtype is _HALF
        else (WorkKind.ATTENTION, WorkKind.ATTENTION_BACKWARD)
    )
    shapes = ((4 * scale, 256, True), (4 * scale, 256, False), (8 * scale, 128, True), (8 * scale, 64, False))
    for rows, places, is_causal in shapes:

        def make(rows: int = rows, places: int = places, is_causal: bool = is_causal) -> Any:  # noqa: FBT001, a loop's
            q, k, v = (_tensor(rows, 4, places, 64, device=device, dtype=dtype, grad=True) for _ in range(3))
            return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal), (q, k, v)

        flops = attention_flops(4.0 * rows * 4 * places * places * 64, places)
        there, back = kinds[0], (kinds[1], 2.5 * flops)
        if dtype is _HALF and places < FEW_PLACES:
            back = WorkKind.HALF_ATTENTION_ROWS, 4.0 * rows * places
        yield from _both((there, back[0]), (flops, back[1]), make)


def _convolutions(device: torch.device, dtype: torch.dtype, scale: int) -> Iterator[_Operation]:
    half = (WorkKind.HALF_CONVOLUTION, WorkKind.HALF_CONVOLUTION)
    wide = (WorkKind.CONVOLUTION, WorkKind.CONVOLUTION_BACKWARD)
    narrow = (WorkKind.NARROW_CONVOLUTION, WorkKind.NARROW_CONVOLUTION_BACKWARD)
    for inputs, outputs, size, kernel, stride in (
        (64, 64, 32, 3, 1),
        (128, 128, 16, 3, 1),
        (96, 96, 16, 1, 1),
        (96, 192, 32, 1, 2),
        (192, 96, 16, 3, 2),
        (24, 24, 32, 3, 1),
        (48, 48, 16, 3, 1),
        (96, 24, 32, 1, 1),
        (32, 96, 32, 1, 1),
    ):

        def make(
            inputs: int = inputs, outputs: int = outputs, size: int = size, kernel: int = kernel, stride: int = stride
        ) -> Any:
            x = _tensor(4 * scale, inputs, size, size, device=device, dtype=dtype, grad=True)
            weight = _tensor(outputs, inputs, kernel, kernel, device=device, dtype=dtype, grad=True)
            return lambda: functional.conv2d(x, weight, padding=kernel // 2, stride=stride), (x, weight)

        flops = 2.0 * 4 * scale * inputs * outputs * kernel**2 * (size // stride) ** 2
        full = narrow if min(inputs, outputs) < 64 else wide
        yield from _both(half if dtype is _HALF else full, (flops, 2 * flops), make)
    if dtype is _HALF:
        return
    for kernel in (3, 5):

        def make_grouped(kernel: int = kernel) -> Any:
            x = _tensor(4, 128, 32, 32, device=device, grad=True)
            weight = _tensor(128, 1, kernel, kernel, device=device, grad=True)
            return lambda: functional.conv2d(x, weight, padding=kernel // 2, groups=128), (x, weight)

        flops = 2.0 * 4 * 128 * kernel**2 * 32 * 32
        grouped = (WorkKind.GROUPED_CONVOLUTION, WorkKind.GROUPED_CONVOLUTION)
        yield from _both(grouped, (flops, 2 * flops), make_grouped)


def _memory(device: torch.device) -> Iterator[_Operation]:
    """Operations that memory bounds; small ones pass through more tensors than a cache holds."""
    for kind, elements, count in ((WorkKind.STREAMED, _SMALL, 8), (WorkKind.STREAMED_LARGE, _LARGE, 1)):
        nbytes = 4.0 * elements * count
        for weight, function in (
            (3, lambda a, b: a + b),
            (3, lambda a, b: a.add_(b)),
            (2, lambda a, _: a * 0.5),
            (2, lambda a, b: b.copy_(a)),
        ):
            yield _Operation(
                kind=kind,
                amount=weight * nbytes,
                make=lambda n=elements, c=count, f=function: _over_pairs(device, n, c, f),
            )
    for function in (
        lambda a, b: a + b,
        lambda a, _: a * 0.5,
        lambda a, _: a.view(-1, 512).sum(0),
        lambda a, _: a.float(),
    ):
        yield _Operation(
            kind=WorkKind.HALF_ELEMENTS,
            amount=2.0 * _SMALL,
            make=lambda f=function: _over_pairs(device, _SMALL // 4, 8, f, dtype=_HALF),
        )
    nbytes = 4.0 * _SMALL * 8
    for function in (lambda a, _: a.view(-1, 512).sum(0), lambda a, _: a.view(-1, 512).mean(-1)):
        yield _Operation(
            kind=WorkKind.REDUCED, amount=nbytes, make=lambda f=function: _over_pairs(device, _SMALL, 8, f)
        )
    yield _Operation(
        kind=WorkKind.TRANSPOSED,
        amount=2 * nbytes,
        make=lambda: _over_pairs(device, _SMALL, 8, lambda a, _: a.view(-1, 512).t().contiguous()),
    )
    rows, vocabulary, width = 1024, 8192, 512
    taken, whole = 4.0 * rows * width, 4.0 * vocabulary * width
    small = 8.0 * rows

    def make() -> Any:
        table = _tensor(vocabulary, width, device=device, grad=True)
        places = torch.randint(vocabulary, (rows,), device=device)
        return lambda: functional.embedding(places, table), (table,)

    yield from _both((WorkKind.GATHERED, WorkKind.GATHERED), (taken + small, whole + small), make)


def _over_pairs(
    device: torch.device, elements: int, count: int, function: Callable[[Any, Any], object], dtype: torch.dtype = _FP32
) -> Trial:
    def tensor() -> torch.Tensor:
        return _tensor(elements, device=device, dtype=dtype)

    pairs = [(tensor(), tensor()) for _ in range(count)]
    held: deque[object] = deque(maxlen=max(2, _HELD_BYTES // (elements * dtype.itemsize)))

    def run() -> None:
        for a, b in pairs:
            held.append(function(a, b))

    return run


def _elements(device: torch.device) -> Iterator[_Operation]:
    """Operations whose functions are what is waited for."""
    elements = _SMALL // 2
    fast, slow = WorkKind.FUNCTIONS, WorkKind.SLOW_FUNCTIONS

    def pair(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        # Functions of one value only would be foretold.
        x = torch.randn(elements // 512, 512, device=device, requires_grad=True)
        return lambda: function(x), (x,)

    for function, name in ((functional.gelu, "gelu_backward"), (functional.silu, "silu_backward")):
        amounts = elements, elements * BACKWARD_OF[name]
        yield from _both((fast, fast), amounts, lambda f=function: pair(f))
    yield _Operation(kind=fast, amount=elements, make=lambda: pair(torch.exp)[0])
    yield from _both((slow, slow), (elements, elements), lambda: pair(lambda x: functional.gelu(x, approximate="tanh")))
    yield _Operation(kind=slow, amount=elements, make=lambda: pair(torch.tanh)[0])
    normal = (WorkKind.NORMALIZED, WorkKind.NORMALIZED_BACKWARD)
    weight = _tensor(512, device=device, grad=True)
    for function in (
        lambda x: functional.layer_norm(x, (512,), weight, weight),
        lambda x: functional.softmax(x, -1),
        lambda x: functional.log_softmax(x, -1),
    ):
        yield from _both(normal, (elements, elements), lambda f=function: pair(f))
    for window in (2, 3):
        yield _Operation(
            kind=WorkKind.WINDOWED,
            amount=window**2 * (elements // 4),
            make=lambda w=window: pair(lambda x: functional.max_pool2d(x.view(-1, 32, 32), w, 2, w // 3))[0],
        )
    yield _Operation(
        kind=slow,
        amount=elements,
        make=lambda: pair(lambda x: functional.batch_norm(x.view(4, -1, 32, 32), None, None, training=True))[0],
    )
    yield _Operation(
        kind=WorkKind.DRAWN, amount=elements, make=lambda: pair(lambda x: functional.dropout(x.detach(), 0.1))[0]
    )
    yield _Operation(
        kind=WorkKind.DRAWN, amount=elements, make=lambda: pair(lambda x: torch.empty_like(x).bernoulli_(0.9))[0]
    )


def _fresh(nbytes: int, *, is_huge: bool) -> Trial:
    """Writes to memory that the process has never touched, mapped as the allocator maps it."""

    def run() -> None:
        mapped = mmap.mmap(-1, nbytes)
        if is_huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # advice: a kernel without huge pages declines
                mapped.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(mapped, dtype=torch.uint8).fill_(1)

    return run
