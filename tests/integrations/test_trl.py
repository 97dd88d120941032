"""TRL's trainers with `MemfitMixin` beside themselves: all that they log, and weights, bit for bit. `make test-hosts` installs it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from memfit.core.errors import UnsupportedError
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier
from memfit.integrations.transformers import MemfitMixin

trl: Any = pytest.importorskip("trl", reason="memfit[trl] is not installed: make test-hosts installs it")
datasets: Any = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft")

# Of defaults that change, of the machine, and of libraries' older interfaces.
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [f"w{index}" for index in range(28)]
MODEL: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GRADIENT_HOMES = (Tier.DISK, Tier.DEVICE)
SAVED = "DPO with a reference"
NOT_TOLD = ("runtime", "per_second", "flos")


def tokenizer() -> Any:
    names = {name: index for index, name in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(index: int, words: int = 6) -> str:
    drawn = torch.randint(0, 28, (words + index % 3,), generator=torch.Generator().manual_seed(index))
    return " ".join(WORDS[int(one)] for one in drawn)


def texts() -> Any:
    return datasets.Dataset.from_dict({"text": [text(index) for index in range(12)]})


def preferences() -> Any:
    columns = {"prompt": (0, 3), "chosen": (50, 6), "rejected": (90, 6)}
    return datasets.Dataset.from_dict(
        {name: [" " + text(first + index, words) for index in range(12)] for name, (first, words) in columns.items()}
    )


def adapter() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


CASES: dict[str, tuple[str, Any, Any, bool]] = {
    "SFT": ("SFT", LlamaForCausalLM, texts, False),
    "SFT of an adapter": ("SFT", LlamaForCausalLM, texts, True),
    "DPO of an adapter": ("DPO", LlamaForCausalLM, preferences, True),
    "DPO with a reference": ("DPO", LlamaForCausalLM, preferences, False),
    "reward": ("Reward", LlamaForSequenceClassification, preferences, False),
}


def train(
    name: str, directory: Path, *, ours: bool, gradients: Tier = Tier.DISK, **changed: Any
) -> tuple[list[Any], list[torch.Tensor]]:
    kind, model, data, is_adapted = CASES[name]
    host, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    given = {
        "output_dir": str(directory), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    home = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=gradients)
    options: dict[str, Any] = {"peft_config": adapter()} if is_adapted else {}
    if ours:
        prefix = "base_model.model." if is_adapted else ""
        plan = Plan(blocks={f"{prefix}model.layers.{i}": home for i in range(2)}, update=UpdateTime.AFTER_BACKWARD)
        options["memfit"] = {"plan": plan}
        host = type("Ours", (MemfitMixin, host), {})
    torch.manual_seed(0)
    more: dict[str, Any] = {"num_labels": 1} if kind == "Reward" else {}
    rows = data()
    if kind == "DPO" and not is_adapted:
        options["ref_model"] = model(LlamaConfig(**MODEL))
        if ours:
            layers = {f"{part}model.layers.{i}": home for part in ("", "reference.") for i in range(2)}
            options["memfit"] = {"plan": Plan(blocks=layers, update=UpdateTime.AFTER_BACKWARD)}
    trainer: Any = host(
        model=model(LlamaConfig(**MODEL, **more)), args=config(**(given | changed)), train_dataset=rows,
        eval_dataset=rows.select(range(4)), processing_class=tokenizer(), **options,
    )  # fmt: skip
    trainer.train()
    if ours:
        assert any(not tier.traits.is_device for tier in trainer.job.plan.tiers)
        if name == SAVED:
            trainer.save_model(directory / "saved")
        trainer.close()
    log = [
        {key: value for key, value in entry.items() if not any(word in key for word in NOT_TOLD)}
        for entry in trainer.state.log_history
    ]
    return log, [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_of_trl_is_bitwise_itself(name: str, tmp_path: Path) -> None:
    """With gradients on disk, and on the device."""
    expected_log, expected = train(name, tmp_path, ours=False)
    for gradients in GRADIENT_HOMES:
        log, weights = train(name, tmp_path, ours=True, gradients=gradients)
        assert log == expected_log, gradients
        assert len(log[0]) > 5  # what TRL itself counts is there
        assert all(map(torch.equal, weights, expected)), gradients
    if name == SAVED:
        saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        assert all(map(torch.equal, saved.parameters(), expected))


def test_the_default_of_trl_that_does_not_go_with_a_limit_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="gradient_checkpointing=True"):
        train("SFT", tmp_path, ours=True, gradient_checkpointing=True)


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer", "RewardTrainer"])
def test_what_is_relied_upon_of_a_trainer_is_there(name: str) -> None:
    """A release of TRL that changes one of these needs a look at `memfit.integrations.transformers`."""
    host: Any = getattr(trl, name)
    found = {
        method: list(inspect.signature(getattr(host, method)).parameters)[1:]
        for method in ("compute_loss", "prediction_step", "evaluate", "log", "_prepare_inputs", "_save_checkpoint")
    }
    assert found == {
        "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
        "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
        "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
        "log": ["logs", "start_time"],
        "_prepare_inputs": ["inputs"],
        "_save_checkpoint": ["model", "trial"],
    }
    # The mixin's own methods must come first: TRL may not define one of these itself.
    own = {
        "get_batch_samples",
        "evaluation_loop",
        "_save",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_best_model",
    }
    assert not own & set(vars(host))
    # What its losses count, which planning must not: by name.
    program = inspect.getsource(host)
    assert "self._metrics = " in program
    assert "self._total_train_tokens = " in program
    if name == "DPOTrainer":
        assert "self.ref_model = " in program
        assert "sync_ref_model" in inspect.signature(trl.DPOConfig).parameters
