"""Batches of further lengths, run by what is prepared for longer ones.

In: what is prepared for the shapes that came, and a new one. Out: the one that serves it, if there
is one.

[Note: buckets of lengths]
A schedule names blocks, calls and microbatches, and no sizes; the engine moves what it finds. So a
shorter batch runs by the schedule of a longer one, as it does in lines of the user's own, and takes
no more than is predicted for the longer one. Nothing in a model says so beforehand: a program may
do something else at another length. Ten shapes that were traced, with one schedule and peaks that
do not exceed the longest one's, are taken as a sign that it does not. Where it does nevertheless,
what the schedule does not foresee is served on demand, with equal bits, and told as a departure.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.batches.splitting import Signature
from memfit.job.setup import Prepared

ENOUGH = 10
"""Shapes of a bucket that are traced; those behind them cost nothing."""


def serving(known: Mapping[Signature, Prepared], signature: Signature) -> Signature | None:
    """Returns the shapes whose preparation serves these too; None: they are to be traced.

    Args:
        known: all that is prepared.
        signature: of a batch whose shapes are not among them.
    """
    alike = {found: prepared for found, prepared in known.items() if _is_alike(found, signature)}
    if len(alike) < ENOUGH:
        return None
    covering = [found for found in alike if _is_within(signature, found)]
    for found in sorted(covering, key=lambda found: alike[found].peak_bytes):
        longest = alike[found]
        bucket = [prepared for other, prepared in alike.items() if _is_within(other, found)]
        if len(bucket) >= ENOUGH and all(_is_served(prepared, longest) for prepared in bucket):
            return found
    return None


def _is_alike(one: Signature, other: Signature) -> bool:
    return one.rows == other.rows and _ranks(one) == _ranks(other)


def _ranks(signature: Signature) -> list[tuple[int, str]]:
    return [(len(shape), dtype) for shape, dtype in signature.tensors]


def _is_within(one: Signature, other: Signature) -> bool:
    pairs = zip(one.tensors, other.tensors, strict=True)
    return all(size <= most for (sizes, _), (bounds, _) in pairs for size, most in zip(sizes, bounds, strict=True))


def _is_served(prepared: Prepared, longest: Prepared) -> bool:
    return (
        prepared.peak_bytes <= longest.peak_bytes
        and prepared.plan == longest.plan
        and prepared.step.schedule == longest.step.schedule
        and prepared.evaluation.schedule == longest.evaluation.schedule
    )
