"""Choice of a plan: the fastest that fits, over all ways to compute that are allowed (dtype, chunks
of the loss, format of states). `planner.search.planner` searches within one way; `deciding` and
`advise` ask here.

In: a problem, its first profile, a budget and what is allowed. Out: `Choice`, or the refusal with
the smallest limit that would do.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import nn

from memfit.core.errors import DoesNotFitError, UnsupportedError
from memfit.core.hardware import Hardware, at_rates_of_smaller, in_dtype
from memfit.core.layout import Scheme
from memfit.core.limits import MIB, Budget, format_bytes, format_seconds
from memfit.core.numerics import NONADDITIVE, Wish, weighed_seconds
from memfit.core.plan import Plan
from memfit.core.profile import CallProfile, Profile, TraceProfile, accumulated
from memfit.core.storage_formats import FP16_WEIGHTS, WITHOUT_MASTERS, ComputeDtype, FrozenFormat, StateFormat
from memfit.core.work_kinds import PRODUCT_KINDS, summed
from memfit.engine.causal_loss import LossNotChunkedError, known_head, knows_loss
from memfit.machine.described import PlannedMachine
from memfit.machine.machine import library_bytes_to_come
from memfit.planner.problem import STATE_FORMATS, Problem, unfit_for, with_frozen
from memfit.planner.search.plan_choice import PlanChoice
from memfit.planner.search.planner import choose_plan
from memfit.planner.search.pricing import PlanCosts, Refusal
from memfit.step.clock import fastest_products_per_s, work_seconds
from memfit.store import Durability
from memfit.trace.splitting import checked_rows

# Chunks of the loss: how large they are, and what they spare at most.
#
# In: a model, a profile with the loss whole. Out: figures from which `choosing` tells whether plans
# with the loss in chunks may be faster, before any is traced.


def chunk_tokens(model: nn.Module) -> int:
    """Tokens whose logits take about 64 MiB in fp32, a power of two of at least 32."""
    head = known_head(model)
    assert head is not None, "asked of models whose loss is known"
    tokens = (64 * MIB) // (4 * head.out_features)
    return max(32, 1 << max(0, tokens.bit_length() - 1))


def bytes_of_loss(model: nn.Module, profile: Profile) -> int | None:
    """Most bytes that the head, with the loss behind it, has at any instant beyond those of calls
    before: a loss in chunks takes so many less at most. None: the head is not the last call, or not
    the only one of its kind.
    """
    last = _heads(model, profile)
    if last is None:
        return None
    return max(trace.seed_peak_bytes + c.forward_peak_bytes + max(0, c.backward_peak_bytes) for trace, c in last)


def seconds_of_loss(model: nn.Module, profile: Profile, hardware: Hardware) -> float:
    """Seconds of a step that the head, with the loss behind it, computes beside products: a loss in
    chunks takes so many less at most; infinite where `bytes_of_loss` is not known.
    """

    def seconds(trace: TraceProfile, call: CallProfile) -> float:
        works = [(work, 1.0) for work in (call.forward_work, call.backward_work, trace.seed_work)]
        beside = tuple((kind, amount) for kind, amount in summed(works) if kind not in PRODUCT_KINDS)
        return -(-profile.batch_rows // trace.rows) * work_seconds(beside, hardware)

    last = _heads(model, profile)
    return math.inf if last is None else max(seconds(trace, call) for trace, call in last)


def _heads(model: nn.Module, profile: Profile) -> list[tuple[TraceProfile, CallProfile]] | None:
    """The head's call in each trace; None where it is not the last one, once."""
    head = known_head(model)
    names = {name for name, module in model.named_modules(remove_duplicate=False) if module is head}
    found: list[tuple[TraceProfile, CallProfile]] = []
    for trace in profile.traces.values():
        calls = [call for call in trace.calls if call.site in names]
        if head is None or len(calls) != 1 or calls[0] is not trace.calls[-1]:
            return None
        found.append((trace, calls[0]))
    return found


# A plan that takes less than this share of what another way to compute takes at least wins in any
# case: ways differ a little in operations.
_SURELY_LESS = 0.8


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan that was chosen.

    Attributes:
        plan: the decisions.
        reason: why these, in a sentence or two.
        profile: that it was made from: of its dtype and its chunks of the loss.
        hardware: that it was priced on, in its dtype.
        found: what the rules said.
        why: why a plan that regroups sums, if it is one.
    """

    plan: Plan
    reason: str
    profile: Profile
    hardware: Hardware
    found: PlanChoice
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Conditions that a plan is looked for with.

    Attributes:
        allow: declared changes of arithmetic.
        may_split: the batch may be cut.
        clips_norm: gradients are clipped by their global norm.
        load_bytes: held while weights move home: no smaller limit is advised.
        like: a plan whose formats of weights, masters and states are kept, because bytes rest in
            them already.
        scheme: of the store that the run is committed to.
        checks_split: a plan that cuts the batch is to be shown to mean the same, which takes memory
            too.
        numerics: see `core.numerics.Wish`.
        commits: to the store, a step.
        has_lines: the user's own loop makes the steps, and may accumulate.
        classic: name of the only technique whose plans are looked at.
        compares: techniques are predicted too, for people.
    """

    allow: Collection[str]
    may_split: bool
    clips_norm: bool
    load_bytes: int
    like: Plan | None = None
    scheme: Scheme | None = None
    checks_split: bool = True
    numerics: Wish = "auto"
    commits: float = 0.0
    has_lines: bool = False
    classic: str | None = None
    compares: bool = False


def commits_a_step(durability: Durability) -> float:
    """Returns how many commits a step brings with it."""
    if isinstance(durability, int):
        return 1.0 / durability
    return 1.0 if durability == "step" else 0.0


class Traces(dict[tuple[ComputeDtype, int | None], Profile]):
    """Profiles of one batch by dtype and chunks of the loss, for questions that are asked several
    times.

    Attributes:
        costs: of plans, by dtype, chunks of the loss and formats of states and frozen weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[Any, PlanCosts] = {}


def choose(
    problem: Problem,
    sample: Any,
    first: Profile,
    budget: Budget,
    hardware: Hardware,
    machine: PlannedMachine,
    wanted: Wanted,
    traces: Traces | None = None,
) -> Choice:
    """Chooses the fastest plan that fits.

    It looks at the loss whole and, where it is a known one, in chunks, in every dtype and format of
    states that is allowed.

    Args:
        problem: what is trained.
        sample: a batch.
        first: its profile in the given dtype with the loss whole, for all `problem.counts`.
        budget: of the device.
        hardware: what plans are priced on.
        machine: the limits of host memory and disk are its.
        wanted: what is allowed, and what plans must leave room for.
        traces: further profiles of the batch, which are kept there.

    Raises:
        DoesNotFitError: no plan does.
    """
    search = _Search(problem, sample, first, budget, hardware, machine, wanted)
    search.traces = Traces() if traces is None else traces
    search.run()
    best = search.best()
    load_bytes = wanted.load_bytes
    if budget.limit_bytes is not None and load_bytes > budget.limit_bytes:
        raise Refusal(
            budget=budget,
            peak_bytes=best.found.timeline.peak_bytes,
            plan=best.found.name,
            report=f"the process as it is, {format_bytes(load_bytes)}",
            advice=(
                "memfit.empty, which builds a model without its weights",
                "an optimizer that makes its states when it steps",
            ),
            load_bytes=load_bytes,
            varies=machine.counts_process,
        ).error()
    why = _why_regrouped(best, min(search.unchanged_s, default=None))
    return replace(best, reason=best.reason + search.untried, why=why)


def keeps_batch_whole(
    problem: Problem,
    sample: Any,
    found: Profile,
    budget: Budget,
    hardware: Hardware,
    machine: PlannedMachine,
    wanted: Wanted,
) -> bool:
    """Tells from a trace of the whole batch alone that no plan that cuts it would be chosen.

    So it is where a plan for the whole batch fits and takes so little above the least that any
    takes that microbatches, which regroup sums, cannot gain as much as they must. A loss that adds
    up over microbatches takes no fewer operations in several of them, each at most as fast as its
    smaller classes are; one that does not is cut only where that is allowed, and then this is not
    told.

    Args:
        problem: as for `choose`, like the others.
        sample: a batch.
        found: its profile, with the trace of the whole batch.
        budget: of the device.
        hardware: what plans are priced on.
        machine: the limits of host memory and disk are its.
        wanted: what is allowed, and what plans must leave room for.
    """
    if NONADDITIVE in wanted.allow or wanted.like is not None:
        return False
    search = _Search(problem, sample, found, budget, hardware, machine, wanted)
    try:
        return search.keeps_whole()
    except DoesNotFitError:
        return False


class _Search:
    """One search over ways to compute: (dtype, tokens of a chunk of the loss).

    Attributes:
        choices: plans that fit, with the number of their way; a smaller one is more exact.
        refusals: what did not fit.
        unchanged_s: least seconds of plans with plain PyTorch's own sums.
        untried: why the loss was not tried in chunks, in words.
        traces: profiles in other ways than the first one's.
    """

    def __init__(
        self,
        problem: Problem,
        sample: Any,
        first: Profile,
        budget: Budget,
        hardware: Hardware,
        machine: PlannedMachine,
        wanted: Wanted,
    ) -> None:
        self._problem = problem
        self._sample = sample
        self._first = first
        self._budget = budget
        self._hardware = hardware
        self._machine = machine
        self._wanted = wanted
        self.choices: list[tuple[int, Choice]] = []
        self.refusals: list[DoesNotFitError] = []
        self.unchanged_s: list[float] = []
        self.untried = ""
        self.traces = Traces()
        # By dtype: of each format, seconds that no plan with the loss in chunks takes less than.
        self._chunked_least_s: dict[ComputeDtype, list[float]] = {}

    def run(self) -> None:
        """Looks at the ways in the order of their speed, as far as they can still win: a trace of
        each costs seconds.
        """
        ways = list(product(self._dtypes(), self._chunks()))
        least_s = [_compute_seconds(self._first, in_dtype(self._hardware, compute), compute) for compute, _ in ways]
        for way in sorted(range(len(ways)), key=lambda w: (least_s[w], w)):
            compute, chunk = ways[way]
            best_s = min((choice.found.weighed_s for _, choice in self.choices), default=math.inf)
            if best_s < _SURELY_LESS * least_s[way]:
                self.unchanged_s.append(least_s[way])  # may fit, for all that is known
                break
            if chunk is not None and best_s <= weighed_seconds(self._chunked_s(compute), regroups=True):
                continue
            self._try_way(way, compute, chunk)

    def keeps_whole(self) -> bool:
        """Answers `keeps_batch_whole`.

        Raises `DoesNotFitError` if no plan for the whole batch fits.
        """
        given = ComputeDtype.GIVEN

        def plan(hardware: Hardware) -> PlanChoice:
            speeds = in_dtype(hardware, given)
            return self._plan(self._first, speeds, given, None, StateFormat.GIVEN)

        found = plan(self._hardware)
        if found.weighed_s > weighed_seconds(found.least_s, regroups=True):
            return False
        least_s = plan(at_rates_of_smaller(self._hardware)).least_s
        return found.weighed_s <= weighed_seconds(least_s, regroups=True)

    def best(self) -> Choice:
        """Returns the fastest choice; of equally fast ones the more exact.

        Raises `DoesNotFitError` if there is none.
        """
        if not self.choices:
            raise _refusal(self.refusals, self._wanted.load_bytes, varies=self._machine.counts_process)
        return min(self.choices, key=lambda found: (found[1].found.weighed_s, found[0]))[1]

    def _dtypes(self) -> list[ComputeDtype]:
        """Returns the dtypes that are allowed, the more exact first."""
        allow, like = self._wanted.allow, self._wanted.like
        if like is not None:
            return [like.compute_dtype]
        is_fast = (
            self._hardware.device != "cpu"
        )  # a CPU gains no speed from fp16's products: there such a plan must be given
        wanted = {
            ComputeDtype.BFLOAT16: "bf16" in allow or WITHOUT_MASTERS in allow,
            ComputeDtype.FLOAT16: "fp16" in allow and is_fast,
            ComputeDtype.FLOAT16_WEIGHTS: FP16_WEIGHTS in allow and is_fast,
        }
        chosen = [one for one, is_wanted in wanted.items() if is_wanted and unfit_for(one, self._problem.model) is None]
        return [ComputeDtype.GIVEN, *chosen]

    def _chunks(self) -> list[int | None]:
        model = self._problem.model
        # The loss of lines of the user's own is computed where nobody can cut it.
        may_chunk = self._wanted.numerics != "exact" and not self._wanted.has_lines and knows_loss(model)
        return [None, chunk_tokens(model)] if may_chunk else [None]

    def _formats(self) -> list[StateFormat]:
        if self._wanted.like is not None:
            return [self._wanted.like.state_format]
        return [StateFormat.GIVEN, *(one for one in STATE_FORMATS if one.allowance in self._wanted.allow)]

    def _frozen_formats(self, compute: ComputeDtype) -> list[FrozenFormat]:
        """Returns the formats of frozen weights that are allowed, as they are first."""
        if self._wanted.like is not None:
            return [self._wanted.like.frozen_format]
        others = [one for one in FrozenFormat if one is not FrozenFormat.GIVEN and one.allowance in self._wanted.allow]
        # A store has bytes of weights as they are, and masters are of weights that are rounded
        # anew.
        goes = not compute.has_masters and self._wanted.scheme is None and not self._wanted.commits
        return [FrozenFormat.GIVEN, *(others if goes else ())]

    def _try_way(self, way: int, compute: ComputeDtype, chunk: int | None) -> None:
        problem = self._problem
        is_first = compute is ComputeDtype.GIVEN and chunk is None
        try:
            traced = self._first if is_first else self._traced(compute, chunk)
        except UnsupportedError as error:
            if chunk is None:
                raise
            if not isinstance(error, LossNotChunkedError):
                self.untried = f" The loss was not tried in chunks: {str(error).splitlines()[0]}."
            return
        speeds = in_dtype(self._hardware, compute)
        for states, frozen in product(self._formats(), self._frozen_formats(compute)):
            profile = with_frozen(problem.model, problem.with_states(traced, compute, states), frozen)
            if states is not StateFormat.GIVEN and not any(profile.encoded_elements.values()):
                continue
            if frozen is not FrozenFormat.GIVEN and not any(block.encoded for block in profile.blocks):
                continue
            try:
                others_s = min((c.found.weighed_s for _, c in self.choices), default=math.inf)
                found = self._plan(profile, speeds, compute, chunk, states, frozen, others_s=others_s)
            except DoesNotFitError as error:
                self.refusals.append(error)
                if chunk is None:
                    self._chunked_least_s.setdefault(compute, []).append(0.0)
                continue
            if chunk is None:
                # With room to spare sums stay plain PyTorch's: that chunks compute less is no
                # reason.
                roomier_s = 0.0
                if found.roomier_s is not None:
                    roomier_s = found.roomier_s - seconds_of_loss(problem.model, profile, speeds)
                self._chunked_least_s.setdefault(compute, []).append(max(found.least_s, roomier_s))
            if found.unchanged_s is not None:
                self.unchanged_s.append(found.unchanged_s)
            choice = Choice(
                plan=found.plan, reason=_words(found, found.plan, speeds), profile=profile, hardware=speeds, found=found
            )
            self.choices.append((way, choice))

    def _chunked_s(self, compute: ComputeDtype) -> float:
        """Seconds that plans with the loss in chunks are taken to take at least, in a dtype: those
        of plans with the loss whole that have room for all, or for the logits.
        """
        return min(self._chunked_least_s.get(compute, [0.0]))

    def _traced(self, compute: ComputeDtype, chunk: int | None) -> Profile:
        key = compute, chunk
        if key not in self.traces:
            counts = self._problem.counts(self._sample)
            how: dict[str, Any] = {"chunk_tokens": chunk, "compute": compute, "like": self._first}
            self.traces[key] = self._problem.profile(self._sample, counts, **how)
        return self.traces[key]

    def _plan(
        self,
        profile: Profile,
        speeds: Hardware,
        compute: ComputeDtype,
        chunk: int | None,
        states: StateFormat,
        frozen: FrozenFormat = FrozenFormat.GIVEN,
        *,
        others_s: float = 0.0,
    ) -> PlanChoice:
        wanted, machine = self._wanted, self._machine
        # In another dtype other kernels are compiled, and kept, by libraries that are yet to begin.
        more = max(0, profile.kernel_bytes - self._first.kernel_bytes)
        more = more + library_bytes_to_come(profile.libraries) if machine.counts_process else 0
        budget = replace(self._budget, base_bytes=self._budget.base_bytes + more)
        may_be_chunked = chunk is None and len(self._chunks()) > 1
        checks = wanted.checks_split and NONADDITIVE not in wanted.allow
        return choose_plan(
            accumulated(profile) if wanted.has_lines else profile,
            budget,
            speeds,
            allow=frozenset(wanted.allow),
            clips_norm=wanted.clips_norm,
            compute=compute,
            splits_allowed=wanted.may_split,
            like=wanted.like,
            tiers=machine.tiers,
            limits=machine.limits.by_tier,
            scheme=wanted.scheme,
            checked_rows=checked_rows(self._problem.cut) if checks else 0,
            # Sums are as the lines make them, in any plan.
            numerics="auto" if wanted.has_lines else wanted.numerics,
            commits=wanted.commits,
            decided={"loss_chunk_tokens": chunk, "state_format": states, "frozen_format": frozen},
            classic=wanted.classic,
            others_s=others_s,
            more_bytes=bytes_of_loss(self._problem.model, profile) if may_be_chunked else None,
            compares=wanted.compares,
            costs=self.traces.costs.setdefault((compute, chunk, states, frozen), PlanCosts()),
        )


def _why_regrouped(choice: Choice, unchanged_s: float | None) -> str:
    if not choice.found.regroups:
        return ""
    if unchanged_s is None:
        return "no plan that adds up as plain PyTorch does is predicted to fit"
    seconds = choice.found.timeline.seconds
    return (
        f"{format_seconds(seconds)} a step are predicted, {1 - seconds / unchanged_s:.0%} less than the {format_seconds(unchanged_s)} "
        "that any plan with plain PyTorch's own sums would take at least"
    )


def _compute_seconds(profile: Profile, hardware: Hardware, compute: ComputeDtype) -> float:
    """Seconds of the work of a whole batch, in the size of microbatches that has least of it: no
    plan takes less. In another dtype than was traced, the products alone, at the fastest rate.
    """
    fastest = fastest_products_per_s(hardware)

    def seconds(trace: TraceProfile) -> float:
        if compute is not ComputeDtype.GIVEN or not any(call.forward_work for call in trace.calls):
            return sum(call.forward_flops + call.backward_flops for call in trace.calls) / fastest
        works = [work for call in trace.calls for work in (call.forward_work, call.backward_work)]
        return work_seconds(summed((work, 1.0) for work in works), hardware)

    return min(-(-profile.batch_rows // rows) * seconds(trace) for rows, trace in profile.traces.items())


def _words(found: PlanChoice, plan: Plan, hardware: Hardware) -> str:
    words = [found.reason]
    if plan.loss_chunk_tokens is not None:
        words.append(f"The loss runs in chunks of {plan.loss_chunk_tokens} tokens.")
    if plan.compute_dtype is ComputeDtype.FLOAT16:
        words.append("The forward runs under autocast to fp16, and losses are scaled.")
    elif plan.compute_dtype is ComputeDtype.FLOAT16_WEIGHTS:
        words.append("Weights compute in fp16, rounded from fp32 masters, and losses are scaled.")
    elif plan.compute_dtype is not ComputeDtype.GIVEN:
        kept = "rounded from fp32 masters" if not plan.drops_masters else "without masters, rounded stochastically"
        words.append(f"Weights compute in bf16, {kept}.")
    if plan.state_format is not StateFormat.GIVEN:
        words.append(f"Optimizer states rest in {plan.state_format}.")
    if plan.frozen_format is not FrozenFormat.GIVEN:
        words.append(f"Frozen weights of linear layers rest in {plan.frozen_format}.")
    if measured := hardware.origin.get("measured"):
        words.append(f"Seconds are priced with rates that memfit probe measured ({measured}).")
    return " ".join(words)


def _refusal(refusals: Sequence[DoesNotFitError], load_bytes: int, *, varies: bool) -> DoesNotFitError:
    """The refusal that asks for least, with a limit that holds from the load on."""
    refusal = min(refusals, key=lambda error: error.smallest_limit_bytes or float("inf"))
    if not isinstance(refusal.refusal, Refusal):
        return refusal
    return replace(refusal.refusal, load_bytes=load_bytes, varies=varies).error()


# A plan that fits beside what looking for it takes of a process.
#
# In: what measures the room, and what looks for a plan in it. Out: the plan; or the refusal, whose
# smallest limit holds what a search takes.

# To look for a plan takes 2 to 7 MiB of a process, and less each time that it is done again.
_MOST_CHOICES = 6
# So often a limit that is to be named is tried, each time beside what the last one took.
_MOST_TRIALS = 3
_ADVICE = ("a larger limit", "a process that holds less before memfit.fit")


def choose_in_room(
    found: Profile, budget: Callable[..., Budget], choose: Callable[[Profile, Budget, Traces], Choice]
) -> tuple[Choice, Budget]:
    """Chooses a plan that fits beside what is held when it has been chosen: to look for one, and to
    load what it computes with, takes of a process, too. What that is, only the plan tells: parts of
    two sizes have kernels each. So what was missing is kept free when a plan is looked for again.

    Where none fits, the same is done with the limit that is to be named: a search that finds plans
    takes more of the process than one that finds none.

    Args:
        found: profile that plans are looked for with.
        budget: measures what is left to tensors under a profile, and a plan if there is one.
        choose: looks for a plan, and keeps what it traces.

    Returns:
        The plan, and what is left to its tensors.

    Raises:
        DoesNotFitError: no plan fits, or none that was found did when it had been found.
    """
    # Looked for again in less room, the same is traced and predicted.
    traces = Traces()
    choice = _Choosing(found, budget, lambda found, room: choose(found, room, traces))
    begun = budget(found)
    try:
        return choice.run(begun)
    except DoesNotFitError as error:
        raise choice.beside_a_search(error, begun) from None


class _Choosing:
    """Looks for a plan, beside what that takes of the process.

    Args:
        found, budget: as in `choose_in_room`.
        choose: looks for a plan in a room.
    """

    def __init__(
        self, found: Profile, budget: Callable[..., Budget], choose: Callable[[Profile, Budget], Choice]
    ) -> None:
        self._found, self._budget, self._choose = found, budget, choose

    def run(self, room: Budget) -> tuple[Choice, Budget]:
        """Looks for a plan until one fits beside what it took to be found.

        Args:
            room: at the beginning; what is held later is measured, under the same limit.

        Raises:
            DoesNotFitError: as `choose_in_room`.
        """
        limit_bytes = room.limit_bytes
        missing, grown, attempt = 0, 0, 0
        while True:
            attempt += 1
            chosen = self._keeping_free(missing, grown, room)
            left = replace(self._budget(chosen.profile, chosen.plan), limit_bytes=limit_bytes)
            peak = chosen.found.timeline.peak_bytes
            if left.tensor_bytes is None or peak <= left.tensor_bytes:
                return chosen, left
            if attempt == _MOST_CHOICES:
                name = chosen.found.name
                raise Refusal(budget=left, peak_bytes=peak, plan=name, report="", advice=_ADVICE, varies=True).error()
            missing += peak - left.tensor_bytes
            del chosen
            gc.collect()  # what was looked at goes: the next search takes its place
            before, room = room, replace(self._budget(self._found), limit_bytes=limit_bytes)
            # The next search may take as much as the last one did, which is there now.
            grown = max(0, room.base_bytes - before.base_bytes)
            missing = max(0, missing - grown)

    def _keeping_free(self, least: int, more: int, room: Budget) -> Choice:
        """Chooses a plan with so many bytes kept free at least, and with more where one fits beside
        them, too.

        Raises:
            DoesNotFitError: no plan fits with the least.
        """
        within = replace(room, base_bytes=room.base_bytes + least)
        if more:
            with contextlib.suppress(DoesNotFitError):
                return self._choose(self._found, replace(within, base_bytes=within.base_bytes + more))
        return self._choose(self._found, within)

    def beside_a_search(self, error: DoesNotFitError, begun: Budget) -> DoesNotFitError:
        """Returns the refusal of a limit of a process, beside what the next search takes, at the
        limit that is named: it is made here.

        Args:
            error: the refusal.
            begun: the room at the beginning, as the next process has it.
        """
        refusal = error.refusal
        if not isinstance(refusal, Refusal) or not refusal.varies:
            return error
        # Its frames hold what was looked at, in cycles: the next search takes that memory again.
        error.__traceback__ = None
        for _ in range(_MOST_TRIALS):
            gc.collect()
            refusal = _beside(refusal, self._budget(self._found))
            try:
                _, left = self.run(replace(begun, limit_bytes=refusal.smallest_limit_bytes))
            except DoesNotFitError as again:
                if not isinstance(again.refusal, Refusal):
                    break
                refusal = _beside(refusal, again.refusal.budget)
            else:
                return _beside(refusal, left).error()
        return _beside(refusal, self._budget(self._found)).error()


def _beside(refusal: Refusal, budget: Budget) -> Refusal:
    """The same beside what is held now, where that is more."""
    base = max(refusal.budget.base_bytes, budget.base_bytes)
    return replace(refusal, budget=replace(refusal.budget, base_bytes=base))
