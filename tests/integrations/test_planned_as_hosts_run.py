"""What a host puts around a step is in the plan: tensors measured beside those predicted, in each precision that hosts have."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import memfit
from memfit.core.plan import Plan, UpdateTime
from memfit.integrations.transformers import MemfitTrainer
from memfit.machine.proof import Proof

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the number of workers, of the machine
    pytest.mark.usefixtures("older_objects_are_passed_over"),
]
RESIDENT = Plan(update=UpdateTime.AFTER_BACKWARD)
WIDTH, VOCABULARY = 192, 256


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Collects the trainers of tests before, whose tensors would count as those of others."""
    gc.collect()


def check(proof: Proof, *, least: float = -0.08) -> None:
    """Two backwards a window were planned for, and made: so predictions are near from both sides."""
    found = {p.name: p for p in proof.by_phase() if p.predicted_tensor_bytes is not None}
    assert {"first step", "steady"} <= found.keys()
    for phase in found.values():
        assert phase.predicted_tensor_bytes is not None
        error = phase.measured_tensor_bytes / phase.predicted_tensor_bytes - 1
        assert error <= 0.01, f"{phase.name}: {error:+.1%}"
    steady = found["steady"]
    assert steady.measured_tensor_bytes / (steady.predicted_tensor_bytes or 1) - 1 >= least


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(nn.functional.gelu(self.up(self.norm(values))))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY))


def rows_of(lengths: list[int]) -> Any:
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, WIDTH, generator=drawn), torch.randint(0, VOCABULARY, (n,), generator=drawn)) for n in lengths
    ]


def lightning_job(
    precision: str,
    lengths: list[int],
    *,
    automatic: bool = True,
    plan: Plan | None = RESIDENT,
    limit: str | None = None,
) -> Any:
    lightning: Any = pytest.importorskip("lightning", reason="make test-hosts installs it")
    from memfit.integrations.lightning import MemfitStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = stack()
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
            if automatic:
                return loss
            self.manual_backward(loss)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
            return None

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    is_scaled = precision == "16-mixed"
    how: dict[str, Any] = {"precision": precision}
    if is_scaled:  # for which Lightning takes "bf16-mixed" on a processor
        plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        how = {"plugins": [plugin]}
    strategy = MemfitStrategy(limit=limit or "8GiB", plan=plan, emulate_device=is_scaled)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, strategy=strategy, accumulate_grad_batches=2 if automatic else 1, **how,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(rows_of(lengths), batch_size=2))
    job = strategy.job
    assert job is not None
    proof = job.proof()
    strategy.close()
    return proof


@pytest.mark.parametrize("tokens", [8, 96], ids=["weights weigh", "activations weigh"])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_lightning_in_each_precision_holds_what_was_predicted(precision: str, tokens: int) -> None:
    check(lightning_job(precision, [tokens] * 12))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_manual_step_in_mixed_precision_holds_what_was_predicted(precision: str) -> None:
    check(lightning_job(precision, [8] * 12, automatic=False))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_predicts_a_longer_batch_anew_in_the_middle_of_a_window(precision: str) -> None:
    check(lightning_job(precision, [16] * 6 + [256] * 2 + [16] * 8))


def test_the_smallest_limit_that_is_named_holds_for_scaled_losses() -> None:
    lightning_job("32-true", [8])  # what the host and the libraries make once
    with pytest.raises(memfit.DoesNotFitError) as refused:
        lightning_job("16-mixed", [96] * 12, plan=None, limit="1MiB")
    limit = refused.value.smallest_limit_bytes
    assert limit is not None
    del refused
    gc.collect()
    proof = lightning_job("16-mixed", [96] * 12, plan=None, limit=f"{limit}B")
    assert proof.holds
    check(proof, least=-0.25)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.randint(3, VOCABULARY, (self.lengths[index],), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words.clone()}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=3, num_attention_heads=4
        )
    )  # fmt: skip


def trainer_of(
    directory: Path, lengths: list[int], model: Any = None, *, is_scaled: bool = False, **given: Any
) -> MemfitTrainer:
    """Scaled: as Accelerate has fp16 on an accelerator; on a processor it passes the argument over."""
    arguments: Any = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, train_sampling_strategy="sequential", fp16=is_scaled,
        **({"num_train_epochs": 1, "save_strategy": "no"} | given),
    )  # fmt: skip
    model = llama() if model is None else model
    options: dict[str, Any] = {"plan": RESIDENT, "limit": "8GiB", "emulate_device": is_scaled}
    trainer = MemfitTrainer(model, arguments, train_dataset=Rows(lengths), memfit=options)
    if is_scaled:
        trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu")
    return trainer


@pytest.mark.parametrize("tokens", [8, 96], ids=["weights weigh", "activations weigh"])
@pytest.mark.parametrize("given", [{}, {"bf16": True}, {"is_scaled": True}], ids=["fp32", "bf16", "fp16"])
def test_a_trainer_in_each_precision_holds_what_was_predicted(
    given: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    with trainer_of(tmp_path, [tokens] * 12, **given) as trainer:
        trainer.train()
        assert trainer.job is not None
        check(trainer.job.proof())


def test_a_trainer_with_adapters_in_bf16_holds_what_was_predicted(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with trainer_of(tmp_path, [48] * 12, model, bf16=True) as trainer:
        trainer.train()
        assert trainer.job is not None
        check(trainer.job.proof())


def test_a_resume_whose_batches_grow_is_predicted_for_the_longest(tmp_path: Path) -> None:
    lengths = [16] * 12 + [160] * 4
    with trainer_of(tmp_path, lengths, save_strategy="steps", save_steps=1) as trainer:
        trainer.train()
        assert trainer.job is not None
        check(trainer.job.proof())
    with trainer_of(tmp_path, lengths) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert trainer.job is not None
        check(trainer.job.proof())


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_of_accelerates_holds_what_was_predicted(precision: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(mixed_precision=precision, cpu=True, gradient_accumulation_steps=2)
    made = stack()
    loader: Any = torch.utils.data.DataLoader(rows_of([8] * 12), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-3), loader)

    def loss(model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    job = memfit.fit(model, optimizer.optimizer, loss, loader, plan=RESIDENT, limit="8GiB", lines=True)
    with job.lines() as lines:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        assert lines.steps == 3
    check(job.proof())
    job.close()
