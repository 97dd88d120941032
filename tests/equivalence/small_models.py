"""Models of our own that do at a block's edge what ordinary models do: keywords, containers, in-place work, hooks.

In: a width. Out: modules that map (rows, places, width) to the same shape, or images to class scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = 4
DROPOUT = 0.1


def sequential(width: int) -> nn.Sequential:
    """A perceptron of repeated stages."""
    stages = [
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(2 * width, width))
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*stages, nn.LayerNorm(width), nn.Linear(width, width))


class _Mix(nn.Module):
    """Norm, two layers, dropout: the inside of the blocks below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))))


class KeywordBlock(nn.Module):
    """Takes keywords only; one of them is no tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = _Mix(width)

    def forward(self, *, hidden: Tensor, scale: float) -> Tensor:
        return hidden + scale * self.mix(hidden)

    def step(self, hidden: Tensor) -> Tensor:
        return self(hidden=hidden, scale=0.5)


class TupleBlock(nn.Module):
    """Returns a tuple: an output that goes on, one that nobody uses, and None."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = _Mix(width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        mixed = self.mix(hidden)
        return hidden + mixed, mixed.mean(-1), None

    def step(self, hidden: Tensor) -> Tensor:
        return self(hidden)[0]


class DictBlock(nn.Module):
    """Returns a dictionary, of which both tensors are used; takes one, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = _Mix(width)
        self.gate = nn.Linear(width, width)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden = inputs["hidden"]
        return {"hidden": self.mix(hidden), "gate": torch.sigmoid(self.gate(hidden))}

    def step(self, hidden: Tensor) -> Tensor:
        outputs = self({"hidden": hidden})
        return hidden + outputs["gate"] * outputs["hidden"]


@dataclass
class Output:
    """What `DataclassBlock` returns: a plain dataclass that torch's pytrees do not know."""

    hidden: Tensor
    parts: list[Tensor]


class DataclassBlock(nn.Module):
    """Returns a dataclass with a list of tensors inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = _Mix(width)

    def forward(self, hidden: Tensor) -> Output:
        mixed = self.mix(hidden)
        left, right = mixed.chunk(2, dim=-1)
        return Output(hidden=hidden + mixed, parts=[left, right])

    def step(self, hidden: Tensor) -> Tensor:
        output = self(hidden)
        return output.hidden + 0.1 * torch.cat([output.parts[1], output.parts[0]], dim=-1)


class Stack(nn.Module):
    """Blocks in a row between two layers; each block class says with `step` how it is called."""

    def __init__(self, block: Callable[[int], Any], width: int) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList([block(width) for _ in range(LAYERS)])
        self.exit = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = block.step(hidden)  # type: ignore[operator]
        return self.exit(hidden)


class _InPlaceBlock(nn.Module):
    """Changes the tensor it receives, and returns that very tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = _Mix(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden.mul_(0.9)
        mixed = self.mix(hidden.clone())
        return hidden.add_(mixed)


class InPlace(nn.Module):
    """In-place operations on what goes into blocks and on what comes out of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList([_InPlaceBlock(width) for _ in range(LAYERS)])
        self.exit = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = block(hidden)
            hidden += 0.01
        return self.exit(hidden.relu_())


class _BlockWithSpare(nn.Module):
    """Owns a parameter that it never reads."""

    def __init__(self, width: int, *, has_spare: bool) -> None:
        super().__init__()
        self.mix = _Mix(width)
        if has_spare:
            self.spare = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mix(hidden)


class WithUnused(nn.Module):
    """One block with a parameter that it never reads, one module that is never called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList([_BlockWithSpare(width, has_spare=index == 1) for index in range(LAYERS)])
        self.never_called = nn.Linear(width, width)
        self.exit = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.exit(hidden)


class Captured(Stack):
    """Forward hooks of the model's own keep what its blocks return; the loss reads it."""

    def __init__(self, width: int) -> None:
        super().__init__(TupleBlock, width)
        self.captured: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(self._capture)

    def _capture(self, _module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, None]) -> None:
        self.captured.append(output[1])

    def forward(self, inputs: Tensor) -> Tensor:
        # A list of its own for each call, as transformers does: microbatches must not meet in it.
        self.captured = []
        return super().forward(inputs)


def captured_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Distance, and what the hooks captured in this forward."""
    if not isinstance(model, Captured):
        raise TypeError(f"the loss reads what Captured keeps, not {type(model).__name__}")
    distance = functional.mse_loss(model(batch["inputs"]), batch["targets"])
    return distance + 0.1 * sum((side.square().mean() for side in model.captured), torch.zeros(()))


class _ConvolutionBlock(nn.Module):
    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(4, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.activation(pixels + self.second(self.activation(self.norm(self.first(pixels)))))


class ConvolutionNet(nn.Module):
    """A residual network; `norm` is "group" (rows stay apart) or "batch"."""

    def __init__(self, norm: str = "group", channels: int = 8) -> None:
        super().__init__()
        self.entry = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[_ConvolutionBlock(channels, norm) for _ in range(3)])
        self.dropout = nn.Dropout(DROPOUT)
        self.exit = nn.Linear(channels, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.exit(self.dropout(self.blocks(self.entry(pixels)).mean((2, 3))))
