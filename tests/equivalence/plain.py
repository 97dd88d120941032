"""The reference: plain PyTorch, whole batch or accumulation in the same split, written without a line of memfit.

In: a `Case` and an optimizer. Out: losses, gradients, weights, states, as tensors of their own.

The random streams are drawn here again from their description, not by memfit's helper: at the step's start k seeds come
from one draw of the default generator; microbatch m runs on the stream of seed m, as do Python's, NumPy's and an accelerator's
generators (NumPy's on its lowest 32 bits); then the default generator goes on behind that one draw, the others where they were.
One microbatch uses the generators as they stand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equivalence.terms import Terms
from equivalence.zoo import Batch, Case

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def _new_others() -> tuple[Any, Any, list[Tensor]]:
    """States of all generators but torch's on the CPU, of a new trainer."""
    accelerator = _accelerator()
    if accelerator is None:
        return Random(7).getstate(), np.random.RandomState(7).get_state(), []
    before = accelerator.get_rng_state_all()
    accelerator.manual_seed_all(7)
    devices = accelerator.get_rng_state_all()
    accelerator.set_rng_state_all(before)
    return Random(7).getstate(), np.random.RandomState(7).get_state(), devices


def _accelerator() -> Any:
    """torch's module of the accelerator that this process uses, if any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    module: Any = None if found is None else torch.get_device_module(found)
    return module if module is not None and module.is_initialized() else None


@dataclass
class RandomState:
    """One trainer's own default generators, so that two trainers can take turns in a process.

    Attributes:
        state: of torch's on the CPU.
        others: of Python's, NumPy's and, by index, the accelerator's; two new trainers have the same.
    """

    state: Tensor = field(default_factory=torch.get_rng_state)
    others: tuple[Any, Any, list[Tensor]] = field(default_factory=_new_others)

    @property
    def on_devices(self) -> dict[str, Tensor]:
        """States of the accelerator's generators by index."""
        return {str(index): state for index, state in enumerate(self.others[2])}

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        return cls(state=torch.Generator().manual_seed(seed).get_state())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        outer, outer_others = torch.get_rng_state(), _other_states()
        torch.set_rng_state(self.state)
        _set_other_states(self.others)
        try:
            yield
        finally:
            self.state, self.others = torch.get_rng_state(), _other_states()
            torch.set_rng_state(outer)
            _set_other_states(outer_others)


def _other_states() -> tuple[Any, Any, list[Tensor]]:
    accelerator = _accelerator()
    devices = [] if accelerator is None else accelerator.get_rng_state_all()
    return random.getstate(), np.random.get_state(), devices


def _set_other_states(states: tuple[Any, Any, list[Tensor]]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    if states[2]:
        _accelerator().set_rng_state_all(states[2])


def split_rows(batch: Batch, microbatches: int) -> list[Batch]:
    """Slices of equal or nearly equal rows, larger ones first; what is no tensor goes to all."""
    parts = {name: torch.tensor_split(v, microbatches) for name, v in batch.items() if isinstance(v, Tensor)}
    return [{name: parts[name][m] if name in parts else batch[name] for name in batch} for m in range(microbatches)]


def rows_of(batch: Batch) -> float:
    """The weight of a microbatch where the case names no other."""
    return float(len(next(iter(batch.values()))))


def clone_all(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors}


def clone_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name; parameters without any are left out."""
    states: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        # .get: indexing the optimizer's defaultdict would add an entry.
        state = optimizer.state.get(parameter)
        if state:
            states[name] = {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in state.items()}
    return states


class PlainTrainer:
    """A training loop that can stop between backward and update.

    Attributes:
        losses, loss: of the last step, one a microbatch and their weighted sum.
        magnitudes: of shared weights, the sum over uses and microbatches of the absolute gradient, before clipping.
        terms: of shared weights, how many gradients were added.
    """

    def __init__(
        self,
        case: Case,
        optimizer: torch.optim.Optimizer,
        *,
        microbatches: int = 1,
        max_grad_norm: float | None = None,
        seed: int = 7,
    ) -> None:
        self.case = case
        self.model = case.model
        self.optimizer = optimizer
        self.microbatches = microbatches
        self.max_grad_norm = max_grad_norm
        self.random = RandomState.seeded(seed)
        self.losses: list[Tensor] = []
        self.loss = torch.tensor(0.0)
        self._sums = Terms({name: self.model.get_parameter(name) for name in case.shared})
        self.magnitudes, self.terms = self._sums.magnitudes, self._sums.counts

    def accumulate(self, batch: Batch) -> None:
        """Forward and backward of one step."""
        # Not the optimizer's: it may not hold all that trains.
        self.model.zero_grad(set_to_none=True)
        self._sums.clear()
        with self.random.in_use():
            if self.microbatches == 1:
                loss = self.case.loss(self.model, batch)
                loss.backward()
                self.losses, self.loss = [loss.detach().clone()], loss.detach().clone()
            else:
                self._accumulate_microbatches(batch)

    def _accumulate_microbatches(self, batch: Batch) -> None:
        parts = split_rows(batch, self.microbatches)
        weights = [(self.case.weight or rows_of)(part) for part in parts]
        seeds = torch.randint(2**63 - 1, (self.microbatches,))
        after, others = torch.get_rng_state(), _other_states()
        self.losses, self.loss = [], torch.zeros(())
        for part, weight, seed in zip(parts, weights, seeds.tolist(), strict=True):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            if others[2]:
                _accelerator().manual_seed_all(seed)
            loss = self.case.loss(self.model, part)
            weighted = loss * (weight / sum(weights))
            self._sums.watch(weighted)
            weighted.backward()
            self.losses.append(loss.detach().clone())
            self.loss = self.loss + weighted.detach()
        torch.set_rng_state(after)
        _set_other_states(others)

    def clip(self, norm: float | None = None) -> Tensor | None:
        """Clips where that is wanted; returns the norm. `norm`: take this for the norm (another order of the sum)."""
        if self.max_grad_norm is None:
            return None
        if norm is None:
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.max_grad_norm, torch.tensor(norm))
        return torch.tensor(norm)

    def norm(self) -> Tensor:
        """The global gradient norm."""
        return torch.nn.utils.get_total_norm(p.grad for p in self.model.parameters() if p.grad is not None)

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of the gradients as they stand."""
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.model.named_parameters()}

    def adopt(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes these gradients for its own (where another order of the same sum is allowed)."""
        for name, gradient in gradients.items():
            self.model.get_parameter(name).grad = gradient.clone()

    def update(self) -> None:
        """The optimizer's step."""
        with self.random.in_use():
            self.optimizer.step()


def sgd(lr: float = 1.0, **options: Any) -> MakeOptimizer:
    """SGD with a step so large that no rounding of a gradient hides in the weights."""
    return lambda model: torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=lr, **options)


def adamw(lr: float = 1e-2, **options: Any) -> MakeOptimizer:
    return lambda model: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr, **options)
