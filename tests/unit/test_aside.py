"""Weights put aside come back bit for bit, whatever happens in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.core.errors import StoreError
from memfit.files.weight_sources import WeightsAside
from memfit.store import FileOperations


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    first, second = nn.Linear(300, 200), nn.Linear(200, 300)
    tied = nn.Linear(300, 200)
    tied.weight = first.weight
    return nn.Sequential(first, second, tied)


def _bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _is_away(parameter: torch.Tensor) -> bool:
    return parameter.untyped_storage().nbytes() == 0


def test_large_weights_leave_and_come_back_in_place(tmp_path: Path) -> None:
    model = _model()
    before = _bits(model)
    pointers = {name: id(p) for name, p in model.named_parameters()}
    weights = dict(model.named_parameters())
    large, small = weights["0.weight"], weights["0.bias"]
    with WeightsAside(model.parameters(), tmp_path) as aside:
        assert _is_away(large) and not _is_away(small)
        assert large.shape == (200, 300)
        other = weights["1.weight"]
        aside.bring([other])
        assert not _is_away(other) and _is_away(large)
        assert torch.equal(other, before["1.weight"])
    assert {name: id(p) for name, p in model.named_parameters()} == pointers
    assert model.get_parameter("2.weight") is large
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert list(tmp_path.iterdir()) == []


def test_views_of_one_buffer_leave_once_and_borrowed_memory_stays(tmp_path: Path) -> None:
    flat = torch.randn(2, 100, 100)
    borrowed = torch.frombuffer(bytearray(80_000), dtype=torch.float32)
    parameters = [nn.Parameter(flat[0]), nn.Parameter(flat[1]), nn.Parameter(borrowed)]
    before = [p.detach().clone() for p in parameters]
    with WeightsAside(parameters, tmp_path) as aside:
        assert [_is_away(p) for p in parameters] == [True, True, False]
        aside.bring(parameters[:1])
        assert [_is_away(p) for p in parameters] == [False, False, False]
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_everything_is_back_when_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    before = _bits(model)
    calls: list[int] = []
    pwrite = FileOperations.pwrite

    def fails_second(self: FileOperations, *args: object) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return pwrite(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(FileOperations, "pwrite", fails_second)
    with pytest.raises(StoreError, match="No space left"):
        WeightsAside(model.parameters(), tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_weights_that_were_never_made_are_left_to_others(tmp_path: Path) -> None:
    model = _model()
    deferred = memfit.empty(lambda: nn.Linear(300, 200)).weight
    assert isinstance(deferred, nn.Parameter)
    before = _bits(model)
    with WeightsAside(model.parameters(), tmp_path) as aside:
        aside.bring([deferred, *model.parameters()])
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with WeightsAside(model.parameters(), tmp_path) as aside:
        aside.forget([deferred])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
