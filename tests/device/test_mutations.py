"""A test of the tests: each ordering of the accelerator path is taken out once, and something must fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerator.build import NoCompilerError, built
from device.mutations import MUTATIONS

TESTS = Path(__file__).parents[1]


def test_every_ordering_that_is_taken_out_is_noticed(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """In a process of its own, whatever accelerator this one has: the late device."""
    try:
        built()
    except NoCompilerError as error:
        pytest.skip(str(error))
    is_slow = request.config.getoption("--slow")
    # Without mutation the same tests run in this suite, on this device, unless another one is there.
    is_controlled = not is_slow and not torch.cuda.is_available()
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *("-p", "accelerator.mutants", "--mutations", "device.mutations"),
        *(
            "--device",
            "late",
            "--basetemp",
            str(tmp_path / "of the child"),
            *(["--slow"] if is_slow else []),
            *(["--no-control"] if is_controlled else []),
        ),
        str(TESTS / "device"),
    ]
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=TESTS.parent)
    assert result.returncode == 0, "\n".join(result.stdout.splitlines()[-60:]) + result.stderr
    assert "mutations were noticed" in result.stdout


def test_each_mutation_fits_the_code_of_today() -> None:
    """The slow ones too, which the default suite does not try: code that moves takes its mutation along."""
    stale: list[str] = []
    for mutation in MUTATIONS:
        try:
            mutation.code()
        except LookupError as error:
            stale.append(f"{mutation.says}: {error}")
    assert not stale, "\n".join(stale)
    assert len(MUTATIONS) >= 99
