"""A second instance of the user's optimizer class that steps on borrowed memory.

In: the live optimizer, as it stands. Out: `Shadow.run`, which lets the class's own `step` code work
on tensors that we hand in (a piece of a weight, of its gradient and of its states) without touching
the live object, its states or its hooks.

[Note: shadow] The class's arithmetic must run with the live hyperparameters on memory that is not
the parameter's. Calling the live object would need its `param_groups` and `state` swapped under the
user's feet, from a worker thread. So the shadow is made with `cls.__new__` (an `__init__` may
allocate states, as Adagrad's does), receives a shallow copy of the live instance's attributes, and
groups that are copies of the live groups with only `params` replaced. Its hooks are empty: hooks
run once a step, in the driver. Source of the layers that are peeled off `step`:
torch/optim/optimizer.py, `profile_hook_step` and `_use_grad_for_differentiable`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    _default_to_fused_or_foreach,  # pyright: ignore[reportPrivateUsage]
    _use_grad_for_differentiable,  # pyright: ignore[reportPrivateUsage]
)

from memfit.core.errors import UnsupportedError
from memfit.tensors.guard import as_present

State = dict[str, Any]
"""State that torch keeps in `optimizer.state[parameter]`: names to tensors, numbers or None."""

INTERCEPTED_METHODS = ("step", "state_dict", "load_state_dict", "add_param_group", "zero_grad", "__getstate__")
"""Names that may lie in the live instance's `__dict__` (put there by us or by an LR scheduler) and
must not reach the shadow."""

_HOOK_ATTRIBUTES = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Memory that one parameter lends to a step, and the live parameter whose attributes the class
    may ask for.
    """

    group: int
    name: str
    parameter: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor
    state: State
    """Used as it is: tensors in it are updated in place. Pass copies of what must not change."""
    leaf: torch.nn.Parameter | None = None
    """Over the weight, made before; None: one is made."""


def bare_step(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The class's `step` without torch's two wrappers (step hooks with their profiler range; the
    grad-mode switch).

    Wrappers are known by the identity of their code object, so that a decorator of the user's own
    is never peeled off.
    """

    def sample(*_: Any) -> None:
        return None

    wrappers = {
        Optimizer.profile_hook_step(sample).__code__,  # pyright: ignore[reportFunctionMemberAccess]
        _use_grad_for_differentiable(sample).__code__,  # pyright: ignore[reportFunctionMemberAccess]
    }
    step: Any = optimizer_class.step
    while getattr(step, "__code__", None) in wrappers:
        step = step.__wrapped__
    return step


def has_hooked_base_step(optimizer_class: type[Optimizer]) -> bool:
    """Tells whether `super().step()` inside this step would pass through torch's hook wrapper of
    a base class.

    torch wraps `step` in the class of the first instance, inherited or not: only another function
    counts as an own step.
    """
    own = bare_step(optimizer_class)
    bases = [c for c in optimizer_class.__mro__[1:] if issubclass(c, Optimizer) and "step" in vars(c)]
    return any(getattr(vars(c)["step"], "hooked", False) and bare_step(c) is not own for c in bases)


def snapshot_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of every group at this moment, without the parameters.

    With `foreach=None` torch decides by all the parameters of a group. A single piece could be
    decided otherwise (a group over two devices, a tensor subclass), so that decision is taken here,
    on the live parameters, and written down where it is "no". Parameters whose bytes are away wear
    another class and would all be a "no": each is asked for as what it is while it is here. The
    decision follows from classes, devices and dtypes: one parameter of each kind is asked for.
    """
    groups: list[dict[str, Any]] = []
    for live in optimizer.param_groups:
        group = {key: value for key, value in live.items() if key != "params"}
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            _, foreach = _default_to_fused_or_foreach(
                _one_of_each_kind(live["params"]), bool(group.get("differentiable")), use_fused=False
            )
            if not foreach:
                group["foreach"] = False
        groups.append(group)
    return groups


def _one_of_each_kind(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A parameter, as it is while its bytes are here, for each class, device and dtype."""
    # Of parameters that are away, each such question would be answered in Python.
    with torch._C.DisableTorchFunctionSubclass():
        kinds = {(type(p), p.device, p.dtype): p for p in parameters}
    return [as_present(p) for p in kinds.values()]


class Shadow:
    """The stand-in, good for one step: it keeps the hyperparameters and attributes of the moment
    when it was made.

    Memory: nothing but a few dictionaries. Not thread-safe by itself: one caller at a time.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        groups: Sequence[dict[str, Any]] | None = None,
        isolate: Callable[[Any], Any] | None = None,
    ) -> None:
        """Make the stand-in.

        Args:
            optimizer: the live optimizer; only read.
            groups: hyperparameters to use instead of the live ones, one dict a group, without
                `params`.
            isolate: applied to each attribute that is copied from the live instance (the detector
                copies containers).

        Raises:
            UnsupportedError: the class cannot be made without its `__init__`.
        """
        optimizer_class = type(optimizer)
        self._step = bare_step(optimizer_class)
        self.groups = list(groups) if groups is not None else snapshot_groups(optimizer)
        try:
            self.instance: Any = optimizer_class.__new__(optimizer_class)
        except TypeError as error:
            raise UnsupportedError(
                f"{optimizer_class.__name__} cannot be made without arguments to __new__ ({error}), which memfit needs "
                "to run it on pieces. Move the work of __new__ into __init__."
            ) from error
        attributes = {
            k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", *INTERCEPTED_METHODS)
        }
        if isolate is not None:
            attributes = {k: isolate(v) for k, v in attributes.items()}
        attributes.update({name: OrderedDict() for name in _HOOK_ATTRIBUTES})
        vars(self.instance).update(attributes)
        self.instance.state = defaultdict(dict)
        self.instance.param_groups = []
        self.used_groups: list[dict[str, Any]] = []
        """The group dicts of the latest `run` without their parameters, as the class left them."""

    def run(self, parts: Sequence[Part]) -> list[State]:
        """One step of the user's class on these parts, in place.

        Returns each part's new state, in order.

        The class sees only the groups that own the parts.

        Tensors that the class replaced instead of writing in place are copied back into the memory
        that was lent, so that weights and states always end where they came from. Gradients may be
        overwritten (torch's foreach SGD with nesterov does that).

        Raises:
            UnsupportedError: the class changed a state's shape or dtype, or keeps state outside of
                its parameters.
        """
        instance = self.instance
        proxies = [_proxy(part) for part in parts]
        instance.param_groups = self._groups_for(parts, proxies)
        state: defaultdict[Any, State] = defaultdict(dict)
        for part, proxy in zip(parts, proxies, strict=True):
            # an empty entry would look like an existing one to `if p not in self.state`
            if part.state:
                state[proxy] = dict(part.state)
        instance.state = state
        try:
            with torch.no_grad():
                device_type = parts[0].weight.device.type
                if torch.is_autocast_enabled(device_type):
                    # The caller may stand inside the user's autocast; torch's step does not.
                    with torch.autocast(device_type, enabled=False):
                        self._step(instance)
                else:
                    self._step(instance)
                if {id(key) for key in instance.state} - {id(proxy) for proxy in proxies}:
                    raise UnsupportedError(
                        f"{type(instance).__name__} keeps state that belongs to no parameter (an entry of "
                        "optimizer.state that is not keyed by a parameter); memfit keeps states per parameter and "
                        "would lose it."
                    )
                return [
                    _copy_back(part, proxy, instance.state.get(proxy, {}))
                    for part, proxy in zip(parts, proxies, strict=True)
                ]
        finally:
            # Without the proxies: the last ones would keep what they were lent alive until the next
            # run, such as a whole gradient.
            self.used_groups = [{k: v for k, v in g.items() if k != "params"} for g in instance.param_groups]
            instance.state = defaultdict(dict)
            instance.param_groups = []
            for part in parts:
                if part.leaf is not None:
                    part.leaf.grad = None  # the leaf stands; its gradient is of this step

    def _groups_for(self, parts: Sequence[Part], proxies: Sequence[torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Copies of the groups that own the parts, in group order, with the proxies as their
        parameters.
        """
        members: dict[int, list[int]] = {}
        for position, part in enumerate(parts):
            members.setdefault(part.group, []).append(position)
        groups: list[dict[str, Any]] = []
        for index in sorted(members):
            group = self.groups[index].copy()
            group["params"] = [proxies[position] for position in members[index]]
            if "param_names" in group:
                group["param_names"] = [parts[position].name for position in members[index]]
            groups.append(group)
        return groups


def _proxy(part: Part) -> torch.nn.Parameter:
    """A leaf over the lent weight, with its gradient and with what the user hung on the live
    parameter.
    """
    assert part.gradient.dtype == part.weight.dtype and part.gradient.shape == part.weight.shape, (
        f"the gradient of {part.name!r} is like its weight"
    )
    proxy = part.leaf
    if proxy is None:
        proxy = torch.nn.Parameter(part.weight.detach(), requires_grad=True)
    own_attributes = getattr(part.parameter, "__dict__", None)
    if own_attributes:
        vars(proxy).update(own_attributes)
    proxy.grad = part.gradient
    return proxy


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _copy_back(part: Part, proxy: torch.nn.Parameter, new: State) -> State:
    """Brings what the class left elsewhere into the lent memory.

    Returns the state, made of lent tensors.
    """
    if _place(proxy) != _place(part.weight):  # `p.data = ...` in the user's step
        part.weight.copy_(proxy.detach())
    state = dict(new)
    for key, lent in part.state.items():
        value = state.get(key)
        if value is lent or not isinstance(lent, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        if value.shape != lent.shape or value.dtype != lent.dtype:
            raise UnsupportedError(
                f"The optimizer turned state {key!r} of {part.name!r} from {tuple(lent.shape)} {lent.dtype} into "
                f"{tuple(value.shape)} {value.dtype}; memfit keeps states in homes of fixed size."
            )
        lent.copy_(value)
        state[key] = lent
    return state
