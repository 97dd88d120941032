"""A machine as numbers: what its tiers hold and how fast bytes and operations move.

In: a probe or a file. Out: `Hardware`, read by prediction and planning.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        update_elements_per_s: parameters an AdamW update passes in a second.
        codec_elements_per_s: elements of optimizer states that are decoded and encoded in a second (one core of a 2020s server: 2e8).
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
    bf16_flops_per_s: float | None = None
