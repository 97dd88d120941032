"""Random streams of microbatches: the same numbers in whatever order the microbatches run.

In: the user's default generators as they stand at the step's start. Out: one stream a microbatch.

[Note: random numbers of a split batch]
With one microbatch the user's generators are used as they are. With k > 1, `torch.randint(2**63 - 1, (k,))` is drawn once from the default CPU
generator at the step's start; microbatch m uses generators seeded with the m-th number; after the step the default generators stand right
after that one draw (an accelerator's: where they were). `microbatch_streams` does the same to a plain accumulation loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from memfit import devices


class RandomStream:
    """The default generators' state of one microbatch; `enter` installs it, `leave` takes it and puts the outside's back.

    Memory: one state of 5 KiB (CPU) and 16 bytes (of an accelerator, if it is in use).
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._cpu = generator.get_state()
        self._seed = seed
        self._device: list[torch.Tensor] | None = None
        self._outside: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def enter(self) -> None:
        """The stream's numbers come next."""
        assert self._outside is None, "a random stream was entered twice"
        self._outside = (torch.get_rng_state(), _device_states())
        torch.set_rng_state(self._cpu)
        accelerator = devices.initialized()
        if accelerator is None:
            return
        if self._device is None:
            accelerator.manual_seed_all(self._seed)
        else:
            accelerator.set_rng_states(self._device)

    def leave(self) -> None:
        """The numbers of outside come next."""
        assert self._outside is not None, "a random stream was left without being entered"
        self._cpu, self._device = torch.get_rng_state(), _device_states()
        cpu, device = self._outside
        self._outside = None
        torch.set_rng_state(cpu)
        accelerator = devices.initialized()
        if device and accelerator is not None:
            accelerator.set_rng_states(device)


def draw_streams(microbatches: int) -> list[RandomStream | None]:
    """One stream a microbatch, drawn from the default generator; `[None]` for a single one (see [Note: random numbers of a split batch])."""
    if microbatches == 1:
        return [None]
    seeds = torch.randint(2**63 - 1, (microbatches,)).tolist()
    return [RandomStream(seed) for seed in seeds]


def microbatch_streams(microbatches: int) -> Callable[[int], AbstractContextManager[None]]:
    """Seeds a plain accumulation loop as memfit seeds its microbatches.

    ```python
    stream = memfit.microbatch_streams(4)
    for m, part in enumerate(parts):
        with stream(m):
            (loss(model, part) * share[m]).backward()
    ```

    Args:
        microbatches: how many slices the batch is cut into.

    Returns:
        A function from the microbatch's index to a context in which its random numbers are drawn.
    """
    streams = draw_streams(microbatches)

    @contextmanager
    def within(microbatch: int) -> Iterator[None]:
        stream = streams[microbatch]
        if stream is None:
            yield
            return
        stream.enter()
        try:
            yield
        finally:
            stream.leave()

    return within


def _device_states() -> list[torch.Tensor]:
    accelerator = devices.initialized()
    return [] if accelerator is None else accelerator.rng_states()
