"""Numbers, texts and small tensors as JSON, and back with the same bits and types.

In: settings of optimizers, scalar states, what a user wants to keep with a save. Out: values that
`json` writes. Nothing is pickled: what has no JSON form is refused.

Plain values stay as they are, so that a person can read the file; the others are an object with one
tag: {"tuple": [...]}, {"map": {...}}, {"float": "inf"}, {"tensor": {"dtype", "shape", "values",
"device"}}.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memfit.core.errors import StoreError, UnsupportedError
from memfit.tensors.container import is_shape

# What is larger belongs into a safetensors file.
_MOST_ELEMENTS = 4096


def encode_value(value: Any, where: str) -> Any:
    """A JSON value.

    Args:
        value: None, a truth value, number, text, list, tuple, dictionary with texts as keys, or a
            tensor of at most 4096 elements.
        where: for the message.

    Raises:
        UnsupportedError: anything else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, list):
        return [encode_value(v, where) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode_value(v, where) for v in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"map": {key: encode_value(v, f"{where}[{key!r}]") for key, v in value.items()}}
    if isinstance(value, torch.Tensor) and value.numel() <= _MOST_ELEMENTS and not value.is_complex():
        return {
            "tensor": {
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "values": [encode_value(v, where) for v in value.detach().reshape(-1).tolist()],
                "device": value.device.type,
            }
        }
    raise UnsupportedError(
        f"{where} is a {type(value).__name__}, which cannot be saved without pickling; keep numbers, texts, lists and dictionaries there"
    )


def decode_value(value: Any, where: str, *, device: torch.device | None = None) -> Any:
    """Returns the value that `encode_value` was given.

    Args:
        value: of a JSON file that anybody may have written.
        where: for the message.
        device: for tensors that were not on the CPU.

    Raises:
        StoreError: not a form that `encode_value` writes.
    """
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, list):
        return [decode_value(v, where, device=device) for v in value]
    if isinstance(value, dict) and len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "tuple" and isinstance(inner, list):
            return tuple(decode_value(v, where, device=device) for v in inner)
        if tag == "map" and isinstance(inner, dict):
            return {key: decode_value(v, where, device=device) for key, v in inner.items()}
        if tag == "float" and inner in ("inf", "-inf", "nan"):
            return float(inner)
        if tag == "tensor" and isinstance(inner, dict):
            return _decode_tensor(inner, where, device)
    raise StoreError(f"{where:.200} has a form that memfit does not write: {str(value)[:80]}; take another save")


def _decode_tensor(inner: dict[str, Any], where: str, device: torch.device | None) -> torch.Tensor:
    dtype = getattr(torch, str(inner.get("dtype")), None)
    shape, values = inner.get("shape"), inner.get("values")
    is_sound = (
        isinstance(dtype, torch.dtype)
        and isinstance(values, list)
        and is_shape(shape)
        and math.prod(shape or ()) == len(values)
    )
    if not is_sound:
        raise StoreError(f"{where:.200} is not a tensor as memfit writes it: {str(inner)[:80]}; take another save")
    numbers = [decode_value(v, where) for v in values or ()]
    if not all(isinstance(v, bool | int | float) for v in numbers):
        raise StoreError(f"{where:.200} holds values that are not numbers; take another save")
    try:
        # Through float64 (or whole numbers as they are): every narrower value comes back with the
        # same bits.
        tensor = torch.tensor(numbers, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype).view(shape)  # type: ignore[union-attr]
    except (RuntimeError, OverflowError) as error:
        raise StoreError(
            f"{where:.200} cannot be made a tensor of {dtype}: {str(error)[:200]}; take another save"
        ) from error
    on_cpu = inner.get("device") == "cpu" or device is None
    return tensor if on_cpu else tensor.to(device)
