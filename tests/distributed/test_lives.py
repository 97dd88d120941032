"""Ranks that are killed or stopped at drawn instants of their whole life: nobody waits longer than is said, and the run goes on with the same bits."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from distributed.lives import Lives, drawn, faults, is_named

FEW = 2


@pytest.mark.parametrize(("kind", "few", "each"), [(signal.SIGKILL, FEW, 1), (signal.SIGSTOP, 1, 4)])
def test_ranks_hear_of_one_that_ends_or_stops_in_time_and_the_run_goes_on_with_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, kind: signal.Signals, few: int, each: int
) -> None:
    """`--examples 200` draws 200 kills and 50 stops."""
    asked = request.config.getoption("--examples")
    count, draw, lives = int(asked) // each if asked else few, random.Random(int(kind)), Lives(tmp_path)
    first = drawn(draw, kind)
    for turn in range(1 if asked is None else 3):  # how long each phase takes
        assert lives.undisturbed(first, first.size, str(tmp_path / f"whole-{turn}"), goes_on=False)
    trials = [lives.trial(drawn(draw, kind)) for _ in range(count)]
    wrong = [text for trial in trials for text in faults(trial)]
    failed = [trial for trial in trials if trial["phase"] >= 2 and any(error for error, _, _ in trial["told"])]
    print(f"{count} signals, {len(failed)} failed the others, {sum(map(is_named, failed))} of them by number")
    print(f"longest waits: {sorted(max(trial['seconds']) for trial in trials)[-5:]} s")
    assert not wrong, "\n".join(wrong)
