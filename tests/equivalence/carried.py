"""Cases, plans and lateness for an accelerator: the subjects of the CPU's tests, carried over.

In: a case of the zoo or a drawn one, and a device. Out: the same case with its model and batches there.

Ways to train come with it: where a plan sends things to disk, its homes may be host memory as well, or both by turns; the late device's streams may be as late
as they may be, or run at places drawn from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import note
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from equivalence import plans, zoo
from equivalence.compare import Report, assert_equal_training
from equivalence.drawn_jobs import draw_job, train_under
from equivalence.plain import adamw
from equivalence.random_modules import ModelSpec, make_case
from equivalence.with_memfit import Traces, fit_with, profile_by_name, traced_once
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier
from memfit.engine.offload import Offloader

AWAY = (Tier.DISK, Tier.HOST)
_traces: Traces = {}


def carry(model: nn.Module, device: torch.device) -> nn.Module:
    """Moves a model. Torch makes a parameter anew for each of its owners on a backend that is not its own, so what was tied is tied again."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    model.to(device)
    for (first, its_name), *others in owners.values():
        for module, name in others:
            module._parameters[name] = first._parameters[its_name]
    return model


def on_device(case: zoo.Case, device: torch.device) -> zoo.Case:
    """The case, its model moved; its batches are made on the CPU and moved."""

    def batch(step: int) -> Mapping[str, Any]:
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, dict(case.batch(step)))

    return replace(case, model=carry(case.model, device), batch=batch)


def rehomed(plan: Plan, tiers: tuple[Tier, ...]) -> Plan:
    """The plan with the given tiers, by turns, wherever it says disk (an atomic step's weights and states stay there: they need its spare slots).

    Where host memory is among the tiers, every other block whose gradients and states are away is updated on the host's cores.
    """
    turns, processors = cycle(tiers), cycle((Tier.HOST, Tier.DEVICE))
    stays = plan.is_atomic

    def other(tier: Tier) -> Tier:
        return next(turns) if tier is Tier.DISK else tier

    def updated(block: BlockPlan) -> BlockPlan:
        away = block.gradient_home is not Tier.DEVICE and block.state_home is not Tier.DEVICE
        return replace(block, update_on=next(processors)) if away and Tier.HOST in tiers else block

    blocks = {
        name: updated(
            replace(
                b,
                weight_home=b.weight_home if stays else other(b.weight_home),
                gradient_home=other(b.gradient_home),
                state_home=b.state_home if stays else other(b.state_home),
            )
        )
        for name, b in plan.blocks.items()
    }
    calls = tuple(replace(c, saved_home=other(c.saved_home), boundary_home=other(c.boundary_home)) for c in plan.calls)
    return replace(plan, blocks=blocks, calls=calls)


@contextmanager
def every_storage_leaves() -> Iterator[None]:
    """Saved tensors of the subjects, which are tiny, leave all the same."""
    defaults = Offloader.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "minimum_bytes", 256)
        yield


@dataclass(frozen=True, kw_only=True)
class Way:
    """How something is trained on a device.

    Attributes:
        tiers: stand for disk in the plan, by turns.
        seed: of the late device's order; None: as late as may be.
        index: of the device; the thread's current one stays 0.
        is_aside: inside a stream of the caller's, not the default one.
    """

    tiers: tuple[Tier, ...] = (Tier.DISK,)
    seed: int | None = None
    index: int = 0
    is_aside: bool = False

    @classmethod
    def numbered(cls, number: int) -> Way:
        """Draws a way; number 0 is the plainest."""
        if number == 0:
            return cls()
        draw = random.Random(number)
        tiers = draw.choice([(Tier.DISK,), (Tier.HOST,), (Tier.HOST, Tier.DISK)])
        seed = draw.choice([None, draw.randrange(1 << 16)])
        return cls(tiers=tiers, seed=seed, index=draw.randrange(2), is_aside=draw.random() < 0.5)

    def device(self, device: torch.device) -> torch.device:
        """The device of this way; index 0 where there is one only."""
        return torch.device(device.type, self.index if self.index < torch.accelerator.device_count() else 0)

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Work goes this way inside, and fails with the accesses that nothing orders. A real device is as late as it is, and cannot tell."""
        with ExitStack() as stack:
            if device.type == "late":
                from accelerator import late

                stack.enter_context(late.checked())
                if self.seed is not None:
                    stack.enter_context(late.lateness("random", self.seed))
            if self.is_aside:
                here = self.device(device)
                stream = torch.Stream(here)
                stream.wait_stream(torch.accelerator.current_stream(here))
                stack.callback(stream.synchronize)  # before memory of the default stream's is given up
                stack.enter_context(stream)
                stack.callback(torch.accelerator.set_device_index, 0)
                torch.accelerator.set_device_index(0)  # entering a stream makes its device the current one
            yield


def train_pair(name: str, plan: str, device: torch.device, directory: Path, way: Way) -> Report:
    """Trains a model of the zoo under a plan of `plans`, beside plain PyTorch on the same device.

    Raises:
        AssertionError: They differ, or an access is ordered by nothing.
    """
    variant, there = plans.BY_NAME[plan], way.device(device)
    fit = fit_with(
        rehomed(variant.plan(profile_by_name(name)), way.tiers),
        directory,
        max_grad_norm=variant.max_grad_norm,
        keep_gradients=True,
    )
    with traced_once((name, there), _traces), every_storage_leaves(), way.entered(device):
        report = assert_equal_training(
            lambda: on_device(zoo.ZOO[name](), there),
            adamw(),
            fit,
            microbatches=variant.microbatches,
            max_grad_norm=variant.max_grad_norm,
            may_reorder=variant.reorders,
        )
    assert report.reordered <= zoo.ZOO[name]().shared
    return report


def train_drawn(data: st.DataObject, device: torch.device) -> None:
    """Draws a model, a plan and a way, and trains beside plain accumulation on the same device.

    Raises:
        AssertionError: They differ, or an access is ordered by nothing.
    """
    way = Way.numbered(data.draw(st.integers(0, 1 << 16), label="way"))
    there = way.device(device)

    def make(spec: ModelSpec) -> zoo.Case:
        return on_device(make_case(spec), there)

    with every_storage_leaves(), way.entered(device):
        drawn = draw_job(data, make, AWAY)
        clips = drawn.plan.update is UpdateTime.AFTER_BACKWARD and data.draw(st.booleans(), label="clips")
        keeps = data.draw(st.booleans(), label="keeps gradients")
        note(f"{way}\n{drawn.plan.to_json()}")
        train_under(drawn.spec, drawn.plan, clips=clips, keeps=keeps, traced=drawn, make=make)
