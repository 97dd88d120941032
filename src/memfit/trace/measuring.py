"""Finds what operations allocate inside themselves by running them, where no table knows it.

In: an operation as a trace meets it, mostly on fake tensors. Out: bytes alive for a moment above
arguments and results.

[Note: small runs]
An operation whose arguments and results take no more than 2 MiB runs as it is, on tensors of its
own. A larger one may be larger than what is left below a limit, and slow. So it runs on small
tensors of the same dtypes, with strides in the same proportions and the same other arguments: sizes
are halved wherever they stand, so that what belonged together does still, until it is small; and if
it took anything, once more at about twice that. What it takes follows from the two runs: a straight
line in the bytes of its largest tensor, or a power of them where it grows faster than they do. An
operation that cannot be made smaller, or that does not bear the values that it is given here
(integers are 0, masks true), is taken to copy its largest operand.

Of a convolution only the rows are made fewer: with other channels or pictures oneDNN goes another
way, and what it takes grows by as much with each row. Where the smaller of two runs takes nothing,
that was another way too, and the larger one tells what a row takes; where both do, the table is
asked.

Only torch's own operators are tried; others may do more than compute.

[Note: code that comes in]
The first run of an operator in a dtype brings pages of libraries' code into the process, for good:
some 10 MiB in a first step. So each that treats elements one by one, or makes its result and
nothing else, runs once on small tensors while a step is traced. What its code takes is there, then,
when the base of a limit is measured, and need not be guessed. Not those whose kernels trust that
sizes belong together (attention divides by a ratio of heads), nor any on integers (a division by 0
ends the process).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memfit.trace.traced_trees import operator_tensors
from memfit.trace.workspaces import PROCESSOR_TABLE, ScratchTable

Watch = Callable[[Callable[[], object]], int]
"""Runs a function and tells the most bytes of tensors that were alive meanwhile above what is alive
after it, its result held.
"""
Sizes = Mapping[int, int]
"""New sizes of dimensions by old; those that are not in it stay."""

# Operations on less are not looked at: a few of their copies are lost in a limit's reserve.
_LEAST_BYTES = 32 << 10
_AS_IT_IS_BYTES = 2 << 20
_SMALL_BYTES = 512 << 10
# What an operation takes whatever its size: counters, rounding. Of a very small run, this share.
_NOTHING_BYTES = 4096
_NOTHING_SHARE = 1 / 64
# Kinds of operations that are remembered: a model has some hundreds for each shape of its batches.
_MOST_LAWS = 1 << 14
# Smaller sizes are kernels, groups, heads: with others an operation may go another way.
_LEAST_SIZE = 16
_NAMESPACES = ("aten", "prims", "mkldnn", "torchvision")
aten = torch.ops.aten
# They make what they return, and nothing else.
_FREE = {
    aten._to_copy, aten.detach, aten._unsafe_view, aten.embedding, aten.fill_, aten.zero_,
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like,
}  # fmt: skip
# The table knows what oneDNN's ways take; small, strange or grouped convolutions go others, and may
# take many times their arguments.
_TABLE_AND_RUNS = {aten.convolution, aten.convolution_backward}
_CONVOLUTION_AS_IT_IS_BYTES = 4 << 20
# Of a convolution's tensors, on the rows that it is tried with; and of one row, above which it is
# not tried so.
_ROWS_BYTES = 8 << 20
_MOST_ROW_BYTES = 32 << 20
# Their kernels trust that sizes belong together, unchecked.
_NEVER_SMALLER = {aten._fft_c2r}
# See [Note: code that comes in]: operators with the dtypes that they have run in. Of the process.
_have_run: set[Any] = set()


@dataclass(frozen=True)
class _Law:
    """Scratch memory of an operation by the bytes of its largest argument or result, from
    one or two runs.

    Attributes:
        largest_bytes, hidden_bytes: of the larger run.
        slope: bytes inside for each byte more.
        power: where they grow faster than that, above 1.
        is_exact: the run was of the size that was asked.
    """

    largest_bytes: int
    hidden_bytes: int
    slope: float = 0.0
    power: float = 1.0
    is_exact: bool = False

    def of(self, largest_bytes: int) -> int:
        """Bytes inside an operation on so many."""
        if self.power > 1.0:
            return math.ceil(self.hidden_bytes * (largest_bytes / self.largest_bytes) ** self.power)
        return max(0, math.ceil(self.hidden_bytes + self.slope * (largest_bytes - self.largest_bytes)))


class Workspaces:
    """Scratch memory of operations, from the table or else measured, each kind once.

    See [Note: small runs].

    Memory: 4 MiB while an operation runs, of a convolution up to twice 32, and what it takes
    itself.

    Args:
        watch: measures tensors on the CPU; None: only the table is asked.
        apart: context in which operations are tried: where they are not to count as the device's.
        table: of the device that plans are for.
    """

    def __init__(
        self,
        watch: Watch | None = None,
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
        table: ScratchTable = PROCESSOR_TABLE,
    ) -> None:
        self.table = table
        self._watch = watch
        self._apart = apart
        self._laws: dict[Any, _Law | None] = {}
        # Of convolutions on half of few rows, and on all of these.
        self._rows: dict[Any, tuple[int, int] | None] = {}

    def bytes_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
        """Bytes that the operation holds inside itself beyond its arguments and results.

        Args:
            func: the operator, as a dispatch mode receives it.
            args: its positional arguments.
            kwargs: the others.
            out: its result.
        """
        known = self.table.workspace_bytes(func, args, out)
        packet = func._overloadpacket if isinstance(func, torch._ops.OpOverload) else None
        is_processor = self.table is PROCESSOR_TABLE
        if is_processor and (known is not None or packet in _FREE):
            self._bring_code(func, args, kwargs, out)
        has_runs = is_processor and packet in _TABLE_AND_RUNS
        if (known is not None and not has_runs) or self._watch is None:
            return known or 0
        if packet is None or packet in _FREE or func.namespace not in _NAMESPACES:
            return known or 0
        tensors = list(operator_tensors((args, kwargs)))
        found = [*tensors, *operator_tensors(out)]
        if (
            not tensors
            or (_total_bytes(found) < _LEAST_BYTES and known is None)
            or any(t.device.type != "cpu" for t in found)
        ):
            return known or 0
        if packet in _TABLE_AND_RUNS and _total_bytes(found) > _CONVOLUTION_AS_IT_IS_BYTES:
            hidden = self._by_rows(func, args, kwargs)
            if hidden:
                return hidden
        law = self._law(func, args, kwargs, found)
        if law is None:
            return known or _largest_bytes(tensors)
        largest = _largest_bytes(found)
        return law.of(largest) if law.is_exact else max(law.of(largest), known or 0)

    def _bring_code(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Runs an operator once in the dtypes that it is given; see [Note: code that comes in]."""
        if self._watch is None or not isinstance(func, torch._ops.OpOverload) or func.is_view:
            return
        packet = func._overloadpacket
        found = [*operator_tensors((args, kwargs)), *operator_tensors(out)]
        if func.namespace not in _NAMESPACES or not (torch.Tag.pointwise in func.tags or packet in _FREE):
            return
        is_whole = any(not (t.is_floating_point() or t.dtype is torch.bool) for t in found) and packet not in _FREE
        if is_whole or any(t.numel() == 0 for t in found):
            return
        key = (func, *(tensor.dtype for tensor in found))
        if key in _have_run or any(tensor.device.type != "cpu" for tensor in found):
            return
        _have_run.add(key)
        self._run(func, args, kwargs, _halved(found, _SMALL_BYTES, _all))

    def _law(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Sequence[torch.Tensor]
    ) -> _Law | None:
        """Returns what runs of this kind measured, earlier or new ones; None if there can
        be none.
        """
        if len(self._laws) >= _MOST_LAWS:
            self._laws.clear()
            self._rows.clear()
        is_convolution = func._overloadpacket in _TABLE_AND_RUNS
        if _total_bytes(found) <= (_CONVOLUTION_AS_IT_IS_BYTES if is_convolution else _AS_IT_IS_BYTES):
            key = (func, None, _described((args, kwargs), {}))
            if key not in self._laws:
                run = self._run(func, args, kwargs, {})
                self._laws[key] = run and _Law(*run, is_exact=True)
            return self._laws[key]
        for halve in () if func._overloadpacket in _NEVER_SMALLER else (_all, _largest):
            sizes = _halved(found, _SMALL_BYTES, halve)
            key = (func, halve, _described((args, kwargs), sizes))
            if key not in self._laws:
                self._laws[key] = self._extrapolated(func, args, kwargs, sizes, _halved(found, 2 * _SMALL_BYTES, halve))
            if self._laws[key] is not None:
                return self._laws[key]
        return None

    def _by_rows(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """Bytes inside a convolution, from two runs on fewer rows; None where there can be none."""
        count = 2 if func._overloadpacket is aten.convolution_backward else 1
        rows = args[0].shape[0]
        row_bytes = sum(tensor.nbytes for tensor in args[:count]) // max(rows, 1)
        if args[0].dim() < 3 or rows < 2 or row_bytes > _MOST_ROW_BYTES:
            return None
        few = max(2, min(rows, _ROWS_BYTES // max(row_bytes, 1)))
        key = (func, few, _described((args, kwargs), {}))
        if key not in self._rows:
            tried = [self._run_rows(func, args, kwargs, count, number) for number in (few // 2, few)]
            self._rows[key] = None if None in tried else (tried[0] or 0, tried[1] or 0)
        found = self._rows[key]
        if found is None:
            return None
        less, hidden = found
        if less <= _NOTHING_BYTES:
            return math.ceil(hidden * rows / few)  # half of the rows went another way
        return hidden + max(0, math.ceil((hidden - less) * (rows - few) / (few - few // 2)))

    def _run_rows(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], count: int, rows: int) -> int | None:
        fewer = [*(tensor[:rows] for tensor in args[:count]), *args[count:]]
        found = self._run(func, fewer, kwargs, {})
        return None if found is None else found[1]

    def _extrapolated(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sizes, wider: Sizes
    ) -> _Law | None:
        small = self._run(func, args, kwargs, sizes)
        if small is None:
            return None
        largest, hidden = small
        if hidden <= min(_NOTHING_BYTES, largest * _NOTHING_SHARE):
            return _Law(largest, hidden)
        twice = self._run(func, args, kwargs, wider) if wider != sizes else None
        if twice is None or twice[0] <= largest:
            return _Law(largest, hidden, slope=hidden / largest)
        if twice[1] > hidden * twice[0] / largest * 1.02 + _NOTHING_BYTES:
            return _Law(*twice, power=math.log(twice[1] / hidden) / math.log(twice[0] / largest))
        return _Law(*twice, slope=max(0.0, (twice[1] - hidden) / (twice[0] - largest)))

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sizes) -> tuple[int, int] | None:
        """(bytes of the largest argument or result, bytes inside) of one run; None if it fails."""
        assert self._watch is not None
        random = torch.get_rng_state()
        results: list[Any] = []
        try:
            with self._apart(), unset_fake_temporarily(), torch.no_grad():
                made: dict[int, torch.Tensor] = {}
                own_args, own_kwargs = (_made(part, sizes, made) for part in (tuple(args), dict(kwargs)))

                def run() -> Any:
                    results.append(func(*own_args, **own_kwargs))

                hidden = self._watch(run)
                return _largest_bytes([*made.values(), *operator_tensors(results[0])]), hidden
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError):
            return None  # it does not go with other sizes, or not with these values
        finally:
            torch.set_rng_state(random)


def _total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of all tensors, one that comes again once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _largest_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return max(t.numel() * t.element_size() for t in tensors)


def _all(sizes: Iterable[int]) -> Iterator[int]:
    yield from sizes


def _largest(sizes: Iterable[int]) -> Iterator[int]:
    most = max(sizes)
    return (size for size in sizes if size == most)


def _halved(tensors: Sequence[torch.Tensor], most_bytes: int, halve: Callable[[Iterable[int]], Iterable[int]]) -> Sizes:
    """Sizes halved again and again, until these tensors take no more than `most_bytes`.

    Args:
        tensors: arguments and results.
        most_bytes: of all of them together.
        halve: which of the sizes, as they are now, are halved next.
    """
    shapes = [(tuple(t.shape), t.element_size()) for t in {id(t): t for t in tensors}.values()]
    sizes = {size: size for shape, _ in shapes for size in shape if size >= _LEAST_SIZE}
    while sizes and max(sizes.values()) > 2:
        if sum(math.prod(sizes.get(size, size) for size in shape) * width for shape, width in shapes) <= most_bytes:
            break
        chosen = set(halve(sizes.values()))
        sizes = {size: -(-now // 2) if now in chosen else now for size, now in sizes.items()}
    return sizes


def _described(item: Any, sizes: Sizes) -> Any:
    """Key of a run: all that its result depends on."""
    if isinstance(item, torch.Tensor):
        return (*_layout(item, sizes), item.dtype)
    if isinstance(item, list | tuple):
        return tuple(_described(part, sizes) for part in item)
    if isinstance(item, dict):
        return tuple((name, _described(part, sizes)) for name, part in item.items())
    return _sized(item, sizes) if isinstance(item, int) else repr(item)


def _made(item: Any, sizes: Sizes, made: dict[int, torch.Tensor]) -> Any:
    """The same arguments, small and real."""
    if isinstance(item, torch.Tensor):
        if id(item) not in made:
            made[id(item)] = _stand_in(item, sizes)
        return made[id(item)]
    if isinstance(item, list | tuple):
        return type(item)(_made(part, sizes, made) for part in item)
    if isinstance(item, dict):
        return {name: _made(part, sizes, made) for name, part in item.items()}
    return _sized(item, sizes)


def _sized(item: Any, sizes: Sizes) -> Any:
    return sizes.get(item, item) if isinstance(item, int) and not isinstance(item, bool) else item


def _stand_in(tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    shape, stride = _layout(tensor, sizes)
    small = torch.empty_strided(shape, stride, dtype=tensor.dtype)
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return small.fill_(tensor.dtype is torch.bool)
    small.fill_(0.5)
    if len(shape) > 1 and shape[-1] == shape[-2] and 0 not in stride:
        small.diagonal(dim1=-2, dim2=-1).add_(shape[-1])  # invertible, where that is asked
    return small


def _layout(tensor: torch.Tensor, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides with other sizes: a stride shrinks as the dimensions that lie inside of it
    do; padding between rows stays in proportion.
    """
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    small, steps = tuple(sizes.get(size, size) for size in shape), list(stride)
    inner = -1
    for dim in sorted(range(len(shape)), key=lambda d: (stride[d], shape[d])):
        if stride[dim] == 0 or shape[dim] <= 1:
            continue
        if inner >= 0:
            share = stride[dim] / (shape[inner] * stride[inner])
            steps[dim] = math.ceil(share * small[inner] * steps[inner])
        inner = dim
    return small, tuple(steps)
