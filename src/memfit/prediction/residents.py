"""Who is in memory at the peak, by name: what an error message and a report show.

In: `Schedule`, `Plan`, `Profile`. Out: `Resident`s, largest first, or a table of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.core.units import format_bytes
from memfit.prediction.bytes import STAGING_BYTES, DeviceBytes
from memfit.prediction.lifetimes import Lifetimes


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Something alive: its category (as in `Timeline`), what it belongs to, its bytes."""

    category: str
    name: str
    nbytes: int


def residents_at(
    schedule: Schedule, plan: Plan, profile: Profile, index: int, *, staging_bytes: int = STAGING_BYTES
) -> tuple[Resident, ...]:
    """What is alive while action `index` runs, largest first. The sum is that action's `peak_bytes`.

    Activations are named by the call whose forward made them, all microbatches together.
    """
    memory = DeviceBytes(schedule, plan, profile, microbatches=plan.microbatches, staging_bytes=staging_bytes)
    moments = memory.run(schedule)
    # The action's own effect may free or add; what rests there is the state before it, the rest is its transient.
    for _ in range(index):
        next(moments)
    blocks = memory.shape.blocks
    found = [Resident(category="weight", name=blocks[b], nbytes=n) for b, n in memory.weights.items()]
    found.append(Resident(category="weight", name="batch and buffers", nbytes=memory.input_bytes))
    for held in (memory.gradients, memory.leaving):
        found += [Resident(category="gradient", name=blocks[b], nbytes=n) for b, n in held.items()]
    found += [Resident(category="state", name=blocks[b], nbytes=n) for b, n in memory.states.items()]
    found += _activations(memory, schedule.microbatches)
    peak = next(moments)
    if staging := peak.by_category["staging"]:
        found.append(Resident(category="staging", name="updates and disk buffers", nbytes=staging))
    running = peak.peak_bytes - sum(r.nbytes for r in found)
    found.append(Resident(category="transient", name=str(schedule.actions[index]), nbytes=running))
    return tuple(sorted((r for r in found if r.nbytes), key=lambda r: (-r.nbytes, r.category, r.name)))


def peak_report(
    schedule: Schedule, plan: Plan, profile: Profile, *, staging_bytes: int = STAGING_BYTES, rows: int = 12
) -> str:
    """A table of the largest residents at the predicted device peak."""
    memory = DeviceBytes(schedule, plan, profile, microbatches=plan.microbatches, staging_bytes=staging_bytes)
    peaks = [m.peak_bytes for m in memory.run(schedule)]
    index = max(range(len(peaks)), key=peaks.__getitem__)
    found = residents_at(schedule, plan, profile, index, staging_bytes=staging_bytes)
    lines = [f"predicted device peak {format_bytes(peaks[index])} at action {index}, {schedule.actions[index]}"]
    lines += [f"  {format_bytes(r.nbytes):>12}  {r.category:<10}  {r.name}" for r in found[:rows]]
    if rest := found[rows:]:
        lines.append(f"  {format_bytes(sum(r.nbytes for r in rest)):>12}  {len(rest)} smaller ones")
    return "\n".join(lines)


def _activations(memory: DeviceBytes, microbatches: int) -> list[Resident]:
    by_name: dict[str, int] = {}
    sites = [c.site or "model" for c in memory.trace.calls]
    together = Counter(memory.events_of(m) for m in range(microbatches))
    for (events, done), count in together.items():
        life = Lifetimes(memory.facts, is_training=memory.is_training)
        life.follow(events, stop=done)
        for s in life.alive.values():
            name = f"made by {sites[s.segment]}" if s.segment >= 0 else "made before the first call"
            by_name[name] = by_name.get(name, 0) + count * s.nbytes
        for segment, nbytes in life.copies.items():
            name = f"reloaded for {sites[memory.shape.segments[segment][0]]}"
            by_name[name] = by_name.get(name, 0) + count * nbytes
        for name, nbytes in (("gradients of activations", life.gradient_bytes), ("selected", life.extra_bytes)):
            by_name[name] = by_name.get(name, 0) + count * nbytes
    return [Resident(category="activation", name=name, nbytes=n) for name, n in by_name.items()]
