"""Random streams of microbatches: the same numbers in whatever order the microbatches run.

In: the user's default generators as they stand at the step's start. Out: one stream a microbatch.

[Note: random numbers of a split batch]
With one microbatch the user's generators are used as they are. With k > 1, `torch.randint(2**63 -
1, (k,))` is drawn once from the default CPU generator at the step's start; microbatch m uses
generators seeded with the m-th number; after the step the default generators stand right after that
one draw (an accelerator's, Python's and NumPy's: where they were). NumPy's takes 32 bits: the
number modulo 2**32. `microbatch_streams` does the same to a plain accumulation loop. Python's and
NumPy's are there because models draw from them, too: the time masks of speech models are NumPy's.
"""

from __future__ import annotations

import functools
import importlib
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfit import devices


class RandomStream:
    """The default generators' state of one microbatch.

    `enter` installs it, `leave` takes it and puts the outside's back.

    Memory: states of 5 KiB (torch's CPU generator), 25 KiB (Python's), 3 KiB (NumPy's, if it is
    there) and 16 bytes (an accelerator's, if it is in use).
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._cpu = generator.get_state()
        self._seed = seed
        self._device: list[torch.Tensor] | None = None
        self._python = random.Random(seed).getstate()  # noqa: S311 - a model's random numbers, no secret
        self._numpy: Any = None
        self._outside: tuple[torch.Tensor, list[torch.Tensor], Any, Any] | None = None

    def enter(self) -> None:
        """The stream's numbers come next."""
        assert self._outside is None, "a random stream was entered twice"
        numpy = _numpy_random()
        numpy_state = None if numpy is None else numpy.get_state(legacy=False)
        self._outside = (torch.get_rng_state(), _device_states(), random.getstate(), numpy_state)
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if numpy is not None:
            if self._numpy is None:
                numpy.seed(self._seed % (1 << 32))
            else:
                numpy.set_state(self._numpy)
        accelerator = devices.initialized()
        if accelerator is None:
            return
        if self._device is None:
            accelerator.manual_seed_all(self._seed)
        else:
            accelerator.set_rng_states(self._device)

    def leave(self) -> None:
        """The numbers of outside come next."""
        assert self._outside is not None, "a random stream was left without being entered"
        numpy = _numpy_random()
        self._cpu, self._device, self._python = torch.get_rng_state(), _device_states(), random.getstate()
        self._numpy = None if numpy is None else numpy.get_state(legacy=False)
        cpu, device, python, numpy_state = self._outside
        self._outside = None
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy is not None and numpy_state is not None:  # NumPy may have been imported inside
            numpy.set_state(numpy_state)
        accelerator = devices.initialized()
        if device and accelerator is not None:
            accelerator.set_rng_states(device)


def draw_streams(microbatches: int) -> list[RandomStream | None]:
    """One stream a microbatch, drawn from the default generator.

    `[None]` for a single one (see [Note: random numbers of a split batch]).
    """
    if microbatches == 1:
        return [None]
    seeds = torch.randint(2**63 - 1, (microbatches,)).tolist()
    return [RandomStream(seed) for seed in seeds]


def microbatch_streams(microbatches: int) -> Callable[[int], AbstractContextManager[None]]:
    """Seeds a plain accumulation loop as memfit seeds its microbatches.

    ```python
    stream = memfit.microbatch_streams(4)
    for m, part in enumerate(parts):
        with stream(m):
            (loss(model, part) * share[m]).backward()
    ```

    Args:
        microbatches: how many slices the batch is cut into.

    Returns:
        A function from the microbatch's index to a context in which its random numbers are drawn.
    """
    streams = draw_streams(microbatches)

    @contextmanager
    def within(microbatch: int) -> Iterator[None]:
        stream = streams[microbatch]
        if stream is None:
            yield
            return
        stream.enter()
        try:
            yield
        finally:
            stream.leave()

    return within


def _device_states() -> list[torch.Tensor]:
    accelerator = devices.initialized()
    return [] if accelerator is None else accelerator.rng_states()


def _numpy_random() -> Any:
    """NumPy's module of random numbers, if NumPy is there.

    It loads that module when it is first asked for, which may be inside a microbatch.
    """
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


# Skips random numbers of torch's CPU generator without drawing them.
#
# In: a state of the generator and a number of 32-bit words. Out: the state after drawing them, bit
# for bit.
#
# [Note: jumping]
# The generator is MT19937. Its words y[0], y[1], ... follow from one another by a linear recurrence
# over GF(2), whose characteristic polynomial p has degree 19937. With g = x^n mod p, therefore, y[n
# + j] is the sum (exclusive or) of all y[i + j] where g has the coefficient i: 20,560 words, which
# take less than a millisecond, give the state after any n. A block of 624 words is jumped to as a
# whole, since torch keeps words by blocks. Sums of neighbouring words are made once for all odd
# patterns of a few bits, so that g is gone through some coefficients at a time. Source: Haramoto,
# Matsumoto, Nishimura, Panneton, L'Ecuyer 2008, "Efficient Jump Ahead for F2-Linear Random Number
# Generators", sections 3 and 4.

_BLOCK = 624
_MIDDLE = 397
_DEGREE = 19937
# Exponents of the characteristic polynomial below the leading one; a test finds them from the
# generator's numbers (Berlekamp and Massey).
_EXPONENTS = (
    19314, 19087, 18860, 18691, 18633, 18406, 18237, 18179, 18068, 17952, 17841, 17783, 17725, 17498, 17445, 17329, 17271, 17160, 17044,
    16933, 16875, 16822, 16817, 16595, 16590, 16537, 16421, 16368, 16363, 16252, 16141, 16136, 16025, 15967, 15909, 15682, 15629, 15576,
    15513, 15455, 15349, 15344, 15228, 15117, 15059, 15006, 15001, 14953, 14779, 14774, 14721, 14605, 14552, 14547, 14436, 14325, 14320,
    14209, 14151, 14093, 13866, 13813, 13760, 13697, 13639, 13533, 13528, 13412, 13301, 13243, 13190, 13185, 13137, 12963, 12958, 12905,
    12789, 12736, 12731, 12673, 12620, 12509, 12504, 12393, 12335, 12277, 11997, 11944, 11881, 11838, 11717, 11712, 11611, 11485, 11384,
    11374, 11321, 11215, 11157, 11147, 11089, 10920, 10761, 10693, 10128, 9969, 9901, 9505, 8206, 7979, 7752, 7583, 7525, 7477, 7129, 6569,
    6337, 5661, 4753, 4362, 4135, 3908, 3681, 3454, 3227, 3000, 2773, 2493, 1870, 1643, 1585, 1416, 1189, 0,
)  # fmt: skip
_MASK = (1 << _DEGREE) - 1
# Coefficients that are taken at a time: the sums for 2^4 odd patterns stay in a core's cache.
_PATTERN_BITS = 5
# Blocks from which on a jump is faster than a walk.
_LEAST_JUMP = 160
# Where `torch.Generator.get_state` keeps what: the words left in the block plus one, the words
# taken, and the block, a word in eight bytes.
_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _BLOCK)

Words = NDArray[np.uint32]


def skipped(state: torch.Tensor, words: int) -> torch.Tensor:
    """The state after so many 32-bit words more.

    Time: 3 ms, and 20 ms once for a number of words.

    Args:
        state: of a CPU generator, as `torch.Generator.get_state` gives it.
        words: any number.
    """
    made = state.clone()
    raw = made.numpy()
    left = int(raw[_LEFT].view(np.int32)[0])
    if not words:
        return made
    # A block is made when its first word is taken: before, all words of the one before are taken,
    # and so they are after a seed.
    position = _BLOCK + 1 - left + words
    blocks = (position - 1) // _BLOCK
    if blocks:
        stored = raw[_WORDS].view(np.uint64)
        stored[:] = _block_after(stored.astype(np.uint32), blocks, words // _BLOCK - 1)
    taken = position - blocks * _BLOCK
    raw[_LEFT].view(np.int32)[0] = _BLOCK + 1 - taken
    raw[_NEXT].view(np.uint64)[0] = taken
    return made


def _block_after(block: Words, blocks: int, jumped: int) -> Words:
    """The words so many blocks on, `jumped` of them at once where that is faster: a number that
    follows from the size of a draw alone, so that one polynomial serves all draws of a size.
    """
    # First by one: bits of a seed's first word belong to no recurrence, those of later blocks do.
    block = _next_block(block)
    blocks -= 1
    if jumped >= _LEAST_JUMP:
        block = _jumped(block, jumped * _BLOCK)
        blocks -= jumped
    for _ in range(blocks):
        block = _next_block(block)
    return block


def _next_block(block: Words) -> Words:
    made = np.empty_like(block)
    mixed = _mixed(block[:-1], block[1:])
    step = _BLOCK - _MIDDLE
    made[:step] = block[_MIDDLE:] ^ mixed[:step]
    made[step : 2 * step] = made[:step] ^ mixed[step : 2 * step]
    made[2 * step : -1] = made[step : _MIDDLE - 1] ^ mixed[2 * step :]
    made[-1] = made[_MIDDLE - 1] ^ _mixed(block[-1:], made[:1])[0]
    return made


def _mixed(first: Words, second: Words) -> Words:
    joined = (first & np.uint32(0x80000000)) | (second & np.uint32(0x7FFFFFFF))
    return (joined >> np.uint32(1)) ^ ((second & np.uint32(1)) * np.uint32(0x9908B0DF))


def _jumped(block: Words, words: int) -> Words:
    """The block of words that begins so many words after the one given. See [Note: jumping]."""
    made = [block]
    while len(made) * _BLOCK < _DEGREE + _PATTERN_BITS + _BLOCK:
        made.append(_next_block(made[-1]))
    sequence = np.concatenate(made)
    sums: dict[int, Words] = {1: sequence}
    for pattern in range(3, 1 << _PATTERN_BITS, 2):
        shift = pattern.bit_length() - 1
        lower = sums[pattern ^ (1 << shift)]
        # Each ends so early that no sum reaches behind the sequence.
        size = len(sequence) - shift
        sums[pattern] = lower[:size] ^ sequence[shift:]
    result = np.zeros(_BLOCK, dtype=np.uint32)
    add = np.bitwise_xor
    for place, pattern in _patterns(words):
        add(result, sums[pattern][place : place + _BLOCK], out=result)
    return result


@functools.lru_cache(maxsize=64)
def _patterns(words: int) -> tuple[tuple[int, int], ...]:
    """x^words mod p as (place, odd pattern of a few bits there)."""
    power = _power_of_x(words)
    found: list[tuple[int, int]] = []
    bits = bin(power)[:1:-1]  # the lowest first
    place = bits.find("1")
    while place >= 0:
        found.append((place, int(bits[place : place + _PATTERN_BITS][::-1], 2)))
        place = bits.find("1", place + _PATTERN_BITS)
    return tuple(found)


def _power_of_x(exponent: int) -> int:
    """x^exponent mod p, its coefficients as bits."""
    power = 1
    for bit in f"{exponent:b}":
        power = _reduced(_squared(power) << int(bit))
    return power


def _squared(polynomial: int) -> int:
    """The square: each coefficient at twice its place."""
    raw = polynomial.to_bytes(_DEGREE // 8 + 2, "little")
    return int.from_bytes(_SPREAD[np.frombuffer(raw, dtype=np.uint8)].tobytes(), "little")


def _reduced(polynomial: int) -> int:
    """The remainder of the division by p."""
    while (high := polynomial >> _DEGREE) != 0:
        polynomial &= _MASK
        for exponent in _EXPONENTS:
            polynomial ^= high << exponent
    return polynomial


def _spread() -> NDArray[Any]:
    bytes_ = np.arange(256, dtype="<u2")
    return np.sum([((bytes_ >> k) & 1) << (2 * k) for k in range(8)], axis=0).astype("<u2")


_SPREAD = _spread()


# States of random generators that a file tells: refused where a library would read outside of its
# own memory with them.
#
# In: what torch, NumPy or Python gave as the state of a generator, or what anybody wrote in its
# place. Out: nothing, or a `ValueError`; a `TypeError` for what is no state at all.
#
# [Note: positions in generators]
# A generator keeps a table of drawn words and its position in it. Python asks whether the position
# lies in the table. NumPy's MT19937 and Philox take any (numpy/random/_mt19937.pyx and _philox.pyx,
# `state.setter`): the next number is read from wherever it points, and the process dies or draws
# what lies there. torch asks that a position and a count of words left are each in range
# (aten/src/ATen/core/MT19937RNGEngine.h, `is_valid`), but not that they agree: then up to 2.5 kB
# behind the table are read as random numbers.

_STATE_WORDS = 624
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
    if not (0 < left <= _STATE_WORDS and 0 <= position <= _STATE_WORDS and position + left <= _STATE_WORDS + 1):
        raise ValueError(f"torch's generator stands at word {position} with {left} left, of {_WORDS}")


def check_numpy(state: Any) -> None:
    """Refuses a state of a bit generator, or of NumPy's default one (a tuple), whose position is
    not in its table.

    Raises `ValueError`, `TypeError`.
    """
    if isinstance(state, tuple) and len(state) in (3, 5) and state[0] == "MT19937":
        _, words, position, *_ = state
        if not isinstance(words, np.ndarray) or words.shape != (_STATE_WORDS,) or words.dtype.kind not in "ui":
            raise ValueError(f"NumPy's generator has no table of {_WORDS} words")
        _check_position(position, _STATE_WORDS)
        return
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise TypeError("invalid state for NumPy's random generator")
    name, inner = state.get("bit_generator"), state["state"]
    if name == "MT19937":
        _check_position(inner.get("pos"), _STATE_WORDS)
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
