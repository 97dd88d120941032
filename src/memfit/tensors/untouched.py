"""Parameters that somebody gave other memory, another shape or other attributes while they were
here.

In: a parameter and its place in a block. Out: what was changed, in words, and the parameter as it
was.

[Note: what a visit may not change]
A parameter is a view of its block's flat buffer: updates, homes and the next visit know that buffer
and nothing else. Code that sets `parameter.data` (a clamp, a repacked layout, a conversion) trains
and reads other memory, which ends with the visit: its change would be lost without a word. And what
hangs on a parameter of a class of its own tells how its bytes are read (bitsandbytes'
`quant_state`), so that one must not change without the other. Both are looked for where a visit
ends, and at the end of a pass for what stays on the device. Ordinary parameters may carry what they
like: nobody reads their bytes by it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UnsupportedError

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
