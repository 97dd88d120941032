"""`ResumableLoader`: batches whose order depends on a seed and an epoch alone, so that where they
stand is three numbers.

In: a dataset with a length. Out: batches, epoch by epoch; a `state_dict` that a run keeps
(`job.register`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from memfit.core.errors import UsageError


class ResumableLoader:
    """Batches of a dataset, shuffled anew each epoch, that can be left after any batch and taken up
    behind it, in another process.

        loader = memfit.ResumableLoader(dataset, batch_size=32, seed=0)
        job.register("loader", loader)
        for batch in loader:      # the rest of the epoch that the run was in
            job.step(batch)

    Iterating gives the rest of the current epoch; the next time, the next one. What it gives is
    what `torch.utils.data.DataLoader` makes of the same indices. Random transformations in the
    dataset go on bit for bit where they draw from the process's own generators (`workers=0`); those
    in worker processes do not.

    Memory: 8 bytes an item for the order of an epoch; what the loader prefetches.

    Args:
        dataset: has `len` and takes indices.
        batch_size: items of a batch.
        seed: decides the order, with the epoch.
        shuffle: False: in the dataset's order.
        keeps_last: an epoch's last batch is given even if it is smaller.
        workers: processes that read ahead.
        collate: makes a batch of items; torch's by default.

    Raises:
        UsageError: a dataset that gives no batch, or sizes that cannot be.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        keeps_last: bool = False,
        workers: int = 0,
        collate: Any = None,
    ) -> None:
        if batch_size < 1 or workers < 0:
            raise UsageError(f"a loader of batches of {batch_size} items and {workers} workers: give at least 1 and 0")
        self._dataset = dataset
        self._items = len(dataset)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._keeps_last = keeps_last
        self._workers = workers
        self._collate = collate
        self._epoch = 0
        self._batch = 0
        if not len(self):
            raise UsageError(
                f"{self._items} items give no batch of {batch_size}: use smaller batches, or keeps_last=True"
            )

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole = self._items // self._batch_size
        return whole + (self._keeps_last and whole * self._batch_size < self._items)

    @property
    def epoch(self) -> int:
        """Epochs that were given to their end."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current epoch."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._items, generator=generator) if self._shuffle else torch.arange(self._items)
        size = self._batch_size
        rest = [order[at * size : (at + 1) * size].tolist() for at in range(self._batch, len(self))]
        batches = DataLoader(
            self._dataset,
            batch_sampler=rest,
            num_workers=self._workers,
            collate_fn=self._collate,
            generator=generator,  # of its own: the process's generators are the program's
        )
        for batch in batches:
            self._batch += 1  # given, as soon as it is asked for
            yield batch
        self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int | bool]:
        """Where it stands, and what decides the order."""
        return {**self._shape(), "epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the batch that was given last.

        Raises:
            UsageError: a state of other data, batches or seed; or none.
        """
        for key, value in self._shape().items():
            if state.get(key) != value:
                raise UsageError(
                    f"the loader's {key} is {value}, and was {state.get(key)!r:.40} in the run: make the loader "
                    "as it was, or begin another run"
                )
        epoch, batch = state.get("epoch"), state.get("batch")
        if type(epoch) is not int or type(batch) is not int or epoch < 0 or not 0 <= batch <= len(self):
            raise UsageError(
                f"the loader cannot go on behind batch {batch!r:.40} of epoch {epoch!r:.40} (an epoch has {len(self)}): "
                "give the state that state_dict() of such a loader gave"
            )
        self._epoch, self._batch = epoch, batch

    def _shape(self) -> dict[str, int | bool]:
        return {
            "items": self._items,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "keeps_last": self._keeps_last,
        }
