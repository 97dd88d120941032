"""Random modules that change tensors in place, through views and past them, under every fate: plain PyTorch's gradients bit for bit, or a refusal.

Changes that plain PyTorch's own version counters see are never refused; those that pass them by may be, and are never wrong in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from equivalence.saved_harness import POLICIES, Driver, Outcome, make_offloader, run_driven, run_plain
from memfit.core.errors import UnsupportedError
from memfit.engine.offload import Offloader

SHAPE = (2, 2, 4, 4)


@dataclass(frozen=True)
class Step:
    """An operation on registers: `left` and `right` are read, `left` is changed where the operation works in place."""

    name: str
    left: int
    right: int
    dim: int


NEW = (
    "batched product", "product of two", "linear", "attention", "view", "unsafe view", "transpose", "chunks", "expand",
    "tanh", "exp", "times", "plus", "fresh",
)  # fmt: skip
IN_PLACE = (
    "add_", "mul_", "tanh_", "relu_", "copy_", "fill part", "narrow mul_", "transpose add_", "foreach", "out=", "detached",
)  # fmt: skip
PAST_COUNTERS = ("data", "set_", "unsafe view mul_", "unsafe chunk tanh_", "unsafe chunks", "out=data", "foreach data")


class Layer(nn.Module):
    """Runs drawn steps on registers; the first register is its argument, the last is its result."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.weight = nn.Parameter(torch.randn(SHAPE) * 0.4)
        self.linear = nn.Linear(SHAPE[-1], SHAPE[-1])

    def forward(self, hidden: Tensor) -> Tensor:
        registers = [hidden]
        for step in self.steps:
            left, right = registers[step.left % len(registers)], registers[step.right % len(registers)]
            if step.name in NEW:
                registers.append(self._new(step, left, right))
            elif step.name in IN_PLACE:
                _change(step, left, right)
            else:
                with torch.no_grad():
                    _change_unseen(step, left)
        return registers[-1] + self.linear(registers[0]) if len(registers) > 1 else self.linear(hidden)

    def _new(self, step: Step, left: Tensor, right: Tensor) -> Tensor:
        match step.name:
            case "batched product":
                return torch.matmul(left, self.weight)
            case "product of two":
                return torch.matmul(left, right * 0.3)
            case "linear":
                return self.linear(left)
            case "attention":
                return functional.scaled_dot_product_attention(left, right, left)
            case "view":
                return left.reshape(4, -1).view(SHAPE)
            case "unsafe view":
                return torch.ops.aten._unsafe_view(left.contiguous(), SHAPE)
            case "transpose":
                return left.transpose(-1, -2)
            case "chunks":
                first, second = left.chunk(2, dim=step.dim)
                return torch.cat([second, first * 0.5], dim=step.dim)
            case "expand":
                return left.narrow(step.dim, 0, 1).expand(SHAPE)
            case "tanh":
                return left.tanh()
            case "exp":
                return left.clamp(max=1).exp()
            case "times":
                return left * right
            case "plus":
                return left + right
            case "fresh":
                return torch.zeros(SHAPE)
        raise AssertionError(step)


def _change(step: Step, left: Tensor, right: Tensor) -> None:
    match step.name:
        case "add_":
            left += right
        case "mul_":
            left.mul_(0.9)
        case "tanh_":
            left.tanh_()
        case "relu_":
            functional.relu_(left)
        case "copy_":
            left.copy_(right.clone())
        case "fill part":
            left.select(step.dim, 0).fill_(0.25)
        case "narrow mul_":
            left.narrow(step.dim, 1, 1).mul_(1.1)
        case "transpose add_":
            left.transpose(0, 1).add_(0.125)
        case "foreach":
            torch.ops.aten._foreach_mul_([left], 0.8)
        case "out=":
            with torch.no_grad():
                torch.add(right.detach(), 1, out=left.detach())
        case "detached":
            left.detach().add_(0.5)


def _change_unseen(step: Step, left: Tensor) -> None:
    match step.name:
        case "data":
            left.data.mul_(0.7)
        case "set_":
            torch.ops.aten.set_(torch.empty(0), left.detach()).add_(0.3)
        case "unsafe view mul_":
            torch.ops.aten._unsafe_view(left.contiguous(), SHAPE).mul_(0.6)
        case "unsafe chunk tanh_":
            left.unsafe_chunk(2, dim=step.dim)[1].tanh_()
        case "unsafe chunks":
            for part in left.unsafe_chunk(2, dim=step.dim):
                part.mul_(0.5)
        case "out=data":
            torch.mul(left.data, 0.4, out=left.data)
        case "foreach data":
            torch.ops.aten._foreach_add_([left.data], 0.2)


class Model(nn.Module):
    """Layers, and code between them that may change what they gave and were given."""

    def __init__(self, layers: Sequence[Layer], glue: Sequence[Step | None]) -> None:
        super().__init__()
        self.first = nn.Linear(SHAPE[-1], SHAPE[-1])
        self.layers = nn.ModuleList(layers)
        self.glue = tuple(glue)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values)
        for layer, step in zip(self.layers, self.glue, strict=True):
            made = layer(hidden * 1)
            if step is not None and step.name in IN_PLACE:
                _change(step, made, hidden)
            elif step is not None:
                with torch.no_grad():
                    _change_unseen(step, made)
            hidden = made
        return hidden.square().mean()


def _steps(names: Sequence[str]) -> st.SearchStrategy[Step]:
    # Mostly the newest register: what autograd has saved must not be changed, and the newest has rarely been read.
    places = st.one_of(st.just(-1), st.just(-1), st.integers(0, 7))
    return st.builds(Step, name=st.sampled_from(names), left=places, right=st.integers(0, 7), dim=st.integers(0, 3))


def _programs(names: Sequence[str]) -> st.SearchStrategy[list[Step]]:
    return st.lists(_steps(names), min_size=2, max_size=7)


Drawn = tuple[list[list[Step]], list[Step | None]]


def _fates() -> st.SearchStrategy[list[str]]:
    selecting = st.sampled_from([name for name in sorted(POLICIES) if "select" in name])
    return st.tuples(selecting, *[st.sampled_from(sorted(POLICIES))] * 3).map(lambda names: list(dict.fromkeys(names)))


def _models(names: Sequence[str], changes: Sequence[str]) -> st.SearchStrategy[Drawn]:
    glue = st.one_of(st.none(), _steps(changes))
    return st.integers(1, 3).flatmap(
        lambda n: st.tuples(st.lists(_programs(names), min_size=n, max_size=n), st.lists(glue, min_size=n, max_size=n))
    )


@pytest.fixture(scope="module")
def offloader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offloader]:
    with make_offloader(tmp_path_factory.mktemp("scratch"), minimum_bytes=64) as made:
        yield made


def _plain(model: nn.Module, values: Tensor) -> Outcome | None:
    """None where plain PyTorch refuses."""
    try:
        outcome = run_plain(model, lambda made: made(values), steps=1)
    except RuntimeError as error:
        if any(text in str(error) for text in ("modified", "inplace", "in-place", "single memory location")):
            return None
        raise
    finally:
        model.zero_grad(set_to_none=True)
    return outcome


def _under(name: str, model: Model, values: Tensor, offloader: Offloader) -> Outcome:
    sites = [f"layers.{i}" for i in range(len(model.layers))]
    driver = Driver(model, sites, POLICIES[name], offloader=offloader, copies_inputs=sites, extra_stays=[values])
    try:
        return run_driven(model, lambda made: made(values), driver, steps=1)
    finally:
        model.zero_grad(set_to_none=True)


def _build(drawn: Drawn, seed: int) -> tuple[Model, Tensor]:
    torch.manual_seed(seed)
    programs, glue = drawn
    return Model([Layer(program) for program in programs], glue), torch.randn(SHAPE)


@given(drawn=_models(NEW + IN_PLACE, IN_PLACE), seed=st.integers(0, 100), fates=_fates())
def test_changes_in_place_that_plain_pytorch_allows_train_alike_under_every_fate(
    drawn: Drawn, seed: int, fates: list[str], offloader: Offloader
) -> None:
    model, values = _build(drawn, seed)
    plain = _plain(model, values)
    event("plain refuses" if plain is None else "plain trains")
    if plain is None:
        return
    for name in fates:
        _under(name, model, values, offloader).assert_equal(plain)


@given(
    drawn=_models(NEW + IN_PLACE + PAST_COUNTERS, IN_PLACE + PAST_COUNTERS), seed=st.integers(0, 100), fates=_fates()
)
def test_changes_that_pass_version_counters_by_train_alike_or_are_refused(
    drawn: Drawn, seed: int, fates: list[str], offloader: Offloader
) -> None:
    model, values = _build(drawn, seed)
    plain = _plain(model, values)
    if plain is None:
        return
    for name in fates:
        try:
            outcome = _under(name, model, values, offloader)
        except (UnsupportedError, RuntimeError) as error:
            if name == "keep" or ("in place" not in str(error) and "inplace operation" not in str(error)):
                raise
            event(f"{name} refused")
        else:
            outcome.assert_equal(plain)
            event(f"{name} alike")
