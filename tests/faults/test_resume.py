"""A run that is stopped and goes on is the run that was never stopped: losses, weights, states, schedules, random numbers, bit for bit."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from faults import small_run
from faults.small_run import Average, Result, adamw, build, draw, loss, profile, train
from memfit.core.errors import StoreError, StoreInUseError, UnsupportedError, UsageError
from memfit.core.plan import Plan
from memfit.runs.run_store import RunStore
from memfit.store import RegionSpec, verify

pytestmark = pytest.mark.usefixtures("generators_as_before")

TESTS = Path(__file__).parents[1]


def assert_same(found: Result, wanted: Result) -> None:
    assert found.losses == {step: value for step, value in wanted.losses.items() if step >= found.first}
    assert found.kept.keys() == wanted.kept.keys()
    assert not [name for name in wanted.kept if not torch.equal(found.kept[name], wanted.kept[name])]


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("model", "plan", "durability"),
    [
        ("gpt2", "layer-major", "step"),
        ("gpt2", "clipped", 2),
        ("tied-and-frozen", "resident", "exit"),
        ("tied-and-frozen", "layer-major", 2),
        ("tied-and-frozen", "bf16", "step"),
        pytest.param("gpt2", "resident", "step", marks=pytest.mark.slow),
        pytest.param("tied-and-frozen", "clipped", "step", marks=pytest.mark.slow),
        pytest.param("gpt2", "bf16", 2, marks=pytest.mark.slow),
        pytest.param("gpt2", "layer-major", "exit", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_closed_and_goes_on_is_the_run_that_was_not(
    model: str, plan: str, durability: Any, tmp_path: Path
) -> None:
    whole = train(model, plan, tmp_path / "whole", durability=durability)
    first = train(model, plan, tmp_path / "parts", stop=2, durability=durability)
    second = train(model, None if plan != "bf16" else plan, tmp_path / "parts", durability=durability, **_options(plan))
    assert (first.first, second.first) == (0, 2)
    assert first.losses == {step: whole.losses[step] for step in (0, 1)}
    assert_same(second, whole)
    assert verify(tmp_path / "parts").is_whole


def _options(plan: str) -> dict[str, Any]:
    return {"max_grad_norm": 0.5} if plan == "clipped" else {}


@pytest.mark.parametrize("plan", ["resident", "layer-major"])
def test_a_run_is_what_it_is_without_a_store(plan: str, tmp_path: Path) -> None:
    """Committing changes no bit of training."""
    stored = train("tied-and-frozen", plan, tmp_path / "run", total=3)
    made = build("tied-and-frozen")
    optimizer = adamw(made)
    generator = torch.Generator().manual_seed(3)
    small_run.random.seed(6)
    np.random.seed(7)
    decided, _ = small_run.PLANS[plan](profile("tied-and-frozen"))
    torch.manual_seed(5)
    with memfit.fit(made, optimizer, loss, draw(torch.Generator()), plan=decided) as job:
        # The sample above was drawn after the seeds: begin again.
        small_run.random.seed(6)
        np.random.seed(7)
        torch.manual_seed(5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(3):
            assert job.step(draw(generator)).loss == stored.losses[step]
            scheduler.step()
    for name, value in made.state_dict().items():
        assert torch.equal(value, stored.kept[name]), name


def test_a_new_process_goes_on(tmp_path: Path) -> None:
    whole = train("tied-and-frozen", "layer-major", tmp_path / "whole", total=4)
    train("tied-and-frozen", "layer-major", tmp_path / "parts", total=4, stop=2)
    code = (
        "import sys; from pathlib import Path; from faults.small_run import train\n"
        "found = train('tied-and-frozen', None, Path(sys.argv[1]), total=4)\n"
        "print(found.first, found.digest())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "parts")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["2", whole.digest()]


def test_a_run_goes_on_under_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one microbatch, homes change no bit."""
    whole = train("tied-and-frozen", "resident", tmp_path / "whole")
    train("tied-and-frozen", "resident", tmp_path / "parts", stop=2)
    on_disk = Plan(blocks=small_run.plans.on_disk(profile("tied-and-frozen")), is_atomic=True)
    monkeypatch.setitem(small_run.PLANS, "resident", lambda _: (on_disk, {}))
    assert_same(train("tied-and-frozen", "resident", tmp_path / "parts"), whole)


def test_bf16_weights_come_back_from_their_masters_where_homes_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("tied-and-frozen", "bf16", tmp_path / "whole")
    disk, options = small_run.PLANS["bf16"](profile("tied-and-frozen"))
    resident = small_run.replace(disk, blocks={})
    found = Result()
    for stop, plan in ((1, resident), (2, disk), (3, resident), (None, disk)):
        monkeypatch.setitem(small_run.PLANS, "bf16", lambda _, plan=plan: (plan, options))
        found = train("tied-and-frozen", "bf16", tmp_path / "parts", stop=stop)
    assert_same(found, whole)


# What belongs to a commit, and when


class Loop:
    """A job over the small model with things registered; `close` it or leave it to the store."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.model = build("tied-and-frozen")
        self.optimizer = adamw(self.model)
        self.generator = torch.Generator().manual_seed(1)
        self.average = Average()
        self.job = memfit.fit(self.model, self.optimizer, loss, draw(torch.Generator()), store=store, **options)

    def register(self) -> Loop:
        self.job.register("data", self.generator)
        self.job.register("average", self.average)
        return self

    def die(self) -> None:
        """As a kill: nothing is committed, the directory is free again."""
        self.job.close(restore=False, commit=False)


def test_a_step_is_sealed_by_the_next_one_with_what_was_done_after_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run").register()
    loop.job.step(draw(loop.generator))
    assert loop.job.commits is not None and loop.job.commits.step == 0
    loop.average.value = 1.0
    drawn = loop.generator.get_state()
    loop.job.step(draw(loop.generator))
    assert loop.job.commits.step == 1
    loop.average.value = 2.0
    loop.die()
    again = Loop(tmp_path / "run").register()
    assert again.job.steps == 1
    assert again.average.value == 1.0
    # The batch of the step that was lost is drawn again.
    assert torch.equal(again.generator.get_state(), drawn)
    again.job.close()


def test_a_rate_in_a_tensor_is_the_run_s_again_whatever_the_scheduler_s_constructor_made_of_it(tmp_path: Path) -> None:
    """It writes the first rate into the group's tensor, where torch's own `load_state_dict` would undo that."""
    seen: list[list[float]] = []
    for stops in ((), (2,)):
        rates: list[float] = []
        for first, end in itertools.pairwise((0, *stops, 4)):
            made = nn.Linear(4, 1)
            optimizer = torch.optim.AdamW(made.parameters(), lr=torch.tensor(0.01), foreach=False)
            with memfit.fit(
                made, optimizer, lambda model, batch: model(batch).mean(), torch.ones(2, 4), store=tmp_path / str(stops)
            ) as job:
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
                job.register("scheduler", scheduler)
                assert job.steps == first
                for _ in range(first, end):
                    rates.append(float(optimizer.param_groups[0]["lr"]))
                    job.step(torch.ones(2, 4))
                    scheduler.step()
        seen.append(rates)
    assert seen[0] == seen[1]


def test_groups_that_share_a_rate_s_tensor_share_it_where_the_run_goes_on(tmp_path: Path) -> None:
    """torch gives one tensor to all groups that name none of their own: a scheduler that changes it for one changes it for all."""
    seen: list[list[list[float]]] = []
    for stops in ((), (2,)):
        rates: list[list[float]] = []
        for first, end in itertools.pairwise((0, *stops, 4)):
            made = nn.Linear(4, 1)
            groups = [{"params": [made.weight]}, {"params": [made.bias]}]
            optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False)
            falls, stays = (lambda step: 1 / (1 + step)), (lambda _: 1.0)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [falls, stays])
            with memfit.fit(
                made, optimizer, lambda model, batch: model(batch).mean(), torch.ones(2, 4), store=tmp_path / str(stops)
            ) as job:
                job.register("scheduler", scheduler)
                for _ in range(first, end):
                    rates.append([float(group["lr"]) for group in optimizer.param_groups])
                    job.step(torch.ones(2, 4))
                    scheduler.step()
            assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
        seen.append(rates)
    assert seen[0] == seen[1]


class Drawing:
    """Draws from the default generator when its state is first taken or given, as a loader does that makes an iterator for it."""

    def __init__(self) -> None:
        self.drawn: float | None = None

    def state_dict(self) -> dict[str, float]:
        if self.drawn is None:
            self.drawn = torch.rand(()).item()
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.drawn = state["drawn"] + torch.rand(()).item()


def test_a_job_whose_store_is_gone_says_how_it_is_closed_and_gives_the_model_back(tmp_path: Path) -> None:
    made = nn.Linear(4, 1)
    job = memfit.fit(
        made, adamw(made), lambda model, batch: model(batch).mean(), torch.ones(2, 4), store=tmp_path / "run"
    )
    job.step(torch.ones(2, 4))
    trained = job.evaluate(torch.ones(2, 4)).loss
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StoreError, match=r"was removed or replaced.*give up step 1 with job\.close\(commit=False\)"):
        job.close()
    job.close(commit=False)
    assert made(torch.ones(2, 4)).mean().item() == trained


class Looking(Average):
    """Looks at what it was given when it is asked for its state, as a loader does that makes an iterator for it."""

    def state_dict(self) -> dict[str, Any]:
        if self.value < 0:
            raise RuntimeError("the data may have changed")
        return super().state_dict()


def test_an_object_that_finds_its_state_wrong_later_is_refused_as_one_that_finds_it_at_once(tmp_path: Path) -> None:
    made = nn.Linear(4, 1)
    optimizer = adamw(made)
    for is_resumed in (False, True):
        with memfit.fit(
            made, optimizer, lambda model, batch: model(batch).mean(), torch.ones(2, 4), store=tmp_path / "run"
        ) as job:
            if is_resumed:
                with pytest.raises(StoreError, match="state of 'kept'.*the data may have changed"):
                    job.register("kept", Looking())
                job.register("kept", None)
            else:
                kept = Average()
                kept.value = -1.0
                job.register("kept", kept)
                job.step(torch.ones(2, 4))


def test_what_draws_while_it_is_registered_moves_no_generator_of_the_run(tmp_path: Path) -> None:
    drawn: list[list[float]] = []
    for stops in ((), (1, 2)):
        numbers: list[float] = []
        for first, end in itertools.pairwise((0, *stops, 3)):
            made = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
            with memfit.fit(
                made, optimizer, lambda model, batch: model(batch).mean(), torch.ones(2, 4), store=tmp_path / str(stops)
            ) as job:
                torch.manual_seed(3)
                job.register("drawing", Drawing())
                for _ in range(first, end):
                    numbers.append(torch.rand(()).item())
                    job.step(torch.ones(2, 4))
        drawn.append(numbers)
    assert drawn[0] == drawn[1]


class _Failing:
    """A loader whose place cannot be told once."""

    def __init__(self) -> None:
        self.place, self.fails = 0, False

    def __iter__(self) -> Any:
        return self

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise ConnectionError("the workers do not answer")
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_step_whose_data_position_is_not_known_is_not_committed_with_an_older_one(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loader = _Failing()
    loop.job.register("loader", loader)
    batch = draw(torch.Generator())
    loop.job.step(batch)
    loader.place, loader.fails = 1, True
    with pytest.raises(ConnectionError):
        loop.job.step(batch)
    loader.fails = False
    with pytest.raises(StoreError, match=r"step 2 cannot be committed: .* job\.commit\(\) notes"):
        loop.job.step(batch)
    loop.job.commit()
    loop.job.close()
    again, found = Loop(tmp_path), _Failing()
    again.job.register("loader", found)
    assert (again.job.steps, found.place) == (2, 1)
    again.job.close()


def test_commit_seals_at_once_and_leaving_by_an_error_seals_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", durability="exit").register()

    def body() -> None:
        with loop.job:
            loop.job.step(draw(loop.generator))
            loop.average.value = 1.0
            loop.job.commit()
            loop.job.step(draw(loop.generator))
            raise RuntimeError("between a step and its scheduler")

    with pytest.raises(RuntimeError, match="between"):
        body()
    again = Loop(tmp_path / "run").register()
    assert (again.job.steps, again.average.value) == (1, 1.0)
    again.job.close()


@pytest.mark.parametrize("plan", ["resident", "layer-major"])
def test_changes_between_steps_belong_to_the_commit(plan: str, tmp_path: Path) -> None:
    decided, _ = small_run.PLANS[plan](profile("tied-and-frozen"))
    loop = Loop(tmp_path / "run", plan=decided).register()
    loop.job.step(draw(loop.generator))
    with loop.job.weights(), torch.no_grad():
        for p in loop.model.parameters():
            p.mul_(0.5)
    state = loop.optimizer.state_dict()
    for one in state["state"].values():
        one["exp_avg"].mul_(2.0)
    loop.optimizer.load_state_dict(state)
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.125
    loop.job.close()
    wanted = loop.optimizer.state_dict()
    again = Loop(tmp_path / "run").register()
    again.job.close()
    for name, value in loop.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    found = again.optimizer.state_dict()
    for index, one in wanted["state"].items():
        assert all(torch.equal(found["state"][index][key], value) for key, value in one.items())
    assert [group["lr"] for group in found["param_groups"]] == [0.125, 0.125]


def test_register_says_what_is_missing_and_what_is_new(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run").register()
    with pytest.raises(UsageError, match="'average' is registered already"):
        loop.job.register("average", Average())
    with pytest.raises(UsageError, match="a list has no state_dict"):
        loop.job.register("list", [])
    loop.job.step(draw(loop.generator))
    loop.job.close()
    again = Loop(tmp_path / "run")
    again.job.register("data", again.generator)
    with pytest.raises(UsageError, match=r"also has the state of 'average': register"):
        again.job.step(draw(again.generator))
    with pytest.raises(UsageError, match=r"has no state of 'other' \(it has \['average'\]\)"):
        again.job.register("other", Average())
    again.job.register("other", Average(), is_new=True)
    again.job.register("average", None)
    again.job.step(draw(again.generator))
    again.job.close()
    last = Loop(tmp_path / "run")
    last.job.register("data", last.generator)
    last.job.register("other", Average())
    last.job.close()


def test_what_cannot_be_kept_without_pickling_is_refused_by_its_place(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    average = Average()
    average.value = lambda: 0.0  # type: ignore[assignment]
    with pytest.raises(
        UnsupportedError, match=r"state\['average'\]\['value'\] is a builtins.function.*without pickling"
    ):
        loop.job.register("average", average)
    with pytest.raises(UsageError, match="own optimizer belongs to every commit"):
        loop.job.register("optimizer", loop.optimizer)
    loop.job.close()


def test_a_job_without_a_store_says_that_it_commits_nothing() -> None:
    model = build("tied-and-frozen")
    with memfit.fit(model, adamw(model), loss, draw(torch.Generator())) as job:
        assert job.commits is None
        for act in (job.commit, lambda: job.register("average", Average())):
            with pytest.raises(UsageError, match="store="):
                act()


# Refusals


@pytest.fixture(name="made", scope="module")
def a_run_of_one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("runs") / "run"
    loop = Loop(store)
    loop.job.step(draw(loop.generator))
    loop.job.close()
    return store


def refusal(store: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StoreError) as caught:
        memfit.fit(model, optimizer, loss, draw(torch.Generator()), store=store, **options)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    return str(caught.value)


def test_a_store_of_another_model_dtype_or_optimizer_is_refused_with_the_difference(made: Path) -> None:
    model: Any = build("tied-and-frozen")
    model.layers.append(small_run.Layer())
    assert "'layers.3.norm.weight' is missing there" in refusal(made, model, adamw(model))
    model = build("tied-and-frozen")
    model.layers[2].up = nn.Linear(small_run.WIDTH, 2 * small_run.WIDTH + 1)
    model.layers[2].down = nn.Linear(2 * small_run.WIDTH + 1, small_run.WIDTH)
    assert "'layers.2.up.weight' has shape [64, 32] there and [65, 32] here" in refusal(made, model, adamw(model))
    model = build("tied-and-frozen").double()
    assert "dtype float32, wanted float64" in refusal(made, model, adamw(model))
    model = build("tied-and-frozen")
    model.layers[0].requires_grad_(requires_grad=True)
    assert "has other parameters than here" in refusal(made, model, adamw(model))
    model = build("tied-and-frozen")
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert "was trained with 'torch.optim.adamw.AdamW', not 'torch.optim.sgd.SGD'" in refusal(made, model, sgd)
    model = build("tied-and-frozen")
    one_group = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert "has 2 parameter groups, this one has 1" in refusal(made, model, one_group)
    model = build("tied-and-frozen")
    ams = adamw(model)
    for group in ams.param_groups:
        group["amsgrad"] = True
    assert "param_groups[0]['amsgrad'] is True here and was False" in refusal(made, model, ams)
    model = build("tied-and-frozen")
    plan, options = small_run.PLANS["bf16"](profile("tied-and-frozen"))
    assert "its 'compute dtype' is 'given', not 'bfloat16'" in refusal(made, model, adamw(model), plan=plan, **options)
    # After all that it goes on.
    again = Loop(made)
    assert again.job.steps == 1
    again.job.close()


def test_a_second_live_job_on_the_directory_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    with pytest.raises(StoreInUseError, match=f"{os.getpid()}"):
        Loop(tmp_path / "run")
    loop.job.step(draw(loop.generator))
    loop.job.close()


def test_a_job_that_nobody_can_reach_any_more_gives_its_run_back(tmp_path: Path) -> None:
    def cell(*, fails: bool) -> int:
        """As in a notebook, typed again after it raised."""
        loop = Loop(tmp_path / "run")
        loop.job.step(draw(loop.generator))
        if fails:
            raise ValueError
        loop.job.close()
        return loop.job.steps

    gc.disable()
    try:
        with pytest.raises(ValueError):  # noqa: PT011
            cell(fails=True)
        assert cell(fails=False) == 1, "the step that was not committed is made again"
    finally:
        gc.enable()


def test_resume_wants_a_run_that_was_committed(tmp_path: Path) -> None:
    model = build("tied-and-frozen")
    arguments = (model, adamw(model), loss, draw(torch.Generator()))
    with pytest.raises(StoreError, match="no such directory"):
        memfit.fit(*arguments, resume=tmp_path / "nothing")
    with pytest.raises(UsageError, match="not both"):
        memfit.fit(*arguments, resume=tmp_path / "a", store=tmp_path / "b")
    with pytest.raises(UsageError, match="name its directory with store="):
        memfit.fit(*arguments, durability=3)
    with pytest.raises(UsageError, match="durability is"):
        memfit.fit(*arguments, store=tmp_path / "a", durability=0)
    with pytest.raises(StoreError, match="its parent"):
        memfit.fit(*arguments, store=tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ended_before_its_first_commit_begins_anew(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run", durability="step", must_exist=False)
    store.prepare({"block/weight": RegionSpec(nbytes=4096, slots=2, tag="weight")}, {})
    # As a kill leaves it: files and no commit.
    store.committed.disk.close()
    store.io.close()
    model = build("tied-and-frozen")
    with pytest.raises(StoreError, match="never committed"):
        memfit.fit(model, adamw(model), loss, draw(torch.Generator()), resume=tmp_path / "run")
    loop = Loop(tmp_path / "run")
    assert loop.job.steps == 0
    loop.job.close()


def test_a_fit_that_is_refused_leaves_no_store(tmp_path: Path) -> None:
    model = build("tied-and-frozen")

    def not_additive(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) ** 2

    plan = Plan(microbatches=2)
    with pytest.raises(UnsupportedError):
        memfit.fit(model, adamw(model), not_additive, draw(torch.Generator()), plan=plan, store=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_run_is_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.job.step(draw(loop.generator))
    loop.job.close(restore=False)
    with (tmp_path / "run" / "homes-0.bin").open("r+b") as file:
        content = bytearray(file.read())
        for at in range(0, len(content), 1024):
            content[at] ^= 1
        file.seek(0)
        file.write(content)
    with pytest.raises(StoreError, match=r"homes-0.bin is damaged.*'embedding"):
        Loop(tmp_path / "run")
