"""Machines by name, by file and by text: descriptions of common devices, and sizes of their tiers.

In: what a person writes for `hardware=`, `--hardware` and `--tiers`. Out: `Hardware`.

[Note: from a data sheet]
A data sheet states peaks; `Hardware` holds what a step reaches. One factor leads from the one to
the other, `utilisation` of the file, 0.5 in all that are shipped: large trainings report 38 to 46 %
of the peak in bf16 for the whole step (Grattafiori et al. 2024, "The Llama 3 Herd of Models", table
4; Chowdhery et al. 2022, "PaLM", section 4.1), and their matrix products alone reach more. It
multiplies matrix products, and the memory's bandwidth for updates and encoded states. fp32 is
priced without TF32, as torch multiplies unless it is told otherwise. Nothing of it was measured by
us; host and disk are assumptions, to be replaced by `--tiers` or in a copy of the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from memfit.core.documents import read_document
from memfit.core.errors import UsageError
from memfit.core.hardware import FILE_LIMIT_BYTES, Hardware
from memfit.core.tiers import Tier
from memfit.core.units import parse_bytes

_DIRECTORY = Path(__file__).with_name("machine_files")


def machine_names() -> list[str]:
    """Returns the names that descriptions are shipped under, in order."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.json"))


def read_hardware(hardware: Hardware | str | Path | None) -> Hardware | None:
    """Reads a machine from its name, its JSON text or its file; a `Hardware` and None stay as they
    are.

    A file that has a machine's name is meant by a path: `./h200`, or `Path("h200")`.

    Raises:
        UsageError: an unknown name, with the nearest ones; not a machine; or a file that cannot be
            read.
    """
    if hardware is None or isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance], users pass anything
        raise UsageError(
            f"hardware must be a Hardware, a machine's name, its JSON text or a path to it, not {type(hardware).__name__}"
        )
    if isinstance(hardware, str) and hardware.lstrip().startswith("{"):
        return Hardware.from_json(hardware)
    path = Path(hardware)
    if isinstance(hardware, str) and (known := _known(hardware)) is not None:
        path = _DIRECTORY / f"{known}.json"
    try:
        text = read_document(path, limit_bytes=FILE_LIMIT_BYTES)
    except (OSError, ValueError) as error:
        if isinstance(hardware, Path) or "/" in hardware or hardware.endswith(".json"):
            raise UsageError(f"the hardware file {str(hardware)[:200]!r} cannot be read: {error}") from error
        raise UsageError(f"{_unknown(hardware)} As a file it cannot be read ({error})") from error
    return Hardware.from_json(text)


def read_tiers(text: str) -> Mapping[Tier, int]:
    """Reads capacities as `device=141GiB,host=128GiB,disk=64GiB`.

    Raises:
        UsageError: another form, a size that cannot be read, or a tier named twice.
    """
    sizes: dict[Tier, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals:
            raise UsageError(f"{part.strip()!r:.80} of the tiers is not TIER=SIZE, such as 'device=141GiB'")
        try:
            tier = Tier(name.strip())
        except ValueError as error:
            raise UsageError(str(error)) from None
        if tier in sizes:
            raise UsageError(f"the tier {str(tier)!r} has two sizes")
        sizes[tier] = parse_bytes(size)
    return sizes


def _known(name: str) -> str | None:
    """The shipped name that a person means by `H200`, `rtx 4090` or `RTX-4090`."""
    return {_plain(known): known for known in machine_names()}.get(_plain(name))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c not in "-_ ")


def _unknown(name: str) -> str:
    """Says which machines have names like this one, and which there are."""
    names, wanted = {_plain(known): known for known in machine_names()}, _plain(name)
    # "h100" lacks its form; by letters alone "h200" would be nearer.
    longer = [plain for plain in names if wanted and wanted in plain]
    near = [names[plain] for plain in longer or difflib.get_close_matches(wanted, list(names), n=3, cutoff=0.5)]
    guess = f": did you mean {' or '.join(map(repr, near))}?" if near else "."
    return f"no machine is called {name!r:.80}{guess} memfit has descriptions of {', '.join(names.values())}."
