"""Clipping after `job.step`, where there is nothing to clip, is told once, however the program came by the function; anything else is torch's own."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad, clip_grad_norm_

import memfit
from memfit.core.errors import MemfitWarning
from memfit.job import steps

TORCHS = clip_grad._clip_grads_with_norm_


@pytest.fixture(autouse=True)
def no_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that other tests left alive are not looked at."""
    monkeypatch.setattr(steps, "_jobs", weakref.WeakSet())
    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", TORCHS)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _job(model: nn.Module, **arguments: Any) -> memfit.Job:
    return memfit.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, torch.ones(2, 4), **arguments)


def _names_are_torchs() -> bool:
    return clip_grad._clip_grads_with_norm_ is TORCHS


def test_clipping_after_a_step_is_told_once_with_what_to_write_and_where_it_was_called() -> None:
    model = nn.Linear(4, 4)
    job = _job(model)
    job.step(torch.ones(2, 4))
    with pytest.warns(MemfitWarning, match=r"there are none.*memfit\.fit\(max_grad_norm=") as told:
        clip_grad_norm_(model.parameters(), 1.0)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_(model.parameters(), 1.0)  # once a job
    job.close()
    # Another job is another program's, or another try.
    job = _job(model)
    job.step(torch.ones(2, 4))
    with pytest.warns(MemfitWarning, match="there are none"):
        clip_grad_norm_(next(iter(model.parameters())), 1.0)
    job.close()


def test_what_has_gradients_or_is_no_jobs_is_clipped_as_ever_and_nothing_is_told() -> None:
    jobs, other, plain = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(other.state_dict())
    _loss(plain, torch.ones(2, 4)).backward()
    wanted_norm = clip_grad_norm_(plain.parameters(), 0.01)
    wanted = [p.grad for p in plain.parameters()]
    job = _job(jobs)
    job.step(torch.ones(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_(other.parameters(), 1.0)  # no gradients, and nobody's
        _loss(other, torch.ones(2, 4)).backward()
        assert clip_grad_norm_(other.parameters(), 0.01) == wanted_norm
        for parameter, gradient in zip(other.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
        # The loop's own backward over a job's model: these are gradients.
        _loss(jobs, torch.ones(2, 4)).backward()
        clip_grad_norm_(jobs.parameters(), 1.0)
    job.close()


def test_torchs_functions_are_its_own_again_when_the_last_job_ends() -> None:
    assert _names_are_torchs()
    first, second = _job(nn.Linear(4, 4)), _job(nn.Linear(4, 4))
    assert not _names_are_torchs()
    first.close()
    assert not _names_are_torchs()
    second.close()
    assert _names_are_torchs()


def test_the_norm_that_is_advised_clips_as_the_call_would_have() -> None:
    plain, mine = nn.Linear(4, 4), nn.Linear(4, 4)
    mine.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    _loss(plain, torch.ones(2, 4)).backward()
    norm = clip_grad_norm_(plain.parameters(), 0.01)
    optimizer.step()
    with _job(mine, max_grad_norm=0.01) as job:
        assert job.step(torch.ones(2, 4)).norm == pytest.approx(float(norm))
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_job_that_nobody_closed_keeps_torchs_functions_working() -> None:
    model = nn.Linear(4, 4)
    job = _job(model)
    del job
    gc.collect()
    other = nn.Linear(4, 4)
    _loss(other, torch.ones(2, 4)).backward()
    assert clip_grad_norm_(other.parameters(), 0.01) > 0
    _job(nn.Linear(4, 4)).close()
    assert _names_are_torchs()
