"""Attributes that a model sets on its own modules while it runs, kept apart for interleaved
microbatches.

In: a model. Out: `ModuleNotes`, which takes attributes off at a pause of a coroutine and puts them
back when it resumes.

[Note: notes on modules]
Some models keep things on themselves during a forward: outputs that their own hooks capture, a
position, a cache. Run one after the other, microbatches overwrite these in turn; interleaved, they
would mix them up. So at a pause, attributes that differ from those of before the resume are taken
off and belong to the microbatch; lists, dictionaries and sets are taken with their content. So are
modules' modes (`train`, `eval`). Parameters, buffers and submodules are no notes, nor are other
switches, numbers and functions (a flag that hooks have been installed must hold for all). After the
step the notes of the last microbatch stay, as after a plain loop.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.core.storage_formats import ComputeDtype
from memfit.homes.gradients import GradientHomes
from memfit.homes.weights import BlockWeights, ParameterSlot

_ABSENT: Any = object()
_MODE = "training"
_TORCH_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_CONTAINERS = (list, dict, set, deque)

Place = tuple[int, str]
Notes = dict[Place, Any]


class ModuleNotes:
    """Saved module attributes of one model.

    The first run of a schedule looks at every attribute of every module at every pause and learns
    which ones are written; later runs look at those.

    Memory: references to the attributes, shallow copies of containers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.modules())
        self._places: list[Place] | None = None
        self._written: set[Place] = set()

    def begin_run(self, *, learns: bool) -> None:
        """Prepares for a run of a schedule.

        Args:
            learns: look at every attribute (in the first run of these shapes).
        """
        self._places = None if learns else sorted(self._written)

    def enter(self, notes: Notes | None) -> Notes:
        """Puts the attributes of a microbatch that resumes on the modules.

        Returns:
            The replaced attributes, for `leave`.
        """
        outside = self._take()
        if notes:
            self._change(outside, {**outside, **notes})
        return outside

    def leave(self, outside: Notes) -> Notes:
        """Takes off the attributes that a microbatch has set, when it pauses.

        Returns:
            Its attributes, for the next `enter`.
        """
        here = self._take()
        places = here.keys() | outside.keys()
        notes = {
            place: here.get(place, _ABSENT)
            for place in places
            if not _same(here.get(place, _ABSENT), outside.get(place, _ABSENT))
        }
        self._written |= notes.keys()
        self._change(here, outside)
        return notes

    def _take(self) -> Notes:
        if self._places is not None:
            return {
                place: _noted(place[1], vars(self._modules[place[0]]).get(place[1], _ABSENT)) for place in self._places
            }
        return {
            (index, name): _noted(name, value)
            for index, module in enumerate(self._modules)
            for name, value in vars(module).items()
            if name not in _TORCH_OWN and not name.endswith("_hooks")
        }

    def _change(self, here: Notes, wanted: Notes) -> None:
        for place in here.keys() | wanted.keys():
            now, then = here.get(place, _ABSENT), wanted.get(place, _ABSENT)
            if not _same(now, then):
                _put(self._modules[place[0]], place[1], then)


class _Mode(Enum):
    """Mode of a module (training or evaluation), the only switch that belongs to a microbatch."""

    EVALUATION = False
    TRAINING = True


def _noted(name: str, value: Any) -> Any:
    """Returns a container and its present content: (the object, a shallow copy)."""
    if name == _MODE and isinstance(value, bool):
        return _Mode(value)
    if type(value) in _CONTAINERS:
        return (value, value.copy())
    return value


def _is_flag(value: Any) -> bool:
    """Tells whether a value belongs to no microbatch in particular: a switch, a counter, a function
    that was installed once.
    """
    return (
        value is _ABSENT
        or value is None
        or isinstance(value, bool | int | float | complex | str | bytes)
        or callable(value)
    )


def _same(a: Any, b: Any) -> bool:
    if _is_flag(a) and _is_flag(b):
        return True
    if type(a) is tuple and type(b) is tuple and len(a) == 2 and len(b) == 2 and type(a[0]) in _CONTAINERS:
        return a[0] is b[0] and _same_content(a[1], b[1])
    return a is b


def _same_content(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and a[key] is b[key] for key in a)
    if isinstance(a, set):
        return a == b
    return all(x is y for x, y in zip(a, b, strict=True))


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(module).pop(name, None)
        return
    if isinstance(value, _Mode):
        value = value.value
    if type(value) is tuple and len(value) == 2 and type(value[0]) in _CONTAINERS and type(value[0]) is type(value[1]):
        container, content = value
        container.clear()
        if isinstance(container, dict | set):
            container.update(content)
        else:
            container.extend(content)
        value = container
    vars(module)[name] = value


# Leaves of microbatches: each microbatch uses a low-precision weight through a leaf of its own.
#
# In: the model, its blocks and their gradient homes. Out: modules that hold fresh leaves over the
# same storages while a call runs.
#
# [Note: leaves of a microbatch]
# Where microbatches run interleaved, one backward covers all of them, and autograd adds what
# reaches a weight before the weight's own node runs: in the weight's dtype, which loses digits with
# every microbatch (bf16: 6e-3 of the sum at 32 microbatches). So while a call runs, its modules
# hold leaves made for this call of this microbatch. What a leaf received is whole when its node
# runs, and goes to the weight's sum in the master's dtype (`homes.gradients`) before the next
# microbatch's comes. Uses within one call still add in the weight's dtype; a weight that several
# calls use adds call by call in the master's. Microbatches that run one after the other need none
# of this: each has a backward of its own.

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


# Casts of floating inputs of low-precision modules.
#
# In: a model that computes in another dtype than its batches are of. Out: its own forward, and
# those of its layers, get floating arguments in that dtype.
#
# The rule is that of `torch.distributed.fsdp.fully_shard` with
# `MixedPrecisionPolicy(cast_forward_inputs=True)` on each layer and on the whole model: floating
# tensors among the positional and keyword arguments are cast, in whatever containers; integers
# stay, and so do buffers and what a module makes itself. The batch that the loss function sees is
# as the user gave it.


def cast_dtype(compute: ComputeDtype) -> torch.dtype | None:
    """Returns the dtype that inputs of the model and its layers are cast to; None without a compute
    dtype.
    """
    return None if compute.weight_dtype is None else getattr(torch, compute.weight_dtype)


@contextmanager
def casting_inputs(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Context in which these modules get their floating arguments in `dtype`; None changes
    nothing.
    """
    cast = None if dtype is None else _Cast(dtype)
    handles = [m.register_forward_pre_hook(cast, with_kwargs=True) for m in modules] if cast is not None else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Cast:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not any(self._is_other(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            return None  # containers stay the caller's own
        return pytree.tree_map(self._one, args), pytree.tree_map(self._one, kwargs)

    def _is_other(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != self._dtype

    def _one(self, value: Any) -> Any:
        return value.to(self._dtype) if self._is_other(value) else value
