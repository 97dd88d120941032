"""State of a model that is neither a parameter nor an ordinary buffer goes on with a run and with every copy of it.

A module's extra state (`get_extra_state`), and buffers whose elements share memory (`expand`), which torch's own `copy_` refuses.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import StoreError, UsageError
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier
from memfit.job.loading import load
from memfit.runs.exporting import export_run

pytestmark = pytest.mark.usefixtures("generators_as_before")

WIDTH = 8


class Counting(nn.Module):
    """What it computes depends on how often it was trained, which is in its extra state alone, and longer each time."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []
        self.register_buffer("offset", torch.zeros(1, WIDTH).expand(3, WIDTH))

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seen, dtype=torch.int16)

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state.tolist()

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(self.seen))
            self.offset[0] += 1
        return self.linear(rows) * (1 + 0.1 * sum(self.seen)) + self.offset.mean(0)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counting(), nn.Linear(WIDTH, WIDTH))


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().mean()


def _batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


_ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
_PLANS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "generations": (Plan(), {}),
    "journal": (
        Plan(blocks={"0": _ON_DISK, "1": _ON_DISK}, update=UpdateTime.AFTER_BACKWARD),
        {"scheme": "journal"},
    ),
}


def _fit(model: nn.Module, **options: Any) -> memfit.Job:
    return memfit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2), _loss, _batch(0), **options)


def _train(model: nn.Module, job: memfit.Job, until: int) -> dict[str, Tensor]:
    with job:
        for step in range(job.steps, until):
            job.step(_batch(step))
    return {name: value.clone() for name, value in model.state_dict().items()}


def _plain(until: int) -> dict[str, Tensor]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(until):
        optimizer.zero_grad()
        _loss(model, _batch(step)).backward()
        optimizer.step()
    return model.state_dict()


def _assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("name", _PLANS)
def test_it_belongs_to_each_commit(name: str, tmp_path: Path) -> None:
    plan, options = _PLANS[name]
    found: dict[str, Tensor] = {}
    for _, end in itertools.pairwise((0, 2, 3, 5)):
        model = _model()
        found = _train(model, _fit(model, plan=plan, store=tmp_path / "run", **options), end)
    _assert_same(found, _plain(5))


def test_it_goes_with_saves_and_exports(tmp_path: Path) -> None:
    model = _model()
    job = _fit(model, store=tmp_path / "run")
    for step in range(2):
        job.step(_batch(step))
    job.save(tmp_path / "saved")
    job.close()
    export_run(tmp_path / "run", tmp_path / "exported")
    wanted = _plain(2)
    for source in ("saved", "exported"):
        plain = _model()
        load(tmp_path / source, plain, torch.optim.AdamW(plain.parameters()))
        _assert_same(plain.state_dict(), wanted)
        model = _model()
        _assert_same(_train(model, _fit(model, weights=tmp_path / source), 0), wanted)
        model = _model()
        job = _fit(model)
        job.load(tmp_path / source)
        _assert_same(_train(model, job, 5), _plain(5))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = _model()
    _fit(model, store=tmp_path / "run").close()
    other = _model()
    other[0].offset = torch.zeros(1, WIDTH).expand(3, WIDTH)
    kept = Counting.get_extra_state
    del Counting.get_extra_state
    try:
        with pytest.raises(StoreError, match="extra state of"):
            _fit(other, store=tmp_path / "run")
    finally:
        Counting.get_extra_state = kept  # type: ignore[method-assign]
    torch.save(model.state_dict() | {"0.offset": torch.arange(3 * WIDTH).view(3, WIDTH).float()}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="share memory"):
        _fit(_model(), weights=tmp_path / "other.pt")
