"""Selective recomputation: results of matrix products and attention are kept, everything else is
made again.

In: the operations that run inside a call. Out: the same results when the call runs again, the
expensive ones without computing.

[Note: what selection keeps]
While the call runs, a dispatch mode keeps the results of the operations that the policy names
(`core.saved_policies`), without their graph. When it runs again, another mode hands them out in the
same order; whatever is not selected runs again. Three cases are computed again although they are
expensive, because handing out a result would not be exact: attention that draws random numbers
(skipping it would leave the generator behind for whatever draws next), a result that was changed in
place since (`nn.ReLU(inplace=True)` behind a linear layer; see [Note: writes are known by
storage]), and a result that nobody will reach because recomputation stops before it (the last
product of a call; it is not held either).

`torch.utils.checkpoint.create_selective_checkpoint_contexts` is not used: it draws random numbers
differently when attention has dropout, and fails in backward when a kept result was changed in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.activations.operation_modes import OperationMode
from memfit.activations.saved_tensors import TRY_ANOTHER_POLICY, AstrayError, storage_of, version_of
from memfit.activations.writes import Writes, are_plain
from memfit.core.operators import is_kept


class _Kept:
    """One expensive operation: its result, or None where it has to run again."""

    __slots__ = ("_marks", "_versions", "operation", "packs_before", "result")

    def __init__(self, operation: Any, result: Any, packs_before: int, writes: Writes) -> None:
        self.operation = operation
        self.packs_before = packs_before
        is_dense = all(storage_of(t) is not None for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        self.result = pytree.tree_map_only(torch.Tensor, _without_graph, result) if is_dense else None
        self._versions = [version_of(tensor) for tensor in self.tensors]
        written = [writes.of(tensor.untyped_storage()) for tensor in self.tensors]
        self._marks = [(found, found.mark()) for found in written]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, torch.Tensor)]

    @property
    def is_unchanged(self) -> bool:
        # The whole storage counts, and so does what an operator without a schema may have written.
        return [version_of(tensor) for tensor in self.tensors] == self._versions and not any(
            written.since(mark, doubts=True) for written, mark in self._marks
        )

    def take(self) -> Any:
        """The result, handed over; None if it has to be computed again."""
        result = self.result if self.is_unchanged else None
        self.let_go()
        return result

    def let_go(self) -> None:
        """Gives the result up."""
        self.result = None
        self._versions, self._marks = [], []


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    # Below autograd an alias would get a version counter of its own; with this key back in, it
    # shares that of the result, which tells later whether the result was changed in place.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: FBT003 (C function)
        return tensor.detach()


class Selection:
    """Results kept of one call.

    Args:
        place: the site, for messages.
        count_packs: how many tensors autograd has saved in the call so far.
        writes: of the job's forwards.
        operators: schema names of those whose results are kept.
    """

    def __init__(self, place: str, count_packs: Callable[[], int], writes: Writes, operators: frozenset[str]) -> None:
        self._place = place
        self._operators = operators
        self._writes = writes
        self._count_packs: Callable[[], int] | None = count_packs
        self._kept: list[_Kept] = []
        self._position = 0

    def keeping(self) -> TorchDispatchMode:
        """The mode for the first run."""
        return _Keeping(self._note, self._operators)

    def using(self) -> TorchDispatchMode:
        """The mode for the second run."""
        self._position = 0
        return _Using(self._take, self._operators)

    def end_of_call(self, *, runs_to_the_end: bool) -> None:
        """Called when the call is over: lets go of results that cannot or will not be used.

        Args:
            runs_to_the_end: the call's outputs will be needed, so it will not stop at the last
                saved tensor.
        """
        assert self._count_packs is not None
        packs = self._count_packs()
        self._count_packs = None  # it refers to the frame
        for kept in self._kept:
            if (kept.packs_before == packs and not runs_to_the_end) or not kept.is_unchanged:
                kept.let_go()

    def storages(self) -> Iterable[torch.UntypedStorage]:
        """Storages of the kept results."""
        return (tensor.untyped_storage() for kept in self._kept for tensor in kept.tensors)

    def _note(self, operation: Any, result: Any) -> None:
        assert self._count_packs is not None
        self._kept.append(_Kept(operation, result, self._count_packs(), self._writes))

    def _take(self, operation: Any) -> Any:
        """The kept result, handed over; None if the operation has to run."""
        if self._position >= len(self._kept) or self._kept[self._position].operation is not operation:
            expected = (
                self._kept[self._position].operation if self._position < len(self._kept) else "the end of the call"
            )
            raise AstrayError(
                f"{self._place} runs other operations when it is recomputed: {operation} came where the first run had "
                f"{expected}. Its control flow depends on something outside its arguments; {TRY_ANOTHER_POLICY}"
            )
        kept = self._kept[self._position]
        self._position += 1
        return kept.take()


class _Keeping(OperationMode):
    supports_higher_order_operators = True

    def __init__(self, note: Callable[[Any, Any], None], operators: frozenset[str]) -> None:
        super().__init__()
        self._note = note
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not are_plain(types):
            return NotImplemented  # the products inside a subclass come here one by one
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_kept(func, args, kwargs, self._operators):
            self._note(func, result)
        return result


class _Using(OperationMode):
    supports_higher_order_operators = True

    def __init__(self, take: Callable[[Any], Any], operators: frozenset[str]) -> None:
        super().__init__()
        self._take = take
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not are_plain(types):
            return NotImplemented
        kwargs = kwargs or {}
        if is_kept(func, args, kwargs, self._operators):
            result = self._take(func)
            if result is not None:
                return result
        return func(*args, **kwargs)
