"""Notes of a child process: a JSON file that is whole at every instant, so that a crash or the end of its time loses nothing that was measured.

In: names and values. Out: the file, and for the parent what is in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Replaces a file in one step: readers find the old text or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class Notes:
    """Measurements of a child so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {}

    def note(self, **values: Any) -> None:
        """Adds values and writes all of them."""
        self.values.update(values)
        write_whole(self._path, json.dumps(self.values))


def read_notes(path: Path) -> Mapping[str, Any]:
    """Reads the notes of a child; empty if it wrote none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
