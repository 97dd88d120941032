"""Caches as the kernel tells them, from a tree of files that the test makes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memfit import devices
from memfit.machine.host.read import cache_bytes


def tell(root: Path, index: int, **files: str) -> None:
    where = root / f"sys/devices/system/cpu/cpu2/cache/index{index}"
    where.mkdir(parents=True)
    for name, text in files.items():
        (where / name).write_text(f"{text}\n")


def test_caches_of_the_first_processor_that_is_ours_are_told_with_who_shares_them(tmp_path: Path) -> None:
    tell(tmp_path, 0, level="1", type="Data", size="48K", shared_cpu_list="2")
    tell(tmp_path, 1, level="1", type="Instruction", size="32K", shared_cpu_list="2")
    tell(tmp_path, 2, level="2", type="Unified", size="2M", shared_cpu_list="2,10")  # 10 is not ours
    tell(tmp_path, 3, level="3", type="Unified", size="1G", shared_cpu_list="0-7")
    assert cache_bytes(tmp_path, (4, 2, 3)) == {
        "L1 data cache of a processor": 48 << 10,
        "L1 instruction cache of a processor": 32 << 10,
        "L2 cache of a processor": 2 << 20,
        "L3 cache of 3 processors": 1 << 30,
    }


def test_what_the_kernel_does_not_tell_or_tells_oddly_is_left_out(tmp_path: Path) -> None:
    assert cache_bytes(tmp_path, (2,)) == {} == cache_bytes(tmp_path, ())
    tell(tmp_path, 0, level="1", type="Odd", size="48K")
    tell(tmp_path, 1, level="one", type="Data", size="48K")
    tell(tmp_path, 2, level="2", type="Unified", size="much")
    tell(tmp_path, 3, level="2", type="Unified", size="0K")
    tell(tmp_path, 4, level="3", type="Unified", size="512")
    assert cache_bytes(tmp_path, (2,)) == {"L3 cache of a processor": 512}


def test_an_accelerators_chip_is_told_by_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(
        multi_processor_count=132, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20, is_integrated=1,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)
    card = torch.device("cuda", 0)
    assert devices.on_chip_bytes(card) == {
        "registers": 132 * 65536 * 4,
        "shared memory": 132 * 233472,
        "L2 cache": 50 << 20,
    }
    assert devices.is_unified(card) and not devices.is_unified(torch.device("cpu"))
    assert devices.on_chip_bytes(torch.device("cpu")) == {}
