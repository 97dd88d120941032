"""Autograd's graph: where a part of it begins, and sums of gradients that are made in place.

In: outputs of a call, the moment at which it began. Out: hooks on nodes.

[Note: sums of a shared weight's gradients]
A weight that two calls use (an embedding and the head tied to it) receives two gradients in one
backward, and autograd adds the second to the first before the weight's own node runs: in place if
nobody else holds the first, else into a third tensor of the same size. The gradient of a product's
weight is a transposed view, whose base holds it too: plain PyTorch has weight, both gradients and
their sum at once. A view that has lost its base is added to in place, with the same bits. So nodes
of later calls that hand a gradient to a weight of earlier ones give up the base of what they
return. Only the latest call's comes first; which one that is depends on the batch, so all but the
first call are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, ...]


def sequence_number() -> int:
    """Returns the sequence number of the next autograd node of this thread."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def watch_gradients_of(
    is_watched: Callable[[torch.Tensor], bool],
    outputs: Iterable[torch.Tensor],
    began_at: int,
    hook: Callable[[Gradients, Gradients], Gradients | None],
) -> None:
    """Registers a hook on every node that hands a gradient to one of certain leaves.

    Takes a microsecond a node.

    Args:
        is_watched: tells of a leaf whether it is one of them.
        outputs: of a call; the search begins at their nodes.
        began_at: `sequence_number()` when the call began: older nodes are not searched.
        hook: as of `Node.register_hook`.
    """
    pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node: Any = pending.pop()
        if node in seen or node._sequence_nr() < began_at:
            continue
        seen.add(node)
        following = [n for n, _ in node.next_functions if n is not None]
        arrivals = [n for n in following if type(n).__name__ == "AccumulateGrad"]
        if any(is_watched(n.variable) for n in arrivals):
            node.register_hook(hook)
        pending += [n for n in following if n not in arrivals]


def without_bases(made: Gradients, given: Gradients) -> Gradients:
    """Hook that takes the bases off the views among a node's results.

    See [Note: sums of a shared weight's gradients].
    """
    del given
    return tuple(_without_base(gradient) for gradient in made)


def _without_base(gradient: torch.Tensor | None) -> torch.Tensor | None:
    # Autograd looks itself at who else holds the storage: a view of something that lives on is
    # still added to apart.
    if type(gradient) is torch.Tensor and gradient._is_view():
        return gradient.detach()
    return gradient


def parameters_of_earlier_calls(
    calls: Sequence[Collection[Any]], parameters: Callable[[Any], Iterable[int]]
) -> dict[int, frozenset[int]]:
    """Returns, by a call's index, the parameters that it shares with calls before it.

    Args:
        calls: the blocks that each reads.
        parameters: `id` of each trainable parameter of a block.
    """
    seen: set[Any] = set()
    found: dict[int, frozenset[int]] = {}
    for index, blocks in enumerate(calls):
        shared = [name for name in blocks if name in seen]
        if shared:
            found[index] = frozenset(p for name in shared for p in parameters(name))
        seen.update(blocks)
    return found
