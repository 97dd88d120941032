"""Inference on an accelerator: weights from disk, caches of keys and values in host memory, tokens of transformers, memory that does not grow with depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import test_inference, zoo
from equivalence.carried import Way, carry
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.engine import caches

VOCABULARY, WIDTH = 96, 64


def llama(device: torch.device, depth: int = 4, *, width: int = WIDTH) -> Any:
    """On the device, with weights large enough that tokens differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=depth,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)
    return model


def say(model: Any, number: int, *, samples: bool = False, beams: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(1, VOCABULARY - 1, (1 + number % 2, 4 + number), generator=generator).to(model.device)
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=6,
        do_sample=samples,
        num_beams=beams,
        pad_token_id=0,
        eos_token_id=VOCABULARY - 1,
    )


@pytest.mark.parametrize("cache_limit", [None, 0])
def test_generation_on_a_device_gives_the_tokens_of_transformers(
    device: torch.device, cache_limit: int | None, tmp_path: Path
) -> None:
    plain, ours = llama(device), llama(device)
    with memfit.infer(ours, cache_limit=cache_limit, directory=tmp_path / "homes") as session:
        ways: list[dict[str, Any]] = [{}, {"samples": True}, {"beams": 3}]
        for options in ways:
            torch.manual_seed(1)
            expected = say(plain, 1, **options)
            torch.manual_seed(1)
            assert torch.equal(say(ours, 1, **options), expected), options
        if cache_limit == 0:
            read, written = session.cache_moved_bytes
            assert read > 0 and written > 0
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "number"),
    # Weights in host memory or on disk; on the current index and in the default stream, or not.
    [(name, 3 * place) for place, name in enumerate(test_inference.GENERATING)],
)
def test_generation_of_the_zoo_on_a_device_gives_the_tokens_of_transformers_there(
    name: str, number: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "PAGE_BYTES", 256)  # several pages a layer
    way = Way.numbered(number)
    there = way.device(device)
    plain, ours = (carry(test_inference.spread(zoo.ZOO[name]().model), there) for _ in range(2))
    plain.eval()
    with way.entered(device), memfit.infer(ours, cache_limit=0, directory=tmp_path / "homes") as session:
        for how in ("greedy", "sampled", "beams"):
            said: list[torch.Tensor] = []
            for model in (plain, session.model):
                torch.manual_seed(1)
                said.append(test_inference.say(model, 1, how))
            assert torch.equal(*said), how
        read, written = session.cache_moved_bytes
        assert read > 0 and written > 0
        torch.manual_seed(2)
        streams = memfit.microbatch_streams(3)
        alone: list[torch.Tensor] = []
        for request in range(3):
            with streams(request):
                alone.append(test_inference.say(plain, request, "sampled"))
        torch.manual_seed(2)
        together = session.together(
            [lambda request=request: test_inference.say(session.model, request, "sampled") for request in range(3)]
        )
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(together, alone, strict=True))


def test_requests_together_on_a_device_are_what_each_is_alone(device: torch.device) -> None:
    plain, ours = llama(device), llama(device)
    torch.manual_seed(2)
    streams = memfit.microbatch_streams(3)
    expected: list[torch.Tensor] = []
    for number in range(3):
        with streams(number):
            expected.append(say(plain, number, samples=True))
    torch.manual_seed(2)
    with memfit.infer(ours, cache_limit=0) as session:
        got = session.together([lambda n=n: say(ours, n, samples=True) for n in range(3)])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


def test_a_directory_is_generated_from_without_the_model_on_the_device(device: torch.device, tmp_path: Path) -> None:
    plain = llama(device)
    plain.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    model = memfit.empty(lambda: llama(device), initialises=False)
    with memfit.infer(model, weights=tmp_path / "saved") as session:
        assert torch.equal(say(session.model, 0), say(plain, 0))


def test_the_peak_on_a_device_is_the_same_at_depth_4_and_64(device: torch.device) -> None:
    peaks: dict[int, int] = {}
    before = 0
    prompt = torch.ones(4, 32, dtype=torch.int64, device=device)
    for depth in (4, 64):
        model = memfit.empty(lambda depth=depth: llama(device, depth, width=256))
        with memfit.infer(model, cache_limit=0) as session:
            for _ in range(2):  # the first brings workspaces
                torch.accelerator.synchronize(device)
                before = torch.accelerator.memory_allocated(device)
                torch.accelerator.reset_peak_memory_stats(device)
                net: Any = session.model
                net.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, pad_token_id=0)
            peaks[depth] = torch.accelerator.max_memory_allocated(device) - before
    assert abs(peaks[4] - peaks[64]) <= 1 << 20, peaks


def test_a_job_on_a_device_generates_between_steps(device: torch.device, tmp_path: Path) -> None:
    model, plain = llama(device), llama(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(net: Any, batch: torch.Tensor) -> torch.Tensor:
        return net(input_ids=batch, labels=batch).loss

    batch = torch.randint(1, VOCABULARY - 1, (4, 16), device=device)
    names = [block.name for block in memfit.profile(model, optimizer, loss, batch).blocks]
    home = BlockPlan(weight_home=Tier.HOST, gradient_home=Tier.DEVICE, state_home=Tier.HOST)
    with memfit.fit(
        model, optimizer, loss, batch, plan=Plan(blocks=dict.fromkeys(names, home)), directory=tmp_path / "homes"
    ) as job:
        job.step(batch)
        with job.weights():
            plain.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()}, strict=False)
        with job.inference(cache_limit=0) as session:
            assert torch.equal(say(session.model, 1), say(plain, 1))
        assert job.step(batch).is_finite
