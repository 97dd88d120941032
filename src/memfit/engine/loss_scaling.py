"""fp16: the forward under autocast or on fp16 weights, and the scale that keeps small gradients
above fp16's smallest number.

In: the check of a step's gradients. Out: the scale of the next step. Scale, check and skip are
actions of the schedule (`core.schedule`).

[Note: fp16 as GradScaler does it]
The contract is `torch.amp.GradScaler` with `torch.autocast(dtype=torch.float16)` around the loss
function, on the same microbatches: weights and masters are one and stay in fp32; losses are
multiplied with the scale; when all gradients are complete and scaled back, the update is made if
they are finite, and skipped whole if one is not. No update begins before that is known, so that a
skipped step changes nothing: neither weights nor states nor step counts, and neither the
optimizer's hooks nor its schedulers hear of it. Scales are powers of two with torch's factors, so
that scaling and unscaling round nothing, wherever they are done: unscaling is part of the update's
pieces. (With another scale, the norm to clip by is off by a rounding: it is taken of scaled
gradients.) With fp16 weights (`ComputeDtype.FLOAT16_WEIGHTS`) there is no autocast: weights are
rounded from fp32 masters, and the contract is GradScaler over an optimizer of the masters, whose
gradients are sums in fp32 of the microbatches' fp16 ones. A skipped step changes neither masters
nor weights. Autocast's cache of casted weights is off: it would keep an fp16 copy of every weight
until the forward ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UsageError

Loss = Callable[[nn.Module, Any], Any]


class LossScaler:
    """The dynamic loss scale: halved when a gradient overflows, doubled after 2000 steps without.
    The rules and defaults of `torch.amp.GradScaler`.

    Args:
        init_scale: scale of the first step.
        growth_factor: above 1.
        backoff_factor: below 1.
        growth_interval: steps without an overflow before the scale grows.

    Attributes:
        scale: scale of the next step.
        skipped: steps that overflowed so far, in this process.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = init_scale
        self.skipped = 0
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._before: tuple[float, int, int] | None = None

    def begin_step(self) -> None:
        """Saves the state, so that an `update` can be undone."""
        self._before = None

    def forget_update(self) -> None:
        """Undoes the `update` of an unfinished step, if there was one."""
        if self._before is not None:
            self.scale, self.skipped, self._growth_tracker = self._before
            self._before = None

    def update(self, *, has_overflowed: bool) -> None:
        """Adjusts the scale after a step. Source: `torch._amp_update_scale_`
        (aten/src/ATen/native/cuda/AmpKernels.cu): the scale does not grow past fp32's largest
        number.
        """
        self._before = (self.scale, self.skipped, self._growth_tracker)
        if has_overflowed:
            self.skipped += 1
            self.scale = _fp32(self.scale * self._backoff_factor)
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            grown = _fp32(self.scale * self._growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self._growth_tracker = 0

    def after_a_step(self) -> LossScaler:
        """Returns a copy after one more step without an overflow."""
        after = copy(self)
        after.update(has_overflowed=False)
        return after

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the form of `torch.amp.GradScaler.state_dict`: each loads the
        other's.
        """
        return {
            "scale": self.scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of `state_dict`.

        Raises:
            UsageError: the state is invalid.
        """
        missing = sorted(set(self.state_dict()) - set(state))
        if missing:
            raise UsageError(
                f"this is not the state of a loss scaler: it has no {missing[0]!r}. Load what state_dict() gave"
            )
        self.scale = _number(state, "scale", 0.0, math.inf)
        self._growth_factor = _number(state, "growth_factor", 1.0, math.inf)
        self._backoff_factor = _number(state, "backoff_factor", 0.0, 1.0)
        self._growth_interval = _count(state, "growth_interval")
        self._growth_tracker = _count(state, "_growth_tracker")


def in_half(loss: Loss, device_type: str) -> Loss:
    """Returns the loss function, run under autocast to fp16."""

    @wraps(loss)
    def halved(model: nn.Module, batch: Any) -> Any:
        with torch.autocast(device_type, dtype=torch.float16, cache_enabled=False):
            return loss(model, batch)

    return halved


def _number(state: Mapping[str, Any], key: str, least: float, most: float) -> float:
    found = state[key]
    if (
        isinstance(found, bool)
        or not isinstance(found, int | float)
        or not (least <= found <= most)
        or found == math.inf
    ):
        raise UsageError(f"this is not the state of a loss scaler: {key} is {found!r:.80}. Load what state_dict() gave")
    return float(found)


def _count(state: Mapping[str, Any], key: str) -> int:
    found = state[key]
    if type(found) is not int or not 0 <= found < 1 << 63:
        raise UsageError(f"this is not the state of a loss scaler: {key} is {found!r:.80}. Load what state_dict() gave")
    return found


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
