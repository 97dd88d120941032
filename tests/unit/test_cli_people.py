"""What people meet on the command line: the same options everywhere, completion, `init`, `verify`, JSON, images and sequence to sequence."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import memfit
from memfit.cli import app
from memfit.cli.options import DecisionOptions, MachineOptions, SourceOptions
from memfit.core.errors import UsageError
from memfit.integrations.recipes.image_batches import DrawnImages, FileImages, ImageStream

TINY = ("--recipe", "gpt-tiny")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def told_on_standard_output(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + str(result.exception)
    return json.loads(result.stdout)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["profile", "plan", "train", "report", "verify"])
def test_commands_share_one_set_of_options(name: str) -> None:
    command: Any = typer.main.get_command(app)
    own = {parameter.name: parameter for parameter in command.commands[name].params}
    reference = {parameter.name: parameter for parameter in command.commands["report"].params}
    groups = [SourceOptions, MachineOptions, *([] if name == "profile" else [DecisionOptions])]
    shared = [field for group in groups for field in group.__dataclass_fields__]
    assert len(shared) >= 12
    for field in shared:
        mine, theirs = own[field], reference[field]
        assert (mine.opts, mine.help, mine.default) == (theirs.opts, theirs.help, theirs.default), field
    assert "--json" in own["json"].opts


def test_limits_by_tier_reach_the_plan_and_the_training() -> None:
    away = '{"format": 1, "blocks": {"transformer.h.0": {"weight_home": "disk", "state_home": "disk"}}}'
    for command, code, words in (("plan", 0, "of 1.0 KiB"), ("train", 2, "above disk_limit of 1.0 KiB")):
        result = CliRunner().invoke(app, [command, *TINY, "--plan", "-", "--disk-limit", "1KiB"], input=away)
        assert result.exit_code == code, result.output
        assert words in result.output, result.output


def test_profile_says_whether_a_plain_step_fits_the_limit() -> None:
    there = ("--hardware", "laptop-cpu")  # else this machine is measured
    assert "no, " in run("profile", *TINY, "--limit", "100MiB", *there)
    assert "yes" in run("profile", *TINY, "--limit", "8GiB", *there)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("memfit ver", "verify"),
        ("memfit plan --recipe gpt2", "gpt2-small"),
        ("memfit plan --hardware h2", "h200"),
        ("memfit train --allow int4", "int4-state"),
        ("memfit train --scheme j", "journal"),
        ("memfit init --task se", "seq2seq"),
    ],
)
def test_a_shell_completes_commands_and_values(words: str, wanted: str) -> None:
    split = words.split()
    environment = {"_MEMFIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(split) - 1)}
    result = CliRunner().invoke(app, [], prog_name="memfit", env=environment)
    assert result.output.split() == [wanted]


# --- init -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["text", "seq2seq", "images"])
def test_a_starter_script_is_short_imports_and_its_model_trains(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = f"starter_{task}"
    assert f"python {name}.py" in run("init", f"{name}.py", "--task", task, "--limit", "3GiB")
    text = (tmp_path / f"{name}.py").read_text()
    assert len(text.splitlines()) < 100
    assert 'default="3GiB"' in text and "NAME" not in text
    built = importlib.import_module(name).build(rows=2)
    model, optimizer, loss, loader = built
    with memfit.fit(model, optimizer, loss, next(iter(loader)), plan=memfit.Plan()) as job:
        assert job.step(next(iter(loader))).is_finite
    assert "is there already" in run("init", f"{name}.py", code=2)
    run("init", f"{name}.py", "--force", "--task", task)
    assert "is no name that Python imports" in run("init", "my-script.py", code=2)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "seq2seq", "images"])
def test_a_starter_script_runs_as_it_is(task: str, tmp_path: Path) -> None:
    file = tmp_path / "starter.py"
    run("init", str(file), "--task", task)
    child = subprocess.run(
        [sys.executable, str(file), "--steps", "2"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert child.stdout.splitlines()[-1].startswith("proof: predicted peak")


# --- verify and JSON ------------------------------------------------------------------------------


def test_verify_compares_a_plan_with_plain_pytorch() -> None:
    told = told_on_standard_output("verify", *TINY, "--steps", "1", "--json", "-")
    assert (told["kind"], told["steps"]) == ("bitwise", 1)
    assert told["compared"] > 20


def test_verify_of_a_directory_that_is_no_run_says_so(tmp_path: Path) -> None:
    assert str(tmp_path) in run("verify", str(tmp_path), code=2)


def test_train_tells_the_run_and_its_proof_as_json_alone() -> None:
    told = told_on_standard_output("train", *TINY, "--limit", "8GiB", "--steps", "2", "--json", "-")
    assert [step["step"] for step in told["steps"]] == [1, 2]
    assert told["amount"] == 2 * 4 * 32 and told["unit"] == "tokens"
    assert told["proof"]["limit_bytes"] == 8 << 30
    assert {"load", "first step", "steady"} <= {phase["name"] for phase in told["proof"]["phases"]}


# --- images, and sequence to sequence -------------------------------------------------------------


def t5(directory: Path) -> Path:
    from transformers import T5Config

    config: Any = T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config.save_pretrained(directory)
    return directory


def vit(directory: Path) -> Path:
    from transformers import ViTConfig

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3}
    config: Any = ViTConfig(**sizes, intermediate_size=64, image_size=16, patch_size=8)
    config.save_pretrained(directory)
    return directory


def test_a_sequence_to_sequence_model_is_profiled_and_trained(tmp_path: Path) -> None:
    model = ("--model", str(t5(tmp_path)), "--batch", "2", "--sequence", "16")
    assert "T5ForConditionalGeneration" in run("profile", *model)
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 40, encoding="utf-8")
    told = told_on_standard_output(
        "train", *model, "--data", str(text), "--limit", "8GiB", "--steps", "2", "--json", "-"
    )
    assert [step["loss"] is not None for step in told["steps"]] == [True, True]


def test_an_image_classifier_is_profiled_and_trained_on_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = ("--model", str(vit(tmp_path)), "--batch", "2")
    assert "2 images" in run("profile", *model)
    save_file(
        {"images": torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8), "labels": torch.arange(6) % 3},
        tmp_path / "images.safetensors",
    )
    data = ("--data", str(tmp_path / "images.safetensors"))
    told = told_on_standard_output("train", *model, *data, "--limit", "8GiB", "--steps", "2", "--json", "-")
    assert told["unit"] == "rows" and told["amount"] == 4


def test_images_of_another_shape_or_without_labels_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "images.safetensors"
    save_file({"images": torch.zeros(4, 3, 8, 8), "labels": torch.tensor([0, 1, 2, 5])}, file)
    for shape, classes, message in (((3, 16, 16), 6, "takes images of"), ((3, 8, 8), 3, "go from 0 to 2")):
        with pytest.raises(UsageError, match=message):
            FileImages(file, shape, classes)
    save_file({"images": torch.zeros(4, 3, 8, 8)}, file)
    with pytest.raises(UsageError, match="save_file"):
        FileImages(file, (3, 8, 8), 2)


def test_a_stream_of_images_goes_on_where_it_was() -> None:
    def stream() -> ImageStream:
        return ImageStream(DrawnImages((1, 4, 4), 3, count=7), batch_size=2, seed=5)

    first = stream()
    batches = [next(first) for _ in range(7)]  # three an epoch
    again = stream()
    for _ in range(4):
        next(again)
    position = again.state_dict()
    resumed = stream()
    resumed.load_state_dict(position)
    for batch in batches[4:]:
        assert all(torch.equal(batch[key], value) for key, value in next(resumed).items())
    with pytest.raises(ValueError, match="another seed"):
        ImageStream(DrawnImages((1, 4, 4), 3, count=7), batch_size=2, seed=6).load_state_dict(position)


@pytest.mark.parametrize("name", ["profile", "plan", "train", "verify", "export", "report"])
def test_a_commands_help_breaks_no_line_before_it_is_full(name: str) -> None:
    """Line ends of the source, 100 columns wide, would leave a terminal's line with a word or two."""
    shown = run(name, "--help").split("\u256d", 1)[0].splitlines()
    prose = [line.strip() for line in shown if line.strip() and "Usage:" not in line]
    width = max(map(len, prose))
    assert width > 60  # a terminal of 80 columns, with its margins
    for index in range(len(prose) - 1):
        if not prose[index].endswith("."):
            assert len(prose[index]) + 1 + len(prose[index + 1].split()[0]) > width - 4, prose[index]
