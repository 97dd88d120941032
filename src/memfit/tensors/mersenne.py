"""Skips random numbers of torch's CPU generator without drawing them.

In: a state of the generator and a number of 32-bit words. Out: the state after drawing them, bit
for bit.

[Note: jumping]
The generator is MT19937. Its words y[0], y[1], ... follow from one another by a linear recurrence
over GF(2), whose characteristic polynomial p has degree 19937. With g = x^n mod p, therefore,
y[n + j] is the sum (exclusive or) of all y[i + j] where g has the coefficient i: 20,560 words,
which take less than a millisecond, give the state after any n. A block of 624 words is jumped to as
a whole, since torch keeps words by blocks. Sums of neighbouring words are made once for all odd
patterns of a few bits, so that g is gone through some coefficients at a time.
Source: Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer 2008, "Efficient Jump Ahead for F2-Linear
Random Number Generators", sections 3 and 4.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
