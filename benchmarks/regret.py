"""Regret of chosen plans: how much slower they are than the best of all plans of short chains, one by one predicted by the same judge.

    python benchmarks/regret.py [--layers 4 5] [--prefetch 1 2] [--limits 30] [--tables DIRECTORY] [--out results.json]

In: a Llama of wide layers that is never allocated, on the machine "4090" of `benchmarks/planner.py`. Every plan of some policies and homes a layer is
predicted: 4 layers with 4 policies and 3 homes (20,736 plans), 5 layers with 4 policies and 2 homes (32,768 plans); embedding and head on the device.
Limits lie evenly between the smallest and the largest peak of these. Out: for each limit the seconds of the best of all, and of the best that the
planner's search finds among the same plans, for which its menus are these policies and homes. With `--open` the planner is asked as it is: its plans
have other policies, homes and buffers as well, and may be faster than the best of all that were listed. Predictions of all plans are kept in a
directory, if one is named. Nothing is trained.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import planner
from memfit.core.limits import Budget
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.planner.search import frame_search, widening
from memfit.planner.search.candidates import Candidate, MasterForms
from memfit.planner.search.mixed_units import Mixture, find_units, mixed_plan
from memfit.planner.search.planner import choose_plan
from memfit.planner.search.polish import Ahead
from memfit.planner.search.pricing import PlanQuestion, price
from memfit.planner.search.slot_prices import uniform
from memfit.planner.search.uniform_search import UniformSearch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.core.profile import Profile

AWAY = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST)
POLICIES = (CallPlan(), CallPlan(saved=Saved.SELECT), CallPlan(saved=Saved.RECOMPUTE), AWAY)
HOMES = (BlockPlan(), BlockPlan(weight_home=Tier.HOST, state_home=Tier.HOST), BlockPlan(state_home=Tier.HOST))
HOMES_OF = {4: HOMES, 5: HOMES[:2]}
TOO_MANY = 40_000
LIMITS = 30


def chain(layers: int) -> Profile:
    """Traces a Llama of so many layers, one microbatch; updates stay on the device, as in the plans that are listed."""
    found = planner.profile_of("llama1b", layers=layers)
    whole = {found.batch_rows: found.traces[found.batch_rows]}
    return replace(found, traces=whole, host_update_obstacle="as in the plans that are listed")


def question(profile: Profile, limit: int | None) -> PlanQuestion:
    """Returns what `choose_plan` is asked below."""
    hardware = planner.machines()["4090"]
    return PlanQuestion(
        profile=profile, budget=Budget(limit_bytes=limit), hardware=hardware, clips_norm=False, tiers=(Tier.HOST,), may_split=False,
        limits={tier: spec.nbytes for tier, spec in hardware.away.items()}, scheme=None, staging_bytes=0, masters=MasterForms(),
        compute=ComputeDtype.BFLOAT16, like=None, checked_rows=0, numerics="auto", commits=0.0, decided={},
    )  # fmt: skip


def all_plans(profile: Profile, layers: int, prefetch: int) -> list[tuple[int, float]]:
    """Predicts every plan: bytes and seconds."""
    asked, units = question(profile, None), find_units(profile)
    frame = Plan(prefetch=prefetch, compute_dtype=ComputeDtype.BFLOAT16)
    options: list[tuple[CallPlan, BlockPlan]] = [*itertools.product(POLICIES, HOMES_OF[layers])]
    assert len(options) ** layers <= TOO_MANY, "more than can be waited for"
    found: list[tuple[int, float]] = []
    for chosen in itertools.product(options, repeat=layers):
        mixture = Mixture(
            policies=tuple(p for p, _ in chosen),
            homes=tuple(h for _, h in chosen),
            ends=(BlockPlan(),) * len(units.ends),
        )
        cost = asked.predict(mixed_plan(frame, profile, units, mixture))
        found.append((cost.peak_bytes, cost.seconds))
    return found


def kept_plans(profile: Profile, layers: int, prefetch: int, directory: Path | None) -> list[tuple[int, float]]:
    """Returns predictions of all plans, from the directory if they are there."""
    path = None if directory is None else directory / f"plans-{layers}-{prefetch}.pickle"
    if path is not None and path.exists():
        return pickle.loads(path.read_bytes())
    found = all_plans(profile, layers, prefetch)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(found))
    return found


def search(profile: Profile, layers: int, prefetch: int, limit: int) -> tuple[float, int]:
    """Looks for the fastest of the listed plans as the planner does; returns its seconds and the number of judged plans."""
    asked, frame = question(profile, limit), Plan(prefetch=prefetch, compute_dtype=ComputeDtype.BFLOAT16)
    units = replace(find_units(profile), ends=())
    options: list[tuple[CallPlan, BlockPlan]] = [*itertools.product(POLICIES, HOMES_OF[layers])]
    alike = [mixed_plan(frame, profile, units, uniform(units, policy, homes)) for policy, homes in options]
    listed = [price(i, Candidate(name=str(i), plan=plan), asked) for i, plan in enumerate(alike)]
    known = UniformSearch(listed, asked)
    known.run()
    frames = {"find_units": lambda _: units, "AHEAD": Ahead(prefetch=prefetch, backlog=1)}
    menus = {
        "list_homes": lambda _: HOMES_OF[layers],
        "list_policies": lambda *_: POLICIES,
        "BUFFERS_AHEAD": (prefetch,),
        "BACKLOGS": (1,),
    }
    with mock.patch.multiple(widening, **frames), mock.patch.multiple(frame_search, **menus):
        found = widening.search_mixed(known, asked, itertools.count(len(listed)))
    fitting = [built.cost.seconds for built in (*known.built, *found.built) if built.fits]
    return min(fitting), found.count + len(known.built)


def choose(profile: Profile, limit: int) -> tuple[float, int]:
    """Asks the planner as it is; returns the same."""
    choice = choose_plan(
        profile, Budget(limit_bytes=limit), planner.machines()["4090"], tiers=(Tier.HOST,), staging_bytes=0,
        splits_allowed=False, compute=ComputeDtype.BFLOAT16,
    )  # fmt: skip
    return choice.timeline.seconds, choice.built


def rows_of(
    layers: int, prefetch: int, limits: Sequence[int], directory: Path | None, *, is_open: bool
) -> list[dict[str, Any]]:
    """Compares chosen plans with the best of all at each limit, numbered from 1 to 30."""
    profile = chain(layers)
    plans = kept_plans(profile, layers, prefetch, directory)
    least, most = min(plans)[0], max(plans)[0]
    rows: list[dict[str, Any]] = []
    for part in limits:
        limit = round(least + (most - least) * part / (LIMITS + 1))
        best = min(seconds for nbytes, seconds in plans if nbytes <= limit)
        begin = time.process_time()
        seconds, judged = choose(profile, limit) if is_open else search(profile, layers, prefetch, limit)
        rows.append(
            {
                "layers": layers,
                "prefetch": prefetch,
                "part": part,
                "limit": limit,
                "plans": len(plans),
                "best": best,
                "chosen": seconds,
                "regret": seconds / best - 1,
                "judged": judged,
                "planning_s": time.process_time() - begin,
            }
        )
    return rows


def main() -> None:
    """Runs the chains and prints their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 5])
    parser.add_argument("--prefetch", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--limits", type=int, nargs="*", default=[*range(1, LIMITS + 1)], help=f"of 1 to {LIMITS}")
    parser.add_argument("--open", action="store_true", help="asks the planner with its own menus")
    parser.add_argument("--tables", type=Path, help="directory that predictions of all plans are kept in")
    parser.add_argument("--out", type=Path, help="file for the rows as JSON")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layers, prefetch in itertools.product(given.layers, given.prefetch):
        rows += rows_of(layers, prefetch, given.limits, given.tables, is_open=given.open)
        mine = [row["regret"] for row in rows if (row["layers"], row["prefetch"]) == (layers, prefetch)]
        print(
            f"{layers} layers, prefetch {prefetch}: {rows[-1]['plans']} plans, {len(mine)} limits; regret at most {max(mine):.2%}, "
            f"median {statistics.median(mine):.2%}; no slower in {sum(r <= 1e-9 for r in mine) / len(mine):.0%}; "
            f"{statistics.mean(row['planning_s'] for row in rows):.1f} CPU s and {statistics.mean(row['judged'] for row in rows):.0f} plans a question",
            flush=True,
        )
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
