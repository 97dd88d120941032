"""Steps of the optimizer's class on memory that is lent to it for good.

In: pieces of weights and of their states that stay where they are. Out: one call of the class for
many of them, with leaves that are made once.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from memfit.core.errors import UnsupportedError, UsageError
from memfit.optimizers.shadow import Part, Shadow, State
from memfit.optimizers.shape_trials import run_trial
from memfit.optimizers.state_tensors import StateTensor
from memfit.optimizers.validation import Entry, UpdateKind, Verdict
from memfit.tensors.product_scratch import update_product_bytes

# Checks the assumptions of homes and cuts against what the optimizer and the engine do.
#
# In: the live groups, loaded or returned states, pieces. Out: nothing, or an error that says what
# no longer matches.

_DECISIVE_FLAGS = frozenset({"fused", "capturable", "differentiable"})


def group_structure(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """The settings that decide which states exist and how one may cut: flags that are on, momentum
    or none.

    `foreach` is left out: it changes neither. Rates, decays and betas may change at any time.
    """
    structure: list[tuple[Any, ...]] = []
    for group in optimizer.param_groups:
        flags = {key for key, value in group.items() if isinstance(value, bool)} | _DECISIVE_FLAGS
        on = sorted(key for key in flags - {"foreach"} if group.get(key))
        momentum = group.get("momentum")
        structure.append((*on, "momentum" if isinstance(momentum, (int, float)) and momentum else "no momentum"))
    return structure


def check_groups(optimizer: Optimizer, entries: Iterable[Entry], planned: Sequence[tuple[Any, ...]]) -> None:
    """Raises `UsageError` if parameters moved between groups, or a group's structure is not the
    planned one.
    """
    groups = optimizer.param_groups
    places = [(e.group, e.index, e.parameter) for e in entries]
    moved = sum(len(g["params"]) for g in groups) != len(places) or any(
        g >= len(groups) or i >= len(groups[g]["params"]) or groups[g]["params"][i] is not p for g, i, p in places
    )
    if moved:
        raise UsageError(
            "optimizer.param_groups was changed by hand: parameters came, went or moved to another group. Close the "
            "job, change the groups, and call memfit.fit again."
        )
    for index, (now, then) in enumerate(zip(group_structure(optimizer), planned, strict=True)):
        if now != then:
            raise UsageError(
                f"Group {index} of the optimizer changed settings that decide which states exist or which kernels run "
                f"({then} became {now}). Close the job and call memfit.fit again."
            )


def check_piece(entry: Entry, verdict: Verdict, weight: torch.Tensor, *, whole: bool) -> None:
    """Raises if a piece is not whole where it has to be."""
    if verdict.kind is not UpdateKind.ELEMENTWISE:
        if not whole:
            raise UsageError(f"{entry.name!r} must be updated whole: {verdict.reason}.")
        if weight.shape != entry.parameter.shape:
            raise UsageError(
                f"{entry.name!r} was handed over in shape {tuple(weight.shape)}; its optimizer needs it whole, as "
                f"{tuple(entry.parameter.shape)}."
            )


def check_alignment(entry: Entry, verdict: Verdict, weight: torch.Tensor, *, last: bool) -> None:
    """Raises `UsageError` for a piece that would move a fused kernel's vector boundaries."""
    if not last and weight.numel() % verdict.piece_multiple:
        raise UsageError(
            f"A piece of {entry.name!r} has {weight.numel()} elements; all but the last need a multiple of "
            f"{verdict.piece_multiple}, or the bits change (fused kernel)."
        )


def check_keys(class_name: str, name: str, layout: Sequence[StateTensor], state: State) -> None:
    """Raises `UnsupportedError` if a step made a state that no home is planned for."""
    strange = {key for key, value in state.items() if value is not None} - {t.key for t in layout}
    if strange:
        raise UnsupportedError(
            f"{class_name} made a state {min(strange)!r} for {name!r} that it did not make in a dry run of a few "
            "steps; memfit has no home for it, and the step is torn."
        )


def check_whole_state(what: str, name: str, layout: Sequence[StateTensor], state: Mapping[str, Any]) -> None:
    """Raises `UsageError` if a whole state of one parameter does not fit its layout."""
    expected = {t.key: t.shape for t in layout}
    for key, value in state.items():
        if value is None:
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        if key not in expected:
            raise UsageError(
                f"{what}: {name!r} has no state {key!r:.200} with its group's settings ({sorted(expected)})."
            )
        if shape != expected[key]:
            raise UsageError(f"{what}: state {key!r} of {name!r} has shape {shape}, not {expected[key]}.")


def same_scalars(before: State, now: State) -> bool:
    """Tells whether two pieces of one step met the same scalars.

    Those on an accelerator count as equal, unread.
    """
    if before.keys() != now.keys():
        return False
    for key, value in before.items():
        other = now[key]
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and not torch.equal(value, other):
                return False
        elif value != other:
            return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingPart:
    """Memory that is lent to many steps: of a piece of a weight, and of its states.

    Attributes:
        group: index of the parameter's group.
        name: of the parameter, as the optimizer's driver knows it.
        parameter: the live one.
        weight: a piece of it. (count,)
        values: states of the piece, by key; numbers are lent anew for each step.
        leaf: over `weight`: the class's parameter.
    """

    group: int
    name: str
    parameter: torch.Tensor
    weight: torch.Tensor
    values: State
    leaf: torch.nn.Parameter

    def part(self, gradient: torch.Tensor, numbers: Mapping[str, Any]) -> Part:
        """Returns what is lent to one step.

        Args:
            gradient: of the piece; may be overwritten.
            numbers: states that are not of the weight's size, which are copied: the class counts in
                place.
        """
        own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in numbers.items()}
        return Part(
            group=self.group,
            name=self.name,
            parameter=self.parameter,
            weight=self.weight,
            gradient=gradient,
            state={**own, **self.values},
            leaf=self.leaf,
        )


class StandingSteps(ABC):
    """The part of a driver that steps on memory that stays lent."""

    _optimizer: Optimizer
    _shadow: Shadow | None
    _done: set[str]
    _lock: threading.Lock

    @abstractmethod
    def state_layout(self, name: str, dtype: torch.dtype | None = None) -> tuple[StateTensor, ...]:
        """See `OptimizerDriver`."""

    @abstractmethod
    def _entry(self, name: str) -> Entry: ...

    def stand(self, name: str, weight: torch.Tensor, values: Mapping[str, Any]) -> StandingPart:
        """Returns memory that will be lent to many steps; see `update_standing`.

        Args:
            name: of a parameter whose update is elementwise.
            weight: a piece of it. (count,)
            values: the states of the piece.
        """
        entry = self._entry(name)
        leaf = torch.nn.Parameter(weight.detach(), requires_grad=True)
        return StandingPart(
            group=entry.group,
            name=entry.name,
            parameter=entry.parameter,
            weight=weight,
            values=dict(values),
            leaf=leaf,
        )

    def update_standing(self, lent: Sequence[tuple[StandingPart, torch.Tensor, Mapping[str, Any]]]) -> list[State]:
        """One step of the user's class on all pieces of several parameters, each elementwise; as
        `update` for each of them.

        Args:
            lent: what `stand` gave, the gradient, and the numbers of the parameter's state before
                this step.

        Returns:
            New numbers, for each piece.

        Raises:
            UsageError: twice in a step.
        """
        with self._lock:
            assert self._shadow is not None, "pieces are updated inside of a step"
            names = {part.name for part, _, _ in lent}
            if not self._done.isdisjoint(names):
                raise UsageError(f"{min(self._done & names)!r} was already updated in this step.")
            parts = [standing.part(gradient, numbers) for standing, gradient, numbers in lent]
            states = self._shadow.run(parts) if parts else []
            self._done |= names
            found: list[State] = []
            for part, (standing, _, _), state in zip(parts, lent, states, strict=True):
                if state.keys() != part.state.keys():
                    layout = self.state_layout(part.name, part.weight.dtype)
                    check_keys(type(self._optimizer).__name__, part.name, layout, state)
                found.append({key: value for key, value in state.items() if key not in standing.values})
            return found


# Temporary memory of one step of an optimizer's class, beside the memory that it is lent.
#
# In: an optimizer, one of its parameters, the layout of its states. Out: bytes an element of what
# is updated at once, and bytes that its operations move for an element, by which its speed is
# foretold.
#
# The class itself runs for a few steps (`shape_trials.py`) while every storage that an operation
# gives is counted until it dies. Elementwise classes run on a flat vector, where a step holds a
# multiple of what it updates; others run at the parameter's own size. Of what kernels take for
# themselves only that of products in half precision is counted (`tensors.product_scratch`), by
# which Muon makes a gradient orthogonal.

_ADAMW_LENT_BYTES = 28.0
# Measured on one core, ten optimizers on 2^18 and on 5e6 elements: within a fifth of that, but for
# Adafactor.
_MEMORY_SHARE = 0.1
_ADAMW_MOVED_BYTES = {True: 84.0, False: 104.0}
"""Bytes that torch's AdamW in fp32 moves for an element: on a processor, where it takes tensors one
by one, and elsewhere, where it takes them together. Counted as others are.
"""
_FLAT_ELEMENTS = 4096
# Of a class that cannot be counted (its states are made in its __init__, or its step is compiled):
# as many copies as the hungriest of torch's own makes.
_UNKNOWN_COPIES = 4


class UpdateCost(NamedTuple):
    """Bytes for each element that is updated at once.

    Attributes:
        scratch_bytes: most that a step has alive of its own: no weight, gradient or state.
        moved_bytes: read and written by its operations; 0: not counted.
        lent_bytes: of weight, gradient and states, read once and, but for the gradient, written
            once: what comes from memory and goes there, however well caches hold a piece.
        device: type of the device where it was counted.
        product_dtype: of products of matrices in half precision that it makes; None: it makes none.
    """

    scratch_bytes: float
    moved_bytes: float = 0.0
    lent_bytes: float = 0.0
    device: str = "cpu"
    product_dtype: torch.dtype | None = None

    def scratch_of(self, elements: int) -> int:
        """Returns the bytes that an update of some elements allocates."""
        found = math.ceil(self.scratch_bytes * elements)
        if self.product_dtype is None or self.device != "cpu":
            return found
        return found + update_product_bytes(elements, self.product_dtype)

    @property
    def work_share(self) -> float:
        """Work of an element as a multiple of AdamW's; 1 where it is not known. Bytes of memory and
        bytes of operations weigh what AdamW's took in caches and beyond them.
        """
        if not self.moved_bytes:
            return 1.0
        operations = self.moved_bytes / _ADAMW_MOVED_BYTES[self.device == "cpu"]
        return _MEMORY_SHARE * self.lent_bytes / _ADAMW_LENT_BYTES + (1 - _MEMORY_SHARE) * operations


def update_cost(
    optimizer: Optimizer,
    entry: Entry,
    kind: UpdateKind,
    dtype: torch.dtype,
    layout: Sequence[StateTensor],
    device: torch.device,
) -> UpdateCost:
    """Counts what a step of the class takes for each element.

    Args:
        optimizer: the live optimizer; only read.
        entry: the parameter; its bytes are not touched.
        kind: how far its group may be cut.
        dtype: of the weight that is updated.
        layout: of the parameter's states.
        device: where it is updated; the class may take another way there.
    """
    shape = tuple(entry.parameter.shape)
    if not math.prod(shape):
        return UpdateCost(0.0)
    size = (_FLAT_ELEMENTS,) if kind is UpdateKind.ELEMENTWISE else shape
    states: State = {}
    if optimizer.state.get(entry.parameter):
        states = {tensor.key: _as_state(tensor, shape, size) for tensor in layout}
    trial = run_trial(optimizer, entry, size, dtype, device=device, states=states)
    if trial.operations is None:
        return UpdateCost(float(_UNKNOWN_COPIES * dtype.itemsize))
    counts = (trial.scratch_bytes, trial.moved_bytes, trial.lent_bytes)
    scratch, moved, lent = (nbytes / math.prod(size) for nbytes in counts)
    return UpdateCost(scratch, moved, lent, device.type, trial.product_dtype)


def _as_state(tensor: StateTensor, whole: tuple[int, ...], size: tuple[int, ...]) -> Any:
    if tensor.dtype is None:
        return 1
    if tensor.shape_kind == "scalar":
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    return torch.empty(size if tensor.shape == whole else tensor.shape, dtype=tensor.dtype, device="meta")
