"""Targets: what a head learns, by the name of its task.

In: an `Ask` and what the batch holds already. Out: labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sweeping.asking import FIRST_WORD, LAST_WORD, ROWS, TOKENS, Ask, sides


def labels(ask: Ask, batch: Mapping[str, Any]) -> Any:
    """Targets of the head, by the name of its task."""
    for ending, make in _LABELS:
        if ending in ask.head:
            return make(ask, batch)
    return batch["input_ids"].clone() if "input_ids" in batch else ask.integers(FIRST_WORD, LAST_WORD, ROWS, TOKENS)


def _boxes(ask: Ask, _: Any) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    for row in range(ROWS):
        number = 1 + row % 2
        boxes = torch.cat([0.3 + 0.4 * ask.uniform(number, 2), 0.1 + 0.3 * ask.uniform(number, 2)], dim=1)
        found.append({"class_labels": ask.integers(0, 5, number), "boxes": boxes})
        if "Segmentation" in ask.head or "DocLayout" in ask.head:
            _, height, width = sides(ask)
            found[-1]["masks"] = (ask.uniform(number, height, width) > 0.5).float()
        if "DocLayout" in ask.head:
            found[-1]["read_order"] = found[-1]["reading_order"] = torch.arange(number)
            found[-1]["order_labels"] = torch.arange(number)
    return found


def _classes(ask: Ask, _: Any) -> Tensor:
    return ask.integers(0, 5, ROWS)


def _pixel_classes(ask: Ask, _: Any) -> Tensor:
    _, height, width = sides(ask)
    return ask.integers(0, 5, ROWS, height, width)


def _word_classes(ask: Ask, batch: Mapping[str, Any]) -> Tensor:
    return ask.integers(0, 5, *batch["input_ids"].shape)


def words(ask: Ask, _: Any) -> Tensor:
    return ask.integers(FIRST_WORD, LAST_WORD, ROWS, TOKENS - 3)


def _few_words(ask: Ask, _: Any) -> Tensor:
    return ask.integers(FIRST_WORD, 16, ROWS, 3)


def _masked(ask: Ask, batch: Mapping[str, Any]) -> Tensor:
    ids = batch["input_ids"]
    asked = ask.uniform(*ids.shape) < 0.33
    asked[:, 0] = True
    return ids.masked_fill(~asked, -100)


def _depths(ask: Ask, _: Any) -> Tensor:
    _, height, width = sides(ask)
    return 0.5 + ask.uniform(ROWS, height, width)


_LABELS: tuple[tuple[str, Callable[[Ask, Any], Any]], ...] = (
    ("ObjectDetection", _boxes), ("DetrForSegmentation", _boxes), ("SemanticSegmentation", _pixel_classes), ("DepthEstimation", _depths),
    ("MaskedLM", _masked), ("TokenClassification", _word_classes), ("AudioFrameClassification", lambda ask, _: ask.integers(0, 2, ROWS, 39, 5).float()),
    ("Classification", _classes), ("ForCTC", _few_words), ("ForRNNT", _few_words), ("ForTDT", _few_words), ("XVector", _classes), ("CLM", words),
    ("NextSentence", lambda ask, _: ask.integers(0, 2, ROWS)),
)  # fmt: skip


def decodes(ask: Ask) -> bool:
    return bool(getattr(ask.config, "is_encoder_decoder", False))


def masks(ask: Ask, _: Any) -> list[Tensor]:
    _, height, width = sides(ask)
    return [(ask.uniform(1 + row % 2, height, width) > 0.5).float() for row in range(ROWS)]
