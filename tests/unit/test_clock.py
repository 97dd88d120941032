"""The clock against arithmetic: classes of work, contention of links, intervals; and against a second, naive event loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.hardware import DERIVED_SPREAD, Hardware, Link, Rate, TierSpec, machine_names, rates_of, read_hardware
from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.schedule import Schedule, Start
from memfit.core.step import Operation, Step, Token, Transfer, UpdatePlace
from memfit.core.tiers import Tier
from memfit.core.work_kinds import Work, WorkKind, as_work, product_kind, summed
from memfit.step.clock import Clock, Pace, fastest_products_per_s, work_seconds
from memfit.step.predict import predict

LINK = Link(read_bytes_per_s=100.0, write_bytes_per_s=50.0)


def machine(link: Link = LINK, *, device: str = "cpu", **rates: float) -> Hardware:
    return Hardware(
        device=device,
        flops_per_s=1000.0,
        tiers={Tier.DEVICE: TierSpec(nbytes=1 << 40), Tier.DISK: TierSpec(nbytes=1 << 40, link=link)},
        rates={WorkKind(kind.replace("_", "-")): Rate(per_s, 0.25) for kind, per_s in rates.items()},
    )


def step_of(*operations: Operation) -> Step:
    schedule = Schedule(microbatches=1, blocks=(), calls=(), actions=tuple(o.action for o in operations))
    return Step(schedule=schedule, shape=None, resting=(), operations=operations)  # type: ignore[arg-type]


def computing(seconds: float, **more: object) -> Operation:
    return Operation(action=Start(microbatch=0), work=((WorkKind.FLOPS, 1000.0 * seconds),), **more)  # type: ignore[arg-type]


def moving(direction: str, nbytes: int, key: str = "a", **more: object) -> Operation:
    transfer = Transfer(Tier.DISK, direction, "weight", nbytes)
    return Operation(action=Start(microbatch=0), transfers=(transfer,), gives=Token("fetch", key), **more)  # type: ignore[arg-type]


def seconds_of(hardware: Hardware, *operations: Operation) -> float:
    return max(time.end_s for time in Clock(hardware).run(step_of(*operations)))


def test_work_takes_the_sum_over_its_classes() -> None:
    found = work_seconds(
        ((WorkKind.STREAMED, 30.0), (WorkKind.FUNCTIONS, 8.0), (WorkKind.OPERATIONS, 2.0)),
        machine(streamed=10, functions=4, operations=1),
    )
    assert found == 3 + 2 + 2


def test_an_accelerator_computes_while_its_operations_are_launched() -> None:
    work: Work = ((WorkKind.STREAMED, 30.0), (WorkKind.OPERATIONS, 2.0))
    assert work_seconds(work, machine(device="a GPU", streamed=10, operations=1)) == 3
    assert work_seconds(work, machine(device="a GPU", streamed=10, operations=0.5)) == 4


def test_a_link_with_work_slows_compute_by_its_share() -> None:
    slow = replace(LINK, compute_share=0.5)
    # 2 s of reading beside 3 s of compute: 1 s of it is done in the first 2, the other 2 after them.
    assert seconds_of(machine(slow), moving("read", 200), computing(3)) == pytest.approx(4)
    # Compute that ends before the link does.
    assert Clock(machine(slow)).run(step_of(moving("read", 200), computing(0.5)))[1].end_s == pytest.approx(1)
    assert seconds_of(machine(), moving("read", 200), computing(3)) == pytest.approx(3)


def test_each_direction_has_its_speed_while_the_other_has_work() -> None:
    both = replace(LINK, both_read_bytes_per_s=40.0, both_write_bytes_per_s=50.0)
    # Writing takes 2 s; reading moves 80 bytes meanwhile, and the other 120 at its own speed.
    found = seconds_of(machine(both), moving("write", 100, "w"), moving("read", 200, "r"))
    assert found == pytest.approx(2 + 120 / 100)
    assert seconds_of(machine(both), moving("read", 200)) == pytest.approx(2)


@pytest.mark.parametrize(
    ("place", "tier", "wanted"),
    [
        # 2 s of reads beside 4 s of writes, which take turns with 1 s of work; then 3 s of compute.
        (UpdatePlace.IN_ORDER, Tier.HOST, 4 + 1 + 3),
        # The updates' own thread waits for the disk: 1 s of work goes before compute.
        (UpdatePlace.IN_ORDER, Tier.DISK, 1 + 3),
        # It has a stream of its own.
        (UpdatePlace.BESIDE, Tier.HOST, 1 + 3),
    ],
)
def test_what_is_computed_behind_an_update_in_order_waits_for_its_traffic_with_host_memory(
    place: UpdatePlace, tier: Tier, wanted: float
) -> None:
    spec = TierSpec(nbytes=1 << 40, link=LINK)
    hardware = replace(machine(device="a GPU"), tiers={Tier.DEVICE: spec, Tier.HOST: spec, Tier.DISK: spec})
    update = computing(
        1,
        transfers=tuple(Transfer(tier, way, "state", 200) for way in ("read", "write")),
        is_chain=False,
        update_place=place,
        gives=Token("update", "B0"),
    )
    clock = Clock(hardware)
    times = clock.run(step_of(update, computing(3)))
    assert times[1].end_s == pytest.approx(wanted)
    assert clock.stalls_s.get("update", 0.0) == pytest.approx(wanted - 3 if wanted > 4 else 0)


@pytest.mark.parametrize(
    ("to_host", "to_device", "work_s", "wanted"),
    [
        # 1 s until the first of four pieces is there, 8 s of work on all, 0.5 s until the last is back.
        (200, 200, 8.0, 1 + 8 + 0.5),
        # The link takes 8 s; then the last piece is worked on and goes.
        (400, 200, 4.0, 8 + 1 + 0.5),
        # What goes takes the longest.
        (100, 1600, 1.0, 16),
        # It rests where it is worked on.
        (0, 0, 3.0, 3),
    ],
)
def test_an_update_on_the_host_begins_with_its_first_piece_and_ends_with_its_last(
    to_host: int, to_device: int, work_s: float, wanted: float
) -> None:
    spec = TierSpec(nbytes=1 << 40, link=LINK)
    hardware = replace(
        machine(device="a GPU"),
        tiers={Tier.DEVICE: spec, Tier.HOST: spec},
        host_update_elements_per_s=4 * PIECE_ELEMENTS / work_s,
        rates={WorkKind.PIECES: Rate(1e12)},
    )
    moved = [Transfer(Tier.HOST, way, "weight", n) for way, n in (("write", to_host), ("read", to_device)) if n]
    update = Operation(
        action=Start(microbatch=0),
        transfers=tuple(moved),
        is_chain=False,
        host_work=((WorkKind.PIECES, 9.0), (WorkKind.UPDATED, 4.0 * PIECE_ELEMENTS)),
        update_place=UpdatePlace.HOST,
        gives=Token("update", "B0"),
    )
    waiting = Operation(action=Start(microbatch=0), waits=(Token("update", "B0"),))
    assert seconds_of(hardware, update, waiting) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("tier", "wanted"),
    [
        (None, 1.0),  # it rests on the device
        (Tier.HOST, 1.0),  # the thread that makes those of the host only enqueues it
        (Tier.DISK, 8.0 + 1.0),  # that thread waits for its piece
    ],
)
def test_an_update_by_the_device_waits_for_the_hosts_where_files_are_read_for_it(
    tier: Tier | None, wanted: float
) -> None:
    spec = TierSpec(nbytes=1 << 40, link=LINK)
    hardware = replace(
        machine(device="a GPU"),
        tiers={Tier.DEVICE: spec, Tier.HOST: spec, Tier.DISK: spec},
        host_update_elements_per_s=PIECE_ELEMENTS / 8.0,
        rates={WorkKind.PIECES: Rate(1e12)},
    )
    by_host = Operation(
        action=Start(microbatch=0),
        host_work=((WorkKind.PIECES, 1.0), (WorkKind.UPDATED, float(PIECE_ELEMENTS))),
        update_place=UpdatePlace.HOST,
        gives=Token("update", "B1"),
    )
    by_device = computing(
        1,
        transfers=() if tier is None else (Transfer(tier, "read", "state", 100),),
        is_chain=False,
        update_place=UpdatePlace.BESIDE,
        gives=Token("update", "B0"),
    )
    waiting = Operation(action=Start(microbatch=0), waits=(Token("update", "B0"),))
    assert Clock(hardware).run(step_of(by_host, by_device, waiting))[-1].end_s == pytest.approx(wanted)


def test_an_update_on_the_host_whose_pieces_come_late_holds_up_the_next() -> None:
    """Pieces come for 8 s, and the last takes 1; then the other one's work of 4 s."""
    spec = TierSpec(nbytes=1 << 40, link=LINK)
    hardware = replace(
        machine(device="a GPU"),
        tiers={Tier.DEVICE: spec, Tier.HOST: spec},
        host_update_elements_per_s=float(PIECE_ELEMENTS),
        rates={WorkKind.PIECES: Rate(1e12)},
    )
    work: Work = ((WorkKind.PIECES, 4.0), (WorkKind.UPDATED, 4.0 * PIECE_ELEMENTS))
    first, second = (
        Operation(
            action=Start(microbatch=0),
            transfers=(Transfer(Tier.HOST, "write", "weight", nbytes),) if nbytes else (),
            is_chain=False,
            host_work=work,
            update_place=UpdatePlace.HOST,
            gives=Token("update", key),
        )
        for nbytes, key in ((400, "B1"), (0, "B0"))
    )
    waiting = Operation(action=Start(microbatch=0), waits=(Token("update", "B0"),))
    assert Clock(hardware).run(step_of(first, second, waiting))[-1].end_s == pytest.approx(8 + 1 + 4)


def test_an_interval_holds_the_prediction_and_grows_with_the_spread() -> None:
    hardware = machine(replace(LINK, spread=0.5), streamed=10)
    step = step_of(
        moving("read", 600),
        Operation(action=Start(microbatch=0), waits=(Token("fetch", "a"),), work=((WorkKind.STREAMED, 40.0),)),
    )
    times = {sign: max(t.end_s for t in Clock(Pace(hardware, sign=sign)).run(step)) for sign in (-1, 0, 1)}
    assert times[0] == pytest.approx(6 + 4)
    assert times[-1] == pytest.approx(6 * 1.5 + 4 * 1.25)
    assert times[1] == pytest.approx(6 / 1.5 + 4 / 1.25)


def test_classes_that_are_not_measured_are_derived_and_say_so() -> None:
    found = rates_of(machine(streamed=10))
    assert set(found) == set(WorkKind)
    assert found[WorkKind.STREAMED] == Rate(10, 0.25)
    assert found[WorkKind.REDUCED].spread == DERIVED_SPREAD
    assert found[WorkKind.PRODUCTS_256].per_s == found[WorkKind.FLOPS].per_s == 1000


@pytest.mark.parametrize("name", machine_names())
def test_shipped_machines_have_every_class(name: str) -> None:
    hardware = read_hardware(name)
    assert hardware is not None
    found = rates_of(hardware)
    assert set(found) == set(WorkKind)
    assert all(rate.per_s > 0 for rate in found.values())
    # No class of products is faster than the lower bounds of the planner take for granted.
    assert fastest_products_per_s(hardware) >= hardware.flops_per_s
    # Wide products are at least as fast as narrow ones.
    wide = [found[product_kind(size, "float32")].per_s for size in (256, 128, 64, 16, 4, 1)]
    assert wide == sorted(wide, reverse=True)


def test_sizes_of_products_have_their_classes() -> None:
    assert [product_kind(size, "float32") for size in (1, 3, 4, 15, 16, 63, 64, 127, 128, 255, 256, 999)] == [
        WorkKind.PRODUCTS_1, WorkKind.PRODUCTS_1, WorkKind.PRODUCTS_4, WorkKind.PRODUCTS_4,
        WorkKind.PRODUCTS_16, WorkKind.PRODUCTS_16, WorkKind.PRODUCTS_64, WorkKind.PRODUCTS_64,
        WorkKind.PRODUCTS_128, WorkKind.PRODUCTS_128, WorkKind.PRODUCTS_256, WorkKind.PRODUCTS_256,
    ]  # fmt: skip
    assert product_kind(64, "bfloat16") is WorkKind.HALF_PRODUCTS_64
    assert product_kind(1, "float16") is WorkKind.FP16


amounts = st.dictionaries(st.sampled_from(list(WorkKind)), st.integers(0, 9).map(float), max_size=4)


@given(st.lists(st.tuples(amounts, st.integers(-2, 3))))
def test_sums_of_amounts_are_sums_kind_by_kind(works: list[tuple[dict[WorkKind, float], int]]) -> None:
    found = summed((as_work(one), float(factor)) for one, factor in works)
    wanted = {kind: sum(one.get(kind, 0.0) * factor for one, factor in works) for kind in WorkKind}
    assert dict(found) == {kind: amount for kind, amount in wanted.items() if amount}
    assert [kind for kind, _ in found] == [kind for kind in WorkKind if kind in dict(found)]


operations = st.lists(
    st.one_of(
        st.integers(1, 20).map(lambda s: ("compute", s)),
        st.tuples(st.sampled_from(["read", "write"]), st.integers(1, 500)),
        st.just(("wait", 0)),
    ),
    max_size=8,
)


@given(operations, st.sampled_from([1.0, 0.5, 0.25]))
def test_a_naive_loop_in_small_steps_gives_the_same_times(found: list[tuple[str, int]], share: float) -> None:
    """Time goes on in ticks: links move bytes, compute does its share of a tick while a link has work."""
    hardware = machine(replace(LINK, compute_share=share))
    made: list[Operation] = []
    tokens: list[Token] = []
    for index, (what, amount) in enumerate(found):
        if what == "compute":
            made.append(computing(amount / 10))
        elif what == "wait":
            made.append(Operation(action=Start(microbatch=0), waits=tuple(tokens)))
        else:
            made.append(moving(what, amount, str(index)))
            tokens.append(Token("fetch", str(index)))
    expected = max((time.end_s for time in Clock(hardware).run(step_of(*made))), default=0.0)
    assert naive_seconds(found, share) == pytest.approx(expected, abs=0.02)


def naive_seconds(found: list[tuple[str, int]], share: float) -> float:
    tick = 1e-3
    queues: dict[str, float] = {"read": 0.0, "write": 0.0}
    speeds = {"read": 100.0, "write": 50.0}
    now = 0.0

    def let_pass() -> None:
        nonlocal now
        now += tick
        for name, left in queues.items():
            queues[name] = max(0.0, left - speeds[name] * tick)

    for what, amount in found:
        if what == "compute":
            left = amount / 10
            while left > tick / 10:
                left -= tick * (share if any(queues.values()) else 1.0)
                let_pass()
        elif what == "wait":
            while any(queues.values()):
                let_pass()
        else:
            queues[what] += amount
    return now + max(left / speeds[name] for name, left in queues.items())


def test_a_timeline_says_its_interval_and_one_without_a_machine_has_none() -> None:
    from memfit.core.plan import Plan
    from memfit.step.build import build_step
    from memfit.step.lower import lower
    from unit.profiles import gpt_profile

    profile = gpt_profile(layers=2)
    step = lower(build_step(Plan(), profile, clips_norm=False), Plan(), profile)
    assert predict(step).interval_s is None
    timeline = predict(step, machine(products_64=1e9))
    assert timeline.interval_s is not None
    fast, slow = timeline.interval_s
    assert fast <= timeline.seconds <= slow


# ---- updates beside the main thread ----


def updating(seconds: float, nbytes: int) -> Operation:
    transfers = (Transfer(Tier.DISK, "read", "state", nbytes),) if nbytes else ()
    gives = Token("update", "a")
    return computing(seconds, update_place=UpdatePlace.BESIDE, transfers=transfers, gives=gives)


@pytest.mark.parametrize(("nbytes", "whole_s"), [(0, 5.0), (100, 7.0)])
def test_an_update_whose_pieces_come_behind_a_fetch_does_nothing_until_then(nbytes: int, whole_s: float) -> None:
    """2 s of an update, a fetch of 2 s that 3 s of work wait for: hidden by it only where the update has its states."""
    work = computing(3.0, waits=(Token("fetch", "a"),))
    assert seconds_of(machine(), updating(2.0, nbytes), moving("read", 200), work) == whole_s
    # The same where the fetch is there first.
    assert seconds_of(machine(), moving("read", 200), updating(2.0, nbytes), work) == whole_s


def test_what_waits_for_an_update_that_was_held_up_waits_for_its_end() -> None:
    """The fetch goes before its pieces for 2 s, then it takes 4."""
    steps = updating(4.0, 300), moving("read", 200), computing(0.0, waits=(Token("update", "a"),))
    times = Clock(machine()).run(step_of(*steps))
    assert times[-1].end_s == times[0].end_s == 6.0


# ---- a link that two tiers share ----


def beside_a_card(host: float, disk: float) -> Hardware:
    ways = {Tier.HOST: host, Tier.DISK: disk}
    tiers = {t: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=v, write_bytes_per_s=v)) for t, v in ways.items()}
    return Hardware(device="card", flops_per_s=1000.0, tiers={Tier.DEVICE: TierSpec(nbytes=1 << 40), **tiers})


def reading(tier: Tier, nbytes: int, key: str, crosses: Tier | None = None) -> Operation:
    transfer = Transfer(tier, "read", "weight", nbytes, crosses)
    return Operation(action=Start(microbatch=0), transfers=(transfer,), gives=Token("fetch", key))


@pytest.mark.parametrize(("host", "disk"), [(100.0, 50.0), (100.0, 80.0), (50.0, 100.0)])
def test_bytes_of_files_take_their_share_of_the_link_to_the_host(host: float, disk: float) -> None:
    """200 bytes from each tier: the disk is done when both links have carried its 200, the host when its link has carried 400."""
    machine_ = beside_a_card(host, disk)
    first, second = reading(Tier.DISK, 200, "a", Tier.HOST), reading(Tier.HOST, 200, "b")
    times = Clock(machine_).run(step_of(first, second))
    assert times[0].end_s == max(200 / disk, 200 / host)
    assert times[1].end_s == 400 / host
    apart = Clock(machine_).run(step_of(reading(Tier.DISK, 200, "a"), second))
    assert apart[1].end_s == 200 / host


def test_a_machine_that_states_no_link_to_the_host_has_the_disk_s_alone() -> None:
    assert seconds_of(machine(device="card"), reading(Tier.DISK, 200, "a", Tier.HOST)) == 2.0
