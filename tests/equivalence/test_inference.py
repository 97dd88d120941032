"""Forward passes and generation with streamed weights: token for token what transformers gives, with sampling too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import plans, zoo
from equivalence.compare import same_bits
from equivalence.test_birth import born
from equivalence.with_memfit import profile_by_name
from memfit.core.errors import AwayError, DoesNotFitError, UsageError
from memfit.core.plan import BlockPlan, Plan, Tier
from memfit.core.precision import ComputeDtype
from memfit.runtime.guard import is_away

GENERATING = ("gpt2", "llama", "mixtral", "t5")


def generate(model: Any, *, samples: bool) -> Tensor:
    """Six tokens for each of two prompts, and their scores."""
    torch.manual_seed(11)
    prompt = torch.randint(1, zoo.VOCABULARY - 1, (2, 5))
    options = {"do_sample": True, "top_k": 20, "temperature": 0.8} if samples else {"do_sample": False}
    found = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=6,
        min_new_tokens=6,
        pad_token_id=0,
        eos_token_id=zoo.VOCABULARY - 1,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    scores = torch.stack(found.scores)
    return torch.cat([found.sequences.flatten().double(), scores.flatten().double()])


def spread(model: nn.Module) -> nn.Module:
    """Weights large enough that tokens differ."""
    torch.manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.2)
    return model


@pytest.mark.parametrize("name", GENERATING)
def test_generation_with_streamed_weights_equals_transformers_token_for_token(name: str, tmp_path: Path) -> None:
    plain, ours = spread(zoo.ZOO[name]().model).eval(), spread(zoo.ZOO[name]().model)
    expected = [generate(plain, samples=samples) for samples in (False, True)]
    assert len(set(expected[1][:22].tolist())) > 3  # the models do say something
    with memfit.infer(ours, directory=tmp_path / "homes") as session:
        assert all(is_away(p) for p in ours.parameters())
        got = [generate(session.model, samples=samples) for samples in (False, True)]
        assert session.read_bytes > 0
    assert ours.training  # as it was
    for ours_found, plain_found in zip(got, expected, strict=True):
        assert same_bits(ours_found, plain_found)
    for (parameter_name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert same_bits(mine.detach(), theirs.detach()), parameter_name


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
def test_a_directory_is_generated_from_without_ever_loading_the_model(name: str, tmp_path: Path) -> None:
    plain = spread(zoo.ZOO[name]().model).eval()
    plain.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    expected = generate(type(plain).from_pretrained(tmp_path), samples=True)  # type: ignore[attr-defined]
    with memfit.infer(tmp_path) as session:
        assert type(session.model) is type(plain)
        assert same_bits(generate(session.model, samples=True), expected)
    assert all(is_away(p) for p in session.model.parameters())


def test_a_model_built_empty_is_generated_from_and_stays_empty(tmp_path: Path) -> None:
    expected = generate(zoo.llama().model.eval(), samples=True)
    model = born(lambda: zoo.llama().model)
    with memfit.infer(model) as session:
        assert same_bits(generate(session.model, samples=True), expected)
    with pytest.raises(AwayError):
        model(torch.zeros(1, 2, dtype=torch.int64))


def test_a_job_generates_between_steps_and_trains_on_as_if_it_had_not(tmp_path: Path) -> None:
    cases = zoo.gpt2(), zoo.gpt2()
    optimizers = [torch.optim.AdamW(case.model.parameters()) for case in cases]
    homes = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    names = [
        block.name for block in memfit.profile(cases[0].model, optimizers[0], cases[0].loss, cases[0].batch(0)).blocks
    ]
    plan = Plan(blocks=dict.fromkeys(names, homes))
    jobs = [
        memfit.fit(case.model, optimizer, case.loss, case.batch(0), plan=plan)
        for case, optimizer in zip(cases, optimizers, strict=True)
    ]
    for job in jobs:
        torch.manual_seed(1)
        job.step(cases[0].batch(0))
    with jobs[1].weights():
        plain = {name: p.detach().clone() for name, p in cases[1].model.named_parameters()}
    reference = zoo.gpt2().model.eval()
    reference.load_state_dict(plain, strict=False)
    with jobs[0].inference():
        assert same_bits(generate(cases[0].model, samples=True), generate(reference, samples=True))
        assert not cases[0].model.training
        with pytest.raises(UsageError, match=r"of job\.inference\(\)"):
            jobs[0].step(cases[0].batch(1))
    assert cases[0].model.training
    losses = []
    for job in jobs:
        torch.manual_seed(2)
        losses.append(job.step(cases[0].batch(1)).loss)
        job.close()
    assert losses[0] == losses[1]
    for mine, theirs in zip(cases[0].model.parameters(), cases[1].model.parameters(), strict=True):
        assert same_bits(mine.detach(), theirs.detach())


def test_limits_and_directories_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model = zoo.gpt2().model
    with (
        pytest.raises(DoesNotFitError, match="streaming needs .* before any activation"),
        memfit.infer(model, limit="1MiB"),
    ):
        pass
    assert not any(is_away(p) for p in model.parameters())
    with pytest.raises(UsageError, match="holds no model that transformers knows"), memfit.infer(tmp_path):
        pass


def test_a_model_built_empty_trains_and_generates_in_bf16_as_one_built_plainly() -> None:
    results = []
    plan = Plan(blocks=plans.on_disk(profile_by_name("gpt2")), compute_dtype=ComputeDtype.BFLOAT16)
    for is_empty in (False, True):
        case = zoo.gpt2()
        model = born(lambda: zoo.gpt2().model) if is_empty else case.model
        optimizer = torch.optim.AdamW(model.parameters())
        job = memfit.fit(model, optimizer, case.loss, case.batch(0), plan=plan, allow={"bf16"})
        torch.manual_seed(1)
        loss = job.step(case.batch(0)).loss
        with job.inference():
            said = generate(model, samples=True)
        job.close()
        results.append((loss, said, [p.detach() for p in model.parameters()]))
    (plain_loss, plain_said, plain), (loss, said, ours) = results
    assert loss == plain_loss
    assert same_bits(said, plain_said)
    assert all(same_bits(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))
