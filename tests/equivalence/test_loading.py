"""Weights and states of files in a running job, and weights from what plain `torch.save` wrote."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from equivalence import plans, zoo
from equivalence.compare import same_bits
from equivalence.test_deferred import assert_same_model, built_empty, fit_from
from equivalence.with_memfit import profile_by_name
from memfit.core.errors import StoreError, UsageError
from memfit.core.plan import Plan
from memfit.core.storage_formats import ComputeDtype


def _on_disk(**more: Any) -> Plan:
    return Plan(blocks=plans.on_disk(profile_by_name("gpt2")), **more)


_PLANS: dict[str, Callable[[], Plan]] = {
    "resident": Plan,
    "disk": _on_disk,
    "atomic": lambda: _on_disk(is_atomic=True),
    "bf16": lambda: _on_disk(compute_dtype=ComputeDtype.BFLOAT16),
    "bf16-split": lambda: _on_disk(compute_dtype=ComputeDtype.BFLOAT16, splits_masters=True),
    "bf16-resident": lambda: Plan(compute_dtype=ComputeDtype.BFLOAT16),
}


def _job(case: zoo.Case, plan: Plan) -> tuple[memfit.Job, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    return memfit.fit(case.model, optimizer, case.loss, case.batch(0), plan=plan, allow={"bf16"}), optimizer


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("atomic", "bf16-split") else [pytest.mark.slow]) for n in _PLANS]
)
def test_a_running_job_goes_back_to_a_save(name: str, tmp_path: Path) -> None:
    plan, batches = _PLANS[name](), [zoo.gpt2().batch(step) for step in range(3)]
    job, optimizer = _job(zoo.gpt2(), plan)
    job.step(batches[0])
    optimizer.param_groups[0]["lr"] = 3e-3
    job.save(tmp_path, extra={"note": 7})
    expected = [job.step(batch).loss for batch in batches[1:]]
    optimizer.param_groups[0]["lr"] = 1.0
    found = job.load(tmp_path)
    assert (found.steps, found.extra, job.steps) == (1, {"note": 7}, 1)
    assert [job.step(batch).loss for batch in batches[1:]] == expected
    job.close()
    other = zoo.gpt2()
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(3)
    job, optimizer = _job(other, plan)
    job.load(tmp_path)
    assert [job.step(batch).loss for batch in batches[1:]] == expected
    job.close()


def test_weights_alone_are_loaded_from_what_transformers_and_torch_write(tmp_path: Path) -> None:
    plain: Any = zoo.ZOO["mixtral"]().model
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2)
    plain.save_pretrained(tmp_path / "pretrained", max_shard_size="20KB")
    torch.save(plain.state_dict(), tmp_path / "weights.pt")
    for source in ("pretrained", "weights.pt"):
        case = zoo.ZOO["mixtral"]()
        with memfit.fit(case.model, torch.optim.SGD(case.model.parameters()), case.loss, case.batch(0)) as job:
            found = job.load(tmp_path / source)
            assert (found.steps, found.extra) == (0, {})
        assert_same_model(case.model, plain)


def test_a_load_that_does_not_fit_changes_nothing_and_one_that_breaks_off_is_told(tmp_path: Path) -> None:
    case = zoo.gpt2()
    before = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    state = case.model.state_dict()
    torch.save({name: value for name, value in state.items() if "h.1" not in name}, tmp_path / "part.pt")
    torch.save({name: value + 1 for name, value in state.items()}, tmp_path / "whole.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-60_000])
    job, _ = _job(case, Plan())
    with pytest.raises(UsageError, match=r"has no .*h\.1"):
        job.load(tmp_path / "part.pt")
    with pytest.raises(StoreError, match="neither safetensors nor a zip archive"):
        job.load(tmp_path / "half.pt")
    job.close()
    assert all(same_bits(p.detach(), before[name]) for name, p in case.model.named_parameters())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 20)
        self.convolution = nn.Conv1d(20, 20, 3, padding=1)
        self.picture = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(20)
        self.head = nn.Linear(20, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.norm(self.convolution(self.embedding(tokens).transpose(1, 2)))
        return self.head(rows.transpose(1, 2)) + self.picture(rows[:, None]).mean()


def _mean(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


_TOKENS = torch.arange(24).view(2, 12)


def _fit_net(weights: Path) -> nn.Module:
    model = built_empty(_Net)
    with memfit.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), _mean, _TOKENS, weights=weights):
        pass
    return model


@pytest.mark.parametrize("form", ["state", "nested", "wrapped", "bf16", "directory", "shards"])
def test_weights_come_from_checkpoints_of_plain_torch(form: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = _Net()
    state: dict[str, Any] = dict(plain.state_dict())
    source = tmp_path / "checkpoint.pt"
    if form == "nested":
        state = {"epoch": 3, "model": state, "optimizer": torch.optim.AdamW(plain.parameters()).state_dict()}
    elif form == "wrapped":
        state = {f"module.{name}": value for name, value in state.items()}
    elif form == "bf16":
        state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
        plain.load_state_dict(state)
    if form == "directory":
        torch.save(state, tmp_path / "pytorch_model.bin")
    elif form == "shards":
        names = sorted(state)
        files = {name: f"pytorch_model-0000{1 + (i > 3)}-of-00002.bin" for i, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({name: state[name] for name in names if files[name] == file}, tmp_path / file)
        import json

        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        torch.save(state, source)
    assert_same_model(_fit_net(source if source.exists() else tmp_path), plain)


def _unsafe(path: Path) -> None:
    torch.save({"weights": _Net()}, path)  # classes of the program, which only a pickle could make


def _old(path: Path) -> None:
    torch.save(_Net().state_dict(), path, _use_new_zipfile_serialization=False)


def _compressed(path: Path) -> None:
    torch.save(_Net().state_dict(), path)
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for name, content in records:
            archive.writestr(name, content)


def _other(path: Path) -> None:
    torch.save({"embedding.weight": torch.zeros(30, 20), "note": 3}, path)


@pytest.mark.parametrize(
    ("write", "error", "words"),
    [
        (_unsafe, StoreError, "weights_only=True"),
        (_old, StoreError, "neither safetensors nor a zip archive"),
        (_compressed, StoreError, "compressed"),
        (_other, UsageError, "'note', which is no tensor"),
        (lambda path: torch.save([1, 2], path), UsageError, "holds no state_dict"),
        (lambda path: path.write_bytes(b"PK" + bytes(300)), StoreError, "neither safetensors nor a zip archive"),
        (lambda path: path.mkdir(), StoreError, "could not read the file"),
        (lambda path: None, StoreError, "does not exist"),
    ],
)
def test_files_that_are_no_checkpoint_are_refused(
    write: Callable[[Path], None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "checkpoint.pt")
    with pytest.raises(error, match=words):
        _fit_net(tmp_path / "checkpoint.pt")


def test_a_run_has_its_own_weights(tmp_path: Path) -> None:
    case = zoo.llama()
    optimizer = torch.optim.SGD(case.model.parameters())
    with (
        memfit.fit(case.model, optimizer, case.loss, case.batch(0), store=tmp_path / "run") as job,
        pytest.raises(UsageError, match="resume= instead"),
    ):
        job.load(tmp_path)


def test_a_transformers_model_takes_the_files_of_older_versions(tmp_path: Path) -> None:
    case = zoo.gpt2()
    torch.save(case.model.transformer.state_dict(), tmp_path / "pytorch_model.bin")  # type: ignore[union-attr,operator]
    ours = zoo.gpt2()
    with fit_from(built_empty(lambda: zoo.gpt2().model), ours, tmp_path) as job:
        assert job.evaluate(case.batch(0)).loss == pytest.approx(case.loss(case.model.eval(), case.batch(0)).item())
