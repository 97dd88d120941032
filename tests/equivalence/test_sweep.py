"""The sweep keeps working: a few model types by a seed, and its comparison notices what is off."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODELS = ("gpt2", "detr", "clip", "wav2vec2", "perceiver", "t5")


def test_a_few_model_types_train_as_plain_pytorch_does_under_drawn_plans(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "sweep.py"),
        "--seed",
        "11",
        "--plans",
        "2",
        "--models",
        ",".join(MODELS),
    ]
    found = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {row["model"] for row in rows} == set(MODELS)
    assert all(row["outcome"] in ("bitwise", "declared rounding", "refused") for row in rows), found.stdout
    assert [row["outcome"] for row in rows if row["microbatches"] == 1] == ["bitwise"] * len(MODELS)


class _Job:
    """Answers with gradients of its own."""

    def __init__(self, gradients: dict[str, torch.Tensor]) -> None:
        self._gradients = gradients

    def gradient(self, name: str) -> torch.Tensor:
        return self._gradients[name]

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        yield


@pytest.fixture
def trial() -> Iterator[Any]:
    """The module that compares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from sweeping import trial  # pyright: ignore[reportMissingImports]

        yield trial


@pytest.mark.parametrize(("off_by", "outcome"), [(0.0, "bitwise"), (1e-6, "FAILED")])
def test_a_gradient_that_is_off_is_a_failure(trial: Any, off_by: float, outcome: str) -> None:
    model = torch.nn.Linear(2, 2)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = trial.Step(losses=[1.0], gradients={n: torch.ones_like(w) for n, w in weights.items()}, weights=weights)
    job = _Job({name: torch.ones_like(w) + off_by for name, w in weights.items()})
    found, _ = trial.compare(job, SimpleNamespace(losses=[1.0]), model, plain, frozenset())
    assert found == outcome
