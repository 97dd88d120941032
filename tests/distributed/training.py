"""Training on ranks and on one process, in tests of jobs over ranks."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import memfit
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator, install
from memfit.mesh.rank_group import RankGroup
from memfit.planner.search.over_ranks_plans import share_out
from memfit.store import FileOperations
from memfit.trace.blocks import find_blocks

ROWS = 6
WIDTH = 72


class Tower(nn.Module):
    """Layers of widths that no number of ranks divides, with a weight that is read twice if tied."""

    def __init__(self, layers: int = 4, *, ties: bool = False, has_biases: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH + 1, bias=has_biases),
                nn.Tanh(),
                nn.Linear(2 * WIDTH + 1, WIDTH, bias=has_biases),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build(name: str) -> nn.Module:
    """A model, with the same values wherever it is built."""
    torch.manual_seed(0)
    if name == "tower":
        return Tower()
    if name == "tied":
        return Tower(ties=True)
    if name == "matrices":
        return Tower(has_biases=False)
    if name in ("gpt2", "gpt2 untied"):
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=64,
            vocab_size=128,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=name == "gpt2",
        )
        return GPT2LMHeadModel(config)
    small: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 160,
    }
    no_dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "bert":
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(vocab_size=128, max_position_embeddings=16, tie_word_embeddings=False, **small, **no_dropout)
        )
    few_labels: dict[str, Any] = {"num_labels": 10}
    if name == "vit":
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **few_labels, **small, **no_dropout))
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_size=64,
        intermediate_size=160,
        vocab_size=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean over rows."""
    if isinstance(model, Tower):
        return ((model(batch) - 0.3) ** 2).mean()
    return _loss_of_transformers(model, batch)


def _loss_of_transformers(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if batch.is_floating_point():
        return ((model(pixel_values=batch).logits - 0.3) ** 2).mean()
    found: Any = getattr(model, "module", model)  # behind a wrapper
    options = {} if found.config.model_type == "bert" else {"use_cache": False}
    return model(input_ids=batch, labels=batch, **options).loss


def batch_of(name: str, step: int, rank: int, rows: int = ROWS) -> torch.Tensor:
    """A rank's rows of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if name in ("tower", "tied"):
        return torch.randn(rows, WIDTH, generator=generator)
    if name == "vit":
        return torch.randn(rows, 3, 16, 16, generator=generator)
    return torch.randint(0, 128, (rows, 12), generator=generator)


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=False),
    "muon": lambda p: torch.optim.Muon(p, lr=1e-2),
}


def plan_for(model: nn.Module, ranks: int, stage: int, tier: str, k: int, **more: Any) -> Plan:
    """A plan with a stage of ZeRO, whose shares rest in a tier."""
    names = [block.name for block in find_blocks(model, None).blocks]
    homes = BlockPlan(weight_home=Tier(tier), gradient_home=Tier(tier), state_home=Tier(tier))
    plan = Plan(microbatches=k, blocks=dict.fromkeys(names, homes), **more)
    return share_out(plan, ranks, stage, names)


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def differing_from(
    model: nn.Module, optimizer: torch.optim.Optimizer, plain: nn.Module, plain_optimizer: torch.optim.Optimizer
) -> list[str]:
    """Returns the names of weights and states whose bits are not plain PyTorch's."""
    states = [
        f"{name}.{key}"
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)
        for key, value in plain_optimizer.state[q].items()
        if not torch.equal(torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value))
    ]
    return same(weights_of(model), weights_of(plain)) + states


def accumulated(
    name: str,
    optimizer: str,
    ranks: int,
    k: int,
    steps: int,
    *,
    max_norm: float | None = None,
    rows: Callable[[int, int], int] | None = None,
    is_major: bool = False,
) -> dict[str, torch.Tensor]:
    """Weights of plain PyTorch in one process: each rank's microbatches are added up, then the ranks in order.

    Args:
        is_major: in microbatch-major order each microbatch is added over the ranks before the next one.
    """
    model = build(name)
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    count = rows or (lambda step, rank: ROWS)
    for step in range(steps):
        total = sum(count(step, rank) for rank in range(ranks))
        parts = [
            batch_of(name, step, rank, count(step, rank)).tensor_split(max(min(k, count(step, rank)), 1))
            for rank in range(ranks)
        ]
        # Each inner list is added up in order, then these sums.
        groups = [[[part] for part in column] for column in zip(*parts, strict=True)] if is_major else [[*parts]]
        totals: dict[str, torch.Tensor] = {}
        for group in groups:
            sums: dict[str, torch.Tensor] = {}
            for own in group:
                model.zero_grad()
                for part in own:
                    if len(part):
                        (loss(model, part) * torch.tensor(len(part) / total)).backward()
                _add(sums, {n: p.grad for n, p in model.named_parameters()})
            _add(totals, sums)
        sums = totals
        for parameter_name, p in model.named_parameters():
            p.grad = sums.get(parameter_name)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer_.step()
    return weights_of(model)


def _add(sums: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor | None]) -> None:
    for name, value in more.items():
        if value is not None:
            sums[name] = sums[name] + value if name in sums else value.clone()


def train(
    rank: int,
    size: int,
    name: str,
    optimizer: str,
    stage: int,
    tier: str,
    k: int,
    steps: int,
    fit_options: Mapping[str, Any] | None = None,
    plan_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Trains on ranks; returns what differs from one process."""
    model = build(name)
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    options = dict(fit_options or {})
    plan = plan_for(model, size, stage, tier, k, **(plan_options or {}))
    job = memfit.fit(model, optimizer_, loss, batch_of(name, 0, rank), plan=plan, enforce=False, **options)
    told = []
    for step in range(steps):
        result = job.step(batch_of(name, step, rank))
        told += result.departures
    job.close()
    return told + same(
        weights_of(model), accumulated(name, optimizer, size, k, steps, max_norm=options.get("max_grad_norm"))
    )


def hindered(rank: int, size: int, how: str, stage: int = 3, tier: str = "disk") -> dict[str, Any]:
    """Trains two steps, the second with something wrong on rank 1 only; returns what this rank raised, and what lives after closing."""
    name, armed = "tower", [False]
    # The first time loads libraries, whose memory stays.
    live_bytes = _live_bytes()
    model = build(name)
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def own_loss(given: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = loss(given, batch)
        if armed[0] and rank == 1 and how == "an exception in the loss":
            raise KeyError("of the loss")
        if armed[0] and rank == 1 and how == "a limit breach":
            torch.empty(64 << 20, dtype=torch.uint8)
        if armed[0] and rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    options: dict[str, Any] = {"enforce": False}
    if how == "a limit breach":
        options = {"limit": "48MiB", "emulate_device": True}
    job = memfit.fit(
        model, optimizer, own_loss, batch_of(name, 0, rank), plan=plan_for(model, size, stage, tier, 2), **options
    )
    job.step(batch_of(name, 0, rank))
    armed[0] = True
    raised, own_pwrite = "", FileOperations.pwrite
    if rank == 1 and how == "a full disk":

        def full(self: FileOperations, descriptor: int, source: memoryview, offset: int) -> int:
            raise OSError(28, "No space left on device")

        FileOperations.pwrite = full  # type: ignore[method-assign]
    try:
        if rank == 1 and how == "a save on one rank":
            job.save("/nonexistent")
        elif rank == 1 and how == "an invalid batch":
            job.step(torch.zeros(3, WIDTH + 1))
        else:
            job.step(batch_of(name, 1, rank))
    except Exception as error:  # noqa: BLE001, told to the test
        raised = f"{type(error).__name__}: {error}"
    raised_s = time.time()
    armed[0] = False
    FileOperations.pwrite = own_pwrite  # type: ignore[method-assign]
    after = ""
    try:
        after = f"{len(job.step(batch_of(name, 1, rank)).losses)} losses"
    except Exception as error:  # noqa: BLE001, told to the test
        after = f"{type(error).__name__}: {error}"
    # In turn: closing on one rank does not depend on that of another, which may come much later.
    store = dist.distributed_c10d._get_default_store()
    if rank == 1 and how == "a full disk":
        store.wait(["closed"], timedelta(seconds=60))
    with patch.object(RankGroup.close, "__defaults__", (60.0,)):
        job.close()
    store.set("closed", "")
    # The process group of the program is as it was: another job begins.
    again = ""
    if how != "killed":
        del job
        model = build(name)
        job = memfit.fit(
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            loss,
            batch_of(name, 0, rank),
            plan=plan_for(model, size, 3, "device", 1),
            enforce=False,
        )
        again = f"{len(job.step(batch_of(name, 0, rank)).losses)} losses"
        job.close()
    del job, model, optimizer
    deadline = time.monotonic() + 5.0
    # Threads that end let go of what they held.
    while (left := _live_bytes() - live_bytes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"raised": raised, "after": after, "again": again, "raised_s": raised_s, "left": left}


def _live_bytes() -> int:
    """Bytes of tensors of this process."""
    gc.collect()
    found = install()
    assert isinstance(found, Allocator)
    return found.stats().live_bytes


def skipped(rank: int, size: int) -> list[Any]:
    """Steps in fp16 whose gradients are not finite on rank 1 only; returns whether each was skipped, the scales and what differs between ranks."""
    model = build("tower")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    plan = plan_for(model, size, 3, "disk", 1, compute_dtype="float16", update="after-backward")
    is_bad = [False]

    def own_loss(given: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss(given, batch) * (float("nan") if is_bad[0] else 1.0)

    job = memfit.fit(model, optimizer, own_loss, batch_of("tower", 0, rank), plan=plan, allow={"fp16"}, enforce=False)
    told: list[Any] = []
    for step in range(6):
        # The first steps find their scale.
        is_bad[0] = rank == 1 and step == 4
        result = job.step(batch_of("tower", step, rank))
        scaler = job.loss_scaler
        assert scaler is not None
        told.append((result.is_skipped, scaler.scale))
    job.close()
    return [told, float(sum(w.double().sum() for w in weights_of(model).values()))]


def save_after(
    rank: int, size: int, directory: str, optimizer: str, steps: int, stage: int, tier: str, source: str | None = None
) -> list[str]:
    """Trains some steps, on from a save if there is one, and saves; returns what differs from one process that did all steps on two ranks' rows."""
    model = build("tower")
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    plan = plan_for(model, size, stage, tier, 1)
    job = memfit.fit(model, optimizer_, loss, _rows_of(rank, size, 0), plan=plan, enforce=False, resume=source)
    for step in range(job.steps, job.steps + steps):
        job.step(_rows_of(rank, size, step))
    done = job.steps
    job.save(directory)
    job.close()
    expected = Tower()
    expected.load_state_dict(model.state_dict())
    from safetensors.torch import load_file

    saved = load_file(f"{directory}/model.safetensors")
    moments = load_file(f"{directory}/optimizer.safetensors")
    told = same({name: saved[name] for name in dict(model.named_parameters())}, weights_of(model))
    own = {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer_.state[p].items()
        if value.dim()
    }
    return [*told, *same(moments, own), *([] if done == job.steps else ["steps"])]


def _rows_of(rank: int, size: int, step: int) -> torch.Tensor:
    """This rank's part of twelve rows, however many ranks there are."""
    return batch_of("tower", step, 0, 12).tensor_split(size)[rank]


def against(
    rank: int,
    size: int,
    reference: str,
    name: str,
    optimizer: str,
    stage: int,
    tier: str,
    k: int,
    steps: int = 2,
    **options: Any,
) -> list[str]:
    """Trains as `train` does; returns what differs from one of torch's own ways to train on these ranks."""
    model = build(name)
    plan = plan_for(model, size, stage, tier, k, **options.pop("plan", {}))
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    job = memfit.fit(model, optimizer_, loss, batch_of(name, 0, rank), plan=plan, enforce=False, **options)
    for step in range(steps):
        job.step(batch_of(name, step, rank))
    job.close()
    expected = REFERENCES[reference](rank, name, optimizer, k, steps)
    return same(weights_of(model), expected)


LAYERS = {
    "tower": "layers",
    "gpt2": "transformer.h",
    "llama": "model.layers",
    "bert": "bert.encoder.layer",
    "vit": "vit.layers",
}


def _by_fsdp(rank: int, name: str, optimizer: str, k: int, steps: int, policy: Any = None) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    model: Any = build(name)
    policy = MixedPrecisionPolicy() if policy is None else policy
    layers: Any = model.get_submodule(LAYERS[name.partition(" ")[0]])
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        for index, part in enumerate(batch_of(name, step, rank).tensor_split(k)):
            cast("Any", model).set_requires_gradient_sync(index == k - 1)
            (loss_of_fsdp(name)(model, part) * torch.tensor(len(part) / ROWS)).backward()
        optimizer_.step()
        optimizer_.zero_grad()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}


def loss_of_fsdp(name: str) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """The loss; FSDP2 makes a class of its own of each model's."""
    return (
        (lambda model, batch: ((model(batch) - 0.3) ** 2).mean())
        if name in ("tower", "tied")
        else _loss_of_transformers
    )


def _by_fsdp_in_bf16(rank: int, name: str, optimizer: str, k: int, steps: int) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _by_fsdp(rank, name, optimizer, k, steps, policy)


def _by_ddp(rank: int, name: str, optimizer: str, k: int, steps: int, *, zero: bool = False) -> dict[str, torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    assert k == 1
    model = build(name)
    wrapped = DistributedDataParallel(model, find_unused_parameters=name == "bert")
    chosen = OPTIMIZERS[optimizer](model.parameters())
    if zero:
        settings = {key: value for key, value in chosen.param_groups[0].items() if key in ("lr", "foreach", "momentum")}
        chosen = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=type(chosen), **settings)
    for step in range(steps):
        wrapped.zero_grad()
        own = batch_of(name, step, rank)
        # The wrapper's class is none of the model's.
        loss_of_fsdp(name)(wrapped, own).backward()
        chosen.step()
    return weights_of(model)


REFERENCES: Mapping[str, Callable[..., dict[str, torch.Tensor]]] = {
    "fsdp": _by_fsdp,
    "fsdp in bf16": _by_fsdp_in_bf16,
    "ddp": _by_ddp,
    "zero redundancy optimizer": partial(_by_ddp, zero=True),
}


def other_weights(rank: int, size: int) -> str:
    """Begins with another model on each rank; returns the error."""
    torch.manual_seed(rank)
    model = Tower()
    try:
        memfit.fit(
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            loss,
            batch_of("tower", 0, rank),
            plan=plan_for(model, size, 3, "device", 1),
            enforce=False,
        )
    except memfit.MemfitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def like_one_job(rank: int, size: int, kind: str, stage: int, tier: str) -> list[str]:
    """Trains on ranks and on one process by memfit itself, on the same rows: an optimizer that needs whole parameters, or states in few bits."""
    allow = {"int8-state"} if kind == "int8" else set[str]()
    options: dict[str, Any] = {"state_format": "int8"} if kind == "int8" else {}
    if kind == "host":
        tier = "host"

    def make(job_ranks: int) -> tuple[nn.Module, Any]:
        model = build("matrices" if kind == "muon" else "tower")
        plan = plan_for(model, job_ranks, stage if job_ranks > 1 else 0, tier, 1 if job_ranks > 1 else size, **options)
        whole = torch.cat([batch_of("tower", 0, r) for r in range(size)])
        sample = batch_of("tower", 0, rank) if job_ranks > 1 else whole
        optimizer = OPTIMIZERS["muon" if kind == "muon" else "adamw"](model.parameters())
        job = memfit.fit(
            model, optimizer, loss, sample, plan=plan, enforce=False, allow=allow, emulate_device=kind == "host"
        )
        for step in range(3):
            rows = [batch_of("tower", step, r) for r in range(size)]
            job.step(rows[rank] if job_ranks > 1 else torch.cat(rows))
        job.close()
        return model, optimizer

    model, optimizer = make(size)
    dist.destroy_process_group()
    expected, optimizer_of_one = make(1)
    return differing_from(model, optimizer, expected, optimizer_of_one)


def uneven(rank: int, size: int, stage: int, tier: str) -> list[Any]:
    """Rows that no number of ranks divides, other ones in each step; a loss that counts; an evaluation over ranks."""
    rows = lambda step, r: (5, 7, 3, 8)[(step + r) % 4]  # noqa: E731, a table
    model = build("tower")
    job = memfit.fit(
        model,
        OPTIMIZERS["adamw"](model.parameters()),
        loss,
        batch_of("tower", 0, rank, 5),
        plan=plan_for(model, size, stage, tier, 1),
        enforce=False,
    )
    losses = [job.step(batch_of("tower", step, rank, rows(step, rank))).loss for step in range(3)]
    evaluated = job.evaluate(batch_of("tower", 9, rank, rows(9, rank))).loss
    with job.weights("layers.1"):
        gathered = model.get_parameter("layers.1.0.weight").detach().clone()
    job.close()
    whole = torch.cat([batch_of("tower", 9, r, rows(9, r)) for r in range(size)])
    told = same(weights_of(model), accumulated("tower", "adamw", size, 1, 3, rows=rows))
    told += [] if torch.equal(gathered, model.get_parameter("layers.1.0.weight")) else ["job.weights"]
    told += [] if abs(evaluated - loss(model, whole).item()) < 1e-5 else [f"evaluate {evaluated}"]
    return [told, losses]


def counted(rank: int, size: int, tail: int | None) -> list[str]:
    """A loss that returns (sum, count), other counts on each rank: the mean is over the counts of all."""

    def sums(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (((model(batch) - 0.3) ** 2) * (batch[:, :1] > 0)).sum(), float((batch[:, 0] > 0).sum()) * WIDTH

    model = build("tower")
    plan = plan_for(model, size, 3, "disk", 2, tail=tail)
    job = memfit.fit(
        model, OPTIMIZERS["sgd"](model.parameters()), sums, batch_of("tower", 0, rank), plan=plan, enforce=False
    )
    found = job.step(batch_of("tower", 0, rank)).loss
    job.close()
    expected = build("tower")
    whole = torch.cat([batch_of("tower", 0, r) for r in range(size)])
    total, count = sums(expected, whole)
    optimizer = OPTIMIZERS["sgd"](expected.parameters())
    (total / count).backward()
    optimizer.step()
    wrong = [
        n
        for (n, p), q in zip(model.named_parameters(), expected.parameters(), strict=True)
        if not torch.allclose(p, q, atol=1e-6)
    ]
    return wrong + ([] if abs(found - total.item() / count) < 1e-5 else [f"loss {found}"])


def elastic(rank: int, size: int, directory: str, source: str | None, steps: int, stage: int, tier: str) -> int:
    """Goes on from a save on any number of ranks, makes some steps, and saves."""
    model = build("tower")
    job = memfit.fit(
        model,
        OPTIMIZERS["adamw"](model.parameters()),
        loss,
        _rows_of(rank, size, 0),
        plan=plan_for(model, size, stage, tier, 1),
        enforce=False,
        resume=source,
    )
    for step in range(steps):
        job.step(_rows_of(rank, size, step))
    job.save(directory)
    done = job.steps
    job.close()
    return done


def leaves_by_error(rank: int, size: int) -> str:
    """Rank 1's own loop fails between two steps; returns what leaves the context on this rank."""
    model = build("tower")
    job = memfit.fit(
        model,
        OPTIMIZERS["sgd"](model.parameters()),
        loss,
        batch_of("tower", 0, rank),
        plan=plan_for(model, size, 3, "disk", 1),
        enforce=False,
    )
    try:
        with job:
            job.step(batch_of("tower", 0, rank))
            if rank == 1:
                raise LookupError("of the loop")
            job.step(batch_of("tower", 1, rank))
    except Exception as error:  # noqa: BLE001, told to the test
        return f"{type(error).__name__}: {error}"
    return ""


MACHINE = """{"format": 1, "device": "emulated", "flops_per_s": 1e11, "device_bytes": 1099511627776, "disk_bytes": 1099511627776,
"host_bytes": 1099511627776, "host": {"read_bytes_per_s": 1e10, "write_bytes_per_s": 1e10},
"disk": {"read_bytes_per_s": 1e8, "write_bytes_per_s": 1e8}, "network": {"data": {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}}}"""
"""A machine on which what moves least is the fastest."""


def received(rank: int, size: int, stage: int, tier: str, k: int) -> tuple[dict[str, int], dict[str, int]]:
    """Trains two steps; returns what came from other ranks in the second, as counted and as predicted, by purpose."""
    model = build("tower")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    job = memfit.fit(
        model, optimizer, loss, batch_of("tower", 0, rank, 8), plan=plan_for(model, size, stage, tier, k), enforce=False
    )
    job.step(batch_of("tower", 0, rank, 8))
    group = job._assembly.setup.ranks
    assert group is not None
    before = dict(group.received)
    job.step(batch_of("tower", 1, rank, 8))
    counted = {key: value - before.get(key, 0) for key, value in group.received.items()}
    predicted = dict(job._assembly.planned.prepared.timeline.bytes_received)
    job.close()
    return {key: value for key, value in counted.items() if value}, predicted


def under_a_limit(rank: int, size: int, share: float) -> dict[str, Any]:
    """Trains under a limit that is a share of what one process takes; returns the plan and what was measured."""
    torch.manual_seed(0)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        return model, OPTIMIZERS["adamw"](model.parameters())

    def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return ((model(batch) - 0.3) ** 2).mean()

    rows = torch.randn(size * 8, 512, generator=torch.Generator().manual_seed(5)).tensor_split(size)
    alone_bytes = 16 * sum(p.numel() for p in make()[0].parameters())
    limit = int(share * alone_bytes)
    model, optimizer = make()
    job = memfit.fit(model, optimizer, mean, rows[rank], limit=limit, hardware=MACHINE, emulate_device=True)
    results = [job.step(rows[rank]) for _ in range(3)]
    plan, predicted = job.plan, job.predicted_peak_bytes
    job.close()
    expected, optimizer_ = make()
    for _ in range(3):
        optimizer_.zero_grad()
        for part in rows:
            (mean(expected, part) / size).backward()
        optimizer_.step()
    return {
        "over": {(str(b.weight_home), str(b.weights_over), str(b.states_over)) for b in plan.blocks.values()},
        "microbatches": plan.microbatches,
        "limit": limit,
        "predicted": predicted,
        "measured": max(r.peak_bytes for r in results),
        "differ": same(weights_of(model), weights_of(expected)) if plan.microbatches == 1 else [],
    }


class Keeping:
    """Context in which every tensor of a page or more that Gloo was given lives on: as its own threads may keep them."""

    def __enter__(self) -> None:
        self._own = dist.all_to_all_single
        kept = self.kept = list[Any]()

        def keeping(act: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                kept.extend(each for each in args if isinstance(each, torch.Tensor) and each.nbytes > 4096)
                return act(*args, **options)

            return call

        dist.all_to_all_single = keeping(self._own)

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self._own


def peaks(rank: int, size: int, stage: int, tier: str, k: int) -> list[tuple[str, int, int]]:
    """Returns the actions whose prediction was wrong, as (action, predicted, measured): above it in any step, or on the device more than 3 % below it in all.

    Blocks go in several pieces, uneven ones. An exchange may end before the next action does anything: only what it takes when it begins is sure.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, other) for width, other in ((256, 1100), (1100, 1100), (1100, 256))))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    rows = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))
    own_loss = lambda given, batch: ((given(batch) - 0.3) ** 2).mean()  # noqa: E731, given to `fit`
    most: list[int] = []
    with Keeping():
        job = memfit.fit(
            model,
            optimizer,
            own_loss,
            rows,
            plan=plan_for(model, size, stage, tier, k),
            enforce=False,
            emulate_device=True,
        )
        for step in range(3):
            job.step(rows)
            measured = job._runner.measured
            assert measured is not None and measured.step == step + 1
            found = [moment.peak_bytes for moment in measured.timeline.moments]
            most = [max(pair) for pair in zip(most, found, strict=True)] if most else found
        predicted = job._assembly.planned.prepared.timeline.moments
        job.close()
    known = ("forward", "accumulate") if tier == "device" else ()
    return [
        (moment.action, moment.peak_bytes, nbytes)
        for moment, nbytes in zip(predicted, most, strict=True)
        if nbytes > moment.peak_bytes or (moment.action.startswith(known) and nbytes < 0.97 * moment.peak_bytes)
    ]


class Skipping(Tower):
    """A tower that can leave a layer out."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index, layer in enumerate(self.layers):
            if not (self.skips and index == 1):
                x = x + layer(x)
        return self.head(x)


def disagrees(rank: int, size: int, how: str) -> list[Any]:
    """One rank does something else in a step than the other; returns what this rank raised, what it raised in the next step, and what differs from plain PyTorch."""

    def make() -> tuple[Skipping, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Skipping()
        return model, OPTIMIZERS["sgd"](model.parameters())

    model, optimizer = make()
    k = 2 if how == "fewer rows than microbatches" else 1
    job = memfit.fit(
        model, optimizer, loss, batch_of("tower", 0, rank), plan=plan_for(model, size, 3, "disk", k), enforce=False
    )
    told: list[Any] = []
    rows = {"fewer rows than microbatches": 1, "no rows": 0}.get(how, ROWS)
    for step in range(2):
        is_odd = rank == 1 and step == 0
        model.skips = is_odd and how == "an unused block"
        try:
            job.step(batch_of("tower", step, rank, rows if is_odd else ROWS))
        except memfit.MemfitError as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("")
    job.close()
    expected, plain = make()
    for step in range(2):
        if told[step]:
            continue
        sums: dict[str, torch.Tensor] = {}
        for r in range(size):
            expected.skips = r == 1 and step == 0 and how == "an unused block"
            expected.zero_grad()
            for part in batch_of("tower", step, r).tensor_split(k):
                (loss(expected, part) * torch.tensor(len(part) / (size * ROWS))).backward()
            _add(sums, {n: p.grad for n, p in expected.named_parameters()})
        for n, p in expected.named_parameters():
            p.grad = sums.get(n)
        plain.step()
    return [*told, same(weights_of(model), weights_of(expected))]
