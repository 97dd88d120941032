"""Natural batches: what a model type's own processor would hand it, made from the names of its inputs.

In: a model class and its configuration. Out: dictionaries that `model(**batch)` takes, one for each way of packing pictures that the class may want.

Every tensor holds its rows one after the other along its first dimension, each row as many entries as the others; a list has one entry a row. So the halves of a
batch are the halves of its parts, also where all pictures' patches lie in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sweeping.asking import FIRST_WORD, LAST_WORD, PACKINGS, ROWS, TOKENS, Ask, Batch
from sweeping.inputs import GIVEN
from sweeping.signals import (
    boxes_of_words,
    history,
    image_sizes,
    marked,
    patch_places,
    pixel_mask,
    pixels,
    series,
    spatial,
    spectra,
    text,
    time_grid,
    waves,
)
from sweeping.targets import decodes, labels, masks, words


def _label_of_decoder(ask: Ask, batch: Mapping[str, Any]) -> Tensor:
    return words(ask, batch)


_ALWAYS = ("input_ids", "pixel_values", "input_values", "input_features", "past_values", "inputs", "hidden_states")
_BESIDE = (
    "image_grid_thw", "mm_token_type_ids", "bbox", "mask_labels", "class_labels", "return_loss", "future_values", "past_time_features", "past_observed_mask",
    "future_time_features", "image_sizes", "spatial_shapes", "pixel_attention_mask", "image_position_ids", "pixel_position_ids", "target_sizes",
    "task_inputs", "text_inputs", "start_positions", "end_positions", "cu_seqlens_x", "grid_thw", "feature_attention_mask", "input_features_mask",
)  # fmt: skip


def make(ask: Ask, model_type: str) -> Batch:
    """A batch. Its own settings for a type are those of `inputs.GIVEN`."""
    given = GIVEN.get(model_type, {})
    batch: Batch = {}
    for name in (*_ALWAYS, *_BESIDE, *ask.parameters):
        if name in batch or name not in ask or name == "self":
            continue
        if name in given:
            value = given[name](ask, batch) if callable(given[name]) else given[name]
        else:
            is_wanted = name in _ALWAYS or name in _BESIDE or ask.requires(name)
            maker = MAKERS.get(name)
            value = maker(ask, batch) if maker is not None and is_wanted else None
        if value is not None:
            batch[name] = value
    if "input_ids" in batch and "inputs_embeds" in batch:
        del batch["inputs_embeds"]
    if not ask.has_labels:
        batch = {name: value for name, value in batch.items() if "labels" not in name}
    elif "labels" in ask and "labels" not in given:
        batch["labels"] = (
            words(ask, batch)
            if decodes(ask) and "Conditional" in ask.head and "input_ids" in batch and "pixel_values" not in batch
            else labels(ask, batch)
        )
    elif "decoder_input_ids" in ask and "decoder_input_ids" not in batch and "decoder_input_ids" not in given:
        batch["decoder_input_ids"] = words(ask, batch)
    return {name: value for name, value in batch.items() if value is not None}


MAKERS: dict[str, Callable[[Ask, Batch], Any]] = {
    "input_ids": lambda ask, _: text(ask),
    "pixel_values": lambda ask, _: pixels(ask),
    "pixel_values_videos": lambda ask, _: pixels(Ask(kind=ask.kind, config=ask.config, packing="videos")),
    "input_values": lambda ask, _: waves(ask) if ask.packing == "rows" else waves(ask)[:, None],
    "input_features": lambda ask, _: spectra(ask),
    "hidden_states": lambda ask, _: pixels(ask),
    "inputs_embeds": lambda ask, _: ask.normal(ROWS, TOKENS, ask.setting("hidden_size", "d_model", default=64)),
    "grid_thw": time_grid,
    "image_grid_thw": time_grid,
    "mm_token_type_ids": marked,
    "bbox": boxes_of_words,
    "mask_labels": masks,
    "class_labels": lambda ask, _: [ask.integers(0, 5, 1 + row % 2) for row in range(ROWS)],
    "return_loss": lambda *_: True,
    "past_values": lambda ask, _: series(ask, history(ask)),
    "past_observed_mask": lambda _, batch: torch.ones_like(batch["past_values"]),
    "past_time_features": lambda ask, _: ask.normal(
        ROWS, history(ask), max(ask.setting("num_time_features", default=1), 1)
    ),
    "future_values": lambda ask, _: series(ask, ask.setting("prediction_length", "horizon_length", default=8)),
    "future_time_features": lambda ask, _: ask.normal(
        ROWS, ask.setting("prediction_length", default=8), max(ask.setting("num_time_features", default=1), 1)
    ),
    "image_sizes": image_sizes,
    "target_sizes": spatial,
    "spatial_shapes": spatial,
    "pixel_attention_mask": pixel_mask,
    "pixel_position_ids": patch_places,
    "image_position_ids": patch_places,
    "start_positions": lambda ask, _: ask.integers(0, 4, ROWS),
    "end_positions": lambda ask, _: ask.integers(4, 8, ROWS),
    "feature_attention_mask": lambda _ask, _batch: torch.ones(ROWS, 64, dtype=torch.long),
    "input_features_mask": lambda _ask, _batch: torch.ones(ROWS, 64, dtype=torch.bool),
    "qformer_input_ids": lambda ask, _: ask.integers(FIRST_WORD, LAST_WORD, ROWS, 6),
    "query_embeds": lambda ask, _: ask.normal(ROWS, 8, 64),
    "audio_mel": lambda ask, _: ask.normal(ROWS, 64, ask.setting("input_feat_size", default=16)),
    "audio_mel_mask": lambda _ask, _: torch.zeros(ROWS, 64, dtype=torch.bool),
    "task_inputs": lambda ask, _: ask.integers(FIRST_WORD, LAST_WORD, ROWS, TOKENS),
    "text_inputs": lambda ask, _: ask.integers(FIRST_WORD, LAST_WORD, ROWS, 4, TOKENS),
    "latents": lambda ask, _: ask.normal(ROWS, 64, 8),
    "encoder_hidden_states": lambda ask, _: ask.normal(ROWS, 6, 64),
    "merge_sizes": lambda _ask, _: torch.full((ROWS,), 2),
}


def halves(batch: Batch, count: int = 2) -> list[Batch]:
    """The parts of a batch: every tensor and list cut along its first dimension, everything else handed to all."""
    return [{name: _part(value, index, count) for name, value in batch.items()} for index in range(count)]


def cut_by_rows(batch: Batch, count: int) -> list[Batch]:
    """The user's function for `fit(split=...)`: fewer parts where there are not so many rows."""
    return halves(batch, min(count, ROWS))


def _part(value: Any, index: int, count: int) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0:
        return torch.tensor_split(value, count)[index]
    if isinstance(value, list):
        size = len(value) // count
        return value[index * size : (index + 1) * size]
    return value


def asks(kind: type, config: Any, model_type: str) -> Iterator[Ask]:
    """The ways in which a class may want its pictures, the likely ones first."""
    first = GIVEN.get(model_type, {}).get("packing")
    ask = Ask(kind=kind, config=config)
    is_seeing = any(name in ask for name in ("pixel_values", "hidden_states", "input_features", "input_values"))
    likely = ["patches", "patch pictures"] if "image_grid_thw" in ask or "grid_thw" in ask else []
    order = [first] if first else [*likely, *[p for p in PACKINGS if p not in likely]] if is_seeing else ["rows"]
    for packing in order:
        yield Ask(kind=kind, config=config, packing=packing)
    if "labels" in ask:
        yield Ask(kind=kind, config=config, packing=order[0], has_labels=False)
