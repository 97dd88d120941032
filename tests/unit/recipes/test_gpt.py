from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from memfit.core.errors import UsageError
from memfit.integrations.recipes.gpt import RECIPES, find_recipe


def gpt_parameters(*, layers: int, width: int, positions: int, vocabulary_size: int, tied: bool) -> int:
    """By arithmetic: attention 4 w^2 + 4 w, feed-forward 8 w^2 + 5 w, two norms 4 w; one norm after the last layer."""
    layer = 12 * width**2 + 13 * width
    return layers * layer + 2 * width + (positions + vocabulary_size * (1 if tied else 2)) * width


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gpt2-small",
            gpt_parameters(layers=12, width=768, positions=1024, vocabulary_size=50_257, tied=True),
        ),
        (
            "bench-98m",
            gpt_parameters(layers=12, width=768, positions=256, vocabulary_size=8192, tied=False),
        ),
    ],
)
def test_parameters_are_counted_by_arithmetic(name: str, expected: int) -> None:
    with torch.device("meta"):
        model = find_recipe(name).build_model(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert not [module for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p > 0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_gpt2_small_is_the_published_size() -> None:
    assert gpt_parameters(layers=12, width=768, positions=1024, vocabulary_size=50_257, tied=True) == 124_439_808


def test_a_seed_decides_the_weights_and_leaves_the_users_random_numbers_alone() -> None:
    build = find_recipe("gpt-tiny").build_model
    before = torch.random.get_rng_state()
    first, again, other = build(1), build(1), build(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))
    assert first.training


def test_the_loss_is_the_mean_cross_entropy_of_every_next_token(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = find_recipe("gpt-tiny")
    model = recipe.build_model(0)
    batch = next(recipe.batches(0))
    assert recipe.sequence_length is not None, "of text"
    assert batch.shape == (recipe.batch_size, recipe.sequence_length + 1)
    logits = model(input_ids=batch[:, :-1]).logits
    expected = torch.stack(
        [
            -functional.log_softmax(logits[row, place].double(), dim=-1)[batch[row, place + 1]]
            for row in range(recipe.batch_size)
            for place in range(recipe.sequence_length)
        ]
    ).mean()
    value = recipe.loss(model, batch)
    assert value.shape == ()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    assert capfd.readouterr().err == ""  # transformers warns of a loss that it had to guess


@pytest.mark.parametrize(("total_steps", "warmup_steps"), [(1, 1), (7, 1), (12, 3), (10_000, 100)])
def test_the_rate_warms_up_in_a_straight_line_and_stays(total_steps: int, warmup_steps: int) -> None:
    recipe = find_recipe("gpt-tiny")
    optimizer = recipe.build_optimizer(torch.nn.Linear(1, 1))
    rate = optimizer.param_groups[0]["lr"]
    scheduler = recipe.build_scheduler(optimizer, total_steps)
    for step in range(1, min(total_steps, 120) + 1):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate * min(1, step / warmup_steps))
        optimizer.step()
        scheduler.step()


def test_the_tiny_recipe_learns() -> None:
    recipe = find_recipe("gpt-tiny")
    model = recipe.build_model(0)
    optimizer = recipe.build_optimizer(model)
    scheduler = recipe.build_scheduler(optimizer, 40)
    batches = recipe.batches(0)
    losses: list[float] = []
    for _ in range(40):
        loss = recipe.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(512.0).log().item(), abs=0.3)  # as good as guessing
    assert sum(losses[-3:]) / 3 < losses[0] - 0.6


def test_recipes_are_found_by_name_and_a_wrong_name_lists_them() -> None:
    assert [find_recipe(recipe.name) for recipe in RECIPES] == list(RECIPES)
    with pytest.raises(UsageError, match=r"no recipe is called 'gpt3': there are gpt2-small, bench-98m, gpt-tiny"):
        find_recipe("gpt3")


def test_a_run_without_steps_is_refused() -> None:
    recipe = find_recipe("gpt-tiny")
    with pytest.raises(UsageError, match="give at least 1"):
        recipe.build_scheduler(recipe.build_optimizer(torch.nn.Linear(1, 1)), 0)
