"""Numbers of thousands of digits, and names longer than a file can have: errors of ours, in lines that can be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.hardware import read_hardware, read_tiers
from memfit.core.limits import MOST_BYTES, parse_bytes

DIGITS, NUMBER, NAME = "9" * 5000, 10**5000, "n" * 300
BATCH = torch.randn(4, 8)


def fit(**wishes: Any) -> memfit.Job:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return memfit.fit(model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b).square().mean(), BATCH, **wishes)


def hardware(**fields: object) -> str:
    """A description whose text has a number of 4,000 digits, which `json` writes and reads."""
    return json.dumps({**json.loads(read_hardware("h200").to_json()), **fields})  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    "size",
    [DIGITS, f"{DIGITS}GiB", f"1.{DIGITS}GiB", NUMBER, 10**4000, -NUMBER, MOST_BYTES + 1, "8EiB", "9999999999TiB"],
    ids=["digits", "GiB", "fraction", "number", "fewer", "negative", "more by one", "unit", "TiB"],
)
def test_a_size_of_thousands_of_digits_is_refused_wherever_sizes_are_read(size: Any) -> None:
    with pytest.raises(memfit.UsageError) as found:
        parse_bytes(size)
    assert len(str(found.value)) < 240
    with pytest.raises(memfit.UsageError):
        fit(limit=size)
    with pytest.raises(memfit.UsageError):
        fit(host_limit=size)
    if isinstance(size, str):
        with pytest.raises(memfit.UsageError):
            read_tiers(f"device={size}")


def test_the_largest_size_is_read() -> None:
    assert parse_bytes(MOST_BYTES) == parse_bytes(str(MOST_BYTES)) == MOST_BYTES


@pytest.mark.parametrize("number", [NUMBER, -NUMBER, 10**4000], ids=["most", "least", "fewer"])
@pytest.mark.parametrize("name", ["max_grad_norm", "durability"])
def test_a_setting_of_thousands_of_digits_is_refused(name: str, number: int, tmp_path: Path) -> None:
    with pytest.raises(memfit.UsageError) as found:
        fit(**{name: number, "store": tmp_path / "run"})
    assert len(str(found.value)) < 240


def test_more_than_one_number_is_no_norm_to_clip_to() -> None:
    with pytest.raises(memfit.UsageError, match="max_grad_norm must be a number above 0"):
        fit(max_grad_norm=torch.ones(2))


@pytest.mark.parametrize("field", ["flops_per_s", "device_bytes", "step_spread", "format", "pcie_generation"])
def test_a_hardware_file_with_thousands_of_digits_is_refused(field: str) -> None:
    for number in (10**4000, int("1" * 4200)):
        with pytest.raises(memfit.UsageError) as found:
            read_hardware(hardware(**{field: number}))
        assert len(str(found.value)) < 1000
    text = hardware().replace("{", f'{{"{field}": {DIGITS}, ', 1)
    with pytest.raises(memfit.UsageError, match="cannot|not JSON"):
        read_hardware(text)


LONG: dict[str, Callable[[Path, Path], object]] = {
    "store": lambda long, _: fit(store=long),
    "resume": lambda long, _: fit(resume=long),
    "weights": lambda long, _: fit(weights=long),
    "save": lambda long, _: fit().save(long),
    "load": lambda long, _: fit().load(long),
    "load_states": lambda long, _: fit().load_states(long),
    "report": lambda long, _: fit().report(long),
    "average": lambda long, _: memfit.MemfitEma(fit(), path=long),
    "hardware": lambda long, _: read_hardware(str(long)),
    "machine": lambda *_: read_hardware(NAME),
    "block": lambda *_: fit().on_update(NAME, print),
    "gradient": lambda *_: fit(keep_gradients=True).gradient(NAME),
}


@pytest.mark.parametrize("name", LONG)
def test_a_name_of_three_hundred_characters_is_refused_in_words(name: str, tmp_path: Path) -> None:
    with pytest.raises(memfit.MemfitError) as found:
        LONG[name](tmp_path / NAME, tmp_path)
    assert str(found.value)


@pytest.mark.parametrize(
    "path",
    ["a\0b", "~nobody-of-this-name/run", "a\ud800b", "/".join(["d" * 200] * 30)],
    ids=["zero", "home", "half", "deep"],
)
def test_what_is_no_path_is_refused_in_words(path: str) -> None:
    with pytest.raises(memfit.UsageError, match="path"):
        fit(store=path)
