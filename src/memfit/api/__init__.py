"""The calls of a user: the one place that knows planning and jobs.

In: the user's model, optimizer, loss and one sample batch. Out: a `Job` that trains them inside a
limit (`fit`), or what memory they would take (`profile`); models built without the bytes of their
weights (`empty`); forward passes with weights that stream (`infer`).
"""

from memfit.api.empty_model import empty
from memfit.api.equivalence import Equivalence, verify
from memfit.api.first_batch import first_batch, generators_kept, sample_of
from memfit.api.fit import fit, profile
from memfit.api.loader import ResumableLoader
from memfit.batches.parts import Parts
from memfit.job.ema import MemfitEma
from memfit.job.inference import Inference, infer
from memfit.job.job import Job
from memfit.job.lines import Lines
from memfit.job.loading import load
from memfit.job.results import EvaluateResult, StepResult

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
    "first_batch",
    "fit",
    "generators_kept",
    "infer",
    "load",
    "profile",
    "sample_of",
    "verify",
]
