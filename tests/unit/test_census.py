"""When the census looks, what it calls a leak, and how it names holders and callbacks."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from equivalence import small_models
from memfit.devices.binding import install
from memfit.machine import leak_report as census_module
from memfit.machine.closures import CallbackFinding, CallbackKind, graph_of, inspect_callbacks
from memfit.machine.holders import Holder, HolderKind, HolderSearch
from memfit.machine.leak_report import Census
from memfit.machine.meters import CpuMeter

HERE = Path(__file__).name


def line_of(words: str) -> int:
    """The first line of this file that holds the words."""
    return next(i + 1 for i, line in enumerate(Path(__file__).read_text().splitlines()) if words in line)


class HandMeter:
    """Counts that a test sets, and how often they were read."""

    def __init__(self) -> None:
        self.bytes, self.blocks, self.readings = 1000, 10, 0

    def live_bytes(self) -> int:
        self.readings += 1
        return self.bytes

    def live_blocks(self) -> int:
        self.readings += 1
        return self.blocks


def run(steps: int, each: Callable[[int], object]) -> Census:
    """Steps that do what `each` says."""
    census = Census(CpuMeter(install()))
    for step in range(1, steps + 1):
        each(step)
        census.note_step()
    return census


# --- when it looks ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one each time that tensors are looked up."""
    found: list[int] = []

    def count() -> list[Tensor]:
        found.append(1)
        return []

    monkeypatch.setattr(census_module, "live_tensors", count)
    return found


def test_flat_steps_cost_two_readings_and_no_look(looks: list[int]) -> None:
    meter = HandMeter()
    census = Census(meter)
    for _ in range(100):
        census.note_step()
    assert meter.readings == 200
    report = census.report()
    assert report.is_clean and report.text.endswith("flat")
    assert looks == []


def test_growth_costs_a_logarithm_of_looks(looks: list[int]) -> None:
    meter = HandMeter()
    census = Census(meter)
    for _ in range(1000):
        census.note_step()
        meter.bytes += 4
        meter.blocks += 1
    assert 2 <= len(looks) <= 11


def test_warm_up_may_grow(looks: list[int]) -> None:
    meter = HandMeter()
    census = Census(meter)
    assert "no step" in census.report().text
    for blocks in (10, 40, 50):
        meter.blocks = blocks
        assert census.report().is_clean
        census.note_step()
    assert "flat" in census.report().text
    assert looks == []


@pytest.mark.parametrize("period", [2, 3, 7])
def test_batches_of_changing_size_are_no_leak(period: int) -> None:
    batch: list[Tensor] = []

    def each(step: int) -> None:
        batch[:] = [torch.zeros(100 * (1 + step % period)), torch.zeros(step % period + 1)]

    report = run(12, each).report()
    assert report.is_clean and report.survivors == (), report.text


def test_what_is_made_once_is_kept_but_no_leak() -> None:
    kept: list[Tensor] = []
    report = run(12, lambda step: kept.append(torch.zeros(7)) if step in (5, 8) else None).report()
    # Step 5 gave the baseline; step 8 doubled the growth and was looked at.
    assert report.leaks == ()
    assert [(s.count, s.shape, s.since_step) for s in report.survivors] == [(1, (7,), 8)]
    assert "kept, not growing" in report.text
    assert report.is_clean


def test_a_tensor_that_is_replaced_by_a_larger_one_is_rising_and_nothing_is_named() -> None:
    holder: dict[str, Tensor] = {"log": torch.zeros(1)}

    def each(_step: int) -> None:
        holder["log"] = torch.cat([holder["log"], torch.zeros(100)])

    report = run(16, each).report()
    assert report.leaks == () and report.is_rising and not report.is_clean
    assert "torch.cat" in report.text


def test_counts_are_bounded() -> None:
    census = Census(HandMeter())
    for _ in range(1000):
        census.note_step()
    counts = census.report().counts
    assert len(counts) == 256
    assert (counts[0].step, counts[-1].step) == (745, 1000)


def test_the_census_keeps_nothing_alive() -> None:
    kept: list[Tensor] = []
    census = run(8, lambda step: kept.append(torch.zeros(3)))
    assert census.report().leaks
    alive = [weakref.ref(tensor) for tensor in kept]
    gc.disable()
    try:
        kept.clear()
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_views_of_a_weight_are_no_new_memory() -> None:
    weight = nn.Parameter(torch.zeros(100))
    views: list[Tensor] = []
    kept: list[Tensor] = []

    def each(_step: int) -> None:
        views.append(weight.detach()[:10])
        kept.append(torch.zeros(5))

    leaks = run(8, each).report().leaks
    assert [leak.shape for leak in leaks] == [(5,)]


# --- who holds -------------------------------------------------------------------------------------------------------------------


def holders_of(get: Callable[[], object], model: nn.Module | None = None) -> tuple[Holder, ...]:
    """Of what `get` gives: no variable of a test's own holds it."""
    targets = [get()]
    search = HolderSearch(targets, model=model)
    search.climb()
    return search.holders(targets[0])


def one_holder(get: Callable[[], object], model: nn.Module | None = None) -> Holder:
    found = holders_of(get, model)
    assert len(found) == 1, [holder.text for holder in found]
    return found[0]


class Shelf:
    """Keeps tensors in every way that a class can."""

    on_class: ClassVar[list[Tensor]] = []
    __slots__ = ("__weakref__", "in_slot")

    def __init__(self, value: Tensor) -> None:
        self.in_slot = value


shelves: list[Shelf] = []
table: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def empty_globals() -> Iterator[None]:
    yield
    shelves.clear()
    table.clear()
    Shelf.on_class.clear()


def test_a_slot_of_an_object_in_a_global() -> None:
    shelves.append(Shelf(torch.zeros(1)))
    holder = one_holder(lambda: shelves[0].in_slot)
    assert (holder.kind, holder.name.partition(" ")[0]) == (HolderKind.GLOBAL, "shelves[...].in_slot")
    assert f"{HERE}:{line_of('shelves: list')}" in holder.text
    assert f"Shelf.in_slot, {Path('tests/unit') / HERE}:{line_of('self.in_slot = value')}" in holder.name


def test_a_class_attribute() -> None:
    Shelf.on_class.append(torch.zeros(1))
    holder = one_holder(lambda: Shelf.on_class[0])
    assert (holder.kind, holder.name) == (HolderKind.CLASS, "Shelf.on_class[...]")


def test_keys_that_are_words_are_told_and_numbered_ones_are_not() -> None:
    table.update(last=torch.zeros(1), step_7=torch.zeros(2))
    assert one_holder(lambda: table["last"]).name == "table['last']"
    assert one_holder(lambda: table["step_7"]).name == "table[...]"


def test_a_running_variable_and_the_line_that_sets_it() -> None:
    keeps_it = {"value": torch.zeros(1)}
    holder = one_holder(lambda: keeps_it["value"])
    assert (holder.kind, holder.name) == (HolderKind.LOCAL, "keeps_it['value']")
    assert f"{HERE}:{line_of('keeps_it = {')}" in holder.text


def test_asking_for_holders_leaves_no_reference_behind() -> None:
    kept = [torch.zeros(1)]
    gone = weakref.ref(kept[0])
    gc.disable()
    try:
        assert holders_of(lambda: kept[0])
        kept.clear()
        assert gone() is None
    finally:
        gc.enable()


def test_a_dictionary_from_locals_is_left_to_the_user() -> None:
    kept = [torch.zeros(1)]
    mine = locals()
    assert holders_of(lambda: kept[0])
    assert mine["kept"] is kept


def test_a_suspended_generator() -> None:
    def batches() -> Iterator[Tensor]:
        cache = [torch.zeros(1)]
        yield cache[0]

    running = batches()
    holder = one_holder(lambda: next(running))
    assert (holder.kind, holder.name) == (HolderKind.LOCAL, "cache[...]")
    assert "the suspended generator" in holder.text and f":{line_of('cache = [')}" in holder.text


def test_a_frame_that_a_traceback_keeps() -> None:
    def fail() -> None:
        kept_by_the_error = [torch.zeros(1)]
        raise ValueError(kept_by_the_error[0].shape)

    with pytest.raises(ValueError, match="Size") as caught:
        fail()
    inner = caught.tb.tb_next
    assert inner is not None
    holder = one_holder(lambda: inner.tb_frame.f_locals["kept_by_the_error"][0])
    assert holder.name == "kept_by_the_error[...]"
    assert "traceback" in holder.text


def test_a_module_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    notes: Any = model[1]
    notes.seen = [torch.zeros(1)]
    assert one_holder(lambda: notes.seen[0], model).name.startswith("model.1.seen[...]")


def test_a_partial_and_a_default_argument() -> None:
    table["callback"] = functools.partial(print, torch.zeros(1))
    assert one_holder(lambda: table["callback"].args[0]).name.startswith("table['callback'].args[...]")

    def with_default(value: Tensor = torch.zeros(1)) -> Tensor:  # noqa: B008, it is meant to stay
        return value

    table["callback"] = with_default
    del with_default
    holder = one_holder(lambda: table["callback"].__defaults__[0])
    assert (holder.kind, holder.name) == (HolderKind.CLOSURE, "a default argument")
    assert "with_default()" in holder.text and "in table['callback']" in holder.text


ours_alone = threading.local()


def test_an_attribute_of_a_thread_is_named() -> None:
    ours_alone.kept = [torch.zeros(1)]
    holder = one_holder(lambda: ours_alone.kept[0])
    del ours_alone.kept
    assert (holder.kind, holder.name.partition(" ")[0]) == (HolderKind.GLOBAL, "ours_alone.kept[...]")


def test_memfits_own_references_are_told_after_those_of_the_model() -> None:
    memfits: Any = type("Slot", (), {"__module__": "memfit.homes.weights"})
    table.update(model=nn.Linear(2, 2), slots=[memfits() for _ in range(4)])
    table["model"].weight.history = [torch.zeros(1)]
    for index in range(4):
        setattr(table["slots"][index], f"parameter_{index}", table["model"].weight)
    found = holders_of(lambda: table["model"].weight.history[0], table["model"])
    assert [holder.kind for holder in found] == [HolderKind.MODULE, HolderKind.MEMFIT, HolderKind.MEMFIT]


def find_last(link: dict[str, Any]) -> object:
    return find_last(link["next"]) if "next" in link else link["value"]


def test_a_linked_list_is_one_name() -> None:
    first: dict[str, Any] = {}
    last = first
    for _ in range(5):
        last["next"] = {}
        last = last["next"]
    last["value"] = torch.zeros(1)
    table["chain"] = first
    del first, last
    assert one_holder(lambda: find_last(table["chain"])).name == "table['chain']['next']['value']"


# --- graphs ----------------------------------------------------------------------------------------------------------------------


def test_a_graph_is_read_without_unpacking() -> None:
    def unpack(packed: object) -> Tensor:
        raise AssertionError("unpacked")

    inputs = torch.ones(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: {"moved": t.detach().clone()}, unpack):
        hidden = inputs.exp()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        kept = hidden.square()
    contents = graph_of(kept)
    assert contents is not None and contents.name == "PowBackward0"
    assert [saved.shape for saved in contents.storages.values()] == [(8,)]
    assert len(contents.objects) == 1
    assert graph_of(inputs) is None


def test_a_graph_that_ran_backward_holds_nothing() -> None:
    kept = torch.ones(8, requires_grad=True).exp().square().sum()
    before = graph_of(kept)
    assert before is not None and before.storages
    kept.backward()
    after = graph_of(kept)
    assert after is not None and not after.storages


@pytest.mark.parametrize("how", ["plain", "packed", "function"])
def test_what_a_kept_graph_holds_is_told_of_the_tensor_that_keeps_it(how: str) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.copy = value.clone()
            return value * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 2

    class Packed:
        def __init__(self, value: Tensor) -> None:
            self.value = value.detach().clone()

    weight = torch.ones(64, requires_grad=True)
    metrics: list[Tensor] = []

    def each(_step: int) -> None:
        if how == "plain":
            metrics.append(weight.exp().square().sum())
        elif how == "function":
            metrics.append(Doubled.apply(weight).sum())  # type: ignore[union-attr]
        else:
            with torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.value):
                metrics.append(weight.exp().sum())

    leaks = {leak.holders[0].name: leak for leak in run(8, each).report().leaks}
    saved = leaks.pop("the autograd graph (SumBackward0) of metrics[...]")
    assert saved.shape == (64,) and saved.holders[0].kind is HolderKind.GRAPH
    assert list(leaks) == ["metrics[...]"]
    assert "detach" in leaks["metrics[...]"].text


# --- cycles ----------------------------------------------------------------------------------------------------------------------


class Parent:
    """Half of a cycle."""

    def __init__(self) -> None:
        self.child = Child(self)


class Child:
    """The other half."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.values = deque([torch.zeros(11)])


def make_recursive_closure() -> None:
    value = torch.zeros(11)

    def visit(depth: int) -> Tensor:
        return value if depth == 0 else visit(depth - 1)

    visit(1)


def make_stored_error() -> None:
    value = torch.zeros(11)
    try:
        raise KeyError(value.shape)
    except KeyError as error:
        stored = error
        assert stored is not None


@pytest.mark.parametrize(
    ("make", "name", "cycle"),
    [
        (Parent, "Child.values[...]", "Child.parent -> Parent.child -> Child"),
        (make_recursive_closure, "value", "visit()"),
        (make_stored_error, "value", "local 'stored' of make_stored_error()"),
    ],
)
def test_cycles_are_told_by_what_they_run_through(make: Callable[[], object], name: str, cycle: str) -> None:
    gc.collect()
    gc.disable()
    try:
        report = run(7, lambda step: make() and None).report()
    finally:
        gc.enable()
    assert len(report.leaks) == 1, report.text
    leak = report.leaks[0]
    assert leak.shape == (11,)
    assert leak.holders[0].name.startswith(name), report.text
    assert cycle in report.text


# --- callbacks -------------------------------------------------------------------------------------------------------------------


class Watcher(nn.Module):
    """Hooks its own layer in the ways that people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen = 0
        if how == "closure":
            self.layer.register_forward_hook(lambda module, inputs, output: self.count())
        elif how == "method":
            self.layer.register_forward_pre_hook(self.note)
        elif how == "partial":
            self.layer.register_full_backward_hook(functools.partial(self.note_all, "x"))
        elif how == "parameter":
            self.layer.weight.register_post_accumulate_grad_hook(lambda parameter: self.count())
        elif how == "state":
            self.layer.register_load_state_dict_post_hook(self.note)
        elif how == "weak":
            me: weakref.ref[Watcher] = weakref.ref(self)
            self.layer.register_forward_hook(lambda module, inputs, output: note_weakly(me))

    def count(self) -> None:
        self.seen += 1

    def note(self, module: nn.Module, inputs: object) -> None:
        self.seen += 1

    def note_all(self, word: str, module: nn.Module, inputs: object, outputs: object) -> None:
        self.seen += 1


def note_weakly(owner: weakref.ref[Watcher]) -> None:
    watcher = owner()
    if watcher is not None:
        watcher.count()


@pytest.mark.parametrize(
    ("how", "role", "line"),
    [
        ("closure", "a forward hook of 'layer'", "register_forward_hook(lambda module, inputs, output: self"),
        ("method", "a forward pre-hook of 'layer'", "def note(self"),
        ("partial", "a backward hook of 'layer'", "def note_all(self"),
        ("parameter", "a post-accumulate-grad hook of 'layer.weight'", "register_post_accumulate_grad_hook(lambda"),
        ("state", "a load-state-dict post-hook of 'layer'", "def note(self"),
    ],
)
def test_a_hook_over_its_owner_is_a_cycle_with_a_line(how: str, role: str, line: str) -> None:
    model = Watcher(how)
    (finding,) = inspect_callbacks(model)
    assert finding.is_cycle and finding.is_leak
    assert finding.role == role
    assert f"{HERE}:{line_of(line)}" in finding.text
    assert "Watcher" in finding.captured
    # The claim is true: the model does not die by reference count.
    gc.disable()
    try:
        alive = weakref.ref(model)
        del model
        assert alive() is not None
    finally:
        gc.enable()


def test_a_hook_with_a_weak_reference_is_no_finding() -> None:
    model = Watcher("weak")
    assert inspect_callbacks(model) == ()
    gc.disable()
    try:
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_a_model_that_hooks_its_own_blocks_is_found() -> None:
    findings = inspect_callbacks(small_models.Captured(8))
    assert {f.callback for f in findings} == {"bound method Captured._capture"}
    assert all(f.is_cycle for f in findings)


class Log:
    """An owner that holds no tensors."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, *_: object) -> None:
        self.lines.append("called")


def test_a_bound_method_of_a_small_object_is_told_and_no_leak() -> None:
    model, log = nn.Linear(2, 2), Log()
    model.register_forward_hook(log.write)
    (finding,) = inspect_callbacks(model)
    assert (finding.kind, finding.is_cycle, finding.held_bytes) == (CallbackKind.BOUND_METHOD, False, 0)
    assert not finding.is_leak


def test_a_list_is_a_finding_once_it_holds_tensors() -> None:
    outputs: list[object] = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    assert inspect_callbacks(model) == ()
    with torch.no_grad():
        model(torch.zeros(3, 2))
    (finding,) = inspect_callbacks(model)
    assert (finding.kind, finding.held_bytes, finding.is_leak) == (CallbackKind.CLOSURE, 3 * 2 * 4, True)
    assert "closure variable 'outputs' (a list)" in finding.captured


def test_hooks_of_torch_are_left_out() -> None:
    model = nn.Linear(2, 2)
    nn.utils.spectral_norm(model)  # keeps itself in a forward pre-hook
    assert model._forward_pre_hooks
    assert inspect_callbacks(model) == ()


class Trainer:
    """Holds its job, which holds its loss."""

    def __init__(self) -> None:
        self.job: object = None

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()


def test_a_callback_that_holds_its_keeper_is_a_cycle() -> None:
    trainer = Trainer()
    job = {"loss": trainer.loss}
    findings: tuple[CallbackFinding, ...] = inspect_callbacks(None, {"the loss": trainer.loss}, keeper=job)
    assert [(f.role, f.is_cycle) for f in findings] == [("given as the loss", False)]
    trainer.job = job
    (finding,) = inspect_callbacks(None, {"the loss": trainer.loss}, keeper=job)
    assert finding.is_cycle and f"{HERE}:{line_of('def loss(self')}" in finding.text


def test_plain_functions_are_no_finding() -> None:
    scale = 2.0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() * scale

    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda module, inputs, output: print(scale))
    assert inspect_callbacks(model, {"the loss": loss, "a sum": torch.sum}) == ()
