"""The interface to an accelerator, in torch's generic terms.

[Note: never without the device]
`torch.accelerator.current_stream()` is the current stream of the *thread's current device*. A model
on index 1 while index 0 is current (nobody called `set_device`, and a worker thread always begins
on index 0) would order its copies behind a stream of the other card: wrong numbers, silently. So
every method here takes the device whose stream, memory or generator is meant.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.errors import UnsupportedError


def is_accelerator(device: torch.device) -> bool:
    """Tells whether the device has memory of its own beside the processor's."""
    return device.type not in ("cpu", "meta")


@functools.cache
def _of_kind(kind: str) -> Accelerator:
    if kind == "cuda":
        from memfit.devices.cuda import Cuda

        return Cuda()
    return Accelerator(kind)


def of(device: torch.device) -> Accelerator:
    """The accelerator of a device, which must not be the processor's.

    A backend without streams is refused by `Accelerator.new_stream`.
    """
    assert is_accelerator(device), f"{device} is no accelerator"
    return _of_kind(device.type)


def initialized() -> Accelerator | None:
    """The accelerator that this process has begun to use, if any. Looking starts nothing."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    accelerator = _of_kind(found.type)
    return accelerator if accelerator.is_initialized else None


class Accelerator:
    """One backend, through `torch.accelerator` and torch's module of its name.

    A backend that is not torch's own can pin memory in exact sizes if its module has
    `host_register(address, nbytes)` and `host_unregister(address)`. Without these, host homes are
    pageable: copies are right, and wait.

    Memory: none.

    Attributes:
        kind: type of the device, as autocast and `torch.device` name it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._module: Any = torch.get_device_module(kind)

    # ------------------------------------------------------------------ streams
    def new_stream(self, device: torch.device) -> torch.Stream:
        """A stream beside the current one.

        Raises:
            UnsupportedError: The backend has no streams (mps).
        """
        try:
            return torch.Stream(device)
        except (NotImplementedError, RuntimeError) as error:
            raise UnsupportedError(
                f"torch has no streams for {self.kind!r} ({_first_line(error)}), and memfit moves weights on one of their own: train on CUDA, XPU or the CPU"
            ) from error

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The stream that this thread's work on the device goes to.

        See [Note: never without the device].
        """
        return torch.accelerator.current_stream(device)

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """Work of this thread goes to the stream, inside.

        `with stream:` keeps what to come back to in the stream object itself, which threads share:
        the copy stream is entered by the caller, by the update worker and by autograd's device
        thread.
        """
        # Both kept in this frame, which no other thread shares.
        device_index, before = torch.accelerator.current_device_index(), self.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)  # which makes its device the current one, too
            torch.accelerator.set_device_index(device_index)

    def synchronize(self, device: torch.device) -> None:
        """Waits for everything that was given to the device."""
        torch.accelerator.synchronize(device)

    # ------------------------------------------------------------------ memory
    def name(self, device: torch.device) -> str:
        """Name of the hardware."""
        name = getattr(self._module, "get_device_name", None)
        return self.kind if name is None else str(name(device))

    def count(self) -> int:
        """Devices of this kind."""
        return int(torch.accelerator.device_count())

    def total_bytes(self, device: torch.device) -> int:
        """Memory of the device, whoever holds it."""
        return int(torch.accelerator.get_memory_info(device)[1])

    def free_bytes(self, device: torch.device) -> int:
        """Memory of the device that nobody holds."""
        return int(torch.accelerator.get_memory_info(device)[0])

    def statistics(self, device: torch.device) -> Mapping[str, int]:
        """Counters of torch's caching allocator, by their dotted names.

        Empty before the first allocation.
        """
        return torch.accelerator.memory_stats(device)

    def reset_peaks(self, device: torch.device) -> None:
        """Starts the peaks of `statistics` again at what there is now."""
        torch.accelerator.reset_peak_memory_stats(device)

    def empty_cache(self) -> None:
        """Gives segments without tensors back to the driver."""
        torch.accelerator.empty_cache()

    def limit_bytes(self, device: torch.device) -> int:
        """Bytes that the caching allocator may reserve."""
        get = getattr(self._module, "get_per_process_memory_fraction", None)
        total = self.total_bytes(device)
        return total if get is None else round(get(device) * total)

    def set_limit_bytes(self, device: torch.device, limit_bytes: int | None) -> None:
        """Bounds what the caching allocator may reserve, in this process; None lifts it.

        Raises:
            UnsupportedError: The backend has no such bound.
        """
        set_fraction = getattr(self._module, "set_per_process_memory_fraction", None)
        if set_fraction is None:
            raise UnsupportedError(
                f"torch cannot bound the memory of {self.kind!r}: leave the limit out, or train on another device"
            )
        # A bound that nobody lifts outlives its job: whoever sets one lifts it.
        set_fraction(1.0 if limit_bytes is None else limit_bytes / self.total_bytes(device), device)

    # ------------------------------------------------------------------ pinned memory
    def pin(self, storage: torch.UntypedStorage) -> bool:
        """Pins exactly the storage's bytes.

        The caching pinned allocator would round up to a power of two. Returns whether it could.
        """
        register = getattr(self._module, "host_register", None)
        if register is None or not storage.nbytes():
            return False
        # Until `unpin`: the memory must not be freed before that, or its next owner's is pinned.
        register(storage.data_ptr(), storage.nbytes())
        return True

    def unpin(self, storage: torch.UntypedStorage) -> None:
        """Ends what `pin` began; copies that use the storage are through before (the caller sees to
        it).
        """
        # The caller has waited for every copy from and to it.
        self._module.host_unregister(storage.data_ptr())

    # ------------------------------------------------------------------ generators
    @property
    def is_initialized(self) -> bool:
        """Something has used the backend in this process."""
        begun = getattr(self._module, "is_initialized", None)
        return begun is None or bool(begun())

    def default_generator(self, device: torch.device) -> torch.Generator:
        """The generator that draws on the device when none is given."""
        return self._module.default_generators[self.index(device)]

    def rng_state(self, device: torch.device) -> torch.Tensor:
        """State of the default generator: uint8, on the CPU."""
        return self._module.get_rng_state(device)

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Puts a state back."""
        self._module.set_rng_state(state, device)

    def rng_states(self) -> list[torch.Tensor]:
        """States of the default generators of all devices."""
        return list(self._module.get_rng_state_all())

    def set_rng_states(self, states: Sequence[torch.Tensor]) -> None:
        """Puts the states of all devices back."""
        self._module.set_rng_state_all(list(states))

    def manual_seed_all(self, seed: int) -> None:
        """Seeds the default generators of all devices."""
        self._module.manual_seed_all(seed)

    def index(self, device: torch.device) -> int:
        """Index of the device; the current one's where it has none."""
        return torch.accelerator.current_device_index() if device.index is None else device.index


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
