"""Prices candidates: a lower bound of each, and the prediction of those that are built.

In: `PlanQuestion`, `Candidate`s. Out: `PricedCandidate`s; `PlanQuestion.build` lowers one
and predicts it. See [Note: which candidates are built] in `planner.search.planner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.layout import Scheme
from memfit.core.limits import MIB, Budget, format_bytes, round_up
from memfit.core.numerics import Wish, regroups_sums, weighed_seconds
from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile
from memfit.core.shape import StepShape
from memfit.core.step import Step
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier, crossed_tier, is_processor
from memfit.planner.search.bounds import PeakBounds, commit_seconds, compute_seconds, update_seconds
from memfit.planner.search.candidates import Candidate, MasterForms, list_candidates
from memfit.planner.search.classics import list_classics
from memfit.step.build import build_forward, build_step
from memfit.step.bytes import peaks
from memfit.step.clock import Pace
from memfit.step.lower import lower
from memfit.step.predict import Appraisal, appraise
from memfit.step.segment_facts import KnownFacts
from memfit.step.sizes import (
    disk_bytes_with_store,
    flat_gradient_bytes,
    flat_weight_bytes,
    master_home_bytes,
    traces_of,
    update_traffic,
)

# Predicted peaks and seconds of plans, kept from one question about a profile to the next: the same
# plans are asked about at another limit.
#
# In: plans, and what predicts one. Out: `Appraisal`s of peaks and seconds.


def decisions_apart_from(plan: Plan, *names: str) -> tuple[Any, ...]:
    """Returns the values of all fields of a plan but these."""
    return tuple(getattr(plan, field.name) for field in fields(plan) if field.name not in names)


class PlanCosts:
    """Costs of plans of one profile.

    Memory: about 1 KiB a plan.
    """

    def __init__(self) -> None:
        self._conditions: Any = None
        self._costs: dict[Any, Appraisal] = {}
        # Many plans share their decisions about blocks or about calls.
        self._numbers: dict[Any, int] = {}

    def under(self, conditions: Any) -> PlanCosts:
        """Returns itself, empty if costs were predicted under other conditions.

        Args:
            conditions: the machine and all else that costs depend on beside profile and plan.
        """
        if conditions != self._conditions:
            self._costs.clear()
            self._conditions = conditions
        return self

    def of(self, plan: Plan, find: Callable[[], Appraisal]) -> Appraisal:
        """Returns the peaks and seconds of a plan, or finds them."""
        shared = tuple(plan.blocks.items()), plan.calls
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in shared]
        key = *numbers, *decisions_apart_from(plan, "blocks", "calls")
        cost = self._costs.get(key)
        if cost is None:
            found = find()
            cost = self._costs[key] = Appraisal(peaks=found.peaks, seconds=found.seconds)
        return cost


@dataclass(frozen=True, kw_only=True)
class PricedCandidate:
    """A candidate and lower bounds of what it costs.

    Attributes:
        index: its place in the list of candidates; of equal ones the first is taken.
        candidate: the plan and its name.
        seconds_bound: no prediction of the plan takes less.
        bytes_bound: device bytes that rest there through the whole step.
        regroups: it regroups sums (`core.numerics`).
    """

    index: int
    candidate: Candidate
    seconds_bound: float
    bytes_bound: int
    regroups: bool

    @property
    def weighed_bound(self) -> float:
        """Its bound as seconds are compared by."""
        return weighed_seconds(self.seconds_bound, regroups=self.regroups)


@dataclass(frozen=True, kw_only=True)
class BuiltCandidate:
    """A candidate whose step was built, lowered and predicted.

    Attributes:
        priced: the candidate.
        cost: its predicted peaks and seconds.
        fits: it is within every budget.
        fits_elsewhere: it is within those of the tiers beside the device.
    """

    priced: PricedCandidate
    cost: Appraisal
    fits: bool
    fits_elsewhere: bool

    @property
    def weighed_s(self) -> float:
        """Its seconds as plans are compared by."""
        return weighed_seconds(self.cost.seconds, regroups=self.priced.regroups)


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """The arguments of `planner.choose_plan`, with its defaults resolved.

    Attributes:
        tiers: beside the device, those that the hardware has.
        limits: of tiers beside the device, the hardware's capacities included.
        may_split: the batch may be cut, by the loss and by the model.
        classic: name of the only technique that is looked at; None: all plans are.
        checks: peaks of checks that were predicted already (see `bytes_of_check`), by the decisions
            that they depend on.
        known: facts about the profile that lowering has found.
        known_of_checks: the same of passes without gradients.
        costs: peaks and seconds of plans that are known from other questions about the profile;
            searches for mixtures need more of each plan.
    """

    profile: Profile
    budget: Budget
    hardware: Hardware
    clips_norm: bool
    tiers: tuple[Tier, ...]
    may_split: bool
    limits: Mapping[Tier, int]
    scheme: Scheme | None
    staging_bytes: int
    masters: MasterForms
    compute: ComputeDtype | None
    like: Plan | None
    checked_rows: int
    numerics: Wish
    commits: float
    decided: Mapping[str, Any]
    classic: str | None = None
    checks: dict[Any, int] = field(default_factory=dict[Any, int])
    known: KnownFacts = field(default_factory=KnownFacts)
    known_of_checks: KnownFacts = field(default_factory=KnownFacts)
    costs: PlanCosts | None = None

    @cached_property
    def pace(self) -> Pace:
        """Speeds of the hardware."""
        return Pace(self.hardware)

    @cached_property
    def peak_bounds(self) -> PeakBounds:
        """Lower bounds of plans' peaks."""
        return PeakBounds(self.profile, staging_bytes=self.staging_bytes, device=self.hardware.device, known=self.known)

    def within(self, tensor_bytes: int) -> PlanQuestion:
        """Returns the same with another limit of the device, of so many bytes for tensors. What is
        known of plans is shared.
        """
        limit = tensor_bytes + self.budget.base_bytes + self.budget.reserve_bytes
        return replace(self, budget=replace(self.budget, limit_bytes=limit))

    def predict(self, plan: Plan) -> Appraisal:
        """Predicts the step of a plan."""
        return appraise(self.lower(plan), self.pace)

    def build(self, priced: PricedCandidate) -> BuiltCandidate:
        """Builds the step of a candidate, lowers it and predicts it, unless its cost is known."""
        plan = priced.candidate.plan
        if self.costs is None:
            return self.judge(priced, self.lower(plan))
        return self.fitted(priced, self.costs.of(plan, lambda: self.judge(priced, self.lower(plan)).cost))

    def judge(self, priced: PricedCandidate, step: Step) -> BuiltCandidate:
        """Predicts the lowered step of a candidate, and says whether it fits."""
        plan = priced.candidate.plan
        found = appraise(step, self.pace)
        if plan.microbatches > 1 and self.checked_rows:
            found = _with_peak(found, Tier.DEVICE, max(found.peak_bytes, self._check_bytes(plan)))
        if self.scheme is not None:
            beside = found.peaks.get(Tier.DISK, 0)
            in_all = disk_bytes_with_store(plan, self.profile, beside, self.scheme)
            found = _with_peak(found, Tier.DISK, in_all)
        return self.fitted(priced, found)

    def fitted(self, priced: PricedCandidate, cost: Appraisal) -> BuiltCandidate:
        """Says whether a candidate of that cost fits."""
        elsewhere = all(is_within(cost.peaks.get(tier, 0), limit) for tier, limit in self.limits.items())
        return BuiltCandidate(
            priced=priced,
            cost=cost,
            fits=elsewhere and is_within(cost.peak_bytes, self.budget.tensor_bytes),
            fits_elsewhere=elsewhere,
        )

    def lower(self, plan: Plan, *, is_itemized: bool = False) -> Step:
        """Builds the step of a plan and lowers it."""
        return lower(
            build_step(plan, self.profile, clips_norm=self.clips_norm, known=self.known),
            plan,
            self.profile,
            staging_bytes=self.staging_bytes,
            commits=self.commits,
            device=self.hardware.device,
            is_itemized=is_itemized,
            known=self.known,
            is_built=True,
        )

    def allows(self, priced: PricedCandidate) -> bool:
        """Tells whether a candidate may be taken, whatever it costs."""
        return self.numerics != "exact" or not priced.regroups

    def _check_bytes(self, plan: Plan) -> int:
        # Of what calls do with their saved tensors only the disk's buffers are there in a forward.
        shape = self.known.shape(plan, self.profile)
        leaves = any(tier is not None and tier.traits.is_files for tier in shape.leaves)
        masters = plan.splits_masters, plan.drops_masters
        key = (tuple(plan.blocks.items()), shape.segments, plan.prefetch, plan.backlog, *masters, leaves)
        if key not in self.checks:
            self.checks[key] = bytes_of_check(
                plan,
                self.profile,
                self.checked_rows,
                staging_bytes=self.staging_bytes,
                device=self.hardware.device,
                known=self.known_of_checks,
            )
        return self.checks[key]


def bytes_of_check(
    plan: Plan,
    profile: Profile,
    rows: int,
    *,
    staging_bytes: int | None = None,
    device: str = "cpu",
    known: KnownFacts | None = None,
) -> int:
    """Predicted device peak of so many rows (all, if the batch has fewer) that run forward whole,
    to show that the batch may be cut.

    Args:
        plan: with more than one microbatch.
        profile: with a trace of that many rows or more, the smallest of which is taken; of fewer
            where real steps had no room for so many: then bytes grow in proportion.
        rows: that are checked.
        staging_bytes: as in `step.lower`.
        device: likewise.
        known: facts that were found for other checks of the profile, and are added to.
    """
    checked = min(rows, profile.batch_rows)
    needed = min(checked, max(profile.traces))
    sizes = {count: -(-profile.batch_rows // count) for count in range(1, profile.batch_rows + 1)}
    count = max(count for count, size in sizes.items() if size >= needed and size in profile.traces)
    schedule = build_forward(plan, profile, 1)
    step = lower(schedule, plan, profile, microbatches=count, staging_bytes=staging_bytes, device=device, known=known)
    return peaks(step)[Tier.DEVICE] * -(-checked // needed)


def price_all(question: PlanQuestion) -> list[PricedCandidate]:
    """Lists all candidates and bounds each.

    Raises:
        UsageError: no microbatch size has a trace.
    """
    priced: list[PricedCandidate] = []
    profile = question.profile
    for count in _counts(question):
        if -(-profile.batch_rows // count) in profile.traces:
            for candidate in _list_all(question, count):
                whole = replace(candidate, plan=replace(candidate.plan, **question.decided))
                priced.append(price(len(priced), whole, question))
    if not priced:
        raise UsageError(
            f"the {profile.batch_rows} rows of the batch are not to be cut into the {sorted(profile.traces)} rows that were traced, for more "
            "of which there was no room: raise the limit, give fewer rows, or read no numbers where memfit.is_tracing() says so"
        )
    return priced


def _counts(question: PlanQuestion) -> list[int]:
    """Numbers of microbatches: 1, 2, 4, ... up to the rows, or as many as the batch comes in."""
    profile = question.profile
    if profile.own_parts:
        return [profile.own_parts]
    may_split = question.may_split and question.numerics != "exact"
    most = max(1, profile.batch_rows) if may_split else 1
    return [1 << power for power in range(most.bit_length())]


def _list_all(question: PlanQuestion, count: int) -> list[Candidate]:
    """Lists uniform plans and techniques with so many microbatches, each plan once."""
    profile = question.profile
    classics: list[Candidate] = []
    if question.scheme != "journal":
        given = ComputeDtype.BFLOAT16 if profile.has_masters else ComputeDtype.GIVEN
        classics = list(
            list_classics(
                profile,
                question.hardware,
                microbatches=count,
                tiers=question.tiers,
                clips_norm=question.clips_norm,
                compute=given if question.compute is None else question.compute,
                drops_masters=profile.has_masters and not question.masters.kept,
                only=question.classic,
            )
        )
    if question.classic is not None:
        return classics
    listed = list_candidates(
        profile,
        microbatches=count,
        tiers=question.tiers,
        clips_norm=question.clips_norm,
        masters=question.masters,
        compute=question.compute,
        has_journal=question.scheme == "journal",
        like=question.like,
        may_update_on_host=not is_processor(question.hardware.device) and not profile.host_update_obstacle,
    )
    found: list[Candidate] = []
    for candidate in listed:
        same = next((classic for classic in classics if classic.plan == candidate.plan), None)
        found.append(candidate if same is None else replace(candidate, classic=same.classic))
    known = {candidate.classic for candidate in found}
    return found + [classic for classic in classics if classic.classic not in known]


def price(index: int, candidate: Candidate, question: PlanQuestion) -> PricedCandidate:
    """Bounds seconds and device bytes from below. See [Note: which candidates are built]."""
    plan, profile, hardware = candidate.plan, question.profile, question.hardware
    loads = loads_of(plan, question)
    return PricedCandidate(
        index=index,
        candidate=candidate,
        seconds_bound=max([loads.work_s, loads.host_s, *loads.moved_s.values()])
        + commit_seconds(plan, profile, hardware, question.commits),
        bytes_bound=loads.resident_bytes,
        regroups=regroups_sums(plan, profile),
    )


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Work of a step by who does it: none of them is through sooner, whatever the schedule.

    Attributes:
        work_s: the device computes so long, updates of it included.
        host_s: the host's cores update so long beside an accelerator.
        moved_s: each link is in use so long, by tier and direction; visits are counted as often
            as there are at least, and gradients that leave once.
        resident_bytes: rest on the device through the whole step.
    """

    work_s: float
    host_s: float
    moved_s: Mapping[tuple[Tier, str], float]
    resident_bytes: int


def loads_of(plan: Plan, question: PlanQuestion) -> Loads:
    """Adds up a plan's work, block by block, without its schedule."""
    profile = question.profile
    shape = question.known.shape(plan, profile)
    traces = traces_of(profile, plan.microbatches, question.known)
    known = question.known
    key = "compute", traces[0].rows, plan.microbatches, known.calls_of(plan)
    work_s = known.found(key, lambda: compute_seconds(traces, plan, shape, question.pace, known))
    # Of calls: which segments they are in, by which visits are counted.
    key = "loads", known.homes_of(plan), plan.microbatches, plan.order, plan.cut_tail, shape.segments
    of_blocks = known.found(key, lambda: _loads_of_blocks(plan, question, shape))
    return replace(of_blocks, work_s=work_s + of_blocks.work_s)


def _loads_of_blocks(plan: Plan, question: PlanQuestion, shape: StepShape) -> Loads:
    """Adds up what blocks bring."""
    moved_s: dict[tuple[Tier, str], float] = {}
    work_s, host_s, resident = 0.0, 0.0, 0
    for block, profiled in enumerate(question.profile.blocks):
        key = "loads", plan.microbatches, plan.order, plan.cut_tail, shape.segments
        one = question.known.of_update(plan, profiled.name, key, partial(_loads_of_block, plan, question, shape, block))
        work_s, host_s, resident = work_s + one.work_s, host_s + one.host_s, resident + one.resident_bytes
        for queue, seconds in one.moved_s.items():
            moved_s[queue] = moved_s.get(queue, 0.0) + seconds
    return Loads(work_s=work_s, host_s=host_s, moved_s=moved_s, resident_bytes=resident)


def _loads_of_block(plan: Plan, question: PlanQuestion, shape: StepShape, block: int) -> Loads:
    """Adds up what a block brings, by its own decisions: its visit, its gradient and its update."""
    profile, hardware = question.profile, question.hardware
    profiled = profile.blocks[block]
    homes = plan.block(profiled.name)
    weight = flat_weight_bytes(profiled)
    moved_s: dict[tuple[Tier, str], float] = {}
    resident = 0 if block in shape.visiting else weight
    if homes.weight_home is Tier.DEVICE:
        resident += profiled.encoded_bytes
    if homes.state_home is Tier.DEVICE:
        resident += profile.resting_state_bytes(profiled.name) + master_home_bytes(plan, profiled)
    if homes.gradient_home is Tier.DEVICE and (question.clips_norm or block in shape.loose):
        resident += profiled.gradient_bytes
    if block in shape.visiting and homes.weight_home is not Tier.DEVICE:
        moved = profiled.encoded_bytes or weight
        _add(moved_s, hardware, homes.weight_home, "read", moved * _least_visits(plan, shape, block))
    if block not in shape.trainable:
        return Loads(work_s=0.0, host_s=0.0, moved_s=moved_s, resident_bytes=resident)
    if homes.gradient_home is not Tier.DEVICE:
        _add(moved_s, hardware, homes.gradient_home, "write", flat_gradient_bytes(profiled))
    work_s, host_s = update_seconds(plan, profile, block, question.pace)
    traffic = update_traffic(plan, profile, block, is_visiting=True, device=hardware.device)
    goes_on = not homes.updates_on_host(hardware.device)
    for (tier, _), nbytes in traffic.read.items():
        _add(moved_s, hardware, tier, "read", nbytes, reaches_device=goes_on)
    for (tier, _), nbytes in traffic.written.items():
        _add(moved_s, hardware, tier, "write", nbytes, reaches_device=goes_on)
    return Loads(work_s=work_s, host_s=host_s, moved_s=moved_s, resident_bytes=resident)


def _least_visits(plan: Plan, shape: StepShape, block: int) -> int:
    """Number of visits that a block's weights make at least.

    A block of early calls alone is not there between its last forward and its first backward: other
    forwards and backwards lie between. The last segment, and a tail, may keep theirs.
    """
    segments = [segment for segment, needs in enumerate(shape.needs) if block in needs]
    if not segments:
        return 0
    last = min(shape.tail_segment, len(shape.segments) - 1)
    if max(segments) >= last or not any(shape.has_backward[segment] for segment in segments):
        return 1
    # One microbatch's backward may be followed by the next one's forward.
    return plan.microbatches + 1 if plan.order is Order.MICROBATCH_MAJOR else 2


def _add(
    moved_s: dict[tuple[Tier, str], float],
    hardware: Hardware,
    tier: Tier,
    direction: str,
    nbytes: int,
    *,
    reaches_device: bool = True,
) -> None:
    """Adds the seconds of a transfer to every link that it passes."""
    crossed = crossed_tier(tier, hardware.device) if reaches_device else None
    for passed in (tier, crossed):
        if passed is not None and passed in hardware.tiers:
            link = hardware.link(passed)
            speed = link.read_bytes_per_s if direction == "read" else link.write_bytes_per_s
            moved_s[passed, direction] = moved_s.get((passed, direction), 0.0) + nbytes / speed


def is_within(nbytes: int, limit: int | None) -> bool:
    """True if the bytes are within the limit; None is no limit."""
    return limit is None or nbytes <= limit


def _with_peak(cost: Appraisal, tier: Tier, nbytes: int) -> Appraisal:
    return replace(cost, peaks={**cost.peaks, tier: nbytes})


# The words of a refusal: what does not fit, the one number that would, what stands in its way.
#
# In: a budget and a plan's predicted peak. Out: `DoesNotFitError`.

# Resident bytes of equal processes at the same line of the same script: up to 1 MiB apart seen, by
# address layout and timing of threads.
BASE_VARIATION_BYTES = 4 * MIB
"""Bytes by which processes that hold the same may differ, and more."""
OTHERS = "is alive on the device beside the job (other models, data, results of yours)"
"""Names the base of a device's limit."""


def limit_to_name(nbytes: int, *, varies: bool) -> int:
    """Returns the limit that is told to a person who needs so many bytes.

    Args:
        nbytes: needed as this process is.
        varies: the limit is for a process, which holds a little more or less each time.
    """
    return round_up(nbytes + BASE_VARIATION_BYTES, MIB) if varies else nbytes


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a limit is refused, and which one would not be.

    Attributes:
        budget: with the limit.
        peak_bytes: of tensors, that the leanest plan (or the given one) is predicted to take.
        plan: its name.
        report: the residents at its peak, line by line.
        advice: what else could help.
        load_bytes: held until the weights have moved home.
        is_given: the plan is the user's, and others may do with less.
        varies: the limit is for a process, which holds a little more or less each time; the number
            that is named is above that.
        kind: of plan that was asked for, in words that follow "no plan".
        is_of_uniform: the plan treats all layers alike; mixed ones, which were looked for at this
            limit only, may do with less than it.
    """

    budget: Budget
    peak_bytes: int
    plan: str
    report: str
    advice: tuple[str, ...]
    load_bytes: int = 0
    is_given: bool = False
    varies: bool = False
    kind: str = ""
    is_of_uniform: bool = False

    @property
    def smallest_limit_bytes(self) -> int:
        """The smallest limit that holds from the load on; of a process, in the next one as well."""
        found = max(self.peak_bytes + self.budget.base_bytes + self.budget.reserve_bytes, self.load_bytes)
        return limit_to_name(found, varies=self.varies)

    def error(self, remark: str = "") -> DoesNotFitError:
        """Makes the error to be raised; its message ends with the remark."""
        message = f"{self}{remark}"
        return DoesNotFitError(
            message, smallest_limit_bytes=self.smallest_limit_bytes, report=self.report, refusal=self
        )

    @property
    def in_its_way(self) -> str:
        """The report in one line: where the peak is, and the three largest of what is there."""
        head, *rows = [" ".join(line.split()) for line in self.report.splitlines()] or [self.plan]
        return f"{head}: {', '.join(rows[:3])}" if rows else head

    def __str__(self) -> str:
        budget, smallest = self.budget, self.smallest_limit_bytes
        what = "the plan does not fit" if self.is_given else f"no plan{self.kind} fits"
        with_what = "it" if self.is_given else self.plan
        works = "works" if not self.is_of_uniform else "works for all layers alike"
        parts = [f"{format_bytes(self.peak_bytes)} are tensors"]
        if budget.base_bytes:
            # An accelerator's limit, and an emulated one's, is for tensors alone.
            whose = "the process holds before them (interpreter, libraries)" if self.varies else OTHERS
            parts.append(f"{format_bytes(budget.base_bytes)} what {whose}")
        if budget.reserve_bytes:
            parts.append(f"{format_bytes(budget.reserve_bytes)} kept for scratch of kernels")
        if self.load_bytes > self.peak_bytes + budget.base_bytes + budget.reserve_bytes:
            parts.append(
                f"and {format_bytes(self.load_bytes)} are there at first: the model as it was built, until its weights have moved home"
            )
        return (
            f"{what} the limit of {format_bytes(budget.limit_bytes or 0)}: the smallest limit that {works} is {format_bytes(smallest)} ({smallest} bytes), "
            f"with {with_what}.\n"
            f"Of that {', '.join(parts)}.\n"
            f"{self._way_out()}"
        )

    def _way_out(self) -> str:
        """Names what is in the way, and what to try."""
        budget = self.budget
        if self.varies and budget.limit_bytes is not None and budget.base_bytes >= budget.limit_bytes:
            return (
                f"Below {format_bytes(budget.base_bytes)} there is no room: Python, what is imported and the search for a plan take that. Raise the limit, "
                "or import less before memfit.fit."
            )
        return f"In its way: {self.in_its_way}. Try {'; '.join(self.advice)}."
