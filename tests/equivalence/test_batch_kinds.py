"""Batches of every kind: what can be cut is cut as by hand, what cannot is trained whole, and what looks like rows by accident is never cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import memfit
from memfit.core.errors import UnsupportedError, UsageError
from memfit.core.plan import Order, Plan
from memfit.job import deciding
from memfit.planner.advise import advise

Loss = Callable[[nn.Module, Any], Tensor]


class Tower(nn.Module):
    """A few layers over rows of six features, with two or three classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Sequences(nn.Module):
    """A recurrent layer over (time, rows, features) or packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor | PackedSequence) -> Tensor:
        return self.head(self.lstm(x)[1][0][-1])


class Opaque:
    """An object with tensors, as libraries for graphs have them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


@dataclass
class Record:
    x: Tensor
    y: Tensor
    name: str = "a"


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 1, 2, 1])
X = randn(4, 6)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def classify(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(model(x), y, **options)


def each_detection(model: nn.Module, batch: Any) -> Tensor:
    """A mean over samples, each with as many points and boxes as it likes."""
    images, targets = batch
    pairs = zip(images, targets, strict=True)
    return torch.stack([(model(x).mean(0) - t["boxes"].mean()).square().mean() for x, t in pairs]).mean()


def plain_gradients(model: nn.Module, loss: Loss, parts: Sequence[Any], weights: Sequence[float]) -> dict[str, Tensor]:
    model.zero_grad()
    for part, weight in zip(parts, weights, strict=True):
        (loss(model, part) * weight).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(
    make: Callable[[], nn.Module],
    loss: Loss,
    sample: Any,
    plan: Plan,
    directory: Path,
    batch: Any = None,
    **options: Any,
) -> tuple[dict[str, Tensor | None], memfit.StepResult]:
    """Gradients of a step of memfit's."""
    model = build(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with memfit.fit(
        model, optimizer, loss, sample, plan=plan, keep_gradients=True, directory=directory, **options
    ) as job:
        result = job.step(sample if batch is None else batch)
        return {name: job.gradient(name) for name, _ in model.named_parameters()}, result


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        other = found[name]
        assert other is not None and torch.equal(other, gradient), name


# (model, loss, batch, its halves by hand)
CUTTABLE: dict[str, tuple[Callable[[], nn.Module], Loss, Any, list[Any]]] = {
    "arrays": (
        Tower,
        lambda m, b: classify(m, torch.from_numpy(b["x"]), torch.as_tensor(b["y"])),
        {"x": X.numpy(), "y": LABELS.numpy()},
        [{"x": X[:2].numpy(), "y": LABELS[:2].numpy()}, {"x": X[2:].numpy(), "y": LABELS[2:].numpy()}],
    ),
    "texts beside tensors": (
        Tower,
        lambda m, b: classify(m, b["x"], torch.tensor([int(t) for t in b["texts"]])),
        {"x": X, "texts": ["0", "1", "2", "1"], "none": None, "more": {"a": [None], "lr": 0.1}},
        [{"x": X[:2], "texts": ["0", "1"]}, {"x": X[2:], "texts": ["2", "1"]}],
    ),
    "a list of dicts beside a tensor": (
        Tower,
        lambda m, b: each_detection(m, (b["x"], b["labels"])),
        {"x": X[:, None], "labels": [{"boxes": randn(n, 4, seed=n)} for n in (1, 2, 3, 5)]},
        [
            {"x": X[:2, None], "labels": [{"boxes": randn(n, 4, seed=n)} for n in (1, 2)]},
            {"x": X[2:, None], "labels": [{"boxes": randn(n, 4, seed=n)} for n in (3, 5)]},
        ],
    ),
    "as many boxes as rows, by accident": (
        Tower,
        lambda m, b: each_detection(m, (b["x"], b["labels"])),
        {"x": X[:2, None], "labels": [{"boxes": randn(2, 4, seed=n)} for n in (1, 2)]},
        [{"x": X[n : n + 1, None], "labels": [{"boxes": randn(2, 4, seed=n + 1)}]} for n in (0, 1)],
    ),
    "lists of images and targets": (
        Tower,
        each_detection,
        ([randn(n, 6, seed=n) for n in (3, 2, 5, 4)], [{"boxes": randn(n, 4, seed=n)} for n in (1, 2, 3, 4)]),
        [
            ([randn(n, 6, seed=n) for n in (3, 2)], [{"boxes": randn(n, 4, seed=n)} for n in (1, 2)]),
            ([randn(n, 6, seed=n) for n in (5, 4)], [{"boxes": randn(n, 4, seed=n)} for n in (3, 4)]),
        ],
    ),
    "a list of samples": (
        Tower,
        lambda m, b: torch.stack([classify(m, s["x"][None], s["y"][None]) for s in b]).mean(),
        [{"x": x, "y": y} for x, y in zip(X, LABELS, strict=True)],
        [[{"x": x, "y": y} for x, y in zip(X[a : a + 2], LABELS[a : a + 2], strict=True)] for a in (0, 2)],
    ),
    "two views with the same names": (
        Tower,
        lambda m, b: (m(b[0]["x"]) - m(b[1]["x"])).square().mean(),
        [{"x": X}, {"x": randn(4, 6, seed=9)}],
        [[{"x": X[a : a + 2]}, {"x": randn(4, 6, seed=9)[a : a + 2]}] for a in (0, 2)],
    ),
}


@pytest.mark.parametrize("name", CUTTABLE)
def test_a_batch_with_rows_is_cut_as_by_hand(name: str, tmp_path: Path) -> None:
    make, loss, batch, halves = CUTTABLE[name]
    # A weight is used several times in a microbatch: only one after the other are gradients added up as plain accumulation does.
    found, result = step(make, loss, batch, Plan(microbatches=2, order=Order.MICROBATCH_MAJOR), tmp_path)
    assert len(result.losses) == 2
    assert_equal(found, plain_gradients(build(make), loss, halves, [0.5, 0.5]))


WHOLE: dict[str, tuple[Callable[[], nn.Module], Loss, Any]] = {
    "an object": (Tower, lambda m, b: classify(m, b.x, b.y), Opaque(X, LABELS)),
    "an object in a dict": (Tower, lambda m, b: classify(m, b["d"].x, b["y"]), {"d": Opaque(X, LABELS), "y": LABELS}),
    "texts alone": (
        Tower,
        lambda m, b: classify(m, torch.tensor([[ord(c) / 100 for c in text] for text in b]), LABELS),
        ["abcdef", "ghijkl", "mnopqr", "stuvwx"],
    ),
    "packed sequences": (
        Sequences,
        lambda m, b: functional.cross_entropy(m(b[0]), b[1]),
        (pack_padded_sequence(randn(5, 4, 6), torch.tensor([5, 4, 3, 1])), LABELS),
    ),
    "rows in dimension 1": (
        Sequences,
        lambda m, b: functional.cross_entropy(m(b["x"]), b["y"]),
        {"x": randn(5, 4, 6), "y": LABELS},
    ),
    "a table beside the rows": (
        Tower,
        lambda m, b: classify(m, b["x"] + b["table"][LABELS], b["y"]),
        {"x": X, "y": LABELS, "table": randn(7, 6)},
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_batch_without_common_rows_is_trained_whole_and_never_cut(name: str, tmp_path: Path) -> None:
    make, loss, batch = WHOLE[name]
    found, result = step(make, loss, batch, Plan(), tmp_path / "a")
    assert len(result.losses) == 1
    assert_equal(found, plain_gradients(build(make), loss, [batch], [1.0]))
    with pytest.raises(UsageError, match="this one cannot be"):
        step(make, loss, batch, Plan(microbatches=2), tmp_path / "b")


TWO, THREE = X[:2], X[:3]
ACCIDENTS: dict[str, tuple[Callable[[], nn.Module], Loss, Any]] = {
    "a weight for each of as many classes": (
        Tower,
        lambda m, b: classify(m, b["x"], b["y"], weight=b["w"]),
        {"x": THREE, "y": LABELS[:3], "w": torch.tensor([1.0, 2.0, 3.0])},
    ),
    "a weight for each of two classes, which one row would broadcast": (
        lambda: Tower(2),
        lambda m, b: (m(b["x"]) * b["w"]).square().mean(),
        {"x": TWO, "w": torch.ones(2)},
    ),
    "a weight that is looked up": (
        Tower,
        lambda m, b: (classify(m, b["x"], b["y"], reduction="none") * b["w"][b["y"]]).mean(),
        {"x": THREE, "y": torch.zeros(3, dtype=torch.long), "w": torch.tensor([1.0, 2.0, 3.0])},
    ),
    "positions of three axes": (
        Tower,
        lambda m, b: m(b["x"] + b["position_ids"].sum(0)[:, :1]).square().mean(),
        {"x": THREE, "position_ids": torch.arange(3 * 3 * 5).view(3, 3, 5) / 10},
    ),
    "a mask of rows against rows": (
        Tower,
        lambda m, b: ((m(b["x"]) @ m(b["x"]).T) * b["mask"]).square().mean(),
        {"x": THREE, "mask": torch.eye(3)},
    ),
    "time before rows, everywhere": (Sequences, lambda m, b: m(b).square().mean(), randn(4, 3, 6)),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_what_has_as_many_entries_as_rows_by_accident_is_not_cut(name: str, tmp_path: Path) -> None:
    make, loss, batch = ACCIDENTS[name]
    with pytest.raises((UsageError, UnsupportedError)):
        step(make, loss, batch, Plan(microbatches=2), tmp_path / "a")
    found, _ = step(make, loss, batch, Plan(), tmp_path / "b")
    assert_equal(found, plain_gradients(build(make), loss, [batch], [1.0]))


def test_rows_that_are_alike_in_the_sample_are_tried_on_the_first_batch(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (classify(model, batch["x"], batch["y"], reduction="none") * batch["w"][batch["y"]]).mean()

    real = {"x": THREE, "y": torch.zeros(3, dtype=torch.long), "w": torch.tensor([1.0, 2.0, 3.0])}
    sample = {"x": torch.zeros(3, 6), "y": torch.zeros(3, dtype=torch.long), "w": torch.ones(3)}
    with pytest.raises(UnsupportedError, match="give memfit.fit a sample with real rows"):
        step(Tower, loss, sample, Plan(microbatches=3), tmp_path, real)


def test_a_time_major_batch_is_cut_by_the_users_function(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    def split(batch: Any, count: int) -> list[Any]:
        count = min(count, len(batch["y"]))
        pairs = zip(batch["x"].tensor_split(count, 1), batch["y"].tensor_split(count), strict=True)
        return [{"x": x, "y": y} for x, y in pairs]

    batch = {"x": randn(5, 3, 6), "y": LABELS[:3]}
    plan = Plan(microbatches=2)
    found, result = step(Sequences, loss, batch, plan, tmp_path / "a", split=split, weight=lambda part: len(part["y"]))
    assert len(result.losses) == 2
    halves = [{"x": batch["x"][:, :2], "y": LABELS[:2]}, {"x": batch["x"][:, 2:], "y": LABELS[2:3]}]
    assert_equal(found, plain_gradients(build(Sequences), loss, halves, [2 / 3, 1 / 3]))
    # One row is one part, whatever the plan says.
    one = {"x": batch["x"][:, :1], "y": LABELS[:1]}
    _, result = step(Sequences, loss, batch, plan, tmp_path / "b", one, split=split, weight=lambda part: len(part["y"]))
    assert len(result.losses) == 1
    with pytest.raises(UsageError, match="weight="):
        step(Sequences, loss, batch, plan, tmp_path / "c", split=split)
    with pytest.raises(UsageError, match="must return a list of 1 to 2"):
        step(Sequences, loss, batch, plan, tmp_path / "d", split=lambda _batch, _count: [], weight=lambda _: 1)
    nothing = {"x": batch["x"][:, :0], "y": batch["y"][:0]}
    with pytest.raises(UsageError, match="empty batch"):
        step(Sequences, loss, batch, plan, tmp_path / "e", split=lambda b, _: [b, nothing], weight=lambda _: 1)


def test_under_a_limit_a_batch_that_cannot_be_cut_gets_recompute_and_homes_and_is_told_why(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch.x), batch.y)

    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(8)])
    reference = copy.deepcopy(model)
    batch = Opaque(randn(2048, 256), torch.arange(2048) % 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    whole = advise(model, optimizer, loss, batch, plan=Plan(), directory=tmp_path)
    limit = whole.predicted_peak_bytes - whole.timeline.peak_bytes // 2
    with memfit.fit(
        model, optimizer, loss, batch, limit=limit, keep_gradients=True, directory=tmp_path, enforce=False
    ) as job:
        assert job.plan.microbatches == 1
        assert job.plan.calls, "every call keeps what it saves"
        assert "not cut into microbatches: batch is a Opaque" in job.reason
        job.step(batch)
        found = {name: job.gradient(name) for name, _ in model.named_parameters()}
    assert_equal(found, plain_gradients(reference, loss, [batch], [1.0]))


def test_under_a_limit_a_list_is_trained_whole_where_its_length_says_how_often_the_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors of three and five rows look like two rows; a part of the list is computed by fewer calls than the whole."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return torch.stack([model(each).square().mean() for each in batch]).sum()

    batches = [[randn(3, 6), randn(5, 6)], [randn(4, 6), randn(2, 6), randn(6, 6)]]
    model = build(Tower)
    # Where the whole batch fits with room to spare, nobody asks for its parts.
    monkeypatch.setattr(deciding, "keeps_batch_whole", lambda *_: False)
    with memfit.fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loss,
        batches[0],
        limit="4GiB",
        keep_gradients=True,
        directory=tmp_path,
    ) as job:
        assert job.plan.microbatches == 1
        assert "which layers run, or how often, depends on its rows" in job.reason
        for batch in batches:
            assert job.step(batch).departures == ()
            found = {name: job.gradient(name) for name, _ in model.named_parameters()}
            assert_equal(found, plain_gradients(build(Tower), loss, [batch], [1.0]))


def test_an_object_of_a_class_of_arrays_is_not_changed_by_planning() -> None:
    batch = {"x": X.numpy().copy(), "y": LABELS.numpy().copy()}
    model = build(Tower)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch["seen"] = True
        return classify(model, torch.from_numpy(batch["x"]), torch.as_tensor(batch["y"]))

    memfit.profile(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, batch)
    assert np.array_equal(batch["x"], X.numpy()) and "seen" not in batch


def _padded(batch: Any) -> Tensor:
    return batch.to_padded_tensor(0.0) if batch.is_nested else batch.to_dense()


SPARSE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "nested": (lambda: torch.nested.nested_tensor([randn(3, 6), randn(2, 6)]), r"a nested tensor.*to_padded_tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([randn(3, 6), randn(2, 6)], layout=torch.jagged),
        r"a nested tensor.*to_padded_tensor",
    ),
    "sparse": (lambda: randn(4, 6).to_sparse(), r"a sparse tensor.*to_dense\(\)"),
    "rows of a sparse matrix": (lambda: randn(4, 6).to_sparse_csr(), r"a sparse tensor.*to_dense\(\)"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", SPARSE)
def test_nested_and_sparse_tensors_are_refused_in_words_in_the_sample_and_in_a_step(name: str) -> None:
    make, words = SPARSE[name]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(_padded(batch)).square().mean()

    model = build(Tower)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=f"the batch holds {words}"):
        memfit.fit(model, optimizer, loss, make())
    with memfit.fit(model, optimizer, lambda model, batch: loss(model, batch["x"]), {"x": randn(4, 6)}) as job:
        with pytest.raises(UnsupportedError, match=f"the batch holds {words}"):
            job.step({"x": make()})
        assert job.step({"x": randn(4, 6)}).is_finite
