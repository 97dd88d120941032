"""The user's own hooks, which run while `fit` plans as if it were training: they may change what a
module gives, so that they cannot be left out; it is told.

In: a model. Out: a warning that names them, unless they ask `memfit.is_tracing()` themselves.
"""

from __future__ import annotations

import functools
import os
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from memfit.core.errors import MemfitWarning, UnsupportedError
from memfit.tensors.trees import modules_of
from memfit.trace.program_state import gradient_hooks, has_gradient_hooks

_ASKS = frozenset({"is_tracing", "is_planning"})
_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NOT_OF_USERS = (
    Path(os.path.realpath(__file__)).parents[1],
    *(Path(os.path.realpath(sysconfig.get_path(name))) for name in ("stdlib", "purelib", "platlib")),
)


def tell_hooks(
    model: nn.Module, told: Collection[tuple[str, object]] = (), when: str = "memfit.fit planned", stacklevel: int = 3
) -> None:
    """Warns of hooks of the user's program on the model that ran while a plan was made.

    Those of installed packages are theirs to know.

    Args:
        model: any.
        told: those that are known, as `hooks_of` gives them.
        when: they ran, in words.
        stacklevel: of the warning.
    """
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        for code in _codes(module):
            if not _ASKS.intersection(code.co_names) and (name, code) not in told:
                where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                found.setdefault(f"{code.co_name} ({where}), on {name or 'the model'!r}")
    for name, parameter in model.named_parameters():
        for code in _codes_of(hook for hooks in gradient_hooks(parameter) for hook in hooks):
            if not _ASKS.intersection(code.co_names) and (name, code) not in told:
                where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                found.setdefault(f"{code.co_name} ({where}), on {name!r}")
    if found:
        names = list(found)
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        warnings.warn(
            f"hooks of yours also ran while {when}: {'; '.join(names[:2])}{more}. They met tensors without values, or rows of the sample; what they "
            "count or log is not of training. `if memfit.is_tracing(): return` leaves them out where they change nothing, and ends this message",
            MemfitWarning,
            stacklevel=stacklevel,
        )


def hooks_of(model: nn.Module) -> tuple[tuple[str, object], ...]:
    """Returns the hooks of the user's program on modules and on gradients, by name and code.

    Equal as long as the same code hooks the same places: a hook may be taken off and put on again.
    """
    found: list[tuple[str, object]] = []
    for name, module in model.named_modules():
        found += ((name, code) for code in _codes(module))
    for name, parameter in model.named_parameters():
        found += ((name, _code(hook) or type(hook)) for hooks in gradient_hooks(parameter) for hook in hooks)
    return tuple(found)


def marks_of(model: nn.Module) -> tuple[object, ...]:
    """Returns modes and numbers of hooks, memfit's own included, of all modules and parameters, and
    which these are: as long as they are the same, so are modes, names and `hooks_of`, which takes
    many times longer.
    """
    found: list[object] = []
    # Parameters may be away, and their class would answer in Python.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001, nothing public does it
        for module in modules_of(model):
            own = vars(module)
            found += (id(module), own.get("training"), *own["_modules"])
            for kind in _KINDS:
                hooks = own.get(kind)
                if hooks:
                    # A number is given once in a process (`torch.utils.hooks.RemovableHandle`).
                    found.append((kind, *hooks))
            for name, parameter in own["_parameters"].items():
                if parameter is not None:
                    found += (name, id(parameter))
                    if parameter._backward_hooks:  # noqa: SLF001, as above
                        found.append(tuple(parameter._backward_hooks))  # noqa: SLF001, as above
                    if parameter._post_accumulate_grad_hooks:  # noqa: SLF001, as above
                        found.append(tuple(parameter._post_accumulate_grad_hooks))  # noqa: SLF001, as above
    return tuple(found)


def _codes(module: nn.Module) -> Iterator[CodeType]:
    for kind in _KINDS:
        yield from _codes_of(getattr(module, kind, {}).values())


def _codes_of(hooks: Iterable[Any]) -> Iterator[CodeType]:
    for hook in hooks:
        code = _code(hook)
        if code is not None and _is_of_users(code.co_filename):
            yield code


def refuse_hooked(model: nn.Module) -> None:
    """Raises `UnsupportedError` for a model with hooks on the gradients of parameters: of several
    microbatches they may meet shares or sums, as the plan has it.
    """
    hooked = [name for name, parameter in model.named_parameters() if has_gradient_hooks(parameter)]
    if hooked:
        more = f" (and {len(hooked) - 1} more)" if len(hooked) > 1 else ""
        raise UnsupportedError(
            f"the parameter {hooked[0]!r}{more} has a hook on its gradient, which of a batch that is cut into microbatches sees shares of the gradient instead of "
            'all: plan microbatches=1, or, where it makes no difference (a mask, a factor), allow={"nonadditive-loss"}'
        )


def _code(hook: Any) -> CodeType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    code = getattr(hook, "__code__", None)
    if code is None:
        # an object that is called
        code = getattr(vars(type(hook)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


@functools.lru_cache(maxsize=256)
def _is_of_users(file: str) -> bool:
    if file.startswith("<"):
        return file == "<stdin>"
    path = Path(os.path.realpath(file))
    return not any(path.is_relative_to(place) for place in _NOT_OF_USERS)
