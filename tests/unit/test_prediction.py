"""Predicted bytes and seconds against arithmetic, and against a direct reading of what keeps a storage alive."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import PlanError
from memfit.core.hardware import Hardware, Link, Rate, TierSpec
from memfit.core.limits import MIB, Budget
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import BlockProfile, CallProfile, HeldResults, Profile, StorageProfile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.schedule import Backward, Clear, Commit, Fetch, Forward, Release, Reload, Schedule, Seed
from memfit.core.step import Timeline
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import TIERS, Tier
from memfit.core.work_kinds import WorkKind
from memfit.homes.memory import MemoryHome
from memfit.planner.search.bounds import commit_seconds, update_seconds
from memfit.planner.search.planner import choose_plan
from memfit.step.build import build_forward, build_step
from memfit.step.bytes import peak_report, residents_at
from memfit.step.clock import Pace
from memfit.step.lower import lower
from memfit.step.predict import appraise, predict
from memfit.step.sizes import flat_master_bytes, flat_weight_bytes, master_home_bytes, update_traffic
from property.random_steps import Case, cases, storages
from unit.profiles import PAGE, block, gpt_profile

DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DEVICE, state_home=Tier.DISK)
LAYERS, WIDTH, TOKENS, VOCABULARY, ROWS = 4, 64, 128, 2048, 8
U = 4 * ROWS * TOKENS * WIDTH
LOGITS = 4 * ROWS * TOKENS * VOCABULARY


def timeline_of(
    plan: Plan, profile: Profile, hardware: Hardware | None = None, *, clips_norm: bool = False
) -> Timeline:
    schedule = build_step(plan, profile, clips_norm=clips_norm)
    return predict(lower(schedule, plan, profile, staging_bytes=0), hardware)


def recompute_layers(profile: Profile, home: Tier = Tier.DEVICE) -> tuple[CallPlan, ...]:
    calls = next(iter(profile.traces.values())).calls
    return tuple(CallPlan(saved=Saved.RECOMPUTE, boundary_home=home) if c.is_repeated else CallPlan() for c in calls)


def resident_bytes(profile: Profile) -> int:
    return sum(flat_weight_bytes(b) + profile.state_bytes[b.name] for b in profile.blocks)


def batch_bytes(rows: int) -> int:
    return 8 * rows * TOKENS


# ---- activations ----


def test_the_plain_peak_is_the_sum_written_by_hand() -> None:
    """At the head's backward: all saved, the gradient of the logits, the head's own transient and its gradient."""
    profile = gpt_profile(layers=LAYERS)
    saved = U + LAYERS * (8 + 1) * U + U
    head_gradient = 4 * VOCABULARY * WIDTH
    expected = resident_bytes(profile) + batch_bytes(ROWS) + saved + LOGITS + LOGITS + head_gradient
    timeline = timeline_of(Plan(), profile)
    assert timeline.peak_bytes == expected
    assert timeline.peak is not None
    assert timeline.peak.action == f"backward C{LAYERS + 2} m0"


def test_recompute_holds_arguments_and_one_replayed_layer() -> None:
    profile = gpt_profile(layers=LAYERS)
    plan = Plan(calls=recompute_layers(profile))
    timeline = timeline_of(plan, profile)
    moments = {m.action: m for m in timeline.moments}
    # Arguments of all layers, the last one's output (the norm saved it), and the norm's output for the head.
    at_end = moments["forward C6 m0"]
    assert at_end.by_category["activation"] == (LAYERS + 1 + 1) * U
    backward = moments[f"backward C{LAYERS} m0"]
    # Alive: the arguments of all layers and the gradient that arrives; replayed: 8 u saved and 2 u of transients.
    assert backward.by_category["activation"] == LAYERS * U + U
    assert backward.by_category["transient"] == 8 * U + 2 * U


def with_layers(profile: Profile, change: Callable[[CallProfile], CallProfile]) -> Profile:
    """The same profile, with other facts of its layers' calls."""
    traces = {
        rows: replace(trace, calls=tuple(change(c) if c.is_repeated else c for c in trace.calls))
        for rows, trace in profile.traces.items()
    }
    return replace(profile, traces=traces)


def test_a_gradient_that_comes_behind_the_highest_activations_is_not_counted_beside_them() -> None:
    profile = gpt_profile(layers=LAYERS)
    gradient = profile.block("h.0").gradient_bytes

    def come_late(c: CallProfile) -> CallProfile:
        peak = c.backward_peak_bytes
        return replace(c, gradient_bytes=gradient, backward_fresh_peak_bytes=peak, backward_adding_peak_bytes=peak)

    late = with_layers(profile, come_late)
    for plan, less in (
        (Plan(), gradient),
        (Plan(calls=recompute_layers(profile)), gradient),
        # Of the first microbatch to come the gradient is new; to that the others add, the largest at most at once.
        (Plan(microbatches=2, order=Order.MICROBATCH_MAJOR), profile.block("h.0").largest_gradient_bytes),
    ):
        last = plan.microbatches - 1
        before, now = (
            next(m for m in timeline_of(plan, each).moments if m.action == f"backward C2 m{last}")
            for each in (profile, late)
        )
        assert before.peak_bytes - now.peak_bytes == less
        assert before.after_bytes == now.after_bytes


def test_what_selection_holds_is_not_made_again() -> None:
    profile = gpt_profile(layers=LAYERS)

    # The trace says: of 8 u saved inside, 4 u are results of products; run again with these at hand, a layer rises by 5 u.
    def with_peak(call: CallProfile) -> CallProfile:
        (held,) = call.held_results
        held = replace(held, peak_bytes=call.inside_peak_bytes - held.nbytes)
        return replace(call, held_results=(held,))

    traced = with_layers(profile, with_peak)
    plan = Plan(calls=tuple(replace(c, saved=Saved.SELECT) for c in recompute_layers(profile)))
    moment = next(m for m in timeline_of(plan, traced).moments if m.action == f"backward C{LAYERS} m0")
    # Held: arguments and products of all layers, and the gradient that arrives; made: the other 4 u, and 2 u of transients.
    assert moment.by_category["activation"] == LAYERS * (U + 4 * U) + U
    assert moment.by_category["transient"] == 4 * U + 2 * U


def test_the_tail_holds_the_logits_of_one_microbatch_only() -> None:
    profile = gpt_profile(layers=LAYERS)
    calls = recompute_layers(profile)
    cut = timeline_of(Plan(microbatches=4, calls=calls, tail=LAYERS + 1), profile)
    whole = timeline_of(Plan(microbatches=4, calls=calls), profile)
    held = ("activation", "logits", "transient")
    peaks = [max(sum(m.by_category[name] for name in held) for m in t.moments) for t in (cut, whole)]
    assert peaks[1] - peaks[0] >= 3 * LOGITS // 4 - 2 * U


def random_bytes(microbatches: int) -> int:
    """States of the processor's generator: of each microbatch that takes turns, and two where they change."""
    return (microbatches + 2) * torch.get_rng_state().nbytes if microbatches > 1 else 0


def test_layer_major_order_holds_every_microbatchs_boundary() -> None:
    profile = gpt_profile(layers=LAYERS)
    timeline = timeline_of(Plan(microbatches=4, calls=recompute_layers(profile), tail=LAYERS + 1), profile)
    moments = {m.action: m for m in timeline.moments}
    # After the last forward before the tail: of each of 4 microbatches, 5 boundaries of a quarter of u.
    assert moments[f"forward C{LAYERS} m0"].after_bytes == resident_bytes(profile) + batch_bytes(ROWS) + (
        LAYERS + 1
    ) * U + random_bytes(4)


@pytest.mark.parametrize("depth", [4, 64])
def test_inference_has_the_same_peak_at_every_depth(depth: int) -> None:
    """Two layers' weights and one layer's activations, whether there are 4 layers or 64."""
    profile = gpt_profile(layers=depth)
    layer = flat_weight_bytes(profile.block("h.0"))
    plan = Plan(blocks={f"h.{i}": DISK for i in range(depth)})
    schedule = build_forward(plan, profile, 1)
    timeline = predict(lower(schedule, plan, profile, staging_bytes=0))
    always = sum(flat_weight_bytes(b) + profile.state_bytes[b.name] for b in profile.blocks if b.kind != "layer")
    rest = always + batch_bytes(ROWS)
    middle = next(m for m in timeline.moments if m.action == "forward C2 m0")
    assert middle.peak_bytes == rest + 2 * layer + U + 9 * U
    assert max(m.by_category["weight"] for m in timeline.moments) <= rest + 2 * layer
    head = next(m for m in timeline.moments if m.action.startswith(f"forward C{depth + 2}"))
    assert head.by_category["activation"] == U


def alive_by_positions(case: Case, schedule: Schedule, m: int, s: StorageProfile) -> list[bool]:
    """After each action: is a storage of microbatch m on the device, read directly from its facts and positions."""
    plan, trace = case.plan, next(iter(case.profile.traces.values()))
    n = len(trace.calls)
    segments = [range(a, b + 1) for a, b in plan.segments(n)]
    cut = plan.tail if plan.order is Order.LAYER_MAJOR else None
    backs = [any(trace.calls[c].has_backward for c in q) for q in segments]

    def where(call: int) -> int:
        return next(i for i, q in enumerate(segments) if call in q)

    def position(kind: type[Forward | Backward], q: int) -> int:
        return texts.index(str(kind(segments[q][0], segments[q][-1], m)))

    def found(text: str) -> int | None:
        return texts.index(text) if text in texts else None

    texts = [str(a) for a in schedule]
    seed, first = next((i, a.first) for i, a in enumerate(schedule) if isinstance(a, Seed) and a.first <= m <= a.last)
    if m > first and backs[-1]:
        # Losses that begin together: each one's backward comes right behind the last call's of the one before.
        seed = texts.index(str(Backward(segments[-1][0], segments[-1][-1], m - 1)))
    end = max([seed, *(position(Backward, q) for q in range(len(segments)) if backs[q])])
    made = found(f"start m{m}") if s.segment < 0 else position(Forward, where(s.segment))
    assert made is not None
    until = [made]
    last = max(s.last_use, s.segment, *s.saved_inside, *s.saved_outside, *s.argument_of)
    used = s.held_until if s.held_until > last else last - 1
    if not (s.saved_inside or s.saved_outside or s.argument_of):
        used = max(used, s.segment)  # by the profile's contract it would not be listed otherwise
    if used == n - 1:
        until.append(end)
    elif s.segment < 0 or used >= segments[where(s.segment)][-1]:
        until.append(next(position(Forward, q) for q in range(len(segments)) if segments[q][-1] > used))
    for c in s.saved_inside:
        q = where(c)
        fate = plan.calls[c].saved
        lower = next((i for i in range(q, -1, -1) if backs[i]), None)
        if s.is_unseen or fate is Saved.KEEP or not backs[q]:
            until.append(end if lower is None else position(Backward, lower))
        elif fate is Saved.OFFLOAD:
            until.append((s.leaves and found(f"drop C{c} m{m}")) or position(Backward, q))
    for c in s.argument_of:
        q = where(c)
        if plan.calls[c].saved in (Saved.RECOMPUTE, Saved.SELECT) and s.segment < segments[q][0] and backs[q]:
            until.append((s.leaves and found(f"drop C{segments[q][0]} m{m}")) or position(Backward, q))
    for c in s.saved_outside:
        q = where(c)
        is_inner = c != segments[q][-1]
        higher = next((i for i in range(q + 1, len(segments)) if backs[i]), None)
        crosses = cut is not None and c < cut and (higher is None or segments[higher][0] >= cut)
        if is_inner or crosses:
            lower = next((i for i in range(q, -1, -1) if backs[i]), None)
            until.append(end if lower is None else position(Backward, lower))
        else:
            until.append(seed if higher is None else position(Backward, higher))
    gone = min(max(until), end)
    return [made <= t < gone for t in range(len(texts))]


def without_weights(case: Case, found: tuple[StorageProfile, ...]) -> Case:
    """Only activations: no parameters, nothing selected, and no gradients of activations."""
    trace = next(iter(case.profile.traces.values()))
    calls = tuple(replace(c, held_results=(HeldResults(saved=Saved.SELECT, nbytes=0),)) for c in trace.calls)
    rows = -(-case.profile.batch_rows // case.plan.microbatches)
    # More is said to be freed at the seed than there is, so that no byte is taken for a gradient.
    bare = TraceProfile(rows=rows, calls=calls, storages=found, seed_leaves_bytes=-(1 << 40))
    blocks = tuple(BlockProfile(name=b.name, kind=b.kind, parameters=()) for b in case.profile.blocks)
    profile = Profile(batch_rows=case.profile.batch_rows, blocks=blocks, traces={rows: bare})
    return replace(case, profile=profile)


@given(data=st.data(), case=cases())
def test_activations_after_every_action_are_those_that_something_keeps(data: st.DataObject, case: Case) -> None:
    trace = next(iter(case.profile.traces.values()))
    case = without_weights(case, data.draw(storages(len(trace.calls))))
    trace = next(iter(case.profile.traces.values()))
    schedule = build_step(case.plan, case.profile, clips_norm=False)
    timeline = predict(lower(schedule, case.plan, case.profile, staging_bytes=0))
    expected = [random_bytes(case.plan.microbatches)] * len(schedule.actions)
    for m in range(case.plan.microbatches):
        for s in trace.storages:
            for t, is_alive in enumerate(alive_by_positions(case, schedule, m, s)):
                expected[t] += s.nbytes * is_alive
    for t, action in enumerate(schedule):
        if isinstance(action, Reload):
            first, last = next(q for q in case.plan.segments(len(trace.calls)) if q[0] == action.call)
            is_offload = case.plan.calls[first].saved is Saved.OFFLOAD
            copied = sum(
                s.nbytes
                for s in trace.storages
                if s.leaves
                and (first in s.saved_inside if is_offload else s.segment < first)
                and (is_offload or any(first <= c <= last for c in s.argument_of))
            )
            back = str(Backward(first, last, action.microbatch))
            stop = [str(a) for a in schedule].index(back)
            for i in range(t, stop):
                expected[i] += copied
    assert [m.after_bytes for m in timeline.moments] == expected


# ---- weights, gradients, states ----


def test_streamed_blocks_hold_one_buffer_without_prefetch_and_two_with() -> None:
    profile = gpt_profile(layers=LAYERS)
    layers = {f"h.{i}": DISK for i in range(LAYERS)}
    layer = flat_weight_bytes(profile.block("h.0"))
    always = sum(flat_weight_bytes(b) for b in profile.blocks if b.kind != "layer") + batch_bytes(ROWS)
    for prefetch, buffers in ((0, 1), (1, 2), (2, 3)):
        timeline = timeline_of(Plan(blocks=layers, prefetch=prefetch), profile)
        assert max(m.by_category["weight"] for m in timeline.moments) == always + buffers * layer


def test_an_update_in_backward_lets_few_gradients_live_and_a_clipped_one_all() -> None:
    profile = gpt_profile(layers=LAYERS)
    embedding, layer = 4 * VOCABULARY * WIDTH, flat_weight_bytes(profile.block("h.0"))
    fused = timeline_of(Plan(prefetch=0), profile)
    clipped = timeline_of(Plan(update=UpdateTime.AFTER_BACKWARD), profile, clips_norm=True)
    norm = 2 * PAGE
    assert max(m.by_category["gradient"] for m in fused.moments) == embedding
    assert max(m.by_category["gradient"] for m in clipped.moments) == 2 * embedding + norm + LAYERS * layer


def test_a_gradient_added_to_another_is_there_beside_it() -> None:
    profile = gpt_profile(layers=1)
    timeline = timeline_of(Plan(microbatches=2, order=Order.MICROBATCH_MAJOR), profile)
    first, second = (next(m for m in timeline.moments if m.action == f"backward C0 m{i}") for i in range(2))
    assert first.by_category["transient"] == 0
    assert second.by_category["transient"] == 4 * VOCABULARY * WIDTH


def test_homes_count_on_their_tiers_and_have_a_spare_slot_on_disk_where_steps_are_atomic() -> None:
    profile = gpt_profile(layers=2)
    host = BlockPlan(weight_home=Tier.HOST, gradient_home=Tier.HOST, state_home=Tier.HOST)
    plan = Plan(blocks={"h.0": DISK, "h.1": host})
    timeline = timeline_of(plan, profile)
    weight = flat_weight_bytes(profile.block("h.0"))
    assert timeline.peak_in(Tier.DISK) == weight + profile.state_bytes["h.0"]
    assert timeline.peak_in(Tier.HOST) == weight + weight + profile.state_bytes["h.1"]
    atomic = timeline_of(Plan(blocks={"h.0": DISK}, is_atomic=True, update=UpdateTime.AFTER_BACKWARD), profile)
    assert atomic.peak_in(Tier.DISK) == 2 * (weight + profile.state_bytes["h.0"])


def test_offloaded_activations_count_where_they_rest() -> None:
    profile = gpt_profile(layers=LAYERS)
    calls = tuple(
        CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK) if 1 <= i <= LAYERS else CallPlan() for i in range(7)
    )
    timeline = timeline_of(Plan(calls=calls), profile)
    # All four leave: between the last layer and its backward stand the norm and the head, forward and back.
    assert timeline.bytes_written == {"activation": LAYERS * 9 * U}
    assert timeline.bytes_read == timeline.bytes_written
    assert timeline.peak_in(Tier.DISK) == LAYERS * 9 * U


def test_bytes_moved_a_parameter_are_those_of_the_closed_form() -> None:
    """fp32 AdamW from disk: 4 read in forward, 4 in backward, 8 of states; 4 + 8 written (states are 8 a parameter)."""
    profile = gpt_profile(layers=LAYERS)
    plan = Plan(blocks={f"h.{i}": DISK for i in range(LAYERS)}, microbatches=4, tail=LAYERS + 1)
    weight = LAYERS * flat_weight_bytes(profile.block("h.0"))
    states = LAYERS * profile.state_bytes["h.0"]
    timeline = timeline_of(plan, profile)
    # The last layer is not fetched again only where backward follows it at once: here the tail stands between.
    assert timeline.bytes_read == {"weight": 2 * weight, "state": states}
    assert timeline.bytes_written == {"weight": weight, "state": states}
    other = timeline_of(replace(plan, order=Order.MICROBATCH_MAJOR), profile)
    assert other.bytes_read["weight"] == 4 * 2 * weight


def _with_masters(profile: Profile) -> Profile:
    """The same in bf16, with fp32 masters."""
    blocks = [
        replace(b, parameters=tuple(replace(p, nbytes=p.nbytes // 2, master_nbytes=p.nbytes) for p in b.parameters))
        for b in profile.blocks
    ]
    return replace(profile, blocks=tuple(blocks))


def test_bytes_moved_a_parameter_in_bf16_are_those_of_the_closed_form() -> None:
    """AdamW from disk: 2 read in forward, 2 in backward, 4 of masters and 8 of states; 2 + 4 + 8 written."""
    full = gpt_profile(layers=LAYERS)
    profile = _with_masters(full)
    plan = Plan(blocks={f"h.{i}": DISK for i in range(LAYERS)}, microbatches=4, tail=LAYERS + 1)
    master = LAYERS * flat_weight_bytes(full.block("h.0"))
    weight = LAYERS * flat_weight_bytes(profile.block("h.0"))
    states = LAYERS * profile.state_bytes["h.0"]
    timeline = timeline_of(plan, profile)
    assert timeline.bytes_read == {"weight": 2 * weight, "master": master, "state": states}
    assert timeline.bytes_written == {"weight": weight, "master": master, "state": states}
    # Gradients stay on the device.
    assert timeline.peak_in(Tier.DISK) == weight + master + states


def test_of_split_masters_seventeen_bits_a_parameter_move_and_rest() -> None:
    profile = _with_masters(gpt_profile(layers=LAYERS))
    disk = {f"h.{i}": DISK for i in range(LAYERS)}
    plan = Plan(blocks=disk, microbatches=4, tail=LAYERS + 1, compute_dtype=ComputeDtype.BFLOAT16, splits_masters=True)
    block = profile.block("h.0")
    pages = [
        PAGE * -(-math.prod(p.shape) * 2 // PAGE) + PAGE * -(-math.prod(p.shape) // 8 // PAGE) for p in block.parameters
    ]
    rest, weight = LAYERS * sum(pages), LAYERS * flat_weight_bytes(block)
    states = LAYERS * profile.state_bytes["h.0"]
    timeline = timeline_of(plan, profile)
    # The weights visit in backward, where the update finds the upper bits.
    assert timeline.bytes_read == {"weight": 2 * weight, "master": rest, "state": states}
    assert timeline.bytes_written == {"weight": weight, "master": rest, "state": states}
    assert timeline.peak_in(Tier.DISK) == weight + rest + states
    resident = timeline_of(replace(plan, blocks={}), profile)
    whole = timeline_of(replace(plan, blocks={}, splits_masters=False), profile)
    saved = sum(flat_master_bytes(b) - master_home_bytes(plan, b) for b in profile.blocks)
    assert whole.peak_bytes - resident.peak_bytes == saved


def test_in_bf16_one_microbatch_holds_narrow_gradients_and_several_hold_fp32_sums() -> None:
    profile = _with_masters(gpt_profile(layers=LAYERS))
    after = UpdateTime.AFTER_BACKWARD
    narrow = sum(flat_weight_bytes(b) for b in profile.blocks)
    wide = sum(flat_weight_bytes(b) for b in gpt_profile(layers=LAYERS).blocks)
    one = timeline_of(Plan(update=after), profile)
    several = timeline_of(Plan(microbatches=4, update=after), profile)
    assert max(m.by_category["gradient"] for m in one.moments) == narrow
    assert max(m.by_category["gradient"] for m in several.moments) == wide
    # Masters rest on the device like the states, of twice their size.
    assert {m.by_category["state"] for m in one.moments} == {wide + sum(profile.state_bytes.values())}


def test_a_frozen_block_has_neither_gradient_nor_update() -> None:
    profile = gpt_profile(layers=1)
    frozen = block("h.0", "layer", 12 * WIDTH * WIDTH, trains=False)
    blocks = tuple(frozen if b.name == "h.0" else b for b in profile.blocks)
    schedule = build_step(Plan(), replace(profile, blocks=blocks), clips_norm=False)
    assert "update B1" not in schedule.text()
    assert "clear B1" not in schedule.text()


# ---- peaks by name, limits ----


def test_residents_at_every_action_add_up_to_its_peak() -> None:
    profile = gpt_profile(layers=2)
    plan = Plan(
        microbatches=2,
        tail=3,
        blocks={"h.0": DISK, "h.1": DISK},
        calls=recompute_layers(profile, Tier.DISK),
    )
    schedule = build_step(plan, profile, clips_norm=False)
    timeline = predict(lower(schedule, plan, profile, staging_bytes=MIB))
    for index, moment in enumerate(timeline.moments):
        found = residents_at(lower(schedule, plan, profile, staging_bytes=MIB, is_itemized=True), index)
        assert sum(r.nbytes for r in found) == moment.peak_bytes
        assert all(r.nbytes > 0 for r in found)


def test_the_report_names_the_largest_first() -> None:
    profile = gpt_profile(layers=2)
    schedule = build_step(Plan(), profile, clips_norm=False)
    text = peak_report(lower(schedule, Plan(), profile, staging_bytes=0, is_itemized=True), rows=4)
    assert text.splitlines()[0].startswith("predicted device peak")
    assert "backward C4 m0" in text
    assert "smaller ones" in text


def test_a_size_that_was_not_traced_is_refused() -> None:
    profile = gpt_profile(layers=1, rows=(8,))
    with pytest.raises(PlanError, match="trace of 4 rows"):
        timeline_of(Plan(microbatches=2), profile)


CALL_S = 1e-4
FREE = (
    WorkKind.FRAMES, WorkKind.SWITCHES, WorkKind.STEPS, WorkKind.VISITS, WorkKind.VISITED, WorkKind.PIECES,
    WorkKind.PIECE_TRANSFERS,
)  # fmt: skip


def machine(*, disk: float = 1e9, flops: float = 1e9) -> Hardware:
    return Hardware(
        device="cpu",
        flops_per_s=flops,
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 40),
            Tier.DISK: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=disk, write_bytes_per_s=disk)),
        },
        update_elements_per_s=1e30,
        # Of Python's part only entries of calls take time here.
        rates={WorkKind.CALLS: Rate(1 / CALL_S), **{kind: Rate(1e24) for kind in FREE}},
    )


def test_compute_alone_takes_its_operations_and_one_more_forward_if_recomputed() -> None:
    profile = gpt_profile(layers=LAYERS)
    calls = profile.traces[ROWS].calls
    forward = sum(c.forward_flops for c in calls)
    backward = sum(c.backward_flops for c in calls)
    layers = sum(c.forward_flops for c in calls if c.is_repeated)
    # Each is entered twice, and autograd once.
    overhead = (2 * len(calls) + 1) * CALL_S
    plain = timeline_of(Plan(), profile, machine())
    assert plain.seconds == pytest.approx((forward + backward) / 1e9 + overhead)
    again = timeline_of(Plan(calls=recompute_layers(profile)), profile, machine())
    assert again.seconds == pytest.approx((forward + layers + backward) / 1e9 + overhead)


def test_a_fetch_ahead_hides_behind_compute_and_a_late_one_does_not() -> None:
    profile = gpt_profile(layers=LAYERS)
    layers = {f"h.{i}": replace(DISK, state_home=Tier.DEVICE) for i in range(LAYERS)}
    layer = flat_weight_bytes(profile.block("h.0"))
    # A fetch takes half as long as a layer's forward.
    flops_s = profile.traces[ROWS].calls[1].forward_flops / 1e9
    hardware = machine(disk=layer / (flops_s / 2))
    schedule = build_forward(Plan(blocks=layers, prefetch=1), profile, 1)
    ahead = predict(lower(schedule, Plan(blocks=layers, prefetch=1), profile), hardware)
    late_plan = Plan(blocks=layers, prefetch=0)
    late = predict(lower(build_forward(late_plan, profile, 1), late_plan, profile), hardware)
    assert late.stalls_s["fetch"] == pytest.approx(LAYERS * flops_s / 2)
    # Only the first is waited for, less the embedding's time: it has nothing but overhead to hide behind.
    assert ahead.stalls_s["fetch"] == pytest.approx(flops_s / 2 - CALL_S)


def test_a_visit_takes_time_of_the_main_thread_while_its_bytes_come() -> None:
    profile = gpt_profile(layers=LAYERS)
    plan = Plan(blocks={f"h.{i}": replace(DISK, state_home=Tier.DEVICE) for i in range(LAYERS)}, prefetch=0)
    schedule = build_forward(plan, profile, 1)
    fast = machine(disk=1e24)
    block_s, tensor_s = 3e-4, 2e-5
    slowed = replace(
        fast, rates={**fast.rates, WorkKind.VISITS: Rate(1 / block_s), WorkKind.VISITED: Rate(1 / tensor_s)}
    )
    step = lower(schedule, plan, profile)
    tensors = len(list(profile.block("h.0").parameters))
    visit_s = block_s + tensors * tensor_s
    assert predict(step, slowed).seconds - predict(step, fast).seconds == pytest.approx(LAYERS * visit_s)
    # A fetch that takes less is not waited for.
    bytes_s = flat_weight_bytes(profile.block("h.0")) / (visit_s / 2)
    link = Link(read_bytes_per_s=bytes_s, write_bytes_per_s=bytes_s)
    slow_disk = replace(slowed, tiers={**slowed.tiers, Tier.DISK: replace(slowed.tiers[Tier.DISK], link=link)})
    assert predict(step, slow_disk).stalls_s.get("fetch", 0.0) == 0.0
    # An accelerator's host is ahead of it.
    beside = lower(schedule, plan, profile, device="cuda")
    assert not any(kind in (WorkKind.VISITS, WorkKind.VISITED) for o in beside for kind, _ in o.work)


def test_stalls_and_compute_add_up_to_the_step() -> None:
    profile = gpt_profile(layers=LAYERS)
    plan = Plan(
        microbatches=2,
        tail=LAYERS + 1,
        blocks={f"h.{i}": DISK for i in range(LAYERS)},
        calls=recompute_layers(profile, Tier.DISK),
    )
    timeline = timeline_of(plan, profile, machine(disk=1e6))
    busy = sum(m.end_s - m.start_s for m in timeline.moments if m.action.startswith(("forward", "backward", "seed")))
    assert timeline.seconds == pytest.approx(busy + sum(timeline.stalls_s.values()))


def test_links_serve_one_transfer_at_a_time() -> None:
    profile = gpt_profile(layers=LAYERS)
    plan = Plan(blocks={b.name: DISK for b in profile.blocks}, prefetch=2)
    schedule = build_step(plan, profile, clips_norm=False)
    timeline = predict(lower(schedule, plan, profile), machine(disk=1e6))
    fetches = [m for a, m in zip(schedule, timeline.moments, strict=True) if isinstance(a, Fetch)]
    read_s = sum(flat_weight_bytes(profile.blocks[a.block]) for a in schedule if isinstance(a, Fetch)) / 1e6
    assert max(m.end_s for m in fetches) >= read_s


def test_lanes_show_all_that_is_moved_waited_for_and_computed() -> None:
    profile = gpt_profile(layers=LAYERS)
    plan = Plan(
        microbatches=2,
        tail=LAYERS + 1,
        blocks={f"h.{i}": DISK for i in range(LAYERS)},
        calls=recompute_layers(profile, Tier.DISK),
    )
    timeline = timeline_of(plan, profile, machine(disk=1e6))
    lanes: dict[str, list[tuple[float, float]]] = {}
    moved, stalls = Counter[tuple[str, str]](), defaultdict[str, float](float)
    for i in timeline.intervals:
        lanes.setdefault(i.lane, []).append((i.start_s, i.end_s))
        if i.kind == "transfer":
            moved[i.lane.removesuffix(" for updates"), i.name] += i.nbytes
            assert i.end_s - i.start_s == pytest.approx(i.nbytes / 1e6)
        elif i.kind == "stall":
            stalls[i.name] += i.end_s - i.start_s
    ways = ["disk read", "disk read for updates", "disk write", "disk write for updates"]
    assert sorted(lanes) == ["compute", *ways]
    for spans in lanes.values():  # one thing at a time
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(sorted(spans)))
    assert moved == {
        **{("disk read", name): nbytes for name, nbytes in timeline.bytes_read.items()},
        **{("disk write", name): nbytes for name, nbytes in timeline.bytes_written.items()},
    }
    assert dict(stalls) == pytest.approx(dict(timeline.stalls_s))
    assert sum(end - begin for begin, end in lanes["compute"]) == pytest.approx(timeline.seconds, abs=1e-3)
    assert timeline_of(plan, profile).intervals == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_update_of_what_rests_on_the_host_is_priced_where_it_is_done(device: str) -> None:
    """What homes cannot give compute in place is brought to the device and back, and the device does the work."""
    profile = gpt_profile(layers=2)
    host = BlockPlan(weight_home=Tier.HOST, gradient_home=Tier.HOST, state_home=Tier.HOST)
    plan = Plan(blocks={"h.0": host})
    index = next(i for i, b in enumerate(profile.blocks) if b.name == "h.0")
    is_in_place = MemoryHome(0, tier=Tier.HOST, device=torch.device(device)).memory is not None
    assert is_in_place == (device == "cpu")  # an emulated device computes in host memory
    weight, states = flat_weight_bytes(profile.blocks[index]), profile.state_bytes["h.0"]
    for is_visiting in (False, True):
        traffic = update_traffic(plan, profile, index, is_visiting=is_visiting, device=device)
        moved = {} if is_in_place else {"gradient": weight, "state": states}
        read = moved if is_in_place or is_visiting else {"weight": weight, **moved}
        written = {} if is_in_place else {"weight": weight, "state": states}
        assert traffic.read == {(Tier.HOST, name): nbytes for name, nbytes in read.items()}
        assert traffic.written == {(Tier.HOST, name): nbytes for name, nbytes in written.items()}
    elements = sum(math.prod(p.shape) for p in profile.blocks[index].parameters)
    hardware = replace(machine(), device=device, update_elements_per_s=1e3)
    assert update_seconds(plan, profile, index, Pace(hardware)) == pytest.approx((elements / 1e3, 0.0))


@pytest.mark.parametrize("weights", list(TIERS))
def test_an_update_on_the_host_moves_what_does_not_rest_there(weights: Tier) -> None:
    profile = gpt_profile(layers=2)
    host = BlockPlan(weight_home=weights, gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
    index = next(i for i, b in enumerate(profile.blocks) if b.name == "h.0")
    plan, weight = Plan(blocks={"h.0": host}), flat_weight_bytes(profile.blocks[index])
    # Down from the device and up again, from the disk and back, or nothing.
    link = {Tier.DEVICE: Tier.HOST, Tier.DISK: Tier.DISK}.get(weights)
    expected = {} if link is None else {(link, "weight"): weight}
    for is_visiting in (False, True):
        traffic = update_traffic(plan, profile, index, is_visiting=is_visiting, device="cuda")
        assert (traffic.read, traffic.written) == (expected, expected)
    elements = sum(math.prod(p.shape) for p in profile.blocks[index].parameters)
    hardware = replace(machine(), device="cuda", update_elements_per_s=1e9, host_update_elements_per_s=1e3)
    assert update_seconds(plan, profile, index, Pace(hardware)) == pytest.approx((0.0, elements / 1e3))
    # Where the processor is the device, the host's cores are it.
    assert update_seconds(plan, profile, index, Pace(replace(hardware, device="cpu")))[1] == 0


def test_updates_on_the_host_run_beside_backward_one_after_the_other() -> None:
    """By arithmetic: all transfers and all device work take no time to speak of, so that the step is its host updates."""
    profile = gpt_profile(layers=4)
    host = BlockPlan(weight_home=Tier.HOST, gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
    plan = Plan(blocks={f"h.{i}": host for i in range(4)})
    link = Link(read_bytes_per_s=1e18, write_bytes_per_s=1e18)
    hardware = replace(
        machine(),
        device="cuda",
        tiers={**machine().tiers, Tier.HOST: TierSpec(nbytes=1 << 40, link=link)},
        flops_per_s=1e18,
        update_elements_per_s=1e18,
        host_update_elements_per_s=1e6,
    )
    layer = next(b for b in profile.blocks if b.name == "h.0")
    elements = sum(math.prod(p.shape) for p in layer.parameters)
    schedule = build_step(plan, profile, clips_norm=False)
    step = lower(schedule, plan, profile, device="cuda")
    timeline = predict(step, hardware)
    assert timeline.seconds == pytest.approx(4 * elements / 1e6, rel=0.02)
    # No release waits for one: its device bytes are not those that the update works on.
    on_host = {i for i, b in enumerate(profile.blocks) if b.name in plan.blocks}
    ends = [o for o in step if isinstance(o.action, Release | Clear) and o.action.block in on_host]
    assert ends and "update" not in {t.kind for o in ends for t in o.waits}
    assert {t.kind for o in step for t in o.waits if isinstance(o.action, Commit)} >= {"accumulate", "update"}
    # On the device as fast as there, the same updates delay backward: never faster.
    on_device = replace(plan, blocks={name: replace(b, update_on=Tier.DEVICE) for name, b in plan.blocks.items()})
    other = predict(
        lower(build_step(on_device, profile, clips_norm=False), on_device, profile, device="cuda"),
        replace(hardware, update_elements_per_s=1e6),
    )
    assert other.seconds >= timeline.seconds * 0.98


def test_the_disks_buffers_are_host_memory_beside_an_accelerator() -> None:
    profile = gpt_profile(layers=2)
    plan = Plan(blocks={f"h.{i}": DISK for i in range(2)})
    schedule = build_step(plan, profile, clips_norm=False)
    found = {
        device: [
            c
            for c in lower(schedule, plan, profile, device=device, staging_bytes=4 * MIB).resting
            if c.owner == "disk buffers"
        ]
        for device in ("cpu", "cuda")
    }
    assert [(c.tier, c.nbytes) for c in found["cpu"]] == [(Tier.DEVICE, 4 * MIB)]
    assert [(c.tier, c.nbytes) for c in found["cuda"]] == [(Tier.HOST, 4 * MIB)]


def test_host_memory_where_the_device_is_the_host_is_refused() -> None:
    profile = gpt_profile(layers=1)
    with pytest.raises(PlanError, match="the tier 'host', which this machine does not have"):
        timeline_of(Plan(blocks={"h.0": BlockPlan(weight_home=Tier.HOST)}), profile, machine())


def test_a_shared_weights_gradient_that_waits_in_the_trace_is_counted_once() -> None:
    """Autograd holds the head's part until the embedding's comes: the trace has it among activations meanwhile."""
    profile = gpt_profile(layers=2, is_tied=True)
    trace = profile.traces[ROWS]
    weight = 4 * VOCABULARY * WIDTH
    *others, head = trace.calls
    waits = replace(
        head,
        backward_peak_bytes=head.backward_peak_bytes + weight,
        backward_leaves_bytes=head.backward_leaves_bytes + weight,
    )
    # The embedding makes its own part, adds the two, and both stop being activations.
    joins = replace(
        others[0], backward_peak_bytes=weight, backward_leaves_bytes=others[0].backward_leaves_bytes - weight
    )
    traced = replace(trace, calls=(joins, *others[1:], waits))
    found = {m.action: m for m in timeline_of(Plan(prefetch=0), replace(profile, traces={ROWS: traced})).moments}
    untied = {m.action: m for m in timeline_of(Plan(prefetch=0), gpt_profile(layers=2)).moments}
    for name in (f"backward C{c} m0" for c in range(1, 5)):
        for category in ("activation", "transient"):
            assert found[name].by_category[category] == untied[name].by_category[category]
    last = found["backward C0 m0"].by_category
    assert last["gradient"] + last["transient"] == 2 * weight


def test_a_commit_writes_what_rests_in_memory_and_its_seconds_belong_to_the_step() -> None:
    """Twelve bytes a parameter with two moments in fp32, at the speed of the disk; nothing for what rests on disk; a share where every third step commits."""
    profile = gpt_profile(layers=2)
    machine = Hardware(
        device="cpu",
        flops_per_s=1e9,
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 40),
            Tier.DISK: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=5e8)),
        },
    )
    weights = sum(p.nbytes for b in profile.blocks for p in b.parameters)
    on_disk = {b.name: BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK) for b in profile.blocks}
    for blocks, share in (({}, 3), (on_disk, 0), ({n: BlockPlan(state_home=Tier.DISK) for n in on_disk}, 1)):
        plan = Plan(blocks=blocks)
        schedule = build_step(plan, profile, clips_norm=False)
        alone = predict(lower(schedule, plan, profile), machine)
        for commits in (1.0, 1 / 3):
            found = predict(lower(schedule, plan, profile, commits=commits), machine)
            # Each block is laid out in pages.
            assert found.seconds - alone.seconds == pytest.approx(commits * share * weights / 5e8, rel=0.03, abs=1e-9)
            cost = appraise(lower(schedule, plan, profile, commits=commits), machine)
            assert cost.seconds == pytest.approx(found.seconds)


def test_the_planner_keeps_blocks_on_disk_where_each_commit_would_write_them() -> None:
    """Compute and one link take turns: without a store memory is faster, with one a step in memory pays for the disk afterwards."""
    profile = gpt_profile(layers=4, tokens=512, width=512, rows=(8,))
    machine = Hardware(
        device="cpu",
        flops_per_s=1e9,
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 40),
            Tier.DISK: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=1e8, write_bytes_per_s=1e8)),
        },
    )
    budget = Budget(limit_bytes=None, base_bytes=0, reserve_bytes=0)
    found = {commits: choose_plan(profile, budget, machine, commits=commits) for commits in (0.0, 1.0)}
    assert found[0.0].plan.blocks == {} or not any(b.rests_on_disk for b in found[0.0].plan.blocks.values())
    assert found[1.0].timeline.seconds >= found[0.0].timeline.seconds
    in_memory = found[0.0].timeline.seconds + commit_seconds(found[0.0].plan, profile, machine, 1.0)
    assert found[1.0].timeline.seconds < in_memory
    assert any(b.state_home is Tier.DISK for b in found[1.0].plan.blocks.values())
