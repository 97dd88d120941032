"""A loop of one's own in the manner of nanoGPT's `train.py`: accumulation, clipping, cosine, checkpoints."""

import math

import local
import torch
from torch import nn
from torch.nn import functional

local.imported()
n_layer, n_head, n_embd, block_size, dropout, bias = 8, 8, 512, 48, 0.1, False
batch_size, gradient_accumulation_steps, grad_clip = 2, 2, 1.0
learning_rate, min_lr, warmup_iters, eval_interval, eval_iters = 6e-4, 6e-5, 2, local.SAVE, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd, bias=bias), nn.LayerNorm(n_embd, bias=bias)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd, bias=bias), nn.GELU(), nn.Linear(4 * n_embd, n_embd, bias=bias), nn.Dropout(dropout)
        )  # fmt: skip

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, n_head, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(n_embd, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout if self.training else 0)
        x = x + self.c_proj(y.transpose(1, 2).reshape(rows, length, n_embd))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(local.WORDS, n_embd), nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd, bias=bias)
        self.lm_head = nn.Linear(n_embd, local.WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


data = {"train": local.tokens(1, 20_000)[0], "val": local.tokens(1, 4_000, first=1)[0]}


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (local.STEPS - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        X, Y = get_batch("val")
        losses[k] = model(X, Y)[1].item()
    model.train()
    return losses.mean()


torch.manual_seed(1337)
model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95)
)
iter_num = 0
losses, evaluations = [], []
if local.RESUME:
    checkpoint = torch.load(local.OUT / "ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    torch.manual_seed(iter_num)
X, Y = get_batch("train")
while iter_num < local.STEPS:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for _ in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item() * gradient_accumulation_steps)
    iter_num += 1
    stops = local.tick()
    if iter_num % eval_interval == 0:
        evaluations.append(estimate_loss())
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint, local.OUT / "ckpt.pt")
        torch.manual_seed(iter_num)
    if stops:
        break
local.told(losses=losses, evaluations=evaluations)
