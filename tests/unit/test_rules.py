"""The rules take the fastest plan that fits, say what stands in the way, and know the answers of the literature."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.hardware import Hardware, Link, Rate, TierSpec
from memfit.core.limits import MIB, Budget
from memfit.core.numerics import regroups_sums, weighed_seconds
from memfit.core.plan import CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import CallProfile, Profile
from memfit.core.saved_policies import Saved
from memfit.core.step import Timeline
from memfit.core.tiers import Tier
from memfit.core.work_kinds import Work, WorkKind
from memfit.planner.search import uniform_search
from memfit.planner.search.candidates import decided_calls, find_tail, list_candidates
from memfit.planner.search.planner import choose_plan
from memfit.planner.search.pricing import BuiltCandidate, PlanCosts, PlanQuestion, PricedCandidate, Refusal
from memfit.step.build import build_forward, build_step
from memfit.step.lower import lower
from memfit.step.predict import Appraisal, predict
from unit.checking import check_schedule
from unit.profiles import PAGE, chain_profile, gpt_profile


def machine(*, disk_bytes: int = 1 << 40) -> Hardware:
    return Hardware(
        device="cpu",
        flops_per_s=1e11,
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 40),
            Tier.DISK: TierSpec(nbytes=disk_bytes, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)),
        },
    )


def limit(nbytes: int) -> Budget:
    return Budget(limit_bytes=nbytes)


def wide_profile() -> Profile:
    """Layers of 3 MiB, so that they may leave, and activations that are worth cutting."""
    return gpt_profile(layers=3, width=256, vocabulary=4096, tokens=64, batch_rows=4, rows=(4, 2, 1), factor=16)


def activations_peak(timeline: Timeline) -> int:
    return max(sum(m.by_category[name] for name in ("activation", "logits", "transient")) for m in timeline.moments)


def predicted(plan: Plan, profile: Profile) -> Timeline:
    return predict(lower(build_step(plan, profile, clips_norm=False), plan, profile, staging_bytes=0), machine())


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_a_batch_cut_in_m_divides_saved_activations_by_m(microbatches: int) -> None:
    profile = chain_profile(length=10, batch_rows=8, unit=8 * PAGE)
    whole = activations_peak(predicted(Plan(), profile))
    cut = activations_peak(predicted(Plan(microbatches=microbatches, order=Order.MICROBATCH_MAJOR), profile))
    added = 4 * 1024  # one link's gradient is added to the one of the microbatch before
    assert cut - added <= whole / microbatches <= cut


def test_where_accumulation_alone_fits_nothing_is_recomputed_unless_that_is_faster() -> None:
    profile = gpt_profile(layers=8, batch_rows=8, rows=(8, 4, 2, 1))
    accumulation = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
    alone = predicted(accumulation, profile)
    choice = choose_plan(profile, limit(alone.peak_bytes), machine(), tiers=(), staging_bytes=0)
    recomputes = any(c.saved is not Saved.KEEP for c in choice.plan.calls)
    assert not recomputes or choice.timeline.seconds < alone.seconds
    assert choice.timeline.seconds <= alone.seconds
    # With activations that cost nothing to compute again it is the other way round.
    slow_to_enter = replace(machine(), flops_per_s=1e18, rates={WorkKind.FRAMES: Rate(1e3)})
    other = choose_plan(profile, limit(alone.peak_bytes), slow_to_enter, tiers=(), staging_bytes=0)
    # Accumulation regroups sums, so that a plan that does not may take a little longer.
    accumulated = lower(build_step(accumulation, profile, clips_norm=False), accumulation, profile)
    assert other.weighed_s <= weighed_seconds(predict(accumulated, slow_to_enter).seconds, regroups=True)


# ---- the choice ----


def test_without_a_limit_nothing_moves_and_nothing_is_cut() -> None:
    choice = choose_plan(wide_profile(), Budget(limit_bytes=None), machine())
    assert choice.plan == Plan()
    assert choice.built == 1


@pytest.mark.parametrize("clips_norm", [False, True])
def test_every_budget_gets_a_legal_plan_inside_it_and_more_room_is_never_slower(clips_norm: bool) -> None:
    profile = wide_profile()
    plain = predict(lower(build_step(Plan(), profile, clips_norm=False), Plan(), profile, staging_bytes=0)).peak_bytes
    slowest = math.inf
    for share in (0.4, 0.5, 0.7, 1.0):
        budget = limit(int(plain * share) + 2 * MIB)
        choice = choose_plan(profile, budget, machine(), clips_norm=clips_norm, staging_bytes=MIB)
        check_schedule(choice.schedule, choice.plan, profile, clips_norm=clips_norm)
        assert all(m.peak_bytes <= (budget.tensor_bytes or 0) for m in choice.timeline.moments)
        assert choice.timeline.seconds <= slowest
        slowest = choice.timeline.seconds


def test_between_two_uniform_plans_the_best_number_of_calls_is_found() -> None:
    """Every number of last calls with every faster policy is built here."""
    layers = 5
    profile = gpt_profile(layers=layers, width=256, vocabulary=512, tokens=64, batch_rows=2, rows=(2,), factor=16)
    calls = sorted(decided_calls(profile.traces[2]))
    every: list[tuple[int, int, float]] = []  # peaks of the leaner plan and of the mixed one, seconds
    for lean, fast in itertools.permutations((Saved.KEEP, Saved.SELECT, Saved.RECOMPUTE), 2):
        found: list[Timeline] = []
        for count in range(layers + 1):
            policies = [CallPlan() for _ in profile.traces[2].calls]
            for place, index in enumerate(calls):
                policies[index] = CallPlan(saved=fast if place >= layers - count else lean)
            found.append(predicted(Plan(calls=tuple(policies)), profile))
        every += [(found[0].peak_bytes, one.peak_bytes, one.seconds) for one in found]
    slowest, mixed = math.inf, 0
    for peak in sorted({max(lean, peak) for lean, peak, _ in every}):
        choice = choose_plan(profile, limit(peak), machine(), tiers=(), staging_bytes=0)
        assert choice.timeline.peak_bytes <= peak
        assert choice.timeline.seconds <= min(s for a, b, s in every if max(a, b) <= peak) * (1 + 1e-9)
        assert choice.timeline.seconds <= slowest
        slowest = choice.timeline.seconds
        mixed += len({choice.plan.calls[index].saved for index in calls}) > 1 if choice.plan.calls else 0
    assert mixed >= layers - 1


def with_work(profile: Profile, *, of_two_kinds: bool, operations: float = 60.0, spared: float = 0.9) -> Profile:
    """The same with work of its calls, of which a share is spared where their products are kept; of two kinds: every
    other one makes many small operations and no products.
    """

    def worked(call: CallProfile) -> CallProfile:
        if not call.is_repeated:
            return call
        (held,), flops = call.held_results, float(call.forward_flops)
        if of_two_kinds and call.index % 2:
            few: Work = ((WorkKind.OPERATIONS, operations), (WorkKind.STREAMED, 1e6))
            held = replace(held, nbytes=held.nbytes // 2, spared_work=())
            return replace(
                call, forward_work=few, backward_work=few, forward_flops=0, backward_flops=0, held_results=(held,)
            )
        few = ((WorkKind.OPERATIONS, operations / 6),)
        held = replace(held, nbytes=held.nbytes // 8, spared_work=((WorkKind.FLOPS, spared * flops),))
        return replace(
            call,
            forward_work=((WorkKind.FLOPS, flops), *few),
            backward_work=((WorkKind.FLOPS, 2 * flops), *few),
            held_results=(held,),
        )

    traces = {rows: replace(trace, calls=tuple(map(worked, trace.calls))) for rows, trace in profile.traces.items()}
    return replace(profile, traces=traces)


@pytest.mark.parametrize("of_two_kinds", [None, False, True])
def test_plans_between_two_are_left_out_only_where_none_of_them_could_win(
    monkeypatch: pytest.MonkeyPatch, of_two_kinds: bool | None
) -> None:
    """The same choices as where every pair is followed to its end, whatever bounds say of bytes and of seconds, from
    fewer plans; and no bound is above a plan.
    """
    profile = gpt_profile(layers=6, width=320, vocabulary=2048, tokens=32, batch_rows=4, rows=(4, 2, 1))
    profile = profile if of_two_kinds is None else with_work(profile, of_two_kinds=of_two_kinds)
    every = predicted(Plan(), profile).peak_bytes
    limits = [limit(every * share // 20 + 6 * MIB) for share in range(3, 20)]
    build, count, built = uniform_search._Pair.build, PlanQuestion.build, 0

    def built_above_its_bound(pair: Any, number: int, index: int) -> Any:
        bound_s = pair._bound_s(number)
        found = build(pair, number, index)
        assert found.weighed_s >= bound_s * (1 - 1e-9)
        return found

    def counted(question: PlanQuestion, priced: PricedCandidate) -> BuiltCandidate:
        nonlocal built
        built += 1
        return count(question, priced)

    def answers() -> list[tuple[float, int]]:
        found: list[tuple[float, int]] = []
        for one in limits:
            with contextlib.suppress(DoesNotFitError):
                choice = choose_plan(profile, one, machine())
                found.append((choice.weighed_s, choice.timeline.peak_bytes))
        return found

    monkeypatch.setattr(uniform_search._Pair, "build", built_above_its_bound)
    monkeypatch.setattr(PlanQuestion, "build", counted)
    short, of_short = answers(), built
    monkeypatch.setattr(uniform_search, "_may_fit", lambda *_: True)
    built = 0
    assert answers() == short
    of_seconds = built
    monkeypatch.setattr(
        uniform_search._Pair, "_may_win", lambda pair, count, _: pair._fast.weighed_bound <= pair._bound_s(count)
    )
    built = 0
    assert answers() == short
    assert len(short) > 8
    assert 0 < of_short < of_seconds < built


@pytest.mark.parametrize("seed", [6, 7, 42])
def test_where_a_faster_plan_begins_to_fit_what_lies_between_is_still_found(seed: int) -> None:
    """Layers of different lengths, whose saved tensors a slow disk takes as long for as they compute: a plan may be
    slower by its waits than those with fewer calls of its policy. One byte less than each uniform plan needs, and that.
    """
    rng = random.Random(seed)
    slowest, asked = math.inf, 0
    for _ in range(4):
        layers, factor = rng.choice([3, 4, 5]), rng.choice([2, 4, 8])
        profile = gpt_profile(
            layers=layers, width=64, vocabulary=64, tokens=1024, batch_rows=1, rows=(1,), factor=factor
        )
        longer = [rng.choice([0.2, 1.0, 1.0, 4.0]) for _ in profile.traces[1].calls]
        calls = tuple(
            replace(
                call,
                forward_flops=int(call.forward_flops * times),
                backward_flops=int(call.backward_flops * times),
                held_results=(),
            )
            for call, times in zip(profile.traces[1].calls, longer, strict=True)
        )
        profile = replace(profile, traces={1: replace(profile.traces[1], calls=calls)})
        per_s = (factor + 1) * 1e10 / (6 * 64 * rng.uniform(0.3, 3.0))
        link = Link(read_bytes_per_s=per_s, write_bytes_per_s=per_s)
        away = {Tier.DEVICE: TierSpec(nbytes=1 << 40), Tier.DISK: TierSpec(nbytes=1 << 40, link=link)}
        hardware = Hardware(device="cpu", flops_per_s=1e10, tiers=away)
        uniform = list_candidates(profile, microbatches=1, tiers=(Tier.DISK,), clips_norm=False)
        peaks = {predicted(candidate.plan, profile).peak_bytes for candidate in uniform}
        slowest, costs = math.inf, PlanCosts()
        for nbytes in sorted({peak - more for peak in peaks for more in (0, 1)}):
            with contextlib.suppress(DoesNotFitError):
                choice = choose_plan(profile, limit(nbytes), hardware, staging_bytes=0, costs=costs)
                assert choice.weighed_s <= slowest * (1 + 1e-9), f"{layers} layers, {nbytes} bytes"
                slowest, asked = choice.weighed_s, asked + 1
    assert asked > 20


def test_between_segments_of_several_calls_and_calls_of_their_own_plans_are_legal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints of segments beside kept products, where these are few and slow."""
    profile = gpt_profile(layers=9, width=64, vocabulary=256, tokens=256, batch_rows=2, rows=(2,))
    profile = with_work(profile, of_two_kinds=False, operations=36.0, spared=0.02)
    make, made = uniform_search._Pair._plan, list[Plan]()

    def noted(pair: Any, count: int) -> Plan:
        made.append(make(pair, count))
        return made[-1]

    monkeypatch.setattr(uniform_search._Pair, "_plan", noted)
    for kib in range(9200, 10300, 100):
        choose_plan(
            profile, limit(kib << 10), machine(), tiers=(), splits_allowed=False, clips_norm=True, staging_bytes=0
        )
    segments = [plan for plan in made if any(call.joins_previous for call in plan.calls)]
    assert any({call.saved for call in plan.calls} >= {Saved.SELECT, Saved.RECOMPUTE} for plan in segments)
    for plan in segments:
        check_schedule(build_step(plan, profile, clips_norm=True), plan, profile, clips_norm=True)


@pytest.mark.parametrize("shares", [(5, 3, 7, 4, 10), (3, 10, 4, 7, 5)])
def test_questions_that_share_what_plans_cost_get_the_plans_of_questions_that_do_not(shares: tuple[int, ...]) -> None:
    profile, costs = wide_profile(), PlanCosts()
    for share, clips_norm in zip(shares, (False, False, True, False, False), strict=True):
        budget = limit(12 * MIB * share)
        alone = choose_plan(profile, budget, machine(), clips_norm=clips_norm, staging_bytes=MIB)
        shared = choose_plan(profile, budget, machine(), clips_norm=clips_norm, staging_bytes=MIB, costs=costs)
        assert shared == alone


def test_what_a_plan_costs_is_found_once() -> None:
    costs, found = PlanCosts().under("a machine"), [0]

    def find() -> Appraisal:
        found[0] += 1
        return Appraisal(peaks={Tier.DEVICE: found[0]}, seconds=1.0)

    plans = [Plan(), Plan(microbatches=2), Plan(calls=(CallPlan(saved=Saved.SELECT),)), Plan()]
    assert [costs.of(plan, find).peak_bytes for plan in plans] == [1, 2, 3, 1]
    assert costs.under("a machine").of(Plan(), find).peak_bytes == 1
    assert costs.under("another one").of(Plan(), find).peak_bytes == 4


def test_no_candidate_that_fits_is_faster_than_the_chosen_one() -> None:
    """All candidates are built here, without bounds."""
    profile = gpt_profile(layers=2, width=320, vocabulary=2048, tokens=32, batch_rows=2, rows=(2, 1))
    every = [
        (
            candidate,
            predict(lower(build_step(candidate.plan, profile, clips_norm=False), candidate.plan, profile), machine()),
        )
        for count in (1, 2)
        for candidate in list_candidates(profile, microbatches=count, tiers=(Tier.DISK,), clips_norm=False)
    ]
    peaks = sorted({t.peak_bytes for _, t in every})
    for budget in (peaks[0], peaks[len(peaks) // 3], peaks[-1]):
        choice = choose_plan(profile, limit(budget), machine())
        fastest = min(
            weighed_seconds(t.seconds, regroups=regroups_sums(c.plan, profile))
            for c, t in every
            if t.peak_bytes <= budget
        )
        assert choice.weighed_s == fastest
    with pytest.raises(DoesNotFitError) as error:
        choose_plan(profile, limit(peaks[0] - 1), machine())
    assert error.value.smallest_limit_bytes == peaks[0]


def test_the_reason_tells_why_microbatches_do_not_take_turns() -> None:
    profile = gpt_profile(layers=8, batch_rows=8, rows=(8, 4, 2, 1))
    alone = predicted(Plan(microbatches=8, order=Order.MICROBATCH_MAJOR), profile)
    told = "Microbatches run one after the other: a forward changes \"count['calls']\""
    for carried in ((), ("count['calls']",)):
        one = replace(profile, carried=carried)
        choice = choose_plan(one, limit(alone.peak_bytes), machine(), tiers=(), staging_bytes=0)
        assert choice.plan.microbatches > 1
        assert (told in choice.reason) == bool(carried)
        assert not carried or choice.plan.order is Order.MICROBATCH_MAJOR
    without_limit = choose_plan(replace(profile, carried=("a",)), Budget(limit_bytes=None), machine())
    assert "one after the other" not in without_limit.reason


def test_blocks_of_unequal_size_get_more_buffers_where_there_is_room_for_them() -> None:
    """The vocabulary's visit takes longer than a layer computes: two buffers cannot hide it, four do better, where they fit."""
    profile = gpt_profile(layers=6, width=256, vocabulary=32_768, tokens=64, batch_rows=4, rows=(4, 2, 1), factor=16)
    slow = replace(machine(), flops_per_s=2e11)
    plans = {
        c.plan.prefetch: c.plan
        for c in list_candidates(profile, microbatches=4, tiers=(Tier.DISK,), clips_norm=False)
        if c.plan.order is Order.MICROBATCH_MAJOR
        and any(b.weight_home is Tier.DISK for b in c.plan.blocks.values())
        and c.plan.call(1).saved is Saved.KEEP
    }
    found = {
        prefetch: predict(lower(build_step(plan, profile, clips_norm=False), plan, profile, staging_bytes=0), slow)
        for prefetch, plan in plans.items()
    }
    assert sorted(found) == [0, 1, 3]
    assert found[3].seconds < found[1].seconds < found[0].seconds
    assert found[3].peak_bytes >= found[1].peak_bytes >= found[0].peak_bytes
    for prefetch in (3, 1, 0):
        choice = choose_plan(profile, limit(found[prefetch].peak_bytes), slow, staging_bytes=0)
        assert choice.timeline.seconds <= found[prefetch].seconds


def test_the_same_question_gets_the_same_plan() -> None:
    profile = wide_profile()
    first, second = (choose_plan(profile, limit(60 * MIB), machine(), staging_bytes=MIB) for _ in range(2))
    assert first == second


def test_the_smallest_limit_that_is_named_fits_and_a_byte_less_does_not() -> None:
    profile = wide_profile()
    base = Budget(limit_bytes=MIB, base_bytes=3 * MIB, reserve_bytes=5 * MIB)
    with pytest.raises(DoesNotFitError) as error:
        choose_plan(profile, base, machine())
    smallest = error.value.smallest_limit_bytes
    assert smallest is not None
    assert (
        choose_plan(profile, replace(base, limit_bytes=smallest), machine()).timeline.peak_bytes == smallest - 8 * MIB
    )
    with pytest.raises(DoesNotFitError):
        choose_plan(profile, replace(base, limit_bytes=smallest - 1), machine())


def test_what_stands_in_the_way_is_named() -> None:
    with pytest.raises(DoesNotFitError, match=r"smallest limit that works is (?s:.)*In its way: .*peak") as error:
        choose_plan(wide_profile(), limit(MIB), machine(), tiers=(), splits_allowed=False)
    assert "lm_head" in str(error.value)
    assert "the disk as a tier" in str(error.value)
    # The message has three lines; the whole table is beside it.
    assert len(str(error.value).splitlines()) == 3
    assert len(error.value.report.splitlines()) > 3
    assert type(error.value) is DoesNotFitError


def test_a_refusal_names_one_limit_and_names_it_first() -> None:
    base = Budget(limit_bytes=MIB, base_bytes=3 * MIB, reserve_bytes=5 * MIB)
    with pytest.raises(DoesNotFitError) as error:
        choose_plan(wide_profile(), base, machine())
    smallest, message = error.value.smallest_limit_bytes, str(error.value)
    assert re.findall(r"(\d+) bytes", message) == [str(smallest)]
    assert f"({smallest} bytes)" in message.splitlines()[0]
    assert not re.search(r"-\d", message), "a rest below nothing is not a size"
    told = refused(
        Refusal(budget=base, peak_bytes=MIB, plan="p", report="", advice=("less",), load_bytes=70 * MIB, varies=True)
    )
    assert told.smallest_limit_bytes == 74 * MIB
    assert "70.0 MiB are there at first" in str(told)


def refused(refusal: Refusal) -> DoesNotFitError:
    return refusal.error()


def test_a_plan_that_cuts_the_batch_takes_what_showing_that_takes() -> None:
    profile = wide_profile()
    free = choose_plan(profile, limit(1 << 40), machine())
    assert free.plan.microbatches == 1
    with pytest.raises(DoesNotFitError) as unchecked:
        choose_plan(profile, limit(1), machine())
    with pytest.raises(DoesNotFitError) as checked:
        choose_plan(profile, limit(1), machine(), checked_rows=profile.batch_rows)
    before, after = unchecked.value.smallest_limit_bytes, checked.value.smallest_limit_bytes
    assert before is not None
    assert after is not None
    assert after > before
    found = choose_plan(profile, limit(after), machine(), checked_rows=profile.batch_rows)
    if found.plan.microbatches > 1:
        whole = predict(lower(build_forward(found.plan, profile, 1), found.plan, profile, microbatches=1)).peak_bytes
        assert whole <= after


def test_a_disk_that_is_too_small_is_not_used() -> None:
    profile = wide_profile()
    plain = predicted(Plan(), profile).peak_bytes
    choice = choose_plan(profile, limit(plain * 9 // 10), machine(disk_bytes=MIB), staging_bytes=0)
    assert choice.timeline.peak_in(Tier.DISK) <= MIB
    with pytest.raises(DoesNotFitError, match="disk"):
        choose_plan(profile, limit(plain // 2), machine(), limits={Tier.DISK: -1}, staging_bytes=0)


def test_a_batch_is_not_cut_where_that_changes_its_meaning() -> None:
    profile = wide_profile()
    plain = predicted(Plan(), profile).peak_bytes
    assert (
        choose_plan(profile, limit(plain // 2), machine(), splits_allowed=False, staging_bytes=0).plan.microbatches == 1
    )
    for told in ({"reads_batch_statistics": True}, {"unsplittable_buffers": ("ranges",)}):
        unsplittable = replace(profile, **told)
        assert choose_plan(unsplittable, limit(plain // 2), machine(), staging_bytes=0).plan.microbatches == 1


def test_clipping_by_the_norm_makes_updates_wait() -> None:
    choice = choose_plan(wide_profile(), limit(50 * MIB), machine(), clips_norm=True, staging_bytes=MIB)
    assert choice.plan.update is UpdateTime.AFTER_BACKWARD
    assert sum(str(a) == "norm" for a in choice.schedule) == 1


def test_small_blocks_stay_on_the_device() -> None:
    profile = wide_profile()
    for candidate in list_candidates(profile, microbatches=2, tiers=(Tier.DISK,), clips_norm=False):
        assert "ln_f" not in candidate.plan.blocks


def test_the_tail_begins_behind_the_last_repeated_call() -> None:
    trace = gpt_profile(layers=3).traces[8]
    assert find_tail(trace) == 4
    assert decided_calls(trace) == {1, 2, 3}
    assert find_tail(chain_profile(length=4).traces[1]) is None


def test_a_profile_without_any_candidate_size_is_refused() -> None:
    profile = gpt_profile(layers=1, rows=(3,))
    with pytest.raises(UsageError, match="rows that were traced"):
        choose_plan(profile, limit(MIB), machine())


# ---- telling ----


def test_the_front_falls_in_bytes_as_it_rises_in_seconds_and_marks_the_choice() -> None:
    budget = limit(45 * MIB)
    choice = choose_plan(wide_profile(), budget, machine(), staging_bytes=MIB)
    seconds = [r.seconds for r in choice.front]
    peaks = [r.peak_bytes for r in choice.front]
    assert seconds == sorted(seconds)
    assert peaks == sorted(peaks, reverse=True)
    assert next(r.name for r in choice.front if r.fits) == choice.name
    assert "With " in choice.reason


@pytest.mark.parametrize("is_process", [True, False])
def test_a_refusal_names_what_is_there_before_the_job_for_what_it_is(is_process: bool) -> None:
    """On a device only tensors count: none of its bytes are an interpreter's."""
    budget = Budget(limit_bytes=10 * MIB, base_bytes=7 * MIB)
    refusal = Refusal(budget=budget, peak_bytes=5 * MIB, plan="p", report="", advice=("less",), varies=is_process)
    assert ("7.0 MiB what the process holds before them (interpreter, libraries)" in str(refusal)) == is_process
    assert ("7.0 MiB what is alive on the device beside the job" in str(refusal)) != is_process


# ---- where updates run ----


def accelerator(*, link: float, host_updates: float, device_updates: float = 1e11) -> Hardware:
    way = Link(read_bytes_per_s=link, write_bytes_per_s=link)
    return Hardware(
        device="an accelerator",
        flops_per_s=1e13,
        update_elements_per_s=device_updates,
        host_update_elements_per_s=host_updates,
        # Python's part of an update takes no time here: blocks of a few parameters would wait for it alone.
        rates={WorkKind.PIECES: Rate(1e24)},
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 40),
            Tier.HOST: TierSpec(nbytes=1 << 40, link=way),
            Tier.DISK: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=1e8, write_bytes_per_s=1e8)),
        },
    )


def updates_of(choice: object) -> set[Tier]:
    return {block.update_on for block in choice.plan.blocks.values()}  # type: ignore[attr-defined]


def test_updates_run_on_the_host_where_that_is_predicted_faster_and_not_otherwise() -> None:
    """A limit below weights, gradients and states together, so that states leave. Then twelve bytes a parameter pass the link each way, or four each way."""
    profile = replace(wide_profile(), agrees_on_host=True)
    states = sum(profile.state_bytes.values())
    budget = limit(
        choose_plan(profile, limit(1 << 40), accelerator(link=1e9, host_updates=1e8)).timeline.peak_bytes - states // 2
    )
    slow_link, fast_link = 1e9, 1e12
    taken = {
        (link, rate): updates_of(
            choose_plan(profile, budget, accelerator(link=link, host_updates=rate), tiers=(Tier.HOST, Tier.DISK))
        )
        for link in (slow_link, fast_link)
        for rate in (1e10, 1e5)
    }
    assert Tier.HOST in taken[slow_link, 1e10]
    for (link, rate), found in taken.items():
        if (link, rate) != (slow_link, 1e10):
            assert found == {Tier.DEVICE}, (link, rate)


def test_updates_on_the_host_are_chosen_by_what_both_ways_are_predicted_to_take() -> None:
    """Brute force: the same homes with updates on either processor, and the choice is no slower than the faster of them."""
    profile = replace(wide_profile(), agrees_on_host=True)
    for link, rate in ((1e9, 1e10), (1e9, 3e8), (1e10, 1e8)):
        hardware = accelerator(link=link, host_updates=rate)
        budget = limit(choose_plan(profile, limit(1 << 40), hardware).timeline.peak_bytes * 2 // 3)
        choice = choose_plan(profile, budget, hardware, tiers=(Tier.HOST, Tier.DISK))
        for tier in (Tier.DEVICE, Tier.HOST):
            blocks = {
                name: replace(b, update_on=tier, gradient_home=Tier.HOST, state_home=Tier.HOST)
                for name, b in choice.plan.blocks.items()
            }
            plan = replace(choice.plan, blocks=blocks)
            schedule = build_step(plan, profile, clips_norm=False)
            other = predict(lower(schedule, plan, profile, device=hardware.device), hardware)
            assert choice.timeline.seconds <= other.seconds * (1 + 1e-9) or other.peak_bytes > (budget.limit_bytes or 0)


def test_updates_on_the_host_are_not_looked_at_where_they_cannot_run_or_must_be_exact() -> None:
    profile = replace(wide_profile(), agrees_on_host=True)
    hardware = accelerator(link=1e9, host_updates=1e10)
    budget = limit(
        choose_plan(profile, limit(1 << 40), hardware).timeline.peak_bytes - sum(profile.state_bytes.values()) // 2
    )
    assert Tier.HOST in updates_of(
        choose_plan(profile, budget, hardware, tiers=(Tier.HOST, Tier.DISK), numerics="exact")
    )
    refused = replace(profile, host_update_obstacle="'lr' is a tensor on the device")
    assert updates_of(choose_plan(refused, budget, hardware, tiers=(Tier.HOST, Tier.DISK))) == {Tier.DEVICE}
    rounds = replace(profile, agrees_on_host=False)
    assert updates_of(choose_plan(rounds, budget, hardware, tiers=(Tier.HOST, Tier.DISK), numerics="exact")) == {
        Tier.DEVICE
    }
    processor = replace(hardware, device="cpu")
    assert updates_of(choose_plan(profile, budget, processor, tiers=(Tier.HOST, Tier.DISK))) <= {Tier.DEVICE}
