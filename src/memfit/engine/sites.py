"""Call sites: hooks by which the user's model calls the engine.

In: modules whose calls are the units of a schedule. Out: `enter` and `leave` calls on the engine,
and nothing else: the hooks know nothing of plans, and hold the engine by a weak reference only, so
that neither keeps the other alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, kw_only=True)
class Site:
    """A module whose executions are calls.

    Attributes:
        name: dotted name.
        module: the user's.
        blocks: indices of the blocks whose weights it reads.
        compiled: call that takes the place of the module's own; None: the module's.
    """

    name: str
    module: torch.nn.Module
    blocks: tuple[int, ...]
    compiled: Callable[..., Any] | None = None


class CallObserver(Protocol):
    """Protocol of objects that are told of calls."""

    def enter(self, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when the site's module is about to run."""
        ...

    def leave(self, site: int, output: Any) -> None:
        """Called when the site's module has run, or raised (then `output` is None)."""
        ...


class OwnWeights:
    """Parameters of each site's modules, by which calls with other tensors in their places
    (`torch.func.functional_call`) are recognized.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._places = [
            [
                (module._parameters, key, parameter)
                for module in site.module.modules()
                for key, parameter in module._parameters.items()
                if parameter is not None
            ]
            for site in sites
        ]

    def are_here(self, site: int) -> bool:
        """Tells whether the site's modules have their own parameters."""
        for place, key, parameter in self._places[site]:
            found = place.get(key)
            # Weights of loose blocks have leaves in their places while microbatches take turns.
            if found is not parameter and getattr(found, "_memfit_leaf_of", None) is not parameter:
                return False
        return True


class SiteHooks:
    """The forward hooks on all sites. `remove` takes them off.

    [Note: compiled calls] `module.compile()` compiles hooks into the call: ours would break its
    graph, and run while it is traced. Such a module's compiled call is wrapped instead, so that
    what is compiled is what would be without us. A site's own compiled call is put there likewise,
    and the module is plain again when the hooks are removed.
    """

    def __init__(self, sites: Sequence[Site], observer: CallObserver) -> None:
        reference = weakref.ref(observer)
        self._handles: list[RemovableHandle] = []
        self._compiled: list[tuple[torch.nn.Module, Any]] = []
        for index, site in enumerate(sites):
            before = getattr(site.module, "_compiled_call_impl", None)
            compiled = site.compiled or before
            if compiled is not None and not hasattr(site.module, "_orig_mod"):
                self._compiled.append((site.module, before))
                site.module._compiled_call_impl = _CompiledCall(compiled, reference, index, site.module)
                continue
            # Prepended, so that the user's own pre-hooks run inside the call and are run again when
            # it is recomputed.
            self._handles.append(
                site.module.register_forward_pre_hook(_Enter(reference, index), prepend=True, with_kwargs=True)
            )
            self._handles.append(
                site.module.register_forward_hook(_Leave(reference, index), with_kwargs=True, always_call=True)
            )

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, before in self._compiled:
            module._compiled_call_impl = before
        self._compiled.clear()


class _CompiledCall:
    """Call of a module compiled by `module.compile()`, between `enter` and `leave`. See [Note:
    compiled calls].
    """

    def __init__(self, compiled: Any, observer: weakref.ref[CallObserver], site: int, module: torch.nn.Module) -> None:
        self._compiled = compiled
        self._enter = _Enter(observer, site)
        self._leave = _Leave(observer, site)
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        self._enter(module, args, kwargs)
        output = None
        try:
            output = self._compiled(*args, **kwargs)
        finally:
            self._leave(module, args, kwargs, output)
        return output


class _Enter:
    def __init__(self, observer: weakref.ref[CallObserver], site: int) -> None:
        self._observer = observer
        self._site = site

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observer = self._observer()
        if observer is not None:
            observer.enter(self._site, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Enter:
        return _Enter(_dead, self._site)  # a copy of the model is an ordinary model

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle_enter, (self._site,)  # one that is pickled too


class _Leave:
    def __init__(self, observer: weakref.ref[CallObserver], site: int) -> None:
        self._observer = observer
        self._site = site

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        observer = self._observer()
        if observer is not None:
            observer.leave(self._site, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Leave:
        return _Leave(_dead, self._site)

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle_leave, (self._site,)


def _idle_enter(site: int) -> _Enter:
    return _Enter(_dead, site)


def _idle_leave(site: int) -> _Leave:
    return _Leave(_dead, site)


class _Nothing:
    """Target of a weak reference that is dead at once."""


_dead: Any = weakref.ref(_Nothing())


# Side tensors: tensors that a call leaves on its modules beside its outputs, such as a router's
# loss.
#
# In: sites. Out: those with a gradient that the call has just made.
#
# [Note: side tensors]
# The engine hears that autograd has come to a call by hooks on the nodes of the call's outputs. A
# gradient may also reach a call by a tensor that its module kept on itself, with none for its
# output. Planning refuses to send weights away that a trace reads so; but a later step may take
# another way than the traced one. Its side tensors are watched as outputs are, so that weights are
# fetched before they are read. What code outside of the modules keeps (in a closure, by a hook)
# cannot be found: `engine.backward` says what an absent weight's read then means, where torch
# notices it.

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
