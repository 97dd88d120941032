"""A machine as numbers: what its tiers hold and how fast bytes and operations move.

In: a probe or a file. Out: `Hardware`, read by prediction and planning.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from memfit.core.documents import parse_json, read_document
from memfit.core.errors import PlanError, UsageError
from memfit.core.limits import MOST_BYTES, parse_bytes
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import NETWORK, Tier, is_processor
from memfit.core.work_kinds import SMALLER_FIRST, WorkKind

# Rates of classes of work where a machine's description does not state them.
#
# In: what a `Hardware` states in any case (matrix products a second, updates), and its data sheet.
# Out: a `Rate` for each `WorkKind`. Measured ones (`memfit probe`) stand in `Hardware.rates` and
# win.
#
# [Note: derived rates]
# Ratios to matrix products and to memory's bandwidth, as measured on a server's core with AVX-512
# for processors, and assumed for accelerators. They say what a class costs roughly; their spread
# says so. What an accelerator's update does with bf16 weights beside the optimizer's class is
# derived from the bytes that its operations move.

DERIVED_SPREAD = 0.3

SPLIT_ELEMENTS_PER_S = 1.3e9
"""Joining a master from its weight and the rest, and splitting it again, parameters a second on one
core, without launching (measured: 512 Ki in 0.2 ms on a server's core with AVX-512, in 0.55 ms on
one with AVX2).
"""
ROUNDED_ELEMENTS_PER_S = 4.4e8
"""Rounding weights that have no masters stochastically, likewise (0.55 and 2.6 ms).
"""
SPLIT_BYTES = 30.0
"""Bytes that the operations of joining a master, splitting it again and rounding its weight read
and write.
"""
ROUNDED_BYTES = 116.0
"""Bytes that the operations of drawing a parameter's noise and rounding it read and write.
"""


class Rate(NamedTuple):
    """Amount a second, and the share by which measurements of it differed."""

    per_s: float
    spread: float = 0.0


# By class: its share of the rate of products, on a processor and on an accelerator.
_OF_PRODUCTS: Mapping[str, tuple[float, float]] = {
    "products-256": (1.0, 1.0),
    "products-128": (1.0, 1.0),
    "products-64": (0.9, 1.0),
    "products-16": (0.85, 0.5),
    "products-4": (0.5, 0.15),
    "batched-products": (0.65, 0.6),
    "attention": (0.75, 0.6),
    "attention-backward": (0.6, 0.5),
    "convolution": (0.6, 0.6),
    "convolution-backward": (0.5, 0.5),
    "narrow-convolution": (0.35, 0.4),
    "narrow-convolution-backward": (0.3, 0.3),
}
_WHATEVER_DTYPE = {"convolution-backward", "narrow-convolution", "narrow-convolution-backward"}
# By class: amounts for each byte a second of memory. Elements: as many bytes each as the divisor.
_OF_MEMORY: Mapping[WorkKind, tuple[float, float]] = {
    WorkKind.PRODUCTS_1: (0.5, 0.4),
    WorkKind.HALF_PRODUCTS_1: (0.5, 0.8),
    WorkKind.GROUPED_CONVOLUTION: (0.5, 1.0),
    WorkKind.STREAMED: (1.0, 1.0),
    WorkKind.STREAMED_LARGE: (0.8, 1.0),
    WorkKind.REDUCED: (0.7, 1.0),
    WorkKind.TRANSPOSED: (0.3, 0.6),
    WorkKind.GATHERED: (0.2, 0.4),
    WorkKind.HALF_ATTENTION_ROWS: (1 / 80_000, 1 / 1_000),
    # A processor converts; an accelerator reads two of them and writes one.
    WorkKind.HALF_ELEMENTS: (1 / 20, 1 / 6),
    WorkKind.FUNCTIONS: (1 / 18, 1 / 8),
    WorkKind.SLOW_FUNCTIONS: (1 / 60, 1 / 8),
    WorkKind.NORMALIZED: (1 / 22, 1 / 8),
    WorkKind.NORMALIZED_BACKWARD: (1 / 40, 1 / 16),
    WorkKind.WINDOWED: (1 / 120, 1 / 8),
    WorkKind.DRAWN: (1 / 180, 1 / 8),
    WorkKind.FRESH: (1 / 12, 1.0),
}
_FLOPS_PER_BYTE = 3.3, 14.0
_OPERATIONS_PER_S = 2e5, 1.5e5
# Python's part of a step, in operations that take as long (measured by `memfit probe` on a server's
# core, where an operation took 5.8 us).
_OPERATIONS_OF: Mapping[WorkKind, float] = {
    WorkKind.PYTHON: 0.25,
    WorkKind.NODES: 0.5,
    WorkKind.WATCHED: 5.0,
    WorkKind.SELECTED: 3.0,
    WorkKind.CALLS: 17.0,
    WorkKind.FRAMES: 35.0,
    WorkKind.SWITCHES: 40.0,
    WorkKind.STEPS: 400.0,
    WorkKind.VISITS: 28.0,
    WorkKind.VISITED: 7.0,
    WorkKind.PIECES: 30.0,
    WorkKind.PIECE_TRANSFERS: 12.0,
}


def rates_of(hardware: Hardware) -> Mapping[WorkKind, Rate]:
    """Returns the rate of each class on the device. See [Note: derived rates]."""
    found = _derived(hardware)
    found.update(hardware.rates)
    calls = found[WorkKind.OPERATIONS]
    for kind, operations in _OPERATIONS_OF.items():
        if kind not in hardware.rates:
            found[kind] = Rate(calls.per_s / operations, DERIVED_SPREAD)
    return found


def host_rates_of(hardware: Hardware) -> Mapping[WorkKind, Rate]:
    """Returns the rates of updates on the host's cores, beside an accelerator."""
    # Python's part is the same on either processor.
    beside = rates_of(hardware)
    return {
        WorkKind.UPDATED: Rate(hardware.host_update_elements_per_s),
        WorkKind.PIECES: beside[WorkKind.PIECES],
        WorkKind.PIECE_TRANSFERS: beside[WorkKind.PIECE_TRANSFERS],
        WorkKind.ENCODED: Rate(hardware.host_codec_elements_per_s),
        WorkKind.SPLIT: Rate(hardware.host_split_elements_per_s),
        WorkKind.ROUNDED: Rate(hardware.host_rounded_elements_per_s),
    }


def _derived(hardware: Hardware) -> dict[WorkKind, Rate]:
    column = 0 if is_processor(hardware.device) else 1
    products = hardware.flops_per_s
    half = hardware.bf16_flops_per_s or products
    sheet = hardware.datasheet
    memory = products / _FLOPS_PER_BYTE[column] if sheet is None else sheet.memory_bytes_per_s * sheet.utilisation
    found = {WorkKind.FLOPS: Rate(products)}
    for name, shares in _OF_PRODUCTS.items():
        found[WorkKind(name)] = Rate(products * shares[column], DERIVED_SPREAD)
        if name not in _WHATEVER_DTYPE:
            found[WorkKind(f"bf16-{name}")] = Rate(half * shares[column], DERIVED_SPREAD)
    found[WorkKind.FP16] = Rate(half * 0.8, DERIVED_SPREAD)
    for kind, shares in _OF_MEMORY.items():
        found[kind] = Rate(memory * shares[column], DERIVED_SPREAD)
    found[WorkKind.OPERATIONS] = Rate(_OPERATIONS_PER_S[column], DERIVED_SPREAD)
    found[WorkKind.UPDATED] = Rate(hardware.update_elements_per_s)
    found[WorkKind.ENCODED] = Rate(hardware.codec_elements_per_s)
    is_beside = not is_processor(hardware.device)
    split_per_s = memory / SPLIT_BYTES if is_beside else SPLIT_ELEMENTS_PER_S
    rounded_per_s = memory / ROUNDED_BYTES if is_beside else ROUNDED_ELEMENTS_PER_S
    found[WorkKind.SPLIT] = Rate(split_per_s, DERIVED_SPREAD)
    found[WorkKind.ROUNDED] = Rate(rounded_per_s, DERIVED_SPREAD)
    return found


def in_dtype(hardware: Hardware, compute: ComputeDtype) -> Hardware:
    """Returns the machine with its speed of matrix products in a plan's dtype."""
    if compute is ComputeDtype.GIVEN:
        return hardware
    flops_per_s = hardware.bf16_flops_per_s or hardware.flops_per_s
    # What is derived from products in the given dtype, memory's rates for instance, stays as it is.
    rates = {**rates_of(hardware), WorkKind.FLOPS: Rate(flops_per_s)}
    return replace(hardware, flops_per_s=flops_per_s, rates=rates)


def at_rates_of_smaller(hardware: Hardware) -> Hardware:
    """Returns the machine with each class of work at least as fast as those that the same operation
    is of on fewer rows: with smaller sizes, or within caches.
    """
    rates = dict(rates_of(hardware))
    for smaller_first in SMALLER_FIRST:
        for smaller, kind in pairwise(smaller_first):
            rates[kind] = max(rates[kind], rates[smaller])
    return replace(hardware, rates=rates)


DATA_AXIS = "data"
"""Axis of ranks that have rows of their own, in `Hardware.network`."""
HARDWARE_FORMAT = 1
FILE_LIMIT_BYTES = 1 << 20
"""Maximum size of a hardware file.
"""
_SLOWEST, _FASTEST = 1e-6, 1e24
"""Accepted range of rates a second: outside of it, predicted seconds would be infinite or zero.
"""
_LEAST_SHARE = 0.01
STEP_SPREAD = 0.3
"""`Hardware.step_spread` where no runs say it: what `benchmarks/clock.py` found, whose cases were
drawn apart from those that the classes of work were made with.
"""
_LONGEST_NAME = 200
_LONGEST_SOURCE = 1000


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """Peaks of a device as its vendor states them, and how rates of a step were made from them.

    Read by people; plans are priced with the rates of `Hardware` alone.

    Attributes:
        note: says who measured what.
        utilisation: the share of a peak that a step is taken to reach.
        memory_bytes: of the device.
        memory_bytes_per_s: of the device's own memory.
        fp32_flops_per_s: dense matrix products, without TF32.
        tf32_flops_per_s: dense, like the two below; None: the device has no such products, or they
            are no faster than fp32.
        bf16_flops_per_s: with sums in fp32.
        fp16_flops_per_s: with sums in fp32.
        pcie_generation: of the link to the host.
        sources: where each of these is stated, by name.
    """

    note: str
    utilisation: float
    memory_bytes: int
    memory_bytes_per_s: float
    fp32_flops_per_s: float
    tf32_flops_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None
    pcie_generation: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between the device and a tier: bytes a second in each direction.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: with no other traffic.
        both_read_bytes_per_s, both_write_bytes_per_s: each while the other runs; None: neither
            slows the other.
        busy_read_bytes_per_s, busy_write_bytes_per_s: while the device computes; None: as without.
        compute_share: the part of its speed at which the device computes while the link is in use.
        spread: the share by which measurements differed.
        latency_s: seconds that each transfer takes beside its bytes.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_read_bytes_per_s: float | None = None
    both_write_bytes_per_s: float | None = None
    busy_read_bytes_per_s: float | None = None
    busy_write_bytes_per_s: float | None = None
    compute_share: float = 1.0
    spread: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LinkTraffic:
    """Transfers of one direction of a link.

    Attributes:
        nbytes: that went.
        seconds: that they took: copies one after the other, of files while any was under way.
    """

    nbytes: int = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, seconds: float) -> LinkTraffic:
        """Returns the sum with more transfers."""
        return LinkTraffic(nbytes=self.nbytes + nbytes, seconds=self.seconds + seconds)

    def since(self, before: LinkTraffic) -> LinkTraffic:
        """Returns what came since an earlier moment of the same counter."""
        return LinkTraffic(nbytes=self.nbytes - before.nbytes, seconds=self.seconds - before.seconds)


@dataclass(frozen=True, kw_only=True)
class TierSpec:
    """A tier of a machine.

    Attributes:
        nbytes: its capacity.
        link: the way between the device and it; None for the device itself.
    """

    nbytes: int
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device and its tiers.

    Attributes:
        device: "cpu" or the accelerator's name.
        flops_per_s: of matrix products in the compute dtype, as measured or stated.
        tiers: capacity and link of each tier. The device and the disk are always there, host memory
            only beside an accelerator (or an emulated one).
        bf16_flops_per_s: the same in bf16; None: equal to flops_per_s.
        update_elements_per_s: elements of parameters that AdamW on the device updates in a second.
        host_update_elements_per_s: the same on the host's cores, beside an accelerator; unused
            where the processor is the device.
        codec_elements_per_s: elements of optimizer states that the device decodes and encodes in a
            second; probed where such formats are allowed (one core of a 2020s server: 2e8).
        host_codec_elements_per_s: the same on the host's cores, beside an accelerator.
        host_split_elements_per_s, host_rounded_elements_per_s: parameters whose masters the host's
            cores join and split, and that they round stochastically; the device's are in `rates`.
        datasheet: peaks that the rates were made from; None where they were measured.
        rates: of classes of work on the device, as measured; a class that is missing has a derived
            one (`core.hardware`).
        network: links between ranks, by the axis that they lie on ("data"): "read" is what a rank
            receives.
        on_chip: bytes of memories on the chip, in which no plan places anything, by a name for
            people: caches, registers, shared memory; of the whole chip but where a name says else.
        is_unified: the accelerator's memory is the host's. Told, not used: plans price copies
            between them all the same.
        architecture: of an accelerator's chip, as its compiler names it ("sm_90", "gfx942"), which
            says what kernels take beside tensors (`trace.workspaces`); "": unknown,
            and counted as NVIDIA's newest.
        step_spread: share by which nine of ten steps were nearer to their predicted seconds than,
            beside the spreads of rates.
        origin: what was measured, when and with what, where it was: for people, and by which a
            saved file is known to be this machine's.
        sources: where each figure comes from, by the name of its field in a file.
    """

    device: str
    flops_per_s: float
    tiers: Mapping[Tier, TierSpec]
    update_elements_per_s: float = 3e8
    codec_elements_per_s: float = 2e8
    host_update_elements_per_s: float = 3e8
    host_codec_elements_per_s: float = 2e8
    host_split_elements_per_s: float = SPLIT_ELEMENTS_PER_S
    host_rounded_elements_per_s: float = ROUNDED_ELEMENTS_PER_S
    bf16_flops_per_s: float | None = None
    datasheet: DataSheet | None = None
    rates: Mapping[WorkKind, Rate] = field(default_factory=dict[WorkKind, Rate])
    network: Mapping[str, Link] = field(default_factory=dict[str, Link])
    on_chip: Mapping[str, int] = field(default_factory=dict[str, int])
    is_unified: bool = False
    architecture: str = ""
    step_spread: float = STEP_SPREAD
    origin: Mapping[str, str] = field(default_factory=dict[str, str])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def device_bytes(self) -> int:
        """Capacity of the device."""
        return self.tiers[Tier.DEVICE].nbytes

    @property
    def away(self) -> Mapping[Tier, TierSpec]:
        """The tiers beside the device."""
        return {tier: spec for tier, spec in self.tiers.items() if not tier.traits.is_device}

    def link(self, tier: Tier) -> Link:
        """Returns the link between the device and a tier, or between ranks.

        Raises:
            PlanError: the machine has no such tier, or its links between ranks are not known.
        """
        if tier is NETWORK:
            if DATA_AXIS not in self.network:
                raise PlanError(
                    f"the plan is for several ranks, and nothing is known of the links between those of {self.device!r}: say "
                    '"network": {"data": {"read_bytes_per_s": ..., "write_bytes_per_s": ...}} in the hardware file'
                )
            return self.network[DATA_AXIS]
        spec = self.tiers.get(tier)
        if spec is None or spec.link is None:
            raise PlanError(
                f"the plan uses the tier {str(tier)!r}, which this machine does not have beside its device; it has {[*map(str, self.away)]}"
                + (" (without a GPU the device is the host)" if tier is Tier.HOST else "")
            )
        return spec.link

    def with_capacities(self, sizes: Mapping[Tier, int]) -> Hardware:
        """Returns the same machine with other capacities.

        Raises:
            UsageError: a tier that the machine does not have, or a capacity of 0 where a machine
                cannot have it.
        """
        for tier, nbytes in sizes.items():
            if tier not in self.tiers:
                raise UsageError(
                    f"{self.device} has no tier {str(tier)!r}: there is no link to it to price transfers by. It has "
                    f"{[*map(str, self.tiers)]}; a hardware file can say '{tier}_bytes' and {str(tier)!r}, its link"
                )
            _check_bytes(f"{tier}_bytes", nbytes, may_be_none=tier is Tier.DISK)
        tiers = {tier: replace(spec, nbytes=sizes.get(tier, spec.nbytes)) for tier, spec in self.tiers.items()}
        stated = {f"{tier}_bytes": "stated in place of the description's" for tier in sizes}
        return replace(self, tiers=tiers, sources={**self.sources, **stated})

    def to_json(self) -> str:
        """Returns indented JSON that `Hardware.from_json` reads. A tier `x` has two fields:
        `x_bytes`, its capacity, and `x`, its link.
        """
        rest = {name: value for name, value in asdict(self).items() if name not in ("tiers", "rates")}
        for name in ("network", "on_chip", "is_unified", "architecture"):
            if not rest[name]:
                del rest[name]
        rest["rates"] = {str(kind): rate._asdict() for kind, rate in self.rates.items()}
        for tier, spec in self.tiers.items():
            rest[f"{tier}_bytes"] = spec.nbytes
            if spec.link is not None:
                rest[tier] = asdict(spec.link)
        return json.dumps({"format": HARDWARE_FORMAT, **rest}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Hardware:
        """Reads the JSON that `to_json` writes. Fields with defaults may be missing.

        Raises:
            UsageError: the text is not JSON or of another format, a field is unknown or missing, or
                a value is invalid; the message names it.
        """
        try:
            read: object = parse_json(text)
        except ValueError as error:
            raise UsageError(f"the hardware file is not JSON that can be read: {str(error)[:200]}") from error
        raw = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
        if type(raw.get("format")) is not int or raw["format"] != HARDWARE_FORMAT:
            said = f"; this one says {raw['format']!r:.80}" if "format" in raw else ""
            raise UsageError(f'a hardware file is a JSON object that says "format": {HARDWARE_FORMAT}{said}')
        tiers = {name.removesuffix("_bytes") for name in raw if name.endswith("_bytes")} | {"device", "disk"}
        own = {name for tier in tiers for name in (tier if tier != "device" else "", f"{tier}_bytes")}
        _check_tiers(raw, own)
        given = {k: v for k, v in raw.items() if k != "format" and k not in own}
        values = _fields(cls, "the hardware file", given, beside=own - {""})
        for key, value in values.items():
            if key == "device":
                if not isinstance(value, str) or not value or len(value) > _LONGEST_NAME or not value.isprintable():
                    raise UsageError(f"'device' of the hardware file is a name, such as \"cpu\", not {value!r:.80}")
            elif key == "architecture":
                values[key] = _text("'architecture' of the hardware file", value)
            elif key == "datasheet":
                values[key] = None if value is None else _datasheet(value)
            elif key in ("sources", "origin"):
                values[key] = _sources(f"{key!r} of the hardware file", value)
            elif key == "rates":
                values[key] = _rates(value)
            elif key == "on_chip":
                values[key] = _on_chip(value)
            elif key == "is_unified":
                if not isinstance(value, bool):
                    raise UsageError(f"'is_unified' of the hardware file is true or false, not {value!r:.80}")
            elif key == "network":
                values[key] = _network(value)
            elif key == "step_spread":
                values[key] = _share(key, value)
            else:
                values[key] = None if value is None and key == "bf16_flops_per_s" else _rate(key, value)
        return cls(**values, tiers={tier: spec for name in sorted(tiers) for tier, spec in _tier(name, raw)})


def _check_tiers(raw: Mapping[str, Any], own: Collection[str]) -> None:
    """Checks that each link has its tier's capacity, and that a processor has no host beside it."""
    for name, value in raw.items():
        if name not in own and isinstance(value, dict) and {"read_bytes_per_s", "write_bytes_per_s"} & {*value}:
            raise UsageError(
                f"the hardware file has no '{name:.80}_bytes', the capacity of the tier with the link {name!r:.80}"
            )
    has_host = raw.get("host") is not None and raw.get("host_bytes") is not None
    if raw.get("device") == "cpu" and has_host:
        raise UsageError(
            "the hardware file's device is 'cpu', whose memory is the device's: it has no tier 'host' beside it. Leave out "
            "'host' and 'host_bytes', and say all memory in 'device_bytes'; or name the accelerator in 'device'"
        )


def _tier(name: str, raw: Mapping[str, Any]) -> Iterator[tuple[Tier, TierSpec]]:
    """Yields a tier of a hardware file; nothing if both of its fields are null."""
    try:
        tier = Tier(name)
    except ValueError as error:
        raise UsageError(f"'{name:.80}_bytes' of the hardware file: {error}") from None
    if tier.traits.is_device:
        yield tier, TierSpec(nbytes=_bytes(f"{name}_bytes", raw))
        return
    given, capacity = raw.get(name), raw.get(f"{name}_bytes")
    if given is None and capacity is None and tier is not Tier.DISK:
        return
    if given is None:
        raise UsageError(f"the hardware file has no {name!r}, the link to the tier whose capacity is '{name}_bytes'")
    if not isinstance(given, dict):
        raise UsageError(
            f"{name!r} of the hardware file is no link: an object with read_bytes_per_s and write_bytes_per_s"
        )
    link = _link(f"{name!r} of the hardware file", cast("dict[str, Any]", given))
    yield tier, TierSpec(nbytes=_bytes(f"{name}_bytes", raw), link=link)


def _link(what: str, given: Mapping[str, Any]) -> Link:
    rates = _fields(Link, what, given)
    return Link(**{key: _link_figure(key, value) for key, value in rates.items()})


def _network(given: object) -> dict[str, Link]:
    """Reads the links between ranks."""
    what = "'network' of the hardware file"
    found: dict[str, Link] = {}
    for axis, link in (cast("dict[str, object]", given) if isinstance(given, dict) else {"": None}).items():
        if not isinstance(link, dict):
            raise UsageError(
                f'{what} is an object of links by axis, such as {{"{DATA_AXIS}": {{...}}}}, not {given!r:.80}'
            )
        if axis != DATA_AXIS:
            raise UsageError(f"{what} has the unknown axis {axis!r:.80}; there is {DATA_AXIS!r}")
        found[axis] = _link(f"{axis!r} of {what}", cast("dict[str, Any]", link))
    return found


def _on_chip(given: object) -> dict[str, int]:
    """Reads bytes of memories on the chip."""
    if not isinstance(given, dict):
        raise UsageError(f"'on_chip' of the hardware file is an object of bytes by name, not {given!r:.80}")
    read = cast("dict[str, object]", given)
    return {
        _text("a name in 'on_chip'", name): _check_bytes(f"{name:.80} in on_chip", value, may_be_none=False)
        for name, value in read.items()
    }


def _fields(kind: type, what: str, raw: Mapping[str, Any], beside: Collection[str] = ()) -> dict[str, Any]:
    """Reads the fields of a dataclass by name, and checks that none is unknown and none without a
    default is missing; `beside` has the names that are read elsewhere.
    """
    known = {one.name: one for one in fields(kind) if one.name != "tiers"}
    if unknown := sorted(set(raw) - set(known)):
        every = sorted({*known, *beside})
        near = difflib.get_close_matches(unknown[0], every, n=1)
        guess = f": did you mean {near[0]!r}?" if near else ";"
        raise UsageError(f"{what} has the unknown field {unknown[0]!r:.80}{guess} it has {every}")
    needed = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    if missing := [name for name in needed if name not in raw]:
        raise UsageError(f"{what} has no {missing[0]!r}")
    return dict(raw)


def _rate(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _SLOWEST <= value <= _FASTEST:
        raise UsageError(
            f"{key!r} of the hardware file is a number from {_SLOWEST} to {_FASTEST} a second, not {value!r:.80}"
        )
    return float(value)


def _share(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"{key!r} of the hardware file is a share from 0 to 1, not {value!r:.80}")
    return float(value)


def _link_figure(key: str, value: object) -> Any:
    if key == "spread":
        return _share(key, value)
    if key == "latency_s":
        return _share(key, value)  # no link takes a second to answer
    if key == "compute_share":
        return max(_share(key, value), _LEAST_SHARE)
    return None if value is None and key not in ("read_bytes_per_s", "write_bytes_per_s") else _rate(key, value)


def _rates(given: object) -> dict[WorkKind, Rate]:
    """Reads the rates of classes of work."""
    if not isinstance(given, dict):
        raise UsageError(f"'rates' of the hardware file is an object of rates by class, not {given!r:.80}")
    found: dict[WorkKind, Rate] = {}
    for name, raw in cast("dict[str, Any]", given).items():
        try:
            kind = WorkKind(name)
        except ValueError as error:
            raise UsageError(
                f"'rates' of the hardware file has the unknown class {name!r:.80}; there are {[*map(str, WorkKind)]}"
            ) from error
        if not isinstance(raw, dict) or not {"per_s"} <= {*cast("dict[str, Any]", raw)} <= {"per_s", "spread"}:
            raise UsageError(f"{name!r} of 'rates' is an object with per_s and spread, not {raw!r:.80}")
        rate = cast("dict[str, Any]", raw)
        found[kind] = Rate(_rate(name, rate["per_s"]), _share(f"spread of {name}", rate.get("spread", 0.0)))
    return found


def _bytes(key: str, raw: Mapping[str, Any]) -> int:
    if key not in raw:
        raise UsageError(f"the hardware file has no {key!r}")
    # A disk may be full, and is named in any case.
    return _check_bytes(key, raw[key], may_be_none=key == "disk_bytes")


def _check_bytes(key: str, value: object, *, may_be_none: bool) -> int:
    least = 0 if may_be_none else 1
    if type(value) is not int or not least <= value <= MOST_BYTES:
        told = f"{key!r} of the hardware file is a whole number of bytes from {least}, not {value!r:.80}"
        if isinstance(value, str):
            with suppress(UsageError):
                told += f": write {parse_bytes(value)}"
        raise UsageError(told)
    return value


def _datasheet(given: object) -> DataSheet:
    """Reads the data sheet of a hardware file."""
    what = "'datasheet' of the hardware file"
    if not isinstance(given, dict):
        raise UsageError(f"{what} is an object with the vendor's figures, not {given!r:.80}")
    values = _fields(DataSheet, what, cast("dict[str, Any]", given))
    optional = {one.name for one in fields(DataSheet) if one.default is None}
    for key, value in values.items():
        if value is None and key in optional:
            continue
        if key == "note":
            values[key] = _text(f"{key!r} of {what}", value)
        elif key == "sources":
            values[key] = _sources(f"'sources' of {what}", value)
        elif key == "memory_bytes":
            _check_bytes(key, value, may_be_none=False)
        elif key == "utilisation":
            if not 0 < (share := _rate(key, value)) <= 1:
                raise UsageError(f"{key!r} of {what} is a share from 0 to 1, not {share}")
        elif key == "pcie_generation":
            if type(value) is not int or value < 1:
                raise UsageError(f"{key!r} of {what} is a whole number from 1, not {value!r:.80}")
        else:
            values[key] = _rate(key, value)
    return DataSheet(**values)


def _sources(what: str, given: object) -> dict[str, str]:
    if not isinstance(given, dict):
        raise UsageError(f"{what} is an object of texts by field, not {given!r:.80}")
    read = cast("dict[str, Any]", given)
    return {key: _text(f"{key!r:.80} in {what}", value) for key, value in read.items()}


def _text(what: str, given: object) -> str:
    if not isinstance(given, str) or len(given) > _LONGEST_SOURCE or not given.isprintable():
        raise UsageError(f"{what} is a line of text, not {given!r:.80}")
    return given


# Machines by name, by file and by text: descriptions of common devices, and sizes of their tiers.
#
# In: what a person writes for `hardware=`, `--hardware` and `--tiers`. Out: `Hardware`.
#
# [Note: from a data sheet]
# A data sheet states peaks; `Hardware` holds what a step reaches. One factor leads from the one to
# the other, `utilisation` of the file, 0.5 in all that are shipped: large trainings report 38 to 46
# % of the peak in bf16 for the whole step (Grattafiori et al. 2024, "The Llama 3 Herd of Models",
# table 4; Chowdhery et al. 2022, "PaLM", section 4.1), and their matrix products alone reach more.
# It multiplies matrix products, and the memory's bandwidth for updates and encoded states. fp32 is
# priced without TF32, as torch multiplies unless it is told otherwise. Nothing of it was measured
# by us; host and disk are assumptions, to be replaced by `--tiers` or in a copy of the file.

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
