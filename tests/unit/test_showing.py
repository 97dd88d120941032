"""How plans, profiles, proofs and jobs show themselves: short where they are printed, a table in a notebook, and plans as code that makes them again."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import memfit
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.step_report import html_bar, html_table, in_runs
from memfit.core.tiers import TIERS, Tier

HOMES = st.sampled_from(TIERS)
BLOCKS = st.builds(BlockPlan, weight_home=HOMES, gradient_home=HOMES, state_home=HOMES)
CALLS = st.builds(CallPlan, saved=st.sampled_from(list(Saved)), saved_home=HOMES, boundary_home=HOMES)
PLANS = st.builds(
    Plan,
    microbatches=st.integers(1, 9),
    order=st.sampled_from(list(Order)),
    blocks=st.dictionaries(st.text(max_size=9), BLOCKS, max_size=4),
    calls=st.lists(CALLS, max_size=5).map(tuple),
    tail=st.none() | st.integers(0, 9),
    update=st.sampled_from(list(UpdateTime)),
    is_atomic=st.booleans(),
    prefetch=st.integers(0, 3),
    update_backlog=st.integers(0, 3),
    loss_chunk_tokens=st.none() | st.integers(1, 99),
)


@given(PLANS)
def test_a_plan_prints_as_the_call_that_makes_an_equal_one(plan: Plan) -> None:
    assert eval(repr(plan), {"Plan": Plan, "BlockPlan": BlockPlan, "CallPlan": CallPlan}) == plan


def test_what_is_as_it_is_by_default_is_not_printed() -> None:
    assert repr(Plan()) == "Plan()"
    plan = Plan(microbatches=4, calls=(CallPlan(saved=Saved.RECOMPUTE),), order=Order.MICROBATCH_MAJOR)
    assert repr(plan) == "Plan(microbatches=4, order='microbatch-major', calls=(CallPlan(saved='recompute'),))"


@given(st.lists(st.sampled_from("ab"), max_size=12))
def test_runs_of_equal_neighbours_cover_every_index_once(words: list[str]) -> None:
    covered: dict[int, str] = {}
    for indices, word in in_runs(words):
        first, _, last = indices.partition(" to ")
        for index in range(int(first), int(last or first) + 1):
            assert index not in covered
            covered[index] = word
    assert [covered[index] for index in range(len(words))] == words


class Cells(HTMLParser):
    """The texts in a page, with its tags balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in {"div", "b", "table", "tr", "td", "th"}, tag
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_names_cannot_write_into_the_page() -> None:
    assert Cells(html_table("<script>", [("<img src=x>", "1 & 2")])).texts == ["<script>", "<img src=x>", "1 & 2"]


@pytest.mark.parametrize(
    ("share", "width", "color"), [(0.5, "50%", "#4a8"), (0.0, "0%", "#4a8"), (1.2, "100%", "#c33")]
)
def test_a_bar_is_filled_as_far_as_the_limit_is_used_and_red_above(share: float, width: str, color: str) -> None:
    bar = html_bar("<b>words</b>", share)
    assert Cells(bar).texts[-1].strip() == "<b>words</b>"
    assert f"width: {width}" in bar and color in bar


def test_hostile_names_of_modules_stay_text_in_every_representation() -> None:
    evil = "<script>alert(1)</script>&'\""
    model = nn.Sequential()
    for index in range(2):
        model.add_module(f"{evil}{index}", nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.randn(2, 8)
    profile = memfit.profile(model, optimizer, _loss, batch)
    plan = Plan(blocks={f"{evil}0": BlockPlan(weight_home=Tier.DISK), f"{evil}1": BlockPlan(weight_home=Tier.DISK)})
    with memfit.fit(model, optimizer, _loss, batch, plan=plan, limit="8GiB", enforce=False) as job:
        job.step(batch)
        pages = [thing._repr_html_() for thing in (job, job.plan, job.proof(), job.profile, profile)]
    assert evil in "".join(Cells(pages[1]).texts) and evil in "".join(Cells(pages[4]).texts)
    for page in pages:
        Cells(page)  # known tags alone, balanced
        assert "<script" not in page
        assert len(page) < 20_000
        assert "http" not in page and "src=" not in page.replace("&", "").lower().replace("&lt;", "")


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_a_job_and_its_papers_show_themselves_in_a_notebook_and_in_a_line() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 16)
    blocks = {str(index): BlockPlan(weight_home=Tier.DISK) for index in range(4)}
    plan = Plan(microbatches=2, blocks=blocks, calls=(CallPlan(), *[CallPlan(saved=Saved.RECOMPUTE)] * 39))
    profile = memfit.profile(model, optimizer, _loss, batch)
    job = memfit.fit(model, optimizer, _loss, batch, plan=plan)
    job.step(batch)
    for thing in (job, job.proof(), profile, profile.traces[4]):
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 500
    assert repr(job).startswith("<memfit.Job at step 1; plan: given by the user; predicted peak ")
    assert "no limit was given" in repr(job.proof())
    # 40 layers of 16 * 16 weights and 16 biases in fp32; AdamW keeps two more of each.
    assert f"weights {40 * (256 + 16) * 4 / 1024:.1f} KiB" in repr(profile)
    assert f"optimizer states {40 * (256 + 16) * 8 / 1024:.1f} KiB" in repr(profile)
    assert {"memfit.Job", "live", "given by the user", "first step"} <= set(Cells(job._repr_html_()).texts)
    assert "... and 11 more" in Cells(profile._repr_html_()).texts
    cells = Cells(plan._repr_html_()).texts
    assert {"calls 0", "saved='keep'", "calls 1 to 39", "saved='recompute'", "microbatches", "2"} <= set(cells)
    assert "4 blocks: 0 to 3" in cells
    job.close()
    assert repr(job) == "<memfit.Job, closed after step 1>"
    assert "closed" in Cells(job._repr_html_()).texts


@pytest.mark.parametrize("plan", [Plan(), Plan(microbatches=3)])
def test_every_plan_has_something_to_show(plan: Plan) -> None:
    assert Cells(plan._repr_html_()).texts
