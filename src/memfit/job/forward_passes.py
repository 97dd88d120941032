"""Forward passes beside training: the loss of a batch, and the proof that a loss adds up over
microbatches.

In: an assembly and a batch. Out: losses; nothing is changed.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from memfit.core.errors import MemfitError, MemfitWarning, UnsupportedError
from memfit.core.limits import format_bytes
from memfit.core.numerics import NONADDITIVE
from memfit.core.process_state import trial
from memfit.core.storage_formats import ComputeDtype, dtype_failure
from memfit.devices.kernel import is_refusal, limit_breaches, refusal_words
from memfit.engine.surroundings import Buffers
from memfit.engine.work import StepInput
from memfit.job.assembly import Assembly
from memfit.job.results import EvaluateResult
from memfit.job.steps import OF_DTYPES, cut
from memfit.planner.preparing import forward_pass
from memfit.planner.setup import Prepared
from memfit.planner.together import add_up, prepare_together, together
from memfit.planner.user_hooks import refuse_hooked
from memfit.runs.run_state import give_random, is_random_state, take_random
from memfit.trace.batch import ByParts, first_part
from memfit.trace.program_state import untouched_program
from memfit.trace.splitting import (
    RowsAlike,
    Trial,
    check_sum,
    compare_split,
    evaluating,
    rows_differ,
    trial_of,
    without_dropout,
)
from memfit.trace.standins import untouched_modules

# What a model raises that is given what is no batch.
_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AssertionError, AttributeError, ArithmeticError)


def evaluate(assembly: Assembly, batch: Any) -> EvaluateResult:
    """Computes the loss of a batch, forward only, in evaluation mode, with weights streamed as in a
    step.
    """
    began = time.perf_counter()
    ranks = assembly.setup.ranks
    batches = prepare_together(ranks, "evaluate", lambda: cut(assembly, assembly.shapes.prepare(batch), batch))
    prepared, parts = batches.prepared, batches.parts
    model, loss = assembly.model, assembly.loss
    with (
        together(ranks, "evaluate", digest=prepared.evaluation.schedule.text(), values=[batches.total]) as said,
        assembly.machine.phase("evaluate"),
        torch.no_grad(),
        evaluating(model),
        assembly.setting(),
    ):
        factors = batches.factors(sum(total for (total, *_) in said))
        work = StepInput(run=lambda m: loss(model, parts[m]), shares=factors, streams=[None] * len(parts))
        results = _evaluated(assembly, prepared, work)
        if isinstance(results[0], tuple):
            losses, total = tuple(float(s) for s, _ in results), sum(float(count) for _, count in results)
            total = total if ranks is None else add_up(ranks, total)
            factors = [1.0 / total if total else math.nan] * len(results)
        else:
            losses = tuple(float(r) for r in results)
        mean = losses[0] if factors is None else sum(x * f for x, f in zip(losses, factors, strict=True))
        mean = mean if ranks is None else add_up(ranks, mean)
    return EvaluateResult(loss=mean, losses=losses, seconds=time.perf_counter() - began)


def _evaluated(assembly: Assembly, prepared: Prepared, work: StepInput) -> list[Any]:
    limit, engine = assembly.machine.limits.device_bytes, assembly.engine
    with limit_breaches(
        "evaluate",
        lambda error: (
            f"the limit{'' if limit is None else ' of ' + format_bytes(limit)} was hit while a batch was evaluated, at '{engine.at}': "
            f"{refusal_words(error)} Nothing was changed: the job goes on. Try fewer rows at a time, or a larger limit"
        ),
        lambda: engine.at,
    ):
        return engine.evaluate(prepared.evaluation, work)


@trial()
def check_split(assembly: Assembly, sample: Any) -> None:
    """Refuses a loss that does not add up over microbatches, by three rows forward: whole, and cut
    into two and one run interleaved.

    A model that does not run on these parts is refused in the same way.

    As the model trains but without dropout; where it draws random numbers even so, in evaluation
    mode, and each row meets the same ones. Generators, buffers, modules and weights are as they
    were after; weights stream as in a step, so that it fits where the step fits. That it adds up is
    kept in the assembly's parts, and that rows were alike, which shows little: the first batch of a
    step is looked at then.

    Raises:
        UnsupportedError: the results differ by more than 1e-5 of the whole, or the model fails.
    """
    refuse_hooked(assembly.model)
    trial = trial_of(sample, assembly.setup.problem.cut)
    if trial is None:
        return
    try:
        found = _tried(assembly, trial)
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except _FAILURES as error:
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            f"the model does not run on parts of the batch ({told:.200}): what counts its rows was not found. Give fit(split=...), which cuts it, or a plan with "
            "microbatches=1"
        ) from error
    compare_split(
        found[0],
        found[1],
        trial,
        assembly.setup.weight,
        is_rounded=assembly.plan.compute_dtype is not ComputeDtype.GIVEN
        or any(
            slot.given_dtype.is_floating_point and slot.given_dtype.itemsize < 4 for _, slot in assembly.place.values()
        ),
    )
    assembly.planned = replace(assembly.planned, adds_up=True, is_unproven=not rows_differ(trial))


def check_hooks(assembly: Assembly, batch: Any) -> None:
    """Heeds hooks that were registered after `fit`; where the batch is cut, shows as `check_split`
    that the program still adds up.

    Raises:
        UnsupportedError: it does not, or a hook is on a gradient; nothing was trained.
    """
    assembly.engine.heed_hooks()
    setup = assembly.setup
    # Sums over parts of the user's own are the user's: nothing is to add up to a whole.
    if assembly.plan.microbatches == 1 or NONADDITIVE in setup.allow or isinstance(setup.problem.cut, ByParts):
        return
    try:
        with assembly.machine.phases("check"):
            check_split(assembly, batch)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}. A hook was registered after memfit.fit: take it off, or close the job and fit again with it"
        ) from error


@trial()
def check_counted(assembly: Assembly, sample: Any) -> None:
    """Refuses a pair of which the first is a mean: (sum, count) is divided by its count.

    Three rows forward, whole and in two parts, as `check_split`.

    Where the batch cannot be cut, or the model does not run on parts of it, nothing shows.

    Raises:
        UsageError: it lies between those of its parts, where a sum would be larger.
    """
    trial = trial_of(sample, assembly.setup.problem.cut)
    if trial is None:
        return
    try:
        whole, parts = _tried(assembly, trial)
    except _FAILURES as error:
        if isinstance(error, MemfitError | torch.OutOfMemoryError):
            raise
        return
    check_sum(whole, parts, trial)


@trial()
def check_dtype(assembly: Assembly, sample: Any) -> None:
    """Refuses a dtype of the plan's that the model does not run in.

    Some rows forward, without gradients.

    Operations that torch lacks in a dtype show on real tensors only.

    Raises:
        UnsupportedError: these rows fail, and so does the whole sample.
    """
    trial = trial_of(sample, assembly.setup.problem.cut)
    failure: Exception = RuntimeError()
    for batch in ([] if trial is None else [trial.whole]) + [first_part(sample)]:
        try:
            _losses(assembly, batch, [], may_draw=True)
        except OF_DTYPES as error:
            if isinstance(error, MemfitError | torch.OutOfMemoryError) or is_refusal(error):
                raise
            failure = error
        else:
            return
    raise UnsupportedError(dtype_failure(assembly.plan.compute_dtype, failure)) from failure


def _tried(assembly: Assembly, trial: Trial) -> tuple[Any, list[Any]]:
    """Returns what the loss gives for the whole and for its parts: as the model trains but without
    dropout, or in evaluation mode where it draws random numbers even so.
    """
    model = assembly.model
    with without_dropout(model):
        found = _losses(assembly, trial.whole, trial.parts, may_draw=False)
    if found is None:
        with evaluating(model):
            found = _losses(assembly, trial.whole, trial.parts, may_draw=True)
    assert found is not None
    return found[0][0], found[1]


def check_first(assembly: Assembly, batch: Any) -> None:
    """Checks as `check_split` does, on the first batch, where the sample's rows were alike.

    Once: batches of the same kind follow.

    Raises:
        UnsupportedError: as `check_split`; nothing was trained.
    """
    if not assembly.planned.is_unproven or assembly.plan.microbatches == 1:
        return
    try:
        with assembly.machine.phases("check"):
            check_split(assembly, batch)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}. The sample's rows were alike and did not show it: give memfit.fit a sample with real rows"
        ) from error
    except torch.OutOfMemoryError:
        warnings.warn(
            "that the loss adds up over microbatches was tried on a sample of equal rows only, and there is no room to try it on the first batch: give memfit.fit "
            "a sample with real rows",
            MemfitWarning,
            stacklevel=5,
        )
    assembly.planned = replace(assembly.planned, is_unproven=False)


@contextmanager
def _untouched(assembly: Assembly) -> Iterator[None]:
    """Gives back what a forward changes: buffers, modules and their attributes, weights that it
    writes (which stay on the device), and what the loss keeps.
    """
    model = assembly.model
    names = assembly.planned.prepared.profile.written_weights
    written = [(parameter, parameter.detach().clone()) for parameter in map(model.get_parameter, names)]
    try:
        with Buffers(model).restored(), untouched_modules(model), untouched_program(assembly.loss, model):
            yield
    finally:
        for parameter, before in written:
            parameter.detach().copy_(before)


def _losses(assembly: Assembly, whole: Any, parts: Sequence[Any], *, may_draw: bool) -> list[list[Any]] | None:
    """Returns what the loss gives for the whole, and for its parts; None where random numbers are
    drawn that may not be.
    """
    model, loss = assembly.model, assembly.loss
    results: list[list[Any]] = []
    before = take_random()
    try:
        for batches in filter(None, ([whole], parts)):
            give_random(before)
            prepared, device = assembly.planned.prepared, assembly.setup.device
            step = forward_pass(
                assembly.plan, prepared.profile, len(batches), within_bytes=prepared.peak_bytes, device=device
            )

            def run(m: int, batches: Sequence[Any] = batches) -> Any:
                with RowsAlike() if may_draw else nullcontext():
                    return loss(model, batches[m])

            work = StepInput(run=run, shares=None, streams=[None] * len(batches))
            with torch.no_grad(), _untouched(assembly), assembly.setting():
                results.append(assembly.engine.evaluate(step, work))
            if not may_draw and not is_random_state(before):
                return None
    finally:
        give_random(before)
    return results
