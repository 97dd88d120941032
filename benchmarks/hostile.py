"""Files that lie, by the hundred thousand: the targets of `tests/property/test_hostile_files.py` in a plain loop, which costs a fraction of hypothesis' own.

    .venv/bin/python benchmarks/hostile.py                                   # 200,000 cases, drawn anew
    .venv/bin/python benchmarks/hostile.py --cases 20000 --seed 7 --seconds 200

Case n of a target is drawn from the seed and n alone, so that a failure is found again: it is told with the number to pass to the test. A case that
takes longer than --patience seconds of CPU time, or waits for ten minutes, is a failure too, and so is memory above the file's size and 16 MiB.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from property import test_hostile_files as hostile  # pyright: ignore[reportMissingImports]

NEEDS_PLACE = {
    "test_a_safetensors_file_that_lies_is_refused",
    "test_an_index_that_lies_is_refused",
    "test_a_trainer_state_that_lies_is_refused",
    "test_a_run_that_lies_is_copied_out_or_refused",
    "test_a_lock_that_lies_harms_nobody",
    "test_a_run_that_lies_is_taken_up_or_refused",
}
RARE = {"test_a_run_that_lies_is_taken_up_or_refused": 40}
"""Every so many rounds only: a case is a run that is fitted."""


def targets(place: Path) -> dict[str, Callable[[int], Any]]:
    """By name, what takes the seed of a case."""
    found: dict[str, Callable[[int], Any]] = {}
    for name, test in vars(hostile).items():
        if not hasattr(test, "hypothesis"):
            continue
        inner = test.hypothesis.inner_test
        found[name] = (lambda seed, act=inner: act(seed=seed, place=place)) if name in NEEDS_PLACE else inner
    return found


def too_long(_number: int, _frame: object) -> None:
    raise TimeoutError("it hangs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="stop after so long, with what was done")
    parser.add_argument("--patience", type=int, default=20, help="seconds of CPU time for a case")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    # Of a machine that has other work, the clock says little.
    signal.signal(signal.SIGPROF, too_long)
    signal.signal(signal.SIGALRM, too_long)
    hostile.files()
    began, busy = time.monotonic(), time.process_time()
    done = 0
    with tempfile.TemporaryDirectory() as name:
        every = targets(Path(name))
        rounds = 0
        while done < options.cases and (options.seconds is None or time.monotonic() - began < options.seconds):
            rounds += 1
            for target, act in every.items():
                if rounds % RARE.get(target, 1):
                    continue
                case = random.Random(f"{seed} {target} {done}").randrange(1 << 63)
                signal.setitimer(signal.ITIMER_PROF, options.patience)
                signal.alarm(600)
                try:
                    act(case)
                except BaseException:
                    print(f"{target}, seed of the case {case}, after {done} cases of seed {seed}", flush=True)
                    raise
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
                    signal.alarm(0)
                done += 1
    print(
        f"seed {seed}: {done} cases over {len(every)} targets ({', '.join(every)}), {time.process_time() - busy:.0f} s of CPU: "
        "each was read, or refused by one family of errors with a message, in little memory"
    )


if __name__ == "__main__":
    main()
