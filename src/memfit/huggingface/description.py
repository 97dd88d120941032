"""Configuration of a model, as `from_pretrained` wants it.

In: a model, of transformers or not. Out: copies of its configuration; nothing of the model is
changed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from memfit.homes.weights import BlockWeights


def described(model: Any, blocks: Sequence[BlockWeights]) -> tuple[Any, Any]:
    """Returns a model's configuration and that of its generation; None for one that it does not
    have.
    """
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return None, None
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return config, None
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    saved = {id(slot.parameter): slot.master_dtype for block in blocks for slot in block.slots}
    first = next(p for p in model.parameters() if p.is_floating_point())
    config.dtype = str(saved.get(id(first), first.dtype)).removeprefix("torch.")
    return config, model.generation_config if model.can_generate() else None
