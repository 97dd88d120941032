"""Linear programs, some of whose columns may be whole, solved by HiGHS.

In: costs, rows and bounds. Out: columns at the optimum, or a bound of it.

HiGHS's own binding: it is there in a fiftieth of the time that `scipy.optimize` takes to import,
and a program that differs from the one before in its bounds alone is not built again. Each solution
begins anew: what was solved before does not decide between equal optima.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from memfit.core.errors import UsageError

# Nothing depends on the clock or on how many cores there are. The number of threads is not said:
# HiGHS has one scheduler a thread, and refuses whoever asks for another number than the first.
_OPTIONS: Mapping[str, object] = {"output_flag": False, "parallel": "off"}


class LinearProgram:
    """Minimizes the cost of columns within their bounds and those of rows.

    Args:
        least, most: bounds of columns.
        rows: terms of each row, (column, factor); of each pair of row and column one at most.
        row_least, row_most: bounds of rows.
        whole: columns that are whole numbers.
        options: of HiGHS, by its names.
    """

    def __init__(
        self,
        least: Sequence[float],
        most: Sequence[float],
        rows: Sequence[Sequence[tuple[int, float]]],
        row_least: Sequence[float],
        row_most: Sequence[float],
        *,
        whole: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
    ) -> None:
        import numpy as np

        # Not typed, and only where mixed plans are looked for.
        self._core: Any = import_module("highspy")
        self._highs: Any = self._core.Highs()
        for name, value in {**_OPTIONS, **(options or {})}.items():
            assert self._highs.setOptionValue(name, value) != self._core.HighsStatus.kError, (
                f"HiGHS has no option {name}"
            )
        self._is_whole = bool(whole)
        model: Any = self._core.HighsLp()
        model.num_col_, model.num_row_ = len(least), len(rows)
        model.col_cost_ = np.zeros(len(least))
        model.col_lower_, model.col_upper_ = np.array(least, float), np.array(most, float)
        model.row_lower_, model.row_upper_ = np.array(row_least, float), np.array(row_most, float)
        model.a_matrix_.format_ = self._core.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        model.a_matrix_.index_ = np.array([column for row in rows for column, _ in row], np.int32)
        model.a_matrix_.value_ = np.array([factor for row in rows for _, factor in row], float)
        if whole:
            kinds = [self._core.HighsVarType.kContinuous] * len(least)
            for column in whole:
                kinds[column] = self._core.HighsVarType.kInteger
            model.integrality_ = kinds
        self._checked(self._highs.passModel(model))

    def bound_columns(self, least: Sequence[float], most: Sequence[float]) -> None:
        """Takes other bounds of all columns from now on."""
        import numpy as np

        columns = np.arange(len(least), dtype=np.int32)
        self._checked(
            self._highs.changeColsBounds(len(columns), columns, np.array(least, float), np.array(most, float))
        )

    def bound_rows(self, least: Sequence[float], most: Sequence[float]) -> None:
        """Takes other bounds of all rows from now on."""
        import numpy as np

        rows = np.arange(len(least), dtype=np.int32)
        self._checked(self._highs.changeRowsBounds(len(rows), rows, np.array(least, float), np.array(most, float)))

    def minimize(self, cost: Sequence[float]) -> list[float] | None:
        """Returns the columns at the optimum; None if nothing is within the bounds.

        Args:
            cost: of each column.
        """
        return list(self._highs.getSolution().col_value) if self._run(cost) == "kOptimal" else None

    def bound_of_minimum(self, cost: Sequence[float]) -> float:
        """Returns what no columns within the bounds cost less than; infinite: nothing is within.

        Args:
            cost: of each column; columns that cost something are not negative, nor are their costs.
        """
        status = self._run(cost)
        if status == "kInfeasible":
            return math.inf
        info = self._highs.getInfo()
        if self._is_whole:
            return max(0.0, float(info.mip_dual_bound))
        return float(info.objective_function_value) if status == "kOptimal" else 0.0

    def _run(self, cost: Sequence[float]) -> str:
        import numpy as np

        columns = np.arange(len(cost), dtype=np.int32)
        self._checked(self._highs.changeColsCost(len(columns), columns, np.array(cost, float)))
        self._highs.clearSolver()
        self._checked(self._highs.run())
        # A program of the caller's own may ask for any number of threads.
        self._core.Highs.resetGlobalScheduler(True)  # noqa: FBT003, the only way to say it
        return self._highs.getModelStatus().name

    def _checked(self, status: Any) -> None:
        if status == self._core.HighsStatus.kError:
            raise UsageError(
                "the solver of mixed plans refuses a program: the machine's rates are too many orders apart for it. Correct the rates of the hardware file"
            )
