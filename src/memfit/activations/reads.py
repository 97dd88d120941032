"""Which tensors the operations of a call read.

In: storages of interest. Out: those that an operation was given.

[Note: what a call does not read]
A key-value cache hands the keys and values of all earlier layers to each layer, which looks at its
own only. Holding what such an object contains would keep every layer's keys and values until
backward (measured on a six-layer GPT-2 with its default `use_cache=True`: 16 hidden states held
where 6 are needed). So while a call runs that got an object with tensors inside, a dispatch mode
notes which of them are read; the others are not held, and stand-ins with their shapes, but no
values, take their places when the call runs again. A second run that does read one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memfit.activations.operation_modes import OperationMode
from memfit.activations.saved_tensors import plain_storage


class ReadWatcher(OperationMode):
    """Tells of every operation that is given a tensor over one of some storages.

    Time: a few microseconds an operation.

    Args:
        storages: of interest, by the address of the storage object; they must stay alive.
        tell: is given that address.
    """

    def __init__(self, storages: Iterable[int], tell: Callable[[int], None]) -> None:
        super().__init__()
        self._storages = frozenset(storages)
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look(args)
        self._look(kwargs.values())
        return func(*args, **kwargs)

    def _look(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = plain_storage(value)
                if storage is not None and storage._cdata in self._storages:
                    self._tell(storage._cdata)
            elif isinstance(value, list | tuple):
                self._look(value)


def is_compiled(module: torch.nn.Module) -> bool:
    """Tells whether the module or one inside has a compiled forward.

    Under a dispatch mode compiled code would run eagerly, with other roundings.
    """
    return any(
        getattr(inner, "_compiled_call_impl", None) is not None or hasattr(inner.forward, "_torchdynamo_orig_callable")
        for inner in module.modules()
    )
