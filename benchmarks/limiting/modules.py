"""Models of plain torch that nobody wrote for a planner: skips over many layers, statistics, experts, several uses of a weight, kernels of every kind.

In: a kind and sizes. Out: a module that takes a batch's first tensor, and the shape of that.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Convolutions down and up, what was down again beside what is up."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(layers)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self._pair(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.joined = nn.ModuleList(self._pair(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _pair(narrow: int, wide: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(narrow, wide, 3, padding=1), nn.GroupNorm(8, wide), nn.SiLU(), nn.Conv2d(wide, wide, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.first(x)
        skips: list[Tensor] = []
        for layer in self.down:
            skips.append(x)
            x = layer(functional.avg_pool2d(x, 2))
        for up, layer in zip(reversed(self.up), reversed(self.joined), strict=True):
            x = layer(torch.cat([skips.pop(), up(x)], dim=1))
        return self.last(x)


class Inverted(nn.Module):
    """Wide, depthwise, squeezed, narrow again: layers of MobileNet and EfficientNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.widen = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True))
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 5, padding=2, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, width // 4, 1), nn.SiLU())
        self.excite = nn.Conv2d(width // 4, wide, 1)
        self.narrow = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.depth(self.widen(x))
        return x + self.narrow(y * torch.sigmoid(self.excite(self.squeeze(y))))


class Convolutional(nn.Module):
    """A stem, layers at one size, strides between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(Inverted(width) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Mixer(nn.Module):
    """Products along one dimension, then along the other (a perceptron over transposed rows)."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "across": nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens)),
                    "along": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for layer in self.layers:
            x = x + layer["across"](layer["norm"](x).transpose(1, 2)).transpose(1, 2)  # type: ignore[index]
            x = x + layer["along"](layer["norm"](x))  # type: ignore[index]
        return x


class Experts(nn.Module):
    """Each row to two of eight experts by `topk`, added where it came from."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "router": nn.Linear(width, 8),
                    "experts": nn.ModuleList(
                        nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))
                        for _ in range(8)
                    ),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        shape = x.shape
        x = x.flatten(0, -2)
        for layer in self.layers:
            weights, chosen = layer["router"](x).softmax(-1).topk(2)  # type: ignore[index]
            added = torch.zeros_like(x)
            for number, expert in enumerate(layer["experts"]):  # type: ignore[index]
                rows, which = torch.where(chosen == number)
                added = added.index_add(0, rows, expert(x[rows]) * weights[rows, which, None])
            x = x + added
        return x.view(shape)


class Looped(nn.Module):
    """The same layers several times, and a head that is the embedding: every weight has several uses."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 3 * width, batch_first=True, dropout=0.1, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.words(x)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x @ self.words.weight.t()


class Translator(nn.Module):
    """An encoder and a decoder that reads it in every layer."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.body = nn.Transformer(width, 4, layers, layers, 2 * width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        half = x.shape[1] // 2
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1] - half)
        return self.head(self.body(self.words(x[:, :half]), self.words(x[:, half:]), tgt_mask=mask, tgt_is_causal=True))


class Gated(nn.Module):
    """GRU layers in both directions, normed."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.GRU(width, width // 2, batch_first=True, bidirectional=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for layer in self.layers:
            x = self.norm(x + layer(x)[0])
        return x


class Sound(nn.Module):
    """One-dimensional convolutions, dilated, with gates."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 9, padding=4)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=2**i, dilation=2**i) for i in range(layers))
        self.last = nn.Conv1d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.first(x)
        for layer in self.layers:
            value, gate = layer(x).chunk(2, dim=1)
            x = x + torch.tanh(value) * torch.sigmoid(gate)
        return self.last(x)


class Uneven(nn.Module):
    """Layers of widths that nobody would choose, scores held whole, weights normed, einsum, cumulative sums, sorting."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inner = [width + 37 * (i % 3) for i in range(layers)]
        self.into = nn.ModuleList(nn.Linear(width, inner) for inner in self.inner)
        self.out = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Linear(inner, width)) for inner in self.inner)
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in self.inner)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for into, out, scale in zip(self.into, self.out, self.scale, strict=True):
            y = into(x)
            scores = torch.einsum("btd,bsd->bts", y, y) / y.shape[-1]
            y = torch.einsum("bts,bsd->btd", scores.softmax(-1), y)
            y = torch.logcumsumexp(y, dim=1) + y.sort(dim=-1).values + functional.gelu(y) * torch.sigmoid(y)
            x = x * scale + out(torch.tanh(y))
        return x


KINDS: dict[str, type[nn.Module]] = {
    "unet": UNet, "convolutional": Convolutional, "mixer": Mixer, "experts": Experts, "looped": Looped, "translator": Translator, "gated": Gated,
    "sound": Sound, "uneven": Uneven,
}  # fmt: skip


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Program 1)."""

    def __init__(self, params: object, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: D102
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(torch.sign(momentum * first + parameter.grad * (1 - first)), alpha=-group["lr"])
                momentum.mul_(second).add_(parameter.grad, alpha=1 - second)
