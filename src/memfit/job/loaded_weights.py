"""Weights while a plan is looked for: where their values come from, and what lies aside.

In: a model, perhaps files. Out: `LoadedWeights`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from memfit.deferred.aside import WeightsAside
from memfit.job.machine import Machine
from memfit.job.probing import disk_directory
from memfit.job.weight_sources import WeightSources, open_sources
from memfit.tensors.guard import is_away


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """Where the values of weights are while plans are made.

    Attributes:
        sources: they come from.
        aside: weights that were put aside, because there was no room for them and for planning.
        load_bytes: held while weights move home.
    """

    sources: WeightSources
    aside: WeightsAside | None
    load_bytes: int


def load_weights(
    model: nn.Module,
    weights: str | Path | None,
    home: str | Path | None,
    machine: Machine,
    stack: ExitStack,
    *,
    encoding_bytes: int = 0,
) -> LoadedWeights:
    """Finds where weights come from, and puts those that are here aside where planning has no room
    beside them.

    Args:
        model: may be built empty.
        weights: see `memfit.fit`.
        home: directory that homes on disk are made in.
        machine: with its limits.
        stack: closes files.
        encoding_bytes: that encoding weights on their way home takes.
    """
    sources = open_sources(model, weights, stack)
    here = [p for p in model.parameters() if not is_away(p)]
    lacks_room = machine.counts_process and machine.lacks_room
    load_bytes = machine.load_bytes(model, leaves=lacks_room, encoding_bytes=encoding_bytes)
    aside: WeightsAside | None = None
    if lacks_room:
        aside = stack.enter_context(WeightsAside(here, disk_directory(home)))
        machine.forget_peak()
        sources.insert(0, aside)  # what was put aside comes back before files overwrite it
    return LoadedWeights(sources=WeightSources(sources), aside=aside, load_bytes=load_bytes)
