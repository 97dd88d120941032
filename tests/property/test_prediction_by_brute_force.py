"""Predicted bytes and seconds of random steps against a second prediction (`naive_prediction`) that
shares no code with the first: live bytes with a birth and a death each, and a discrete-event
simulation.

That storages of a trace live as long as something keeps them is compared in
`tests/unit/test_prediction.py`; here, what the lowered operations say of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.schedule import Accumulate, Clear, Commit, Fetch, Release, Update
from memfit.core.step import Operation, Step, Timeline, Token, Transfer, UpdatePlace
from memfit.core.tiers import TIERS, Tier
from memfit.core.work_kinds import WorkKind
from memfit.step.build import build_forward, build_step, place_turns
from memfit.step.bytes import held_at
from memfit.step.clock import work_seconds
from memfit.step.lower import lower
from memfit.step.predict import appraise, predict
from memfit.step.sizes import flat_gradient_bytes, flat_weight_bytes
from property.naive_prediction import Simulation, by_category, held, in_tier, lots_of, peaks_of
from property.random_steps import Case, cases, with_storages
from unit.profiles import gpt_profile

PROFILE = gpt_profile(layers=1)
SCHEDULE = build_step(Plan(), PROFILE, clips_norm=False)
HOME = BlockPlan(gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
LOWERED = [
    operation
    for plan in (Plan(), Plan(blocks={block.name: HOME for block in PROFILE.blocks}))
    for operation in lower(build_step(plan, PROFILE, clips_norm=False), plan, PROFILE, device="gpu")
]
COMPUTED = next(o.work[0][0] for o in LOWERED if o.work)
# Whole, and in one and a half, two and three pieces.
HOST_WORK = [
    (),
    ((WorkKind.PIECES, 1.0),),
    *(((WorkKind.PIECES, 3.0), (WorkKind.UPDATED, count * PIECE_ELEMENTS)) for count in (1.5, 2.0, 7.0)),
]
EXACT = 1e-9
"""Relative difference that sums of floating point numbers in another order may have."""


@st.composite
def machines(draw: Any) -> Hardware:
    """Machines on which computing, links and updates take times of every proportion: a block of
    these cases has some 4 KiB, a call takes 0.1 ms.
    """
    rates = st.sampled_from([4e5, 4e6, 4e7, 4e8])
    elements = st.sampled_from([1e4, 1e5, 1e7])
    shares = st.sampled_from([1.0, 0.75, 0.25])

    def link() -> Link:
        read, write = draw(rates), draw(rates)
        return Link(
            read_bytes_per_s=read,
            write_bytes_per_s=write,
            both_read_bytes_per_s=draw(st.sampled_from([None, read, read / 2])),
            both_write_bytes_per_s=draw(st.sampled_from([None, write, write / 4])),
            compute_share=draw(shares),
        )

    spec = {tier: TierSpec(nbytes=1 << 40, link=link()) for tier in (Tier.HOST, Tier.DISK)}
    return Hardware(
        device=draw(st.sampled_from(["gpu", "cpu"])),
        flops_per_s=draw(st.sampled_from([1e3, 1e5, 1e7])),
        tiers={Tier.DEVICE: TierSpec(nbytes=1 << 40), **spec},
        update_elements_per_s=draw(elements),
        host_update_elements_per_s=draw(elements),
    )


@st.composite
def steps(draw: Any, device: str | None = None) -> Step:
    """Steps of random models, plans and kinds: trained, committed by a journal, or forward only."""
    case: Case = with_storages(draw, draw(cases()))
    kind = draw(st.sampled_from(["trained", "trained", "journal", "forward"]))
    where = device or draw(st.sampled_from(["gpu", "cpu"]))
    plan, profile = case.plan, case.profile
    if draw(st.booleans()):
        plan = replace(plan, blocks={name: _updated_on_host(home) for name, home in plan.blocks.items()})
    if kind == "journal":
        homes = {name: replace(home, gradient_home=Tier.DISK) for name, home in plan.blocks.items()}
        plan = replace(plan, update=UpdateTime.AFTER_BACKWARD, blocks=homes)
    trained = build_step(plan, profile, clips_norm=case.clips_norm)
    schedule = build_forward(plan, profile, plan.microbatches) if kind == "forward" else trained
    if kind == "journal":
        updated = [action.block for action in schedule if isinstance(action, Update)]
        schedule = place_turns(schedule, [turn for turn in (updated[:1], updated[1:]) if turn])
    commits = draw(st.sampled_from([0.0, 1.0, 0.25]))
    return lower(schedule, plan, profile, device=where, commits=commits, staging_bytes=draw(st.sampled_from([0, 99])))


def _updated_on_host(home: BlockPlan) -> BlockPlan:
    """The same with its update on the host's cores, where a plan allows that."""
    is_away = Tier.DEVICE not in (home.gradient_home, home.state_home)
    return replace(home, update_on=Tier.HOST) if is_away else home


@st.composite
def free_steps(draw: Any) -> Step:
    """Steps of any operations that only wait for what was begun before: also those that no plan is
    lowered to, where every thing that an operation says has an effect.
    """
    operations: list[Operation] = []
    given_before: list[Token] = []
    for index in range(draw(st.integers(1, 7))):
        tokens = st.lists(st.sampled_from(given_before), max_size=2, unique=True) if given_before else st.just([])
        waits, after, at_end, behind = (tuple(draw(tokens)) for _ in range(4))
        operation = Operation(action=Commit(), waits=waits, work=draw(amounts(COMPUTED)))
        if draw(st.integers(0, 3)):
            token = Token(draw(st.sampled_from(["fetch", "update", "offload"])), str(index))
            operation = operation._replace(
                after=after,
                behind=behind,
                awaited=tuple(draw(transfers(1))),
                transfers=tuple(draw(transfers(3))),
                is_chain=draw(st.booleans()),
                host_work=draw(st.sampled_from(HOST_WORK)),
                update_place=draw(
                    st.sampled_from([None, None, *(p for p in UpdatePlace if p is not UpdatePlace.HOST)])
                ),
                gives=token,
            )
            given_before.append(token)
        else:
            operation = operation._replace(waits_after=at_end)
        operations.append(operation)
    step = lower(SCHEDULE, Plan(), PROFILE)
    return replace(step, resting=(), operations=tuple(operations))


def amounts(kind: Any) -> st.SearchStrategy[Any]:
    """Work of one kind, or none."""
    return st.sampled_from([(), ((kind, 1.0),), ((kind, 3.0),)])


def transfers(most: int) -> st.SearchStrategy[list[Transfer]]:
    """Transfers over any link, and over the disk's and the host's at once."""
    ways = st.sampled_from([(Tier.HOST, None), (Tier.DISK, None), (Tier.DISK, Tier.HOST)])
    directions, sizes = st.sampled_from(["read", "write"]), st.sampled_from([400, 4000])
    return st.lists(
        st.builds(lambda way, to, nbytes: Transfer(way[0], to, "weight", nbytes, way[1]), ways, directions, sizes),
        max_size=most,
    )


def difference_of_bytes(step: Step, timeline: Timeline) -> str:
    """Returns the first difference between predicted bytes and those of the lots; empty if there is
    none.
    """
    lots = lots_of(step)
    for index, moment in enumerate(timeline.moments):
        during, after = held(step, lots, index)
        rising, rested = in_tier(during, Tier.DEVICE), in_tier(after, Tier.DEVICE)
        if moment.after_bytes != rested:
            return f"after {moment.action}: {moment.after_bytes}, not {rested}"
        if moment.peak_bytes != max(rising, rested):
            return f"at the peak of {moment.action}: {moment.peak_bytes}, not {max(rising, rested)}"
        found = {category: nbytes for category, nbytes in moment.by_category.items() if nbytes}
        if found != by_category(after if rested > rising else during, Tier.DEVICE):
            return f"by category at the peak of {moment.action}: {found}"
    found_peaks = {tier: nbytes for tier, nbytes in timeline.peaks.items() if nbytes}
    return "" if found_peaks == peaks_of(step) else f"peaks: {found_peaks}, not {peaks_of(step)}"


def difference_of_seconds(step: Step, hardware: Hardware, timeline: Timeline) -> str:
    """Returns the first difference between predicted seconds and simulated ones; empty if there is
    none.
    """

    def is_equal(one: float, other: float) -> bool:
        # A difference of two instants is as exact as these.
        return one == pytest.approx(other, rel=EXACT, abs=1e-15 + 1e-14 * timeline.seconds)

    simulated = Simulation(hardware).run(step)
    for moment, (begin, end) in zip(timeline.moments, simulated.times, strict=True):
        if not (is_equal(moment.start_s, begin) and is_equal(moment.end_s, end)):
            return f"{moment.action}: {moment.start_s} to {moment.end_s}, not {begin} to {end}"
    stalls = {cause: seconds for cause, seconds in timeline.stalls_s.items() if seconds}
    expected = {cause: seconds for cause, seconds in simulated.stalls_s.items() if seconds}
    if stalls.keys() != expected.keys() or not all(is_equal(stalls[cause], expected[cause]) for cause in stalls):
        return f"stalls: {stalls}, not {expected}"
    written = sum(transfer.nbytes for transfer in step.commit)
    disk = hardware.tiers[Tier.DISK].link
    assert disk is not None
    commit_s = written / disk.write_bytes_per_s
    whole = max((end for _, end in simulated.times), default=0.0) + commit_s
    return "" if is_equal(timeline.seconds, whole) else f"the step: {timeline.seconds}, not {whole}"


@given(step=steps())
def test_predicted_bytes_are_those_of_lots_that_come_and_go(step: Step) -> None:
    """By tier, category and instant."""
    timeline = predict(step)
    assert not difference_of_bytes(step, timeline)
    lots = lots_of(step)
    for index, moment in enumerate(timeline.moments):
        for tier in TIERS:
            at_peak = max(held(step, lots, index), key=lambda counted: in_tier(counted, tier))
            named = {(tier, *key): nbytes for key, nbytes in held_at(step, index, tier).items()}
            assert sum(named.values()) == in_tier(at_peak, tier), (moment.action, tier)


@given(step=steps(), hardware=machines())
def test_predicted_seconds_are_those_of_a_discrete_event_simulation(step: Step, hardware: Hardware) -> None:
    """Begin and end of every action, stalls by cause, the step's share of a commit."""
    timeline = predict(step, hardware)
    assert not difference_of_seconds(step, hardware, timeline)
    appraisal = appraise(step, hardware)
    assert appraisal.seconds == pytest.approx(timeline.seconds, rel=EXACT)
    assert {tier: n for tier, n in appraisal.peaks.items() if n} == peaks_of(step)


@given(step=free_steps(), hardware=machines())
def test_seconds_of_any_operations_are_those_of_the_simulation(step: Step, hardware: Hardware) -> None:
    assert not difference_of_seconds(step, hardware, predict(step, hardware))


MANY = gpt_profile(layers=5)


@st.composite
def mixed_steps(draw: Any) -> Step:
    """Steps of more blocks than `steps` has, each with homes of its own: updates that use other
    directions of other links, one behind the other.
    """
    tier = st.sampled_from(TIERS)
    blocks: dict[str, BlockPlan] = {}
    for block in MANY.blocks:
        homes = BlockPlan(weight_home=draw(tier), gradient_home=draw(tier), state_home=draw(tier))
        is_away = Tier.DEVICE not in (homes.gradient_home, homes.state_home)
        blocks[block.name] = replace(homes, update_on=Tier.HOST) if is_away and draw(st.booleans()) else homes
    plan = Plan(
        blocks=blocks,
        prefetch=draw(st.integers(0, 3)),
        update_backlog=draw(st.integers(0, 4)),
        update=draw(st.sampled_from(list(UpdateTime))),
    )
    return lower(build_step(plan, MANY, clips_norm=False), plan, MANY, device="gpu", staging_bytes=0)


@given(step=mixed_steps(), hardware=machines())
def test_seconds_of_many_blocks_with_homes_of_their_own_are_those_of_the_simulation(
    step: Step, hardware: Hardware
) -> None:
    hardware = replace(hardware, device="gpu")
    assert not difference_of_seconds(step, hardware, predict(step, hardware))


@pytest.mark.parametrize(("host", "disk"), [(0.25, 0.5), (0.5, 0.25), (1.0, 0.5)])
def test_compute_goes_on_at_the_share_of_the_slowest_link_that_has_work(host: float, disk: float) -> None:
    """By arithmetic: for 1 s both links have work, then the disk's for 9 s; 6 s of computing."""
    both = [Transfer(Tier.DISK, "read", "weight", 1000), Transfer(Tier.HOST, "read", "weight", 100)]
    tiers = {Tier.DEVICE: TierSpec(nbytes=1 << 40)}
    for tier, share in ((Tier.HOST, host), (Tier.DISK, disk)):
        link = Link(read_bytes_per_s=100.0, write_bytes_per_s=100.0, compute_share=share)
        tiers[tier] = TierSpec(nbytes=1 << 40, link=link)
    hardware = Hardware(device="gpu", flops_per_s=1.0, tiers=tiers)
    moves = Operation(action=Commit(), transfers=tuple(both), is_chain=False, gives=Token("fetch", "B0"))
    work = ((COMPUTED, 6.0 / work_seconds(((COMPUTED, 1.0),), hardware)),)
    operations = (moves, Operation(action=Commit(), work=work))
    step = replace(lower(SCHEDULE, Plan(), PROFILE), resting=(), operations=operations)
    timeline = predict(step, hardware)
    left = 6 - min(host, disk) - 9 * disk
    assert timeline.moments[1].end_s == pytest.approx(10 + left)
    assert not difference_of_seconds(step, hardware, timeline)


def test_an_update_beside_costs_nothing_where_the_main_thread_waits_anyhow() -> None:
    """By arithmetic: 4 s of reading are waited for, an update takes 3 of them and 2 s of what is
    computed behind that.
    """
    tiers = {Tier.DEVICE: TierSpec(nbytes=1 << 40)}
    for tier in (Tier.HOST, Tier.DISK):
        link = Link(read_bytes_per_s=100.0, write_bytes_per_s=100.0)
        tiers[tier] = TierSpec(nbytes=1 << 40, link=link)
    hardware = Hardware(device="cpu", flops_per_s=1.0, tiers=tiers)
    second = ((COMPUTED, 1.0 / work_seconds(((COMPUTED, 1.0),), hardware)),)
    read, update, late = Token("fetch", "B0"), Token("update", "B0"), Token("fetch", "B1")
    operations = (
        Operation(action=Commit(), transfers=(Transfer(Tier.DISK, "read", "weight", 100),), gives=late),
        Operation(action=Commit(), transfers=(Transfer(Tier.DISK, "read", "weight", 300),), gives=read),
        Operation(
            action=Commit(),
            after=(late,),
            work=tuple((kind, 5 * amount) for kind, amount in second),
            update_place=UpdatePlace.BESIDE,
            gives=update,
        ),
        Operation(action=Commit(), waits=(read,), work=second),
    )
    step = replace(lower(SCHEDULE, Plan(), PROFILE), resting=(), operations=operations)
    timeline = predict(step, hardware)
    assert timeline.stalls_s == {"fetch": pytest.approx(4.0)}
    assert timeline.moments[2].start_s == pytest.approx(1.0)
    assert timeline.moments[2].end_s == pytest.approx(6.0)
    assert timeline.moments[3].end_s == pytest.approx(7.0)
    assert not difference_of_seconds(step, hardware, timeline)


@given(data=st.data(), drawn=cases())
def test_weights_and_gradients_are_where_the_actions_say(data: st.DataObject, drawn: Case) -> None:
    """From the list of actions alone: a visiting block's weights from its fetch to its release;
    with one microbatch, a block's gradient from the first backward that adds to it to its clear,
    or to the first action that waits until it has left.
    """
    case = with_storages(data.draw, replace(drawn, plan=replace(drawn.plan, microbatches=1)))
    plan, profile = case.plan, case.profile
    step = lower(build_step(plan, profile, clips_norm=case.clips_norm), plan, profile, device="gpu")
    visiting = {
        b
        for b, block in enumerate(profile.blocks)
        if plan.block(block.name).weight_home is not Tier.DEVICE and not block.is_spanning
    }
    here = set(range(len(profile.blocks))) - visiting
    made: set[int] = set()
    leaving: dict[object, int] = {}
    for operation, moment in zip(step, predict(step).moments, strict=True):
        for token in (*operation.waits, *operation.waits_after):
            made.discard(leaving.pop(token, -1))
        made.update(b for b in operation.adds_to if profile.blocks[b].trains)
        match operation.action:
            case Fetch(block=b):
                here.add(b)
            case Release(block=b):
                here.discard(b)
            case Clear(block=b):
                made.discard(b)
            case Accumulate(block=b):
                leaving[operation.gives] = b
        if moment.after_bytes < moment.peak_bytes:
            continue  # its categories are those of its peak
        weights = sum(flat_weight_bytes(profile.blocks[b]) for b in here)
        gradients = sum(flat_gradient_bytes(profile.blocks[b]) for b in made)
        assert (moment.by_category["weight"], moment.by_category["gradient"]) == (weights, gradients), moment


def _ignoring(**fields: object) -> Callable[[Operation], Operation]:
    return lambda operation: operation._replace(**fields)


def _losing_the_last_change(operation: Operation) -> Operation:
    return operation._replace(changes=operation.changes[:-1])


def _moving_the_host_s_work(operation: Operation) -> Operation:
    return operation._replace(work=operation.work + operation.host_work, host_work=())


def _not_stopping_for_a_sum(operation: Operation) -> Operation:
    return operation._replace(awaited=(), transfers=operation.awaited + operation.transfers)


def _on_one_link(operation: Operation) -> Operation:
    return operation._replace(transfers=tuple(t._replace(crosses=None) for t in operation.transfers))


def _overtaking_updates(operation: Operation) -> Operation:
    is_in_order = operation.update_place is UpdatePlace.IN_ORDER
    return operation._replace(update_place=UpdatePlace.BESIDE) if is_in_order else operation


BLIND: dict[str, Callable[[Operation], Operation]] = {
    "the rise while it runs": _ignoring(during=()),
    "the last change": _losing_the_last_change,
    "waits at the begin": _ignoring(waits=()),
    "waits at the end": _ignoring(waits_after=()),
    "what transfers wait for": _ignoring(after=()),
    "the order of a chain": _ignoring(is_chain=False),
    "the pipeline of updates": _ignoring(behind=()),
    "the host's cores": _moving_the_host_s_work,
    "the stop for a sum": _not_stopping_for_a_sum,
    "the link that is crossed": _on_one_link,
    "computing": _ignoring(work=()),
    "updates that go on while the main thread waits": _ignoring(update_place=None),
    "updates in the order of what is computed next": _overtaking_updates,
}
"""Predictions that do not see one thing that operations say."""


@pytest.mark.parametrize("unseen", BLIND)
def test_a_prediction_that_does_not_see_one_thing_is_found_out(unseen: str) -> None:
    """The comparisons above are not blind: for each thing that an operation says there is a step
    whose prediction differs without it.
    """

    def differs(drawn: tuple[Step, Hardware]) -> bool:
        step, hardware = drawn
        blind = replace(step, operations=tuple(BLIND[unseen](operation) for operation in step))
        try:
            timeline = predict(blind, hardware)
        except KeyError:
            return True  # waits for what nobody has begun
        return bool(difference_of_bytes(step, timeline) or difference_of_seconds(step, hardware, timeline))

    quick = settings(max_examples=400, derandomize=True, database=None, phases=[Phase.generate])
    find(st.tuples(st.one_of(steps("gpu"), free_steps()), machines()), differs, settings=quick)
