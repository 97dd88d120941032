"""Tiers: names of the places where bytes rest, and the properties of each kind of place.

In: names in plans and schedules. Out: `Tier`, which keys limits, capacities, links and peaks; its
`TierTraits`, which prices and homes read.

[Note: tiers are open]
A tier is a name, and any name is allowed. `device`, `host` and `disk` are memfit's own, with
traits in one table. Every other tier has the traits of a place to which bytes only travel: nothing
computes on them there, a write replaces what was there, and a sum is read back to be added to. A
job can use such a tier if it is given a factory of homes for it (`homes.factories`), and its link
and capacity in `Hardware.tiers`. A plan that names any other tier is refused with the names of the
known ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar
from weakref import WeakValueDictionary

TIER_PATTERN = "[a-z][a-z0-9-]{0,31}"
"""The form of a tier's name, as a regular expression."""
_NAME = re.compile(TIER_PATTERN)


@dataclass(frozen=True, kw_only=True)
class TierTraits:
    """Properties of a tier, by which steps are priced and homes are used.

    Attributes:
        is_device: it is the device's memory, so that weights there never visit.
        is_addressable: the processor (but no accelerator) computes on its bytes in place.
        is_files: transfers pass through bounce buffers of the processor, and an atomic step keeps
            the version before beside the new one.
    """

    is_device: bool = False
    is_addressable: bool = False
    is_files: bool = False


_TRAVELS_ONLY = TierTraits()
_TRAITS: Mapping[str, TierTraits] = MappingProxyType(
    {
        "device": TierTraits(is_device=True),
        "host": TierTraits(is_addressable=True),
        "disk": TierTraits(is_files=True),
    }
)
# One object a name, so that tiers compare by `is` as members of an enum do. Weak: a hostile file of
# names leaves nothing behind.
_known: WeakValueDictionary[str, Tier] = WeakValueDictionary()


class Tier(str):
    """The name of a place where bytes rest. On a machine without an accelerator, `device` is this
    process's memory. See [Note: tiers are open].

    There is one object for each name: `Tier("host") is Tier.HOST`.

    Raises:
        ValueError: the name is invalid. It has at most 32 lower-case letters, digits and hyphens, a
            letter first.
    """

    __slots__ = ("__weakref__",)
    DEVICE: ClassVar[Tier]
    HOST: ClassVar[Tier]
    DISK: ClassVar[Tier]
    NETWORK: ClassVar[Tier]

    def __new__(cls, name: str) -> Tier:  # noqa: PYI034, there are no subclasses
        """Returns the one object of that name."""
        known = _known.get(name)
        if known is not None:
            return known
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r:.80} is no name of a tier: lower-case letters, digits and hyphens, such as 'host'"
            )
        # Two threads may make the same new name at once: the first one to arrive stays.
        return _known.setdefault(name, super().__new__(cls, name))

    def __repr__(self) -> str:
        return f"Tier({str(self)!r})"

    @property
    def traits(self) -> TierTraits:
        """Properties of the tier."""
        return _TRAITS.get(self, _TRAVELS_ONLY)


Tier.DEVICE, Tier.HOST, Tier.DISK = Tier("device"), Tier("host"), Tier("disk")
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""memfit's own tiers.
"""
NETWORK = Tier("network")
"""Name of the way to other ranks, in transfers: nothing rests there.
"""


def is_processor(device: str) -> bool:
    """Tells whether the device is the processor, by its name in `Hardware.device` or a
    `torch.device`.
    """
    return device in ("cpu", "meta")


def updates_in_place(tier: Tier, device: str) -> bool:
    """Tells whether an update computes on bytes of that tier in place; else pieces of them are
    copied to the device and back.

    Lowering (`step.lower`) and homes (`MemoryHome.memory`) both ask here.

    Args:
        tier: where weights, masters, gradients or states rest.
        device: "cpu" if the device is the processor; anything else is an accelerator.
    """
    return tier.traits.is_device or (tier.traits.is_addressable and is_processor(device))


def crossed_tier(tier: Tier, device: str) -> Tier | None:
    """Returns the tier whose link bytes on the way between a tier and the device pass as well.

    Files are read into host memory, and an accelerator gets them from there (`homes.staging`).

    Args:
        tier: where the bytes rest.
        device: as `is_processor` takes it.
    """
    return Tier.HOST if tier.traits.is_files and not is_processor(device) else None
