"""The late device itself: what it promises to those who test on it, by plain CPU tensors and by arithmetic."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerator.build import NoCompilerError

late = pytest.importorskip("accelerator.late", reason="the late device needs a C++ compiler", exc_type=NoCompilerError)

HERE = torch.device("late", 0)
THERE = torch.device("late", 1)
MIB = 1 << 20


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 32),
        nn.LayerNorm(32),
        nn.Dropout(0.0),
        nn.SiLU(),
        nn.Linear(32, 5),
    )


def stats(name: str, device: torch.device = HERE) -> int:
    return torch.accelerator.memory_stats(device)[f"{name}.all.current"]


def test_training_gives_the_bits_of_the_cpu() -> None:
    rows, labels = torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))
    ends = []
    for device in (torch.device("cpu"), HERE):
        model = small_net().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows.to(device)), labels.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert late.native.launched()["aten::convolution_backward"] > 0


def test_a_touch_by_the_host_kills_the_process() -> None:
    code = (
        "import sys, ctypes; sys.path.insert(0, sys.argv[1])\n"
        "import torch; from accelerator import late\n"
        "t = torch.ones(4, device='late'); print('alive', flush=True)\n"
        "ctypes.string_at(t.data_ptr(), 4); print('not here')\n"
    )
    root = str(Path(__file__).parents[1])
    result = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["alive"]
    assert result.returncode == -11


def test_a_copy_that_nobody_waits_for_has_not_happened() -> None:
    pinned = torch.arange(1000.0).pin_memory()
    side = torch.Stream(HERE)
    with side:
        arrived = pinned.to(HERE, non_blocking=True)
    assert arrived.sum().isnan().item()  # fresh memory is NaN, and the copy waits on its stream
    torch.accelerator.current_stream(HERE).wait_event(side.record_event())
    assert arrived.sum().item() == pinned.sum().item()


def test_a_copy_from_pageable_memory_is_read_before_the_call_returns() -> None:
    source = torch.ones(1000)
    side = torch.Stream(HERE)
    with side:
        arrived = source.to(HERE, non_blocking=True)
    source.fill_(7)
    side.synchronize()
    assert arrived.sum().item() == 1000


@pytest.mark.parametrize("mode", ["prompt", "random"])
def test_lateness_can_be_chosen(mode: str) -> None:
    pinned = torch.ones(64).pin_memory()
    side = torch.Stream(HERE)
    seen = set()
    for seed in range(8):
        with late.lateness(mode, seed):
            with side:
                arrived = pinned.to(HERE, non_blocking=True)
            seen.add(bool(arrived.sum().isnan().item()))
            side.synchronize()
    assert seen == ({False} if mode == "prompt" else {False, True})


def race_of(body) -> str:
    with pytest.raises(AssertionError, match="races on the late device") as caught, late.checked():
        body()
    return str(caught.value)


def test_a_copy_that_does_not_wait_for_compute_is_a_race_although_its_numbers_are_right() -> None:
    side, host = torch.Stream(HERE), torch.empty(1000).pin_memory()

    def body() -> None:
        made = torch.ones(1000, device=HERE) * 3
        with side:
            host.copy_(made, non_blocking=True)
        side.synchronize()
        torch.accelerator.synchronize(HERE)

    assert "copy to host" in race_of(body)
    assert host.sum().item() == 3000


def test_memory_that_is_freed_under_a_copy_is_a_race_and_its_reader_meets_nan() -> None:
    side, host = torch.Stream(HERE), torch.zeros(1 << 18).pin_memory()

    def body() -> None:
        made = torch.ones(1 << 18, device=HERE)
        side.wait_stream(torch.accelerator.current_stream(HERE))
        with side:
            host.copy_(made, non_blocking=True)
        del made
        torch.accelerator.synchronize(HERE)  # default stream first: the poison is before the copy

    assert "free" in race_of(body)
    assert host.isnan().all()


def test_record_stream_keeps_memory_until_the_stream_has_come_to_its_end() -> None:
    side, host = torch.Stream(HERE), torch.zeros(1 << 18).pin_memory()
    with late.checked():
        made = torch.ones(1 << 18, device=HERE)
        side.wait_stream(torch.accelerator.current_stream(HERE))
        with side:
            host.copy_(made, non_blocking=True)
            made.record_stream(side)
        del made
        again = torch.zeros(1 << 18, device=HERE)
        torch.accelerator.synchronize(HERE)
        del again
    assert host.sum().item() == 1 << 18


def test_streams_that_are_ordered_by_events_are_no_race() -> None:
    side, pinned = torch.Stream(HERE), torch.ones(1000).pin_memory()
    with late.checked():
        for _ in range(3):
            room = torch.empty(1000, device=HERE)
            side.wait_stream(torch.accelerator.current_stream(HERE))
            with side:
                room.copy_(pinned, non_blocking=True)
            torch.accelerator.current_stream(HERE).wait_event(side.record_event())
            assert (room * 2).sum().item() == 2000


def test_pinned_memory_that_is_given_up_under_a_copy_is_a_race() -> None:
    side, storage = torch.Stream(HERE), torch.ones(4096)
    late.native.pin(storage.data_ptr(), storage.nbytes)

    def body() -> None:
        with side:
            arrived = storage.to(HERE, non_blocking=True)
        late.native.unpin(storage.data_ptr())
        side.synchronize()
        arrived.record_stream(torch.accelerator.current_stream(HERE))

    assert "unpin" in race_of(body)


def test_memory_is_pinned_once() -> None:
    storage = torch.ones(4096)
    late.native.pin(storage.data_ptr(), storage.nbytes)
    with pytest.raises(RuntimeError, match="already mapped"):
        late.native.pin(storage.data_ptr() + 64, 64)
    late.native.unpin(storage.data_ptr())
    with pytest.raises(RuntimeError, match="registered"):
        late.native.unpin(storage.data_ptr())


def test_devices_have_streams_memory_and_generators_of_their_own() -> None:
    before = stats("allocated_bytes", THERE)
    one, two = torch.ones(300, device=HERE), torch.ones(300, device=THERE)
    assert stats("allocated_bytes", THERE) - before == 1536
    assert torch.accelerator.current_stream(HERE) != torch.accelerator.current_stream(THERE)
    with pytest.raises(RuntimeError, match="same device"):
        _ = one + two
    assert one.to(THERE).add(two).sum().item() == 600
    torch.get_device_module("late").manual_seed_all(3)
    a, b = torch.randn(4, device=HERE), torch.randn(4, device=THERE)
    torch.manual_seed(3)
    assert torch.equal(a.cpu(), torch.randn(4)) and torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("draws", [torch.nn.functional.dropout, torch.rand_like, torch.bernoulli])
def test_what_draws_on_a_device_draws_from_its_generator(draws) -> None:
    module, given = torch.get_device_module("late"), torch.full((64,), 0.5, device=HERE)
    host, far = torch.get_rng_state(), module.get_rng_state(1)
    module.manual_seed(3)
    first, then = draws(given), draws(given)
    module.manual_seed(3)
    assert torch.equal(draws(given), first) and not torch.equal(first, then)
    assert torch.equal(torch.get_rng_state(), host) and torch.equal(module.get_rng_state(1), far)


def test_a_current_stream_belongs_to_its_thread_and_device() -> None:
    side = torch.Stream(HERE)
    seen = []
    with side:
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream(HERE)))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream(HERE) == side
        assert torch.accelerator.current_stream(THERE).stream_id == 0
    assert seen[0].stream_id == 0


def test_segments_are_those_of_cudas_allocator() -> None:
    torch.accelerator.empty_cache()
    base = stats("reserved_bytes")
    small = torch.empty(100, dtype=torch.uint8, device=HERE)
    assert stats("reserved_bytes") - base in (0, 2 * MIB)
    base = stats("reserved_bytes")
    middle = torch.empty(2 * MIB, dtype=torch.uint8, device=HERE)
    assert stats("reserved_bytes") - base == 20 * MIB
    second = torch.empty(3 * MIB, dtype=torch.uint8, device=HERE)
    assert stats("reserved_bytes") - base == 20 * MIB
    large = torch.empty(11 * MIB, dtype=torch.uint8, device=HERE)
    assert stats("reserved_bytes") - base in (20 * MIB, 32 * MIB)  # it may fit what the first segment has left
    huge = torch.empty(21 * MIB, dtype=torch.uint8, device=HERE)
    reserved = stats("reserved_bytes")
    assert (reserved - base) % (2 * MIB) == 0
    del small, middle, second, large, huge
    assert stats("reserved_bytes") == reserved
    torch.accelerator.empty_cache()
    assert stats("reserved_bytes") < reserved


def test_a_limit_is_an_out_of_memory_error_and_leaves_everything_usable() -> None:
    torch.accelerator.empty_cache()
    late.set_limit(stats("reserved_bytes") + 32 * MIB)
    try:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match="late device out of memory"):
                torch.empty(40 * MIB, dtype=torch.uint8, device=HERE)
            kept = torch.empty(30 * MIB, dtype=torch.uint8, device=HERE)
            del kept
    finally:
        late.set_limit(None)


def test_freed_memory_is_poisoned_in_the_order_of_its_stream() -> None:
    torch.accelerator.empty_cache()
    held = torch.ones(1 << 18, device=HERE)
    total = held.sum()
    del held
    reused = torch.empty(1 << 18, device=HERE)
    assert reused.isnan().all().item()
    assert total.item() == 1 << 18


def test_a_storage_that_is_resized_keeps_what_it_held() -> None:
    with late.checked():
        held = torch.arange(1000.0, device=HERE)
        held.untyped_storage().resize_(8000)
        assert torch.equal(held.cpu(), torch.arange(1000.0))
        held.untyped_storage().resize_(0)
        assert held.untyped_storage().nbytes() == 0


def test_complex_numbers_are_viewed_and_conjugated_as_on_the_cpu() -> None:
    numbers = torch.randn(3, 4, dtype=torch.complex64)
    ends: list[list[torch.Tensor]] = []
    for device in (torch.device("cpu"), HERE):
        held = numbers.clone().to(device).detach().requires_grad_()
        parts = torch.view_as_real(held)
        spectrum = torch.fft.rfft(held.conj().real @ parts[..., 1].T)
        (spectrum.abs().sum() + held.real.sgn().sum() + held.imag.square().sum()).backward()
        assert held.grad is not None and parts.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        ends.append([held.conj().resolve_conj(), held.conj() * 2, parts, spectrum, held.grad])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("mask", [None, "fixed", "learned"])
def test_attention_is_the_fused_operator_of_the_cpu_where_that_takes_it(mask: str | None) -> None:
    torch.manual_seed(0)
    parts = torch.randn(3, 2, 2, 6, 8)
    bias = None if mask is None else torch.randn(6, 6, requires_grad=mask == "learned")
    ends: list[list[torch.Tensor]] = []
    for device in (torch.device("cpu"), HERE):
        query, key, value = (p.to(device).detach().requires_grad_() for p in parts)
        given = None if bias is None else bias.detach().to(device).requires_grad_(bias.requires_grad)
        out = nn.functional.scaled_dot_product_attention(query, key, value, given)
        out.square().sum().backward()
        made_by = out.grad_fn.name() if out.grad_fn is not None else ""
        assert ("Flash" in made_by) == (mask != "learned")  # no fused operator gives a mask its gradient
        ends.append([t.grad for t in (query, key, value, given) if t is not None and t.grad is not None] + [out])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(*ends, strict=True))


def test_autocast_casts_as_on_an_accelerator() -> None:
    with torch.autocast("late", dtype=torch.bfloat16):
        product = torch.ones(4, 4, device=HERE) @ torch.ones(4, 4, device=HERE)
    assert product.dtype == torch.bfloat16


def test_links_take_their_bytes_by_their_rates_on_a_clock_that_only_work_moves() -> None:
    """Each way its own, one copy of a way after the other, and a kernel behind a copy begins when that is through."""
    nbytes, rate = 1 << 20, float(1 << 22)  # a quarter of a second each
    there = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    here = [torch.zeros(nbytes, dtype=torch.uint8, device="late") for _ in range(3)]
    comes, leaves = torch.Stream("late:0"), torch.Stream("late:0")
    clock = late.native.now_s
    with late.links(rate, pace="counted"):
        torch.accelerator.synchronize()
        began_s, worked_s = clock(), late.native.worked_s()["to device"]
        with comes:
            here[0].copy_(there, non_blocking=True)
            here[1].copy_(there, non_blocking=True)
        with leaves:
            there.copy_(here[2], non_blocking=True)
        enqueued_s = clock() - began_s
        leaves.synchronize()
        left_s = clock() - began_s
        torch.accelerator.current_stream().wait_stream(comes)
        here[0].add_(1)
        torch.accelerator.synchronize()
        came_s = clock() - began_s
        assert late.native.worked_s()["to device"] - worked_s == 0.5
    assert enqueued_s < 0.1 and 0.25 <= left_s < 0.4 and 0.5 <= came_s < 0.7
