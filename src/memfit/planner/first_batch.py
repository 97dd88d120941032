"""First batch of a loader, drawn so that the loader gives the same batches afterwards.

In: what a training loop iterates. Out: one batch of it; nothing that decides the next ones moved.

[Note: a sample from a loader]
`next(iter(loader))` draws: a shuffled `DataLoader` takes its seeds from torch's generator, and the
loop behind it would see other batches than a plain one. So generators are put back, and what the
loader, its samplers and its dataset keep in their attributes. A `DataLoader` is iterated as a
shallow copy: workers that stay from epoch to epoch begin with the loop's own first epoch.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from memfit.core.errors import UsageError
from memfit.runs.run_state import give_random, take_random
from memfit.trace.batch import gives_batches
from memfit.trace.program_state import untouched_program

_DEPTH = 4
_NOTHING = object()


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context after which the default generators of torch, NumPy and Python are where they were."""
    before = take_random()
    try:
        yield
    finally:
        give_random(before)


def sample_of(sample: Any) -> Any:
    """Returns a batch as it is; of a loader, its first batch."""
    return first_batch(sample) if gives_batches(sample) else sample


def first_batch(loader: Any) -> Any:
    """Draws the first batch of anything that can be iterated anew, and leaves its order as it was.

        job = memfit.fit(model, optimizer, loss, memfit.first_batch(batches))

    `memfit.fit(..., sample=loader)` does it for a `DataLoader`, and for objects with a `batch_size`
    or a `state_dict` that can be iterated.

    Random generators are put back: the default ones, and those in attributes of the loader, its
    samplers and its dataset, or named by their functions. So are the attributes themselves. Not
    reached: what a dataset keeps elsewhere, such as a position in a service.

    Raises:
        UsageError: the loader is an iterator, or holds one: what was drawn of it would be missing
            in the loop. Or it gives no batch.
    """
    parts = list(_parts_of(loader, _DEPTH))
    used_up = next((p for p in parts if isinstance(p, Iterator) and not isinstance(p, io.IOBase)), None)
    if used_up is not None:
        raise UsageError(
            f"a {type(used_up).__name__} gives its batches once, and the loop would miss the one that is drawn for planning: draw it yourself, "
            "pass it as the sample, and train on it first"
        )
    is_of_torch = bool(isinstance(loader, DataLoader))
    has_position = hasattr(loader, "load_state_dict") and not is_of_torch
    position = loader.state_dict() if has_position else None
    fresh: Any = copy.copy(loader) if is_of_torch else loader
    if is_of_torch:
        fresh._iterator = None  # noqa: SLF001, workers of an epoch that is under way are the loop's
    with generators_kept(), untouched_program(partial(len, *parts), nn.Module(), keeps_tensors=False):
        batch = next(iter(fresh), _NOTHING)
        if hasattr(fresh, "gradient_state"):
            fresh.end()  # Accelerate counts the loaders that are being iterated
    if has_position:
        loader.load_state_dict(position)
    if batch is _NOTHING:
        raise UsageError(
            f"the {type(loader).__name__} gives no batches: pass one that can be iterated again, over data that is there"
        )
    return batch


def _parts_of(thing: Any, depth: int) -> Iterator[Any]:
    """Yields a loader, and what it reads and is ordered by: their methods name what they keep."""
    yield thing
    yield from (getattr(thing, name) for name in ("__iter__", "__getitem__") if hasattr(thing, name))
    if depth:
        held = vars(thing).items() if hasattr(thing, "__dict__") else ()
        for name, value in held:
            if isinstance(value, DataLoader | Dataset | Sampler) or isinstance(thing, DataLoader | Dataset | Sampler):
                yield from () if name == "_iterator" else _parts_of(value, depth - 1)
