"""Report of one step, for progress views, callbacks and trackers of experiments.

In: filled by a job when a step is over. Out: `StepReport`, and its figures as one flat dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class TierUse:
    """Bytes of a tier that a job holds.

    Attributes:
        name: "memory" where the device is this process, else the tier.
        used_bytes: of the device the measured peak of the step, of other tiers what homes and
            offloaded tensors have claimed there.
        limit_bytes: None: the tier has no limit.
    """

    name: str
    used_bytes: int
    limit_bytes: int | None

    @property
    def share(self) -> float | None:
        """Part of the limit that is used; None without a limit."""
        return None if not self.limit_bytes else self.used_bytes / self.limit_bytes

    def in_words(self) -> str:
        """Returns the bytes beside the limit: "1.09 of 1.25 GiB"."""
        used = format_bytes(self.used_bytes)
        if self.limit_bytes is None:
            return used
        limit = format_bytes(self.limit_bytes)
        if used.split()[1] == limit.split()[1]:
            used = used.split()[0]
        return f"{used} of {limit}"


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step that is over.

    Attributes:
        step: number of the step in the run, from 1.
        loss: weighted mean of the batch; None in a loop of the user's own (`job.lines`), which has
            it.
        norm: global gradient norm before clipping; None where it was not taken.
        rows: of the batch; None in a loop of the user's own.
        tokens: elements of the batch's first integer tensor; None if it has none.
        seconds: of the step, measured.
        tiers: bytes held, the device first.
        waits_s: measured seconds that compute waited, by cause: "fetch", "accumulate", "update".
            Empty where the step was not measured action by action; in a loop of the user's own of
            its first backward and its update.
        read_bytes, written_bytes: moved from and to files (and tiers that count them) since the
            step before.
        microbatches: that the batch was cut into.
        departures: of the step from its trace, in words.
    """

    step: int
    loss: float | None
    norm: float | None
    rows: int | None
    tokens: int | None
    seconds: float
    tiers: tuple[TierUse, ...]
    waits_s: Mapping[str, float] = field(default_factory=dict[str, float])
    read_bytes: int = 0
    written_bytes: int = 0
    microbatches: int = 1
    departures: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Measured peak of the step: of the process without a GPU, else of the device."""
        return self.tiers[0].used_bytes

    def scalars(self) -> dict[str, float]:
        """Returns all figures under names with a slash, as trackers take them; what is not known is
        left out.
        """
        found: dict[str, float | int | None] = {
            "loss": self.loss,
            "norm": self.norm,
            "rows": self.rows,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": None if self.tokens is None or not self.seconds else self.tokens / self.seconds,
            "peak_bytes": self.peak_bytes,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "microbatches": self.microbatches,
            "departures": len(self.departures),
        }
        for tier in self.tiers:
            found[f"{tier.name}_bytes"] = tier.used_bytes
            found[f"{tier.name}_of_limit"] = tier.share
        for cause, seconds in self.waits_s.items():
            found[f"waits_{cause}_s"] = seconds
        return {f"memfit/{name}": float(value) for name, value in found.items() if value is not None}
