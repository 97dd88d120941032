"""Averages of a job's weights, as far as saves know of them.

In: averages that are kept beside a job. Out: their files in a save, and the save that a job goes on
from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class SavedAverage(Protocol):
    """An average whose values belong to the saves of its job."""

    @property
    def is_saved(self) -> bool:
        """Tells whether a save has it: not where it is closed, or in the places of the weights."""
        ...

    def write(self, path: Path) -> None:
        """Writes its values into a new file."""

    def read(self, path: Path) -> None:
        """Takes the values of a file."""


class Averages:
    """The averages of a job."""

    def __init__(self) -> None:
        self._kept: list[SavedAverage] = []
        self._source: Path | None = None
        self._source_steps = 0

    def add(self, average: SavedAverage, steps: int) -> Path | None:
        """Adds an average.

        Args:
            average: is saved from here on.
            steps: of the job now.

        Returns:
            The file that it goes on from: of the save that the job began or was loaded with, unless
            steps were made since. None: there is none.
        """
        self._kept.append(average)
        if self._source is None or steps != self._source_steps:
            return None
        path = self._source / _name(len(self._kept) - 1)
        return path if path.is_file() else None

    def remove(self, average: SavedAverage) -> None:
        """Removes one that was added. The names of the others stay."""
        self._kept = [_Gone() if each is average else each for each in self._kept]

    def note_source(self, source: Path | None, steps: int) -> None:
        """Notes the save that weights and states have just come from, and gives averages their
        values of it, where it has them.
        """
        self._source, self._source_steps = source, steps
        for index, average in enumerate(self._kept):
            if source is not None and average.is_saved and (source / _name(index)).is_file():
                average.read(source / _name(index))

    def write(self, directory: Path) -> None:
        """Writes all of them into the directory of a save."""
        for index, average in enumerate(self._kept):
            if average.is_saved:
                average.write(directory / _name(index))


class _Gone:
    """Keeps the place of an average that was closed."""

    is_saved = False

    def write(self, path: Path) -> None:
        """Does nothing."""

    def read(self, path: Path) -> None:
        """Does nothing."""


def _name(index: int) -> str:
    return "averages.safetensors" if index == 0 else f"averages-{index}.safetensors"
