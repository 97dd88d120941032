"""Refusals as a stranger meets them: each says what happened, where, and what to try, in at most three lines; every error class is provoked."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.cli.source import find_function, read_parts
from memfit.core.errors import check_platform
from memfit.core.hardware import read_hardware
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.integrations.recipes.gpt import find_recipe
from memfit.integrations.recipes.model_recipe import model_recipe
from memfit.machine.meters import AcceleratorMeter

COLUMNS, LINES = 160, 3
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
ON_DISK = Plan(blocks={"0": DISK, "1": DISK})

# What a person can do next: a verb for them, or a value to write.
REMEDY = re.compile(
    r"\b(give|call|pass|use|name|write|put|make|install|raise|lower|cut|free|start|begin|close|leave|return|take|run|say|plan|load|save|fit|keep|drop|"
    r"build|move|read|try|choose|did you mean|there are|there is|lists|needs?|must|such as|takes?|is one of|instead)\b",
    re.IGNORECASE,
)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Scene:
    """A model, an optimizer, a batch, and jobs that are closed at the end."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        torch.manual_seed(0)
        self.directory, self._stack = directory, stack
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(4, 16)

    def fit(self, **wishes: Any) -> memfit.Job:
        given: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "loss": loss, "sample": self.batch}
        job = memfit.fit(**(given | wishes))
        self._stack.callback(lambda: job.close(restore=False, commit=False))
        return job

    def stored(self, **wishes: Any) -> memfit.Job:
        return self.fit(store=self.directory / "run", **wishes)


def touch_away(s: Scene) -> None:
    s.fit(plan=ON_DISK)
    (s.model.get_parameter("0.weight") + 1).sum()


def tear(s: Scene) -> None:
    job = s.fit(plan=Plan())
    job.step(s.batch)

    def fail(piece: Any) -> None:
        if piece.name == "0.weight":
            raise KeyError("mine")

    handle = job.on_update(None, fail)
    with pytest.raises(KeyError):
        job.step(s.batch)
    handle.remove()
    job.step(s.batch)


def breach(s: Scene) -> None:
    def greedy(model: nn.Module, batch: Tensor) -> Tensor:
        if not memfit.is_tracing():
            torch.ones(6 << 30, dtype=torch.uint8)
        return loss(model, batch)

    s.fit(loss=greedy, limit="4GiB", plan=Plan()).step(s.batch)


def two_stores(s: Scene) -> None:
    s.stored()
    other = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    s.fit(model=other, optimizer=torch.optim.AdamW(other.parameters()), store=s.directory / "run")


def another_model(s: Scene) -> None:
    s.stored().close()
    other = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
    s.fit(model=other, optimizer=torch.optim.AdamW(other.parameters()), store=s.directory / "run")


def twice(s: Scene) -> None:
    s.fit()
    s.fit()


def closed(s: Scene) -> None:
    job = s.fit()
    job.close()
    job.step(s.batch)


def step_in_lines(s: Scene) -> None:
    job = s.fit(lines=True)
    with job.lines():
        job.step(s.batch)


def wrong_module(_: Scene) -> None:
    find_function("json.py:load")


REFUSALS: dict[str, tuple[type[Exception], Callable[[Scene], object]]] = {
    "a limit in words that are no unit": (memfit.UsageError, lambda s: s.fit(limit="8 gibi")),
    "a limit without its unit": (memfit.UsageError, lambda s: s.fit(limit=8)),
    "a limit above what the machine has": (memfit.UsageError, lambda s: s.fit(limit="100TiB")),
    "a limit that nothing fits": (memfit.DoesNotFitError, lambda s: s.fit(limit="50MiB")),
    "a technique that nobody knows": (memfit.UsageError, lambda s: s.fit(plan="zero-onload")),
    "a permission that nobody knows": (memfit.UsageError, lambda s: s.fit(allow={"bf17"})),
    "a wish that nobody knows": (memfit.UsageError, lambda s: s.fit(numerics="excat")),
    "the kernel's limit without a limit": (memfit.UsageError, lambda s: s.fit(enforce="kernel")),
    "a clip below nothing": (memfit.UsageError, lambda s: s.fit(max_grad_norm=-1.0)),
    "a machine that nobody knows": (memfit.UsageError, lambda s: read_hardware("h300")),
    "a model without values": (memfit.UsageError, lambda s: s.fit(model=nn.Linear(4, 4, device="meta"))),
    "a loader instead of a batch": (
        memfit.UsageError,
        lambda s: s.fit(sample=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(s.batch))),
    ),
    "a loss that is no scalar": (memfit.UsageError, lambda s: s.fit(loss=lambda m, b: m(b)).step(s.batch)),
    "an optimizer of another model": (
        memfit.MemfitError,
        lambda s: s.fit(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
    ),
    "an optimizer that needs closures": (
        memfit.UnsupportedError,
        lambda s: s.fit(optimizer=torch.optim.LBFGS(s.model.parameters())),
    ),
    "a second fit of a model": (memfit.UsageError, twice),
    "a step after the end": (memfit.UsageError, closed),
    "a weight that is away": (memfit.AwayError, touch_away),
    "a block that is not there": (memfit.UsageError, lambda s: s.fit().weights("2").__enter__()),
    "a watched block that is not there": (memfit.UsageError, lambda s: s.fit().on_update("2", print)),
    "a gradient that was given up": (memfit.UsageError, lambda s: s.fit().gradient("0.weight")),
    "a commit without a store": (memfit.UsageError, lambda s: s.fit().commit()),
    "something registered without a store": (memfit.UsageError, lambda s: s.fit().register("x", s.optimizer)),
    "store and resume": (memfit.UsageError, lambda s: s.fit(store=s.directory / "a", resume=s.directory / "b")),
    "nothing to resume": (memfit.StoreError, lambda s: s.fit(resume=s.directory / "nothing")),
    "a store that another job has": (memfit.StoreInUseError, two_stores),
    "a store of another model": (memfit.StoreError, another_model),
    "weights that are not there": (memfit.StoreError, lambda s: s.fit().load(s.directory / "nothing")),
    "a save where a file is": (memfit.StoreError, lambda s: s.fit().save(__file__)),
    "lines of a job for steps": (memfit.UsageError, lambda s: s.fit().lines().__enter__()),
    "a step among lines": (memfit.UsageError, step_in_lines),
    "a copied job": (memfit.UsageError, lambda s: pickle.dumps(s.fit())),
    "a plan for blocks that are not there": (memfit.PlanError, lambda s: s.fit(plan=Plan(blocks={"7": DISK}))),
    "a plan for more calls than there are": (
        memfit.PlanError,
        lambda s: s.fit(plan=Plan(calls=(CallPlan(saved=Saved.RECOMPUTE),) * 9)),
    ),
    "a plan that is no JSON": (memfit.MemfitError, lambda s: s.fit(plan="{")),
    "a plan that regroups where bits are asked for": (
        memfit.MemfitError,
        lambda s: s.fit(plan=Plan(microbatches=4), numerics="exact"),
    ),
    "memory that a step has not": (memfit.LimitBreachError, breach),
    "a step that was torn": (memfit.TornStepError, tear),
    "a device that is not there": (memfit.TierUnavailableError, lambda _: AcceleratorMeter("cuda")),
    "a system that is not Linux": (memfit.PlatformError, lambda _: check_platform("darwin")),
    "a comparison with a store": (
        memfit.UsageError,
        lambda s: memfit.verify(s.model, s.optimizer, loss, s.batch, store=s.directory / "run"),
    ),
    "a file where a module is named": (memfit.UsageError, wrong_module),
    "a function that returns something else": (memfit.UsageError, lambda s: read_parts("mine:build", s.model)),
    "a recipe that nobody knows": (memfit.UsageError, lambda _: find_recipe("gpt3")),
    "a model directory without a configuration": (
        memfit.UsageError,
        lambda s: model_recipe(s.directory, batch_size=1, sequence_length=8, learning_rate=0.1),
    ),
}  # fmt: skip


def provoke(name: str, directory: Path) -> Exception:
    kind, act = REFUSALS[name]
    with ExitStack() as stack, pytest.raises(kind) as caught:
        act(Scene(directory, stack))
    return caught.value


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_happened_where_and_what_to_try_in_three_lines(name: str, tmp_path: Path) -> None:
    if name == "a device that is not there" and torch.cuda.is_available():
        pytest.skip("this machine has it")
    error = provoke(name, tmp_path)
    assert isinstance(error, memfit.MemfitError)
    words = str(error)
    taken = max(len(words.splitlines()), math.ceil(len(words) / COLUMNS))
    assert taken <= LINES, f"{taken} lines: {words}"
    assert REMEDY.search(words), words
    # Written for a reader: no objects' addresses, no doubled blanks, no sentence that breaks off.
    assert not re.search(r"0x[0-9a-f]{6,}|  |\.\.$| None\b.*None\b", words), words


def test_every_public_error_class_is_among_them_and_there_are_thirty() -> None:
    assert len(REFUSALS) >= 30
    public = {name for name in memfit.__all__ if name.endswith("Error")} - {"MemfitError"}
    provoked = {kind.__name__ for kind, _ in REFUSALS.values()}
    # A lost rank needs a second process: tests/distributed/test_failures.py.
    assert public - provoked == {"PeerError"}
