"""Factor that the gradients of a step are multiplied with when a block is updated.

In: loss scales, counts that come late, norms to clip to. Out: one number on the device, and the same on the host.
"""

from __future__ import annotations

import torch


class GradientScale:
    """Product of all that a step's gradients are multiplied with.

    Attributes:
        value: 0-d tensor; None: gradients are used as they are.
    """

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.factor = 1.0
        # The value, and the same number where the host works with it.
        self._on_host: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin_step(self) -> None:
        """Forgets the last step's."""
        self.value, self.factor = None, 1.0

    def multiply(self, factor: float) -> None:
        """Multiplies gradients with a factor from now on, besides what was said before. Before `clip`."""
        self.factor *= factor
        self.value = torch.tensor(self.factor)

    def unscale(self, scale: float) -> None:
        """Divides gradients by the loss scale from now on."""
        self.multiply(_inverse(scale))

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Multiplies gradients with the clip factor from now on, and with what `multiply` and `unscale` said."""
        self.value = clip_factor(norm, max_norm) * self.factor

    def at(self, device: torch.device) -> torch.Tensor:
        """The value where a piece is multiplied with it: a norm that clips was taken on the device."""
        value = self.value
        assert value is not None
        if device.type != "cpu" or value.device.type == "cpu":
            return value
        if self._on_host is None or self._on_host[0] is not value:
            self._on_host = value, value.cpu()
        return self._on_host[1]


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor for gradients of this norm. Source: `torch.nn.utils.clip_grads_with_norm_`."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _inverse(scale: float) -> float:
    """As `GradScaler` takes it: in double precision, rounded to fp32."""
    return float(torch.tensor(1.0 / scale, dtype=torch.float32))
