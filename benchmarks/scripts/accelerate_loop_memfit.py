"""Sequence classification, as Accelerate's documentation has it (`nlp_example.py`)."""

import local
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

import memfit

local.imported()


def collate_fn(examples):
    input_ids = torch.stack([row for row, _ in examples])
    return {"input_ids": input_ids, "labels": torch.tensor([label for _, label in examples])}


def training_function():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    data = [(row, int(row[0]) % 2) for row in local.tokens(80, 32)]
    train_dataloader = DataLoader(data[:64], shuffle=True, collate_fn=collate_fn, batch_size=4)
    eval_dataloader = DataLoader(data[64:], shuffle=False, collate_fn=collate_fn, batch_size=8)
    config = BertConfig(
        vocab_size=local.WORDS, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8
    )
    model = BertForSequenceClassification(config)
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-4)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=local.STEPS)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    job = memfit.fit(model, optimizer.optimizer, lambda model, batch: model(**batch).loss, collate_fn(data[:4]), limit=local.LIMIT, lines=True)  # fmt: skip
    losses, evaluations, updates = [], [], 0
    if local.RESUME:
        lr_scheduler.load_state_dict(job.load(local.OUT / "saved").extra)
        updates = local.SAVE
    model.train()
    with job.lines():
        for batch in accelerator.skip_first_batches(train_dataloader, 2 * updates):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if not accelerator.sync_gradients:
                continue
            updates += 1
            stops = local.tick()
            if updates % local.SAVE == 0:
                model.eval()
                with torch.no_grad():
                    evaluations += [model(**each).loss.item() for each in eval_dataloader]
                model.train()
                job.save(local.OUT / "saved", extra=lr_scheduler.state_dict())
            if stops or updates == local.STEPS:
                break
    local.told(losses=losses, evaluations=evaluations)


training_function()
