"""Any cut of any parameters, over any steps, gives the bits of plain `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.optimizers import OptimizerDriver
from memfit.optimizers.shape_trials import small_shape

Make = Callable[[Any], Optimizer]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@st.composite
def optimizers(draw: st.DrawFn) -> Make:
    """One of torch's elementwise classes with flags in any combination that it takes."""
    rate = draw(st.sampled_from([0.0, 1e-6, 1e-2, 0.3]))
    decay = draw(st.sampled_from([0.0, 0.1]))
    common: dict[str, Any] = {"maximize": draw(st.booleans()), "foreach": draw(st.sampled_from([None, True, False]))}
    momentum = draw(st.sampled_from([0.0, 0.9]))
    flag = draw(st.booleans())
    choices: dict[str, Make] = {
        "SGD": lambda p: torch.optim.SGD(
            p, rate, momentum=momentum, nesterov=flag and momentum > 0, weight_decay=decay, **common
        ),
        "Adam": lambda p: torch.optim.Adam(p, rate, amsgrad=flag, weight_decay=decay, **common),
        "AdamW": lambda p: torch.optim.AdamW(p, rate, amsgrad=flag, weight_decay=decay, **common),
        "NAdam": lambda p: torch.optim.NAdam(p, rate, decoupled_weight_decay=flag, weight_decay=decay, **common),
        "RAdam": lambda p: torch.optim.RAdam(p, rate, decoupled_weight_decay=flag, weight_decay=decay, **common),
        "RMSprop": lambda p: torch.optim.RMSprop(
            p, rate, centered=flag, momentum=momentum, weight_decay=decay, **common
        ),
        "Adagrad": lambda p: torch.optim.Adagrad(p, rate, lr_decay=0.1 * flag, weight_decay=decay, **common),
        "Adamax": lambda p: torch.optim.Adamax(p, rate, weight_decay=decay, **common),
        "Adadelta": lambda p: torch.optim.Adadelta(p, rate, weight_decay=decay, **common),
        "Rprop": lambda p: torch.optim.Rprop(p, rate, **common),
        "ASGD": lambda p: torch.optim.ASGD(p, rate, t0=2.0 if flag else 1e6, weight_decay=decay, **common),
    }
    return choices[draw(st.sampled_from(sorted(choices)))]


@settings(max_examples=60, deadline=None)
@given(
    make=optimizers(),
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
    adopted_at=st.integers(0, 2),
    data=st.data(),
)
def test_any_cut_of_any_parameters_gives_the_bits_of_plain_steps(
    make: Make, shapes: list[list[int]], seed: int, adopted_at: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain = {f"p{i}": nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)}
    named = {name: nn.Parameter(p.detach().clone()) for name, p in plain.items()}
    plain_optimizer, optimizer = make(plain.values()), make(named.values())
    driver = OptimizerDriver(optimizer, named)
    states: dict[str, dict[str, Any]] = {}
    for step in range(4):
        rate = data.draw(st.sampled_from([0.0, 1e-3, 0.1]))
        present = data.draw(st.sets(st.sampled_from(sorted(named)), min_size=1))
        given_gradients = {
            n: torch.randn(plain[n].shape, generator=generator) * 10.0 ** (step - 2) for n in sorted(present)
        }
        for each, parameters in ((plain_optimizer, plain), (optimizer, named)):
            each.param_groups[0]["lr"] = rate
            each.zero_grad()
            for name, gradient in given_gradients.items():
                parameters[name].grad = gradient.clone()
        plain_optimizer.step()
        if step < adopted_at:
            optimizer.step()
            continue
        if not states:
            states = {name: dict(optimizer.state.get(p, {})) for name, p in named.items()}
        driver.begin_step()
        for name in data.draw(st.permutations(sorted(present))):
            states[name] = cut_update(driver, name, named[name].data, given_gradients[name], states[name], data)
        driver.end_step()
    for name, parameter in plain.items():
        assert torch.equal(bits(parameter), bits(named[name]))
        expected = plain_optimizer.state.get(parameter, {})
        found = states[name]
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert value.shape == found[key].shape
            assert torch.equal(bits(value), bits(found[key]))


def cut_update(
    driver: OptimizerDriver, name: str, weight: Tensor, gradient: Tensor, state: dict[str, Any], data: st.DataObject
) -> dict[str, Any]:
    """One parameter's step in pieces of any lengths, with the homes kept whole."""
    numel = weight.numel()
    places = sorted({0, *data.draw(st.sets(st.integers(0, numel - 1), max_size=6)), numel})
    layout = {t.key: t for t in driver.state_layout(name)}
    new: dict[str, Any] = dict(state)
    for start, stop in pairwise(places):
        lent = {k: v.view(-1)[start:stop] if layout[k].shape_kind == "like" else v for k, v in state.items()}
        got = driver.update(
            name,
            weight.view(-1)[start:stop],
            gradient.clone().view(-1)[start:stop],
            lent,
            first=start == 0,
            last=stop == numel,
        )
        for key, value in got.items():
            if layout[key].shape_kind == "like":
                new.setdefault(key, torch.empty(layout[key].shape, dtype=layout[key].dtype)).view(-1)[start:stop] = (
                    value
                )
            else:
                new[key] = value
    return new


@given(shape=st.lists(st.integers(0, 50), max_size=5), caps=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_small_shapes_keep_the_number_of_dimensions_and_never_grow(shape: list[int], caps: list[int]) -> None:
    small = small_shape(shape, caps)
    assert len(small) == len(shape)
    assert all(a <= b and a <= max(caps) for a, b in zip(small, shape, strict=True))
