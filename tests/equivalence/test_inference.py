"""Forward passes and generation with streamed weights: token for token what transformers gives, with sampling too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import plans, zoo
from equivalence.compare import same_bits
from equivalence.test_deferred import built_empty
from equivalence.with_memfit import profile_by_name
from memfit.core.errors import AwayError, DoesNotFitError, UsageError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.engine import caches
from memfit.tensors.guard import is_away

GENERATING = ("gpt2", "llama", "mixtral", "t5")


def generate(model: Any, *, samples: bool) -> Tensor:
    """Six tokens for each of two prompts, and their scores."""
    torch.manual_seed(11)
    prompt = torch.randint(1, zoo.VOCABULARY - 1, (2, 5)).to(model.device)
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
        use_cache=True,
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
    model = built_empty(lambda: zoo.llama().model)
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


def say(model: Any, number: int, how: str) -> Tensor:
    """Tokens for one or two prompts of a length of their own, that end when they end."""
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(1, zoo.VOCABULARY - 1, (1 + number % 2, 4 + number), generator=generator).to(model.device)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.8},
        "beams": {"do_sample": False, "num_beams": 3},
    }
    return model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=5,
        min_new_tokens=2,
        pad_token_id=0,
        eos_token_id=zoo.VOCABULARY - 1,
        use_cache=True,
        **ways[how],
    )


@pytest.mark.parametrize("name", GENERATING)
def test_caches_that_travel_and_requests_together_give_the_tokens_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "PAGE_BYTES", 256)  # several pages a layer
    plain, ours = spread(zoo.ZOO[name]().model).eval(), spread(zoo.ZOO[name]().model)
    with memfit.infer(ours, cache_limit=0) as session:
        for how in ("greedy", "sampled", "beams"):
            torch.manual_seed(1)
            expected = say(plain, 1, how)
            torch.manual_seed(1)
            assert torch.equal(say(ours, 1, how), expected), how
        read, written = session.cache_moved_bytes
        assert read > 0 and written > 0
        torch.manual_seed(2)
        streams = memfit.microbatch_streams(3)
        answers: list[Tensor] = []
        for number in range(3):
            with streams(number):
                answers.append(say(plain, number, "sampled"))
        torch.manual_seed(2)
        got = session.together([lambda n=n: say(ours, n, "sampled") for n in range(3)])
        for mine, theirs in zip(got, answers, strict=True):
            assert torch.equal(mine, theirs)
        assert session.together([]) == []


def test_requests_together_take_the_weights_of_one() -> None:
    model = spread(zoo.llama().model)
    read: dict[int, int] = {}
    with memfit.infer(model) as session:
        for count in (1, 1, 4):  # the first learns the order
            before = session.read_bytes
            session.together([lambda: say(model, 2, "greedy") for _ in range(count)])
            read[count] = session.read_bytes - before
    # The last visit, of what would be next, is counted when its transfer ends: before or after this reading.
    assert abs(read[4] - read[1]) <= 16 * 1024 < read[1] // 10


def test_a_cache_layer_that_is_read_outside_comes_and_stays_usable_after_the_context() -> None:
    from transformers import DynamicCache

    plain, ours = spread(zoo.llama().model).eval(), spread(zoo.llama().model)
    tokens = torch.randint(1, zoo.VOCABULARY - 1, (2, 6))
    theirs: Any = DynamicCache(config=plain.config)  # type: ignore[arg-type]
    mine: Any = DynamicCache(config=ours.config)  # type: ignore[arg-type]
    with torch.no_grad():
        plain(tokens, past_key_values=theirs, use_cache=True)
    with memfit.infer(ours, cache_limit=0) as session:
        session.model(tokens, past_key_values=mine, use_cache=True)
        first = mine.layers[0]
        assert first.__dict__["keys"].untyped_storage().nbytes() == 0  # it went when the last ones came
        assert first.get_seq_length() == 6
        assert first.__dict__["keys"].untyped_storage().nbytes() == 0  # its length is no reason to bring it
        held = first.keys
        assert torch.equal(held, theirs.layers[0].keys)
        assert all(torch.equal(a.values, b.values) for a, b in zip(mine.layers, theirs.layers, strict=True))
        assert torch.equal(held, theirs.layers[0].keys)  # somebody holds it: it stayed
        twin: Any = copy.deepcopy(mine)
        assert [type(layer) for layer in twin.layers] == [type(layer) for layer in theirs.layers]
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(twin.layers, theirs.layers, strict=True))
        mine.crop(-2)
        theirs.crop(-2)
    assert [type(layer) for layer in mine.layers] == [type(layer) for layer in theirs.layers]
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


@pytest.mark.parametrize("name", GENERATING)
def test_the_price_of_a_token_is_what_its_keys_and_values_take(name: str) -> None:
    from memfit.job.inference import _cache_bytes_per_token

    model: Any = zoo.ZOO[name]().model.eval()
    tokens = torch.randint(1, zoo.VOCABULARY - 1, (2, 7))
    with torch.no_grad():
        extra = {"decoder_input_ids": tokens} if name == "t5" else {}
        cache = model(input_ids=tokens, use_cache=True, **extra).past_key_values
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if name == "t5" else [cache]
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for part in parts for layer in part.layers)
    price = _cache_bytes_per_token(model)
    assert price is not None
    assert nbytes == 2 * 7 * price * len(parts)


def test_an_error_in_one_request_ends_all_and_the_model_goes_on() -> None:
    model = spread(zoo.gpt2().model)
    seen: list[str] = []

    def fails() -> None:
        raise RuntimeError("no")

    def patient() -> None:
        try:
            say(model, 0, "greedy")
        finally:
            seen.append("ended")

    with memfit.infer(model) as session:
        with pytest.raises(RuntimeError, match="no"):
            session.together([patient, fails, patient])
        assert seen == ["ended"]  # the third had not begun
        expected = say(model, 0, "greedy")
        assert torch.equal(session.together([lambda: say(model, 0, "greedy")])[0], expected)


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
        model = built_empty(lambda: zoo.gpt2().model) if is_empty else case.model
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
