"""Models that are parts of one model over several processes.

In: a model. Out: the process groups that it holds, with which ranks refuse it. Until there are
meshes, ranks train data parallel: each has the whole model. With a part, a rank would take the norm
of its own gradients for that of all, and weights that all ranks have would drift apart.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.distributed.rank_group import is_initialized

WHOLE = (
    "Ranks of memfit train data parallel: each has the whole model, from the same seed or files, and fit divides it. "
    "Parts of one model on each rank (tensor, pipeline or expert parallel) are not supported yet"
)
_MOST_OBJECTS = 1 << 18
_CONTAINERS = (dict, list, tuple, set, frozenset, functools.partial, types.MethodType, types.CellType)
_LEAVES = (str, bytes, int, float, complex, torch.Tensor, type, types.ModuleType, type(None))


def groups_of(model: nn.Module) -> list[list[int]]:
    """Returns the ranks of the process groups of several ranks that a model's modules, hooks and
    replaced methods hold, in attributes or closures; not those that they reach by name only.
    """
    if not is_initialized():
        return []
    groups: set[tuple[int, ...]] = set()
    seen: set[int] = set()
    queue: deque[Any] = deque([model])
    while queue and len(seen) < _MOST_OBJECTS:
        held = queue.popleft()
        if id(held) in seen or isinstance(held, _LEAVES):
            continue
        seen.add(id(held))
        if isinstance(held, dist.ProcessGroup):
            groups.add(tuple(dist.get_process_group_ranks(held)))
        elif hasattr(type(held), "get_all_groups"):  # a mesh, which knows its groups by name
            queue.extend(held.get_all_groups())
        else:
            queue.extend(_parts(held))
    return sorted(list(ranks) for ranks in groups if len(ranks) > 1)


def _parts(held: Any) -> Iterable[Any]:
    if isinstance(held, _CONTAINERS):
        return gc.get_referents(held)
    if isinstance(held, types.FunctionType):
        return held.__closure__, held.__defaults__, held.__kwdefaults__, held.__dict__
    return vars(held).values() if hasattr(held, "__dict__") else ()
