"""The command line on the smallest recipe: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from memfit.cli import app
from memfit.core.errors import UsageError
from memfit.core.plan import Plan
from memfit.core.step_report import joined_names
from memfit.core.tiers import Tier

RECIPE = ("--recipe", "gpt-tiny")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def run_streams(*arguments: str) -> str:
    """What goes to standard output alone."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.stdout


def test_profile_shows_blocks_categories_and_the_largest_saved_tensors() -> None:
    text = run("profile", *RECIPE, "--largest", "3")
    # 64 * 3 * 64 + 192 and so on: a layer has 49,984 parameters, the whole model 134,912.
    # Its two layers are equal, and share a row.
    layers = [line for line in text.splitlines() if line.startswith("transformer.h.")]
    assert [" ".join(line.split()[:12]) for line in layers] == ["transformer.h.0-1 2 x 1 2 x 195.2 KiB 2 x 195.2 KiB"]
    assert "2 x 390.5 KiB" in layers[0]
    weights = next(line for line in text.splitlines() if line.startswith("weights"))
    assert weights.split()[1:] == [f"{134_912 * 4 / 1024:.1f}", "KiB"]
    assert "_log_softmax" in text
    assert "predicted peak of a plain step" in text
    told = json.loads(run_streams("profile", *RECIPE, "--json", "-"))
    # Each row's last figure is the line of the program that made it.
    whole = {row[0]: row[3] for row in told["largest_saved"]}
    activation = next(line for what, line in whole.items() if "aten.tanh" in what)
    path, number = activation.rsplit(":", maxsplit=1)
    code = (Path(transformers.__file__).parents[1] / path).read_text().splitlines()[int(number) - 1]
    assert "tanh" in code
    for row in told["break_even"]:
        # Over a link of that speed, away and back take as long as making it again.
        speed, again_s = row["break_even_bytes_per_s"], row["recompute"]["s"]
        assert again_s is None or 2 * row["nbytes"] / speed == pytest.approx(again_s)
        assert row["keep"]["idle_byte_s"] == pytest.approx(
            row["count"] * row["nbytes"] * row["keep"]["idle_s"], rel=1.0
        )
        assert row["reload"]["s"]["disk"] > 0
    assert any("transformer.h." in row["saved_by"] for row in told["break_even"])
    assert dict(told["plain"])["weights"] == 134_912 * 4
    assert {row["name"]: (row["count"], row["weight_bytes"]) for row in told["blocks"]}["transformer.h.0-1"] == (
        2,
        49_984 * 4,
    )
    assert "tiled" not in text


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["h.0.attn", "h.1.attn", "h.3.attn", "h.1.attn"], "h.0-1,3.attn"),
        (["encoder.5.layer.0", "encoder.6.layer.0", "decoder"], "encoder.5-6.layer.0, decoder"),
        (["0", "1"], "0-1"),
        (["layer2"], "layer2"),
        (
            ["mm in h.0.mlp: (4, 2)", "mm in h.1.mlp: (4, 2)", "mm in h.1.mlp: (4, 4)"],
            "mm in h.0-1.mlp: (4, 2), mm in h.1.mlp: (4, 4)",
        ),
    ],
)
def test_names_that_differ_in_a_number_are_joined(names: list[str], joined: str) -> None:
    assert joined_names(names) == joined


def test_plan_writes_a_plan_that_reads_back_and_report_prices_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = run("plan", *RECIPE, "--limit", "8GiB", "--json", str(path), "--text")
    plan = Plan.from_json(path.read_text())
    assert plan.microbatches == 1
    assert "chosen" in text and "limit" in text and "8.00 GiB" in text
    assert "forward" in text and "update" in text
    assert "Techniques of the field" in text and "checkpoint-every-block" in text
    priced = run("plan", *RECIPE, "--plan", str(path))
    assert "given by the user" in priced
    report = run("report", *RECIPE, "--plan", str(path), "--largest", "3")
    assert "given by the user" in report
    assert "Largest moments" in report and "Predicted peak, at" in report


def test_report_shows_what_a_plan_on_disk_moves(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    home = {"weight_home": Tier.DISK, "gradient_home": Tier.DISK, "state_home": Tier.DISK}
    path.write_text(json.dumps({"format": 1, "blocks": {"transformer.h.0": home}}))
    page, data, trace = tmp_path / "report.html", tmp_path / "report.json", tmp_path / "trace.json"
    files = ("--html", str(page), "--json", str(data), "--perfetto", str(trace))
    report = run("report", *RECIPE, "--plan", str(path), *files)
    assert "Moved in a step" in report and "weight" in report
    assert f"the page is in {page}" in report
    told = json.loads(data.read_text())
    assert told["blocks"][2] == "transformer.h.0" and told["device"] == "cpu"
    assert told["from_plain"][-1]["name"].endswith("weights of 1 blocks on disk")
    assert "<title>memfit report: " in page.read_text()
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"X", "C", "M"}
    refused = run("report", *RECIPE, "--plan", str(path), "--html", str(tmp_path), code=2)
    assert "cannot be written" in refused


def test_a_limit_that_nothing_fits_is_one_message_with_the_smallest_that_would() -> None:
    text = run("plan", *RECIPE, "--limit", "10MiB", code=2)
    assert text.startswith("memfit: no plan fits the limit of 10.0 MiB")
    assert "smallest limit" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--recipe", "nothing"), "no recipe is called 'nothing'"),
        (("plan",), "name one of MODULE:FUNCTION, --recipe and --model; none of them"),
        (("profile", *RECIPE, "--transformers", "x"), "2 of them were given"),
        (("plan", *RECIPE, "--limit", "8q"), "cannot read the size '8q'"),
        (("plan", "--transformers", "nowhere.json"), "there is no file 'nowhere.json'"),
        (("profile", "nonsense"), "is not MODULE:FUNCTION"),
        (("profile", "no_such_module_here:f"), "no module 'no_such_module_here'"),
        (("profile", "json:nothing"), "has no function 'nothing'"),
        (("profile", "os:getcwd"), "must return (model, optimizer, loss, sample), not str"),
        (("plan", *RECIPE, "--json", "/no/such/directory/plan.json"), "cannot be written"),
    ],
)
def test_what_cannot_be_is_one_clear_message(arguments: tuple[str, ...], message: str) -> None:
    text = run(*arguments, code=2)
    assert text.startswith("memfit: ")
    assert message in text
    assert "Traceback" not in text


def test_a_place_that_nothing_can_be_saved_to_is_known_before_training(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for place, message in (("notes", "is a file"), ("", "holds the directory")):
        (tmp_path / "inside").mkdir(exist_ok=True)
        text = run("train", *RECIPE, "--limit", "8GiB", "--steps", "1", "--save", str(tmp_path / place), code=2)
        assert message in text
        assert "reading text" not in text


def test_traceback_shows_where_an_error_was_raised() -> None:
    result = CliRunner().invoke(app, ["--traceback", "plan", "--recipe", "nothing"])
    assert isinstance(result.exception, UsageError)


def test_a_function_of_the_users_gives_the_four_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_training_parts.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))\n"
        "    return model, torch.optim.SGD(model.parameters(), momentum=0.9), lambda m, b: m(b).mean(), torch.randn(4, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = run("profile", "my_training_parts:build")
    weights = next(line for line in text.splitlines() if line.startswith("weights"))
    assert weights.split()[1:] == ["432", "B"]


def test_a_transformers_configuration_needs_no_weights(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config: Any = LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=2,
        intermediate_size=11008,
        num_attention_heads=32,
        vocab_size=32000,
        max_position_embeddings=64,
    )
    config.save_pretrained(tmp_path)
    text = run("profile", "--transformers", str(tmp_path / "config.json"), "--batch", "2", "--sequence", "16")
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    line = next(line for line in text.splitlines() if line.startswith("model.layers.0-1"))
    assert line.split()[6] == f"{layer * 4 / 2**20:.1f}"
    text = run("plan", "--transformers", str(tmp_path), "--batch", "2", "--sequence", "16", "--limit", "64GiB")
    assert "LlamaForCausalLM" in text and "chosen" in text
    text = run("profile", "--transformers", str(tmp_path), "--batch", "2", "--sequence", "65", code=2)
    assert "takes at most 64" in text


def test_help_answers_without_loading_transformers() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom memfit.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert all(name in result.output for name in ('profile', 'plan', 'train', 'report')), result.output\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_interrupt_that_python_throws_away_comes_again() -> None:
    program = """
import signal, sys, time, weakref
from memfit.cli.interrupted import hear_again

class Thing:
    pass

def called(_):
    signal.raise_signal(signal.SIGINT)  # KeyboardInterrupt, where nobody can catch it

signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "again":
    hear_again()
thing = Thing()
watch = weakref.ref(thing, called)
try:
    del thing
    time.sleep(5 if sys.argv[1] == "again" else 0.5)
    print("slept")
except KeyboardInterrupt:
    print("heard")
"""
    for how, wanted in (("again", "heard"), ("plain", "slept")):
        found = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == wanted
        assert ("Exception ignored" in found.stderr) is (how == "plain")


def test_a_plans_table_says_what_was_taken_off_the_limit_of_that_device() -> None:
    from memfit.cli.plan_command import what_is_held

    assert "interpreter" in what_is_held("cpu")
    assert "interpreter" not in what_is_held("NVIDIA H100")


def test_plans_for_ranks_that_are_not_here_are_priced_on_a_described_machine() -> None:
    text = run("plan", *RECIPE, "--ranks", "8", "--hardware", "h100-sxm")
    assert "uniform plans for 8 ranks that fits" in text
    assert "sums over the rows of 8 ranks" in text
    assert "nothing is known of the links" in run("plan", *RECIPE, "--ranks", "8", "--hardware", "rtx-3090", code=2)
