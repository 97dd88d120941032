"""Factor by which the gradients of a step are multiplied when a block is updated.

In: loss scales, counts that come late, norms to clip to. Out: one number on the device, and the
same on the host.
"""

from __future__ import annotations

import torch


class GradientScale:
    """Product of all factors of a step's gradients.

    Attributes:
        value: 0-d tensor; None: the factor is 1.
    """

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.factor = 1.0
        # The value, and the same number where the host works with it.
        self._on_host: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin_step(self) -> None:
        """Resets the factor to 1."""
        self.value, self.factor = None, 1.0

    def multiply(self, factor: float) -> None:
        """Multiplies the factor by another. Must come before `clip`."""
        self.factor *= factor
        self.value = torch.tensor(self.factor)

    def unscale(self, scale: float) -> None:
        """Divides the factor by the loss scale."""
        self.multiply(_inverse(scale))

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Multiplies the factor by the one that clips gradients of this norm."""
        self.value = clip_factor(norm, max_norm) * self.factor

    def at(self, device: torch.device) -> torch.Tensor:
        """Returns the value on a device, which may not be the one where the norm was computed."""
        value = self.value
        assert value is not None
        if device.type != "cpu" or value.device.type == "cpu":
            return value
        if self._on_host is None or self._on_host[0] is not value:
            # Stops this thread for the device, once a step; an update on the host has waited for
            # the norm already.
            self._on_host = value, value.cpu()
        return self._on_host[1]


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Returns the factor that clips gradients of this norm. Source:
    `torch.nn.utils.clip_grads_with_norm_`.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _inverse(scale: float) -> float:
    """Returns the inverse as `GradScaler` computes it: in double precision, rounded to fp32."""
    return float(torch.tensor(1.0 / scale, dtype=torch.float32))
