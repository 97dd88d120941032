"""memfit beside plain PyTorch, step by step, bit by bit.

In: how to build a case (twice), an optimizer, a plan. Out: nothing, or an AssertionError that names the first tensors
that differ and by how much.

[Note: sums in another order]
A weight that several calls use gets its gradient as a sum over calls and microbatches. Plain accumulation adds
microbatch by microbatch, layer-major order adds call by call: the same sum in another order. So for these weights, in
that order alone, the gradient may differ by two roundings at the magnitude of what was added (terms may cancel, so that
is more than the magnitude of the sum). Two are what real models show; random ones, whose weights may be used a dozen times
over, get what arithmetic promises of n terms: n - 1 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
The reference then takes memfit's gradient for its own, so that everything behind it (norm, update, states, later steps) is
again compared bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from equivalence.plain import MakeOptimizer, PlainTrainer, RandomState, clone_all, clone_states
from equivalence.zoo import Batch, Case

MOST_REPORTED = 8
ROUNDINGS = 2


class StepLike(Protocol):
    """What a step returns, as far as it is compared."""

    loss: Any
    losses: Any
    norm: Any
    departures: Any


class JobLike(Protocol):
    """What is used of a job: memfit's own, or a stand-in that tests this harness."""

    def step(self, batch: Batch, /) -> Any: ...
    def gradient(self, name: str, /) -> Tensor | None: ...
    def weights(self) -> Any: ...
    def close(self) -> None: ...


MakeJob = Callable[[Case, torch.optim.Optimizer], JobLike]


def _ordered_bits(tensor: Tensor) -> Tensor:
    """Floats as integers in the floats' order, so that a difference counts representable numbers."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    raw = tensor.contiguous().view(bits).to(torch.int64)
    if tensor.element_size() == 8:
        return raw
    sign = 1 << (8 * tensor.element_size() - 1)
    return torch.where(raw < 0, -(raw + sign), raw)


def ulp_distance(left: Tensor, right: Tensor) -> int:
    """The most representable numbers between two elements of the same place; NaNs are left out."""
    both = ~(left.isnan() | right.isnan())
    if not bool(both.any()):
        return 0
    return int((_ordered_bits(left[both]) - _ordered_bits(right[both])).abs().max())


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bits; NaN equals NaN, zero does not equal minus zero."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    if left.numel() == 0:
        return True
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def describe(ours: Tensor, plain: Tensor) -> str:
    """How two tensors differ, for a person."""
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return f"is {tuple(ours.shape)} {ours.dtype}, plain has {tuple(plain.shape)} {plain.dtype}"
    if not ours.is_floating_point():
        return f"{int((ours != plain).sum())} of {ours.numel()} elements differ"
    differs = (ours != plain) & ~(ours.isnan() & plain.isnan())
    if not bool(differs.any()):
        return "differs in the sign of a zero or the bits of a NaN"
    place = tuple(int(i) for i in differs.nonzero()[0])
    gap = (ours.double() - plain.double()).abs().nan_to_num(nan=float("inf")).max().item()
    return (
        f"{int(differs.sum())} of {ours.numel()} elements of {tuple(ours.shape)} differ, by at most {gap:.3g} = "
        f"{ulp_distance(ours, plain)} ulp; first at {place}: {ours[place].item()!r}, plain {plain[place].item()!r}"
    )


@dataclass
class Differences:
    """What was found to differ, in the order of looking."""

    found: list[str] = field(default_factory=list)

    def compare(self, label: str, ours: object, plain: object) -> None:
        """Notes a difference between two values of any kind."""
        if isinstance(ours, Tensor) and isinstance(plain, Tensor):
            if not same_bits(ours.detach(), plain.detach()):
                self.found.append(f"{label}: {describe(ours.detach(), plain.detach())}")
        elif isinstance(ours, Tensor) or isinstance(plain, Tensor) or ours != plain:
            self.found.append(f"{label}: {_brief(ours)}, plain {_brief(plain)}")

    def compare_all(self, label: str, ours: Mapping[str, object], plain: Mapping[str, object]) -> None:
        """Compares by name; a name on one side only is a difference."""
        for name in plain.keys() - ours.keys():
            self.found.append(f"{label} {name}: missing")
        for name in ours.keys() - plain.keys():
            self.found.append(f"{label} {name}: plain has none")
        for name in plain:
            if name in ours:
                self.compare(f"{label} {name}", ours[name], plain[name])

    def check(self, what: str) -> None:
        """Fails with what was found."""
        if self.found:
            more = len(self.found) - MOST_REPORTED
            lines = "\n  ".join(self.found[:MOST_REPORTED] + ([f"and {more} more"] if more > 0 else []))
            raise AssertionError(f"{what} differs from plain PyTorch:\n  {lines}")


def _brief(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def number(value: object) -> float:
    """A loss or norm as a Python number: every fp32 is one exactly."""
    return float(value.detach().item() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]


def within_roundings(
    ours: Tensor | None, plain: Tensor | None, magnitude: Tensor | None = None, *, roundings: int = ROUNDINGS
) -> bool:
    """See [Note: sums in another order]: bound by the spacing of numbers at the largest `magnitude` of what was added."""
    if ours is None or plain is None or ours.shape != plain.shape or ours.dtype != plain.dtype:
        return False
    largest = (plain.abs() if magnitude is None else magnitude).max()
    spacing = torch.nextafter(largest, torch.full_like(largest, torch.inf)) - largest
    return bool(((ours - plain).abs() <= roundings * spacing).all())


@dataclass(frozen=True, kw_only=True)
class Report:
    """What equal training leaves to look at: names whose gradients differed within the bound, and the last losses."""

    reordered: frozenset[str]
    losses: tuple[float, ...]


class _Lockstep:
    """Both trainers, one step at a time."""

    def __init__(
        self,
        plain: PlainTrainer,
        job: JobLike,
        case: Case,
        random: RandomState,
        may_reorder: frozenset[str],
        *,
        by_terms: bool,
    ) -> None:
        self.plain, self.job, self.case, self.random, self.may_reorder = plain, job, case, random, may_reorder
        self.by_terms = by_terms
        self.reordered: set[str] = set()

    def step(self, index: int, *, has_gradients: bool) -> None:
        batch = self.plain.case.batch(index)
        self.plain.accumulate(batch)
        with self.random.in_use():
            result = self.job.step(batch)
        self._losses(index, result)
        self._clip(index, result)
        if has_gradients:
            self._gradients(index)
        self.plain.update()
        found = Differences()
        with self.job.weights():
            found.compare_all(f"step {index} weight", *(dict(m.named_parameters()) for m in self._models()))
            found.compare_all(f"step {index} buffer", *(dict(m.named_buffers()) for m in self._models()))
        found.compare(f"step {index} generator", self.random.state, self.plain.random.state)
        found.compare_all(f"step {index} generator of device", self.random.on_devices, self.plain.random.on_devices)
        found.check(f"step {index}")

    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self.case.model, self.plain.model

    def _losses(self, index: int, result: StepLike) -> None:
        found = Differences()
        found.compare(
            f"step {index} losses of microbatches",
            [number(loss) for loss in result.losses],
            [number(loss) for loss in self.plain.losses],
        )
        ours, plain = number(result.loss), number(self.plain.loss)
        # Of several microbatches the mean is for reading: whoever adds them up may round as he likes, once.
        if len(self.plain.losses) == 1 or abs(ours - plain) > 1e-6 * abs(plain):
            found.compare(f"step {index} loss", ours, plain)
        found.check(f"step {index}")

    def _clip(self, index: int, result: StepLike) -> None:
        found = Differences()
        if self.plain.max_grad_norm is None:
            found.compare(f"step {index} norm", result.norm, None)
        elif not self.may_reorder:
            norm = self.plain.clip()
            assert norm is not None
            found.compare(f"step {index} norm", number(result.norm), number(norm))
        else:
            # The norm of gradients that may be off by a rounding may be so, too; then all are clipped by it.
            norm, ours = self.plain.norm(), torch.tensor(number(result.norm))
            if not within_roundings(ours, norm):
                found.compare(f"step {index} norm", ours, norm)
            self.plain.clip(number(ours))
        found.check(f"step {index}")

    def _gradients(self, index: int) -> None:
        found = Differences()
        adopted: dict[str, Tensor] = {}
        for name, plain in self.plain.gradients().items():
            ours = self.job.gradient(name)
            before = len(found.found)
            found.compare(f"step {index} gradient {name}", ours, plain)
            if len(found.found) > before and name in self.may_reorder and self._is_reordered(name, ours, plain):
                found.found.pop()
                assert ours is not None
                adopted[name] = ours
        found.check(f"step {index}")
        self.reordered |= adopted.keys()
        self.plain.adopt(adopted)

    def _is_reordered(self, name: str, ours: Tensor | None, plain: Tensor | None) -> bool:
        roundings = max(ROUNDINGS, self.plain.terms.get(name, 0) - 1) if self.by_terms else ROUNDINGS
        return within_roundings(ours, plain, self.plain.magnitudes.get(name), roundings=roundings)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def _left_on(model: nn.Module) -> dict[str, object]:
    """What a job could forget to take off: hooks, attributes, classes of parameters."""
    left: dict[str, object] = {}
    for name, module in model.named_modules():
        left[f"{name or 'the model'}: hooks"] = {kind: len(getattr(module, kind)) for kind in _HOOKS}
        left[f"{name or 'the model'}: attributes"] = sorted(vars(module))
    for name, parameter in model.named_parameters():
        left[f"{name}: class"] = type(parameter)
    return left


def assert_equal_training(
    build: Callable[[], Case],
    make_optimizer: MakeOptimizer,
    make_job: MakeJob,
    *,
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    steps: int = 3,
    has_gradients: bool = True,
    may_reorder: bool | None = None,
    by_terms: bool = False,
) -> Report:
    """Trains two copies of a case, one by a job and one plainly, and compares all that a step leaves behind.

    Args:
        build: makes the case; called twice.
        make_optimizer: makes the optimizer over a model.
        make_job: takes the case and its optimizer in hand.
        microbatches, max_grad_norm: as the job does it; the reference does the same.
        steps: how many.
        has_gradients: the job holds gradients for reading.
        may_reorder: the case's shared weights may be off by a rounding; None: with more than one microbatch.
        by_terms: by as many as their sums have terms; see [Note: sums in another order].

    Raises:
        AssertionError: losses, gradients, norm, weights, buffers, generator or, at the end, the optimizer's states
            differ.
    """
    ours, reference = build(), build()
    plain = PlainTrainer(
        reference, make_optimizer(reference.model), microbatches=microbatches, max_grad_norm=max_grad_norm
    )
    # A job's making may not draw from the user's generator: it is seeded before, and compared after each step.
    random = RandomState(state=plain.random.state.clone())
    optimizer = make_optimizer(ours.model)
    with random.in_use():
        job = make_job(ours, optimizer)
    reorders = microbatches > 1 if may_reorder is None else may_reorder
    lockstep = _Lockstep(plain, job, ours, random, ours.shared if reorders else frozenset(), by_terms=by_terms)
    try:
        for index in range(steps):
            lockstep.step(index, has_gradients=has_gradients)
            untouched = {name for name, p in reference.model.named_parameters() if p.grad is None}
            assert reference.untouched in (None, untouched), f"the zoo is wrong about what is untouched: {untouched}"
    finally:
        job.close()
    found = Differences()
    found.compare_all(
        "closed weight", clone_all(ours.model.named_parameters()), clone_all(reference.model.named_parameters())
    )
    expected = clone_states(reference.model, plain.optimizer)
    states = clone_states(ours.model, optimizer)
    found.compare_all("state of", dict.fromkeys(states), dict.fromkeys(expected))
    for name in expected.keys() & states.keys():
        found.compare_all(f"state of {name}:", states[name], expected[name])
    found.compare_all("what is left on", _left_on(ours.model), _left_on(reference.model))
    found.check("the closed job")
    return Report(reordered=frozenset(lockstep.reordered), losses=tuple(number(loss) for loss in plain.losses))
