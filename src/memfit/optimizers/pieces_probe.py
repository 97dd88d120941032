"""Speed of updates as homes make them: piece by piece, through a driver, of more than caches hold.

In: a device. Out: parameters a second.
"""

from __future__ import annotations

import torch

from memfit import devices
from memfit.core.layout import PIECE_ELEMENTS
from memfit.optimizers.driver import OptimizerDriver
from memfit.optimizers.shadow import State


def probe_piece_updates(device: torch.device, *, pieces: int = 10, tries: int = 3) -> float:
    """Parameters that torch's AdamW passes in a second, best of several rounds over all pieces,
    since other work can only slow one down.

    Memory: 8 MiB a piece.

    Args:
        device: whose processor works.
        pieces: of the one parameter that is updated.
        tries: rounds behind the first, which makes states.
    """
    elements = pieces * PIECE_ELEMENTS
    weight = torch.nn.Parameter(torch.zeros(elements, device=device))
    gradient = torch.full_like(weight, 0.5)
    driver = OptimizerDriver(torch.optim.AdamW([weight]), {"weight": weight})
    states: dict[int, State] = {}
    best = float("inf")
    clock = devices.clock_of(device)
    for index in range(tries + 1):
        devices.finish(device)
        began = clock()
        driver.begin_step()
        for at in range(0, elements, PIECE_ELEMENTS):
            part = slice(at, at + PIECE_ELEMENTS)
            is_last = at + PIECE_ELEMENTS == elements
            states[at] = driver.update(
                "weight", weight.detach()[part], gradient[part], states.get(at, {}), first=at == 0, last=is_last
            )
        driver.end_step()
        devices.finish(device)
        if index:
            best = min(best, clock() - began)
    return elements / best
