"""A fit that is refused leaves a model that was built empty as it was: without the bytes of its weights, ready to be fitted otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence.compare import same_bits
from memfit.core.errors import StoreError, UnsupportedError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.store import Region
from memfit.tensors.guard import is_away

WIDTH, LAYERS = 256, 8
LAYER_BYTES = 4 * WIDTH * WIDTH


def _build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _contrastive(model: nn.Module, rows: Tensor) -> Tensor:
    """Each row is told from the others of its batch: this does not add up over rows."""
    out = model(rows).float()
    return -(out @ out.t()).log_softmax(dim=1).diagonal().mean()


def _plan(microbatches: int, kind: str) -> Plan:
    disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    dtype = ComputeDtype.BFLOAT16 if kind == "split" else ComputeDtype.GIVEN
    return Plan(
        blocks={str(i): disk for i in range(LAYERS)}, microbatches=microbatches, compute_dtype=dtype,
        splits_masters=kind == "split",
    )  # fmt: skip


def _fit(model: nn.Module, kind: str, directory: Path, *, microbatches: int) -> memfit.Job:
    weights = directory / "saved" if kind == "files" else None
    options: dict[str, Any] = {"allow": {"bf16"}} if kind == "split" else {}
    return memfit.fit(
        model, torch.optim.AdamW(model.parameters()), _contrastive, torch.randn(4, WIDTH), weights=weights,
        plan=_plan(microbatches, kind), directory=directory / "homes", **options,
    )  # fmt: skip


def _check_deferred(model: nn.Module) -> None:
    plain = _build()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert is_away(mine) == name.endswith("weight"), name
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        if not is_away(mine):
            assert same_bits(mine.detach(), theirs.detach()), name


@pytest.mark.parametrize("kind", ["fp32", "split", "files"])
def test_a_batch_that_must_not_be_split_leaves_the_model_without_bytes(kind: str, tmp_path: Path) -> None:
    if kind == "files":
        with _fit(_build(), "fp32", tmp_path, microbatches=1) as job:
            job.save(tmp_path / "saved")
    model = memfit.empty(_build, initialises=kind != "files")
    allocator = install()
    before = allocator.stats().live_bytes
    allocator.reset_peak()
    with pytest.raises(UnsupportedError, match="does not add up"):
        _fit(model, kind, tmp_path, microbatches=2)
    # Two blocks on their way home, and the pieces of one; never the eight of the model.
    assert allocator.stats().peak_bytes - before < 4 * LAYER_BYTES
    assert allocator.stats().live_bytes - before < LAYER_BYTES
    _check_deferred(model)
    rows = torch.randn(4, WIDTH)
    trained: list[tuple[float, list[Tensor]]] = []
    for name, other in (("again", model), ("plain", _build())):
        (tmp_path / name).mkdir()
        used = kind if name == "again" else kind.replace("files", "fp32")
        if used == "files":
            (tmp_path / name / "saved").symlink_to(tmp_path / "saved")
        with _fit(other, used, tmp_path / name, microbatches=1) as job:
            loss = job.step(rows).loss
        trained.append((loss, [p.detach() for p in other.parameters()]))
    assert trained[0][0] == trained[1][0]
    assert all(same_bits(mine, theirs) for mine, theirs in zip(trained[0][1], trained[1][1], strict=True))


def test_a_disk_that_fails_while_weights_move_home_leaves_the_model_without_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memfit.empty(_build)
    writes: list[int] = []
    plain = Region.write

    def fails(region: Region, *args: Any, **options: Any) -> Any:
        writes.append(1)
        if len(writes) == 8:  # the second tensor of the fourth block
            raise StoreError("the disk is full")
        return plain(region, *args, **options)

    monkeypatch.setattr(Region, "write", fails)
    with pytest.raises(StoreError, match="the disk is full"):
        _fit(model, "fp32", tmp_path, microbatches=1)
    monkeypatch.undo()
    _check_deferred(model)
    (tmp_path / "again").mkdir()
    with _fit(model, "fp32", tmp_path / "again", microbatches=1) as job:
        assert job.step(torch.randn(4, WIDTH)).is_finite
