"""The small tensors on which an unknown optimizer is tried out.

In: an optimizer's parameters. Out: a handful of `Sample`s per group: shapes with as many dimensions
as the real ones, weights and gradients over many orders of magnitude, with exact zeros among them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.optimizers.shadow import State
from memfit.optimizers.validation import Entry

LARGE_ELEMENTS = 9216
"""Above the size at which published low-bit optimizers change format (4,096), and several of their
blocks (256, 2,048)."""

_GRADIENT_SCALES = (1.0, 1e-3, 40.0, 0.2, 5.0, 1e-6, 300.0)
_SMALL_CAPS = (7, 11, 5, 3, 2)
_SMALL_CUTS = (3, 16, 33, 64)
_LARGE_CUTS = (1000, 4097)
_LARGE_STEPS = 3
_SAMPLES_PER_GROUP = 4


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A small stand-in for one parameter: start weight and state, one gradient a step, and where to
    cut.
    """

    entry: Entry
    weight: torch.Tensor
    state: State
    gradients: tuple[torch.Tensor, ...]
    cuts: tuple[int, ...]


def small_samples(entries: Sequence[Entry], live: Mapping[Any, State] | None = None) -> list[Sample]:
    """A few distinct small shapes a group, a large one where it has a large parameter.

    Of each group two have one shape.

    Args:
        entries: the parameters; their bytes are not read.
        live: `optimizer.state`, to start from small parts of it; nothing to start as before a first
            step.
    """
    maker = _Maker(live)
    samples: list[Sample] = []
    seen: dict[int, set[tuple[Any, ...]]] = {}
    for entry in entries:
        parameter = entry.parameter
        keys = seen.setdefault(entry.group, set())
        shape = small_shape(parameter.shape, _SMALL_CAPS)
        attributes = tuple(sorted(getattr(parameter, "__dict__", {})))
        key = (shape, parameter.dtype, parameter.device, attributes)
        if key not in keys and len(keys) < _SAMPLES_PER_GROUP:
            keys.add(key)
            # The parameter's own dtype, and that of its master.
            dtypes = {parameter.dtype, torch.promote_types(parameter.dtype, torch.float32)}
            samples.extend(maker.small(entry, shape, dtype) for dtype in sorted(dtypes, key=str))
    for group in seen:
        large = next((e for e in entries if e.group == group and e.parameter.numel() > 4096), None)
        if large is not None:
            samples.append(maker.large(large))
    # Classes that stack parameters of one shape, as some Muons do, need two of a kind to show.
    firsts = {sample.entry.group: sample for sample in reversed(samples)}
    return samples + [maker.small(each.entry, each.weight.shape, each.weight.dtype) for each in firsts.values()]


def small_shape(shape: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """A shape with as many dimensions, none larger than the cap of its place (the last cap holds
    further on).
    """
    return tuple(min(size, caps[min(place, len(caps) - 1)]) for place, size in enumerate(shape))


def isolated(value: Any) -> Any:
    """A copy of a small mutable value, so that trying out changes nothing that the live optimizer
    holds.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (list, dict, set)):
        return copy.copy(value)
    return value


class _Maker:
    """Draws samples from one random stream, so that no two are alike and every run makes the same
    ones.
    """

    def __init__(self, live: Mapping[Any, State] | None) -> None:
        self._generator = torch.Generator().manual_seed(20)
        self._live = live

    def small(self, entry: Entry, shape: Sequence[int], dtype: torch.dtype) -> Sample:
        return self._sample(entry, shape, dtype, _SMALL_CUTS, len(_GRADIENT_SCALES))

    def large(self, entry: Entry) -> Sample:
        """All dimensions cut at the same length, to nearly `LARGE_ELEMENTS` elements."""
        cap, shape = LARGE_ELEMENTS, entry.parameter.shape
        while torch.Size(sizes := tuple(min(size, cap) for size in shape)).numel() > LARGE_ELEMENTS:
            cap = cap * 9 // 10 if cap > 10 else cap - 1
        return self._sample(entry, sizes, entry.parameter.dtype, _LARGE_CUTS, _LARGE_STEPS)

    def _sample(
        self, entry: Entry, shape: Sequence[int], dtype: torch.dtype, cuts: tuple[int, ...], steps: int
    ) -> Sample:
        return Sample(
            entry=entry,
            weight=self._values(entry, shape, dtype, 1.0),
            state=self._state(entry, shape, dtype),
            gradients=tuple(self._values(entry, shape, dtype, scale) for scale in _GRADIENT_SCALES[:steps]),
            cuts=cuts,
        )

    def _values(self, entry: Entry, shape: Sequence[int], dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Normal values spread over five orders of magnitude, a tenth of them zero."""
        size, generator = tuple(shape), self._generator
        values = torch.randn(size, generator=generator) * 10.0 ** (-5.0 * torch.rand(size, generator=generator))
        values = torch.where(torch.rand(size, generator=generator) < 0.1, torch.zeros(()), values)
        return (values * scale).to(entry.parameter.device, dtype)

    def _state(self, entry: Entry, shape: Sequence[int], dtype: torch.dtype) -> State:
        """The first elements of the live states of the parameter's shape, and its scalars."""
        if self._live is None:
            return {}
        parameter, size = entry.parameter, torch.Size(shape)
        state: State = {}
        for key, value in self._live.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                own = dtype if value.dtype == parameter.dtype else value.dtype
                state[key] = value.detach().reshape(-1)[: size.numel()].reshape(size).to(own).clone()
            else:
                state[key] = isolated(value)
        return state
