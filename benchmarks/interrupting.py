"""Types Ctrl-C at random moments while `memfit train --store` runs, types the command again, and looks at what is left.

    .venv/bin/python benchmarks/interrupting.py                       # 40 interrupts, a terminal for each process
    .venv/bin/python benchmarks/interrupting.py --interrupts 5 --seed 1

Each process has a terminal of its own (a pty), and the interrupt is the byte that the key sends: the terminal makes SIGINT of it, for the whole group of
processes. A third of the moments are drawn over the time that a whole run takes, a third shortly after something was told (planning, a step, a commit), a
third are two keys in a row. After each:

- the process has ended by itself, soon, with one message and code 130 (by the signal itself, without a word, only where Python was not up yet, or down already);
- whatever is committed is whole (`memfit verify`), and so is a save that is there;
- of the steps that were told, at most the last is not committed;
- nothing of it is left in the temporary directory.

The command is typed again until the run is through, and then leaves nothing behind. It says that it goes on, and its last losses are those of the run that
nobody interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

STEPS = 6
INTERRUPTED = 130
PATIENCE_S = 120.0
"""From Ctrl-C to the end, on a machine that has other work."""
KEY = b"\x03"
_GOES_ON = re.compile(r"goes on: (\d+) steps are committed")
_IN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; signal.signal(signal.SIGINT, signal.SIG_DFL); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Takes the terminal as the session's own, so that its keys make signals; and hears them, even where this program was started in a shell's background."""
_MARKS = (
    "reading text",
    "building the model",
    "planning",
    "plan:",
    "goes on",
    "step",
    "closing",
    "committing",
    "saving",
    "ran with",
    "committed: step",
)
_SAID = re.compile(r"(?m)^.*interrupted.*$")


@dataclass
class Typed:
    """A command that was typed, and what became of it."""

    text: str
    status: int
    seconds: float
    leaving_s: float | None

    @property
    def steps(self) -> int:
        """The last step that it told of as done."""
        return max((int(n) for n in re.findall(r"(?m)^.*?\bstep (\d+)\b.*loss", self.text)), default=0)

    @property
    def is_silent(self) -> bool:
        """It did not say that it was interrupted."""
        return _SAID.search(self.text) is None

    @property
    def went_on_at(self) -> int | None:
        """The step that it said it goes on at."""
        found = _GOES_ON.search(self.text)
        return None if found is None else int(found[1])

    @property
    def losses(self) -> dict[int, str]:
        """By step, as it told them."""
        return {int(n): loss for n, loss in re.findall(r"\bstep (\d+)\b.*?loss ([0-9.]+)", self.text)}


def command(place: Path) -> list[str]:
    """What is typed."""
    model, text = place / "model.json", place / "text.txt"
    options = ["--batch", "2", "--sequence", "16", "--steps", str(STEPS), "--limit", "8GiB", "--rate", "0.001"]
    options += ["--save", str(place / "saved")]
    return [
        sys.executable, "-m", "memfit", "train", "--model", str(model), "--data", str(text), "--store", str(place / "run"), *options,
    ]  # fmt: skip


def prepare(place: Path) -> None:
    """A small model and a text."""
    fields = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 16,
    }  # fmt: skip
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.json").write_text(json.dumps(fields))
    (place / "text.txt").write_text("To be, or not to be, that is the question.\n" * 400, encoding="utf-8")
    (place / "tmp").mkdir()


def has_terminal(mine: int, child: int) -> bool:
    """The process hears the keys: before that they are lost."""
    try:
        return os.tcgetpgrp(mine) == child
    except OSError:
        return False


def run(
    arguments: list[str], place: Path, *, after_s: float | None, mark: str = "", keys: int = 1, most_s: float = 600.0
) -> Typed:
    """Types a command in a terminal of its own, and Ctrl-C after so many seconds, of its beginning or of the moment when `mark` was told."""
    mine, theirs = pty.openpty()

    began = time.monotonic()
    environment = {**os.environ, "TMPDIR": str(place / "tmp"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    child = subprocess.Popen(
        [sys.executable, "-c", _IN_TERMINAL, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=environment,
    )
    os.close(theirs)
    text = b""
    due = None if after_s is None or mark else began + after_s
    typed_at: float | None = None
    left = keys
    while True:
        now = time.monotonic()
        if now > began + most_s:
            os.killpg(child.pid, signal.SIGKILL)
            raise SystemExit(f"it did not end within {most_s:.0f} s:\n{text.decode(errors='replace')[-3000:]}")
        if due is not None and now >= due and left and has_terminal(mine, child.pid):
            os.write(mine, KEY)
            typed_at = typed_at or now
            left -= 1
            due = now + 0.05
        if typed_at is not None and now > typed_at + PATIENCE_S:
            os.killpg(child.pid, signal.SIGKILL)
            raise SystemExit(
                f"it did not end within {PATIENCE_S:.0f} s of Ctrl-C:\n{text.decode(errors='replace')[-3000:]}"
            )
        ready, _, _ = select.select([mine], [], [], 0.005 if due is not None and left else 0.1)
        if ready:
            try:
                part = os.read(mine, 1 << 16)
            except OSError:  # the last of its processes has let go of the terminal
                break
            if not part:
                break
            text += part
            if mark and due is None and left and after_s is not None and mark.encode() in text:
                due = time.monotonic() + after_s
        elif child.poll() is not None:
            break
    status = child.wait()
    os.close(mine)
    ended = time.monotonic()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode(errors="replace")).replace("\r", "\n")
    return Typed(plain, status, ended - began, None if typed_at is None else ended - typed_at)


def check(found: Typed, place: Path, told_before: int) -> str | None:
    """What is wrong after an interrupt."""
    return problem_of_words(found) or problem_of_save(place / "saved") or problem_of_run(found, place, told_before)


def problem_of_words(found: Typed) -> str | None:
    """What is wrong with how it ended."""
    # A key that comes while the interpreter starts or shuts down ends it by the signal itself, which shells call 130 too.
    if found.status == -signal.SIGINT and f"{os.sep}memfit{os.sep}" not in found.text:
        is_up = any(mark in found.text for mark in _MARKS) and "committed: step" not in found.text
        return "it said nothing" if is_up and found.is_silent else None
    if found.status not in (0, INTERRUPTED, -signal.SIGINT):
        return f"it ended with status {found.status}"
    if "Traceback" in found.text or "Exception ignored" in found.text or "Error" in found.text:
        return "it showed an error"
    said = _SAID.findall(found.text)
    if found.status == INTERRUPTED and len(said) != 1 and "committed: step" not in found.text:  # all was said before
        return f"it said {len(said)} times that it was interrupted"
    return None


def problem_of_run(found: Typed, place: Path, told_before: int) -> str | None:
    """What is wrong with what is left of the run."""
    # torch keeps a cache of its own there.
    left = sorted(path.name for path in (place / "tmp").iterdir() if not path.name.startswith("torchinductor"))
    if left:
        return f"left in the temporary directory: {left}"
    step = committed_step(place)
    if max(found.steps, told_before) - 1 > (step or 0):
        return f"step {found.steps} was told, and step {step} is committed"
    if step is None:
        return None
    verified = subprocess.run(
        [sys.executable, "-m", "memfit", "verify", str(place / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"what is committed is not whole: {verified.stdout}{verified.stderr}" if verified.returncode else None


def problem_of_save(saved: Path) -> str | None:
    """What is wrong with a save that an interrupt may have stopped."""
    if not saved.exists():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(saved / "model.safetensors", framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118, it is no dictionary
                file.get_slice(key)
        json.loads((saved / "memfit_state.json").read_text())
    except (SafetensorError, OSError, ValueError) as error:
        return f"the save is not whole: {type(error).__name__}: {error}"
    return None


def committed_step(place: Path) -> int | None:
    """What the manifest says."""
    manifest = place / "run" / "manifest.json"
    return json.loads(manifest.read_text())["body"]["step"] if manifest.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="stop after so long, with what was done")
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="memfit-interrupting-", dir=options.directory) as name:
        raise SystemExit(campaign(options, random.Random(seed), Path(name)))


def campaign(options: argparse.Namespace, chance: random.Random, place: Path) -> int:
    began = time.monotonic()
    prepare(place / "whole")
    whole = run(command(place / "whole"), place / "whole", after_s=None)
    if whole.status or whole.steps != STEPS:
        raise SystemExit(f"the run that nobody interrupted failed:\n{whole.text}")
    shutil.rmtree(place / "whole")
    where: Counter[str] = Counter()
    interrupts = runs = silent = 0
    slowest = 0.0
    fastest_s = whole.seconds  # on a machine that has other work, the first one may have been slow
    while interrupts < options.interrupts and (options.seconds is None or time.monotonic() - began < options.seconds):
        runs += 1
        here = place / f"run-{runs}"
        prepare(here)
        told = 0
        for attempt in range(1000):
            before = committed_step(here)
            mark, keys = "", 1
            after_s = chance.random() * fastest_s * (1.0 + 0.1 * attempt)
            kind = chance.randrange(3)
            if kind == 1:
                mark, after_s = chance.choice(_MARKS), chance.random() * 0.3
            elif kind == 2:
                keys = 2
            if attempt > 6:  # enough of this run
                after_s = None  # type: ignore[assignment]
            found = run(command(here), here, after_s=after_s, mark=mark, keys=keys)
            said = f"attempt {attempt}, Ctrl-C after {after_s} s of {mark or 'the beginning'!r}, {keys} times, status {found.status}, committed {before} -> "
            said += f"{committed_step(here)}:\n{found.text[-4000:]}"
            problem = check(found, here, told)
            if problem is None and before and before < STEPS and found.went_on_at not in (None, before):
                problem = f"it says that it goes on at {found.went_on_at}, and {before} was committed"
            different = {n for n, loss in found.losses.items() if whole.losses.get(n) != loss}
            if problem is None and different:
                problem = f"other losses than without interrupts at steps {sorted(different)}"
            if problem is not None:
                raise SystemExit(f"{problem}; {said}")
            told = max(told, found.steps)
            if found.status:
                interrupts += 1
                silent += found.is_silent
                slowest = max(slowest, found.leaving_s or 0.0)
                last = [mark for mark in _MARKS if mark in found.text]
                where[f"{'after ' + last[-1] if last else 'before anything was told'}"] += 1
                if committed_step(here) == STEPS:  # typed again, it would make as many steps more
                    break
                continue
            fastest_s = min(fastest_s, found.seconds) if attempt == 0 else fastest_s
            known = ("model.json", "text.txt", "tmp", "run", "saved")
            left = sorted(path.name for path in here.iterdir() if path.name not in known)
            if left:
                raise SystemExit(f"left behind: {left}; {said}")
            break
        print(f"{interrupts:3d} interrupts, {runs} runs", flush=True)
        shutil.rmtree(here)
    print(
        f"{interrupts} interrupts in {runs} runs, {time.monotonic() - began:.0f} s: each left a whole commit, and the same command went on. "
        f"They came {', '.join(f'{what} {count} times' for what, count in where.most_common())}; it took {slowest:.1f} s at most to leave; "
        f"{silent} ended without a word, before or after Python was up."
    )
    return 0


if __name__ == "__main__":
    main()
