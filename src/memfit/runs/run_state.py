"""State that belongs to a step beside weights and optimizer states: random numbers, settings, and
objects of the user's.

In: live generators, an optimizer, objects with a `state_dict`. Out: plain values that `store.state`
writes without pickling; and back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit import devices
from memfit.core.errors import StoreError, UsageError
from memfit.files.names import extra_states
from memfit.files.trainer import class_name
from memfit.homes.optimizer_states import BlockStates
from memfit.store.state import decode_state
from memfit.tensors.random_streams import check_numpy, check_python, check_torch

_SHOWN = 5
_LEAST, _LARGEST = -(2**63), 2**63 - 1
_OF_SCHEDULERS = frozenset(("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"))
"""Settings that torch's schedulers put into groups, and count with: numbers, whether or not the
optimizer here has met its scheduler yet.
"""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """An object whose state belongs to each commit.

    Attributes:
        take: gives its state.
        give: takes a state back.
        is_position: it says where the data stand, or draws random numbers: noted when a job's
            method returns. Else when control comes back to memfit.
    """

    take: Callable[[], Any]
    give: Callable[[Any], object]
    is_position: bool


def registered(name: str, thing: Any) -> Registered:
    """How the state of an object is taken and given back.

    Args:
        name: for the message.
        thing: has `state_dict` and `load_state_dict`; or is a random generator of torch, NumPy or
            Python.

    Raises:
        UsageError: none of these.
    """
    if isinstance(thing, torch.Generator):
        check = check_torch if thing.device.type == "cpu" else _take_it
        return Registered(take=thing.get_state, give=_checked(check, thing.set_state), is_position=True)
    if isinstance(thing, random.Random):
        check = check_python if type(thing).setstate is random.Random.setstate else _take_it
        return Registered(take=thing.getstate, give=_checked(check, thing.setstate), is_position=True)
    if isinstance(thing, np.random.Generator):
        bits: Any = thing.bit_generator
        give = _checked(check_numpy, lambda state: setattr(bits, "state", state))
        return Registered(take=lambda: bits.state, give=give, is_position=True)
    if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
        raise UsageError(
            f"register({name!r}, ...): a {type(thing).__name__} has no state_dict and load_state_dict; give it both, or register what has its state"
        )
    gives_batches = hasattr(thing, "__iter__") or hasattr(thing, "__next__")
    return Registered(take=thing.state_dict, give=thing.load_state_dict, is_position=gives_batches)


def _checked(check: Callable[[Any], None], give: Callable[[Any], object]) -> Callable[[Any], None]:
    def give_checked(state: Any) -> None:
        check(state)
        give(state)

    return give_checked


def _take_it(_: Any) -> None:
    """A state that whoever gets it checks itself."""


def taken(kept: Registered) -> Any:
    """Its state now, apart from the object: what changes later does not change it."""
    return copy.deepcopy(kept.take())


# --- random numbers -----------------------------------------------------------------------------


def take_random() -> dict[str, Any]:
    """The states of the default generators: torch's (of the CPU and of every accelerator, if one is
    in use), NumPy's and Python's.

    About 10 KiB.
    """
    accelerator = devices.initialized()
    return {
        "cpu": torch.get_rng_state(),
        # Of whatever accelerator is in use: the name is that of files written before there were
        # others than CUDA.
        "cuda": [] if accelerator is None else accelerator.rng_states(),
        "numpy": np.random.get_state(legacy=True),
        "python": random.getstate(),
    }


def is_random_state(state: Mapping[str, Any]) -> bool:
    """The default generators stand where they stood when the state was taken: nobody has drawn from
    them since.
    """
    now = take_random()
    name, words, *place = now["numpy"]
    old_name, old_words, *old_place = state["numpy"]
    return (
        torch.equal(now["cpu"], state["cpu"])
        and len(now["cuda"]) == len(state["cuda"])
        and all(torch.equal(a, b) for a, b in zip(now["cuda"], state["cuda"], strict=True))
        and now["python"] == state["python"]
        and (name, place) == (old_name, old_place)
        and np.array_equal(words, old_words)
    )


def give_random(state: Any) -> None:
    """Puts the default generators where they were. See [Note: positions in generators].

    Raises:
        StoreError: this is no such state, or of more CUDA devices than there are.
    """
    try:
        python, numpy, cuda = state["python"], state["numpy"], list(state["cuda"])
        check_torch(state["cpu"])
        check_numpy(numpy)
        check_python(python)
        accelerator = devices.initialized()
        here = 0 if accelerator is None else accelerator.count()
        if cuda and len(cuda) != here:
            raise StoreError(
                f"the run drew random numbers on {len(cuda)} accelerators, and {here} are in use here: resume it on as many"
            )
        torch.set_rng_state(state["cpu"])
        if cuda and accelerator is not None:
            accelerator.set_rng_states(cuda)
        np.random.set_state(numpy)
        random.setstate(python)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
        raise StoreError(f"the state of the step has no random numbers that can be used: {str(error)[:200]}") from error


# --- the optimizer ------------------------------------------------------------------------------


def take_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The settings of the groups as they stand, with the names of their parameters.

    Args:
        optimizer: the user's.
        names: of parameters, by identity.
    """
    return [
        {
            "parameters": [names[id(p)] for p in group["params"]],
            "settings": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]


def check_optimizer(found: Any, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuses an optimizer that is not the run's.

    Args:
        found: "class" and "groups" of the run.
        optimizer: the user's.
        names: of parameters, by identity.

    Raises:
        StoreError: with the difference.
    """
    here = class_name(optimizer)
    if _field(found, "class") != here:
        raise StoreError(
            f"the run was trained with {_field(found, 'class')!r:.200}, not {here!r}: resume it with the optimizer that it began with"
        )
    groups = _field(found, "groups")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        raise StoreError(
            f"the run's optimizer has {len(groups) if isinstance(groups, list) else 'no'} parameter groups, this one has {len(optimizer.param_groups)}: "
            "build it as it was"
        )
    for index, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        parameters, settings = _field(group, "parameters"), _field(group, "settings")
        if not isinstance(settings, dict) or not isinstance(parameters, list):
            raise StoreError(f"param_groups[{index}] of the run is not a group: its state is damaged")
        wanted = [names[id(p)] for p in live["params"]]
        if parameters != wanted:
            different = {*map(str, parameters)} ^ {*wanted}
            told = f"such as {min(different)!r:.200}" if different else "in another order"
            raise StoreError(
                f"param_groups[{index}] of the run's optimizer has other parameters than here ({len(parameters)} and {len(wanted)}), {told}: build it as it was. "
                "What is to be frozen since then may stay in it: it is left alone while requires_grad=False"
            )
        for key, value in settings.items():
            # Flags decide which states there are and which kernels run; rates and betas may change
            # from step to step.
            if key == "foreach":
                continue  # changes neither
            if isinstance(value, bool | None) and isinstance(live.get(key), bool | None) and live.get(key) != value:
                raise StoreError(
                    f"param_groups[{index}][{key!r:.80}] is {live.get(key)} here and was {value} in the run: build the optimizer as it was"
                )


def settings_of(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of a run's groups, in order.

    Raises:
        StoreError: there are none.
    """
    groups = _field(optimizer, "groups")
    if not isinstance(groups, list):
        raise StoreError("the state of the step has no groups of the optimizer: it is damaged")
    return [_field(group, "settings") for group in groups]


def give_settings(settings: Iterable[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Settings of the groups become those of a run or save: rates, betas, decays, what schedulers
    keep there.

    Copies: a rate in a tensor is changed in place by schedulers. So a tensor that is here stays,
    with the new value: groups that were made with one rate share it, and a scheduler that changes
    it for one group changes it for all.

    Raises:
        StoreError: they are of other groups, or a setting is of another kind than here; nothing was
            changed.
    """
    given = list(settings)
    check_settings(given, optimizer)
    pairs = list(zip(given, optimizer.param_groups, strict=True))
    wanted: dict[int, list[Any]] = {}
    for own, live in pairs:
        for key, now in live.items():
            if isinstance(now, torch.Tensor):
                wanted.setdefault(id(now), []).append(own.get(key))
    for own, live in pairs:
        for key, value in own.items():
            now = live.get(key)
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
                if _may_hold(now, wanted[id(now)]):
                    with torch.no_grad():
                        now.copy_(value)
                else:
                    # a rate held in a tensor stays on its device
                    live[key] = copy.deepcopy(value).to(now.device)
            else:
                live[key] = copy.deepcopy(value)


def _may_hold(now: torch.Tensor, values: Sequence[Any]) -> bool:
    """One tensor can be what all who share it are to have."""
    first = values[0]
    return all(
        isinstance(value, torch.Tensor)
        and value.dtype == now.dtype
        and value.shape == now.shape
        and torch.equal(value, first)
        for value in values
    )


def check_settings(settings: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuses settings that groups cannot take; see `give_settings`. Raises `StoreError`."""
    if len(settings) != len(optimizer.param_groups) or not all(isinstance(own, Mapping) for own in settings):
        raise StoreError(
            f"the settings are of {len(settings)} parameter groups, this optimizer has {len(optimizer.param_groups)}: build it as it was"
        )
    for index, (own, live) in enumerate(zip(settings, optimizer.param_groups, strict=True)):
        for key, value in own.items():
            is_known = isinstance(key, str) and key != "params"
            now = live.get(key, 0.0 if key in _OF_SCHEDULERS else value)
            if not is_known or not _may_replace(value, now):
                raise StoreError(
                    f"param_groups[{index}] has {key!r:.80} = {value!r:.80} in the run, which is no such setting of {type(optimizer).__name__} "
                    f"({live.get(key) if is_known else 'none'!r:.80} here): it is damaged, or build the optimizer as it was"
                )


def _may_replace(value: Any, now: Any) -> bool:
    """A setting is of a kind that another may have become: a number in a tensor or not, a flag or
    none.
    """
    if isinstance(now, list | tuple):
        is_same = isinstance(value, list | tuple) and len(value) == len(now)
        return is_same and all(_may_replace(one, other) for one, other in zip(value, now, strict=True))
    kind, other = _kind(value), _kind(now)
    return other in (kind, "none") or (kind == "none" and other == "flag")


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int) and not _LEAST <= value <= _LARGEST:
        return "number beyond 64 bits"  # which no kernel takes
    is_number = (
        isinstance(value, int | float | np.number)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
        or (isinstance(value, np.ndarray) and value.size == 1)
    )
    return "number" if is_number else type(value).__name__


def groups_by_parameter(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by its identity."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def placed_numbers(numbers: Mapping[str, Any], parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's counters where torch's own rule has them: on the CPU, unless a kernel on the
    device reads them.
    """
    moves = group.get("capturable") or group.get("fused")
    return {
        key: value.to(parameter.device) if moves and isinstance(value, torch.Tensor) else value
        for key, value in numbers.items()
    }


def take_numbers(states: Mapping[int, BlockStates]) -> dict[str, Any]:
    """By parameter, the states that are single numbers (step counters).

    Parameters that were never updated are left out, and those that other processes update.
    """
    slots = [(own, slot) for own in states.values() for slot in own.block.slots if slot.held or not slot.numel]
    return {slot.name: dict(own.numbers[slot.name]) for own, slot in slots if slot.name in own.numbers}


def give_numbers(numbers: Any, states: Mapping[int, BlockStates], optimizer: torch.optim.Optimizer) -> None:
    """Puts the counters where they were.

    Raises:
        StoreError: they are invalid, or belong to parameters that the optimizer does not update.
    """
    check_numbers(numbers)
    waiting = dict(numbers)
    groups = groups_by_parameter(optimizer)
    for own in states.values():
        for slot in own.block.slots:
            values = waiting.pop(slot.name, None)
            if values is None:
                continue
            own.numbers[slot.name] = placed_numbers(values, slot.parameter, groups.get(id(slot.parameter), {}))
    if waiting:
        raise StoreError(f"the run has counters of {next(iter(waiting))!r:.200}, which this optimizer does not update")


def numbers_in_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `take_numbers` gave, out of a journal's record, which has them block by block as
    they are encoded.

    Raises:
        StoreError: they are invalid.
    """
    numbers: dict[str, Any] = {}
    for content in part(record, "counters", dict).values():
        if not isinstance(content, bytes):
            raise StoreError("the record of the step has no proper 'counters': it is damaged")
        numbers |= decode_state(content)
    return numbers


def check_numbers(numbers: Any) -> None:
    """Refuses invalid counters. Raises `StoreError`."""
    if not isinstance(numbers, Mapping) or not all(isinstance(values, Mapping) for values in numbers.values()):
        raise StoreError("the state of the step has no counters of the optimizer: it is damaged")
    for name, values in numbers.items():
        for key, value in values.items():
            if not isinstance(key, str) or _kind(value) not in ("number", "flag", "none"):
                raise StoreError(
                    f"the counter {key!r:.80} of {name!r:.200} is {value!r:.80}, no number of at most 64 bits: it is damaged"
                )


def take_extra(model: nn.Module) -> dict[str, Any]:
    """Returns what modules keep beside parameters and buffers, by its name in the state dict."""
    return {name: copy.deepcopy(module.get_extra_state()) for name, module in extra_states(model).items()}


def give_extra(found: Any, model: nn.Module) -> None:
    """Gives it back.

    Raises:
        StoreError: it is that of other modules, or none that they take.
    """
    modules = extra_states(model)
    if not isinstance(found, dict) or found.keys() != modules.keys():
        there = sorted(found) if isinstance(found, dict) else "no modules"
        raise StoreError(
            f"the run has the extra state of {there!s:.400}, and this model wants that of {sorted(modules)}: build it as it was"
        )
    for name, module in modules.items():
        try:
            module.set_extra_state(copy.deepcopy(found[name]))
        except Exception as error:  # whatever somebody's module makes of what somebody's file says
            raise StoreError(
                f"{name!r} of the run does not fit the module ({type(error).__name__}: {str(error)[:400]}): build the model as it was"
            ) from error


# --- the model ----------------------------------------------------------------------------------


def check_parameters(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], directory: object
) -> None:
    """Refuses another model before anything is planned for it.

    Args:
        wanted: shapes by name, of the model that is here.
        found: of the one in the store.
        directory: for the message.

    Raises:
        StoreError: names the first differences.
    """
    lines = [f"{name!r} is missing there" for name in wanted if name not in found]
    lines += [f"{name!r:.200} is not in this model" for name in found if name not in wanted]
    lines += [
        f"{name!r} has shape {list(found[name])} there and {list(shape)} here"
        for name, shape in wanted.items()
        if name in found and sorted(found[name]) != sorted(shape)
    ]
    if lines:
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise StoreError(
            f"the store at {directory} holds another model: {'; '.join(lines[:_SHOWN])}{more}; choose another directory, or build the model of the run"
        )


def changed_training(before: Any, now: Collection[str], names: Collection[str]) -> str:
    """Says what was frozen, or is trained again, since a run's last commit, in words.

    Nothing where that was not kept or is the same.

    Args:
        before: names of what was frozen then; None: not kept.
        now: of what is.
        names: of all parameters.

    Raises:
        StoreError: these are no names of parameters.
    """
    if before is None:
        return ""
    if not isinstance(before, list) or not all(isinstance(name, str) and name in names for name in before):
        raise StoreError("the state of the step has no proper 'frozen': it is damaged, or of another version of memfit")
    told: list[str] = []
    if frozen := set(now) - set(before):
        told.append(f"{_some(frozen)} frozen (weights and optimizer states stay as they are)")
    if thawed := set(before) - set(now):
        told.append(f"{_some(thawed)} trained again (with the optimizer states of the run)")
    return "; ".join(told)


def _some(names: Collection[str]) -> str:
    """How many, and one of them."""
    many = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return f"{many}, such as {min(names)!r}, {'is' if len(names) == 1 else 'are'}"


def part(state: Any, key: str, kind: type) -> Any:
    """A part of a step's state.

    Raises:
        StoreError: it is not there, or not of this kind.
    """
    found = state.get(key) if isinstance(state, Mapping) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise StoreError(f"the state of the step has no proper {key!r}: it is damaged, or of another version of memfit")
    return found


def _field(found: Any, key: str) -> Any:
    if not isinstance(found, dict) or key not in found:
        raise StoreError(f"the state of the step has no {key!r}: it is damaged, or of another version of memfit")
    return found[key]
