"""Mistakes that a person makes with descriptions of machines, with the command line's subjects and with models that cannot be traced, and what they are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.cli.source import find_function
from memfit.core.errors import AwayError, UnsupportedError, UsageError
from memfit.core.hardware import Hardware, read_hardware
from memfit.core.limits import GIB
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier

H200 = read_hardware("h200")
assert H200 is not None
TEXT = H200.to_json()


def edited(**fields: Any) -> str:
    """The description of a shipped machine with other fields; None leaves one out."""
    return json.dumps({k: v for k, v in {**json.loads(TEXT), **fields}.items() if v is not None})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (edited(flop_per_s=1e12), "unknown field 'flop_per_s': did you mean 'flops_per_s'?"),
        (edited(host_bytes=None), "has no 'host_bytes', the capacity of the tier with the link 'host'"),
        (edited(host=None), "has no 'host', the link to the tier whose capacity is 'host_bytes'"),
        (edited(device_bytes="141GiB"), f"write {141 * GIB}"),
        (edited(device_bytes="large"), "a whole number of bytes from 1, not 'large'"),
        (edited(format=7), 'says "format": 1; this one says 7'),
        (edited(device="cpu"), "has no tier 'host' beside it"),
        (edited(disk={"read_bytes_per_s": 1e9}), "'disk' of the hardware file has no 'write_bytes_per_s'"),
        ("{}", 'says "format": 1'),
        ('{"format": 1,', "not JSON that can be read"),
    ],
)
def test_a_description_that_contradicts_itself_is_told_what_is_missing(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Hardware.from_json(text)
    assert told in str(caught.value)
    assert Hardware.from_json(TEXT) == H200


@pytest.mark.parametrize(
    ("name", "near"),
    [("a100", ["a100-40gb", "a100-80gb"]), ("H300", ["h200"]), ("rtx 4080", ["rtx-4090"]), ("mi300", ["mi300x"])],
)
def test_an_unknown_machine_is_answered_with_the_nearest_names(name: str, near: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read_hardware(name)
    guess = str(caught.value).partition("did you mean ")[2].partition("?")[0]
    assert all(repr(one) in guess for one in near)


def test_a_file_in_a_module_s_place_and_a_misspelt_function_are_told_the_right_words() -> None:
    with pytest.raises(UsageError, match=r"write its name, not its file: training:build"):
        find_function("training.py:build")
    with pytest.raises(UsageError, match="has no function 'cos_': did you mean 'cos'"):
        find_function("math:cos_")


def test_a_config_that_is_not_there_is_called_missing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from memfit.integrations.recipes.model_recipe import build_configured

    with pytest.raises(UsageError, match="there is no file"):
        build_configured(tmp_path / "config.json", batch_size=1, sequence_length=8)


WIDTH = 2048


def test_an_empty_model_that_needs_values_is_told_the_operation_the_line_and_the_weight() -> None:
    def made(work: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        return memfit.empty(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), _Work(work)))

    model = made(lambda x: x[x > 0])
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(AwayError) as caught:
        memfit.profile(model, optimizer, lambda m, b: m(b).square().mean(), torch.randn(2, WIDTH))
    told = str(caught.value)
    assert "nonzero" in told
    assert "test_clear_errors.py, line" in told
    assert "'0.weight' has no bytes" in told


def test_a_program_that_needs_data_is_measured_in_a_real_step_and_that_is_said() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Work(_of_large_ones))
    optimizer = torch.optim.AdamW(model.parameters())
    with memfit.fit(model, optimizer, _square, torch.randn(2, WIDTH)) as job:
        assert job.profile.source == "real"
        assert "Measured in real steps of [2] rows, since none without data goes: " in job.reason


def test_a_real_step_that_meets_the_limit_is_told_with_what_asked_for_it() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        _of_large_ones(x)
        raise torch.OutOfMemoryError("no room")

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Work(work))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError) as caught:
        memfit.profile(model, optimizer, _square, torch.randn(2, WIDTH))
    told = str(caught.value)
    assert "cannot be traced without data" in told
    assert "real step of 2 rows" in told
    assert "met the limit" in told


def _square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _of_large_ones(x: torch.Tensor) -> torch.Tensor:
    return x * x[x > 0].sum()


class _Work(nn.Module):
    def __init__(self, work: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(x)


def test_a_state_dict_of_weights_that_are_away_says_what_saves_and_averages_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = Plan(blocks={"0": BlockPlan(weight_home=Tier.DISK)})
    with memfit.fit(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).sum(), torch.ones(2, 4), plan=plan
    ):
        with pytest.raises(AwayError, match=r"job\.save\(directory\).*MemfitEma"):
            model.state_dict()
        with pytest.raises(AwayError) as caught:
            model.get_parameter("0.weight").sum()
    assert "MemfitEma" not in str(caught.value)
