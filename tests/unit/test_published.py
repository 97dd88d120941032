"""`benchmarks/published_cases.json`: every figure has a source, and those that are arithmetic come out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(name="published")
def _published(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("published", "published_subjects"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import published

    return published


def test_every_figure_has_a_source_with_its_table_and_address(published: Any) -> None:
    sources, cases = published.read_cases()
    assert len(cases) >= 40
    assert len({case["id"] for case in cases}) == len(cases)
    assert {case["source"] for case in cases} == sources.keys()
    assert all(source[key] for source in sources.values() for key in ("title", "table", "measures"))
    assert all(source["link"].startswith("https://") for source in sources.values())


def test_what_is_said_to_follow_from_formulas_follows(published: Any) -> None:
    """Within the rounding that each case states."""
    _, cases = published.read_cases()
    checked = [case for case in cases if case["kind"] == "terms" and "within" in case]
    assert len(checked) >= 8
    for case in checked:
        found = published.by_terms(case).nbytes / published.published_bytes(case)
        assert found == pytest.approx(1, abs=case["within"]), case["id"]


@pytest.mark.slow
def test_states_of_a_published_model_are_counted_from_its_shapes(published: Any) -> None:
    """Of the smallest: 58,073,600 parameters by hand, in bf16 two bytes each for weights and
    gradients and four for moments.
    """
    pytest.importorskip("transformers")
    from published_subjects import build  # pyright: ignore[reportMissingImports]

    (case,) = (case for case in published.read_cases()[1] if case["id"] == "fira-60m")
    subject = build(case["subject"])
    assert subject.optimizer.__class__ is torch.optim.AdamW
    profile = memfit.profile(subject.model, subject.optimizer, subject.loss, subject.batch)
    layer = 4 * 512**2 + 3 * 512 * 1376 + 2 * 512
    parameters = 2 * 32000 * 512 + 8 * layer + 512
    assert published.by_states(case, profile).nbytes == 8 * parameters


def test_results_are_those_of_the_cases(published: Any) -> None:
    _, cases = published.read_cases()
    rows = json.loads((BENCHMARKS / "results" / "published.json").read_text(encoding="utf-8"))["rows"]
    assert [row["id"] for row in rows] == [case["id"] for case in cases]
    for row, case in zip(rows, cases, strict=True):
        assert row["published_bytes"] == round(published.published_bytes(case))
        assert row["error"] == pytest.approx(row["predicted_bytes"] / row["published_bytes"] - 1, abs=1e-4)
