"""Tail of a split batch: the backward of each microbatch's loss runs down to the layers at once;
that of the layers waits for all microbatches.

In: a microbatch's loss and the moment at which its tail began. Out: the gradient at every edge that
leads out of the tail.

[Note: tail at once]
In layer-major order, running all microbatches forward to their losses would hold every microbatch's
logits until backward. Instead each microbatch's tail (final norm, head, loss) runs forward and
straight back; only the gradients at the edges of the autograd graph that cross into older nodes are
kept. One joint backward then starts from these edges for all microbatches. The cut needs no node in
the user's graph and no detached copies: nodes carry the order in which they were made, and an edge
from a node of the tail to an older one is a cut edge, by whatever door the tensor came (router
logits that a hook carried past the blocks included). Each cut edge keeps its own place in the sum
of gradients: the contributions of the tail arrive first, as they do in a plain backward, which runs
the latest-made node first.

A weight that the tail shares with the layers (a head tied to the embedding) would lead autograd
from the tail through all layers to the weight's other use. So while a call of the tail runs, its
module holds an *alias* of such a weight: a leaf of its own over the same storage. What the alias
receives is added to the weight's gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from memfit.core.errors import UnsupportedError
from memfit.tensors.write_marks import shares_elements


@dataclass(frozen=True, kw_only=True)
class CutEdge:
    """An edge out of the tail, with its gradient."""

    edge: GradientEdge
    gradient: torch.Tensor


def hooks_of(output: torch.Tensor) -> dict[int, Any]:
    """Returns the dictionary of hooks on a tensor, to which later ones are added.

    As `Tensor.register_hook` makes the dictionary, without a hook: whoever holds it holds neither
    the tensor nor its graph.
    """
    if output._backward_hooks is None:
        output._backward_hooks = OrderedDict()
        if output.grad_fn is not None:
            output.grad_fn._register_hook_dict(output)  # type: ignore[attr-defined]
    return output._backward_hooks  # type: ignore[return-value]


@contextmanager
def withheld(hooks: Iterable[dict[int, Any]]) -> Iterator[None]:
    """Context of a tail's backward in which no hooks run on the tensors at its cut: asking for a
    gradient would run them, and the joint backward that starts there runs them again.
    """
    kept = [(own, dict(own)) for own in hooks if own]
    for own, _ in kept:
        # The dictionaries themselves are emptied: autograd's nodes refer to them.
        own.clear()
    try:
        yield
    finally:
        for own, those in kept:
            # Also after an error: the user's hooks are on these tensors too.
            own.update(those)


class TailAliases:
    """Aliases of the weights that calls of the tail share with calls before it.

    Memory: none; an alias shares its weight's storage.

    Args:
        modules: of the sites in the tail.
        shared: identities of the parameters that are read before the tail too.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], shared: set[int]) -> None:
        self._places: dict[int, list[tuple[torch.nn.Module, str, torch.nn.Parameter]]] = {}
        for module in modules:
            self._places[id(module)] = [
                (part, name, parameter)
                for part in module.modules()
                for name, parameter in part._parameters.items()
                if parameter is not None and id(parameter) in shared and parameter.requires_grad
            ]
        self._original: dict[int, torch.nn.Parameter] = {}
        # By the weight: calls of one tail share an alias, so that autograd adds up what their uses
        # give, as it does for the weight. They must live as long as the entries above, or another
        # tensor takes a number.
        self._alias_of: dict[int, torch.nn.Parameter] = {}

    def enter(self, module: torch.nn.Module) -> None:
        """Gives aliases to a module that is about to run."""
        for part, name, parameter in self._places[id(module)]:
            alias = self._alias_of.get(id(parameter))
            if alias is None:
                alias = self._alias_of[id(parameter)] = torch.nn.Parameter(parameter.detach())
                self._original[id(alias)] = parameter
            # Not by `setattr`: that would register the alias with the module and its hooks.
            part._parameters[name] = alias

    def leave(self, module: torch.nn.Module) -> None:
        """Gives a module that has run its own weights back."""
        for part, name, parameter in self._places.get(id(module), ()):
            part._parameters[name] = parameter

    def original(self, leaf: torch.Tensor) -> torch.Tensor:
        """Returns the weight that a leaf stands for."""
        return self._original.get(id(leaf), leaf)

    def forget(self) -> None:
        """Ends a microbatch's tail."""
        self._original.clear()
        self._alias_of.clear()

    def restore_all(self) -> None:
        """Gives all modules their own weights back, after an error."""
        for places in self._places.values():
            for part, name, parameter in places:
                part._parameters[name] = parameter
        self.forget()


def differentiate_tail(
    loss: torch.Tensor, share: torch.Tensor | None, began_at: int, aliases: TailAliases
) -> tuple[CutEdge, ...]:
    """Runs the tail backward.

    Gradients of parameters that the tail reads are added to their `.grad`, after which their
    post-accumulate hooks run, as plain backward does.

    Args:
        loss: 0-d tensor of this microbatch.
        share: loss weight (0-d), or None for 1.
        began_at: `sequence_number()` when the tail began: older nodes are outside.
        aliases: of the weights that the tail shares with the layers.

    Returns:
        The cut edges that received a gradient.

    Raises:
        UnsupportedError: code between the tail's calls reads a weight that the layers read too.
    """
    cut = _cut(loss, began_at)
    # Before anything runs back: a refused step must leave no gradient behind.
    _check_leaves(cut, aliases)
    if not cut.edges and not cut.leaves:
        return ()
    leaf_edges = [GradientEdge(node, 0) for node in cut.leaves]
    outputs = None if share is None else [share]
    if not _is_nested(cut):
        gradients = torch.autograd.grad(
            [loss], [*cut.edges.values(), *leaf_edges], grad_outputs=outputs, allow_unused=True
        )
        found = dict(zip(cut.edges, gradients[: len(cut.edges)], strict=True))
        _add_to_leaves(cut.leaves, gradients[len(cut.edges) :], aliases)
    else:
        found, of_leaves = _differentiate_nested(loss, outputs, cut, leaf_edges)
        _add_to_leaves(cut.leaves, of_leaves, aliases)
    return tuple(CutEdge(edge=cut.edges[key], gradient=g) for key, g in found.items() if g is not None)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Edges out of the tail by (node, output), leaves that the tail reaches, and the tail's own
    nodes that have an edge out of it.
    """

    edges: dict[tuple[Any, int], GradientEdge]
    leaves: list[Any]
    frontier: list[Any]


def _cut(loss: torch.Tensor, began_at: int) -> _Cut:
    edges: dict[tuple[Any, int], GradientEdge] = {}
    leaves: dict[Any, None] = {}
    frontier: dict[Any, None] = {}
    seen: set[Any] = set()
    pending: list[tuple[Any, int, Any]] = [(loss.grad_fn, loss.output_nr, None)]
    while pending:
        node, output, source = pending.pop()
        if node is None:
            continue
        # these carry the highest number whenever they were made
        if type(node).__name__ == "AccumulateGrad":
            leaves[node] = None
        elif node._sequence_nr() < began_at:
            edges[node, output] = GradientEdge(node, output)
            if source is not None:
                frontier[source] = None
        elif node not in seen:
            seen.add(node)
            pending.extend((following, number, node) for following, number in node.next_functions)
    return _Cut(edges=edges, leaves=list(leaves), frontier=sorted(frontier, key=lambda n: -n._sequence_nr()))


def _is_nested(cut: _Cut) -> bool:
    """Tells whether a cut edge is reached again beyond another one, so that asking autograd for
    both gradients would run the layers between them.

    That happens if the loss reads an output of a layer in the middle, such as router logits.
    """
    nodes = {node for node, _ in cut.edges}
    if len(nodes) < 2:
        return False
    return any(node in nodes for node in _beyond(nodes))


def _beyond(nodes: Iterable[Any]) -> Iterator[Any]:
    """Returns all nodes that are reached from these (themselves excluded, unless they are reached
    from another).
    """
    seen: set[Any] = set()
    pending = [following for node in nodes for following, _ in node.next_functions]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(following for following, _ in node.next_functions)


def _differentiate_nested(
    loss: torch.Tensor, outputs: list[torch.Tensor] | None, cut: _Cut, leaf_edges: list[GradientEdge]
) -> tuple[dict[tuple[Any, int], Any], Sequence[torch.Tensor | None]]:
    """Differentiates a tail with nested cut edges: autograd stops one node earlier, and the tail's
    last nodes are run by hand.

    Memory: what the tail saved lives until the end of it (autograd must not free what the last
    nodes still need).
    """
    wanted = [GradientEdge(node, i) for node in cut.frontier for i in range(len(node._input_metadata))]
    gradients = list(
        torch.autograd.grad([loss], [*wanted, *leaf_edges], grad_outputs=outputs, allow_unused=True, retain_graph=True)
    )
    of_leaves = gradients[len(wanted) :]
    found: dict[tuple[Any, int], Any] = dict.fromkeys(cut.edges)
    position = 0
    frontier: list[Any] = cut.frontier
    # latest-made first, as autograd would run them: the order of sums is the same
    for node in frontier:
        count = len(node._input_metadata)
        arrived = gradients[position : position + count]
        position += count
        if all(gradient is None for gradient in arrived):
            continue
        following = node.next_functions
        run = node if callable(node) else node.apply
        with torch.no_grad():
            results = run(*arrived)
            results = results if isinstance(results, tuple) else (results,)
            for key, result in zip(following, results, strict=False):
                if key in found and result is not None:
                    before = found[key]
                    found[key] = result if before is None else before + result
    return found, of_leaves


def _check_leaves(cut: _Cut, aliases: TailAliases) -> None:
    """Checks that no leaf of the tail is reached from beyond the cut: autograd would run the layers
    on its way there.
    """
    wanted = {node for node in cut.leaves if aliases.original(node.variable) is node.variable}
    if not wanted:
        return
    for node in _beyond(node for node, _ in cut.edges):
        if node in wanted:
            raise UnsupportedError(
                f"a weight of shape {tuple(node.variable.shape)} is read before the tail and again in it by code that is not a module's call, so the tail "
                "cannot run back on its own: plan tail=None"
            )


def _add_to_leaves(leaves: Sequence[Any], gradients: Sequence[torch.Tensor | None], aliases: TailAliases) -> None:
    taken: set[int] = set()
    for node, gradient in zip(leaves, gradients, strict=True):
        parameter = aliases.original(node.variable)
        if gradient is None or not parameter.requires_grad:
            continue
        with torch.no_grad():
            if parameter.grad is None:
                # Two leaves may have received the same memory (a sum passes its gradient on
                # unchanged): only one may keep it. Nor may elements share memory: the next
                # microbatch's gradient is added in place.
                storage = gradient.untyped_storage()._cdata
                is_shared = storage in taken or shares_elements(gradient)
                parameter.grad = gradient.clone() if is_shared else gradient
                taken.add(storage)
            else:
                parameter.grad += gradient
        # A copy: a hook may remove itself. Behind the sum, as autograd runs them: they take the
        # gradient off the leaf.
        for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)
