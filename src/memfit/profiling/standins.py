"""Runs a model on stand-ins for its parameters and buffers, and leaves no trace of it.

In: a model, possibly with weights that are away (storages of zero bytes) or on `meta`. Out: inside a `with`, the same
model with other tensors in its places; afterwards everything as it was: tensors, gradients, hooks, attributes, random
generators.

[Note: what is restored]
Attributes of every module and the contents of the plain dicts, lists and sets among them (parameters, buffers, hooks,
caches). Objects of other classes that a forward changes (a counter inside a config object) are beyond reach.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memfit import devices

_Container = dict | list | set


@contextmanager
def stand_ins(
    model: nn.Module,
    make_parameter: Callable[[nn.Parameter], nn.Parameter],
    make_buffer: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[dict[int, torch.Tensor]]:
    """Puts stand-ins in place of all parameters and buffers; one stand-in per tensor, so that ties stay ties.

    Yields:
        The stand-in by `id` of the real tensor.
    """
    modules = list(model.modules())
    snapshot = [(module, dict(module.__dict__), _contents(module)) for module in modules]
    made: dict[int, torch.Tensor] = {}
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        made[id(parameter)] = make_parameter(parameter)
                    module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in made:
                        made[id(buffer)] = make_buffer(buffer)
                    module._buffers[name] = made[id(buffer)]
        for module in modules:
            # Recurrent modules keep a second list of the same parameters and compute with that one.
            for value in module.__dict__.values():
                if type(value) is list:
                    value[:] = [made.get(id(item), item) if isinstance(item, torch.Tensor) else item for item in value]
        yield made
    finally:
        for module, attributes, contents in snapshot:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                container.clear()
                if isinstance(container, list):
                    container.extend(content)
                else:
                    container.update(content)


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Gives Python's, NumPy's and torch's global random generators the state back that they had at entry."""
    python = random.getstate()
    cpu = torch.get_rng_state()
    accelerator = devices.initialized()
    device = None if accelerator is None else accelerator.rng_states()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if accelerator is not None and device is not None:
            accelerator.set_rng_states(device)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)


def fake_like(
    tensor: torch.Tensor, device: torch.device, rows: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of the same shape, strides, dtype and `requires_grad`, made from metadata alone; call it in a fake mode.

    Args:
        tensor: its data is never read: its storage may be empty.
        device: stands in for `meta`; other devices are kept.
        rows: another size of dimension 0.
        dtype: another one.
    """
    size = tuple(tensor.shape) if rows is None or not tensor.dim() else (rows, *tensor.shape[1:])
    target = device if tensor.device.type == "meta" else tensor.device
    made = torch.empty_strided(size, tensor.stride(), dtype=dtype or tensor.dtype, device=target)
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def _contents(module: nn.Module) -> list[tuple[_Container, _Container]]:
    return [
        (value, type(value)(value))
        for value in module.__dict__.values()
        if type(value) in (dict, OrderedDict, list, set)
    ]
