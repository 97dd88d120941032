"""Known values beside fake tensors, so that programs may look at the integers of their batch, and
likely ones for what they read besides.

In: the real integer and boolean tensors of a batch. Out: the values of what is computed from them
alone (masks, lengths, positions), which answer `.item()`, `if mask.all()` and the shapes of
`nonzero`. Floating point data has no values here, unless it is tiny.

Memory: the values of at most `_MOST_ELEMENTS` elements each, on the CPU, as long as the fake tensor
lives.

[Note: likely values]
A loss that reads one number (`.item()` to log it, `if loss > 3`, `assert torch.isfinite(x).all()`,
`.tolist()`, `.numpy()`, a hook that does so) is an ordinary loss, and what it reads seldom changes
what it computes. So each fake tensor without a value stands for one *likely* element: numbers near
one half where something is made of data, and what operations by element make of these. It is
finite, as the numbers of a healthy run are: a result that is not is replaced. A read is answered by
it. What it decides may be decided otherwise in a real step, as by any other batch: calls that the
trace did not foresee are departures, never wrong. Shapes are not guessed: a program whose shapes
follow from its data is traced on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_MOST_ELEMENTS = 1 << 22
_MOST_FLOATS = 1 << 12
_ATTRIBUTE = "_memfit_value"
_LIKELY = "_memfit_likely"
# Neighbours differ, so that a difference of two is not zero, of which there is no logarithm.
_GOLDEN = 0.618033988749895
aten = torch.ops.aten
_WITHOUT_VALUE = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}


def is_small_enough(tensor: torch.Tensor) -> bool:
    """Tells whether values of such a tensor are kept."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() <= _MOST_FLOATS
    return tensor.numel() <= _MOST_ELEMENTS


def give_value(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Attaches a value, which operations in place will change with the fake tensor."""
    setattr(fake, _ATTRIBUTE, value)


def give_copy(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Attaches a copy of a real tensor, in CPU memory, if it is small enough."""
    if is_small_enough(real):
        with unset_fake_temporarily(), torch.no_grad():
            give_value(fake, real.detach().to("cpu", copy=True))


class Values:
    """Answers operations whose arguments all have values.

    Args:
        is_trusted: False for a tensor whose storage was changed by an operation without values.
        distrust: told the tensors that such an operation changed.
        guesses: reads of what has no value are answered by likely ones; costs a small operation for
            each of the program's.
    """

    def __init__(
        self, is_trusted: Callable[[torch.Tensor], bool], distrust: Callable[[torch.Tensor], None], *, guesses: bool
    ) -> None:
        self._is_trusted = is_trusted
        self._distrust = distrust
        self._guesses = guesses
        self._made = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor, if it is known."""
        if not isinstance(tensor, FakeTensor):
            # A constant that the program made itself, such as the list in x[:, [0, -1]].
            return tensor if is_small_enough(tensor) and tensor.device.type == "cpu" else None
        value = getattr(tensor, _ATTRIBUTE, None)
        return value if value is not None and self._is_trusted(tensor) else None

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """(True, result) of an operation that fake tensors alone cannot answer; (False, None) if
        values do not help.
        """
        needs_values = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
        if not needs_values:
            return False, None
        if func._overloadpacket is aten.index:
            return self._answer_index(func, args)
        result = self._compute(func, args, kwargs)
        if result is None and self._guesses and torch.Tag.data_dependent_output in func.tags:
            result = self._guess(func, args, kwargs)
        if result is None:
            return False, None
        if not isinstance(result, torch.Tensor):
            return True, result
        fake = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=_device_of(args))
        give_value(fake, result)
        return True, fake

    def follow(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, read: Sequence[torch.Tensor]
    ) -> None:
        """Keeps values up to date after an operation has made (or changed) `out` of the tensors
        `read`.
        """
        if not self._guesses and not func._schema.is_mutable:
            for tensor in read:
                # Most of a model's tensors have none: said at once.
                if type(tensor) is FakeTensor and not hasattr(tensor, _ATTRIBUTE):
                    return
        made = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, torch.Tensor)]
        can_follow = (
            bool(made)
            and all(self.of(t) is not None for t in read)
            and all(is_small_enough(t) for t in made)
            and func._overloadpacket not in _WITHOUT_VALUE
            and torch.Tag.nondeterministic_seeded not in func.tags
        )
        result = self._compute(func, args, kwargs) if can_follow else None
        if result is None:
            if func._schema.is_mutable:
                for changed in made:
                    self._distrust(changed)
            for fake in made if self._guesses else ():
                setattr(fake, _LIKELY, self._likely_result(func, args, kwargs, fake))
            return
        results = [
            t for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, torch.Tensor)
        ]
        for fake, value in zip(made, results, strict=True):
            give_value(fake, value)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a tensor that the program reads whole (`.numpy()`), or a tensor of likely
        ones.
        """
        value = self.of(tensor)
        if value is not None:
            return value
        with unset_fake_temporarily():
            return self._likely(tensor).expand(tuple(tensor.shape)).clone()

    def _guess(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of an operation that reads numbers for likely ones; None if it cannot
        be known.
        """
        if torch.Tag.dynamic_output_shape in func.tags:
            return None
        try:
            with unset_fake_temporarily(), torch.no_grad():
                result = func(*map(self._likely_of, args), **{name: self._likely_of(a) for name, a in kwargs.items()})
        except (RuntimeError, TypeError, ValueError):
            return None
        return result

    def _likely_result(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fake: torch.Tensor
    ) -> torch.Tensor:
        """The likely element of a result: of an operation by element its result, else that of its
        first tensor where the dtype is the same.
        """
        found: Any = None
        with unset_fake_temporarily(), torch.no_grad():
            if torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
                try:
                    found = func(*map(self._likely_of, args), **{n: self._likely_of(a) for n, a in kwargs.items()})
                except (RuntimeError, TypeError, ValueError):
                    found = None
            elif torch.Tag.nondeterministic_seeded not in func.tags:
                first = next((a for a in args if isinstance(a, torch.Tensor)), None)
                found = None if first is None else self._likely(first)
            is_told = isinstance(found, torch.Tensor) and found.numel() == 1
            # Of sums and counts of integers nothing is known; whether all or any are so is what the
            # one says.
            if is_told and (found.dtype == fake.dtype or fake.dtype is torch.bool):
                likely = found.reshape(()).to(fake.dtype)
                if not likely.is_floating_point() or bool(likely.isfinite()):
                    return likely
            return self._fresh(fake.dtype)

    def _fresh(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.ones((), dtype=dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.tensor(0, dtype=dtype)
        self._made += 1
        return torch.tensor(0.4 + 0.2 * (self._made * _GOLDEN % 1.0)).to(dtype)

    def _likely(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self.of(tensor)
        if value is not None and value.numel():
            return value.detach().reshape(-1)[0]
        likely = getattr(tensor, _LIKELY, None)
        if likely is None:
            with unset_fake_temporarily():
                likely = self._fresh(tensor.dtype)
            if isinstance(tensor, FakeTensor):
                setattr(tensor, _LIKELY, likely)
        return likely

    def _likely_of(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self._likely(item)
        if isinstance(item, torch.device):
            return torch.device("cpu")
        if type(item) in (list, tuple):
            return type(item)(self._likely_of(part) for part in item)
        return item

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            values = [self._value_of(arg) for arg in args]
            named = {name: self._value_of(arg) for name, arg in kwargs.items()}
        except _UnknownValueError:
            return None
        with unset_fake_temporarily(), torch.no_grad():
            return func(*values, **named)

    def _value_of(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            value = self.of(item)
            if value is None:
                raise _UnknownValueError
            return value
        if isinstance(item, torch.device):
            return torch.device("cpu")
        if type(item) in (list, tuple):
            return type(item)(self._value_of(part) for part in item)
        return item

    def _answer_index(self, func: Any, args: Sequence[Any]) -> tuple[bool, Any]:
        """x[mask] has the shape of x[mask.nonzero()], and fake tensors understand indexing by
        positions.
        """
        positions: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
                continue
            value = self.of(index)
            if value is None:
                return False, None
            with unset_fake_temporarily():
                hits = int(value.count_nonzero())
            positions += [torch.empty(hits, dtype=torch.int64, device=index.device) for _ in range(index.dim())]
        out = func(args[0], positions)
        value = self._compute(func, args, {}) if is_small_enough(out) else None
        if value is not None:
            give_value(out, value)
        return True, out


class _UnknownValueError(Exception):
    """An argument has no value here."""


def _device_of(args: Sequence[Any]) -> torch.device:
    return next(arg.device for arg in args if isinstance(arg, torch.Tensor))


@contextmanager
def readable_fakes(values: Values) -> Iterator[None]:
    """Lets programs read fake tensors in the ways that fake tensors refuse: `.numpy()` and
    formatting (`f"{loss:.3f}"`).
    """

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        with unset_fake_temporarily():
            return values.read(tensor).numpy(force=force)

    def format_one(tensor: torch.Tensor, spec: str) -> str:
        return format(tensor.item(), spec) if spec and tensor.dim() == 0 else object.__format__(tensor, spec)

    changed: Any = FakeTensor
    replaced = {name: vars(FakeTensor).get(name) for name in ("numpy", "__format__")}
    changed.numpy, changed.__format__ = numpy, format_one
    try:
        yield
    finally:
        for name, before in replaced.items():
            if before is None:
                delattr(changed, name)
            else:
                setattr(changed, name, before)
