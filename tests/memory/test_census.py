"""The census names planted leaks, each by the line to change, and says nothing where nothing leaks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memfit
from equivalence import plans, zoo
from equivalence.with_memfit import fit_variant, fit_with
from memfit.core.errors import MemfitWarning
from memfit.core.plan import Plan
from memfit.machine.holders import HolderKind
from memfit.machine.leak_report import CensusReport, Survivor

CLEAN = ("gpt2", "llama", "mixtral", "t5", "bert", "vit", "resnet", "albert")
STEPS = (
    6  # the counts compare from the third on, grow at the fourth, and what the fifth made is a step old at the sixth
)
HERE = Path(__file__).name

pytestmark = pytest.mark.usefixtures("exact_counts")
history: list[Tensor] = []


@pytest.fixture(autouse=True)
def empty_history() -> Iterator[None]:
    history.clear()
    yield
    history.clear()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """With the cycle collector off."""
    gc.disable()
    yield
    gc.enable()


def line_of(words: str) -> int:
    """The line of this file that holds the words."""
    lines = Path(__file__).read_text().splitlines()
    return next(index + 1 for index, line in enumerate(lines) if words in line)


@dataclass
class Training:
    """A few steps of a model of the zoo, and the census after them.

    Attributes:
        directory: for homes on disk.
        name: of the zoo's model.
        variant: of `plans`; None leaves everything resident.
        loss: in place of the model's own.
        after_step: is called between steps.
        batches: in place of the zoo's.
    """

    directory: Path
    name: str = "sequential"
    variant: str | None = None
    loss: Callable[[nn.Module, zoo.Batch], Tensor] | None = None
    prepare: Callable[[nn.Module], Any] = lambda model: None
    after_step: Callable[[nn.Module], Any] = lambda model: None
    batches: Callable[[zoo.Case], Iterator[zoo.Batch]] | None = None
    steps: int = STEPS

    def report(self) -> CensusReport:
        case = zoo.ZOO[self.name]()
        if self.loss is not None:
            case = zoo.Case(model=case.model, loss=self.loss, batch=case.batch, allow=case.allow)
        self.prepare(case.model)
        optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
        fit = fit_with(Plan(), self.directory)
        if self.variant is not None:
            fit = fit_variant(self.name, plans.BY_NAME[self.variant], self.directory, limit="8GiB")
        batches = self.batches(case) if self.batches is not None else (case.batch(step) for step in range(self.steps))
        job: Any = fit(case, optimizer)
        with job:
            for batch, _ in zip(batches, range(self.steps), strict=True):
                job.step(batch)
                self.after_step(case.model)
            return job.census()


def only_leak(report: CensusReport) -> Survivor:
    assert len(report.leaks) == 1, report.text
    assert not report.is_clean
    return report.leaks[0]


# --- planted ---------------------------------------------------------------------------------------------------------------------


def distance(model: nn.Module, batch: zoo.Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])


def keep_loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
    loss = distance(model, batch)
    history.append(loss)
    return loss


@pytest.mark.parametrize("variant", [None, pytest.param("disk-recompute-4", marks=pytest.mark.slow)])
def test_a_kept_loss_is_named(variant: str | None, tmp_path: Path) -> None:
    leak = only_leak(Training(tmp_path, variant=variant, loss=keep_loss).report())
    assert leak.holders[0].kind is HolderKind.GLOBAL
    assert leak.holders[0].name == "history[...]"
    assert f"{HERE}:{line_of('history: list[Tensor] = []')}" in leak.holders[0].text
    assert leak.shape == ()
    assert leak.graph is not None and "detach" in leak.text


def test_a_kept_graph_is_named_with_what_it_saved(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
        output = model(batch["inputs"])
        sizes.append(output.detach().requires_grad_().square().exp().mean())
        return nn.functional.mse_loss(output, batch["targets"])

    sizes: list[Tensor] = []
    report = Training(tmp_path, loss=loss).report()
    names = {leak.holders[0].name: leak for leak in report.leaks}
    assert set(names) == {"sizes[...]", "the autograd graph (MeanBackward0) of sizes[...]"}, report.text
    saved = names["the autograd graph (MeanBackward0) of sizes[...]"]
    assert saved.holders[0].kind is HolderKind.GRAPH
    # exp saves its result and square its input: two tensors a step, the size of the output.
    assert saved.shape == (zoo.ROWS, 6, zoo.WIDTH)
    assert saved.nbytes == saved.count * zoo.ROWS * 6 * zoo.WIDTH * 4
    assert saved.count == 2 * names["sizes[...]"].count


def test_a_hook_closure_is_named(tmp_path: Path) -> None:
    def prepare(model: nn.Module) -> None:
        outputs: list[Tensor] = []

        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            outputs.append(output.detach().clone())

        model.get_submodule("1").register_forward_hook(hook)

    report = Training(tmp_path, prepare=prepare).report()
    leak = only_leak(report)
    assert leak.holders[0].kind is HolderKind.CLOSURE
    assert leak.holders[0].name == "outputs[...]"
    place = f"{HERE}:{line_of('def hook(_module')}"
    assert place in leak.holders[0].text
    assert "a forward hook of '1'" in leak.holders[0].text
    assert [finding.callback for finding in report.callbacks] == ["hook()"]
    assert place in report.callbacks[0].text
    assert report.callbacks[0].held_bytes > 0


class Recorder:
    """What people write to look at activations."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []

    def record(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self.recorded.append(output.detach().clone())


def test_a_bound_method_in_a_callback_is_named(tmp_path: Path) -> None:
    def prepare(model: nn.Module) -> None:
        model.get_submodule("0").register_forward_hook(Recorder().record)

    report = Training(tmp_path, prepare=prepare).report()
    leak = only_leak(report)
    assert leak.holders[0].kind is HolderKind.BOUND_METHOD
    assert leak.holders[0].name.startswith("Recorder.recorded[...]")
    assert f"{HERE}:{line_of('self.recorded: list')}" in leak.holders[0].name
    assert "through the bound method Recorder.record" in leak.holders[0].text
    assert "a forward hook of '0'" in leak.holders[0].text
    assert report.callbacks[0].callback == "bound method Recorder.record"
    with pytest.warns(MemfitWarning) as caught:
        report.warn()
    assert {(Path(w.filename).name, w.lineno) for w in caught} == {
        (HERE, line_of("self.recorded: list")),
        (HERE, line_of("def record(self")),
    }


class Node:
    """Knows its successor, which is itself."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.successor = self


@pytest.mark.usefixtures("no_collector")
def test_a_cycle_is_named_and_collected(tmp_path: Path) -> None:
    report = Training(tmp_path, after_step=lambda model: Node(torch.zeros(1000))).report()
    leak = only_leak(report)
    assert leak.holders[0].kind is HolderKind.CYCLE
    assert leak.holders[0].name.startswith("Node.value")
    assert "Node.successor -> Node" in leak.holders[0].text
    assert f"{HERE}:{line_of('class Node')}" in leak.holders[0].text
    assert leak.nbytes == leak.count * 4000
    assert leak.count == 3  # made after the fourth step, in whose growth the census took its baseline


class CachedRows(Dataset[Mapping[str, Tensor]]):
    """Keeps what it has read, and reads everything anew."""

    def __init__(self, batch: Callable[[int], zoo.Batch], length: int = STEPS) -> None:
        self.batch = batch
        self.length = length
        self.cache: list[zoo.Batch] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        self.cache.append(self.batch(index))
        return self.batch(index)


@pytest.mark.parametrize("is_held_by_the_loop_alone", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_growing_list_in_a_dataset_is_named(is_held_by_the_loop_alone: bool, tmp_path: Path) -> None:
    kept: list[object] = []

    def batches(case: zoo.Case) -> Iterator[zoo.Batch]:
        dataset = CachedRows(case.batch)
        if not is_held_by_the_loop_alone:
            kept.append(dataset)
        return iter(DataLoader(dataset, batch_size=None))

    leak = only_leak(Training(tmp_path, batches=batches).report())
    assert any("CachedRows.cache" in holder.name for holder in leak.holders), leak.text
    assert f"{HERE}:{line_of('self.cache: list')}" in leak.text


# --- in a running job ----------------------------------------------------------------------------------------------------------------


def _kept_graph(directory: Path) -> Training:
    sizes: list[Tensor] = []

    def graph_keeping_loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
        output = model(batch["inputs"])
        sizes.append(output.detach().requires_grad_().square().exp().mean())
        return nn.functional.mse_loss(output, batch["targets"])

    return Training(directory, loss=graph_keeping_loss)


def _hook_closure(directory: Path) -> Training:
    def prepare(model: nn.Module) -> None:
        outputs: list[Tensor] = []

        def planted_hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            outputs.append(output.detach().clone())

        model.get_submodule("1").register_forward_hook(planted_hook)

    return Training(directory, prepare=prepare)


def _bound_method(directory: Path) -> Training:
    def prepare(model: nn.Module) -> None:
        model.get_submodule("0").register_forward_hook(Recorder().record)

    return Training(directory, prepare=prepare)


def _growing_dataset(directory: Path) -> Training:
    def batches(case: zoo.Case) -> Iterator[zoo.Batch]:
        return iter(DataLoader(CachedRows(case.batch, 12), batch_size=None))

    return Training(directory, batches=batches)


RUNNING: dict[str, tuple[Callable[[Path], Training], str, str]] = {
    "a kept loss": (lambda d: Training(d, loss=keep_loss), "held by history[...]", "history: list[Tensor] = []"),
    "a kept graph": (
        _kept_graph,
        "sizes[...]",
        "def graph_keeping_loss(",
    ),
    "a hook over a list": (_hook_closure, "a forward hook of '1'", "def planted_hook("),
    "a bound method": (_bound_method, "through the bound method Recorder.record", "self.recorded: list"),
    "a cycle": (
        lambda d: Training(d, after_step=lambda model: Node(torch.zeros(1000))),
        "Node.successor",
        "class Node",
    ),
    "a dataset's list": (_growing_dataset, "CachedRows.cache", "self.cache: list"),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "leak", [pytest.param(leak, marks=[pytest.mark.slow] if place % 2 else []) for place, leak in enumerate(RUNNING)]
)
def test_a_running_job_warns_of_a_leak_once_at_its_line(leak: str, tmp_path: Path) -> None:
    make, words, line = RUNNING[leak]
    training = make(tmp_path)
    training.steps = 12
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MemfitWarning)
        training.report()
    told = [w for w in caught if issubclass(w.category, MemfitWarning)]
    assert any(words in str(w.message) for w in told), [str(w.message) for w in told]
    told = [
        w for w in told if "hooks of yours also ran" not in str(w.message)
    ]  # one of these leaks is a hook, which fit tells of too
    assert len({str(w.message).splitlines()[1] for w in told}) == len(told)  # each holder once
    text = "\n".join(f"{w.filename}:{w.lineno}: {w.message}" for w in told)
    assert f"{HERE}:{line_of(line)}" in text, text


def test_lines_of_the_users_own_are_told_of_what_they_keep() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())

    def loss(model: nn.Module, values: Tensor) -> Tensor:
        return model(values).square().mean()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MemfitWarning)
        with memfit.fit(model, optimizer, loss, torch.ones(4, 64), lines=True) as job, job.lines():
            for _ in range(12):
                found = loss(model, torch.ones(4, 64))
                found.backward()
                optimizer.step()
                optimizer.zero_grad()
                history.append(found.detach() + torch.zeros(1000))
    assert any("history" in str(each.message) for each in caught), [str(each.message) for each in caught]


# --- clean -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n in CLEAN[::2] else pytest.param(n, marks=pytest.mark.slow) for n in CLEAN])
@pytest.mark.parametrize("is_streamed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_census_is_silent_on_clean_runs(name: str, is_streamed: bool, tmp_path: Path) -> None:
    streamed = "disk" if name in zoo.WHOLE_BATCH_ONLY else "disk-recompute-4"
    report = Training(tmp_path, name, streamed if is_streamed else None).report()
    assert report.is_clean
    assert (report.survivors, report.callbacks, report.grown_bytes, report.grown_blocks) == ((), (), 0, 0), report.text
    assert report.text.endswith("flat")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.warn()
