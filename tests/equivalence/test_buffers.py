"""Buffers that a forward changes: where microbatches could be told from the whole batch the split is refused, elsewhere it is bitwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import memfit
from equivalence import plans, zoo
from equivalence.compare import assert_equal_training, same_bits
from equivalence.plain import adamw
from equivalence.with_memfit import fit_case, fit_with, profile_of
from memfit.core.errors import UnsupportedError
from memfit.core.plan import Plan

WIDTH = zoo.WIDTH
Change = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    """A linear layer; `change` does something with the buffers a, b and count."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = change
        self.a: Tensor
        self.b: Tensor
        self.count: Tensor
        self.register_buffer("a", torch.zeros(WIDTH))
        self.register_buffer("b", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.linear(x))


def case_of(*layers: nn.Module) -> zoo.Case:
    torch.manual_seed(0)
    return zoo.Case(model=nn.Sequential(*layers).train(), loss=zoo.distance, batch=zoo.rows)


def of_change(change: Change) -> zoo.Case:
    torch.manual_seed(0)
    return case_of(*(Layer(change) for _ in range(3)), nn.Linear(WIDTH, WIDTH))


# -- what the rows or the order can be told from -------------------------------------------------------------------


def running_mean(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.a.lerp_(x.mean((0, 1)), 0.1)
    return x


def running_range(layer: Any, x: Tensor) -> Tensor:
    layer.a = torch.maximum(layer.a, x.detach().amax((0, 1)))
    return x


def into_data(layer: Any, x: Tensor) -> Tensor:
    layer.a.data = x.detach()[0, 0].clone()
    return x


def a_part(layer: Any, x: Tensor) -> Tensor:
    layer.a[:4] = x.detach()[0, 0, :4]
    return x


def by_way_of_another(layer: Any, x: Tensor) -> Tensor:
    layer.b.copy_(layer.a)
    torch.add(layer.a, x.detach()[0, 0], out=layer.a)
    return x


def as_a_number(layer: Any, x: Tensor) -> Tensor:
    layer.a.fill_(x.max().item())
    return x


def noise(layer: Any, x: Tensor) -> Tensor:
    layer.a.normal_()
    return x


def annealed(layer: Any, x: Tensor) -> Tensor:
    layer.count += 1
    return x / layer.count


def every_second_time(layer: Any, x: Tensor) -> Tensor:
    layer.count.add_(1)
    return 2 * x if layer.count.item() % 2 else x


def saved_for_backward(layer: Any, x: Tensor) -> Tensor:
    layer.a.copy_(layer.linear.weight.detach().amax(0))
    return x / layer.a


TELLING: dict[str, tuple[Change, str]] = {
    "running mean": (running_mean, "0.a"),
    "running range": (running_range, "0.a"),
    "into .data": (into_data, "0.a"),
    "a part": (a_part, "0.a"),
    "by way of another": (by_way_of_another, "0.a"),
    "as a number": (as_a_number, "0.a"),
    "noise": (noise, "0.a"),
    "annealed by a count": (annealed, "0.count"),
    "decided by a count": (every_second_time, "0.count"),
    "saved for backward": (saved_for_backward, "0.a"),
}


@pytest.mark.parametrize("kind", TELLING)
def test_a_split_that_buffers_would_tell_is_refused_by_the_buffer_s_name(kind: str) -> None:
    change, name = TELLING[kind]
    with pytest.raises(UnsupportedError, match="microbatches would not mean the same") as caught:
        fit_case(of_change(change), plan=Plan(microbatches=2))
    assert f"{name!r} (and 2 more)" in str(caught.value)
    assert "microbatches=1" in str(caught.value)


def test_the_whole_batch_is_bitwise_with_such_buffers_on_disk_and_recomputed(tmp_path: Path) -> None:
    def build() -> zoo.Case:
        return of_change(running_range)

    profile = profile_of(build())
    plan = Plan(blocks=plans.on_disk(profile), calls=plans.fates(profile, plans.RECOMPUTE))
    assert_equal_training(build, adamw(), fit_with(plan, tmp_path, keep_gradients=True))


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, spectral_norm])
def test_power_iterations_forbid_a_split_only_while_they_run(norm: Callable[[nn.Module], nn.Module]) -> None:
    case = case_of(*(norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
    assert not profile_of(case).may_split
    case.model.eval()
    assert profile_of(case).may_split


def test_running_statistics_of_instances_forbid_a_split_and_statistics_alone_do_not() -> None:
    for tracks in (True, False):
        found = profile_of(case_of(nn.Linear(WIDTH, WIDTH), nn.InstanceNorm1d(6, track_running_stats=tracks)))
        assert found.unsplittable_buffers == (("1.running_mean", "1.running_var") if tracks else ())


def test_ibert_s_running_ranges_forbid_a_split_and_the_whole_batch_is_bitwise(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"buffer 'ibert\.embeddings\.embeddings_act1\.x_min' \(and \d+ more\)"):
        fit_case(ibert(), plan=Plan(microbatches=2))
    profile = profile_of(ibert())
    plan = Plan(blocks=plans.on_disk(profile), calls=plans.fates(profile, plans.RECOMPUTE))
    assert_equal_training(ibert, adamw(), fit_with(plan, tmp_path, keep_gradients=True))
    quiet = ibert()
    quiet.model.eval()
    assert profile_of(quiet).may_split


def ibert() -> zoo.Case:
    """I-BERT in full precision: it watches the ranges of its activations, to quantize them one day."""
    from transformers import IBertConfig, IBertForMaskedLM

    config = IBertConfig(
        vocab_size=zoo.VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=zoo.TOKENS + 4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = IBertForMaskedLM(config).train()
    return zoo.Case(model=model, loss=zoo.model_loss, batch=zoo.masked_text, untouched=None, weight=zoo.count_labels)


# -- what they cannot be told from ---------------------------------------------------------------------------------


def counted(layer: Any, x: Tensor) -> Tensor:
    layer.count += 1
    return x


def cached(layer: Any, x: Tensor) -> Tensor:
    layer.a = torch.arange(float(x.shape[-1])) / 100
    layer.b.copy_(torch.zeros_like(x[0, 0]))
    return x + layer.a + layer.b


def grown(layer: Any, x: Tensor) -> Tensor:
    if not hasattr(layer, "places"):
        layer.register_buffer("places", torch.arange(float(x.shape[-1])) / 100)
    return x + layer.places


def of_the_weights(layer: Any, x: Tensor) -> Tensor:
    layer.a = layer.linear.weight.detach().amax(0)
    layer.b.copy_(layer.a)
    return x / layer.a + layer.b


SILENT: dict[str, Change] = {"count": counted, "cache": cached, "grown": grown, "of the weights": of_the_weights}


@pytest.mark.parametrize("kind", SILENT)
def test_counts_and_caches_split_bit_for_bit_as_plain_accumulation(kind: str, tmp_path: Path) -> None:
    def build() -> zoo.Case:
        return of_change(SILENT[kind])

    plan = Plan(microbatches=4, blocks=plans.on_disk(profile_of(build())))
    assert_equal_training(build, adamw(), fit_with(plan, tmp_path, keep_gradients=True), microbatches=4)


def test_showing_that_the_loss_adds_up_leaves_buffers_as_they_were() -> None:
    case = of_change(counted)
    before = {name: buffer.clone() for name, buffer in case.model.named_buffers()}
    with memfit.fit(case.model, adamw()(case.model), case.loss, case.batch(0), plan=Plan(microbatches=2)):
        for name, buffer in case.model.named_buffers():
            assert same_bits(buffer, before[name]), name
