"""Steps lowered to operations: what they say adds up, whoever adds it, and nothing beside them is needed."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.plan import BlockPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile, UpdateProfile
from memfit.core.schedule import Accumulate, Update
from memfit.core.step import Step, Transfer, UpdatePlace
from memfit.core.tiers import TIERS, Tier
from memfit.planner.search.bounds import PeakBounds
from memfit.planner.search.pricing import bytes_of_check
from memfit.step.build import build_forward, build_step
from memfit.step.bytes import held_at, peaks, residents_at
from memfit.step.clock import Pace
from memfit.step.lower import lower
from memfit.step.predict import appraise, predict
from memfit.step.segment_facts import KnownFacts
from property.random_steps import Case, cases, with_storages
from unit.profiles import PAGE, gpt_profile

MACHINE = Hardware(
    device="gpu",
    flops_per_s=1e9,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 40),
        Tier.HOST: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=2e7, write_bytes_per_s=1e7)),
        Tier.DISK: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=3e6, write_bytes_per_s=1e6)),
    },
)


def step_of(case: Case, **settings: Any) -> Step:
    schedule = build_step(case.plan, case.profile, clips_norm=case.clips_norm)
    return lower(schedule, case.plan, case.profile, device="gpu", **settings)


@given(data=st.data(), drawn=cases())
def test_bytes_by_owner_sum_to_the_peak_of_every_operation_however_owners_are_named(
    data: st.DataObject, drawn: Case
) -> None:
    case = with_storages(data.draw, drawn)
    step, itemized = step_of(case), step_of(case, is_itemized=True)
    timeline = predict(step)
    assert predict(itemized).moments == timeline.moments
    for index, moment in enumerate(timeline.moments):
        assert sum(held_at(step, index).values()) == moment.peak_bytes
        found = residents_at(itemized, index)
        assert sum(r.nbytes for r in found) == moment.peak_bytes
        assert all(r.nbytes > 0 for r in found)


@given(data=st.data(), drawn=cases())
def test_every_byte_that_a_prediction_counts_is_one_that_the_list_states(data: st.DataObject, drawn: Case) -> None:
    """Each operation's peak and rest, added up here from what operations say and nothing else."""
    step = step_of(with_storages(data.draw, drawn))
    timeline = predict(step)
    most: Counter[Tier] = Counter()
    alive = Counter(dict.fromkeys(TIERS, 0))
    for change in step.resting:
        alive[change.tier] += change.nbytes
    most.update(alive)
    for operation, moment in zip(step, timeline.moments, strict=True):
        high = alive.copy()
        for change in operation.during:
            high[change.tier] += change.nbytes
        for change in operation.changes:
            alive[change.tier] += change.nbytes
        for tier in alive:
            most[tier] = max(most[tier], high[tier], alive[tier])
        assert (moment.action, moment.after_bytes) == (str(operation.action), alive[Tier.DEVICE])
        assert moment.peak_bytes == max(high[Tier.DEVICE], alive[Tier.DEVICE])
    assert {tier: nbytes for tier, nbytes in most.items() if nbytes} == {t: n for t, n in timeline.peaks.items() if n}


@given(data=st.data(), drawn=cases())
def test_nobody_holds_less_than_nothing_and_what_came_is_gone_at_the_end_of_a_step(
    data: st.DataObject, drawn: Case
) -> None:
    """By tier, category and owner, which no prediction adds up so."""
    step = step_of(with_storages(data.draw, drawn))
    resting = Counter({change[:3]: 0 for change in step.resting})
    for change in step.resting:
        resting[change[:3]] += change.nbytes
    alive = resting.copy()
    for operation in step:
        for change in operation.changes:
            alive[change[:3]] += change.nbytes
            assert change.nbytes
        assert not [key for key, nbytes in alive.items() if nbytes < 0], operation
    assert {k: n for k, n in alive.items() if n} == {k: n for k, n in resting.items() if n}


@given(data=st.data(), drawn=cases(), is_forward=st.booleans())
def test_whatever_is_waited_for_was_begun_before_and_everything_begun_is_waited_for(
    data: st.DataObject, drawn: Case, *, is_forward: bool
) -> None:
    case = with_storages(data.draw, drawn)
    if is_forward:
        plan, profile = case.plan, case.profile
        step = lower(build_forward(plan, profile, plan.microbatches), plan, profile)
    else:
        step = step_of(case)
    begun: set[tuple[str, str]] = set()
    waited: set[tuple[str, str]] = set()
    for operation in step:
        for tokens in (operation.waits, operation.after, operation.waits_after):
            assert begun.issuperset(tokens), operation
        waited.update(operation.waits, operation.waits_after)
        if operation.gives is not None:
            begun.add(operation.gives)
        else:
            assert not operation.transfers, operation
    assert {token for token in begun if token[0] != "fetch"} <= waited
    # A visit that its calls were left out of is waited for where it ends.
    assert {token for token in begun if token[0] == "fetch"} <= waited


@given(data=st.data(), drawn=cases(), faster=st.sampled_from([1.0, 10.0]))
def test_equal_steps_have_equal_predictions_whatever_plans_they_came_from(
    data: st.DataObject, drawn: Case, faster: float
) -> None:
    """A tail that a single microbatch does not have, and the order of one: other plans, the same step."""
    case = with_storages(data.draw, replace(drawn, plan=replace(drawn.plan, microbatches=1)))
    tail = data.draw(st.sampled_from([None, *range(len(case.plan.calls))]))
    order = data.draw(st.sampled_from(Order))
    other = replace(case, plan=replace(case.plan, tail=tail, order=order))
    hardware = replace(MACHINE, flops_per_s=faster * MACHINE.flops_per_s)
    schedules = [build_step(c.plan, c.profile, clips_norm=case.clips_norm).text() for c in (case, other)]
    first, second = step_of(case), step_of(other)
    if schedules[0] == schedules[1]:
        assert first == second
    if first == second:
        assert predict(first, hardware) == predict(second, hardware)


@given(data=st.data(), drawn=cases())
def test_a_timeline_s_traffic_is_that_of_the_operations(data: st.DataObject, drawn: Case) -> None:
    step = step_of(with_storages(data.draw, drawn))
    timeline = predict(step, MACHINE)
    moved = {"read": Counter[str](), "write": Counter[str]()}
    for operation in step:
        for transfer in (*operation.awaited, *operation.transfers):
            moved[transfer.direction][transfer.category] += transfer.nbytes
    assert (dict(moved["read"]), dict(moved["write"])) == (timeline.bytes_read, timeline.bytes_written)


@pytest.mark.parametrize(("tier", "device"), [(Tier.DISK, "cpu"), (Tier.HOST, "gpu"), (Tier.HOST, "cpu")])
def test_a_gradient_that_is_added_to_a_sum_elsewhere_waits_for_it(tier: Tier, device: str) -> None:
    """By arithmetic: with links so slow that nothing else takes time, each further microbatch reads the sum, then
    writes it, and computing stands still while it reads."""
    profile = gpt_profile(layers=2)
    homes = BlockPlan(gradient_home=tier)
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR, update=UpdateTime.AFTER_BACKWARD,
                blocks={b.name: homes for b in profile.blocks})  # fmt: skip
    profile = replace(profile, traces={4: replace(next(iter(profile.traces.values())), rows=4)}, batch_rows=8)
    step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device=device)
    again = [o for o in step if isinstance(o.action, Accumulate) and o.awaited]
    if (tier, device) == (Tier.HOST, "cpu"):
        assert not again, "the processor adds where the sum rests"
        return
    assert len(again) == len(profile.blocks)
    sums = sum(transfer.nbytes for o in again for transfer in o.awaited)
    assert sums == sum(t.nbytes for o in again for t in o.transfers)
    timeline = predict(step, replace(MACHINE, device=device, flops_per_s=1e18))
    assert timeline.stalls_s["accumulate"] >= sums / MACHINE.link(tier).read_bytes_per_s
    assert timeline.bytes_read["gradient"] >= sums


def has_files(drawn: Case, block: int) -> bool:
    profile = drawn.profile.blocks[block]
    homes = drawn.plan.block(profile.name)
    has_masters = any(p.master_nbytes for p in profile.parameters) and not drawn.plan.drops_masters
    rest = [homes.state_home] if drawn.profile.state_bytes.get(profile.name) or has_masters else []
    return Tier.DISK in (homes.weight_home, homes.gradient_home, *rest)


@given(data=st.data(), drawn=cases())
def test_updates_are_one_pipeline_in_the_order_of_the_list(data: st.DataObject, drawn: Case) -> None:
    step = step_of(with_storages(data.draw, drawn))
    found = [(o, o.action.block) for o in step if isinstance(o.action, Update)]
    updates = [o for o, _ in found]
    on_host = [o.update_place is UpdatePlace.HOST for o in updates]
    # Those of an accelerator go before the pieces of those that the host makes, but where files are read or written.
    in_turn = [host or has_files(drawn, block) for host, (_, block) in zip(on_host, found, strict=True)]
    for i, o in enumerate(updates):
        pipelines = [in_turn if in_turn[i] else [], [] if on_host[i] else [not host for host in on_host]]
        behind = [
            [one.gives for one, is_one in zip(updates[:i], pipe, strict=False) if is_one][-1:] for pipe in pipelines
        ]
        assert o.behind == tuple(dict.fromkeys([*behind[0], *behind[1]]))
    assert all(o.behind == () for o in step if not isinstance(o.action, Update))


@pytest.mark.parametrize(
    ("away", "has_states", "stays"),
    [
        ({}, True, True),  # it was made before the host's next piece, which is still there
        ({"h.1": Tier.HOST}, True, True),
        ({"h.1": Tier.DISK}, True, False),  # in turn: the one before it is done
        ({"h.1": Tier.DISK}, False, True),  # nothing of it is there
    ],
)
def test_pieces_of_the_host_stay_where_what_went_before_them_is_waited_for(
    away: dict[str, Tier], has_states: bool, stays: bool
) -> None:
    profile = gpt_profile(layers=4, width=1024, vocabulary=2048)
    updates = {
        p.name: UpdateProfile(
            piece_elements=1 << 19, scratch_bytes=1 << 21, host_scratch_bytes=1 << 21, state_bytes=2 * p.nbytes
        )
        for block in profile.blocks
        for p in block.parameters
    }
    on_host = BlockPlan(gradient_home=Tier.HOST, state_home=Tier.DISK, update_on=Tier.HOST)
    plan = Plan(blocks={"h.2": on_host, **{name: BlockPlan(state_home=tier) for name, tier in away.items()}})
    state_bytes = {name: size for name, size in profile.state_bytes.items() if has_states or name != "h.1"}
    profile = replace(profile, updates=updates, state_bytes=state_bytes)
    step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device="gpu")
    names = [block.name for block in profile.blocks]
    held: dict[str, int] = {}
    nbytes = 0
    for operation in step:
        changes = [c for c in operation.changes if c.tier is Tier.HOST and c.owner == "updates"]
        nbytes += sum(c.nbytes for c in changes)
        held[str(operation.action)] = nbytes
    assert held[f"update B{names.index('h.2')}"] > 0
    assert (held[f"clear B{names.index('h.1')}"] > 0) is stays
    assert nbytes == 0, "nothing is left behind the step"


@pytest.mark.parametrize("tiers", [(Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK)])
def test_what_an_update_reads_comes_behind_what_the_one_before_it_reads(tiers: tuple[Tier, Tier]) -> None:
    """Two blocks with states on two links: the second one's would come at once if links were all that orders them."""
    profile = gpt_profile(layers=2)
    homes = {profile.blocks[i].name: BlockPlan(state_home=tier) for i, tier in zip((1, 2), tiers, strict=True)}
    plan = Plan(update=UpdateTime.AFTER_BACKWARD, blocks=homes)
    step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device="gpu")
    first, second = (o for o in step if isinstance(o.action, Update) and o.transfers)
    assert [o.transfers[0].tier for o in (first, second)] == [*tiers]
    times = {m.action: m for m in predict(step, MACHINE).moments}
    read = sum(t.nbytes for t in first.transfers if t.direction == "read") / MACHINE.link(tiers[0]).read_bytes_per_s
    assert times[str(second.action)].start_s >= times[str(first.action)].start_s + read


def test_a_commit_is_a_transfer_of_the_step() -> None:
    profile: Profile = gpt_profile(layers=2)
    schedule = build_step(Plan(), profile, clips_norm=False)
    without, each, seldom = (lower(schedule, Plan(), profile, commits=commits) for commits in (0.0, 1.0, 0.1))
    assert without.commit == ()
    (transfer,) = each.commit
    assert transfer == Transfer(Tier.DISK, "write", "commit", transfer.nbytes)
    states = sum(profile.state_bytes.values())
    aligned = transfer.nbytes - profile.buffer_bytes - states
    assert profile.weight_bytes <= aligned < profile.weight_bytes + PAGE * len(profile.blocks)
    assert seldom.commit[0].nbytes == round(transfer.nbytes / 10)
    assert predict(each, MACHINE).commit_s == transfer.nbytes / MACHINE.link(Tier.DISK).write_bytes_per_s
    assert peaks(each) == peaks(without)


def test_no_function_but_lowering_takes_both_a_list_of_actions_and_a_plan() -> None:
    """The checker, prediction and the engine read the lowered step alone."""
    source = Path(memfit.__file__).parent
    found: set[str] = set()
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = {name for a in every if a.annotation for name in _names_in(a.annotation)}
                if "Plan" in names and names & {"Schedule", "Step", "Operation", "Action", "Actions"}:
                    found.add(f"{path.relative_to(source).as_posix()}: {node.name}")
    # A report shows both to people; what it adds up is lowered there.
    shown = {"job/reporting.py: report_subject"}
    assert found - shown == {"step/lower.py: lower", "step/lower.py: __init__"}


def _names_in(annotation: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def test_bytes_between_files_and_a_device_cross_the_link_to_the_host_and_others_do_not() -> None:
    """What the host's cores work on stays there; without an accelerator there is no such link."""
    profile = gpt_profile(layers=2)
    away = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    for device, update_on in (("gpu", Tier.DEVICE), ("gpu", Tier.HOST), ("cpu", Tier.DEVICE)):
        plan = Plan(blocks={b.name: replace(away, update_on=update_on) for b in profile.blocks})
        step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device=device)
        crossed = {(type(o.action).__name__, t.category): t.crosses for o in step for t in (*o.awaited, *o.transfers)}
        way = None if device == "cpu" else Tier.HOST
        kinds = {"Fetch": way, "Accumulate": way, "Update": None if update_on is Tier.HOST else way}
        assert {kind for kind, _ in crossed} == set(kinds)
        assert all(tier is kinds[kind] for (kind, _), tier in crossed.items()), (device, update_on)


@given(data=st.data(), drawn=cases())
def test_facts_that_plans_share_change_no_step(data: st.DataObject, drawn: Case) -> None:
    """Two plans of one profile, lowered with what the other one has found, in either order and again."""
    case = with_storages(data.draw, drawn)
    away = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    homes = st.sampled_from([BlockPlan(), BlockPlan(state_home=Tier.HOST), away])
    blocks = {block.name: data.draw(homes) for block in case.profile.blocks}
    calls = case.plan.calls if data.draw(st.booleans()) else ()
    other = replace(case.plan, blocks=blocks, calls=calls)
    device = data.draw(st.sampled_from(["cpu", "gpu"]))
    known, of_checks, pace = KnownFacts(), KnownFacts(), Pace(MACHINE)
    for plan in data.draw(st.permutations([case.plan, other, case.plan, other])):
        schedule = build_step(plan, case.profile, clips_norm=case.clips_norm)
        assert build_step(plan, case.profile, clips_norm=case.clips_norm, known=known) == schedule
        alone = lower(schedule, plan, case.profile, device=device)
        assert lower(schedule, plan, case.profile, device=device, known=known) == alone
        assert lower(schedule, plan, case.profile, device=device, known=known, is_built=True) == alone
        assert appraise(alone, pace) == appraise(alone, MACHINE)
        rows = data.draw(st.sampled_from(sorted(case.profile.traces)))
        check = bytes_of_check(plan, case.profile, rows, device=device)
        assert bytes_of_check(plan, case.profile, rows, device=device, known=of_checks) == check


def with_peaks(draw: Any, case: Case) -> Case:
    """The same with calls, code between them and seeds that rise and leave something."""
    rises, leaves = st.sampled_from([0, 0, 40, 1000]), st.sampled_from([0, 0, -30, 200])
    trace = max(case.profile.traces.values(), key=lambda one: one.rows)
    calls = tuple(
        replace(
            call,
            forward_peak_bytes=draw(rises),
            inside_peak_bytes=draw(rises),
            backward_peak_bytes=draw(rises),
            backward_leaves_bytes=draw(leaves),
            between_peak_bytes=draw(rises),
            between_leaves_bytes=draw(leaves),
        )
        for call in trace.calls
    )
    filled = {"calls": calls, "seed_peak_bytes": draw(rises), "prologue_peak_bytes": draw(rises)}
    traces = {rows: replace(one, **filled) for rows, one in case.profile.traces.items()}
    return replace(case, profile=replace(case.profile, traces=traces))


@given(data=st.data(), drawn=cases(), device=st.sampled_from(["cpu", "gpu"]))
def test_no_peak_is_below_its_bound(data: st.DataObject, drawn: Case, device: str) -> None:
    """Of plans whose calls and blocks each do as they like, in any tier."""
    case = with_peaks(data.draw, with_storages(data.draw, drawn))
    bounds = PeakBounds(case.profile, staging_bytes=0, device=device)
    schedule = build_step(case.plan, case.profile, clips_norm=case.clips_norm)
    step = lower(schedule, case.plan, case.profile, staging_bytes=0, device=device)
    assert bounds.of(case.plan) <= peaks(step)[Tier.DEVICE]
