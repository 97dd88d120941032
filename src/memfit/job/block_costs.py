"""Costs of one block, forward and backward, plain or compiled.

In: what a trace calls a block with. Out: seconds and bytes of runs of a copy of it on random
numbers. Which blocks are compiled then, says `job.compiled_blocks`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit import devices
from memfit.job.machine import Machine
from memfit.tensors.trees import tensors_in


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One block, forward and backward.

    Attributes:
        forward_s, backward_s: least seconds of some runs.
        saved_bytes: kept from forward to backward, without arguments and outputs; of a compiled
            block, those among that which the plain one lets go.
        forward_peak_bytes: of the forward, above what was there before.
        backward_peak_bytes: of the backward, above what was there before it, the outputs' gradients
            among that.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int

    @property
    def peak_in_backward_bytes(self) -> int:
        """Peak of the backward, with what the forward keeps for it."""
        return self.saved_bytes + self.backward_peak_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak of both, without outputs and their gradients."""
        return max(self.forward_peak_bytes, self.peak_in_backward_bytes)

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class GivenCall:
    """Arguments of a call, described in place of tensors; and the autocast around it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None

    @property
    def key(self) -> str:
        """Equal for calls that one measurement serves."""
        return repr(pytree.tree_map(_key_of, (self.args, dict(self.kwargs)))) + str(self.autocast)

    def made(self, module: nn.Module, machine: Machine) -> MadeCall:
        """Makes tensors of the descriptions, for runs of a copied block."""

        def make(leaf: Any) -> Any:
            return leaf.made(machine.device) if isinstance(leaf, _Described) else leaf

        args, kwargs = pytree.tree_map(make, (self.args, dict(self.kwargs)))
        return MadeCall(args=args, kwargs=kwargs, autocast=self.autocast, module=module, machine=machine)


@dataclass(frozen=True)
class _Described:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self, device: torch.device) -> torch.Tensor:
        if not self.dtype.is_floating_point:
            # Zeros are valid places and words; a mask of ones masks nothing.
            return torch.full(self.shape, self.dtype is torch.bool, dtype=self.dtype, device=device)
        return torch.randn(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


def note_given(
    found: dict[str, GivenCall], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Notes what a module is called with: the hook before its forward, with the first two given."""
    device = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    args, kwargs = pytree.tree_map_only(torch.Tensor, _describe, (args, kwargs))
    found[name] = GivenCall(args=args, kwargs=kwargs, autocast=autocast)


def _describe(tensor: torch.Tensor) -> _Described:
    return _Described(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _key_of(leaf: Any) -> Any:
    plain = isinstance(leaf, _Described | bool | int | float | str) or leaf is None
    return leaf if plain else type(leaf).__qualname__


def copied_block(module: nn.Module, device: torch.device) -> nn.Module:
    """Copies a block with random weights: its own may be away."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if made.is_floating_point():
            made.normal_(0.0, 0.02)
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Tensors that a block's forward keeps for its backward.

    Attributes:
        own_bytes: without arguments, outputs, parameters and buffers.
        arguments: bytes of arguments among them, by position among the call's tensors.
        outputs: likewise of outputs that are no arguments.
    """

    own_bytes: int
    arguments: Mapping[int, int]
    outputs: Mapping[int, int]

    def beyond(self, plain: Kept) -> int:
        """Bytes of arguments and outputs that are kept here and not by the plain block."""
        mine = [*_without(self.arguments, plain.arguments), *_without(self.outputs, plain.outputs)]
        return sum(mine)


@dataclass(frozen=True, kw_only=True)
class MadeCall:
    """A call of a copied block that is run again and again.

    Attributes:
        args, kwargs: of the call.
        autocast: dtype of an autocast around it.
        module: that has the parameters.
        machine: whose meter and phases are read.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None
    module: nn.Module
    machine: Machine

    def run(self, call: Callable[..., Any]) -> BlockCost:
        """Runs one forward and backward of the block's call, plain or compiled."""
        for tensor in (*tensors_in((self.args, self.kwargs)), *self.module.parameters()):
            tensor.grad = None
        device, before = self.machine.device, self.machine.meter.live_bytes()
        with self.machine.phases("compile"):
            began = time.perf_counter()
            outputs = self._forward(call)
            devices.finish(device)
            forward_s = time.perf_counter() - began
        forward = _peak_of(self.machine)
        given = _storages((self.args, self.kwargs))
        made = {where: nbytes for where, nbytes in _storages(outputs).items() if where not in given}
        saved = self.machine.meter.live_bytes() - before - sum(made.values())
        leaves = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        gradients = [torch.ones_like(tensor) for tensor in leaves]
        between = self.machine.meter.live_bytes()
        with self.machine.phases("compile"):
            began = time.perf_counter()
            torch.autograd.backward(leaves, gradients)
            devices.finish(device)
            backward_s = time.perf_counter() - began
        backward = _peak_of(self.machine)
        return BlockCost(
            forward_s=forward_s,
            backward_s=backward_s,
            saved_bytes=saved,
            forward_peak_bytes=forward - before,
            backward_peak_bytes=backward - between,
        )

    def kept_by(self, call: Callable[..., Any]) -> Kept:
        """Runs one forward, and notes what it keeps."""
        outputs = self._forward(call)
        found, given, made = _storages(_saved_for(outputs)), _storages((self.args, self.kwargs)), _storages(outputs)
        lasting = _storages([*self.module.parameters(), *self.module.buffers()])
        own = {where: nbytes for where, nbytes in found.items() if where not in given | made | lasting}
        made = {where: nbytes for where, nbytes in made.items() if where not in given}
        return Kept(
            own_bytes=sum(own.values()),
            arguments={i: nbytes for i, (where, nbytes) in enumerate(given.items()) if where in found},
            outputs={i: nbytes for i, (where, nbytes) in enumerate(made.items()) if where in found},
        )

    def _forward(self, call: Callable[..., Any]) -> Any:
        kind, dtype = self.machine.device.type, self.autocast
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            return call(*self.args, **self.kwargs)


def _saved_for(outputs: Any) -> list[torch.Tensor]:
    """Tensors that the graph behind outputs keeps. Hooks of saved tensors would have compiled code
    compiled anew.
    """
    left: list[Any] = [tensor.grad_fn for tensor in tensors_in(outputs)]
    seen: set[Any] = {None}
    saved: list[torch.Tensor] = []
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                saved += tensors_in([getattr(node, name)])
    return saved


def _without(some: Mapping[int, int], others: Mapping[int, int]) -> list[int]:
    return [nbytes for i, nbytes in some.items() if i not in others]


def _storages(tree: Any) -> dict[int, int]:
    """Bytes of storages by where they lie, in order."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(tree)}


def _peak_of(machine: Machine) -> int:
    """Peak of the phase that has ended."""
    assert machine.phases.last is not None, "a phase has ended"
    return machine.phases.last.peak_bytes


def least_of(runs: Sequence[BlockCost]) -> BlockCost:
    """The least seconds, and the most bytes."""
    return BlockCost(
        forward_s=min(one.forward_s for one in runs),
        backward_s=min(one.backward_s for one in runs),
        saved_bytes=max(one.saved_bytes for one in runs),
        forward_peak_bytes=max(one.forward_peak_bytes for one in runs),
        backward_peak_bytes=max(one.backward_peak_bytes for one in runs),
    )
