"""Corrections of a machine's rates that runs have taught, kept beside the file of `memfit probe`.

In: factors by group of classes, and of the disk, that a run's steps were measured to take, and how
far whole steps were from their predictions. Out: a corrected `Hardware`, for the next run.

[Note: self-correction]
A job on a processor compares its first steps with their prediction, action by action
(`job.comparing`), in seconds that its thread was on a processor. The refitted factors are averaged,
as logarithms, with those of earlier runs, each weighted by the seconds that it rests on (earlier
ones by at most ten times those of the new run, so that a changed machine is followed). They belong
to one measurement of `memfit probe`: a new one begins without any. `MEMFIT_CORRECTIONS=off` neither
reads nor writes them, and a hardware description that is given to `fit` is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from memfit.core.documents import parse_json, read_document, write_document
from memfit.core.errors import MemfitWarning
from memfit.core.hardware import Hardware
from memfit.prediction.calibration import (
    GROUPS,
    LANES,
    LARGEST_FACTOR,
    LARGEST_LINK_FACTOR,
    SMALLEST_FACTOR,
    calibrated,
)

CORRECTION_FORMAT = 1
_FILE_LIMIT_BYTES = 64 << 10
_DIGEST = 32
_MOST_RATIOS = 64
_FEWEST_RATIOS = 5
_LARGEST_RATIO = 100.0
_LEAST_SPREAD = 0.03
_MEMORY = 10.0
_LONGEST_S = 1e12


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Corrections of one hardware file.

    Attributes:
        of: digest of the measurement that they correct.
        factors: by group of classes and lane of the disk (`prediction.calibration.GROUPS`,
            `LANES`): its seconds as a multiple of those that the file's rates give.
        seconds: measured seconds that each factor rests on.
        ratios: of each run, latest last: measured seconds of a step by those that were predicted
            with the corrections of that time.
    """

    of: str
    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    ratios: tuple[float, ...] = ()

    def followed_by(self, factors: Mapping[str, float], seconds: Mapping[str, float], ratio: float) -> Correction:
        """Returns the corrections with those of another run.

        Args:
            factors: by group and lane, relative to the rates as corrected until now.
            seconds: of the run, likewise; those without any, or without a factor, say nothing.
            ratio: measured by predicted seconds of its step.
        """
        found, rests_on = dict(self.factors), dict(self.seconds)
        for group, new_s in seconds.items():
            if new_s <= 0 or group not in factors:
                continue
            old = found.get(group, 1.0)
            old_s = min(rests_on.get(group, 0.0), _MEMORY * new_s)
            step = math.log(factors[group]) * new_s / (new_s + old_s)
            least, most = _bounds(group)
            found[group] = min(max(old * math.exp(step), least), most)
            rests_on[group] = min(old_s + new_s, _LONGEST_S)
        ratios = (*self.ratios, min(max(ratio, 1 / _LARGEST_RATIO), _LARGEST_RATIO))[-_MOST_RATIOS:]
        return replace(self, factors=found, seconds=rests_on, ratios=ratios)

    @property
    def spread(self) -> float | None:
        """Share by which nine of ten runs were nearer than; None where too few say so."""
        if len(self.ratios) < _FEWEST_RATIOS:
            return None
        apart = sorted(math.exp(abs(math.log(ratio))) - 1 for ratio in self.ratios)
        # The next run's is below the k-th of n with probability k / (n + 1); of few, the farthest.
        return max(_LEAST_SPREAD, min(1.0, apart[min(len(apart) - 1, math.ceil(0.9 * (len(apart) + 1)) - 1)]))

    def applied(self, hardware: Hardware) -> Hardware:
        """Returns the machine with corrected rates, and with the spread of steps that runs saw."""
        spread = self.spread
        if not self.ratios:
            return hardware
        return replace(
            calibrated(hardware, self.factors) if self.factors else hardware,
            step_spread=hardware.step_spread if spread is None else spread,
            origin={**hardware.origin, "corrected": f"by {len(self.ratios)} runs"},
        )


def corrections_are_on() -> bool:
    """Tells whether corrections are read and written. See [Note: self-correction]."""
    return os.environ.get("MEMFIT_CORRECTIONS", "on").strip().lower() not in ("off", "0", "no", "false")


def correction_path(hardware_path: Path) -> Path:
    """Returns the place of the corrections of a hardware file."""
    return hardware_path.with_name(f"{hardware_path.stem}.corrections.json")


def measurement_of(hardware: Hardware) -> str:
    """Returns a digest of what a probe has measured, whatever corrections were applied since."""
    known = {key: value for key, value in hardware.origin.items() if key != "corrected"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:_DIGEST]


def load_correction(hardware: Hardware, path: Path) -> Correction:
    """Reads the corrections of a hardware file; none where there are none, or those of another
    measurement. A file that cannot be read is told by a warning and not used.

    Args:
        hardware: as it was measured.
        path: `correction_path` of its file.
    """
    nothing = Correction(of=measurement_of(hardware))
    if not path.is_file():
        return nothing
    try:
        found = _read(read_document(path, limit_bytes=_FILE_LIMIT_BYTES))
    except (OSError, ValueError) as error:
        warnings.warn(
            f"what earlier runs taught about this machine cannot be read ({str(error)[:200]}), so predicted seconds are those of "
            f"memfit probe alone: remove {path}",
            MemfitWarning,
            stacklevel=2,
        )
        return nothing
    return found if found.of == nothing.of else nothing


def save_correction(correction: Correction, path: Path) -> None:
    """Writes corrections whole or not at all.

    Raises:
        OSError: they cannot be written.
    """
    document = {"format": CORRECTION_FORMAT, **asdict(correction)}
    write_document(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _read(text: bytes) -> Correction:
    """Reads a document.

    Raises:
        ValueError: it has a flaw, which the message names.
    """
    read: object = parse_json(text)
    raw = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
    if type(raw.get("format")) is not int or raw["format"] != CORRECTION_FORMAT:
        raise ValueError(f'it is no JSON object that says "format": {CORRECTION_FORMAT}')
    of, ratios = raw.get("of"), raw.get("ratios")
    if not isinstance(of, str) or len(of) != _DIGEST or not isinstance(ratios, list):
        raise ValueError("'of' is a digest and 'ratios' a list")
    numbers = cast("list[object]", ratios)
    if len(numbers) > _MOST_RATIOS:
        raise ValueError(f"'ratios' has more than {_MOST_RATIOS} entries")
    return Correction(
        of=of,
        factors=_numbers("factors", raw.get("factors"), _bounds),
        seconds=_numbers("seconds", raw.get("seconds"), lambda _: (0.0, _LONGEST_S)),
        ratios=tuple(_number("ratios", one, 1 / _LARGEST_RATIO, _LARGEST_RATIO) for one in numbers),
    )


def _bounds(name: str) -> tuple[float, float]:
    """The smallest and the largest factor of a group or a lane."""
    return (1 / LARGEST_LINK_FACTOR, LARGEST_LINK_FACTOR) if name in LANES else (SMALLEST_FACTOR, LARGEST_FACTOR)


def _numbers(name: str, given: object, bounds: Callable[[str], tuple[float, float]]) -> dict[str, float]:
    if not isinstance(given, dict):
        raise ValueError(f"{name!r} is an object of numbers by group")  # noqa: TRY004, as every other flaw of the file
    raw = cast("dict[str, object]", given)
    if unknown := sorted(set(raw) - set(GROUPS) - set(LANES)):
        raise ValueError(f"{name!r} has the unknown group {unknown[0]!r:.80}")
    return {group: _number(name, value, *bounds(group)) for group, value in raw.items()}


def _number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"a number of {name!r} is from {least:.3g} to {most:.3g}, not {value!r:.80}")
    return float(value)
