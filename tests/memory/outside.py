"""A process's peak as another process sees it."""

from __future__ import annotations

import threading
from pathlib import Path


class Watch:
    """The largest VmHWM that a process shows to another, read every 20 ms until `stop`."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/status")
        self._is_over = threading.Event()
        self.peak_bytes = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            try:
                lines = self._path.read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                return
            self.peak_bytes = max(
                [self.peak_bytes, *(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))]
            )

    def stop(self) -> int:
        """Ends the watch; the peak."""
        self._is_over.set()
        self._thread.join()
        return self.peak_bytes
