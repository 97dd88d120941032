"""`benchmarks/measured_t4.json`: public runs on a T4 come out as predicted for a T4 that is not here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(name="measured")
def _measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("measured_gpu", "measured_subjects", "published_subjects", "common"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import measured_gpu

    return measured_gpu


def test_eager_attention_measured_on_a_t4_is_predicted(measured: Any) -> None:
    """A public run that was 15.6 % too low without softmax's product."""
    (run,) = (run for run in measured.read_runs() if run["name"] == "b42-TinyLlama-1.1B-Chat-v1.0-eager-nf4-b2-s2048")
    assert -0.005 < measured.predict(run)["error"] < 0.005


@pytest.mark.slow
def test_all_public_runs_on_a_t4_are_predicted(measured: Any) -> None:
    rows = [measured.predict(run) for run in measured.read_runs()]
    assert len(rows) == 50
    assert measured.holds(rows)
