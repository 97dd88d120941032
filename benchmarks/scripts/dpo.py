"""Direct preference optimization, as TRL's documentation of `DPOTrainer` has it, with a reference model."""

import local
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

local.imported()
config = LlamaConfig(
    vocab_size=local.WORDS, hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8
)


def preferences(rows, first=0):
    columns = {"prompt": (0, 16), "chosen": (5000, 48), "rejected": (9000, 48)}
    return Dataset.from_dict(
        {
            name: [" " + local.text(start + first + row, words) for row in range(rows)]
            for name, (start, words) in columns.items()
        }
    )


model = LlamaForCausalLM(config)
ref_model = LlamaForCausalLM(config)
ref_model.load_state_dict(model.state_dict())
training_args = DPOConfig(
    output_dir=str(local.OUT),
    per_device_train_batch_size=2,
    max_steps=local.STEPS,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=local.SAVE,
    save_steps=local.SAVE,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
)
trainer = DPOTrainer(
    model=model,
    ref_model=ref_model,
    args=training_args,
    train_dataset=preferences(48),
    eval_dataset=preferences(8, first=1000),
    processing_class=local.tokenizer(),
    callbacks=[local.clock()],
)
trainer.train(resume_from_checkpoint=local.RESUME)
metrics = trainer.evaluate()
trainer.save_model()
local.told(**local.losses(trainer), final=metrics["eval_loss"])
