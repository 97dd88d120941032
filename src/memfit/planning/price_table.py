"""Prices as arrays, to estimate many mixtures at once.

In: `OptionPrices`, room. Out: amounts by row of prices, and seconds, of mixtures that differ a
little from a judged one.
"""

from __future__ import annotations

import math
from typing import Any

from memfit.planning.mixing import ByteRoom, limit_of
from memfit.planning.place_prices import PlacePrices
from memfit.planning.slot_prices import Judged, OptionPrices

# Prices of neighbours are trusted to so much of the room; the part of stalls that they say.
_ROUNDING = 0.005
_STALLED = 0.5


class PriceTable:
    """Prices of options: a row an option, a column a row of prices, the last one stalls.

    Args:
        prices: of the options.
        room: bytes that a mixture may take.

    Attributes:
        more: what options take more than the reference.  # (options, columns)
        most: what a mixture may take; infinite for lanes and stalls.  # (columns,)
        lanes, slot_columns: columns of lanes and of slots.
        first_home: row at which the options of homes begin.
        first_ends: the same for each group of ends, and the number of rows.
    """

    def __init__(self, prices: OptionPrices, room: ByteRoom) -> None:
        import numpy as np

        self._rows = prices.rows
        stalls = np.array([stall for _, stall in prices.options])
        self.more: Any = np.column_stack([prices.by_row.T, stalls])
        limits = [limit_of(row, room) for row in self._rows]
        most = [math.inf if limit is None else limit * (1 + _ROUNDING) for limit in limits]
        self.most: Any = np.array([*most, math.inf])
        self.lanes = [i for i, row in enumerate(self._rows) if row.kind == "lane"]
        self.slot_columns = [i for i, row in enumerate(self._rows) if row.kind == "slot"]
        self.first_home = len(prices.policies)
        self.first_ends = [self.first_home + len(prices.homes)]
        for group in prices.ends:
            self.first_ends.append(self.first_ends[-1] + len(group))

    def slot_order(self, places: PlacePrices) -> list[int]:
        """Returns the positions of the columns' slots in prices by place."""
        return [places.slots.index(self._rows[column].slot) for column in self.slot_columns]

    def amounts_of(self, judged: Judged) -> Any:
        """Returns what a judged mixture takes of each column; of the last one nothing: stalls are
        told by their changes.
        """
        import numpy as np

        return np.array([*(judged.amount(row) for row in self._rows), 0.0])

    def worth(self, changed: Any, known: Judged) -> Any:
        """Estimates seconds of mixtures; infinite where they do not fit, or one of their lanes
        alone works as long as the known mixture takes.

        Args:
            changed: their amounts, as of the known one plus changes.  # (..., columns)
            known: that they differ from.
        """
        import numpy as np

        stalls = np.maximum(0.0, known.stall_s + _STALLED * changed[..., -1])
        busiest = changed[..., self.lanes].max(-1)
        may_win = (changed <= self.most).all(-1) & (busiest < known.built.cost.seconds)
        return np.where(may_win, busiest + stalls, math.inf)
