"""Linear programs: optima by arithmetic, what has no solution, and programs of the caller's own beside them."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest

from memfit.core.errors import UsageError
from memfit.planner.search.mixing import LinearProgram

# Two columns between 0 and 1, of which at least 0.5 are taken, and not more than 0.3 of the first.
ROWS = [[(0, 1.0), (1, 1.0)], [(0, 1.0)]]


def program(whole: tuple[int, ...] = ()) -> LinearProgram:
    return LinearProgram([0, 0], [1, 1], ROWS, [0.5, -math.inf], [math.inf, 0.3], whole=whole)


def test_optima_are_those_of_arithmetic_with_one_bound_after_the_other() -> None:
    found = program()
    assert found.minimize([1.0, 2.0]) == pytest.approx([0.3, 0.2])
    assert found.minimize([2.0, 1.0]) == pytest.approx([0.0, 0.5])
    found.bound_rows([0.5, -math.inf], [math.inf, 0.1])
    assert found.minimize([1.0, 2.0]) == pytest.approx([0.1, 0.4])
    found.bound_columns([0.0, 0.0], [1.0, 0.3])
    assert found.minimize([1.0, 2.0]) is None
    assert found.bound_of_minimum([1.0, 2.0]) == math.inf
    # Whole, the first is 0 and the second 1.
    assert program(whole=(0, 1)).bound_of_minimum([1.0, 2.0]) == pytest.approx(2.0)
    assert program().bound_of_minimum([1.0, 2.0]) == pytest.approx(0.7)


def test_a_program_of_the_callers_own_runs_with_its_threads_before_and_behind() -> None:
    core: Any = import_module("highspy")
    for threads in (2, 3):
        own = core.Highs()
        own.setOptionValue("output_flag", False)
        own.setOptionValue("threads", threads)
        assert own.run() == core.HighsStatus.kOk
        assert program().minimize([1.0, 2.0]) == pytest.approx([0.3, 0.2])


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(AssertionError, match="HiGHS"):
        LinearProgram([0.0], [1.0], [[(0, 1.0)]], [0.0], [1.0], options={"no_such_option": 1})


def test_a_program_whose_figures_are_too_far_apart_is_refused_by_what_people_can_mend() -> None:
    with pytest.raises(UsageError, match="Correct the rates of the hardware file"):
        LinearProgram([0.0], [1.0], [[(0, 1e24)]], [0.0], [1.0])
