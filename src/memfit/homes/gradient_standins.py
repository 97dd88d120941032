"""Stand-ins for gradients that are not on `.grad`, for loops that the user wrote.

In: gradients at their homes, or in sums of their own. Out: on `.grad` of their parameters, tensors
without bytes, which know the norm and take a factor; and what the user did to them meanwhile.

[Note: what a stand-in is for]
Between `loss.backward()` and `optimizer.step()` a loop looks at gradients through `.grad`: it clips
their norm, and it forgets them (`optimizer.zero_grad`, `model.zero_grad`, `parameter.grad = None`).
Where a gradient rests elsewhere, a stand-in takes its place. The norm was noted when the gradient
went home, and a factor is noted, to be multiplied in when the gradient is read for its update: so
`torch.nn.utils.clip_grad_norm_` runs as it is, over any parameters, and gives the bits of plain
PyTorch. Everything else raises `AwayError`, wherever it comes from, since a stand-in is asked below
autograd. Whoever removes a stand-in has forgotten the gradient, in whichever way that was done:
`heed` looks before the gradients are used again.

After the update the gradients are given up, where plain PyTorch would keep them until they are
zeroed. A *spent* stand-in says so, and a backward that finds one would have added to them.
`zero_grad(set_to_none=False)` would leave zeros, which an optimizer decays weights with: that is
the same as forgetting for every parameter that gets a gradient again before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from memfit.core.errors import AwayError, UsageError
from memfit.homes.gradients import GradientHomes
from memfit.homes.weights import BlockWeights, ParameterSlot

_STALE = "a backward came without zero_grad() since "
_USED = "optimizer.step() has used the gradients and given them up"


class GradientStandIn(torch.Tensor):
    """A gradient without bytes, in the shape and dtype of its parameter. See [Note: what a stand-in
    is for].

    Attributes:
        slot: of the parameter.
        owner: answers for the gradient.
        is_spent: the gradient was given up.
    """

    slot: ParameterSlot
    owner: GradientStandIns
    is_spent: bool

    # Asked below autograd: C++ code that adds to a gradient comes there too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        where = "given up by optimizer.step()" if self.is_spent else "at home"
        return f"<gradient of {self.slot.name!r}, {where}>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        served = _SERVED.get(name)
        given = next((g for g in _stand_ins(args)), None)
        if served is None or given is None or kwargs:
            _refuse(name, given)
        return served(name, func, *args)


def _stand_ins(values: Iterable[Any]) -> Iterator[GradientStandIn]:
    for value in values:
        if isinstance(value, GradientStandIn):
            yield value
        elif isinstance(value, list | tuple):
            yield from _stand_ins(value)


def _refuse(name: str, found: GradientStandIn | None) -> NoReturn:
    if found is not None and found.is_spent:
        raise AwayError(
            f"the gradient of {found.slot.name!r} was read by '{name}': {found.owner.why}. Read gradients before the step, or keep them at their homes with "
            "memfit.fit(keep_gradients=True) and read job.gradient(name)"
        )
    called = "a gradient" if found is None else f"the gradient of {found.slot.name!r}"
    raise AwayError(
        f"'{name}' asks for the values of {called}, which rests away from the device until its update. Served there: clip_grad_norm_ with its 2-norm, "
        "and setting it to None. For anything else plan gradient_home='device' for its block; job.gradient(name) reads it after the step with "
        "memfit.fit(keep_gradients=True)"
    )


def _norm(name: str, func: Any, gradient: Any, order: Any = 2.0, *rest: Any) -> torch.Tensor:
    if not isinstance(gradient, GradientStandIn):
        return func(gradient, order, *rest)
    if rest or order != 2.0:
        _refuse(f"{name} of order {order}", gradient)
    return _owner(name, gradient).norm_of(gradient.slot)


def _norms(name: str, func: Any, gradients: Any, order: Any = 2.0) -> list[torch.Tensor]:
    return [_norm(name, None, g, order) if isinstance(g, GradientStandIn) else func([g], order)[0] for g in gradients]


def _multiply(name: str, func: Any, gradient: Any, factor: Any) -> Any:
    if not isinstance(gradient, GradientStandIn):
        _refuse(name, factor)  # an ordinary tensor times a stand-in
    if isinstance(factor, GradientStandIn) or (isinstance(factor, torch.Tensor) and factor.numel() != 1):
        _refuse(f"{name} by a tensor", gradient)
    _owner(name, gradient).multiply(gradient.slot, factor)
    return gradient


def _multiply_each(name: str, func: Any, gradients: Any, factor: Any) -> None:
    factors = factor if isinstance(factor, list | tuple) else [factor] * len(gradients)
    for gradient, each in zip(gradients, factors, strict=True):
        if isinstance(gradient, GradientStandIn):
            _multiply(name, func, gradient, each)
        else:
            gradient.mul_(each)


def _unscale_each(name: str, func: Any, gradients: Any, found_inf: Any, inverse_scale: Any) -> None:
    """Does what `GradScaler` asks for: notes whether values are not finite, and a factor."""
    if isinstance(found_inf, GradientStandIn) or isinstance(inverse_scale, GradientStandIn):
        _refuse(name, next(_stand_ins((found_inf, inverse_scale))))
    ordinary = [gradient for gradient in gradients if not isinstance(gradient, GradientStandIn)]
    if ordinary:
        func(ordinary, found_inf, inverse_scale)
    for gradient in _stand_ins(gradients):
        owner = _owner(name, gradient)
        if not owner.is_finite(gradient.slot):
            found_inf.fill_(1.0)
        if float(inverse_scale) != 1.0:
            owner.multiply(gradient.slot, inverse_scale)


def _same(name: str, func: Any, gradient: Any) -> Any:
    del name, func
    return gradient


def _zero(name: str, func: Any, gradient: Any) -> Any:
    del name, func
    gradient.owner.zero(gradient.slot)
    return gradient


def _zero_each(name: str, func: Any, gradients: Any) -> None:
    for gradient in gradients:
        if isinstance(gradient, GradientStandIn):
            _zero(name, func, gradient)
        else:
            gradient.zero_()


def _owner(name: str, gradient: GradientStandIn) -> GradientStandIns:
    if gradient.is_spent:
        _refuse(name, gradient)
    return gradient.owner


_SERVED: Mapping[str, Callable[..., Any]] = {
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "_foreach_norm": _norms,
    "mul_": _multiply,
    "_foreach_mul_": _multiply_each,
    "zero_": _zero,
    "_foreach_zero_": _zero_each,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale_each,
    "detach": _same,
    "alias": _same,
}


class GradientStandIns:
    """Stand-ins of one job's parameters. See [Note: what a stand-in is for].

    Memory: an object of Python for each parameter.

    Args:
        blocks: all blocks.
        gradients: their gradients; keeps norms.

    Attributes:
        why: gradients were given up last.
    """

    def __init__(self, blocks: Sequence[BlockWeights], gradients: GradientHomes) -> None:
        self._gradients = gradients
        self._block_of = {slot.name: block for block in blocks for slot in block.slots if slot.requires_grad}
        slots = [slot for block in blocks for slot in block.slots if slot.requires_grad]
        self._resting = {slot.name: (slot, _stand_in(slot, self, is_spent=False)) for slot in slots}
        self._spent = {slot.name: (slot, _stand_in(slot, self, is_spent=True)) for slot in slots}
        self._shown: set[str] = set()
        self._zeroed: dict[str, ParameterSlot] = {}
        self.why = _USED

    def show(self) -> None:
        """Puts stand-ins on `.grad` of all parameters whose gradient rests apart."""
        for name, (slot, stand_in) in self._resting.items():
            if self._gradients.rests_apart(slot):
                _put(slot, stand_in)
                self._shown.add(name)
                self._zeroed.pop(name, None)

    def heed(self) -> None:
        """Takes all stand-ins off, and forgets the gradients of those that the user has removed.
        One that the user replaced by a gradient of their own counts as the gradient.
        """
        for name in self._shown:
            slot, stand_in = self._resting[name]
            if _grad(slot) is stand_in:
                _put(slot, None)
            else:
                self._gradients.forget(slot)
        self._shown.clear()

    def spend(self, slots: Iterable[ParameterSlot], why: str = _USED) -> None:
        """Marks parameters whose gradients are given up, and says why."""
        self._zeroed.clear()
        self.why = why
        for slot in slots:
            if slot.name in self._spent:
                _put(slot, self._spent[slot.name][1])

    def take_off_spent(self) -> str | None:
        """Takes marks off, before a backward. Returns the name of a parameter that had one: what
        this backward adds up is less than in plain PyTorch.
        """
        found = self._first_spent()
        if found is not None:
            self.take_off()
        return found

    def check_fresh(self) -> None:
        """Raises `UsageError` if an update would use gradients that are given up."""
        found = self._first_spent()
        if found is not None and self.why.startswith(_STALE):
            raise UsageError(
                f"{self.why} (that of {found!r}, for instance), and optimizer.step() came behind it: plain PyTorch would have added to them. Call "
                "optimizer.zero_grad() before the backward"
            )
        if found is not None:
            raise UsageError(
                f"optimizer.step() came without a backward since {self.why} (that of {found!r}, for instance). Call zero_grad() and loss.backward() before it"
            )

    def _first_spent(self) -> str | None:
        return next((name for name, (slot, spent) in self._spent.items() if _grad(slot) is spent), None)

    def check_unscaled(self) -> None:
        """Raises `UsageError` if gradients were multiplied and a backward would add to them."""
        found = next((s.name for s, _ in self._resting.values() if self._gradients.factors(s)), None)
        if found is not None:
            raise UsageError(
                f"a backward came after the gradient of {found!r}, which rests away from the device, was multiplied (clipped): clip once, after the last "
                "backward before optimizer.step(), or plan gradient_home='device'"
            )

    def check_complete(self) -> None:
        """Raises `UsageError` if a gradient that was zeroed, not set to None, did not come again:
        plain PyTorch would update with zeros.
        """
        found = next((name for name, slot in self._zeroed.items() if not self._gradients.has(slot)), None)
        if found is not None:
            raise UsageError(
                f"zero_grad(set_to_none=False) zeroed the gradient of {found!r}, and no backward gave it another before optimizer.step(): plain PyTorch "
                "would update it with zeros, of which nothing is kept here. Leave set_to_none=False out"
            )

    def forget(self) -> None:
        """Takes off what stands for gradients, without a look at what the user did."""
        for slot, stand_in in self._resting.values():
            if _grad(slot) is stand_in:
                _put(slot, None)
        self._shown.clear()

    def take_off(self) -> None:
        """Leaves no stand-in on any parameter; gradients stay as they are."""
        self.forget()
        for slot, stand_in in self._spent.values():
            if _grad(slot) is stand_in:
                _put(slot, None)

    # --- what stand-ins are asked ----------------------------------------------------------------

    def norm_of(self, slot: ParameterSlot) -> torch.Tensor:
        """Returns the 2-norm of a gradient that rests apart.

        Raises:
            AwayError: it was multiplied since its norm was noted.
        """
        norm = self._gradients.norm_of(slot)
        for factor in self._gradients.factors(slot):
            # By a power of two norms scale as gradients do, and nothing is rounded.
            if abs(math.frexp(float(factor))[0]) != 0.5:
                raise AwayError(
                    f"the norm of the gradient of {slot.name!r} was asked for after it was clipped, while it rests away from the device: take the norm that "
                    "clip_grad_norm_ returns, or plan gradient_home='device'"
                )
            if not bool(norm.isfinite()) and self.is_finite(slot):
                raise AwayError(
                    f"the squares of the scaled gradient of {slot.name!r}, which rests away from the device, add up to more than its dtype holds, so that its "
                    "norm is not known: begin with a smaller scale (GradScaler(init_scale=...)), or plan gradient_home='device'"
                )
            norm = norm * factor.abs().to(norm.device)
        return norm.clone()

    def is_finite(self, slot: ParameterSlot) -> bool:
        """Tells whether a gradient that rests apart has no infinity and no NaN."""
        return self._gradients.is_finite_apart(self._block_of[slot.name], slot)

    def zero(self, slot: ParameterSlot) -> None:
        """Forgets a gradient that is to be zeros."""
        self._zeroed[slot.name] = slot
        _put(slot, None)

    def multiply(self, slot: ParameterSlot, factor: Any) -> None:
        """Notes a factor for the update."""
        noted = factor.detach().clone() if isinstance(factor, torch.Tensor) else torch.tensor(factor)
        self._gradients.multiply(slot, noted.reshape(()))


class WindowGradients:
    """Gradients of one window of the user's own lines: what its lines do to them, and in what order
    that may be.

    Args:
        blocks: all blocks.
        gradients: their gradients; keeps norms.

    Attributes:
        is_stale: the last backward would have added to gradients that are given up.
    """

    def __init__(self, blocks: Sequence[BlockWeights], gradients: GradientHomes) -> None:
        self._blocks = tuple(blocks)
        self._gradients = gradients
        self._stand_ins = GradientStandIns(blocks, gradients)
        self._slots = [slot for block in blocks for slot in block.slots if slot.requires_grad]
        self._has_failed = False
        self.is_stale = False

    def begin(self) -> None:
        """Begins a window."""
        self._gradients.begin_step()

    def before_backward(self) -> None:
        """Takes note of what the lines did before a backward adds to the gradients.

        Raises:
            UsageError: it would add to gradients that were scaled.
        """
        self._stand_ins.heed()
        self.is_stale = self._stand_ins.take_off_spent() is not None
        self._stand_ins.check_unscaled()

    def show(self) -> None:
        """Shows the lines what a backward has made: nothing, where plain PyTorch would have added
        to gradients that are given up. Nobody may want it: a generator's loss gives the
        discriminator gradients that are zeroed before its next turn.
        """
        if self.is_stale:
            why = self._stand_ins.why
            self.forget()
            self.spend(self._slots, why if why.startswith(_STALE) else _STALE + why)
        else:
            self._stand_ins.show()

    def fail(self) -> None:
        """Marks all gradients as incomplete, once a backward, in time for `zero_grad`."""
        if not self._has_failed:
            self._has_failed = True
            self.spend(self._slots, "a backward ended with an error, so that gradients are incomplete")

    def forget(self) -> None:
        """Forgets all gradients, wherever they are; marks stay."""
        self._has_failed = False
        self._stand_ins.forget()
        self._gradients.wait()
        self._gradients.begin_step()

    def before_update(self) -> None:
        """Takes note of what the lines did before an update uses the gradients.

        Raises:
            UsageError: they are given up, or some are zeros of which nothing is kept.
        """
        self._stand_ins.heed()
        self._stand_ins.check_fresh()
        self._stand_ins.check_complete()

    def used(self) -> list[ParameterSlot]:
        """Returns the parameters that have a gradient."""
        return [slot for slot in self._slots if self._gradients.has(slot)]

    def are_left(self) -> bool:
        """True if there are gradients that an update would use: none where the lines zeroed
        them, or where infinities make a `GradScaler` skip the update.
        """
        self._stand_ins.heed()
        self._stand_ins.take_off_spent()
        left = [(b, s, self._gradients.here.of(s)) for b in self._blocks for s in b.slots if self._gradients.has(s)]
        is_finite = (
            self._gradients.is_finite_apart(block, slot) if gradient is None else bool(gradient.isfinite().all())
            for block, slot, gradient in left
        )
        return any(gradient is None or bool(gradient.any()) for *_, gradient in left) and all(is_finite)

    def spend(self, slots: Iterable[ParameterSlot], why: str = _USED) -> None:
        """Marks gradients as given up, and says why."""
        self._stand_ins.spend(slots, why)

    def end(self, *, are_used: bool) -> None:
        """Drops all gradients and marks; those that the last update has used stay readable where
        they are kept.
        """
        self._stand_ins.take_off()
        self._gradients.wait()
        if not are_used:
            self._gradients.begin_step()
        self._gradients.here.drop(self._blocks)


def _grad(slot: ParameterSlot) -> torch.Tensor | None:
    # The weight may be away, and its class then answers for it.
    with torch._C.DisableTorchFunctionSubclass():
        return slot.parameter.grad


def _stand_in(slot: ParameterSlot, owner: GradientStandIns, *, is_spent: bool) -> GradientStandIn:
    parameter = slot.parameter
    made: Any = torch.Tensor._make_wrapper_subclass(
        GradientStandIn, slot.shape, dtype=parameter.dtype, device=parameter.device, strides=slot.stride
    )
    made.slot, made.owner, made.is_spent = slot, owner, is_spent
    return made


def _put(slot: ParameterSlot, gradient: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        slot.parameter.grad = gradient
