"""memfit: you say how much memory there is; it trains your PyTorch model inside it and shows the
proof.

Names are loaded when they are first used: importing a part that needs no torch (`memfit.core`,
`memfit.host`, the command line's help) does not load it, and settings that torch reads when it is
loaded can still be made.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from memfit.core.errors import check_platform
from memfit.core.version import VERSION

if TYPE_CHECKING:
    from memfit import arena, communicator, losses, parameter_server, sinks
    from memfit.core.errors import (
        AwayError,
        DoesNotFitError,
        LimitBreachError,
        MemfitError,
        MemfitWarning,
        PeerError,
        PlanError,
        PlatformError,
        StoreError,
        StoreInUseError,
        TierUnavailableError,
        TornStepError,
        UnsupportedError,
        UsageError,
    )
    from memfit.core.plan import Plan
    from memfit.core.process_state import is_planning, is_tracing
    from memfit.job.ema import MemfitEma
    from memfit.job.equivalence import verify
    from memfit.job.fit import empty, fit, profile
    from memfit.job.inference import infer
    from memfit.job.job import Job
    from memfit.job.loader import ResumableLoader
    from memfit.job.results import StepResult
    from memfit.planner.first_batch import first_batch
    from memfit.tensors.random_streams import microbatch_streams
    from memfit.tensors.with_frozen import WithFrozen
    from memfit.trace.batch import Parts

check_platform(sys.platform)
__version__ = VERSION

_ORIGINS = {
    "AwayError": "memfit.core.errors",
    "DoesNotFitError": "memfit.core.errors",
    "Job": "memfit.job.job",
    "LimitBreachError": "memfit.core.errors",
    "MemfitEma": "memfit.job.ema",
    "MemfitError": "memfit.core.errors",
    "MemfitWarning": "memfit.core.errors",
    "PeerError": "memfit.core.errors",
    "Plan": "memfit.core.plan",
    "PlanError": "memfit.core.errors",
    "PlatformError": "memfit.core.errors",
    "Parts": "memfit.trace.batch",
    "ResumableLoader": "memfit.job.loader",
    "StepResult": "memfit.job.results",
    "StoreError": "memfit.core.errors",
    "StoreInUseError": "memfit.core.errors",
    "TierUnavailableError": "memfit.core.errors",
    "TornStepError": "memfit.core.errors",
    "UnsupportedError": "memfit.core.errors",
    "UsageError": "memfit.core.errors",
    "WithFrozen": "memfit.tensors.with_frozen",
    "empty": "memfit.job.fit",
    "first_batch": "memfit.planner.first_batch",
    "fit": "memfit.job.fit",
    "infer": "memfit.job.inference",
    "is_planning": "memfit.core.process_state",
    "is_tracing": "memfit.core.process_state",
    "microbatch_streams": "memfit.tensors.random_streams",
    "profile": "memfit.job.fit",
    "verify": "memfit.job.equivalence",
}

__all__ = [
    "AwayError",
    "DoesNotFitError",
    "Job",
    "LimitBreachError",
    "MemfitEma",
    "MemfitError",
    "MemfitWarning",
    "Parts",
    "PeerError",
    "Plan",
    "PlanError",
    "PlatformError",
    "ResumableLoader",
    "StepResult",
    "StoreError",
    "StoreInUseError",
    "TierUnavailableError",
    "TornStepError",
    "UnsupportedError",
    "UsageError",
    "WithFrozen",
    "__version__",
    "arena",
    "communicator",
    "empty",
    "first_batch",
    "fit",
    "infer",
    "is_planning",
    "is_tracing",
    "losses",
    "microbatch_streams",
    "parameter_server",
    "profile",
    "sinks",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads a public name. Source: PEP 562."""
    if name in {"arena", "communicator", "losses", "parameter_server", "sinks"}:
        return importlib.import_module(f"memfit.{name}")
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ORIGINS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
