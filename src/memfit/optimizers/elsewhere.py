"""The user's optimizer on another processor than the weights': whether it can run there, with which
bits, and how fast.

In: the live optimizer, its parameters. Out: a reason against it in words; equality found by trial;
parameters a second.

[Note: bits of another processor]
IEEE 754 fixes what one addition, product, quotient or root gives. It does not fix whether a
compiler contracts a product and a sum into one operation with one rounding, and compilers for GPUs
do. So an elementwise update on the host may differ from the device's in the last place, by class,
flags and versions. A *trial* decides: the class itself runs some steps on both, on values over many
orders of magnitude. Contraction shows in one element of ten to a hundred, so 65,536 do not miss it;
a class that sums over elements is taken to differ, for its order may depend on sizes that no trial
has.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memfit import devices
from memfit.core.layout import PIECE_ELEMENTS
from memfit.optimizers.kinds import SIXTEEN_BIT, UpdateKind, Verdict, narrowed
from memfit.optimizers.shadow import Part, Shadow, State
from memfit.optimizers.validation import Entry

_HOST = torch.device("cpu")
_TRIED_ELEMENTS = 1 << 16
_STEPS = 3


class HostUpdates:
    """Updates of parameters on an accelerator, as the host would make them.

    Memory: 1 MiB and the states' four times that on either side, while `agrees` finds out.

    Args:
        optimizer: the live one; only read.
        entries: its parameters.
        verdicts: by group, how far updates may be cut.
    """

    def __init__(self, optimizer: Optimizer, entries: Sequence[Entry], verdicts: Mapping[int, Verdict]) -> None:
        self._optimizer = optimizer
        self._entries = tuple(entries)
        self._verdicts = verdicts
        self._agrees: dict[torch.dtype | None, bool] = {}

    def obstacle(self, dtype: torch.dtype | None = None) -> str:
        """Reason in words why updates cannot run on the host; empty if there is none.

        Args:
            dtype: of masters; None: each weight is its own.
        """
        name, groups = type(self._optimizer).__name__, self._optimizer.param_groups
        for index, group in enumerate(groups):
            for flag in ("capturable", "fused"):
                if group.get(flag):
                    return f"{name} has {flag}=True (group {index}), whose step counts lie on the device: leave it out"
            if key := _on_accelerator(group, but=("params",)):
                return f"{key!r} of {name} (group {index}) is a tensor on the device"
        if key := _on_accelerator(vars(self._optimizer), but=("state", "param_groups", "defaults")):
            return f"the attribute {key!r} of {name} is a tensor on the device"
        for entry in self._entries:
            kind = dtype or entry.parameter.dtype
            if kind in SIXTEEN_BIT:
                return f"{entry.name!r} is updated in {kind}, which the processor rounds otherwise: train with masters"
        return ""

    def agrees(self, dtype: torch.dtype | None = None) -> bool:
        """Tells whether a trial gave the same bits on both. See [Note: bits of another processor].

        Args:
            dtype: of masters; None: each weight is its own.
        """
        if dtype not in self._agrees:
            first = {entry.group: entry for entry in reversed(self._entries)}.values()
            self._agrees[dtype] = all(self._is_alike(entry, dtype or entry.parameter.dtype) for entry in first)
        return self._agrees[dtype]

    def _is_alike(self, entry: Entry, dtype: torch.dtype) -> bool:
        if narrowed(self._verdicts[entry.group], dtype, "cpu").kind is not UpdateKind.ELEMENTWISE:
            return False
        given = [_stepped(self._optimizer, entry, dtype, device) for device in (entry.parameter.device, _HOST)]
        alike = [torch.equal(a, b) for a, b in zip(*given, strict=True)]
        return all(alike)


def _on_accelerator(values: Mapping[str, Any], *, but: Collection[str]) -> str:
    """The first name of a tensor on an accelerator; empty if there is none."""
    found = (k for k, v in values.items() if isinstance(v, torch.Tensor) and devices.is_accelerator(v.device))
    return next((name for name in found if name not in but), "")


def _stepped(optimizer: Optimizer, entry: Entry, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Weight and states after some steps on a device, on the host."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        scales = torch.logspace(-12, 4, _TRIED_ELEMENTS)[torch.randperm(_TRIED_ELEMENTS, generator=generator)]
        return (torch.randn(_TRIED_ELEMENTS, generator=generator) * scales).to(dtype).to(device)

    weight, shadow = drawn(), Shadow(optimizer)
    state: State = {}
    for _ in range(_STEPS):
        part = Part(
            group=entry.group, name=entry.name, parameter=entry.parameter, weight=weight, gradient=drawn(), state=state
        )
        with torch.compiler.set_stance("force_eager"):
            state = shadow.run([part])[0]
    tensors = [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return [tensor.cpu() for tensor in (weight, *tensors)]


def probe_updates(device: torch.device, *, elements: int = PIECE_ELEMENTS, tries: int = 4) -> float:
    """Parameters that torch's AdamW passes in a second, a piece at a time: best of several, since
    other work can only slow one down.

    Memory: 8 MiB for weight, gradient and states of a piece, as much again for what the class
    makes.

    Args:
        device: whose processor works.
        elements: of a piece.
        tries: of which the best counts.
    """
    weight = torch.nn.Parameter(torch.zeros(elements, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    best = float("inf")
    for _ in range(tries):
        devices.finish(device)
        began = time.perf_counter()
        optimizer.step()
        devices.finish(device)
        best = min(best, time.perf_counter() - began)
    return elements / best
