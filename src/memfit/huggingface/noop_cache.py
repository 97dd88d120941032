"""Key-value caches of transformers that keep nothing, for training.

In: a model whose configuration says `use_cache`, as transformers' default is. Out: a context in
which the caches that its forward makes hand out what they are given and hold none of it.

[Note: caches in training]
Transformers' decoders make a cache for generation even while they train. It holds all keys and
values until the end of the forward, and a layer that has appended to it cannot run again. Yet
without it the numbers are others, by a rounding: what a cache hands out is a copy (`torch.cat` with
nothing), and products of copies add in another order than those of views (GPT-2 with dropout or
eager attention, T5). A cache that copies and forgets gives the user's numbers, holds nothing, and
may be asked again in recompute.

Where a model does more with its caches than to update them, or keeps states in its modules instead
(RecurrentGemma), caches are switched off, as transformers does it under gradient checkpointing.
Where the loss itself hands a cache to a second forward, it is a real one, and its layers run once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UnsupportedError
from memfit.core.planning_state import uncounted
from memfit.tensors.module_walk import modules_of


class CacheUse(Enum):
    """Treatment of the caches that a model makes in training."""

    NO_OP = "no-op"
    OFF = "off"
    REAL = "real"


class HandedBackError(UnsupportedError):
    """A cache that kept nothing was given to another forward."""


@dataclass
class CacheChoice:
    """Treatment that was found to work with a model: once, at its first trace."""

    use: CacheUse = CacheUse.NO_OP
    is_decided: bool = False


class _Making(threading.local):
    """Counts this thread's nested contexts of no-op caches, and the caches made in them."""

    depth = 0
    made = 0


_making = _Making()


@contextmanager
def caches_in_training(model: nn.Module, use: CacheUse) -> Iterator[None]:
    """Caches that the model's forward makes are as `use` says; after the context all is as it was.

    Raises:
        HandedBackError: from a forward that gets a cache of an earlier one, which kept nothing.
    """
    utils = sys.modules.get("transformers.cache_utils")
    if utils is None or use is CacheUse.REAL or not (configs := _caching(model)):
        yield
        return
    if use is CacheUse.OFF or not hasattr(utils, "DynamicLayer"):
        for config in configs:
            config.use_cache = False
        try:
            yield
        finally:
            for config in configs:
                config.use_cache = True
        return
    _install(utils)
    with ExitStack() as stack:
        for outer in _outermost(model):
            stack.callback(outer.register_forward_pre_hook(_refuse_noop, with_kwargs=True).remove)
        _making.depth += 1
        try:
            yield
        finally:
            _making.depth -= 1


def asks_for_caches(model: nn.Module) -> bool:
    """A configuration in the model does."""
    return "transformers.cache_utils" in sys.modules and bool(_caching(model))


@dataclass
class Noted:
    """Observations of what a loss does with caches.

    Attributes:
        made: caches that keep nothing.
        keeps_elsewhere: modules hold tensors, as attributes of their own, that they did not hold
            before.
    """

    made: int = 0
    keeps_elsewhere: bool = False

    def watching(self, loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """The loss; what it does is noted."""

        def watched(model: nn.Module, batch: Any) -> Any:
            with uncounted():
                before, made = _kept_by(model), _making.made
            result = loss(model, batch)
            with uncounted():
                self.made += _making.made - made
                self.keeps_elsewhere |= bool(_kept_by(model) - before)
            return result

        return watched


def _kept_by(model: nn.Module) -> set[tuple[str, str]]:
    return {
        (where, name)
        for where, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _caching(model: nn.Module) -> list[Any]:
    # Asked only where there is one: a module answers for what it does not have at length.
    found: list[Any] = [
        getattr(module, "config", None)
        for module in modules_of(model)
        if "config" in vars(module) or hasattr(type(module), "config")
    ]
    return list({id(config): config for config in found if getattr(config, "use_cache", None) is True}.values())


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Models of transformers that are not parts of others."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return
    pending = [model]
    while pending:
        module = pending.pop()
        if isinstance(module, base):
            yield module
        else:
            pending += module.children()


def _refuse_noop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    # None: a hook before it in the same call has removed it, and torch forgot how to call it.
    for value in (*args, *(kwargs or {}).values()):
        caches = (value, getattr(value, "self_attention_cache", None))
        if any(getattr(cache, "keeps_nothing", False) for cache in caches):
            raise HandedBackError(
                "a key-value cache of one forward was given to another, but the caches that a model makes in training keep nothing: make one yourself "
                "(transformers.DynamicCache) outside of the loss function, or switch caches off (config.use_cache = False)"
            )


@functools.cache
def _install(cache_utils: Any) -> None:
    """Has transformers' caches look, when they are made, whether this thread trains.

    Once a process: what others make is as ever.
    """

    class NoOp:
        """Hands out what it is given, as the first update of a real layer does, and keeps none of
        it.
        """

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return _copied(key_states), _copied(value_states)

    class NoOpLayer(NoOp, cache_utils.DynamicLayer):
        pass

    class NoOpSlidingLayer(NoOp, cache_utils.DynamicSlidingWindowLayer):
        def __init__(self, sliding_window: int) -> None:
            cache_utils.DynamicSlidingWindowLayer.__init__(self, sliding_window)

    def without_memory(layer: Any) -> Any:
        if type(layer) is cache_utils.DynamicLayer:
            return NoOpLayer()
        if type(layer) is cache_utils.DynamicSlidingWindowLayer:
            return NoOpSlidingLayer(sliding_window=layer.sliding_window)
        return layer

    plain_cache, plain_pair = cache_utils.DynamicCache.__init__, cache_utils.EncoderDecoderCache.__init__

    @functools.wraps(plain_cache)
    def make_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_cache(self, *args, **kwargs)
        if not _making.depth or any(getattr(layer, "is_initialized", False) for layer in self.layers):
            return
        self.layers = [without_memory(layer) for layer in self.layers]
        if self.layer_class_to_replicate is cache_utils.DynamicLayer:
            self.layer_class_to_replicate = NoOpLayer
        self.keeps_nothing = True
        _making.made += 1

    @functools.wraps(plain_pair)
    def make_pair(self: Any, *caches: Any) -> None:
        plain_pair(self, *caches)
        if getattr(self.cross_attention_cache, "keeps_nothing", False):
            self.is_updated = _NeverNoted(self.is_updated)

    cache_utils.DynamicCache.__init__ = make_cache
    cache_utils.EncoderDecoderCache.__init__ = make_pair


class _NeverNoted(dict[int, bool]):
    """Which layers have the encoder's keys already: none ever does."""

    def __setitem__(self, layer: int, value: bool) -> None:
        pass


def _copied(states: torch.Tensor) -> torch.Tensor:
    """As the first update of a real cache hands it out."""
    return torch.cat([torch.tensor([], dtype=states.dtype, device=states.device), states], dim=-2)
