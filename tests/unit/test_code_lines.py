"""The line of the program that made a tensor: the innermost one that is not torch's or memfit's."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import Tensor, nn

import memfit


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(64, 64)

    def forward(self, values: Tensor) -> Tensor:
        return torch.sin(self.inside(values).sigmoid())  # this line


def test_the_largest_saved_tensors_tell_the_line_that_made_them() -> None:
    model = Waves()
    found = memfit.profile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        torch.randn(32, 64),
    )
    trace = found.traces[32]
    source, first = inspect.getsourcelines(Waves)
    number = first + next(i for i, text in enumerate(source) if "# this line" in text)
    line = f"unit/{Path(__file__).name}:{number}"
    made = {what: trace.made_at[what] for what, _ in trace.largest_saved}
    # The linear layer's own code is torch's.
    assert {line} == {at for what, at in made.items() if "sigmoid" in what or "sin " in what or "addmm" in what}
    assert len(made) >= 2
