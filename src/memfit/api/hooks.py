"""The user's own hooks, which run while `fit` plans as if it were training: they may change what a module gives, so that they cannot be left out; it is told.

In: a model. Out: a warning that names them, unless they ask `memfit.is_planning()` themselves.
"""

from __future__ import annotations

import functools
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from memfit.core.errors import MemfitWarning

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NOT_OF_USERS = (
    Path(os.path.realpath(__file__)).parents[1],
    *(Path(os.path.realpath(sysconfig.get_path(name))) for name in ("stdlib", "purelib", "platlib")),
)


def tell_hooks(model: nn.Module) -> None:
    """Warns of hooks of the user's program on the model that ran while a plan was made. Those of installed packages are theirs to know."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        for code in _codes(module):
            if "is_planning" not in code.co_names:
                where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                found.setdefault(f"{code.co_name} ({where}), on {name or 'the model'!r}")
    if found:
        names = list(found)
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        warnings.warn(
            f"hooks of yours also ran while memfit.fit planned: {'; '.join(names[:2])}{more}. They met tensors without values, or rows of the sample; what they "
            "count or log is not of training. `if memfit.is_planning(): return` leaves them out where they change nothing, and ends this message",
            MemfitWarning,
            stacklevel=3,
        )


def _codes(module: nn.Module) -> Iterator[CodeType]:
    for kind in _KINDS:
        for hook in getattr(module, kind, {}).values():
            code = _code(hook)
            if code is not None and _is_of_users(code.co_filename):
                yield code


def _code(hook: Any) -> CodeType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    code = getattr(hook, "__code__", None)
    if code is None:
        code = getattr(vars(type(hook)).get("__call__"), "__code__", None)  # an object that is called
    return code if isinstance(code, CodeType) else None


def _is_of_users(file: str) -> bool:
    if file.startswith("<"):
        return file == "<stdin>"
    path = Path(os.path.realpath(file))
    return not any(path.is_relative_to(place) for place in _NOT_OF_USERS)
