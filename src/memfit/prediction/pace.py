"""Speeds of a machine: seconds of work on its processors, and of bytes on its links.

In: `Hardware`. Out: `Pace`, and seconds of single amounts.

[Note: the interval]
Each rate has a spread, the share by which its measurements differed. All rates slow by theirs gives
one end of what rates leave open, all fast the other: errors that do not cancel. Besides, a step is
not its model: nine of ten steps were nearer to their prediction than `Hardware.step_spread`, which
`benchmarks/clock.py` and a machine's own runs tell. Both are taken as independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memfit.core.hardware import Hardware
from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.rates import Rate, host_rates_of, rates_of
from memfit.core.tiers import Tier, is_processor
from memfit.core.work_kinds import LAUNCHED, PRODUCT_KINDS, Work, WorkKind


def work_seconds(work: Work, hardware: Hardware) -> float:
    """Returns the seconds of work on the device, one kind after the other."""
    return _seconds(work, _per_s(rates_of(hardware)), launches_beside=not is_processor(hardware.device))


def host_work_seconds(work: Work, hardware: Hardware) -> float:
    """Returns the seconds of work on the host's cores, beside an accelerator."""
    return _seconds(work, _per_s(host_rates_of(hardware)))


def fastest_products_per_s(hardware: Hardware) -> float:
    """Returns the rate that no class of products exceeds, for lower bounds."""
    rates = rates_of(hardware)
    return max(rates[kind].per_s for kind in PRODUCT_KINDS)


def _per_s(rates: Mapping[WorkKind, Rate], sign: int = 0) -> Mapping[WorkKind, float]:
    """Amounts a second: as measured, or all fast (1) or slow (-1) by their spread."""
    return {kind: _shifted(rate.per_s, rate.spread, sign) for kind, rate in rates.items()}


def _shifted(per_s: float, spread: float, sign: int) -> float:
    return per_s * (1 + spread) if sign > 0 else per_s / (1 + spread) if sign < 0 else per_s


def _seconds(work: Work, rates: Mapping[WorkKind, float], *, launches_beside: bool = False) -> float:
    """Seconds of amounts. An accelerator works while the host launches what comes next."""
    launched = 0.0
    total = 0.0
    for kind, amount in work:
        if launches_beside and kind in LAUNCHED:
            launched += amount / rates[kind]
        else:
            total += amount / rates[kind]
    return max(total, launched)


class Lane(NamedTuple):
    """One direction of a link: its name, bytes a second alone and while the other one has work,
    seconds beside the bytes.
    """

    name: str
    alone: float
    both: float
    latency_s: float


class Pace:
    """Speeds of a machine as clocks take them, found once for many steps.

    Args:
        hardware: the machine.
        sign: 0: at its rates; 1 or -1: all rates fast or slow. See [Note: the interval].
    """

    def __init__(self, hardware: Hardware, *, sign: int = 0) -> None:
        self.hardware = hardware
        self._sign = sign
        self._rates = _per_s(rates_of(hardware), sign)
        self._host_rates = _per_s(host_rates_of(hardware), sign)
        self._launches_beside = not is_processor(hardware.device)
        # Seconds by work: segments share theirs among microbatches, and steps among plans.
        self._known_s: dict[Work, float] = {}
        self._host_known_s: dict[Work, float] = {}
        self._known_pieces: dict[Work, float] = {}
        self._lanes: dict[tuple[Tier, str], Lane] = {}
        self.slows_compute = any(spec.link and spec.link.compute_share < 1 for spec in hardware.tiers.values()) or any(
            link.compute_share < 1 for link in hardware.network.values()
        )

    @property
    def adds_up(self) -> bool:
        """Amounts of work take as long together as one after the other."""
        return not self._launches_beside

    def work_s(self, work: Work) -> float:
        """Seconds of work on the device."""
        found = self._known_s.get(work)
        if found is None:
            found = self._known_s[work] = _seconds(work, self._rates, launches_beside=self._launches_beside)
        return found

    def host_work_s(self, work: Work) -> float:
        """Seconds of work on the host's cores."""
        found = self._host_known_s.get(work)
        if found is None:
            found = self._host_known_s[work] = _seconds(work, self._host_rates)
        return found

    def pieces(self, work: Work) -> float:
        """Pieces of an update on the host: small parameters go together, large ones are cut."""
        found = self._known_pieces.get(work)
        if found is None:
            amounts = dict(work)
            together = amounts.get(WorkKind.UPDATED, 0.0) / PIECE_ELEMENTS
            found = self._known_pieces[work] = max(1.0, min(amounts.get(WorkKind.PIECES, 0.0), together))
        return found

    def lane(self, tier: Tier, direction: str) -> Lane:
        """One direction of a tier's link.

        Raises:
            PlanError: the machine has no such tier.
        """
        found = self._lanes.get((tier, direction))
        if found is None:
            link, is_read = self.hardware.link(tier), direction == "read"
            alone = _shifted(link.read_bytes_per_s if is_read else link.write_bytes_per_s, link.spread, self._sign)
            both = link.both_read_bytes_per_s if is_read else link.both_write_bytes_per_s
            both = alone if both is None else _shifted(both, link.spread, self._sign)
            found = self._lanes[tier, direction] = Lane(f"{tier} {direction}", alone, both, link.latency_s)
        return found
