"""The data of a report against the timeline that it is made of, by arithmetic."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest

from memfit.core.hardware import rates_of
from memfit.core.operators import UntiledAttention
from memfit.core.plan import CallPlan, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.step import Interval, Moment, Timeline
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind
from memfit.report.memory_tables import closed_forms
from memfit.report.page import page_data
from memfit.report.timeline_data import TICKS_PER_S, fold, timeline_data
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from unit.profiles import gpt_profile
from unit.report.subjects import machine, seconds_of_the_device, streamed_plan, subject_of

LAYERS, WIDTH, TOKENS, VOCABULARY, ROWS = 4, 64, 128, 2048, 8
U = 4 * ROWS * TOKENS * WIDTH


def read(differences: list[int]) -> list[int]:
    return list(accumulate(differences))


def test_categories_of_every_action_sum_to_the_timelines_peak() -> None:
    subject = subject_of()
    told = page_data(subject)["predicted"]
    columns = [read(column) for column in told["by_category"].values()]
    peaks = [moment.peak_bytes for moment in subject.predicted.moments]
    assert [sum(row) for row in zip(*columns, strict=True)] == peaks == read(told["peak_bytes"])
    assert all(nbytes >= 0 for column in columns for nbytes in column)
    assert read(told["after_bytes"]) == [moment.after_bytes for moment in subject.predicted.moments]
    assert told["actions"] == [str(action) for action in subject.schedule]
    assert peaks[told["peak_index"]] == subject.predicted.peak_bytes


def test_a_category_below_zero_is_taken_off_the_largest() -> None:
    moment = Moment(
        action="norm", peak_bytes=70, after_bytes=70, by_category={"weight": 60, "gradient": -10, "state": 20}
    )
    told = timeline_data(Timeline(moments=(moment,), bytes_read={}, bytes_written={}))
    assert told["by_category"] == {"weight": [50], "state": [20]}


def test_the_area_below_the_picture_is_that_of_the_timeline() -> None:
    # Byte-seconds between the instants at which the main thread comes to the actions: drawn from the columns, and
    # added up from the moments that compute.
    subject = subject_of()
    told = page_data(subject)["predicted"]
    begins, peaks = [t / TICKS_PER_S for t in read(told["begin"])], read(told["peak_bytes"])
    ends = [*begins[1:], told["seconds"]]
    drawn = sum(peak * (end - begin) for peak, begin, end in zip(peaks, begins, ends, strict=True))
    busy = Counter[int]()
    for interval in subject.predicted.intervals:
        if interval.lane == "compute":
            busy[interval.moment] += round((interval.end_s - interval.start_s) * 1e9)
    added = sum(subject.predicted.moments[i].peak_bytes * ns / 1e9 for i, ns in busy.items())
    assert drawn == pytest.approx(added, rel=0.02)
    assert ends[-1] == pytest.approx(seconds_of_the_device(subject.predicted), rel=1e-3)
    assert begins == sorted(begins)


def test_lanes_carry_every_byte_and_every_stalled_second() -> None:
    subject = subject_of()
    told = page_data(subject)["predicted"]
    moved, stalls = Counter[str](), Counter[str]()
    for lane in told["lanes"]:
        for kind, ticks, nbytes in zip(
            lane["kind"], lane["ticks"], lane["bytes"] or [0] * len(lane["kind"]), strict=True
        ):
            what, name = lane["kinds"][kind].split(" ")
            if what == "stall":
                stalls[name] += ticks
            elif what == "transfer":
                moved[lane["name"].split()[1], name] += nbytes  # type: ignore[index]
    assert moved == {
        **{("read", name): nbytes for name, nbytes in subject.predicted.bytes_read.items()},
        **{("write", name): nbytes for name, nbytes in subject.predicted.bytes_written.items()},
    }
    assert {name: ticks / TICKS_PER_S for name, ticks in stalls.items()} == pytest.approx(
        dict(subject.predicted.stalls_s), rel=1e-4
    )


def test_the_disk_holds_at_every_action_what_it_holds_at_its_peak_or_less() -> None:
    subject = subject_of()
    disk = read(page_data(subject)["predicted"]["tiers"]["disk"])
    assert max(disk) == subject.predicted.peak_in(Tier.DISK)
    assert len(disk) == len(subject.predicted.moments)


def test_a_long_timeline_is_folded_and_keeps_its_peak_its_end_and_its_bytes() -> None:
    profile, plan = gpt_profile(layers=LAYERS), streamed_plan(LAYERS, 4)
    timeline = predict(lower(build_step(plan, profile, clips_norm=False), plan, profile), machine())
    folded = fold(timeline, moments=20, intervals=30)
    drawn = folded.timeline
    assert len(drawn.moments) <= 20 and len(drawn.intervals) <= 30
    width = folded.first[1]
    for index, moment in enumerate(drawn.moments):
        group = timeline.moments[index * width : (index + 1) * width]
        assert moment.peak_bytes == max(m.peak_bytes for m in group)
        assert moment.after_bytes == group[-1].after_bytes
        assert sum(moment.by_category.values()) == moment.peak_bytes
    assert drawn.peak_bytes == timeline.peak_bytes
    assert {i.moment for i in drawn.intervals} <= set(range(len(drawn.moments)))
    assert fold(timeline).timeline.moments == timeline.moments


def test_neighbours_of_a_lane_are_joined_and_their_bytes_added() -> None:
    spans = tuple(Interval("disk read", "transfer", "weight", i, 10, float(i), i + 0.5) for i in range(10))
    moments = tuple(Moment(action=f"fetch B{i}", peak_bytes=1, after_bytes=1, by_category={}) for i in range(10))
    timeline = Timeline(moments=moments, bytes_read={"weight": 100}, bytes_written={}, intervals=spans)
    joined = fold(timeline, intervals=5).timeline.intervals
    assert sum(i.nbytes for i in joined) == 100
    assert {(i.start_s, i.end_s) for i in joined} == {(0.0, 1.5), (2.0, 3.5), (4.0, 5.5), (6.0, 7.5), (8.0, 9.5)}


def test_equal_blocks_stand_in_one_row_and_rows_sum_to_the_model() -> None:
    subject = subject_of()
    rows = page_data(subject)["memory"]["blocks"]
    assert [(row["name"], row["count"]) for row in rows] == [("wte", 1), ("h.0-3", 4), ("ln_f", 1), ("lm_head", 1)]
    assert sum(row["count"] * row["weight_bytes"] for row in rows) == subject.profile.weight_bytes
    assert rows[1]["policy"] == "recompute" and rows[1]["homes"] == "disk, device, disk"
    u = U // 2  # two microbatches
    assert rows[1]["saved_bytes"] == 8 * u
    mixed = replace(subject.plan, blocks={"h.1": subject.plan.blocks["h.1"]})
    names = [row["name"] for row in page_data(subject_of(mixed))["memory"]["blocks"]]
    assert names == ["wte", "h.0", "h.1", "h.2-3", "ln_f", "lm_head"]


def test_holders_of_the_peak_sum_to_it() -> None:
    subject = subject_of()
    assert sum(nbytes for _, _, nbytes in page_data(subject)["memory"]["holders"]) == subject.predicted.peak_bytes


def test_untiled_attention_is_told_with_its_cost() -> None:
    profile = gpt_profile(layers=LAYERS)
    attentions = tuple(
        UntiledAttention(call=i + 1, module=f"h.{i}.attn", saved_bytes=100, tiled_bytes=3) for i in range(LAYERS)
    )
    traces = {rows: replace(trace, untiled_attention=attentions) for rows, trace in profile.traces.items()}
    told = page_data(subject_of(profile=replace(profile, traces=traces)))["memory"]["untiled"]
    assert told == {"modules": "h.0-3.attn", "saved_bytes": 400, "tiled_bytes": 12}


def test_equal_saved_tensors_of_equal_layers_stand_in_one_row() -> None:
    profile = gpt_profile(layers=LAYERS)
    alike = [(f"aten.mul in h.{i}.act: (1, 512)", 64) for i in (0, 0, 1, 2)]
    told = (*alike, ("aten.mm in h.0: (2, 2)", 16))
    lines = {told[0][0]: "app/model.py:7", told[2][0]: "app/model.py:7", told[3][0]: "app/model.py:7"}
    traces = {rows: replace(trace, largest_saved=told, made_at=lines) for rows, trace in profile.traces.items()}
    rows = page_data(subject_of(profile=replace(profile, traces=traces)))["memory"]["largest_saved"]
    assert rows == [
        ["aten.mul in h.0-2.act: (1, 512)", 64, 4, "app/model.py:7"],
        ["aten.mm in h.0: (2, 2)", 16, 1, ""],
    ]


def test_each_call_tells_the_largest_tensor_that_its_own_modules_save() -> None:
    profile = gpt_profile(layers=LAYERS)
    told = (
        ("aten.mul in h.10.act: (9, 9)", 96),  # another layer, whose name begins as that of h.1
        ("aten.mul in h.1.act: (1, 512)", 64),
        ("aten.mm in h.1: (2, 2)", 16),
        ("aten.mm in lm_head: (2, 2)", 8),
    )
    traces = {
        rows: replace(trace, largest_saved=told, made_at={told[1][0]: "app/model.py:7"})
        for rows, trace in profile.traces.items()
    }
    data = page_data(subject_of(profile=replace(profile, traces=traces)))
    found = dict(zip(data["calls"], data["memory"]["of_calls"], strict=True))
    assert found.pop("h.1") == ["aten.mul in h.1.act: (1, 512)", 64, "app/model.py:7"]
    assert found.pop("lm_head") == ["aten.mm in lm_head: (2, 2)", 8, ""]
    assert set(found.values()) == {None}


def test_idle_time_is_from_the_last_use_in_forward_to_the_backward_that_needs_it() -> None:
    subject = subject_of(Plan())
    lifetimes = page_data(subject)["lifetimes"]
    times = {m.action: (m.start_s, m.end_s) for m in subject.predicted.moments}
    assert [call["site"] for call in lifetimes["calls"]] == ["wte", *(f"h.{i}" for i in range(4)), "ln_f", "lm_head"]
    for call in lifetimes["calls"]:
        assert tuple(call["forward_s"]) == times[f"forward C{call['call']} m0"]
        assert tuple(call["backward_s"]) == times[f"backward C{call['call']} m0"]
    # What layers save inside: used up when their own forward ends.
    inside = next(row for row in lifetimes["storages"] if row["nbytes"] == 8 * U)
    assert (inside["made_by"], inside["saved_by"], inside["count"]) == ("h.0-3", "h.0-3", 4)
    idle = sum(times[f"backward C{c} m0"][0] - times[f"forward C{c} m0"][1] for c in range(1, 5))
    assert inside["idle_byte_s"] == pytest.approx(8 * U * idle)
    assert inside is lifetimes["storages"][0]


def test_what_a_call_that_recomputes_has_read_is_read_again() -> None:
    def told(plan: Plan) -> dict[str, int]:
        found = subject_of(plan)
        traces = {
            rows: replace(
                trace, storages=tuple(replace(s, uses=((s.segment, 3),), backward_uses=2) for s in trace.storages)
            )
            for rows, trace in found.profile.traces.items()
        }
        lifetimes = page_data(subject_of(plan, profile=replace(found.profile, traces=traces)))["lifetimes"]
        return next(row["uses"] for row in lifetimes["storages"] if row["nbytes"] == 8 * U)

    assert told(Plan()) == {"forward": 3, "recompute": 0, "backward": 2}
    assert told(recomputing_all()) == {"forward": 3, "recompute": 3, "backward": 2}


def test_keeping_moving_and_making_again_have_a_break_even() -> None:
    plain, again = subject_of(Plan()), subject_of(recomputing_all())
    lifetimes = page_data(plain)["lifetimes"]
    # A step that recomputes a layer takes longer by what the layer's row says.
    layers = [call for call in lifetimes["calls"] if call["site"].startswith("h.")]
    more = again.predicted.seconds - plain.predicted.seconds
    assert sum(call["recompute_s"] for call in layers) == pytest.approx(more)
    row = lifetimes["storages"][0]
    assert row["reload_s"] == {"disk": pytest.approx(2 * row["nbytes"] / 1e7)}
    saved = layers[0]["saved_bytes"]
    assert row["recompute_s"] == pytest.approx(layers[0]["recompute_s"] * row["nbytes"] / saved)
    # Over a link of that speed, away and back take as long as making it again.
    assert 2 * row["nbytes"] / row["break_even_bytes_per_s"] == pytest.approx(row["recompute_s"])
    unknown = page_data(replace(plain, hardware=None, recompute_s=()))["lifetimes"]["storages"][0]
    assert (unknown["reload_s"], unknown["recompute_s"], unknown["break_even_bytes_per_s"]) == ({}, None, None)


def test_the_first_step_takes_longer_by_its_fresh_memory() -> None:
    subject = subject_of(Plan())
    grown = subject.predicted.peak_bytes - subject.predicted.moments[0].after_bytes
    assert subject.hardware is not None
    more_s = grown / rates_of(subject.hardware)[WorkKind.FRESH].per_s
    assert dict(subject.facts)["first step"].startswith(f"{more_s:.2g} s more")


def recomputing_all() -> Plan:
    return Plan(
        calls=tuple(CallPlan(saved=Saved.RECOMPUTE if 1 <= c <= LAYERS else Saved.KEEP) for c in range(LAYERS + 3))
    )


def test_the_way_from_plain_training_ends_at_the_plan() -> None:
    subject = subject_of()
    points = subject.from_plain
    assert [point.name for point in points] == [
        "plain training",
        "updates in backward",
        "2 microbatches, layer-major",
        "recompute 4 of 7 calls",
        "optimizer states of 4 blocks on disk",
        "weights of 4 blocks on disk",
    ]
    plain = Plan(update=UpdateTime.AFTER_BACKWARD)
    step = lower(build_step(plain, subject.profile, clips_norm=False), plain, subject.profile)
    first = predict(step, machine())
    assert (points[0].peak_bytes, points[0].seconds) == (first.peak_bytes, pytest.approx(first.seconds))
    assert points[-1].peak_bytes == subject.predicted.peak_bytes
    assert points[-1].seconds == pytest.approx(subject.predicted.seconds)


def test_what_was_not_traced_is_told_with_the_next_decision() -> None:
    profile = gpt_profile(layers=LAYERS, rows=(4,))
    names = [point.name for point in subject_of(profile=profile).from_plain]
    assert names[0] == "plain training + updates in backward + 2 microbatches, layer-major"


# ---- closed forms ----


def plain_peak(profile: Profile, rows: int) -> int:
    """Activations and gradients of a plain step, by the step's own prediction."""
    sized = replace(profile, batch_rows=rows)
    plan = Plan(update=UpdateTime.AFTER_BACKWARD)
    timeline = predict(lower(build_step(plan, sized, clips_norm=False), plan, sized))
    resting = timeline.moments[0].after_bytes
    return timeline.peak_bytes - resting


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_closed_forms_give_the_predicted_plain_peak_of_every_number_of_rows(rows: int) -> None:
    forms = closed_forms(gpt_profile(layers=LAYERS, rows=(1, 8)))
    assert forms.traced_rows == (1, 8)
    predicted = plain_peak(gpt_profile(layers=LAYERS), rows)
    assert forms.peak_bytes(rows) == pytest.approx(predicted, rel=0.01)


def test_one_traced_size_is_taken_in_proportion() -> None:
    forms = closed_forms(gpt_profile(layers=LAYERS, rows=(8,)))
    held = sum(call.stays[1] + call.drops[1] for call in forms.calls)
    # By hand: embedding's and layers' outputs, what layers save inside, the final norm's output, the logits.
    assert 8 * held == (LAYERS + 1) * U + 8 * LAYERS * U + U + 4 * ROWS * TOKENS * VOCABULARY
    assert all(call.stays[0] == call.drops[0] == 0 for call in forms.calls)


def test_recomputing_all_layers_leaves_their_arguments_and_one_of_them() -> None:
    forms = closed_forms(gpt_profile(layers=LAYERS))
    kept, recomputed = forms.peak_bytes(8), forms.peak_bytes(8, LAYERS)
    # Either peak is at the end of forward, where recomputation has dropped all that layers save inside.
    assert kept - recomputed == 8 * LAYERS * U
