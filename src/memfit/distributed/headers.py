"""Headers of buffers: their kind, dtype and shape, by which ranks agree before they move bytes.

In: a tensor, a list of numbers, or None. Out: flat tensors and `BufferHeader`s; from these buffers
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from memfit.core.errors import UsageError
from memfit.distributed.transport import Group, gather_small, rank_and_size

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_MOST_DIMENSIONS = 12
# What was asked for, its operator, kind, dtype, number of dimensions; then the dimensions.
_FIELDS = 5 + _MOST_DIMENSIONS


@dataclass(frozen=True)
class Form:
    """Kind and shape of a buffer.

    Attributes:
        is_given: False: None was given, where a rank has nothing to send.
        is_list: a plain list, whose numbers travel as a tensor.
        shape: of the tensor.
        dtype: of the tensor.
    """

    is_given: bool
    is_list: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BufferHeader:
    """Form of a buffer, as its rank has told it."""

    form: Form

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return torch.Size(self.form.shape).numel() if self.form.is_given else 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""
        return self.form.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Returns a flat tensor for it, without values."""
        return torch.empty(self.numel, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        if not self.form.is_given:
            return "nothing"
        if self.form.is_list:
            return f"a list of {self.numel}"
        return f"a tensor {tuple(self.form.shape)} of {str(self.dtype).removeprefix('torch.')}"


def form_of(buffer: Any) -> Form:
    """Returns the form of a buffer.

    Raises:
        UsageError: it is neither a tensor nor a list of numbers.
    """
    if buffer is None:
        return Form(is_given=False, is_list=False, shape=(0,), dtype=torch.uint8)
    if isinstance(buffer, Tensor):
        if buffer.dtype not in _DTYPES or buffer.layout is not torch.strided or buffer.dim() > _MOST_DIMENSIONS:
            raise UsageError(
                f"a tensor {tuple(buffer.shape)} of {buffer.dtype} and layout {buffer.layout} cannot travel"
            )
        return Form(is_given=True, is_list=False, shape=tuple(buffer.shape), dtype=buffer.dtype)
    if isinstance(buffer, list | tuple):
        values = cast("Sequence[object]", buffer)
        if all(isinstance(value, int | float | complex) for value in values):
            kinds = (complex, torch.complex128), (float, torch.float64)
            dtype = next((d for kind, d in kinds if any(isinstance(v, kind) for v in values)), torch.int64)
            return Form(is_given=True, is_list=True, shape=(len(values),), dtype=dtype)
    raise UsageError(f"a buffer is a tensor or a list of numbers, not {type(buffer).__name__}")


def given_values(buffer: Any, form: Form) -> Tensor:
    """Returns a buffer's values as a flat tensor of its own."""
    if not form.is_given:
        return torch.empty(0, dtype=form.dtype)
    if isinstance(buffer, Tensor):
        return buffer.detach().reshape(-1).clone()
    try:
        return torch.tensor(buffer, dtype=form.dtype).reshape(-1)
    except (OverflowError, RuntimeError) as error:
        raise UsageError(f"integers of a list travel as 64 bits: {error}") from error


def restored(flat: Tensor, form: Form) -> Any:
    """Returns a buffer of the form's kind with these values."""
    if not form.is_given:
        return None
    return flat.tolist() if form.is_list else flat.view(form.shape)


def promoted(headers: Sequence[BufferHeader]) -> torch.dtype:
    """Returns the dtype that holds the values of all buffers.

    Raises:
        UsageError: lists and tensors, or tensors of different dtypes.
    """
    given = [header for header in headers if header.form.is_given]
    if not given:
        return torch.uint8
    dtype = given[0].dtype
    for header in given[1:]:
        if header.form.is_list != given[0].form.is_list or (not header.form.is_list and header.dtype != dtype):
            raise UsageError(f"one rank has {given[0]}, another {header}: their buffers must be of one kind and dtype")
        dtype = torch.promote_types(dtype, header.dtype)
    return dtype


def agree_on(group: Group, asked: tuple[str, str], forms: Sequence[Form]) -> list[list[BufferHeader]]:
    """Exchanges headers.

    Returns:
        By rank, the headers of its buffers.

    Raises:
        UsageError: the ranks have asked for different things. Raised on all of them, and nothing
            was moved.
    """
    rows = [_row(asked, form) for form in forms]
    # As many rows on all ranks, whatever they ask for: else the exchange itself would differ.
    _, size = rank_and_size(group)
    rows += [[0] * _FIELDS] * (size - len(rows))
    found = gather_small(group, torch.tensor(rows, dtype=torch.int64)).tolist()
    if any(other[0][:2] != found[0][0][:2] for other in found):
        # Names travel as sums only; the message of each rank says its own.
        raise UsageError(
            f"the ranks have called different things: this one {' by '.join(filter(None, asked))}, "
            f"ranks {[r for r, other in enumerate(found) if other[0][:2] != rows[0][:2]]} something else. Nothing was moved"
        )
    return [[_header(row) for row in own[: len(forms)]] for own in found]


def _row(asked: tuple[str, str], form: Form) -> list[int]:
    kind = int(form.is_given) + 2 * int(form.is_list)
    shape = [*form.shape, *[0] * (_MOST_DIMENSIONS - len(form.shape))]
    return [
        crc32(asked[0].encode()),
        crc32(asked[1].encode()),
        kind,
        _DTYPES.index(form.dtype),
        len(form.shape),
        *shape,
    ]


def _header(row: list[int]) -> BufferHeader:
    _, _, kind, dtype, dimensions, *shape = row
    return BufferHeader(
        Form(is_given=bool(kind & 1), is_list=bool(kind & 2), shape=tuple(shape[:dimensions]), dtype=_DTYPES[dtype])
    )
