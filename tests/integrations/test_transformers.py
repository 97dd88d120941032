"""transformers' `Trainer` under memfit beside itself: logs, weights and checkpoints, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import memfit
from memfit.core.errors import DoesNotFitError, UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import FrozenFormat
from memfit.core.tiers import Tier
from memfit.homes.encoded_weights import decode, encode
from memfit.integrations.transformers import MemfitMixin, MemfitTrainer
from memfit.tensors.guard import is_away

pytestmark = [
    # What is said of the machine, of times, or by libraries that the test does not ask about.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("older_objects_are_passed_over"),  # each Trainer collects
]
ON_DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
TOLD = ("loss", "grad_norm", "learning_rate", "eval_loss", "step", "eval_rouge")


def homes(names: list[str], home: BlockPlan = ON_DISK) -> Plan:
    return Plan(blocks=dict.fromkeys(names, home), update=UpdateTime.AFTER_BACKWARD)


LAYERS = [f"model.layers.{index}" for index in range(2)]
GRADIENTS_ON_DEVICE = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Unequal numbers of targets; for classification, one label a row."""

    def __init__(self, count: int = 10, *, is_class: bool = False) -> None:
        self.count, self.is_class = count, is_class

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.randint(3, 32, (6,), generator=torch.Generator().manual_seed(index))
        labels = words.clone()
        labels[: index % 4] = -100
        return {"input_ids": words, "labels": int(words[0]) % 2 if self.is_class else labels}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.1
        )
    )  # fmt: skip


def bert() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16
        )
    )  # fmt: skip


def arguments(directory: Path, kind: Any = TrainingArguments, **given: Any) -> Any:
    common = {
        "output_dir": str(directory), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
        "learning_rate": 1e-2, "warmup_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return kind(**(common | given))


def told(trainer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key in TOLD} for entry in trainer.state.log_history]


def train(
    kind: Any,
    directory: Path,
    build: Callable[[], Any] = llama,
    data: Rows | None = None,
    plan: Plan | None = None,
    resume: Any = None,
    callbacks: Any = None,
    arguments_of: Any = TrainingArguments,
    allow: Collection[str] = (),
    frozen: Any = None,
    mode: str = "lines",
    emulate_device: bool = False,
    **given: Any,
) -> Any:
    rows = Rows() if data is None else data
    wishes = {"plan": plan, "allow": allow, "frozen": frozen or {}, "mode": mode, "emulate_device": emulate_device}
    options = {"memfit": wishes} if issubclass(kind, MemfitMixin) else {}
    trainer = kind(
        build(), arguments(directory, arguments_of, **given), train_dataset=rows, eval_dataset=Rows(4, is_class=rows.is_class),
        callbacks=callbacks, **options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def check_equal(ours: Any, theirs: Any) -> None:
    if isinstance(ours, MemfitMixin):
        ours.close()
    # By their text: norms of skipped steps are NaN, which is not equal to itself.
    found, expected = ([repr(sorted(entry.items())) for entry in told(each)] for each in (ours, theirs))
    assert found == expected
    for (name, found), expected in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("plan", "given"),
    [
        (None, {}),
        (homes(LAYERS), {}),
        (homes(LAYERS, GRADIENTS_ON_DEVICE), {}),
        (homes(LAYERS), {"bf16": True}),
        (homes(LAYERS), {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}),
        (homes(LAYERS), {"label_smoothing_factor": 0.1}),
    ],
    ids=["resident", "disk", "gradients on the device", "bf16", "one backward, not clipped", "label smoothing"],
)
def test_a_trainer_is_bitwise_itself(plan: Plan | None, given: dict[str, Any], tmp_path: Path) -> None:
    given = {"save_strategy": "no", **given}
    check_equal(train(MemfitTrainer, tmp_path, plan=plan, **given), train(Trainer, tmp_path, **given))


class Scaled(Trainer):
    """A trainer whose fp16 is what Accelerate makes of it on an accelerator; on a processor it leaves fp32."""

    init_scale = 2.0**16

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale, backoff_factor=2.0**-8)


class OverflowingFirst(Scaled):
    init_scale = 2.0**30


class OursScaled(MemfitMixin, Scaled):
    pass


class OursOverflowingFirst(MemfitMixin, OverflowingFirst):
    pass


FP16: dict[str, Any] = {"fp16": True, "save_strategy": "no"}


@pytest.mark.parametrize(
    "plan",
    [None, homes(LAYERS), homes(LAYERS, GRADIENTS_ON_DEVICE)],
    ids=["resident", "disk", "gradients on the device"],
)
@pytest.mark.parametrize(
    ("plain", "ours"),
    [(Scaled, OursScaled), (OverflowingFirst, OursOverflowingFirst)],
    ids=["each step", "skipped steps"],
)
def test_scaled_losses_are_bitwise_those_of_trainer(plain: Any, ours: Any, plan: Plan | None, tmp_path: Path) -> None:
    theirs = train(plain, tmp_path, **FP16)
    found = train(ours, tmp_path, plan=plan, emulate_device=True, **FP16)
    check_equal(found, theirs)
    assert found.accelerator.scaler.state_dict() == theirs.accelerator.scaler.state_dict()
    assert (found.accelerator.scaler.get_scale() < plain.init_scale) is (plain is OverflowingFirst)


def test_scaled_losses_are_gone_on_with_from_a_checkpoint_of_either(tmp_path: Path) -> None:
    """The first steps were skipped; the scale, the scheduler and the states are those of the checkpoint."""
    given: dict[str, Any] = {"fp16": True, "plan": homes(LAYERS)}
    for kind in (OverflowingFirst, OursOverflowingFirst):
        train(kind, tmp_path / kind.__name__, **given)
    first = {kind: str(tmp_path / kind.__name__ / "checkpoint-2") for kind in (OverflowingFirst, OursOverflowingFirst)}
    theirs = train(Scaled, tmp_path / "then", resume=first[OverflowingFirst], **given)
    for name, kind, resume in (
        ("again", OursScaled, OursOverflowingFirst),
        ("other", OursScaled, OverflowingFirst),
        ("back", Scaled, OursOverflowingFirst),
    ):
        found = train(kind, tmp_path / name, resume=first[resume], **given)
        check_equal(found, theirs)
        assert found.accelerator.scaler.state_dict() == theirs.accelerator.scaler.state_dict()


def test_on_a_processor_fp16_is_what_it_is_in_trainer(tmp_path: Path) -> None:
    """Accelerate passes the argument over there: fp32, without a scaler, also in collected windows."""
    theirs = train(Trainer, tmp_path, undropped, **FP16)
    assert theirs.accelerator.scaler is None
    check_equal(theirs, train(Trainer, tmp_path, undropped, save_strategy="no"))
    check_equal(train(MemfitTrainer, tmp_path, undropped, plan=homes(LAYERS), **FP16), theirs)
    check_equal(train(MemfitTrainer, tmp_path, undropped, mode="collected", **FP16), theirs)


def undropped() -> Any:
    """Layer by layer parts would draw in another order."""
    found = llama()
    found.config.attention_dropout = 0.0
    for layer in found.model.layers:
        layer.self_attn.attention_dropout = 0.0
    return found


def test_collected_windows_are_bitwise_themselves_and_bring_weights_once(tmp_path: Path) -> None:
    """With a save, and what goes on from it."""
    plan = replace(homes(LAYERS), microbatches=2)
    theirs = train(Trainer, tmp_path / "plain", undropped)
    ours = train(MemfitTrainer, tmp_path / "ours", undropped, plan=plan, mode="collected")
    lines = train(MemfitTrainer, tmp_path / "lines", undropped, plan=homes(LAYERS))
    assert sum(ours.job.bytes_moved[0].values()) < sum(lines.job.bytes_moved[0].values())
    lines.close()
    check_equal(ours, theirs)
    resume = str(tmp_path / "ours" / "checkpoint-2")
    check_equal(train(MemfitTrainer, tmp_path / "then", undropped, plan=plan, mode="collected", resume=resume), theirs)


@pytest.mark.parametrize("plan", [None, homes(LAYERS)], ids=["resident", "disk"])
@pytest.mark.parametrize(
    "given",
    [{"bf16": True}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 1}],
    ids=["bf16", "label smoothing", "one batch"],
)
def test_collected_windows_of_other_settings(given: dict[str, Any], plan: Plan | None, tmp_path: Path) -> None:
    given = {"save_strategy": "no", **given}
    parts = given.get("gradient_accumulation_steps", 2)
    wishes = {"mode": "collected", "plan": plan and replace(plan, microbatches=parts)}
    ours = train(MemfitTrainer, tmp_path, undropped, **wishes, **given)
    check_equal(ours, train(Trainer, tmp_path, undropped, **given))


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_collected_windows_that_draw_and_end_short(max_grad_norm: float, tmp_path: Path) -> None:
    """One part after the other, as the planner has it for dropout; losses that the host divides by the window's length. Without
    clipping there is no norm to log.
    """
    given: dict[str, Any] = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "save_strategy": "no",
        "max_grad_norm": max_grad_norm,
    }
    rows = Rows(9, is_class=True)
    ours = train(MemfitTrainer, tmp_path, bert, rows, mode="collected", **given)
    theirs = train(Trainer, tmp_path, bert, rows, **given)
    if not max_grad_norm:
        for entry in theirs.state.log_history:
            entry.pop("grad_norm", None)
    check_equal(ours, theirs)


def test_what_collected_windows_do_not_go_with_is_named(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.raises(UnsupportedError, match="Looks looks at gradients"):
        train(MemfitTrainer, tmp_path, callbacks=[Looks()], mode="collected")
    with pytest.raises(UsageError, match="'mode': 'collect'"):
        train(MemfitTrainer, tmp_path, mode="collect")
    with pytest.raises(UnsupportedError, match="fp16=True.*leave memfit={'mode': 'collected'} out"):
        train(OursScaled, tmp_path, mode="collected", fp16=True)


def test_short_last_windows_and_batches_are_served(tmp_path: Path) -> None:
    """Nine rows in windows of two batches of two: the last window has one batch of one row."""
    names = [f"bert.encoder.layer.{index}" for index in range(2)]
    given: dict[str, Any] = {"num_train_epochs": 2, "max_steps": -1, "save_strategy": "no"}
    rows = Rows(9, is_class=True)
    theirs = train(Trainer, tmp_path, bert, rows, **given)
    for home in (ON_DISK, GRADIENTS_ON_DEVICE):
        ours = train(MemfitTrainer, tmp_path, bert, rows, homes(names, home), **given)
        check_equal(ours, theirs)
    assert len([entry for entry in told(ours) if "loss" in entry]) == 6


@pytest.mark.parametrize(
    ("first", "then"), [(MemfitTrainer, MemfitTrainer), (Trainer, MemfitTrainer), (MemfitTrainer, Trainer)]
)
def test_checkpoints_are_read_by_either(first: Any, then: Any, tmp_path: Path) -> None:
    plan = homes(LAYERS)
    theirs = train(Trainer, tmp_path / "plain")
    if first is MemfitTrainer:
        train(MemfitTrainer, tmp_path / "first", plan=plan).close()
    else:
        train(Trainer, tmp_path / "first")
    again = train(then, tmp_path / "then", plan=plan, resume=str(tmp_path / "first" / "checkpoint-2"))
    check_equal(again, theirs)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "first" / "checkpoint-4")
    for found, expected in zip(loaded.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_states_of_a_checkpoint_are_those_of_plain_trainer(tmp_path: Path) -> None:
    train(Trainer, tmp_path / "plain", max_steps=2)
    train(MemfitTrainer, tmp_path / "ours", plan=homes(LAYERS), max_steps=2).close()
    found, expected = (
        torch.load(tmp_path / name / "checkpoint-2" / "optimizer.pt", weights_only=True) for name in ("ours", "plain")
    )
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, states in expected["state"].items():
        assert states.keys() == found["state"][index].keys()
        assert all(torch.equal(found["state"][index][key], states[key]) for key in states)


def test_an_interrupted_save_is_not_resumed_from(tmp_path: Path) -> None:
    """What a kill leaves: the newest checkpoint without its last file. The one before it is taken."""
    theirs = train(Trainer, tmp_path / "plain")
    train(MemfitTrainer, tmp_path / "ours", plan=homes(LAYERS)).close()
    (tmp_path / "ours" / "checkpoint-4" / "trainer_state.json").unlink()
    with pytest.raises(UsageError, match="not written to its end"):
        train(MemfitTrainer, tmp_path / "ours", plan=homes(LAYERS), resume=str(tmp_path / "ours" / "checkpoint-4"))
    check_equal(train(MemfitTrainer, tmp_path / "ours", plan=homes(LAYERS), resume=True), theirs)


class _Reading(TrainerCallback):
    """Reads what callbacks of hosts read: norms before the update, weights through the trainer's own ways."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        norms = [p.grad.norm() for p in kwargs["model"].lm_head.parameters()]
        self.seen.append([float(norm) for norm in norms])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, kwargs["optimizer"].param_groups[0]["lr"]))


def test_callbacks_stand_where_they_stood(tmp_path: Path) -> None:
    seen = [_Reading(), _Reading()]
    given: dict[str, Any] = {"save_strategy": "no", "max_grad_norm": 0.5}
    theirs = train(Trainer, tmp_path, callbacks=[seen[0]], **given)
    check_equal(train(MemfitTrainer, tmp_path, plan=homes(LAYERS), callbacks=[seen[1]], **given), theirs)
    assert seen[0].seen == seen[1].seen


def test_the_best_model_is_loaded_and_the_trainer_goes_on_to_evaluate_and_save(tmp_path: Path) -> None:
    given: dict[str, Any] = {"load_best_model_at_end": True, "learning_rate": 0.5}
    theirs = train(Trainer, tmp_path / "plain", **given)
    ours = train(MemfitTrainer, tmp_path / "ours", plan=homes(LAYERS), **given)
    assert ours.state.best_global_step == theirs.state.best_global_step
    found, expected = ours.evaluate(), theirs.evaluate()
    assert found["eval_loss"] == expected["eval_loss"]
    predicted, plainly = ours.predict(Rows(4)), theirs.predict(Rows(4))
    assert (predicted.predictions == plainly.predictions).all()
    ours.save_model()  # beside its checkpoints
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours" / "optimizer.pt").exists()
    for parameter, other in zip(loaded.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(parameter, other)
    check_equal(ours, theirs)


@pytest.mark.slow
def test_a_second_train_goes_on_from_the_first(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_strategy": "no"}
    theirs = train(Trainer, tmp_path, **given)
    ours = train(MemfitTrainer, tmp_path, plan=homes(LAYERS), **given)
    for trainer in (theirs, ours):
        torch.manual_seed(9)
        trainer.train()
    check_equal(ours, theirs)


def test_generation_while_a_translation_model_is_evaluated(tmp_path: Path) -> None:
    class Ours(MemfitMixin, Seq2SeqTrainer):
        pass

    def t5() -> Any:
        torch.manual_seed(0)
        beginning: dict[str, Any] = {"decoder_start_token_id": 0}
        return T5ForConditionalGeneration(
            T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **beginning)
        )

    names = [f"{side}.block.{index}" for side in ("encoder", "decoder") for index in range(2)]
    given: dict[str, Any] = {
        "arguments_of": Seq2SeqTrainingArguments, "predict_with_generate": True, "generation_max_length": 6, "save_strategy": "no"
    }  # fmt: skip
    theirs = train(Seq2SeqTrainer, tmp_path, t5, **given)
    generated = theirs.predict(Rows(4)).predictions
    for home in (ON_DISK, GRADIENTS_ON_DEVICE):
        ours = train(Ours, tmp_path, t5, plan=homes(names, home), **given)
        assert (ours.predict(Rows(4)).predictions == generated).all()
        check_equal(ours, theirs)


def test_a_model_that_is_never_whole_trains_and_resumes(tmp_path: Path) -> None:
    theirs = train(Trainer, tmp_path / "plain")
    plan = homes(LAYERS)
    check_equal(train(MemfitTrainer, tmp_path / "ours", lambda: memfit.empty(llama), plan=plan), theirs)
    resumed = train(
        MemfitTrainer, tmp_path / "then", lambda: memfit.empty(llama), plan=plan, resume=str(tmp_path / "ours" / "checkpoint-2")
    )  # fmt: skip
    check_equal(resumed, theirs)


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_an_adapter_on_a_base_in_four_bits(tmp_path: Path, *, use_dora: bool) -> None:
    """The trainer is plain Trainer on the rounded base, bit for bit, with evaluations and saves in between."""
    peft = pytest.importorskip("peft")

    def adapted(*, is_rounded: bool = False) -> Any:
        torch.manual_seed(0)
        base = LlamaForCausalLM(
            LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
        )
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", use_dora=use_dora)
        model = peft.get_peft_model(base, config)
        layers = [each for name, each in model.named_parameters() if "layers" in name and not each.requires_grad]
        with torch.no_grad():
            for weight in layers if is_rounded else ():
                if weight.dim() == 2:
                    scales, codes = encode(FrozenFormat.NF4, weight.view(-1), len(weight))
                    decode(FrozenFormat.NF4, scales, codes, weight.view(-1))
        return model

    names = [f"base_model.model.model.layers.{index}" for index in range(2)]
    plan = replace(homes(names), frozen_format=FrozenFormat.NF4)
    theirs = train(Trainer, tmp_path / "plain", lambda: adapted(is_rounded=True))
    ours = train(MemfitTrainer, tmp_path / "ours", adapted, plan=plan, allow={"nf4-frozen"})
    check_equal(ours, theirs)
    saved = {path.name for path in (tmp_path / "ours" / "checkpoint-4").iterdir()}
    assert {"adapter_model.safetensors", "optimizer.pt"} <= saved
    assert "model.safetensors" not in saved


def test_a_model_whose_checkpoints_have_other_names_is_resumed(tmp_path: Path) -> None:
    """transformers writes a ViT under older names, which `Trainer` (5.23) passes over where it resumes: its own first run is the reference."""

    def vit() -> Any:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "num_labels": 4,
        }  # fmt: skip
        return ViTForImageClassification(ViTConfig(**sizes))

    class Images(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            drawn = torch.Generator().manual_seed(index)
            return {"pixel_values": torch.randn(3, 8, 8, generator=drawn), "labels": index % 4}

    given: dict[str, Any] = {"build": vit, "data": Images(), "eval_strategy": "no"}
    theirs = train(Trainer, tmp_path / "plain", **given)
    ours = train(MemfitTrainer, tmp_path / "ours", resume=str(tmp_path / "plain" / "checkpoint-2"), **given)
    check_equal(ours, theirs)


@pytest.mark.parametrize("saved", [Saved.KEEP, Saved.RECOMPUTE])
def test_a_teacher_that_the_loss_calls_rests_at_home_too(saved: Saved, tmp_path: Path) -> None:
    """Distillation: the teacher is away while the student trains, and is what it was behind `close`.

    Where calls run again, too, and where the user's class has its own loss in front of the mixin's methods.
    """

    class Distilling(Trainer):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self.teacher = teacher

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            student: Any = self.model  # as documentation has it, past the argument
            output = student(**inputs)
            with torch.no_grad():
                target = self.teacher(**inputs).logits
            loss = output.loss + torch.nn.functional.mse_loss(output.logits, target)
            return (loss, output) if return_outputs else loss

    class OursDistilling(MemfitMixin, Distilling):
        compute_loss = Distilling.compute_loss

    teacher = llama()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    theirs = train(Distilling, tmp_path / "plain")
    plan = replace(
        homes([*LAYERS, *(f"teacher.{name}" for name in LAYERS)]), calls=(CallPlan(), *[CallPlan(saved=saved)] * 2)
    )
    ours = train(OursDistilling, tmp_path / "ours", plan=plan, frozen={"teacher": teacher})
    assert is_away(teacher.model.layers[0].mlp.up_proj.weight)
    assert [call.saved for call in ours.job.plan.calls[1:3]] == [saved, saved]
    check_equal(ours, theirs)
    assert ours.compute_loss.__func__ is Distilling.compute_loss
    assert all(p.requires_grad for p in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        path.name for path in (tmp_path / "plain").iterdir()
    }
    resume = str(tmp_path / "plain" / "checkpoint-2")
    check_equal(train(OursDistilling, tmp_path / "then", plan=plan, frozen={"teacher": teacher}, resume=resume), theirs)


def test_frozen_models_are_given_back_where_fit_refuses_and_shared_weights_go_on_training(tmp_path: Path) -> None:
    teacher, student = llama(), llama()

    def train_with(options: dict[str, Any]) -> None:
        MemfitTrainer(student, arguments(tmp_path, eval_strategy="no"), train_dataset=Rows(), memfit=options).train()

    options: dict[str, Any] = {"limit": "10MiB", "frozen": {"teacher": teacher}}
    with pytest.raises(DoesNotFitError):
        train_with(options)
    assert all(p.requires_grad for p in teacher.parameters())
    teacher.model.embed_tokens.weight = student.model.embed_tokens.weight
    with pytest.raises(UsageError, match=r"teacher.model.embed_tokens.weight would train"):
        train_with(options)
    assert all(p.requires_grad for p in (*teacher.parameters(), *student.parameters()))


def test_an_adapter_on_a_frozen_base_that_rests_on_disk(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        found = llama()
        torch.manual_seed(1)
        return peft.get_peft_model(found, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))

    plan = homes([f"base_model.model.{name}" for name in LAYERS])
    given: dict[str, Any] = {"load_best_model_at_end": True, "learning_rate": 0.5}
    theirs = train(Trainer, tmp_path / "plain", adapted, **given)
    ours = train(MemfitTrainer, tmp_path / "ours", adapted, plan=plan, **given)
    assert ours.state.best_global_step == theirs.state.best_global_step < theirs.state.global_step
    check_equal(ours, theirs)
    saved = Path(ours.state.best_model_checkpoint)
    assert not (saved / "model.safetensors").exists()
    again = train(
        MemfitTrainer, tmp_path / "then", adapted, plan=plan, resume=str(tmp_path / "ours" / "checkpoint-2"), **given
    )
    check_equal(again, theirs)
    loaded: Any = peft.PeftModel.from_pretrained(llama(), saved)
    weights: dict[str, Tensor] = dict(theirs.model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"torch_compile": True}, "torch_compile=True"),
    ],
)
def test_arguments_that_do_not_go_with_a_limit_are_named(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=words):
        MemfitTrainer(llama(), arguments(tmp_path, **given), train_dataset=Rows(), eval_dataset=Rows(), memfit={})


def test_what_the_trainer_decides_is_no_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'max_grad_norm'"):
        MemfitTrainer(llama(), arguments(tmp_path), train_dataset=Rows(), memfit={"max_grad_norm": 1.0})


def test_the_methods_that_are_relied_upon_have_their_signatures() -> None:
    """A release of transformers that changes one of these needs a look at `memfit.integrations.transformers`."""
    found = {
        name: list(inspect.signature(getattr(Trainer, name)).parameters)[1:]
        for name in (
            "_move_model_to_device", "train", "get_batch_samples", "evaluation_loop", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler",
            "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model", "compute_loss", "_prepare_inputs",
            "compute_loss_context_manager", "training_step",
        )
    }  # fmt: skip
    assert found == {
        "_move_model_to_device": ["model", "device"],
        "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
        "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
        "evaluation_loop": ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
        "_save": ["output_dir", "state_dict"],
        "_save_checkpoint": ["model", "trial"],
        "_save_optimizer_and_scheduler": ["output_dir"],
        "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
        "_load_optimizer_and_scheduler": ["checkpoint"],
        "_load_best_model": [],
        "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
        "_prepare_inputs": ["inputs"],
        "compute_loss_context_manager": [],
        "training_step": ["model", "inputs", "num_items_in_batch"],
    }
