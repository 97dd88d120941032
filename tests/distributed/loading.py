"""Torch's own loaders and samplers on ranks, in tests of jobs over ranks."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import memfit
from distributed.training import OPTIMIZERS, batch_of, build, loss, plan_for, weights_of

MOST_NORM = 0.05
# Plain PyTorch's norm of gradients is one sum over all parameters; ranks add their shares' norms.
MOST_OFF = 1e-6


def sampled(rank: int, size: int, stage: int, items: int, rows: int, drops: bool) -> list[str]:
    """Trains two epochs of a shuffled dataset, whose last batch is smaller than the others and may be of other rows on
    each rank, with gradients clipped over ranks; evaluates between. Returns what differs from plain PyTorch.
    """
    data = TensorDataset(batch_of("tower", 0, 0, items))
    model, plain = build("tower"), build("tower")
    optimizer, plain_optimizer = (OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain))
    batches = [
        DataLoader(data, rows, sampler=DistributedSampler(data, size, r, shuffle=True, seed=3, drop_last=drops))
        for r in range(size)
    ]
    first = next(iter(batches[rank]))[0]
    plan = plan_for(model, size, stage, "device", 1)
    told = list[str]()
    with memfit.fit(model, optimizer, loss, first, plan=plan, enforce=False, max_grad_norm=MOST_NORM) as job:
        for epoch in range(2):
            for loader in batches:
                sampler = loader.sampler
                assert isinstance(sampler, DistributedSampler)
                sampler.set_epoch(epoch)
            for of_ranks in zip(*batches, strict=True):
                parts = [part for (part,) in of_ranks]
                found = job.step(parts[rank]).loss
                expected, total = 0.0, sum(map(len, parts))
                plain_optimizer.zero_grad()
                for part in parts:
                    share = loss(plain, part) * (len(part) / total)
                    share.backward()
                    expected += share.item()
                torch.nn.utils.clip_grad_norm_(plain.parameters(), MOST_NORM)
                plain_optimizer.step()
                told += [] if abs(found - expected) < MOST_OFF else [f"loss {found}, expected {expected}"]
            held_out = batch_of("tower", 50 + epoch, 0, 7).tensor_split(size)
            found = job.evaluate(held_out[rank]).loss
            with torch.no_grad():
                expected = loss(plain, torch.cat(held_out)).item()
            told += [] if abs(found - expected) < MOST_OFF else [f"evaluate {found}, expected {expected}"]
    far = [
        name
        for (name, value), other in zip(weights_of(model).items(), plain.parameters(), strict=True)
        if not torch.allclose(value, other, rtol=0.0, atol=MOST_OFF)
    ]
    return told + far
