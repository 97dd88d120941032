"""Worked examples of the field, with answers known beforehand, as memfit itself does them.

Where each is shown; those without a file are below:

- bytes of weights (175e9 parameters), boundary activations of GPT-3, Adam's bytes a parameter,
  two bytes against four: `test_175_billion_...`, `test_gpt3s_...`, `test_adam_takes_...` and
  `test_adams_12_bytes_...`, `test_in_two_bytes_...`;
- a chain of six, every K-th output kept, and what one recompute costs: `test_a_chain_of_six_...`,
  `test_a_chain_with_every_kth_...`, `test_recomputing_everything_once_...`;
- closed forms of saved outputs, attention at twice the sequence, a batch cut in m, a mixture of
  experts: `test_saved_outputs_are_...`,
  `test_with_the_sequence_doubled_plain_attention_saves_four_times_the_scores_and_tiled_twice` in
  `memory/test_trace.py`, `test_a_batch_cut_in_m_...`, `test_a_mixture_of_experts_...`;
- inference over depth 4 and 64: `test_the_peak_of_inference_is_the_same_at_depth_4_and_64` in
  `memory/test_inference_memory.py`, predicted in `unit/test_prediction.py`;
- where accumulation alone fits:
  `test_where_accumulation_alone_fits_nothing_is_recomputed_unless_that_is_faster` in
  `unit/test_rules.py`;
- bit patterns of fp32, subnormals, ranges of integers, two zeros: `test_bit_patterns_of_fp32` and
  the four tests after it in `unit/test_formats.py`;
- defragmenting a buffer of `narrow` views:
  `test_live_tensors_keep_their_contents_through_defragmentation` in `unit/test_arena.py`.

Those that need several ranks (allreduce, data parallel, ZeRO, a product on two ranks) have no test.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import memfit
from memfit.core.limits import format_bytes, parse_bytes
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.planner.problem import Problem, driver_of
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.trace.blocks import find_blocks

WIDTH, ROWS = 8, 4


@dataclass
class Chain:
    """A chain of equal layers; which outputs are alive is seen by weak references to their storages.

    Layer i makes output i from output i-1 (the input is output 0); a linear layer saves its input for backward.
    """

    layers: int
    runs: list[int] = field(default_factory=list[int])
    """Numbers of the layers in the order in which they ran forward, recomputing included."""
    peak: int = 0
    """Most outputs alive at once, whenever a layer's forward or backward began."""
    at_backward: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Outputs alive when a layer's backward began."""
    when_made_again: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Outputs alive when a layer had run forward again."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.layers)))
        self._made: list[tuple[int, StorageWeakRef]] = []
        for number, layer in enumerate(self.model, start=1):
            layer.register_forward_hook(partial(self._ran, number))

    def _ran(self, number: int, _layer: nn.Module, _args: tuple[Tensor], output: Tensor) -> None:
        if type(output) is not Tensor or output.device.type != "cpu" or not torch.is_grad_enabled():
            return  # the trace
        is_first = number not in self.runs
        self.runs.append(number)
        self._made.append((number, StorageWeakRef(output.untyped_storage())))
        self.peak = max(self.peak, len(self.alive()))
        if is_first:
            output.register_hook(partial(self._goes_back, number))
        else:
            self.when_made_again[number] = self.alive()

    def _goes_back(self, number: int, _gradient: Tensor) -> None:
        self.at_backward[number] = self.alive()
        self.peak = max(self.peak, len(self.alive()))

    def alive(self) -> set[int]:
        return {number for number, storage in self._made if not storage.expired()}

    def train_one_step(self, segment: int) -> None:
        """One step in which every `segment`-th output is kept and the others are made again."""
        calls = tuple(
            CallPlan(saved=Saved.RECOMPUTE, joins_previous=index % segment != 0) for index in range(self.layers)
        )
        batch = {"x": torch.randn(ROWS, WIDTH)}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with memfit.fit(self.model, optimizer, _sum, batch, plan=Plan(calls=calls)) as job:
            self.runs.clear()
            self._made.clear()
            self.peak = 0
            job.step(batch)


def _sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).sum()


def _distance(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def test_a_chain_of_six_with_every_second_output_kept_makes_five_then_three_again() -> None:
    chain = Chain(6)
    chain.train_one_step(2)
    again = chain.runs[6:]
    assert chain.runs[:6] == [1, 2, 3, 4, 5, 6]
    # What is missing is made again from the back: 5 for {4, 5, 6}, then 3 for {2, 3, 4}, then 1.
    assert [number for number in again if number % 2] == [5, 3, 1]
    # Kept beside the last output: 2 and 4. Nothing of 1, 3, 5 outlived the forward.
    assert chain.at_backward[6] - {6} == {2, 4}
    # The last segment lives on {4, 5, 6}, beside 2 that waits; the next one on {2, 3, 4}, when 5 and 6 are gone.
    assert {4, 5} <= chain.when_made_again[5] <= {2, 4, 5, 6}
    assert {2, 3} <= chain.when_made_again[3] <= {2, 3, 4}
    assert chain.when_made_again[1] <= {1, 2}


@pytest.mark.parametrize(("layers", "segment", "most"), [(100, 10, 20), (64, 8, 16)])
def test_a_chain_with_every_kth_output_kept_holds_n_over_k_plus_k_and_runs_at_most_n_layers_more(
    layers: int, segment: int, most: int
) -> None:
    assert most == layers // segment + segment
    chain = Chain(layers)
    chain.train_one_step(segment)
    assert chain.peak <= most
    assert chain.peak > layers // segment
    assert layers < len(chain.runs) <= 2 * layers


@pytest.mark.parametrize(
    ("is_frozen", "share"),
    [
        (False, 1 / 3),  # backward makes gradients of inputs and of weights: two forwards
        (True, 1 / 2),  # weights that do not train: gradients of inputs only, one forward
    ],
)
def test_recomputing_everything_once_costs_a_third_or_half_of_a_step_by_what_backward_costs(
    is_frozen: bool, share: float
) -> None:
    model = Chain(12).model
    if is_frozen:
        # The first layer trains, so that gradients flow through all others.
        for layer in list(model)[1:]:
            layer.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    profile = memfit.profile(model, optimizer, _sum, {"x": torch.randn(ROWS, WIDTH)})
    calls = profile.traces[ROWS].calls[1:]  # the first one's input needs no gradient
    forward = sum(call.forward_flops for call in calls)
    backward = sum(call.backward_flops for call in calls)
    assert forward == len(calls) * 2 * ROWS * WIDTH * WIDTH
    assert forward / (forward + backward) == pytest.approx(share)


@pytest.mark.parametrize("order", [Order.MICROBATCH_MAJOR, Order.LAYER_MAJOR])
def test_a_batch_cut_in_m_saves_an_mth_of_the_activations_and_gives_equal_gradients(order: Order) -> None:
    microbatches, rows = 4, 8
    batch = {name: torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)) for name in ("x", "y")}
    whole = Chain(6).model
    _distance(whole, batch).backward()

    model = Chain(6).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    profile = memfit.profile(model, optimizer, _distance, batch, microbatches=(1, microbatches))
    # The last call holds the loss as well, a number whatever the rows.
    whole_calls, part_calls = (profile.traces[count].calls[:-1] for count in (rows, rows // microbatches))
    for call, part in zip(whole_calls, part_calls, strict=True):
        assert call.forward_peak_bytes == rows * WIDTH * 4 == part.forward_peak_bytes * microbatches

    plan = Plan(microbatches=microbatches, order=order)
    with memfit.fit(model, optimizer, _distance, batch, plan=plan, keep_gradients=True) as job:
        job.step(batch)
        for name, parameter in whole.named_parameters():
            gradient = job.gradient(name)
            assert gradient is not None
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-7)


# What is saved for backward, in closed forms


class TwoTimes(nn.Module):
    """A module called twice over: what the first gives is what the second saves."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "shape", "elements"),
    [
        (lambda: nn.Conv2d(8, 8, 3, padding=1), (2, 8, 16, 16), 2 * 8 * 16 * 16),
        (lambda: nn.Linear(24, 24), (5, 24), 5 * 24),
        (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (3, 10, 16), 3 * 10 * 16),
    ],
    ids=["convolution", "linear", "transformer"],
)
def test_saved_outputs_are_batch_times_channels_times_places_times_bytes(
    make: Callable[[], nn.Module], shape: tuple[int, ...], elements: int, dtype: torch.dtype
) -> None:
    model = TwoTimes(make).to(dtype)
    profile = memfit.profile(model, torch.optim.SGD(model.parameters()), _mean, torch.zeros(shape, dtype=dtype))
    trace = profile.traces[shape[0]]
    first, second = (call for call in trace.calls if call.site.startswith("layers."))
    assert first.output_bytes == trace.boundary_bytes(second.index) == elements * dtype.itemsize
    if isinstance(model.layers[0], nn.Conv2d) and dtype is torch.float32:
        assert first.output_bytes == 16_384


class Mixture(nn.Module):
    """y = sum over the chosen experts of G(x)_i E_i(x), each expert a call of its own."""

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.chosen)  # (rows, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == index)).sum(-1, keepdim=True)
        return out


@pytest.mark.parametrize("chosen", [2, 4])
def test_a_mixture_of_experts_is_the_sum_over_the_chosen_ones_and_their_mean_with_equal_gates(chosen: int) -> None:
    torch.manual_seed(1)
    model = Mixture(4, chosen)
    if chosen == 4:
        nn.init.zeros_(model.gate.weight)  # equal gates
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    # By hand, row by row.
    with torch.no_grad():
        gates = model.gate(x).softmax(-1)
        rows: list[Tensor] = []
        for row, gate in zip(x, gates, strict=True):
            best = gate.argsort(descending=True)[:chosen]
            rows.append(sum((gate[i] / gate[best].sum() * model.experts[i](row) for i in best), torch.zeros(WIDTH)))
        expected = torch.stack(rows)
        if chosen == 4:
            torch.testing.assert_close(expected, torch.stack([expert(x) for expert in model.experts]).mean(0))
    plan = Plan(calls=(), blocks={f"experts.{i}": BlockPlan(weight_home=Tier.DISK) for i in range(4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memfit.fit(model, optimizer, _distance, {"x": x, "y": y}, plan=plan) as job:
        assert job.step({"x": x, "y": y}).loss == pytest.approx((expected - y).square().mean().item(), rel=1e-5)


# Sizes in bytes, from shapes alone: models whose weights have no bytes


def _hollow(layers: int, rows: int, columns: int, dtype: torch.dtype) -> list[nn.Linear]:
    """Linear layers of any size, whose weights have shapes and no memory."""
    made: list[nn.Linear] = []
    for _ in range(layers):
        with torch.device("meta"):
            layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
        weight = torch.empty(rows, columns, dtype=dtype)
        weight.untyped_storage().resize_(0)
        layer.weight = nn.Parameter(weight)
        made.append(layer)
    return made


def _mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().mean()


@pytest.mark.parametrize(
    ("dtype", "decimal", "binary"),
    [pytest.param(torch.bfloat16, 350, "325.96 GiB", marks=pytest.mark.slow), (torch.float32, 700, "651.93 GiB")],
)
def test_175_billion_parameters_take_350_gb_in_two_bytes_and_700_in_four(
    dtype: torch.dtype, decimal: int, binary: str
) -> None:
    up, down = (40_000, 25_000), (25_000, 40_000)  # 1e9 parameters each
    layers = [_hollow(1, *(up if index % 2 else down), dtype)[0] for index in range(175)]
    model = nn.Sequential(*layers)
    batch = torch.zeros(1, 40_000, dtype=dtype)
    profile = memfit.profile(model, torch.optim.SGD(model.parameters()), _mean, batch)
    assert sum(p.numel() for p in model.parameters()) == 175_000_000_000
    assert profile.weight_bytes == parse_bytes(f"{decimal} GB") == decimal * 10**9
    assert format_bytes(profile.weight_bytes) == binary


@pytest.mark.parametrize(
    ("dtype", "layer_gb", "all_gb"), [(torch.bfloat16, 78.64, 7_549.7), (torch.float32, 157.29, 15_099.5)]
)
def test_gpt3s_boundary_activations_of_3_2_million_tokens(dtype: torch.dtype, layer_gb: float, all_gb: float) -> None:
    layers, width, tokens = 96, 12_288, 3_200_000

    class Boundaries(nn.Module):
        """Only what its blocks hand on counts here: a token's number becomes a row of that width."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 1, dtype=dtype))
            self.layers = nn.ModuleList(_hollow(layers, width, width, dtype))

        def forward(self, batch: Tensor) -> Tensor:
            hidden = (batch.to(dtype) * self.scale).expand(-1, width).contiguous()
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    model = Boundaries()
    batch = torch.zeros(tokens, 1, dtype=torch.int8)
    profile = memfit.profile(model, torch.optim.SGD(model.parameters()), _mean, batch)
    trace = profile.traces[tokens]
    # Each layer's argument is what is held of it where it is recomputed.
    held = [trace.boundary_bytes(call.index) for call in trace.calls if call.site.startswith("layers.")]
    assert held == [tokens * width * dtype.itemsize] * layers
    assert held[0] / 1e9 == pytest.approx(layer_gb, abs=0.005)
    assert sum(held) / 1e9 == pytest.approx(all_gb, abs=0.05)


@dataclass(frozen=True)
class Predicted:
    """Bytes a parameter, predicted for a step of Adam."""

    resting: float
    """On the device between steps."""
    most: float
    """On the device when backward is through and nothing is updated yet."""
    host: float
    """In host memory, at its peak."""


def _predicted(compute: str, home: Tier) -> Predicted:
    model = nn.Sequential(*_hollow(4, 512, 512, torch.float32))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.zeros(1, 512)
    problem = Problem(model=model, loss=_mean, driver=driver_of(optimizer, model), block_map=find_blocks(model, None))
    blocks = {block.name: BlockPlan(gradient_home=home, state_home=home) for block in problem.block_map.blocks}
    plan = Plan(compute_dtype=compute, update=UpdateTime.AFTER_BACKWARD, blocks=blocks)  # type: ignore[arg-type]  # words are taken
    profile = problem.profile_for(plan, batch)
    timeline = predict(lower(build_step(plan, profile, clips_norm=False), plan, profile))
    last = [moment for moment in timeline.moments if moment.action.startswith("backward")][-1]
    parameters = sum(p.numel() for p in model.parameters())
    # The batch and the loss are there too: one row.
    sizes = (timeline.moments[-1].after_bytes, last.after_bytes, timeline.peak_in(Tier.HOST))
    return Predicted(*(round(size / parameters, 1) for size in sizes))


def test_adam_takes_12_bytes_a_parameter_16_with_gradients_and_mixed_precision_16_of_which_offloading_leaves_2() -> (
    None
):
    # Weights and two moments in fp32; gradients while backward is through.
    assert _predicted("given", Tier.DEVICE) == Predicted(resting=4 + 8, most=16, host=0)
    # 2 for the weight, 2 for the gradient, 4 for the master and 8 for the moments.
    assert _predicted("bfloat16", Tier.DEVICE).most == 2 + 2 + 12
    offloaded = _predicted("bfloat16", Tier.HOST)
    assert offloaded.resting == 2
    assert 16 / offloaded.resting == 8
    # At home there is the rest; gradients add up in fp32 there.
    assert offloaded.host == 4 + 12


def test_adams_12_bytes_a_parameter_are_what_a_job_holds() -> None:
    allocator = install()
    gc.collect()
    before = allocator.stats().live_bytes
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    parameters = sum(p.numel() for p in model.parameters())
    batch = torch.randn(2, 256)
    with memfit.fit(model, torch.optim.Adam(model.parameters()), _mean, batch) as job:
        job.step(batch)
        held = allocator.stats().live_bytes - before
    assert held == pytest.approx(12 * parameters, abs=16 << 10)  # and a batch, counters, a loss


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_in_two_bytes_weights_and_activations_are_half_and_masters_add_four_bytes_a_parameter(
    narrow: torch.dtype,
) -> None:
    def profiled(dtype: torch.dtype) -> tuple[int, list[int]]:
        def block() -> nn.Module:
            return nn.Sequential(nn.Linear(32, 64, dtype=dtype), nn.GELU(), nn.Linear(64, 32, dtype=dtype))

        model = nn.Sequential(block(), block(), block())
        batch = torch.zeros(ROWS, 32, dtype=dtype)

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).mean()

        profile = memfit.profile(model, torch.optim.SGD(model.parameters()), loss, batch)
        held = [s for s in profile.traces[ROWS].storages if (s.saved_inside or s.argument_of) and not s.is_input]
        return profile.weight_bytes, [storage.nbytes for storage in held]

    (weights, activations), (half_weights, half_activations) = profiled(torch.float32), profiled(narrow)
    assert weights == 2 * half_weights
    # What each of three blocks gives its GELU, what comes out of that, and what two of them hand on: the last one's goes into a mean.
    assert sorted(half_activations) == sorted(2 * ROWS * width for width in [*[64] * 6, *[32] * 2])
    assert activations == [2 * nbytes for nbytes in half_activations]
    if narrow is torch.bfloat16:
        model = nn.Sequential(nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        problem = Problem(
            model=model, loss=_mean, driver=driver_of(optimizer, model), block_map=find_blocks(model, None)
        )
        plan = Plan(compute_dtype="bfloat16")  # type: ignore[arg-type]  # words are taken
        mixed = problem.profile_for(plan, torch.zeros(ROWS, 32))
        parameters = 32 * 32 + 32
        assert mixed.weight_bytes == 2 * parameters
        assert sum(p.master_nbytes for block in mixed.blocks for p in block.parameters) == 4 * parameters
