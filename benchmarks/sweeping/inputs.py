"""Inputs by hand, for model types whose names of inputs do not say enough.

Values, or functions of what is asked and of what the batch holds already. None: leave the input out. "packing": how its pictures lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def _all_pictures(_: Any, batch: Mapping[str, Any]) -> Any:
    return torch.ones(*batch["input_ids"].shape, 1, dtype=torch.long)


def _phrases(ask: Any, _: Mapping[str, Any]) -> Any:
    """Five words, each closed by a point, as a text to ground pictures in."""
    rows = ask.integers(5, 100, 4, 5)
    points = torch.full_like(rows, 1012)
    ends = torch.tensor([[101], [102]]).expand(2, 4)
    return torch.cat([ends[0][:, None], torch.stack([rows, points], dim=2).flatten(1), ends[1][:, None]], dim=1)


def _points(ask: Any, _: Mapping[str, Any]) -> Any:
    return 64 * ask.uniform(4, 1, 2, 2)


GIVEN: dict[str, Mapping[str, Any]] = {
    "grounding-dino": {"input_ids": _phrases},
    "mm-grounding-dino": {"input_ids": _phrases},
    "sam2": {"input_points": _points, "input_labels": lambda ask, _: ask.integers(0, 2, 4, 1, 2)},
    "llava": {"image_sizes": None},
    "vipllava": {"image_sizes": None},
    "idefics": {"image_attention_mask": _all_pictures, "packing": "pictures in rows"},
}
