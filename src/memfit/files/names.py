"""Decides which tensors of a model are saved, under which names and in which files.

In: a model, its weights here or away. Out: names and tensors as `state_dict` gives them, each tied
tensor once; shards.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UnsupportedError, UsageError
from memfit.files.trainer import OLD_FILE_NAME, is_of_trainer

STALE = re.compile(
    r"model\.safetensors|model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json|optimizer\.safetensors|registered\.safetensors|averages(-\d+)?\.safetensors|memfit_state\.json"
)
"""Files that a new save replaces even where it has no file of that name."""


def is_stale(path: Path) -> bool:
    """Tests whether a new save replaces a file of an older one, even where it has no file of that
    name.
    """
    is_old_state = path.name == OLD_FILE_NAME and not is_of_trainer(path)
    return is_old_state or STALE.fullmatch(path.name) is not None


_EXTRA_STATE = "_extra_state"
"""As `torch.nn.modules.module` has it."""


@dataclass(frozen=True, kw_only=True)
class KeptNames:
    """The entries of a state dict.

    Attributes:
        tensors: by name, each tensor once; parameters are the model's own objects, whose bytes may
            be away.
        tied: name that was left out -> name that holds the same tensor.
    """

    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]


def keep_names(model: nn.Module) -> KeptNames:
    """Names as in `model.state_dict()`, ties resolved as transformers does on loading.

    Reads no values of parameters.

    Raises:
        UnsupportedError: an entry that is not a dense tensor (extra state of a module, say).
    """
    # keep_vars gives the parameters themselves; without it each would be detached, which needs its
    # bytes to be here.
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    groups: dict[object, list[str]] = defaultdict(list)
    for name, value in entries.items():
        if name in ignored:
            continue
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise UnsupportedError(
                f"{name!r} of the model's state_dict is {kind}; safetensors holds dense tensors only. Keep it in a buffer, or save it yourself"
            )
        groups[_identity(value)].append(name)
    patterns = _tied_patterns(model)
    chosen = {_choose(names, patterns): names for names in groups.values()}
    return KeptNames(
        tensors={name: entries[name] for name in entries if name in chosen},
        tied={other: name for name, names in chosen.items() for other in names if other != name},
    )


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """By name in the state dict, the modules that have state beside parameters and buffers
    (`get_extra_state`).
    """
    return {
        f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE: module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _identity(tensor: torch.Tensor) -> object:
    """Equal for the same tensor under two names."""
    if isinstance(tensor, nn.Parameter) or tensor.numel() == 0:
        return id(tensor)
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
    )


def _tied_patterns(model: nn.Module) -> list[re.Pattern[str]]:
    """Returns the names that a transformers model fills from others on loading."""
    found: set[str] = set(getattr(model, "all_tied_weights_keys", None) or ())
    for prefix, module in model.named_modules():
        declared = getattr(module, "_tied_weights_keys", None) or ()
        found.update(f"{prefix}.{name}" if prefix else name for name in declared)
    return [re.compile(pattern) for pattern in sorted(found)]


def _choose(names: Sequence[str], patterns: Sequence[re.Pattern[str]]) -> str:
    """The name that stays: the first that is not declared to be filled from another one."""
    return next((n for n in names if not any(p.search(n) for p in patterns)), names[0])


def shard(sizes_bytes: Mapping[str, int], max_shard_bytes: int) -> list[tuple[str, list[str]]]:
    """Cuts tensors into files of at most `max_shard_bytes`, in order.

    A larger tensor has a file of its own.

    Returns:
        (file name, names of its tensors): one `model.safetensors`, or numbered ones as transformers
            names them.

    Raises:
        UsageError: not a positive size.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes_bytes.items():
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    if len(shards) == 1:
        return [("model.safetensors", shards[0])]
    return [(f"model-{i:05d}-of-{len(shards):05d}.safetensors", names) for i, names in enumerate(shards, 1)]
