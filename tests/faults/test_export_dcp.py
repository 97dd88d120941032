"""A run is copied out as a checkpoint of torch.distributed.checkpoint, whose own load fills a plain model and optimizer from it."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from typer.testing import CliRunner

from faults.small_run import adamw, build
from faults.test_export import train
from memfit.cli import app
from memfit.core.errors import StoreError, UsageError
from memfit.files import dcp
from memfit.runs.exporting import export_run


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What a program without memfit does; returns the number of steps."""
    weights, states = cast("tuple[dict[str, Any], dict[str, Any]]", get_state_dict(model, optimizer))
    for tensors in (weights, *states["state"].values()):
        for tensor in tensors.values():
            tensor.detach().fill_(0)
    whole: dict[str, Any] = {"model": weights, "optim": states, "steps": -1}
    with warnings.catch_warnings():
        # It warns that there is one process.
        warnings.simplefilter("ignore", UserWarning)
        load_checkpoint(whole, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
    return whole["steps"]


def test_torch_loads_weights_buffers_states_and_settings_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties, frozen weights, buffers, masters; tensors in chunks of a few rows, and several files."""
    trained, trained_optimizer = train("tied-and-frozen", "bf16", tmp_path / "run", until=2)
    monkeypatch.setattr(dcp, "CHUNK_BYTES", 1000)
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "dcp", "--shard", "20KB"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files[:2] == [".metadata", "__0_0.distcp"]
    assert len(files) > 3
    plain = build("tied-and-frozen")
    plain.load_state_dict({name: torch.zeros_like(value) for name, value in plain.state_dict().items()})
    optimizer = adamw(plain)
    assert load(tmp_path / "out", plain, optimizer) == 2
    for name, value in trained.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name
    assert optimizer.param_groups[0]["lr"] == trained_optimizer.param_groups[0]["lr"]
    for (name, p), q in zip(trained.named_parameters(), plain.named_parameters(), strict=True):
        for key, value in trained_optimizer.state[p].items():
            assert torch.equal(value, optimizer.state[q[1]][key]), (name, key)


@pytest.mark.parametrize("room", [0, 5000, 60_000])
def test_a_disk_that_fills_up_is_told_wherever_it_does(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's serializer, in C++, tells of a failed write by an error of its own."""
    train("tied-and-frozen", "resident", tmp_path / "run", until=1)
    opened = Path.open

    class Full:
        left = room

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, data: Any) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.stream.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

    def open_full(self: Path, mode: str = "r", *args: Any, **given: Any) -> Any:
        found = opened(self, mode, *args, **given)
        return Full(found) if self.suffix == ".distcp" else found

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(StoreError, match="the disk is full"):
        export_run(tmp_path / "run", tmp_path / "out", form="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_directory_with_files_and_an_unknown_form_are_refused(tmp_path: Path) -> None:
    train("tied-and-frozen", "resident", tmp_path / "run", until=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    with pytest.raises(UsageError, match="has files already"):
        export_run(tmp_path / "run", tmp_path / "out", form="dcp")
    with pytest.raises(UsageError, match='"memfit" or "dcp"'):
        export_run(tmp_path / "run", tmp_path / "out", form="onnx")  # type: ignore[arg-type]
