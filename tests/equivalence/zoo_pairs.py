"""Pairs of a zoo model and a plan: all, those that devices are tried with, and those that the default suite trains; see `test_zoo_plans`.

In: the zoo and the plans. Out: `PAIRS`, of which `DEFAULT_PAIRS` are some, and of these `FEW_PAIRS`.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from equivalence import plans, zoo


def _default_pairs() -> frozenset[tuple[str, str]]:
    # Uneven microbatches of a model that hooks itself: what is captured twice would only show where it is not doubled.
    chosen = {("mixtral", "resident-3")}
    for place, name in enumerate(zoo.ZOO):
        if name in zoo.WHOLE_BATCH_ONLY:  # of these no plan with microbatches contains the others
            promised = list(plans.PROMISED)
        elif name in zoo.CORE:
            promised = [plan for i, plan in enumerate(plans.PROMISED) if (place + i) % 2 == 0]
        else:
            promised = [plans.PROMISED[(place + 3 * i) % len(plans.PROMISED)] for i in range(2)]
        others = [plans.OTHERS[(2 * place + i) % len(plans.OTHERS)] for i in range(1 + place % 2)]
        chosen |= {(name, plan) for plan in (*promised, *others)}
    return frozenset(chosen & set(PAIRS))


def _few_pairs() -> frozenset[tuple[str, str]]:
    """Those of the default pairs, in a drawn order, whose model had fewer than two plans until then, or whose plan fewer than three models."""
    few, met = {("mixtral", "resident-3")}, Counter[str](("mixtral", "resident-3"))
    order = [pair for pair in PAIRS if pair in DEFAULT_PAIRS - few]
    Random(0).shuffle(order)
    for name, plan in order:
        if met[name] < 2 or met[plan] < 3:
            few.add((name, plan))
            met.update((name, plan))
    return frozenset(few)


PAIRS = tuple(
    (name, plan)
    for name in zoo.ZOO
    for plan in plans.BY_NAME
    if plans.BY_NAME[plan].microbatches == 1 or name not in zoo.WHOLE_BATCH_ONLY
)
"""All pairs of a model and a plan that mean something."""

DEFAULT_PAIRS = _default_pairs()
"""Each promised model under half of the promised plans, and the rest by turns."""

FEW_PAIRS = _few_pairs()
"""At least two plans of each model and three models of each plan."""
