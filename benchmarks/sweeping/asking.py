"""Questions to a model class: which inputs it takes, and the settings of its configuration that say how large they are.

In: a model class and its configuration. Out: an `Ask`, and sizes of its pictures.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sweeping.configs import IMAGE, PATCH, VOCABULARY

Batch = dict[str, Any]
ROWS = 4
TOKENS = 12
FIRST_WORD, LAST_WORD = 5, 100  # special tokens lie below and above
PACKINGS = ("rows", "patches", "patch pictures", "pictures in rows", "padded patches", "videos", "flat")


@dataclass
class Ask:
    """Request for a batch.

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


def vision(ask: Ask) -> Any:
    return getattr(ask.config, "vision_config", None) or getattr(ask.config, "vision", None) or ask.config


def sides(ask: Ask) -> tuple[int, int, int]:
    """Channels, height and width of a picture."""
    found = ask.setting("image_size", "input_size", "img_size", config=vision(ask), default=IMAGE)
    found = found if isinstance(found, (list, tuple)) else (found, found)
    sides = [s if isinstance(s, int) else IMAGE for s in (*found, *found)[-2:]]
    sides = [s if 16 <= s <= 512 else IMAGE for s in sides]
    return ask.setting("num_channels", "in_channels", "in_chans", config=vision(ask), default=3), sides[0], sides[1]


def patch_side(ask: Ask) -> int:
    found = ask.setting("patch_size", "spatial_patch_size", config=vision(ask), default=PATCH)
    return found[-1] if isinstance(found, (list, tuple)) else found


def grid(ask: Ask) -> tuple[int, int, int]:
    """Patches of a picture in time, height and width, before they are merged."""
    merge = ask.setting("spatial_merge_size", "merge_size", "spatial_patch_merge_size", config=vision(ask), default=2)
    merge = merge[0] if isinstance(merge, (list, tuple)) else merge
    side = 2 * max(int(merge), 1)
    return 1, side, side


def channels_of(ask: Ask) -> int:
    found = ask.setting("num_channels", "in_channels", "in_chans", config=vision(ask), default=3)
    return found if isinstance(found, int) else 3


def token_of(ask: Ask, *names: str) -> int | None:
    found = ask.setting(*names)
    found = found[0] if isinstance(found, (list, tuple)) and found else found
    return found if isinstance(found, int) and 0 <= found < VOCABULARY else None
