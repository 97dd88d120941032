"""Facts about operators from their schemas: whose results policies keep, and which arguments an
operation writes.

In: an operator as a dispatch mode receives it, with its arguments. Out: answers that the profile
and the engine share.

Nothing is imported from torch: an operator is anything that has a torch schema as its `_schema`.
One that has none (a higher-order operator) is not kept, and what it writes is not known.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from memfit.core.saved_policies import Saved


def is_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operators: Container[str]) -> bool:
    """Tells whether a policy that names these operators keeps the results of this operation.
    Operations that draw random numbers or write into an argument are not kept.
    """
    name = _pure_name(func)
    return name is not None and name in operators and not argument_of(func, "dropout_p", args, kwargs)


def policies_that_keep(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Saved, ...]:
    """Returns the policies that keep the results of this operation."""
    return tuple(saved for saved in Saved if is_kept(func, args, kwargs, saved.policy.kept_operators))


@cache
def _pure_name(func: Any) -> str | None:
    schema = _schema_of(func)
    return None if schema is None or schema.is_mutable else schema.name


def _schema_of(func: Any) -> Any:
    return getattr(func, "_schema", None)


def argument_of(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the value of an operator's argument by name; None if it has no such argument."""
    for position, argument in enumerate(_schema_of(func).arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def runs_across(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Tells whether the operator is a norm along dimensions without the last one: its kernel then
    walks across memory, some 20 times as slowly as along it.
    """
    schema = _schema_of(func)
    if schema is None or schema.name != "aten::linalg_vector_norm":
        return False
    dims = argument_of(func, "dim", args, kwargs or {})
    return dims is not None and not {-1, args[0].dim() - 1} & {*dims}


def has_schema(func: Any) -> bool:
    """Tells whether the operator has a schema, which says what it writes. Higher-order operators
    have none.
    """
    return _schema_of(func) is not None


@cache
def only_relabels(func: Any) -> bool:
    """Tells whether the operator changes only a tensor's metadata and no byte of its storage
    (`unsqueeze_`, `set_`).
    """
    return any(tag.name == "inplace_view" for tag in func.tags)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the arguments that an operation writes: tensors, lists of tensors, or
    None where an argument was left out.
    """
    names = _written_names(func)
    if not names:
        return []
    if names is _STATISTICS and not any(argument_of(func, n, args, kwargs) is True for n in ("training", "train")):
        return []
    return [argument_of(func, name, args, kwargs) for name in names]


_STATISTICS = ("running_mean", "running_var")


@cache
def _written_names(func: Any) -> tuple[str, ...]:
    schema = _schema_of(func)
    if schema.is_mutable:
        return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    # In training these kernels change the running statistics behind their schema's back.
    name = schema.name.partition("::")[2]
    return _STATISTICS if "batch_norm" in name and "backward" not in name else ()


# Attention that bypasses tiled kernels.
#
# In: nothing (`trace` fills it). Out: a frozen dataclass, a part of
# `core.profile.TraceProfile`.


@dataclass(frozen=True, kw_only=True)
class UntiledAttention:
    """Attention that saves its probabilities for backward, instead of making them again in tiles.

    Attributes:
        call: index of the call in whose segment it ran.
        module: dotted name of the module.
        saved_bytes: the probabilities, and dropout's mask and result where there are any.
        tiled_bytes: what a tiled kernel saves in their place, a number in fp32 for each row. Q, K
            and V are saved either way.
    """

    call: int
    module: str
    saved_bytes: int
    tiled_bytes: int
