"""Trying out an optimizer of unknown class: may its step be cut, and how far?

In: the live optimizer and its parameters. Out: one `Verdict` per param group, found by exact
comparison of runs on small random tensors with the groups' real hyperparameters. Nothing of the
live object is changed; random state is put back.

Compared bit by bit, weights and states, over several steps with gradients of very different sizes:

1. every parameter alone against all parameters of all groups in one call. Different, or the step
   wrote into its groups, its own attributes or the random state: `JOINT`;
2. a flat vector cut at odd and even places against the whole tensor in its own number of
   dimensions. Equal for every sample: `ELEMENTWISE`; otherwise `PER_PARAMETER`.

Each is done with the hyperparameters as they are and with a learning rate of 0.05, because a rate
of 0 (warm-up) or of 1e-8 would hide differences. Small tensors say nothing of a class that chooses
by size: where pieces gave the same bits, the operations of a step on each true shape are compared
with those on a piece ([Note: true shapes] in `shape_trials.py`). Not found by this: behaviour that
changes only after many steps.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from memfit import devices
from memfit.core.errors import MemfitError, UnsupportedError
from memfit.core.layout import PIECE_ELEMENTS
from memfit.optimizers.shadow import Part, Shadow, State, snapshot_groups
from memfit.optimizers.shape_trials import Sample, isolated, like_states, run_trial, small_samples
from memfit.optimizers.validation import ALIGNED_PIECE_ELEMENTS, SIXTEEN_BIT, Entry, UpdateKind, Verdict, narrowed

_VISIBLE_RATE = 0.05
_PIECE_SIZES = (PIECE_ELEMENTS, ALIGNED_PIECE_ELEMENTS)

# Flags that torch's own classes set on themselves after a check that never changes the arithmetic.
_HARMLESS_ATTRIBUTES = frozenset({"_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"})


@dataclass(kw_only=True)
class _Run:
    weight: torch.Tensor
    state: State


def detect(optimizer: Optimizer, entries: Sequence[Entry], *, piece_multiple: int = 1) -> dict[int, Verdict]:
    """Try the optimizer out.

    Args:
        optimizer: the live optimizer; only read.
        entries: its parameters; their bytes are not read.
        piece_multiple: cut only at multiples of this many elements (fused kernels).

    Returns:
        A verdict for each group that has parameters.

    Raises:
        UnsupportedError: a step on small tensors fails.
    """
    there = {e.parameter.device for e in entries if devices.is_accelerator(e.parameter.device)}
    forked = sorted({devices.of(device).index(device) for device in there})
    kind = next((device.type for device in there), "cuda")  # of no meaning where none is forked
    with torch.random.fork_rng(devices=forked, device_type=kind):
        try:
            return _verdicts(optimizer, entries, small_samples(entries), piece_multiple)
        except MemfitError:
            raise
        except Exception as error:
            # A class that makes its states in __init__ fails without them: try again from small
            # parts of the live ones.
            seeded = small_samples(entries, optimizer.state)
            if not any(sample.state for sample in seeded):
                raise _untriable(optimizer, error) from error
        try:
            return _verdicts(optimizer, entries, seeded, piece_multiple)
        except MemfitError:
            raise
        except Exception as error:
            raise _untriable(optimizer, error) from error


def _untriable(optimizer: Optimizer, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"memfit does not know {type(optimizer).__name__} and could not try it out: a step on small tensors failed "
        f"with {type(error).__name__}: {_first_line(error)}. Its step must work for any parameters of the same dimensions."
    )


def _first_line(error: Exception) -> str:
    """The beginning of an error's text; a compiler's goes on for pages."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def _verdicts(
    optimizer: Optimizer, entries: Sequence[Entry], samples: list[Sample], piece_multiple: int
) -> dict[int, Verdict]:
    indices = sorted({s.entry.group for s in samples})
    reason = _joint_reason(optimizer, samples)
    if reason is not None:
        return {g: Verdict(kind=UpdateKind.JOINT, piece_multiple=1, reason=reason) for g in indices}
    verdicts = {
        g: _group_verdict(optimizer, [s for s in samples if s.entry.group == g], piece_multiple) for g in indices
    }
    tried = {s.weight.shape for s in samples}
    alike = {_looks(e): e for e in entries if e.parameter.shape not in tried}
    for entry in alike.values():
        if verdicts[entry.group].kind is UpdateKind.ELEMENTWISE and (reason := _shape_reason(optimizer, entry)):
            verdicts[entry.group] = Verdict(kind=UpdateKind.PER_PARAMETER, piece_multiple=1, reason=reason)
    return verdicts


def _looks(entry: Entry) -> tuple[Any, ...]:
    """Everything that a class may choose by: group, shape, dtype, device, the user's attributes."""
    parameter = entry.parameter
    attributes = tuple(sorted(getattr(parameter, "__dict__", {})))
    return entry.group, tuple(parameter.shape), parameter.dtype, parameter.device, attributes


def _shape_reason(optimizer: Optimizer, entry: Entry) -> str:
    """Reason why a parameter of this shape must be updated whole; empty if its pieces may be.

    Compared are operations for the whole parameter, and for large and small pieces.
    """
    name, whole = type(optimizer).__name__, entry.parameter.shape
    live, dtype = optimizer.state.get(entry.parameter, {}), entry.parameter.dtype
    shapes = (whole, *((min(size, whole.numel()),) for size in _PIECE_SIZES))
    trials = [run_trial(optimizer, entry, shape, dtype, states=like_states(live, whole, shape)) for shape in shapes]
    if trials[0].operations is None:
        return f"operations of {name} cannot be recorded, and what it chooses by shape is not known"
    if any(trial.operations != trials[0].operations for trial in trials):
        return f"{name} takes other operations for a parameter of shape {tuple(whole)} than for its pieces"
    return ""


def _fresh(sample: Sample) -> _Run:
    return _Run(weight=sample.weight.clone(), state={key: isolated(value) for key, value in sample.state.items()})


def _rate_variants(optimizer: Optimizer) -> list[list[dict[str, Any]]]:
    real = snapshot_groups(optimizer)
    visible = [dict(group) for group in real]
    for group in visible:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            group["lr"] = torch.full_like(rate, _VISIBLE_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = _VISIBLE_RATE
    return [real, visible]


def _joint_reason(optimizer: Optimizer, samples: list[Sample]) -> str | None:
    """Why all parameters are needed at once, or None if each may be updated alone."""
    name = type(optimizer).__name__
    for groups in _rate_variants(optimizer):
        torch.manual_seed(5)
        random_before = torch.get_rng_state()
        shadow = Shadow(optimizer, groups=groups, isolate=isolated)
        attributes = {k: isolated(v) for k, v in vars(shadow.instance).items()}
        together = [_fresh(s) for s in samples]
        alone = [_fresh(s) for s in samples]
        for step in range(max(len(s.gradients) for s in samples)):
            active = [i for i, s in enumerate(samples) if step < len(s.gradients)]
            parts = [_part(samples[i], together[i], step) for i in active]
            for i, state in zip(active, shadow.run(parts), strict=True):
                together[i].state = state
            changed = _changed(attributes, vars(shadow.instance))
            if changed is not None:
                return f"a step of {name} changes its attribute {changed!r}, so it must be made once for all parameters"
            used = [groups[index] for index in sorted({samples[i].entry.group for i in active})]
            for before, after in zip(used, shadow.used_groups, strict=True):
                changed = _changed(before, after)
                if changed is not None:
                    return (
                        f"a step of {name} changes {changed!r} of its param group, so it must be made once for all "
                        "parameters"
                    )
            for i in active:
                # A shadow of its own: nothing can reach one parameter through the other's run.
                single = Shadow(optimizer, groups=groups, isolate=isolated)
                alone[i].state = single.run([_part(samples[i], alone[i], step)])[0]
        if not torch.equal(random_before, torch.get_rng_state()):
            return f"a step of {name} draws random numbers, so parameters must be updated in one call, in order"
        if not all(_same(a, b) for a, b in zip(together, alone, strict=True)):
            return (
                f"{name} updates a parameter differently when others are present (a norm or a statistic over all "
                "parameters)"
            )
    return None


def _part(sample: Sample, run: _Run, step: int) -> Part:
    entry = sample.entry
    return Part(
        group=entry.group,
        name=entry.name,
        parameter=entry.parameter,
        weight=run.weight,
        gradient=sample.gradients[step].clone(),
        state=run.state,
    )


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The first key whose value is not what it was, apart from those that a run sets itself."""
    for key in {**before, **after}:
        if key in ("params", "param_names", "state", "param_groups", *_HARMLESS_ATTRIBUTES):
            continue
        if key not in before or key not in after:
            return key
        old, new = before[key], after[key]
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if not torch.equal(old, new):
                return key
        elif old is not new and not (
            type(old) is type(new) and isinstance(old, (int, float, str, list, dict, set, tuple)) and old == new
        ):
            return key
    return None


def _group_verdict(optimizer: Optimizer, samples: list[Sample], multiple: int) -> Verdict:
    name = type(optimizer).__name__
    for groups in _rate_variants(optimizer):
        for sample in samples:
            shadow = Shadow(optimizer, groups=groups, isolate=isolated)
            whole = _fresh(sample)
            for step in range(len(sample.gradients)):
                whole.state = shadow.run([_part(sample, whole, step)])[0]
            if not _states_may_be_cut(whole):
                return Verdict(
                    kind=UpdateKind.PER_PARAMETER,
                    piece_multiple=1,
                    reason=f"{name} keeps a state that is neither a scalar nor of the parameter's shape",
                )
            for cut in sample.cuts:
                # See [Note: 16-bit tails]: in 16 bits only aligned cuts can tell whether the
                # arithmetic is elementwise.
                unit = multiple if sample.weight.dtype.itemsize > 2 else max(multiple, ALIGNED_PIECE_ELEMENTS)
                aligned = max(unit, cut // unit * unit)
                try:
                    same = _same(whole, _cut_run(shadow, sample, aligned, whole))
                except Exception as error:  # noqa: BLE001  (whatever a class raises for flat pieces says that it needs shapes)
                    return Verdict(
                        kind=UpdateKind.PER_PARAMETER,
                        piece_multiple=1,
                        reason=f"{name} takes no flat pieces ({type(error).__name__}: {error})",
                    )
                if not same:
                    return Verdict(
                        kind=UpdateKind.PER_PARAMETER,
                        piece_multiple=1,
                        reason=f"{name} gives other bits when a parameter of shape {tuple(sample.weight.shape)} is "
                        f"cut into pieces of {aligned}",
                    )
    return Verdict(
        kind=UpdateKind.ELEMENTWISE,
        piece_multiple=multiple,
        reason=f"{name} gave the same bits on pieces as on whole tensors, tried on {len(samples)} small shapes",
    )


def _states_may_be_cut(run: _Run) -> bool:
    for value in run.state.values():
        if not isinstance(value, torch.Tensor):
            if value is not None and not isinstance(value, (bool, int, float)):
                return False
        elif type(value) is not torch.Tensor or (value.shape != run.weight.shape and value.numel() != 1):
            return False
    return True


def _cut_run(shadow: Shadow, sample: Sample, cut: int, whole: _Run) -> _Run:
    """The same steps on a flat vector, piece by piece, with the scalars of a step shared by its
    pieces.
    """
    shape = sample.weight.shape
    elements = shape.numel()
    weight = sample.weight.reshape(-1).clone()
    cut_keys = {key for key, value in whole.state.items() if isinstance(value, torch.Tensor) and value.shape == shape}
    state = {key: value.reshape(-1) if key in cut_keys else value for key, value in _fresh(sample).state.items()}
    for step in range(len(sample.gradients)):
        gradient = sample.gradients[step].reshape(-1)
        new_state: State = {}
        for start in range(0, elements, cut):
            span = slice(start, min(start + cut, elements))
            size = span.stop - span.start
            lent = {
                key: value[span].clone() if key in cut_keys and value.shape == (elements,) else isolated(value)
                for key, value in state.items()
            }
            part = Part(
                group=sample.entry.group,
                name=sample.entry.name,
                parameter=sample.entry.parameter,
                weight=weight[span],
                gradient=gradient[span].clone(),
                state=lent,
            )
            for key, value in shadow.run([part])[0].items():
                if key in cut_keys and value.shape == (size,):
                    new_state.setdefault(key, torch.empty(elements, dtype=value.dtype, device=value.device))[span] = (
                        value
                    )
                else:
                    new_state[key] = value
        state = new_state
    shaped = {key: value.reshape(shape) if key in cut_keys else value for key, value in state.items()}
    return _Run(weight=weight.reshape(shape), state=shaped)


def _same(one: _Run, other: _Run) -> bool:
    """Compares weight and states bit by bit (NaN equals itself, 0.0 differs from -0.0)."""
    if one.state.keys() != other.state.keys() or not _same_bits(one.weight, other.weight):
        return False
    return all(_same_value(value, other.state[key]) for key, value in one.state.items())


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_bits(one, other)
    return type(one) is type(other) and one == other


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat, flat_other = one.detach().reshape(-1).contiguous(), other.detach().reshape(-1).contiguous()
    return torch.equal(flat.view(torch.uint8), flat_other.view(torch.uint8))


# The user's optimizer on another processor than the weights': whether it can run there, with which
# bits, and how fast.
#
# In: the live optimizer, its parameters. Out: a reason against it in words; equality found by
# trial; parameters a second.
#
# [Note: bits of another processor]
# IEEE 754 fixes what one addition, product, quotient or root gives. It does not fix whether a
# compiler contracts a product and a sum into one operation with one rounding, and compilers for
# GPUs do. So an elementwise update on the host may differ from the device's in the last place, by
# class, flags and versions. A *trial* decides: the class itself runs some steps on both, on values
# over many orders of magnitude. Contraction shows in one element of ten to a hundred, so 65,536 do
# not miss it; a class that sums over elements is taken to differ, for its order may depend on sizes
# that no trial has.

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
