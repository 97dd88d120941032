"""memfit's own objects die by reference count alone: nothing waits for the cycle collector with gigabytes in its hands.

A job that is dropped without `close` is held by its hooks on the user's model, and dies with that model by a collection.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence import plans, zoo
from equivalence.with_memfit import fit_known
from memfit.devices.binding import install


@pytest.fixture
def no_collector() -> Iterator[None]:
    """With the cycle collector off, after it has run once."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _train(name: str, variant: str, directory: Path, *, closes: bool) -> list[weakref.ref[object]]:
    case = zoo.ZOO[name]()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    job: Any = fit_known(name, plans.BY_NAME[variant], directory, limit="8GiB")(case, optimizer)
    for step in range(2):
        job.step(case.batch(step))
    job.evaluate(case.batch(0))
    if closes:
        job.close()
    return [weakref.ref(job), weakref.ref(case.model), weakref.ref(optimizer), weakref.ref(job.plan)]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.thinned
@pytest.mark.parametrize("variant", ["everything", "disk-recompute-4", "disk-offload-2"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_a_closed_job_dies_by_reference_count(name: str, variant: str, tmp_path: Path) -> None:
    allocator = install()
    for turn in ("first", "second"):  # the first brings up what libraries keep for good
        (tmp_path / turn).mkdir()
        before = allocator.stats()
        alive = _train(name, variant, tmp_path / turn, closes=True)
        after = allocator.stats()
    assert [reference() for reference in alive] == [None] * len(alive)
    assert (after.live_bytes, after.live_blocks, after.limit_bytes) == (before.live_bytes, before.live_blocks, None)


def _say(model: Any) -> torch.Tensor:
    prompt = torch.ones(2, 4, dtype=torch.int64)
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        use_cache=True,
    )


def _infer(name: str, directory: Path) -> list[weakref.ref[object]]:
    import memfit

    model: Any = zoo.ZOO[name]().model
    say = partial(_say, model)
    with memfit.infer(model, directory=directory / "homes", cache_limit=0, limit="8GiB") as session:
        say()
        session.together([say, say])
    return [weakref.ref(session), weakref.ref(model), weakref.ref(session._weights), weakref.ref(session._caches)]


def _generate_in_a_job(name: str, directory: Path) -> list[weakref.ref[object]]:
    case = zoo.ZOO[name]()
    model: Any = case.model
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    job: Any = fit_known(name, plans.BY_NAME["disk-recompute-4"], directory, limit="8GiB")(case, optimizer)
    seen: list[weakref.ref[Any]] = []
    for step in range(2):
        job.step(case.batch(step))
        with job.inference() as session:
            seen.append(weakref.ref(session))
            _say(model)
    report = job.census()
    job.close()
    return [weakref.ref(job), weakref.ref(case.model), weakref.ref(report), *seen]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("use", [_infer, _generate_in_a_job])
@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_what_generates_dies_by_reference_count(name: str, use: Any, tmp_path: Path) -> None:
    allocator = install()
    for turn in ("first", "second"):
        (tmp_path / turn).mkdir()
        before = allocator.stats()
        alive = use(name, tmp_path / turn)
        after = allocator.stats()
    assert [reference() for reference in alive] == [None] * len(alive)
    assert (after.live_bytes, after.live_blocks, after.limit_bytes) == (before.live_bytes, before.live_blocks, None)


def test_a_dropped_job_dies_with_its_model(tmp_path: Path) -> None:
    allocator = install()
    for turn in ("first", "second"):
        (tmp_path / turn).mkdir()
        before = allocator.stats()
        alive = _train("gpt2", "disk-recompute-4", tmp_path / turn, closes=False)
        gc.collect()
        after = allocator.stats()
    assert [reference() for reference in alive] == [None] * len(alive)
    assert (after.live_bytes, after.live_blocks, after.limit_bytes) == (before.live_bytes, before.live_blocks, None)
