"""Causal language modelling, as transformers' documentation of `Trainer` has it."""

import local
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, TrainingArguments

from memfit.integrations.transformers import MemfitTrainer

local.imported()
tokenizer = local.tokenizer()
config = LlamaConfig(
    vocab_size=local.WORDS, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8
)
model = LlamaForCausalLM(config)


def preprocess(examples):
    return tokenizer(examples["text"], truncation=True, max_length=48)


train_data = local.texts(64).map(preprocess, batched=True, remove_columns=["text"])
eval_data = local.texts(8, first=1000).map(preprocess, batched=True, remove_columns=["text"])
training_args = TrainingArguments(
    output_dir=str(local.OUT),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=local.STEPS,
    learning_rate=1e-3,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=local.SAVE,
    save_steps=local.SAVE,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = MemfitTrainer(
    model=model,
    args=training_args,
    train_dataset=train_data,
    eval_dataset=eval_data,
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[local.clock()],
    memfit={"limit": local.LIMIT},
)
trainer.train(resume_from_checkpoint=local.RESUME)
metrics = trainer.evaluate()
trainer.save_model()
local.told(**local.losses(trainer), final=metrics["eval_loss"])
