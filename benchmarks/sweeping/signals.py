"""Inputs: pictures as each class wants them packed, words, waves, spectra, series, and what goes beside them.

In: an `Ask`. Out: tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sweeping.asking import (
    FIRST_WORD,
    LAST_WORD,
    ROWS,
    TOKENS,
    Ask,
    channels_of,
    grid,
    patch_side,
    sides,
    token_of,
    vision,
)


def pixels(ask: Ask) -> Tensor:
    """Pictures as the packing has them."""
    channels, height, width = sides(ask)
    channels = channels if isinstance(channels, int) else 3
    time, rows, columns = grid(ask)
    patches = time * rows * columns
    flat = channels_of(ask) * ask.setting("temporal_patch_size", config=vision(ask), default=1) * patch_side(ask) ** 2
    match ask.packing:
        case "patches":
            return ask.normal(ROWS * patches, flat)
        case "flat":
            return ask.normal(ROWS * patches, channels_of(ask) * patch_side(ask) ** 2)
        case "patch pictures":
            return ask.normal(ROWS * patches, channels_of(ask), patch_side(ask), patch_side(ask))
        case "pictures in rows":
            return ask.normal(ROWS, 1, channels, height, width)
        case "padded patches":
            return ask.normal(ROWS, patches, channels_of(ask) * patch_side(ask) ** 2)
        case "videos":
            return ask.normal(ROWS, ask.setting("num_frames", "frames_per_clip", default=2), channels, height, width)
        case _:
            return ask.normal(ROWS, channels, height, width)


_MEDIA = (
    (("pixel_values", "flattened_patches", "image_patches"), ("image_token_id", "image_token_index", "img_context_token_id", "image_patch_id", "media_token_id")),
    (("input_features", "input_values", "audio_values"), ("audio_token_id", "audio_token_index")),
)  # fmt: skip


def text(ask: Ask) -> Tensor:
    """Random words; where there is a picture or a sound, its places come first, behind the sign that begins it."""
    ids = ask.integers(FIRST_WORD, LAST_WORD, ROWS, TOKENS)
    for inputs, tokens in _MEDIA:
        token = token_of(ask, *tokens)
        if token is None or not any(name in ask for name in inputs):
            continue
        starts = token_of(
            ask,
            "vision_start_token_id",
            "image_start_token_id",
            "boi_token_id",
            "audio_start_token_id",
            "audio_bos_token_id",
        )
        ends = token_of(
            ask, "vision_end_token_id", "image_end_token_id", "eoi_token_id", "audio_end_token_id", "audio_eos_token_id"
        )
        before = [0 if starts is None else starts]
        behind = [] if ends is None else [ends]
        media = torch.tensor([*before, *[token] * ask.media_tokens, *behind]).expand(ROWS, -1)
        ids = torch.cat([media, ids], dim=1)
        break
    return ids


def is_media(ask: Ask, ids: Tensor) -> Tensor:
    """Where pictures or sounds stand."""
    tokens = {token_of(ask, *names) for _, names in _MEDIA} - {None}
    return torch.isin(ids, torch.tensor(sorted(t for t in tokens if t is not None), dtype=ids.dtype))


def waves(ask: Ask) -> Tensor:
    return ask.normal(ROWS, 800)


def spectra(ask: Ask) -> Tensor:
    """(rows, mel, frames) or (rows, frames, mel), as the class reads them: those that have `num_mel_bins` put them first."""
    bins = ask.setting(
        "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_feat_size", "input_dim", default=16
    )
    return ask.normal(ROWS, bins, 64) if ask.packing != "patches" else ask.normal(ROWS, 64, bins)


def patch_places(ask: Ask, _: Any) -> Tensor | None:
    if ask.packing != "padded patches":
        return None
    _, rows, columns = grid(ask)
    places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), dim=-1).reshape(
        1, -1, 2
    )
    return places.expand(ROWS, -1, -1).clone()


def spatial(ask: Ask, _: Any) -> Tensor | None:
    return torch.tensor([grid(ask)[1:]]).expand(ROWS, 2).clone() if ask.packing == "padded patches" else None


def pixel_mask(ask: Ask, batch: Mapping[str, Any]) -> Tensor | None:
    found = batch.get("pixel_values")
    if not isinstance(found, Tensor):
        return None
    if ask.packing == "padded patches":
        return torch.ones(found.shape[:2], dtype=torch.long)
    return torch.ones(ROWS, 1, *found.shape[-2:], dtype=torch.bool) if ask.packing == "pictures in rows" else None


def image_sizes(ask: Ask, _: Any) -> Tensor | None:
    _, height, width = sides(ask)
    return torch.tensor([[height, width]]).expand(ROWS, 2).clone()


def time_grid(ask: Ask, _: Any) -> Tensor | None:
    return (
        torch.tensor([grid(ask)]).expand(ROWS, 3).clone()
        if ask.packing in ("patches", "patch pictures", "flat")
        else None
    )


def history(ask: Ask) -> int:
    lags = ask.setting("lags_sequence", default=[0])
    return ask.setting("context_length", "prediction_length", default=16) + max(lags)


def series(ask: Ask, length: int) -> Tensor:
    channels = ask.setting("num_input_channels", "input_size", default=1)
    return ask.normal(ROWS, length) if channels == 1 and "Patch" not in ask.head else ask.normal(ROWS, length, channels)


def marked(ask: Ask, batch: Mapping[str, Any]) -> Tensor | None:
    return is_media(ask, batch["input_ids"]).long() if "input_ids" in batch and "pixel_values" in batch else None


def boxes_of_words(ask: Ask, batch: Mapping[str, Any]) -> Tensor:
    corners = ask.integers(0, 50, *batch["input_ids"].shape, 2)
    return torch.cat([corners, corners + ask.integers(1, 50, *corners.shape)], dim=-1)
