"""Inputs by hand, for model types whose names of inputs do not say enough.

Values, or functions of what is asked and of what the batch holds already. None: leave the input out. "packing": how its pictures lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def _all_pictures(_: Any, batch: Mapping[str, Any]) -> Any:
    return torch.ones(*batch["input_ids"].shape, 1, dtype=torch.long)


GIVEN: dict[str, Mapping[str, Any]] = {
    "llava": {"image_sizes": None},
    "vipllava": {"image_sizes": None},
    "idefics": {"image_attention_mask": _all_pictures, "packing": "pictures in rows"},
}
