"""Known values beside fake tensors, so that programs may look at the integers of their batch.

In: the real integer and boolean tensors of a batch. Out: the values of what is computed from them alone (masks,
lengths, positions), which answer `.item()`, `if mask.all()` and the shapes of `nonzero`. Floating point data has no
values here, unless it is tiny.

Memory: the values of at most `_MOST_ELEMENTS` elements each, on the CPU, as long as the fake tensor lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_MOST_ELEMENTS = 1 << 22
_MOST_FLOATS = 1 << 12
_ATTRIBUTE = "_memfit_value"
aten = torch.ops.aten
_WITHOUT_VALUE = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}


def is_small_enough(tensor: torch.Tensor) -> bool:
    """Whether values of such a tensor are kept."""
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
    """

    def __init__(self, is_trusted: Callable[[torch.Tensor], bool], distrust: Callable[[torch.Tensor], None]) -> None:
        self._is_trusted = is_trusted
        self._distrust = distrust

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor, if it is known."""
        if not isinstance(tensor, FakeTensor):
            # A constant that the program made itself, such as the list in x[:, [0, -1]].
            return tensor if is_small_enough(tensor) and tensor.device.type == "cpu" else None
        value = getattr(tensor, _ATTRIBUTE, None)
        return value if value is not None and self._is_trusted(tensor) else None

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """(True, result) of an operation that fake tensors alone cannot answer; (False, None) if values do not help."""
        needs_values = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
        if not needs_values:
            return False, None
        if func._overloadpacket is aten.index:
            return self._answer_index(func, args)
        result = self._compute(func, args, kwargs)
        if result is None:
            return False, None
        if not isinstance(result, torch.Tensor):
            return True, result
        fake = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=_device_of(args))
        give_value(fake, result)
        return True, fake

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Keeps values up to date after an operation has made (or changed) `out`."""
        made = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, torch.Tensor)]
        can_follow = (
            bool(made)
            and all(is_small_enough(t) for t in made)
            and func._overloadpacket not in _WITHOUT_VALUE
            and torch.Tag.nondeterministic_seeded not in func.tags
        )
        result = self._compute(func, args, kwargs) if can_follow else None
        if result is None:
            if func._schema.is_mutable:
                for changed in made:
                    self._distrust(changed)
            return
        results = [
            t for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, torch.Tensor)
        ]
        for fake, value in zip(made, results, strict=True):
            give_value(fake, value)

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
        """x[mask] has the shape of x[mask.nonzero()], and fake tensors understand indexing by positions."""
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
