"""What runs teach about a machine: kept beside its file, averaged, applied, refused where it lies, and switched off."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.core.errors import MemfitWarning
from memfit.core.hardware import STEP_SPREAD, Hardware, Link, Rate, TierSpec, rates_of
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind
from memfit.devices.binding import install
from memfit.job import comparing
from memfit.machine import described
from memfit.machine.described import (
    Correction,
    correction_path,
    load_correction,
    measurement_of,
    save_correction,
)
from memfit.step.predict import GROUPS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def files_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_HARDWARE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEMFIT_CORRECTIONS", raising=False)


def machine() -> Hardware:
    """This machine, as a probe would name it, with rates that are far from its own."""
    link = Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    return Hardware(
        device="cpu",
        flops_per_s=1e11,
        tiers={Tier.DEVICE: TierSpec(nbytes=1 << 40), Tier.DISK: TierSpec(nbytes=1 << 40, link=link)},
        rates={WorkKind.OPERATIONS: Rate(1e6, 0.1)},
        origin={
            **described.identity_of(CPU),
            "measured": "once",
            "disk": described.disk_name(Path(os.environ.get("TMPDIR", "/tmp"))),
        },
    )


def save_machine() -> Path:
    path = described.saved_path(described.identity_of(CPU))
    described.save(machine(), path)
    return path


def correction(**factors: float) -> Correction:
    return Correction(of=measurement_of(machine()), factors=factors, seconds=dict.fromkeys(factors, 1.0), ratios=(1.5,))


def test_a_saved_machine_is_read_with_its_corrections_and_without_where_they_are_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save_machine()
    before = rates_of(machine())
    save_correction(correction(overhead=2.0), correction_path(path))
    found = described.load_saved(CPU)
    assert found is not None
    for kind, rate in rates_of(found).items():
        slower = 2.0 if kind in GROUPS["overhead"] else 1.0
        assert rate.per_s == pytest.approx(before[kind].per_s / slower), kind
    assert found.origin["corrected"] == "by 1 runs"
    monkeypatch.setenv("MEMFIT_CORRECTIONS", "off")
    plain = described.load_saved(CPU)
    assert plain is not None and rates_of(plain) == before


def test_another_measurement_begins_without_corrections() -> None:
    path = save_machine()
    save_correction(correction(products=2.0), correction_path(path))
    again = replace(machine(), origin={**machine().origin, "measured": "later"})
    described.save(again, path)
    assert described.load_saved(CPU) == again


def flawed() -> list[tuple[str, str]]:
    def changed(**changes: Any) -> str:
        whole = {"format": 1, "of": "a" * 32, "factors": {}, "seconds": {}, "ratios": [1.0]}
        return json.dumps({**whole, **changes})

    return [
        ("{", ""),
        ("[]", "format"),
        (changed(format=2), "format"),
        (changed(format=True), "format"),
        (changed(of="short"), "digest"),
        (changed(factors={"speed": 1.0}), "unknown group 'speed'"),
        (changed(factors={"products": 1e9}), "number of 'factors'"),
        (changed(factors={"products": "2"}), "number of 'factors'"),
        (changed(seconds={"products": -1}), "number of 'seconds'"),
        (changed(ratios=[1.0] * 65), "more than 64"),
        (changed(ratios=[0.0]), "number of 'ratios'"),
        (changed(ratios=[True]), "number of 'ratios'"),
        (changed(ratios="x" * (1 << 17)), "more than"),
        (changed(of=None, factors=None).replace("null", "NaN"), ""),
    ]


@pytest.mark.parametrize(("text", "said"), flawed())
def test_files_that_lie_are_told_and_not_used(text: str, said: str) -> None:
    path = save_machine()
    correction_path(path).write_text(text)
    with pytest.warns(MemfitWarning, match="memfit probe alone") as caught:
        found = described.load_saved(CPU)
    assert said in str(caught[0].message)
    assert found == machine()


def test_a_pipe_in_its_place_does_not_hang() -> None:
    path = save_machine()
    os.mkfifo(correction_path(path))
    assert described.load_saved(CPU) == machine()


def test_a_write_that_fails_leaves_the_file_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    path = correction_path(save_machine())
    save_correction(correction(products=2.0), path)
    before = path.read_text()

    def failing(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memfit.core.documents.os.fsync", failing)
    with pytest.raises(OSError, match="No space"):
        save_correction(correction(products=3.0), path)
    assert path.read_text() == before
    assert sorted(p.name for p in path.parent.iterdir()) == sorted([path.name, path.name.replace(".corrections", "")])


factors = st.floats(0.25, 4.0)
runs = st.lists(st.tuples(factors, st.floats(0.01, 100.0)), min_size=1, max_size=12)


@given(runs)
def test_factors_are_averaged_by_the_seconds_that_they_rest_on(found: list[tuple[float, float]]) -> None:
    """Against the same average in plain arithmetic on what each run measured, relative to the file."""
    kept = Correction(of="x" * 32)
    log_mean = weight = 0.0
    for absolute, seconds in found:
        relative = min(max(absolute / kept.factors.get("products", 1.0), 0.25), 4.0)
        measured = math.log(kept.factors.get("products", 1.0) * relative)
        kept = kept.followed_by({"products": relative, "updates": 3.0}, {"products": seconds, "updates": 0.0}, 1.0)
        old = min(weight, 10 * seconds)
        log_mean = (log_mean * old + measured * seconds) / (old + seconds)
        log_mean, weight = min(max(log_mean, math.log(0.25)), math.log(4.0)), old + seconds
    assert math.log(kept.factors["products"]) == pytest.approx(log_mean, abs=1e-6)
    assert "updates" not in kept.factors  # no seconds, nothing learnt
    assert len(kept.ratios) == len(found)


@given(st.lists(st.floats(0.5, 2.0), min_size=5, max_size=64))
def test_the_spread_holds_nine_of_ten_runs(ratios: list[float]) -> None:
    spread = Correction(of="x" * 32, ratios=tuple(ratios)).spread
    assert spread is not None
    held = sum(1 / (1 + spread) - 1e-9 <= ratio <= 1 + spread + 1e-9 for ratio in ratios)
    assert held >= 0.9 * len(ratios)


def test_few_runs_say_no_spread() -> None:
    few = Correction(of=measurement_of(machine()), ratios=(1.0,) * 4)
    assert few.spread is None and few.applied(machine()).step_spread == STEP_SPREAD
    assert replace(few, ratios=(1.1,) * 5).applied(machine()).step_spread == pytest.approx(0.1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x))


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def run(steps: int, **more: Any) -> Any:
    model = nn.Sequential(*(Layer() for _ in range(4)))
    batch = torch.ones(8, 64)
    with memfit.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), squared, batch, enforce=False, **more) as job:
        for _ in range(steps):
            job.step(batch)
        return job.compared.result()


def test_a_job_compares_its_first_steps_and_the_next_one_predicts_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_BUSY_MACHINE", math.inf)
    install()
    path = save_machine()
    first = run(5)
    assert first is not None and first.steps == 3
    # No machine has Python that calls a million operations a second.
    assert first.ratio > 1.5 and first.deviations
    assert f"{first.measured_s:.3g} s where {first.predicted_s:.3g} s were predicted" in first.sentence()
    found = load_correction(machine(), correction_path(path))
    assert found.ratios == (pytest.approx(first.ratio),)
    assert found.factors["overhead"] > 1
    second = run(5)
    assert second is not None
    assert abs(math.log(second.ratio)) < abs(math.log(first.ratio))
    assert len(load_correction(machine(), correction_path(path)).ratios) == 2


def test_nothing_is_learnt_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_BUSY_MACHINE", 0.0)
    install()
    path = correction_path(save_machine())
    found = run(5)
    assert found is not None and not found.is_quiet and "others used" in found.sentence()
    assert not path.exists()


def test_nothing_is_learnt_where_it_is_off_of_a_given_machine_or_from_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "_BUSY_MACHINE", math.inf)
    install()
    path = correction_path(save_machine())
    assert run(4) is None and not path.exists()
    assert run(5, hardware=replace(machine(), origin={})) is not None and not path.exists()
    monkeypatch.setenv("MEMFIT_CORRECTIONS", "off")
    assert run(5) is not None and not path.exists()
