"""What autograd's device thread and streams change: losses on the CPU, detours, streams of the caller's, other indices, context variables, limits."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit import devices
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.optimizers.shadow import snapshot_groups

ROWS, WIDTH, LAYERS, STEPS = 8, 64, 3, 3
FAST = Link(read_bytes_per_s=1e10, write_bytes_per_s=1e10)
HARDWARE = Hardware(
    device="an accelerator",
    flops_per_s=1e11,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 40),
        Tier.HOST: TierSpec(nbytes=1 << 40, link=FAST),
        Tier.DISK: TierSpec(nbytes=1 << 40, link=FAST),
    },
)
TEMPERATURE: ContextVar[float] = ContextVar("device temperature", default=1.0)
Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.detours = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(hidden) * TEMPERATURE.get()
        if self.detours:
            mixed = mixed.cpu().tanh().to(hidden.device)
        return hidden + torch.tanh(mixed)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return self.head(rows)


def loss_there(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def loss_here(model: nn.Module, batch: Batch) -> torch.Tensor:
    return loss_there(model, batch).cpu()


def logits_here(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch[0]).cpu()
    return nn.functional.cross_entropy(logits, batch[1].cpu()) + 1e-3 * logits.square().mean()


def loss_here_slowly(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The device's thread could be at an earlier block before the next loss has been differentiated."""
    loss = loss_here(model, batch)
    if loss.requires_grad:
        loss.register_hook(_wait)
    return loss


def _wait(gradient: torch.Tensor) -> None:
    time.sleep(0.02)


def tempered(model: nn.Module, batch: Batch) -> torch.Tensor:
    token = TEMPERATURE.set(2.0)
    try:
        return loss_there(model, batch)
    finally:
        TEMPERATURE.reset(token)


def made(device: torch.device) -> tuple[Net, torch.optim.Optimizer, Batch]:
    torch.manual_seed(0)
    model = Net().to(device)
    batch = (torch.randn(ROWS, WIDTH, device=device), torch.randint(0, 10, (ROWS,), device=device))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), batch


def plan_of(profile: Profile, tier: Tier, saved: Saved, microbatches: int, *, tail: bool) -> Plan:
    calls = next(iter(profile.traces.values())).calls
    home = BlockPlan(weight_home=tier, gradient_home=Tier.DEVICE, state_home=tier)
    return Plan(
        microbatches=microbatches,
        blocks={block.name: home for block in profile.blocks},
        calls=tuple(CallPlan(saved=saved, saved_home=Tier.HOST) if c.is_repeated else CallPlan() for c in calls),
        tail=len(calls) - 1 if tail else None,
    )


def plain(device: torch.device, loss: Loss, microbatches: int) -> Net:
    model, optimizer, batch = made(device)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in zip(*(t.tensor_split(microbatches) for t in batch), strict=True):
            value = loss(model, part)
            (value if microbatches == 1 else value * (len(part[0]) / ROWS)).backward()
        optimizer.step()
    return model


def ours(
    device: torch.device, loss: Loss, tier: Tier, saved: Saved, microbatches: int, where: Path, *, tail: bool = False
) -> Net:
    model, optimizer, batch = made(device)
    plan = plan_of(memfit.profile(model, optimizer, loss, batch), tier, saved, microbatches, tail=tail)
    with memfit.fit(model, optimizer, loss, batch, plan=plan, directory=where / "homes") as job:
        for _ in range(STEPS):
            assert job.step(batch).departures == ()
    return model


def assert_equal(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("loss", [loss_here, loss_here_slowly, logits_here])
@pytest.mark.parametrize("saved", [Saved.KEEP, Saved.RECOMPUTE])
@pytest.mark.parametrize("tail", [False, True])
def test_microbatches_with_a_loss_on_the_cpu_run_back_in_order(
    device: torch.device, loss: Loss, saved: Saved, tail: bool, tmp_path: Path
) -> None:
    assert_equal(ours(device, loss, Tier.HOST, saved, 4, tmp_path, tail=tail), plain(device, loss, 4))


def test_a_detour_over_the_cpu_is_refused_for_microbatches_that_take_turns(
    device: torch.device, tmp_path: Path
) -> None:
    model, optimizer, batch = made(device)
    model.layers[1].detours = True  # type: ignore[union-attr]
    plan = plan_of(memfit.profile(model, optimizer, loss_there, batch), Tier.HOST, Saved.KEEP, 4, tail=False)
    with (
        memfit.fit(model, optimizer, loss_there, batch, plan=plan, directory=tmp_path / "homes") as job,
        pytest.raises(memfit.UnsupportedError, match="computes on the CPU in the middle"),
    ):
        job.step(batch)


def test_weights_that_are_away_do_not_change_which_of_the_optimizers_loops_runs(
    device: torch.device, tmp_path: Path
) -> None:
    """Torch takes one call for many tensors (`foreach`) by the classes of the parameters, and an absent one has another class."""
    plain, optimizer, _ = made(device)
    wanted = [group["foreach"] for group in snapshot_groups(optimizer)]
    model, optimizer, batch = made(device)
    plan = plan_of(memfit.profile(model, optimizer, loss_there, batch), Tier.HOST, Saved.KEEP, 1, tail=False)
    with memfit.fit(model, optimizer, loss_there, batch, plan=plan, directory=tmp_path / "homes"):
        assert [group["foreach"] for group in snapshot_groups(optimizer)] == wanted == [None]
    del plain


def test_a_backend_without_streams_is_refused_before_anything_is_done_to_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, batch = made(device)
    done: list[str] = []
    accelerator = type(devices.of(device))

    def refuse(self: object, device: torch.device) -> torch.Stream:
        raise memfit.UnsupportedError(f"torch has no streams for {device}")

    monkeypatch.setattr(accelerator, "new_stream", refuse)
    for name in ("empty_cache", "reset_peaks", "set_limit_bytes", "statistics"):
        monkeypatch.setattr(accelerator, name, lambda *_, name=name: done.append(name))
    with pytest.raises(memfit.UnsupportedError, match="has no streams"):
        memfit.fit(model, optimizer, loss_there, batch, limit="1GiB")
    assert done == []


@pytest.mark.parametrize("saved", [Saved.RECOMPUTE, Saved.SELECT])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_recomputation_in_the_device_thread_meets_context_variables(
    device: torch.device, saved: Saved, microbatches: int, tmp_path: Path
) -> None:
    mine = ours(device, tempered, Tier.HOST, saved, microbatches, tmp_path)
    assert_equal(mine, plain(device, tempered, microbatches))


def test_recomputation_in_the_device_thread_meets_the_users_autocast(device: torch.device, tmp_path: Path) -> None:
    def cast(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return loss_there(model, batch)

    mine = ours(device, cast, Tier.HOST, Saved.RECOMPUTE, 1, tmp_path)
    assert_equal(mine, plain(device, cast, 1))


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_a_step_inside_a_stream_of_the_callers_trains_as_outside(
    device: torch.device, tier: Tier, tmp_path: Path
) -> None:
    expected = plain(device, loss_there, 4)
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        assert_equal(ours(device, loss_there, tier, Saved.KEEP, 4, tmp_path), expected)
    stream.synchronize()  # before memory of the default stream's is given up


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_a_model_on_another_index_than_the_current_one_trains_as_plain(
    device: torch.device, tier: Tier, tmp_path: Path
) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    other = torch.device(device.type, 1)
    assert torch.accelerator.current_device_index() == 0
    assert_equal(ours(other, loss_there, tier, Saved.OFFLOAD, 4, tmp_path), plain(other, loss_there, 4))


@pytest.mark.parametrize("within", [nullcontext, FakeTensorMode])
def test_a_transfer_that_is_dropped_before_anyone_waited_keeps_its_memory(
    device: torch.device, within: Callable[[], Any]
) -> None:
    """The collector drops it wherever it comes: while a model is traced, too."""
    from memfit.homes import MemoryHome

    nbytes = 1 << 20
    home = MemoryHome(nbytes, tier=Tier.HOST, device=device, stream=torch.Stream(device))
    home.write(0, nbytes, torch.ones(nbytes // 4, device=device).untyped_storage()).wait()
    into: Any = torch.empty(nbytes // 4, device=device)
    transfer = home.read(0, nbytes, into.untyped_storage())
    with within():
        del into, transfer
    mine = torch.full((nbytes // 4,), 7.0, device=device)
    torch.accelerator.synchronize(device)
    assert mine.sum().item() == 7 * (nbytes // 4)
    home.close()


def test_a_dropped_job_leaves_no_limit_behind(device: torch.device, tmp_path: Path) -> None:
    from memfit import devices

    model, optimizer, batch = made(device)
    job = memfit.fit(
        model, optimizer, loss_there, batch, limit="512MiB", directory=tmp_path / "homes", hardware=HARDWARE
    )
    assert devices.of(device).limit_bytes(device) <= 512 << 20
    del job, optimizer, model  # the optimizer serves its states through the job as long as it lives
    gc.collect()
    assert devices.of(device).limit_bytes(device) == devices.of(device).total_bytes(device)


def test_the_proof_does_not_count_what_loading_held(device: torch.device, tmp_path: Path) -> None:
    def load() -> None:  # what a checkpoint is read through stays in the allocator's pool
        torch.empty(64 << 20, dtype=torch.uint8, device=device)

    model, optimizer, batch = made(device)
    load()
    with memfit.fit(
        model, optimizer, loss_there, batch, limit="512MiB", directory=tmp_path / "homes", hardware=HARDWARE
    ) as job:
        load()
        job.step(batch)
        proof = job.proof()
    assert proof.measured_peak_bytes < 64 << 20, proof


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_backward_comes_between_two_blocks(
    device: torch.device, tmp_path: Path, interruptible: None
) -> None:
    model, optimizer, batch = made(device)
    began: list[int] = []

    def interrupting(index: int) -> Callable[[torch.Tensor], None]:
        def hook(_gradient: torch.Tensor) -> None:
            began.append(index)
            if index == LAYERS - 1:
                os.kill(os.getpid(), signal.SIGINT)

        return hook

    def loss(net: nn.Module, part: Batch) -> torch.Tensor:
        rows = part[0]
        for index, layer in enumerate(net.layers):  # type: ignore[arg-type]
            rows = layer(rows)
            if rows.requires_grad and not memfit.is_planning():
                rows.register_hook(interrupting(index))
        return nn.functional.cross_entropy(net.head(rows), part[1])  # type: ignore[operator]

    plan = plan_of(memfit.profile(model, optimizer, loss, batch), Tier.HOST, Saved.KEEP, 1, tail=False)
    with memfit.fit(model, optimizer, loss, batch, plan=plan, directory=tmp_path / "homes") as job:
        with pytest.raises(KeyboardInterrupt):
            job.step(batch)
        assert began[0] == LAYERS - 1
        assert 0 not in began  # the first layer's backward was not begun
