"""Supervised fine-tuning, as TRL's documentation of `SFTTrainer` has it."""

import local
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

local.imported()
config = LlamaConfig(
    vocab_size=local.WORDS, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8
)
training_args = SFTConfig(
    output_dir=str(local.OUT),
    per_device_train_batch_size=2,
    max_steps=local.STEPS,
    max_length=48,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=local.SAVE,
    save_steps=local.SAVE,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=training_args,
    train_dataset=local.texts(64),
    eval_dataset=local.texts(8, first=1000),
    processing_class=local.tokenizer(),
    callbacks=[local.clock()],
)
trainer.train(resume_from_checkpoint=local.RESUME)
metrics = trainer.evaluate()
trainer.save_model()
local.told(**local.losses(trainer), final=metrics["eval_loss"])
