"""State that a call's result depends on beyond its arguments and weights: switches, random numbers,
buffers, what modules note on themselves.

In: the state of the thread and the module when the call begins. Out: the same state around the call
when it runs again, and the present one put back after.

Not captured: generators of the user's own (`torch.Generator` passed by hand), `threading.local` (on
an accelerator the recomputation runs in autograd's thread; context variables are carried there,
thread-locals cannot be), numbers outside of modules (a closure's), containers that the module keeps
on itself (what a recomputation does to them is taken back, but it reads them as they are; tensors:
see [Note: a module's memory]), and active dispatch modes (they watch operations; watching the
recomputation would count twice).
"""

from __future__ import annotations

import importlib
import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from memfit import devices
from memfit.core.errors import UnsupportedError
from memfit.core.limits import MIB
from memfit.engine.call_arguments import direct_tensors, non_leaf
from memfit.engine.writes import TRY_ANOTHER_POLICY, ReadWatcher, Stays, Watched, Writes, plain_storage, version_of
from memfit.tensors.trees import PLAIN_TYPES, own_attributes

SMALL_BUFFER_BYTES = 1 * MIB
"""On an accelerator, buffers up to this size are taken for changed without looking, because looking
would wait for the device."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Thread-wide and process-wide settings that choose kernels and dtypes."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    is_autocast_cached: bool
    function_modes: tuple[Any, ...]
    settings: tuple[Any, ...]

    @classmethod
    def capture(cls, device: torch.device) -> Switches:
        """The settings as they are."""
        kinds = dict.fromkeys(("cpu", device.type))
        return cls(
            autocast=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            is_autocast_cached=torch.is_autocast_cache_enabled(),
            function_modes=tuple(_get_current_function_mode_stack()),
            settings=tuple(read() for read, _ in _SETTINGS),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Has these settings inside, and those of outside again after."""
        with ExitStack() as stack:
            for (read, write), value in zip(_SETTINGS, self.settings, strict=True):
                present = read()
                # Only what differs: some of these belong to the process, and the worker of updates
                # runs beside a recomputation.
                if present != value:
                    write(value)
                    stack.callback(write, present)
            if any(is_enabled for _, is_enabled, _ in self.autocast):
                # Contexts of paused microbatches are still open, so that casts made here would stay
                # until the next of them goes on.
                stack.callback(torch.clear_autocast_cache)
            for kind, is_enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=self.is_autocast_cached)
                )
            present_modes = _get_current_function_mode_stack()
            for mode in self.function_modes:
                if not any(mode is other for other in present_modes):
                    # Pushed past its own __enter__, which may note where it was entered and is
                    # still entered there.
                    _push_mode(mode)
                    stack.callback(_pop_mode)
            yield


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_cudnn(value: tuple[bool, bool, bool]) -> None:
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = value


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    (
        lambda: (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        _set_cudnn,
    ),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
)


class RandomNumbers:
    """State of torch's, Python's and NumPy's default generators.

    Taken at every call that may run again, whatever its trace drew: operations of torch show that
    they draw, Python's and NumPy's numbers show nowhere, and a module may begin to draw in its
    thousandth step. About 0.1 ms a call.

    Memory: 5 KiB for torch's CPU generator, 16 bytes for an accelerator's, about 20 KiB for
        Python's; nothing once `end_of_call` saw no use of them.
    """

    __slots__ = ("_device", "_states")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[str, Any] = _random_states(device)

    def end_of_call(self) -> None:
        """Called when the call is over: generators that it did not use are forgotten."""
        now = _random_states(self._device)
        self._states = {name: state for name, state in self._states.items() if not _is_same(state, now[name])}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Generators that the call used start inside as they did then, and go on after as if
        nothing had happened.
        """
        present = {name: _GENERATORS[name][0](self._device) for name in self._states}
        try:
            for name, state in self._states.items():
                _GENERATORS[name][1](self._device, state)
            yield
        finally:
            for name, state in present.items():
                _GENERATORS[name][1](self._device, state)


def _numpy_random() -> Any:
    return importlib.import_module("numpy.random")


_GENERATORS: dict[str, tuple[Callable[[torch.device], Any], Callable[[torch.device, Any], Any]]] = {
    "torch": (lambda _: torch.get_rng_state(), lambda _, state: torch.set_rng_state(state)),
    "device": (
        lambda device: devices.of(device).rng_state(device),
        lambda device, state: devices.of(device).set_rng_state(device, state),
    ),
    "python": (lambda _: random.getstate(), lambda _, state: random.setstate(state)),
    "numpy": (
        lambda _: _numpy_random().get_state(legacy=False),
        lambda _, state: _numpy_random().set_state(state),
    ),
}


def _random_states(device: torch.device) -> dict[str, Any]:
    names = ["torch", "python"]
    if devices.is_accelerator(device):
        names.append("device")
    # NumPy loads its generators when they are first asked for: that may be inside the call, and
    # then their state before it would be unknown.
    if "numpy" in sys.modules:
        names.append("numpy")
    return {name: _GENERATORS[name][0](device) for name in names}


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):  # NumPy's, whose key is an array
        return _without_arrays(left) == _without_arrays(right)
    return left == right


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_arrays(item) for name, item in value.items()}
    return value.tobytes() if hasattr(value, "tobytes") else value


class Buffers:
    """Buffers of a module as they were when its call began, for those that the call changes.

    (Running statistics, power iterations.) The recomputed call works on copies of the entry values,
    so it sees what the first run saw and the module's own buffers are not changed a second time.

    Memory: a copy of all buffers while the call runs, of the changed ones until it was recomputed.
        On an accelerator every floating-point buffer of at most `SMALL_BUFFER_BYTES` counts as
        changed.

    Args:
        module: the site.
    """

    __slots__ = ("_entries",)

    def __init__(self, module: torch.nn.Module) -> None:
        self._entries = [
            (owner, name, buffer, buffer.detach().clone(), version_of(buffer))
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    @property
    def held_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for _, _, _, copy, _ in self._entries)

    def end_of_call(self) -> None:
        """Called when the call is over: buffers that it did not change are forgotten."""
        self._entries = [entry for entry in self._entries if _may_have_changed(*entry)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The module has copies of its buffers' entry values inside, and its own buffers again
        after.
        """
        present = [owner._buffers[name] for owner, name, *_ in self._entries]
        try:
            for owner, name, _, copy, _ in self._entries:
                owner._buffers[name] = copy
            yield
        finally:
            for (owner, name, *_), buffer in zip(self._entries, present, strict=True):
                owner._buffers[name] = buffer


def _may_have_changed(
    owner: torch.nn.Module, name: str, before: torch.Tensor, copy: torch.Tensor, version: int
) -> bool:
    now = owner._buffers.get(name)
    if now is not before or now is None or version_of(now) != version:
        return True
    if now.device.type == "cpu":
        # Batch norm changes its running statistics without counting a version, so values decide;
        # NaN counts as changed.
        return not torch.equal(now, copy)
    is_small = now.is_floating_point() and now.nbytes <= SMALL_BUFFER_BYTES
    return is_small or (isinstance(owner, _NormBase) and owner.training)


_ABSENT: Any = object()
_CONTAINERS = (list, dict, set, deque)
_TORCH_OWN = frozenset(vars(torch.nn.Module())) - {"training"}


class Attributes:
    """Python attributes of a module and its submodules as they were when its call began, for those
    that the call changes.

    (A counter, a flag, a cache made in the first call.) Flags, numbers and words have their entry
    values when the call runs again, and what it made anew is absent. After it, every attribute is
    what it was before it, containers with their content: the call happened once.

    Memory: references to numbers and words while the call runs; of changed ones until it was
    recomputed.

    Args:
        module: the site.
    """

    __slots__ = ("_entries", "_modules", "_names")

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = tuple(module.modules())
        self._entries = [
            {name: value for name, value in vars(owner).items() if type(value) in PLAIN_TYPES}
            for owner in self._modules
        ]
        self._names = [frozenset(vars(owner)) for owner in self._modules]

    def end_of_call(self) -> None:
        """Called when the call is over: attributes that it did not change are forgotten."""
        for index, owner in enumerate(self._modules):
            now, entry = vars(owner), self._entries[index]
            changed = {name: value for name, value in entry.items() if now.get(name, _ABSENT) is not value}
            changed.update((name, _ABSENT) for name in now.keys() - self._names[index])
            self._entries[index] = changed
        self._names.clear()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The module has its attributes' entry values inside, and its present ones again after."""
        present = [_notes_of(owner) for owner in self._modules]
        try:
            for owner, entry in zip(self._modules, self._entries, strict=True):
                for name, value in entry.items():
                    _note(owner, name, value)
            yield
        finally:
            for owner, notes in zip(self._modules, present, strict=True):
                for name in vars(owner).keys() - notes.keys() - _TORCH_OWN:
                    _note(owner, name, _ABSENT)
                for name, (value, content) in notes.items():
                    if vars(owner).get(name, _ABSENT) is not value:
                        _note(owner, name, value)
                    if content is not None and not _has_same(value, content):
                        value.clear()
                        value.update(content) if isinstance(value, dict | set) else value.extend(content)


def _notes_of(owner: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    """Attributes that are not torch's own, with a shallow copy of each container."""
    return {
        name: (value, value.copy() if type(value) in _CONTAINERS else None)
        for name, value in vars(owner).items()
        if name not in _TORCH_OWN
    }


def _note(owner: torch.nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def _has_same(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in container and container[key] is value for key, value in content.items())
    return container == content if isinstance(container, set) else all(map(operator.is_, container, content))


class Surroundings:
    """All of the above for one call.

    Args:
        module: the site.
        device: where it computes.
    """

    __slots__ = ("_attributes", "_buffers", "_context", "_random", "_switches")

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._context = copy_context()
        self._switches = Switches.capture(device)
        self._random = RandomNumbers(device)
        self._buffers = Buffers(module)
        self._attributes = Attributes(module)

    @property
    def held_bytes(self) -> int:
        """Device bytes held: copies of changed buffers."""
        return self._buffers.held_bytes

    def end_of_call(self) -> None:
        """Called when the call is over: forgets what it did not use."""
        self._random.end_of_call()
        self._buffers.end_of_call()
        self._attributes.end_of_call()

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls with the context variables as they were.

        What the call sets of them is gone after it.

        The recomputation runs outside of the microbatch's coroutine and, on an accelerator, in
        autograd's device thread, where variables have their defaults.
        """
        return self._context.copy().run(call, *args, **kwargs)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Everything but context variables as it was, with gradients enabled."""
        with ExitStack() as stack:
            stack.enter_context(self._random.restored())
            stack.enter_context(self._attributes.restored())
            stack.enter_context(self._buffers.restored())
            stack.enter_context(torch.enable_grad())
            # Last, so that the saved-tensor hooks and modes of the recomputation are above the
            # user's.
            stack.enter_context(self._switches.restored())
            yield


# Tensors that modules keep on themselves from call to call, as they were when a call began.
#
# In: a module. Out: the same tensors on it while the call runs again.
#
# [Note: a module's memory]
# A layer that reads what its last call left on it (a state, a running list) would, run again, read
# what this call or a later one left. So the tensors on it at entry are held, those only that the
# call both reads and replaces; what it changes in place is refused. They are looked for in
# attributes, and in lists and dictionaries there.


class HeldAttributes:
    """Tensors on a module and its submodules, from a call's entry on.

    Memory: nothing beyond what was there while the call runs; then what it reads and replaces,
    until it was run again.

    Args:
        module: the site.
        place: its name, for messages.
        stays: see `saved_tensors.Stays`.
        writes: of the job's forwards.
    """

    __slots__ = ("_entries", "_place", "_read")

    def __init__(self, module: torch.nn.Module, place: str, stays: Stays, writes: Writes) -> None:
        self._place = place
        self._read: set[int] = set()
        self._entries: list[_Entry] = []
        for owner in module.modules():
            for name, value in own_attributes(owner):
                if not isinstance(value, torch.Tensor | list | dict):
                    continue
                movable = [t for t in direct_tensors(value) if (s := plain_storage(t)) is not None and not stays(s)]
                if movable:
                    self._entries.append(_Entry(owner, name, value, movable, writes))

    def watcher(self) -> ReadWatcher | None:
        """A mode for the first run, which learns what the call reads.

        None if there is nothing to learn.
        """
        addresses = {address for entry in self._entries for address in entry.addresses}
        return ReadWatcher(addresses, self._read.add) if addresses else None

    def end_of_call(self) -> None:
        """Called when the call is over: holds what it reads and has changed, without the past."""
        self._entries = [e for e in self._entries if not self._read.isdisjoint(e.addresses) and e.has_changed]
        for entry in self._entries:
            entry.forget_the_past()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The module has them inside. Whoever calls puts the present ones back.

        Raises:
            UnsupportedError: one was changed in place.
        """
        for entry in self._entries:
            if any(watched.has_changed for watched in entry.watched):
                raise UnsupportedError(
                    f"{self._place} reads a tensor that it keeps on itself ({entry.name!r}) and changes it in place, so the call cannot be "
                    f"run again; {TRY_ANOTHER_POLICY}"
                )
            vars(entry.owner)[entry.name] = entry.made_again()
        yield


class _Entry:
    """One attribute at entry: a tensor, or a list or dictionary as it was."""

    def __init__(
        self, owner: torch.nn.Module, name: str, value: Any, tensors: list[torch.Tensor], writes: Writes
    ) -> None:
        self.owner, self.name = owner, name
        self._value = value
        self._content = value if isinstance(value, torch.Tensor) else value.copy()
        self.watched: list[Watched] = [found for t in tensors if (found := writes.watch(t)) is not None]
        self.addresses = {t.untyped_storage()._cdata for t in tensors}

    @property
    def has_changed(self) -> bool:
        """The call left something else there."""
        now = vars(self.owner).get(self.name)
        if now is not self._value or any(watched.has_changed for watched in self.watched):
            return True
        if isinstance(now, dict):
            return list(map(id, now.values())) != list(map(id, self._content.values()))
        return isinstance(now, list) and list(map(id, now)) != list(map(id, self._content))

    def forget_the_past(self) -> None:
        """Lets go of graphs, which hold what runs the call again."""
        self._value = None
        self._content = _each_tensor(self._content, _Bare)

    def made_again(self) -> Any:
        """The value for a second run."""
        return _each_tensor(self._content, lambda bare: bare.made_again())


class _Bare:
    """A tensor without its graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._requires_grad = tensor.detach(), tensor.requires_grad

    def made_again(self) -> torch.Tensor:
        value = self._tensor.detach()
        return non_leaf(value) if self._requires_grad else value


def _each_tensor(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor | _Bare):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, change) for key, item in value.items()}
    return [_each_tensor(item, change) for item in value] if isinstance(value, list) else value
