"""Calls of Python functions that a program makes around its operations.

In: a forward under a trace. Out: their number by segment, which the clock multiplies by a rate.

Operations alone do not tell what Python spends: layers of transformers call two functions an
operation, with attributes read and arguments handed on in each, plain modules of torch one.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from memfit.core.profile import CallProfile, Profile, TraceProfile
from memfit.core.work_kinds import Work, WorkKind, as_work, summed
from memfit.trace.storage_log import SegmentRecord

_T = TypeVar("_T")
_TORCH = Path(torch.__file__).parent
# What a trace brings along: its own, torch's way to a dispatch mode, fake tensors and the tables
# that they are looked up in, what modules call where they have hooks, ends of weak references.
_OTHERS = (
    Path(__file__).parent,
    _TORCH / "_library",
    _TORCH / "_subclasses",
    _TORCH / "utils" / "weak.py",
    Path(weakref.__file__),
)
_WITH_HOOKS = frozenset({
    (str(_TORCH / "nn" / "modules" / "module.py"), "inner"),
    (str(_TORCH / "_jit_internal.py"), "is_scripting"),
    (str(_TORCH / "compiler" / "__init__.py"), "is_compiling"),
})  # fmt: skip


class PythonCalls:
    """Counts calls into the last of some segments.

    Beside a profiler that somebody else has set, nothing is counted: Python has one of
    `sys.setprofile` at a time. Tools of `sys.monitoring`, such as cProfile since Python 3.12, are
    others.

    Attributes:
        is_counting: calls are counted now, so that what is not the program's has to say so.
    """

    def __init__(self, segments: list[SegmentRecord]) -> None:
        self._segments = segments
        self._is_paused = False
        self.is_counting = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what this thread calls inside the block."""
        if sys.getprofile() is not None:
            yield
            return
        with self._uncounted_collections():
            self.is_counting = True
            sys.setprofile(self._note)
            try:
                yield
            finally:
                sys.setprofile(None)
                self.is_counting = False

    @contextmanager
    def _uncounted_collections(self) -> Iterator[None]:
        """Counts nothing of what the collector of cycles calls, whenever it comes: ends of what
        others left, and their callbacks around collections.
        """
        own, was_paused = threading.get_ident(), False

        def begin(phase: str, _: dict[str, int]) -> None:
            nonlocal was_paused
            if phase == "start" and threading.get_ident() == own:
                was_paused, self._is_paused = self._is_paused, True

        def end(phase: str, _: dict[str, int]) -> None:
            if phase == "stop" and threading.get_ident() == own:
                self._is_paused = was_paused

        # Around all others.
        gc.callbacks.insert(0, begin)
        gc.callbacks.append(end)
        try:
            yield
        finally:
            gc.callbacks.remove(begin)
            gc.callbacks.remove(end)

    def uncounted(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Calls what is not the program's."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            return function(*arguments)
        finally:
            self._is_paused = was_paused

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if event == "call" and not self._is_paused and _is_programs(frame.f_code.co_filename, frame.f_code.co_name):
            self._segments[-1].python_calls += 1


def with_python_of(profile: Profile, earlier: Profile) -> Profile:
    """Returns the profile of a batch whose Python was not counted, with that of an earlier one: of
    as many rows, or else of the most.
    """
    largest = earlier.traces[max(earlier.traces)]
    traces = {rows: with_python(trace, earlier.traces.get(rows, largest)) for rows, trace in profile.traces.items()}
    return replace(profile, traces=traces)


def with_python(trace: TraceProfile, told: TraceProfile) -> TraceProfile:
    """Returns a trace whose Python was not counted, with that of another one: a site's forwards
    call as much whatever the shapes are. Sites that it did not call get none.
    """
    by_site: dict[str, list[float]] = {}
    for call in told.calls:
        by_site.setdefault(call.site, []).append(_amount(call.forward_work, WorkKind.PYTHON))
    left = {site: iter(amounts) for site, amounts in by_site.items()}
    calls: list[CallProfile] = []
    for call in trace.calls:
        python = next(left.get(call.site, iter(())), by_site.get(call.site, [0.0])[-1])
        calls.append(replace(call, forward_work=_adding(call.forward_work, python)))
    prologue = _adding(trace.prologue_work, _amount(told.prologue_work, WorkKind.PYTHON))
    return replace(trace, calls=tuple(calls), prologue_work=prologue)


def operations_of(trace: TraceProfile) -> list[float]:
    """Returns the number of operations that the program calls, by segment of forward."""
    works = [trace.prologue_work, *(call.forward_work for call in trace.calls)]
    return [_amount(work, WorkKind.OPERATIONS) for work in works]


def _amount(work: Work, kind: WorkKind) -> float:
    return dict(work).get(kind, 0.0)


def _adding(work: Work, python: float) -> Work:
    return summed([(work, 1.0), (as_work({WorkKind.PYTHON: python}), 1.0)])


@lru_cache(maxsize=8192)
def _is_programs(file: str, name: str) -> bool:
    """A function would be called without a trace as well."""
    return (file, name) not in _WITH_HOOKS and not any(Path(file).is_relative_to(folder) for folder in _OTHERS)


# Lines of the program that operations come from.
#
# In: Python's stack, as an operation is watched. Out: "folder/file.py:line" of the innermost frame
# that is neither torch's, nor memfit's, nor the standard library's: of a model of transformers its
# modeling file, of a model of the user's own the user's.

_MEMFIT = Path(__file__).parents[1]
_PASSED_OVER = (_MEMFIT, Path(torch.__file__).parent, Path(os.__file__).parent)
# They are models like any user's, and packages lie inside the standard library's folder.
_PROGRAMS = (_MEMFIT / "integrations" / "recipes",)
_PACKAGES = ("site-packages", "dist-packages")


def calling_line() -> str:
    """Returns the line of the program that runs; "" where there is none on this stack."""
    frame = sys._getframe(1)
    while frame is not None:
        shown = _shown(frame.f_code.co_filename)
        if shown:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(maxsize=4096)
def _shown(file: str) -> str:
    """Returns the file as it is shown; "" of one that is passed over."""
    path = Path(file)
    if file.startswith("<") or not path.name:
        return ""
    is_package = any(part in _PACKAGES for part in path.parts)
    if not any(path.is_relative_to(folder) for folder in _PROGRAMS):
        for folder in _PASSED_OVER:
            is_standard = folder is _PASSED_OVER[-1]
            if path.is_relative_to(folder) and not (is_standard and is_package):
                return ""
    return "/".join(path.parts[-2:])
