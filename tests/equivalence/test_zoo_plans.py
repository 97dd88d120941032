"""Every model of the zoo, three steps under plans made by hand: all that plain PyTorch would compute, bit for bit.

The default suite trains each model under two plans and each plan with three models; `--slow` adds all other pairs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from equivalence import plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.plain import adamw
from equivalence.with_memfit import fit_known
from equivalence.zoo_pairs import FEW_PAIRS, PAIRS


def _pairs() -> list[object]:
    return [
        pytest.param(name, plan, id=f"{name}-{plan}", marks=[] if (name, plan) in FEW_PAIRS else [pytest.mark.slow])
        for name, plan in PAIRS
    ]


@pytest.mark.parametrize(("name", "plan"), _pairs())
def test_training_under_a_plan_equals_plain_pytorch_bit_for_bit(name: str, plan: str, tmp_path: Path) -> None:
    variant = plans.BY_NAME[plan]
    report = assert_equal_training(
        zoo.ZOO[name],
        adamw(),
        fit_known(name, variant, tmp_path, keep_gradients=True),
        microbatches=variant.microbatches,
        max_grad_norm=variant.max_grad_norm,
        may_reorder=variant.reorders,
    )
    assert report.reordered <= zoo.ZOO[name]().shared


def test_the_default_pairs_let_every_plan_meet_three_models_and_every_model_two_plans() -> None:
    for plan in plans.BY_NAME:
        assert sum(p == plan for _, p in FEW_PAIRS) >= 3, plan
    for model in zoo.ZOO:
        assert sum(name == model for name, _ in FEW_PAIRS) >= 2, model
