"""Report of one step, for progress views, callbacks and trackers of experiments.

In: filled by a job when a step is over. Out: `StepReport`, and its figures as one flat dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from html import escape
from itertools import groupby
from typing import Any

from memfit.core.limits import format_bytes


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


# Proof of a phase: what loading, a step, an evaluation, a save or a resume was predicted to take,
# and what was measured.
#
# In: filled by a job. Out: `PhaseProof`, for the terminal, JSON and the report.

STEP_PHASES = frozenset({"first step", "steady"})
COLUMNS = ("phase", "times", "predicted", "measured", "limit", "tensors predicted", "measured")


@dataclass(frozen=True, kw_only=True)
class PhasePrediction:
    """Predicted peaks of a phase.

    Attributes:
        whole_bytes: of the process, or of the device.
        tensor_bytes: of all tensors on the device, those of others too; None: not predicted apart.
    """

    whole_bytes: int
    tensor_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseProof:
    """One phase.

    Attributes:
        name: "load" or "resume", "first step", "steady", "evaluate", "save" and others.
        times: how often it was entered.
        predicted_bytes: of the process without a GPU, else of the device; None: this phase is not
            predicted.
        measured_bytes: the same, measured: of a process by the kernel (VmHWM, with its children),
            of a device by its allocator.
        limit_bytes: None: no limit was given.
        predicted_tensor_bytes: of all tensors on the device; None: not predicted.
        measured_tensor_bytes: the same, as the device's allocator counted them.
    """

    name: str
    times: int
    predicted_bytes: int | None
    measured_bytes: int
    limit_bytes: int | None
    predicted_tensor_bytes: int | None
    measured_tensor_bytes: int

    @property
    def holds(self) -> bool:
        """True if the phase stayed within the limit, if there is one."""
        return self.limit_bytes is None or self.measured_bytes <= self.limit_bytes

    def row(self) -> tuple[str, ...]:
        """Returns the cells of `COLUMNS`."""
        return (
            self.name,
            str(self.times),
            _bytes(self.predicted_bytes),
            format_bytes(self.measured_bytes),
            _bytes(self.limit_bytes),
            _bytes(self.predicted_tensor_bytes),
            format_bytes(self.measured_tensor_bytes),
        )

    def data(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self) | {"holds": self.holds}


def phase_table(phases: Sequence[PhaseProof]) -> str:
    """Returns the phases as text of at most 80 columns, a line each under their names."""
    rows = [COLUMNS, *(phase.row() for phase in phases)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def predicted_beside(own: Mapping[str, PhasePrediction], name: str, *, is_behind_step: bool) -> PhasePrediction | None:
    """Returns what a phase is predicted to take; None if it is not predicted.

    Args:
        own: predictions of phases by themselves.
        name: of the phase.
        is_behind_step: a step was made before. Memory that it freed may stay with the process,
            ready for the next step, so that a later phase may hold as much as a step.
    """
    found = own.get(name)
    if found is None or not is_behind_step or name in STEP_PHASES:
        return found
    step = own.get("steady")
    least = 0 if step is None else step.whole_bytes
    return PhasePrediction(whole_bytes=max(found.whole_bytes, least), tensor_bytes=found.tensor_bytes)


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


# HTML representations of objects in notebooks: a title and a table, in HTML that every front end
# knows.
#
# In: text. Out: HTML. Everything is escaped, since names of blocks are the user's.

_LONGEST_FIGURE = 24


def html_table(title: str, rows: Sequence[Sequence[str]], columns: Sequence[str] = ()) -> str:
    """Returns a table under a bold title.

    Args:
        title: one line.
        rows: cells; the first of each is text, the others figures, aligned right.
        columns: their names.
    """
    head = f"<tr>{''.join(_cell('th', name, index) for index, name in enumerate(columns))}</tr>" if columns else ""
    body = "".join(f"<tr>{''.join(_cell('td', cell, i) for i, cell in enumerate(row))}</tr>" for row in rows)
    return f"<div><b>{escape(title)}</b><table>{head}{body}</table></div>"


def html_bar(words: str, share: float) -> str:
    """Returns a bar that is filled as far as a limit is used, with words behind it.

    Args:
        words: one line.
        share: of the limit; above 1 the bar is full, and red.
    """
    color, width = ("#c33" if share > 1 else "#4a8"), 100 * min(1.0, max(0.0, share))
    outer = "display: inline-block; width: 200px; height: 10px; border: 1px solid; vertical-align: middle"
    bar = f'<div style="{outer}"><div style="width: {width:.0f}%; height: 100%; background: {color}"></div></div>'
    return f"<div>{bar} {escape(words)}</div>"


def _cell(kind: str, text: str, index: int) -> str:
    # Sentences are read from the left, figures compared at the right.
    side = "right" if index and len(text) <= _LONGEST_FIGURE else "left"
    return f'<{kind} style="text-align: {side}">{escape(text)}</{kind}>'


def named_values(made: Any) -> str:
    """Returns a dataclass as the call that makes an equal one, without fields that have their
    default; enums as strings.
    """
    said: list[str] = []
    for each in fields(made):
        value = getattr(made, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if value != default:
            said.append(f"{each.name}={str(value)!r}" if isinstance(value, str) else f"{each.name}={value!r}")
    return f"{type(made).__name__}({', '.join(said)})"


def in_runs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Groups equal neighbours: (indices, word), such as ("0 to 11", "keep")."""
    runs: list[tuple[str, str]] = []
    for word, group in groupby(enumerate(words), key=lambda pair: pair[1]):
        indices = [index for index, _ in group]
        first, last = indices[0], indices[-1]
        runs.append((str(first) if first == last else f"{first} to {last}", word))
    return runs


# Names of modules that differ in a number, such as those of equal layers, told as one.
#
# In: dotted names, or texts with one in them. Out: names with ranges (`layers.0-31`).

# A part of a dotted name that is a number; the name may stand inside a text, before a colon.
_NUMBER = re.compile(r"(?:(?<=[. ])|^)(\d+)(?=[.:]|$)")


def split_number(name: str) -> tuple[str, int | None, str]:
    """A name as (what stands before its first number, the number, what stands behind it); None
    where it has none.
    """
    head, number, tail = (*_NUMBER.split(name, maxsplit=1), "", "")[:3]
    return head, int(number) if number else None, tail


def joined_names(names: Iterable[str]) -> str:
    """Names, each once; those that differ only in their first number as ranges (`layers.0-31`)."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        head, number, tail = split_number(name)
        numbers.setdefault((head, tail), []).extend([] if number is None else [number])
    joined: list[str] = []
    for (head, tail), found in numbers.items():
        # A run of consecutive numbers keeps its distance to their positions.
        runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(found)), key=lambda pair: pair[1] - pair[0])]
        shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        joined.append(f"{head}{shown}{tail}")
    return ", ".join(joined)
