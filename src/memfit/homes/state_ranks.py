"""Optimizer states of which each process that trains the model has a share: how they become whole.

In: this process's part. Out: whole values. Made by the room `distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.homes.home import ByteHome
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.optimizers import StateTensor


class StateRanks:
    """Processes that have shares of optimizer states; abstract. Its methods are collective."""

    def first_known(
        self, numbers: Mapping[str, Any] | None, block: BlockWeights, slot: ParameterSlot
    ) -> dict[str, Any] | None:
        """Returns the numbers of a parameter's state, of the first process that has any; None if
        none has.
        """
        raise NotImplementedError

    def home(self, local: ByteHome | None, tensor: StateTensor, block: BlockWeights, slot: ParameterSlot) -> ByteHome:
        """Returns a home of a whole state tensor, whose gathers are collective.

        Args:
            local: of the values that this process has; None if it has none.
            tensor: of the state.
            block: of the parameter.
            slot: of the parameter.
        """
        raise NotImplementedError

    def assemble(
        self,
        own: torch.Tensor | None,
        numel: int,
        dtype: torch.dtype,
        block: BlockWeights,
        slot: ParameterSlot,
        *,
        is_like: bool,
    ) -> torch.Tensor:
        """Returns a whole state tensor, 1-D.

        Args:
            own: the values that this process has; None if it has none.
            numel: of the whole.
            dtype: of the whole.
            block: of the parameter.
            slot: of the parameter.
            is_like: it is cut as the parameter is; else one process has all of it.
        """
        raise NotImplementedError
