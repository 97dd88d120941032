"""Knowledge distillation of an image classifier, as transformers' documentation of the task has it."""

import local
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from memfit.integrations.transformers import MemfitMixin

local.imported()
teacher_model = ViTForImageClassification(
    ViTConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, image_size=64, patch_size=8, num_labels=10
    )
)  # fmt: skip
student_model = ResNetForImageClassification(
    ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3], layer_type="basic", num_labels=10)
)


class ImageDistilTrainer(MemfitMixin, Trainer):
    def __init__(self, teacher_model, student_model, temperature, lambda_param, *args, **kwargs):
        super().__init__(student_model, *args, **kwargs)
        self.teacher = teacher_model
        self.student = student_model
        self.loss_function = nn.KLDivLoss(reduction="batchmean")
        self.teacher.to(self.model.device)
        self.teacher.eval()
        self.temperature = temperature
        self.lambda_param = lambda_param

    def compute_loss(self, student, inputs, return_outputs=False, **kwargs):
        student_output = self.student(**inputs)
        with torch.no_grad():
            teacher_output = self.teacher(**inputs)
        soft_teacher = functional.softmax(teacher_output.logits / self.temperature, dim=-1)
        soft_student = functional.log_softmax(student_output.logits / self.temperature, dim=-1)
        distillation_loss = self.loss_function(soft_student, soft_teacher) * (self.temperature**2)
        loss = (1.0 - self.lambda_param) * student_output.loss + self.lambda_param * distillation_loss
        return (loss, student_output) if return_outputs else loss


def collate_fn(examples):
    return {
        "pixel_values": torch.stack([image for image, _ in examples]),
        "labels": torch.tensor([label for _, label in examples]),
    }


training_args = TrainingArguments(
    output_dir=str(local.OUT),
    per_device_train_batch_size=8,
    max_steps=local.STEPS,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=local.SAVE,
    save_steps=local.SAVE,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    remove_unused_columns=False,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = ImageDistilTrainer(
    student_model=student_model,
    teacher_model=teacher_model,
    args=training_args,
    train_dataset=local.Images(256, 64),
    eval_dataset=local.Images(32, 64),
    data_collator=collate_fn,
    temperature=5,
    lambda_param=0.5,
    callbacks=[local.clock()],
    memfit={"limit": local.LIMIT, "frozen": {"teacher": teacher_model}},
)
trainer.train(resume_from_checkpoint=local.RESUME)
metrics = trainer.evaluate()
trainer.save_model()
local.told(**local.losses(trainer), final=metrics["eval_loss"])
