"""A device for tests, `late`: memory that the host cannot touch, streams as late as they may be, every access checked.

`import late` registers it with torch, for good in a process (README.md beside this file). Tensors then live on
`torch.device("late", index)`, `torch.accelerator` speaks of it, and what torch has no interface for is here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accelerator import build

NAME = "late"
native = build.load()


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return native.current_device() if index is None else index


def set_limit(nbytes: int | None, device: int = 0) -> None:
    """Bounds what the allocator may reserve; beyond it `torch.OutOfMemoryError`. None lifts the bound."""
    native.set_limit_bytes(device, native.total_bytes() if nbytes is None else nbytes)


@contextmanager
def checked() -> Iterator[None]:
    """Fails with the races of the body, each once, with the Python stack of the later access.

    Raises:
        AssertionError: Two accesses to the same bytes, one of them writing, are ordered by nothing.
    """
    native.check_races(True)
    try:
        yield
        found = sorted(set(native.races()))
    finally:
        native.check_races(False)
    assert not found, f"{len(found)} races on the late device:\n" + "\n".join(found[:5])


@contextmanager
def lateness(mode: str, seed: int = 0) -> Iterator[None]:
    """Tasks run as late as they may ("latest", the default), at once ("prompt"), or somewhere between ("random")."""
    native.set_lateness(mode, seed)
    try:
        yield
    finally:
        native.set_lateness("latest", 0)


@contextmanager
def links(bytes_per_s: float, to_host_bytes_per_s: float | None = None, *, pace: str = "slept") -> Iterator[None]:
    """Copies between host and device take their bytes by the rate of their direction (`native/timing.h`).

    Args:
        bytes_per_s: To the device, and to the host as well where that is not said apart.
        to_host_bytes_per_s: To the host.
        pace: "slept": whoever is behind a copy sleeps until it is through. "counted": nobody sleeps, and `native.now_s()`
            is a clock that other processes do not change.
    """
    set_links(bytes_per_s, to_host_bytes_per_s, pace=pace)
    try:
        yield
    finally:
        native.set_links(0.0, 0.0, "none")


def set_links(bytes_per_s: float, to_host_bytes_per_s: float | None = None, *, pace: str = "slept") -> None:
    """As `links`, from now on: rates may change while something runs."""
    native.set_links(bytes_per_s, bytes_per_s if to_host_bytes_per_s is None else to_host_bytes_per_s, pace)


def _module() -> types.ModuleType:
    """What torch asks of `torch.late`."""
    module = types.ModuleType(f"torch.{NAME}")
    every = range(native.device_count())

    def device_of(index: object) -> torch.device:
        return torch.device(NAME, _index(index))  # type: ignore[arg-type]

    @contextmanager
    def device(where: torch.device | str | int) -> Iterator[None]:
        before = native.current_device()
        native.set_device(_index(where))
        try:
            yield
        finally:
            native.set_device(before)

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        for index, state in zip(every, states, strict=True):
            native.set_rng_state(index, state)

    def manual_seed_all(seed: int) -> None:
        for index in every:
            native.manual_seed(index, seed)

    def set_fraction(fraction: float, where: torch.device | None = None) -> None:
        native.set_limit_bytes(_index(where), round(fraction * native.total_bytes()))

    given = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device": device,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda where: native.set_device(_index(where)),
        "synchronize": lambda where=None: torch.accelerator.synchronize(device_of(where)),
        "current_stream": lambda where=None: torch.accelerator.current_stream(device_of(where)),
        "get_device_name": lambda where=None: "late device",
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "get_rng_state": lambda where=None: native.get_rng_state(_index(where)),
        "set_rng_state": lambda state, where=None: native.set_rng_state(_index(where), state),
        "get_rng_state_all": lambda: [native.get_rng_state(index) for index in every],
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": lambda seed: native.manual_seed(native.current_device(), seed),
        "manual_seed_all": manual_seed_all,
        "default_generators": tuple(native.default_generator(index) for index in every),
        "memory_stats": lambda where=None: torch.accelerator.memory_stats(device_of(where)),
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda where=None: native.limit_bytes(_index(where)) / native.total_bytes(),
        "host_register": native.pin,
        "host_unregister": native.unpin,
        "empty_cache": torch.accelerator.empty_cache,
    }
    for name, value in given.items():
        setattr(module, name, value)
    return module


def _register() -> None:
    utils: Any = torch.utils  # both functions are documented, and not in the package's list of names
    utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    utils.generate_methods_for_privateuse1_backend(for_storage=True)


_register()
