"""Images as batches: from a file, or drawn.

In: a safetensors file, or nothing; a seed. Out: an endless, deterministic stream of batches, which
can be left and taken up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from memfit.core.errors import UsageError


class ImageSource(Protocol):
    """Images by number."""

    count: int

    def read(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (pixels in fp32, labels) of these images."""
        ...


class DrawnImages:
    """Gratings whose direction tells their class, with noise: something to learn, without a file.

    Args:
        shape: (channels, height, width).
        classes: number of directions.
        count: of different images.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, count: int = 4096) -> None:
        self.count = count
        self._shape, self._classes = shape, classes

    def read(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """See `ImageSource`."""
        channels, height, width = self._shape
        labels = numbers % self._classes
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        images: list[Tensor] = []
        for number, label in zip(numbers.tolist(), labels.tolist(), strict=True):
            angle = math.pi * label / self._classes
            wave = torch.sin(12 * (rows * math.sin(angle) + columns * math.cos(angle)) + number)
            noise = torch.Generator().manual_seed(number)
            images.append(wave + 0.5 * torch.randn(channels, height, width, generator=noise))
        return torch.stack(images), labels


class FileImages:
    """Images of a safetensors file with the tensors `images` (numbers, channels, height, width) and
    `labels`; only those of a batch are read.

    Args:
        path: of the file.
        shape: (channels, height, width) that the model takes.
        classes: that it knows.

    Raises:
        UsageError: no such file, other tensors in it, or images of another shape.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int], classes: int) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._file: Any = safe_open(str(path), framework="pt").__enter__()
            self._images, self._labels = self._file.get_slice("images"), self._file.get_tensor("labels").long()
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"--data {path} is no safetensors file with the tensors 'images' and 'labels' ({error}): write it with "
                "safetensors.torch.save_file({'images': ..., 'labels': ...}, path)"
            ) from error
        found = tuple(self._images.get_shape())
        if found[1:] != shape or len(self._labels) != found[0]:
            raise UsageError(
                f"--data {path} has images {list(found)} and {len(self._labels)} labels: the model takes images of {list(shape)}, one label each"
            )
        if len(self._labels) == 0 or not 0 <= int(self._labels.min()) <= int(self._labels.max()) < classes:
            raise UsageError(f"--data {path}: labels go from 0 to {classes - 1} for this model's {classes} classes")
        self.count = found[0]

    def read(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """See `ImageSource`. Bytes from 0 to 255 become -1 to 1."""
        pixels = torch.stack([self._images[number] for number in numbers.tolist()])
        pixels = pixels.float() / 127.5 - 1 if pixels.dtype is torch.uint8 else pixels.float()
        return pixels, self._labels[numbers]


class ImageStream:
    """Batches of images, shuffled anew each epoch, equal for equal seeds. Says where it stands, and
    goes on from there.

    Args:
        source: of the images.
        batch_size: images a batch.
        seed: decides the order.

    Raises:
        UsageError: fewer images than a batch has.
    """

    def __init__(self, source: ImageSource, batch_size: int, seed: int) -> None:
        if source.count < batch_size:
            raise UsageError(f"{source.count} images, fewer than a batch of {batch_size}: give more, or --batch less")
        self._source, self._batch_size, self._seed = source, batch_size, seed
        self._step = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Tensor]:
        """The next batch; there always is one."""
        per_epoch = self._source.count // self._batch_size
        epoch, batch = divmod(self._step, per_epoch)
        self._step += 1
        order = torch.randperm(self._source.count, generator=torch.Generator().manual_seed(self._seed + epoch))
        pixels, labels = self._source.read(order[batch * self._batch_size : (batch + 1) * self._batch_size])
        return {"pixel_values": pixels, "labels": labels}

    def state_dict(self) -> dict[str, int]:
        """Position and what it is a position in."""
        return {"step": self._step, **self._shape()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position.

        Raises:
            ValueError: it is one of other images or batches.
        """
        different = [key for key, value in self._shape().items() if state.get(key) != value]
        if different:
            raise ValueError(f"the run had another {different[0]}: {state.get(different[0])!r:.80}")
        self._step = int(state["step"])

    def _shape(self) -> dict[str, int]:
        return {"seed": self._seed, "batch_size": self._batch_size, "images": self._source.count}
