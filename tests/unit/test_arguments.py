"""What a newcomer writes first: sizes, samples, losses and models that cannot be meant are answered by a sentence; what can be meant is taken."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import memfit
from memfit.core.errors import MemfitWarning, UsageError
from memfit.core.limits import Limits, format_seconds, parse_bytes
from memfit.machine.limits_of_process import check_limit
from memfit.machine.proof import Proof

ROWS = 4


@given(st.floats(min_value=1e-6, max_value=1e9), st.sampled_from([2, 3, 4]))
def test_seconds_are_written_with_so_many_digits_and_large_ones_whole(seconds: float, digits: int) -> None:
    number, unit = format_seconds(seconds, digits).split()
    assert unit == "s"
    assert float(number) == pytest.approx(seconds, rel=0.51 * 10 ** (1 - digits), abs=0.5 if seconds >= 99 else 0.0)
    assert "e" not in number or seconds < 1e-4


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 6), torch.arange(ROWS) % 3


def _model(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _fit(model: nn.Module | None = None, loss: Callable[..., Any] = _loss, sample: Any = None, **arguments: Any) -> Any:
    model = _model() if model is None else model
    sample = _batch() if sample is None else sample
    return memfit.fit(model, torch.optim.AdamW(model.parameters()), loss, sample, **arguments)


# Sizes

# The standard's binary prefixes, SI's decimal ones, and one letter as docker, systemd and Slurm mean it.
FACTORS = {
    "": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "Ki": 2**10, "Gi": 2**30,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(FACTORS)), st.booleans())
def test_a_size_is_its_number_times_its_unit(whole: int, thousandths: int, unit: str, is_lower: bool) -> None:
    factor = FACTORS[unit]
    written = unit.lower() if is_lower else unit
    if factor == 1:
        assert parse_bytes(f"{whole} {written}") == whole
    else:
        assert parse_bytes(f"{whole}.{thousandths:03}{written}") == int(
            Fraction(whole * 1000 + thousandths, 1000) * factor
        )


@pytest.mark.parametrize("size", ["0.5", "1.25", ".5", "0.5B"])
def test_a_fraction_without_a_unit_is_no_size_of_0_bytes(size: str) -> None:
    with pytest.raises(UsageError, match="write its unit"):
        parse_bytes(size)
    assert parse_bytes("2.0") == 2


@pytest.mark.parametrize("limit", [0, 8, "24", "1000KiB"])
def test_a_limit_below_what_any_process_takes_is_answered_with_how_to_write_one(limit: int | str) -> None:
    with pytest.raises(UsageError, match="unit, such as '8GiB'"):
        _fit(limit=limit)


def test_a_limit_above_what_the_machine_has_is_refused() -> None:
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(UsageError, match=r"10\.00 TiB is more than"):
        _fit(limit="10TiB")
    with pytest.raises(UsageError, match="is more than"):
        _fit(limit=there + os.sysconf("SC_PAGE_SIZE"))  # a part of a page is nobody's to give or to take
    # Where nobody is held to it, plans may be made for other machines.
    _fit(limit="10TiB", enforce=False).close()


def test_a_limit_above_that_of_the_processs_cgroup_is_refused_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.machine import limits_of_process as arguments
    from memfit.machine.host.read import Ceiling, Cgroup

    ceiling = Ceiling(value=float(1 << 30), file="/sys/fs/cgroup/memory.max")
    monkeypatch.setattr(arguments, "read_cgroup", lambda _: Cgroup(quota=None, memory=ceiling, memory_high=None))
    device = torch.device("cpu")
    with pytest.raises(UsageError, match=r"cgroup \(/sys/fs/cgroup/memory.max\) has \(1.00 GiB\)"):
        check_limit(Limits.read("1.5GiB"), device, is_emulated=False)
    check_limit(Limits.read("1GiB"), device, is_emulated=False)
    check_limit(Limits.read("1.5GiB"), device, is_emulated=True)


def test_a_proof_without_a_limit_holds_and_names_none() -> None:
    batch = _batch()
    job = _fit()
    job.step(batch)
    proof = job.proof()
    job.close()
    assert proof.holds
    assert proof.limit_bytes is None
    assert "no limit was given" in proof.line()
    assert "BREACHED" not in proof.line()
    proof.check()
    assert "BREACHED" in Proof(limit_bytes=1, predicted_peak_bytes=1, measured_peak_bytes=2).line()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_grad_norm": "1"}, "max_grad_norm must be a number above 0, not '1'"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a number above 0, not nan"),
        ({"split": 3}, "split must be a function"),
        ({"tiers": {"x": 3}}, "takes a memfit.homes.factories.FurtherTier, not 3"),
    ],
)
def test_what_is_of_another_kind_than_an_argument_takes_is_refused_by_its_name(
    asked: dict[str, Any], said: str
) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=said):
        memfit.fit(model, optimizer, lambda m, b: m(b).sum(), torch.randn(4, 6), **asked)


@pytest.mark.parametrize("norm", [1, 0.5, np.float32(0.5), torch.tensor(0.5)])
def test_a_norm_to_clip_to_may_come_from_numpy_or_torch(norm: Any) -> None:
    with _fit(max_grad_norm=norm) as job:
        assert job.step(_batch()).norm is not None


# Samples


class _Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.randn(6)])


DATA = TensorDataset(torch.randn(8, 6), torch.arange(8) % 3)


@pytest.mark.parametrize("make", [iter, lambda loader: (batch for batch in loader)])
def test_what_gives_its_batches_once_is_no_sample(make: Any) -> None:
    with pytest.raises(UsageError, match="gives its batches once.*pass it as the sample"):
        _fit(sample=make(DataLoader(DATA, batch_size=2)))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=2),
        iter(DataLoader(DATA, batch_size=2)),
        (x for x in [1]),
        memfit.ResumableLoader(DATA, batch_size=2, seed=0),
    ],
)
def test_what_gives_batches_is_no_batch_of_a_step_and_the_answer_says_how_one_is_had(loader: Any) -> None:
    job = _fit()
    with pytest.raises(UsageError, match="gives batches.*for batch in loader"):
        job.step(loader)
    job.close()


@pytest.mark.parametrize("sample", [DATA, _Endless()])
def test_a_dataset_is_no_batch(sample: Any) -> None:
    with pytest.raises(UsageError, match="is a dataset"):
        _fit(sample=sample)


# Losses


def test_a_pair_whose_second_is_no_count_is_told_to_return_the_loss_alone() -> None:
    def with_outputs(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return nn.functional.cross_entropy(out, batch[1]), out

    def with_second_loss(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return nn.functional.cross_entropy(out, batch[1]), out.square().mean()

    for loss, named in ((with_outputs, "tensor of shape"), (with_second_loss, "requires gradients")):
        with pytest.raises(UsageError, match=f"{named}.*return the loss alone"):
            _fit(loss=loss)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda loss: (loss, 1.0, 2.0), "tuple of 3"),
        (lambda loss: {"loss": loss}, r"a dict: return its loss alone \(output.loss\)"),
        (lambda loss: [loss], "list of 1"),
        (lambda loss: loss.item(), "cuts the graph"),
    ],
)
def test_what_is_neither_a_scalar_nor_a_sum_with_its_count_is_told_what_to_return(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _fit(loss=lambda model, batch: make(_loss(model, batch)))


def test_an_accuracy_beside_the_loss_is_refused_as_what_would_be_taken_for_a_count() -> None:
    def with_accuracy(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return nn.functional.cross_entropy(out, batch[1]), torch.tensor(0.75)

    with pytest.raises(
        UsageError, match=r"its first is no sum: .* divided by its second, 0\.75: return the loss alone"
    ):
        _fit(loss=with_accuracy)
    # A batch of one row cannot be cut, so nothing shows at `fit` that the first is no sum.
    x, y = _batch()
    job = _fit(loss=with_accuracy, sample=(x[:1], y[:1]))
    with pytest.warns(MemfitWarning, match=r"0.75.*takes a pair for \(sum, count\)"):
        job.step((x[:1], y[:1]))
    job.close()


def test_a_wrong_width_is_one_error_with_its_place_in_the_users_program_and_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)  # the place

    with caplog.at_level(logging.DEBUG), pytest.raises(UsageError, match="cannot be multiplied") as caught:
        _fit(Net())
    assert f"{Path(__file__).name}, line" in str(caught.value)
    assert "# the place" in str(caught.value)
    assert not [record for record in caplog.records if "failed while attempting" in record.getMessage()]
    # What follows is the user's program's own error, from the user's function on.
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert cause.__context__ is None
    assert cause.__traceback__ is not None
    assert cause.__traceback__.tb_frame.f_code.co_name == "_loss"
    # Torch's own log is as it was.
    assert not logging.getLogger("torch._subclasses.fake_tensor").filters


def test_a_model_on_meta_is_told_of_memfit_empty() -> None:
    with torch.device("meta"):
        model = _model()
    with pytest.raises(UsageError, match=r"meta.*memfit\.empty"):
        _fit(model)
    with pytest.raises(UsageError, match=r"meta.*memfit\.empty"):
        memfit.profile(model, torch.optim.SGD(model.parameters()), _loss, _batch())


# Names


def test_the_version_and_the_errors_that_a_program_catches_are_public() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert memfit.__version__ == project["version"]
    for name in ("UsageError", "UnsupportedError", "StoreError", "PlanError", "TornStepError", "MemfitWarning"):
        assert name in memfit.__all__
        assert issubclass(
            getattr(memfit, name), memfit.MemfitWarning if name == "MemfitWarning" else memfit.MemfitError
        )


def test_a_wrong_batch_while_weights_are_away_is_told_as_that_and_the_job_goes_on() -> None:
    from memfit.core.plan import BlockPlan, Plan
    from memfit.core.tiers import Tier

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    home = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    names = [block.name for block in memfit.profile(model, optimizer, _loss, _batch()).blocks]
    with memfit.fit(model, optimizer, _loss, _batch(), plan=Plan(blocks=dict.fromkeys(names, home))) as job:
        with pytest.raises(memfit.AwayError, match="See that the batch has the shapes and dtypes that the loss takes"):
            job.step((torch.randn(ROWS, 7), torch.arange(ROWS) % 3))
        assert job.step(_batch()).is_finite


def test_a_loss_with_parameters_of_its_own_is_told_to_be_put_into_the_model() -> None:
    model, temperature = _model(), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature])
    with pytest.raises(UsageError, match="A loss with parameters of its own goes into one module with the model"):
        memfit.fit(model, optimizer, lambda m, b: _loss(m, b) * temperature, _batch())
