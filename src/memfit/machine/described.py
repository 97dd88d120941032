"""A machine that plans are made for: this one, or one that is known by its description only.

In: a `Hardware` that somebody stated, or none, and a limit. Out: what `choose` asks of a machine,
its tiers and limits, and the budget of its device. Nothing is allocated on what is described.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from memfit import devices
from memfit.core.documents import parse_json, read_document, write_document
from memfit.core.errors import MemfitWarning, UsageError
from memfit.core.hardware import FILE_LIMIT_BYTES, Hardware
from memfit.core.limits import Budget, Limits, device_reserve_bytes, format_bytes
from memfit.core.profile import Profile
from memfit.core.tiers import Tier, is_processor
from memfit.machine.machine import Machine, device_of, open_machine
from memfit.step.predict import GROUPS, LANES, LARGEST_FACTOR, LARGEST_LINK_FACTOR, SMALLEST_FACTOR, calibrated


class PlannedMachine(Protocol):
    """A machine as the search for a plan sees it."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where bytes may rest, the device first."""
        ...

    @property
    def limits(self) -> Limits:
        """Limits by tier."""
        ...

    @property
    def counts_process(self) -> bool:
        """The device is a process, whose size varies between runs."""
        ...


@dataclass(frozen=True, kw_only=True)
class DescribedAccelerator:
    """An accelerator that need not be here, with nothing on it but the job.

    Not modelled: that other kernels than this processor's save other tensors for backward.
    """

    tiers: tuple[Tier, ...]
    limits: Limits
    counts_process: bool = False

    def budget(self, profile: Profile) -> Budget:
        """Returns what is left to tensors of a profile's step on the empty device."""
        reserve = device_reserve_bytes(profile.libraries)
        return Budget(limit_bytes=self.limits.device_bytes, base_bytes=0, reserve_bytes=reserve)


@dataclass(frozen=True, kw_only=True)
class PlannedFor:
    """A machine that plans are made for, and what is there before the job.

    Attributes:
        machine: its tiers and limits.
        budget: measures what is left to tensors of its device, once the model has been traced.
        load_bytes: held while weights move home; 0 where it is not known.
        here: it is this machine, which can be probed; None where a description is planned for.
    """

    machine: PlannedMachine
    budget: Callable[[Profile], Budget]
    load_bytes: int
    here: Machine | None


def plan_for(
    model: nn.Module,
    limit: int | str | None,
    hardware: Hardware | None,
    beside: Sequence[torch.Tensor],
    *,
    loads: bool,
    host_limit: int | str | None = None,
    disk_limit: int | str | None = None,
    is_emulated: bool = False,
    encoding_bytes: int = 0,
) -> PlannedFor:
    """Opens the machine that plans are made for.

    A described processor is a process like this one: what this one holds is its base, too. A
    described accelerator is empty; its limit is its capacity where none is given.

    Args:
        model: its weights may be without bytes.
        limit: of the device.
        hardware: the description; None: this machine.
        beside: as in `Machine.budget`.
        loads: how the model's weights come home is known, so that what that takes counts.
        host_limit: of host memory beside a device; None: what the machine has.
        disk_limit: of files; None likewise.
        is_emulated: as `fit(emulate_device=True)`.
        encoding_bytes: as in `Machine.load_bytes`.

    Raises:
        UsageError: the limit is more than the described device has.
    """
    wanted = Limits.read(limit, host_limit, disk_limit)
    if hardware is not None and not is_processor(hardware.device):
        machine = DescribedAccelerator(tiers=tuple(hardware.tiers), limits=_limits(wanted, hardware))
        return PlannedFor(machine=machine, budget=machine.budget, load_bytes=0, here=None)
    limits = wanted if hardware is None else _limits(wanted, hardware)
    device = device_of(model) if hardware is None else torch.device("cpu")
    opened = open_machine(device, limits, is_emulated=is_emulated)
    return PlannedFor(
        machine=opened,
        budget=lambda found: opened.planned_budget(
            model, beside, kernel_bytes=found.kernel_bytes, libraries=found.libraries
        ),
        load_bytes=opened.load_bytes(model, encoding_bytes=encoding_bytes) if loads else 0,
        here=opened if hardware is None else None,
    )


def _limits(given: Limits, hardware: Hardware) -> Limits:
    """The described capacities; limits that are given take their places, but for more than there
    is.
    """
    wanted = given.device_bytes
    if wanted is not None and wanted > hardware.device_bytes:
        raise UsageError(
            f"the limit of {format_bytes(wanted)} is more than {hardware.device} has ({format_bytes(hardware.device_bytes)}): give less, or another "
            f"capacity: --tiers device={format_bytes(wanted).replace(' ', '')}"
        )
    capacities = {tier: spec.nbytes for tier, spec in hardware.tiers.items()} | {Tier.DEVICE: hardware.device_bytes}
    return Limits(by_tier={tier: min(nbytes, given.by_tier.get(tier, nbytes)) for tier, nbytes in capacities.items()})


# Corrections of a machine's rates that runs have taught, kept beside the file of `memfit probe`.
#
# In: factors by group of classes, and of the disk, that a run's steps were measured to take, and
# how far whole steps were from their predictions. Out: a corrected `Hardware`, for the next run.
#
# [Note: self-correction]
# A job on a processor compares its first steps with their prediction, action by action
# (`job.comparing`), in seconds that its thread was on a processor. The refitted factors are
# averaged, as logarithms, with those of earlier runs, each weighted by the seconds that it rests on
# (earlier ones by at most ten times those of the new run, so that a changed machine is followed).
# They belong to one measurement of `memfit probe`: a new one begins without any.
# `MEMFIT_CORRECTIONS=off` neither reads nor writes them, and a hardware description that is given
# to `fit` is taken as it is.

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
        factors: by group of classes and lane of the disk (`step.predict.GROUPS`,
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


# The machine as `memfit probe` measured it, kept for later runs.
#
# In: a device. Out: a file in the user's cache directory (`$MEMFIT_HARDWARE_CACHE`, or
# `$XDG_CACHE_HOME/memfit/hardware`, or `~/.cache/memfit/hardware`), by the identity of what it
# describes: another processor, another number of threads or another torch has rates of its own, and
# finds no file. Beside it stands what runs have taught (`machine.described`).

_PROBE_VERSION = "3"  # another way of measuring gives other figures


def identity_of(device: torch.device) -> Mapping[str, str]:
    """Returns what a device's rates depend on, by name."""
    is_accelerator = devices.is_accelerator(device)
    return {
        "probe": _PROBE_VERSION,
        "device": devices.of(device).name(device) if is_accelerator else "cpu",
        "processor": _processor_name(),
        "processors": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }


def saved_path(identity: Mapping[str, str]) -> Path:
    """Returns the place of the file of that identity."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(os.environ.get("MEMFIT_HARDWARE_CACHE") or cache / "memfit" / "hardware")
    digest = hashlib.sha256(json.dumps(dict(sorted(identity.items()))).encode()).hexdigest()[:16]
    return directory / f"{digest}.json"


def load_saved(device: torch.device) -> Hardware | None:
    """Reads the file of this device, if there is one, with what runs have taught since; see
    `machine.described`. A file that cannot be read is told by a warning and not used.
    """
    found = load_measured(device)
    if found is None or not corrections_are_on():
        return found
    return load_correction(found, correction_path(saved_path(identity_of(device)))).applied(found)


def load_measured(device: torch.device) -> Hardware | None:
    """Reads the file of this device as it was measured."""
    identity = identity_of(device)
    path = saved_path(identity)
    if not path.is_file():
        return None
    try:
        found = Hardware.from_json(read_document(path, limit_bytes=FILE_LIMIT_BYTES))
    except (OSError, ValueError, UsageError) as error:
        warnings.warn(
            f"what memfit probe measured cannot be read ({error}), so the machine is probed for half a second instead: "
            f"run memfit probe again, or remove {path}",
            MemfitWarning,
            stacklevel=2,
        )
        return None
    return found if all(found.origin.get(key) == value for key, value in identity.items()) else None


def save(hardware: Hardware, path: Path) -> None:
    """Writes a file whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_document(path, hardware.to_json() + "\n")
    except OSError as error:
        raise UsageError(f"the hardware file cannot be written to {path}: {error.strerror}; name another") from error


def disk_name(directory: Path) -> str:
    """Returns a name of the file system that a directory is on, equal while it is mounted."""
    found = directory.stat()
    return f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"


def _processor_name() -> str:
    """The processor's name as the kernel gives it; its architecture where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return os.uname().machine
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine
