"""Side tensors: tensors that a call leaves on its modules beside its outputs, such as a router's
loss.

In: sites. Out: those with a gradient that the call has just made.

[Note: side tensors]
The engine hears that autograd has come to a call by hooks on the nodes of the call's outputs. A
gradient may also reach a call by a tensor that its module kept on itself, with none for its output.
Planning refuses to send weights away that a trace reads so; but a later step may take another way
than the traced one. Its side tensors are watched as outputs are, so that weights are fetched before
they are read. What code outside of the modules keeps (in a closure, by a hook) cannot be found:
`engine.backward` says what an absent weight's read then means, where torch notices it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memfit.engine.sites import Site

_TORCH_OWN = frozenset(vars(torch.nn.Module()))


class SideTensors:
    """Tensors that each site's modules hold as attributes.

    Args:
        sites: all.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._attributes = [[vars(module) for module in site.module.modules()] for site in sites]

    def made_since(self, site: int, number: int) -> list[torch.Tensor]:
        """Returns the tensors on the site's modules whose node was made since the thread's sequence
        number was `number`.
        """
        return [
            tensor
            for attributes in self._attributes[site]
            for name, value in attributes.items()
            if name not in _TORCH_OWN
            for tensor in _tensors_of(value)
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= number
        ]


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields a tensor, or those that a container holds directly."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, torch.Tensor):
                yield item
