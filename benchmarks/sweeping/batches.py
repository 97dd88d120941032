"""Natural batches: what a model type's own processor would hand it, made from the names of its inputs.

In: a model class and its configuration. Out: dictionaries that `model(**batch)` takes, one for each way of packing pictures that the class may want.

Every tensor holds its rows one after the other along its first dimension, each row as many entries as the others; a list has one entry a row. So the halves of a
batch are the halves of its parts, also where all pictures' patches lie in one tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sweeping.configs import IMAGE, PATCH, VOCABULARY
from sweeping.inputs import GIVEN

Batch = dict[str, Any]
ROWS = 4
TOKENS = 12
FIRST_WORD, LAST_WORD = 5, 100  # special tokens lie below and above
PACKINGS = ("rows", "patches", "patch pictures", "pictures in rows", "padded patches", "videos", "flat")


@dataclass
class Ask:
    """What a batch is made for.

    Attributes:
        kind, config: the model class and its configuration.
        packing: how pictures are laid out; one of `PACKINGS`.
        media_tokens: places in each row's text that stand for its picture or sound.
        step: of which the batch is.
        has_labels: the model learns from labels; otherwise from all that it returns.
    """

    kind: type
    config: Any
    packing: str = "rows"
    media_tokens: int = 4
    step: int = 0
    has_labels: bool = True

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1_000 + self.step)
        self.parameters = inspect.signature(self.kind.forward).parameters  # type: ignore[attr-defined]

    def __contains__(self, name: str) -> bool:
        """The class takes an input of this name."""
        return name in self.parameters

    def requires(self, name: str) -> bool:
        """The class does not run without it."""
        return name in self and self.parameters[name].default is inspect.Parameter.empty

    @property
    def head(self) -> str:
        """The name of the class: it says what is learned."""
        return self.kind.__name__

    def setting(self, *names: str, default: Any = None, config: Any = None) -> Any:
        """The first of these that the configuration, or one of its parts, has."""
        places = [self.config if config is None else config]
        places += [
            c
            for n in ("vision_config", "audio_config", "text_config", "backbone_config", "encoder_config", "encoder")
            if (c := getattr(places[0], n, None))
        ]
        for place in places:
            for name in names:
                if getattr(place, name, None) is not None:
                    return getattr(place, name)
        return default

    def normal(self, *shape: int) -> Tensor:
        """Random numbers of the batch."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Random numbers of the batch."""
        return torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Random numbers of the batch."""
        return torch.randint(low, high, shape, generator=self.generator)


def _vision(ask: Ask) -> Any:
    return getattr(ask.config, "vision_config", None) or getattr(ask.config, "vision", None) or ask.config


def _side(ask: Ask) -> tuple[int, int, int]:
    """Channels, height and width of a picture."""
    found = ask.setting("image_size", "input_size", "img_size", config=_vision(ask), default=IMAGE)
    found = found if isinstance(found, (list, tuple)) else (found, found)
    sides = [s if isinstance(s, int) else IMAGE for s in (*found, *found)[-2:]]
    sides = [s if 16 <= s <= 512 else IMAGE for s in sides]
    return ask.setting("num_channels", "in_channels", "in_chans", config=_vision(ask), default=3), sides[0], sides[1]


def _patch(ask: Ask) -> int:
    found = ask.setting("patch_size", "spatial_patch_size", config=_vision(ask), default=PATCH)
    return found[-1] if isinstance(found, (list, tuple)) else found


def grid(ask: Ask) -> tuple[int, int, int]:
    """Patches of a picture in time, height and width, before they are merged."""
    merge = ask.setting("spatial_merge_size", "merge_size", "spatial_patch_merge_size", config=_vision(ask), default=2)
    merge = merge[0] if isinstance(merge, (list, tuple)) else merge
    side = 2 * max(int(merge), 1)
    return 1, side, side


def _channels(ask: Ask) -> int:
    found = ask.setting("num_channels", "in_channels", "in_chans", config=_vision(ask), default=3)
    return found if isinstance(found, int) else 3


def pixels(ask: Ask) -> Tensor:
    """Pictures as the packing has them."""
    channels, height, width = _side(ask)
    channels = channels if isinstance(channels, int) else 3
    time, rows, columns = grid(ask)
    patches = time * rows * columns
    flat = _channels(ask) * ask.setting("temporal_patch_size", config=_vision(ask), default=1) * _patch(ask) ** 2
    match ask.packing:
        case "patches":
            return ask.normal(ROWS * patches, flat)
        case "flat":
            return ask.normal(ROWS * patches, _channels(ask) * _patch(ask) ** 2)
        case "patch pictures":
            return ask.normal(ROWS * patches, _channels(ask), _patch(ask), _patch(ask))
        case "pictures in rows":
            return ask.normal(ROWS, 1, channels, height, width)
        case "padded patches":
            return ask.normal(ROWS, patches, _channels(ask) * _patch(ask) ** 2)
        case "videos":
            return ask.normal(ROWS, ask.setting("num_frames", "frames_per_clip", default=2), channels, height, width)
        case _:
            return ask.normal(ROWS, channels, height, width)


def _token(ask: Ask, *names: str) -> int | None:
    found = ask.setting(*names)
    found = found[0] if isinstance(found, (list, tuple)) and found else found
    return found if isinstance(found, int) and 0 <= found < VOCABULARY else None


_MEDIA = (
    (("pixel_values", "flattened_patches", "image_patches"), ("image_token_id", "image_token_index", "img_context_token_id", "image_patch_id", "media_token_id")),
    (("input_features", "input_values", "audio_values"), ("audio_token_id", "audio_token_index")),
)  # fmt: skip


def text(ask: Ask) -> Tensor:
    """Random words; where there is a picture or a sound, its places come first, behind the sign that begins it."""
    ids = ask.integers(FIRST_WORD, LAST_WORD, ROWS, TOKENS)
    for inputs, tokens in _MEDIA:
        token = _token(ask, *tokens)
        if token is None or not any(name in ask for name in inputs):
            continue
        starts = _token(
            ask,
            "vision_start_token_id",
            "image_start_token_id",
            "boi_token_id",
            "audio_start_token_id",
            "audio_bos_token_id",
        )
        ends = _token(
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
    tokens = {_token(ask, *names) for _, names in _MEDIA} - {None}
    return torch.isin(ids, torch.tensor(sorted(t for t in tokens if t is not None), dtype=ids.dtype))


def waves(ask: Ask) -> Tensor:
    return ask.normal(ROWS, 800)


def spectra(ask: Ask) -> Tensor:
    """(rows, mel, frames) or (rows, frames, mel), as the class reads them: those that have `num_mel_bins` put them first."""
    bins = ask.setting(
        "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_feat_size", "input_dim", default=16
    )
    return ask.normal(ROWS, bins, 64) if ask.packing != "patches" else ask.normal(ROWS, 64, bins)


def labels(ask: Ask, batch: Mapping[str, Any]) -> Any:
    """What the head learns, by the name of its task."""
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
            _, height, width = _side(ask)
            found[-1]["masks"] = (ask.uniform(number, height, width) > 0.5).float()
        if "DocLayout" in ask.head:
            found[-1]["read_order"] = found[-1]["reading_order"] = torch.arange(number)
            found[-1]["order_labels"] = torch.arange(number)
    return found


def _classes(ask: Ask, _: Any) -> Tensor:
    return ask.integers(0, 5, ROWS)


def _pixel_classes(ask: Ask, _: Any) -> Tensor:
    _, height, width = _side(ask)
    return ask.integers(0, 5, ROWS, height, width)


def _word_classes(ask: Ask, batch: Mapping[str, Any]) -> Tensor:
    return ask.integers(0, 5, *batch["input_ids"].shape)


def _words(ask: Ask, _: Any) -> Tensor:
    return ask.integers(FIRST_WORD, LAST_WORD, ROWS, TOKENS - 3)


def _few_words(ask: Ask, _: Any) -> Tensor:
    return ask.integers(FIRST_WORD, 16, ROWS, 3)


def _masked(ask: Ask, batch: Mapping[str, Any]) -> Tensor:
    ids = batch["input_ids"]
    asked = ask.uniform(*ids.shape) < 0.33
    asked[:, 0] = True
    return ids.masked_fill(~asked, -100)


def _depths(ask: Ask, _: Any) -> Tensor:
    _, height, width = _side(ask)
    return 0.5 + ask.uniform(ROWS, height, width)


_LABELS: tuple[tuple[str, Callable[[Ask, Any], Any]], ...] = (
    ("ObjectDetection", _boxes), ("DetrForSegmentation", _boxes), ("SemanticSegmentation", _pixel_classes), ("DepthEstimation", _depths),
    ("MaskedLM", _masked), ("TokenClassification", _word_classes), ("AudioFrameClassification", lambda ask, _: ask.integers(0, 2, ROWS, 39, 5).float()),
    ("Classification", _classes), ("ForCTC", _few_words), ("ForRNNT", _few_words), ("ForTDT", _few_words), ("XVector", _classes), ("CLM", _words),
    ("NextSentence", lambda ask, _: ask.integers(0, 2, ROWS)),
)  # fmt: skip


def _decodes(ask: Ask) -> bool:
    return bool(getattr(ask.config, "is_encoder_decoder", False))


def _label_of_decoder(ask: Ask, batch: Mapping[str, Any]) -> Tensor:
    return _words(ask, batch)


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
            _words(ask, batch)
            if _decodes(ask) and "Conditional" in ask.head and "input_ids" in batch and "pixel_values" not in batch
            else labels(ask, batch)
        )
    elif "decoder_input_ids" in ask and "decoder_input_ids" not in batch and "decoder_input_ids" not in given:
        batch["decoder_input_ids"] = _words(ask, batch)
    return {name: value for name, value in batch.items() if value is not None}


def _masks(ask: Ask, _: Any) -> list[Tensor]:
    _, height, width = _side(ask)
    return [(ask.uniform(1 + row % 2, height, width) > 0.5).float() for row in range(ROWS)]


def _patch_places(ask: Ask, _: Any) -> Tensor | None:
    if ask.packing != "padded patches":
        return None
    _, rows, columns = grid(ask)
    places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), dim=-1).reshape(
        1, -1, 2
    )
    return places.expand(ROWS, -1, -1).clone()


def _spatial(ask: Ask, _: Any) -> Tensor | None:
    return torch.tensor([grid(ask)[1:]]).expand(ROWS, 2).clone() if ask.packing == "padded patches" else None


def _pixel_mask(ask: Ask, batch: Mapping[str, Any]) -> Tensor | None:
    found = batch.get("pixel_values")
    if not isinstance(found, Tensor):
        return None
    if ask.packing == "padded patches":
        return torch.ones(found.shape[:2], dtype=torch.long)
    return torch.ones(ROWS, 1, *found.shape[-2:], dtype=torch.bool) if ask.packing == "pictures in rows" else None


def _image_sizes(ask: Ask, _: Any) -> Tensor | None:
    _, height, width = _side(ask)
    return torch.tensor([[height, width]]).expand(ROWS, 2).clone()


def _time_grid(ask: Ask, _: Any) -> Tensor | None:
    return (
        torch.tensor([grid(ask)]).expand(ROWS, 3).clone()
        if ask.packing in ("patches", "patch pictures", "flat")
        else None
    )


def _history(ask: Ask) -> int:
    lags = ask.setting("lags_sequence", default=[0])
    return ask.setting("context_length", "prediction_length", default=16) + max(lags)


def _series(ask: Ask, length: int) -> Tensor:
    channels = ask.setting("num_input_channels", "input_size", default=1)
    return ask.normal(ROWS, length) if channels == 1 and "Patch" not in ask.head else ask.normal(ROWS, length, channels)


def _marked(ask: Ask, batch: Mapping[str, Any]) -> Tensor | None:
    return is_media(ask, batch["input_ids"]).long() if "input_ids" in batch and "pixel_values" in batch else None


def _one_box_a_word(ask: Ask, batch: Mapping[str, Any]) -> Tensor:
    corners = ask.integers(0, 50, *batch["input_ids"].shape, 2)
    return torch.cat([corners, corners + ask.integers(1, 50, *corners.shape)], dim=-1)


MAKERS: dict[str, Callable[[Ask, Batch], Any]] = {
    "input_ids": lambda ask, _: text(ask),
    "pixel_values": lambda ask, _: pixels(ask),
    "pixel_values_videos": lambda ask, _: pixels(Ask(kind=ask.kind, config=ask.config, packing="videos")),
    "input_values": lambda ask, _: waves(ask) if ask.packing == "rows" else waves(ask)[:, None],
    "input_features": lambda ask, _: spectra(ask),
    "hidden_states": lambda ask, _: pixels(ask),
    "inputs_embeds": lambda ask, _: ask.normal(ROWS, TOKENS, ask.setting("hidden_size", "d_model", default=64)),
    "grid_thw": _time_grid,
    "image_grid_thw": _time_grid,
    "mm_token_type_ids": _marked,
    "bbox": _one_box_a_word,
    "mask_labels": _masks,
    "class_labels": lambda ask, _: [ask.integers(0, 5, 1 + row % 2) for row in range(ROWS)],
    "return_loss": lambda *_: True,
    "past_values": lambda ask, _: _series(ask, _history(ask)),
    "past_observed_mask": lambda _, batch: torch.ones_like(batch["past_values"]),
    "past_time_features": lambda ask, _: ask.normal(
        ROWS, _history(ask), max(ask.setting("num_time_features", default=1), 1)
    ),
    "future_values": lambda ask, _: _series(ask, ask.setting("prediction_length", "horizon_length", default=8)),
    "future_time_features": lambda ask, _: ask.normal(
        ROWS, ask.setting("prediction_length", default=8), max(ask.setting("num_time_features", default=1), 1)
    ),
    "image_sizes": _image_sizes,
    "target_sizes": _spatial,
    "spatial_shapes": _spatial,
    "pixel_attention_mask": _pixel_mask,
    "pixel_position_ids": _patch_places,
    "image_position_ids": _patch_places,
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
