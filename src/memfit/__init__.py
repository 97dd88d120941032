"""memfit: you say how much memory there is; it trains your PyTorch model inside it and shows the proof."""

from memfit.api import Job, StepResult, fit, profile
from memfit.core.errors import AwayError, DoesNotFitError, LimitBreachError, MemfitError
from memfit.core.plan import Plan
from memfit.runtime.streams import microbatch_streams

__all__ = [
    "AwayError",
    "DoesNotFitError",
    "Job",
    "LimitBreachError",
    "MemfitError",
    "Plan",
    "StepResult",
    "fit",
    "microbatch_streams",
    "profile",
]
