"""States of random generators that a file tells: refused where a library would read outside of its
own memory with them.

In: what torch, NumPy or Python gave as the state of a generator, or what anybody wrote in its
place. Out: nothing, or a `ValueError`; a `TypeError` for what is no state at all.

[Note: positions in generators]
A generator keeps a table of drawn words and its position in it. Python asks whether the position
lies in the table. NumPy's MT19937 and Philox take any (numpy/random/_mt19937.pyx and _philox.pyx,
`state.setter`): the next number is read from wherever it points, and the process dies or draws what
lies there. torch asks that a position and a count of words left are each in range
(aten/src/ATen/core/MT19937RNGEngine.h, `is_valid`), but not that they agree: then up to 2.5 kB
behind the table are read as random numbers.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_WORDS = 624
"""Words of the Mersenne Twister."""
_PHILOX_WORDS = 4
_TORCH_HEAD = struct.Struct("=QiiQ")
"""Seed, words left, whether it is seeded, position: the beginning of the state of torch's CPU
generator (aten/src/ATen/CPUGeneratorImpl.cpp).
"""


def check_torch(state: Any) -> None:
    """Refuses a state of a CPU generator whose position is not in its table.

    That of another device is left to torch. Raises `ValueError`, `TypeError`.
    """
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.dim() != 1:
        raise TypeError("the state of torch's generator is not a row of bytes")
    if state.numel() <= _TORCH_HEAD.size:
        return
    _, left, _, position = _TORCH_HEAD.unpack(bytes(state[: _TORCH_HEAD.size].tolist()))
    # The table is filled anew when no word is left: before that, `left - 1` words are read from the
    # position on.
    if not (0 < left <= _WORDS and 0 <= position <= _WORDS and position + left <= _WORDS + 1):
        raise ValueError(f"torch's generator stands at word {position} with {left} left, of {_WORDS}")


def check_numpy(state: Any) -> None:
    """Refuses a state of a bit generator, or of NumPy's default one (a tuple), whose position is
    not in its table.

    Raises `ValueError`, `TypeError`.
    """
    if isinstance(state, tuple) and len(state) in (3, 5) and state[0] == "MT19937":
        _, words, position, *_ = state
        if not isinstance(words, np.ndarray) or words.shape != (_WORDS,) or words.dtype.kind not in "ui":
            raise ValueError(f"NumPy's generator has no table of {_WORDS} words")
        _check_position(position, _WORDS)
        return
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise TypeError("invalid state for NumPy's random generator")
    name, inner = state.get("bit_generator"), state["state"]
    if name == "MT19937":
        _check_position(inner.get("pos"), _WORDS)
    elif name == "Philox":
        _check_position(state.get("buffer_pos"), _PHILOX_WORDS)


def check_python(state: Any) -> None:
    """Refuses a state of `random.Random` that it would take and fail with later.

    Raises `ValueError`, `TypeError`.
    """
    random.Random().setstate(state)  # noqa: S311, asked whether it takes it
    if not (state[2] is None or isinstance(state[2], float)):
        raise ValueError("invalid state for Python's random generator: not an integer")


def _check_position(position: Any, words: int) -> None:
    if isinstance(position, bool) or not isinstance(position, int | np.integer) or not 0 <= position <= words:
        raise ValueError(f"NumPy's generator stands at word {position!r:.40} of {words}")
