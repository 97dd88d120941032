"""`memfit_state.json`: what continues a run beside weights and large optimizer states.

In: an optimizer's settings, scalar states, the random numbers' place, the step. Out: JSON text; and
the same back, checked.

[Note: two programs, one name]
Until version 0.1 the file was called `trainer_state.json`, as that of transformers' `Trainer` is,
which writes its own into the same directories and would overwrite ours. Saves with the old name are
read still; a file of that name which has `Trainer`'s entries is not memfit's, and is left where it
is.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memfit.core.documents import ROOM_BYTES, check_depth, parse_json, parsed_bytes, read_document
from memfit.core.errors import StoreError, UnsupportedError
from memfit.core.limits import MIB, format_bytes
from memfit.store.files import explain
from memfit.tensors.container import is_shape

# Numbers, texts and small tensors as JSON, and back with the same bits and types.
#
# In: settings of optimizers, scalar states, what a user wants to keep with a save. Out: values that
# `json` writes. Nothing is pickled: what has no JSON form is refused.
#
# Plain values stay as they are, so that a person can read the file; the others are an object with
# one tag: {"tuple": [...]}, {"map": {...}}, {"float": "inf"}, {"tensor": {"dtype", "shape",
# "values", "device"}}.

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


FORMAT = 1
FILE_NAME = "memfit_state.json"
OLD_FILE_NAME = "trainer_state.json"
# Numbers of a hundred thousand parameters; what is larger was not written by memfit.
_LIMIT_BYTES = 256 * MIB
_COPIES = 2
"""Depth of the values: as JSON has them, and as they were."""
_HEAD_BYTES = 64 << 10
"""Holds the names by which the files of two programs are told apart: memfit writes its own first,
and `Trainer` sorts its entries, the long one last but few.
"""
_DEEPEST = 300
"""Settings and `extra` may be nested as `encode_value` found them, two containers a level."""


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """A parameter group: names of its parameters in order, and its settings."""

    parameters: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """All of the file.

    Attributes:
        steps: made so far.
        optimizer_class: dotted name.
        groups: in the optimizer's order.
        numbers: by parameter, the states that are not large tensors.
        random_cpu, random_device: states of torch's default generators.
        noise_seed: of stochastic rounding.
        loss_scale: `LossScaler.state_dict()`, which `torch.amp.GradScaler` takes as well; None
            where losses were not scaled.
        extra: what the user gave along.
    """

    steps: int
    optimizer_class: str
    groups: Sequence[GroupState]
    numbers: Mapping[str, Mapping[str, Any]]
    random_cpu: bytes
    random_device: bytes | None = None
    noise_seed: int | None = None
    loss_scale: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The dotted name of its class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def write_text(state: TrainerState) -> str:
    """The file's text.

    Raises:
        UnsupportedError: a setting, a number or a value of `extra` that has no JSON form.
    """
    groups = [
        {
            "parameters": list(group.parameters),
            "settings": {
                key: encode_value(value, f"param_groups[{index}][{key!r}]") for key, value in group.settings.items()
            },
        }
        for index, group in enumerate(state.groups)
    ]
    numbers = {
        name: {key: encode_value(value, f"state {key!r} of {name!r}") for key, value in values.items()}
        for name, values in state.numbers.items()
    }
    random: dict[str, Any] = {"cpu": base64.b64encode(state.random_cpu).decode()}
    if state.random_device is not None:
        random["cuda"] = base64.b64encode(state.random_device).decode()
    if state.noise_seed is not None:
        random["noise"] = state.noise_seed
    document = {
        "format": FORMAT,
        "made_by": "memfit",
        "steps": state.steps,
        "optimizer": {"class": state.optimizer_class, "groups": groups, "numbers": numbers},
        "random": random,
        "loss_scale": None if state.loss_scale is None else dict(state.loss_scale),
        "extra": {key: encode_value(value, f"extra[{key!r}]") for key, value in state.extra.items()},
    }
    try:
        check_depth(document, _DEEPEST)
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(
            f"what is saved beside the weights, `extra` among it, is nested too deep: {error}"
        ) from error
    return json.dumps(document, indent=1, allow_nan=False)


def check_room(text: str | bytes, saved_bytes: int) -> None:
    """Refuses a file that `read_text` would not read.

    Args:
        text: of the file.
        saved_bytes: of the safetensors files beside it.

    Raises:
        UnsupportedError: it has too many values.
    """
    content = text.encode() if isinstance(text, str) else text
    needed, room = parsed_bytes(content), _room_bytes(saved_bytes)
    if needed > room or len(content) > _LIMIT_BYTES:
        raise UnsupportedError(
            f"settings, numbers and `extra` take {format_bytes(len(content))} as text and {format_bytes(needed)} to read, more than the "
            f"{format_bytes(room)} that are read beside these weights: keep long lists as safetensors of your own"
        )


def _room_bytes(saved_bytes: int) -> int:
    return (ROOM_BYTES + saved_bytes) // _COPIES


def state_file(directory: Path) -> Path | None:
    """The file in a directory that memfit saved into, under its present or its old name; None where
    there is none.

    See [Note: two programs, one name].
    """
    present, old = directory / FILE_NAME, directory / OLD_FILE_NAME
    if present.is_file():
        return present
    return old if old.is_file() and not is_of_trainer(old) else None


def is_of_trainer(path: Path) -> bool:
    """Tests whether a file is the `trainer_state.json` of transformers' `Trainer`."""
    if path.name != OLD_FILE_NAME or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False  # reading it as ours tells the reason
    return b'"made_by"' not in head and b'"global_step"' in head and b'"log_history"' in head


def read_state(directory: Path) -> TrainerState:
    """Reads and checks the file of a directory.

    Raises:
        StoreError: as `read_text`; or the directory is a checkpoint of transformers' `Trainer`.
    """
    found = state_file(directory)
    if found is None and is_of_trainer(directory / OLD_FILE_NAME):
        raise StoreError(
            f"{directory} is a checkpoint of transformers' Trainer, whose optimizer.pt memfit does not read: take its weights with memfit.fit(weights=...), "
            "or go on with Trainer"
        )
    return read_text(directory / FILE_NAME if found is None else found)


def read_text(path: Path) -> TrainerState:
    """Reads and checks the file.

    Raises:
        StoreError: it cannot be read, is of another format, or is not what memfit writes.
    """
    try:
        content = read_document(path, limit_bytes=_LIMIT_BYTES)
        saved_bytes = sum(file.lstat().st_size for file in path.parent.iterdir() if file.suffix == ".safetensors")
        document = parse_json(content, room_bytes=_room_bytes(saved_bytes), deepest=_DEEPEST, any_text=True)
    except OSError as error:
        raise explain(error, doing="read the state of the training run", path=path) from error
    except ValueError as error:
        raise _damaged(path, f"it is not JSON that can be read ({str(error)[:200]})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise _damaged(path, f"its format is {str(found)[:20]!r}, this version of memfit reads {FORMAT}")
    try:
        optimizer, random = document["optimizer"], document["random"]
        steps = document["steps"]
        if type(steps) is not int or steps < 0 or not isinstance(optimizer["class"], str):
            raise _damaged(path, "steps or the optimizer's class are not as memfit writes them")
        return TrainerState(
            steps=steps,
            optimizer_class=optimizer["class"],
            groups=[_group(group, index) for index, group in enumerate(optimizer["groups"])],
            numbers={
                str(name): {key: decode_value(v, f"state {key!r} of {name!r}") for key, v in values.items()}
                for name, values in optimizer["numbers"].items()
            },
            random_cpu=base64.b64decode(random["cpu"], validate=True),
            random_device=base64.b64decode(random["cuda"], validate=True) if "cuda" in random else None,
            noise_seed=_noise_seed(random.get("noise")),
            loss_scale=_loss_scale(document.get("loss_scale")),
            extra={str(key): decode_value(v, f"extra[{key!r}]") for key, v in document["extra"].items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, StoreError):
            raise
        raise _damaged(path, f"{type(error).__name__}: {str(error)[:200]}") from error


def _group(group: Any, index: int) -> GroupState:
    names = group["parameters"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"the parameters of group {index} are not names")
    return GroupState(
        parameters=tuple(names),
        settings={
            str(key): decode_value(value, f"param_groups[{index}][{key!r}]") for key, value in group["settings"].items()
        },
    )


def _noise_seed(found: Any) -> int | None:
    if found is not None and type(found) is not int:
        raise TypeError("the seed of the noise is no integer")
    return found


def _loss_scale(found: Any) -> Mapping[str, Any] | None:
    """Compared by who takes it."""
    if found is not None and not isinstance(found, dict):
        raise TypeError("the loss scale is no dictionary")
    return found


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is damaged or was not written by memfit: {why}; take another save")
