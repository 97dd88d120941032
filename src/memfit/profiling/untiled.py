"""Finds attention that saves its probabilities: softmax of a product of two activations, multiplied
with a third.

In: operations of a forward with their storages, as the recorder sees them. Out: for each softmax of
that kind the storages of its probabilities and of what dropout makes of them. The program's own
attention is found, and that of `scaled_dot_product_attention` where torch takes it apart because no
tiled kernel takes its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.core.untiled_attention import UntiledAttention
from memfit.profiling.records import Role, StorageRecord

aten = torch.ops.aten
_PRODUCTS = {aten.bmm, aten.baddbmm}
_SOFTMAXES = {aten._softmax, aten._safe_softmax}
# Beside pointwise operations: results of the shape of what they read, element by element.
_CARRIERS = {aten._to_copy, aten.native_dropout, aten.empty_like}
_LOG_SUM_BYTES = 4  # the tiled kernel's own saved tensor, a row: a number in fp32


@dataclass(eq=False)
class _Probabilities:
    """Storages of the size of one softmax's result: itself, masks, what dropout leaves of it."""

    rows: int
    made: list[StorageRecord] = field(default_factory=list[StorageRecord])
    is_multiplied: bool = False


class AttentionFollower:
    """Follows products of activations through softmax to the next product.

    Memory: an entry for each storage on the way; the records are the log's.
    """

    def __init__(self) -> None:
        # By `id` of the record, which the log keeps alive.
        self._scores: dict[int, StorageRecord] = {}
        self._probabilities: dict[int, _Probabilities] = {}
        self._found: list[_Probabilities] = []

    def follow(
        self,
        func: Any,
        args: Sequence[Any],
        read: Sequence[tuple[torch.Tensor, StorageRecord]],
        results: Sequence[torch.Tensor],
        made: Sequence[StorageRecord],
    ) -> None:
        """An operation of the forward: what it read and what it gave, with their records."""
        packet = func._overloadpacket
        if packet in _PRODUCTS:
            self._follow_product(read, made)
        elif not self._scores:
            return
        elif packet in _SOFTMAXES:
            tensor, record = read[0]
            if id(record) in self._scores:
                size = tensor.shape[args[1]] if tensor.dim() else 1
                found = _Probabilities(rows=tensor.numel() // max(size, 1))
                self._found.append(found)
                self._join(found, made[0])
        elif torch.Tag.pointwise in func.tags or packet in _CARRIERS:
            self._carry(read, results, made)

    def _follow_product(
        self, read: Sequence[tuple[torch.Tensor, StorageRecord]], made: Sequence[StorageRecord]
    ) -> None:
        factors = [self._probabilities.get(id(record)) for _, record in read]
        for found in factors:
            if found is not None:
                found.is_multiplied = True
        if not any(factors) and all(record.role is not Role.WEIGHT for _, record in read):
            self._scores.update((id(record), record) for record in made)

    def _carry(
        self,
        read: Sequence[tuple[torch.Tensor, StorageRecord]],
        results: Sequence[torch.Tensor],
        made: Sequence[StorageRecord],
    ) -> None:
        for tensor, record in read:
            found = self._probabilities.get(id(record))
            if found is None and id(record) not in self._scores:
                continue
            for result, new in zip(results, made, strict=True):
                if result.numel() != tensor.numel() or new.role is not Role.MADE:
                    continue
                if found is not None:
                    self._join(found, new)
                else:
                    self._scores[id(new)] = new

    def _join(self, found: _Probabilities, record: StorageRecord) -> None:
        if id(record) not in self._probabilities:
            self._probabilities[id(record)] = found
            found.made.append(record)

    def untiled(self) -> tuple[UntiledAttention, ...]:
        """Returns what saves more than a tiled kernel would, in forward order."""
        attentions = (
            UntiledAttention(
                call=found.made[0].segment,
                module=found.made[0].cause[1],
                saved_bytes=sum(record.nbytes for record in found.made if record.is_saved),
                tiled_bytes=_LOG_SUM_BYTES * found.rows,
            )
            for found in self._found
            if found.is_multiplied
        )
        return tuple(one for one in attentions if one.saved_bytes > one.tiled_bytes)
