"""Cures for limits: of jobs, of evaluations, of sessions of inference, of saves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from typer.testing import CliRunner

import memfit
from memfit.cli import app
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.machine import hard_limit
from unit.advice import BATCH, Scene, follows, live_bytes, loss

MIB = 1 << 20
BATCH_OF_4 = torch.ones(4, 1024)
REPLANNED = partial(pytest.warns, memfit.MemfitWarning, match="another one took its place")
TWO = Plan(microbatches=2)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, Tensor]:
    """Gives the command line a model to train."""
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2), loss, BATCH


def planned(*arguments: str) -> tuple[int, str]:
    """Prices a plan for a device that is not here; returns the exit code and what is printed."""
    machine = ("plan", f"{__name__}:parts", "--hardware", "rtx-4090", "--plan", "-")
    found = CliRunner().invoke(app, [*machine, *arguments], input=Plan().to_json())
    return found.exit_code, " ".join(found.output.split())


@follows("machine/described.py", "give less, or another capacity: --tiers device=")
def a_capacity_of_a_described_device(s: Scene) -> None:
    code, s.words = planned("--limit", "30GiB")
    assert code
    assert planned("--limit", "20GiB")[0] == 0
    assert planned("--limit", "30GiB", "--tiers", "device=30GiB")[0] == 0


@follows(
    "machine/limits_of_process.py",
    "what was predicted would not be what runs. Leave hardware out, or plan for a machine",
)
def a_machine_that_is_not_here_is_planned_for(s: Scene) -> None:
    s.refused(lambda: s.fit(hardware="rtx-4090"))
    s.fit().step(BATCH)
    assert planned()[0] == 0


@follows("job/breaches.py", "there is none to change: give memfit.fit a limit=")
def a_limit_that_can_be_changed(s: Scene) -> None:
    s.refused(lambda: s.fit().set_limit("3GiB"))
    s.begin()
    with s.fit(limit="4GiB") as job:
        job.set_limit("3GiB")
        job.step(BATCH)
        assert job.proof().limit_bytes == 3 << 30


def wide(s: Scene) -> nn.Sequential:
    """Gives the scene a model of 16 MiB, whose bytes are counted."""
    install()
    torch.manual_seed(0)
    s.model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=1e-2)
    return s.model


def on_device(s: Scene, limit_bytes: int, **wishes: Any) -> memfit.Job:
    job = memfit.fit(
        s.model, s.optimizer, loss, BATCH_OF_4, limit=live_bytes() + limit_bytes, emulate_device=True, **wishes
    )
    s._stack.callback(lambda: job.close(restore=False, commit=False))
    return job


@follows("job/breaches.py", "takes another plan; here, save the job and fit again with resume=")
def a_job_goes_on_under_a_smaller_limit(s: Scene) -> None:
    wide(s)
    with on_device(s, 64 * MIB, plan=Plan()) as job:
        job.step(BATCH_OF_4)
        s.refused(lambda: job.set_limit(live_bytes() + 4 * MIB))
        job.save(s.directory / "saved")
    wide(s)
    away = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    plan = Plan(blocks=dict.fromkeys("0123", away))
    with on_device(s, 12 * MIB, resume=s.directory / "saved", plan=plan, blocks=[*"0123"]) as job:
        assert job.steps == 1
        job.step(BATCH_OF_4)
    wide(s)
    with on_device(
        s, 64 * MIB, plan=Plan(), store=s.directory / "run", on_breach="replan", hardware="laptop-cpu"
    ) as job:
        job.step(BATCH_OF_4)
        job.set_limit(live_bytes() + 4 * MIB)
        with REPLANNED():
            job.step(BATCH_OF_4)


@follows("machine/hard_limit.py", "free what is not needed, or leave the limit as it is")
def a_limit_above_what_the_process_holds(s: Scene) -> None:
    with s.fit(limit="4GiB") as job:
        s.refused(lambda: job.set_limit("2MiB"))
        job.step(BATCH)
        assert job.proof().limit_bytes == 4 << 30


@follows("machine/hard_limit.py", "start from a fresh process, free what is not needed, or raise the limit")
def a_limit_above_what_other_threads_hold(s: Scene) -> None:
    with pytest.MonkeyPatch.context() as machine:
        # A thread of the program's takes 5 GiB after `fit` has looked.
        machine.setattr(hard_limit, "outside_bytes", lambda *_: 5 << 30)
        s.refused(lambda: s.fit(limit="4GiB"))
        s.fit(limit="6GiB").close()
    s.fit(limit="4GiB").step(BATCH)


def beside() -> list[Tensor]:
    """Tensors of the program's own that take 55 MiB."""
    return [torch.ones(MIB // 4) for _ in range(55)]


@follows(
    "machine/hard_limit.py", "Nothing was updated. Free it, have it before memfit.fit, raise the limit, or fit with"
)
def a_step_beside_what_else_the_program_keeps(s: Scene) -> None:
    def fit(room_bytes: int = 60 * MIB, **wishes: Any) -> memfit.Job:
        wide(s)
        return on_device(s, room_bytes, **wishes)

    job = fit(plan=Plan())
    kept = beside()
    s.refused(lambda: job.step(BATCH_OF_4))
    kept.clear()
    job.step(BATCH_OF_4)
    job.set_limit(live_bytes() + 90 * MIB)
    kept = beside()
    job.step(BATCH_OF_4)
    job.close()
    fit(plan=Plan()).step(BATCH_OF_4)
    kept.clear()
    with fit(store=s.directory / "run", on_breach="replan", hardware="laptop-cpu") as job:
        kept = beside()
        with REPLANNED():
            job.step(BATCH_OF_4)
    assert kept


class Wasteful(nn.Linear):
    """Takes more memory in evaluation than any trace of a training step shows."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        if not memfit.is_tracing():
            torch.ones(len(input) * (1 if self.training else 64), 1024)
        return super().forward(input)


@follows("job/forward_passes.py", "Nothing was changed: the job goes on. Try fewer rows at a time, or a larger limit")
def fewer_rows_are_evaluated_at_a_time(s: Scene) -> None:
    wide(s).append(Wasteful(1024, 1024))
    many = torch.ones(256, 1024)
    with on_device(s, 40 * MIB, plan=Plan()) as job:
        s.refused(lambda: job.evaluate(many))
        job.step(BATCH_OF_4)
        losses = [job.evaluate(part).loss for part in many.split(64)]
        job.set_limit(live_bytes() + 200 * MIB)
        assert job.evaluate(many).loss == pytest.approx(losses[0])


@follows(
    "machine/machine.py",
    "Build the model inside the limit (weights on one device, nothing else alive), or raise the limit",
)
def a_phase_of_fit_with_room(s: Scene) -> None:
    def hungry(model: nn.Module, batch: Tensor) -> Tensor:
        if not isinstance(batch, FakeTensor):
            torch.ones(12 * MIB)  # no trace sees it
        return loss(model, batch)

    def fit(limit_bytes: int) -> None:
        wide(s)
        memfit.fit(
            s.model, s.optimizer, hungry, BATCH_OF_4, limit=before + limit_bytes, emulate_device=True, plan=TWO
        ).close()

    before = live_bytes()
    kept = torch.ones(10 * MIB)
    s.refused(lambda: fit(100 * MIB))
    fit(140 * MIB)
    del kept
    fit(100 * MIB)


@follows("job/job.py", "Save it and say job.close(restore=False), or bring everything back past the limit with")
def a_model_that_was_never_whole_is_saved_or_comes_back(s: Scene) -> None:
    names = [*"01234567"]
    homes = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)

    def job() -> memfit.Job:
        s.model = memfit.empty(lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in names)))
        s.optimizer = torch.optim.SGD(s.model.parameters(), lr=1e-2)
        job = on_device(s, 24 * MIB, plan=Plan(blocks=dict.fromkeys(names, homes)), blocks=names)
        job.step(BATCH_OF_4)
        return job

    given_up = job()
    s.refused(given_up.close)
    given_up.save(s.directory / "saved")
    given_up.close(restore=False)
    back = job()
    s.refused(back.close)
    back.close(restore=True)
    assert loss(s.model, BATCH_OF_4).isfinite()


@follows("job/inference.py", "for scratch of kernels; the limit is")
def a_limit_that_streaming_fits(s: Scene) -> None:
    with torch.no_grad():
        expected = s.model(BATCH)

    def run(batch: Tensor = BATCH, **wishes: Any) -> Tensor:
        with memfit.infer(s.model, **wishes) as session:
            return session.model(batch)

    s.refused(lambda: run(limit="2MiB"))
    assert torch.equal(run(limit="4GiB"), expected)
    # Blocks of two layers, and the layers alone.
    s.model = nn.Sequential(*(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in "01")) for _ in "01"))
    batch = torch.ones(4, 2048)
    with pytest.raises(memfit.DoesNotFitError, match="name smaller modules in blocks=") as refused:
        run(batch, limit="2MiB", blocks=["0", "1"])
    limit = (refused.value.smallest_limit_bytes or 0) - 12 * MIB
    run(batch, limit=limit, blocks=["0.0", "0.1", "1.0", "1.1"])


@follows("job/inference.py", "are left of the limit of")
def a_cache_that_fits_beside_weights(s: Scene) -> None:
    def run(**wishes: Any) -> int | None:
        with memfit.infer(s.model, **wishes) as session:
            session.model(BATCH)
            return session.cache_limit_bytes

    taken = run(limit="4GiB")
    s.refused(lambda: run(limit="4GiB", cache_limit="4GiB"))
    assert run(limit="4GiB", cache_limit=taken) == taken
    run(limit="6GiB", cache_limit="4GiB")


@follows("runs/saving.py", "Free what else the process holds, or raise the limit")
def a_save_with_room(s: Scene) -> None:
    wide(s)
    with pytest.raises(memfit.DoesNotFitError) as refused:
        memfit.fit(s.model, s.optimizer, loss, BATCH_OF_4, limit="2MiB", plan=Plan())
    limit = (refused.value.smallest_limit_bytes or 0) + 20 * MIB
    with memfit.fit(s.model, s.optimizer, loss, BATCH_OF_4, limit=limit, plan=Plan()) as job:
        job.step(BATCH_OF_4)
        kept = list[Tensor]()
        with pytest.raises(torch.OutOfMemoryError):
            kept.extend(torch.ones(MIB // 4) for _ in range(4000))
        kept.pop()
        s.refused(lambda: job.save(s.directory / "saved"))
        kept.clear()
        job.save(s.directory / "saved")
