"""Selective recomputation: results of matrix products and attention are kept, everything else is made again.

In: the operations that run inside a call. Out: the same results when the call runs again, the expensive ones without
computing.

[Note: what selection keeps]
While the call runs, a dispatch mode keeps the results of the operations in `expensive_operations`, without their graph.
When it runs again, another mode hands them out in the same order; whatever is not expensive runs again. Three cases are
computed again although they are expensive, because handing out a result would not be exact: attention that draws random
numbers (skipping it would leave the generator behind for whatever draws next), a result that was changed in place since
(`nn.ReLU(inplace=True)` behind a linear layer), and a result that nobody will reach because recomputation stops before
it (the last product of a call; it is not held either).

`torch.utils.checkpoint.create_selective_checkpoint_contexts` is not used: it draws random numbers differently when
attention has dropout, and fails in backward when a kept result was changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.runtime.saved.tensors import TRY_ANOTHER_FATE, AstrayError, version_of

_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "convolution", "_convolution",
    "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm",
)  # fmt: skip
_ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps",
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
)  # fmt: skip


@cache
def expensive_operations() -> frozenset[Any]:
    """Operations whose results are kept, as overloads of `torch.ops.aten` (those that this build of torch has)."""
    packets = [getattr(torch.ops.aten, name, None) for name in (*_PRODUCTS, *_ATTENTION)]
    return frozenset(packet.default for packet in packets if packet is not None and hasattr(packet, "default"))


class _Kept:
    """One expensive operation: its result, or None where it has to run again."""

    __slots__ = ("operation", "packs_before", "result", "versions")

    def __init__(self, operation: Any, result: Any, packs_before: int) -> None:
        self.operation = operation
        self.packs_before = packs_before
        self.result = pytree.tree_map_only(torch.Tensor, _without_graph, result)
        self.versions = [version_of(tensor) for tensor in self.tensors]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, torch.Tensor)]

    @property
    def is_unchanged(self) -> bool:
        return [version_of(tensor) for tensor in self.tensors] == self.versions


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    # Below autograd an alias would get a version counter of its own; with this key back in, it shares that of the
    # result, which tells later whether the result was changed in place.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: FBT003 (C function)
        return tensor.detach()


class Selection:
    """Results kept of one call.

    Args:
        place: the site, for messages.
        count_packs: how many tensors autograd has saved in the call so far.
    """

    def __init__(self, place: str, count_packs: Callable[[], int]) -> None:
        self._place = place
        self._count_packs: Callable[[], int] | None = count_packs
        self._kept: list[_Kept] = []
        self._position = 0

    def keeping(self) -> TorchDispatchMode:
        """The mode for the first run."""
        return _Keeping(self._note)

    def using(self) -> TorchDispatchMode:
        """The mode for the second run."""
        self._position = 0
        return _Using(self._take)

    def settle(self, *, runs_to_the_end: bool) -> None:
        """Called when the call is over: lets go of results that cannot or will not be used.

        Args:
            runs_to_the_end: the call's outputs will be needed, so it will not stop at the last saved tensor.
        """
        assert self._count_packs is not None
        packs = self._count_packs()
        self._count_packs = None  # it refers to the frame
        for kept in self._kept:
            if (kept.packs_before == packs and not runs_to_the_end) or not kept.is_unchanged:
                kept.result = None

    def storages(self) -> Iterable[torch.UntypedStorage]:
        """Storages of the kept results."""
        return (tensor.untyped_storage() for kept in self._kept for tensor in kept.tensors)

    def _note(self, operation: Any, result: Any) -> None:
        assert self._count_packs is not None
        self._kept.append(_Kept(operation, result, self._count_packs()))

    def _take(self, operation: Any) -> Any:
        """The kept result, handed over; None if the operation has to run."""
        if self._position >= len(self._kept) or self._kept[self._position].operation is not operation:
            expected = (
                self._kept[self._position].operation if self._position < len(self._kept) else "the end of the call"
            )
            raise AstrayError(
                f"{self._place} runs other operations when it is recomputed: {operation} came where the first run had "
                f"{expected}. Its control flow depends on something outside its arguments; {TRY_ANOTHER_FATE}"
            )
        kept = self._kept[self._position]
        self._position += 1
        result, kept.result = (kept.result if kept.is_unchanged else None), None
        kept.versions = []
        return result


class _Keeping(TorchDispatchMode):
    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in expensive_operations() and not draws_random(func, args, kwargs):
            self._note(func, result)
        return result


class _Using(TorchDispatchMode):
    def __init__(self, take: Callable[[Any], Any]) -> None:
        super().__init__()
        self._take = take

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in expensive_operations() and not draws_random(func, args, kwargs):
            result = self._take(func)
            if result is not None:
                return result
        return func(*args, **kwargs)


def draws_random(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention operation is called with dropout."""
    for index, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return bool(kwargs.get("dropout_p", args[index] if index < len(args) else 0.0))
    return False
