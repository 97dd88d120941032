"""Use of the machine by others while something is measured.

In: /proc/stat and the load, before and after. Out: `Others`: shares of the processors' time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from memfit.host.kernel_files import read_text

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Others:
    """Shares of the time of all processors.

    Attributes:
        stolen: by other guests of the same host (steal time, as far as the host tells).
        used: by other processes of this machine.
    """

    stolen: float
    used: float

    @property
    def is_busy(self) -> bool:
        """True if figures measured meanwhile are rough."""
        return self.stolen + self.used > _BUSY_SHARE

    def sentence(self) -> str:
        """Says it in words; empty if the machine was quiet."""
        if not self.is_busy:
            return ""
        return (
            f"others used {self.used:.0%} of the processors' time and {self.stolen:.0%} was stolen by other guests of "
            "the host: these figures are rough, measure again when the machine is quiet"
        )


@dataclass(frozen=True, kw_only=True)
class _Count:
    """Seconds since the machine started, over all processors, and of this process."""

    busy_s: float
    stolen_s: float
    own_s: float
    at_s: float


class OthersMeter:
    """Watches the machine from its creation on.

    Args:
        root: where `proc` is; another tree is for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._processors = os.cpu_count() or 1
        self._before = self._count()

    def read(self) -> Others | None:
        """Returns the shares since; None where the kernel does not tell."""
        before, now = self._before, self._count()
        if before is None or now is None or now.at_s <= before.at_s:
            return None
        whole_s = self._processors * (now.at_s - before.at_s)
        others_s = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
        stolen_s = now.stolen_s - before.stolen_s
        return Others(stolen=max(0.0, stolen_s / whole_s), used=max(0.0, others_s / whole_s))

    def _count(self) -> _Count | None:
        """Reads the first line of /proc/stat. Source: proc_stat(5)."""
        line = (read_text(self._root / "proc/stat") or "").partition("\n")[0].split()
        if len(line) < 9 or line[0] != "cpu":
            return None
        user, nice, system, _idle, _waiting, irq, softirq, steal = (int(text) * _TICK_S for text in line[1:9])
        own = os.times()
        return _Count(
            busy_s=user + nice + system + irq + softirq,
            stolen_s=steal,
            own_s=own.user + own.system + own.children_user + own.children_system,
            at_s=time.monotonic(),
        )
