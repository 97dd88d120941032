"""Memory of the update of one parameter, as data.

In: nothing (`job.problem` fills it). Out: a frozen dataclass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UpdateProfile:
    """Memory of the update of one parameter, which is made in pieces.

    Attributes:
        piece_elements: elements in a piece; the last one may have fewer.
        first_piece_elements: the same in the parameter's first update, which makes its states; 0:
            equal.
        scratch_bytes: temporary memory of the optimizer for a piece.
        host_scratch_bytes: the same on the host, beside an accelerator. The optimizer may have
            another implementation there (one tensor at a time instead of several).
        state_bytes: bytes of all states of the parameter at home.
        encoded_elements: elements of encoded states, summed over states: twice the parameter's for
            two encoded moments.
        work_share: bytes that the optimizer's operations move for an element, as a multiple of what
            AdamW's move.
        needs_whole: the optimizer needs all of the parameter, so that one rank must hold it whole.
    """

    piece_elements: int
    first_piece_elements: int = 0
    scratch_bytes: int = 0
    host_scratch_bytes: int = 0
    state_bytes: int = 0
    encoded_elements: int = 0
    work_share: float = 1.0
    needs_whole: bool = False

    def scratch_of(self, elements: int) -> int:
        """Returns the temporary bytes of the optimizer for some elements at once."""
        return math.ceil(self.scratch_bytes * elements / max(self.piece_elements, 1))
