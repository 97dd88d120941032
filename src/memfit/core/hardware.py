"""A machine as numbers: what its tiers hold and how fast bytes and operations move.

In: a probe or a file. Out: `Hardware`, read by prediction and planning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, cast

from memfit.core.documents import parse_json
from memfit.core.errors import UsageError

HARDWARE_FORMAT = 1
FILE_LIMIT_BYTES = 1 << 20
"""A longer file describes no machine."""
_MOST_BYTES = (1 << 63) - 1
_SLOWEST, _FASTEST = 1e-6, 1e24
"""Of what happens in a second: beyond that, predicted seconds would be infinite or nothing."""
_LONGEST_NAME = 200
_LINKS = ("disk", "host")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between the device and a tier, in bytes a second each way, alone."""

    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device and its tiers.

    Attributes:
        device: "cpu" or the accelerator's name.
        flops_per_s: of matrix products in the compute dtype, as measured or stated.
        device_bytes, host_bytes, disk_bytes: capacities; host_bytes is None where the device is the host.
        host, disk: links; host is None where the device is the host.
        bf16_flops_per_s: the same in bf16; None: as flops_per_s.
        update_elements_per_s: parameters that an AdamW update on the device passes in a second.
        host_update_elements_per_s: the same on the host's cores, beside an accelerator; not asked for where the processor is the device.
        codec_elements_per_s: elements of optimizer states that the device decodes and encodes in a second; probed where such formats are allowed (one
            core of a 2020s server: 2e8).
        host_codec_elements_per_s: the same on the host's cores, beside an accelerator.
    """

    device: str
    flops_per_s: float
    device_bytes: int
    disk: Link
    disk_bytes: int
    host: Link | None = None
    host_bytes: int | None = None
    update_elements_per_s: float = 3e8
    codec_elements_per_s: float = 2e8
    host_update_elements_per_s: float = 3e8
    host_codec_elements_per_s: float = 2e8
    bf16_flops_per_s: float | None = None

    def to_json(self) -> str:
        """The machine as indented JSON; `Hardware.from_json` gives an equal one."""
        return json.dumps({"format": HARDWARE_FORMAT, **asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Hardware:
        """Reads a machine. Fields with defaults may be missing.

        Raises:
            UsageError: not JSON, another format, an unknown or missing field, or a value that the field does not take; the message names it.
        """
        try:
            read: object = parse_json(text)
        except ValueError as error:
            raise UsageError(f"the hardware file is not JSON that can be read: {str(error)[:200]}") from error
        raw = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
        if type(raw.get("format")) is not int or raw["format"] != HARDWARE_FORMAT:
            raise UsageError(f'a hardware file is a JSON object that says "format": {HARDWARE_FORMAT}')
        values = _fields(cls, "the hardware file", {key: value for key, value in raw.items() if key != "format"})
        for name in _LINKS:
            link = values.get(name)
            if link is None:
                if name == "disk":
                    raise UsageError("the hardware file has no 'disk', the link to the disk that homes would use")
                continue
            if not isinstance(link, dict):
                raise UsageError(
                    f"{name!r} of the hardware file is no link: an object with read_bytes_per_s and write_bytes_per_s"
                )
            rates = _fields(Link, f"{name!r} of the hardware file", cast("dict[str, Any]", link))
            values[name] = Link(**{key: _rate(key, value) for key, value in rates.items()})
        for key, value in values.items():
            if key == "device":
                if not isinstance(value, str) or not value or len(value) > _LONGEST_NAME or not value.isprintable():
                    raise UsageError(f"'device' of the hardware file is a name, such as \"cpu\", not {value!r:.80}")
            elif key.endswith("_per_s"):
                values[key] = None if value is None and key == "bf16_flops_per_s" else _rate(key, value)
            elif key.endswith("_bytes") and not (value is None and key == "host_bytes"):
                _check_bytes(key, value)
        if (values.get("host") is None) != (values.get("host_bytes") is None):
            raise UsageError("the hardware file has 'host' without 'host_bytes', or the other way round")
        return cls(**values)


def _fields(kind: type, what: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, by name; none unknown, none without a default missing."""
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(raw) - set(known)):
        raise UsageError(f"{what} has the unknown field {unknown[0]!r:.80}; it has {sorted(known)}")
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in raw]:
        raise UsageError(f"{what} has no {missing[0]!r}")
    return dict(raw)


def _rate(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _SLOWEST <= value <= _FASTEST:
        raise UsageError(
            f"{key!r} of the hardware file is a number from {_SLOWEST} to {_FASTEST} a second, not {value!r:.80}"
        )
    return float(value)


def _check_bytes(key: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= _MOST_BYTES:
        raise UsageError(f"{key!r} of the hardware file is a whole number of bytes from 0, not {value!r:.80}")
