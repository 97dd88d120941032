"""Watching a job: callbacks of steps and updates, trackers, the view in a terminal, the log, and what tells callbacks that a plan is made."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import memfit
from memfit.core.plan import BlockPlan, Plan
from memfit.core.step_report import StepReport, TierUse
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.homes.update_pieces import UpdatedPiece

DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
WIDTH, BLOCKS = 24, 3


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def make_job(plan: Plan | None = None, **wishes: Any) -> memfit.Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return memfit.fit(model, optimizer, loss, torch.randn(4, WIDTH), plan=plan or Plan(), **wishes)


def model_of(job: memfit.Job) -> nn.Module:
    return job._assembly.model


def test_a_step_is_told_with_the_figures_of_its_result_until_the_handle_takes_the_function_off() -> None:
    told: list[StepReport] = []
    plan = Plan(microbatches=2, blocks={"0": DISK, "1": DISK})
    with make_job(plan, limit="64GiB", disk_limit="1GiB", max_grad_norm=1.0, enforce=False) as job:
        handle = job.on_step(told.append)
        results = [job.step(torch.randn(4, WIDTH)) for _ in range(2)]
        read, written = (sum(by_purpose.values()) for by_purpose in job.bytes_moved)
        results.append(job.step(torch.randn(4, WIDTH)))
        moved = tuple(sum(by_purpose.values()) for by_purpose in job.bytes_moved)
        handle.remove()
        job.step(torch.randn(4, WIDTH))
    assert [report.step for report in told] == [1, 2, 3]
    for report, result in zip(told, results, strict=True):
        assert (report.loss, report.norm, report.rows) == (result.loss, result.norm, 4)
        assert (report.seconds, report.peak_bytes) == (result.seconds, result.peak_bytes)
        memory, disk = report.tiers
        assert (memory.name, memory.limit_bytes, disk.name, disk.limit_bytes) == ("memory", 64 << 30, "disk", 1 << 30)
        # Two blocks of weights and two states each, in pages of their own.
        assert disk.used_bytes >= 2 * 3 * 4 * (WIDTH * WIDTH + WIDTH)
        assert sum(report.waits_s.values()) <= report.seconds
    assert (told[2].read_bytes, told[2].written_bytes) == (moved[0] - read, moved[1] - written)
    scalars = told[2].scalars()
    assert scalars["memfit/loss"] == told[2].loss
    assert scalars["memfit/disk_of_limit"] == told[2].tiers[1].used_bytes / (1 << 30)
    assert "memfit/tokens" not in scalars
    assert all(type(value) is float for value in scalars.values())


def test_an_error_of_a_callback_comes_out_of_the_step_which_counts() -> None:
    def fail(report: StepReport) -> None:
        raise KeyError("mine")

    with make_job() as job:
        handle = job.on_step(fail)
        with pytest.raises(KeyError, match="mine"):
            job.step(torch.randn(4, WIDTH))
        assert job.steps == 1
        handle.remove()
        job.step(torch.randn(4, WIDTH))
        assert job.steps == 2


@pytest.mark.parametrize(
    ("plan", "wishes"),
    [
        (Plan(), {}),
        (Plan(blocks=dict.fromkeys("012", DISK)), {}),
        (Plan(blocks=dict.fromkeys("012", DISK), compute_dtype=ComputeDtype.BFLOAT16), {"allow": {"bf16"}}),
    ],
    ids=["device", "disk", "masters"],
)
def test_pieces_that_an_update_shows_are_together_the_weights_after_the_step(plan: Plan, wishes: Any) -> None:
    seen: dict[str, Tensor] = {}
    blocks: set[str] = set()

    def keep(piece: UpdatedPiece) -> None:
        flat = seen.setdefault(piece.name, torch.full(piece.shape, torch.nan)).view(-1)
        flat[piece.first : piece.first + piece.weight.numel()] = piece.weight
        blocks.add(piece.block)

    job = make_job(plan, **wishes)
    handles = [job.on_update("1", keep), job.on_update("2", keep)]
    job.step(torch.randn(4, WIDTH))
    for handle in handles:
        handle.remove()
    after = {name: value.clone() for name, value in seen.items()}
    job.close()  # gives masters back
    assert blocks == {"1", "2"}
    assert after.keys() == {"1.weight", "1.bias", "2.weight", "2.bias"}
    for name, value in after.items():
        assert torch.equal(value, model_of(job).get_parameter(name)), name


def test_what_is_no_function_or_no_block_is_refused() -> None:
    with make_job() as job:
        with pytest.raises(memfit.UsageError, match="job.block_names lists them"):
            job.on_update("7", print)
        with pytest.raises(memfit.UsageError, match="takes a function, not str"):
            job.on_step("print")  # type: ignore[arg-type]
    with pytest.raises(memfit.UsageError, match="closed"):
        job.on_step(print)


def test_a_loop_of_the_users_own_is_told_as_well() -> None:
    told: list[StepReport] = []
    job = make_job(Plan(update="after-backward"), lines=True)  # type: ignore[arg-type]
    job.on_step(told.append)
    optimizer = job._assembly.setup.optimizer
    with job.lines():
        for _ in range(2):
            loss(model_of(job), torch.randn(4, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
    peaks = {phase.name: phase.measured_bytes for phase in job.proof().by_phase()}
    job.close()
    # Of the whole window, not only of its update.
    assert [report.peak_bytes for report in told] == [peaks["first step"], peaks["steady"]]
    assert [(report.step, report.loss, report.rows) for report in told] == [(1, None, None), (2, None, None)]
    assert all(report.seconds > 0 and report.peak_bytes > 0 for report in told)
    assert "memfit/loss" not in told[0].scalars()


def report_of(**changed: Any) -> StepReport:
    facts: dict[str, Any] = {
        "step": 7, "loss": 2.5, "norm": None, "rows": 4, "tokens": 400, "seconds": 2.0,
        "tiers": (TierUse(name="memory", used_bytes=3 << 28, limit_bytes=1 << 30), TierUse(name="disk", used_bytes=5, limit_bytes=None)),
        "waits_s": {"fetch": 0.5},
    }  # fmt: skip
    return StepReport(**(facts | changed))


class Tracker:
    """Takes what SummaryWriter, a run of wandb and the module mlflow take."""

    def __init__(self) -> None:
        self.got: list[tuple[int | None, dict[str, float]]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.got.append((global_step, {tag: scalar_value}))

    def log(self, data: dict[str, Any], *, step: int | None = None) -> None:
        self.got.append((step, data))

    def log_metrics(self, metrics: dict[str, float], *, step: int | None = None) -> None:
        self.got.append((step, metrics))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_sink_hands_every_figure_to_the_tracker_with_its_step(name: str) -> None:
    tracker = Tracker()
    getattr(memfit.sinks, name)(tracker)(report_of())
    assert {step for step, _ in tracker.got} == {7}
    figures: dict[str, float] = {}
    for _, part in tracker.got:
        figures |= part
    assert figures == report_of().scalars()
    assert (figures["memfit/tokens_per_s"], figures["memfit/memory_of_limit"]) == (200.0, 0.75)
    assert figures["memfit/waits_fetch_s"] == 0.5
    assert "memfit/norm" not in figures and "memfit/disk_of_limit" not in figures


def test_json_lines_are_json_even_of_a_loss_that_is_not_a_number() -> None:
    file = io.StringIO()
    memfit.sinks.json_lines(file)(report_of(loss=float("nan")))
    told = json.loads(file.getvalue())
    assert (told["step"], told["memfit/loss"], told["memfit/peak_bytes"]) == (7, None, 3 << 28)


def test_the_view_in_a_terminal_fits_80_columns_and_tells_loss_speed_tiers_waits_and_the_action() -> None:
    stream = io.StringIO()
    seen: list[str] = []
    plan = Plan(blocks=dict.fromkeys("012", DISK))
    with (
        make_job(plan, limit="64GiB", enforce=False) as job,
        job.live_view(2, console=Console(file=stream, force_terminal=True, width=80, height=30)) as view,
    ):

        def look(*_: Any) -> None:
            if not memfit.is_tracing():
                seen.extend(view._rows())  # as the thread that draws does, in the middle of a step

        model_of(job).get_submodule("1").register_forward_hook(look)
        for _ in range(3):  # one more than was said: the view goes on without a total
            job.step(torch.randn(4, WIDTH))
            assert view._live is not None
            view._live.refresh()
    rows = [re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", row) for row in stream.getvalue().splitlines()]
    assert max(map(len, rows)) <= 80
    assert any(re.search(r"step 2/2  loss [0-9.]+  [0-9,]+ rows/s", row) for row in rows)
    # The unit stands once where both are GiB: a worker of the suite may hold more than one.
    assert any(re.search(r"memory +\[[#-]{20}\] [0-9.]+( MiB)? of 64.00 GiB \([0-9]+%\)", row) for row in rows)
    assert any(re.search(r"disk +[0-9.]+ KiB, no limit", row) for row in rows)
    assert any("waits for" in row and "computes" in row for row in rows)
    assert any("forward C1" in row for row in seen)
    assert "step 3  loss" in stream.getvalue()
    assert "step 3/" not in stream.getvalue()


def test_without_a_terminal_the_view_is_one_line_a_step() -> None:
    stream = io.StringIO()
    with make_job() as job, job.live_view(2, console=Console(file=stream, width=80)):
        job.step(torch.randn(4, WIDTH))
        job.step(torch.randn(4, WIDTH))
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"step 1/2  loss [0-9.]+  [0-9,]+ rows/s  measured peak [0-9.]+ [MG]iB  remaining .*", first)
    assert second.startswith("step 2/2")


def test_everything_that_is_logged_has_one_name(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    caplog.set_level(logging.DEBUG)
    with make_job(store=tmp_path / "run") as job:
        job.step(torch.randn(4, WIDTH))
        job.commit()
    ours = [record for record in caplog.records if record.name.startswith("memfit")]
    assert {record.name for record in ours} == {"memfit"}
    told = [(record.levelname, record.getMessage()) for record in ours]
    for level, words in (
        ("INFO", "plan: given"),
        ("DEBUG", "step 1, loss"),
        ("DEBUG", "committed step 1"),
        ("INFO", "job closed after step 1"),
    ):
        assert any(found == level and words in text for found, text in told), (words, told)


def test_callbacks_can_ask_whether_memfit_traces() -> None:
    answers: list[bool] = []
    model = nn.Linear(WIDTH, WIDTH)
    model.register_forward_hook(lambda *_: answers.append(memfit.is_tracing() or memfit.is_planning()))
    job = memfit.fit(model, torch.optim.SGD(model.parameters()), loss, torch.randn(4, WIDTH), plan=Plan())
    assert answers and all(answers)
    answers.clear()
    job.step(torch.randn(4, WIDTH))
    job.close()
    assert answers == [False]
