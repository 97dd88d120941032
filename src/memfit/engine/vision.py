"""The rule for batches of transformers' vision-language models: which images and videos belong to
which row.

In: a model and a batch that holds `input_ids` with placeholders, and all rows' images, or patches
of images, in one tensor. Out: the places that count rows.

[Note: images of a row]
Rows take images in order. An image of the grid (t, h, w) has t * h * w patches in `pixel_values`.
The model merges n of them into one, so that its row of `input_ids` has t * h * w / n placeholders;
n is the same for all. So a row's number of placeholders says how many of the next images are its.
Videos are the same in `pixel_values_videos` and `video_grid_thw`. Without a grid, each image has
one entry and equally many placeholders. Where numbers do not come out even the batch is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from memfit.trace.batch import RowPlaces, UncuttableError, children, is_plain_leaf
from memfit.trace.cutting import ByRows

# (kind, its value in `mm_token_type_ids`, names of its placeholder in configs, its patches, its
# grid, other leaves with one entry an item).
_KINDS = (
    ("image", 1, ("image_token_id", "image_token_index"), "pixel_values", "image_grid_thw", ("image_sizes",)),
    (
        "video",
        2,
        ("video_token_id", "video_token_index"),
        "pixel_values_videos",
        "video_grid_thw",
        ("second_per_grid_ts", "video_second_per_grid"),
    ),
)


def vision_way(model: nn.Module, sample: Any) -> ByRows | None:
    """The rule for a sample that images or videos lie in as transformers' models take them; None
    for others.

    Raises:
        UncuttableError: there are images, and which rows they belong to does not come out even.
    """
    tokens = _placeholders(model)
    found = _inputs_in(sample, "batch")
    if not tokens or found is None:
        return None
    if not any(one in found[1] for _, _, _, pixels, grid, _ in _KINDS for one in (pixels, grid)):
        return None
    way = ByRows(lambda batch: _places(batch, tokens), is_even=False)
    way.find(sample)
    return way


def _placeholders(model: nn.Module) -> dict[str, int]:
    """By kind, the token that stands for a part of an image or video, from the first config that
    names one.
    """
    found: dict[str, int] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for kind, _, names, *_ in _KINDS:
            token = next(
                (getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), None
            )
            if token is not None:
                found.setdefault(kind, token)
    return found


def _inputs_in(node: Any, path: str) -> tuple[str, Mapping[str, Any]] | None:
    """The mapping that holds `input_ids` (rows, tokens), with its place."""
    if isinstance(node, Mapping):
        ids = node.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            return path, node
    if isinstance(node, torch.Tensor) or is_plain_leaf(node):
        return None
    inner = (_inputs_in(value, place) for place, value in children(node, path) or ())
    return next((found for found in inner if found is not None), None)


def _places(batch: Any, tokens: Mapping[str, int]) -> RowPlaces:
    found = _inputs_in(batch, "batch")
    if found is None:
        raise UncuttableError("the batch holds no input_ids of shape (rows, tokens)")
    path, inputs = found
    ids = inputs["input_ids"]
    ends: dict[str, Sequence[int]] = {}
    for kind, value, _, pixels_name, grid_name, others in _KINDS:
        grid, pixels = inputs.get(grid_name), inputs.get(pixels_name)
        if grid is None and pixels is None:
            continue
        counts = _placeholder_counts(inputs, kind, value, tokens)
        patches = _patches(kind, grid, pixels)
        runs = _runs(kind, counts, patches)
        if grid is not None:
            ends[f"{path}[{grid_name!r}]"] = runs
        if pixels is not None:
            upto = [0, *accumulate(patches)]
            ends[f"{path}[{pixels_name!r}]"] = runs if grid is None else [upto[items] for items in runs]
        for name in others:
            if inputs.get(name) is not None:
                _check_length(name, inputs[name], len(patches), kind)
                ends[f"{path}[{name!r}]"] = runs
    positions = inputs.get("position_ids")
    has_axes = isinstance(positions, torch.Tensor) and positions.dim() == 3 and positions.shape[1:] == ids.shape
    return RowPlaces(ends=ends, along={f"{path}['position_ids']": 1} if has_axes else {})


def _placeholder_counts(inputs: Mapping[str, Any], kind: str, value: int, tokens: Mapping[str, int]) -> list[int]:
    """Placeholders of a kind in each row."""
    types, ids = inputs.get("mm_token_type_ids"), inputs["input_ids"]
    if isinstance(types, torch.Tensor) and types.shape == ids.shape:
        return (types == value).sum(1).tolist()
    if kind not in tokens:
        raise UncuttableError(f"which tokens of input_ids stand for a {kind} is not in the model's config")
    return (ids == tokens[kind]).sum(1).tolist()


def _patches(kind: str, grid: Any, pixels: Any) -> list[int]:
    """Patches of each item; one each where there is no grid."""
    if grid is None:
        return [1] * len(pixels)
    patches = [int(n) for n in torch.as_tensor(grid).prod(-1)]
    if pixels is not None:
        _check_length("its patches", pixels, sum(patches), kind)
    return patches


def _check_length(name: str, leaf: Any, expected: int, kind: str) -> None:
    if len(leaf) != expected:
        raise UncuttableError(
            f"the {kind}s' tensors disagree: {name} has {len(leaf)} entries, where {expected} belong to the {kind}s"
        )


def _runs(kind: str, counts: Sequence[int], patches: Sequence[int]) -> list[int]:
    """How many items the rows up to each have taken, with a 0 before.

    See [Note: images of a row].
    """
    placeholders, total = sum(counts), sum(patches)
    uneven = UncuttableError(
        f"which rows the {len(patches)} {kind}s belong to does not show: {placeholders} placeholders in input_ids, {total} patches"
    )
    if not placeholders or not total:
        raise uneven
    ends, taken = [0], 0
    for count in counts:
        left = count * total
        while left > 0 and taken < len(patches):
            left -= patches[taken] * placeholders
            taken += 1
        if left:
            raise uneven
        ends.append(taken)
    if taken != len(patches):
        raise uneven
    return ends
