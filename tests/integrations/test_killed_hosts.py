"""Loops under Lightning, Accelerate and `job.lines()` that are killed in a save or in a step, and go on: bit for bit runs that nobody killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier
from memfit.job import saved_job, torch_states
from memfit.runs import saving

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
WIDTH, STEPS, SAVE_EACH, KILLED_AT = 8, 6, 2, 4
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)


def plan(prefix: str = "") -> Plan:
    return Plan(blocks={f"{prefix}{index}": DISK for index in (0, 2)}, update=UpdateTime.AFTER_BACKWARD)


def new_model(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))


def rows(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(number: int) -> None:
    """Ends the process in the middle of a save, as a power cut would."""
    module: Any = saving
    own, saves = module.write_tensors, [0]

    def write(path: Path, *args: Any, **kwargs: Any) -> Any:
        saves[0] += path.name == "model.safetensors"
        if saves[0] == number and path.name == "optimizer.safetensors":
            kill()
        return own(path, *args, **kwargs)

    module.write_tensors = write

    # Of a file of torch.save, as Lightning's checkpoints are: while its second tensor is read from home.
    states: Any = torch_states
    saves_of_jobs: Any = saved_job
    read, files = states._LateStorage.cpu, dict[Path, int]()
    write_file = saves_of_jobs.write_torch

    def write_torch(path: Path, content: Any) -> None:
        files[path] = 0
        write_file(path, content)

    def cpu(storage: Any) -> Any:
        files[[*files][-1]] += 1
        if len(files) == number and files[[*files][-1]] == 2:
            kill()
        return read(storage)

    saves_of_jobs.write_torch = write_torch
    states._LateStorage.cpu = cpu


def by_lines(directory: Path, where: str, *, ours: bool) -> dict[str, Tensor]:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = directory / "saved"
    job = None
    if ours:
        resume = saved if saved.exists() else None
        job = memfit.fit(model, optimizer, loss_of, rows(0), plan=plan(), lines=True, resume=resume)

    def loop(begin: int) -> None:
        for step in range(begin, STEPS):
            loss_of(model, rows(step)).backward()
            if where == "step" and step == KILLED_AT:
                kill()
            optimizer.step()
            optimizer.zero_grad()
            if job is not None and (step + 1) % SAVE_EACH == 0:
                job.save(saved)

    if job is None:
        loop(0)
    else:
        with job.lines():
            loop(job.steps)
        job.close()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def by_accelerate(directory: Path, where: str, *, ours: bool) -> dict[str, Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, 0.5)
    saved = directory / "saved"
    job = None
    if ours:
        resume = saved if saved.exists() else None
        job = memfit.fit(model, optimizer.optimizer, loss_of, rows(0), plan=plan(), lines=True, resume=resume)
        if resume is not None:
            scheduler.load_state_dict(dict(job.extra))

    def loop(begin: int) -> None:
        for part in range(2 * begin, 2 * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, rows(part)))
                if where == "step" and part == 2 * KILLED_AT:
                    kill()
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            if job is not None and (part + 1) % (2 * SAVE_EACH) == 0:
                job.save(saved, extra=scheduler.state_dict())

    if job is None:
        loop(0)
    else:
        with job.lines():
            loop(job.steps)
        job.close()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def by_lightning(directory: Path, where: str, *, ours: bool) -> dict[str, Tensor]:
    lightning: Any = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            # Lightning's checkpoints have no random states.
            self.model = new_model(dropout=0.0)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            # Not the loader's rows: Lightning goes on in the middle of an epoch with its first ones.
            del batch, index
            return loss_of(self.model, rows(self.trainer.global_step))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            del optimizer
            if where == "step" and self.trainer.global_step == KILLED_AT:
                kill()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    options: dict[str, Any] = {}
    if ours:
        from memfit.integrations.lightning import MemfitStrategy

        options["strategy"] = MemfitStrategy(plan=plan("model."))
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=SAVE_EACH, save_top_k=-1, filename="{step}"
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, callbacks=[checkpoint], enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    module = Module()
    found = sorted(directory.glob("step=*.ckpt")) if ours else []
    data = torch.utils.data.DataLoader([rows(0)] * 99, batch_size=None)  # type: ignore[arg-type]
    reading: dict[str, Any] = {"weights_only": False} if found else {}
    torch.manual_seed(1)
    trainer.fit(module, data, ckpt_path=found[-1] if found else None, **reading)
    return {name: each.detach().clone() for name, each in module.model.named_parameters()}


HOSTS = {"lines": by_lines, "Accelerate": by_accelerate, "Lightning": by_lightning}


@pytest.mark.parametrize("where", ["save", "step"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_killed_loop_goes_on_bit_for_bit(host: str, where: str, tmp_path: Path) -> None:
    if host == "Lightning":
        pytest.importorskip("lightning", reason="memfit[lightning] is not installed: make test-hosts installs it")
    run = HOSTS[host]
    expected = run(tmp_path / "plain", "", ours=False)
    killed = subprocess.run(
        [sys.executable, __file__, host, str(tmp_path / "ours"), where], check=False, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    found = run(tmp_path / "ours", "", ours=True)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


if __name__ == "__main__":
    if sys.argv[3] == "save":
        kill_in_save(KILLED_AT // SAVE_EACH)
    HOSTS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3], ours=True)
