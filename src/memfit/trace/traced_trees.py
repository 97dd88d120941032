"""Finds the tensors in values of three sorts: operator arguments, module arguments, and whatever
hangs on objects; and the leaves of a loss.

In: any Python value. Out: its tensors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def operator_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors among an operator's arguments or results, which nest in lists, tuples and the dict of
    keywords only.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from operator_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from operator_tensors(item)


def contained_tensors(root: Any) -> Iterator[torch.Tensor]:
    """Distinct tensors in nested mappings (model outputs are some), lists, tuples, sets, deques and
    dataclasses.
    """
    return _walk(root, enters_objects=False)


def reachable_tensors(root: Any) -> Iterator[torch.Tensor]:
    """`contained_tensors` and those held by attributes of other objects, such as caches.

    Modules are not entered.
    """
    return _walk(root, enters_objects=True)


def _walk(root: Any, *, enters_objects: bool) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, str | int | float | bool | bytes | type(None) | type | nn.Module) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, torch.Tensor):
            yield node
        elif isinstance(node, Mapping):
            stack.extend(node.values())
        elif isinstance(node, list | tuple | set | frozenset | deque):
            stack.extend(node)
        elif dataclasses.is_dataclass(node) or (enters_objects and not callable(node)):
            stack.extend(getattr(node, "__dict__", {}).values())


def uses_of_leaves(loss: torch.Tensor) -> Counter[int]:
    """By `id` of each leaf that the loss depends on: how many gradients backward adds up for it."""
    uses: Counter[int] = Counter()
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                uses[id(variable)] += 1
            else:
                stack.append(following)
    return uses
