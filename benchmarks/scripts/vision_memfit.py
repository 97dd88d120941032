"""Image classification with augmentation and an average of the weights, as torch's documentation of `swa_utils` has it."""

import local
import torch
from torch import nn
from torch.utils.data import DataLoader

import memfit

local.imported()


class Block(nn.Module):
    def __init__(self, width, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width // stride, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def resnet():
    stages = [Block(width, stride) for width in (64, 128, 256, 512) for stride in ((1, 1) if width == 64 else (2, 1))]
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def augment(images):
    images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(-1), images)
    left, top = torch.randint(0, 8, (2,))
    return nn.functional.pad(images, (4, 4, 4, 4))[:, :, top : top + 48, left : left + 48]


loader = DataLoader(local.Images(128, 48), batch_size=16, shuffle=True)
val_loader = DataLoader(local.Images(32, 48), batch_size=16)
loss_fn = nn.CrossEntropyLoss()
model = resnet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def evaluate(model):
    model.eval()
    with torch.no_grad():
        found = sum(loss_fn(model(images), labels).item() for images, labels in val_loader)
    model.train()
    return found


losses, evaluations, begin = [], [], 0
if local.RESUME:
    begin = local.SAVE
with (job := memfit.fit(model, optimizer, lambda model, batch: loss_fn(model(batch[0]), batch[1]), (torch.zeros(16, 3, 48, 48), torch.zeros(16).long()), limit=local.LIMIT, lines=True, resume=local.OUT / "saved" if local.RESUME else None)).lines():  # fmt: skip
    ema_model = memfit.MemfitEma(job, 0.9, copies_first=True)
    torch.manual_seed(begin)
    for step, (images, labels) in enumerate(loader, begin):
        optimizer.zero_grad()
        loss = loss_fn(model(augment(images)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        stops = local.tick() or step + 1 == local.STEPS
        if (step + 1) % local.SAVE == 0:
            evaluations.append(evaluate(model))
            with ema_model.applied(): evaluations.append(evaluate(model))  # fmt: skip
            job.save(local.OUT / "saved")
        if stops:
            break
local.told(losses=losses, evaluations=evaluations)
