"""The setting in which a model is traced, checked, stepped and evaluated: the same in all four.

In: the model, the plan's chunk of the loss, what its key-value caches are. Out: a context, after
which the model is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from memfit.huggingface.causal_loss import chunked_head
from memfit.huggingface.noop_cache import CacheUse, caches_in_training


@contextmanager
def training_setting(model: nn.Module, chunk_tokens: int | None, caches: CacheUse) -> Iterator[None]:
    """Context in which known losses run in chunks of `chunk_tokens`, and transformers' caches hold
    nothing.

    See [Note: caches in training] in `huggingface.noop_cache`.
    """
    with caches_in_training(model, caches), chunked_head(model, chunk_tokens):
        yield
