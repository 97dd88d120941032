"""Cuts the power of runs at random instants: the disk is copied as it stands while a run goes on, mounted as after a crash, and the run is taken up from there.

    .venv/bin/python benchmarks/power_cuts.py                           # 60 cuts on ext4, xfs and btrfs; as root
    .venv/bin/python benchmarks/power_cuts.py --cuts 12 --kinds ext4 --seed 4
    .venv/bin/python benchmarks/power_cuts.py --without-syncs           # must fail

A run trains on a file system that lies in a file, behind a loop device. At an instant that file is copied, in one step (FICLONE), so that the copy has what
the file system had handed to its disk by then, and nothing of what was only in memory: pages that were not written yet, the file system's journal in the
middle of a transaction. Half of the instants are drawn over the run, half shortly after a phase was entered, as `kill.py` tells them. What this does not
show is a disk that loses or reorders what it was given: `tests/faults/crash_disk.py` enumerates that. Of each copy, mounted:

- the manifest names a step that the durability promises, given the steps that the run had told of before the copy and after it;
- the store is whole (`memfit.store.verify`), and so is a save that is there;
- a process that takes the run up goes on at exactly that step, and comes to the same weights, states, averages and random numbers, bit for bit.

The run itself goes on, and is compared as well.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import kill
from memfit.core.limits import MIB
from memfit.store import FileOperations, verify

KINDS: dict[str, tuple[int, tuple[str, ...], str]] = {
    "ext4": (192 * MIB, (), "loop"),
    "xfs": (320 * MIB, (), "loop,nouuid"),
    "btrfs": (256 * MIB, (), "loop"),
}
"""Of each file system: bytes of its disk, options of `mkfs` and of `mount`."""
HOLDER_BYTES = 8 << 30
"""Length of the file, mostly of holes, for the file system that holds the disks: xfs, which copies files in one step."""
_FICLONE = 0x40049409
PLANS = ("resident", "layer-major", "clipped", "bf16")


@dataclass(frozen=True)
class Cut:
    """A copy of the disk."""

    image: Path
    before: tuple[int, ...]
    """Steps that the run had told of when the copying began."""
    after: tuple[int, ...]
    """And when it had ended."""
    phase: str


@contextmanager
def mounted(image: Path, place: Path, options: str) -> Iterator[Path]:
    """A file system in a file, at a place."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", options, str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def make_disk(kind: str, image: Path) -> None:
    """An empty file system."""
    nbytes, options, _ = KINDS[kind]
    with image.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run([f"mkfs.{kind}", "-q", *options, str(image)], check=True, capture_output=True)


def clone(image: Path, target: Path) -> None:
    """Copies a file in one step, whoever writes to it meanwhile."""
    with image.open("rb") as source, target.open("wb") as copy:
        fcntl.ioctl(copy.fileno(), _FICLONE, source.fileno())


def run_and_cut(
    work: kill.Work, image: Path, place: Path, count: int, whole: kill.Child, chance: random.Random
) -> tuple[kill.Child, list[Cut]]:
    """A run to its end, and copies of its disk that were made meanwhile: `count`, or fewer where two fall together.

    Args:
        work: the run.
        image: its disk.
        place: where the copies go.
        count: how many.
        whole: the run with nobody watching: instants are drawn from its seconds and phases.
        chance: draws them.
    """
    cuts: list[Cut] = []
    text, told = b"", list[dict[str, Any]]()
    began = time.perf_counter()
    child, reader = kill.start_child(work, kill.Moment())
    moments = sorted(chance.random() * whole.seconds for _ in range(count // 2))
    entries = sum("at" in line and "left" not in line for line in whole.told)
    phases = {chance.randrange(entries) for _ in range(count - len(moments))}
    entered = 0
    is_open = True

    def drain(wait_s: float) -> None:
        nonlocal text, is_open
        while is_open and select.select([reader], [], [], wait_s)[0]:
            part = os.read(reader, 1 << 16)
            is_open = bool(part)
            *whole, text = (text + part).split(b"\n")
            told.extend(json.loads(line) for line in whole)
            wait_s = 0.0

    def cut() -> None:
        drain(0.0)
        phase = next((line["at"] for line in reversed(told) if "at" in line), "starting")
        steps = tuple(line["step"] for line in told if "step" in line)
        copy = place / f"cut-{len(cuts)}.img"
        clone(image, copy)
        drain(0.0)
        cuts.append(Cut(copy, steps, tuple(line["step"] for line in told if "step" in line), phase))

    while is_open:
        left = max(0.0, moments[0] - (time.perf_counter() - began)) if moments else 1.0
        drain(left)
        if moments and time.perf_counter() - began >= moments[0]:
            moments.pop(0)
            cut()
        now = sum("at" in line and "left" not in line for line in told)
        due, entered = phases & set(range(entered, now)), now
        if due:
            time.sleep(chance.random() ** 2 * 0.01)
            cut()
    os.close(reader)
    return kill.ended(child, told, began), cuts


def promised(durability: Any, cut: Cut) -> range:
    """The steps that may be committed at a cut."""
    least = kill.promised(durability, 0, cut.before[-1] if cut.before else 0)
    # What was told after the copy may have been committed before it.
    most = kill.promised(durability, 0, min(kill.TOTAL, (cut.after[-1] if cut.after else 0) + 1))
    return range(least.start, most.stop)


def check(
    scenario: kill.Scenario, program: kill.Program, whole: kill.Child, cut: Cut, place: Path, options: str
) -> str | None:
    """Takes a run up on the copy of its disk; what is wrong with it."""
    with mounted(cut.image, place, options) as directory:
        committed = kill.committed_step(directory)
        if committed is None and cut.before:
            return "nothing is committed"
        if committed is not None and committed not in promised(scenario.durability, cut):
            return f"step {committed} is committed: not what the durability promises"
        problem = kill.check_save(directory)
        if problem is not None:
            return problem
        if committed is not None and not verify(directory / "run").is_whole:
            return "the store is not whole"
        found = kill.run_child(kill.training(scenario, program, directory), kill.Moment())
        if found.status:
            return f"it was not taken up: status {found.status}, told {found.told}"
        if found.steps[0] != (committed or 0):
            return f"it went on at {found.steps[0]}, and {committed} was committed"
        if found.told[-1]["digest"] != whole.told[-1]["digest"]:
            return "it came to something else"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--directory", type=Path, default=None, help="where the disks are made")
    parser.add_argument("--seed", type=int, default=None, help="of the instants; drawn and printed by default")
    parser.add_argument(
        "--without-syncs", action="store_true", help="leave out the store's syncs, to see that such cuts are found"
    )
    options = parser.parse_args()
    if options.without_syncs:
        for name in ("fsync", "fdatasync"):
            setattr(FileOperations, name, lambda operations, descriptor: None)  # noqa: ARG005
    missing = [f"mkfs.{kind}" for kind in {*options.kinds, "xfs"} if shutil.which(f"mkfs.{kind}") is None]
    if os.geteuid() != 0 or missing:
        raise SystemExit(f"mounting needs root, and these programs: {missing or 'they are here'}")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="memfit-cuts-", dir=options.directory) as name:
        holder = Path(name) / "holder.img"
        with holder.open("wb") as file:
            file.truncate(HOLDER_BYTES)
        subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(holder)], check=True)
        with mounted(holder, Path(name) / "holder", "loop") as place:
            campaign(options.kinds, options.cuts, random.Random(seed), place)


def campaign(kinds: Sequence[str], wanted: int, chance: random.Random, place: Path) -> None:
    programs = kill.programs_of(list(kill.small_run.MODELS), list(PLANS))
    scenarios = kill.scenarios_of(list(kill.small_run.MODELS), PLANS, ("generations", "journal"))
    chance.shuffle(scenarios)
    phases, found_steps, number, began = Counter[str](), Counter[str](), 0, time.monotonic()
    runs = 0
    while number < wanted:
        scenario, kind = scenarios[runs % len(scenarios)], kinds[runs % len(kinds)]
        runs += 1
        program = programs[scenario.model, scenario.plan].under(scenario.scheme)
        whole = kill.reference(scenario, program, place / "whole")
        image, at, mount_options = place / "disk.img", place / "at", KINDS[kind][2]
        make_disk(kind, image)
        with mounted(image, at, mount_options):
            work = kill.training(scenario, program, at)
            found, cuts = run_and_cut(work, image, place, min(6, wanted - number), whole, chance)
        if found.status or found.told[-1]["digest"] != whole.told[-1]["digest"]:
            raise SystemExit(f"{scenario} on {kind}: the run itself came to something else, told {found.told}")
        for cut in cuts:
            problem = check(scenario, program, whole, cut, at, mount_options)
            if problem is not None:
                raise SystemExit(
                    f"{scenario} on {kind}, cut in {cut.phase!r}, told {cut.before} and {cut.after}: {problem}"
                )
            phases[cut.phase] += 1
            found_steps[f"after {cut.before[-1] if cut.before else 'no'} steps"] += 1
            cut.image.unlink()
        image.unlink()
        number += len(cuts)
        print(f"{number:4d} cuts, {runs} runs: {scenario} on {kind}", flush=True)

    def words(found: Counter[str]) -> str:
        return ", ".join(f"{what} {count}" for what, count in found.most_common())

    print(
        f"{number} cuts in {runs} runs on {', '.join(kinds)}, {time.monotonic() - began:.0f} s: every copy was whole, was taken up at its last commit and "
        f"ended bit for bit. Cut in: {words(phases)}. {words(found_steps)}."
    )


if __name__ == "__main__":
    main()
