"""Closed forms of what autograd saves, against a trace, against real tensors, and against their page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import memfit
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.profile import TraceProfile
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.planner.problem import Problem, driver_of
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.trace.blocks import find_blocks
from memory import closed_forms as forms

PAGE = Path(__file__).parents[2] / "docs" / "activations.md"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Stem(nn.Module):
    """Makes an input that needs a gradient, and is not of the batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, batch: Tensor) -> Tensor:
        return batch * self.scale if batch.is_floating_point() else batch


class Stage(nn.Module):
    """The call that is looked at; a parameter that it does not use makes it a block."""

    def __init__(self, action: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.action = action
        self.used_by_nobody = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.action(x)


class Subject(nn.Module):
    """A stem and a stage."""

    def __init__(self, action: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.stem, self.stage = Stem(dtype), Stage(action, dtype)
        self.to(dtype)

    def forward(self, batch: Tensor) -> Tensor:
        return self.stage(self.stem(batch))


def total(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss that saves nothing."""
    return model(batch).sum()


def trace_of(model: nn.Module, batch: Tensor) -> TraceProfile:
    blocks = ["stem", "stage"]
    profile = memfit.profile(model, torch.optim.SGD(model.parameters()), total, batch, blocks=blocks)
    assert profile.source == "fake"
    return profile.traces[len(batch)]


def traced_bytes(model: nn.Module, batch: Tensor) -> int:
    """What the stage saves, by memfit's trace."""
    trace = trace_of(model, batch)
    stage = next(call.index for call in trace.calls if call.site == "stage")
    return sum(s.nbytes for s in trace.storages if stage in s.saved_inside and not s.is_buffer)


def hooked_bytes(model: Subject, batch: Tensor) -> int:
    """What the stage saves, by torch's own hooks on real tensors: distinct storages."""
    there = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, tuple[int, Tensor]] = {}  # tensors are held, or another would take their address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            saved[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    x = model.stem(batch)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.stage(x)
    del out
    return sum(nbytes for nbytes, _ in saved.values())


def saved_bytes(action: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What an action saves, by both roads."""
    torch.manual_seed(0)
    model, batch = Subject(action, dtype), torch.randn(shape).to(dtype)
    found = traced_bytes(model, batch)
    assert found == hooked_bytes(model, batch)
    return found


# -- one call --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (3, 6, 9, 5)])
def test_a_convolution_saves_its_input_whatever_it_makes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    b, channels, *places = shape
    for layer in (nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(channels, 2, 3, stride=2, bias=False)):
        assert saved_bytes(layer, shape, dtype) == forms.convolution(dtype.itemsize, b, channels, prod(places))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 32), (2, 5, 24)])
def test_a_linear_layer_saves_its_input(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    *rows, inputs = shape
    for layer in (nn.Linear(inputs, 3 * inputs), nn.Linear(inputs, 2, bias=False)):
        assert saved_bytes(layer, shape, dtype) == forms.linear(dtype.itemsize, prod(rows), inputs)


def test_a_linear_layer_that_is_frozen_saves_nothing() -> None:
    assert saved_bytes(nn.Linear(32, 8).requires_grad_(False), (6, 32), torch.float32) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 2, 5), (2, 7, 7, 7)])
def test_a_product_saves_both_factors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    b, rows, inner, columns = shape

    def multiply(x: Tensor) -> Tensor:
        left, right = x.sum(-1, keepdim=True) * torch.ones(rows, inner, dtype=dtype), x.sum(-1, keepdim=True)
        return torch.bmm(left, (right * torch.ones(inner, columns, dtype=dtype)))

    # Factors that are made from x by products with constants save the constants.
    constants = dtype.itemsize * (rows * inner + inner * columns)
    expected = forms.product(dtype.itemsize, b, rows, inner, columns) + constants
    assert saved_bytes(multiply, (b, 1, 1), dtype) == expected


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads_of(attention: Attention) -> Callable[[Tensor], Tensor]:
    """Attention over one storage that holds Q, K and V: it is saved once, whole."""

    def run(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(1)
        return attention(q, k, v)

    return run


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5).softmax(-1) @ v


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return functional.dropout(scores.softmax(-1), 0.1) @ v


def with_fused_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return torch.native_dropout(scores.softmax(-1), 0.1, True)[0] @ v


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_fp32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def fallen_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "a", "s", "d"), [(1, 4, 16, 8), (3, 2, 40, 16)])
def test_attention_saves_probabilities_unless_it_is_tiled(dtype: torch.dtype, b: int, a: int, s: int, d: int) -> None:
    e, shape = dtype.itemsize, (b, 3, a, s, d)
    assert saved_bytes(heads_of(plain), shape, dtype) == forms.plain_attention(e, b, a, s, d)
    assert saved_bytes(heads_of(tiled), shape, dtype) == forms.tiled_attention(e, b, a, s, d)
    # Softmax in fp32 of scores in two bytes: P is saved twice.
    twice = 4 * b * a * s**2 if e == 2 else 0
    assert saved_bytes(heads_of(in_fp32), shape, dtype) == forms.plain_attention(e, b, a, s, d) + twice


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_dropout_saves_three_matrices_and_the_fallback_of_the_tiled_kernel_all_in_fp32(
    dtype: torch.dtype,
) -> None:
    e, b, a, s, d = dtype.itemsize, 2, 2, 24, 8
    shape = b, 3, a, s, d
    saved = saved_bytes(heads_of(with_dropout), shape, dtype)
    assert saved == forms.plain_attention_with_dropout(e, b, a, s, d, mask=e)
    saved = saved_bytes(heads_of(with_fused_dropout), shape, dtype)
    assert saved == forms.plain_attention_with_dropout(e, b, a, s, d, mask=1)
    assert saved_bytes(heads_of(fallen_back), shape, dtype) == forms.fallen_back_attention(b, a, s, d)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(6, 32), (15, 20)])
def test_norms_over_features_save_statistics_of_each_row(dtype: torch.dtype, rows: int, features: int) -> None:
    e, shape = dtype.itemsize, (rows, features)
    assert saved_bytes(nn.LayerNorm(features), shape, dtype) == forms.layer_norm(e, rows, features)
    assert saved_bytes(nn.RMSNorm(features), shape, dtype) == forms.rms_norm(rows, features)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "channels", "side"), [(2, 4, 8), (3, 6, 5)])
def test_norms_over_places_save_statistics_of_each_channel_or_group(
    dtype: torch.dtype, b: int, channels: int, side: int
) -> None:
    e, shape = dtype.itemsize, (b, channels, side, side)
    places = side * side
    norm = nn.BatchNorm2d(channels)
    assert saved_bytes(norm, shape, dtype) == forms.batch_norm(e, b, channels, places)
    norm = nn.BatchNorm2d(channels).eval()
    assert saved_bytes(norm, shape, dtype) == forms.batch_norm_in_evaluation(e, b, channels, places)
    norm = nn.GroupNorm(2, channels)
    assert saved_bytes(norm, shape, dtype) == forms.group_norm(e, b, channels, places, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("action", [functional.relu, torch.tanh, torch.sigmoid, lambda x: x.softmax(-1)])
def test_functions_whose_derivative_is_one_of_the_output_share_it_with_the_next_layer(
    dtype: torch.dtype, action: Callable[[Tensor], Tensor]
) -> None:
    e, rows, features = dtype.itemsize, 6, 32
    layer = nn.Linear(features, 8)
    assert saved_bytes(action, (rows, features), dtype) == forms.relu(e, rows * features)
    both = nn.Sequential(Action(action), layer)
    assert saved_bytes(both, (rows, features), dtype) == forms.linear(e, rows, features)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("action", [functional.gelu, functional.silu, functional.leaky_relu])
def test_functions_whose_derivative_is_one_of_the_input_add_to_what_the_next_layer_saves(
    dtype: torch.dtype, action: Callable[[Tensor], Tensor]
) -> None:
    e, rows, features = dtype.itemsize, 6, 32
    assert saved_bytes(action, (rows, features), dtype) == forms.gelu(e, rows * features)
    both = nn.Sequential(Action(action), nn.Linear(features, 8))
    expected = forms.gelu(e, rows * features) + forms.linear(e, rows, features)
    assert saved_bytes(both, (rows, features), dtype) == expected


class Action(nn.Module):
    """A function as a module."""

    def __init__(self, action: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.action = action

    def forward(self, x: Tensor) -> Tensor:
        return self.action(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_saves_its_mask_in_the_dtype_of_its_input_on_a_cpu_and_as_bools_where_it_is_fused(
    dtype: torch.dtype,
) -> None:
    e, n = dtype.itemsize, 6 * 32
    assert saved_bytes(lambda x: functional.dropout(x, 0.1), (6, 32), dtype) == forms.dropout(e, n)
    assert saved_bytes(lambda x: torch.native_dropout(x, 0.1, True)[0], (6, 32), dtype) == forms.fused_dropout(n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_saves_the_ids_of_the_batch(dtype: torch.dtype) -> None:
    model, ids = Subject(nn.Embedding(10, 16), dtype), torch.randint(0, 10, (3, 7))
    assert traced_bytes(model, ids) == hooked_bytes(model, ids) == forms.embedding(3 * 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "words"), [(15, 10), (4, 100)])
def test_cross_entropy_saves_the_logarithms_of_all_probabilities(dtype: torch.dtype, tokens: int, words: int) -> None:
    def loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits, torch.zeros(tokens, dtype=torch.int64))

    assert saved_bytes(loss, (tokens, words), dtype) == forms.cross_entropy(dtype.itemsize, tokens, words)


# -- a transformer layer ---------------------------------------------------------------------------------------------


def fused_dropout(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0]


class Recomputed(torch.autograd.Function):
    """Attention that saves Q, K and V, and runs again in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attend: Attention) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.attend = attend
        return attend(q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            out = ctx.attend(*inputs)
        return *torch.autograd.grad(out, inputs, grads), None


class GatheredLinear(torch.autograd.Function):
    """A rank's linear layer behind an allgather of the sequence: saves its own part, and gathers it
    again in backward. Other ranks' parts are taken to be as its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ranks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ranks = ranks
        return x.repeat(ranks, 1, 1) @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        whole = x.repeat(ctx.ranks, 1, 1)
        return (grad @ weight)[: len(x)], grad.flatten(0, 1).T @ whole.flatten(0, 1), None


class Layer(nn.Module):
    """A rank's part of a GPT layer, as in section 4 of Korthikanti et al.; x is (s, b, h).

    Args:
        h: width.
        a: heads.
        t: ranks of tensor parallelism: their products are cut by columns, then by rows.
        by_sequence: the rank holds s/t places outside of the cut products.
        drop: dropout.
        recomputes: attention is recomputed.
        in_fp32: softmax computes in fp32.
        is_tiled: attention is tiled, without dropout.
    """

    def __init__(
        self,
        h: int,
        a: int,
        *,
        t: int = 1,
        by_sequence: bool = False,
        drop: Callable[[Tensor], Tensor] = fused_dropout,
        recomputes: bool = False,
        in_fp32: bool = False,
        is_tiled: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.size = a // t, h // a
        self.gathers = t if by_sequence else 0
        self.drop, self.recomputes, self.in_fp32, self.is_tiled = drop, recomputes, in_fp32, is_tiled
        self.before, self.between = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h // t), nn.Linear(h // t, h)
        self.up, self.down = nn.Linear(h, 4 * h // t), nn.Linear(4 * h // t, h)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self._cut_by_columns(self.qkv, self.before(x))
        s, b, _ = qkv.shape
        # (b heads, s, d), views of one storage
        q, k, v = (
            part.reshape(s, b * self.heads, self.size).transpose(0, 1)
            for part in qkv.view(s, b, self.heads, 3 * self.size).chunk(3, -1)
        )
        mixed: Any = Recomputed.apply(q, k, v, self._attend) if self.recomputes else self._attend(q, k, v)
        x = x + self.drop(self.out(mixed.transpose(0, 1).reshape(s, b, -1))[: len(x)])
        hidden = functional.gelu(self._cut_by_columns(self.up, self.between(x)))
        return x + self.drop(self.down(hidden)[: len(x)])

    def _cut_by_columns(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if not self.gathers:
            return layer(x)
        gathered: Any = GatheredLinear.apply(x, layer.weight, self.gathers)
        return gathered + layer.bias

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.is_tiled:
            return tiled(q[None], k[None], v[None])[0]
        scores = torch.bmm(q, k.transpose(1, 2)) / self.size**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype) if self.in_fp32 else scores.softmax(-1)
        return torch.bmm(self.drop(weights), v)


def not_counted(s: int, b: int, *, mask: bool = True, parts: int = 1) -> int:
    """What the paper leaves out as small: two statistics of two norms a place in two bytes, and the causal mask."""
    return 2 * 2 * 2 * s * b // parts + (s * s if mask else 0)


SIZES = [(32, 2, 64, 4), (48, 1, 32, 8), (16, 3, 64, 2)]


def layer_bytes(s: int, b: int, h: int, a: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> int:
    return saved_bytes(Layer(h, a, **more), (s, b, h), dtype)


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpt_layer_saves_34_sbh_and_5_as2b(s: int, b: int, h: int, a: int, dtype: torch.dtype) -> None:
    assert layer_bytes(s, b, h, a, dtype) == forms.transformer_layer(s, b, h, a) + not_counted(s, b)


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
def test_a_gpt_layer_recomputed_holds_34_sbh_or_2_sbh(s: int, b: int, h: int, a: int) -> None:
    selective = layer_bytes(s, b, h, a, recomputes=True)
    assert selective == forms.transformer_layer_selective(s, b, h) + not_counted(s, b, mask=False)
    dtype = torch.bfloat16
    trace = trace_of(Subject(Layer(h, a), dtype), torch.zeros(s, b, h, dtype=dtype))
    layer = next(call.index for call in trace.calls if call.site == "stage")
    assert trace.boundary_bytes(layer) == forms.transformer_layer_recomputed(s, b, h)


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
def test_a_gpt_layer_on_two_ranks_saves_what_the_paper_says(s: int, b: int, h: int, a: int) -> None:
    tensor = layer_bytes(s, b, h, a, t=2)
    assert tensor == forms.transformer_layer_on_ranks(s, b, h, a, 2) + not_counted(s, b)
    # A rank gets s/t places.
    model = Layer(h, a, t=2, by_sequence=True)
    saved = saved_bytes(model, (s // 2, b, h), torch.bfloat16)
    assert saved == forms.transformer_layer_on_ranks_by_sequence(s, b, h, a, 2) + not_counted(s, b, parts=2)


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
def test_a_gpt_layer_on_a_cpu_and_with_other_attention_saves_otherwise(s: int, b: int, h: int, a: int) -> None:
    paper = forms.transformer_layer(s, b, h, a) + not_counted(s, b)
    scores = a * s * s * b
    # Dropout's two masks outside of attention and the one inside: a byte more an element.
    on_cpu = layer_bytes(s, b, h, a, drop=lambda x: functional.dropout(x, 0.1))
    assert on_cpu == paper + 2 * s * b * h + scores
    # Softmax saves four bytes an element instead of two; what dropout gives stays at two.
    assert layer_bytes(s, b, h, a, in_fp32=True) == paper + 2 * scores
    # Log-sums instead of five bytes a score, and no mask. The output is what the next layer saves.
    assert layer_bytes(s, b, h, a, is_tiled=True) == paper - 5 * scores - s * s + 4 * a * s * b


# -- attention that is not tiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
def test_the_profile_says_what_attention_that_is_not_tiled_costs(s: int, b: int, h: int, a: int) -> None:
    dtype = torch.bfloat16
    batch = torch.zeros(s, b, h, dtype=dtype)
    by_hand = trace_of(Subject(Layer(h, a), dtype), batch)
    in_tiles = trace_of(Subject(Layer(h, a, is_tiled=True), dtype), batch)
    assert in_tiles.untiled_attention == ()
    (found,) = by_hand.untiled_attention
    stage = next(call.index for call in by_hand.calls if call.site == "stage")
    assert (found.call, found.module) == (stage, "stage.action")
    assert (found.saved_bytes, found.tiled_bytes) == (5 * a * s * s * b, 4 * a * s * b)
    # What both layers save says the same, but for the causal mask, which is no probability.
    assert by_hand.saved_bytes(stage) - in_tiles.saved_bytes(stage) == found.saved_bytes - found.tiled_bytes + s * s


def untiled(action: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    trace = trace_of(Subject(action, torch.float32), torch.zeros(shape))
    return [(found.saved_bytes, found.tiled_bytes) for found in trace.untiled_attention]


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Gemma's, with a bias for distances, written in place."""
    scores = torch.tanh((q @ k.transpose(-2, -1)) / 50) * 50
    scores = scores + torch.zeros(scores.shape[-2:])
    return scores.masked_fill_(torch.zeros(scores.shape[-2:], dtype=torch.bool), -1e9).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def over_the_first_places(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys along the rows, half as many as queries."""
    k, v = k[:, :, : k.shape[2] // 2], v[:, :, : v.shape[2] // 2]
    return (k @ q.transpose(-2, -1)).softmax(-2).transpose(-2, -1) @ v


@pytest.mark.parametrize(
    ("attention", "matrices"), [(plain, 1), (capped, 1), (by_einsum, 1), (with_dropout, 3), (fallen_back, 3)]
)
def test_attention_is_known_however_it_is_written(attention: Attention, matrices: int) -> None:
    b, a, s, d = 2, 3, 16, 8
    scores = 4 * b * a * s * s
    assert untiled(heads_of(attention), (b, 3, a, s, d)) == [(matrices * scores, 4 * b * a * s)]


def test_a_row_of_attention_is_a_query_wherever_the_keys_lie() -> None:
    b, a, s, d = 2, 3, 16, 8
    assert untiled(heads_of(over_the_first_places), (b, 3, a, s, d)) == [(4 * b * a * s * s // 2, 4 * b * a * s)]


def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Any = Recomputed.apply(q, k, v, plain)
    return out


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).relu() @ v


def that_ends_with_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) * v.sum()


def of_no_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q + k).softmax(-1) @ v.transpose(-2, -1)


@pytest.mark.parametrize("other", [tiled, recomputed, without_softmax, that_ends_with_softmax, of_no_product])
def test_what_saves_no_probabilities_or_is_no_attention_is_not_named(other: Attention) -> None:
    assert untiled(heads_of(other), (2, 3, 3, 16, 8)) == []


class Router(nn.Module):
    """Mixes the rows of its input by gates that a weight makes, a product a batch row."""

    def __init__(self, features: int, choices: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, choices))

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.bmm(x, self.weight.expand(len(x), -1, -1)).softmax(-1)
        return torch.bmm(gates.transpose(1, 2), x)


def test_a_softmax_of_a_product_with_a_weight_is_a_router_and_no_attention() -> None:
    assert untiled(Router(8, 4), (2, 16, 8)) == []


# -- states of the model ---------------------------------------------------------------------------------------------


DEVICE, HOST = Tier.DEVICE, Tier.HOST


@dataclass(frozen=True)
class Resting:
    """Bytes a parameter when backward is through and nothing is updated yet."""

    device: float
    home: float
    """At their peak, elsewhere: what ZeRO would cut over the ranks."""


def predicted(layers: int, weights: Tier, gradients: Tier, states: Tier) -> Resting:
    """A plan of mixed precision with Adam: bf16 weights and gradients, fp32 masters and moments."""
    width = 256
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    driver = driver_of(torch.optim.Adam(model.parameters()), model)
    problem = Problem(model=model, loss=total, driver=driver, block_map=find_blocks(model, None))
    block = BlockPlan(weight_home=weights, gradient_home=gradients, state_home=states)
    blocks = {found.name: block for found in problem.block_map.blocks}
    plan = Plan(compute_dtype=ComputeDtype.BFLOAT16, update=UpdateTime.AFTER_BACKWARD, blocks=blocks)
    profile = problem.profile_for(plan, torch.zeros(1, width))
    timeline = predict(lower(build_step(plan, profile, clips_norm=False), plan, profile))
    last = [moment for moment in timeline.moments if moment.action.startswith("backward")][-1]
    parameters = layers * width * width
    # The batch and the loss are there too: one row.
    return Resting(round(last.after_bytes / parameters, 1), round(timeline.peak_in(HOST) / parameters, 1))


@pytest.mark.parametrize("layers", [4, 10])
def test_what_zero_cuts_over_ranks_memfit_moves_home(layers: int) -> None:
    def split(form: Callable[[int, int], float]) -> tuple[float, float]:
        """(bytes a parameter that a rank keeps whole, bytes that are cut over the ranks)."""
        one, many = form(1, 1), form(1, 10**9)
        return round(many, 1), round(one - many, 1)

    assert predicted(layers, DEVICE, DEVICE, DEVICE) == Resting(forms.data_parallel(1), 0)
    assert predicted(layers, DEVICE, DEVICE, HOST) == Resting(*split(forms.zero_1))
    # A block's gradient is on the device still; at home gradients add up in four bytes, not two.
    whole, cut = split(forms.zero_2)
    assert predicted(layers, DEVICE, HOST, HOST) == Resting(round(whole + 2 / layers, 1), cut + 2)
    # A block's weight too.
    whole, cut = split(forms.zero_3)
    assert predicted(layers, HOST, HOST, HOST) == Resting(round(whole + 4 / layers, 1), cut + 2)


@pytest.mark.parametrize(("dtype", "moments"), [(torch.float32, 8), (torch.bfloat16, 4)])
def test_a_model_in_one_dtype_has_no_master_and_moments_of_its_own_dtype(dtype: torch.dtype, moments: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(3)))
    profile = memfit.profile(model, torch.optim.Adam(model.parameters()), total, torch.zeros(1, 64, dtype=dtype))
    sizes = profile.weight_bytes, sum(block.gradient_bytes for block in profile.blocks)
    assert [size / (3 * 64 * 64) for size in sizes] == [dtype.itemsize] * 2
    # Beside a counter of steps.
    assert sum(profile.state_bytes.values()) / (3 * 64 * 64) == pytest.approx(moments, abs=0.02)


# -- the page --------------------------------------------------------------------------------------------------------


def stated_forms() -> Mapping[str, str]:
    """Functions and expressions in the page's tables, as `| ... | `name(...)` | `expression` |`."""
    rows = re.findall(r"^\|.*?`(\w+)\(([^`]*)\)` \| `([^`]+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for name, parameters, _ in rows:
        assert list(inspect.signature(getattr(forms, name)).parameters) == parameters.split(", ")
    return {name: expression for name, _, expression in rows}


def test_the_page_states_every_form_and_each_as_it_is_computed() -> None:
    stated = stated_forms()
    functions = {name: form for name, form in vars(forms).items() if inspect.isfunction(form)}
    assert stated.keys() == functions.keys()
    for name, form in functions.items():
        for first in (1, 2, 5):
            values = {name: first * (3 + index) for index, name in enumerate(inspect.signature(form).parameters)}
            said = eval(stated[name], {"__builtins__": {}}, values)
            assert said == pytest.approx(form(**values)), name
