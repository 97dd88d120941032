"""The user's optimizer on pieces, against plain `optimizer.step()` on twins of the same parameters."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import memfit
from memfit.core.errors import AwayError, UnsupportedError, UsageError
from memfit.devices.binding import install
from memfit.optimizers import OptimizerDriver, OwnerCallbacks, UpdateKind, shadow
from memfit.optimizers.detect import detect
from memfit.optimizers.validation import known_classes, known_verdict, validated_entries
from memfit.tensors import guard
from memfit.tensors.product_scratch import update_product_bytes

Make = Callable[[Any], Optimizer]
SHAPES = {"stem.weight": (9, 14), "stem.bias": (9,), "head.weight": (5, 3, 3), "head.scale": ()}


class Lion(Optimizer):
    """A user's elementwise optimizer with a Python number and rebinding instead of in-place writes."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None or not p.requires_grad:
                    continue
                state = self.state[p]
                if p not in self.state or not state:
                    state["count"] = 0
                    state["momentum"] = torch.zeros_like(p)
                state["count"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                direction = (state["momentum"] * first + p.grad * (1 - first)).sign()
                p.data = p.data - group["lr"] * direction / state["count"] ** 0.1
                state["momentum"] = state["momentum"] * second + p.grad * (1 - second)


class BornWithState(Optimizer):
    """Makes its states in __init__, as torch's Adagrad did, and fails without them."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"sum": torch.full_like(p, 0.5), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] += 1
                    state["sum"].addcmul_(p.grad, p.grad)
                    p.addcdiv_(p.grad, state["sum"].sqrt(), value=-group["lr"] / state["step"].item())


class TrustRatio(Optimizer):
    """A user's optimizer that needs whole parameters (the norm of one)."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))


class OnlyMatrices(Optimizer):
    """Treats matrices otherwise than vectors, so a flat piece of a matrix would be a mistake."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (2.0 if p.ndim > 1 else 1.0))


class GlobalNorm(Optimizer):
    """A user's joint optimizer: clips by the norm over everything, and counts its steps in the group."""

    def __init__(self, params: Any, lr: float = 0.0, *, counts: bool = False):
        super().__init__(params, {"lr": lr})
        self.counts = counts

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            if self.counts:
                group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / norm.clamp(min=1.0))


class Counting(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.steps)


class Noisy(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class LargeIsDifferent(Optimizer):
    """Like a low-bit optimizer that keeps small tensors in full precision: elementwise until 4,096 elements only."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = p.grad.abs().max() if p.numel() >= 4096 else 1.0
                    p.sub_(p.grad / scale, alpha=group["lr"])


CONFIGURATIONS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3)),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True),
    "Adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=0.1),
    "Adamax foreach": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adadelta foreach": lambda p: torch.optim.Adadelta(p, lr=1.0, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "NAdam foreach": lambda p: torch.optim.NAdam(p, lr=1e-2, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RAdam foreach": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, lr=1e-2, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=3, weight_decay=0.1),
    "ASGD foreach": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=3, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=True),
    "Muon": lambda p: torch.optim.Muon(p, lr=1e-2),
    "Lion": lambda p: Lion(p, lr=1e-2),
    "BornWithState": BornWithState,
    "TrustRatio": TrustRatio,
    "OnlyMatrices": OnlyMatrices,
}


def parameters(
    seed: int = 0, *, only_matrices: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
        if not only_matrices or len(shape) == 2
    }


def groups(named: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups with other settings, where there are enough parameters for two."""
    values = list(named.values())
    return [{"params": values[:1], "lr": 0.02}, *([{"params": values[1:]}] if values[1:] else [])]


def gradients(named: Mapping[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: (torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 1)).to(p.dtype)
        for name, p in named.items()
    }


def plain_step(optimizer: Optimizer, named: Mapping[str, nn.Parameter], given: Mapping[str, Tensor]) -> None:
    for name, gradient in given.items():
        named[name].grad = gradient.clone()
    optimizer.step()
    optimizer.zero_grad()


class Homes:
    """What the engine does, in small: states live here, flat, and are lent in pieces of a given length."""

    def __init__(self, optimizer: Optimizer, named: dict[str, nn.Parameter]) -> None:
        self.named = named
        self.driver = OptimizerDriver(optimizer, named)
        self.states: dict[str, dict[str, Any]] = {}
        self.zeroed: list[bool] = []
        callbacks = OwnerCallbacks(
            gather_state=lambda name: copy.deepcopy(self.states[name]),
            scatter_state=lambda name, state: self.states.update({name: copy.deepcopy(state)}),
            zero_grad=self.zeroed.append,
        )
        for name, state in self.driver.adopt(callbacks):
            self.states[name] = dict(state)

    def update(self, name: str, gradient: Tensor, piece_elements: int) -> None:
        weight, state = self.named[name].data, self.states[name]
        if self.driver.verdict(name).kind is UpdateKind.PER_PARAMETER:
            self.states[name] = self.driver.update(name, weight, gradient.clone(), state, first=True, last=True)
            return
        layout = {t.key: t for t in self.driver.state_layout(name)}
        numel = weight.numel()
        flat_weight, flat_gradient = weight.view(-1), gradient.clone().view(-1)
        new: dict[str, Any] = {}
        starts = list(range(0, numel, piece_elements))
        for start in starts:
            span = slice(start, min(start + piece_elements, numel))
            lent = {k: v.view(-1)[span] if layout[k].shape_kind == "like" else v for k, v in state.items()}
            got = self.driver.update(
                name, flat_weight[span], flat_gradient[span], lent, first=start == 0, last=start == starts[-1]
            )
            for key, value in got.items():
                if layout[key].shape_kind == "like":
                    new.setdefault(key, state.get(key, torch.empty(layout[key].shape, dtype=layout[key].dtype)))
                    new[key].view(-1)[span] = value
                else:
                    new[key] = value
        self.states[name] = new

    def step(self, given: Mapping[str, Tensor], piece_elements: int = 1 << 20) -> None:
        self.driver.begin_step()
        for name, gradient in reversed(list(given.items())):  # backward order: the last parameter is ready first
            self.update(name, gradient, piece_elements)
        self.driver.end_step()

    def close(self) -> None:
        for name in list(self.states):
            self.driver.restore(name, self.states.pop(name))
        self.driver.release()


def assert_same_bits(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        left, right = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
        assert torch.equal(left, right)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_bits(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b)
    else:
        assert one == other


def twin(make: Make, **how: Any) -> tuple[dict[str, nn.Parameter], Optimizer, dict[str, nn.Parameter], Optimizer]:
    plain, pieces = parameters(**how), parameters(**how)
    return plain, make(groups(plain)), pieces, make(groups(pieces))


@pytest.mark.parametrize("label", CONFIGURATIONS)
@pytest.mark.parametrize("piece_elements", [64, 1 << 20])
def test_steps_on_pieces_with_moving_rates_equal_plain_steps_bitwise(label: str, piece_elements: int) -> None:
    plain, plain_optimizer, named, optimizer = twin(CONFIGURATIONS[label], only_matrices=label == "Muon")
    plain_schedule = lr_scheduler.OneCycleLR(plain_optimizer, [0.05] * len(plain_optimizer.param_groups), total_steps=9,
                                             cycle_momentum=False)  # fmt: skip
    schedule = lr_scheduler.OneCycleLR(
        optimizer, [0.05] * len(optimizer.param_groups), total_steps=9, cycle_momentum=False
    )
    homes = Homes(optimizer, named)
    aligned = homes.driver.verdict("stem.weight").piece_multiple
    for step in range(8):
        given = gradients(plain, step)
        plain_step(plain_optimizer, plain, given)
        homes.step(given, max(aligned, piece_elements - (step * 7 if aligned == 1 else 0)))
        plain_schedule.step()
        schedule.step()
        assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})
    assert_same_bits(plain_optimizer.state_dict(), optimizer.state_dict())
    homes.close()
    assert_same_bits(plain_optimizer.state_dict(), optimizer.state_dict())
    plain_step(plain_optimizer, plain, gradients(plain, 9))
    plain_step(optimizer, named, gradients(named, 9))
    assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})


@pytest.mark.parametrize("label", ["AdamW", "SGD nesterov", "ASGD", "NAdam", "Adafactor", "Adagrad", "Lion"])
def test_states_adopted_midway_continue_bitwise_and_leave_the_users_object(label: str) -> None:
    plain, plain_optimizer, named, optimizer = twin(CONFIGURATIONS[label])
    for step in range(3):
        plain_step(plain_optimizer, plain, gradients(plain, step))
        plain_step(optimizer, named, gradients(named, step))
    own_state = optimizer.state
    homes = Homes(optimizer, named)
    assert len(own_state) == 0
    for step in range(3, 6):
        plain_step(plain_optimizer, plain, gradients(plain, step))
        homes.step(gradients(named, step), 64)
    homes.close()
    assert optimizer.state is own_state
    assert_same_bits(plain_optimizer.state_dict(), optimizer.state_dict())
    assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})


def test_adoption_gives_memory_back_parameter_by_parameter() -> None:
    named = parameters()
    optimizer = torch.optim.AdamW(named.values())
    plain_step(optimizer, named, gradients(named, 0))
    alive = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    seen = 0
    nothing = OwnerCallbacks(gather_state=lambda _: {}, scatter_state=lambda *_: None, zero_grad=lambda _: None)
    for _, state in OptimizerDriver(optimizer, named).adopt(nothing):
        seen += 1
        del state
        gc.collect()
        assert sum(ref() is not None for ref in alive) == len(alive) - seen
    assert seen == len(SHAPES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("label", ["AdamW", "AdamW foreach", "SGD momentum", "SGD fused", "ASGD", "Adafactor", "Lion"])
def test_weights_of_other_dtypes_keep_plain_bits(label: str, dtype: torch.dtype) -> None:
    plain, plain_optimizer, named, optimizer = twin(CONFIGURATIONS[label], dtype=dtype)
    homes = Homes(optimizer, named)
    for step in range(4):
        plain_step(plain_optimizer, plain, gradients(plain, step))
        homes.step(gradients(named, step), 64)
    homes.close()
    assert_same_bits(plain_optimizer.state_dict(), optimizer.state_dict())
    assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})


def test_sixteen_bit_weights_on_the_cpu_are_updated_whole_and_their_masters_in_pieces() -> None:
    named = parameters(dtype=torch.bfloat16)
    for label in ("AdamW", "Lion"):
        driver = OptimizerDriver(CONFIGURATIONS[label](groups(named)), named)
        assert driver.verdict("stem.weight").kind is UpdateKind.PER_PARAMETER
        assert "float32 master" in driver.verdict("stem.weight").reason
        assert driver.verdict("stem.weight", torch.float32).kind is UpdateKind.ELEMENTWISE
        assert driver.verdict("stem.weight", device=torch.device("cuda")).kind is UpdateKind.ELEMENTWISE
        master = driver.state_layout("stem.weight", torch.float32)
        assert {t.dtype for t in master if t.shape_kind == "like"} == {torch.float32}
        weight, gradient, states = torch.ones(9, 14), torch.full((9, 14), 0.5), {}
        driver.begin_step()
        states = driver.update("stem.weight", weight.view(-1), gradient.view(-1), states, first=True, last=True)
        driver.end_step()
        assert all(states[t.key].dtype is torch.float32 for t in master if t.shape_kind == "like")


@pytest.mark.parametrize("label", CONFIGURATIONS)
def test_layout_told_before_any_step_is_what_plain_torch_makes(label: str) -> None:
    named = parameters(only_matrices=label == "Muon")
    optimizer = CONFIGURATIONS[label](groups(named))
    fresh = OptimizerDriver(optimizer, named)
    told = {name: fresh.state_layout(name) for name in named}
    for step in range(3):
        plain_step(optimizer, named, gradients(named, step))
    for name, parameter in named.items():
        made = optimizer.state[parameter]
        assert {t.key for t in told[name]} == set(made)
        for tensor in told[name]:
            value = made[tensor.key]
            if isinstance(value, Tensor):
                assert (tensor.dtype, tensor.shape, tensor.numel) == (value.dtype, tuple(value.shape), value.numel())
                assert tensor.nbytes == value.numel() * value.element_size()
            else:
                assert (tensor.dtype, tensor.shape_kind, tensor.nbytes) == (None, "scalar", 0)
        assert OptimizerDriver(optimizer, named).state_layout(name) == told[name]


@pytest.mark.parametrize("label", CONFIGURATIONS)
def test_what_was_lent_for_a_piece_is_free_as_soon_as_it_is_updated(label: str) -> None:
    """A gradient on the device is a piece of one storage: whoever kept the piece would keep all of it until the next update."""
    named = parameters(only_matrices=label == "Muon")
    optimizer = CONFIGURATIONS[label](groups(named))
    driver = OptimizerDriver(optimizer, named)
    weight = torch.ones(9, 14)
    gradient = torch.full((9, 14), 0.5)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (weight, gradient)]
    driver.begin_step()
    born = copy.deepcopy(optimizer.state.get(named["stem.weight"], {}))
    driver.update("stem.weight", weight, gradient, born, first=True, last=True)
    del weight, gradient
    assert [storage() for storage in storages] == [None, None]


@pytest.mark.parametrize("label", CONFIGURATIONS)
def test_scratch_told_before_any_step_is_the_most_that_a_step_allocates(label: str) -> None:
    """The allocator under torch, which knows nothing of operations, against the count of what operations make on a small tensor."""
    weight = nn.Parameter(torch.ones(300, 1000))
    optimizer = CONFIGURATIONS[label]([{"params": [weight]}])
    driver = OptimizerDriver(optimizer, {"weight": weight})
    told = driver.update_cost("weight").scratch_of(weight.numel())
    allocator = install()
    states: dict[str, Any] = copy.deepcopy(optimizer.state.get(weight, {}))
    most = 0
    for _ in range(3):
        driver.begin_step()
        lent, gradient = weight.detach().clone(), torch.full_like(weight, 0.5)
        before = allocator.stats().live_bytes
        allocator.reset_peak()
        states = driver.update("weight", lent, gradient, states, first=True, last=True)
        stats = allocator.stats()
        most = max(most, stats.peak_bytes - max(before, stats.live_bytes))
        driver.end_step()
    assert most <= told * 1.01 + 4096
    # Muon's squares of the shorter side weigh more in a small square, and its products' memory is bounded, not fitted.
    bounded = update_product_bytes(weight.numel(), torch.bfloat16) if label == "Muon" else 0
    assert told <= most * (1.3 if label == "Muon" else 1.1) + bounded + weight.nbytes // 64


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor, Lion, TrustRatio])
def test_layout_of_a_huge_parameter_allocates_nothing_of_its_size(make: Any) -> None:
    huge = nn.Parameter(torch.zeros(1).expand(1 << 20, 1 << 20))
    layout = OptimizerDriver(make([huge]), {"huge": huge}).state_layout("huge")
    assert all(t.numel in (1, 1 << 20, 1 << 40) for t in layout)


def test_each_setting_of_a_group_decides_its_own_states() -> None:
    named = parameters()
    first, *others = named.values()
    optimizer = torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)
    driver = OptimizerDriver(optimizer, named)
    assert [t.key for t in driver.state_layout("stem.weight")] == ["momentum_buffer"]
    assert driver.state_layout("stem.bias") == ()


@pytest.mark.parametrize(
    "label", [c for c in CONFIGURATIONS if type(CONFIGURATIONS[c]([nn.Parameter(torch.ones(2, 2))])) in known_classes()]
)
def test_the_table_of_known_classes_agrees_with_the_detector(label: str) -> None:
    named = parameters(only_matrices=label == "Muon")
    optimizer = CONFIGURATIONS[label](groups(named))
    entries = list(validated_entries(optimizer, named).values())
    for index, group in enumerate(optimizer.param_groups):
        table = known_verdict(type(optimizer), group)
        assert table is not None
        found = detect(optimizer, entries, piece_multiple=table.piece_multiple)[index]
        assert (found.kind, found.piece_multiple) == (
            table.kind,
            table.piece_multiple,
        )


def test_every_class_of_the_table_is_tried_here() -> None:
    tried = {type(make([nn.Parameter(torch.zeros(2, 2))])) for make in CONFIGURATIONS.values()}
    assert set(known_classes()) <= tried


@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (Lion, UpdateKind.ELEMENTWISE, "same bits"),
        (BornWithState, UpdateKind.ELEMENTWISE, "same bits"),
        (TrustRatio, UpdateKind.PER_PARAMETER, "other bits"),
        (OnlyMatrices, UpdateKind.PER_PARAMETER, "other bits"),
        (GlobalNorm, UpdateKind.JOINT, "when others are present"),
        (lambda p: GlobalNorm(p, counts=True), UpdateKind.JOINT, "'k' of its param group"),
        (Counting, UpdateKind.JOINT, "attribute 'steps'"),
        (Noisy, UpdateKind.JOINT, "random numbers"),
    ],
)
def test_unknown_classes_are_found_out(make: Make, kind: UpdateKind, reason: str) -> None:
    named = {name: p for name, p in parameters().items() if "weight" in name}
    optimizer = make(list(named.values()))
    random_before, copies = torch.get_rng_state(), {k: v.detach().clone() for k, v in named.items()}
    verdict = OptimizerDriver(optimizer, named).verdict("stem.weight")
    assert verdict.kind is kind
    assert reason in verdict.reason
    assert torch.equal(torch.get_rng_state(), random_before)
    assert_same_bits(copies, {k: v.data for k, v in named.items()})
    assert_same_bits(list(optimizer.state.values()), list(make(list(named.values())).state.values()))
    assert set(optimizer.param_groups[0]) == set(make(list(named.values())).param_groups[0])


def test_a_class_that_changes_its_ways_for_large_tensors_is_found_out() -> None:
    large = {"w": nn.Parameter(torch.zeros(96, 96))}
    assert OptimizerDriver(LargeIsDifferent(large.values()), large).verdict("w").kind is UpdateKind.PER_PARAMETER


def test_a_subclass_is_tried_out_instead_of_believed() -> None:
    class Clipping(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(p.grad.norm().clamp(min=1.0))
            super().step()

    class Renamed(torch.optim.AdamW):
        pass

    named = parameters()
    assert (
        OptimizerDriver(Clipping(named.values(), lr=0.1), named).verdict("stem.bias").kind is UpdateKind.PER_PARAMETER
    )
    assert OptimizerDriver(Renamed(named.values()), named).verdict("stem.bias").kind is UpdateKind.ELEMENTWISE


@pytest.mark.parametrize("make", [lambda p: GlobalNorm(p, lr=0.1, counts=True), Counting])
def test_a_joint_optimizer_refuses_pieces(make: Make) -> None:
    plain, _, named, optimizer = twin(make)
    driver = OptimizerDriver(optimizer, named)
    given = gradients(plain, 0)
    driver.begin_step()
    assert driver.verdict("stem.bias").kind is UpdateKind.JOINT
    with pytest.raises(AssertionError, match="cannot be updated alone"):
        driver.update("stem.bias", named["stem.bias"].data, given["stem.bias"], {}, first=True, last=True)


def refusals() -> Iterator[tuple[str, Callable[[dict[str, nn.Parameter]], Any], type[Exception], str]]:
    class NeedsClosure(Lion):
        def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
            closure()

    class Wrapper(Lion):
        def __init__(self, inner: Optimizer) -> None:
            super().__init__(inner.param_groups[0]["params"])
            self.inner = inner

    class HoldsModel(Lion):
        def __init__(self, params: list[nn.Parameter]) -> None:
            super().__init__(params)
            self.mine = params

    class Broken(Lion):
        def step(self, closure: Any = None) -> Any:
            raise KeyError("exp_avg")

    def doubled(named: dict[str, nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(named.values(), lr=0.1)
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [named["stem.bias"]]})
        return optimizer

    def patched(named: dict[str, nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(named.values(), lr=0.1)
        optimizer.step = lambda *_: None  # type: ignore[method-assign]
        return optimizer

    yield "no optimizer", lambda named: list(named.values()), UsageError, "not a torch.optim.Optimizer"
    yield (
        "foreign",
        lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1),
        UsageError,
        "not a parameter of the",
    )
    yield "doubled", doubled, UsageError, "'stem.bias' appears twice"
    yield "LBFGS", lambda named: torch.optim.LBFGS(named.values()), UnsupportedError, "closure"
    yield "closure", lambda named: NeedsClosure(named.values()), UnsupportedError, "needs 'closure'"
    yield "sparse", lambda named: torch.optim.SparseAdam(list(named.values())), UnsupportedError, "sparse=False"
    yield (
        "capturable",
        lambda named: torch.optim.AdamW(named.values(), capturable=True),
        UnsupportedError,
        "capturable=False",
    )
    yield (
        "differentiable",
        lambda named: torch.optim.AdamW(named.values(), differentiable=True),
        UnsupportedError,
        "autograd",
    )
    yield "replaced step", patched, UnsupportedError, "was replaced on this object"
    yield "wrapper", lambda named: Wrapper(torch.optim.SGD(named.values(), lr=0.1)), UnsupportedError, "inner optimizer"
    yield "holds model", lambda named: HoldsModel(list(named.values())), UnsupportedError, "its own reference"
    yield "broken", lambda named: Broken(named.values()), UnsupportedError, "could not try it out.*KeyError"


@pytest.mark.parametrize(("what", "make", "error", "message"), list(refusals()))
def test_what_cannot_be_run_on_pieces_is_refused_with_its_reason(
    what: str, make: Callable[[dict[str, nn.Parameter]], Any], error: type[Exception], message: str
) -> None:
    named = parameters()
    with pytest.raises(error, match=message):
        OptimizerDriver(make(named), named)


def test_complex_weights_are_refused() -> None:
    named = {"w": nn.Parameter(torch.zeros(3, dtype=torch.complex64))}
    with pytest.raises(UnsupportedError, match="'w' is complex"):
        OptimizerDriver(torch.optim.SGD(named.values(), lr=0.1), named)


def test_misuse_of_pieces_is_told_apart() -> None:
    named = parameters()
    driver = OptimizerDriver(torch.optim.AdamW(named.values()), named)
    weight, gradient = named["stem.weight"].data.view(-1), torch.ones(126)

    def update(span: slice, state: dict[str, Any], *, first: bool, last: bool) -> dict[str, Any]:
        return driver.update("stem.weight", weight[span], gradient[span], state, first=first, last=last)

    with pytest.raises(AssertionError, match="inside of a step"):
        update(slice(0, 64), {}, first=True, last=False)
    with pytest.raises(UsageError, match="end_step without begin_step"):
        driver.end_step()
    driver.begin_step()
    with pytest.raises(UsageError, match="neither ended"):
        driver.begin_step()
    with pytest.raises(UsageError, match="no parameter called 'tail'"):
        driver.update("tail", weight, gradient, {}, first=True, last=True)
    with pytest.raises(UsageError, match="before the first one"):
        update(slice(0, 64), {}, first=False, last=False)
    new = update(slice(0, 64), {}, first=True, last=False)
    with pytest.raises(UsageError, match="second first piece"):
        update(slice(0, 64), {}, first=True, last=False)
    with pytest.raises(UsageError, match=r"scalar states of 'stem.weight' changed between two pieces"):
        update(slice(64, 126), new, first=False, last=True)
    with pytest.raises(UsageError, match=r"last piece of 'stem.weight' was never updated"):
        driver.end_step()
    update(slice(64, 126), {}, first=False, last=True)
    with pytest.raises(UsageError, match="already updated"):
        update(slice(0, 64), {}, first=True, last=False)
    with pytest.raises(AssertionError, match="like its weight"):
        driver.update("stem.bias", named["stem.bias"].data, torch.ones(9).double(), {}, first=True, last=True)
    driver.abandon_step()
    driver.begin_step()
    driver.end_step()


def test_fused_pieces_must_be_aligned_and_whole_parameters_whole() -> None:
    named = parameters()
    driver = OptimizerDriver(torch.optim.SGD(named.values(), lr=0.1, fused=True), named)
    driver.begin_step()
    with pytest.raises(UsageError, match="multiple of 64"):
        driver.update(
            "stem.weight", named["stem.weight"].data.view(-1)[:63], torch.ones(63), {}, first=True, last=False
        )
    whole = OptimizerDriver(torch.optim.Adafactor(named.values()), named)
    whole.begin_step()
    with pytest.raises(UsageError, match="must be updated whole"):
        whole.update("stem.weight", named["stem.weight"].data[:3], torch.ones(3, 14), {}, first=True, last=False)
    with pytest.raises(UsageError, match="needs it whole"):
        whole.update("stem.weight", named["stem.weight"].data.view(-1), torch.ones(126), {}, first=True, last=True)


def test_hooks_fire_once_a_step_in_torchs_order_and_see_the_users_object() -> None:
    named = parameters()
    optimizer = torch.optim.AdamW(named.values(), lr=0.5)
    homes, calls = Homes(optimizer, named), []

    def told(label: str) -> Callable[..., None]:
        return lambda seen, args, kwargs: calls.append((label, seen is optimizer, args == (optimizer,), kwargs))

    handles = [
        optimizer.register_step_post_hook(told("post")),
        register_optimizer_step_post_hook(told("global post")),
        optimizer.register_step_pre_hook(told("pre")),
        register_optimizer_step_pre_hook(told("global pre")),
    ]
    try:
        homes.step(gradients(named, 0), 10)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [(label, True, True, {}) for label in ("global pre", "pre", "post", "global post")]
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 1.0), {}))
    with pytest.raises(UnsupportedError, match="returned new arguments"):
        homes.driver.begin_step()


def test_a_rate_set_by_a_pre_hook_counts_for_this_step() -> None:
    plain, plain_optimizer, named, optimizer = twin(CONFIGURATIONS["SGD"])
    homes = Homes(optimizer, named)
    for each in (plain_optimizer, optimizer):
        each.register_step_pre_hook(lambda opt, args, kwargs: opt.param_groups[0].update(lr=7.0))
    plain_step(plain_optimizer, plain, gradients(plain, 0))
    homes.step(gradients(named, 0))
    assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})


def test_schedulers_made_before_or_while_adopted_never_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for early in (True, False):
            named = parameters()
            optimizer = torch.optim.SGD(named.values(), lr=0.1)
            schedule = lr_scheduler.StepLR(optimizer, 1) if early else None
            homes = Homes(optimizer, named)
            schedule = schedule or lr_scheduler.StepLR(optimizer, 1)
            homes.step(gradients(named, 0))
            schedule.step()
            late = lr_scheduler.StepLR(optimizer, 1)
            homes.close()
            plain_step(optimizer, named, gradients(named, 1))
            late.step()
            schedule.step()
            assert vars(optimizer)["_opt_called"]


def test_the_adopted_object_refuses_what_would_be_wrong_and_says_why() -> None:
    named = parameters()
    optimizer = torch.optim.AdamW(named.values())
    plain_step(optimizer, named, gradients(named, 0))
    kind, before = type(optimizer), dict(vars(optimizer))
    homes = Homes(optimizer, named)
    assert isinstance(optimizer, kind)
    with pytest.raises(UsageError, match=r"job.step"):
        optimizer.step()
    with pytest.raises(UnsupportedError, match="Close the job"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UsageError, match=r"'stem.bias' already"):
        optimizer.add_param_group({"params": named["stem.bias"]})
    for read in (lambda s: s[named["stem.bias"]], lambda s: s.items(), list, lambda s: named["stem.bias"] in s):
        with pytest.raises(AwayError, match="state_dict"):
            read(optimizer.state)
    assert len(optimizer.state) == len(named)
    named["stem.bias"].grad = torch.ones(9)
    optimizer.zero_grad()
    assert homes.zeroed == [True]
    assert named["stem.bias"].grad is None
    with pytest.raises(UsageError, match="already adopted"):
        homes.driver.adopt(OwnerCallbacks(gather_state=dict, scatter_state=lambda *_: None, zero_grad=lambda _: None))  # type: ignore[arg-type]
    homes.close()
    homes.driver.release()
    assert vars(optimizer).keys() == before.keys()
    assert optimizer.state is before["state"]


def test_state_dicts_pickles_and_copies_hold_everything_while_adopted() -> None:
    plain, plain_optimizer, named, optimizer = twin(CONFIGURATIONS["AdamW"])
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda _, __: calls.append("post"))
    homes = Homes(optimizer, named)
    assert optimizer.state_dict()["state"] == {}
    plain_step(plain_optimizer, plain, gradients(plain, 0))
    homes.step(gradients(named, 0), 30)
    assert_same_bits(plain_optimizer.state_dict(), optimizer.state_dict())
    assert calls == ["pre", "post"] * 2
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(clone) is torch.optim.AdamW
        assert_same_bits(plain_optimizer.state_dict(), clone.state_dict())
        clone.step()  # an ordinary optimizer over copies, not an intercepted one


def test_loading_a_state_dict_while_adopted_continues_from_it_bitwise() -> None:
    plain, plain_optimizer, named, optimizer = twin(CONFIGURATIONS["Adam amsgrad"])
    for step in range(3):
        plain_step(plain_optimizer, plain, gradients(plain, step))
    plain_optimizer.param_groups[0]["lr"] = 0.7
    homes = Homes(optimizer, named)
    homes.step(gradients(named, 9))
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    for name, parameter in named.items():
        parameter.data.copy_(plain[name].data)
    plain_step(plain_optimizer, plain, gradients(plain, 3))
    homes.step(gradients(named, 3), 64)
    assert_same_bits(plain_optimizer.state_dict(), optimizer.state_dict())
    assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})


def test_a_state_dict_of_other_settings_is_refused_and_changes_nothing() -> None:
    named = parameters()
    optimizer = torch.optim.Adam(named.values())
    homes = Homes(optimizer, named)
    homes.step(gradients(named, 0))
    before = optimizer.state_dict()
    other = parameters()
    strange = torch.optim.Adam(other.values(), amsgrad=True)
    plain_step(strange, other, gradients(other, 0))
    with pytest.raises(UsageError, match="amsgrad"):
        optimizer.load_state_dict(strange.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert_same_bits(before, optimizer.state_dict())
    homes.step(gradients(named, 1))


def test_groups_changed_by_hand_are_noticed_before_anything_is_updated() -> None:
    named = parameters()
    optimizer = torch.optim.SGD(groups(named), lr=0.1)
    homes = Homes(optimizer, named)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(UsageError, match="no momentum"):
        homes.driver.begin_step()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.param_groups[1]["params"].pop()
    with pytest.raises(UsageError, match="changed by hand"):
        homes.driver.begin_step()


def test_tied_parameters_answer_to_both_names_and_update_once() -> None:
    shared = nn.Parameter(torch.zeros(4))
    driver = OptimizerDriver(torch.optim.SGD([shared], lr=1.0), {"embed": shared, "head": shared})
    assert driver.names == ("embed",)
    driver.begin_step()
    driver.update("head", shared.data, torch.ones(4), {}, first=True, last=True)
    with pytest.raises(UsageError, match="already updated"):
        driver.update("embed", shared.data, torch.ones(4), {}, first=True, last=True)
    assert shared.tolist() == [-1.0] * 4


def test_attributes_on_parameters_and_names_of_groups_reach_the_users_class() -> None:
    class Selective(Lion):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for name, p in zip(group["param_names"], group["params"], strict=True):
                    if p.grad is not None:
                        p.sub_(p.grad * getattr(p, "speed", 1.0) * len(name))

    def build() -> tuple[dict[str, nn.Parameter], Optimizer]:
        named = parameters()
        named["stem.bias"].speed = 3.0  # type: ignore[attr-defined]
        return named, Selective(list(named.items()))

    (plain, plain_optimizer), (named, optimizer) = build(), build()
    plain_step(plain_optimizer, plain, gradients(plain, 0))
    Homes(optimizer, named).step(gradients(named, 0), 17)
    assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})


def test_updates_from_a_worker_thread_leave_autograd_of_the_main_thread_alone() -> None:
    plain, plain_optimizer, named, optimizer = twin(CONFIGURATIONS["AdamW"])
    homes, failures = Homes(optimizer, named), []

    def work() -> None:
        try:
            for step in range(20):
                homes.step(gradients(named, step), 40)
        except Exception as error:  # noqa: BLE001  (told by the main thread)
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        x = torch.randn(8, 8, requires_grad=True)
        (x @ x).sum().backward()
        assert torch.is_grad_enabled()
        assert x.grad is not None
    worker.join()
    assert not failures
    for step in range(20):
        plain_step(plain_optimizer, plain, gradients(plain, step))
    assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})


def test_updates_inside_the_users_autocast_and_grad_mode_keep_plain_bits() -> None:
    plain, plain_optimizer, named, optimizer = twin(CONFIGURATIONS["Muon"], only_matrices=True)
    homes = Homes(optimizer, named)
    plain_step(plain_optimizer, plain, gradients(plain, 0))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        homes.step(gradients(named, 0))
    assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("label", [c for c in CONFIGURATIONS if c not in ("Muon", "AdamW tensor lr")])
def test_pieces_on_cuda_equal_plain_multi_tensor_steps_bitwise(label: str) -> None:
    def build() -> tuple[nn.Parameter, nn.Parameter, Optimizer]:
        generator = torch.Generator().manual_seed(1)
        first = nn.Parameter(torch.randn(700, 301, generator=generator).cuda())
        second = nn.Parameter(torch.randn(5000, generator=generator).cuda())
        return first, second, CONFIGURATIONS[label]([first, second])

    (a, b, plain_optimizer), (c, d, optimizer) = build(), build()
    named, plain = {"c": c, "d": d}, {"c": a, "d": b}
    driver, states = OptimizerDriver(optimizer, named), {"c": {}, "d": {}}
    for step in range(3):
        given = {
            k: g.cuda()
            for k, g in gradients({k: nn.Parameter(p.detach().cpu()) for k, p in plain.items()}, step).items()
        }
        plain_step(plain_optimizer, plain, given)
        driver.begin_step()
        for name, p in named.items():
            layout, whole = {t.key: t for t in driver.state_layout(name)}, driver.verdict(name).kind
            new: dict[str, Any] = {}
            size = p.numel() if whole is UpdateKind.PER_PARAMETER else 64 * 999
            for start in range(0, p.numel(), size):
                span, last = slice(start, start + size), start + size >= p.numel()
                if whole is UpdateKind.PER_PARAMETER:
                    new = driver.update(name, p.data, given[name].clone(), states[name], first=True, last=True)
                    continue
                lent = {k: v.view(-1)[span] if layout[k].shape_kind == "like" else v for k, v in states[name].items()}
                got = driver.update(
                    name, p.data.view(-1)[span], given[name].clone().view(-1)[span], lent, first=start == 0, last=last
                )
                for k, v in got.items():
                    if layout[k].shape_kind == "like":
                        new.setdefault(k, torch.empty(p.shape, dtype=v.dtype, device="cuda")).view(-1)[span] = v
                    else:
                        new[k] = v
            states[name] = new
        driver.end_step()
        assert_same_bits({k: v.data for k, v in plain.items()}, {k: v.data for k, v in named.items()})
    for name, p in plain.items():
        assert_same_bits(dict(plain_optimizer.state[p]), states[name])


def test_torchs_choice_of_kernels_is_asked_once_for_each_kind_of_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Parameter):
        pass

    parameters = [
        *(nn.Parameter(torch.zeros(3)) for _ in range(50)),
        *(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(3)),
        Own(torch.zeros(3)),
    ]
    for number, parameter in enumerate(parameters[1:40]):
        guard.mark_away(parameter, f"w{number}", "block")
    asked: list[list[tuple[Any, ...]]] = []

    def decide(given: list[Tensor], differentiable: bool, use_fused: bool) -> tuple[bool, bool]:
        asked.append([(type(p), p.device.type, p.dtype) for p in given])
        return False, not any(type(p) is Own for p in given)

    monkeypatch.setattr(shadow, "_default_to_fused_or_foreach", decide)
    found = shadow.snapshot_groups(torch.optim.AdamW([{"params": parameters[:-1]}, {"params": parameters[-1:]}]))
    # Those that are away count as what they are while they are here.
    assert [set(kinds) for kinds in asked] == [
        {(nn.Parameter, "cpu", torch.float32), (nn.Parameter, "cpu", torch.bfloat16)},
        {(Own, "cpu", torch.float32)},
    ]
    assert max(map(len, asked)) <= 3
    assert [group["foreach"] for group in found] == [None, False]


@pytest.mark.parametrize("is_held_in_a_list", [False, True])
def test_an_optimizer_around_another_is_refused_with_the_place_of_the_inner_one(*, is_held_in_a_list: bool) -> None:
    class Around(torch.optim.SGD):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, lr=0.1)
            self.inner = [inner] if is_held_in_a_list else inner

    model = torch.nn.Linear(2, 2)
    place = r"AdamW, in optimizer\.inner\)" if is_held_in_a_list else r"AdamW, optimizer\.inner\)"
    with pytest.raises(UnsupportedError, match=place):
        memfit.fit(model, Around(torch.optim.AdamW(model.parameters())), lambda m, b: m(b).sum(), torch.zeros(2, 2))
