"""Refusals that name a cure: each cure that is listed here is followed, and works.

Refusals are collected from the source. A new one has a case here or in a module named `advice_of_*.py`, or a line in
`advice_not_followed.txt`, which only gets shorter.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import memfit
from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from unit.advice import BATCH, CASES, ON_DISK, Scene, follows, loss

SOURCE = Path(memfit.__file__).parent
# Packages and files whose refusals are followed.
ROOMS = [
    "engine",
    "homes",
    "tensors",
    "job",
    "trace",
    "optimizers",
    "planner",
    "integrations",
    "mesh",
    "machine/described.py",
    "machine/hard_limit.py",
    "machine/limits_of_process.py",
    "machine/machine.py",
    "machine/measuring_rates.py",
    "machine/probing.py",
    "files/weight_sources.py",
    "runs/exporting.py",
    "runs/saving.py",
]
# Those of recipes, of the torch-free search and of the parameter server are not.
PASSED_OVER = ("integrations/recipes/", "planner/search/", "job/push_clocks.py", "job/served.py", "job/server.py")
ERRORS = [
    "UsageError",
    "UnsupportedError",
    "PlanError",
    "DoesNotFitError",
    "AwayError",
    "LimitBreachError",
    "TornStepError",
    "AstrayError",
    "UncuttableError",
    "DisagreementError",
    "PeerError",
    "RuntimeError",
]
# Callables that make a refusal -> the position of its message.
MESSAGES = {**dict.fromkeys(ERRORS, 0), "limit_breaches": 1}
CURE = re.compile(
    r"(?:^|[.:;,(?] ?|\bor |\band |\bto )(?:use|call|try|give|run|return|leave|make|write|plan|change|close|hold|note|train|fit|load|save|build|name|set|put|take|"
    r"cut|pass|raise|move|keep|say|repeat|clone|clip|let|begin|go|remove|replace|convert|skip|pad|rename|start|initialize)\b",
    re.IGNORECASE,
)
NOT_FOLLOWED = Path(__file__).with_name("advice_not_followed.txt")

for module in sorted(Path(__file__).parent.glob("advice_of_*.py")):
    importlib.import_module(f"unit.{module.stem}")


def texts(node: ast.AST, constants: dict[str, str]) -> str:
    found = (
        n.value if isinstance(n, ast.Constant) else constants.get(n.id, "") if isinstance(n, ast.Name) else ""
        for n in ast.walk(node)
    )
    return "".join(text for text in found if isinstance(text, str))


def constants_of(tree: ast.Module) -> dict[str, str]:
    """Texts of a module's constants, and of what its functions return."""
    found = {
        node.name: "".join(texts(one, {}) for one in ast.walk(node) if isinstance(one, ast.Return))
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = texts(node.value, {})
    return found


def named_constants(tree: ast.Module, trees: dict[str, ast.Module]) -> dict[str, str]:
    """Texts of the constants of a module, and of those that it imports."""
    imported = {
        alias.name: constants_of(trees[node.module]).get(alias.name, "")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in trees
        for alias in node.names
    }
    return {**imported, **constants_of(tree)}


def refusals() -> Iterator[str]:
    """Yields each refusal that names a cure: its file, and the beginning of its text without what is filled in."""
    roots = [SOURCE / room for room in ROOMS]
    files = [path for each in roots for path in ([each] if each.is_file() else sorted(each.rglob("*.py")))]
    paths = [path.relative_to(SOURCE) for path in files]
    paths = [path for path in paths if not path.as_posix().startswith(PASSED_OVER)]
    names = {path: ".".join(("memfit", *path.with_suffix("").parts)) for path in paths}
    trees = {names[path]: ast.parse((SOURCE / path).read_text(encoding="utf-8")) for path in paths}
    for path in paths:
        tree = trees[names[path]]
        constants = named_constants(tree, trees)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in MESSAGES
                and node.args
            ):
                text = texts(node.args[MESSAGES[node.func.id]], constants)
                if CURE.search(text):
                    yield f"{path.as_posix()}: {' '.join(text.split())[:400]}"


def penalized(model: nn.Module) -> Tensor:
    batch = BATCH.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@follows("engine/driven_run.py", "a gradient of a gradient was asked for")
def a_penalty_trains_in_plain_pytorch(s: Scene) -> None:
    job = s.fit(lines=True)
    with job.lines():
        s.refused(lambda: penalized(s.model))
    job.close()
    penalized(s.model).backward()
    s.optimizer.step()
    s.trains_as(lambda model: penalized(model).backward())


def perturbed(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(model, batch), batch)
    return loss(model, (batch + 0.1 * slope.sign()).detach())


@follows("trace/trace_run.py", "the loss runs a backward of its own")
def a_backward_whose_gradients_are_numbers_runs_in_a_loop(s: Scene) -> None:
    for lines in (False, True):
        s.refused(lambda lines=lines: s.fit(perturbed, lines=lines))
    s.begin()
    with s.fit(lines=True) as job, job.lines():
        perturbed(s.model, BATCH).backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.trains_as(lambda model: perturbed(model, BATCH).backward())


@follows("tensors/one_call.py", "which is under way in this thread")
def a_wish_is_fulfilled_at_the_end_of_the_body(s: Scene) -> None:
    job, wishes = s.fit(), list[bool]()

    def saving(model: nn.Module, batch: Tensor) -> Tensor:
        if jobs:
            s.refused(lambda: jobs[0].save(s.directory / "saved"))
            wishes.append(True)
        return loss(model, batch)

    job.close()
    jobs: list[memfit.Job] = []
    jobs.append(s.fit(saving))
    jobs[0].step(BATCH)
    assert wishes
    assert jobs[0].save(s.directory / "saved").directory.is_dir()


@follows("tensors/one_call.py", "one call at a time")
def a_lock_around_both_calls_lets_both_go_through(s: Scene) -> None:
    job, errors, lock = s.fit(), list[str](), threading.Lock()

    def evaluate() -> None:
        try:
            job.evaluate(BATCH)
        except memfit.MemfitError as error:
            errors.append(str(error))

    def meet(_: object) -> None:
        other = threading.Thread(target=evaluate)
        other.start()
        other.join()

    handle = job.on_update("0", meet)
    job.step(BATCH)
    handle.remove()
    s.words = errors.pop()
    errors.clear()

    def locked() -> None:
        with lock:
            evaluate()

    thread = threading.Thread(target=lambda: [locked() for _ in range(5)])
    thread.start()
    for _ in range(5):
        with lock:
            job.step(BATCH)
    thread.join()
    assert not errors


@follows("tensors/one_call.py", "in a forked process")
def a_child_has_a_job_of_its_own(s: Scene) -> None:
    job = s.fit()
    read, write = os.pipe()
    if os.fork() == 0:
        code = 1
        try:
            s.refused(lambda: job.step(BATCH))
            os.write(write, s.words.encode())
            s.begin()
            with memfit.fit(s.model, s.optimizer, loss, BATCH) as own:
                code = 0 if own.step(BATCH).is_finite else 2
        finally:
            os._exit(code)
    os.close(write)
    s.words = os.read(read, 2000).decode()
    os.close(read)
    _, status = os.wait()
    assert status == 0


@follows("job/saved_job.py", "job.weights() is still open")
def a_step_behind_weights(s: Scene) -> None:
    job = s.fit(plan=ON_DISK)
    with job.weights():
        s.refused(lambda: job.step(BATCH))
    assert job.step(BATCH).is_finite


@follows("job/job.py", "job.close() is called inside of")
def a_close_behind_inference(s: Scene) -> None:
    job = s.fit()
    with job.inference():
        s.refused(job.close)
    job.close()
    assert "closed" in repr(job)


@follows("job/job.py", "job.lines() is still open where")
def a_step_behind_lines(s: Scene) -> None:
    job = s.fit(lines=True)
    with job.lines():
        s.refused(lambda: job.step(BATCH))
    assert job.step(BATCH).is_finite


@follows("job/lines.py", "job.lines() is open already")
def lines_behind_lines(s: Scene) -> None:
    job = s.fit(lines=True)
    with job.lines():
        s.refused(lambda: job.lines().__enter__())
    with job.lines() as lines:
        loss(s.model, BATCH).backward()
        s.optimizer.step()
    assert lines.steps == 1


@follows("job/lines.py", "the job was planned for job.step")
def a_job_for_lines(s: Scene) -> None:
    job = s.fit()
    s.refused(lambda: job.lines().__enter__())
    job.close()
    job = s.fit(lines=True)
    with job.lines():
        loss(s.model, BATCH).backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
    assert job.steps == 1


@follows("job/lines.py", "these lines call a part of the model")
def parts_of_a_model_inside_of_a_forward(s: Scene) -> None:
    calls = (CallPlan(saved=Saved.RECOMPUTE),) * 2

    def by_parts(model: Any) -> None:
        model[2](model[1](model[0](BATCH))).square().mean().backward()

    job = s.fit(lines=True, plan=Plan(calls=calls))
    with job.lines() as lines:
        s.refused(lambda: by_parts(s.model))
        with lines.forward(BATCH):
            found = loss(s.model, BATCH)
        found.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
    job.close()
    s.trains_as(lambda model: loss(model, BATCH).backward())
    s.begin()
    kept = s.fit(lines=True, plan=Plan())
    with kept.lines():
        by_parts(s.model)
        s.optimizer.step()
        s.optimizer.zero_grad()
    kept.close()
    s.trains_as(by_parts)


@follows("homes/gradient_standins.py", "Call zero_grad() and loss.backward() before")
def a_step_behind_a_backward(s: Scene) -> None:
    job = s.fit(lines=True, plan=ON_DISK)
    with job.lines() as lines:
        loss(s.model, BATCH).backward()
        s.optimizer.step()
        s.refused(s.optimizer.step)
        s.optimizer.zero_grad()
        loss(s.model, BATCH).backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        assert lines.steps == 2


@follows("job/job_facts.py", "fit(keep_gradients=True) keeps them readable")
def gradients_that_are_kept(s: Scene) -> None:
    job = s.fit()
    s.refused(lambda: job.gradient("0.weight"))
    job.close()
    job = s.fit(keep_gradients=True)
    job.step(BATCH)
    assert job.gradient("0.weight") is not None


@follows("job/job_facts.py", "memfit.fit makes a new job")
def a_new_job(s: Scene) -> None:
    job = s.fit()
    job.close()
    s.refused(lambda: job.step(BATCH))
    assert s.fit().step(BATCH).is_finite


@follows("job/watching.py", "give None instead of a name")
def all_blocks_watched(s: Scene) -> None:
    job, seen = s.fit(), list[str]()
    s.refused(lambda: job.on_update("no such block", print))
    job.on_update(None, lambda piece: seen.append(piece.name))
    job.step(BATCH)
    assert {"0.weight", "2.bias"} <= {*seen}


@follows("planner/first_batch.py", "gives its batches once")
def a_batch_that_is_drawn_is_trained_on_first(s: Scene) -> None:
    batches = (BATCH + number for number in range(3))
    s.refused(lambda: memfit.first_batch(batches))
    sample = next(batches)
    assert torch.equal(sample, BATCH)
    with memfit.fit(s.model, s.optimizer, loss, sample) as job:
        for batch in (sample, *batches):
            job.step(batch)
        assert job.steps == 3


@follows("planner/first_batch.py", "gives no batches")
def a_loader_over_data_that_is_there(s: Scene) -> None:
    s.refused(lambda: memfit.first_batch([]))
    assert memfit.first_batch([BATCH]) is BATCH


@follows("trace/batch.py", "which gives batches, and not a batch")
def each_batch_of_a_loader(s: Scene) -> None:
    job, loader = s.fit(), torch.utils.data.DataLoader(BATCH, batch_size=4)  # type: ignore[arg-type]
    s.refused(lambda: job.step(loader))
    for batch in loader:
        assert job.step(batch).is_finite


@follows("trace/batch.py", "this is a dataset")
def batches_of_a_datasets_loader(s: Scene) -> None:
    data = torch.utils.data.TensorDataset(BATCH)
    s.refused(lambda: memfit.fit(s.model, s.optimizer, loss, data))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    with memfit.fit(s.model, s.optimizer, lambda model, batch: loss(model, batch[0]), loader) as job:
        for batch in loader:
            assert job.step(batch).is_finite


@follows("job/torch_states.py", "build the model as it was")
def weights_of_the_same_model(s: Scene) -> None:
    state = {name: values.clone() for name, values in s.model.state_dict().items()}
    job = s.fit(plan=ON_DISK)
    job.step(BATCH)
    s.refused(lambda: job.give_weights({**state, "0.weight": torch.zeros(2)}))
    job.give_weights(state)
    with job.weights():
        assert all(torch.equal(p, state[name]) for name, p in s.model.named_parameters())


@follows("optimizers/shape_trials.py", "there is no memory for one like")
def an_optimizer_that_reads_values_of_a_whole_parameter(s: Scene) -> None:
    class Reading(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if len(p.grad.nonzero()) and p.shape == (8, 8):  # the true shape, with numbers
                    raise torch.OutOfMemoryError("as under a limit")

    s.optimizer = Reading(s.model.parameters(), {"lr": 0.1})
    s.refused(s.fit)
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
    s.fit().step(BATCH)


@follows("trace/blocks.py", "each process of a mesh has a part")
def a_model_that_is_divided_over_a_mesh(s: Scene) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        s.model[0].weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh))
        s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)
        s.refused(s.fit)
        s.begin()  # whole, before it is divided
        s.fit().step(BATCH)
    finally:
        dist.destroy_process_group()


def case_of(refusal: str) -> tuple[str, str] | None:
    path, text = refusal.split(": ", 1)
    return next((key for key in CASES if key[0] == path and key[1] in text), None)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, id=case.__name__, marks=[pytest.mark.compiles] if "compiled" in case.__name__ else [])
        for key, case in CASES.items()
    ],
)
def test_the_cure_that_a_refusal_names_works(key: tuple[str, str], tmp_path: Path) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        CASES[key](scene)
    assert key[1] in scene.words


def test_a_refusal_that_names_a_cure_has_a_case_or_is_a_known_debt() -> None:
    debt = {line for line in NOT_FOLLOWED.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}
    found = [*refusals()]
    open_ones = {one.split(": ", 1)[1] for one in found if case_of(one) is None}
    assert open_ones - debt == set(), "follow the cure in a case"
    assert debt - open_ones == set(), "take these lines out of advice_not_followed.txt"
    assert len(found) > 150
