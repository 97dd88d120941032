"""Limits and budgets in bytes, by tier.

In: what the user wrote. Out: `Limits`. A limit must never be passed. A budget is a limit minus what
memfit does not control: `base_bytes` (interpreter, libraries) and `reserve_bytes` (what no trace
sees).

[Note: what a process takes]
Beside tensors a process grows in two stretches. Planning takes 15 to 30 MiB: pages of libraries'
code that tracing is the first to touch, and Python's own. It is over when a plan is chosen, so
that the base is measured then, and nobody has to guess it (`PLANNING_BYTES` is kept free where
nothing was planned). Steps take what is left: code of kernels that run for the first time,
rounding of the allocator, threads (`FIRST_STEP_BYTES`), kernels that oneDNN compiles and keeps, and
what a product takes from the C library while it runs, beside all that the allocator keeps mapped
(both in `TraceProfile.kernel_bytes`). These are counted as if they were there already, as they
usually are: a process may take 8 MiB or 1 % more than its predicted peak. What the BLAS and oneDNN
take when they first compute is made certain: they compute once before the base is measured. The
reserve is kept free beside all this, for what is not usual.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from memfit.core.errors import UsageError, shown
from memfit.core.tiers import Tier

# Conversion between bytes and text with units; seconds as text.
#
# In: integers of bytes, or a user's `"8 GiB"`. Out: integers of bytes, or text. Binary (KiB, MiB,
# GiB, TiB) and decimal (kB, MB, GB, TB) units are both read, and one letter (K, M, G, T) as docker,
# Slurm and systemd read it: binary. Only binary ones are written.

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
MOST_BYTES = (1 << 63) - 1
"""Largest size that is read: what a file can have.
"""
_LONGEST_TEXT = 200

_UNITS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB, "ki": KIB, "mi": MIB, "gi": GIB, "ti": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*$")


def parse_bytes(size: int | str) -> int:
    """Reads a size: an integer of bytes, or text such as `"1.25GiB"`, `"400 MB"`, `"8G"` (8 GiB).

    Args:
        size: bytes as an integer, or a number with a unit.

    Returns:
        Whole bytes, rounded down.

    Raises:
        UsageError: the size is negative, has an unknown unit or parts of a byte, or is no size at
            all.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):  # pyright: ignore[reportUnnecessaryIsInstance], users pass anything
        raise UsageError(f"a size is an integer of bytes or text such as '8GiB', not {shown(size)}")
    if isinstance(size, int):
        return _in_range(size, size)
    match = _PATTERN.match(size) if len(size) <= _LONGEST_TEXT else None
    if match is None or match.group(2).lower() not in _UNITS:
        raise UsageError(
            f"cannot read the size {shown(size)}: write a number and a unit, such as '8GiB', '512 MiB' or '10GB'"
        )
    number, unit = match.group(1), match.group(2).lower()
    whole, _, fraction = number.partition(".")
    if fraction.strip("0") and _UNITS[unit] == 1:
        raise UsageError(f"the size {size!r} is not a whole number of bytes: write its unit, such as '{number}GiB'")
    scale = _UNITS[unit]
    # Integer arithmetic: a float of 2**53 bytes and more would lose whole bytes.
    fraction_bytes = int(fraction) * scale // 10 ** len(fraction) if fraction else 0
    return _in_range(int(whole or "0") * scale + fraction_bytes, size)


def _in_range(nbytes: int, size: int | str) -> int:
    if nbytes < 0:
        raise UsageError(f"a size cannot be negative: {shown(size)}")
    if nbytes > MOST_BYTES:
        raise UsageError(
            f"the size {shown(size)} is more than any machine has: write at most {format_bytes(MOST_BYTES)}"
        )
    return nbytes


def format_bytes(size_bytes: int) -> str:
    """Writes bytes for a person: `"1.25 GiB"`, `"37.0 MiB"`, `"512 B"`."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    for scale, unit, digits in ((TIB, "TiB", 2), (GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if size >= scale:
            return f"{sign}{size / scale:.{digits}f} {unit}"
    return f"{sign}{size} B"


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Writes seconds for a person: `"0.0123 s"`, `"7.1 s"`, `"2979 s"`; with so many digits, or as
    many as whole seconds have.
    """
    return f"{seconds:.{digits}g} s" if abs(seconds) < 10**digits - 0.5 else f"{seconds:.0f} s"


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


# Of a process; see [Note: what a process takes]. Each thread beyond the first has buffers of its
# own.
RESERVE_BYTES = 16 * MIB
RESERVE_BYTES_PER_THREAD = 2 * MIB
FIRST_STEP_BYTES = 6 * MIB
# Workspaces that torch keeps for an accelerator's BLAS, in KiB by how an architecture's name
# begins: one for the thread of the forward, one for autograd's, so each counts twice (a T4 had 2).
# Source: torch of 2026, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize:
# ":4096:2:16:8", 32 MiB for compute capability 9 to 12; hipBLAS 32 MiB, 128 for gfx942 and gfx950.
BLAS_WORKSPACES_KIB = {"sm": 8320, "sm_9": 32768, "sm_1": 32768, "gfx": 32768, "gfx94": 131072, "gfx95": 131072}
# Measured: code and buffers of the BLAS, and of oneDNN for bf16, when they first compute; counted
# where that is still to come as the base is measured. The BLAS keeps a panel of the right factor,
# on an Intel processor 384 rows of at most 10,368 columns, on an AMD one half as much: by columns.
BLAS_COLUMNS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 10368)
LIBRARY_BYTES = (
    {"onednn": 10 * MIB}
    | {f"blas, {n} columns": 2 * MIB + 4 * 384 * n for n in BLAS_COLUMNS}
    | {f"workspaces, {kib} KiB": 2 * kib << 10 for kib in BLAS_WORKSPACES_KIB.values()}
)
PLANNING_BYTES = 48 * MIB
# See [Note: kernels that are kept] in `devices.compiled_kernels`.
KERNELS_KEPT = 64
# Measured: of a product in bf16, by each combination of shapes (0.55 to 0.61 MiB; 0.6 to 1.07 where
# the processor has AMX).
PRODUCT_KERNEL_BYTES = 600 << 10
TILED_PRODUCT_KERNEL_BYTES = 1 * MIB
# Measured on models of 8 to 150 MiB: what no prediction counts (alignment, 0-d counters, losses,
# slices of the batch, scratch of small kernels).
EMULATED_RESERVE_BYTES = 2 * MIB
# Not measured: torch's allocator holds segments of 2 and 20 MiB for each stream (of compute, of
# updates), the free parts of which count against its limit (48 MiB); 32 MiB are for libraries.
DEVICE_RESERVE_BYTES = 80 * MIB
_FOR_LIBRARIES_BYTES = 32 * MIB


def device_reserve_bytes(libraries: Iterable[str] = ()) -> int:
    """Returns what plans for an accelerator leave free beside tensors: more than
    `DEVICE_RESERVE_BYTES` where its libraries keep larger workspaces (`LIBRARY_BYTES`).
    """
    needed = sum(LIBRARY_BYTES[name] for name in libraries)
    return DEVICE_RESERVE_BYTES + max(0, needed - _FOR_LIBRARIES_BYTES)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that each tier may hold.

    Attributes:
        by_tier: limits of the device (without an accelerator: of this process as the operating
            system counts it), of host memory (pinned staging included), of files, and of any other
            tier. A tier that is not named has no limit.
    """

    by_tier: Mapping[Tier, int] = field(default_factory=dict[Tier, int])

    @classmethod
    def read(
        cls,
        device: int | str | None,
        host: int | str | None = None,
        disk: int | str | None = None,
        others: Mapping[Tier, int] = MappingProxyType({}),
    ) -> Limits:
        """Reads limits as a user writes them; see `units.parse_bytes`."""
        sizes = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk, **others}
        return cls(by_tier={tier: parse_bytes(size) for tier, size in sizes.items() if size is not None})

    def of(self, tier: Tier) -> int | None:
        """Returns the limit of a tier; None if it has none."""
        return self.by_tier.get(tier)

    @property
    def device_bytes(self) -> int | None:
        """The device's limit."""
        return self.of(Tier.DEVICE)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes that tensors may take under a limit: `limit_bytes - base_bytes - reserve_bytes`.

    Attributes:
        limit_bytes: limit of the device; None if there is none.
        base_bytes: in use before any tensor of the job. In a process: interpreter, libraries, what
            these usually take in a first step, and tensors of others; on a device: tensors of
            others.
        reserve_bytes: kept free for what no trace sees.
        others_bytes: tensors of others, which `base_bytes` includes.
    """

    limit_bytes: int | None
    base_bytes: int = 0
    reserve_bytes: int = 0
    others_bytes: int = 0

    @property
    def tensor_bytes(self) -> int | None:
        """Bytes that tensors may take; None without a limit; may be negative when the limit is
        below the base.
        """
        return None if self.limit_bytes is None else self.limit_bytes - self.base_bytes - self.reserve_bytes
