"""A run in another arithmetic goes on in a new process as if it had never stopped: fp16 with its loss scale, states in few bits, weights without masters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from faults import small_run
from memfit.core.errors import UnsupportedError
from memfit.job.loading import load
from memfit.runs.exporting import export_run
from memfit.store import verify

TESTS = Path(__file__).parents[1]
TOTAL = 6
STEEPNESS = {"fp16": 25.0, "fp16 resident": 25.0}
QUICK = ("fp16",)
GO_ON = f"""
import json, sys
from pathlib import Path
from faults.small_run import train
from memfit.core.numerics import ALLOWANCES
for name, store, steepness in json.loads(sys.argv[1]):
    found = train("wide", None, Path(store), total={TOTAL}, steepness=steepness, allow=set(ALLOWANCES))
    print(json.dumps([name, found.first, found.digest(), found.skipped]))
"""


# torch says so of a first step that an overflow skipped, with GradScaler as well.
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(n for n in small_run.FORMATS if n not in QUICK), marks=pytest.mark.slow)]
)
def test_a_run_in_another_format_goes_on_in_a_new_process_bit_for_bit(names: tuple[str, ...], tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        whole: dict[str, small_run.Result] = {}
        for n in names:
            (tmp_path / n).mkdir()
            whole[n] = small_run.train("wide", n, tmp_path / n / "whole", total=TOTAL, steepness=STEEPNESS.get(n, 1.0))
            small_run.train("wide", n, tmp_path / n / "parts", total=TOTAL, stop=3, steepness=STEEPNESS.get(n, 1.0))
            assert verify(tmp_path / n / "parts").is_whole
    asked = [[n, str(tmp_path / n / "parts"), STEEPNESS.get(n, 1.0)] for n in names]
    child = subprocess.run(
        [sys.executable, "-c", GO_ON, json.dumps(asked)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        check=False,
    )
    assert child.returncode == 0, child.stderr
    for name, first, digest, skipped in map(json.loads, child.stdout.splitlines()):
        assert (first, digest) == (3, whole[name].digest()), name
        assert skipped == [step for step in whole[name].skipped if step >= 3]
        if name in STEEPNESS:  # the loss scale went on falling where it stood, and training began after
            assert 0 < len(skipped) < len(whole[name].skipped) < TOTAL


def test_states_that_rest_in_few_bits_are_exported_as_the_optimizer_holds_them(tmp_path: Path) -> None:
    for name in ("int4-state",):
        with torch.random.fork_rng(devices=[]):
            trained = small_run.train("wide", name, tmp_path / name, total=2)
        export_run(tmp_path / name, tmp_path / f"{name} out")
        model = small_run.build("wide")
        optimizer = small_run.adamw(model)
        load(tmp_path / f"{name} out", model, optimizer)
        for key, value in model.state_dict().items():
            assert torch.equal(value, trained.kept[key]), key
        found = {
            f"{n}.{k}": torch.as_tensor(v) for n, s in optimizer.state_dict()["state"].items() for k, v in s.items()
        }
        assert found.keys() <= trained.kept.keys()
        for key, value in found.items():
            assert torch.equal(value, trained.kept[key]), key
            assert value.dtype == torch.float32


def test_split_masters_are_not_exported_as_something_else(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        small_run.train("wide", "split masters", tmp_path / "run", total=1)
    with pytest.raises(UnsupportedError, match="masters 'split', which only a job decodes"):
        export_run(tmp_path / "run", tmp_path / "out")
