"""A run is looked at and copied out of its store without its program: whole, by name, and continued by plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import memfit
from faults import small_run
from faults.small_run import adamw, build, loss, profile
from memfit.cli import app
from memfit.core.errors import StoreError, UnsupportedError
from memfit.core.plan import Plan
from memfit.job.loading import load
from memfit.runs.exporting import export_run, read_registered, remove_run, verify_run

SHARD_BYTES = 60_000


def train(model: str, plan: str, store: Path, *, until: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A run whose batches depend on the step alone."""
    made = build(model)
    optimizer = adamw(made)
    decided, options = small_run.PLANS[plan](profile(model))
    torch.manual_seed(5)
    with memfit.fit(made, optimizer, loss, batch(0), plan=decided, store=store, **options) as job:
        for step in range(job.steps, until):
            job.step(batch(step))
    return made, optimizer


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(29, (8, 7), generator=torch.Generator().manual_seed(step))}


def test_plain_pytorch_makes_the_next_step_of_an_exported_run(tmp_path: Path) -> None:
    train("gpt2", "resident", tmp_path / "run", until=2)
    saved = export_run(tmp_path / "run", tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    assert len([name for name in saved.files if name.startswith("model-")]) > 1
    plain = build("gpt2")
    for p in plain.parameters():
        torch.nn.init.zeros_(p)
    optimizer = adamw(plain)
    assert load(tmp_path / "out", plain, optimizer).steps == 2
    loss(plain, batch(2)).backward()
    optimizer.step()
    wanted, wanted_optimizer = train("gpt2", "resident", tmp_path / "run", until=3)
    for (name, p), q in zip(wanted.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name
        for key, value in wanted_optimizer.state[p].items():
            assert torch.equal(value, optimizer.state[q][key]), (name, key)


def test_a_run_below_the_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    train("tied-and-frozen", "resident", Path("~/run"), until=1)
    assert verify_run("~/run").is_whole
    assert export_run("~/run", "~/out").directory == tmp_path / "out"
    assert remove_run("~/run")
    assert not (tmp_path / "run").exists()


def test_from_pretrained_reads_an_exported_run(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    trained, _ = train("gpt2", "layer-major", tmp_path / "run", until=2)
    export_run(tmp_path / "run", tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    tokens = batch(9)["tokens"][:, :-1]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, trained.eval()(tokens).logits)


@pytest.mark.parametrize("plan", ["clipped", "bf16"])
def test_what_is_exported_is_what_the_run_gives_back(plan: str, tmp_path: Path) -> None:
    """Ties, frozen weights, buffers, masters."""
    trained, _ = train("tied-and-frozen", plan, tmp_path / "run", until=2)
    export_run(tmp_path / "run", tmp_path / "out")
    loaded = build("tied-and-frozen")
    for p in loaded.parameters():
        torch.nn.init.zeros_(p)
    load(tmp_path / "out", loaded)
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.state_dict()["passes"].abs().sum() > 0


def test_a_layout_that_is_not_row_major_comes_out_row_major(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    data = {"x": torch.randn(4, 3, 8, 8)}
    with memfit.fit(
        model, optimizer, lambda m, b: m(b["x"]).square().mean(), data, plan=Plan(), store=tmp_path / "run"
    ) as job:
        job.step(data)
    export_run(tmp_path / "run", tmp_path / "out")
    loaded = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    other = torch.optim.AdamW(loaded.parameters())
    load(tmp_path / "out", loaded, other)
    for p, q in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])


def test_registered_states_go_along(tmp_path: Path) -> None:
    small_run.train("tied-and-frozen", Plan(), tmp_path / "run", total=2)
    export_run(tmp_path / "run", tmp_path / "out")
    found = read_registered(tmp_path / "out")
    assert found.keys() == {"scheduler", "average", "data"}
    assert found["scheduler"]["last_epoch"] == 2
    generator = torch.Generator()
    generator.set_state(found["data"])


def test_what_only_a_job_decodes_is_not_exported_as_something_else(tmp_path: Path) -> None:
    model = build("tied-and-frozen")
    found = profile("tied-and-frozen")
    plan = small_run.replace(small_run.PLANS["bf16"](found)[0], splits_masters=True)
    optimizer = adamw(model)
    with memfit.fit(model, optimizer, loss, batch(0), plan=plan, allow={"bf16"}, store=tmp_path / "run") as job:
        job.step(batch(0))
    with pytest.raises(UnsupportedError, match="masters 'split', which only a job decodes"):
        export_run(tmp_path / "run", tmp_path / "out")
    again = build("tied-and-frozen")
    with memfit.fit(again, adamw(again), loss, batch(0), allow={"bf16"}, store=tmp_path / "run") as job:
        assert job.steps == 1
        job.step(batch(1))
    assert not (tmp_path / "out").exists()


def test_the_shell_verifies_exports_and_tells_damage(tmp_path: Path) -> None:
    small_run.train("tied-and-frozen", Plan(), tmp_path / "run", total=1)
    run = CliRunner().invoke
    found = run(app, ["verify", str(tmp_path / "run")])
    assert found.exit_code == 0, found.output
    assert "step 1" in found.output
    assert "all as written" in found.output
    found = run(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    assert "optimizer.safetensors" in found.output
    found = run(app, ["export", str(tmp_path / "run"), str(tmp_path / "again"), "--json"])
    told = json.loads(found.stdout)
    written = {path.name: path.stat().st_size for path in (tmp_path / "again").iterdir()}
    assert "optimizer.safetensors" in told["files"] and told["files"].items() <= written.items()
    with (tmp_path / "run" / "homes-0.bin").open("r+b") as file:
        content = bytearray(file.read())
        for at in range(0, len(content), 512):
            content[at] ^= 1
        file.seek(0)
        file.write(content)
    found = run(app, ["verify", str(tmp_path / "run")])
    assert found.exit_code == 1
    assert "DAMAGED" in found.output
    assert "'embedding.weight" in found.output
    found = run(app, ["export", str(tmp_path / "run"), str(tmp_path / "other")])
    assert found.exit_code == 2
    assert not (tmp_path / "other").exists()
    assert run(app, ["verify", str(tmp_path / "nothing")]).exit_code == 2


def test_a_run_is_removed_and_nothing_else(tmp_path: Path) -> None:
    small_run.train("tied-and-frozen", Plan(), tmp_path / "run", total=1)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert remove_run(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
    assert not remove_run(tmp_path / "run")
    memfit_home = tmp_path / "other"
    from memfit.store import DiskStore, RegionSpec

    DiskStore.create(memfit_home, {"a": RegionSpec(nbytes=4096)}, identity={"made-by": "memfit"}).close()
    with pytest.raises(StoreError, match="another's"):
        remove_run(memfit_home)
