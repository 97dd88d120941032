"""A loss, or a hook, that reads numbers is an ordinary loss: planned for in every number of microbatches, on batches of new shapes, with weights away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from equivalence import plans
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.plan import CallPlan, Order, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.advise import advise
from memfit.planner.problem import Problem

WIDTH, ROWS = 24, 8
MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e9,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 36),
        Tier.DISK: TierSpec(nbytes=1 << 36, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)),
    },
)
LOGGED: list[Any] = []


def _read_item(loss: Tensor, out: Tensor) -> Tensor:
    LOGGED.append(loss.item())
    return loss


def _read_float(loss: Tensor, out: Tensor) -> Tensor:
    LOGGED.append((float(loss.detach()), int(out.argmax()), bool(loss > 0)))
    return loss


def _read_list(loss: Tensor, out: Tensor) -> Tensor:
    LOGGED.append((loss.tolist(), out[0, :2].tolist(), out[:2, :2].detach().tolist()))
    return loss


def _read_array(loss: Tensor, out: Tensor) -> Tensor:
    LOGGED.append((loss.detach().numpy().copy(), float(out.detach().cpu().numpy().mean())))
    return loss


def _write_text(loss: Tensor, out: Tensor) -> Tensor:
    LOGGED.append(f"{loss:.3f} of {out.detach().abs().max():.2e}, {loss.detach()}")
    return loss


def _branch(loss: Tensor, out: Tensor) -> Tensor:
    return loss.clamp(max=1e4) if loss > 1e4 else loss


def _assert_finite(loss: Tensor, out: Tensor) -> Tensor:
    assert torch.isfinite(out).all()
    assert not torch.isnan(loss)
    assert not (out - out.mean()).log1p().isinf().any()
    if torch.isnan(out).any() or torch.isinf(loss):
        raise FloatingPointError("the loss has left the numbers")
    return loss


def _measure_accuracy(loss: Tensor, out: Tensor) -> Tensor:
    LOGGED.append((out.argmax(dim=1) == 0).float().mean().item())
    return loss


def _compare(loss: Tensor, out: Tensor) -> Tensor:
    LOGGED.append((torch.equal(out, out), torch.allclose(out, out.clone())))
    return loss


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "item": _read_item,
    "float": _read_float,
    "tolist": _read_list,
    "numpy": _read_array,
    "format": _write_text,
    "branch": _branch,
    "assert": _assert_finite,
    "accuracy": _measure_accuracy,
    "equal": _compare,
}


def _loss_of(reader: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        out = model(rows)
        return reader(functional.mse_loss(out, rows), out)

    return loss


def _plain_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return functional.mse_loss(model(rows), rows)


def _model(*, logs: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]
    if logs:
        layers[1].register_forward_hook(lambda module, args, out: LOGGED.append(out.abs().mean().item()))
        layers[2].register_full_backward_hook(lambda module, into, out: LOGGED.append(float(out[0].norm())))
    return nn.Sequential(*layers)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("name", [*READERS, "hook"])
def test_a_program_that_reads_numbers_is_planned_for_as_one_that_does_not(name: str) -> None:
    loss = _plain_loss if name == "hook" else _loss_of(READERS[name])
    # In every number of microbatches once, for the others in two.
    counts = (1, 2, 4, 8) if name == "item" else (1, 2)
    rows = torch.randn(counts[-1], WIDTH)
    model = _model(logs=name == "hook")
    found = memfit.profile(model, _optimizer(model), loss, rows, microbatches=counts)
    assert found.source == "fake"
    assert "was guessed" in found.source_reason
    assert sorted(found.traces) == [*counts]
    advice = advise(model, _optimizer(model), loss, rows, limit="64GiB", hardware=MACHINE)
    assert advice.plan.microbatches == 1
    assert advice.numerics.is_exact


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        pytest.param(name, count, marks=() if (index + count) % 2 else pytest.mark.slow)
        for index, name in enumerate(["item", "numpy", "branch", "assert"])
        for count in (1, 2)
    ],
)
def test_it_trains_bit_for_bit_with_weights_away_and_on_batches_of_new_shapes(
    name: str, microbatches: int, tmp_path: Path
) -> None:
    """The second and third batch have shapes that are planned for while the weights are on disk."""
    loss = _loss_of(READERS[name])
    batches = [torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)) for rows in (8, 6, 4)]
    plain = _model(logs=True)
    optimizer = _optimizer(plain)
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.tensor_split(microbatches):
            value = loss(plain, part)
            (value if microbatches == 1 else value * (len(part) / len(batch))).backward()
        optimizer.step()
    model = _model(logs=True)
    profile = memfit.profile(model, _optimizer(model), loss, batches[0])
    plan = Plan(
        microbatches=microbatches,
        order=Order.LAYER_MAJOR,
        blocks=plans.on_disk(profile),
        calls=plans.fates(profile, CallPlan(saved=Saved.RECOMPUTE)),
        tail=plans.tail(profile) if microbatches > 1 else None,
    )
    with memfit.fit(model, _optimizer(model), loss, batches[0], plan=plan, directory=tmp_path) as job:
        LOGGED.clear()
        for batch in batches:
            assert job.step(batch).departures == ()
        assert LOGGED
    for (parameter, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), parameter


def test_a_step_that_reads_something_else_than_was_guessed_is_right_and_told() -> None:
    """Where what is read decides which calls are made, the trace guessed one way, and a batch goes the other."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](x))
            return self.layers[2](x) if x.abs().max().item() > 100.0 else x

    torch.manual_seed(0)
    model = Model()
    large = 1e4 * torch.randn(ROWS, WIDTH)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    _plain_loss(plain, large).backward()
    with memfit.fit(
        model, torch.optim.SGD(model.parameters(), lr=0.0), _plain_loss, torch.randn(ROWS, WIDTH), keep_gradients=True
    ) as job:
        result = job.step(large)
        assert any("calls 'layers.2' where the trace did not" in text for text in result.departures)
        for parameter, theirs in plain.named_parameters():
            mine = job.gradient(parameter)
            assert mine is not None
            assert theirs.grad is not None
            assert torch.equal(mine, theirs.grad), parameter


def test_shapes_that_alternate_are_planned_for_once_each_and_a_bounded_number_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memfit.planner.preparing._SHAPES", 3)
    traced: list[int] = []
    plain = Problem.profile_for

    def profile_for(problem: Problem, plan: Plan, batch: Tensor, **options: Any) -> Any:
        traced.append(len(batch))
        return plain(problem, plan, batch, **options)

    model = _model()
    with memfit.fit(model, _optimizer(model), _plain_loss, torch.randn(ROWS, WIDTH), plan=Plan()) as job:
        monkeypatch.setattr(Problem, "profile_for", profile_for)
        for rows in (8, 4, 8, 4, 6, 8, 4, 5, 8, 4, 6):
            job.step(torch.randn(rows, WIDTH))
    assert traced == [4, 6, 5, 6]
