"""Amounts of work of a traced step: bytes, elements and products by arithmetic on shapes, apart from the code that classes operations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memfit
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import CallProfile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind, summed
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.step.work_amounts import replayed_work, update_work

ROWS, WIDTH, HIDDEN = 32, 48, 96


class Layer(nn.Module):
    """A linear layer, a normalisation, an activation function, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.norm(self.up(x))))


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).sum()


def traced(model: nn.Module, x: torch.Tensor) -> Any:
    return memfit.profile(model, torch.optim.SGD(model.parameters(), lr=0.1), squared, x)


def trace_of_layers(count: int = 3) -> TraceProfile:
    model = nn.Sequential(*(Layer() for _ in range(count)))
    return traced(model, torch.randn(ROWS, WIDTH)).traces[ROWS]


def layer_of(trace: TraceProfile) -> CallProfile:
    return next(call for call in trace.calls if call.site == "1")


def test_a_layer_counts_products_by_their_smallest_size_and_functions_by_element() -> None:
    layer = layer_of(trace_of_layers())
    forward, backward = dict(layer.forward_work), dict(layer.backward_work)
    # Both products have 32 rows, their smallest size; backward makes two of each.
    products = 2 * (2 * ROWS * WIDTH * HIDDEN)
    assert forward[WorkKind.PRODUCTS_16] == products == layer.forward_flops
    assert backward[WorkKind.PRODUCTS_16] == 2 * products == layer.backward_flops
    assert not {
        WorkKind.PRODUCTS_256,
        WorkKind.PRODUCTS_128,
        WorkKind.PRODUCTS_64,
        WorkKind.PRODUCTS_4,
        WorkKind.PRODUCTS_1,
    } & {
        *forward,
        *backward,
    }
    assert forward[WorkKind.NORMALIZED] == forward[WorkKind.FUNCTIONS] == ROWS * HIDDEN
    assert backward[WorkKind.NORMALIZED_BACKWARD] == ROWS * HIDDEN
    # A GELU's backward takes twice its forward.
    assert backward[WorkKind.FUNCTIONS] == 2 * ROWS * HIDDEN
    # Gradients of biases are sums over rows, of as many bytes as they read and write.
    assert backward[WorkKind.REDUCED] == 4 * (ROWS + 1) * (WIDTH + HIDDEN)


def test_the_loss_and_its_backward_count_too() -> None:
    trace = trace_of_layers()
    last = trace.calls[-1]
    outputs = 4 * ROWS * WIDTH
    # Behind the last layer: a square reads and writes the outputs, the sum reads them.
    assert dict(last.forward_work)[WorkKind.STREAMED] == 2 * outputs
    assert dict(last.forward_work)[WorkKind.REDUCED] == outputs + 4
    # Autograd calls what runs in backward.
    assert dict(trace.seed_work)[WorkKind.NODES] > 0
    assert WorkKind.OPERATIONS not in {*dict(trace.seed_work), *dict(last.backward_work)}


def test_a_recomputed_layer_repeats_all_up_to_its_last_product_and_a_selected_one_no_product() -> None:
    """Its second run ends where the last product has saved its operands."""
    layer = layer_of(trace_of_layers())
    product = 2.0 * ROWS * WIDTH * HIDDEN
    forward = dict(layer.forward_work)
    assert forward[WorkKind.PRODUCTS_16] == 2 * product
    again = dict(replayed_work(layer, Saved.RECOMPUTE))
    operations = forward[WorkKind.OPERATIONS] - 1
    assert again == {**forward, WorkKind.OPERATIONS: operations, WorkKind.PRODUCTS_16: product}
    assert not replayed_work(layer, Saved.KEEP)
    assert not replayed_work(layer, Saved.OFFLOAD)
    selected = dict(replayed_work(layer, Saved.SELECT))
    assert selected == {kind: amount for kind, amount in forward.items() if kind is not WorkKind.PRODUCTS_16}


def test_dtype_and_kernels_have_classes_of_their_own() -> None:
    def kinds(model: nn.Module, x: torch.Tensor) -> set[WorkKind]:
        trace = traced(model, x).traces[x.shape[0]]
        works = [work for call in trace.calls for work in (call.forward_work, call.backward_work)]
        return {kind for work in works for kind, _ in work}

    assert WorkKind.HALF_PRODUCTS_64 in kinds(nn.Linear(64, 64, dtype=torch.bfloat16), torch.randn(64, 64).bfloat16())
    assert WorkKind.PRODUCTS_64 in kinds(nn.Linear(64, 64), torch.randn(64, 64))
    dense = kinds(nn.Conv2d(16, 16, 3), torch.randn(2, 16, 8, 8))
    assert {WorkKind.NARROW_CONVOLUTION, WorkKind.NARROW_CONVOLUTION_BACKWARD} <= dense
    wide = kinds(nn.Conv2d(64, 96, 3), torch.randn(2, 64, 8, 8))
    assert {WorkKind.CONVOLUTION, WorkKind.CONVOLUTION_BACKWARD} <= wide
    assert WorkKind.NARROW_CONVOLUTION in kinds(nn.Conv2d(128, 128, 3, groups=4), torch.randn(2, 128, 8, 8))
    assert WorkKind.GROUPED_CONVOLUTION in kinds(nn.Conv2d(16, 16, 3, groups=16), torch.randn(2, 16, 8, 8))


def test_the_backward_of_a_grouped_convolution_takes_twice_its_forward() -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 1), nn.Conv1d(8, 16, 3, groups=8))
    call = traced(model, torch.randn(2, 8, 10)).traces[2].calls[1]
    assert call.forward_flops == 2 * (2 * 16 * 8) * 3
    assert call.backward_flops == 2 * call.forward_flops


def test_a_second_microbatch_adds_its_gradients() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = memfit.profile(model, optimizer, squared, torch.randn(ROWS, WIDTH), microbatches=(1, 2))
    plan = Plan(microbatches=2, calls=tuple(CallPlan() for _ in range(3)))
    step = lower(build_step(plan, profile, clips_norm=False), plan, profile)
    found = {
        str(o.action): dict(o.work).get(WorkKind.STREAMED, 0.0) for o in step if str(o.action).startswith("backward C1")
    }
    first, second = found.values()
    gradients = sum(p.numel() for p in model[1].parameters()) * 4
    # Both are read, the sum is written.
    assert second - first == 3 * gradients


def test_the_work_of_an_update_is_told_by_the_bytes_that_its_class_moves() -> None:
    model = nn.Linear(64, 64)
    loss, x = squared, torch.randn(8, 64)

    def share(optimizer: torch.optim.Optimizer) -> float:
        return memfit.profile(model, optimizer, loss, x).updates["weight"].work_share

    assert share(torch.optim.AdamW(model.parameters())) == pytest.approx(1.0)
    # Plain SGD reads weight and gradient and writes the weight: 12 of AdamW's 84 bytes, and of the 28 that memory sees.
    plain = share(torch.optim.SGD(model.parameters(), lr=0.1))
    assert plain == pytest.approx(0.1 * 12 / 28 + 0.9 * 12 / 84)
    assert plain < share(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) < 1
    assert 0.4 < share(torch.optim.AdamW(model.parameters(), fused=True)) < 0.5
    # Its norm of columns walks across memory: measured twice to 2.7 times AdamW's.
    assert 1.5 < share(torch.optim.Adafactor(model.parameters())) < 2.7


def test_a_policy_adds_its_frames_and_the_operations_that_it_watches() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    profile = traced(model, torch.randn(ROWS, WIDTH))
    operations = dict(layer_of(profile.traces[ROWS]).forward_work)[WorkKind.OPERATIONS]

    def of(saved: Saved) -> list[tuple[float, ...]]:
        plan = Plan(calls=tuple(CallPlan(saved=saved) for _ in range(3)))
        step = lower(build_step(plan, profile, clips_norm=False), plan, profile)
        works = [dict(o.work) for o in step if str(o.action).split()[:2] in (["forward", "C1"], ["backward", "C1"])]
        kinds = WorkKind.FRAMES, WorkKind.WATCHED, WorkKind.SELECTED
        return [tuple(work.get(kind, 0.0) for kind in kinds) for work in works]

    assert of(Saved.KEEP) == [(0, 0, 0)] * 2
    # Once in the forward, and once where that is run again.
    assert of(Saved.RECOMPUTE) == [(1, operations, 0)] * 2
    assert of(Saved.SELECT) == [(1, operations, operations)] * 2


def test_what_travels_for_an_update_counts_by_piece_and_tensor() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    profile = memfit.profile(model, optimizer, squared, torch.randn(ROWS, WIDTH))
    pieces = len(list(model[1].parameters()))

    def transfers(homes: BlockPlan) -> float:
        return dict(update_work(Plan(blocks={"1": homes}), profile, 1)).get(WorkKind.PIECE_TRANSFERS, 0.0)

    assert transfers(BlockPlan()) == 0
    # Two moments come and go; a weight does so too, and a gradient only comes.
    assert transfers(BlockPlan(state_home=Tier.DISK)) == 4 * pieces
    assert transfers(BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)) == 6 * pieces
    assert transfers(BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)) == 7 * pieces


def test_microbatches_that_take_turns_switch_at_each_call_and_each_step_counts_once() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = memfit.profile(model, optimizer, squared, torch.randn(ROWS, WIDTH), microbatches=(1, 2))

    def amounts(kind: WorkKind, count: int) -> float:
        plan = Plan(microbatches=count, calls=tuple(CallPlan() for _ in range(3)))
        step = lower(build_step(plan, profile, clips_norm=False), plan, profile)
        return sum(dict(o.work).get(kind, 0.0) for o in step)

    assert [amounts(WorkKind.SWITCHES, count) for count in (1, 2)] == [0, 2 * 3]
    assert [amounts(WorkKind.STEPS, count) for count in (1, 2)] == [1, 1]


def test_point_wise_work_in_bf16_counts_by_element() -> None:
    model = nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16), nn.ReLU())
    trace = traced(model, torch.randn(ROWS, 16).bfloat16()).traces[ROWS]
    forward = {k: a for call in trace.calls for k, a in call.forward_work}
    # The function itself, the loss's square and its sum.
    assert forward[WorkKind.HALF_ELEMENTS] == 3 * ROWS * 16
    assert WorkKind.STREAMED not in forward


def test_windows_count_what_they_look_at() -> None:
    def windows(model: nn.Module) -> float:
        trace = traced(nn.Sequential(nn.Conv2d(3, 4, 1), model), torch.randn(2, 3, 8, 8)).traces[2]
        works = [trace.seed_work, *(work for call in trace.calls for work in (call.forward_work, call.backward_work))]
        return sum(dict(work).get(WorkKind.WINDOWED, 0.0) for work in works)

    assert windows(nn.MaxPool2d(2)) == 2 * 4 * 8 * 8
    assert windows(nn.MaxPool2d(3, 2, 1)) == 2 * 4 * 4 * 4 * 9
    # An average is no search; its backward takes as long.
    assert windows(nn.AvgPool2d(2)) == 2 * (2 * 4 * 8 * 8) / 4
    assert windows(nn.Upsample(scale_factor=2, mode="bilinear")) == 2 * (2 * 4 * 16 * 16)


@pytest.mark.parametrize(
    ("places", "dtype"), [(64, torch.bfloat16), (191, torch.bfloat16), (192, torch.bfloat16), (64, torch.float32)]
)
def test_short_attention_in_bf16_counts_its_rows_in_backward(places: int, dtype: torch.dtype) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Linear(32, 32, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.queries(x).unflatten(-1, (2, 16)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    trace = traced(nn.Sequential(Attention()), torch.randn(3, places, 32, dtype=dtype)).traces[3]
    found = summed((work, 1.0) for call in trace.calls for work in (call.forward_work, call.backward_work))
    amounts = dict(found)
    is_half = dtype is torch.bfloat16
    # Few places count as more: blocks that are not full take as long as 24 places besides.
    flops = 4.0 * 3 * 2 * places * (places + 24) * 16
    assert amounts[WorkKind.HALF_ATTENTION if is_half else WorkKind.ATTENTION] == pytest.approx(flops)
    if is_half and places < 192:
        assert (
            amounts[WorkKind.HALF_ATTENTION_ROWS] == 3 * 2 * places and WorkKind.HALF_ATTENTION_BACKWARD not in amounts
        )
    else:
        backward = WorkKind.HALF_ATTENTION_BACKWARD if is_half else WorkKind.ATTENTION_BACKWARD
        assert amounts[backward] == pytest.approx(2.5 * flops) and WorkKind.HALF_ATTENTION_ROWS not in amounts


def test_logits_and_what_the_loss_makes_of_them_are_a_category_of_their_own() -> None:
    """A head behind equal layers: its result, cross-entropy's log-softmax and both gradients are of one size."""
    words = 1000
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(16, words))

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(m(x), torch.zeros(len(x), dtype=torch.int64))

    x = torch.randn(64, 16)
    profile = memfit.profile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, x)
    plan, logits = Plan(microbatches=1), 4 * 64 * words
    moments = {m.action: m for m in predict(lower(build_step(plan, profile, clips_norm=False), plan, profile)).moments}
    assert moments["forward C2 m0"].by_category["logits"] == 0
    forward, seed, backward = (moments[f"{name} m0"] for name in ("forward C3", "seed", "backward C3"))
    # The result goes when the loss has its log-softmax; then the gradients of both are there at once.
    assert logits <= forward.by_category["logits"] <= 2 * logits + 4096
    assert 2 * logits <= seed.by_category["logits"] <= 3 * logits + 4096
    # The weight's and the activations' gradients are others'.
    assert logits <= backward.by_category["logits"] <= logits + 4096
    # The loss itself.
    assert moments["backward C2 m0"].by_category["logits"] == 4


class Counting(TorchDispatchMode):
    """Counts how often operations that are no views read a storage, by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self.reads.update(x.untyped_storage().nbytes() for x in found)
        return func(*args, **(kwargs or {}))


def test_uses_of_a_saved_storage_are_the_reads_that_a_dispatch_mode_sees() -> None:
    """Of a size of its own: read by a function, a product with itself and a sum; in backward as autograd saves it."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 7 * HIDDEN), nn.Linear(7 * HIDDEN, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            return self.down(functional.gelu(h) + h * h)

    model, x, size = nn.Sequential(Reader(), Reader()), torch.randn(ROWS, WIDTH), 4 * ROWS * 7 * HIDDEN
    forward, backward = Counting(), Counting()
    with forward:
        loss = squared(model, x)
    with backward:
        loss.backward()
    trace = traced(model, x).traces[ROWS]
    held = [s for s in trace.storages if s.nbytes == size]
    reads = sum(count for s in held for _, count in s.uses)
    # h by GELU and twice by the product, the sum by the last layer; the two summands are not saved.
    assert reads == forward.reads[size] - 2 * 2 == 2 * (3 + 1)
    # Backward reads h for GELU and twice for the product, and the sum for the weight's gradient, beside gradients of that size.
    assert sum(s.backward_uses for s in held) == 2 * (1 + 2 + 1) <= backward.reads[size]
    assert all({segment for segment, _ in storage.uses} == {storage.segment} for storage in held)
