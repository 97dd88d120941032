"""Builds a case: its model, optimizer, loss and batches.

In: the parts of a case, as JSON has them. Out: ordinary torch objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from limiting.modules import KINDS, Lion

Loss = Callable[[nn.Module, Any], torch.Tensor]


def load(family: tuple[str, str]) -> None:
    """Imports what the model needs: memory that is there before a limit is set."""
    if family[0] == "torch":
        return
    import transformers

    assert all(hasattr(transformers, name) for name in family)


def build_model(family: tuple[str, str], config: Mapping[str, Any]) -> nn.Module:
    """The model, in training mode."""
    if family[0] == "torch":
        sizes = {name: value for name, value in config.items() if name != "kind"}
        return KINDS[config["kind"]](**sizes)
    import transformers

    kind, model = (getattr(transformers, name) for name in family)
    return model(kind(**config)).train()


def build_optimizer(
    name: str, settings: Mapping[str, Any], model: nn.Module, *, grouped: bool = False
) -> torch.optim.Optimizer:
    """The optimizer; `grouped`: matrices and the rest in groups of their own, with rates of their own."""
    kind = Lion if name == "Lion" else getattr(torch.optim, name)
    if not grouped:
        return kind(model.parameters(), **settings)
    rate = settings.get("lr", 1e-3)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return kind([{"params": matrices, "lr": rate}, {"params": others, "lr": rate / 2}], **settings)


def build_loss(family: tuple[str, str], batch: str, autocast: str | None = None) -> Loss:
    """The loss; under `autocast` as the user would write it."""

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        if family[0] != "torch":
            return model(**rows).loss
        if batch == "words":
            logits = model(rows[0])
            return nn.functional.cross_entropy(logits.flatten(0, -2).float(), rows[0][:, -logits.shape[1] :].flatten())
        if batch == "classes":
            return nn.functional.cross_entropy(model(rows[0]), rows[1])
        return nn.functional.mse_loss(model(rows[0]), rows[1])

    if autocast is None:
        return loss

    def cast(model: nn.Module, rows: Any) -> torch.Tensor:
        with torch.autocast("cpu", getattr(torch, autocast)):
            return loss(model, rows)

    return cast


def build_batch(batch: str, sizes: tuple[int, int, int], *, rows: int | None = None, share: float = 1.0) -> Any:
    """Random rows.

    Args:
        batch: kind of rows.
        sizes: of the case.
        rows: so many instead of the case's.
        share: of the tokens that a row has.
    """
    most, length, count = sizes
    rows = rows or most
    tokens = max(8, int(share * length) // 8 * 8)
    match batch:
        case "rows":
            shape = (rows, count, length) if count else (rows, length)
            return (torch.randn(shape), torch.randn(shape))
        case "words":
            return (torch.randint(3, count, (rows, tokens)),)
        case "pictures":
            return (torch.randn(rows, 3, length, length), torch.randn(rows, 3, length, length))
        case "classes":
            return (torch.randn(rows, 3, length, length), torch.randint(0, 3, (rows,)))
        case "waves":
            return (torch.randn(rows, 1, length), torch.randn(rows, 1, length))
        case "images":
            return {"pixel_values": torch.randn(rows, 3, length, length), "labels": torch.randint(0, count, (rows,))}
        case "pairs":
            return {
                "input_ids": torch.randint(3, count, (rows, tokens)),
                "labels": torch.randint(3, count, (rows, tokens * 3 // 4)),
            }
        case _:
            words = torch.randint(3, count, (rows, tokens))
            return {"input_ids": words, "labels": words}
