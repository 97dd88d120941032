"""QLoRA, as PEFT's documentation of quantization has it: a base in NF4 by bitsandbytes, adapters on all linear layers."""

import local
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    TrainingArguments,
)

from memfit.integrations.transformers import MemfitTrainer

local.imported()
tokenizer = local.tokenizer()
quantization = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False, bnb_4bit_compute_dtype=torch.float32
)
model = AutoModelForCausalLM.from_pretrained(local.base(), quantization_config=quantization)
for module in model.modules():
    # On CPUs with AVX512-BF16 bitsandbytes repacks its layers in an evaluation, and their next training forward has no gradient.
    module.support_avx512bf16_for_cpu = False
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
config = LoraConfig(r=16, lora_alpha=8, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
model = get_peft_model(model, config)


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
trainer = MemfitTrainer(
    model=model,
    args=training_args,
    train_dataset=local.texts(64, words=128).map(preprocess, batched=True, remove_columns=["text"]),
    eval_dataset=local.texts(8, first=1000, words=128).map(preprocess, batched=True, remove_columns=["text"]),
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[local.clock()],
    memfit={"limit": local.LIMIT},
)
trainer.train(resume_from_checkpoint=local.RESUME)
metrics = trainer.evaluate()
trainer.save_model()
local.told(**local.losses(trainer), final=metrics["eval_loss"])
