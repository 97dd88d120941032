"""Which states an optimizer keeps for a parameter, learned without allocating the parameter's size.

In: an optimizer, one of its parameters and the verdict on its group. Out: a tuple of `StateTensor`.

The class itself is run for a few steps without data (`shape_trials.py`; some states appear at the
first step only, so all steps are looked at). Elementwise classes run on flat vectors, where a state
is either as long as the vector or a scalar; other classes run at the parameter's own shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from memfit.core.errors import MemfitError, UnsupportedError
from memfit.optimizers.shadow import State
from memfit.optimizers.shape_trials import run_trial
from memfit.optimizers.validation import Entry, UpdateKind

ShapeKind = Literal["like", "scalar", "other"]

_FLAT_ELEMENTS = 6


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One state of one parameter, as it is after the first steps.

    `like` has the parameter's shape and is cut with it; `scalar` is one value a parameter (a step
    count) that every piece of a step reads alike; `other` is a tensor of a shape of its own
    (Adafactor's rows and columns), only ever used whole.
    """

    key: str
    dtype: torch.dtype | None
    """None for a plain Python number."""
    shape_kind: ShapeKind
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    """Bytes of the whole state; 0 for a Python number."""


def state_tensor(key: str, dtype: torch.dtype | None, shape_kind: ShapeKind, shape: Sequence[int]) -> StateTensor:
    """A `StateTensor` with its sizes filled in."""
    numel = math.prod(shape)
    return StateTensor(
        key=key,
        dtype=dtype,
        shape_kind=shape_kind,
        shape=tuple(shape),
        numel=numel,
        nbytes=numel * dtype.itemsize if dtype else 0,
    )


def learn_layout(
    optimizer: Optimizer, entry: Entry, kind: UpdateKind, dtype: torch.dtype, live: State
) -> tuple[StateTensor, ...]:
    """The states of one parameter, when its weight is kept in `dtype`.

    Args:
        optimizer: the live optimizer; only read.
        entry: the parameter; its bytes are not touched, so they may be away.
        kind: how far its group may be cut.
        dtype: of the weight that is updated (a float32 master of a bfloat16 parameter, say).
        live: the states that exist already; they win over the dry run where both know a key, and
            complete it.

    Raises:
        UnsupportedError: the class cannot be run on a small copy, or a state's shape cannot be
            explained by the parameter's.
    """
    shape = tuple(entry.parameter.shape)
    try:
        learned = (
            _flat_layout(optimizer, entry, dtype, shape)
            if kind is UpdateKind.ELEMENTWISE
            else _shaped_layout(optimizer, entry, dtype, shape)
        )
    except MemfitError:
        raise
    except Exception as error:
        if not live:
            raise UnsupportedError(
                f"{type(optimizer).__name__} could not be run for a step on a small copy of {entry.name!r} to learn "
                f"its states ({type(error).__name__}: {error})."
            ) from error
        # states made in __init__ (Adagrad before torch 2.12): the live ones tell everything
        learned = {}
    for key, value in live.items():
        if value is not None:
            learned[key] = _from_live(type(optimizer).__name__, entry, key, value, dtype, learned.get(key))
    return tuple(learned.values())


def _from_live(
    class_name: str, entry: Entry, key: str, value: Any, dtype: torch.dtype, learned: StateTensor | None
) -> StateTensor:
    """A state that exists: its shape and dtype, and the dry run's kind (a 0-d weight's state looks
    like a scalar).
    """
    if isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        guess: ShapeKind = (
            "like" if shape == tuple(entry.parameter.shape) and shape else "scalar" if value.numel() == 1 else "other"
        )
        kind = learned.shape_kind if learned is not None and learned.shape == shape else guess
        # torch keeps such states in the parameter's dtype; with a master of another dtype they
        # follow the master.
        own = dtype if kind != "scalar" and value.dtype == entry.parameter.dtype else value.dtype
        return state_tensor(key, own, kind, shape)
    _check_number(class_name, entry.name, key, value)
    return state_tensor(key, None, "scalar", ())


def _check_number(class_name: str, name: str, key: str, value: Any) -> None:
    if not isinstance(value, (bool, int, float)):
        raise UnsupportedError(
            f"{class_name} keeps state {key!r} of {name!r} as a {type(value).__name__}; memfit can keep tensors and "
            "numbers."
        )


def _dry_run(optimizer: Optimizer, entry: Entry, shape: Sequence[int], dtype: torch.dtype) -> State:
    """States after a few steps at this size; states that went meanwhile are kept."""
    states = run_trial(optimizer, entry, shape, dtype).states
    for key, value in states.items():
        if not isinstance(value, torch.Tensor):
            _check_number(type(optimizer).__name__, entry.name, key, value)
        elif type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps state {key!r} of {entry.name!r} as a {type(value).__name__}; memfit "
                "keeps plain tensors."
            )
    return states


def _flat_layout(
    optimizer: Optimizer, entry: Entry, dtype: torch.dtype, shape: tuple[int, ...]
) -> dict[str, StateTensor]:
    layout: dict[str, StateTensor] = {}
    for key, value in _dry_run(optimizer, entry, (_FLAT_ELEMENTS,), dtype).items():
        if not isinstance(value, torch.Tensor):
            layout[key] = state_tensor(key, None, "scalar", ())
        elif value.shape == (_FLAT_ELEMENTS,):
            layout[key] = state_tensor(key, value.dtype, "like", shape)
        elif value.numel() == 1:
            layout[key] = state_tensor(key, value.dtype, "scalar", tuple(value.shape))
        else:
            raise AssertionError(f"an elementwise optimizer with state {key} of shape {tuple(value.shape)}")
    return layout


def _shaped_layout(
    optimizer: Optimizer, entry: Entry, dtype: torch.dtype, shape: tuple[int, ...]
) -> dict[str, StateTensor]:
    layout: dict[str, StateTensor] = {}
    for key, value in _dry_run(optimizer, entry, shape, dtype).items():
        if not isinstance(value, torch.Tensor):
            layout[key] = state_tensor(key, None, "scalar", ())
            continue
        real = tuple(value.shape)
        kind: ShapeKind = "like" if real == shape and real else "scalar" if math.prod(real) == 1 else "other"
        layout[key] = state_tensor(key, value.dtype, kind, real)
    return layout
