"""Losses that leave the accelerator: the processor's part of each microbatch's backward runs before
the joint backward.

In: a microbatch's loss. Out: the edges at which gradients enter the accelerator, and these
gradients.

[Note: one ready queue]
That one backward visits blocks in the reverse order of the forward rests on autograd's choice of
the latest-made ready node (`engine.run`, [Note: who drives whom]). It chooses within one queue.
Nodes of the processor have a queue of their own in the caller's thread: there the roots of several
losses on the CPU would be handed over one by one, while the device's thread already takes whatever
is ready, an earlier microbatch's first block if need be. Gradients would reach blocks that have
been left, and been updated. So all roots of a joint backward lie on the accelerator. A detour over
the processor in the middle of the graph has the same effect, cannot be cut off, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from memfit import devices
from memfit.core.errors import UnsupportedError
from memfit.engine.tail import CutEdge


def differentiate_on_host(loss: torch.Tensor, factor: torch.Tensor | None) -> tuple[CutEdge, ...]:
    """Runs the part of the graph back that lies between the loss and the accelerator.

    Args:
        loss: 0-d, with a graph.
        factor: what the loss is multiplied with before it is differentiated (0-d), or None for 1.

    Returns:
        The edges into the accelerator that received a gradient; the loss itself, with its factor,
        where it lies there.

    Raises:
        UnsupportedError: Parameters on the processor take part.
    """
    assert loss.grad_fn is not None
    # Already in the accelerator's queue: it may be a root as it is.
    if not _is_on_host(loss.grad_fn):
        gradient = torch.ones_like(loss) if factor is None else factor
        return (CutEdge(edge=GradientEdge(loss.grad_fn, loss.output_nr), gradient=gradient),)
    edges: dict[tuple[Any, int], GradientEdge] = {}
    seen, pending = {loss.grad_fn}, [loss.grad_fn]
    while pending:
        for node, number in pending.pop().next_functions:
            if node is None:
                continue
            if not _is_on_host(node):
                # Each edge once: autograd sums what arrives at it, in the order of a plain
                # backward.
                edges[node, number] = GradientEdge(node, number)
            elif not node.next_functions:
                raise UnsupportedError(
                    "the loss reads a parameter on the CPU while the model lies on an accelerator: make it a part of the model there, or freeze it "
                    "(requires_grad_(False))"
                )
            elif node not in seen:
                seen.add(node)
                pending.append(node)
    if not edges:
        # Nothing of the accelerator takes part: its parameters get no gradient, as in plain
        # PyTorch.
        return ()
    outputs = None if factor is None else [factor.to(loss.device)]
    # Now, in the caller's thread: these nodes would run in an order of their own beside those of
    # the accelerator.
    gradients = torch.autograd.grad([loss], list(edges.values()), grad_outputs=outputs, allow_unused=True)
    return tuple(CutEdge(edge=e, gradient=g) for e, g in zip(edges.values(), gradients, strict=True) if g is not None)


def refuse_detours(roots: Iterable[Any]) -> None:
    """Walks a graph, some microseconds a node, and refuses nodes of the processor in it. See [Note:
    one ready queue].

    Args:
        roots: nodes on the accelerator.

    Raises:
        UnsupportedError: The graph leaves the accelerator and comes back.
    """
    seen = set(roots)
    pending = list(seen)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is None or node in seen:
                continue
            if _is_on_host(node):
                raise UnsupportedError(
                    f"the model computes on the CPU in the middle ({node.name()}): microbatches that take turns would run back in an order that is not "
                    "sure. Keep the model on its device, or train with one microbatch: Plan(microbatches=1), or order='microbatch-major'"
                )
            seen.add(node)
            pending.append(node)


def _is_on_host(node: Any) -> bool:
    """Tells whether autograd runs the node in the caller's thread."""
    metadata = getattr(node, "_input_metadata", None)
    return bool(metadata) and not any(devices.is_accelerator(one.device) for one in metadata)
