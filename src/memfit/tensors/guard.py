"""A weight whose bytes are away must be a clear error, not a crash.

In: parameters that leave. Out: the same objects, wearing a class that refuses every operation on
values until they come back.

[Note: why the class is swapped]
A freed weight that is read crashes the interpreter for `w + 1`, `sum`, `clone`, `copy_` (matrix
products merely raise). Torch asks the *class* of an argument whether it wants to handle an
operation, in C++ and before any kernel runs; ordinary parameters say no. While a weight is away its
object gets a subclass that says yes and raises. The object, its identity, hooks, grad and place in
the optimizer are untouched, autograd's engine never asks, and a weight that is there costs nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from memfit.core.errors import AwayError, UnsupportedError

# Attributes and methods that read or write the object's description, never its values.
_DESCRIPTIVE = frozenset({
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "ndim", "names", "grad_fn", "_backward_hooks",
    "_post_accumulate_grad_hooks", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_xpu", "is_mps",
    "is_nested", "is_sparse_csr", "_version", "output_nr", "_base", "name", "nbytes", "itemsize", "grad_dtype", "retains_grad",
    "size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__", "__hash__", "ndimension", "is_shared",
    "is_signed", "is_inference", "_has_compatible_shallow_copy_type", "_is_view", "get_device", "is_conj", "is_neg", "is_same_size", "has_names",
})  # fmt: skip

# Conversions that return the tensor itself where it is already what they make it.
_CONVERSIONS = frozenset({
    "to", "type", "type_as", "cpu", "cuda", "xpu", "float", "double", "half", "bfloat16", "contiguous",
})  # fmt: skip

_NAMES = "_memfit_away"
_classes: dict[type, type] = {}


def mark_away(parameter: torch.nn.Parameter, name: str, block: str) -> None:
    """From now on every operation on the parameter's values raises `AwayError`."""
    if is_away(parameter):
        return
    kind = type(parameter)
    setattr(parameter, _NAMES, (name, block))
    parameter.__class__ = _away_class(kind)


def mark_deferred(parameter: torch.nn.Parameter, name: str) -> None:
    """The same for a parameter that has no values yet."""
    mark_away(parameter, name, "")


def is_away(parameter: torch.nn.Parameter) -> bool:
    """The parameter's bytes are not here."""
    return hasattr(type(parameter), "_memfit_present_class")


def as_present(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter, or an empty one of the class, dtype and device that it has while its bytes are
    here: for code that looks at these.
    """
    present = getattr(type(parameter), "_memfit_present_class", None)
    if present is None:
        return parameter
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return empty if present is torch.Tensor else empty.as_subclass(present)


def mark_present(parameter: torch.nn.Parameter) -> None:
    """The parameter is an ordinary one again."""
    present = getattr(type(parameter), "_memfit_present_class", None)
    if present is not None:
        parameter.__class__ = present
        delattr(parameter, _NAMES)


def _away_class(kind: type) -> type:
    if kind not in _classes:
        _classes[kind] = type(
            kind.__name__, (kind,), {"__torch_function__": classmethod(_refuse), "_memfit_present_class": kind}
        )
    return _classes[kind]


def _refuse(_cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(func.__self__, "__name__", name)
    asks_for_kind = name == "type" and len(args) == 1 and not kwargs
    if name in _DESCRIPTIVE or asks_for_kind:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    if _changes_nothing(name, func, args, kwargs or {}):
        return args[0] if name in _CONVERSIONS else None
    weight, block = _find_away([*args, *(kwargs or {}).values()])
    if block and name in _CONVERSIONS:
        held = args[0]
        raise AwayError(
            f"{name!r} would move or convert the weight {weight!r}, which rests in the home of block {block!r} as {held.dtype} for {held.device}; only what changes "
            f"nothing passes. To read it: with job.weights({block!r}): ...   To convert the model: job.close(), convert it, and fit again"
        )
    if not block:
        raise AwayError(
            f"'{name}' needs the values of the weight {weight!r}, which has none yet: its model was built by memfit.empty, and memfit.fit gives each weight "
            "its values when its block moves home. To change them before, do it in the function that builds the model"
        )
    # Called first by state_dict(), copies of a model and averages of weights.
    beside = ". To save, job.save(directory); to average, memfit.MemfitEma(job)" if name in ("detach", "data") else ""
    raise AwayError(
        f"'{name}' needs the values of the weight {weight!r}, which are away: block {block!r} rests in its home between its uses. "
        f"Put `with job.weights({block!r}):` around it (job.weights() brings all), or job.close() before it{beside}"
    )


def _changes_nothing(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tests whether a conversion would give the tensor back as it is, or whether its `data` is set
    to itself, as `nn.Module.to` does then.

    Hosts (trainers, accelerators) move every model that they are given to the device where it is
    already.
    """
    if name == "data":
        return len(args) == 2 and args[1] is args[0]
    if name not in _CONVERSIONS or not is_away(args[0]):
        return False
    held = args[0]
    wanted = kwargs.get("memory_format", torch.contiguous_format if name == "contiguous" else torch.preserve_format)
    if wanted not in (None, torch.preserve_format) and not held.is_contiguous(memory_format=wanted):
        return False
    # Without elements there are no values to convert: what a conversion does to it depends on dtype
    # and device alone.
    probe = torch.empty((0,) * held.dim(), dtype=held.dtype, device=held.device)
    options = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return func(probe, *args[1:], **options) is probe


def _find_away(arguments: list[Any]) -> tuple[str, str]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and hasattr(type(argument), "_memfit_present_class"):
            return object.__getattribute__(argument, _NAMES)
        if isinstance(argument, list | tuple):
            found = _find_away(list(argument))
            if found[0] != "?":
                return found
    return ("?", "?")


# Parameters that somebody gave other memory, another shape or other attributes while they were
# here.
#
# In: a parameter and its place in a block. Out: what was changed, in words, and the parameter as it
# was.
#
# [Note: what a visit may not change]
# A parameter is a view of its block's flat buffer: updates, homes and the next visit know that
# buffer and nothing else. Code that sets `parameter.data` (a clamp, a repacked layout, a
# conversion) trains and reads other memory, which ends with the visit: its change would be lost
# without a word. And what hangs on a parameter of a class of its own tells how its bytes are read
# (bitsandbytes' `quant_state`), so that one must not change without the other. Both are looked for
# where a visit ends, and at the end of a pass for what stays on the device. Ordinary parameters may
# carry what they like: nobody reads their bytes by it.

_DEEPEST = 3
Kept = list[tuple[Any, dict[str, Any], dict[str, object]]]


def keep_attributes(parameter: nn.Parameter) -> Kept:
    """Yields what hangs on a parameter of a class not torch's own: objects, attributes, and the
    versions of tensors among them.
    """
    kind = getattr(type(parameter), "_memfit_present_class", type(parameter))
    kept: Kept = []
    if kind is not nn.Parameter:
        _keep(parameter, kept, 0)
    return kept


def _keep(thing: Any, kept: Kept, depth: int) -> None:
    own = {name: value for name, value in vars(thing).items() if not name.startswith("_memfit")}
    versions = {name: _version_of(value) for name, value in own.items() if isinstance(value, torch.Tensor)}
    kept.append((thing, own, versions))
    for value in own.values():
        is_plain = isinstance(value, torch.Tensor | nn.Module | type) or callable(value)
        if depth < _DEEPEST and not is_plain and hasattr(value, "__dict__") and all(value is not k for k, _, _ in kept):
            _keep(value, kept, depth + 1)


def changed_attribute(kept: Kept) -> str | None:
    """The name of an attribute that is not what it was; None if all are."""
    for thing, own, versions in kept:
        now = vars(thing)
        for name, value in own.items():
            found = now.get(name)
            is_written = name in versions and found is value and _version_of(value) != versions[name]
            if is_written or not (
                found is value or (type(found) is type(value) and _is_number(value) and found == value)
            ):
                return name
        for name in now:
            if name not in own and not name.startswith("_memfit"):
                return name
    return None


def _version_of(tensor: torch.Tensor) -> object:
    """Returns what shows a write: the version counter; in the processor's memory, where nothing
    waits for it, a hash of the bits as well.
    """
    version = -1 if tensor.is_inference() else tensor._version
    is_near = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel()
    return version, int(torch.hash_tensor(tensor.detach().reshape(-1).view(torch.uint8))) if is_near else 0


def put_back(kept: Kept) -> None:
    """The attributes are those that were kept."""
    for thing, own, _ in kept:
        now = vars(thing)
        for name in [name for name in now if name not in own and not name.startswith("_memfit")]:
            del now[name]
        now.update(own)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def refused_change(name: str, block: str, what: str) -> UnsupportedError:
    """The error for a parameter that was changed."""
    remark = " (bitsandbytes' Linear4bit repacks its weights when it is evaluated on some CPUs: set support_avx512bf16_for_cpu=False on such layers.)"
    return UnsupportedError(
        f"the weight {name!r} {what} while it was here: only values that are changed in place stay, so the change would be lost (it was taken back). Write "
        f"`parameter.copy_(...)` inside `with job.weights({block!r}):` between steps.{remark if 'bitsandbytes' in sys.modules else ''}"
    )
