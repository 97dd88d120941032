"""One trace for several plans of one model: a trace is most of the time that a small job takes, and knows nothing of homes and fates.

In: a key. Out: a context in which what goes by this key is traced once. The first trace is of the very model that is then trained, so that what tracing
leaves on a model is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import memfit
from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile
from memfit.planner.problem import Problem
from sweeping.reference import make_optimizer
from sweeping.subjects import Subject, loss_of

Split = Callable[[Any, int], list[Any]]
Known = dict[Any, tuple[Any, Any]]


@contextmanager
def traced_once(known: Known) -> Iterator[None]:
    """Within, a batch is traced once for each number of microbatches and each arithmetic; `known` holds what was found."""
    trace = Problem.profile

    def profile(problem: Problem, batch: Any, counts: Any, **settings: Any) -> Any:
        way = type(problem.cut).__name__
        key = (way, tuple(counts), settings.get("chunk_tokens"), str(settings.get("compute", "given")))
        if key not in known:
            found = trace(problem, batch, counts, **settings)
            known[key] = found, problem.caches.use
        found, problem.caches.use = known[key]
        problem.caches.is_decided = True
        return found

    Problem.profile = profile  # type: ignore[method-assign]
    try:
        yield
    finally:
        Problem.profile = trace  # type: ignore[method-assign]


def profile_of(subject: Subject, model: nn.Module, microbatches: int, optimizer: str, split: Split | None) -> Profile:
    """The profile of a subject, its batches cut by memfit, or by a function of the user's: then `model` is not touched."""
    if split is None:
        steps = make_optimizer(optimizer, model)
        return memfit.profile(model, steps, loss_of, subject.copy_of_batch(), microbatches=[microbatches])
    other = subject.build()
    steps, plan = make_optimizer(optimizer, other), Plan(microbatches=microbatches, order=Order.MICROBATCH_MAJOR)
    settings: dict[str, Any] = {"plan": plan, "split": split, "weight": lambda _: 1.0, "allow": {"nonadditive-loss"}}
    with memfit.fit(other, steps, loss_of, subject.copy_of_batch(), **settings) as job:
        return job.profile
