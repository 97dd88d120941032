"""Skips large draws of random numbers, in no time and no memory.

In: an operation that fills a tensor with random numbers, and its generator. Out: the generator as
the operation would leave it.

[Note: words of a draw]
On a processor `uniform_` takes a word of 32 bits for each number, two for fp64, in the order of the
elements. `normal_` makes sixteen numbers of sixteen uniform ones where a tensor is contiguous;
where sixteen does not divide the elements, it makes the last sixteen a second time, or in 16 bits
as many as are missing (aten/src/ATen/native/cpu/DistributionTemplates.h, `normal_fill`). Which of
these rules this build of torch follows is tried on smaller tensors, with the same dtype and
arguments; a draw that follows none of them is not skipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.tensors.mersenne import skipped

_GROUP = 16
# Words by elements.
_RULES: tuple[Callable[[int], int], ...] = (
    lambda elements: elements,
    lambda elements: 2 * elements,
    lambda elements: elements + (_GROUP if elements % _GROUP else 0),
    lambda elements: 2 * (elements + (_GROUP if elements % _GROUP else 0)),
    lambda elements: -(-elements // _GROUP) * _GROUP,
)
# Smaller draws take no longer than to skip them.
_LEAST_ELEMENTS = 1 << 19
_TRIED_ELEMENTS = (1 << 16, (1 << 16) + 1, (1 << 16) + 15, (1 << 16) + 24)

_aten = torch.ops.aten
_FACTORIES = (_aten.rand, _aten.randn)
_DRAWS = (_aten.uniform_, _aten.normal_, *_FACTORIES)


def skip_draw(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], generator: torch.Generator) -> bool:
    """Brings a generator to where an operation on a large tensor leaves it.

    Args:
        func: an operation.
        args: its positional arguments.
        kwargs: the others.
        generator: that it draws from.

    Returns:
        True if it did; False if the operation must be run for that.
    """
    packet = func.overloadpacket
    if generator.device.type != "cpu" or packet not in _DRAWS or not args:
        return False
    named = {name: value for name, value in kwargs.items() if name != "generator"}
    if packet in _FACTORIES:
        elements, dtype = math.prod(args[0]), named.get("dtype") or torch.get_default_dtype()
    elif args[0].is_contiguous():  # others are filled number by number, with halves of pairs kept
        elements, dtype = args[0].numel(), args[0].dtype
    else:
        return False
    if elements < _LEAST_ELEMENTS:
        return False
    rule = _rule(func, dtype, args[1:], tuple(named.items()))
    if rule is None:
        return False
    generator.set_state(skipped(generator.get_state(), rule(elements)))
    return True


@functools.lru_cache(maxsize=256)
def _rule(
    func: Any, dtype: torch.dtype, rest: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> Callable[[int], int] | None:
    """Words by elements of an operation; None where no known rule tells them."""
    states: list[tuple[int, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    for elements in _TRIED_ELEMENTS:
        states.append((elements, generator.get_state()))
        first = [elements] if func.overloadpacket in _FACTORIES else torch.empty(elements, dtype=dtype)
        func.overloadpacket(first, *rest, **{**dict(named), "generator": generator})
    after = [state for _, state in states[1:]] + [generator.get_state()]
    for rule in _RULES:
        if all(
            torch.equal(skipped(state, rule(elements)), left)
            for (elements, state), left in zip(states, after, strict=True)
        ):
            return rule
    return None
