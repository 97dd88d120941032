"""Checks the assumptions of homes and cuts against what the optimizer and the engine do.

In: the live groups, loaded or returned states, pieces. Out: nothing, or an error that says what no
longer matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.core.errors import UnsupportedError, UsageError
from memfit.optimizers.kinds import UpdateKind, Verdict
from memfit.optimizers.shadow import State
from memfit.optimizers.state_tensors import StateTensor
from memfit.optimizers.validation import Entry

_DECISIVE_FLAGS = frozenset({"fused", "capturable", "differentiable"})


def group_structure(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """The settings that decide which states exist and how one may cut: flags that are on, momentum
    or none.

    `foreach` is left out: it changes neither. Rates, decays and betas may change at any time.
    """
    structure: list[tuple[Any, ...]] = []
    for group in optimizer.param_groups:
        flags = {key for key, value in group.items() if isinstance(value, bool)} | _DECISIVE_FLAGS
        on = sorted(key for key in flags - {"foreach"} if group.get(key))
        momentum = group.get("momentum")
        structure.append((*on, "momentum" if isinstance(momentum, (int, float)) and momentum else "no momentum"))
    return structure


def check_groups(optimizer: Optimizer, entries: Iterable[Entry], planned: Sequence[tuple[Any, ...]]) -> None:
    """Raises `UsageError` if parameters moved between groups, or a group's structure is not the
    planned one.
    """
    groups = optimizer.param_groups
    places = [(e.group, e.index, e.parameter) for e in entries]
    moved = sum(len(g["params"]) for g in groups) != len(places) or any(
        g >= len(groups) or i >= len(groups[g]["params"]) or groups[g]["params"][i] is not p for g, i, p in places
    )
    if moved:
        raise UsageError(
            "optimizer.param_groups was changed by hand: parameters came, went or moved to another group. Close the "
            "job, change the groups, and call memfit.fit again."
        )
    for index, (now, then) in enumerate(zip(group_structure(optimizer), planned, strict=True)):
        if now != then:
            raise UsageError(
                f"Group {index} of the optimizer changed settings that decide which states exist or which kernels run "
                f"({then} became {now}). Close the job and call memfit.fit again."
            )


def check_piece(entry: Entry, verdict: Verdict, weight: torch.Tensor, *, whole: bool) -> None:
    """Raises if a piece is not whole where it has to be."""
    if verdict.kind is not UpdateKind.ELEMENTWISE:
        if not whole:
            raise UsageError(f"{entry.name!r} must be updated whole: {verdict.reason}.")
        if weight.shape != entry.parameter.shape:
            raise UsageError(
                f"{entry.name!r} was handed over in shape {tuple(weight.shape)}; its optimizer needs it whole, as "
                f"{tuple(entry.parameter.shape)}."
            )


def check_alignment(entry: Entry, verdict: Verdict, weight: torch.Tensor, *, last: bool) -> None:
    """Raises `UsageError` for a piece that would move a fused kernel's vector boundaries."""
    if not last and weight.numel() % verdict.piece_multiple:
        raise UsageError(
            f"A piece of {entry.name!r} has {weight.numel()} elements; all but the last need a multiple of "
            f"{verdict.piece_multiple}, or the bits change (fused kernel)."
        )


def check_keys(class_name: str, name: str, layout: Sequence[StateTensor], state: State) -> None:
    """Raises `UnsupportedError` if a step made a state that no home is planned for."""
    strange = {key for key, value in state.items() if value is not None} - {t.key for t in layout}
    if strange:
        raise UnsupportedError(
            f"{class_name} made a state {min(strange)!r} for {name!r} that it did not make in a dry run of a few "
            "steps; memfit has no home for it, and the step is torn."
        )


def check_whole_state(what: str, name: str, layout: Sequence[StateTensor], state: Mapping[str, Any]) -> None:
    """Raises `UsageError` if a whole state of one parameter does not fit its layout."""
    expected = {t.key: t.shape for t in layout}
    for key, value in state.items():
        if value is None:
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        if key not in expected:
            raise UsageError(
                f"{what}: {name!r} has no state {key!r:.200} with its group's settings ({sorted(expected)})."
            )
        if shape != expected[key]:
            raise UsageError(f"{what}: state {key!r} of {name!r} has shape {shape}, not {expected[key]}.")


def same_scalars(before: State, now: State) -> bool:
    """Tells whether two pieces of one step met the same scalars.

    Those on an accelerator count as equal, unread.
    """
    if before.keys() != now.keys():
        return False
    for key, value in before.items():
        other = now[key]
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and not torch.equal(value, other):
                return False
        elif value != other:
            return False
    return True
