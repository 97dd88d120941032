"""What a newcomer types first: a function of their own to train, versions, plans through a pipe, machines without the extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import memfit
from memfit.cli import app
from memfit.cli.source import read_parts
from memfit.core.plan import Plan

RECIPE = ("--recipe", "gpt-tiny")
PARTS = """
import torch
import memfit

data = torch.utils.data.TensorDataset(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4)

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def built():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def sampled():
    return *built(), loss, next(iter(torch.utils.data.DataLoader(data, batch_size=4)))

def loading():
    return *built(), loss, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

def resumable():
    return *built(), loss, memfit.ResumableLoader(data, batch_size=4, seed=5)

def both():
    return *sampled(), memfit.ResumableLoader(data, batch_size=4, seed=5)

def nothing():
    return *built(), loss, iter(())

def three():
    return built(), loss, None
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a user's functions, in the working directory."""
    name = f"parts_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*arguments: str, code: int = 0, piped: str | None = None) -> Any:
    result = CliRunner().invoke(app, list(arguments), input=piped)
    assert result.exit_code == code, result.output + str(result.exception)
    return result


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    "function",
    [
        "sampled",
        "resumable",
        pytest.param("loading", marks=pytest.mark.slow),
        pytest.param("both", marks=pytest.mark.slow),
    ],
)
def test_train_takes_the_function_that_profile_and_plan_take(parts: str, function: str, tmp_path: Path) -> None:
    name = f"{parts}:{function}"
    assert "one step of 4 rows" in run("profile", name).output
    said = run(
        "train",
        name,
        "--limit",
        "2GiB",
        "--steps",
        "3",
        "--seed",
        "7",
        "--save",
        str(tmp_path / "out"),
        "--report",
        str(tmp_path / "report.html"),
    ).output
    assert '"measured in step","3"' in (tmp_path / "report.html").read_text()
    assert "rows/s" in said and "proof: predicted peak" in said and "BREACHED" not in said
    assert ("on the one sample" in said) == (function == "sampled")

    # The same by hand, in plain PyTorch.
    torch.manual_seed(7)
    made = getattr(sys.modules[parts], function)()
    model, optimizer, loss = made[:3]
    batches = [made[3]] * 3
    if function != "sampled":
        source = iter(made[-1])
        batches = []
        while len(batches) < 3:
            batch = next(source, None)
            if batch is None:
                source = iter(made[-1])
            else:
                batches.append(batch)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    saved = weights_of(tmp_path / "out")
    for key, value in model.state_dict().items():
        assert torch.equal(saved[key], value), key


def test_a_users_run_goes_on_in_its_store_where_its_loader_stood(parts: str, tmp_path: Path) -> None:
    for store, steps in (("whole", (4,)), ("halves", (2, 4))):
        for count in steps:
            more = ("--fresh",) if store == "whole" else ()
            arguments = ("--limit", "2GiB", "--store", str(tmp_path / store), "--save", str(tmp_path / f"{store}-out"))
            # A run of two that had its steps is given two more.
            said = run("train", f"{parts}:resumable", "--steps", "4" if store == "whole" else "2", *arguments, *more)
            assert f"committed: step {count}" in said.output
    one, other = (weights_of(tmp_path / f"{store}-out") for store in ("whole", "halves"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("nothing", (), "gives no batches"),
        ("three", (), "must return (model, optimizer, loss, sample), not tuple of 3"),
        ("loading", ("--store", "run"), "cannot say where it is: return a memfit.ResumableLoader"),
        ("sampled", RECIPE, "brings its own model and batches"),
        ("sampled", ("--data", "x"), "brings its own model and batches"),
    ],
)
def test_a_function_that_cannot_be_trained_is_one_message(
    parts: str, function: str, options: tuple[str, ...], message: str
) -> None:
    said = " ".join(run("train", f"{parts}:{function}", "--limit", "2GiB", *options, code=2).output.split())
    assert message in said


def test_a_plan_goes_through_a_pipe_and_nothing_else_with_it(parts: str) -> None:
    piped = run("plan", f"{parts}:sampled", "--limit", "2GiB", "--json", "-")
    plan = Plan.from_json(piped.stdout)
    assert json.loads(piped.stdout)["format"] == 1
    assert "Pareto front" in piped.stderr
    told = run("report", f"{parts}:sampled", "--plan", "-", piped=piped.stdout).output
    assert "given by the user" in told
    assert plan.microbatches == 1


def test_the_version_is_told() -> None:
    assert run("--version").output.startswith(f"memfit {memfit.__version__}, torch {torch.__version__.split('+')[0]}")


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "tokenizers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

sys.meta_path.insert(0, Missing())
from memfit.cli import main

mine, theirs = sys.argv[1], sys.argv[2:]
for arguments in (["train"], ["profile", "--recipe", "gpt-tiny"], ["plan", "--model", "."], ["train", mine, "--steps", "2"]):
    sys.argv = ["memfit", *arguments]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code, flush=True)
import memfit
try:
    with memfit.infer("."):
        pass
except memfit.UsageError as error:
    print(error)
"""


def test_without_the_extra_what_needs_it_says_so_and_a_function_of_the_users_trains(parts: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, f"{parts}:sampled"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    told = done.stderr.strip().splitlines()
    assert len(told) == 3
    for line in told:
        assert line.startswith("memfit: ")
        assert "is not installed: pip install 'memfit[transformers]'" in line
    assert done.stdout.count("ended with 2") == 3
    assert done.stdout.count("ended with 0") + done.stdout.count("ended with None") == 1
    assert "proof: predicted peak" in done.stdout
    assert "pip install 'memfit[transformers]'" in done.stdout.strip().splitlines()[-1]


def test_a_list_of_batches_stands_for_a_loader_and_a_list_of_tensors_is_a_batch() -> None:
    row, label = torch.ones(1, 2), torch.zeros(1)
    for batches in ([(row, label)] * 3, [{"x": row}] * 3, [[row, label]] * 3):
        found = read_parts("mine:build", (None, None, None, batches))
        assert found.batches is batches and found.sample is batches[0]
    for batch in ([row, label], (row, label), {"x": row}, [], row):
        found = read_parts("mine:build", (None, None, None, batch))
        assert found.batches is None and found.sample is batch
    # Five things leave nothing to guess.
    found = read_parts("mine:build", (None, None, None, [(row, label)], [[(row, label)]]))
    assert found.sample == [(row, label)] and found.batches == [[(row, label)]]
