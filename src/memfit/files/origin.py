"""A model without the bytes of its weights, and where they come from.

In: the function that builds the model. Out: the model, its large weights away from the beginning,
and its `Origin`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.files.recording import LEAST_BYTES, BuildRecorder, Program, RegionPlace
from memfit.tensors.guard import mark_deferred, mark_present
from memfit.tensors.with_frozen import saved_model

_ATTRIBUTE = "_memfit_origin"


class Origin:
    """Source of the values of a model that was built empty.

    Held by the model itself.

    Memory: see `Program`. The model lets go of it when the last weight is given; who may give
    weights back (`take_back`) holds it longer.

    Args:
        program: makes the values.
        places: of the parameters that have no bytes.
        model: holds this object until the last of them is given.
    """

    def __init__(self, program: Program, places: Iterable[tuple[nn.Parameter, RegionPlace]], model: nn.Module) -> None:
        self._program = program
        self._model = weakref.ref(model)
        object.__setattr__(model, _ATTRIBUTE, self)
        self._deferred: dict[int, list[tuple[nn.Parameter, RegionPlace]]] = {}
        self._keys: dict[int, int] = {}
        self._given: dict[int, tuple[nn.Parameter, RegionPlace]] = {}
        for parameter, place in places:
            self._deferred.setdefault(place.key, []).append((parameter, place))
            self._keys[id(parameter)] = place.key

    def bring(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives these the values of the model's own initialisation.

        Those that have theirs stay as they are.

        Memory: the parameters, and for a moment what one of them is computed from.

        Raises:
            UsageError: the model was built without drawing random numbers.
        """
        for parameter in parameters:
            key = self._keys.get(id(parameter))
            if key is not None:
                self._give(key, self._program.values([key])[key])

    def make_room(self, parameter: nn.Parameter) -> None:
        """Gives a parameter, and those that share its storage, uninitialised memory for values
        that come from elsewhere.
        """
        key = self._keys.get(id(parameter))
        if key is not None:
            self._give(key, self._program.blank(key))

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notes that these got memory and values elsewhere; what their own initialisation was is
        not asked for any more.
        """
        for parameter in parameters:
            key = self._keys.pop(id(parameter), None)
            if key is not None:
                self._given |= {id(member[0]): member for member in self._deferred[key] if member[0] is parameter}
                self._deferred[key] = [member for member in self._deferred[key] if member[0] is not parameter]
                if not self._deferred[key]:
                    del self._deferred[key]
        self._end()

    def take_back(self, name: str, parameter: nn.Parameter) -> bool:
        """Makes a parameter one without values again, which can be given a second time.

        Only while nobody has changed them.

        Memory: none; address space of its storage for a moment.

        Args:
            name: of the parameter, for messages.
            parameter: any; its own bytes, wherever they are, are given up.

        Returns:
            True if it is one of the deferred weights made here, and has no values now.
        """
        if id(parameter) in self._keys:
            return True
        if id(parameter) not in self._given:
            return False
        _, place = member = self._given.pop(id(parameter))
        storage = self._program.blank(place.key)
        mark_present(parameter)
        parameter.data = place.view(storage)
        storage.resize_(0)
        mark_deferred(parameter, name)
        self._deferred.setdefault(place.key, []).append(member)
        self._keys[id(parameter)] = place.key
        model = self._model()
        if model is not None:
            object.__setattr__(model, _ATTRIBUTE, self)
        return True

    def _give(self, key: int, storage: torch.UntypedStorage) -> None:
        for parameter, place in self._deferred.pop(key):
            mark_present(parameter)
            parameter.data = place.view(storage)
            del self._keys[id(parameter)]
            self._given[id(parameter)] = parameter, place
        self._end()

    def _end(self) -> None:
        model = self._model()
        if not self._deferred and model is not None and _ATTRIBUTE in model.__dict__:
            del model.__dict__[_ATTRIBUTE]


def build_empty(build: Callable[[], nn.Module], *, draws: bool, least_bytes: int = LEAST_BYTES) -> nn.Module:
    """Runs `build` and gives its model, whose parameters of 64 KiB or more have no bytes.

    Buffers and small parameters are as always.

    Memory: the largest tensor that is drawn and not skipped, for a moment; address space for all.

    Raises:
        UsageError: what was built is no module. Whatever `build` raises.
    """
    recorder = BuildRecorder(draws=draws, least_bytes=least_bytes)
    with recorder:
        model: Any = build()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the function given to memfit.empty must return a torch.nn.Module, not {type(model).__name__}"
        )
    places: dict[int, list[tuple[str, nn.Parameter, RegionPlace]]] = {}
    for name, parameter in model.named_parameters():
        key = recorder.key(parameter)
        if key is not None:
            places.setdefault(key, []).append((name, parameter, RegionPlace.of(key, parameter)))
    for key in tuple(recorder.storages):
        # Who holds a storage beside parameters and the recorder (a buffer, an attribute, a closure)
        # will read it.
        if torch._C._storage_Use_Count(key) > len(places.get(key, ())) + 1:
            recorder.fill(key)
            places.pop(key, None)
    for key, members in places.items():
        recorder.storages[key].resize_(0)
        for name, parameter, _ in members:
            mark_deferred(parameter, name)
    recorder.program.keep(places.keys())
    if places:
        deferred = [(parameter, place) for members in places.values() for _, parameter, place in members]
        Origin(recorder.program, deferred, model)
    return model


def find_origins(model: nn.Module) -> list[Origin]:
    """The origins of a model and of the models inside it."""
    # Beside frozen models the one that trains is not among the modules, and only its parts are.
    modules = {id(module): module for inner in model.modules() for module in (inner, saved_model(inner))}
    found = [vars(module).get(_ATTRIBUTE) for module in modules.values()]
    return [origin for origin in found if isinstance(origin, Origin)]
