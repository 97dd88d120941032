"""Averages of weights that rest in a file, beside torch's own on a plain model: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import get_ema_multi_avg_fn

import memfit
from equivalence.line_loops import BLOCKS, Words, batch, loss_of
from memfit.core.errors import StoreError, UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier

DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
PLANS = {
    "resident": Plan(update=UpdateTime.AFTER_BACKWARD),
    "disk": Plan(blocks=dict.fromkeys(BLOCKS, DISK), update=UpdateTime.AFTER_BACKWARD),
}
STEPS = 4


def new() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Words().eval()  # without dropout: microbatches and evaluations draw nothing
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain() -> tuple[Any, list[torch.Tensor]]:
    model, optimizer = new()
    averages = [p.detach().clone() for p in model.parameters()]
    move = get_ema_multi_avg_fn(0.7)
    for index in range(STEPS):
        loss_of(model, batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
        move(averages, [p.detach() for p in model.parameters()], 1)
    return model, averages


@pytest.mark.thinned
@pytest.mark.parametrize("by_lines", [False, True])
@pytest.mark.parametrize("where", PLANS)
def test_an_average_is_torchs_wherever_weights_rest(where: str, tmp_path: Path, *, by_lines: bool) -> None:
    theirs, averages = plain()
    model, optimizer = new()
    with memfit.fit(model, optimizer, loss_of, batch(0), plan=PLANS[where], lines=by_lines) as job:
        ema = memfit.MemfitEma(job, decay=0.7, path=tmp_path / "ema.safetensors")
        if by_lines:
            with job.lines():
                for index in range(STEPS):
                    loss_of(model, batch(index)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            for index in range(STEPS):
                job.step(batch(index))
        with ema.applied():
            with pytest.raises(UsageError, match="already"), ema.applied():
                pass
            found = job.evaluate(batch(9)).loss
            job.save(tmp_path / "saved")
        ema.close()
    names = [name for name, _ in model.named_parameters()]
    kept = load_file(tmp_path / "ema.safetensors")
    assert list(kept) and set(kept) == set(names)
    for name, average in zip(names, averages, strict=True):
        assert torch.equal(kept[name], average), name
    assert all(map(torch.equal, model.parameters(), theirs.parameters()))
    averaged, _ = new()
    averaged.load_state_dict(dict(zip(names, averages, strict=True)), strict=False)
    with torch.no_grad():
        assert found == loss_of(averaged, batch(9)).item()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(saved["layers.0.up.weight"], kept["layers.0.up.weight"])


def test_what_an_average_cannot_do_is_told(tmp_path: Path) -> None:
    model, optimizer = new()
    with memfit.fit(model, optimizer, loss_of, batch(0), plan=Plan(compute_dtype="bfloat16"), allow={"bf16"}) as job:  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="from 0 to 1"):
            memfit.MemfitEma(job, decay=1.5)
        ema = memfit.MemfitEma(job)
        job.step(batch(0))
        assert load_file(ema.path)["layers.0.up.weight"].dtype is torch.float32
        with pytest.raises(UnsupportedError, match="masters"), ema.applied():
            pass
        ema.close()
        assert not ema.path.exists()


def test_an_average_is_saved_with_the_weights_and_goes_on_from_there(tmp_path: Path) -> None:
    """Beside `AveragedModel`, whose first update copies: a save in the middle, read by a new job and by the one that made it."""
    model, optimizer = new()
    theirs = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for index in range(STEPS):
        loss_of(model, batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.update_parameters(model)
    model, optimizer = new()
    with memfit.fit(model, optimizer, loss_of, batch(0), plan=PLANS["disk"]) as job:
        ema = memfit.MemfitEma(job, decay=0.7, copies_first=True)
        job.step(batch(0))
        job.step(batch(1))
        job.save(tmp_path / "saved")
        job.step(batch(5))
        job.load(tmp_path / "saved")
        for index in range(2, STEPS):
            job.step(batch(index))
        again = load_file(ema.path)
        with ema.applied():
            job.save(tmp_path / "applied")
        ema.close()
    assert not (tmp_path / "applied" / "averages.safetensors").exists()
    model, optimizer = new()
    with memfit.fit(model, optimizer, loss_of, batch(0), plan=PLANS["resident"], resume=tmp_path / "saved") as job:
        ema = memfit.MemfitEma(job, decay=0.7, copies_first=True)
        for index in range(2, STEPS):
            job.step(batch(index))
        for name, expected in theirs.module.named_parameters():
            assert torch.equal(load_file(ema.path)[name], expected), name
            assert torch.equal(again[name], expected), name
        job.save(tmp_path / "saved")
        ema.close()
        job.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "averages.safetensors").exists()
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_bytes(b"no averages")
    model, optimizer = new()
    with memfit.fit(model, optimizer, loss_of, batch(0), plan=PLANS["resident"]) as job:
        ema = memfit.MemfitEma(job)
        with pytest.raises(StoreError, match="averages of other weights"):
            ema.read(wrong)
        ema.close()
