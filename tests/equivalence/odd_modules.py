"""Modules of torch that are not ordinary layers: recurrent ones, parametrized weights, lists of parameters, odd dtypes and shapes.

In: a name of `ODD`. Out: a `Case` with blocks in a row; `REFUSED` holds what cannot be trained as it is, with the words of the refusal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from equivalence import zoo

WIDTH = zoo.WIDTH
Mix = Callable[[Any, Tensor], Tensor]


class Row(nn.Module):
    """Blocks in a row between two layers, each added to what goes into it."""

    def __init__(self, make: Callable[[], nn.Module], mix: Mix, layers: int = 2) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(layers)])
        self.exit = nn.Linear(WIDTH, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + self.mix(block, x)
        return self.exit(x)


def call(block: Any, x: Tensor) -> Tensor:
    return block(x)


def first(block: Any, x: Tensor) -> Tensor:
    return block(x)[0]


class Cell(nn.Module):
    """A recurrent cell over the places of a row: one weight, six uses."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, seen = x[:, 0], []
        for place in range(x.shape[1]):
            hidden = self.cell(x[:, place], hidden)
            seen.append(hidden)
        return torch.stack(seen, 1)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x)


class Scalars(nn.Module):
    """Parameters without dimensions, and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.linear(x) + self.nothing.sum() + self.no_rows.sum()


class Listed(nn.Module):
    """A list and a dictionary of parameters; one of them is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": torch.zeros(WIDTH), "scale": torch.ones(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) + self.named["shift"]
        return x * self.named["scale"]


class Unblocked(nn.Module):
    """Parameters that no block owns, read between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.places = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places
        for block in self.blocks:
            x = x + self.scale * torch.tanh(block(x))
        return x


class Bare(nn.Module):
    """A parameter and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Masked(nn.Module):
    """Masks that NumPy and Python draw: the time masks of speech models come so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.inner(x)
        kept = torch.from_numpy(np.random.rand(WIDTH) < 0.8).to(x.dtype)
        return self.inner(x * kept) * (0.5 + random.random())


class Strided(nn.Module):
    """Parameters that are views: two halves of one tensor, a transposed one, every second column."""

    def __init__(self) -> None:
        super().__init__()
        halves = torch.randn(2, WIDTH, WIDTH) / 6
        self.left, self.right = nn.Parameter(halves[0]), nn.Parameter(halves[1])
        self.turned = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH) / 6).t())
        self.spread = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2] / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.left) @ self.right + torch.tanh(x @ self.turned[:WIDTH]) @ self.spread


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH)
        self.lower = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.order = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(WIDTH, dtype=torch.bool), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.single(x)[..., self.order] * self.mask + self.lower(x.to(dtype=torch.bfloat16)).float()


class OwnCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = lambda y: self.down(torch.tanh(self.up(y)))  # noqa: E731, one line that the checkpoint runs twice
        return checkpoint(inner, x, use_reentrant=False)


class Mapped(nn.Module):
    """Runs a layer by `torch.func`, as a function of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.linear.named_parameters())
        return torch.func.vmap(lambda y: torch.func.functional_call(self.linear, weights, (y,)))(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) @ self.weight).real


class SparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.neighbours: Tensor
        self.register_buffer("neighbours", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.neighbours, self.linear(x).flatten(0, 1).t()).t().reshape(x.shape)


class OtherMemory(nn.Module):
    """Normalizes its weight in every forward, into other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = functional.normalize(self.linear.weight.data)
        return self.linear(x)


class Words(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, zoo.VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def next_word(model: nn.Module, batch: zoo.Batch) -> Tensor:
    logits = model(batch["input_ids"])
    targets = batch["labels"] if logits.dim() == 3 else batch["labels"][:, :1]
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def translate(model: nn.Module, batch: zoo.Batch) -> Tensor:
    return functional.mse_loss(model(batch["inputs"], batch["targets"]), batch["targets"])


def doubled(step: int) -> zoo.Batch:
    return {name: value.double() for name, value in zoo.rows(step).items()}


def row(make: Callable[[], nn.Module], mix: Mix = call, uses: tuple[str, ...] = ()) -> Callable[[], zoo.Case]:
    """Three such blocks; `uses`: their parameters with several uses in one call."""

    def build() -> zoo.Case:
        torch.manual_seed(0)
        model = Row(make, mix).train()
        shared = frozenset(f"blocks.{i}.{name}" for i in range(len(model.blocks)) for name in uses)
        return zoo.Case(model=model, loss=zoo.distance, batch=zoo.rows, shared=shared, untouched=None)

    return build


def whole(make: Callable[[], nn.Module], **known: Any) -> Callable[[], zoo.Case]:
    def build() -> zoo.Case:
        torch.manual_seed(0)
        return zoo.Case(model=make().train(), **{"loss": zoo.distance, "batch": zoo.rows, "untouched": None, **known})

    return build


def words(make: Callable[[], nn.Module]) -> Callable[[], zoo.Case]:
    return whole(lambda: Words(make()), loss=next_word, batch=zoo.text)


def partly_frozen() -> zoo.Case:
    """Convolutions whose batch norms keep the statistics they have, in a model that trains."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), *stages, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    ).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return zoo.Case(model=model, loss=zoo.picture_loss, batch=zoo.images)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


_HIDDEN = ("weight_hh_l0", "bias_hh_l0")

ODD: dict[str, Callable[[], zoo.Case]] = {
    "masked": row(Masked),
    "lstm": row(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), first, _HIDDEN),
    "lstm-deep": row(
        lambda: nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True),
        first,
        tuple(
            f"{name}_l{layer}{way}" for name in ("weight_hh", "bias_hh") for layer in (0, 1) for way in ("", "_reverse")
        ),
    ),
    "lstm-projected": row(
        lambda: nn.LSTM(WIDTH, 48, proj_size=WIDTH, batch_first=True), first, (*_HIDDEN, "weight_hr_l0")
    ),
    "gru": row(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), first, _HIDDEN),
    "rnn": row(lambda: nn.RNN(WIDTH, WIDTH, batch_first=True), first, _HIDDEN),
    "cell": row(Cell, uses=("cell.weight_ih", "cell.weight_hh", "cell.bias_ih", "cell.bias_hh")),
    "transformer": whole(
        lambda: nn.Transformer(WIDTH, 2, 2, 2, dim_feedforward=48, dropout=0.1, batch_first=True), loss=translate
    ),
    "attention": row(
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1),
        lambda block, x: block(x, x, x, need_weights=False)[0],
    ),
    "bilinear": row(Product),
    "weight-norm": row(lambda: parametrizations.weight_norm(linear())),
    "weight-norm-of-old": row(lambda: nn.utils.weight_norm(linear())),
    "orthogonal": row(lambda: parametrizations.orthogonal(linear())),
    "spectral-norm": row(lambda: parametrizations.spectral_norm(linear())),
    "spectral-norm-of-old": row(lambda: nn.utils.spectral_norm(linear())),
    "pruned": row(lambda: prune.random_unstructured(linear(), "weight", 0.3)),
    "float64": whole(lambda: Row(linear, call).double(), batch=doubled),
    "two-dtypes": row(TwoDtypes),
    "scalars": row(Scalars),
    "listed": row(Listed, uses=("named.shift",)),
    "unblocked": whole(Unblocked, shared=frozenset({"scale"})),
    "bare": whole(Bare),
    "one-layer": whole(linear),
    "strided": row(Strided),
    "own-checkpoint": row(OwnCheckpoint),
    "mapped": row(Mapped),
    "partly-frozen": partly_frozen,
    "by-frequency": words(lambda: nn.Embedding(zoo.VOCABULARY, WIDTH, scale_grad_by_freq=True, padding_idx=0)),
    "bag": words(lambda: nn.EmbeddingBag(zoo.VOCABULARY, WIDTH)),
    "max-norm": words(lambda: nn.Embedding(zoo.VOCABULARY, WIDTH, max_norm=1.0)),
}
"""What trains, by name."""

WHOLE_BATCH_ONLY = ("spectral-norm", "spectral-norm-of-old", "max-norm")
"""Power iterations run once a forward, and so do bounds on a weight."""

REFUSED: dict[str, tuple[Callable[[], zoo.Case], str]] = {
    "sparse gradients": (
        words(lambda: nn.Embedding(zoo.VOCABULARY, WIDTH, sparse=True)),
        r"a sparse tensor \(sparse_coo.*nn\.Embedding\(sparse=False\)",
    ),
    "a sparse buffer": (row(SparseBuffer), r"the buffer 'blocks\.0\.neighbours' is a sparse tensor"),
    "complex weights": (row(Complex), r"'blocks\.0\.weight' is complex"),
    "weights without a shape": (whole(lambda: nn.Sequential(nn.LazyLinear(WIDTH), linear())), "run the model once"),
    "weights that move": (row(OtherMemory), r"gives the parameter 'blocks\.0\.linear\.weight' other memory"),
    "torchscript": (row(lambda: torch.jit.script(linear())), r"'blocks\.0' is a TorchScript module"),
}
"""What does not, and the words of the refusal."""
