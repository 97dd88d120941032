"""Clipping after `job.step` finds no gradients and would do nothing, in silence.

Here it is told, once a job.

In: live jobs. Out: a warning where `clip_grad_norm_` gets parameters of a job, of which none has a
gradient. (`clip_grad_value_` raises then, by itself.)

[Note: who hears of clipping]
Nothing of a parameter says that its `grad` was read, and a program may have taken `clip_grad_norm_`
by any name. But the function reaches a helper through the globals of its module,
`torch.nn.utils.clip_grad`, when it runs. While a job lives, that name leads through this module: it
looks, then does what torch's does, with the same arguments. When the last job is closed the name is
torch's own again. A torch without it is left alone; then nothing is told.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from memfit.core.errors import MemfitWarning

_NAME = "_clip_grads_with_norm_"


class _LiveJob(Protocol):
    def holds(self, parameters: set[int]) -> str | None: ...


_jobs: weakref.WeakSet[Any] = weakref.WeakSet()
_told: weakref.WeakSet[Any] = weakref.WeakSet()
_torchs: list[Callable[..., Any]] = []


def watch(job: _LiveJob) -> None:
    """Begins to watch for clipping of the job's parameters. See [Note: who hears of clipping]."""
    _jobs.add(job)
    found = getattr(clip_grad, _NAME, None)
    if found is not None and found is not _heard:
        _torchs[:] = [found]
        setattr(clip_grad, _NAME, _heard)


def unwatch(job: _LiveJob) -> None:
    """Stops watching for a job. After the last one torch's function is as it was."""
    _jobs.discard(job)
    if not _jobs and getattr(clip_grad, _NAME, None) is _heard:
        setattr(clip_grad, _NAME, _torchs[0])


def _heard(parameters: Any, *args: Any, **kwargs: Any) -> Any:
    own = _torchs[0]
    _look(parameters)
    return own(parameters, *args, **kwargs)


def _look(parameters: Any) -> None:
    """Warns where a job's parameters are to be clipped and none of them has a gradient."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable):
        return
    given = list(parameters)
    if not given or any(p.grad is not None for p in given):
        return
    ids = {id(p) for p in given}
    job = next((each for each in list(_jobs) if each.holds(ids) is not None), None)
    if job is None or job in _told:
        return
    _told.add(job)
    warnings.warn(
        "gradients are clipped here after job.step, and there are none: job.step has made the update with them. Give the norm to "
        "memfit.fit(max_grad_norm=...), which clips before the update (StepResult.norm is the norm before), and take this call out",
        MemfitWarning,
        stacklevel=5,
    )
