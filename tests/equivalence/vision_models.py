"""Small vision-language models of transformers with random weights, and batches whose rows hold images and videos at will.

In: a kind and what each row holds. Out: a model; the batch, and the same rows cut by hand, from the pieces it was made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

IMAGE, VIDEO, START, END = 95, 96, 97, 98
PATCH_WIDTH = 3 * 2 * 4 * 4


class Item(NamedTuple):
    """An image, or a video, of a grid of patches, four of which become one token."""

    is_video: bool
    grid: tuple[int, int, int]

    @property
    def patches(self) -> int:
        frames, height, width = self.grid
        return frames * height * width


SMALL, WIDE, TALL = (Item(False, grid) for grid in ((1, 4, 4), (1, 4, 8), (1, 8, 4)))
CLIP, LONG_CLIP = Item(True, (2, 4, 4)), Item(True, (3, 4, 4))


def build(kind: str) -> nn.Module:
    """A model of two vision layers and two text layers."""
    import transformers

    text: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0},
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "hidden_size": 32, "num_heads": 2,
    }  # fmt: skip
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    own: dict[str, dict[str, Any]] = {
        "Qwen2VL": {"embed_dim": 32, "mlp_ratio": 2},
        "Qwen2_5_VL": {"out_hidden_size": 32, "intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        "Qwen3VL": {"out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        "Glm4v": {"out_hidden_size": 32, "intermediate_size": 48, "image_size": 32},
    }  # fmt: skip
    if kind == "Qwen3VL":
        text["head_dim"] = 8
    torch.manual_seed(11)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision | own[kind], **tokens)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).train()


def one_row(items: Sequence[Item], generator: torch.Generator, length: int, *, parts_frames: bool) -> dict[str, Tensor]:
    """A row of text around its images and videos, as a batch of one row.

    Args:
        items: in their order.
        generator: of the text and the patches.
        length: of the row, in tokens.
        parts_frames: text stands between the frames of a video, as Qwen3-VL has its times.
    """
    ids: list[int] = []
    types: list[int] = []
    pixels: dict[bool, list[Tensor]] = {False: [], True: []}
    grids: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
    for item in items:
        pieces = item.grid[0] if parts_frames else 1
        tokens = item.patches // 4 // pieces
        for _ in range(pieces):
            ids += [*_text(2, generator), START, *[VIDEO if item.is_video else IMAGE] * tokens, END]
            types += [0, 0, 0, *[2 if item.is_video else 1] * tokens, 0]
        pixels[item.is_video].append(torch.randn(item.patches, PATCH_WIDTH, generator=generator))
        grids[item.is_video].append(item.grid)
    ids += _text(length - len(ids), generator)
    types += [0] * (length - len(types))
    row = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([types])}
    row |= {"attention_mask": torch.ones_like(row["input_ids"]), "labels": row["input_ids"].clone()}
    if grids[False]:
        row |= {"pixel_values": torch.cat(pixels[False]), "image_grid_thw": torch.tensor(grids[False])}
    if grids[True]:
        row |= {"pixel_values_videos": torch.cat(pixels[True]), "video_grid_thw": torch.tensor(grids[True])}
    return row


def together(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One batch of several, as processors make it: everything of a name in one tensor."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: torch.cat([row[name] for row in rows if name in row]) for name in names}


def rows_of(kind: str, contents: Sequence[Sequence[Item]], seed: int, length: int) -> list[dict[str, Tensor]]:
    """Rows with these contents, one batch each."""
    generator = torch.Generator().manual_seed(seed)
    return [one_row(items, generator, length, parts_frames=kind == "Qwen3VL") for items in contents]


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The model's own: every row has as many tokens that count."""
    return model(**batch, use_cache=False).loss


def _text(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, 90, (count,), generator=generator).tolist()
