"""LoRA, as PEFT's documentation has it, with `Trainer`."""

import local
from peft import LoraConfig, TaskType, get_peft_model
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

local.imported()
tokenizer = local.tokenizer()
config = LlamaConfig(
    vocab_size=local.WORDS, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8
)
peft_config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=32, lora_dropout=0.1)
model = get_peft_model(LlamaForCausalLM(config), peft_config)
model.print_trainable_parameters()


def preprocess(examples):
    return tokenizer(examples["text"], truncation=True, max_length=128)


training_args = TrainingArguments(
    output_dir=str(local.OUT),
    learning_rate=1e-3,
    per_device_train_batch_size=8,
    max_steps=local.STEPS,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=local.SAVE,
    save_steps=local.SAVE,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=local.texts(64, words=128).map(preprocess, batched=True, remove_columns=["text"]),
    eval_dataset=local.texts(8, first=1000, words=128).map(preprocess, batched=True, remove_columns=["text"]),
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[local.clock()],
)
trainer.train(resume_from_checkpoint=local.RESUME)
metrics = trainer.evaluate()
trainer.save_model()
local.told(**local.losses(trainer), final=metrics["eval_loss"])
