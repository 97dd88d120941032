"""Weights that are away: touching one names it and the way to reach it, and never crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import plans, zoo
from equivalence.plain import adamw, sgd
from equivalence.touch_away import HARMLESS, TOUCHED, TOUCHES
from equivalence.with_memfit import fit_variant
from memfit.core.errors import (
    AwayError,
    MemfitError,
    UnsupportedError,
)
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier


@lru_cache(maxsize=1)
def _touched(directory: str) -> dict[str, dict[str, Any]]:
    roots = [str(Path(__file__).parents[1]), str(Path(memfit.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("touch_away.py"))
    child = subprocess.run(
        [sys.executable, script, directory], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert child.returncode == 0, f"the child died with {child.returncode}:\n{child.stderr[-4000:]}"
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def touched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return _touched(str(tmp_path_factory.mktemp("touched")))


@pytest.mark.parametrize("touch", [*TOUCHES, "behind job.weights()"])
def test_touching_a_weight_that_is_away_names_it_and_the_way_to_reach_it(
    touch: str, touched: dict[str, dict[str, Any]]
) -> None:
    result = touched[touch]
    assert result["status"] == 0, f"the process died by signal {-result['status']}"
    assert result["error"] is not None, "nothing was raised: the bytes that were read are nobody's"
    # torch hands the error of a single weight on as a RuntimeError of its own that holds the message.
    assert result["is_away_error"] or touch == "load_state_dict", result["traceback"]
    assert "job.weights" in result["message"]
    # What goes through all weights may meet another one first.
    whole = {"state_dict", "deepcopy-model", "torch.save", "parameters_to_vector"}
    assert TOUCHED in result["message"] or touch in whole
    assert ".weight" in result["message"] or ".bias" in result["message"]


@pytest.mark.parametrize("touch", [*HARMLESS, "inside job.weights()", "closed"])
def test_what_needs_no_bytes_or_has_them_just_works(touch: str, touched: dict[str, dict[str, Any]]) -> None:
    result = touched[touch]
    assert result["status"] == 0, f"the process died by signal {-result['status']}"
    assert result["error"] is None, result["traceback"]


def test_the_error_for_a_weight_that_is_away_is_of_both_families(tmp_path: Path) -> None:
    case = zoo.ZOO["kwargs"]()
    job = fit_variant("kwargs", plans.BY_NAME["disk"], tmp_path)(case, sgd()(case.model))
    job.step(case.batch(0))
    with pytest.raises(AwayError) as caught:
        case.model.get_parameter(TOUCHED).sum()
    assert isinstance(caught.value, MemfitError)
    assert isinstance(caught.value, RuntimeError)
    job.close()


@pytest.mark.parametrize("plan", ["resident", "disk", "offload"])
def test_calling_the_model_between_steps_just_works(plan: str, tmp_path: Path) -> None:
    case, reference = zoo.ZOO["kwargs"](), zoo.ZOO["kwargs"]()
    job = fit_variant("kwargs", plans.BY_NAME[plan], tmp_path)(case, adamw()(case.model))
    inputs = case.batch(0)["inputs"]
    for model in (case.model, reference.model):
        model.eval()
    assert torch.equal(case.model(inputs), reference.model(inputs))
    with torch.no_grad():
        assert torch.equal(case.model(inputs), reference.model(inputs))
    case.model.train()
    before = case.model.training
    job.step(case.batch(0))
    assert before
    assert case.model(inputs).shape == inputs.shape
    job.close()


class _Aside(torch.nn.Module):
    """Computes two layers; the loss may also take what the first one computed inside, which a closure keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))) for _ in range(2)
        )
        self.kept: list[torch.Tensor] = []
        kept = self.kept
        self.layers[0][1].register_forward_hook(lambda _module, _inputs, output: kept.append(output))  # type: ignore[index]

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        self.kept.clear()
        first = self.layers[0](batch["x"])
        last = self.layers[1](first if batch["goes_on"] else batch["x"])
        return last.square().mean() + (0.0 if batch["goes_on"] else self.kept[0].square().mean())


def test_a_gradient_by_a_way_that_nobody_foresaw_is_told_where_weights_are_away(tmp_path: Path) -> None:
    model = _Aside()
    x = torch.randn(4, 8)
    away = Plan(blocks={"layers.0": BlockPlan(weight_home=Tier.DISK)}, prefetch=0)
    with memfit.fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model.loss(batch),
        {"x": x, "goes_on": True},
        plan=away,
        directory=tmp_path,
        numerics="exact",
    ) as job:
        job.step({"x": x, "goes_on": True})
        with pytest.raises(UnsupportedError, match="a gradient reached a call by a tensor that it does not return"):
            job.step({"x": x, "goes_on": False})
