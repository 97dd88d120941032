"""Kills training runs with SIGKILL at random instants, takes each up again, and compares what it comes to with the run that nobody killed.

    .venv/bin/python benchmarks/kill.py                          # 300 kills: two models, four plans, three durabilities
    .venv/bin/python benchmarks/kill.py --kills 20 --models tied-and-frozen --directory /dev/shm

A run loads, trains, commits and saves; it is killed at any moment of that, taken up again, killed again, until it ends by itself. Half of the kills
come at a random moment of the clock, half at a random moment of the process's own CPU time (a timer of the kernel), so that a busy machine does not
move all of them into waiting. After each kill:

- the store's manifest names a step that the durability promises, given the steps that the run had told of;
- a save that is there is whole;
- the next process goes on at exactly that step.

At the end of each run: weights, optimizer states, rates, averages and the next random number are, bit for bit, those of the run that was not killed.

Each process is forked from one that has loaded torch and done nothing else, so that a kill costs a second and not ten.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import small_run  # pyright: ignore[reportMissingImports]
from memfit.core.plan import Plan

TOTAL = 6
DURABILITIES: tuple[Any, ...] = ("step", 2, "exit")


@dataclass(frozen=True)
class Scenario:
    """One kind of run."""

    model: str
    plan: str
    durability: Any

    def __str__(self) -> str:
        return f"{self.model}, {self.plan}, durability {self.durability}"


@dataclass
class Child:
    """A process that runs to its end or to its death, and what it told."""

    told: list[dict[str, Any]]
    status: int
    seconds: float
    cpu_s: float

    @property
    def was_killed(self) -> bool:
        """It did not end by itself."""
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    @property
    def steps(self) -> list[int]:
        """Steps made, as it told them: the one that it went on at first."""
        return [line["step"] for line in self.told if "step" in line]


def kill_after_cpu(seconds: float) -> None:
    """From now on the kernel kills this process when it has used so much CPU time (timer_create(2), CLOCK_PROCESS_CPUTIME_ID)."""
    libc = ctypes.CDLL(None, use_errno=True)
    event = (ctypes.c_int * 16)(0, 0, signal.SIGKILL, 0)  # sigev_value, sigev_signo, SIGEV_SIGNAL
    timer = ctypes.c_void_p()
    if libc.timer_create(time.CLOCK_PROCESS_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    whole, part = divmod(seconds, 1.0)
    when = (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9))  # no interval; first expiry
    if libc.timer_settime(timer, 0, ctypes.byref(when), None):
        raise OSError(ctypes.get_errno(), "timer_settime")


def run_child(
    work: Callable[[Callable[[dict[str, Any]], None]], None], *, wall_s: float | None, cpu_s: float | None
) -> Child:
    """Forks, works, and kills at the given moment, if the work is not done before."""
    reader, writer = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        try:
            if cpu_s is not None:
                kill_after_cpu(cpu_s)
            work(lambda line: _write(writer, line))
            status = 0
        except BaseException:  # noqa: BLE001, a child must not go on as its parent
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    text = b""
    deadline = None if wall_s is None else began + wall_s
    while True:
        left = None if deadline is None else max(0.0, deadline - time.perf_counter())
        ready, _, _ = select.select([reader], [], [], left)
        if not ready:
            os.kill(child, signal.SIGKILL)
            deadline = None
            continue
        part = os.read(reader, 1 << 16)
        if not part:
            break
        text += part
    os.close(reader)
    _, status, usage = os.wait4(child, 0)
    whole = text.rpartition(b"\n")[0].decode()
    told = [json.loads(line) for line in whole.split("\n") if line]
    return Child(told, status, time.perf_counter() - began, usage.ru_utime + usage.ru_stime)


def _write(descriptor: int, line: dict[str, Any]) -> None:
    os.write(descriptor, (json.dumps(line) + "\n").encode())


def plans_of(models: list[str]) -> dict[tuple[str, str], tuple[Plan, dict[str, Any]]]:
    """The plans, made in a process of their own: one that has run backward cannot be forked."""

    def work(tell: Callable[[dict[str, Any]], None]) -> None:
        for model in models:
            for name, make in small_run.PLANS.items():
                plan, options = make(small_run.profile(model))
                known = {key: sorted(value) if isinstance(value, set) else value for key, value in options.items()}
                tell({"model": model, "plan": name, "json": plan.to_json(), "options": known})

    found = run_child(work, wall_s=None, cpu_s=None)
    if found.status:
        raise SystemExit("the plans could not be made")
    return {(line["model"], line["plan"]): (Plan.from_json(line["json"]), line["options"]) for line in found.told}


def training(scenario: Scenario, plan: Plan, options: dict[str, Any], directory: Path) -> Callable[..., None]:
    def work(tell: Callable[[dict[str, Any]], None]) -> None:
        result = small_run.train(
            scenario.model,
            plan,
            directory / "run",
            total=TOTAL,
            durability=scenario.durability,
            save=directory / "saved",
            tell=lambda step: tell({"step": step}),
            **options,
        )
        tell({"digest": result.digest(), "first": result.first})

    return work


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
        steps = json.loads((saved / "trainer_state.json").read_text())["steps"]
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        return f"the save is not whole: {type(error).__name__}: {error}"
    return None if steps % 2 == 0 else f"the save is of step {steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--models", nargs="+", choices=list(small_run.MODELS), default=list(small_run.MODELS))
    parser.add_argument("--plans", nargs="+", choices=list(small_run.PLANS), default=list(small_run.PLANS))
    parser.add_argument(
        "--directory", type=Path, default=None, help="where stores are made; the temporary directory by default"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the moments; drawn and printed by default")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so long, with what was done")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    chance = random.Random(seed)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="memfit-kill-", dir=options.directory) as name:
        raise SystemExit(campaign(options, chance, Path(name)))


def campaign(options: argparse.Namespace, chance: random.Random, place: Path) -> int:
    began = time.monotonic()
    plans = plans_of(options.models)
    scenarios = [
        Scenario(model, plan, durability)
        for durability in DURABILITIES
        for plan in options.plans
        for model in options.models
    ]
    chance.shuffle(scenarios)
    whole: dict[Scenario, Child] = {}
    kills = runs = 0
    where: Counter[str] = Counter()
    while kills < options.kills and (options.seconds is None or time.monotonic() - began < options.seconds):
        scenario = scenarios[runs % len(scenarios)]
        runs += 1
        plan, known = plans[scenario.model, scenario.plan]
        if scenario not in whole:
            whole[scenario] = reference(scenario, plan, known, place / "whole")
        kills += one_run(scenario, plan, known, whole[scenario], place / f"run-{runs}", chance, where)
        print(f"{kills:4d} kills, {runs} runs: {scenario}", flush=True)
    print(
        f"{kills} kills in {runs} runs over {len(whole)} kinds of run, {time.monotonic() - began:.0f} s: every one was taken up at its last commit and ended "
        f"bit for bit. Killed {', '.join(f'{count} times {what}' for what, count in where.most_common())}."
    )
    return 0


def reference(scenario: Scenario, plan: Plan, known: dict[str, Any], directory: Path) -> Child:
    """The run that nobody kills."""
    directory.mkdir()
    found = run_child(training(scenario, plan, known, directory), wall_s=None, cpu_s=None)
    shutil.rmtree(directory)
    if found.status:
        raise SystemExit(f"{scenario}: the run that nobody killed failed")
    return found


def one_run(
    scenario: Scenario,
    plan: Plan,
    known: dict[str, Any],
    whole: Child,
    directory: Path,
    chance: random.Random,
    where: Counter[str],
) -> int:
    """Kills and takes up until a process ends by itself; the number of kills."""
    directory.mkdir()
    kills = 0
    for attempt in range(1000):
        before = committed_step(directory)
        # Later moments as the run goes on, or it would never end.
        reach = 1.1 + 0.2 * attempt
        wall_s = cpu_s = None
        if chance.random() < 0.5:
            wall_s = chance.random() * whole.seconds * reach
        else:
            cpu_s = 0.001 + chance.random() * whole.cpu_s * reach
        found = run_child(training(scenario, plan, known, directory), wall_s=wall_s, cpu_s=cpu_s)
        told = f"{scenario}, attempt {attempt}: told {found.told}, committed before {before}, now {committed_step(directory)}"
        if found.steps and found.steps[0] != (before or 0):
            raise SystemExit(f"{told}: it did not go on at its last commit")
        if found.was_killed:
            kills += 1
            after = committed_step(directory)
            made = found.steps[-1] if found.steps else before or 0
            where["while loading" if not found.steps else f"after {made} of {TOTAL} steps"] += 1
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
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
    return kills


if __name__ == "__main__":
    main()
