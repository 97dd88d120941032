"""Random streams of microbatches: the same numbers in whatever order the microbatches run.

In: the user's default generators as they stand at the step's start. Out: one stream a microbatch.

[Note: random numbers of a split batch]
With one microbatch the user's generators are used as they are. With k > 1, `torch.randint(2**63 -
1, (k,))` is drawn once from the default CPU generator at the step's start; microbatch m uses
generators seeded with the m-th number; after the step the default generators stand right after that
one draw (an accelerator's, Python's and NumPy's: where they were). NumPy's takes 32 bits: the
number modulo 2**32. `microbatch_streams` does the same to a plain accumulation loop. Python's and
NumPy's are there because models draw from them, too: the time masks of speech models are NumPy's.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memfit import devices


class RandomStream:
    """The default generators' state of one microbatch.

    `enter` installs it, `leave` takes it and puts the outside's back.

    Memory: states of 5 KiB (torch's CPU generator), 25 KiB (Python's), 3 KiB (NumPy's, if it is
    there) and 16 bytes (an accelerator's, if it is in use).
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._cpu = generator.get_state()
        self._seed = seed
        self._device: list[torch.Tensor] | None = None
        self._python = random.Random(seed).getstate()  # noqa: S311 - a model's random numbers, no secret
        self._numpy: Any = None
        self._outside: tuple[torch.Tensor, list[torch.Tensor], Any, Any] | None = None

    def enter(self) -> None:
        """The stream's numbers come next."""
        assert self._outside is None, "a random stream was entered twice"
        numpy = _numpy_random()
        numpy_state = None if numpy is None else numpy.get_state(legacy=False)
        self._outside = (torch.get_rng_state(), _device_states(), random.getstate(), numpy_state)
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if numpy is not None:
            if self._numpy is None:
                numpy.seed(self._seed % (1 << 32))
            else:
                numpy.set_state(self._numpy)
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
        numpy = _numpy_random()
        self._cpu, self._device, self._python = torch.get_rng_state(), _device_states(), random.getstate()
        self._numpy = None if numpy is None else numpy.get_state(legacy=False)
        cpu, device, python, numpy_state = self._outside
        self._outside = None
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy is not None and numpy_state is not None:  # NumPy may have been imported inside
            numpy.set_state(numpy_state)
        accelerator = devices.initialized()
        if device and accelerator is not None:
            accelerator.set_rng_states(device)


def draw_streams(microbatches: int) -> list[RandomStream | None]:
    """One stream a microbatch, drawn from the default generator.

    `[None]` for a single one (see [Note: random numbers of a split batch]).
    """
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


def _numpy_random() -> Any:
    """NumPy's module of random numbers, if NumPy is there.

    It loads that module when it is first asked for, which may be inside a microbatch.
    """
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None
