"""Fine-tuning of a model of images and text, as transformers' documentation of Llava and `Trainer` has it."""

import local
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

local.imported()
IMAGE, PATCHES, LENGTH = local.WORDS - 1, 16, 24
config = LlavaConfig(
    vision_config=CLIPVisionConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6, image_size=64, patch_size=16
    ),
    text_config=LlamaConfig(
        vocab_size=local.WORDS, hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8
    ),
    image_token_index=IMAGE,
    vision_feature_layer=-1,
)  # fmt: skip
model = LlavaForConditionalGeneration(config)


class Captions(torch.utils.data.Dataset):
    def __init__(self, rows, first=0):
        self.rows, self.first = rows, first

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return local.Images(2000, 64)[self.first + index][0], local.tokens(1, LENGTH, self.first + index)[0]


def collate_fn(examples):
    text = torch.stack([text for _, text in examples])
    input_ids = torch.cat([torch.full((len(examples), PATCHES), IMAGE), text], dim=1)
    return {
        "pixel_values": torch.stack([image for image, _ in examples]),
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "labels": input_ids.masked_fill(input_ids == IMAGE, -100),
    }


args = TrainingArguments(
    output_dir=str(local.OUT),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=local.STEPS,
    learning_rate=1e-4,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=local.SAVE,
    save_steps=local.SAVE,
    remove_unused_columns=False,
    prediction_loss_only=True,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=Captions(128),
    eval_dataset=Captions(8, first=1000),
    data_collator=collate_fn,
    callbacks=[local.clock()],
)
trainer.train(resume_from_checkpoint=local.RESUME)
metrics = trainer.evaluate()
trainer.save_model()
local.told(**local.losses(trainer), final=metrics["eval_loss"])
