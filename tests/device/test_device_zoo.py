"""The zoo under its plans and random modules under random ones, on an accelerator: the bits of plain PyTorch on the same device, every access ordered.

Homes are on disk, in host memory or in both by turns; streams as late as they may be, or somewhere between by seed; the device is the current one or not; the
caller is in the default stream or in one of his own (`carried.Way`). The default suite trains each plan with one model; `--slow` all pairs of the CPU's
default suite in two ways, and `make zoo-device` the whole in several, with a table.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivalence import plans, zoo
from equivalence.carried import Way, carry, train_drawn, train_pair
from equivalence.compare import Differences
from equivalence.plain import adamw, clone_states
from equivalence.zoo_pairs import DEFAULT_PAIRS
from memfit.core.tiers import Tier

# `--examples` asks for fresh ones, and as many.
_given = settings()
EXAMPLES = 20 if _given.derandomize else _given.max_examples


# Of the default suite. Most use host memory on the index that is not current, inside and outside a stream of the caller's: most orders can be wrong there.
SAMPLE = (26, 44, 9, 36, 8, 47, 33, 20, 10)
STAYS = ("resident", "recompute", "select", "resident-3")
"""Plans that send nothing away, in which no transfer can be wrong."""


def _ways() -> list[object]:
    """Every pair in two ways; by default one model for each plan, no model twice, in the ways of the sample."""
    ways: list[object] = []
    pairs = sorted(DEFAULT_PAIRS)
    Random(3).shuffle(pairs)
    sample = cycle(SAMPLE)
    met: set[str] = set()
    for place, (name, plan) in enumerate(pairs):
        is_first = name not in met and plan not in met
        met |= {name, plan} if is_first else set()
        first = next(sample) if is_first and plan not in STAYS else place
        for number in (first, len(pairs) + place):
            marks = [] if is_first and number == first else [pytest.mark.slow]
            ways.append(pytest.param(name, plan, number, id=f"{name}-{plan}-{number}", marks=marks))
    return ways


@pytest.mark.parametrize(("name", "plan", "number"), _ways())
def test_training_on_a_device_in_any_way_equals_plain_pytorch_there_and_no_access_is_unordered(
    name: str, plan: str, number: int, device: torch.device, tmp_path: Path
) -> None:
    train_pair(name, plan, device, tmp_path, Way.numbered(number))


def test_the_default_ways_meet_every_plan_in_every_manner() -> None:
    chosen = [param.values for param in _ways() if not param.marks]  # type: ignore[attr-defined]
    assert {plan for _, plan, _ in chosen} == set(plans.BY_NAME)
    ways = [Way.numbered(number) for _, plan, number in chosen if plan not in STAYS]
    assert len({way.tiers for way in ways}) == 3
    met = {(way.index, way.is_aside, way.seed is None) for way in ways if Tier.HOST in way.tiers}
    assert met >= {(1, False, True), (1, True, True), (0, True, False), (1, False, False), (0, False, False)}


@pytest.mark.timeout(0)
@given(data=st.data())
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_random_modules_under_random_plans_equal_plain_accumulation_on_a_device(
    device: torch.device, data: st.DataObject
) -> None:
    train_drawn(data, device)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "mixtral" else pytest.mark.slow) for n in zoo.ZOO])
def test_plain_pytorch_on_the_late_device_has_the_bits_of_the_cpu(name: str, device: torch.device) -> None:
    """The reference of the other tests is checked by another device: every operator of the zoo is there, and right."""
    if device.type != "late":
        pytest.skip("kernels of another device round otherwise")
    ends: list[dict[str, torch.Tensor]] = []
    for where in (torch.device("cpu"), device):
        case = zoo.ZOO[name]()
        model = carry(case.model, where).eval()  # dropout on an accelerator is another operator, and draws otherwise
        optimizer = adamw()(model)
        for step in range(2):
            batch = {key: value.to(where) for key, value in case.batch(step).items()}
            model.zero_grad()
            case.loss(model, batch).backward()
            optimizer.step()
        states = clone_states(model, optimizer)
        flat = {f"{n} {key}": value for n, state in states.items() for key, value in state.items()}
        ends.append({n: t.detach().cpu() for n, t in ({**dict(model.state_dict()), **flat}).items()})
    found = Differences()
    found.compare_all("after two steps", ends[1], ends[0])
    found.check("the late device")
