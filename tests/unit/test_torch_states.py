"""`job.save(form="trainer")`: weights for `from_pretrained`, and states as `torch.save` writes them, a parameter at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit.core.errors import StoreError, UsageError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import StateFormat
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.job import torch_states

WIDTH, LAYERS = 64, 4
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
AWAY = Plan(blocks={str(index): DISK for index in range(LAYERS)})


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 1e-2}]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(groups(model), lr=1e-3, amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(groups(model), lr=1e-3, momentum=0.9),
    "Adafactor": lambda model: torch.optim.Adafactor(groups(model), lr=1e-3),
    "without states": lambda model: torch.optim.SGD(groups(model), lr=1e-3),
}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and found.stride() == expected.stride() and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


@pytest.mark.thinned
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("plan", [Plan(), AWAY], ids=["resident", "disk"])
def test_the_file_is_what_torch_would_have_saved(plan: Plan, name: str, tmp_path: Path) -> None:
    model = build()
    optimizer = OPTIMIZERS[name](model)
    with memfit.fit(model, optimizer, loss_of, torch.randn(4, WIDTH), plan=plan) as job:
        job.save(tmp_path / "before", form="trainer")
        job.step(torch.randn(4, WIDTH))
        job.save(tmp_path / "after", form="trainer")
        job.save(tmp_path / "weights", form="weights")
        expected = optimizer.state_dict()
        weights = {key: value.clone() for key, value in _whole(job, model).items()}
    assert same(torch.load(tmp_path / "after" / "optimizer.pt", weights_only=True), expected)
    assert torch.load(tmp_path / "before" / "optimizer.pt", weights_only=True)["state"] == {}
    for name, files in (("after", {"model.safetensors", "optimizer.pt"}), ("weights", {"model.safetensors"})):
        assert same(load_file(tmp_path / name / "model.safetensors"), weights)
        assert {path.name for path in (tmp_path / name).iterdir()} == files


def _whole(job: memfit.Job, model: nn.Module) -> dict[str, Tensor]:
    with job.weights():
        return {key: value.detach().clone() for key, value in model.state_dict().items()}


def test_states_in_few_bits_are_saved_decoded(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = Plan(blocks=AWAY.blocks, state_format=StateFormat.INT8)
    with memfit.fit(model, optimizer, loss_of, torch.randn(4, WIDTH), plan=plan, allow={"int8-state"}) as job:
        job.step(torch.randn(4, WIDTH))
        job.save(tmp_path, form="trainer")
        assert same(torch.load(tmp_path / "optimizer.pt", weights_only=True), optimizer.state_dict())


def test_one_parameters_states_are_in_memory_at_a_time(tmp_path: Path) -> None:
    allocator = install()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with memfit.fit(model, optimizer, loss_of, torch.randn(4, 512), plan=AWAY) as job:
        job.step(torch.randn(4, 512))
        gc.collect()
        before = allocator.stats().live_bytes
        allocator.reset_peak()
        job.save(tmp_path, form="trainer")
        taken = allocator.stats().peak_bytes - before
    one = 2 * 4 * 512 * 512
    # Pieces of the weights' file, or a parameter's states twice: as read, and as written.
    assert taken < max(2 * one, 2 * 8 * 2**20) + 2**20 < LAYERS * one * 3


def test_a_full_disk_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with memfit.fit(model, optimizer, loss_of, torch.randn(4, WIDTH), plan=AWAY) as job:
        job.step(torch.randn(4, WIDTH))
        job.save(tmp_path, form="trainer")
        expected = optimizer.state_dict()
        job.step(torch.randn(4, WIDTH))

        def full(_: Any, file: Any) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(StoreError, match="optimizer"):
            job.save(tmp_path, form="trainer")
        monkeypatch.undo()
    assert same(torch.load(tmp_path / "optimizer.pt", weights_only=True), expected)
    assert not (tmp_path / "optimizer.pt.new").exists()


def test_tensors_that_the_system_moves_in_parts_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with more than 2 GiB."""
    values, file = torch.arange(1000.0), tmp_path / "states.pt"
    torch.save({"a": values}, file)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda number, into, offset: preadv(number, [into[0][:999]], offset))
    with FakeTensorMode():
        places = torch.load(file)
    with file.open("r+b") as opened:
        assert torch.equal(torch_states._value(opened.fileno(), "a", places["a"]), values)
        opened.truncate(500)
        with pytest.raises(StoreError, match="ends in the middle of 'a'"):
            torch_states._value(opened.fileno(), "a", places["a"])


def test_extra_has_no_place_there(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with (
        memfit.fit(model, optimizer, loss_of, torch.randn(4, WIDTH)) as job,
        pytest.raises(UsageError, match="no place for extra"),
    ):
        job.save(tmp_path, form="trainer", extra={"a": 1})


@pytest.mark.parametrize("plan", [Plan(), AWAY], ids=["resident", "disk"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_file_of_torchs_is_read_into_the_homes(plan: Plan, name: str, tmp_path: Path) -> None:
    """States and settings of a plain optimizer, whose file may go as soon as it was read."""
    model = build()
    plain = OPTIMIZERS[name](model)
    rows = torch.randn(4, WIDTH)
    for _ in range(2):
        loss_of(model, rows).backward()
        plain.step()
        plain.zero_grad()
    plain.param_groups[0]["lr"] = 0.125
    expected, weights = plain.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    file = tmp_path / "optimizer.pt"
    torch.save(expected, file)
    expected = torch.load(file, weights_only=True)
    other = build()
    other.load_state_dict(weights)
    optimizer = OPTIMIZERS[name](other)
    with memfit.fit(other, optimizer, loss_of, rows, plan=plan) as job:
        assert job.load_states(file).steps == 0
        content = file.read_bytes()
        file.write_bytes(bytes(len(content)))
        assert same(optimizer.state_dict(), expected)
        job.step(rows)
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(StoreError, match="optimizer.pt"):
            job.load_states(file)
    loss_of(model, rows).backward()
    plain.step()
    assert all(map(torch.equal, other.parameters(), model.parameters()))
