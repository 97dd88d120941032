"""Steps of the optimizer's class on memory that is lent to it for good.

In: pieces of weights and of their states that stay where they are. Out: one call of the class for
many of them, with leaves that are made once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.core.errors import UsageError
from memfit.optimizers import structure_checks as structure
from memfit.optimizers.shadow import Part, Shadow, State
from memfit.optimizers.state_tensors import StateTensor
from memfit.optimizers.validation import Entry


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
                    structure.check_keys(type(self._optimizer).__name__, part.name, layout, state)
                found.append({key: value for key, value in state.items() if key not in standing.values})
            return found
