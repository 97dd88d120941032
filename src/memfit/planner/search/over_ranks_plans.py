"""Plans for several ranks: what is cut over them, and which of a few uniform plans is the fastest
that fits.

In: a plan for one process, the names of the blocks, the number of ranks; or a profile and a
machine. Out: the same plan over ranks, as data parallel or with ZeRO's stages; or a choice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.core.errors import DoesNotFitError
from memfit.core.hardware import Hardware
from memfit.core.layout import Share
from memfit.core.limits import format_bytes
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.search.candidates import update_time
from memfit.planner.search.plan_choice import ParetoPoint
from memfit.step.build import build_step
from memfit.step.bytes import peaks
from memfit.step.lower import lower
from memfit.step.predict import appraise

STAGES = (0, 1, 2, 3)
"""Stages of ZeRO: nothing is cut, optimizer states, gradients too, weights too.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.
"""
_FORMATS = (
    "is_atomic",
    "compute_dtype",
    "splits_masters",
    "drops_masters",
    "state_format",
    "frozen_format",
    "loss_chunk_tokens",
)


def data_parallel(ranks: int) -> Plan:
    """Returns the plan with which each rank has everything whole on its device."""
    return Plan(ranks=ranks)


def share_out(
    plan: Plan, ranks: int, stage: int, blocks: Collection[str], staying: Collection[str] = frozenset()
) -> Plan:
    """Returns a plan whose blocks are cut over ranks.

    Args:
        plan: the other decisions.
        ranks: their number.
        stage: one of `STAGES`.
        blocks: names of all blocks.
        staying: names of blocks whose weights every rank must have whole on its device.
    """
    states, gradients, weights = (Share.DATA if stage >= least else Share.WHOLE for least in (1, 2, 3))

    def shared(name: str) -> BlockPlan:
        own = Share.WHOLE if name in staying else weights
        return replace(plan.block(name), weights_over=own, gradients_over=gradients, states_over=states)

    return replace(plan, ranks=ranks, blocks={name: shared(name) for name in blocks})


@dataclass(frozen=True, kw_only=True)
class RanksChoice:
    """A plan for ranks, and what stood beside it.

    Attributes:
        plan: the fastest that fits; without a machine the first.
        name: the decisions in words.
        front: of all plans that were looked at, from the fastest to the leanest.
        looked_at: their number.
    """

    plan: Plan
    name: str
    front: tuple[ParetoPoint, ...]
    looked_at: int

    @property
    def reason(self) -> str:
        """Says why it is taken."""
        return f"{self.name}: the fastest of {self.looked_at} uniform plans for {self.plan.ranks} ranks that fits."


def choose_over_ranks(
    profile: Profile,
    counts: Sequence[int],
    ranks: int,
    room_bytes: int | None,
    hardware: Hardware | None,
    *,
    clips_norm: bool,
    device: str,
    like: Plan | None = None,
) -> RanksChoice:
    """Chooses among uniform plans: data parallel, ZeRO-1, 2 and 3, each with shares on the device,
    on the host and on disk, more and more microbatches, kept and recomputed; with one buffer where
    two do not fit.

    Every one of them gives the same bits for the same number of microbatches, so seconds decide.

    Args:
        profile: of a rank's batch.
        counts: numbers of microbatches that it was traced for.
        ranks: their number.
        room_bytes: left to tensors on the device of the rank that has the least; None: any.
        hardware: of a rank, with its links to others; None: seconds are not predicted, and the
            first plan that fits is taken, those that move least first.
        clips_norm: updates wait for the norm of all gradients.
        device: as in `step.lower`.
        like: a plan whose formats they have, which the profile was traced with; None: the model's.

    Raises:
        DoesNotFitError: none fits; the smallest is named.
    """
    points: list[ParetoPoint] = []
    best: tuple[float, Plan, str] | None = None
    left = [*_uniform_plans(profile, counts, ranks, hardware, clips_norm=clips_norm, like=like or Plan())]
    while left:
        name, plan = left.pop(0)
        step = lower(build_step(plan, profile, clips_norm=clips_norm), plan, profile, device=device)
        seconds = 0.0
        if hardware is None:
            most = peaks(step)
        else:
            found = appraise(step, hardware)
            most, seconds = found.peaks, found.seconds
        fits = room_bytes is None or most[Tier.DEVICE] <= room_bytes
        if hardware is not None:
            fits = fits and all(most.get(tier, 0) <= spec.nbytes for tier, spec in hardware.away.items())
        points.append(ParetoPoint(name=name, peak_bytes=most[Tier.DEVICE], seconds=seconds, fits=fits))
        if not fits and plan.prefetch:
            # Slower and leaner: a gradient does not wait for its exchange beside the next backward.
            left.insert(0, (f"{name}, one buffer", replace(plan, prefetch=0)))
        if fits and (best is None or seconds < best[0]):
            best = seconds, plan, name
            if hardware is None:
                break
    if best is None:
        least = min(points, key=lambda point: point.peak_bytes)
        raise DoesNotFitError(
            f"no plan fits the rank with the least room, {format_bytes(max(room_bytes or 0, 0))} of tensors: the smallest takes "
            f"{format_bytes(least.peak_bytes)} ({least.name}). Use more ranks, or a larger limit"
        )
    return RanksChoice(plan=best[1], name=best[2], front=tuple(_front(points)), looked_at=len(points))


def _front(points: Sequence[ParetoPoint]) -> Iterator[ParetoPoint]:
    """Yields the plans than which no other one is both faster and leaner."""
    least: int | None = None
    for point in sorted(points, key=lambda point: (point.seconds, point.peak_bytes)):
        if least is None or point.peak_bytes < least:
            least = point.peak_bytes
            yield point


def _uniform_plans(
    profile: Profile, counts: Sequence[int], ranks: int, hardware: Hardware | None, *, clips_norm: bool, like: Plan
) -> Iterator[tuple[str, Plan]]:
    """Yields plans that treat all blocks and calls alike, as far as they allow it; those that move
    less first.
    """
    names = [block.name for block in profile.blocks]
    staying = {block.name for block in profile.blocks if block.is_spanning or block.name in profile.written_blocks}
    calls = next(iter(profile.traces.values())).calls
    away = (Tier.DISK,) if hardware is None else [tier for tier in (Tier.HOST, Tier.DISK) if tier in hardware.tiers]
    for tier, stage in (*((Tier.DEVICE, stage) for stage in STAGES), *((tier, STAGES[-1]) for tier in away)):
        homes = {
            name: BlockPlan(weight_home=Tier.DEVICE if name in staying else tier, gradient_home=tier, state_home=tier)
            for name in names
        }
        for count in counts:
            for saved in (Saved.KEEP, Saved.RECOMPUTE):
                plan = replace(
                    Plan(**{name: getattr(like, name) for name in _FORMATS}),
                    microbatches=count,
                    blocks=homes,
                    calls=tuple(CallPlan(saved=saved) for _ in calls),
                    update=update_time(profile, clips_norm=clips_norm),
                )
                way = "data parallel" if stage == 0 else f"ZeRO-{stage}"
                yield f"{way} on {tier}, {count} microbatches, {saved}", share_out(plan, ranks, stage, names, staying)
