"""Hashes of frozen dataclasses, found once: searches look thousands of plans up by their parts.

In: a frozen dataclass whose fields are hashable. Out: its hash, kept beside its fields; its state
without that, since strings hash otherwise in another process.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

_KEPT = "_hash"


def hash_once(value: Any) -> int:
    """Returns the hash of a frozen dataclass by its fields; found the first time."""
    found = value.__dict__.get(_KEPT)
    if found is None:
        found = value.__dict__[_KEPT] = hash(tuple(getattr(value, field.name) for field in fields(value)))
    return found


def without_hash(value: Any) -> dict[str, object]:
    """Returns what is pickled and copied of it."""
    return {name: kept for name, kept in value.__dict__.items() if name != _KEPT}
