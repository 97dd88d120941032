"""One trace for several plans of one model: a trace is most of the time that a small job takes, and knows nothing of homes and fates.

In: a key. Out: a context in which what goes by this key is traced once. The first trace is of the very model that is then trained, so that what tracing
leaves on a model is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memfit.api.problem import Problem

Known = dict[Any, tuple[Any, Any]]


@contextmanager
def traced_once(known: Known) -> Iterator[None]:
    """Within, a batch is traced once for each number of microbatches and each arithmetic; `known` holds what was found."""
    trace = Problem.profile

    def profile(problem: Problem, batch: Any, counts: Any, **settings: Any) -> Any:
        key = (tuple(counts), settings.get("chunk_tokens"), str(settings.get("compute", "given")))
        if key not in known:
            found = trace(problem, batch, counts, **settings)
            known[key] = found, problem.caches.use
        found, problem.caches.use = known[key]
        problem.caches.is_settled = True
        return found

    Problem.profile = profile  # type: ignore[method-assign]
    try:
        yield
    finally:
        Problem.profile = trace  # type: ignore[method-assign]
