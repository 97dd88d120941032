"""Hooks and losses of the user's also run while memfit plans: they can ask, and who does not is told once a fit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import MemfitWarning
from memfit.core.plan import Plan

SAID = "hooks of yours also ran while memfit.fit planned"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _fit(model: nn.Module, loss: Callable[..., Any] = _loss, **arguments: Any) -> memfit.Job:
    return memfit.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, torch.ones(4, 4), **arguments)


class Counter:
    """Counts calls, of trials and of steps."""

    def __init__(self) -> None:
        self.planning, self.training = 0, 0

    def forward(self, *_: Any) -> None:
        if memfit.is_planning():
            self.planning += 1
        else:
            self.training += 1

    def silent(self, *_: Any) -> None:
        self.training += 1

    def __call__(self, *_: Any) -> None:
        self.training += 1


def test_hooks_and_losses_know_planning_from_training() -> None:
    hooks = Counter()

    class Losses:
        """A class, because what the loss keeps in objects is given back after a trial."""

        planning, training = 0, 0

    model = _model()
    model[0].register_forward_hook(hooks.forward)  # type: ignore[operator, union-attr]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if memfit.is_planning():
            Losses.planning += 1
        else:
            Losses.training += 1
        return _loss(model, batch)

    assert not memfit.is_planning()
    # Two microbatches: that the loss adds up over rows is tried out too, on rows of the sample.
    job = _fit(model, loss, plan=Plan(microbatches=2))
    assert hooks.training == Losses.training == 0
    assert hooks.planning > 0
    assert Losses.planning > 0
    for _ in range(3):
        job.step(torch.ones(4, 4))
    assert hooks.training == Losses.training == 6
    before = Losses.planning
    job.step(torch.ones(2, 4))  # another shape is looked at first
    assert Losses.planning > before
    assert Losses.training == 8
    job.close()
    assert not memfit.is_planning()


def test_a_failing_trial_leaves_no_trace() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        raise RuntimeError("on purpose")

    with pytest.raises(memfit.UsageError, match="on purpose"):
        _fit(_model(), loss)
    assert not memfit.is_planning()


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_that_do_not_ask_are_told_with_their_place(kind: str) -> None:
    counter = Counter()
    hooks = {
        "silent": counter.silent,
        "<lambda>": lambda *_: None,
        "__call__": counter,
        "forward": functools.partial(Counter.silent, counter),
    }
    for name, hook in hooks.items():
        model = _model()
        getattr(model[2], kind)(hook)  # type: ignore[index]
        with pytest.warns(MemfitWarning, match=SAID) as told:
            _fit(model).close()
        assert "test_hooks.py:" in str(told[0].message)
        assert "on '2'" in str(told[0].message)
        assert "memfit.is_tracing()" in str(told[0].message)
        assert told[0].filename == __file__
        assert name in str(told[0].message) or name == "forward"


def test_hooks_that_ask_and_hooks_of_libraries_are_not_told() -> None:
    model = _model()
    model[0].register_forward_hook(Counter().forward)  # type: ignore[operator, union-attr]
    model.append(torch.nn.utils.spectral_norm(nn.Linear(2, 2)))  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemfitWarning)
        _fit(model).close()
