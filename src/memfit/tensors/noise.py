"""Random numbers for stochastic rounding that depend on what is rounded, not on how or when.

In: a seed, a step, a name and a range of elements. Out: 16 random bits an element, the same on
every device and for every way to cut the range.

[Note: counted noise]
A generator that is drawn from would make results depend on the order and size of pieces, that is on
the plan, and would take numbers away from the user's. So the bits are a function of (seed, step,
name, element): the first three are hashed to a key, the element's number is mixed with it by the
finalizer of a 32-bit integer hash (Wang; constants by Mueller and by Ellis, "lowbias32": bias below
0.2 of the ideal's). Multiplication of int32 wraps around, on CPU and CUDA alike. One hash serves
two elements. Numbers of elements count modulo 2^33: a parameter of more than that meets the same
noise again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))


@dataclass(kw_only=True)
class RoundingNoise:
    """The noise of a run.

    Nothing but two numbers; a checkpoint that keeps them (`state_dict`) goes on with the same
    noise.

    Attributes:
        seed: of the run.
        step: number of the step that rounds, from 0; whoever runs steps keeps it.
    """

    seed: int
    step: int = 0

    def state_dict(self) -> dict[str, int]:
        """State for a checkpoint."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state_dict` was taken."""
        self.seed, self.step = int(state["seed"]), int(state["step"])

    def bits(self, name: str, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Int32 numbers from 0 to 65535, one for each of the elements [first, first + count) of
        what `name` names.

        Memory: 8 bytes an element for a moment, of which 4 are given back to the caller as the
        result.
        """
        key = hashlib.blake2b(f"{self.seed}/{self.step}/{name}".encode(), digest_size=8).digest()
        whitening = int.from_bytes(key[4:], "little", signed=True)
        begin = first // 2
        pairs = (first + count + 1) // 2 - begin
        origin = (begin + int.from_bytes(key[:4], "little")) & 0xFFFFFFFF
        mixed = torch.arange(pairs, dtype=torch.int32, device=device).add_(_signed(origin)).bitwise_xor_(whitening)
        for shift, multiplier in zip((16, 15), _MULTIPLIERS, strict=True):
            mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)
        mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF))
        halves = torch.stack((mixed & 0xFFFF, (mixed >> 16).bitwise_and_(0xFFFF)), dim=1).view(-1)
        return halves[first - 2 * begin : first - 2 * begin + count]


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Fp32 values as bf16: each goes to one of its two neighbours, to the farther one with a
    probability that makes the mean right.

    16 random bits are added to the 16 that are cut off: the carry is the rounding, with the
    probability of their fraction, exactly. Values that bf16 has, infinities and NaN among them,
    stay what they are.

    Memory: 4 bytes an element beside the result.

    Args:
        values: fp32, contiguous; not changed.
        noise: int32 of the same number of elements, from 0 to 65535, each value equally likely.
    """
    carried = values.view(torch.int32) + noise.view(values.shape)
    rounded = carried.bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)
    # A NaN whose lower bits are set could carry into another number.
    return rounded.masked_fill_(values.isnan(), float("nan"))


def _signed(unsigned: int) -> int:
    """The int32 of the same bits."""
    return unsigned - (1 << 32) if unsigned >= 1 << 31 else unsigned
