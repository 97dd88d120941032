"""The largest size and the smallest limit, against plans for every size and limit nearby, made one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.limits import DEVICE_RESERVE_BYTES, MIB
from memfit.planner.advise import advise
from memfit.planner.extremes import batches_like, find_largest, find_smallest_limit
from unit.test_cli import run
from unit.test_explaining import small_card

WIDTH = 64
LIMIT = 2 * MIB + DEVICE_RESERVE_BYTES


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
    return model, torch.optim.AdamW(model.parameters()), lambda m, x: (m(x) - x).square().mean()


def batch(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 160, WIDTH)


def seconds_of(parts: tuple[Any, Any, Any], sample: torch.Tensor, limit: int = LIMIT) -> float | None:
    try:
        found = advise(*parts, sample, limit=limit, hardware=small_card(), numerics="exact")
    except DoesNotFitError:
        return None
    assert found.predicted_peak_bytes <= limit
    return found.timeline.seconds


def test_the_largest_size_is_the_last_of_all_that_fits(parts: tuple[Any, Any, Any]) -> None:
    asked: dict[str, Any] = {"limit": LIMIT, "hardware": small_card(), "numerics": "exact"}
    found = find_largest(*parts, batch, start=2, **asked)
    every = {size: seconds_of(parts, batch(size)) for size in range(1, found.size + 3)}
    fitting = [size for size, seconds in every.items() if seconds is not None]
    assert 4 < found.size == max(fitting) and found.next_size == found.size + 1
    assert found.advice.timeline.seconds == every[found.size] and "fits the limit" in found.why
    # As fast as an earlier one, and as nothing that is larger.
    step_seconds = every[3]
    assert step_seconds is not None
    faster = find_largest(*parts, batch, start=found.size, step_seconds=step_seconds, **asked)
    assert faster.size == max(size for size in fitting if (every[size] or 0.0) <= step_seconds) < found.size
    assert "s a step" in faster.why
    least = find_largest(*parts, batch, at_most=2, **asked)
    assert (least.size, least.why) == (2, "no more was to be asked about")


def test_the_smallest_limit_is_as_fast_as_asked_and_less_is_slower(parts: tuple[Any, Any, Any]) -> None:
    sample = batch(16)
    fastest = advise(*parts, sample, hardware=small_card(), numerics="exact")
    least = find_smallest_limit(*parts, sample, step_seconds=60.0, hardware=small_card(), numerics="exact")
    slowest = least.timeline.seconds
    with pytest.raises(DoesNotFitError):
        advise(*parts, sample, limit=_limit_of(least) - MIB, hardware=small_card(), numerics="exact")
    for share in (0.0, 0.5):
        asked = fastest.timeline.seconds * (1 - share) + slowest * share
        found = find_smallest_limit(*parts, sample, step_seconds=asked, hardware=small_card(), numerics="exact")
        limit = _limit_of(found)
        again = seconds_of(parts, sample, limit)
        assert again == found.timeline.seconds <= asked
        below = seconds_of(parts, sample, limit - max(MIB, limit // 100))
        assert below is None or below > asked


def _limit_of(advice: Any) -> int:
    assert advice.budget.limit_bytes is not None
    return advice.budget.limit_bytes


def test_questions_without_an_answer_are_refused(parts: tuple[Any, Any, Any]) -> None:
    card: dict[str, Any] = {"hardware": small_card()}
    with pytest.raises(UsageError, match="a batch of size 1: the plan for it takes"):
        find_largest(*parts, batch, step_seconds=1e-9, **card)
    with pytest.raises(DoesNotFitError):
        find_largest(*parts, batch, limit=64 * MIB + 1024, **card)
    for wrong in ({"start": 2.5}, {"start": 0}, {"at_most": 0}):
        with pytest.raises(UsageError, match="give integers"):
            find_largest(*parts, batch, limit=LIMIT, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give the seconds"):
        find_largest(*parts, batch, step_seconds="2")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="every size fits"):
        find_largest(*parts, batch)
    with pytest.raises(UsageError, match="no limit makes it faster"):
        find_smallest_limit(*parts, batch(2), step_seconds=1e-9, **card)
    with pytest.raises(UsageError, match="leave limit= out"):
        find_smallest_limit(*parts, batch(2), step_seconds=1.0, limit=LIMIT, **card)


def test_batches_grow_by_their_own_rows() -> None:
    sample: dict[str, Any] = {"x": torch.arange(6).reshape(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0)}
    sized, rows = batches_like(sample)
    assert rows == 3
    for rows in (1, 3, 8):
        made = sized(rows)
        assert made["x"].tolist() == [sample["x"][row % 3].tolist() for row in range(rows)]
        assert made["names"] == ["abc"[row % 3] for row in range(rows)] and made["scale"] == 2.0
    with pytest.raises(UsageError, match="what counts the rows"):
        batches_like(torch.tensor(1.0))


def test_the_command_finds_sizes_and_limits(tmp_path: Path) -> None:
    data, config = tmp_path / "found.json", tmp_path / "config.json"
    fields = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 24, "vocab_size": 64, "model_type": "gpt2"}
    config.write_text(json.dumps(fields))
    model = ("--model", str(config), "--sequence", "8", "--hardware", "h200", "--data", str(data))
    # As long as the model takes.
    text = run("plan", *model, "--batch", "2", "--largest", "sequence")
    told = json.loads(data.read_text())["found"]
    assert "the longest sequence: 24 tokens a row" in text and told["size"] == 24
    text = run("plan", *model, "--batch", "2", "--step-seconds", "60")
    limit = json.loads(data.read_text())["found"]["smallest_limit_bytes"]
    assert f"({limit} bytes)" in text and limit > 64 * MIB
    for arguments, told in {
        ("--largest", "rows"): "is batch or sequence",
        ("--step-seconds", "1", "--limit", "1GiB"): "needs --largest",
        ("--largest", "batch", "--explain"): "are for one limit",
    }.items():
        assert told in run("plan", *model, *arguments, code=2)
    text = run("plan", "--recipe", "gpt-tiny", "--hardware", "h200", "--largest", "sequence", code=2)
    assert "needs --model of a language model" in " ".join(text.split())
