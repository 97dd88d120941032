"""Speed of what an update does with bf16 weights beside the optimizer's class: joining and
splitting masters, rounding stochastically.

In: a device. Out: parameters a second, without what launching operations takes: that is counted by
pieces (`scheduling.work_amounts`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from memfit import devices
from memfit.core.layout import PIECE_ELEMENTS
from memfit.homes.split_masters import join, split
from memfit.tensors.noise import RoundingNoise, round_stochastically

_FEW = 512
_TRIES = 5
# Of a piece, at least this share is taken to be work: launching may take as long as all of it.
_LEAST_SHARE = 0.05


def probe_splitting(device: torch.device) -> float:
    """Masters that are split, whose weights are rounded, and that are joined from both again, in a
    second.

    Memory: 10 MiB. Some 10 ms on one core.

    Args:
        device: where updates run.
    """

    def run(masters: torch.Tensor) -> None:
        difference, marks = split(masters)
        join(masters.bfloat16(), difference, marks, torch.empty_like(masters))

    return _elements_per_s(device, run)


def probe_rounding(device: torch.device) -> float:
    """Weights that are rounded stochastically in a second.

    Memory: 12 MiB. Some 15 ms on one core.

    Args:
        device: where updates run.
    """
    noise = RoundingNoise(seed=0)

    def run(masters: torch.Tensor) -> None:
        round_stochastically(masters, noise.bits("probe", 0, masters.numel(), masters.device))

    return _elements_per_s(device, run)


def _elements_per_s(device: torch.device, run: Callable[[torch.Tensor], None]) -> float:
    # The first run makes what stays made.
    few_s, piece_s = (
        devices.least_seconds(device, partial(run, torch.linspace(-1.0, 1.0, count, device=device)), tries=_TRIES)
        for count in (_FEW, PIECE_ELEMENTS)
    )
    return (PIECE_ELEMENTS - _FEW) / max(piece_s - few_s, _LEAST_SHARE * piece_s)
