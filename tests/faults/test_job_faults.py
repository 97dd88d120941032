"""A job whose disk fails, whose user presses Ctrl-C, or whose start is cut short: told clearly, nothing half-written, nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import plans
from faults.tower import Batch, Tower, adamw, loss
from memfit.core.errors import MemfitError, StoreError, StoreInUseError, TornStepError, UsageError
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.runs.exporting import verify_run
from memfit.store import FileOperations

TOWER = Tower(width=128)  # hidden values of 64 KiB, from which on saved tensors leave the device
build, batch, profile, after_plain_steps = TOWER.build, TOWER.batch, cache(TOWER.profile), TOWER.after_plain_steps
OFFLOAD = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)
ARGUMENTS_AWAY = CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.DISK)


def atomic(found: Profile) -> Plan:
    return Plan(blocks=plans.on_disk(found), is_atomic=True)


def atomic_after_backward(found: Profile) -> Plan:
    return Plan(
        blocks=plans.on_disk(found),
        calls=plans.fates(found, OFFLOAD),
        update=UpdateTime.AFTER_BACKWARD,
        is_atomic=True,
    )


def atomic_recomputed(found: Profile) -> Plan:
    return Plan(blocks=plans.on_disk(found), calls=plans.fates(found, ARGUMENTS_AWAY), is_atomic=True, prefetch=0)


def in_place(found: Profile) -> Plan:
    return Plan(blocks=plans.on_disk(found))


def in_place_after_backward(found: Profile) -> Plan:
    return Plan(blocks=plans.on_disk(found), calls=plans.fates(found, OFFLOAD), update=UpdateTime.AFTER_BACKWARD)


@dataclass
class Disk:
    """The disk under all stores of this process: counts its calls, and fails them from a given one on."""

    counts: dict[str, int] = field(default_factory=lambda: {"pwrite": 0, "pread": 0})
    breaks: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def break_from(self, call: str, number: int, *, after_calls: int = 0) -> None:
        with self.lock:
            self.breaks[call] = (number, self.counts[call] + after_calls)

    def mend(self) -> None:
        with self.lock:
            self.breaks.clear()

    def note(self, call: str) -> None:
        with self.lock:
            self.counts[call] += 1
            number, first = self.breaks.get(call, (0, 0))
            fails = number and self.counts[call] > first
        if fails:
            raise OSError(number, os.strerror(number))


@pytest.fixture(name="disk")
def breakable_disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()

    def counted(call: str) -> Callable[..., Any]:
        plain = getattr(FileOperations, call)

        def run(operations: FileOperations, *arguments: Any) -> Any:
            disk.note(call)
            return plain(operations, *arguments)

        return run

    for call in disk.counts:
        monkeypatch.setattr(FileOperations, call, counted(call))
    return disk


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def memfit_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("memfit"))


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """As in a terminal: a shell starts what runs in its background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


pytestmark = pytest.mark.usefixtures("older_objects_are_passed_over")  # each test collects at its end


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """No thread, descriptor or file outlives a job, however its steps ended."""
    files, threads = open_files(), memfit_threads()
    yield
    gc.collect()
    # What an earlier test of this process left to the collector may be gone by now.
    assert not set(memfit_threads()) - set(threads)
    assert open_files() <= files
    assert not list(tmp_path.rglob("homes*"))


def start(plan: Plan, directory: Path) -> tuple[nn.Module, torch.optim.Optimizer, memfit.Job]:
    model = build()
    optimizer = adamw(model)
    return model, optimizer, memfit.fit(model, optimizer, loss, batch(0), plan=plan, directory=directory / "homes")


def copies(job: memfit.Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and states of a job, by name."""
    with job.weights():
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value.clone() for key, value in state.items()}
    return found


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    changed = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not changed


def assert_as_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """An ordinary model and optimizer again, with the bits of so many plain steps."""
    wanted, wanted_optimizer = after_plain_steps(steps)
    assert_same(dict(model.named_parameters()), dict(wanted.named_parameters()))
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        assert_same(optimizer.state[p], wanted_optimizer.state[q])


# The disk fails in the middle of a step


@pytest.mark.thinned
@pytest.mark.parametrize(("call", "number", "said"), [("pwrite", errno.ENOSPC, "full"), ("pread", errno.EIO, "dmesg")])
@pytest.mark.parametrize("make", [atomic, atomic_after_backward, atomic_recomputed])
def test_an_atomic_step_whose_disk_fails_anywhere_leaves_every_bit_as_it_was(
    make: Callable[[Profile], Plan], call: str, number: int, said: str, disk: Disk, tmp_path: Path
) -> None:
    model, optimizer, job = start(make(profile()), tmp_path)
    before = disk.counts[call]
    job.step(batch(0))
    calls = disk.counts[call] - before
    wanted = copies(job, model, optimizer)
    for after_calls in (0, calls // 3, calls // 2, calls - 1):
        disk.break_from(call, number, after_calls=after_calls)
        with pytest.raises(StoreError, match=said) as caught:
            job.step(batch(1))
        assert caught.value.errno == number
        disk.mend()
        assert_same(copies(job, model, optimizer), wanted)
    # The step can be repeated, and is then what plain PyTorch does.
    job.step(batch(1))
    job.close()
    assert_as_plain(model, optimizer, 2)


def test_an_atomic_first_step_that_fails_leaves_no_states(disk: Disk, tmp_path: Path) -> None:
    model, optimizer, job = start(atomic(profile()), tmp_path)
    disk.break_from("pwrite", errno.EIO, after_calls=30)
    with pytest.raises(StoreError):
        job.step(batch(0))
    disk.mend()
    assert optimizer.state_dict()["state"] == {}
    for step in range(2):
        job.step(batch(step))
    job.close()
    assert_as_plain(model, optimizer, 2)


def test_closing_after_an_atomic_step_that_failed_gives_the_complete_weights_of_before(
    disk: Disk, tmp_path: Path
) -> None:
    model, optimizer, job = start(atomic(profile()), tmp_path)
    job.step(batch(0))
    disk.break_from("pwrite", errno.ENOSPC, after_calls=10)
    with pytest.raises(StoreError, match="disk is full"):
        job.step(batch(1))
    # Reading does not need room.
    job.close()
    disk.mend()
    assert_as_plain(model, optimizer, 1)


def test_a_step_in_place_that_is_interrupted_is_torn_and_every_later_call_says_so(disk: Disk, tmp_path: Path) -> None:
    _, _, job = start(in_place(profile()), tmp_path)
    before = disk.counts["pwrite"]
    job.step(batch(0))
    disk.break_from("pwrite", errno.ENOSPC, after_calls=(disk.counts["pwrite"] - before) // 2)
    with pytest.raises(StoreError, match="disk is full"):
        job.step(batch(1))
    disk.mend()
    later: list[Callable[[], Any]] = [
        lambda: job.step(batch(1)),
        lambda: job.evaluate(batch(1)),
        lambda: job.save(tmp_path / "saved"),
    ]
    for call in later:
        with pytest.raises(TornStepError, match=r"step 2 was interrupted \(StoreError.*load a saved state") as caught:
            call()
        assert "is_atomic=True" in str(caught.value)
    job.close(restore=False)
    assert not (tmp_path / "saved").exists()


def test_a_step_is_torn_also_where_several_visits_under_way_fail_together(disk: Disk, tmp_path: Path) -> None:
    """Weights on disk, read ahead: the last block is updated in memory when all reads of the others fail."""
    tower = Tower(width=128, layers=8)
    home = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DEVICE, state_home=Tier.DEVICE)
    plan = Plan(blocks={block.name: home for block in tower.profile().blocks}, prefetch=4)
    model = tower.build()
    job = memfit.fit(model, adamw(model), loss, tower.batch(0), plan=plan, directory=tmp_path / "homes")
    job.step(tower.batch(0))
    disk.break_from("pread", errno.EIO, after_calls=9)
    with pytest.raises(StoreError):
        job.step(tower.batch(1))
    disk.mend()
    with pytest.raises(TornStepError):
        job.step(tower.batch(1))
    job.close(restore=False)


def test_a_step_in_place_that_fails_before_its_first_update_is_not_torn(disk: Disk, tmp_path: Path) -> None:
    model, optimizer, job = start(in_place_after_backward(profile()), tmp_path)
    job.step(batch(0))
    wanted = copies(job, model, optimizer)
    for call, number in (("pread", errno.EIO), ("pwrite", errno.ENOSPC)):  # a weight; a saved tensor or gradient
        disk.break_from(call, number)
        with pytest.raises(StoreError):
            job.step(batch(1))
        disk.mend()
        assert_same(copies(job, model, optimizer), wanted)
    job.step(batch(1))
    job.close()
    assert_as_plain(model, optimizer, 2)


def test_a_gradient_that_could_not_go_home_does_not_meet_the_next_step(disk: Disk, tmp_path: Path) -> None:
    """Two microbatches one after the other: the error of one's gradient is seen when the next one's comes, or never."""
    found = profile()
    plan = Plan(microbatches=2, blocks=plans.on_disk(found), update=UpdateTime.AFTER_BACKWARD)
    _, _, job = start(plan, tmp_path)
    job.step(batch(0))
    before = disk.counts["pwrite"]
    job.step(batch(1))
    calls = disk.counts["pwrite"] - before
    for after_calls in range(0, calls // 3, calls // 8):
        disk.break_from("pwrite", errno.EIO, after_calls=after_calls)
        with pytest.raises(StoreError) as caught:
            job.step(batch(2))
        disk.mend()
        assert caught.value.errno == errno.EIO
        if job_is_torn(job):
            break
        assert job.step(batch(2)).is_finite
    job.close(restore=False)


def job_is_torn(job: memfit.Job) -> bool:
    try:
        job.evaluate(batch(0))
    except TornStepError:
        return True
    return False


# Between steps, at the start and at the end


@pytest.mark.parametrize("make", [atomic, in_place])
def test_weights_and_states_changed_between_steps_are_kept(make: Callable[[Profile], Plan], tmp_path: Path) -> None:
    model, optimizer, job = start(make(profile()), tmp_path)
    plain, plain_optimizer = build(), None
    plain_optimizer = adamw(plain)

    def plain_step(step: int) -> None:
        plain_optimizer.zero_grad()
        loss(plain, batch(step)).backward()
        plain_optimizer.step()

    job.step(batch(0))
    plain_step(0)
    with job.weights(), torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(0.5)
    state = optimizer.state_dict()
    for one in state["state"].values():
        one["exp_avg"].mul_(2.0)
    optimizer.load_state_dict(state)
    other = plain_optimizer.state_dict()
    for one in other["state"].values():
        one["exp_avg"].mul_(2.0)
    plain_optimizer.load_state_dict(other)
    wanted = {f"{i}.{k}": v for i, s in other["state"].items() for k, v in s.items()}
    assert_same(copies(job, model, optimizer), dict(plain.named_parameters()) | wanted)
    job.step(batch(1))
    plain_step(1)
    job.close()
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("make", [atomic, in_place])
def test_a_disk_that_fails_while_weights_move_in_gives_the_model_back(
    make: Callable[[Profile], Plan], disk: Disk, tmp_path: Path
) -> None:
    plan = make(profile())
    model, optimizer = after_plain_steps(1)
    before = disk.counts["pwrite"]
    memfit.fit(model, optimizer, loss, batch(0), plan=plan, directory=tmp_path / "homes").close()
    calls = disk.counts["pwrite"] - before
    for after_calls in range(0, calls, calls // 3):
        disk.break_from("pwrite", errno.EIO, after_calls=after_calls)
        with pytest.raises(StoreError):
            memfit.fit(model, optimizer, loss, batch(0), plan=plan, directory=tmp_path / "homes")
        disk.mend()
        assert_as_plain(model, optimizer, 1)
        assert not (tmp_path / "homes").exists()
    optimizer.zero_grad()
    loss(model, batch(1)).backward()
    optimizer.step()
    assert_as_plain(model, optimizer, 2)


def test_a_close_that_cannot_read_says_how_to_go_on_and_can_be_repeated(disk: Disk, tmp_path: Path) -> None:
    model, optimizer, job = start(in_place(profile()), tmp_path)
    job.step(batch(0))
    disk.break_from("pread", errno.EIO, after_calls=7)
    with pytest.raises(StoreError, match=r"Repeat job\.close\(\).*restore=False") as caught:
        job.close()
    assert caught.value.errno == errno.EIO
    with pytest.raises(UsageError, match="closed"):
        job.step(batch(1))
    disk.mend()
    job.close()
    assert_as_plain(model, optimizer, 1)


def test_a_close_that_cannot_read_can_give_up(disk: Disk, tmp_path: Path) -> None:
    _, optimizer, job = start(in_place(profile()), tmp_path)
    job.step(batch(0))
    disk.break_from("pread", errno.EIO)
    with pytest.raises(StoreError):
        job.close()
    job.close(restore=False)
    assert not (tmp_path / "homes").exists()
    assert isinstance(optimizer.state_dict(), dict)


# Interrupted by the user


class Interrupting(nn.Module):
    """Passes its input on, unless armed: then Ctrl-C comes in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise KeyboardInterrupt
        out = x * 1.0
        if self.when == "backward":
            out.register_hook(self._interrupt)
        return out

    def _interrupt(self, gradient: Tensor) -> None:
        raise KeyboardInterrupt


@pytest.mark.thinned
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(
    ("make", "microbatches"), [(atomic, 1), (atomic_recomputed, 2), (in_place_after_backward, 1), (in_place, 2)]
)
def test_an_interrupt_comes_through_and_the_job_goes_on_or_says_that_it_is_torn(
    make: Callable[[Profile], Plan], microbatches: int, when: str, tmp_path: Path
) -> None:
    model = build()
    model.insert(1, Interrupting())  # type: ignore[operator]
    plan = replace(make(memfit.profile(model, adamw(model), loss, batch(0))), microbatches=microbatches)
    optimizer = adamw(model)
    interrupting = model[1]  # type: ignore[index]
    with memfit.fit(model, optimizer, loss, batch(0), plan=plan, directory=tmp_path / "homes") as job:
        job.step(batch(0))
        wanted = copies(job, model, optimizer)
        interrupting.when = when
        with pytest.raises(KeyboardInterrupt):
            job.step(batch(1))
        interrupting.when = ""
        may_tear = when == "backward" and not plan.is_atomic and plan.update is UpdateTime.IN_BACKWARD
        if may_tear:
            with pytest.raises(TornStepError, match="KeyboardInterrupt"):
                job.step(batch(1))
        else:
            assert_same(copies(job, model, optimizer), wanted)
            assert job.step(batch(1)).departures == ()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_forward_between_steps_that_is_broken_off_leaves_later_ones_whole(
    error: type[BaseException], tmp_path: Path
) -> None:
    model, _, job = start(in_place(profile()), tmp_path)
    job.step(batch(0))

    def interrupt(*_: Any) -> None:
        raise error("now")

    with torch.no_grad():
        wanted = model(batch(1)["x"])
        handle = next(iter(model[1].children())).register_forward_hook(interrupt)  # type: ignore[index]
        with pytest.raises(error):
            model(batch(1)["x"])
        handle.remove()
        for _ in range(2):
            assert torch.equal(model(batch(1)["x"]), wanted)
    job.close()


def test_ctrl_c_comes_through_at_the_next_action_and_a_second_one_at_once(tmp_path: Path) -> None:
    presses: list[int] = []

    def pressed(module: nn.Module, data: Batch) -> Tensor:
        for _ in presses:
            os.kill(os.getpid(), signal.SIGINT)
        if len(presses) == 2:
            raise AssertionError("the second one should not have waited")
        return loss(module, data)

    model = build()
    optimizer = adamw(model)
    found = memfit.profile(model, optimizer, loss, batch(0))
    job = memfit.fit(model, optimizer, pressed, batch(0), plan=atomic(found), directory=tmp_path / "homes")
    job.step(batch(0))
    wanted = copies(job, model, optimizer)
    for count in (1, 2):
        presses[:] = range(count)
        with pytest.raises(KeyboardInterrupt):
            job.step(batch(1))
        presses.clear()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert_same(copies(job, model, optimizer), wanted)
    job.step(batch(1))
    job.close()
    assert_as_plain(model, optimizer, 2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_ctrl_c_at_any_moment_leaves_a_whole_step(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random moments: the weights are those of before, or those of the step that had been committed; and nothing hangs."""
    draw = random.Random(seed)
    model, optimizer, job = start(atomic_after_backward(profile()), tmp_path)
    began = time.perf_counter()
    made = 0
    for _ in range(2):
        job.step(batch(made))
        made += 1
    step_s = (time.perf_counter() - began) / 2
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: dropped.append((args.exc_value, args.object)))
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        for _ in range(10):
            old = copies(job, model, optimizer)
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, step_s))
            try:
                job.step(batch(made))
                time.sleep(30.0)  # it comes, be it behind the step
                pytest.fail(f"the interrupt was lost; exceptions that Python dropped: {dropped}")
            except KeyboardInterrupt:
                new = copies(job, model, optimizer)
                made += any(not torch.equal(old[name], new[name]) for name in old)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    job.close()
    # Bits of so many whole steps, in all weights and all states.
    assert_as_plain(model, optimizer, made)


def test_a_job_used_from_inside_its_own_step_is_refused(tmp_path: Path) -> None:
    model = build()
    jobs: list[memfit.Job] = []

    def nested(module: nn.Module, data: Batch) -> Tensor:
        for job in jobs:
            job.save(tmp_path / "saved")
        return loss(module, data)

    with memfit.fit(model, adamw(model), nested, batch(0), plan=Plan()) as job:
        job.step(batch(0))
        jobs.append(job)
        with pytest.raises(UsageError, match="job.save inside of job.step"):
            job.step(batch(1))
        jobs.clear()
        assert job.step(batch(1)).is_finite


# A real disk that is too small, and one that is taken


@pytest.fixture(name="small_disk")
def mount_small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "memfit-test", str(where)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this process may not mount a file system")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_disk_without_room_for_the_homes_is_told_with_both_sizes_and_the_model_stays(small_disk: Path) -> None:
    model, optimizer = after_plain_steps(1)
    with pytest.raises(StoreError, match=r"needed, 2\.0 MiB .* free; the disk is full") as caught:
        memfit.fit(model, optimizer, loss, batch(0), plan=in_place(profile()), directory=small_disk / "homes")
    assert caught.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []
    assert_as_plain(model, optimizer, 1)


def test_a_disk_that_is_full_when_activations_come_stops_the_step_and_the_job_goes_on_when_there_is_room(
    small_disk: Path,
) -> None:
    found = profile()
    plan = Plan(calls=plans.fates(found, OFFLOAD), update=UpdateTime.AFTER_BACKWARD)
    model, optimizer, job = start(plan, small_disk)
    job.step(batch(0))
    wanted = copies(job, model, optimizer)
    job.close()

    model, optimizer, job = start(plan, small_disk)
    filler = small_disk / "of another"
    with pytest.raises(OSError, match="No space left"):
        fill(filler)
    with pytest.raises(StoreError, match="disk is full"):
        job.step(batch(0))
    filler.unlink()
    job.step(batch(0))
    assert_same(copies(job, model, optimizer), wanted)
    job.close()


HOLDER = """
import sys
from test_job_faults import *
_, _, job = start(in_place(profile()), Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
job.close()
"""


def test_a_directory_that_another_process_trains_in_is_refused_with_its_number(tmp_path: Path) -> None:
    roots = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(memfit.__file__).parents[1])]
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
    )
    with child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "held\n"
        model, optimizer = after_plain_steps(1)
        with pytest.raises(StoreInUseError, match=rf"in use by a live job \(pid {child.pid}"):
            memfit.fit(model, optimizer, loss, batch(0), plan=in_place(profile()), directory=tmp_path / "homes")
        assert_as_plain(model, optimizer, 1)
        child.stdin.write("\n")
    assert child.returncode == 0
    assert issubclass(StoreInUseError, MemfitError)


def test_homes_of_a_process_that_was_killed_are_swept_by_the_same_program_and_a_run_is_not(tmp_path: Path) -> None:
    roots = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(memfit.__file__).parents[1])]
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.kill()
    assert (tmp_path / "homes" / "homes-0.bin").stat().st_size
    (tmp_path / "homes" / "notes.txt").write_text("mine")
    model, optimizer, job = start(in_place(profile()), tmp_path)
    job.step(batch(0))
    job.close()
    assert_as_plain(model, optimizer, 1)
    assert [path.name for path in (tmp_path / "homes").iterdir()] == ["notes.txt"]
    with memfit.fit(model, optimizer, loss, batch(0), store=tmp_path / "run"):
        pass
    with pytest.raises(StoreError, match="holds a store already"):
        memfit.fit(model, optimizer, loss, batch(0), plan=in_place(profile()), directory=tmp_path / "run")
    assert verify_run(tmp_path / "run").is_whole
    shutil.rmtree(tmp_path / "homes")
    shutil.rmtree(tmp_path / "run")
