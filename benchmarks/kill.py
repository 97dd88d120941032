"""Kills training runs with SIGKILL at random instants, takes each up again, and compares what it comes to with the run that nobody killed.

    .venv/bin/python benchmarks/kill.py                          # 300 kills: two models, six plans, three durabilities, both schemes
    .venv/bin/python benchmarks/kill.py --kills 20 --models tied-and-frozen --directory /dev/shm
    .venv/bin/python benchmarks/kill.py --signal INT             # Ctrl-C instead, which a process may answer

A run loads, trains, commits and saves; under the plan "replanned" it also meets its limit, twice, because the program takes memory that no plan knew
of, and plans anew; under the plan "reshaped" it plans anew, twice, because batches come that its plan does not fit. It is killed at any moment of that,
taken up again, killed again, until it ends by itself. Kills come, a third each, at a random moment of the clock; at a random moment of the process's
own CPU time, so that a busy machine does not move all of them into waiting; and at a random moment after a phase was entered (loading, opening the
store, the first commit, a step, a commit, a save, replanning, the step made again, closing), so that short phases are hit as often as long ones. The
last two are timers of the kernel in the process itself. After each kill:

- the store's manifest names a step that the durability promises, given the steps that the run had told of;
- a save that is there is whole;
- the next process goes on at exactly that step.

At the end of each run: weights, optimizer states, rates, averages and the next random number are, bit for bit, those of the run that was not killed, and no
file of a process that died is left. Kills are counted by the phase in which they came.

With `--signal INT` they are interrupts: the process ends by `KeyboardInterrupt` and nothing else, after it has closed its job without a commit, and the rest
holds as it stands. `benchmarks/interrupting.py` types Ctrl-C into the terminal of the command line.

Each process is forked from one that has loaded torch and done nothing else, so that a kill costs a second and not ten.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import small_run  # pyright: ignore[reportMissingImports]
from faults.tower import HARDWARE  # pyright: ignore[reportMissingImports]
from memfit.core.plan import Plan, UpdateTime

TOTAL = 6
DURABILITIES: tuple[Any, ...] = ("step", 2, "exit")
REPLANNED, RESHAPED = "replanned", "reshaped"
PLANNED_ANEW = (REPLANNED, RESHAPED)
ROWS = {"gpt2": 1024, "tied-and-frozen": 8192}
"""By model, of a batch under the plans that are replanned: activations are most of what it takes."""
_LIBRARIES = {"torch", "transformers", "safetensors", "tokenizers", "sympy", "scipy", "numpy", "memfit"}
STORE_FILES = frozenset({"homes-0.bin", "homes-1.bin", "state-0.bin", "state-1.bin", "manifest.json", "lock"})
INTERRUPTED = 130
PATIENCE_S = 300.0
"""A process that tells nothing for so long hangs."""
LEAVES = {2: 0.8, 4: 0.6}
"""From which step on the program leaves the job how much of what the first plan takes."""
GROWS = {2: 3, 4: 6}
"""From which step on batches have how many times as many rows."""


@dataclass(frozen=True)
class Scenario:
    """One kind of run."""

    model: str
    plan: str
    durability: Any
    scheme: str = "generations"

    def __str__(self) -> str:
        kept = f"durability {self.durability}" if self.scheme == "generations" else "journal"
        return f"{self.model}, {self.plan}, {kept}"


@dataclass(frozen=True)
class Program:
    """What a scenario's process runs: a plan, options of `fit`, rows of a batch.

    By step, the bytes that the program itself holds from there on (hogs), and how many times as many rows batches have (growth). A run with either begins
    under the plan and goes on under its own, which replanning may have changed.
    """

    plan: Plan
    options: dict[str, Any]
    rows: int = small_run.ROWS
    hogs: tuple[tuple[int, int], ...] = ()
    growth: tuple[tuple[int, int], ...] = ()

    def under(self, scheme: str) -> Program:
        """As a store of the scheme takes it."""
        if scheme != "journal":
            return self
        return replace(self, plan=replace(self.plan, update=UpdateTime.AFTER_BACKWARD))

    def rows_of(self, step: int) -> int:
        """Of the batch of a step."""
        return self.rows * max((times for first, times in self.growth if first <= step), default=1)


@dataclass
class Child:
    """A process that runs to its end or to its death, and what it told."""

    told: list[dict[str, Any]]
    status: int
    seconds: float
    cpu_s: float

    @property
    def was_killed(self) -> bool:
        """It did not end by itself: by SIGKILL, or by an interrupt that came through."""
        if os.WIFSIGNALED(self.status):
            return os.WTERMSIG(self.status) == signal.SIGKILL
        return os.WEXITSTATUS(self.status) == INTERRUPTED

    @property
    def steps(self) -> list[int]:
        """Steps made, as it told them: the one that it went on at first."""
        return [line["step"] for line in self.told if "step" in line]

    @property
    def phase(self) -> str:
        """Where it was last."""
        interrupted = next((line["interrupted in"] for line in self.told if "interrupted in" in line), None)
        return interrupted or next((line["at"] for line in reversed(self.told) if "at" in line), "starting")

    def visits(self) -> dict[str, list[float]]:
        """By phase, the seconds of each of its visits."""
        found: dict[str, list[float]] = {}
        for line in self.told:
            if "left" in line:
                found.setdefault(line["left"], []).append(line["s"])
        return found


@dataclass(frozen=True)
class Moment:
    """When to kill: after seconds of the clock, after seconds of the process's CPU time, or so long after a phase was entered for the n-th time."""

    wall_s: float | None = None
    cpu_s: float | None = None
    phase: str = ""
    visit: int = 0
    delay_s: float = 0.0
    signal: int = signal.SIGKILL


class Phases:
    """Tells where a process is, and arms the timer of a moment inside a phase."""

    def __init__(self, tell: Callable[[dict[str, Any]], None], moment: Moment) -> None:
        self._tell = tell
        self._moment = moment
        self._stack: list[str] = []
        self._visits: Counter[str] = Counter()

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """For as long as the context lasts, the process is in this phase."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._visits[phase] += 1
        self._stack.append(phase)
        self._tell({"at": phase})
        began = time.perf_counter()
        if (phase, self._visits[phase]) == (self._moment.phase, self._moment.visit):
            kill_after(time.CLOCK_MONOTONIC, self._moment.delay_s, self._moment.signal)
        try:
            yield
        except KeyboardInterrupt:
            if not self._is_interrupted:
                self._is_interrupted = True
                self._tell({"interrupted in": phase})
            raise
        finally:
            self._stack.pop()
            around = self._stack[-1] if self._stack else "the loop"
            self._tell({"left": phase, "s": time.perf_counter() - began, "at": around})

    def watch(self) -> None:
        """Puts itself around what memfit does, in this process."""
        from memfit.job import job, step_runner
        from memfit.runs import checkpointer, run_store

        def around(holder: Any, name: str, phase: Callable[[Any, dict[str, Any]], str]) -> None:
            inner = getattr(holder, name)

            def outer(*args: Any, **kwargs: Any) -> Any:
                with self.inside(phase(args[0] if args else None, kwargs)):
                    found = inner(*args, **kwargs)
                    self.job = found if isinstance(found, job.Job) else self.job
                    return found

            setattr(holder, name, outer)

        around(run_store.RunStore, "_open", lambda *_: "opening the store")
        around(
            run_store.RunStore, "prepare", lambda run, _: "opening the store" if run.is_resumed else "making the store"
        )
        around(
            checkpointer.RunCheckpointer,
            "_commit",
            lambda _, known: "the first commit" if known.get("is_first") else "committing",
        )
        around(
            step_runner.StepRunner,
            "_step",
            lambda *_: "the step made again" if self._visits["replanning"] > self._answered else "a step",
        )
        around(step_runner.StepRunner, "_make_tighter", lambda *_: "replanning")
        around(step_runner, "assemble_fitting", lambda *_: "replanning")
        around(job.Job, "save", lambda *_: "saving")
        around(job.Job, "close", lambda *_: "closing")
        around(import_module("memfit.job.fit"), "_begin", lambda *_: "planning and loading")

    _answered = 0
    _is_interrupted = False
    job: Any = None
    """What `fit` is about to give, or gave."""

    def note_step(self) -> None:
        """A step is through: what was replanned is."""
        self._answered = self._visits["replanning"]


def kill_after(clock: int, seconds: float, number: int) -> None:
    """From now on the kernel sends this process a signal when so much of a clock has passed, of real or of CPU time (timer_create(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    event = (ctypes.c_int * 16)(0, 0, number, 0)  # sigev_value, sigev_signo, SIGEV_SIGNAL
    timer = ctypes.c_void_p()
    if libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    whole, part = divmod(seconds, 1.0)
    when = (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9))  # no interval; first expiry
    if libc.timer_settime(timer, 0, ctypes.byref(when), None):
        raise OSError(ctypes.get_errno(), "timer_settime")


Work = Callable[[Callable[[dict[str, Any]], None], Moment], None]
"""What a process does: it tells lines, and may be killed at a moment."""


def start_child(work: Work, moment: Moment) -> tuple[int, int]:
    """Forks, and works there; the process, and where what it tells is read from."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    status = 1
    try:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        # Shells start what runs in their background with interrupts ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if moment.cpu_s is not None:
            kill_after(time.CLOCK_PROCESS_CPUTIME_ID, moment.cpu_s, moment.signal)
        work(lambda line: _write(writer, line), moment)
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException:  # noqa: BLE001, a child must not go on as its parent
        traceback.print_exc()
    finally:
        os._exit(status)


def run_child(work: Work, moment: Moment) -> Child:
    """Forks, works, and kills at the given moment, if the work is not done before."""
    began = time.perf_counter()
    child, reader = start_child(work, moment)
    text = b""
    deadline = None if moment.wall_s is None else began + moment.wall_s
    while True:
        left = PATIENCE_S if deadline is None else max(0.0, deadline - time.perf_counter())
        ready, _, _ = select.select([reader], [], [], left)
        if not ready and deadline is None:
            os.kill(child, signal.SIGUSR1)
            time.sleep(2)
            os.kill(child, signal.SIGKILL)
            raise SystemExit(f"it hangs ({moment}), its threads are told above; it had told {text.decode()[-2000:]}")
        if not ready:
            os.kill(child, moment.signal)
            deadline = None
            continue
        part = os.read(reader, 1 << 16)
        if not part:
            break
        text += part
    os.close(reader)
    whole = text.rpartition(b"\n")[0].decode()
    return ended(child, [json.loads(line) for line in whole.split("\n") if line], began)


def ended(child: int, told: list[dict[str, Any]], began: float) -> Child:
    """A process that has told all that it will tell, when it has ended."""
    _, status, usage = os.wait4(child, 0)
    return Child(told, status, time.perf_counter() - began, usage.ru_utime + usage.ru_stime)


def _write(descriptor: int, line: dict[str, Any]) -> None:
    os.write(descriptor, (json.dumps(line) + "\n").encode())


def scenarios_of(models: Sequence[str], plans: Sequence[str], schemes: Sequence[str]) -> list[Scenario]:
    """Every kind of run that there can be."""
    found = [
        Scenario(model, plan, durability)
        for durability in DURABILITIES
        for plan in plans
        for model in models
        if "generations" in schemes
        if plan not in PLANNED_ANEW or durability == "step"  # replanning needs the commit of the step before
    ]
    # A journal is for what rests on disk, and for updates after backward.
    return found + [
        Scenario(model, plan, "step", "journal")
        for plan in plans
        for model in models
        if "journal" in schemes and plan not in ("resident", *PLANNED_ANEW)
    ]


def programs_of(models: list[str], plans: list[str]) -> dict[tuple[str, str], Program]:
    """What is run, made in a process of its own: one that has run backward cannot be forked."""

    def work(tell: Callable[[dict[str, Any]], None], _: Moment) -> None:
        for model in models:
            for name, make in small_run.PLANS.items():
                if name in plans:
                    plan, options = make(small_run.profile(model))
                    known = {key: sorted(value) if isinstance(value, set) else value for key, value in options.items()}
                    tell({"model": model, "plan": name, "json": plan.to_json(), "options": known})
            for name in PLANNED_ANEW:
                if name in plans:
                    tell({"model": model, "plan": name, "peak": peak_of(model)})
            peak_of(model)  # whatever a step imports is imported now
        tell({"modules": sorted(sys.modules)})

    found = run_child(work, Moment())
    if found.status:
        raise SystemExit("the plans could not be made")
    # What a process imports while it trains takes longer than the training: it is here before the others are forked.
    for name in found.told.pop()["modules"]:
        if name.split(".", maxsplit=1)[0] in _LIBRARIES:
            with contextlib.suppress(ImportError):
                import_module(name)
    return {(line["model"], line["plan"]): program_of(line) for line in found.told}


def peak_of(model: str) -> int:
    """Bytes that a step takes with everything resident."""
    import memfit

    made = small_run.build(model)
    batch = small_run.draw(torch_generator(), ROWS[model])
    with memfit.fit(made, small_run.adamw(made), small_run.loss, batch, plan=Plan(), emulate_device=True) as job:
        job.step(batch)
        return job.step(batch).peak_bytes


def torch_generator() -> Any:
    import torch

    return torch.Generator()


def program_of(line: dict[str, Any]) -> Program:
    if "json" in line:
        return Program(Plan.from_json(line["json"]), line["options"])
    # Nothing is probed, so that each process plans the same.
    limit = int(1.2 * line["peak"])
    options = {"limit": limit, "emulate_device": True, "hardware": HARDWARE, "on_breach": "replan"}
    rows = ROWS[line["model"]]
    if line["plan"] == RESHAPED:
        return Program(Plan(), options, rows, growth=tuple(GROWS.items()))
    hogs = tuple((step, limit - int(share * line["peak"])) for step, share in LEAVES.items())
    return Program(Plan(), options, rows, hogs)


def training(scenario: Scenario, program: Program, directory: Path) -> Work:
    """A process of a run: it begins, or goes on, and trains to the end."""

    def work(tell: Callable[[dict[str, Any]], None], moment: Moment) -> None:
        import torch

        phases = Phases(tell, moment)
        phases.watch()
        warnings.filterwarnings("ignore", message="step .* (met the limit|does not fit|had been decided)")
        held: list[torch.Tensor] = []

        def before_step(step: int) -> None:
            wanted = max((nbytes for first, nbytes in program.hogs if first <= step), default=0)
            missing = wanted - sum(hog.nbytes for hog in held)
            if missing:
                held.append(torch.empty(missing, dtype=torch.uint8))

        def told(step: int) -> None:
            phases.note_step()
            tell({"step": step})

        with closing(phases), phases.inside("the loop"):
            result = small_run.train(
                scenario.model,
                None if (program.hogs or program.growth) and committed_step(directory) is not None else program.plan,
                directory / "run",
                total=TOTAL,
                durability=scenario.durability,
                scheme=scenario.scheme,
                save=directory / "saved",
                rows=program.rows,
                rows_of=program.rows_of,
                before_step=before_step,
                tell=told,
                **program.options,
            )
        tell({"digest": result.digest(), "first": result.first})

    return work


@contextmanager
def closing(phases: Phases) -> Iterator[None]:
    """As a program leaves that was interrupted: the job is closed, and the step that is not committed is given up."""
    try:
        yield
    except KeyboardInterrupt:
        if phases.job is not None:
            phases.job.close(restore=False, commit=False)
        raise


def committed_step(directory: Path) -> int | None:
    """What the manifest says; None where there is no committed run."""
    manifest = directory / "run" / "manifest.json"
    return json.loads(manifest.read_text())["body"]["step"] if manifest.exists() else None


def promised(durability: Any, before: int, made: int) -> range:
    """The steps that may be committed when a process that went on at `before` was killed and had told of `made` steps."""
    if durability == "exit":
        return range(before, before + 1) if made < TOTAL else range(before, TOTAL + 1)
    every = 1 if durability == "step" else durability
    # The step that was told last may not be sealed yet, and rarer commits lie up to N steps back.
    return range(max(before, made - every), made + 1)


def check_save(directory: Path) -> str | None:
    """What is wrong with a save that a kill may have interrupted."""
    saved = directory / "saved"
    if not saved.exists():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        for name in ("model.safetensors", "optimizer.safetensors"):
            with safe_open(saved / name, framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118, it is no dictionary
                    file.get_slice(key)
        steps = json.loads((saved / "memfit_state.json").read_text())["steps"]
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        return f"the save is not whole: {type(error).__name__}: {error}"
    return None if steps % 2 == 0 else f"the save is of step {steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--models", nargs="+", choices=list(small_run.MODELS), default=list(small_run.MODELS))
    every = [*small_run.PLANS, *PLANNED_ANEW]
    parser.add_argument("--plans", nargs="+", choices=every, default=every)
    parser.add_argument("--schemes", nargs="+", choices=("generations", "journal"), default=["generations", "journal"])
    parser.add_argument(
        "--directory", type=Path, default=None, help="where stores are made; the temporary directory by default"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the moments; drawn and printed by default")
    parser.add_argument("--signal", choices=("KILL", "INT"), default="KILL", help="what ends a process")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so long, with what was done")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    chance = random.Random(seed)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="memfit-kill-", dir=options.directory) as name:
        raise SystemExit(campaign(options, chance, Path(name)))


def campaign(options: argparse.Namespace, chance: random.Random, place: Path) -> int:
    programs = programs_of(options.models, options.plans)
    began = time.monotonic()
    scenarios = scenarios_of(options.models, options.plans, options.schemes)
    chance.shuffle(scenarios)
    whole: dict[Scenario, Child] = {}
    kills = runs = 0
    tally = Tally()
    while kills < options.kills and (options.seconds is None or time.monotonic() - began < options.seconds):
        scenario = scenarios[runs % len(scenarios)]
        runs += 1
        program = programs[scenario.model, scenario.plan].under(scenario.scheme)
        if scenario not in whole:
            whole[scenario] = reference(scenario, program, place / "whole")
        number = signal.Signals[f"SIG{options.signal}"]
        kills += one_run(scenario, program, whole[scenario], place / f"run-{runs}", chance, tally, number)
        print(f"{kills:4d} kills, {runs} runs: {scenario}", flush=True)
    what = "kills" if options.signal == "KILL" else "interrupts"
    if not kills:
        raise SystemExit("no kill came in the time that was given")
    print(
        f"{kills} {what} in {runs} runs over {len(whole)} kinds of run, {time.monotonic() - began:.0f} s: "
        f"every one was taken up at its last commit and ended bit for bit. {tally}"
    )
    return 0


@dataclass
class Tally:
    """Kills, by phase, by progress and by kind of moment."""

    phases: Counter[str] = field(default_factory=Counter[str])
    progress: Counter[str] = field(default_factory=Counter[str])
    moments: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        def words(found: Counter[str]) -> str:
            return ", ".join(f"{what} {count}" for what, count in found.most_common())

        return f"Killed in: {words(self.phases)}. After: {words(self.progress)}. By: {words(self.moments)}."


def reference(scenario: Scenario, program: Program, directory: Path) -> Child:
    """The run that nobody kills."""
    directory.mkdir()
    found = run_child(training(scenario, program, directory), Moment())
    shutil.rmtree(directory)
    if found.status:
        raise SystemExit(f"{scenario}: the run that nobody killed failed")
    replans = len(found.visits().get("replanning", []))
    if (scenario.plan in PLANNED_ANEW) != (replans > 0):
        raise SystemExit(f"{scenario}: it was replanned {replans} times")
    return found


def moment_of(whole: Child, attempt: int, chance: random.Random) -> Moment:
    """Drawn anywhere in a run; later moments as the run goes on, or it would never end."""
    reach = 1.1 + 0.2 * attempt
    match chance.randrange(3):
        case 0:
            return Moment(wall_s=chance.random() * whole.seconds * reach)
        case 1:
            return Moment(cpu_s=0.001 + chance.random() * whole.cpu_s * reach)
        case _:
            visits = whole.visits()
            phase = chance.choice(sorted(visits.keys() - {"the loop"}))
            # A process that goes on opens the store too, and makes fewer visits than the whole run.
            number = 1 + chance.randrange(len(visits[phase]) + attempt // 3)
            return Moment(phase=phase, visit=number, delay_s=1e-6 + chance.random() * 1.2 * max(visits[phase]))


def left_over(directory: Path, store: frozenset[str]) -> str | None:
    """What processes that died have left behind, once the run is through."""
    found = {path.name for path in directory.iterdir()} - {"run", "saved"}
    inside = {path.name for path in (directory / "run").iterdir()} - store
    return f"left behind: {sorted(found | inside)}" if found | inside else None


def one_run(
    scenario: Scenario,
    program: Program,
    whole: Child,
    directory: Path,
    chance: random.Random,
    tally: Tally,
    number: int,
) -> int:
    """Kills and takes up until a process ends by itself; the number of kills."""
    directory.mkdir()
    kills = 0
    for attempt in range(1000):
        before = committed_step(directory)
        moment = replace(moment_of(whole, attempt, chance), signal=number)
        found = run_child(training(scenario, program, directory), moment)
        told = f"{scenario}, attempt {attempt}, {moment}: told {found.told}, committed before {before}, now {committed_step(directory)}"
        if found.steps and found.steps[0] != (before or 0):
            raise SystemExit(f"{told}: it did not go on at its last commit")
        if found.was_killed:
            kills += 1
            after = committed_step(directory)
            made = found.steps[-1] if found.steps else before or 0
            tally.phases[found.phase] += 1
            tally.progress["no step told" if not found.steps else f"{made} of {TOTAL} steps"] += 1
            tally.moments["the phase" if moment.phase else "the clock" if moment.cpu_s is None else "CPU time"] += 1
            is_fine = after in promised(scenario.durability, before or 0, made) or (after is None and not found.steps)
            if not is_fine:
                raise SystemExit(f"{told}: not what the durability promises")
            problem = check_save(directory)
            if problem is not None:
                raise SystemExit(f"{told}: {problem}")
            continue
        if found.status:
            raise SystemExit(f"{told}: it ended with status {found.status}")
        if found.told[-1]["digest"] != whole.told[-1]["digest"]:
            raise SystemExit(f"{told}: it came to something else than the run that nobody killed")
        break
    problem = left_over(directory, STORE_FILES)
    if problem is not None:
        raise SystemExit(f"{scenario}: {problem}")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
    return kills


if __name__ == "__main__":
    main()
