"""The setting in which a model is traced, checked, stepped and evaluated: the same in all four.

In: the model and the plan's chunk of the loss. Out: a context, after which the model is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memfit.runtime.losses import chunked_head


@contextmanager
def training_setting(model: nn.Module, chunk_tokens: int | None) -> Iterator[None]:
    """Known losses run in chunks of `chunk_tokens`, and transformers keep no key-value cache.

    Transformers' models make a cache for generation even while they train (`config.use_cache`). It changes no value of the loss, holds all keys and
    values until the end of the forward, and a layer that appends to it cannot be run again. The loss function sees no `past_key_values`.
    """
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", None) is True}
    for config in configs.values():
        config.use_cache = False
    try:
        with chunked_head(model, chunk_tokens):
            yield
    finally:
        for config in configs.values():
            config.use_cache = True
