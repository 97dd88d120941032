"""Random numbers that are the same for every row, for as long as losses of a batch and of its parts
are compared.

In: a program that draws. Out: inside a `with`, what torch's default generators give depends on
shapes beyond dimension 0 alone, so that a row meets the same numbers wherever it stands. (A mask
that is drawn for the third row of three is not the one of the first row of one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_FACTORIES = {aten.rand, aten.randn, aten.randint}
_LIKE = {aten.rand_like, aten.randn_like, aten.randint_like}
_IN_PLACE = {aten.uniform_, aten.normal_, aten.exponential_, aten.random_, aten.bernoulli_, aten.geometric_}


class RowsAlike(TorchDispatchMode):
    """Draws one row and gives it to all.

    Operations that draw otherwise (permutations, samples of given odds) begin at one seed each
    time.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        torch.manual_seed(0)
        kind = func.overloadpacket
        has_tensors = any(isinstance(arg, torch.Tensor) for arg in args[1:])
        if kind in _FACTORIES:
            place = next(index for index, arg in enumerate(args) if isinstance(arg, list | tuple))
            size = list(args[place])
            if size:
                one = func(*args[:place], [1, *size[1:]], *args[place + 1 :], **kwargs)
                return one.expand(size).contiguous()
        elif kind in _LIKE and args[0].dim() and len(args[0]):
            return func(args[0][:1], *args[1:], **kwargs).expand(args[0].shape).contiguous()
        elif kind is aten.bernoulli and args[0].dim() and len(args) == 1:
            odds = args[0]
            return (torch.rand_like(odds[:1]) < odds).to(odds.dtype)
        elif kind in _IN_PLACE and args[0].dim() and len(args[0]) and not has_tensors:
            one = torch.empty_like(args[0][:1])
            func(one, *args[1:], **kwargs)
            return args[0].copy_(one.expand(args[0].shape))
        return func(*args, **kwargs)
