"""Subjects: a small model of a model type with its batch and its loss, as plain PyTorch trains it.

In: a model type. Out: a `Subject`, or the reasons why none of its classes could be built and run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sweeping.asking import ROWS, Ask, Batch
from sweeping.batches import asks, make
from sweeping.configs import WIDTH, small_config
from sweeping.heads import candidates

MOST_PARAMETERS = 8_000_000

_MISMATCH = re.compile(r"tokens:? *(\d+).*?features:? *(\d+)", re.DOTALL)


class NotBuiltError(Exception):
    """Says why no class of a model type could be trained small."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to train.

    Attributes:
        model_type, kind: its type's name and its class's.
        config: small.
        batch: of its step.
        seed: of its weights.
    """

    model_type: str
    kind: type
    config: Any
    batch: Batch
    seed: int = 0

    def build(self) -> nn.Module:
        """The model, the same bits at every call."""
        import copy

        seed_all(self.seed)
        model: nn.Module = self.kind(copy.deepcopy(self.config)).train()
        _fill(model)
        return model

    def copy_of_batch(self) -> Batch:
        """A batch that a model may write into."""
        import copy

        return copy.deepcopy(self.batch)


def seed_all(seed: int) -> None:
    """Seeds the generators that models draw from."""
    import numpy as np

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _fill(model: nn.Module) -> None:
    """Weights that begin as zeros would hide what is behind them: they get small random numbers."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not bool(parameter.any()):
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss; of one that has none, the mean square of all that it returns."""
    output = model(**batch)
    own = output.get("loss") if isinstance(output, dict) else None
    if isinstance(own, Tensor) and own.requires_grad:
        return own if own.dim() == 0 else own.mean()
    parts = [tensor.float().square().mean() for tensor in _tensors(output) if tensor.requires_grad]
    if not parts:
        raise ValueError("nothing that the model returns depends on a weight")
    return torch.stack(parts).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _lend_boxes() -> None:
    """Losses of detection import one function of plain torch only where Pillow is installed, which nothing here needs: it is handed to them."""
    import importlib
    import pkgutil

    from transformers import loss
    from transformers.image_transforms import center_to_corners_format

    for found in pkgutil.iter_modules(loss.__path__, loss.__name__ + "."):
        module = importlib.import_module(found.name)
        if "center_to_corners_format" in Path(str(module.__file__)).read_text(encoding="utf-8") and not hasattr(
            module, "center_to_corners_format"
        ):
            module.center_to_corners_format = center_to_corners_format  # type: ignore[attr-defined]


def find(model_type: str) -> Subject:
    """The first class of a model type that plain PyTorch trains on a natural batch.

    Raises:
        NotBuiltError: none does, with the reason of each.
    """
    reasons: list[str] = []
    _lend_boxes()
    try:
        config = small_config(model_type)
    except Exception as error:
        raise NotBuiltError(f"configuration: {_brief(error)}") from error
    for kind in candidates(model_type, config):
        try:
            size = _size(kind, config)
        except Exception as error:  # noqa: BLE001 - the next class may do
            reasons.append(f"{kind.__name__}: {_brief(error)}")
            continue
        if size > MOST_PARAMETERS:
            reasons.append(f"{kind.__name__}: {size} parameters")
            continue
        for ask in asks(kind, config, model_type):
            found = _trained(model_type, kind, config, ask, reasons)
            if found is not None:
                return found
    raise NotBuiltError("; ".join(reasons) or "no class")


def _size(kind: type, config: Any) -> int:
    """Parameters, counted where they take no memory; as built, where a class cannot be built so."""
    import copy

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    except (RuntimeError, NotImplementedError):
        return sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())


def _trained(model_type: str, kind: type, config: Any, ask: Ask, reasons: list[str]) -> Subject | None:
    """One forward and backward; a model that says how many places its pictures need gets as many."""
    for _ in range(3):
        try:
            subject = Subject(model_type=model_type, kind=kind, config=config, batch=make(ask, model_type))
            model = subject.build()
            loss = loss_of(model, subject.copy_of_batch())
            loss.backward()
        except Exception as error:  # noqa: BLE001 - another batch may do
            said = _MISMATCH.search(str(error))
            if said is not None:
                wanted = int(said[2]) // ROWS if int(said[2]) % ROWS == 0 else 0
                wanted = wanted // WIDTH if wanted > 256 else wanted  # some count elements, not places
                if 0 < wanted <= 256 and wanted != ask.media_tokens:
                    ask = Ask(
                        kind=kind, config=config, packing=ask.packing, media_tokens=wanted, has_labels=ask.has_labels
                    )
                    continue
            reasons.append(f"{kind.__name__}, {ask.packing}: {_brief(error)}")
            return None
        if not bool(torch.isfinite(loss)):
            reasons.append(f"{kind.__name__}, {ask.packing}: its loss is {loss.item()}")
            return None
        if not any(p.grad is not None and bool(p.grad.any()) for p in model.parameters()):
            reasons.append(f"{kind.__name__}, {ask.packing}: no gradients")
            return None
        return subject
    return None


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
