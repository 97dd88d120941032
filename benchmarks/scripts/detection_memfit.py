"""Object detection by DETR, as transformers' documentation of the task has it."""

import local
import torch
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig, TrainingArguments

from memfit.integrations.transformers import MemfitTrainer

local.imported()
backbone = ResNetConfig(out_features=["stage4"])  # a ResNet-50, as DETR's own
config = DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone, num_queries=20, num_labels=5)
model = DetrForObjectDetection(config)


class Boxes(torch.utils.data.Dataset):
    def __init__(self, rows, first=0):
        self.rows, self.first = rows, first

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(self.first + index)
        objects = 1 + index % 4
        boxes = torch.rand(objects, 4, generator=drawn) * 0.4 + 0.1
        return {
            "pixel_values": torch.randn(3, 192, 192, generator=drawn),
            "labels": {"class_labels": torch.randint(0, 5, (objects,), generator=drawn), "boxes": boxes},
        }


def collate_fn(batch):
    return {
        "pixel_values": torch.stack([each["pixel_values"] for each in batch]),
        "labels": [each["labels"] for each in batch],
    }


training_args = TrainingArguments(
    output_dir=str(local.OUT),
    per_device_train_batch_size=4,
    max_steps=local.STEPS,
    learning_rate=1e-4,
    max_grad_norm=0.1,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=local.SAVE,
    save_steps=local.SAVE,
    remove_unused_columns=False,
    eval_do_concat_batches=False,
    prediction_loss_only=True,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = MemfitTrainer(
    model=model,
    args=training_args,
    train_dataset=Boxes(64),
    eval_dataset=Boxes(8, first=1000),
    data_collator=collate_fn,
    callbacks=[local.clock()],
    memfit={"limit": local.LIMIT},
)
trainer.train(resume_from_checkpoint=local.RESUME)
metrics = trainer.evaluate()
trainer.save_model()
local.told(**local.losses(trainer), final=metrics["eval_loss"])
