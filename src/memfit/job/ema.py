"""Average of a job's weights over its steps, kept in a file and updated piece by piece.

In: a job, whose updates are watched. Out: a safetensors file with the averages, at every instant
between two steps; and the averages in the places of the weights, to evaluate with.

[Note: what an average costs]
A piece of a weight is in a core's cache when it has been updated, before it goes home. There its
average is read, moved, and written back: the weights visit no further time, and of the averages two
pieces are in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from memfit.core.documents import user_path
from memfit.core.errors import StoreError, UnsupportedError, UsageError
from memfit.core.layout import PIECE_ELEMENTS
from memfit.files.writer import read_at, write_at
from memfit.homes.update_pieces import UpdatedPiece
from memfit.job.job import Job
from memfit.store.directory import TemporaryDirectory

_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, kw_only=True)
class _AveragePlace:
    """Where a parameter's average lies in the file."""

    offset: int
    numel: int
    dtype: torch.dtype


class MemfitEma:
    """Exponential moving average of the weights that train: after each step `average = decay *
    average + (1 - decay) * weight`, as `torch.optim.swa_utils.get_ema_multi_avg_fn` has it, bit for
    bit. It begins as a copy of the weights.

        ema = memfit.MemfitEma(job, decay=0.999, path="ema.safetensors")
        ...
        with ema.applied():
            job.evaluate(batch)

    `job.save` saves it with the weights. Made beside a job that goes on from such a save
    (`fit(resume=...)`, `job.load`), it goes on from there.

    A step that fails after it has begun to update leaves averages of both steps.

    Args:
        job: of `memfit.fit`, on one process.
        decay: from 0 to 1.
        path: of the file, which is written anew; None: a temporary one, removed at the end.
        copies_first: the first update copies the weights, as that of
            `torch.optim.swa_utils.AveragedModel` does.

    Attributes:
        path: of the file: safetensors with the names of `model.named_parameters()`.

    Raises:
        UsageError: a decay below 0 or above 1.
        UnsupportedError: a weight whose memory order is not row-major.
        StoreError: the save that the job goes on from has averages of other weights.
    """

    def __init__(
        self, job: Job, decay: float = 0.999, path: str | Path | None = None, *, copies_first: bool = False
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise UsageError(f"the decay of an average is from 0 to 1, not {decay!r:.40}")
        self._job = job
        self._decay = decay
        # Kept: its finalizer removes the directory.
        self._directory = TemporaryDirectory() if path is None else None
        self.path = user_path(path) if self._directory is None and path is not None else self._temporary()
        self._places: dict[str, _AveragePlace] = {}
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._is_applied = False
        self._copies_at: int | None = None
        try:
            self._lay_out()
            found = job.averages.add(self, job.steps)
            if found is None:
                self._copy_weights()
            else:
                self.read(found)
            self._copies_at = job.steps if copies_first and found is None else None
            self._handle = job.on_update(None, self._move)
        except BaseException:
            os.close(self._file)
            job.averages.remove(self)
            raise

    def _temporary(self) -> Path:
        assert self._directory is not None
        return self._directory.path / "ema.safetensors"

    def close(self) -> None:
        """Ends the average; the file stays as it is, unless it was a temporary one. May be
        repeated.
        """
        self._handle.remove()
        self._job.averages.remove(self)
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
        if self._directory is not None:
            self._directory.remove()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model's weights are the averages: to evaluate, save or generate.

        Memory: one block's weights, and one piece.

        Raises:
            UnsupportedError: weights have masters, which a change of the weights would round.
            UsageError: it is applied already.
        """
        if self._is_applied:
            raise UsageError("the averages are in the places of the weights already: leave that context first")
        if any(block.has_masters for block in self._job._assembly.blocks):  # noqa: SLF001, nothing public tells
            raise UnsupportedError(
                f"the plan keeps fp32 masters, which weights that are exchanged would round: load {self.path} into a model of its own to evaluate it"
            )
        self._exchange()
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            self._exchange()

    # --- saves -----------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """Tells whether a save has the averages: where they are applied, its weights are they."""
        return self._file >= 0 and not self._is_applied

    def write(self, path: Path) -> None:
        """Writes the averages into a new file, as `job.save` asks."""
        with path.open("xb") as file:
            _copy_file(self._file, file.fileno(), os.fstat(self._file).st_size)
            os.fsync(file.fileno())

    def read(self, path: Path) -> None:
        """Takes the averages of a file that `write` wrote, as `job.load` asks.

        Raises:
            StoreError: they are of other weights, or the file is cut.
        """
        with path.open("rb") as file:
            nbytes = os.fstat(self._file).st_size
            is_alike = os.fstat(file.fileno()).st_size == nbytes
            if not is_alike or os.pread(file.fileno(), self._begin, 0) != os.pread(self._file, self._begin, 0):
                raise StoreError(
                    f"{path} has averages of other weights than the model's that train, or is damaged: load a save of this model, or remove that file"
                )
            _copy_file(file.fileno(), self._file, nbytes)
        self._copies_at = None

    # --- the file --------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        entries: dict[str, object] = {}
        end = 0
        for name, (_, slot) in self._job._assembly.place.items():  # noqa: SLF001, as above
            if not slot.requires_grad or slot.master_dtype not in _NAMES:
                continue
            if slot.stride != torch.empty(slot.shape, device="meta").stride():
                raise UnsupportedError(
                    f"the average of {name!r} would lie in another order than its weight: the weight is not contiguous; make it so before memfit.fit"
                )
            nbytes = slot.numel * slot.master_dtype.itemsize
            entries[name] = {
                "dtype": _NAMES[slot.master_dtype],
                "shape": list(slot.shape),
                "data_offsets": [end, end + nbytes],
            }
            self._places[name] = _AveragePlace(offset=end, numel=slot.numel, dtype=slot.master_dtype)
            end += nbytes
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        header += b" " * (-len(header) % 8)
        os.ftruncate(self._file, 8 + len(header) + end)
        write_at(self._file, len(header).to_bytes(8, "little") + header, 0)
        self._begin = 8 + len(header)

    def _copy_weights(self) -> None:
        for name, place in self._places.items():
            with torch.no_grad(), self._job.weights(name):
                weight = self._parameter(name).detach().to(place.dtype).view(-1)
                for first in range(0, place.numel, PIECE_ELEMENTS):
                    self._put(place, first, weight[first : first + PIECE_ELEMENTS].cpu().clone())

    def _exchange(self) -> None:
        """Puts averages in the places of weights, and weights into the file."""
        for block in self._job.block_names:
            names = [s.name for b in self._job._assembly.blocks if b.name == block for s in b.slots]  # noqa: SLF001
            if not any(name in self._places for name in names):
                continue
            with torch.no_grad(), self._job.weights(block):
                for name in (name for name in names if name in self._places):
                    weight, place = self._parameter(name).detach().view(-1), self._places[name]
                    for first in range(0, place.numel, PIECE_ELEMENTS):
                        piece = weight[first : first + PIECE_ELEMENTS]
                        average, own = self._get(place, first, len(piece)), piece.cpu().clone()
                        piece.copy_(average)
                        self._put(place, first, own)

    def _move(self, piece: UpdatedPiece) -> None:
        place = self._places.get(piece.name)
        if place is None:
            return
        weight = piece.weight.detach().cpu()
        if self._job.steps == self._copies_at:
            average = weight.to(place.dtype, copy=True)
        else:
            average = self._get(place, piece.first, weight.numel())
            average.lerp_(weight.to(place.dtype), 1.0 - self._decay)
        self._put(place, piece.first, average)

    def _parameter(self, name: str) -> torch.nn.Parameter:
        return self._job._assembly.place[name][1].parameter  # noqa: SLF001, as above

    def _get(self, place: _AveragePlace, first: int, count: int) -> torch.Tensor:
        size = place.dtype.itemsize
        into = bytearray(count * size)
        offset = self._begin + place.offset + first * size
        if not read_at(self._file, into, offset):
            raise OSError(
                f"the file of averages {self.path} ends before its end: it was cut from outside. Remove it, and begin averages anew"
            )
        return torch.frombuffer(into, dtype=place.dtype)

    def _put(self, place: _AveragePlace, first: int, values: torch.Tensor) -> None:
        # Of memory of its own: what NumPy has seen can not be given up any more.
        data = values.view(torch.uint8).numpy()
        write_at(self._file, data, self._begin + place.offset + first * place.dtype.itemsize)


def _copy_file(source: int, target: int, nbytes: int) -> None:
    """Copies a file from its beginning, a piece at a time: neither position moves."""
    done = 0
    while done < nbytes:
        found = os.pread(source, min(1 << 21, nbytes - done), done)
        if not found:
            raise OSError("a file of averages ends before its end: it was cut from outside. Load another save")
        write_at(target, found, done)
        done += len(found)
