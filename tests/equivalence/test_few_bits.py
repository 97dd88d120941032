"""Weights and optimizers in few bits that other libraries make: run as they are, or refused in words.

Stand-ins have the structure of what bitsandbytes 0.50 and torchao 0.18 make; where the libraries are installed, their own classes are tried too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

import memfit
from equivalence.compare import JobLike, assert_equal_training
from equivalence.plain import adamw
from equivalence.zoo import Batch, Case
from memfit.core.errors import MemfitWarning, UnsupportedError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier

AWAY = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
PLANS = {"resident": Plan(), "disk": Plan(blocks={f"layers.{i}": AWAY for i in range(3)})}
WIDTH = 64


class Scales:
    """What a packed weight's bytes mean, as bitsandbytes' `QuantState`."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        self.is_repacked = False


class Packed(nn.Parameter):
    """Bytes with their meaning beside them, as bitsandbytes' `Params4bit`."""

    state: Scales


class PackedLinear(nn.Module):
    """Decodes its frozen weight for each product. `repacks`: it lays the bytes out otherwise in its next forward."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8)
        self.weight: Packed = torch.Tensor._make_subclass(Packed, codes, False)  # type: ignore[assignment]
        self.weight.state = Scales(torch.rand(WIDTH, 1) / 1000)
        self.repacks = False

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.state
        if self.repacks:
            self.weight.data = self.weight.data.t().contiguous()
            state.is_repacked = True
        codes = self.weight.t() if state.is_repacked else self.weight
        return functional.linear(x, (codes.float() - 127) * state.scale)


class Adapted(nn.Module):
    """A frozen layer and what is learned beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(nn.Module):
    """Three adapted layers and a head."""

    def __init__(self, base: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adapted(base()) for _ in range(3)])
        for layer in self.layers:
            layer.get_submodule("base").requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


def batch_of(step: int) -> Batch:
    return {"x": torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))}


def case_of(base: Callable[[], nn.Module] = PackedLinear) -> Case:
    torch.manual_seed(3)
    return Case(model=Net(base), loss=loss_of, batch=batch_of, untouched=None)


def _fit(case: Case, plan: Plan) -> memfit.Job:
    return memfit.fit(case.model, adamw()(case.model), case.loss, case.batch(0), plan=plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_frozen_base_whose_bytes_have_a_meaning_beside_them_trains_adapters_as_plainly(plan: Plan) -> None:
    def make(case: Case, optimizer: torch.optim.Optimizer) -> JobLike:
        return memfit.fit(case.model, optimizer, case.loss, case.batch(0), plan=plan)

    assert_equal_training(case_of, adamw(), make, has_gradients=False)


def _step(job: memfit.Job, _: nn.Module) -> object:
    return job.step(batch_of(1))


def _evaluate(job: memfit.Job, _: nn.Module) -> object:
    return job.evaluate(batch_of(1))


def _infer(job: memfit.Job, model: nn.Module) -> object:
    with job.inference():
        return model(batch_of(1)["x"])


@pytest.mark.parametrize("run", [_step, _evaluate, _infer])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_weight_that_is_laid_out_otherwise_in_a_visit_is_an_error_and_taken_back(
    plan: Plan, run: Callable[[memfit.Job, nn.Module], object]
) -> None:
    case, plain = case_of(), case_of()
    optimizer = adamw()(plain.model)
    job = _fit(case, plan)
    layers = [layer.get_submodule("base") for layer in case.model.get_submodule("layers").children()]
    for layer in layers:
        layer.repacks = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"'layers\.\d\.base\.weight' was given other memory.*taken back"):
        run(job, case.model)
    for layer in layers:
        layer.repacks = False  # type: ignore[assignment]
    undone = run is not _step or plan is PLANS["disk"]
    if undone:  # else the step was torn: updates are made in place
        assert job.step(batch_of(1)).loss == case_loss(plain, optimizer, 1)
    job.close()
    for (name, ours), theirs in zip(case.model.named_parameters(), plain.model.parameters(), strict=True):
        if undone or "base" in name:
            assert torch.equal(ours, theirs), name
    assert not any(layer.weight.state.is_repacked for layer in layers)  # type: ignore[union-attr]


def case_loss(case: Case, optimizer: torch.optim.Optimizer, step: int) -> float:
    """A plain step."""
    optimizer.zero_grad()
    loss = case.loss(case.model, case.batch(step))
    loss.backward()
    optimizer.step()
    return loss.item()


def test_an_attribute_that_alone_is_changed_is_an_error() -> None:
    case = case_of()
    with _fit(case, PLANS["disk"]) as job:
        state: Any = case.model.get_parameter("layers.1.base.weight").state  # type: ignore[attr-defined]
        scale = state.scale
        state.scale = scale * 2
        with pytest.raises(UnsupportedError, match="attribute 'scale' changed"):
            job.step(batch_of(1))
        assert state.scale is scale
        job.step(batch_of(1))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_other_memory_for_a_weight_between_steps_is_never_lost_without_a_word(plan: Plan) -> None:
    case = case_of()
    job = _fit(case, plan)
    weight = case.model.get_parameter("head.weight")
    with pytest.raises(UnsupportedError, match=r"'head\.weight' was given other memory"), job.weights():
        weight.data = torch.zeros_like(weight)
    weight.data = torch.zeros_like(weight)
    with pytest.warns(MemfitWarning, match=r"job is closed: the weight 'head\.weight' was given other memory"):
        job.close()


class _Inner(Tensor):
    """A tensor that is made of others, as torchao's are."""

    parts: Tensor

    @staticmethod
    def __new__(cls, parts: Tensor) -> _Inner:  # noqa: PYI034  (a static method)
        made = torch.Tensor._make_wrapper_subclass(cls, parts.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.parts = parts
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["parts"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        plain = [a.parts.float() if isinstance(a, _Inner) else a for a in args]
        if func is torch.ops.aten.detach.default:
            return _Inner(args[0].parts)
        return func(*plain, **(kwargs or {}))


def test_a_weight_that_is_made_of_other_tensors_is_refused_with_its_name() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = _Inner(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8))
            self.weight = nn.Parameter(codes, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight)

    case = case_of(Wrapped)
    case.loss(case.model, batch_of(0))
    with pytest.raises(UnsupportedError, match=r"'layers\.0\.base\.weight' is a _Inner.*values lie in other tensors"):
        _fit(case, PLANS["resident"])
    with pytest.raises(UnsupportedError, match=r"'layers\.0\.base\.weight' is a _Inner"):
        memfit.profile(case.model, adamw()(case.model), case.loss, batch_of(0))


def test_a_weight_that_has_a_second_reference_to_its_bytes_is_refused_with_its_name() -> None:
    class Twice(PackedLinear):
        def __init__(self) -> None:
            super().__init__()
            self.weight.CB = self.weight.data  # type: ignore[attr-defined]

    with pytest.raises(UnsupportedError, match=r"'layers\.0\.base\.weight' is a Packed.*second reference.*'CB'"):
        _fit(case_of(Twice), PLANS["resident"])


# Optimizers


@pytest.mark.parametrize("module", ["bitsandbytes.optim.adamw", "torchao.optim.adam"])
def test_an_optimizer_of_few_bits_is_refused_with_what_takes_its_place(module: str) -> None:
    foreign = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": module})
    own = type("Mine", (foreign,), {})
    case = case_of()
    for kind in (foreign, own):
        with pytest.raises(
            UnsupportedError, match=r"of (bitsandbytes|torchao) keeps its states.*allow=\{'int8-state'\}"
        ):
            memfit.fit(case.model, kind(case.model.get_submodule("head").parameters()), case.loss, batch_of(0))


class CompiledSgd(torch.optim.Optimizer):
    """A class of the user's whose step is compiled, which cannot be counted operation by operation."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # As a compiled function does where operations are dispatched to Python.
                    if _get_current_dispatch_mode() is not None:
                        raise RuntimeError("torch.compile found no compiled frames")
                    parameter.sub_(parameter.grad * group["lr"])


def test_an_optimizer_whose_step_is_compiled_runs() -> None:
    def make(case: Case, optimizer: torch.optim.Optimizer) -> JobLike:
        return memfit.fit(case.model, optimizer, case.loss, case.batch(0), plan=PLANS["disk"])

    assert_equal_training(
        case_of, lambda model: CompiledSgd(p for p in model.parameters() if p.requires_grad), make, has_gradients=False
    )


# The libraries themselves

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_four_bit_layers_of_bitsandbytes_train_adapters_as_plainly(plan: Plan, *, is_nested: bool) -> None:
    import bitsandbytes  # type: ignore[import-not-found]

    def layer() -> nn.Module:
        ordinary = nn.Linear(WIDTH, WIDTH)
        made = bitsandbytes.nn.Linear4bit(
            WIDTH, WIDTH, quant_type="nf4", compute_dtype=torch.float32, compress_statistics=is_nested
        )
        made.load_state_dict(ordinary.state_dict())
        return made.to("cpu")

    def make(case: Case, optimizer: torch.optim.Optimizer) -> JobLike:
        return memfit.fit(case.model, optimizer, case.loss, case.batch(0), plan=plan)

    assert_equal_training(lambda: case_of(layer), adamw(), make, has_gradients=False)


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore")
def test_eight_bit_layers_and_optimizers_of_bitsandbytes_are_refused_in_words() -> None:
    import bitsandbytes  # type: ignore[import-not-found]

    def layer() -> nn.Module:
        made = bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
        made.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict())
        return made.to("cpu")

    with pytest.raises(UnsupportedError, match="Int8Params of bitsandbytes, which keeps a second reference"):
        _fit(case_of(layer), PLANS["resident"])
    case = case_of(lambda: nn.Linear(WIDTH, WIDTH))
    optimizer = bitsandbytes.optim.AdamW8bit([p for p in case.model.parameters() if p.requires_grad])
    with pytest.raises(UnsupportedError, match="int8-state"):
        memfit.fit(case.model, optimizer, case.loss, batch_of(0))


@needs_torchao
@pytest.mark.filterwarnings("ignore")
def test_layers_and_optimizers_of_torchao_are_refused_in_words() -> None:
    import torchao.optim  # type: ignore[import-not-found]
    import torchao.quantization as quantization  # type: ignore[import-not-found]

    case = case_of(lambda: nn.Linear(WIDTH, WIDTH))
    quantization.quantize_(case.model.get_submodule("layers.1.base"), quantization.Int8WeightOnlyConfig())
    with pytest.raises(UnsupportedError, match=r"'layers\.1\.base\.weight' is a Int8Tensor of torchao"):
        _fit(case, PLANS["resident"])
    case = case_of(lambda: nn.Linear(WIDTH, WIDTH))
    optimizer = torchao.optim.AdamW8bit([p for p in case.model.parameters() if p.requires_grad])
    with pytest.raises(UnsupportedError, match="int8-state"):
        memfit.fit(case.model, optimizer, case.loss, batch_of(0))
