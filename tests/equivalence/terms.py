"""Terms of gradients that are sums, as they go over the edges of the graph: a sum's rounding is that of its terms, not of its result.

In: parameters by name, and losses before their backward. Out: of each parameter, how many gradients were added and how large they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn


class Terms:
    """Counts and sizes of what is added to the gradients of some parameters.

    Args:
        parameters: by name.

    Attributes:
        counts: by name, how many gradients were added.
        magnitudes: by name, the sum of their absolute values.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.counts: dict[str, int] = {}
        self.magnitudes: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Forgets what was added."""
        self.counts.clear()
        self.magnitudes.clear()

    def watch(self, loss: Tensor) -> None:
        """Has every edge of the loss's graph that ends at one of the parameters tell what goes over it."""
        seen: set[Any] = set()
        pending: list[Any] = [loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for place, (following, _) in enumerate(node.next_functions):
                pending.append(following)
                name = self._names.get(id(getattr(following, "variable", None)))
                if name is not None:
                    node.register_hook(partial(self._add, name, place))

    def _add(self, name: str, place: int, inputs: tuple[Tensor | None, ...], _outputs: Any) -> None:
        gradient = inputs[place]
        if gradient is None or gradient.is_sparse:
            return
        size, known = gradient.detach().abs(), self.magnitudes.get(name)
        self.magnitudes[name] = size if known is None or known.shape != size.shape else known + size
        self.counts[name] = self.counts.get(name, 0) + 1
