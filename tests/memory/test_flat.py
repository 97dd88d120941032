"""Long training holds no more at its end than after its third step: bytes, blocks, files, descriptors, threads.

The allocator's counts have no noise, so they must be equal to the byte; what the operating system counts may waver by a hair.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import memfit
from equivalence import plans, zoo
from equivalence.with_memfit import fit_variant, profile_by_name
from memfit.core.storage_formats import ComputeDtype
from memfit.devices.binding import Allocator, install
from memfit.machine.meters import ProcessMeter

MIB = 1 << 20
LONG_STEPS = 300
# --slow gives all of them 300.
SHORT_STEPS = {"disk-recompute-4": 10, "disk-offload-2": 7, "everything": 7}
# A step's first two see lazy library state and the first filling of the optimizer's states.
FIRST_FLAT_STEP = 3


@dataclass(frozen=True)
class Footprint:
    """What a process holds between two steps, as far as it must never change."""

    live_bytes: int
    live_blocks: int
    descriptors: int
    threads: int
    kernel_threads: int
    files_bytes: int


def footprint(allocator: Allocator, directory: Path) -> Footprint:
    """Of this process, and of the files under `directory` together with those that are open without a name."""
    stats = allocator.stats()
    descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return Footprint(
        live_bytes=stats.live_bytes,
        live_blocks=stats.live_blocks,
        descriptors=len(descriptors),
        threads=threading.active_count(),
        kernel_threads=len(list(Path("/proc/self/task").iterdir())),
        files_bytes=_named_bytes(directory) + sum(_unnamed_bytes(d) for d in descriptors),
    )


def settled(allocator: Allocator, directory: Path, before: list[Footprint]) -> Footprint:
    """As it is when it is what it was before, or after two seconds: a thread of the disk lets go of a written tensor a moment after it is home."""
    until = time.monotonic() + 2.0
    found = footprint(allocator, directory)
    while before and found.live_bytes > before[0].live_bytes and time.monotonic() < until:
        time.sleep(0.01)
        found = footprint(allocator, directory)
    return found


def _named_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _unnamed_bytes(descriptor: int) -> int:
    try:
        found = os.fstat(descriptor)
    except OSError:  # the descriptor of the listing itself is closed by now
        return 0
    return found.st_blocks * 512 if found.st_nlink == 0 else 0


def resident_bytes() -> int:
    """Private resident memory of the process."""
    return ProcessMeter().resident_bytes().private_bytes


def train_flat(
    variant: str, steps: int, directory: Path, *, masters: str | None = None
) -> tuple[list[Footprint], list[int]]:
    """Trains the zoo's GPT-2 and looks after each step; in bf16, with masters "whole" or "split", it is built empty."""
    allocator = install()
    case = zoo.ZOO["gpt2"]()
    chosen = plans.BY_NAME[variant]
    if masters is not None:
        case = replace(case, model=memfit.empty(lambda: zoo.ZOO["gpt2"]().model), allow=case.allow | {"bf16"})
        plan = replace(
            chosen.plan(profile_by_name("gpt2")),
            compute_dtype=ComputeDtype.BFLOAT16,
            splits_masters=masters == "split",
        )
        chosen = replace(chosen, plan=lambda _: plan)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    found: list[Footprint] = []
    resident: list[int] = []
    job = fit_variant("gpt2", chosen, directory, limit="8GiB")(case, optimizer)
    try:
        for step in range(steps):
            job.step(case.batch(step % 4))
            found.append(settled(allocator, directory, found[FIRST_FLAT_STEP - 1 :]))
            resident.append(resident_bytes())
    finally:
        job.close()
    return found, resident


def assert_flat(variant: str, steps: int, directory: Path, *, masters: str | None = None) -> None:
    """As `assert_unchanged`, of training."""
    assert_unchanged(*train_flat(variant, steps, directory, masters=masters))


def assert_unchanged(found: list[Footprint], resident: list[int]) -> None:
    """Everything is equal from the third step on; resident memory stays within 1 %, or 2 MiB of a small process."""
    first = found[FIRST_FLAT_STEP - 1]
    # The kernel's threads may become fewer: one that watches over the test ends by itself.
    found = [replace(f, kernel_threads=max(f.kernel_threads, first.kernel_threads)) for f in found]
    changed = [(step + 1, f) for step, f in enumerate(found) if step + 1 >= FIRST_FLAT_STEP and f != first]
    assert not changed, f"step {FIRST_FLAT_STEP} left {first}, step {changed[0][0]} left {changed[0][1]}"
    flat = resident[FIRST_FLAT_STEP - 1 :]
    assert max(flat[len(flat) // 2 :]) <= max(flat[: len(flat) // 2]) + max(flat[0] // 100, 2 * MIB)


# --- the checks themselves can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leak",
    [
        lambda directory: torch.empty(1),
        lambda directory: (directory / "grows").write_bytes(b"x" * 5000),
        lambda directory: (directory / "opened").open("w"),
    ],
    ids=["a tensor", "a file", "a descriptor"],
)
def test_a_footprint_sees_what_is_kept(leak: Callable[[Path], object], tmp_path: Path) -> None:
    allocator = install()
    before = footprint(allocator, tmp_path)
    kept = leak(tmp_path)
    try:
        assert footprint(allocator, tmp_path) != before
    finally:
        if hasattr(kept, "close"):
            kept.close()  # type: ignore[attr-defined]


def test_a_footprint_sees_a_thread_and_a_file_without_a_name(tmp_path: Path) -> None:
    allocator = install()
    before = footprint(allocator, tmp_path)
    with (tmp_path / "gone").open("wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        (tmp_path / "gone").unlink()
        assert footprint(allocator, tmp_path).files_bytes >= before.files_bytes + 100_000
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert footprint(allocator, tmp_path).threads == before.threads + 1
    finally:
        done.set()
        thread.join()


# --- training -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", SHORT_STEPS)
def test_streamed_training_is_flat_from_the_third_step_on(variant: str, tmp_path: Path) -> None:
    assert_flat(variant, SHORT_STEPS[variant], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", SHORT_STEPS)
def test_300_steps_of_streamed_training_are_flat(variant: str, tmp_path: Path) -> None:
    assert_flat(variant, LONG_STEPS, tmp_path)


LONG = pytest.param(LONG_STEPS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("steps", [7, LONG], ids=["short", "long"])
@pytest.mark.parametrize("masters", [pytest.param("whole", marks=pytest.mark.slow), "split"])
def test_training_in_bf16_of_a_model_born_empty_is_flat(masters: str, steps: int, tmp_path: Path) -> None:
    assert_flat("disk-recompute-4", steps, tmp_path, masters=masters)


@pytest.mark.parametrize("rounds", [8, LONG], ids=["short", "long"])
def test_generation_with_streamed_weights_and_caches_is_flat(rounds: int, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    allocator = install()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = memfit.empty(lambda: LlamaForCausalLM(config))
    prompt = torch.ones(2, 6, dtype=torch.int64)
    found: list[Footprint] = []
    resident: list[int] = []
    with memfit.infer(model, cache_limit=0, directory=tmp_path / "homes", limit="8GiB") as session:
        for _ in range(rounds):
            session.model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=True,
                pad_token_id=0,
            )
            gc.collect()  # generate itself leaves cycles
            found.append(settled(allocator, tmp_path, found[FIRST_FLAT_STEP - 1 :]))
            resident.append(resident_bytes())
        assert session.cache_moved_bytes[1] > 0
    assert_unchanged(found, resident)


def test_a_closed_job_leaves_no_files_threads_or_descriptors(tmp_path: Path) -> None:
    # Threads of torch and OpenMP stay for good once they were used: the first job brings them up.
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    train_flat("disk-recompute-4", 1, tmp_path / "first")
    time.sleep(0.1)  # for the same reason as below
    before = footprint(install(), tmp_path)
    train_flat("disk-recompute-4", 2, tmp_path / "second")
    # A joined thread is gone for Python a moment before it is gone for the kernel.
    deadline = time.monotonic() + 10
    while (
        after := footprint(install(), tmp_path)
    ).kernel_threads > before.kernel_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (after.descriptors, after.threads, after.kernel_threads, after.files_bytes) == (
        before.descriptors, before.threads, before.kernel_threads, before.files_bytes,
    )  # fmt: skip
