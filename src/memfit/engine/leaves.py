"""Leaves of microbatches: each microbatch uses a low-precision weight through a leaf of its own.

In: the model, its blocks and their gradient homes. Out: modules that hold fresh leaves over the
same storages while a call runs.

[Note: leaves of a microbatch]
Where microbatches run interleaved, one backward covers all of them, and autograd adds what reaches
a weight before the weight's own node runs: in the weight's dtype, which loses digits with every
microbatch (bf16: 6e-3 of the sum at 32 microbatches). So while a call runs, its modules hold leaves
made for this call of this microbatch. What a leaf received is whole when its node runs, and goes to
the weight's sum in the master's dtype (`homes.gradients`) before the next microbatch's comes. Uses
within one call still add in the weight's dtype; a weight that several calls use adds call by call
in the master's. Microbatches that run one after the other need none of this: each has a backward of
its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from memfit.homes.gradients import GradientHomes
from memfit.homes.weights import BlockWeights, ParameterSlot

Replaced = list[tuple[Any, Any, torch.nn.Parameter]]


class MicrobatchLeaves:
    """Replaces weights by leaves, and puts the weights back.

    Memory: none but small objects; a leaf shares its weight's storage.

    Args:
        model: the user's.
        blocks: of the model.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[BlockWeights]) -> None:
        block_of = {id(slot.parameter): block.index for block in blocks for slot in block.slots if slot.requires_grad}
        self._places: dict[int, Replaced] = {}
        for module in model.modules():
            containers: list[tuple[Any, Iterable[tuple[Any, Any]]]] = [(module._parameters, module._parameters.items())]
            # Recurrent modules keep a second list of the same parameters and compute with that one.
            containers += [(value, enumerate(value)) for value in vars(module).values() if type(value) is list]
            for container, items in containers:
                for key, value in items:
                    if id(value) in block_of:
                        self._places.setdefault(block_of[id(value)], []).append((container, key, value))

    def enter(self, blocks: Iterable[int]) -> Replaced:
        """Replaces these blocks' weights, which must be on the device, by leaves.

        Returns:
            The replaced parameters, for `leave`.
        """
        made: dict[int, torch.nn.Parameter] = {}
        replaced: Replaced = []
        for block in blocks:
            for container, key, parameter in self._places.get(block, ()):
                leaf = made.get(id(parameter))
                if leaf is None:
                    leaf = made[id(parameter)] = _leaf_of(parameter)
                replaced.append((container, key, container[key]))
                container[key] = leaf
        return replaced

    def leave(self, replaced: Replaced) -> None:
        """Puts the replaced parameters back."""
        # Backwards: a place that was replaced twice gets what it had first.
        for container, key, before in reversed(replaced):
            container[key] = before

    def restore_all(self) -> None:
        """Gives all modules their own weights back, after an error."""
        for places in self._places.values():
            self.leave(places)


def watch_arrivals(blocks: Sequence[BlockWeights], gradients: GradientHomes) -> list[Any]:
    """Registers hooks by which every trainable weight hands its gradient on as soon as it is
    complete. Returns handles to `remove`.
    """
    # The weights are the user's and outlive the job: a hook must not hold its homes.
    reference = weakref.ref(gradients)
    return [
        slot.parameter.register_post_accumulate_grad_hook(_Arrival(reference, slot))
        for block in blocks
        for slot in block.slots
        if slot.requires_grad
    ]


def watch_last(blocks: Sequence[BlockWeights]) -> None:
    """Moves the hooks that hand gradients on behind hooks that were registered later, since these
    may change a gradient.
    """
    for slot in (slot for block in blocks for slot in block.slots):
        with torch._C.DisableTorchFunctionSubclass():  # the weight may be away
            hooks: Any = slot.parameter._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Arrival)]:
            # torch runs them in the order of insertion; of `OrderedDict.move_to_end` it knows
            # nothing.
            hooks[key] = hooks.pop(key)


class _Arrival:
    def __init__(self, gradients: weakref.ref[GradientHomes], slot: ParameterSlot) -> None:
        self._gradients = gradients
        self._slot = slot

    def __call__(self, parameter: torch.Tensor) -> None:
        gradients = self._gradients()
        if gradients is not None and gradients.is_receiving:
            gradients.here.receive(self._slot, parameter)


def _leaf_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    leaf = torch.nn.Parameter(parameter.detach())
    leaf._memfit_leaf_of = parameter  # type: ignore[attr-defined]
    for hook in (parameter._backward_hooks or {}).values():
        leaf.register_hook(hook)
    leaf.register_post_accumulate_grad_hook(_HandOn(parameter))
    return leaf


class _HandOn:
    """Makes a leaf's gradient the parameter's, whose hooks (the user's, and `_Arrival`) run as
    without leaves.
    """

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter = parameter

    def __call__(self, leaf: torch.Tensor) -> None:
        parameter = self._parameter
        parameter.grad, leaf.grad = leaf.grad, None
        for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)
