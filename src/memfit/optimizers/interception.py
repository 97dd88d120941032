"""Keeping the user's optimizer object truthful while memfit owns its states.

In: the live optimizer and the owner's callbacks. Out: an object that still is what the user made
(same class, same `param_groups`), whose `state_dict()` and pickling gather the states from their
homes, whose `load_state_dict()` sends them there, and whose `step()`, `add_param_group()` and
`state[...]` refuse with the reason instead of working on states that are not there.

[Note: interception] Everything is an attribute of the one instance (Python looks there before the
class), so the class, other instances and `isinstance` are untouched, and `remove()` takes it all
away. A `step` that somebody took before, which no attribute reaches, is met by a hook of the
instance (`ClassStep`). `Optimizer.__getstate__` pickles only `defaults`, `state` and
`param_groups`: the attributes never reach a pickle or a deep copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from memfit.core.errors import AwayError, UnsupportedError, UsageError
from memfit.optimizers.shadow import INTERCEPTED_METHODS, Shadow, State, has_hooked_base_step
from memfit.optimizers.validation import Entry

# Side effects of a step of the user's optimizer: step hooks, global hooks, LR schedulers.
#
# In: the live optimizer, before and after an update that was made elsewhere. Out: the same calls,
# in the same order, once a step. Source: torch/optim/optimizer.py, `profile_hook_step`;
# torch/optim/lr_scheduler.py, `patch_track_step_called`.


class ClassStep:
    """Takes the place of the class's own `step` on one optimizer.

    Whoever took `optimizer.step` before the optimizer was adopted calls the class's function, past
    the instance's attribute: Accelerate does with a `GradScaler`, and some schedulers. torch asks
    the instance's step pre-hooks first, and calls the function with what they return: this one,
    the last of them, makes the update, and gives the function an optimizer without parameters.

    Attributes:
        is_running: torch's wrapper runs the user's hooks around an update that is being made.
    """

    def __init__(self, step: Callable[[Callable[[], Any] | None], Any]) -> None:
        """Prepares; changes nothing yet.

        Args:
            step: makes the update, or says why not; takes a closure.
        """
        self._step = step
        self.is_running = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the update, as a step pre-hook."""
        own = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
        if next(reversed(own.values())) is not self:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step was taken before memfit.fit, and a step pre-hook registered after it: the hook would run behind the update. "
                "Register the hook before memfit.fit, or call optimizer.step()"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self.is_running = True
        try:
            value = self._step(closure)
        finally:
            self.is_running = False
        empty = Shadow(optimizer, groups=[]).instance
        return (empty,) if closure is None else (empty, lambda: value), {}


def run_pre_hooks(optimizer: Optimizer) -> None:
    """Runs the global and then the instance's step pre-hooks.

    Hooks that look at `.grad` or at weights see what the engine shows them, which may be nothing.

    Raises:
        UnsupportedError: a hook returns other arguments for `step`, or global hooks would run once
            a piece.
    """
    if (_global_optimizer_pre_hooks or _global_optimizer_post_hooks) and has_hooked_base_step(type(optimizer)):
        raise UnsupportedError(
            f"{type(optimizer).__name__}'s base class has a step of its own; called by super(), it would run torch's "
            "global optimizer hooks once a piece. Remove the hooks made by register_optimizer_step_pre_hook and "
            "_post_hook, or register them on the optimizer itself."
        )
    own = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
    if _is_around(optimizer):
        return
    for hook in [*_global_optimizer_pre_hooks.values(), *own.values()]:
        if isinstance(hook, ClassStep):
            continue
        result: Any = hook(optimizer, (optimizer,), {})
        if result is not None and not _is_plain_call(result, optimizer):
            raise UnsupportedError(
                f"The step pre-hook {getattr(hook, '__qualname__', hook)!r} returned new arguments for optimizer.step. "
                "memfit makes the update without arguments (no closure); return None."
            )


def run_post_hooks(optimizer: Optimizer) -> None:
    """Tells LR schedulers that a step was made, then runs the instance's and the global step
    post-hooks.
    """
    mark_stepped(optimizer)
    if _is_around(optimizer):
        return
    own = optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
    for hook in [*own.values(), *_global_optimizer_post_hooks.values()]:
        hook(optimizer, (optimizer,), {})


def _is_around(optimizer: Optimizer) -> bool:
    """Tells whether torch's own wrapper of `step` runs the hooks of this update."""
    own = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
    return any(isinstance(hook, ClassStep) and hook.is_running for hook in own.values())


def mark_stepped(optimizer: Optimizer) -> None:
    """Sets what torch's wrapper around `step` sets, without which the first `scheduler.step()`
    warns.
    """
    vars(optimizer)["_opt_called"] = True


def _is_plain_call(result: Any, optimizer: Optimizer) -> bool:
    """Tells whether a pre-hook's answer is the call that memfit makes anyway: `step()` without
    arguments.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        return False
    args, kwargs = result
    return len(args) == 1 and args[0] is optimizer and not any(value is not None for value in kwargs.values())


@dataclass(frozen=True, kw_only=True)
class OwnerCallbacks:
    """How the user's object reaches the states while they rest in memfit's homes.

    All are called on the user's thread, between steps.
    """

    gather_state: Callable[[str], State]
    """Name to the parameter's whole state in its shapes, as copies that the caller may keep; `{}`
    before its first step."""
    scatter_state: Callable[[str, State], None]
    """Takes a loaded state into the homes.

    Must copy: the tensors may be the ones in the user's dict.
    """
    zero_grad: Callable[[bool], None]
    """`set_to_none` to forgetting (or zeroing) the gradients that memfit holds."""


class AwayStates(defaultdict[Any, Any]):
    """Stands in for `optimizer.state` while the states are away: as long as what is away, and
    refuses to be read.
    """

    def __init__(self, count: int) -> None:
        super().__init__(dict)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    def _refuse(self, *_: object) -> NoReturn:
        raise AwayError(
            "optimizer.state was read while its tensors rest in memfit's homes. Use optimizer.state_dict(), which "
            "gathers copies, or close the job first."
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __missing__ = _refuse
    keys = values = items = get = pop = popitem = setdefault = update = clear = copy = __copy__ = _refuse  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> NoReturn:
        self._refuse()

    def __repr__(self) -> str:
        return f"<states of {self._count} parameters, resting in memfit's homes>"


class AdoptedStep:
    """`optimizer.step` while adopted: refused, but where the user's own lines are served.

    An LR scheduler looks for `_wrapped_by_lr_sched` on it, to know whether `step` tells schedulers
    that it was called (the driver does). That question is remembered, so that a scheduler made
    meanwhile finds what it expects after the release.

    Attributes:
        served: makes the update in place of the user's optimizer; None: the call is refused.
    """

    def __init__(self) -> None:
        self.asked_by_scheduler = False
        self.served: Callable[[Callable[[], Any] | None], Any] | None = None

    @property
    def _wrapped_by_lr_sched(self) -> bool:
        self.asked_by_scheduler = True
        return True

    def __call__(self, closure: Callable[[], Any] | None = None, *_: object, **__: object) -> Any:
        """Makes the update where lines are served. Raises `UsageError` elsewhere."""
        if self.served is not None:
            return self.served(closure)
        raise UsageError(
            "optimizer.step() was called while memfit owns the weights and states. Call job.step(batch): it runs "
            "forward, backward and the update; or plan with memfit.fit(lines=True), and run these lines inside `with job.lines():`. After job.close() the "
            "optimizer steps by itself again."
        )


def _telling_step(optimizer: Optimizer) -> Callable[..., object]:
    """Does what `LRScheduler` puts over `step` (torch/optim/lr_scheduler.py): notes the call,
    then calls it.
    """

    def step(*args: Any, **kwargs: Any) -> object:
        mark_stepped(optimizer)
        return type(optimizer).step(optimizer, *args, **kwargs)

    vars(step)["_wrapped_by_lr_sched"] = True
    return step


class Interception:
    """Installs the stand-ins on one optimizer and takes them away.

    Memory: none of its own; `state_dict()` costs a copy of all states, `load_state_dict()` holds
    one parameter's cast copy at a time beyond what torch's own loading makes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        entries: Mapping[str, Entry],
        callbacks: OwnerCallbacks,
        check_loaded: Callable[[Mapping[Any, State]], None],
        *,
        step: AdoptedStep,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        """Prepares; changes nothing yet.

        Args:
            optimizer: the live optimizer.
            entries: its parameters by name.
            callbacks: the owner of the states.
            check_loaded: raises `UsageError` for loaded groups and states that do not fit the
                homes.
            step: stands in for the optimizer's.
            master_dtype: of what is updated, where it is not the parameters' own: states are loaded
                in it.
        """
        self._master_dtype = master_dtype
        self._check_loaded = check_loaded
        self._optimizer = optimizer
        self._entries = entries
        self._callbacks = callbacks
        self.kept_state: defaultdict[Any, State] = optimizer.state
        """The user's own `optimizer.state` object, emptied parameter by parameter and put back by
        `remove`.
        """
        self._before: dict[str, Any] = {}
        self._step = step
        self._class_step: Any = None

    def install(self) -> None:
        """Puts the stand-ins in place."""
        attributes = vars(self._optimizer)
        self._before = {name: attributes[name] for name in INTERCEPTED_METHODS if name in attributes}
        attributes.update(
            step=self._step,
            state_dict=self._state_dict,
            load_state_dict=self._load_state_dict,
            add_param_group=self._add_param_group,
            zero_grad=self._zero_grad,
            __getstate__=self._getstate,
        )
        self._class_step = self._optimizer.register_step_pre_hook(ClassStep(self._step))
        self._hide_state()

    def remove(self) -> None:
        """Gives the object back: its own methods, its own `state` object (with whatever `restore`
        put into it).
        """
        attributes = vars(self._optimizer)
        self._class_step.remove()
        for name in INTERCEPTED_METHODS:
            attributes.pop(name, None)
        attributes.update(self._before)
        if "step" not in self._before and self._step.asked_by_scheduler:
            attributes["step"] = _telling_step(self._optimizer)
        self._optimizer.state = self.kept_state

    def _hide_state(self) -> None:
        self._optimizer.state = AwayStates(len(self._entries))

    def _gathered(self) -> defaultdict[Any, State]:
        """All states, as copies, in the order of the groups.

        Keys without a parameter as they are.
        """
        full: defaultdict[Any, State] = defaultdict(dict)
        for name, entry in self._entries.items():
            state = self._callbacks.gather_state(name)
            if state:
                full[entry.parameter] = state
        own = {id(entry.parameter) for entry in self._entries.values()}
        full.update({key: value for key, value in self.kept_state.items() if id(key) not in own})
        return full

    def _state_dict(self) -> dict[str, Any]:
        """The class's own `state_dict`, with its hooks, over gathered states.

        Costs a copy of all states.
        """
        self._optimizer.state = self._gathered()
        try:
            return type(self._optimizer).state_dict(self._optimizer)
        finally:
            self._hide_state()

    def _getstate(self) -> dict[str, Any]:
        self._optimizer.state = self._gathered()
        try:
            return type(self._optimizer).__getstate__(self._optimizer)
        finally:
            self._hide_state()

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The class's own `load_state_dict` (checks, casts, hooks, new groups).

        Its states then go home one by one.
        """
        optimizer = self._optimizer
        groups_before = optimizer.param_groups
        optimizer.state = defaultdict(dict)
        try:
            with self._masters_in_place():
                type(optimizer).load_state_dict(optimizer, state_dict)
            loaded = optimizer.state
            try:
                self._check_loaded(loaded)
            except UsageError:
                # nothing went home yet: the refusal leaves everything as it was
                optimizer.param_groups = groups_before
                raise
            for name, entry in self._entries.items():
                self._callbacks.scatter_state(name, loaded.pop(entry.parameter, {}))
            for key, value in loaded.items():
                self.kept_state[key] = value
        finally:
            self._hide_state()

    @contextmanager
    def _masters_in_place(self) -> Iterator[None]:
        """Loading casts states to the dtype of the parameters in the groups: for the time, empty
        ones of the masters' dtype stand there.
        """
        if self._master_dtype is None:
            yield
            return
        optimizer, dtype = self._optimizer, self._master_dtype
        real = [list(group["params"]) for group in optimizer.param_groups]
        own: dict[Any, Any] = {torch.empty(0, dtype=dtype, device=p.device): p for params in real for p in params}
        placed = iter(own)
        for group in optimizer.param_groups:
            group["params"] = [next(placed) for _ in group["params"]]
        groups = optimizer.param_groups
        try:
            yield
        finally:
            for found in {id(groups): groups, id(optimizer.param_groups): optimizer.param_groups}.values():
                for group, params in zip(found, real, strict=True):
                    group["params"] = params
            state: defaultdict[Any, State] = defaultdict(dict)
            state.update({own.get(key, key): value for key, value in optimizer.state.items()})
            optimizer.state = state

    def _add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        given = param_group.get("params", ()) if isinstance(param_group, dict) else ()
        parameters = list(_parameters(given))
        by_id = {id(entry.parameter): name for name, entry in self._entries.items()}
        known = [by_id[id(p)] for p in parameters if id(p) in by_id]
        if known:
            raise UsageError(
                f"add_param_group: the optimizer updates {known[0]!r} already; a parameter belongs to one group."
            )
        raise UnsupportedError(
            f"add_param_group with {len(parameters)} parameters that the plan does not know: memfit planned homes and "
            "memory for the parameters that the optimizer had. Close the job, add the group, and call memfit.fit again."
        )

    def _zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  (torch's own signature)
        self._callbacks.zero_grad(set_to_none)
        type(self._optimizer).zero_grad(self._optimizer, set_to_none)


def _parameters(given: Any) -> Iterator[torch.Tensor]:
    """The tensors of what `add_param_group` takes: one tensor, tensors, or pairs of name and
    tensor.
    """
    for item in [given] if isinstance(given, torch.Tensor) else given:
        yield item[1] if isinstance(item, tuple) else item
