"""What the shell is told is what `fit` does: one choice, in every dtype that is allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from equivalence import zoo
from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.hardware import Hardware, Link, Rate, TierSpec
from memfit.core.limits import Budget
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.core.work_kinds import PRODUCT_KINDS, WorkKind
from memfit.machine import described
from memfit.planner import advise as advice_module
from memfit.planner import choosing
from memfit.planner.advise import Advice, advise
from memfit.planner.choosing import choose_in_room
from memfit.planner.problem import Problem
from memfit.planner.search import planner
from memfit.planner.search.pricing import Refusal

MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e9,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 36),
        Tier.DISK: TierSpec(nbytes=1 << 36, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)),
    },
    bf16_flops_per_s=1e12,
)


def _problem() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(8, 256)


def _loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows).float() - rows).square().mean()


@pytest.mark.parametrize("allow", [frozenset[str](), frozenset({"bf16"})], ids=["exact", "bf16"])
def test_advice_is_what_fit_chooses(allow: frozenset[str], tmp_path: Path) -> None:
    model, optimizer, rows = _problem()
    advice = advise(model, optimizer, _loss, rows, limit="64GiB", allow=allow, hardware=MACHINE)
    with memfit.fit(
        model, optimizer, _loss, rows, limit="64GiB", allow=allow, hardware=MACHINE, enforce=False,
        directory=tmp_path / "homes",
    ) as job:  # fmt: skip
        assert advice.plan == job.plan
        assert advice.profile.blocks == job.profile.blocks
        assert advice.reason.split(": predicted")[0] == job.reason.split(": predicted")[0]
    assert advice.plan.compute_dtype is (ComputeDtype.BFLOAT16 if allow else ComputeDtype.GIVEN)


@pytest.mark.parametrize("bf16_speedup", [1000, 1])
def test_ways_to_compute_that_cannot_win_are_not_traced(bf16_speedup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room to spare nobody asks what the loss in chunks would take, in any dtype."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    traced: list[tuple[ComputeDtype, bool]] = []
    plain = Problem.profile

    def profile(problem: Problem, sample: Any, counts: Any, **ways: Any) -> Any:
        traced.append((ways.get("compute", ComputeDtype.GIVEN), ways["chunk_tokens"] is not None))
        return plain(problem, sample, counts, **ways)

    monkeypatch.setattr(Problem, "profile", profile)
    # Memory and all but products cost nothing: else half as many bytes are a gain of their own.
    free = {kind: Rate(1e24) for kind in WorkKind if kind not in PRODUCT_KINDS}
    machine = replace(MACHINE, flops_per_s=1e6, bf16_flops_per_s=1e6 * bf16_speedup, rates=free)
    tokens = torch.randint(64, (4, 8))
    advice = advise(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(input_ids=x, labels=x).loss, tokens, limit="64GiB",
        allow={"bf16"}, hardware=machine,
    )  # fmt: skip
    assert traced == [(ComputeDtype.GIVEN, False), (ComputeDtype.BFLOAT16, False)]
    assert advice.plan.compute_dtype is (ComputeDtype.GIVEN if bf16_speedup == 1 else ComputeDtype.BFLOAT16)


@pytest.mark.parametrize("says", ["nothing", "slower", "as fast"])
def test_chunks_of_the_loss_are_not_traced_where_room_for_the_logits_would_not_help(
    says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks the loss takes its logits less at most: plans that have so much more room are no slower."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=5000, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(5000, (4, 64))
    logits_bytes = 4 * tokens.numel() * config.vocab_size
    chunks: list[int | None] = []
    plain, plain_choice = Problem.profile, planner.choose_plan

    def profile(problem: Problem, sample: Any, counts: Any, **ways: Any) -> Any:
        chunks.append(ways["chunk_tokens"])
        return plain(problem, sample, counts, **ways)

    def choose_plan(*arguments: Any, more_bytes: int | None = None, **options: Any) -> Any:
        found = plain_choice(*arguments, **options)
        if more_bytes is None:
            return found
        # The logits, their logarithms and their gradient.
        assert 3 * logits_bytes <= more_bytes <= 6 * logits_bytes
        bound_s = {"nothing": 0.0, "slower": 1.3, "as fast": 1.0}[says] * found.timeline.seconds
        return replace(found, roomier_s=bound_s)

    monkeypatch.setattr(Problem, "profile", profile)
    monkeypatch.setattr(choosing, "choose_plan", choose_plan)
    # Less than what is kept takes, so that what plans take at least whatever they hold says little.
    advise(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(input_ids=x, labels=x).loss, tokens,
        limit="94MiB", hardware="rtx-4090",
    )  # fmt: skip
    assert len(chunks) == (1 if says == "slower" else 2)


def test_a_model_whose_weights_are_read_outside_of_every_call_is_planned_for() -> None:
    model = nn.Linear(4, 4)
    advice = advise(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: (x @ m.weight).square().mean(),
        torch.ones(2, 4), limit="8GiB", hardware=MACHINE,
    )  # fmt: skip
    assert not advice.profile.traces[2].calls and advice.plan.microbatches == 1


def test_a_given_plan_is_priced_in_its_own_dtype() -> None:
    model, optimizer, rows = _problem()
    plan = Plan(compute_dtype=ComputeDtype.BFLOAT16)
    advice = advise(model, optimizer, _loss, rows, plan=plan, allow={"bf16"}, hardware=MACHINE)
    assert {p.dtype for b in advice.profile.blocks for p in b.parameters} == {"bfloat16"}
    assert advice.hardware.flops_per_s == MACHINE.bf16_flops_per_s
    split = advise(
        model, optimizer, _loss, rows, plan=Plan(compute_dtype=ComputeDtype.BFLOAT16, splits_masters=True),
        allow={"bf16"}, hardware=MACHINE,
    )  # fmt: skip
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    resting = [found.timeline.moments[0].by_category["state"] for found in (advice, split)]
    assert resting[0] - resting[1] == pytest.approx(weights * 15 / 8, rel=0.1)


@pytest.mark.parametrize(("limit", "fits"), [("64GiB", True), ("1MiB", False)])
def test_a_given_plan_that_does_not_fit_says_so(limit: str, *, fits: bool) -> None:
    model, optimizer, rows = _problem()
    advice = advise(model, optimizer, _loss, rows, plan=Plan(), limit=limit, hardware=MACHINE)
    assert ("It does not fit: " in advice.reason) is not fits
    assert (advice.timeline.peak_bytes <= (advice.budget.tensor_bytes or 0)) is fits


def test_a_given_plan_in_bf16_is_refused_where_that_is_not_allowed() -> None:
    model, optimizer, rows = _problem()
    with pytest.raises(UsageError, match=r'allow=\{"bf16"\}'):
        advise(model, optimizer, _loss, rows, plan=Plan(compute_dtype=ComputeDtype.BFLOAT16), hardware=MACHINE)


def test_a_model_built_empty_gets_the_advice_of_the_whole_one() -> None:
    found: list[Plan] = []
    for is_born in (False, True):
        model, optimizer, rows = _problem()
        if is_born:
            model = memfit.empty(lambda: _problem()[0])
            optimizer = torch.optim.AdamW(model.parameters())
        found.append(advise(model, optimizer, _loss, rows, limit="64GiB", allow={"bf16"}, hardware=MACHINE).plan)
    assert found[0] == found[1]


def test_a_program_that_computes_the_loss_itself_from_a_causal_models_logits_is_planned_for() -> None:
    """The model's own loss can run in chunks, the program's cannot: plans with chunks are out, not the program."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=8, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(40, (4, 9))

    def own_loss(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(net(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters())
    job = memfit.fit(model, optimizer, own_loss, tokens, limit="64GiB", hardware=MACHINE)
    assert job.plan.loss_chunk_tokens is None
    job.step(tokens)
    job.close()


@pytest.mark.parametrize(
    ("name", "flops_per_s", "shares"),
    [
        ("resnet", 1e12, (0.5,)),
        *(
            pytest.param(name, flops_per_s, (1.1, 0.7, 0.4, 0.1, 0.02), marks=pytest.mark.slow)
            for name in zoo.CORE
            for flops_per_s in (1e8, 1e12)
        ),
    ],
)
def test_the_choice_is_the_same_where_only_the_whole_batch_is_traced(
    name: str, flops_per_s: float, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the plain step's peak (1) down to the smallest limit (0), on a slow and on a fast processor."""
    case = zoo.ZOO[name]()
    optimizer = torch.optim.AdamW(p for p in case.model.parameters() if p.requires_grad)
    machine = replace(MACHINE, flops_per_s=flops_per_s)

    plan_for = described.plan_for

    def alone(*args: Any, **kwargs: Any) -> Any:
        """What the process holds besides grows while tests run."""
        planned = plan_for(*args, **kwargs)

        def empty(found: Profile) -> Budget:
            return replace(planned.budget(found), base_bytes=0, reserve_bytes=0)

        return replace(planned, budget=empty, load_bytes=0)

    def advised(limit: int, *, traces_all: bool = False) -> Advice:
        with monkeypatch.context() as patch:
            patch.setattr(advice_module, "plan_for", alone)
            if traces_all:
                patch.setattr(advice_module, "keeps_batch_whole", lambda *_: False)
            return advise(
                case.model, optimizer, case.loss, case.batch(0), limit=limit, allow=case.allow, hardware=machine
            )

    plain = advised(1 << 35)
    assert len(plain.profile.traces) == (1 if not case.allow else 4), "where everything fits one size is traced"
    with pytest.raises(DoesNotFitError) as refused:
        advised(1 << 10)
    refusal: Any = refused.value.refusal
    least = refusal.peak_bytes
    for share in shares:
        limit = int(least + share * (plain.predicted_peak_bytes - least))
        one, other = advised(limit), advised(limit, traces_all=True)
        assert (one.plan, one.chosen, one.timeline) == (other.plan, other.chosen, other.timeline), share


class Wide(nn.Module):
    """A weight, and point-wise operations on rows of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 << 20))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            rows = (rows * self.weight).relu()
        return rows


def test_smaller_sizes_are_traced_where_operations_on_fewer_rows_are_of_a_faster_class() -> None:
    """A batch whose tensors are larger than caches, on a machine that is ten times faster within them."""
    model, rows = Wide(), torch.zeros(8, 1 << 20)
    rates = {WorkKind.STREAMED: Rate(1e11), WorkKind.STREAMED_LARGE: Rate(1e10)}
    plans: list[Plan] = []
    for own in (rates, dict.fromkeys(rates, Rate(1e10))):
        machine = replace(MACHINE, flops_per_s=1e12, rates=own)
        found = advise(model, torch.optim.SGD(model.parameters()), _loss, rows, limit="32GiB", hardware=machine)
        plans.append(found.plan)
        assert len(found.profile.traces) == (4 if own is rates else 1)
    assert [plan.microbatches > 1 for plan in plans] == [True, False]


@pytest.mark.parametrize("name", ["checkpoint-every-block", "sqrt", "vdnn", "zero-infinity", "accumulate"])
def test_a_job_under_a_technique_trains_as_plain_pytorch_does(name: str, tmp_path: Path) -> None:
    """Losses and weights bit for bit, against a plain loop; and advice under the name is what the job took."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(64, 8))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(8, 64)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().mean()

    plain, optimizer, rows = made()
    expected: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        found = loss(plain, rows)
        found.backward()
        optimizer.step()
        expected.append(found.item())
    model, own, rows = made()
    told = advise(model, own, loss, rows, plan=name, hardware=MACHINE)
    with memfit.fit(model, own, loss, rows, plan=name, hardware=MACHINE, directory=tmp_path, numerics="exact") as job:
        assert job.plan == told.plan
        assert name in job.reason
        assert [job.step(rows).loss for _ in range(3)] == expected
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_refusal_names_a_limit_that_holds_what_the_search_took_of_the_process() -> None:
    """A search that finds a plan takes as much or more, and is measured when it has ended: three are made to name it."""
    held = [100 << 20]

    def budget(*_: object) -> Budget:
        return Budget(limit_bytes=1 << 20, base_bytes=held[0], reserve_bytes=0)

    def choose(_: Profile, room: Budget, _traces: object) -> Any:
        held[0] += 7 << 20
        raise Refusal(budget=room, peak_bytes=50 << 20, plan="p", report="", advice=(), varies=True).error()

    with pytest.raises(DoesNotFitError) as caught:
        choose_in_room(None, budget, choose)  # type: ignore[arg-type]
    assert caught.value.smallest_limit_bytes == (100 + 4 * 7 + 50 + 4) << 20


def test_a_limit_that_is_named_is_one_at_which_a_plan_was_found_beside_its_search() -> None:
    """A search that finds a plan of 40 MiB takes 30 of the process the first time, one that finds none takes 5."""
    held, has_found = [100], [False]

    def budget(*_: object) -> Budget:
        return Budget(limit_bytes=120 << 20, base_bytes=held[0] << 20, reserve_bytes=0)

    def choose(_: Profile, room: Budget, _traces: object) -> Any:
        assert room.tensor_bytes is not None
        if room.tensor_bytes < 40 << 20:
            held[0] += 5
            raise Refusal(budget=room, peak_bytes=40 << 20, plan="p", report="", advice=(), varies=True).error()
        held[0] += 0 if has_found[0] else 30
        has_found[0] = True
        return SimpleNamespace(
            profile=None, plan="p", found=SimpleNamespace(timeline=SimpleNamespace(peak_bytes=40 << 20))
        )

    with pytest.raises(DoesNotFitError) as caught:
        choose_in_room(None, budget, choose)  # type: ignore[arg-type]
    named = (caught.value.smallest_limit_bytes or 0) >> 20
    # in a process that begins anew, which takes 30 to find it, it is found at what was named
    assert 100 + 30 + 40 <= named <= 100 + 4 * 5 + 30 + 40 + 4


@pytest.mark.parametrize(
    ("limit", "grows", "is_found"),
    [
        (250, (7, 3, 3, 2, 1, 1, 1, 1), True),
        # what the first one took is there when the second one begins, and kept free once
        (300, (100, 0, 0, 0, 0, 0), True),
        (250, (1, *(60,) * 60), False),
    ],
)
def test_a_plan_is_taken_only_if_it_fits_beside_what_its_own_search_took(
    limit: int, grows: tuple[int, ...], is_found: bool
) -> None:
    """Each search takes of the process, and finds plans of 40 MiB and more, whose kernels take 42."""
    held, searches = [100], [0]

    def budget(_: Profile, plan: object = None) -> Budget:
        return Budget(limit_bytes=limit << 20, base_bytes=(held[0] + (42 if plan else 0)) << 20, reserve_bytes=0)

    def choose(_: Profile, room: Budget, _traces: object) -> Any:
        held[0] += grows[searches[0]]
        searches[0] += 1
        assert room.tensor_bytes is not None
        if room.tensor_bytes < 40 << 20:
            raise Refusal(budget=room, peak_bytes=40 << 20, plan="p", report="", advice=(), varies=True).error()
        peak = SimpleNamespace(timeline=SimpleNamespace(peak_bytes=room.tensor_bytes))
        return SimpleNamespace(profile=None, plan="a plan", found=peak)

    if is_found:
        chosen, left = choose_in_room(None, budget, choose)  # type: ignore[arg-type]
        assert left.base_bytes == (held[0] + 42) << 20
        assert left.tensor_bytes is not None
        assert 40 << 20 <= chosen.found.timeline.peak_bytes <= left.tensor_bytes
        return
    with pytest.raises(DoesNotFitError) as caught:
        choose_in_room(None, budget, choose)  # type: ignore[arg-type]
    assert (caught.value.smallest_limit_bytes or 0) > limit << 20
