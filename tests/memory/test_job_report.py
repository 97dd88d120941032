"""Reports of jobs: the measured step beside the predicted one, weighed by an allocator's own figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UsageError
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator, install
from memfit.report.page import page_data
from memfit.step.sizes import STAGING_BYTES

MIB = 1 << 20
WIDTH, ROWS, LAYERS = 512, 256, 4


def _square(model: nn.Module, values: Tensor) -> Tensor:
    return model(values).square().mean()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def _job(tmp_path: Path, plan: Plan) -> tuple[memfit.Job, Tensor]:
    model, values = _model(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.fit(model, optimizer, _square, values, plan=plan, directory=tmp_path / "homes"), values


def _data_in(page: Path) -> Any:
    text = page.read_text(encoding="utf-8")
    block = text.split('<script type="application/json" id="data">', 1)[1].split("</script>", 1)[0]
    return json.loads(block)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_measured_step_lies_on_the_predicted_one(tmp_path: Path, *, is_streamed: bool) -> None:
    disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    blocks = {f"{i}": disk for i in range(LAYERS)} if is_streamed else {}
    calls = tuple(CallPlan(saved=Saved.RECOMPUTE) for _ in range(LAYERS)) if is_streamed else ()
    # Tensors of others lie beside the job, and are no part of the picture.
    others = torch.zeros(8 * MIB)
    job, values = _job(tmp_path, Plan(blocks=blocks, calls=calls))
    with job:
        for _ in range(3):
            job.step(values)
        assert isinstance(install(), Allocator)
        subject = job.report(tmp_path / "report.html", title="streamed" if is_streamed else "resident")
    told, measured = subject.predicted.moments, subject.measured
    assert measured is not None
    assert [m.action for m in measured.moments] == [str(a) for a in subject.schedule] == [m.action for m in told]
    for predicted, found in zip(told, measured.moments, strict=True):
        assert found.peak_bytes <= predicted.peak_bytes + MIB // 2, predicted.action
        assert found.end_s >= found.start_s
    # Exact peaks: not only what lives at the ends of actions.
    assert measured.peak_bytes >= 0.85 * subject.predicted.peak_bytes
    assert max(m.after_bytes for m in measured.moments) < measured.peak_bytes
    assert subject.predicted.seconds > 0
    moved = measured.bytes_read.get("weight", 0)
    assert moved == (subject.predicted.bytes_read["weight"] if is_streamed else 0)
    assert _data_in(tmp_path / "report.html") == json.loads(json.dumps(page_data(subject)))
    assert others.numel()


def test_steps_of_the_users_own_lines_are_measured(tmp_path: Path) -> None:
    away = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
    plan = Plan(blocks={f"{i}": away for i in range(LAYERS)}, update=UpdateTime.AFTER_BACKWARD)
    model, values = _model(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    with memfit.fit(model, optimizer, _square, values, plan=plan, lines=True, directory=tmp_path / "homes") as job:
        with job.lines():
            for step in range(6):
                for _ in range(1 + step % 2):
                    _square(model, values).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            _square(model, values)  # never run back
        subject = job.report(tmp_path / "report.html")
        told, measured, compared = subject.predicted.moments, subject.measured, job.compared.result()
        assert not job.census().grown_bytes
    assert measured is not None
    assert [m.action for m in measured.moments] == [str(a) for a in subject.schedule] == [m.action for m in told]
    for index, (predicted, found) in enumerate(zip(told, measured.moments, strict=True)):
        # Autograd tells of a backward when it reaches a call: what the loss took before counts with the action before.
        is_before_seed = index + 1 < len(told) and told[index + 1].action.startswith("seed")
        most = max(predicted.peak_bytes, told[index + 1].peak_bytes if is_before_seed else 0)
        assert found.peak_bytes <= most + MIB // 2, predicted.action
    # Buffers of the disk's threads are no tensors.
    assert measured.peak_bytes >= 0.85 * (subject.predicted.peak_bytes - STAGING_BYTES)
    assert ("measured in step", "6") in subject.facts
    assert compared is not None
    assert compared.steps == 4


def test_measuring_disturbs_no_peak_that_others_read(tmp_path: Path) -> None:
    job, values = _job(tmp_path, Plan())
    with job:
        peaks = [job.step(values).peak_bytes for _ in range(2)]
        measured = job.report(tmp_path / "report.html").measured
        assert measured is not None
        steady = next(record for record in job.proof().phases if record.name == "steady")
    # The phase counts what the report counts, and what lives beside the job.
    assert steady.peak_bytes >= measured.peak_bytes
    assert min(peaks) > 0


def test_a_report_can_be_had_before_the_first_step_and_after_the_last(tmp_path: Path) -> None:
    job, values = _job(tmp_path, Plan())
    assert job.report(tmp_path / "before.html").measured is None
    job.step(values)
    job.close()
    subject = job.report(tmp_path / "after.html", perfetto=tmp_path / "trace.json")
    assert subject.measured is not None
    assert ("measured in step", "1") in subject.facts
    assert subject.title == "Sequential"
    processes = {event["pid"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert processes == {1, 2}


def test_a_report_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    job, _ = _job(tmp_path, Plan())
    with job, pytest.raises(UsageError, match="cannot be written"):
        job.report(tmp_path / "no" / "such" / "directory.html")
