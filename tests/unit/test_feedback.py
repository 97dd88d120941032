"""Feedback of a job's steps, by arithmetic: rates of links, when a plan is priced again, when the plan before comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memfit.core.hardware import Hardware, Link, LinkTraffic, TierSpec
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.job import comparing as module
from memfit.job.comparing import Feedback, with_rates

MIB = 1 << 20


def machine(per_s: float = 1e9) -> Hardware:
    link = Link(read_bytes_per_s=per_s, write_bytes_per_s=per_s, both_read_bytes_per_s=per_s / 2)
    return Hardware(
        device="card",
        flops_per_s=1e12,
        tiers={Tier.DEVICE: TierSpec(nbytes=1 << 30), Tier.HOST: TierSpec(nbytes=1 << 30, link=link)},
    )


def test_a_measured_way_of_a_link_changes_its_rate_and_what_hangs_on_it() -> None:
    traffic = {
        (Tier.HOST, "read"): LinkTraffic(nbytes=8 * MIB, seconds=8 * MIB / 2.5e8),
        (Tier.HOST, "write"): LinkTraffic(nbytes=MIB, seconds=1.0),  # too few bytes to say anything
        (Tier.DISK, "read"): LinkTraffic(nbytes=8 * MIB, seconds=1.0),  # a tier that the machine has not
    }
    link = with_rates(machine(), traffic, {}).link(Tier.HOST)
    assert link.read_bytes_per_s == pytest.approx(2.5e8)
    assert link.both_read_bytes_per_s == pytest.approx(1.25e8)
    assert link.write_bytes_per_s == 1e9


def test_a_way_that_the_other_one_was_foretold_to_slow_is_not_slow_for_that() -> None:
    traffic = {(Tier.HOST, "read"): LinkTraffic(nbytes=8 * MIB, seconds=8 * MIB / 2.5e8)}
    foretold = {(Tier.HOST, "read"): LinkTraffic(nbytes=MIB, seconds=MIB / 5e8)}
    link = with_rates(machine(), traffic, foretold).link(Tier.HOST)
    assert link.read_bytes_per_s == pytest.approx(1e9 * 2.5e8 / 5e8)


class Run:
    """A job's assembly as far as feedback looks at it; a step moves 8 MiB to the device, and takes their time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.per_s = 1e9
        monkeypatch.setattr(module, "step_traffic", lambda _, __: {})
        monkeypatch.setattr(module, "step_seconds", lambda _, hardware: MIB / hardware.link(Tier.HOST).read_bytes_per_s)
        compared: Any = SimpleNamespace(result=lambda: None)
        self.feedback = Feedback(compared)
        self.prepared: Any = object()

    @property
    def assembly(self) -> Any:
        traffic = {"read": LinkTraffic(nbytes=8 * MIB, seconds=8 * MIB / self.per_s)}
        factory = SimpleNamespace(take_traffic=lambda: traffic)
        house = SimpleNamespace(factories={Tier.HOST: factory})
        return SimpleNamespace(house=house, setup=SimpleNamespace(hardware=machine))

    def step(self, seconds: float) -> Hardware | None:
        self.feedback.note(self.assembly, self.prepared, seconds)
        return self.feedback.measured(self.assembly)


def test_a_plan_is_priced_again_once_for_each_change_of_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    assert [run.step(1.0) for _ in range(6)] == [None] * 6
    run.per_s = 0.97e9  # too near
    assert [run.step(1.0) for _ in range(4)] == [None] * 4
    run.per_s = 1e8
    asked = [found.link(Tier.HOST).read_bytes_per_s for _ in range(8) if (found := run.step(5.0)) is not None]
    # A window that the change falls into may be priced by itself; then by the new rate, and never again.
    assert 1 <= len(asked) <= 2 and asked[-1] == pytest.approx(1e8)


def test_the_plan_before_comes_back_where_the_new_one_is_measured_to_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Plan(blocks={"a": BlockPlan()})
    for new_s, comes_back in ((1.2, True), (1.01, False), (0.5, False)):
        run = Run(monkeypatch)
        for _ in range(3):
            run.step(1.0)
        run.feedback.begin_plan(before)
        assert run.feedback.slower_than_before() is None, "nothing is measured yet"
        run.step(9.0)  # the first step of an assembly says nothing
        for _ in range(2):
            run.step(new_s)
        assert (run.feedback.slower_than_before() is before) == comes_back
        assert run.feedback.slower_than_before() is None, "asked once"


def test_a_job_takes_so_many_plans_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    for change in range(module.MOST_CHANGES + 2):
        run.per_s = 1e9 / 2 ** (change + 1)
        found = [run.step(1.0) for _ in range(6)]
        assert any(found) == (change < module.MOST_CHANGES)
        if any(found):
            run.feedback.begin_plan(Plan())
