"""Random models and plans: what is built is legal, and the checker agrees with a slow interpreter about any edit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import PlanError
from memfit.core.plan import CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.schedule import (
    Accumulate,
    Action,
    Backward,
    Clear,
    Fetch,
    Forward,
    Norm,
    Release,
    Schedule,
    Start,
    Update,
)
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.planner.search.bounds import PeakBounds
from memfit.step.build import build_forward, build_step, place_turns
from memfit.step.lower import lower
from memfit.step.predict import predict
from property.random_steps import Case, cases, is_legal
from unit.checking import check_schedule
from unit.profiles import gpt_profile


def with_actions(schedule: Schedule, actions: list[Action]) -> Schedule:
    return replace(schedule, actions=tuple(actions))


def edit(schedule: Schedule, rng: random.Random) -> Schedule:
    """One random edit: leave out, repeat, move or exchange actions, or change a number in one."""
    actions = list(schedule.actions)
    i, j = rng.randrange(len(actions)), rng.randrange(len(actions))
    match rng.randrange(6):
        case 0:
            del actions[i]
        case 1:
            actions.insert(j, actions[i])
        case 2:
            actions.insert(j, actions.pop(i))
        case 3:
            actions[i], actions[j] = actions[j], actions[i]
        case 4:
            # Moves one place only: the edits that are nearest to legal.
            j = max(0, min(len(actions) - 1, i + rng.choice([-1, 1])))
            actions[i], actions[j] = actions[j], actions[i]
        case _:
            block = rng.randrange(len(schedule.blocks))
            kinds = (Fetch, Release, Accumulate, Update, Clear)
            actions.insert(i, rng.choice([*(kind(block) for kind in kinds), Norm()]))
    return with_actions(schedule, actions)


@given(case=cases())
def test_built_schedules_are_legal_to_the_checker_and_to_the_slow_interpreter(case: Case) -> None:
    schedule = build_step(case.plan, case.profile, clips_norm=case.clips_norm)
    check_schedule(schedule, case.plan, case.profile, clips_norm=case.clips_norm)
    assert is_legal(schedule, case.plan, case.profile, clips_norm=case.clips_norm)


@given(case=cases(max_calls=4), seed=st.integers(0, 2**32))
def test_the_checker_and_the_slow_interpreter_agree_about_every_edit(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    schedule = build_step(case.plan, case.profile, clips_norm=case.clips_norm)
    for _ in range(12):
        edited = edit(schedule, rng)
        expected = is_legal(edited, case.plan, case.profile, clips_norm=case.clips_norm)
        try:
            check_schedule(edited, case.plan, case.profile, clips_norm=case.clips_norm)
            found = True
        except PlanError:
            found = False
        assert found == expected, edited.text()


@given(case=cases(max_calls=3), kind=st.sampled_from(["plain", "scaled", "journal"]), seed=st.integers(0, 2**32))
def test_an_action_left_out_doubled_or_exchanged_is_refused_wherever_the_step_would_not_be_the_same(
    case: Case, kind: str, seed: int
) -> None:
    """Every action counts: none may be missing, none may come twice, and only neighbours that know nothing of each other
    may change places. What scales losses and what a journal adds is known to no interpreter here, so it is told by text."""
    plan, rng = case.plan, random.Random(seed)
    if kind == "scaled":
        plan = replace(plan, compute_dtype=ComputeDtype.FLOAT16, update=UpdateTime.AFTER_BACKWARD)
    if kind == "journal":
        homes = {name: replace(homes, gradient_home=Tier.DISK) for name, homes in plan.blocks.items()}
        plan = replace(plan, update=UpdateTime.AFTER_BACKWARD, blocks=homes)
    schedule = build_step(plan, case.profile, clips_norm=case.clips_norm)
    if kind == "journal":
        blocks = [action.block for action in schedule if isinstance(action, Update)]
        schedule = place_turns(schedule, [turn for turn in (blocks[:1], blocks[1:]) if turn])
    check_schedule(schedule, plan, case.profile, clips_norm=case.clips_norm)
    plain = replace(schedule, actions=tuple(a for a in schedule if str(a).split()[0] not in BESIDE_THE_INTERPRETER))
    actions = list(schedule.actions)
    for _ in range(4):
        i, j = rng.randrange(len(actions)), rng.randrange(len(actions))
        for edited in (
            actions[:i] + actions[i + 1 :],
            [*actions[:j], actions[i], *actions[j:]],
            exchanged(actions, i, j),
        ):
            try:
                check_schedule(with_actions(schedule, edited), plan, case.profile, clips_norm=case.clips_norm)
            except PlanError:
                continue
            left = [a for a in edited if str(a).split()[0] not in BESIDE_THE_INTERPRETER]
            assert is_legal(with_actions(plain, left), plan, case.profile, clips_norm=case.clips_norm), "\n".join(
                map(str, [kind, *edited])
            )
            assert keeps_the_order(list(map(str, edited)), kind), with_actions(schedule, edited).text()


BESIDE_THE_INTERPRETER = ("scale", "unscale", "check", "decide", "keep")


def exchanged(actions: list[Action], i: int, j: int) -> list[Action]:
    """Two actions in each other's place."""
    found = list(actions)
    found[i], found[j] = found[j], found[i]
    return found


def keeps_the_order(texts: list[str], kind: str) -> bool:
    """By positions: losses are scaled before any backward and checked before any update; a journal decides before any
    update, when all gradients are at home, and keeps each block once, behind its update."""

    def at(*words: str) -> list[int]:
        return [i for i, text in enumerate(texts) if text.split()[0] in words]

    updates, backwards = at("update"), at("seed", "backward")
    if not updates:
        return True  # nothing trains, so nothing can be lost
    if kind == "scaled":
        if [len(at(word)) for word in ("scale", "unscale", "check")] != [1, 1, 1]:
            return False
        (scale,), (unscale,), (check,) = at("scale"), at("unscale"), at("check")
        return scale < min(backwards) and max(backwards + at("accumulate")) < unscale < check < min(
            [*updates, len(texts)]
        )
    if kind == "journal":
        (decide,) = at("decide")
        kept = [(i, word) for i in at("keep") for word in texts[i].split()[1:]]
        return (
            max(backwards + at("accumulate", "norm")) < decide < min(updates)
            and sorted(word for _, word in kept) == sorted(texts[i].split()[1] for i in updates)
            and all(texts.index(f"update {word}") < i for i, word in kept)
        )
    return True


@given(case=cases())
def test_text_of_a_built_schedule_parses_back_to_the_same(case: Case) -> None:
    schedule = build_step(case.plan, case.profile, clips_norm=case.clips_norm)
    assert Schedule.parse(schedule.text()) == schedule


@given(case=cases(), microbatches=st.integers(1, 3))
def test_forward_only_passes_are_legal_and_hold_nothing_but_forward(case: Case, microbatches: int) -> None:
    schedule = build_forward(case.plan, case.profile, microbatches)
    check_schedule(schedule, case.plan, case.profile, is_training=False)
    assert {type(a) for a in schedule} <= {Start, Fetch, Forward, Release}


@given(case=cases())
def test_every_byte_that_a_step_brings_is_gone_when_it_ends(case: Case) -> None:
    """After the commit only what lives on the device is left: the bytes of before the first action."""
    plan = case.plan
    profile = case.profile
    traces = {-(-profile.batch_rows // plan.microbatches): next(iter(profile.traces.values()))}
    profile = type(profile)(batch_rows=profile.batch_rows, blocks=profile.blocks, traces=traces)
    schedule = build_step(plan, profile, clips_norm=case.clips_norm)
    timeline = predict(lower(schedule, plan, profile))
    assert timeline.moments[-1].after_bytes == timeline.moments[0].after_bytes
    assert all(m.peak_bytes >= m.after_bytes for m in timeline.moments)
    assert all(sum(m.by_category.values()) == m.peak_bytes for m in timeline.moments)


@given(case=cases())
def test_unused_visitors_stay_within_the_plans_prefetch(case: Case) -> None:
    """At each compute action, blocks there for another action are at most `prefetch` segments' worth, or those whose updates run."""
    schedule = build_step(case.plan, case.profile, clips_norm=case.clips_norm)
    calls = schedule.calls
    tail = case.plan.tail if case.plan.order is Order.LAYER_MAJOR and case.plan.microbatches > 1 else None
    segments = [range(first, last + 1) for first, last in case.plan.segments(len(calls))]
    largest = max(len({b for c in segment for b in calls[c].blocks}) for segment in segments)
    present: set[int] = set()
    for action in schedule:
        if isinstance(action, Fetch):
            present.add(action.block)
        elif isinstance(action, Release):
            present.discard(action.block)
        elif isinstance(action, Forward | Backward):
            span = calls[tail:] if tail is not None and action.first >= tail else calls[action.first : action.last + 1]
            assert (
                len(present - {b for c in span for b in c.blocks})
                <= max(case.plan.prefetch, case.plan.backlog) * largest
            )


@given(case=cases())
def test_layer_major_order_fetches_a_block_at_most_twice_a_call(case: Case) -> None:
    """Once in each direction for every call that reads it, whatever the number of microbatches."""
    if case.plan.order is not Order.LAYER_MAJOR:
        return
    schedule = build_step(case.plan, case.profile, clips_norm=case.clips_norm)
    for block in range(len(schedule.blocks)):
        reads = sum(block in c.blocks for c in schedule.calls)
        assert sum(a == Fetch(block) for a in schedule) <= 2 * reads


@st.composite
def shaped(draw: Any, profile: Profile) -> Plan:
    """A plan of a hand-made GPT of one fate for all calls; what shapes the order of a step is free."""
    calls = len(next(iter(profile.traces.values())).calls)
    saved = draw(st.sampled_from([Saved.KEEP, Saved.RECOMPUTE]))
    joins = saved is Saved.RECOMPUTE and draw(st.booleans())
    return Plan(
        microbatches=draw(st.sampled_from([1, 2, 4])),
        order=draw(st.sampled_from(Order)),
        calls=tuple(CallPlan(saved=saved, joins_previous=joins and i % 2 == 1) for i in range(calls)),
        tail=draw(st.one_of(st.none(), st.integers(0, calls - 1))),
        update=draw(st.sampled_from(UpdateTime)),
        prefetch=draw(st.integers(0, 3)),
        update_backlog=draw(st.integers(0, 3)),
    )


SHAPED = gpt_profile(layers=2, rows=(8, 4, 2), is_tied=True)


@given(plans=st.lists(shaped(SHAPED), min_size=3, max_size=3), clips_norm=st.booleans())
def test_plans_with_equal_schedule_texts_and_fates_are_predicted_alike(plans: list[Plan], clips_norm: bool) -> None:
    """What the engine does alike takes alike: each drawn plan beside itself with another tail, order, prefetch or time of updates."""
    found: dict[tuple[str, object], tuple[Plan, object]] = {}
    for drawn in plans:
        others = [replace(drawn, tail=tail) for tail in (None, 3, len(drawn.calls) - 1)]
        others += [replace(drawn, order=order, microbatches=1) for order in Order]
        for plan in (drawn, *others):
            schedule = build_step(plan, SHAPED, clips_norm=clips_norm)
            timeline = predict(lower(schedule, plan, SHAPED))
            held = tuple((m.peak_bytes, m.after_bytes) for m in timeline.moments)
            text = schedule.text(), tuple(call.saved for call in plan.calls)
            other, same = found.setdefault(text, (plan, held))
            assert held == same, f"{plan} and {other}"
            bounds = PeakBounds(SHAPED, staging_bytes=0)
            assert bounds.of(plan) == bounds.of(other)


@given(case=cases(), microbatches=st.integers(1, 3))
def test_a_forward_pass_is_ordered_by_its_own_number_of_microbatches(case: Case, microbatches: int) -> None:
    own = build_forward(replace(case.plan, microbatches=microbatches), case.profile, microbatches)
    assert build_forward(case.plan, case.profile, microbatches).text() == own.text()
    check_schedule(own, case.plan, case.profile, is_training=False)
