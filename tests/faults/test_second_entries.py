"""Public calls of a job that come while another one is under way: from signal handlers, threads, callbacks and forked children."""

from __future__ import annotations

import ast
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.job.inference import Inference
from memfit.job.job import Job
from memfit.job.lines import Lines

SOURCE = str(Path(memfit.__file__).parent)
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def weights_of(model: nn.Module) -> bytes:
    return b"".join(p.detach().clone().numpy().tobytes() for p in model.parameters())


class Plain:
    """The loop in plain PyTorch: its weights after each number of steps."""

    def __init__(self) -> None:
        self._parts = build()
        self._after = [weights_of(self._parts[0])]

    def after(self, steps: int) -> bytes:
        model, optimizer, scheduler = self._parts
        while len(self._after) <= steps:
            optimizer.zero_grad()
            loss(model, BATCH).backward()
            optimizer.step()
            scheduler.step()
            self._after.append(weights_of(model))
        return self._after[steps]


class Run:
    """A run in a store, with a scheduler."""

    def __init__(self, directory: Path, *, has_lines: bool, durability: Any = "step", plan: Plan | None = None) -> None:
        self.model, self.optimizer, self.scheduler = build()
        self.job = memfit.fit(
            self.model, self.optimizer, loss, BATCH, plan=Plan(blocks={"0": DISK, "2": DISK}) if plan is None else plan,
            store=directory, durability=durability, lines=has_lines, keep_gradients=True,
        )  # fmt: skip
        self.job.register("scheduler", self.scheduler)
        self.saves, self.marks = directory.parent, 0

    def step(self) -> None:
        """The body of the loop."""
        if self.job._assembly.setup.has_lines:
            with self.job.lines():
                loss(self.model, BATCH).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        else:
            self.job.step(BATCH)
        self.scheduler.step()

    def call_model(self) -> None:
        with torch.no_grad():
            self.model(BATCH)

    def weights(self) -> None:
        with self.job.weights():
            weights_of(self.model)

    def inference(self) -> None:
        with self.job.inference():
            self.model(BATCH)

    def together(self) -> None:
        with self.job.inference() as session:
            session.together([lambda: self.model(BATCH), lambda: self.model(BATCH)])

    def lines(self) -> None:
        with self.job.lines(), torch.no_grad():
            self.model(BATCH)

    def register(self) -> None:
        self.marks += 1
        self.job.register(f"generator {self.marks}", torch.Generator())

    def call(self, name: str) -> None:
        calls: dict[str, Callable[[], object]] = {
            "evaluate": lambda: self.job.evaluate(BATCH),
            "save": lambda: self.job.save(self.saves / "saved"),
            "commit": self.job.commit,
            "gradient": lambda: self.job.gradient("0.weight"),
            "set_limit": lambda: self.job.set_limit("8GiB"),
            "load": lambda: self.job.load(self.saves / "saved"),
            "close": self.job.close,
            "model": self.call_model,
            "only step": lambda: self.job.step(BATCH),
            "optimizer": self.optimizer.step,
        }
        act = calls[name] if name in calls else getattr(self, name)
        act()


OUTER = ["step", "evaluate", "save", "commit", "weights", "inference", "together", "gradient", "register"]
INNER = [*OUTER, "lines", "set_limit", "load", "close", "model", "only step", "optimizer"]


@contextmanager
def traced(at_line: Callable[[], None], but: str = "-") -> Iterator[None]:
    """Context in which a function runs before each line of memfit's in this thread, as a signal handler may.

    Args:
        at_line: runs.
        but: end of the name of a file without such lines.
    """

    def look(frame: FrameType, event: str, _value: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE) or name.endswith(but):
            return None
        if event == "line":
            at_line()
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(run: Run, name: str) -> int:
    count = [0]

    def note() -> None:
        count[0] += 1

    with traced(note):
        run.call(name)
    return count[0]


def meet(act: Callable[[], object], *, in_thread: bool) -> BaseException | None:
    """Makes a call, here or in a thread; returns its error."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001, judged by the caller
            errors.append(error)

    if in_thread:
        thread = threading.Thread(target=run, name="second", daemon=True)
        thread.start()
        thread.join(30.0)
        assert not thread.is_alive(), "the second entry hangs"
    else:
        run()
    return errors[0] if errors else None


# Calls of a part of a step are no whole steps of the loop: what they change when they come between two calls is theirs.
CHANGING = {"step", "only step", "lines", "optimizer", "close", "load"}


def check_pair(run: Run, plain: Plain, draw: random.Random, sizes: dict[str, int], examples: list[str]) -> bool:
    """Meets a drawn call with another one, and compares with plain PyTorch. Returns whether the job is as it should be to go on."""
    outer, inner, in_thread = draw.choice(OUTER), draw.choice(INNER), draw.random() < 0.4
    if outer not in sizes:
        sizes[outer] = lines_of(run, outer)
    at, line, met = draw.randrange(sizes[outer]), [0], list[BaseException | None]()
    before = run.job.steps
    named = f"{inner} at line {at} of {sizes[outer]} of {outer}, {'in a thread' if in_thread else 'in a handler'}"

    def look() -> None:
        line[0] += 1
        if line[0] == at + 1:
            met.append(meet(lambda: run.call(inner), in_thread=in_thread))

    error: BaseException | None = None
    # A thread that waits for the guard's own lock waits for the end of the test.
    with traced(look, "one_call.py" if in_thread else "-"):
        try:
            run.call(outer)
        except memfit.MemfitError as own:
            error = own
    was_refused = bool(met) and met[0] is not None
    if was_refused:
        assert isinstance(met[0], memfit.MemfitError), (named, met[0])
        examples.append(f"{named}: {met[0]}")
    if error is not None:
        # The call that came first went through whole: it was closed, say, before the other one began.
        assert not was_refused, (named, error)
        assert inner in CHANGING, (named, error)
    if (not was_refused and inner in CHANGING) or error is not None:
        return False
    assert run.job.steps == before + (outer == "step"), named
    run.step()
    steps = run.job.steps
    with run.job.weights():
        assert weights_of(run.model) == plain.after(steps), named
    return True


def sweep(directory: Path, *, draws: int, seed: int) -> list[str]:
    draw, plain, sizes, examples = random.Random(seed), Plain(), dict[tuple[bool, str], dict[str, int]](), list[str]()
    runs = 0
    run: Run | None = None
    key = (False, "step")
    for _ in range(draws):
        if run is None:
            runs += 1
            key = (draw.random() < 0.5, draw.choice(["disk", "device"]))
            place = directory / str(runs)
            place.mkdir()
            run = Run(place / "run", has_lines=key[0], plan=Plan() if key[1] == "device" else None)
            for _ in range(3):  # what is made with the first steps
                run.step()
        if not check_pair(run, plain, draw, sizes.setdefault(key, {}), examples):
            run.job.close(restore=False, commit=False)
            run = None
    if run is not None:
        steps = run.job.steps
        run.job.commit()
        run.job.close()
        again = Run(directory / str(runs) / "run", has_lines=key[0], plan=None)
        assert again.job.steps == steps
        again.job.close()
    return examples


# Errors that the sweep holds hold frames, and those what is local there.
hold_errors = pytest.mark.filterwarnings("ignore:memory leak")


@hold_errors
def test_a_second_entry_at_any_line_is_refused_in_words_or_goes_through_and_the_first_one_ends_as_it_should(
    tmp_path: Path,
) -> None:
    examples = sweep(tmp_path, draws=30, seed=7)
    assert len(examples) >= 5


@hold_errors
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_more_second_entries(seed: int, tmp_path: Path) -> None:
    sweep(tmp_path, draws=300, seed=seed)


# Handlers, threads, callbacks and children, as people write them


@pytest.fixture(name="run")
def make_run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run", has_lines=False, durability="exit")
    yield run
    if not run.job._is_closed:
        run.job.close(restore=False, commit=False)


def committed_step(run: Run) -> int | None:
    commits = run.job.commits
    assert commits is not None
    return commits.step


def test_a_commit_that_a_signal_asks_for_in_a_step_is_made_at_the_next_boundary_with_what_the_loop_did_until_then(
    run: Run, tmp_path: Path
) -> None:
    plain = Plain()
    before = signal.signal(signal.SIGTERM, lambda *_: run.job.commit())
    handle = run.job.on_update("2", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    try:
        run.step()
        handle.remove()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert committed_step(run) == 0
    run.job.step(BATCH)
    assert committed_step(run) == 1
    rate = plain_rate(1)
    run.job.close(restore=False, commit=False)
    again = Run(tmp_path / "run", has_lines=False)
    assert again.job.steps == 1
    assert again.optimizer.param_groups[0]["lr"] == rate
    again.step()
    with again.job.weights():
        assert weights_of(again.model) == plain.after(2)
    again.job.close()


def plain_rate(steps: int) -> float:
    _, optimizer, scheduler = build()
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


def test_signals_at_any_instant_commit_and_every_step_is_made(run: Run, tmp_path: Path) -> None:
    """As Slurm's SIGTERM, whose handler commits: it came in the middle of waits for locks that the commit takes too."""
    heard = [0]

    def commit(*_: object) -> None:
        heard[0] += 1
        run.job.commit()

    before = signal.signal(signal.SIGTERM, commit)
    draw, is_over = random.Random(3), threading.Event()

    def send() -> None:
        while not is_over.wait(draw.random() * 0.01):
            os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(30):
            run.job.step(BATCH)
    finally:
        is_over.set()
        sender.join()
        signal.signal(signal.SIGTERM, before)
    assert heard[0] >= 3
    assert (committed_step(run) or 0) >= 1
    run.job.close()
    again = Run(tmp_path / "run", has_lines=False)
    assert again.job.steps == 30
    again.job.close()


def test_a_commit_of_a_thread_inside_of_a_call_waits_for_the_boundary_and_inside_of_weights_too(run: Run) -> None:
    run.step()
    with run.job.weights():
        run.job.commit()
        assert committed_step(run) == 0
    run.step()
    assert committed_step(run) == 1
    run.job.on_update(None, lambda _: run.job.commit())  # in the thread of updates
    run.step()
    run.step()
    assert committed_step(run) == 3
    run.job.close()


def test_a_commit_that_was_asked_for_and_is_given_up_is_told(run: Run) -> None:
    run.step()
    with run.job.weights():
        run.job.commit()
    with pytest.warns(memfit.MemfitWarning, match="given up with step 1"):
        run.job.close(commit=False)


@pytest.mark.parametrize(
    "name", ["evaluate", "save", "only step", "weights", "inference", "gradient", "close", "model"]
)
def test_what_a_second_thread_asks_for_in_the_middle_of_a_step_is_refused_and_the_step_goes_on(
    run: Run, name: str
) -> None:
    met: list[BaseException | None] = []
    handle = run.job.on_update("0", lambda _: met.append(meet(lambda: run.call(name), in_thread=True)))
    run.step()
    handle.remove()
    run.step()
    assert all(isinstance(error, memfit.UsageError) for error in met)
    assert "in thread 'second' while job.step is under way in thread 'MainThread'" in str(met[0])
    with run.job.weights():
        assert weights_of(run.model) == Plain().after(2)


def test_calls_in_a_function_that_is_told_of_steps_are_calls_between_steps(run: Run, tmp_path: Path) -> None:
    run.job.on_step(lambda _: (run.job.evaluate(BATCH), run.job.save(tmp_path / "beside"), run.job.commit()))
    run.step()
    assert committed_step(run) == 1


@pytest.mark.parametrize("has_store", [True, False], ids=["store", "no store"])
@pytest.mark.parametrize("name", ["only step", "evaluate", "weights", "save", "close"])
def test_a_forked_child_is_told_whose_the_job_is(name: str, has_store: bool, tmp_path: Path) -> None:
    if has_store:
        run = Run(tmp_path / "run", has_lines=False)
        job, act = run.job, lambda: run.call(name)
    else:
        model, optimizer, _ = build()
        job = memfit.fit(model, optimizer, loss, BATCH, plan=Plan())
        acts: dict[str, Callable[[], object]] = {
            "only step": lambda: job.step(BATCH),
            "evaluate": lambda: job.evaluate(BATCH),
            "weights": lambda: job.weights().__enter__(),
            "save": lambda: job.save(tmp_path / "saved"),
            "close": job.close,
        }
        act = acts[name]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        error = meet(act, in_thread=False)
        os.write(write, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    told = os.read(read, 1000).decode()
    os.close(read)
    assert status == 0
    assert told.startswith("UsageError: job.")
    assert f"in a forked process: the worker threads live in process {os.getpid()}" in told
    job.step(BATCH)
    job.close()


def test_an_error_of_a_handler_at_any_line_leaves_the_guard_open(run: Run) -> None:
    """The job may be torn by it; it is never told to be in a call that is over."""
    interrupts, draw = run.job._runner.interrupts, random.Random(5)

    def many_calls() -> None:
        for _ in range(50):
            with interrupts.calls.enter("job.save"):
                pass
            with interrupts.working("job.step"):
                pass

    for _ in range(20):
        at, line = draw.randrange(1, 900), [0]

        def look(at: int = at, line: list[int] = line) -> None:
            line[0] += 1
            if line[0] == at:
                raise SystemExit

        with pytest.raises(SystemExit), traced(look):
            many_calls()
        assert not interrupts.calls.is_under_way


# Public calls that have no guard, each with its reason.
UNGUARDED = {
    "Job.__init__": "the job is made",
    "Job.holds": "reads whose the parameters are",
    "Job.on_step": "puts a function into a table",
    "Job.on_update": "puts a function into a table",
    "Job.live_view": "registers with `on_step`, which reads",
    "Job.proof": "reads what was measured",
    "Job.report": "reads the plan and the last measured step",
    "Job.census": "reads what lives",
    "Inference.__init__": "the session is made",
}


def public_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public methods of a job, its lines and a session of inference, but for properties."""
    for kind in (*Job.__mro__, Lines, Inference):
        if not kind.__module__.startswith("memfit."):
            continue
        module = sys.modules[kind.__module__]
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
        for node in body.body:
            is_property = isinstance(node, ast.FunctionDef) and any(
                isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list
            )
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not is_property:
                yield ("Job" if issubclass(Job, kind) else kind.__name__) + f".{node.name}", node


def test_every_public_call_of_a_job_of_lines_and_of_a_session_has_the_guard() -> None:
    without = {
        name
        for name, node in public_functions()
        if not any(
            isinstance(part, ast.Attribute) and part.attr in ("enter", "enter_if_free", "working", "_enter_model")
            for part in ast.walk(node)
        )
    }
    assert without == UNGUARDED.keys() - {"Job.__init__", "Inference.__init__"} | {"Job.lines"}
