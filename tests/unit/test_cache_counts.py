"""Counts of key-value caches that are here, while others go."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.engine.caches import CacheRecord, OffloadedCaches


class Layer:
    """Has no tensors."""


def test_a_cache_that_goes_while_another_is_counted_is_counted_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = None
    caches = OffloadedCaches(pool, limit_bytes=1000)
    caches.here_bytes = 50
    record = CacheRecord(Layer(), caches)

    def recount(_: CacheRecord) -> int:
        caches.drop(0, 50)  # as a finalizer does, whenever something is freed
        return 7

    monkeypatch.setattr(CacheRecord, "recount", recount)
    caches.changed(record)
    assert caches.here_bytes == 7
