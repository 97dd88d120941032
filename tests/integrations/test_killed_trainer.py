"""A Trainer inside a limit that is killed in a save or in a step, and goes on: bit for bit a run that nobody killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier
from memfit.integrations.transformers import MemfitTrainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
PLAN = Plan(blocks={f"model.layers.{index}": DISK for index in range(2)}, update=UpdateTime.AFTER_BACKWARD)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.randint(3, 32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Killer(TrainerCallback):
    """Ends the process as a power cut would, where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.where == "step" and state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def train(directory: str, where: str, kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.1
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=directory, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, learning_rate=1e-2,
        max_grad_norm=0.5, logging_steps=1, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = kind(model, arguments, train_dataset=Rows(), callbacks=[Killer(where)], **options)
    if where == "save":
        plain_save = torch.save

        def save(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            if "checkpoint-4" in str(path) and "scheduler" in str(path):
                os.kill(os.getpid(), signal.SIGKILL)
            plain_save(content, path, *args, **kwargs)

        torch.save = save
    is_resumed = any(Path(directory).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if is_resumed else None)
    return trainer


@pytest.mark.parametrize("where", ["save", "step"])
def test_a_killed_trainer_goes_on_bit_for_bit(where: str, tmp_path: Path) -> None:
    theirs = train(str(tmp_path / "plain"), "", Trainer)
    killed = subprocess.run([sys.executable, __file__, str(tmp_path / "ours"), where], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert (tmp_path / "ours" / "checkpoint-4").exists()
    ours = train(str(tmp_path / "ours"), "", MemfitTrainer, memfit={"plan": PLAN})
    ours.close()
    logged = [[entry.get("loss") for entry in trainer.state.log_history] for trainer in (ours, theirs)]
    assert logged[0] == logged[1]
    assert all(map(torch.equal, ours.model.parameters(), theirs.model.parameters()))


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], MemfitTrainer, memfit={"plan": PLAN})
