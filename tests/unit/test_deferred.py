"""The program behind a model that was built empty: what is noted, what is forgotten, what is played again, and when memory is touched."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.core.errors import UnsupportedError
from memfit.files.origin import Origin, build_empty, find_origins
from memfit.files.recording import BuildRecorder
from memfit.tensors.guard import is_away


class Names(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def origin_of(model: nn.Module) -> Origin:
    (found,) = find_origins(model)
    return found


def test_only_what_a_weights_values_depend_on_is_played_again() -> None:
    def build() -> nn.Module:
        model: Any = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])  # kaiming and uniform draws, all overwritten
        nn.init.normal_(model[0].weight)
        model[0].weight.data[0] = 1.0
        nn.init.zeros_(model[1].weight)
        return model

    model: Any = build_empty(build, draws=True, least_bytes=1)
    with Names() as names:
        origin_of(model).bring([model[0].weight])
    filled = [name for name in names.seen if name in ("normal_", "uniform_", "zero_", "fill_", "copy_")]
    assert filled == ["normal_", "fill_"], names.seen
    assert is_away(model[1].weight)


def test_a_value_that_is_computed_from_a_weight_is_that_of_its_moment() -> None:
    def build() -> nn.Module:
        model: Any = nn.Module()
        model.first = nn.Parameter(torch.full((8, 8), 2.0))
        model.copied = nn.Parameter(model.first.detach() * 3)
        with torch.no_grad():
            model.first.add_(1)
        return model

    model: Any = build_empty(build, draws=True, least_bytes=1)
    for name, value in (("copied", 6.0), ("first", 3.0)):
        parameter = getattr(model, name)
        origin_of(model).bring([parameter])
        assert torch.equal(parameter.detach(), torch.full((8, 8), value))


def test_arguments_that_are_ordinary_tensors_are_noted_with_the_values_they_had() -> None:
    def build() -> nn.Module:
        model = nn.Linear(64, 64, bias=False)
        scale = torch.ones(64)
        with torch.no_grad():
            model.weight.zero_().add_(scale)
        scale.mul_(5)  # later: no part of the weight
        return model

    model: Any = build_empty(build, draws=True, least_bytes=1024)
    origin_of(model).bring([model.weight])
    assert torch.equal(model.weight.detach(), torch.ones(64, 64))


def test_the_default_dtype_of_the_building_holds_when_it_is_played_again() -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: Any = nn.Module()
            model.weight = nn.Parameter(torch.ones(16, 16) / 3)
            return model
        finally:
            torch.set_default_dtype(torch.float32)

    plain: Any = build()
    model: Any = build_empty(build, draws=True, least_bytes=1)
    origin_of(model).bring([model.weight])
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight.detach(), plain.weight.detach())


def test_an_operation_that_changes_a_weight_and_an_ordinary_tensor_at_once_is_refused() -> None:
    with (
        BuildRecorder(draws=True, least_bytes=1024),
        pytest.raises(UnsupportedError, match="with and without bytes at once"),
    ):
        torch._foreach_add_([torch.zeros(32, 32), torch.zeros(3)], 1.0)  # pyright: ignore[reportPrivateImportUsage]


def test_what_a_weight_says_to_an_ordinary_tensor_is_computed_there_and_then() -> None:
    with BuildRecorder(draws=True, least_bytes=1024) as recorder:
        weight = torch.full((32, 32), 4.0)
        ordinary = torch.zeros(32)
        ordinary.copy_(weight.sum(0))
        assert recorder.key(weight) is not None
        assert recorder.key(ordinary) is None
    assert torch.equal(ordinary, torch.full((32,), 128.0))


def test_a_model_that_was_built_empty_dies_without_the_collector() -> None:
    import weakref

    gc.disable()
    try:
        model = memfit.empty(lambda: nn.Linear(256, 256))
        parts = [weakref.ref(model), weakref.ref(model.weight), weakref.ref(origin_of(model))]
        del model
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()


def test_a_buffer_and_a_tensor_that_code_keeps_have_their_values_at_once() -> None:
    kept: list[Tensor] = []

    def build() -> nn.Module:
        model = nn.Linear(8, 8, bias=False)
        model.register_buffer("mask", torch.ones(16, 16).tril())
        kept.append(torch.arange(300.0))
        return model

    model: Any = build_empty(build, draws=True, least_bytes=1)
    assert torch.equal(model.mask, torch.ones(16, 16).tril())
    assert torch.equal(kept[0], torch.arange(300.0))
