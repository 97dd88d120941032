"""Functions and results beside those that `memfit` itself exports.

In: the user's model, optimizer, loss and one sample batch. Out: a `Job` that trains them inside a
limit (`fit`), their memory (`profile`), the smallest limit and the largest size that work
(`find_smallest_limit`, `find_largest`); models built without the bytes of their weights (`empty`);
forward passes with weights that stream (`infer`); what `job.save` wrote (`load`).
"""

from memfit.job.ema import MemfitEma
from memfit.job.equivalence import Equivalence, verify
from memfit.job.fit import empty, fit, profile
from memfit.job.inference import Inference, infer
from memfit.job.job import Job
from memfit.job.lines import Lines
from memfit.job.loader import ResumableLoader
from memfit.job.loading import load
from memfit.job.results import EvaluateResult, StepResult
from memfit.planner.extremes import find_largest, find_smallest_limit
from memfit.planner.first_batch import first_batch, generators_kept, sample_of
from memfit.trace.batch import Parts

__all__ = [
    "Equivalence",
    "EvaluateResult",
    "Inference",
    "Job",
    "Lines",
    "MemfitEma",
    "Parts",
    "ResumableLoader",
    "StepResult",
    "empty",
    "find_largest",
    "find_smallest_limit",
    "first_batch",
    "fit",
    "generators_kept",
    "infer",
    "load",
    "profile",
    "sample_of",
    "verify",
]
