"""The tensors inside a region: names, dtypes, shapes and places, and how two lists of them differ.

In: what a job has, and what a manifest says. Out: checked tables; differences in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from memfit.store.placement import RegionSpec

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
_LONGEST_NAME = 512
_MOST_DIMENSIONS = 64
_LARGEST = 1 << 60
"""Most elements of a dimension, and of all together, zeros apart."""
_SHOWN_DIFFERENCES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """A tensor of a region: elements in row-major order from `offset` on."""

    name: str
    """A parameter's name, or a state's (`exp_avg` of a parameter), for people; once in a region."""
    dtype: str
    """Torch's name without the prefix: "float32", "bfloat16"."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the region."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the manifest."""
    return str(dtype).removeprefix("torch.")


def problem_of_tensors(tensors: Sequence[TensorPlace], region_bytes: int) -> str | None:
    """Returns the problem with the tensors of a region, in words, or None."""
    names: set[str] = set()
    for tensor in tensors:
        problem = _problem_of_tensor(tensor, region_bytes)
        if problem is not None:
            return problem
        if tensor.name in names:
            return f"the tensor {tensor.name!r:.200} is there twice"
        names.add(tensor.name)
    end = 0
    for tensor in sorted(tensors, key=lambda found: (found.offset, found.nbytes)):
        if tensor.nbytes and tensor.offset < end:
            return f"the tensor {tensor.name!r:.200} overlaps the one before it"
        end = max(end, tensor.offset + tensor.nbytes)
    return None


def _problem_of_tensor(tensor: TensorPlace, region_bytes: int) -> str | None:
    name, shape = tensor.name, tensor.shape
    if not isinstance(name, str) or not name or len(name) > _LONGEST_NAME or not name.isprintable():
        return f"a tensor's name is 1 to {_LONGEST_NAME} printable characters, not {name!r:.80}"
    if tensor.dtype not in _DTYPES:
        return f"the tensor {name!r:.200} has the dtype {tensor.dtype!r:.80}, which memfit does not know"
    if len(shape) > _MOST_DIMENSIONS or any(type(size) is not int or not 0 <= size <= _LARGEST for size in shape):
        return f"the tensor {name!r:.200} has the shape {list(shape[:8])!r:.160}"
    if math.prod(max(size, 1) for size in shape) > _LARGEST:
        return f"the tensor {name!r:.200} of shape {list(shape[:8])!r:.160} is larger than any memory"
    if type(tensor.offset) is not int or tensor.offset < 0 or tensor.offset + tensor.nbytes > region_bytes:
        return (
            f"the tensor {name!r:.200} at {tensor.offset!r:.40} does not lie inside the region's {region_bytes} bytes"
        )
    return None


def tensors_between(tensors: Sequence[TensorPlace], start: int, end: int) -> list[str]:
    """The names of the tensors that have bytes in a range of their region, in order."""
    return [t.name for t in tensors if t.nbytes and t.offset < end and start < t.offset + t.nbytes]


def differences(wanted: Mapping[str, RegionSpec], found: Mapping[str, RegionSpec]) -> list[str]:
    """How a store differs from what is wanted of it, a line each; empty if it does not."""
    lines = [f"block {name!r} is missing" for name in wanted if name not in found]
    lines += [f"block {name!r} is there and not wanted" for name in found if name not in wanted]
    for name, spec in wanted.items():
        other = found.get(name)
        if other is not None and other != spec:
            lines += _differences_of_region(name, spec, other)
    return lines


def _differences_of_region(name: str, wanted: RegionSpec, found: RegionSpec) -> list[str]:
    lines: list[str] = []
    there = {tensor.name: tensor for tensor in found.tensors}
    for tensor in wanted.tensors:
        other = there.pop(tensor.name, None)
        if other is None:
            lines.append(f"{name}: tensor {tensor.name!r} is missing")
        elif other != tensor:
            for what in ("dtype", "shape", "offset"):
                has, wants = getattr(other, what), getattr(tensor, what)
                if has != wants:
                    lines.append(f"{name}: tensor {tensor.name!r} has {what} {_plain(has)}, wanted {_plain(wants)}")
    lines += [f"{name}: tensor {other!r} is there and not wanted" for other in there]
    for what in ("nbytes", "slots", "tag"):
        has, wants = getattr(found, what), getattr(wanted, what)
        if has != wants:
            lines.append(f"{name}: {what} is {has}, wanted {wants}")
    return lines or [f"{name}: its tensors stand in another order"]


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def in_words(lines: Sequence[str]) -> str:
    """The first differences, and how many more there are."""
    more = len(lines) - _SHOWN_DIFFERENCES
    return "; ".join(lines[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
