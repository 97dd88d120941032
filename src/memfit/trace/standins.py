"""Runs a model on stand-ins for its parameters and buffers, and leaves no trace of it.

In: a model, possibly with weights that are away (storages of zero bytes) or on `meta`. Out: inside
a `with`, the same model with other tensors in its places; afterwards everything as it was: tensors,
gradients, hooks, attributes, random generators.

[Note: what is restored]
Attributes of every module and the contents of the plain dicts, lists and sets among them
(parameters, buffers, hooks, caches); and the same of objects that lie in modules' attributes (a
counter inside a config object). What such objects hold in turn is beyond reach.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch
from torch import nn

from memfit import devices
from memfit.core.storage_formats import ComputeDtype, stored_dtypes
from memfit.tensors.trees import held_objects
from memfit.trace.known import KnownOperations
from memfit.trace.known_values import give_copy

_Container = dict | list | set
_CachedFunction = functools._lru_cache_wrapper
_KEEPING = (dict, list, tuple)


@contextmanager
def stand_ins(
    model: nn.Module,
    make_parameter: Callable[[nn.Parameter], nn.Parameter],
    make_buffer: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[dict[int, torch.Tensor]]:
    """Puts stand-ins in place of all parameters and buffers.

    One stand-in per tensor, so that ties stay ties.

    Yields:
        The stand-in by `id` of the real tensor.
    """
    modules = list(model.modules())
    made: dict[int, torch.Tensor] = {}
    with untouched_modules(model):
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


@contextmanager
def untouched_modules(model: nn.Module) -> Iterator[None]:
    """Gives every module its attributes back, and the contents of its containers.

    See [Note: what is restored].
    """
    snapshot = [(module, dict(module.__dict__), _contents(module.__dict__)) for module in model.modules()]
    held = {id(one): one for module in model.modules() for _, one in held_objects(module)}
    beside = [(one, dict(vars(one)), _contents(vars(one))) for one in held.values()]
    try:
        yield
    finally:
        for module, attributes, contents in snapshot:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                _refill(container, content)
        for one, attributes, contents in beside:
            # Most hold settings that no forward touches; of others, other threads may hold them
            # too.
            if len(vars(one)) != len(attributes) or not _holds_same(vars(one), attributes):
                vars(one).clear()
                vars(one).update(attributes)
            for container, content in contents:
                if len(container) != len(content) or not _holds_same(container, content):
                    _refill(container, content)


@contextmanager
def untouched_caches(model: nn.Module) -> Iterator[None]:
    """Leaves no stand-in in what outlives a forward beside the modules: cached functions, and the
    dicts, lists and sets of classes and their files.

    Functions of `functools.lru_cache` that hold tensors are emptied, before and after. So each
    forward does the work of the first, and none finds there what a trace has left, a tensor without
    data.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not _is_foreign(kind.__module__)}
    files = [sys.modules[name] for name in sorted({kind.__module__ for kind in kinds}) if name in sys.modules]
    places = [vars(place) for place in (*kinds, *files)]
    contents = [one for attributes in places for one in _contents(attributes)]
    cached = {one for held in _cached_functions(len(sys.modules)) if (one := held()) is not None}
    cached |= {one for attributes in [*places, *map(vars, model.modules())] for one in _cached_in(attributes)}
    _empty(cached)
    try:
        yield
    finally:
        _empty(cached)
        for container, content in contents:
            if len(container) != len(content) or not _holds_same(container, content):
                _refill(container, content)


@contextmanager
def untouched_generators() -> Iterator[Callable[[], bool]]:
    """Gives Python's, NumPy's and torch's global random generators the state back that they had at
    entry.

    Yields:
        Tells that Python's or NumPy's numbers were drawn since. (Torch's are seen by operation: on
        fake tensors its generators stand still.)
    """
    python = random.getstate()
    cpu = torch.get_rng_state()
    accelerator = devices.initialized()
    device = None if accelerator is None else accelerator.rng_states()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None

    def has_drawn() -> bool:
        if random.getstate() != python:
            return True
        return numpy is not None and not _is_same_numpy(numpy.random.get_state(), numpy_state)

    try:
        yield has_drawn
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if accelerator is not None and device is not None:
            accelerator.set_rng_states(device)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)


def _is_same_numpy(left: Any, right: Any) -> bool:
    """Compares two states of NumPy's generator: a name, an array, numbers."""
    return left[0] == right[0] and left[1].tobytes() == right[1].tobytes() and left[2:] == right[2:]


def _contents(attributes: Mapping[str, Any]) -> list[tuple[_Container, _Container]]:
    return [
        (value, type(value)(value))
        for name, value in attributes.items()
        if type(value) in (dict, OrderedDict, list, set) and not name.startswith("__")
    ]


@functools.lru_cache(maxsize=1)
def _cached_functions(loaded: int) -> tuple[weakref.ref[Any], ...]:
    """Those of `functools.lru_cache` in the process, looked for again when more files are loaded:
    decorators hide them where no attribute leads.

    Weak, because one that was made inside of a call must die with it: what it has in its closure
    (a job's machine, whose limit ends with it) would live on otherwise.
    """
    del loaded
    found = [one for one in gc.get_objects() if type(one) is _CachedFunction]
    return tuple(weakref.ref(one) for one in found if not _is_foreign(getattr(one, "__module__", None)))


def _cached_in(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """The same among attributes, and one wrapper deep: what was made since."""
    for value in attributes.values():
        found: list[Any] = []
        if type(value) is _CachedFunction:
            found = [value]
        elif isinstance(value, FunctionType) and value.__closure__ is not None:
            for cell in value.__closure__:
                with suppress(ValueError):  # a cell that nothing was put into yet
                    found += [cell.cell_contents] if type(cell.cell_contents) is _CachedFunction else []
        yield from (one for one in found if not _is_foreign(getattr(one, "__module__", None)))


_misses_without_tensors: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By cached function, how often it had computed when it held nothing that is a tensor or may become
one."""


def _empty(cached: Iterable[Any]) -> None:
    """Empties those that hold tensors.

    A function that has computed nothing since it held none is passed over: a process has hundreds,
    some with thousands of entries, and each trace looks four times.
    """
    for function in cached:
        found = function.cache_info()
        if not found.currsize or _misses_without_tensors.get(function) == found.misses:
            continue
        holds_tensors, may_change = _look_through(function)
        if holds_tensors:
            function.cache_clear()  # and its count begins anew
            _misses_without_tensors.pop(function, None)
        elif not may_change:
            _misses_without_tensors[function] = found.misses


def _look_through(function: Any) -> tuple[bool, bool]:
    """Looks for tensors in what a cached function has kept: its results, in tuples, lists and
    dicts, four deep.

    By classes, level by level.

    Returns:
        (a tensor is there, a list or a dict is there, which the program may yet fill with tensors)
    """
    attributes = vars(function)
    held = [one for one in gc.get_referents(function) if one is not attributes]
    # One dict is the table itself; a bounded function refers to its results beside it.
    may_change = sum(type(one) is dict for one in held) > 1
    for depth in range(5):
        kinds = set(map(type, held))
        if any(issubclass(kind, torch.Tensor) for kind in kinds):
            return True, may_change
        may_change |= list in kinds or (depth > 0 and dict in kinds)
        if kinds.isdisjoint(_KEEPING):
            break
        held = gc.get_referents(*[one for one in held if type(one) in _KEEPING])
    return False, may_change


def _holds_same(container: _Container, content: _Container) -> bool:
    """The very same objects, in their order; tensors do not compare with ==."""
    mine, theirs = ((one.items() if isinstance(one, dict) else enumerate(one)) for one in (container, content))
    return all(a[0] == b[0] and a[1] is b[1] for a, b in zip(mine, theirs, strict=True))


def _refill(container: _Container, content: _Container) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _is_foreign(name: str | None) -> bool:
    """A file of torch's or of the standard library, whose caches hold no tensors of a model."""
    root = (name or "builtins").partition(".")[0]
    return root == "torch" or root in sys.stdlib_module_names


def fake_parameter(
    known: KnownOperations, parameter: nn.Parameter, device: torch.device, compute: ComputeDtype
) -> nn.Parameter:
    """Returns a fake parameter of the dtype in which the step computes."""
    made: Any = known.like(parameter, device, _weight_dtype(parameter, compute))
    return _with_attributes(made, parameter)


def _with_attributes(stand_in: nn.Parameter, parameter: nn.Parameter) -> nn.Parameter:
    """Copies the attributes that the user's code set: its forward reads them (a scale,
    bitsandbytes' `quant_state`).
    """
    for name, value in vars(parameter).items():
        if not name.startswith("_memfit"):
            setattr(stand_in, name, value)
    return stand_in


def with_value(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Gives a fake tensor the values of a real one, where there are any."""
    if real.device.type != "meta" and has_data(real):
        give_copy(fake, real)
    return fake


def has_data(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor's bytes are there: a weight that is away has a storage of zero
    bytes.
    """
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size() or tensor.numel() == 0


def alias(parameter: nn.Parameter, compute: ComputeDtype) -> nn.Parameter:
    """Returns the same memory (in another dtype: a copy) as another leaf.

    Gradients and hooks of the real parameter stay out of the trace.
    """
    with torch._C.DisableTorchFunctionSubclass():
        weight = parameter.detach().to(_weight_dtype(parameter, compute)).as_subclass(torch.Tensor)
    # A class of the user's stays what it is: forwards ask for it.
    made = torch.Tensor._make_subclass(type(parameter), weight, parameter.requires_grad)
    return _with_attributes(made, parameter)  # type: ignore[arg-type]


def _weight_dtype(parameter: nn.Parameter, compute: ComputeDtype) -> torch.dtype:
    return getattr(torch, stored_dtypes(str(parameter.dtype).removeprefix("torch."), compute)[0])
