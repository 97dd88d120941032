"""Calls of Python functions that a trace counts, against Python's own profiler around the plain program."""

from __future__ import annotations

import cProfile
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.profile import TraceProfile
from memfit.core.work_kinds import WorkKind
from memfit.trace import trace, trace_run
from memfit.trace.blocks import find_blocks
from memfit.trace.python_calls import with_python_of
from memfit.trace.trace import profile_step

CALLS = 17


def looked_at(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


class Looking(nn.Module):
    """Calls a function so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.line = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            looked_at(x)
        return torch.relu(self.line(x))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def counted(trace: TraceProfile) -> list[float]:
    works = [trace.prologue_work, *(call.forward_work for call in trace.calls)]
    return [dict(work).get(WorkKind.PYTHON, 0.0) for work in works]


def traced(model: nn.Module) -> TraceProfile:
    profile = memfit.profile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, torch.ones(2, 8))
    return profile.traces[max(profile.traces)]


def called(model: nn.Module) -> int:
    """Calls of Python functions in a plain forward, by a profiler."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    batch = torch.ones(2, 8)
    sys.setprofile(note)
    try:
        loss(model, batch)
    finally:
        sys.setprofile(None)
    return count


def test_a_trace_counts_what_the_program_calls_by_call() -> None:
    model = nn.Sequential(*(Looking(times) for times in (0, CALLS, 3 * CALLS)))
    found = counted(traced(model))
    # The first call begins with its module; what follows the last one, the loss, is the last one's.
    _, first, second, third = found
    assert second - first == CALLS
    assert 2 * CALLS <= third - second <= 2 * CALLS + 3
    # memfit's own, torch's ways to a dispatch mode and hooks are not the program's.
    assert abs(sum(found) - called(model)) <= 4


def test_a_profiler_of_the_users_own_stays_and_nothing_is_counted() -> None:
    model = nn.Sequential(Looking(CALLS), Looking(CALLS))
    plain = traced(model)

    def users(_frame: Any, _event: str, _argument: Any) -> None:
        return

    sys.setprofile(users)
    try:
        beside = traced(model)
        assert sys.getprofile() is users
    finally:
        sys.setprofile(None)
    assert sum(counted(beside)) == 0 < sum(counted(plain))
    assert beside.calls[0].forward_flops == plain.calls[0].forward_flops


def test_cprofile_goes_on_beside_a_trace() -> None:
    """Up to Python 3.11 it is the one profiler of `sys.setprofile`, since then one of `sys.monitoring`'s tools."""
    model = nn.Sequential(Looking(CALLS), Looking(CALLS))
    plain = traced(model)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        beside = traced(model)
        looked_at(torch.ones(1))
    finally:
        profiler.disable()
    (seen,) = [entry.callcount for entry in profiler.getstats() if entry.code is looked_at.__code__]
    assert seen > 2 * CALLS
    assert sum(counted(beside)) == (sum(counted(plain)) if sys.version_info >= (3, 12) else 0)
    assert beside.calls[0].forward_flops == plain.calls[0].forward_flops


def test_a_later_batch_takes_what_an_earlier_one_counted() -> None:
    """Counting takes a quarter of a trace, and shapes do not change how often functions are called."""
    model = nn.Sequential(*(Looking(times) for times in (CALLS, 0, 3 * CALLS)))
    blocks = find_blocks(model)
    earlier = profile_step(model, loss, torch.ones(2, 8), blocks)
    again = profile_step(model, loss, torch.ones(5, 8), blocks, checks_repeat=False)
    uncounted = profile_step(model, loss, torch.ones(5, 8), blocks, checks_repeat=False, counts_python=False)
    assert sum(counted(uncounted.traces[5])) == 0
    assert with_python_of(uncounted, earlier) == again


class RowByRow(nn.Module):
    """Calls functions, and operations, as often as there are rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        for row in x:
            looked_at(row)
            rows.append(torch.relu(row))
        return torch.stack(rows)


@pytest.mark.parametrize("is_row_by_row", [False, True], ids=["alike", "row-by-row"])
def test_further_sizes_are_told_what_one_size_counted_unless_they_call_other_operations(
    monkeypatch: pytest.MonkeyPatch, is_row_by_row: bool
) -> None:
    model = nn.Sequential(Looking(CALLS), RowByRow() if is_row_by_row else Looking(2 * CALLS))
    blocks = find_blocks(model)
    sizes = (2, 4, 16)
    apart = {
        rows: profile_step(model, loss, torch.ones(rows, 8), blocks, rows=(rows,), checks_repeat=False).traces[rows]
        for rows in sizes
    }
    counting: list[bool] = []
    plain = trace_run.run_traced

    def run_traced(setting: Any, *arguments: Any, **options: Any) -> Any:
        counting.append(setting.counts_python)
        return plain(setting, *arguments, **options)

    monkeypatch.setattr(trace, "run_traced", run_traced)
    together = profile_step(model, loss, torch.ones(16, 8), blocks, rows=sizes, checks_repeat=False).traces
    assert {rows: counted(one) for rows, one in together.items()} == {rows: counted(one) for rows, one in apart.items()}
    assert counting == [True, *((False, True) * 2 if is_row_by_row else (False, False))]
    assert (counted(together[16]) != counted(together[2])) is is_row_by_row


class Held:
    """Something in a cycle."""

    def __init__(self) -> None:
        self.cycle = self


class Collecting(Looking):
    """Leaves cycles, whose ends call a function of Python, and may have them collected."""

    def __init__(self, *, collects: bool) -> None:
        super().__init__(CALLS)
        self.collects, self.ends = collects, list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ends += [weakref.ref(Held(), lambda _: looked_at(x)) for _ in range(20)]
        if self.collects:
            gc.collect()
        return super().forward(x)


def test_what_a_collection_calls_while_a_program_runs_is_not_the_program_s() -> None:
    """Collections come whenever they do, end what others have left, and call what others want to hear of them."""

    def hears(_phase: str, _found: dict[str, int]) -> None:
        looked_at(torch.ones(1))

    gc.callbacks.append(hears)
    try:
        collecting = counted(traced(Collecting(collects=True)))
    finally:
        gc.callbacks.remove(hears)
    assert collecting == counted(traced(Collecting(collects=False)))
