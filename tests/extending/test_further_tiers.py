"""Tiers that memfit does not have are entries: a third one and a home cut in two, planned, priced and bitwise, without a line of `src`."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.plain import adamw, sgd
from equivalence.with_memfit import fit_with, profile_by_name
from extending.other_places import LINK, HalvesFactory, Node, NodeFactory, further
from memfit.core.errors import PlanError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import Budget
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.schedule import Accumulate, Schedule
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.engine.offload import Offloader
from memfit.homes.factories import FurtherTier
from memfit.planner.search.planner import choose_plan
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from unit.profiles import gpt_profile

SOURCE = Path(__file__).parents[2] / "src" / "memfit"
NODE, HALVES = Tier("node"), Tier("halves")
FAST = Link(read_bytes_per_s=1e12, write_bytes_per_s=1e12)
MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e13,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 40),
        Tier.DISK: TierSpec(nbytes=1 << 40, link=FAST),
        NODE: TierSpec(nbytes=1 << 40, link=LINK),
    },
)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    assert made.live_bytes == 0, "closing the job gives the other machine's memory back"
    made.end()


@pytest.fixture(autouse=True)
def every_storage_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Offloader.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "minimum_bytes", 256)


def at(tier: Tier) -> BlockPlan:
    return BlockPlan(weight_home=tier, gradient_home=tier, state_home=tier)


def everything_at(tier: Tier, name: str, **decided: Any) -> Plan:
    blocks = {block.name: at(tier) for block in profile_by_name(name).blocks if not block.is_spanning}
    return Plan(blocks=blocks, **decided)


@pytest.mark.parametrize("saved", [Saved.KEEP, Saved.OFFLOAD, Saved.RECOMPUTE])
def test_weights_gradients_states_and_activations_in_a_third_tier_give_the_bits_of_plain_pytorch(
    saved: Saved, node: Node, tmp_path: Path
) -> None:
    profile = profile_by_name("dict")
    fate = CallPlan(saved=saved, saved_home=NODE, boundary_home=NODE if saved is Saved.RECOMPUTE else Tier.DEVICE)
    plan = everything_at(NODE, "dict", calls=plans.fates(profile, fate))
    assert Plan.from_json(plan.to_json()) == plan
    assert_equal_training(
        zoo.ZOO["dict"],
        adamw(),
        fit_with(plan, tmp_path, keep_gradients=True, tiers=further(NODE, lambda _: NodeFactory(NODE, node))),
        may_reorder=False,
    )
    rested = sum(4 * block.weight_bytes for block in profile.blocks)  # weight, gradient, two moments
    assert node.peak_bytes >= rested and min(node.moved.values()) > rested


@pytest.mark.parametrize("splits", [None, True, False])
def test_microbatches_and_masters_over_a_third_tier(splits: bool | None, node: Node, tmp_path: Path) -> None:
    """Sums of gradients are read back, added to and written; masters, whole and split, rest there as well."""
    bf16: dict[str, Any] = {} if splits is None else {"compute_dtype": ComputeDtype.BFLOAT16, "splits_masters": splits}
    plan = everything_at(NODE, "dict", microbatches=2, order="microbatch-major", **bf16)
    options: dict[str, Any] = {"keep_gradients": True, "allow": {"bf16"}} if bf16 else {"keep_gradients": True}
    if bf16:
        # Against the same plan with everything on the device, which the suite of bf16 holds against FSDP2.
        finals = []
        for homes in (plan, replace(plan, blocks={})):
            case = zoo.ZOO["dict"]()
            tiers = further(NODE, lambda _: NodeFactory(NODE, node))
            with memfit.fit(
                case.model, adamw()(case.model), case.loss, case.batch(0), plan=homes, allow={"bf16"}, tiers=tiers
            ) as job:
                losses = [job.step(case.batch(step)).loss for step in range(3)]
            finals.append([*map(float, losses), *case.model.state_dict().values()])
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*finals, strict=True))
        return
    assert_equal_training(
        zoo.ZOO["dict"],
        sgd(lr=0.5, momentum=0.9),
        fit_with(plan, tmp_path, tiers=further(NODE, lambda _: NodeFactory(NODE, node)), **options),
        microbatches=2,
    )


def test_a_home_cut_in_two_gathers_at_a_visit_and_takes_gradients_in_halves(tmp_path: Path) -> None:
    nodes, logs = (Node(), Node()), dict[str, list[str]]()
    plan = everything_at(HALVES, "dict", microbatches=2, order="microbatch-major")
    tiers = further(HALVES, lambda _: HalvesFactory(HALVES, nodes, logs))
    assert_equal_training(
        zoo.ZOO["dict"], adamw(), fit_with(plan, tmp_path, keep_gradients=True, tiers=tiers), microbatches=2
    )
    assert "gather" in logs["weight"]
    assert "gather" not in logs["gradient"] + logs["state"], "updates and gradients are local"
    assert "write" in logs["gradient"] and "write" in logs["state"]
    for node in nodes:
        assert node.peak_bytes > 0 and node.live_bytes == 0
        node.end()


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_gradients_go_home_by_the_accumulates_of_the_schedule_and_are_reduced_by_nothing_else(
    max_grad_norm: float | None, tmp_path: Path
) -> None:
    nodes, logs = (Node(), Node()), dict[str, list[str]]()
    plan = everything_at(HALVES, "dict", microbatches=2, order="microbatch-major", update="after-backward")
    case = zoo.ZOO["dict"]()
    tiers = further(HALVES, lambda _: HalvesFactory(HALVES, nodes, logs))
    with memfit.fit(
        case.model, adamw()(case.model), case.loss, case.batch(0), plan=plan, tiers=tiers, max_grad_norm=max_grad_norm
    ) as job:
        report = job.step(case.batch(0))
        parameters = {b.name: sum(p.requires_grad for p in b.parameters) for b in job.profile.blocks}
        names = [b.name for b in job.profile.blocks]
        listed = sum(parameters[names[a.block]] for a in job.schedule if isinstance(a, Accumulate))
        assert not report.departures
    assert logs["gradient"].count("reduce") == listed > 0
    for node in nodes:
        node.end()


def test_only_the_elements_that_are_held_here_are_updated(tmp_path: Path) -> None:
    """As if another process had the second half of each parameter: it stays, and the first is that of plain PyTorch."""
    case, plain = zoo.ZOO["dict"](), zoo.ZOO["dict"]()
    before = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    with memfit.fit(
        case.model, adamw()(case.model), case.loss, case.batch(0), plan=everything_at(Tier.DISK, "dict")
    ) as job:
        for block in job._assembly.blocks:
            block.slots = tuple(replace(slot, held=range(slot.numel // 2)) for slot in block.slots)
        torch.manual_seed(7)
        job.step(case.batch(0))
    optimizer = adamw()(plain.model)
    torch.manual_seed(7)
    plain.loss(plain.model, plain.batch(0)).backward()
    optimizer.step()
    for name, parameter in plain.model.named_parameters():
        mine, half = case.model.get_parameter(name).flatten(), parameter.numel() // 2
        assert torch.equal(mine[:half], parameter.flatten()[:half]) and torch.equal(
            mine[half:], before[name].flatten()[half:]
        )


def test_a_run_with_homes_in_a_third_tier_is_committed_and_resumed_to_the_bit(node: Node, tmp_path: Path) -> None:
    tiers = further(NODE, lambda _: NodeFactory(NODE, node))
    plan = everything_at(NODE, "dict")

    def start(where: Path, **options: Any) -> Any:
        case = zoo.ZOO["dict"]()
        return case, memfit.fit(
            case.model, adamw()(case.model), case.loss, case.batch(0), plan=plan, tiers=tiers, **options
        )

    case, job = start(tmp_path, store=tmp_path / "run")
    with job:
        for step in range(2):
            job.step(case.batch(step))
    case, job = start(tmp_path, resume=tmp_path / "run")
    with job:
        assert job.steps == 2
        last = job.step(case.batch(2)).loss
    resumed = case.model.state_dict()
    case, job = start(tmp_path)
    with job:
        losses = [job.step(case.batch(step)).loss for step in range(3)]
    assert losses[-1] == last
    assert all(torch.equal(value, resumed[name]) for name, value in case.model.state_dict().items())


def test_a_third_tier_is_scheduled_and_priced_by_its_own_link() -> None:
    profile = profile_by_name("gpt2")
    fate = CallPlan(saved=Saved.OFFLOAD, saved_home=NODE)
    plan = everything_at(NODE, "gpt2", calls=plans.fates(profile, fate))
    schedule = build_step(plan, profile, clips_norm=False)
    assert " node" in schedule.text() and Schedule.parse(schedule.text()) == schedule
    step = lower(schedule, plan, profile)
    timeline = predict(step, MACHINE)
    moved = {"read": 0, "write": 0}
    for operation in step:
        for transfer in (*operation.awaited, *operation.transfers):
            assert transfer.tier is NODE
            moved[transfer.direction] += transfer.nbytes
    # The link is so slow that the step is its slower direction, less what nothing waits for.
    slower = max(moved["read"] / LINK.read_bytes_per_s, moved["write"] / LINK.write_bytes_per_s)
    assert timeline.seconds == pytest.approx(slower, rel=0.35) and timeline.seconds >= slower * (1 - 1e-9)
    parameters = sum(math.prod(p.shape) for b in profile.blocks if not b.is_spanning for p in b.parameters)
    assert timeline.peak_in(NODE) >= 4 * 4 * parameters
    assert timeline.peak_in(Tier.DISK) == timeline.peak_in(Tier.HOST) == 0
    text = MACHINE.to_json()
    assert Hardware.from_json(text) == MACHINE and '"node_bytes"' in text


def test_the_planner_takes_a_third_tier_where_it_is_the_faster_one() -> None:
    profile = gpt_profile(layers=8, width=1024, tokens=8, rows=(1,))
    plain = choose_plan(profile, Budget(limit_bytes=None), MACHINE, tiers=(Tier.DISK, NODE))
    half = Budget(limit_bytes=plain.timeline.peak_bytes // 2)
    for slow, fast in ((Tier.DISK, NODE), (NODE, Tier.DISK)):
        specs = {slow: TierSpec(nbytes=1 << 40, link=LINK), fast: TierSpec(nbytes=1 << 40, link=FAST)}
        machine = replace(MACHINE, tiers={**MACHINE.tiers, **specs})
        chosen = choose_plan(profile, half, machine, tiers=(Tier.DISK, NODE))
        assert fast in chosen.plan.tiers and slow not in {
            home for b in chosen.plan.blocks.values() for home in (b.weight_home, b.gradient_home, b.state_home)
        }
        assert chosen.timeline.peak_in(fast) > plain.timeline.peak_bytes // 4 and chosen.timeline.peak_in(slow) == 0


def test_a_plan_that_names_a_tier_which_the_job_was_not_handed_is_refused_with_those_that_it_has() -> None:
    case = zoo.ZOO["dict"]()
    plan = everything_at(NODE, "dict")
    with pytest.raises(PlanError, match=r"'node', which this job does not have: it has \['device', 'disk'\]"):
        memfit.fit(case.model, adamw()(case.model), case.loss, case.batch(0), plan=plan)


def test_a_plan_that_takes_more_of_a_third_tier_than_there_is_is_refused(node: Node) -> None:
    case = zoo.ZOO["dict"]()
    small = {"node": FurtherTier(spec=TierSpec(nbytes=1000, link=LINK), make=lambda _: NodeFactory(NODE, node))}
    with pytest.raises(memfit.DoesNotFitError, match=r"of node, above node_limit of 1,?000"):
        memfit.fit(
            case.model, adamw()(case.model), case.loss, case.batch(0), plan=everything_at(NODE, "dict"), tiers=small
        )


def test_nobody_asks_a_home_for_its_class() -> None:
    """What a home is follows from its methods: `isinstance` on one would shut out every home that is added."""
    homes = {
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "ByteHome" for b in node.bases)
    }
    assert {"MemoryHome", "DiskHome", "SplitMasters", "RoundedMasters"} <= homes
    found = [
        f"{path.name}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "type")
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and inner.id in homes | {"ByteHome"}
    ]
    assert found == []
