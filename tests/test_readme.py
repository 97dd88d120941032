"""What README and the guide show runs: their Python blocks, in order, on a small model; and the names that they tell of are there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import memfit
from memfit.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
BOTH = README + GUIDE


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _loader(batches: list[Any]) -> Any:
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _objects() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [(torch.randn(8, 8), torch.arange(8) % 4) for _ in range(4)]
    return {
        "torch": torch,
        "memfit": memfit,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "loss": _loss,
        "compute_loss": _loss,
        "loader": _loader(batches),
        "sample": batches[0],
        "parts": [tuple(tensor[2 * m : 2 * m + 2] for tensor in batches[0]) for m in range(4)],
    }


def _blocks() -> list[str]:
    # A machine with less than 8 GiB would refuse a limit of that; this process may hold more than a fresh one.
    return [
        block.replace('limit="8GiB"', 'limit="2GiB"')
        .replace('limit="640MiB"', 'limit="2GiB"')
        .replace("1024", "64")
        .replace("range(32)", "range(4)")
        for block in re.findall(r"```python\n(.*?)```", BOTH, re.DOTALL)
    ]


@pytest.mark.parametrize("index", range(len(_blocks())))
def test_a_python_block_of_readme_and_guide_runs(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = _objects()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(_blocks()[index], names)
    if "job" in names:
        names["job"].close()
    else:
        assert all(p.grad is not None for p in names["model"].parameters())


def test_an_accumulation_loop_and_what_readme_puts_in_its_place_train_alike() -> None:
    (block,) = [block for block in _blocks() if "# before" in block]
    before, _, after = block.partition("# after")
    plain, mine = _objects(), _objects()
    exec(before, plain)
    # One batch that is four times as large.
    whole = tuple(torch.cat(parts) for parts in zip(*mine["loader"], strict=True))
    mine.update(loader=_loader([whole]), sample=whole)
    exec("#" + after, mine)
    mine["job"].close()
    for theirs, ours in zip(plain["model"].parameters(), mine["model"].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_names_and_arguments_that_readme_tells_of_are_there() -> None:
    for name in set(re.findall(r"\bmemfit\.([a-z_]+)\(", BOTH)):
        assert callable(getattr(memfit, name)), name
    for name in set(re.findall(r"\bjob\.([a-z_]+)\(", BOTH)):
        assert callable(getattr(memfit.Job, name)), name
    told = set(re.findall(r"fit\(\.\.\., ([a-z_]+)=", BOTH)) | set(re.findall(r"fit\(([a-z_]+)=", BOTH))
    assert told
    assert told <= set(inspect.signature(memfit.fit).parameters)


def _keywords_by_group_in_docstring() -> dict[str, list[str]]:
    arguments = (inspect.getdoc(memfit.fit) or "").split("\nArgs:\n")[1].split("\n\nReturns:")[0]
    found: dict[str, list[str]] = {}
    for group, name in re.findall(r"^    (?:-- (.*) --|(\w+): )", arguments, re.MULTILINE):
        if group:
            found[group] = []
        else:
            found[list(found)[-1]].append(name)
    return found


def _keywords_by_group_in_readme() -> dict[str, list[str]]:
    table = GUIDE.split("### Arguments of `fit`")[1].split("\n### ")[0]
    found: dict[str, list[str]] = {}
    for group, names in re.findall(r"^\| ([a-z ]*?) ?\| (`[a-z_`, ]+`) \|", table, re.MULTILINE):
        if group:
            found[group] = []
        found[list(found)[-1]] += re.findall(r"`(\w+)`", names)
    return found


def test_every_keyword_of_fit_is_documented_once_in_its_group() -> None:
    """In the order of the signature: in the docstring, and the optional ones in README too."""
    parameters = inspect.signature(memfit.fit).parameters
    told = _keywords_by_group_in_docstring()
    assert [name for names in told.values() for name in names] == list(parameters)
    optional = [name for name, one in parameters.items() if one.default is not inspect.Parameter.empty]
    table = _keywords_by_group_in_readme()
    assert [name for names in table.values() for name in names] == optional
    assert list(table) == ["what to fit into", "what may change", "where homes are", "the batch", "the run"]
    assert {group: names for group, names in told.items() if group != "what is trained"} == table


def test_files_that_readme_names_are_there() -> None:
    named = set(re.findall(r"\]\(([^)#]+\.(?:md|png)|LICENSE)\)", README)) | set(
        re.findall(r"((?:examples|benchmarks|tests)/[a-z_/]+\.py)", BOTH)
    )
    assert len(named) > 8
    for name in named:
        assert (ROOT / name).is_file(), name


def test_commands_and_options_that_readme_shows_are_there() -> None:
    commands = re.findall(r"`memfit ([a-z]+)([^`]*)`", BOTH)
    assert {name for name, _ in commands} >= {"train", "verify", "export"}
    for name, rest in commands:
        told = CliRunner().invoke(app, [name, "--help"])
        assert told.exit_code == 0, name
        for option in re.findall(r"--[a-z]+", rest):
            assert option in told.output, (name, option)


def test_make_targets_that_readme_shows_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:`|^)make ([a-z]+)", BOTH, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_readme_is_read_in_two_minutes() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert len(prose.split()) < 600  # at 300 words a minute
    assert README.count("![") == 1
    (ten_lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert ten_lines.count("memfit.fit(") == 1
    # Figures beside others are those of the page with the commands.
    measured = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    table = README.split("## Beside others")[1].split("\n\n")[2]
    figures = re.findall(r"\d\.\d\d / \d\.\d\d|\d,\d{3}", table)
    assert len(figures) >= 10
    assert [figure for figure in figures if figure not in measured] == []


@pytest.mark.slow
def test_the_ten_lines_train_inside_their_limit_in_a_process_of_their_own(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "ten.py").write_text(block, encoding="utf-8")
    child = subprocess.run([sys.executable, "ten.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    steady = child.stdout.splitlines()[-1].split()
    assert steady[:2] == ["steady", "9"]
    assert float(steady[4]) < 640 and steady[5] == "MiB"
